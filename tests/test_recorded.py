"""Steps recorded as a CUDA graph."""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

import marquardt as mq
from marquardt.metric import restored
from marquardt.metric.layered import EARLY
from marquardt.recordings import RECORDERS
from support.recorder import Repeated
from support.reference import error
from support.steps import state
from support.unchanged import changes, same, world

cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")


def test_capture_changes_nothing_on_a_cpu():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 3))
    twin = copy.deepcopy(model)
    one, other = mq.LM(model, "cross_entropy", capture=True), mq.LM(twin, "cross_entropy", capture=False)
    for _ in range(6):
        x, y = torch.randn(20, 3), torch.randint(3, (20,))
        assert one.step(x, y) == other.step(x, y)


# Without a GPU: recorded by doing it again.


def on_cpu(kind: str) -> nn.Module:
    torch.manual_seed(0)
    if kind == "mlp":
        return nn.Sequential(nn.Linear(5, 16), nn.Tanh(), nn.Linear(16, 3)).double()
    return nn.Sequential(nn.Conv2d(1, 3, 3), nn.ReLU(), nn.Flatten(), nn.Linear(27 * 4, 3)).double()


def batch_on_cpu(kind: str, seed: int, N: int = 40) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(*((N, 5) if kind == "mlp" else (N, 1, 8, 8)), generator=generator, dtype=torch.float64)
    return x, torch.randint(3, (N,), generator=generator)


class Pair:
    """A run whose steps are recorded beside the plain one: from the same weights and state, step after step, or as two
    runs. Every step is the same, and so is what it leaves."""

    def __init__(self, patch: Any, model: nn.Module, loss: str, *, runs: bool = False, **parts: Any) -> None:
        self.loss, self.parts, self.runs = loss, parts, runs
        self.repeated = Repeated(model)  # steps of a model on a CPU are recorded too
        patch.setitem(RECORDERS, "cpu", self.repeated)
        self.opt = mq.LM(model, loss, capture=True, **parts)
        self.plain = self.twin()

    def twin(self) -> mq.LM:
        """A plain one that goes on from where this one is"""
        plain = mq.LM(copy.deepcopy(self.opt.model), self.loss, capture=False, **self.parts)
        plain.load_state_dict(self.opt.state_dict())
        return plain

    def step(self, x: torch.Tensor, y: torch.Tensor) -> mq.Step:
        if not self.runs:
            self.plain = self.twin()
        here, there = self.opt.step(x, y), self.plain.step(x, y)
        same_step(here, there)
        same_state(self.opt, self.plain)
        spoil(self.opt)
        return there


@pytest.fixture
def pair(monkeypatch):
    return partial(Pair, monkeypatch)


def parameters(model: nn.Module) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def same_step(here: mq.Step, there: mq.Step) -> None:
    for key in ("rule", "accepted", "lr", "converged", "note"):
        assert getattr(here, key) == getattr(there, key), key
    for key in ("loss", "new_loss", "lam", "gain", "slope", "averaged_loss"):
        assert getattr(here, key) == pytest.approx(getattr(there, key), rel=1e-7, nan_ok=True), key


COUNTS = ("lam", "steps", "accepted", "repeats", "unjudged", "idle", "points", "most_rows")
LOSSES = ("best", "expected", "height", "stride", "idle_from", "late")


def same_state(opt: mq.LM, plain: mq.LM) -> None:
    """θ and everything that a step leaves for the next one."""
    assert error(parameters(opt.model), parameters(plain.model)) < 1e-8
    one, other = state(opt), state(plain)
    assert one.keys() == other.keys()
    for key in COUNTS + LOSSES:
        assert one[key] == pytest.approx(other[key], rel=1e-7), key
    for key in ("mean", "previous"):
        assert (one[key] is None) == (other[key] is None), key
        assert one[key] is None or error(one[key], other[key]) < 1e-7, key
    assert (one["past"] is None) == (other["past"] is None)
    assert (one["lag"] is None) == (other["lag"] is None)
    assert one["lag"] is None or one["lag"] == pytest.approx(other["lag"], rel=1e-7, abs=1e-9)
    sizes = [p.numel() for p in opt.params]
    found, expected = (None if s["D"] is None else restored(s["D"]).diagonal(sizes) for s in (one, other))
    assert (found is None) == (expected is None)
    assert found is None or error(found, expected) < 1e-7


PARTS = {
    "default": {},
    "gram": {"curvature": mq.Gram()},
    "kronecker": {"curvature": mq.Kronecker(), "momentum": None},
    "kfac": {"curvature": mq.Kronecker(), "momentum": mq.QuadraticMomentum(), "rows": mq.Sampled(1)},
    "empirical": {"rows": mq.Empirical(), "average": None},
    "sampled": {"rows": mq.Sampled(2), "curvature": mq.Gram()},
    "max-diagonal": {"damping": mq.MaxDiagonal(), "momentum": None, "acceptance": mq.Decrease()},
    "per layer": {"damping": mq.LayerMeanEigenvalue(), "curvature": mq.Gram()},
    "factored": {"damping": mq.FactoredMaxDiagonal(), "curvature": mq.Gram(whole=0)},
    "kronecker metric": {"damping": mq.KroneckerMetric(), "curvature": mq.Gram(whole=0)},
    "kronecker metric, sampled": {"damping": mq.KroneckerMetric(c=0.1), "rows": mq.Sampled(1), "curvature": mq.Gram()},
    "kronecker metric, dense": {"damping": mq.KroneckerMetric(), "curvature": mq.Dense(), "momentum": None},
    "half": {"lr": 0.5},
    "momentum": {"momentum": mq.AdaptiveMomentum()},  # on changing batches too, as the paper has it
    "bold": {"schedule": mq.Constant(1e-9), "curvature": mq.Dense()},  # many of its steps are rejected
}


@pytest.mark.parametrize("parts", PARTS)
@pytest.mark.parametrize("kind", ["mlp", "conv"])
def test_a_replayed_step_is_the_plain_step(pair, kind, parts):
    """Whatever becomes of it."""
    both = pair(on_cpu(kind), "cross_entropy", **PARTS[parts])
    steps = [both.step(*batch_on_cpu(kind, i)) for i in range(20 if parts == "bold" else 14)]
    assert not any(step.converged for step in steps)
    assert both.repeated.replays > 5
    assert parts != "bold" or {"search", "rejected"} & {step.rule for step in steps}


@pytest.mark.parametrize("kind", ["mlp", "conv"])
def test_a_run_of_replayed_steps_is_the_plain_run(pair, kind):
    """With the defaults: D is renewed after each of the first steps and after one of ten, between replays."""
    both, renewed, replayed = pair(on_cpu(kind), "cross_entropy", runs=True), [], []
    for i in range(1, EARLY + 25):
        before, replays = state(both.opt)["D"], both.repeated.replays
        assert both.step(*batch_on_cpu(kind, i)).accepted
        if i > 1 and not same(roots(state(both.opt)["D"]), roots(before)):
            renewed.append(i)
        if both.repeated.replays > replays:
            replayed.append(i)
    assert renewed == [*range(2, EARLY), *range(EARLY, EARLY + 25, 10)]
    assert len(set(replayed) & set(renewed)) > 3  # renewed by the host, after a replay,
    assert len(set(replayed) & {i + 1 for i in renewed}) > 3  # and taken up by the next
    assert len(set(replayed) - set(renewed)) > 10


def roots(D: Any) -> list[torch.Tensor]:
    return [] if D is None else [t for pair in restored(D).roots for t in pair if t is not None]


def test_batches_of_several_sizes_are_those_of_the_plain_run(pair):
    """The rank of the largest batch so far is a part of D."""
    both = pair(on_cpu("mlp"), "cross_entropy", runs=True)
    for i, N in enumerate([20] * 8 + [40] + [20] * 8 + [60] * 8 + [20] * 8):
        both.step(*batch_on_cpu("mlp", i, N))
    assert both.repeated.replays > 15


# The same data in every step.


class Physics(nn.Module):
    """u'' + u = 0: a network that differentiates itself, with a buffer that stays."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(1, 12), nn.Tanh(), nn.Linear(12, 1)).double()
        self.register_buffer("one", torch.ones((), dtype=torch.float64))

    def forward(self, t: torch.Tensor) -> torch.Tensor:
        t = t.requires_grad_()
        u = self.net(t)
        (du,) = torch.autograd.grad(u.sum(), t, create_graph=True)
        (ddu,) = torch.autograd.grad(du.sum(), t, create_graph=True)
        return torch.cat([ddu + self.one * u, 3 * (u - torch.sin(t))], 1)


def on_the_same_data(kind: str) -> tuple[nn.Module, torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    x = torch.linspace(-2, 2, 40, dtype=torch.float64)[:, None]
    if kind == "physics":
        return Physics(), x, torch.zeros(40, 2, dtype=torch.float64)
    return nn.Sequential(nn.Linear(1, 8), nn.Tanh(), nn.Linear(8, 1)).double(), x, torch.sin(3 * x)


def spoil(opt: mq.LM) -> None:
    """What a replay has made lies in memory that the next one writes over."""
    if opt._recordings.made is not None:
        recording = opt._recordings.made[1]
        for t in (recording.theta, recording.d, recording.answers, *recording.readings.values()):
            t.fill_(torch.nan)


SAME_DATA = {
    "default": {},
    "dense": {"curvature": mq.Dense(inertia=0.8), "average": mq.Polyak()},
    "attempts": {"attempts": 3, "line_search": None, "damping": mq.MaxDiagonal()},
}


@pytest.mark.parametrize("parts", SAME_DATA)
@pytest.mark.parametrize("kind", ["sine", "physics"])
def test_a_replayed_step_on_the_same_data_is_the_plain_step(pair, kind, parts):
    """Uphill, rejected and undone ones too."""
    model, x, y = on_the_same_data(kind)
    both, rules, stood = pair(model, "mse", **SAME_DATA[parts]), [], 0
    for _ in range(40):
        replays = both.repeated.replays
        rules.append(both.step(x, y).rule)
        stood += both.repeated.replays > replays and rules[-1] in ("decrease", "uphill")
    assert stood > 15
    assert "uphill" in rules


def test_other_data_after_the_same_are_noticed(pair):
    """The replay on the same data is undone, and those on changing batches are recorded apart; so are among these the
    first steps of a run, which form their own D."""
    both = pair(on_cpu("mlp"), "cross_entropy")
    for i in [0] * 6 + list(range(1, 12)):
        both.step(*batch_on_cpu("mlp", i))
    assert both.repeated.recordings == 3


class Counts(nn.Linear):
    """A buffer that every forward pass changes."""

    def __init__(self) -> None:
        super().__init__(5, 3, dtype=torch.float64)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.calls += 1
        return super().forward(x)


def five(pair: Any, model: nn.Module, dtype: torch.dtype = torch.int64, **parts: Any) -> Pair:
    """Enough steps for replays"""
    both: Pair = pair(model, "cross_entropy", **parts)
    for i in range(5):
        x, y = batch_on_cpu("mlp", i)
        both.opt.step(x, y.to(dtype))
    return both


@pytest.mark.parametrize("training", [True, False])
def test_a_model_is_recorded_if_its_buffers_stay_as_they_are(pair, training):
    model = nn.Sequential(Counts()).train(training)
    both = five(pair, model)
    assert bool(both.repeated.recordings) != training
    assert model[0].calls == (5 if training else 0)
    if not training:  # in the other mode
        model.train()
        replays = both.repeated.replays
        both.opt.step(*batch_on_cpu("mlp", 6))
        assert (model[0].calls, both.repeated.replays) == (1, replays)


def test_another_part_makes_another_recording(pair):
    """One that is exchanged between two steps must not be played back with what was there before."""
    both = five(pair, on_cpu("mlp"), curvature=mq.Dense())
    assert both.repeated.replays
    both.opt.rows = both.parts["rows"] = mq.Empirical()
    both.step(*batch_on_cpu("mlp", 5))


class Raises:
    """An acceptance that fails once it is told to."""

    looks_back, fails = False, False

    def judge(self, trial):
        if self.fails:
            raise KeyboardInterrupt
        return mq.Decrease().judge(trial)


def test_what_a_part_raises_after_a_replay_leaves_everything_as_it_was(pair):
    acceptance = Raises()
    both = five(pair, on_cpu("mlp"), acceptance=acceptance)
    replays, before = both.repeated.replays, world(both.opt.model, both.opt)
    acceptance.fails = True
    with pytest.raises(KeyboardInterrupt):
        both.opt.step(*batch_on_cpu("mlp", 5))
    assert both.repeated.replays == replays + 1  # it was the replay that was judged
    assert changes(before, world(both.opt.model, both.opt)) == []
    acceptance.fails = False
    both.step(*batch_on_cpu("mlp", 5))


@pytest.mark.parametrize(
    ("worse", "match"),
    [(lambda x, y: (x, y + 5), "classes"), (lambda x, y: (x * float("nan"), y), "inputs hold NaN")],
    ids=["classes", "nan"],
)
@pytest.mark.parametrize("dtype", [torch.int64, torch.uint8, torch.int8], ids=str)
def test_bad_input_to_a_replay_is_refused_as_in_a_plain_step(pair, worse, match, dtype):
    """Classes that do not exist end no recording: whether they do is answered after the kernels ran."""
    both = five(pair, on_cpu("mlp"), dtype)
    (x, y), theta, replays = batch_on_cpu("mlp", 5), parameters(both.opt.model), both.repeated.replays
    y = y.to(dtype)
    with pytest.raises(ValueError, match=match):
        both.opt.step(*worse(x, y))
    assert both.repeated.replays == replays + 1
    assert torch.equal(parameters(both.opt.model), theta)
    assert both.opt.step(x, y).accepted
    assert both.opt.step(x[:30], y[:30]).accepted  # another shape


def network(kind: str) -> nn.Module:
    torch.manual_seed(0)
    if kind == "mlp":
        return nn.Sequential(nn.Linear(5, 16), nn.Tanh(), nn.Linear(16, 3)).cuda()
    act = nn.RReLU if kind == "rrelu" else nn.ReLU
    return nn.Sequential(nn.Conv2d(1, 3, 3), act(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(27, 3)).cuda()


def data(kind: str, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(*((64, 5) if kind == "mlp" else (64, 1, 8, 8)), generator=generator)
    return x.cuda(), torch.randint(3, (64,), generator=generator).cuda()


ON_GPU = ["default", "momentum", "gram", "empirical", "sampled", "max-diagonal", "per layer", "factored"]


@cuda
@pytest.mark.parametrize("parts", ON_GPU)
@pytest.mark.parametrize("kind", ["mlp", "conv", "rrelu"])
def test_a_recorded_step_is_the_step(kind, parts):
    """From the same weights, state and random numbers."""
    model = network(kind)
    opt = mq.LM(model, "cross_entropy", capture=True, **PARTS[parts])
    replayed = 0
    for i in range(14):
        x, y = data(kind, i)
        twin = copy.deepcopy(model)
        plain = mq.LM(twin, "cross_entropy", capture=False, **PARTS[parts])
        plain.load_state_dict(opt.state_dict())
        rng = torch.cuda.get_rng_state()
        there = plain.step(x, y)
        after = torch.cuda.get_rng_state()
        torch.cuda.set_rng_state(rng)
        replayed += "steps are recorded" in repr(opt)
        here = opt.step(x, y)
        assert torch.equal(torch.cuda.get_rng_state(), after)
        assert (here.rule, here.accepted, here.lam) == (there.rule, there.accepted, there.lam)
        assert here.new_loss == pytest.approx(there.new_loss, rel=1e-3)
        one, other = (torch.cat([p.detach().flatten() for p in m.parameters()]) for m in (model, twin))
        assert error(one, other) < 1e-3
        if opt.average is not None:
            assert error(state(opt)["mean"], state(plain)["mean"]) < 1e-3
    assert replayed > 5


@cuda
@pytest.mark.parametrize("kind", ["sine", "physics"])
def test_a_recorded_step_on_the_same_data_is_the_step(kind):
    model, x, y = on_the_same_data(kind)
    model, x, y = model.cuda(), x.cuda(), y.cuda()
    opt, replays = mq.LM(model, "mse", capture=True), 0
    for _ in range(30):
        twin = copy.deepcopy(model)
        plain = mq.LM(twin, "mse", capture=False)
        plain.load_state_dict(opt.state_dict())
        there = plain.step(x, y)
        replays += "steps are recorded" in repr(opt)
        here = opt.step(x, y)
        assert (here.rule, here.accepted) == (there.rule, there.accepted)
        assert here.new_loss == pytest.approx(there.new_loss, rel=1e-6)
        assert error(parameters(model), parameters(twin)) < 1e-6
    assert replays > 10


@cuda
def test_what_does_not_go_as_recorded_is_done_without():
    model = network("mlp")
    opt = mq.LM(model, "cross_entropy", capture=True)
    for i in range(6):
        opt.step(*data("mlp", i))
    assert "steps are recorded" in repr(opt)
    x, y = data("mlp", 7)
    before = [p.detach().clone() for p in model.parameters()]
    with pytest.raises(ValueError, match="classes"):
        opt.step(x, y + 5)
    with pytest.raises(ValueError, match="inputs hold NaN"):
        opt.step(x * float("nan"), y)
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), before, strict=True))
    assert opt.step(x, y).accepted
    assert opt.step(x[:30], y[:30]).accepted  # another shape
    assert "recorded" not in repr(copy.deepcopy(opt))


@cuda
def test_a_recording_that_breaks_off_leaves_the_generator_alone():
    class Asks(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            assert float(x.sum()) < float("inf")  # waits for the device, which no recording can
            return super().forward(x)

    torch.manual_seed(0)
    model = nn.Sequential(Asks(5, 16), nn.RReLU(), nn.Linear(16, 3)).cuda()
    opt = mq.LM(model, "cross_entropy", capture=True)
    with pytest.warns(UserWarning, match="cannot be recorded"):
        # two equal ones in a row, once it is known whether the data stay the same
        assert len([opt.step(*data("mlp", i)) for i in range(5)]) == 5
    assert opt.step(*data("mlp", 5)).accepted
    assert torch.rand(3, device="cuda").isfinite().all()
