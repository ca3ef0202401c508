"""Steps recorded as a CUDA graph."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import marquardt as mq
from marquardt.recorded import RECORDERS
from support.recorder import Repeated
from support.reference import error

cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")


def test_capture_changes_nothing_on_a_cpu():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 3))
    twin = copy.deepcopy(model)
    one, other = mq.LM(model, "cross_entropy", capture=True), mq.LM(twin, "cross_entropy")
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


PARTS = {
    "default": {},
    "gram": {"curvature": mq.Gram()},
    "kronecker": {"curvature": mq.Kronecker(), "momentum": None},
    "empirical": {"rows": mq.Empirical(), "average": None},
    "sampled": {"rows": mq.Sampled(2), "curvature": mq.Gram()},
    "max-diagonal": {"damping": mq.MaxDiagonal(), "momentum": None, "acceptance": mq.Decrease()},
    "per layer": {"damping": mq.LayerMeanEigenvalue(), "curvature": mq.Gram()},
    "factored": {"damping": mq.FactoredMaxDiagonal(), "curvature": mq.Gram(whole=0)},
    "half": {"lr": 0.5},
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
    for i in range(20):
        x, y = batch_on_cpu(kind, i)
        twin = copy.deepcopy(model)
        plain = mq.LM(twin, "cross_entropy", **PARTS[parts])
        plain.load_state_dict(opt.state_dict())
        here, there = opt.step(x, y), plain.step(x, y)
        plain_rules.append(there.rule)
        assert (here.rule, here.accepted, here.lr, here.converged) == (there.rule, there.accepted, there.lr, False)
        for key in ("loss", "new_loss", "lam", "gain", "slope"):
            assert getattr(here, key) == pytest.approx(getattr(there, key), rel=1e-7, nan_ok=True), key
        assert error(parameters(model), parameters(twin)) < 1e-8
        one, other = (o.state_dict()["marquardt"] for o in (opt, plain))
        for key in ("lam", "steps", "accepted", "repeats", "unjudged", "idle", "best", "expected", "height", "stride"):
            assert one[key] == pytest.approx(other[key], rel=1e-7), key
        if one["mean"] is not None:
            assert error(one["mean"], other["mean"]) < 1e-8
    assert repeated.replays > 5
    assert parts != "bold" or {"search", "rejected"} & set(plain_rules)


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
    plain = mq.LM(twin, "cross_entropy", curvature=mq.Dense(), rows=mq.Empirical())
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
    plain = mq.LM(twin, "cross_entropy", acceptance=acceptance)
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


ON_GPU = ["default", "gram", "empirical", "sampled", "max-diagonal", "per layer", "factored"]


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
        plain = mq.LM(twin, "cross_entropy", **PARTS[parts])
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
    opt.step(*data("mlp", 0))
    opt.step(*data("mlp", 1))
    with pytest.warns(UserWarning, match="cannot be recorded"):
        opt.step(*data("mlp", 2))
    assert opt.step(*data("mlp", 3)).accepted
    assert torch.rand(3, device="cuda").isfinite().all()
