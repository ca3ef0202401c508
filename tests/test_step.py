"""What the parts of a step are told, what it leaves for the next one, and what no part can make it do."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import marquardt as mq
from marquardt.metric import restored
from support import reference
from support.parts import Always, Never
from support.reference import error
from support.steps import Spy, edit, linear_problem, lm, objective, overshooting, problem, state, theta, unharmed
from support.unchanged import same

pytestmark = pytest.mark.usefixtures("double")

MANY, TIMES = 10, 10.0  # steps before a batch can be an outlier, and heights of late that make it one
SAME = {"repeats": 5}  # with `expected`, the data of earlier steps


def going(lam: float = 0.3, entries: dict[str, Any] | None = None, **parts: Any) -> tuple[Any, ...]:
    """In the middle of a run: the optimizer, its batch, the quadratic model of it, and the loss"""
    model, x, y = problem()
    q = reference.quadratic(model, "mse", x, y)
    opt = lm(model, **{"schedule": Spy(mq.Constant(lam)), "acceptance": Always(), **parts})
    f = q.f.item()
    entries = {"steps": 50, **(entries or {})}
    edit(opt, **{"expected": f if "repeats" in entries else None, **entries})
    return opt, x, y, q, f


# ---- what parts are told


PREVIOUS = torch.linspace(-1, 1, 27, dtype=torch.float64)


@pytest.mark.parametrize("best", [math.inf, 0.1])
def test_what_an_acceptance_is_told(best):
    opt, x, y, q, f = going(
        entries={"previous": PREVIOUS, "best": best, "late": 7.0}, acceptance=Spy(mq.Uphill(), "judge")
    )
    step = opt.step(x, y)
    trial = opt.acceptance.calls[0][0]
    assert trial[:4] == pytest.approx((f, step.new_loss, 0.0, min(best, f)))
    assert trial.cosine == pytest.approx(torch.cosine_similarity(q.step(0.3), PREVIOUS, 0).item())
    assert trial.late == 7


def test_heights_of_a_loss_without_a_bound_are_above_a_floor():
    """A little below the best one."""
    model, x, y = problem()
    opt = lm(model, lambda z, y: (z - y).square().mean() - 3.0, acceptance=Spy(mq.Decrease(), "judge"))
    edit(opt, height=2.0, best=-5.0)
    opt.step(x, y)
    assert opt.acceptance.calls[0][0].lower_bound == pytest.approx(-5 - 0.1 * 2)


@pytest.mark.parametrize("lr", [1.0, 0.5])
@pytest.mark.parametrize("same", [False, True])
def test_what_a_schedule_is_told(same, lr):
    """The gain over −lr·gᵀd − ½lr²·dᵀGd, and the share of damping in that, known on the same data alone."""
    opt, x, y, q, f = going(2.0, SAME if same else {}, lr=lr, damping=mq.MaxDiagonal())
    D, d = q.diagonal().clamp(min=0.01), q.step(2.0 * q.diagonal().clamp(min=0.01))
    step = opt.step(x, y)
    predicted = float(-lr * q.g @ d - 0.5 * lr**2 * d @ q.G @ d)
    _, outcome, _ = opt.schedule.calls[0]
    assert outcome[:3] == pytest.approx((f, step.new_loss, (f - step.new_loss) / predicted))
    assert outcome[3:7] == ("decrease", same, False, 0)
    assert outcome.share == pytest.approx(0.5 * 2 * lr**2 * float(d @ (D * d)) / predicted if same else 1.0)


def test_a_schedule_is_told_the_loss_of_the_full_step():
    """After a search too. Where there was no step it is NaN."""

    class Breaks:
        recordable = True

        def refine(self, newton: Tensor, previous: Tensor | None, H: object, same_data: bool) -> Tensor:
            raise mq.FactorizationError("not today")

    schedule = Spy(mq.Constant(1e-9))
    _, opt, x, y = overshooting(line_search=mq.Grid(), schedule=schedule)
    step = opt.step(x, y)
    assert schedule.calls[-1][1][:4] == (step.loss, pytest.approx(4 * step.loss), -math.inf, "search")
    opt.momentum = Breaks()
    step = opt.step(x, y)
    assert (step.rule, step.accepted) == ("rejected", False)
    assert "not today" in step.note
    outcome = schedule.calls[-1][1]
    assert math.isnan(outcome.new_loss)
    assert outcome[2:4] == (-math.inf, "rejected")
    assert math.isnan(outcome.lag)


class Search:
    """A line search that asks for some rates and takes the largest that has a loss."""

    along_step = False

    def __init__(self, *rates: float) -> None:
        self.rates = rates

    def search(self, along: Any, loss: float, lr: float, tried: Any) -> tuple[float, float] | None:
        self.tried, self.losses = tried, along(self.rates)
        found = [(rate, f) for rate, f in zip(self.rates, self.losses, strict=True) if math.isfinite(f)]
        return max(found) if found else None


@pytest.mark.parametrize(("radius", "lr"), [(None, 1.0), (1e-2, 1.0), (1e-2, 0.5)])
def test_what_a_search_is_told(radius, lr):
    """The point that failed, and no loss beyond the radius."""
    search = Search(0.1 * lr, lr, 1.1 * lr, 4 * lr)
    opt, x, y, *_ = going(acceptance=Never(), line_search=search, radius=radius, lr=lr)
    before = theta(opt.model)
    step = opt.step(x, y)
    assert step.rule == "search"
    assert [math.isfinite(f) for f in search.losses] == [True, True, radius is None, radius is None]
    assert search.tried == (lr, search.losses[1])
    assert step.lr == (4 * lr if radius is None else lr)
    assert radius is None or (theta(opt.model) - before).norm() == pytest.approx(radius, rel=1e-10)


def test_a_search_along_the_plain_step_has_tried_nothing():
    """With momentum the point that failed is on another line."""
    search = Search(0.5)
    opt, x, y, *_ = going(
        entries={"previous": PREVIOUS}, acceptance=Never(), line_search=search, momentum=mq.AdaptiveMomentum()
    )
    assert opt.step(x, y).rule == "search"
    assert search.tried is None


def test_momentum_refines_the_step():
    """The cosine is that of the plain step, the gain that of the refined one."""

    class Backwards:
        recordable = True

        def refine(self, newton: Tensor, previous: Tensor | None, H: object, same_data: bool) -> Tensor:
            assert previous is not None
            return newton - 0.01 * previous

    opt, x, y, q, f = going(entries={"previous": PREVIOUS}, momentum=Backwards(), acceptance=Spy(Always(), "judge"))
    before, plain = theta(opt.model), q.step(0.3)
    d = plain - 0.01 * PREVIOUS
    step = opt.step(x, y)
    assert error(theta(opt.model) - before, d) < 1e-10
    cosine = opt.acceptance.calls[0][0].cosine
    assert cosine == pytest.approx(torch.cosine_similarity(plain, PREVIOUS, 0).item())
    assert step.gain == pytest.approx((f - step.new_loss) / float(-q.g @ d - 0.5 * d @ q.G @ d))


class Zeros:
    """A damping with zeros."""

    def update(self, D: mq.Metric | None, G: mq.Curvature) -> mq.Metric:
        n = sum(G.parameters.sizes)
        return mq.Diagonal.of(torch.arange(n).clamp(max=2).double(), G.parameters.sizes)


def test_a_damping_is_told_the_last_one_and_its_zeros_do_not_count():
    opt, x, y, q, _ = going(damping=Spy(Zeros()))
    before = theta(opt.model)
    opt.step(x, y)
    opt.step(x, y)
    (_, _, first), (last, _, _) = opt.damping.calls
    assert last is first
    assert restored(state(opt)["D"]).entries([p.numel() for p in opt.params])[:3].tolist() == [0, 1, 2]
    opt, x, y, q, _ = going(damping=Zeros())
    before = theta(opt.model)
    opt.step(x, y)
    assert error(theta(opt.model) - before, q.step(0.3 * torch.arange(27).clamp(1, 2).double())) < 1e-10


@pytest.mark.parametrize(
    ("metric", "says"),
    [
        (torch.ones(3), ["Mine.update returned Tensor", "mq.Diagonal"]),
        (mq.Diagonal.of(torch.ones(27), [27]), ["Mine.update", "[8, 4, 12, 3]"]),
    ],
    ids=["tensor", "sizes"],
)
def test_a_damping_that_returns_something_else(metric, says):
    class Mine:
        def update(self, D: object, G: object) -> Any:
            return metric

    model, x, y = problem()
    opt = lm(model, damping=Mine())
    with unharmed(model, opt, *says):
        opt.step(x, y)


# ---- what no part can make it do


class Blind:
    """Accepts whatever it is shown."""

    looks_back = False

    def judge(self, trial: Any) -> str:
        return "uphill"


UPHILL = mq.Uphill(of_late=True)


@pytest.mark.parametrize(
    ("lr", "entries", "acceptance", "rule"),
    [
        (2.5, {}, UPHILL, "uphill"),
        (2.5, {"previous": None}, UPHILL, "rejected"),
        (2.5, {"late": 2.26}, UPHILL, "uphill"),
        (2.5, {"late": 2.24}, UPHILL, "rejected"),  # more than the best loss was of late
        (2.5, {"height": 0.05}, UPHILL, "rejected"),  # in doubt of the batch only a decrease counts
        (2.5, {}, Blind(), "uphill"),
        (2.5, {"height": 0.05}, Blind(), "rejected"),  # whatever the acceptance says
        (0.5, {"height": 0.05, "late": 0.1}, UPHILL, "decrease"),
    ],
)
def test_uphill_and_what_bars_it(lr, entries, acceptance, rule):
    """Along the previous step from f = 1 to 2.25"""
    _, opt, x, y = overshooting(lr=0.5, acceptance=acceptance if lr > 1 else UPHILL)
    opt.acceptance = UPHILL
    first = opt.step(x, y)
    edit(opt, steps=MANY, stride=math.inf, **{k: v and v * first.new_loss for k, v in entries.items()})
    opt.param_groups[0]["lr"], opt.acceptance = lr, acceptance
    assert opt.step(x, y).rule == rule


@pytest.mark.parametrize("chance", [False, True])
def test_a_batch_in_doubt(chance):
    """Its λ is as many times larger as its loss is unheard-of, its step shorter than the last one, and it has no say in
    what comes after. That its loss is the one that is expected may be chance, once."""
    opt, x, y, *_ = going(damping=mq.MaxDiagonal(), curvature=mq.Dense(inertia=0.5), acceptance=mq.Uphill())
    opt.step(x, y)
    f, doubt = objective(opt.model, "mse", x, -y), 2.0
    edit(opt, steps=MANY, height=f / (TIMES * doubt), stride=1e-3, expected=f if chance else None)
    before, old, calls = theta(opt.model), state(opt), len(opt.schedule.calls)
    step = opt.step(x, -y)
    moved, left = theta(opt.model) - before, state(opt)
    assert step.lam == pytest.approx(doubt * 0.3)
    assert "times those of late" in step.note
    assert moved.norm() == pytest.approx(1e-3 / math.sqrt(doubt))
    assert len(opt.schedule.calls) == calls
    assert same([old[k] for k in KEPT], [left[k] for k in KEPT])
    assert left["doubted"]
    assert error(left["previous"], moved) < 1e-10


KEPT = ("lam", "height", "stride", "D", "past")


def test_there_is_no_doubt_of_the_same_data_or_of_the_second_such_batch():
    for entries in ({**SAME, "height": 1e-3}, {"height": 1e-3, "doubted": True}, {"height": 1e-3, "steps": MANY - 1}):
        opt, x, y, *_ = going(entries=entries)
        assert opt.step(x, y).lam == 0.3


@pytest.mark.parametrize(
    ("change", "dtype", "repeats"),
    [(0.0, torch.float64, 6), (1e-10, torch.float64, 6), (1e-8, torch.float64, 0), (1e-8, torch.float32, 6)],
)
def test_the_same_loss_again_is_the_same_data(change, dtype, repeats):
    model, x, y = problem()
    opt = lm(model.to(dtype))
    edit(opt, repeats=5, expected=objective(model, "mse", x.to(dtype), y.to(dtype)) * (1 + change))
    opt.step(x.to(dtype), y.to(dtype))
    assert state(opt)["repeats"] == repeats


class Falls(mq.Constant):
    def update(self, lam: float, outcome: Any) -> float:
        return lam / 7


@pytest.mark.parametrize(
    ("parts", "falls"), [({"line_search": mq.Grid()}, False), ({"radius": 1e-3}, False), ({"lr": 1.0}, True)], ids=str
)
def test_lambda_does_not_fall_after_a_step_that_was_too_long(parts, falls):
    _, opt, x, y = overshooting(schedule=Falls(1e-9), **parts)
    opt.step(x, y)
    assert opt.lam == pytest.approx(1e-9 / 7 if falls else 1e-9)


@pytest.mark.parametrize("why", [{"entries": {"height": 1e-3}}, {"lr": 0.0}], ids=str)
def test_there_is_no_search_in_doubt_or_where_nothing_moves(why):
    search = Search(0.5)
    opt, x, y, *_ = going(acceptance=Never(), line_search=search, **why)
    assert opt.step(x, y).rule == "rejected"
    assert not hasattr(search, "tried")


# ---- what rounding hides


class Jump(nn.Module):
    """10⁶ at θ = 1, with next to no slope; elsewhere it has jumped, of which the slope does not tell."""

    def __init__(self, jump: float) -> None:
        super().__init__()
        self.w, self.jump = nn.Parameter(torch.ones(1)), jump

    def forward(self, x: Tensor) -> Tensor:
        return x * (1e6 + 1e-3 * (self.w - 1) + self.jump * (self.w.detach() != 1))


@pytest.mark.parametrize("lr", [1.0, 0.01])
@pytest.mark.parametrize("jump", [0.0, -1e-6, 1e-6])
@pytest.mark.filterwarnings("ignore:lr=0.01")
def test_what_rounding_hides(jump, lr):
    """A predicted decrease below the rounding of f, where none is found, or ‖lr·d‖ is below √ε‖θ‖: then what is found
    is rounding too. It is taken all the same if it is a decrease, and no other move is."""
    search, schedule = Search(0.5), Spy(mq.Constant(4e9))
    model, x = Jump(jump), torch.ones(2, 1)
    opt = lm(model, "residual", lr=lr, schedule=schedule, acceptance=mq.Uphill(), line_search=search)
    edit(opt, previous=-torch.ones(1), unjudged=3)
    step = opt.step(x)
    seen = bool(jump) and lr == 1
    outcome = schedule.calls[0][1]
    assert math.isnan(step.gain) != seen
    assert outcome.unjudged == (0 if seen else 4)
    assert outcome.share == 1
    if jump:
        assert step.rule == ("decrease" if jump < 0 else "uphill" if seen else "rejected")
    assert not hasattr(search, "tried")


@pytest.mark.parametrize(("lam", "converged"), [(1.0, True), (1.1, False)])
def test_a_run_that_has_converged_says_so_and_nothing_else(lam, converged):
    """With a λ above λ₀ that may be why a step finds nothing."""
    model, x, y = linear_problem()
    with torch.no_grad():
        model.weight.copy_(torch.tensor([[1.0, -2.0]]))
    opt = lm(model, schedule=mq.TenFold(1.0))
    f = objective(model, "mse", x, y)
    edit(opt, lam=lam, repeats=9, expected=f, idle=9, idle_from=f, steps=20)
    step = opt.step(x, y)
    assert step.converged == converged
    assert step.note.startswith("converged") == converged


# ---- what a step leaves for the next one


@pytest.mark.parametrize("lr", [1.0, 0.5])
@pytest.mark.parametrize("acceptance", [mq.Uphill(), mq.Decrease(), Never()], ids=lambda a: type(a).__name__)
def test_what_a_step_leaves(acceptance, lr):
    entries = {"accepted": 40, "height": 5.0, "stride": 0.7, "best": 9.0}
    opt, x, y, q, _ = going(entries=entries, acceptance=acceptance, lr=lr, curvature=mq.Dense(inertia=0.5))
    before = theta(opt.model)
    step = opt.step(x, y)
    moved, left = theta(opt.model) - before, state(opt)
    assert (left["steps"], left["accepted"]) == (51, 40 + step.accepted)
    assert (left["expected"], left["best"]) == pytest.approx((step.new_loss, step.new_loss))
    assert left["stride"] == pytest.approx(float(moved.norm()) if step.accepted else 0.7)
    assert left["height"] == pytest.approx(0.9 * 5.0)
    assert (left["past"] is None) == (left["D"] is None) == (not step.accepted)
    if step.accepted:
        assert error(left["past"]["G"], q.G) < 1e-10
    assert (left["previous"] is None) == (not isinstance(acceptance, mq.Uphill))  # nobody asks for it
    if left["previous"] is not None:
        assert error(left["previous"], moved) < 1e-10


@pytest.mark.parametrize(("average", "restarts"), [(mq.EMA(), True), (mq.Polyak(), False)], ids=str)
def test_an_average_on_the_same_data(average, restarts):
    """In the place of an EMA the last weights stand there."""
    opt, x, y, *_ = going(entries={**SAME, "mean": torch.zeros(27), "points": 3}, average=average)
    opt.step(x, y)
    left, now = state(opt), theta(opt.model)
    assert left["points"] == (0 if restarts else 4)
    assert left["mean"] is None if restarts else error(left["mean"], now / 4) < 1e-12
    with opt.averaged():
        assert error(theta(opt.model), now if restarts else now / 4) < 1e-12
