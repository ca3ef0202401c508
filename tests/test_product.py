"""The product of parts: every representation with every damping, choice of rows, momentum, acceptance and line search.

The whole product is 3,600 optimizers. A fixed random sample of it has every triple (representation, part, part), and
the paper's four improvements together on every representation, with all rows.
"""

from __future__ import annotations

import copy
import io
import itertools
import math
import random
from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import marquardt as mq
from support.linearized import EXACT as PRODUCTS
from support.reference import error
from support.steps import theta

REPRESENTATIONS = {
    "dense": mq.Dense(),
    "dense-chunked": mq.Dense(chunk=4),
    "gram": mq.Gram(),
    "gram-layers": mq.Gram(whole=0),
    "gram-chunked": mq.Gram(chunk=4),
    "matrix-free": mq.MatrixFree(),
    "matrix-free-hessian": mq.MatrixFree(hessian=True),
    "kronecker": mq.Kronecker(),
    "ekfac": mq.EKFAC(),
    "hessian": mq.Hessian(),
    "auto": mq.Auto(inertia=0.8),
}
PARTS = {
    "damping": {
        "identity": mq.Identity(),
        "mean": mq.MeanEigenvalue(memory=math.inf),
        "layer-mean": mq.LayerMeanEigenvalue(memory=math.inf),
        "max": mq.MaxDiagonal(),
        "factored": mq.FactoredMaxDiagonal(),
        "kronecker": mq.KroneckerMetric(),
    },
    "rows": {
        "exact": mq.Exact(),
        "sampled": mq.Sampled(1),
        "empirical": mq.Empirical(),
        "fraction": mq.Fraction(0.5),
    },
    "line_search": {"none": None, "grid": mq.Grid(), "backtracking": mq.Backtracking()},
    "momentum": {
        "none": None,
        "fixed": mq.AdaptiveMomentum(),
        "capped": mq.AdaptiveMomentum(dP=math.inf, cap=True),
        "quadratic": mq.QuadraticMomentum(),
    },
    "acceptance": {"decrease": mq.Decrease(), "uphill": mq.Uphill()},
}
IMPROVED = ("max", "grid", "fixed", "uphill")  # max-diagonal, line search, adaptive momentum, uphill acceptance
# diag ∇²f cannot be had from products, and EKFAC takes one number alone: errors that name the way out, see
# curvature/test_matrix_free.py and curvature/test_ekfac.py.
IMPOSSIBLE = {("matrix-free-hessian", "max"), ("matrix-free-hessian", "factored")}
IMPOSSIBLE |= {("ekfac", name) for name in ("layer-mean", "max", "factored")}

Names = tuple[str, str, str, str, str]  # of the parts, in their order


def every(representation: str) -> list[Names]:
    combinations = itertools.product(*PARTS.values())
    return [names for names in combinations if (representation, names[0]) not in IMPOSSIBLE]


def pairs(names: Names) -> set[tuple[int, str, int, str]]:
    return {(i, names[i], j, names[j]) for i, j in itertools.combinations(range(len(names)), 2)}


def sample(representation: str) -> list[Names]:
    """Few combinations with all pairs of parts: of 20 at random always the one with the most pairs not yet there."""
    pick = random.Random(f"product of {representation}")
    possible = every(representation)
    wanted = set().union(*map(pairs, possible))
    d, s, m, a = IMPROVED
    chosen = [names for names in possible if (names[0], *names[2:]) == (d, s, m, a)]
    while wanted:
        wanted -= set().union(*map(pairs, chosen))
        candidates = pick.sample(possible, 20)
        best = max(candidates, key=lambda names: len(pairs(names) & wanted))
        if pairs(best) & wanted:
            chosen.append(best)
    return chosen


SAMPLE = [(r, names) for r in REPRESENTATIONS for names in sample(r)]
EVERY_REPRESENTATION = pytest.mark.parametrize("representation", REPRESENTATIONS)


def test_sample():
    """Every pair (representation, part), and the four improvements with all rows wherever they are possible."""
    for r in REPRESENTATIONS:
        found = [names for representation, names in SAMPLE if representation == r]
        assert set().union(*map(pairs, found)) == set().union(*map(pairs, every(r)))
        improved = {names[1] for names in found if (names[0], *names[2:]) == IMPROVED}
        assert improved == (set() if (r, IMPROVED[0]) in IMPOSSIBLE else set(PARTS["rows"]))


# ---- three steps


def convolution() -> tuple[nn.Module, list[tuple[Tensor, Tensor]]]:
    model = nn.Sequential(nn.Conv2d(1, 2, 3), nn.Tanh(), nn.AvgPool2d(2), nn.Flatten(), nn.Linear(8, 3))  # n = 47
    return model.double(), [(torch.randn(10, 1, 6, 6).double(), torch.randint(3, (10,))) for _ in range(2)]


def mlp() -> tuple[nn.Module, list[tuple[Tensor, Tensor]]]:
    model = nn.Sequential(nn.Linear(4, 6), nn.Softplus(), nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3))  # n = 83
    return model.double(), [(torch.randn(9, 4).double(), torch.randint(3, (9,))) for _ in range(2)]


def optimizer(model: nn.Module, representation: str, names: Names, **more) -> mq.LM:
    parts = {kind: PARTS[kind][name] for kind, name in zip(PARTS, names, strict=True)}
    # λ far too small at first, so that steps fail: rejection, search and uphill moves happen and not only decrease.
    initial = 3.0 if representation == "hessian" else 1e-4  # otherwise it is never positive definite
    parts |= {"schedule": mq.TenFold(initial=initial), "average": None, **more}
    curvature = mq.Kronecker(every=3) if representation == "kronecker, older" else REPRESENTATIONS[representation]
    return mq.LM(model, "cross_entropy", curvature=curvature, **parts)


def loss(model: nn.Module, x: Tensor, y: Tensor) -> float:
    with torch.no_grad():
        return F.cross_entropy(model(x), y).item()


def damping(opt: mq.LM) -> Tensor | None:
    D = opt._state.D
    return None if D is None else D.diagonal([p.numel() for p in opt.params])


BUILDS = [convolution, mlp]  # by turns


@pytest.mark.parametrize(
    ("representation", "names", "build"),
    [(r, names, BUILDS[i % 2]) for i, (r, names) in enumerate(SAMPLE)],
    ids=["-".join([r, *n]) for r, n in SAMPLE],
)
def test_three_steps(representation, names, build):
    torch.manual_seed(0)
    model, (first, second) = build()
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(2)  # far from linear
    opt = optimizer(model, representation, names)
    random_numbers = torch.get_rng_state()
    for x, y in (first, second, second):
        lam, before, f, D = opt.lam, theta(model), loss(model, x, y), damping(opt)
        step = opt.step(x, y)
        after, f_new = theta(model), loss(model, x, y)
        assert after.isfinite().all()
        assert step.loss == pytest.approx(f, rel=1e-9)
        assert step.new_loss == pytest.approx(f_new, rel=1e-9)
        assert step.lam == lam
        assert step.accepted == (step.rule != "rejected") == (not torch.equal(before, after))
        match step.rule:
            case "decrease":
                assert step.new_loss < step.loss
                assert step.lr == 1
            case "search":
                assert step.new_loss < step.loss
                assert names[2] != "none"
            case "uphill":
                assert step.new_loss >= step.loss
                assert names[4] == "uphill"
            case rule:
                assert rule == "rejected"
                assert step.new_loss == step.loss
        if step.accepted or D is not None:
            new = damping(opt)
            assert new.isfinite().all()
            assert (new > 0).all()
            if D is not None and names[0] != "kronecker":  # an average
                assert (new >= D * (1 - 1e-12)).all()  # the largest so far
    assert all(p.grad is None for p in model.parameters())
    assert torch.equal(torch.get_rng_state(), random_numbers)  # this model draws none


# ---- the same numbers whatever the representation


EXACT = {**REPRESENTATIONS, "auto": mq.Auto(), "products": PRODUCTS}
AGREE = [(r, rows) for r in ("gram", "gram-layers", "auto", "products") for rows in PARTS["rows"]]
AGREE += [(r, rows) for r in ("dense-chunked", "gram-chunked") for rows in ("exact", "empirical")]  # no random rows
AGREE_BY_DAMPING = [
    (r, rows, damping)
    for r, rows in AGREE
    for damping in PARTS["damping"]
    if (r, damping) != ("products", "kronecker")  # which has its partial traces from one row per sample
]


@pytest.mark.parametrize(("representation", "rows", "damping"), AGREE_BY_DAMPING)
def test_exact_representations_agree(representation, rows, damping):
    """All improvements on: three steps of each end where those of Dense end."""
    ends = []
    for r in ("dense", representation):
        torch.manual_seed(0)
        model, (first, second) = mlp()
        parts = {kind: PARTS[kind][name] for kind, name in zip(PARTS, (damping, rows, *IMPROVED[1:]), strict=True)}
        parts |= {"curvature": EXACT[r], "schedule": mq.TenFold(initial=0.1), "average": None}
        opt = mq.LM(model, "cross_entropy", **parts)
        steps = [opt.step(*batch) for batch in (first, second, second)]
        ends.append((theta(model), [s.rule for s in steps]))
    assert ends[0][1] == ends[1][1]
    assert error(ends[1][0], ends[0][0]) < (1e-5 if representation == "products" else 1e-8)


OVER = [(r, "mean") for r in ("dense", "dense-chunked", "products", "kronecker", "ekfac", "hessian", "auto")]
OVER += [("dense", "kronecker"), ("auto", "kronecker")]


@pytest.mark.parametrize(("representation", "damping"), OVER)
def test_step_over_batches_is_the_step_on_all_of_them(representation, damping):
    ends = []
    for over in (False, True):
        torch.manual_seed(0)
        model, ((x, y), _) = mlp()
        lam = 30.0 if representation == "hessian" else 1.0  # positive definite
        parts = {"damping": PARTS["damping"][damping], "schedule": mq.Constant(lam), "average": None}
        opt = mq.LM(model, "cross_entropy", curvature=EXACT[representation], **parts)
        batches = list(zip(x.split(5), y.split(5), strict=True))
        for _ in range(2):
            assert (opt.step_over(batches) if over else opt.step(x, y)).accepted
        ends.append(theta(model))
    assert error(ends[1], ends[0]) < (1e-5 if representation == "products" else 1e-8)


# ---- resuming

RESUMED = [(r, "mean" if (r, "max") in IMPOSSIBLE else "max") for r in REPRESENTATIONS]
RESUMED += [("gram", damping) for damping in PARTS["damping"] if damping != "max"]
RESUMED += [("kronecker, older", "mean"), ("kronecker, older", "factored")]


@pytest.mark.parametrize(("representation", "damping"), RESUMED)
def test_resumes_bit_for_bit(representation, damping):
    """Everything on, saved and loaded between two steps: the loaded one goes on as if nothing had happened."""
    model, batches = convolution()
    names = (damping, "sampled", *IMPROVED[1:])
    more = {"average": mq.EMA(), "schedule": mq.TenFold(initial=1.0)}
    opt = optimizer(model, representation, names, **more)
    for batch in (*batches, *batches):
        opt.step(*batch)
    assert opt._state.accepted > 0
    file = io.BytesIO()
    torch.save(opt.state_dict(), file)
    file.seek(0)
    twin = copy.deepcopy(model)
    again = optimizer(twin, representation, names, **more)
    again.load_state_dict(torch.load(file, weights_only=True))
    for batch in (*batches, batches[1], batches[1]):
        assert opt.step(*batch) == again.step(*batch)
        assert torch.equal(theta(model), theta(twin))
    with opt.averaged(), again.averaged():
        assert torch.equal(theta(model), theta(twin))


# ---- momentum


@dataclass(frozen=True)
class Watched(mq.AdaptiveMomentum):
    """Notes what the paper promises of a step with momentum: dᵀHd = δP², gᵀd = −ξ·δP·√(gᵀH⁻¹g)."""

    seen: tuple = ()

    def refine(self, newton, previous, H, same_data):
        d = super().refine(newton, previous, H, same_data)
        if d is not newton:
            decrement = -(H.G.gradient @ newton).item()  # gᵀH⁻¹g
            dP = min(self.dP, decrement**0.5) if self.cap else self.dP
            length, slope = H.quadratic(d).item(), (H.G.gradient @ d).item()
            WATCHED.append((length / dP**2, -slope / (self.xi * dP * decrement**0.5)))
        return d


WATCHED: list[tuple[float, float]] = []


@pytest.mark.parametrize("momentum", [Watched(), Watched(dP=math.inf, cap=True)], ids=["fixed", "capped"])
@pytest.mark.parametrize("name", ["identity", "layer-mean", "max"])
@EVERY_REPRESENTATION
def test_momentum(representation, name, momentum):
    if (representation, name) in IMPOSSIBLE:
        name = "mean"
    WATCHED.clear()
    model, (first, second) = mlp()
    more = {}
    if representation.startswith("matrix-free"):  # the identities are those of an exact solution
        hessian = representation.endswith("hessian")
        more["curvature"] = mq.MatrixFree(hessian=hessian, tolerance=0.0, warm=0.0, backtrack=False)
    parts = {kind: PARTS[kind][n] for kind, n in zip(PARTS, (name, "exact", *IMPROVED[1:]), strict=True)}
    parts |= {"curvature": REPRESENTATIONS[representation], "momentum": momentum, "average": None, **more}
    lam = 30.0 if "hessian" in representation else 1.0  # positive definite
    opt = mq.LM(model, "cross_entropy", schedule=mq.Constant(lam), **parts)
    for batch in (first, second, second, first):
        opt.step(*batch)
    assert WATCHED
    for length, slope in WATCHED:
        assert length == pytest.approx(1, rel=1e-6)
        assert slope == pytest.approx(1, rel=1e-9)
