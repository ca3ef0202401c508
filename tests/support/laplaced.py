"""The Laplace approximation by plain dense float64 matrices, and models with their data to take it of."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

import marquardt as mq
from support.reference import jacobian, objective, output_hessian, trainable


@contextmanager
def quiet() -> Iterator[None]:
    """θ that is no minimum, on purpose."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "the parameters are no minimum")
        yield


class Plain(NamedTuple):
    """−log p(y|θ)p(θ) = c·Σℓ + ½Σα(θ − θ₀)² + …, H its Gauss-Newton matrix."""

    theta: Tensor  # (n,)
    J: Tensor  # (Z, n)
    H: Tensor  # (n, n)
    alpha: Tensor  # (n,)
    nll: float  # −log p(y|θ), with its constant

    @property
    def covariance(self) -> Tensor:
        return torch.linalg.inv(self.H)

    @property
    def gamma(self) -> Tensor:
        """(n,)"""
        return 1 - self.alpha * self.covariance.diagonal()

    @property
    def log_evidence(self) -> float:
        prior = (self.alpha.log() - self.alpha * self.theta.square()).sum()
        return float(-self.nll + 0.5 * prior - 0.5 * torch.linalg.slogdet(self.H)[1])

    def variance(self, model: nn.Module, x: Tensor) -> Tensor:
        """JH⁻¹Jᵀ of other inputs, by sample: (N, c, c)"""
        J = jacobian(model, trainable(model), x)[0]
        J = J.view(len(x), -1, J.shape[1])
        return J @ self.covariance @ J.mT


def plain(model: nn.Module, loss: Any, x: Any, y: Any, alpha: Tensor, c: float, constant: float, weight=None) -> Plain:
    """`loss` is a torch.nn loss with reduction="sum"."""
    params = trainable(model)
    J, z = jacobian(model, params, x)
    H = c * J.T @ output_hessian(loss, z, y, weight) @ J + alpha.diag()
    theta = torch.cat([p.detach().flatten() for p in params.values()])
    return Plain(theta, J, H, alpha, c * float(objective(loss, z, y, weight)) + constant)


def plain_regression(model: nn.Module, x: Tensor, y: Tensor, alpha: float, beta: float, weight=None) -> Plain:
    count = y.numel() if weight is None else float(weight.sum()) * y[0].numel()
    n = sum(p.numel() for p in model.parameters())
    constant = 0.5 * count * math.log(2 * math.pi / beta)
    full = torch.full((n,), alpha, dtype=torch.float64)
    return plain(model, nn.MSELoss(reduction="sum"), x, y, full, 0.5 * beta, constant, weight)


def network(*sizes: int, bias: bool = True) -> nn.Sequential:
    layers: list[nn.Module] = []
    for a, b in pairwise(sizes):
        layers += [nn.Linear(a, b, bias=bias), nn.Tanh()]
    return nn.Sequential(*layers[:-1]).double()


def fitted(model: nn.Module, loss: Any, x: Any, y: Any, weight_decay: float, weight=None, steps: int = 60) -> nn.Module:
    opt = mq.LM(model, loss, weight_decay=weight_decay)
    for _ in range(steps):
        opt.step(x, y, weight)
    return model


def regression(
    N: int = 40, outputs: int = 1, hidden: int = 5, weight_decay: float = 1e-2, bias: bool = True, quiet: float = 0.1
):
    """A fitted network, its inputs and its targets; `quiet` is the noise of the first output."""
    x = 2 * torch.rand(N, 2, dtype=torch.float64) - 1
    noise = torch.tensor([quiet, 0.4, 0.2][:outputs], dtype=torch.float64)
    y = torch.stack([(2 * x[:, 0] + k).sin() + x[:, 1] for k in range(outputs)], 1) + noise * torch.randn(N, outputs)
    return fitted(network(2, hidden, outputs, bias=bias), "mse", x, y, weight_decay), x, y


def classification(N: int = 60, classes: int = 3, hidden: int = 4, weight_decay: float = 0.02, bias: bool = True):
    x = torch.randn(N, 2, dtype=torch.float64)
    y = (x @ torch.randn(2, classes, dtype=torch.float64) + 0.5 * torch.randn(N, classes)).argmax(1)
    return fitted(network(2, hidden, classes, bias=bias), "cross_entropy", x, y, weight_decay), x, y
