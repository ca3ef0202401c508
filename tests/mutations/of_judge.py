"""The judge: what a trial point is worth, and what rounding hides."""

from __future__ import annotations

from .mutations import mutation
from .of_policies import ENDS, HIDDEN, MOVES, NO_GRADIENT, PIECES, STEP

MUTATIONS = [
    mutation(
        "policies: the prediction adds the curvature",
        "predicted = -lr * found.gd - 0.5 * lr**2 * found.dGd",
        "predicted = -lr * found.gd + 0.5 * lr**2 * found.dGd",
        STEP,
        PIECES,
    ),
    mutation(
        "policies: the prediction with lr for its square",
        "- 0.5 * lr**2 * found.dGd",
        "- 0.5 * lr * found.dGd",
        STEP,
        PIECES,
    ),
    mutation(
        "policies: a model that predicts a rise is praised for one",
        "if predicted > 0 and not math.isnan(decrease) else -math.inf",
        "if predicted != 0 and not math.isnan(decrease) else -math.inf",
        PIECES,
    ),
    mutation(
        "policies: nothing hides a decrease",
        "least = ROUNDINGS * rounding",
        "least = 0.0 * rounding",
        HIDDEN,
        MOVES,
        PIECES,
    ),
    mutation(
        "policies: a step that hardly moves is judged",
        "(abs(f - f_new) <= least or hardly_moves)",
        "abs(f - f_new) <= least",
        HIDDEN,
        PIECES,
    ),
    mutation(
        "policies: hardly moving is a matter of all digits",
        "torch.finfo(start.theta.dtype).eps ** 0.5 * found.theta",
        "torch.finfo(start.theta.dtype).eps * found.theta",
        HIDDEN,
        PIECES,
    ),
    mutation(
        "policies: hardly moving whatever the learning rate",
        "hardly_moves = lr * found.length",
        "hardly_moves = found.length",
        PIECES,
    ),
    mutation(
        "policies: the share of damping without its half",
        "share = 0.5 * lam * lr**2 * found.dDd / predicted",
        "share = lam * lr**2 * found.dDd / predicted",
        PIECES,
    ),
    mutation(
        "policies: trials are held against the bound and not the floor",
        "Trial(f, f_new, start.floor, start.best,",
        "Trial(f, f_new, start.level.low, start.best,",
        PIECES,
        STEP,
        "tests/optimizer/test_models.py",
    ),
    mutation(
        "policies: the best loss is that before the step",
        "Trial(f, f_new, start.floor, start.best,",
        "Trial(f, f_new, start.floor, f,",
        STEP,
        PIECES,
    ),
    mutation(
        "policies: a step without a decrease that counts is unjudged only once",
        "unjudged = 0 if judgement.judged else unjudged + 1",
        "unjudged = 0 if judgement.judged else 1",
        HIDDEN,
        *ENDS,
    ),
    mutation(
        "policies: a step is unjudged after one that was judged",
        "unjudged = 0 if judgement.judged else unjudged + 1",
        "unjudged = unjudged if judgement.judged else unjudged + 1",
        HIDDEN,
        MOVES,
        NO_GRADIENT,
    ),
]
