"""Weight decay whose weights change from step to step: the data stay the same, as do the levels of earlier steps."""

from __future__ import annotations

import copy
import io
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

import marquardt as mq
from marquardt.jacobian.objective import Level
from marquardt.policies.recent import Recent
from marquardt.recordings import RECORDERS
from marquardt.step import reweighted
from support.cases import mlp
from support.recorder import Repeated
from support.reference import error
from support.steps import theta

pytestmark = pytest.mark.usefixtures("double")


def sine(hidden: int = 10) -> tuple[nn.Module, Tensor, Tensor]:
    x = torch.linspace(-1, 1, 40)[:, None]
    return mlp(1, hidden, 1), x, (3 * x).sin() + 0.1 * torch.randn(40, 1)


def weigh(opt: mq.LM, w: float) -> None:
    opt.param_groups[0]["weight_decay"] = w


def objective(model: nn.Module, x: Tensor, y: Tensor, w: float) -> float:
    with torch.no_grad():
        return float((model(x) - y).square().mean() + 0.5 * w * sum(p.square().sum() for p in model.parameters()))


@pytest.mark.parametrize("w", [1e-3, 0.1])
@pytest.mark.parametrize("loss", ["mse", "cross_entropy"])
def test_small_changes_change_little(w, loss):
    """Steps go as with constant weights: the data are told to be the same, and λ, momentum and uphill moves follow."""
    model, x, y = sine()
    if loss == "cross_entropy":
        model, y = mlp(1, 10, 2), (y[:, 0] > 0).long()
    twin = copy.deepcopy(model)
    one, other = (mq.LM(m, loss, weight_decay=w) for m in (model, twin))
    for k in range(12):
        weigh(other, w * (1 + 1e-6 * (k % 3)))
        a, b = one.step(x, y), other.step(x, y)
        assert one._state.same_data.repeats == other._state.same_data.repeats == k
        assert (a.rule, a.lam) == (b.rule, pytest.approx(b.lam))
        assert b.new_loss == pytest.approx(a.new_loss, rel=1e-3)
    assert error(theta(model), theta(twin)) < 1e-2


@pytest.mark.parametrize("towards", [None, "start"])
def test_the_levels_are_those_of_the_new_weights(towards):
    """By hand, where the model is."""
    model, x, y = sine()
    opt = mq.LM(model, "mse", weight_decay=mq.WeightDecay(0.1, towards=towards))
    start = theta(model)

    def penalty(w: float, there: Tensor) -> float:
        return float(0.5 * w * (there - (start if towards else 0)).square().sum())

    for _ in range(6):
        opt.step(x, y)
    data = opt._state.same_data.expected - opt._state.decay
    outliers = replace(opt._state.outliers, height=2.0)
    before = opt._state = replace(opt._state, best=4.5, recent=Recent(7.0), outliers=outliers)

    weigh(opt, 0.02)
    level = Level(1.0, 0.0, 0.0, float(len(x)), penalty(0.02, theta(model)))
    found = reweighted(before, level)
    assert found.same_data.expected == pytest.approx(data + penalty(0.02, theta(model)), rel=1e-12)
    assert found.recent.late - found.best == pytest.approx(2.5)
    step = opt.step(x, y)
    assert opt._state.same_data.repeats == before.same_data.repeats + 1
    assert step.loss == pytest.approx(found.same_data.expected, rel=1e-9)
    assert opt._state.decay == pytest.approx(penalty(0.02, theta(model)), rel=1e-12)


def test_a_state_of_an_earlier_version_goes_on():
    """It does not tell what weight decay had of its loss: the same weights are assumed."""
    model, x, y = sine()
    opt = mq.LM(model, "mse", weight_decay=0.1)
    for _ in range(4):
        opt.step(x, y)
    opt._state = replace(opt._state, decay=None)
    opt.step(x, y)
    assert opt._state.same_data.repeats == 4


def test_the_loss_that_is_expected_is_that_by_hand():
    model, x, y = sine()
    opt = mq.LM(model, "mse", weight_decay=0.3)
    for k in range(8):
        weigh(opt, 0.3 * 10.0 ** (-k % 3))
        want = objective(model, x, y, 0.3 * 10.0 ** (-k % 3))
        assert opt.step(x, y).loss == pytest.approx(want, rel=1e-12)
        assert opt._state.same_data.repeats == k


def test_groups_have_weights_of_their_own():
    model, x, y = sine()
    halves = list(model.parameters())[:2], list(model.parameters())[2:]
    opt = mq.LM(model, "mse", params=[{"params": some, "weight_decay": 0.1} for some in halves])
    for k in range(6):
        opt.param_groups[0]["weight_decay"], opt.param_groups[1]["weight_decay"] = 0.1 * 2**k, 0.1 / 3**k
        opt.step(x, y)
        assert opt._state.same_data.repeats == k


def test_from_none_to_some_and_back():
    model, x, y = sine()
    opt = mq.LM(model, "mse")
    for k in range(6):
        weigh(opt, 0.1 * (k % 2))
        opt.step(x, y)
        assert opt._state.same_data.repeats == k


def test_other_data_are_still_told():
    model, x, y = sine()
    opt = mq.LM(model, "mse", weight_decay=0.1)
    for k in range(5):
        weigh(opt, 0.1 / (k + 1))
        opt.step(x, y)
    weigh(opt, 0.05)
    opt.step(x, y + 0.01)
    assert opt._state.same_data.repeats == 0


@pytest.mark.parametrize("w", [1e-3, 10.0])
def test_a_corrupt_batch_stands_out_as_much_if_there_is_no_bound(w):
    """What is doubted of such a loss are differences of losses, which weight decay leaves as they are."""
    truth = torch.tensor([[3.0], [-2.0], [1.0], [2.0]])

    def corrupt(w: float) -> mq.Step:
        torch.manual_seed(0)
        model = nn.Linear(4, 1)
        opt = mq.LM(model, lambda z, y: (z - y).square().mean() - 3.0, weight_decay=0.1)
        for _ in range(20):
            x = torch.randn(16, 4)
            opt.step(x, x @ truth + torch.randn(16, 1))
        weigh(opt, w)
        return opt.step(x, x @ truth + 1e3)

    usual, step = corrupt(0.1), corrupt(w)
    assert "times those of late" in step.note
    assert step.lam == pytest.approx(usual.lam, rel=1e-6)  # which is multiplied by the doubt


@pytest.mark.parametrize("w", [0.03, 0.0])
def test_it_converges_to_the_new_minimum(w):
    """From where a run with other weights has converged, and as one that had the new weights all along."""
    torch.manual_seed(1)
    x, y = torch.randn(30, 3), torch.randn(30, 2)
    model, twin = nn.Linear(3, 2), nn.Linear(3, 2)
    opt, other = mq.LM(model, "mse", weight_decay=0.5), mq.LM(twin, "mse", weight_decay=w)
    for _ in range(100):
        if opt.step(x, y).converged:
            break
    weigh(opt, w)
    first = opt.step(x, y)
    assert not first.converged
    assert all(any(o.step(x, y).converged for _ in range(100)) for o in (opt, other))
    assert error(theta(model), theta(twin)) < 1e-6


def test_a_saved_run_goes_on_with_other_weights():
    model, x, y = sine()
    opt = mq.LM(model, "mse", weight_decay=0.1)
    for _ in range(5):
        opt.step(x, y)
    file, twin = io.BytesIO(), copy.deepcopy(model)
    torch.save(opt.state_dict(), file)
    file.seek(0)
    other = mq.LM(twin, "mse", weight_decay=0.1)
    other.load_state_dict(torch.load(file, weights_only=True))
    assert other._state.decay == opt._state.decay
    for o in (opt, other):
        weigh(o, 0.01)
    assert opt.step(x, y) == other.step(x, y)
    assert other._state.same_data.repeats == 5
    assert torch.equal(theta(model), theta(twin))


def test_recorded_steps(monkeypatch):
    """The same as without a recording; the first step with other weights is none that is replayed."""
    model, x, y = sine()
    twin, recorder = copy.deepcopy(model), Repeated(model)
    parts = {"curvature": mq.Dense(), "weight_decay": 0.1}

    def run(m: nn.Module, capture: bool) -> list[mq.Step]:
        opt, steps = mq.LM(m, "mse", capture=capture, **parts), []
        for k in range(30):
            weigh(opt, 0.1 if k % 10 < 7 else 0.05)
            steps.append(opt.step(x, y))
            assert opt._state.same_data.repeats == k
        return steps

    with monkeypatch.context() as patch:
        patch.setitem(RECORDERS, "cpu", recorder)
        found = run(model, True)
    for a, b in zip(found, run(twin, False), strict=True):
        assert (a.rule, a.new_loss, a.lam) == (b.rule, pytest.approx(b.new_loss, rel=1e-7), pytest.approx(b.lam))
    assert error(theta(model), theta(twin)) < 1e-6
    assert recorder.replays > 4


def test_weights_by_element_may_change_too():
    """Also in place, and in a run that goes on from a saved state."""
    model, x, y = sine()
    model = mlp(2, 10, 1)
    x = torch.cat((x, torch.randn_like(x)), 1)
    column = torch.tensor([[0.1, 0.2]])
    groups = [
        {"params": [model[0].weight], "weight_decay": column},
        {"params": [model[0].bias, *model[2].parameters()], "weight_decay": 0.1},
    ]
    opt = mq.LM(model, "mse", params=groups)
    for k in range(6):
        column[0, 1] *= 1 + k % 2
        opt.step(x, y)
        assert opt._state.same_data.repeats == k
    file, twin = io.BytesIO(), copy.deepcopy(model)
    torch.save(opt.state_dict(), file)
    file.seek(0)
    parameters = list(twin.parameters())
    other = mq.LM(twin, "mse", params=[{"params": parameters[:1], "weight_decay": 0.1}, {"params": parameters[1:]}])
    other.load_state_dict(torch.load(file, weights_only=True))
    for o in (opt, other):
        o.param_groups[0]["weight_decay"] = torch.tensor([[0.3, 0.0]])
    assert opt.step(x, y) == other.step(x, y)
    assert other._state.same_data.repeats == 6
    assert torch.equal(theta(model), theta(twin))
