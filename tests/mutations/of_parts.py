"""Schedules, acceptance, averages, momentum, line searches and damping."""

from __future__ import annotations

from .mutations import mutation

STEP = "tests/optimizer/test_step.py"
SCHEDULE = "tests/parts/test_schedule.py"
HIDDEN = "tests/optimizer/test_judgement.py::test_lambda_after_steps_that_rounding_hides"
ACCEPTANCE = "tests/parts/test_acceptance.py"
AVERAGE = "tests/parts/test_average.py"
MOMENTUM = "tests/parts/test_momentum.py"
SEARCH = "tests/parts/test_line_search.py"
DAMPING = "tests/parts/test_damping.py"
LAYERS = "tests/parts/test_damping_by_layers.py"
METRIC = "tests/parts/test_kronecker_metric.py"
REMEMBERS = "tests/optimizer/test_judgement.py::test_what_a_damping_remembers"

MUTATIONS = [
    mutation(
        "parts: ten-fold takes a search for a success",
        '"search") else lam / self.factor',
        ") else lam / self.factor",
        "tests/parts/test_schedule.py::test_ten_fold_learns_with_a_line_search",
        SCHEDULE,
    ),
    mutation(
        "parts: ten-fold never falls",
        '"search") else lam / self.factor',
        '"search") else lam',
        STEP,
        SCHEDULE,
    ),
    mutation(
        "parts: relative decrease is content with a quarter",
        "decrease > 0.75 and lam >= self.minimum",
        "decrease > 0.25 and lam >= self.minimum",
        SCHEDULE,
        "tests/test_presets.py",
    ),
    mutation(
        "parts: relative decrease raises after the wrong failures",
        "raised = decrease > -0.25",
        "raised = decrease < -0.25",
        SCHEDULE,
    ),
    mutation(
        "parts: relative decrease of a negative loss has the wrong sign",
        "(outcome.loss - outcome.new_loss) / abs(outcome.loss)",
        "(outcome.loss - outcome.new_loss) / outcome.loss",
        SCHEDULE,
    ),
    mutation(
        "parts: relative decrease rises beyond its maximum",
        "return lam * 1.5 if raised and lam <= self.maximum else lam",
        "return lam * 1.5 if raised else lam",
        SCHEDULE,
    ),
    mutation("parts: λ falls above a gain of a half", "outcome.gain > 0.75", "outcome.gain > 0.5", SCHEDULE),
    mutation(
        "parts: a λ that no longer matters falls on",
        "lam *= down if outcome.share > NEGLIGIBLE else 1.0",
        "lam *= down",
        "tests/optimizer/test_judgement.py::test_a_lambda_that_no_longer_matters_stays",
        SCHEDULE,
    ),
    mutation(
        "parts: λ rises after an uphill step",
        'elif not outcome.gain >= 0.25 and outcome.rule != "uphill":',
        "elif not outcome.gain >= 0.25:",
        SCHEDULE,
    ),
    mutation(
        "parts: a gain that is not a number raises nothing",
        'elif not outcome.gain >= 0.25 and outcome.rule != "uphill":',
        'elif outcome.gain < 0.25 and outcome.rule != "uphill":',
        SCHEDULE,
        "tests/optimizer/test_exceptions.py",
    ),
    mutation(
        "parts: a floor under λ with averaged curvature too",
        "honest = outcome.same_data or outcome.averaged_curvature",
        "honest = outcome.same_data",
        SCHEDULE,
        "tests/curvature/test_dense.py",
    ),
    mutation(
        "parts: no floor under λ on changing batches",
        "self.minimum if honest else self.floor",
        "self.minimum if honest else self.minimum",
        SCHEDULE,
    ),
    mutation(
        "parts: fast factors on changing batches",
        "(self.down, self.up) if outcome.same_data else (self.slow_down, self.slow_up)",
        "(self.down, self.up) if outcome.same_data else (self.down, self.up)",
        SCHEDULE,
    ),
    mutation(
        "parts: balanced raises λ when the average lags behind",
        "self.target / outcome.lag",
        "outcome.lag / self.target",
        SCHEDULE,
    ),
    mutation(
        "parts: balanced changes λ without limit",
        "min(max(self.target / outcome.lag, 1 / self.quickest), self.quickest)",
        "max(self.target / outcome.lag, 1 / self.quickest)",
        SCHEDULE,
    ),
    mutation(
        "parts: balanced lowers λ beyond its most",
        "lam = max(lam, min(change * lam, self.most))",
        "lam = min(change * lam, self.most)",
        SCHEDULE,
    ),
    mutation(
        "parts: balanced lowers λ after a bad gain ratio",
        'if not outcome.gain >= 0.25 and outcome.rule != "uphill": lam *= self.gain.slow_up',
        "if False:\n            lam *= self.gain.slow_up",
        SCHEDULE,
    ),
    mutation(
        "parts: balanced goes back to the λ₀ of its gain ratio",
        "return replace(self.gain, initial=self.initial)",
        "return self.gain",
        SCHEDULE,
    ),
    mutation(
        "parts: an unjudged step lowers λ below λ₀ at once",
        "return max(down * lam, initial)",
        "return down * lam",
        HIDDEN,
        SCHEDULE,
    ),
    mutation(
        "parts: λ comes back one unjudged step too early",
        "if outcome.unjudged > ENOUGH:",
        "if outcome.unjudged >= ENOUGH:",
        HIDDEN,
        SCHEDULE,
    ),
    mutation(
        "parts: λ comes back beyond λ₀",
        "return min(lam / down, initial)",
        "return lam / down",
        HIDDEN,
        SCHEDULE,
    ),
    mutation(
        "parts: unjudged steps lower λ on changing batches",
        "return down * lam if outcome.same_data else lam",
        "return down * lam",
        HIDDEN,
        "tests/optimizer/test_judgement.py::test_batches_without_a_gradient_leave_lambda_alone",
        SCHEDULE,
    ),
    mutation(
        "parts: the same loss is a decrease",
        "math.isfinite(trial.new_loss) and trial.new_loss < trial.loss else None",
        "math.isfinite(trial.new_loss) and trial.new_loss <= trial.loss else None",
        ACCEPTANCE,
        STEP,
    ),
    mutation(
        "parts: uphill as far as the best loss, not that of late",
        "(self.of_late and trial.new_loss > trial.late)",
        "(self.of_late and trial.new_loss > trial.best)",
        ACCEPTANCE,
    ),
    mutation(
        "parts: uphill against the loss before the step alone",
        "reference = trial.best if self.against_best else trial.loss",
        "reference = trial.loss",
        STEP,
        ACCEPTANCE,
    ),
    mutation(
        "parts: uphill without its power",
        "min(1.0, 1.0 - max(-1.0, min(1.0, trial.cosine))) ** self.b",
        "min(1.0, 1.0 - max(-1.0, min(1.0, trial.cosine)))",
        ACCEPTANCE,
    ),
    mutation(
        "parts: uphill against the previous step",
        "1.0 - max(-1.0, min(1.0, trial.cosine))",
        "1.0 + max(-1.0, min(1.0, trial.cosine))",
        STEP,
        ACCEPTANCE,
    ),
    mutation(
        "parts: uphill without the lower bound",
        "factor * (trial.new_loss - trial.lower_bound) <= reference - trial.lower_bound",
        "factor * trial.new_loss <= reference",
        ACCEPTANCE,
    ),
    mutation(
        "parts: the average has a long memory at first",
        "1 - min(self.decay, (1 + count) / (10 + count))",
        "1 - max(self.decay, (1 + count) / (10 + count))",
        "tests/optimizer/test_averaged.py",
        AVERAGE,
    ),
    mutation(
        "parts: the mean of all weights counts one too few",
        "mean.lerp(theta, 1 / (count + 1))",
        "mean.lerp(theta, 1 / count)",
        "tests/optimizer/test_averaged.py",
        AVERAGE,
    ),
    mutation(
        "parts: α of momentum takes the overlap off",
        "(self.xi * dP * root(GG) + beta * GF) / GG",
        "(self.xi * dP * root(GG) - beta * GF) / GG",
        STEP,
        MOMENTUM,
    ),
    mutation(
        "parts: β of momentum with ξ for its square",
        "(1 - self.xi**2) / (FF * sine2)",
        "(1 - self.xi) / (FF * sine2)",
        STEP,
        MOMENTUM,
    ),
    mutation(
        "parts: momentum does not see parallel steps",
        "1 - GF * GF / size",
        "1 + GF * GF / size",
        STEP,
        MOMENTUM,
    ),
    mutation(
        "parts: the cap of momentum is its least length",
        "dP.clamp(max=self.dP) if isinstance(dP, Tensor) else min(dP, self.dP)",
        "dP.clamp(min=self.dP) if isinstance(dP, Tensor) else max(dP, self.dP)",
        MOMENTUM,
    ),
    mutation(
        "parts: momentum on changing batches too",
        "previous is None or (self.same_data and not same_data)",
        "previous is None",
        MOMENTUM,
    ),
    mutation(
        "parts: quadratic momentum with the other sign of the overlap",
        "((p - q * b / c) / (a * sine2))",
        "((p + q * b / c) / (a * sine2))",
        MOMENTUM,
    ),
    mutation(
        "parts: β of quadratic momentum without the angle",
        "((q - p * b / a) / (c * sine2))",
        "((q - p * b / a) / c)",
        MOMENTUM,
    ),
    mutation("parts: the grid takes a rise", "not (best[0] < loss or self.uphill)", "False", SEARCH, STEP),
    mutation("parts: the grid never takes a rise", "not (best[0] < loss or self.uphill)", "not best[0] < loss", SEARCH),
    mutation(
        "parts: the grid without its power",
        "[lr**self.power for lr in rates if lr < self.stop]",
        "[lr for lr in rates if lr < self.stop]",
        SEARCH,
    ),
    mutation(
        "parts: the grid takes the largest loss",
        "best = min( ((f, lr) for lr, f in zip(self.rates",
        "best = max(\n            ((f, lr) for lr, f in zip(self.rates",
        SEARCH,
    ),
    mutation(
        "parts: backtracking leaves its first rate out", "first = 0 if tried is None else 1", "first = 1", SEARCH, STEP
    ),
    mutation(
        "parts: backtracking takes the same loss",
        "math.isfinite(f) and f < loss:",
        "math.isfinite(f) and f <= loss:",
        SEARCH,
        STEP,
    ),
    mutation(
        "parts: the bracket goes beyond its stop",
        "return min(2 * points[k][0], self.stop)",
        "return 2 * points[k][0]",
        SEARCH,
        STEP,
        "tests/test_step.py",
    ),
    mutation(
        "parts: the parabola has its vertex on the other side", "x1 - 0.5 * ((x1", "x1 + 0.5 * ((x1", SEARCH, STEP
    ),
    mutation(
        "parts: the golden section of the shorter interval",
        "0.382 * above if above > below else",
        "0.382 * above if above < below else",
        SEARCH,
        STEP,
    ),
    mutation(
        "parts: the mean eigenvalue over all parameters",
        "Diagonal(G.trace() / G.rank)",
        "Diagonal(G.trace() / G.parameters.n)",
        DAMPING,
    ),
    mutation(
        "parts: an outlier stays in D for ever",
        "past.recent(tau, memory).maximum(tau)",
        "past.maximum(tau)",
        REMEMBERS,
        DAMPING,
    ),
    mutation(
        "parts: D forgets what it was",
        "tau if past is None or not past.like(tau) else past.recent(tau, memory).maximum(tau)",
        "tau",
        DAMPING,
        REMEMBERS,
    ),
    mutation("parts: the trace of a layer for its mean", "means[i] = trace / rank", "means[i] = trace", LAYERS),
    mutation(
        "parts: the largest diagonal of this step alone",
        "least = self.floor if past is None else past.entries(G.parameters.sizes)",
        "least = self.floor",
        DAMPING,
        STEP,
    ),
    mutation(
        "parts: max-diagonal starts at 0", "diagonal.clamp(min=least)", "diagonal.clamp(min=0 * least)", DAMPING, STEP
    ),
    mutation(
        "parts: factored damping of all columns and not of the rank",
        "(G.parameters.n / G.rank) * factored_maximum(",
        "1.0 * factored_maximum(",
        LAYERS,
    ),
    mutation(
        "parts: factored damping forgets earlier inputs",
        "if old_v is None else torch.maximum(old_v, layer.inputs)",
        "if old_v is None else layer.inputs",
        LAYERS,
    ),
    mutation(
        "parts: a batch that is far from the last one has all its weight",
        "share = (weight * trusted(self.trace, trace))",
        "share = (weight * 1.0 + 0 * trace.sum())",
        METRIC,
    ),
    mutation(
        "parts: the first batch lingers in the Kronecker metric",
        "layers, batches.reciprocal().neg_().add_(1).clamp_(max=self.decay))",
        "layers, 0 * batches + self.decay)",
        METRIC,
    ),
    mutation(
        "parts: γ without c",
        "gamma = self.c * torch.cat(",
        "gamma = torch.cat(",
        METRIC,
    ),
    mutation(
        "parts: rounding is taken for curvature",
        "torch.finfo(t.dtype).eps * largest(t, dim)).where(t > 0, 0)",
        "0 * largest(t, dim)).where(t > 0, 0)",
        DAMPING,
        LAYERS,
    ),
]
