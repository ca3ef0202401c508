"""Losses at trial points: the same random numbers, one by one or all at once."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import marquardt as mq
from marquardt.jacobian.linearization import Linearization, Trials
from marquardt.jacobian.objective import Objective
from marquardt.jacobian.passes import Facts
from marquardt.losses import resolve
from marquardt.model.batch import Batch
from support import reference
from support.cases import Recurrent, mlp, sample_weights
from support.modules import SWAPPED, Slope, noisy
from support.steps import CUDA, EVERY_CURVATURE, lm, problem, theta

RANDOM: dict[str, Callable[[], nn.Module]] = {
    "dropout": lambda: nn.Sequential(nn.Linear(2, 6), nn.Dropout(0.4), nn.Linear(6, 3)),
    "input dropout": lambda: nn.Sequential(nn.Dropout(0.4), nn.Linear(2, 6), nn.Tanh(), nn.Linear(6, 3)),
    "two dropouts": lambda: nn.Sequential(
        nn.Linear(2, 6), nn.Dropout(0.2), nn.Linear(6, 5), nn.Dropout(0.5), nn.Tanh(), nn.Linear(5, 3)
    ),
    "feature dropout": lambda: nn.Sequential(
        nn.Unflatten(1, (2, 1, 1)), nn.Conv2d(2, 6, 1), nn.Dropout2d(0.4), nn.Conv2d(6, 3, 1), nn.Flatten(1)
    ),
    "rrelu": lambda: nn.Sequential(nn.Linear(2, 6), nn.RReLU(), nn.Linear(6, 3)),
    "rrelu in place": lambda: nn.Sequential(nn.Linear(2, 6), nn.RReLU(0.1, 0.9, inplace=True), nn.Linear(6, 3)),
    "both": noisy,
}
LSTM: dict[str, Callable[[], nn.Module]] = {
    "mlp": lambda: mlp(2, 4, 3),
    "lstm": lambda: nn.Sequential(nn.Unflatten(1, (2, 1)), Recurrent(nn.LSTM(1, 4, batch_first=True), 3)),
    "lstm with dropout": lambda: nn.Sequential(
        nn.Unflatten(1, (2, 1)), Recurrent(nn.LSTM(1, 4, 2, batch_first=True, dropout=0.4), 3)
    ),
}


def linearised(build: Callable[[], nn.Module], chunk: int | None) -> tuple[mq.Linearization, Tensor, Tensor]:
    model, x, y = build(), torch.randn(7, 2), torch.randn(7, 3)
    lin = mq.linearize(model, "mse", x, y, sample_weights(7), chunk=chunk)
    C = mq.Dense(chunk).represent(lin)
    return lin, theta(model), -C.newton(torch.tensor(1e-2))


@pytest.mark.usefixtures("double")
@pytest.mark.parametrize("name", [*RANDOM, *LSTM])
@pytest.mark.parametrize("chunk", [None, 3])
def test_trial_losses_see_the_same_random_numbers(name, chunk):
    lin, at, d = linearised({**RANDOM, **LSTM}[name], chunk)
    for _ in range(2):
        assert Trials(lin).loss(d, 0.0).item() == pytest.approx(lin.loss, rel=1e-12)
        assert torch.equal(theta(lin.objective.model), at)
    f = Trials(lin).loss(d, 1.0)
    assert f.dtype == torch.float64
    assert torch.equal(theta(lin.objective.model), at + d)
    Trials(lin).loss(d, -1.0)
    assert torch.equal(Trials(lin).loss(d, 1.0), f)
    assert torch.equal(Trials(lin).loss(d.clone(), 1.0), f)
    assert Trials(lin).loss(2 * d, 0.5).item() == pytest.approx(f.item(), rel=1e-12)


@pytest.mark.usefixtures("double")
@pytest.mark.parametrize("name", [*RANDOM, *LSTM])
@pytest.mark.parametrize("chunk", [None, 3])
def test_all_trials_at_once(name, chunk):
    """The losses of a grid in one batched pass are those of one pass after the other."""
    lin, _, d = linearised({**RANDOM, **LSTM}[name], chunk)
    rates = [0.0, 1e-6, 0.25, 1.0, 4.0]
    together = Trials(lin).losses(d, rates)
    assert all(isinstance(f, float) for f in together)
    assert together == pytest.approx([Trials(lin).loss(d, lr).item() for lr in rates], rel=1e-10)
    assert together[0] == pytest.approx(lin.loss, rel=1e-12)


@pytest.mark.usefixtures("double")
def test_batched_trials_keep_the_model():
    lin, at, d = linearised(lambda: mlp(2, 4, 3), None)
    Trials(lin).loss(d, 1.0)
    first = Trials(lin).losses(d, [0.5, 1.0])  # compared with a plain pass, which moves the model
    assert list(lin.known.batched_trials.values()) == [True]  # a plain network needs no loop
    lin.position.move()
    assert torch.equal(theta(lin.objective.model), at)
    assert Trials(lin).losses(d, [0.5, 1.0]) == first
    assert torch.equal(theta(lin.objective.model), at)


@pytest.mark.usefixtures("double")
@pytest.mark.parametrize("recipe", ["explicit", "search"])
@EVERY_CURVATURE
def test_trial_losses_of_a_model_that_differentiates_itself(recipe, curvature):
    """They need gradients where other models are evaluated without."""
    model, x = Slope(), torch.randn(6, 2)
    y = torch.cat([x.cos(), x.sin().sum(1, keepdim=True)], 1)
    opt = lm(model, curvature=curvature, line_search=mq.Grid(1e-6, 2, 0.25) if recipe == "search" else None)
    for lr in (1.0, 100.0, 1.0):
        opt.param_groups[0]["lr"] = lr
        step = opt.step(x, y)
        found = reference.objective("mse", model(x), y, None).item()
        assert step.new_loss == pytest.approx(found, rel=1e-9)
        assert step.rule == {"explicit": "rejected", "search": "search"}[recipe] or lr == 1.0


@pytest.mark.usefixtures("double")
@CUDA
@pytest.mark.parametrize("name", [*RANDOM, "mlp", "lstm"])
@pytest.mark.parametrize("chunk", [None, 3])
def test_cuda_trials_see_the_same_random_numbers(name, chunk):
    model, x, y = {**RANDOM, **LSTM}[name]().cuda(), torch.randn(7, 2).cuda(), torch.randn(7, 3).cuda()
    start = torch.cuda.get_rng_state()
    for part in x.split(chunk or 7):
        model(part)
    after = torch.cuda.get_rng_state()
    torch.cuda.set_rng_state(start)
    lin = mq.linearize(model, "mse", x, y, chunk=chunk)
    d = -mq.Dense(chunk).represent(lin).newton(torch.tensor(1e-2).cuda())
    assert torch.equal(torch.cuda.get_rng_state(), after)
    rates = [0.0, 0.25, 1.0, 4.0]
    together = Trials(lin).losses(d, rates)
    assert together == pytest.approx([Trials(lin).loss(d, lr).item() for lr in rates], rel=1e-9)
    assert together[0] == pytest.approx(lin.loss, rel=1e-9)


@pytest.mark.usefixtures("double")
def test_weights_that_functional_call_does_not_see():
    """The batched grid is used only where it agrees with a plain evaluation."""

    class Hidden(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(2, 3)
            self.pair = [self.inner.weight, self.inner.bias]

        def forward(self, x: Tensor) -> Tensor:
            return nn.functional.linear(x, *self.pair).tanh()

    model, x, y = Hidden(), *problem()[1:]
    lin = mq.linearize(model, "mse", x, y)
    d = torch.randn(lin.n)
    lin.totals()
    rates = [0.5, 1.0, 2.0]
    assert Trials(lin).losses(d, rates) == [Trials(lin).loss(d, lr).item() for lr in rates]


@pytest.mark.parametrize(("lower", "upper"), [(1 / 8, 1 / 3), (0.5, 1.5)])
def test_a_trial_at_the_same_weights_has_the_same_loss(lower, upper):
    """RReLU keeps its slopes, also those above 1."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 50), nn.RReLU(lower, upper), nn.Linear(50, 2)).double()
    x, y = torch.randn(10, 3).double(), torch.randn(10, 2).double()
    lin = mq.linearize(model, "mse", x, y)
    f = lin.loss
    d = torch.zeros_like(lin.theta)
    assert float(Trials(lin).loss(d, 1.0)) == pytest.approx(f, rel=1e-12)
    assert Trials(lin).losses(d, [0.5, 1.0]) == pytest.approx([f, f], rel=1e-12)


class Far(nn.Module):
    """Dropout on an input that is not contiguous has other masks in a batched pass; they do not show if the bias is
    large."""

    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(1))
        self.layers = nn.Sequential(SWAPPED, nn.Linear(4, 4), SWAPPED, nn.Dropout())

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x).mean(1) + self.bias


@pytest.mark.usefixtures("double")
@pytest.mark.parametrize(("trains", "samples"), [(True, 6), (False, 6), (True, 1)], ids=["same", "eval", "one sample"])
def test_trial_points_have_the_random_numbers_of_the_linearisation(trains, samples):
    """Also if the way to their losses was proven in eval mode, or on one sample, for which strides do not count."""
    model, known, x, y = Far(), Facts(), torch.randn(6, 5, 4), torch.randn(6, 4)
    rates = [0.0, 0.5, 1.0]
    for mode, N in ((trains, samples), (True, 6)):
        model.train(mode)
        batch = Batch(x[:N], y[:N])
        lin = Linearization(Objective(model, resolve("mse"), list(model.parameters())), [batch], known=known)
        d = torch.zeros_like(lin.theta)
        d[:1] = 1e3  # the bias
        f = lin.loss
        losses = Trials(lin).losses(d, rates)
        assert losses[0] == pytest.approx(f, rel=1e-12)
        assert losses == pytest.approx([float(Trials(lin).loss(d, lr)) for lr in rates], rel=1e-12)
