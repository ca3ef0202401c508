"""A small problem of every kind of curvature: LM with its defaults is below the best value of Adam, in fewer steps."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import marquardt as mq
from marquardt import losses
from support.cases import mlp
from support.reference import error
from support.steps import lm, theta

N = 120


class End(nn.Module):
    """What stands behind a network: a function of its outputs, or thresholds tₖ − m with tₖ increasing."""

    def __init__(self, end: Callable[[Tensor], Tensor] | None = None) -> None:
        super().__init__()
        self.end = end
        if end is None:
            self.steps = nn.Parameter(torch.zeros(3))

    def forward(self, z: Tensor) -> Tensor:
        return F.softplus(self.steps).cumsum(0) - 1 - z if self.end is None else self.end(z)


def curve(x: Tensor) -> Tensor:
    return torch.stack((x.prod(1).sin(), x.square().sum(1).cos()), 1)  # (N, 2)


def noisy(x: Tensor) -> Tensor:
    return curve(x) + 0.1 * (1 + x[:, :1].abs()) * torch.randn(N, 2)


def outliers(x: Tensor) -> Tensor:
    return noisy(x) + 3 * (torch.rand(N, 2) < 0.05)


def levels(x: Tensor) -> Tensor:
    return torch.bucketize(noisy(x)[:, 0].contiguous(), torch.tensor([-0.5, 0.0, 0.5]))


def norm(z: Tensor, y: Tensor) -> Tensor:
    return ((z - y).square().sum(1) + 0.01).sqrt()


def heteroscedastic(z: Tensor, y: Tensor) -> Tensor:
    """A negative log-likelihood of one's own, a scalar that is not bounded below."""
    return (z[:, 2:] + (z[:, :2] - y).square() * (-z[:, 2:]).exp()).mean()


def squares_of_positive(z: Tensor) -> Tensor:
    return torch.cat((z[:, :2], F.softplus(z[:, 2:]) + 0.01), 1)


# The loss, outputs, targets, what stands behind the network, and the least value in 300 steps of Adam with the learning
# rates 0.01, 0.03, 0.1, 0.3 and 1: of the last 18 steps in all of them.
PROBLEMS: dict[str, tuple[object, int, Callable[[Tensor], Tensor], nn.Module | None, float]] = {
    "mse": ("mse", 2, noisy, None, 0.1853),
    "l1": ("l1", 2, outliers, None, 0.46384),
    "huber": ("huber", 2, outliers, None, 0.2124),
    "quantile": (losses.Quantile(0.8, 0.05), 2, noisy, None, 0.10226),
    "student_t": (losses.StudentT(3.0, 0.1), 2, outliers, None, 2.82202),
    "gaussian_nll": ("gaussian_nll", 4, noisy, None, -0.6441),
    "GaussianNLLLoss": (nn.GaussianNLLLoss(), 4, noisy, End(squares_of_positive), -0.67252),
    "ordinal": ("ordinal", 1, levels, End(), 0.66829),
    "a norm": (norm, 2, noisy, None, 0.49031),
    "a likelihood": (heteroscedastic, 4, noisy, None, -1.28728),
}


def made(name: str) -> tuple[losses.Loss, nn.Module, Tensor, Tensor]:
    loss, outputs, targets, end, _ = PROBLEMS[name]
    torch.manual_seed(0)
    x = 1.5 * torch.randn(N, 2)
    y = targets(x)
    layers = [nn.Linear(2, 10), nn.Tanh(), nn.Linear(10, outputs), *([] if end is None else [copy.deepcopy(end).to(x)])]
    return losses.resolve(loss), nn.Sequential(*layers), x, y


@pytest.mark.usefixtures("double")
@pytest.mark.parametrize("name", PROBLEMS)
def test_fewer_steps_than_adam(name):
    """Measured: 14 to 42 steps, against 300 of Adam."""
    loss, model, x, y = made(name)
    opt, goal = mq.LM(model, loss), PROBLEMS[name][-1]
    assert any(opt.step(x, y).new_loss < goal for _ in range(100))


@pytest.mark.usefixtures("double")
@pytest.mark.parametrize(
    ("end", "of_probabilities", "of_logits", "targets"),
    [
        (nn.LogSoftmax(1), nn.NLLLoss(), "cross_entropy", lambda: torch.arange(4) % 3),
        (nn.LogSoftmax(1), nn.KLDivLoss(reduction="batchmean"), "cross_entropy", lambda: torch.randn(4, 3).softmax(1)),
        (nn.Sigmoid(), nn.BCELoss(), "bce", lambda: torch.rand(4, 3).round()),
    ],
    ids=["nll", "kl", "bce"],
)
def test_probabilities_have_the_steps_of_logits(end, of_probabilities, of_logits, targets):
    model, x, y = mlp(2, 4, 3), torch.randn(4, 2), targets()
    ended = nn.Sequential(copy.deepcopy(model), end)
    one, two = lm(ended, of_probabilities), lm(model, of_logits)
    for _ in range(4):
        one.step(x, y)
        two.step(x, y)
    assert error(theta(ended), theta(model)) < 1e-7
