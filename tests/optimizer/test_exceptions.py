"""An exception anywhere in a step leaves everything as it was."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import grad, jacfwd, jacrev, jvp, vmap

import marquardt as mq
from support.cases import Fn
from support.modules import Counting, Scaling, Slope, noisy
from support.reference import error
from support.steps import DENSE, EVERY_CURVATURE, MAX_MOMENTUM, ByHand, lm, parts_of, problem, theta
from support.unchanged import changes, refused, world

pytestmark = pytest.mark.usefixtures("double")


class Boom(Exception):
    pass


EXCEPTIONS = pytest.mark.parametrize("exception", [Boom, KeyboardInterrupt, RuntimeError], ids=lambda e: e.__name__)


class Fragile(nn.Module):
    """Fails at the k-th pass."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner, self.passes, self.fail_at, self.exception = inner, 0, 0, Boom

    def forward(self, x: Tensor) -> Tensor:
        self.passes += 1
        z = self.inner(x)
        if self.passes == self.fail_at:
            raise self.exception("in the middle of forward")
        return z


FRAGILE: dict[str, Callable[[], nn.Module]] = {
    "random": noisy,
    "own parameter": lambda: nn.Sequential(nn.Linear(2, 4), Scaling(), nn.Tanh(), nn.Linear(4, 3)),
    "own parameter and buffer": lambda: nn.Sequential(nn.Linear(2, 4), Scaling(), Counting(), nn.Linear(4, 3)),
    "pinn": Slope,
}


def fragile(name: str, started: bool) -> tuple[Fragile, mq.LM, Tensor, Tensor]:
    """The next step fails at lr = 1000, searches on a grid, and does so with two λ: it passes through every line."""
    torch.manual_seed(0)
    model, x, y = Fragile(FRAGILE[name]()), torch.randn(6, 2), torch.randn(6, 3)
    parts = {**MAX_MOMENTUM, "average": mq.EMA(), "acceptance": mq.Uphill()}
    opt = lm(model, line_search=mq.Backtracking(0.1, trials=6), attempts=2, **parts)
    if started:
        opt.step(x, y)
        opt.step(x + 0.1, y)
    opt.param_groups[0]["lr"] = 1e3
    model.passes = 0
    return model, opt, x, y


@EXCEPTIONS
@pytest.mark.parametrize("name", FRAGILE)
@pytest.mark.parametrize("started", [False, True], ids=["first step", "third step"])
def test_exception_in_forward(exception, name, started):
    """Whichever pass fails, nothing has happened; or the library knew another way, and the step is the same."""
    model, opt, x, y = fragile(name, started)
    expected = opt.step(x, y)
    passes, end = model.passes, theta(model)
    assert passes >= 3
    raised = 0
    for k in range(1, passes + 1):
        model, opt, x, y = fragile(name, started)
        before = world(model, opt)
        model.fail_at, model.exception = k, exception
        try:
            step = opt.step(x, y)
        except exception:
            assert changes(before, world(model, opt)) == [], f"pass {k}"
            model.fail_at, raised = 0, raised + 1
            step = opt.step(x, y)
        assert step.rule == expected.rule
        assert error(theta(model), end) < 1e-7
        assert all(b.item() == 2 * started + 1 for b in model.buffers())
    assert raised >= passes // 2


class Failing:
    """A part that does its work, then raises."""

    def __init__(self, part: Any, exception: type[BaseException]) -> None:
        self.part, self.exception = part, exception

    def __getattr__(self, name: str) -> Any:
        found = getattr(self.part, name)
        if not callable(found):
            return found

        def fail(*args: Any, **kwargs: Any) -> Any:
            found(*args, **kwargs)
            raise self.exception("in a part")

        return fail


PARTS = ["curvature", "rows", "damping", "schedule", "momentum", "acceptance", "line_search", "average"]
METHODS = [*((mq.losses.SquaredError, name) for name in ("ell", "error", "s"))]
METHODS += [*((mq.Curvature, name) for name in ("newton", "quadratic", "diagonal"))]


@EXCEPTIONS
@pytest.mark.parametrize("part", PARTS)
def test_exception_in_a_part(exception, part):
    model, opt, x, y = fragile("random", started=True)
    expected, end = opt.step(x, y), theta(model)
    model, opt, x, y = fragile("random", started=True)
    before, whole = world(model, opt), getattr(opt, part)
    setattr(opt, part, Failing(mq.Exact() if whole is None else whole, exception))
    with pytest.raises(exception, match="in a part"):
        opt.step(x, y)
    setattr(opt, part, whole)  # a state_dict names its parts
    assert changes(before, world(model, opt)) == []
    assert opt.step(x, y) == expected
    assert torch.equal(theta(model), end)


@EXCEPTIONS
@pytest.mark.parametrize(("owner", "method"), METHODS, ids=lambda o: o if isinstance(o, str) else o.__name__)
def test_exception_in_the_mathematics(monkeypatch, exception, owner, method):
    """At the first, second, … call of a method."""
    plain, *batch = problem()
    owner = type(DENSE.represent(mq.linearize(plain, "mse", *batch))) if owner is mq.Curvature else owner
    model, opt, x, y = fragile("random", started=True)
    expected, end = opt.step(x, y), theta(model)
    original = getattr(owner, method)
    for k in range(1, 20):
        calls = [0]

        def failing(self: Any, *args: Any, calls: list[int] = calls, k: int = k) -> Any:
            calls[0] += 1
            if calls[0] == k:
                raise exception("in the mathematics")
            return original(self, *args)

        model, opt, x, y = fragile("random", started=True)
        before = world(model, opt)
        with monkeypatch.context() as patched:
            patched.setattr(owner, method, failing)
            try:
                opt.step(x, y)
                break
            except exception:
                pass
        assert changes(before, world(model, opt)) == [], f"call {k}"
        assert opt.step(x, y) == expected
        assert torch.equal(theta(model), end)
    assert 2 <= k < 19  # it was called, and then no longer


def test_exception_while_rules_are_proven_again():
    """Another mode of the model is another proof; if that fails, the old one must still hold."""

    class Turned(Scaling):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.atan2(x, self.scale)  # no rule knows it, so that the model is called once more for its rows

    model, x, y = Fragile(nn.Sequential(nn.Linear(2, 4), Turned(), nn.Linear(4, 3))), *problem()[1:]
    twin = copy.deepcopy(model)
    opt, hand = lm(model.eval()), ByHand(twin, "mse")
    opt.step(x, y)
    hand.step(x, y)
    for k in (1, 2, 3, 4):
        model.train()
        model.passes, model.fail_at, model.exception = 0, k, KeyboardInterrupt
        with pytest.raises(KeyboardInterrupt):
            opt.step(x, y)
        model.eval()
        model.fail_at = 0
        opt.step(x, y)
        hand.step(x, y)
        assert error(theta(model), theta(twin)) < 1e-8, f"pass {k}"


def test_exception_in_step_over():
    """While the batches are read, in the second round."""

    class Source:
        def __init__(self, batches: list[Any]) -> None:
            self.batches, self.rounds = batches, 0

        def __iter__(self) -> Any:
            self.rounds += 1
            yield self.batches[0]
            torch.rand(3)
            if self.rounds == 2:
                raise Boom
            yield from self.batches[1:]

    model, x, y = noisy(), torch.randn(8, 2), torch.randn(8, 3)
    opt = lm(model)
    before = world(model, opt)
    source = Source(parts_of(x, y))
    with pytest.raises(Boom):
        opt.step_over(source)
    assert changes(before, world(model, opt)) == []
    assert opt.step_over(source).accepted


TRANSFORMS: dict[str, Callable[[Callable[[Tensor], Tensor]], Any]] = {
    "grad": lambda f: grad(f)(torch.tensor(2.0)),
    "jacrev": lambda f: jacrev(f)(torch.tensor(2.0)),
    "jacfwd": lambda f: jacfwd(f)(torch.tensor(2.0)),
    "jvp": lambda f: jvp(f, (torch.tensor(2.0),), (torch.tensor(1.0),)),
    "vmap": lambda f: vmap(f)(torch.ones(3)),
}


@pytest.mark.parametrize("transform", TRANSFORMS)
@pytest.mark.parametrize("tracked", [True, False], ids=["inputs", "nothing"])
@pytest.mark.parametrize("over", [False, True], ids=["step", "step_over"])
@pytest.mark.parametrize("started", [False, True], ids=["first step", "third step"])
def test_a_step_inside_a_transform_is_refused(started: bool, over: bool, tracked: bool, transform: str):
    """Whether or not torch.func tracks its inputs: it would be done once for all that vmap maps."""
    model, x, y = problem()
    opt = lm(model)
    for _ in range(2 * started):
        opt.step(x, y)
    before = world(model, opt)

    def loss(c: Tensor) -> Tensor:
        inputs = x * c if tracked else x
        step = opt.step_over([(inputs, y)]) if over else opt.step(inputs, y, closure=lambda: called.append(c))
        return c * step.new_loss

    called: list[Any] = []
    with pytest.raises(ValueError, match=r"opt\.step is called inside a torch\.func transform.*call it outside"):
        TRANSFORMS[transform](loss)
    assert not called
    assert changes(before, world(model, opt)) == []
    opt.step(x, y)


# ---- Steps that fail: trials that are not finite, factorisations that break down, losses that overflow.


def explosive(kind: str) -> nn.Module:
    """e^θ, or e^2θ/(1 + e^θ): a long step overflows to ∞, or to ∞/∞."""

    def f(x: Tensor, theta: Tensor) -> Tensor:
        e = (theta * x).exp()
        return e if kind == "inf" else e * e / (1 + e)

    return Fn(f, nn.Parameter(torch.ones(1)))


RAISING = pytest.mark.parametrize("schedule", [mq.TenFold, mq.GainRatio, mq.RelativeDecrease])


@pytest.mark.parametrize("kind", ["inf", "nan"])
@RAISING
@pytest.mark.parametrize("acceptance", [mq.Decrease(), mq.Uphill()], ids=str)
def test_non_finite_trial_is_a_failed_step(kind, schedule, acceptance):
    model, x, y = explosive(kind), torch.ones(3, 1), torch.full((3, 1), 1e5)
    opt = lm(model, schedule=schedule(1e-6), acceptance=acceptance)
    before = theta(model)
    step = opt.step(x, y)
    assert (step.accepted, step.rule, step.new_loss) == (False, "rejected", step.loss)
    assert math.isfinite(step.loss)
    assert torch.equal(theta(model), before)
    assert kind in step.note
    assert opt.lam > step.lam


@pytest.mark.parametrize("kind", ["inf", "nan"])
@pytest.mark.parametrize(
    "parts", [{"line_search": mq.Grid()}, {"line_search": mq.Backtracking(trials=20)}, {"attempts": 30}], ids=str
)
def test_a_search_or_larger_lambda_rescue_a_non_finite_trial(kind, parts):
    model, x, y = explosive(kind), torch.ones(3, 1), torch.full((3, 1), 1e4)
    step = lm(model, schedule=mq.TenFold(1e-6), **parts).step(x, y)
    assert (step.accepted, step.rule) == (True, "decrease" if "attempts" in parts else "search")
    assert step.new_loss < step.loss
    assert step.note.count(f"loss is {kind}") >= (2 if "attempts" in parts and kind == "inf" else 1)
    assert theta(model).isfinite().all()


class Breaks:
    """A momentum whose systems cannot be factored, so many times"""

    recordable = True

    def __init__(self, times: int) -> None:
        self.left = times

    def refine(self, newton: Tensor, previous: Tensor | None, H: object, same_data: bool) -> Tensor:
        self.left -= 1
        if self.left >= 0:
            raise mq.FactorizationError("not today")
        return newton


@RAISING
@EVERY_CURVATURE
def test_failed_factorisation_is_a_failed_step(schedule, curvature):
    model, x, y = problem()
    opt = lm(model, schedule=schedule(1.0), curvature=curvature, momentum=Breaks(1))
    before = theta(model)
    step = opt.step(x, y)
    assert (step.accepted, step.rule, step.new_loss) == (False, "rejected", step.loss)
    assert torch.equal(theta(model), before)
    assert "not today" in step.note
    assert opt.lam > step.lam
    assert opt.step(x, y).accepted


def test_failed_factorisation_is_attempted_again():
    model, x, y = problem()
    twin = copy.deepcopy(model)
    step = lm(model, schedule=mq.TenFold(1e-3), attempts=3, momentum=Breaks(2)).step(x, y)
    lm(twin, schedule=mq.TenFold(0.1)).step(x, y)
    assert (step.accepted, step.lam) == (True, pytest.approx(0.1))
    assert step.note.count("not today") == 2
    assert error(theta(model), theta(twin)) < 1e-9


def test_a_gradient_that_is_not_finite_is_named():
    _, x, y = problem()
    with pytest.raises(ValueError, match="gradient of parameter 'w'"):
        lm(Fn(lambda x, w: w.sqrt() + 0 * x[:, :1], nn.Parameter(torch.zeros(3)))).step(x, y)


@pytest.mark.parametrize(
    ("outputs", "targets", "says"),
    [
        (1.0, 1e30, ["largest target is 1e+30", "scale the data", "float64"]),
        (1e30, 1.0, ["largest output is 1e+30", "scale the data", "float64"]),
        (1e39, 1.0, ["it is the model that overflows"]),
    ],
    ids=["targets", "outputs", "model"],
)
def test_what_overflows(outputs, targets, says):
    def scaled() -> nn.Module:
        return Fn(lambda x, w: x * w * outputs, nn.Parameter(torch.ones(1)))

    x = torch.ones(4, 1)
    with refused("the loss is inf", *says):
        lm(scaled().float(), "mse").step(x.float(), (targets * x).float())
    if outputs < 1e38:
        with refused("the loss is inf", "scale the data"):
            lm(scaled(), "mse").step(x * 1e200, targets * x * 1e200)
