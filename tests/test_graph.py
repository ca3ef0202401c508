"""Steps recorded as a CUDA graph, and the questions that are answered after them."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import marquardt as mq
from marquardt import deferred as tape
from reference import error

cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")


def test_questions_are_asked_at_once_or_later():
    yes, no, numbers = torch.tensor(True), torch.tensor(False), torch.tensor([1.0, 2.0, 0.0])
    assert tape.ask(yes)
    assert not tape.ask(no)
    assert tape.read(numbers) == [1.0, 2.0, 0.0]
    seeds = torch.tensor([3, 4])
    assert torch.equal(tape.draw(lambda seed: seeds + seed, 5, numbers), torch.tensor([8.0, 9.0]))
    recording = tape.Tape([7.0, 8.0, 9.0])
    with tape.recorded(recording):
        place = tape.draw(lambda seed: seeds + seed, 5, numbers)
        assert tape.recording()
        assert tape.ask(yes)
        assert tape.ask(no)  # all is assumed to be well
        assert tape.read(numbers) == [7.0, 8.0, 9.0]
    assert not tape.recording()
    assert place.dtype == numbers.dtype
    with tape.recorded(tape.Tape([], [place])):
        assert tape.draw(lambda seed: seeds + seed, 6, numbers) is place
    assert [(to is place, of(7).tolist(), seed) for to, of, seed in recording.drawn] == [(True, [10, 11], 5)]
    assert tape.answers(recording, torch.tensor(5.0)).tolist() == [1.0, 0.0, 1.0, 2.0, 0.0, 5.0]


@pytest.mark.parametrize("dtype", [torch.int64, torch.uint8, torch.int8])
def test_classes_that_do_not_exist_end_no_recording(dtype):
    """The question whether they do is answered after the kernels ran."""
    z, y = torch.randn(3, 4), torch.tensor([0, 1, 7], dtype=dtype)
    with tape.recorded(tape.Tape([])):
        found = mq.losses.CrossEntropy().ell(z, y)
    torch.testing.assert_close(found[:2], nn.functional.cross_entropy(z[:2], y[:2].long(), reduction="none"))
    assert found[2] == 0


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
