"""Steps recorded as a CUDA graph."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import marquardt as mq
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


PARTS = {
    "default": {},
    "gram": {"curvature": mq.Gram()},
    "empirical": {"rows": mq.Empirical(), "average": None},
    "sampled": {"rows": mq.Sampled(2), "curvature": mq.Gram()},
    "max-diagonal": {"damping": mq.MaxDiagonal(), "momentum": None, "acceptance": mq.Decrease()},
    "per layer": {"damping": mq.LayerMeanEigenvalue(), "curvature": mq.Gram()},
    "factored": {"damping": mq.FactoredMaxDiagonal(), "curvature": mq.Gram(whole=0)},
}


@cuda
@pytest.mark.parametrize("parts", PARTS)
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
        found = opt._recorded
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
    assert opt._recorded[1] is not None
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
    assert again._recorded is None


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
