"""Steps recorded as a CUDA graph."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import marquardt as mq
from marquardt.metric.layered import EARLY
from marquardt.recordings import RECORDERS
from marquardt.step import present
from support.recorder import Repeated
from support.reference import error
from support.unchanged import same

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


@pytest.fixture
def recorder(monkeypatch):
    """Steps of a model on a CPU are recorded too."""

    def of(model: nn.Module) -> Repeated:
        made = Repeated(model)
        monkeypatch.setitem(RECORDERS, "cpu", made)
        return made

    return of


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
    one, other = (o.state_dict()["marquardt"] for o in (opt, plain))
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
    found, expected = (None if o._state.D is None else o._state.D.diagonal(sizes) for o in (opt, plain))
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
def test_a_replayed_step_is_the_plain_step(recorder, kind, parts):
    """From the same weights and state, step after step, whatever becomes of it."""
    model = on_cpu(kind)
    repeated = recorder(model)
    opt = mq.LM(model, "cross_entropy", capture=True, **PARTS[parts])
    plain_rules = []
    for i in range(20 if parts == "bold" else 14):
        x, y = batch_on_cpu(kind, i)
        twin = copy.deepcopy(model)
        plain = mq.LM(twin, "cross_entropy", capture=False, **PARTS[parts])
        plain.load_state_dict(opt.state_dict())
        here, there = opt.step(x, y), plain.step(x, y)
        plain_rules.append(there.rule)
        assert not here.converged
        same_step(here, there)
        same_state(opt, plain)
        spoil(opt)
    assert repeated.replays > 5
    assert parts != "bold" or {"search", "rejected"} & set(plain_rules)


@pytest.mark.parametrize("kind", ["mlp", "conv"])
def test_a_run_of_replayed_steps_is_the_plain_run(recorder, kind):
    """With the defaults: D is renewed after each of the first steps and after one of ten, between replays."""
    model = on_cpu(kind)
    twin, repeated = copy.deepcopy(model), recorder(model)
    opt, plain = mq.LM(model, "cross_entropy", capture=True), mq.LM(twin, "cross_entropy", capture=False)
    renewed, replayed = [], []
    for i in range(1, EARLY + 25):
        x, y = batch_on_cpu(kind, i)
        before, replays = roots(opt), repeated.replays
        here, there = opt.step(x, y), plain.step(x, y)
        same_step(here, there)
        same_state(opt, plain)
        spoil(opt)
        assert there.accepted
        if i > 1 and not same(roots(opt), before):
            renewed.append(i)
        if repeated.replays > replays:
            replayed.append(i)
    assert renewed == [*range(2, EARLY), *range(EARLY, EARLY + 25, 10)]
    assert len(set(replayed) & set(renewed)) > 3  # renewed by the host, after a replay,
    assert len(set(replayed) & {i + 1 for i in renewed}) > 3  # and taken up by the next
    assert len(set(replayed) - set(renewed)) > 10


def roots(opt: mq.LM) -> list[torch.Tensor]:
    """Copies: a replay writes over those that it has made"""
    D = opt._state.D
    return [] if D is None else [t.clone() for pair in D.roots for t in pair if t is not None]


def test_batches_of_several_sizes_are_those_of_the_plain_run(recorder):
    """The rank of the largest batch so far is a part of D."""
    model = on_cpu("mlp")
    twin, repeated = copy.deepcopy(model), recorder(model)
    opt, plain = mq.LM(model, "cross_entropy", capture=True), mq.LM(twin, "cross_entropy", capture=False)
    for i, N in enumerate([20] * 8 + [40] + [20] * 8 + [60] * 8 + [20] * 8):
        x, y = batch_on_cpu("mlp", i, N)
        same_step(opt.step(x, y), plain.step(x, y))
        same_state(opt, plain)
        spoil(opt)
    assert repeated.replays > 15


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
        for t in (recording.theta, recording.d, recording.answers, *present(recording.readings)):
            t.fill_(torch.nan)


SAME_DATA = {
    "default": {},
    "dense": {"curvature": mq.Dense(inertia=0.8), "average": mq.Polyak()},
    "attempts": {"attempts": 3, "line_search": None, "damping": mq.MaxDiagonal()},
}


@pytest.mark.parametrize("parts", SAME_DATA)
@pytest.mark.parametrize("kind", ["sine", "physics"])
def test_a_replayed_step_on_the_same_data_is_the_plain_step(recorder, kind, parts):
    """From the same weights and state, step after step: uphill, rejected and undone ones too."""
    model, x, y = on_the_same_data(kind)
    repeated = recorder(model)
    opt = mq.LM(model, "mse", capture=True, **SAME_DATA[parts])
    rules, stood = [], 0
    for _ in range(40):
        twin = copy.deepcopy(model)
        plain = mq.LM(twin, "mse", capture=False, **SAME_DATA[parts])
        plain.load_state_dict(opt.state_dict())
        replays = repeated.replays
        here, there = opt.step(x, y), plain.step(x, y)
        same_step(here, there)
        same_state(opt, plain)
        spoil(opt)
        rules.append(there.rule)
        stood += repeated.replays > replays and there.rule in ("decrease", "uphill")
    assert stood > 15
    assert "uphill" in rules


def test_other_data_after_the_same_are_noticed(recorder):
    """The replay on the same data is undone, and those on changing batches are recorded apart; so are among these the
    first steps of a run, which form their own D."""
    model = on_cpu("mlp")
    repeated = recorder(model)
    opt = mq.LM(model, "cross_entropy", capture=True)
    for i in [0] * 6 + list(range(1, 12)):
        twin = copy.deepcopy(model)
        plain = mq.LM(twin, "cross_entropy", capture=False)
        plain.load_state_dict(opt.state_dict())
        x, y = batch_on_cpu("mlp", i)
        same_step(opt.step(x, y), plain.step(x, y))
        same_state(opt, plain)
        spoil(opt)
    assert repeated.recordings == 3


class Counts(nn.Linear):
    """A buffer that every forward pass changes."""

    def __init__(self) -> None:
        super().__init__(5, 3, dtype=torch.float64)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.calls += 1
        return super().forward(x)


@pytest.mark.parametrize("training", [True, False])
def test_a_model_is_recorded_if_its_buffers_stay_as_they_are(recorder, training):
    model = nn.Sequential(Counts()).train(training)
    repeated = recorder(model)
    opt = mq.LM(model, "cross_entropy", capture=True)
    for i in range(6):
        opt.step(*batch_on_cpu("mlp", i))
    assert bool(repeated.recordings) != training
    assert model[0].calls == (6 if training else 0)
    if not training:  # in the other mode
        model.train()
        replays = repeated.replays
        opt.step(*batch_on_cpu("mlp", 6))
        assert (model[0].calls, repeated.replays) == (1, replays)


def test_another_part_makes_another_recording(recorder):
    """One that is exchanged between two steps must not be played back with what was there before."""
    model = on_cpu("mlp")
    repeated = recorder(model)
    opt = mq.LM(model, "cross_entropy", capture=True, curvature=mq.Dense())
    for i in range(5):
        opt.step(*batch_on_cpu("mlp", i))
    assert repeated.replays
    opt.rows = mq.Empirical()
    twin = copy.deepcopy(model)
    plain = mq.LM(twin, "cross_entropy", capture=False, curvature=mq.Dense(), rows=mq.Empirical())
    plain.load_state_dict(opt.state_dict())
    opt.step(*batch_on_cpu("mlp", 5))
    plain.step(*batch_on_cpu("mlp", 5))
    assert error(parameters(model), parameters(twin)) < 1e-10


class Raises:
    """An acceptance that fails once it is told to."""

    looks_back, fails = False, False

    def judge(self, trial):
        if self.fails:
            raise KeyboardInterrupt
        return mq.Decrease().judge(trial)


def test_what_a_part_raises_after_a_replay_leaves_everything_as_it_was(recorder):
    model, acceptance = on_cpu("mlp"), Raises()
    repeated = recorder(model)
    opt = mq.LM(model, "cross_entropy", capture=True, acceptance=acceptance)
    for i in range(5):
        opt.step(*batch_on_cpu("mlp", i))
    replays, theta, state, rng = repeated.replays, parameters(model), opt.state_dict(), torch.get_rng_state()
    acceptance.fails = True
    with pytest.raises(KeyboardInterrupt):
        opt.step(*batch_on_cpu("mlp", 5))
    assert repeated.replays == replays + 1  # it was the replay that was judged
    assert torch.equal(parameters(model), theta)
    assert torch.equal(torch.get_rng_state(), rng)
    acceptance.fails = False
    twin = copy.deepcopy(model)
    plain = mq.LM(twin, "cross_entropy", capture=False, acceptance=acceptance)
    plain.load_state_dict(state)
    assert plain.step(*batch_on_cpu("mlp", 5)).new_loss == pytest.approx(opt.step(*batch_on_cpu("mlp", 5)).new_loss)
    assert error(parameters(model), parameters(twin)) < 1e-10


@pytest.mark.parametrize(
    ("spoil", "match"),
    [(lambda x, y: (x, y + 5), "classes"), (lambda x, y: (x * float("nan"), y), "inputs hold NaN")],
    ids=["classes", "nan"],
)
def test_bad_input_to_a_replay_is_refused_as_in_a_plain_step(recorder, spoil, match):
    model = on_cpu("mlp")
    repeated = recorder(model)
    opt = mq.LM(model, "cross_entropy", capture=True)
    for i in range(5):
        opt.step(*batch_on_cpu("mlp", i))
    (x, y), theta, replays = batch_on_cpu("mlp", 5), parameters(model), repeated.replays
    with pytest.raises(ValueError, match=match):
        opt.step(*spoil(x, y))
    assert repeated.replays == replays + 1
    assert torch.equal(parameters(model), theta)
    assert opt.step(x, y).accepted
    assert opt.step(x[:30], y[:30]).accepted  # another shape


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
        found = opt._recordings.made
        here = opt.step(x, y)
        replayed += found is not None and found[1] is not None
        assert torch.equal(torch.cuda.get_rng_state(), after)
        assert (here.rule, here.accepted, here.lam) == (there.rule, there.accepted, there.lam)
        assert here.new_loss == pytest.approx(there.new_loss, rel=1e-3)
        one, other = (torch.cat([p.detach().flatten() for p in m.parameters()]) for m in (model, twin))
        assert error(one, other) < 1e-3
        if opt.average is not None:
            assert error(opt._state.mean, plain._state.mean) < 1e-3
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
        replays += opt._recordings.made is not None
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
    assert opt._recordings.made[1] is not None
    x, y = data("mlp", 7)
    before = [p.detach().clone() for p in model.parameters()]
    with pytest.raises(ValueError, match="classes"):
        opt.step(x, y + 5)
    with pytest.raises(ValueError, match="inputs hold NaN"):
        opt.step(x * float("nan"), y)
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), before, strict=True))
    assert opt.step(x, y).accepted
    assert opt.step(x[:30], y[:30]).accepted  # another shape
    again = copy.deepcopy(opt)
    assert again._recordings.made is None


@cuda
def test_a_recording_that_breaks_off_leaves_the_generator_alone():
    class Asks(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            assert float(x.sum()) < float("inf")  # waits for the device, which no recording can
            return super().forward(x)

    torch.manual_seed(0)
    model = nn.Sequential(Asks(5, 16), nn.RReLU(), nn.Linear(16, 3)).cuda()
    opt = mq.LM(model, "cross_entropy", capture=True)
    with pytest.warns(UserWarning, match="cannot be recorded"):  # two equal ones, once it is known that data change
        [opt.step(*data("mlp", i)) for i in range(5)]
    assert opt.step(*data("mlp", 5)).accepted
    assert torch.rand(3, device="cuda").isfinite().all()
