"""Models: parameters used more than once, attention and recurrence, forwards that do more than call layers."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations

from support.cases.problem import (
    Problem,
    case,
    classes,
    mlp,
    sample_weights,
)

# ---- parameters used more than once, or not by their own module


@case
def called_twice() -> Problem:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.head = nn.Linear(3, 3), nn.Linear(3, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.inner(self.inner(x).tanh()))

    return Problem(Twice(), "mse", torch.randn(4, 3), torch.randn(4, 2))


@case
def tied_linears() -> Problem:
    model = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 2))
    model[2].weight = model[0].weight
    return Problem(model, "mse", torch.randn(4, 3), torch.randn(4, 2))


@case
def weight_used_transposed() -> Problem:
    """An auto-encoder whose decoder borrows the encoder's weight, outside the encoder's forward."""

    class AutoEncoder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.encoder, self.shift = nn.Linear(4, 2), nn.Parameter(torch.randn(4))

        def forward(self, x: Tensor) -> Tensor:
            return F.linear(self.encoder(x).tanh(), self.encoder.weight.T, self.shift)

    x = torch.randn(4, 4)
    return Problem(AutoEncoder(), "mse", x, x)


@case
def unused_parameter() -> Problem:
    class Spare(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used, self.spare, self.loose = nn.Linear(3, 2), nn.Linear(3, 2), nn.Parameter(torch.randn(2))

        def forward(self, x: Tensor) -> Tensor:
            return self.used(x).tanh()

    return Problem(Spare(), "mse", torch.randn(4, 3), torch.randn(4, 2))


@case
def weight_norm() -> Problem:
    model = nn.Sequential(parametrizations.weight_norm(nn.Linear(3, 4)), nn.Tanh(), nn.Linear(4, 2))
    return Problem(model, "mse", torch.randn(4, 3), torch.randn(4, 2))


@case
def spectral_norm() -> Problem:
    model = nn.Sequential(parametrizations.spectral_norm(nn.Linear(3, 4)), nn.Tanh(), nn.Linear(4, 2))
    return Problem(model.eval(), "mse", torch.randn(4, 3), torch.randn(4, 2))


@case
def orthogonal() -> Problem:
    model = nn.Sequential(parametrizations.orthogonal(nn.Linear(3, 3)), nn.Tanh(), nn.Linear(3, 2))
    return Problem(model, "mse", torch.randn(4, 3), torch.randn(4, 2))


@case
def custom_scale() -> Problem:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear, self.scale = nn.Linear(3, 2), nn.Parameter(torch.randn(2))
            self.gain = nn.Parameter(torch.randn(()))

        def forward(self, x: Tensor) -> Tensor:
            return self.scale * self.linear(x).tanh() + self.gain**2

    return Problem(Scaled(), "mse", torch.randn(4, 3), torch.randn(4, 2))


@case
def custom_polynomial() -> Problem:
    class Polynomial(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.coefficients = nn.Parameter(torch.randn(4))

        def forward(self, x: Tensor) -> Tensor:
            return torch.stack([x**k for k in range(4)], dim=-1) @ self.coefficients.sin()

    return Problem(Polynomial(), "mse", torch.randn(6), torch.randn(6))


@case
def frozen_parameters() -> Problem:
    model = mlp(3, 4, 4, 2)
    model[0].requires_grad_(False)
    model[2].bias.requires_grad_(False)
    return Problem(model, "mse", torch.randn(4, 3), torch.randn(4, 2))


@case
def chosen_parameters() -> Problem:
    model = mlp(3, 4, 4, 2)
    return Problem(model, "mse", torch.randn(4, 3), torch.randn(4, 2), params=[model[0].weight, *model[4].parameters()])


# ---- attention and recurrence


@case
def multihead_attention() -> Problem:
    class Attend(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention, self.head = nn.MultiheadAttention(4, 2, batch_first=True), nn.Linear(4, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.attention(x, x, x, need_weights=False)[0].mean(1))

    return Problem(Attend(), "mse", torch.randn(3, 3, 4), torch.randn(3, 2))


@case
def transformer_encoder_layer() -> Problem:
    layer = nn.TransformerEncoderLayer(4, 2, dim_feedforward=5, dropout=0.0, batch_first=True)
    return Problem(layer, "mse", torch.randn(2, 3, 4), torch.randn(2, 3, 4))


@case
def transformer_masked() -> Problem:
    """Two inputs by keyword, one of them a mask; the attention frozen."""
    layer = nn.TransformerEncoderLayer(4, 1, dim_feedforward=4, dropout=0.0, batch_first=True, norm_first=True)
    layer.self_attn.requires_grad_(False)
    mask = torch.tensor([[False, False, True], [False, True, True]])
    x = {"src": torch.randn(2, 3, 4), "src_key_padding_mask": mask}
    return Problem(layer, "mse", x, torch.randn(2, 3, 4), sample_weights(2))


class Recurrent(nn.Module):
    def __init__(self, cell: nn.Module, out: int) -> None:
        super().__init__()
        self.cell, self.head = cell, nn.Linear(cell.hidden_size, out)

    def forward(self, x: Tensor) -> Tensor:  # (N, T, F)
        h = self.cell(x)[0] if self.cell.batch_first else self.cell(x.transpose(0, 1))[0].transpose(0, 1)
        return self.head(h[:, -1])


@case
def lstm() -> Problem:
    return Problem(Recurrent(nn.LSTM(2, 3, batch_first=True), 3), "cross_entropy", torch.randn(4, 3, 2), classes(3, 4))


@case
def gru_time_major() -> Problem:
    return Problem(Recurrent(nn.GRU(2, 3), 2), "mse", torch.randn(4, 3, 2), torch.randn(4, 2))


# ---- forwards that do more than call layers


@case
def control_flow() -> Problem:
    class Branch(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.plus, self.minus, self.head = nn.Linear(3, 3), nn.Linear(3, 3), nn.Linear(3, 2)

        def forward(self, x: Tensor) -> Tensor:
            return torch.stack([self.head((self.plus(s) if s.sum() > 0 else self.minus(s)).tanh()) for s in x])

    return Problem(Branch(), "mse", torch.randn(5, 3), torch.randn(5, 2))


@case
def routed_experts() -> Problem:
    """Each sample goes to one of two experts, who see as many samples as they get: at first all, then some."""

    class Experts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.plus, self.minus, self.head = nn.Linear(3, 3), nn.Linear(3, 3), nn.Linear(3, 2)

        def forward(self, x: Tensor) -> Tensor:
            h, plus = torch.zeros_like(x), x[:, 0] > 0
            h[plus], h[~plus] = self.plus(x[plus]), self.minus(x[~plus])
            return self.head(h.tanh())

    x = torch.randn(6, 3)
    x[:, 0] = torch.tensor([1.0, 2.0, -1.0, 1.0, -1.0, -2.0])
    return Problem(Experts(), "mse", x, torch.randn(6, 2))


@case
def sorted_samples() -> Problem:
    """The layer sees the samples sorted, as packed sequences are: the first two are in order, the others are not."""

    class Sorted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.head = nn.Linear(3, 3), nn.Linear(3, 2)

        def forward(self, x: Tensor) -> Tensor:
            order = x[:, 0].argsort()
            return self.head(self.inner(x[order]).tanh()[order.argsort()])

    x = torch.randn(6, 3)
    x[:, 0] = torch.tensor([1.0, 2.0, 4.0, 3.0, 6.0, 5.0])
    return Problem(Sorted(), "mse", x, torch.randn(6, 2))


class Poisson1D(nn.Module):
    """Residual of u'' = −sin x, with u a network: the forward differentiates itself."""

    def __init__(self) -> None:
        super().__init__()
        self.u = nn.Sequential(nn.Linear(1, 5), nn.Tanh(), nn.Linear(5, 1))

    def forward(self, x: Tensor) -> Tensor:  # (N, 1)
        with torch.enable_grad():
            x = x.detach().requires_grad_(True)
            (u_x,) = torch.autograd.grad(self.u(x).sum(), x, create_graph=True)
            (u_xx,) = torch.autograd.grad(u_x.sum(), x, create_graph=True)
        return u_xx + x.sin()


class Heat(nn.Module):
    """Residual and start value of u_t = κ·u_xx with κ unknown, stacked: (N, 2)."""

    def __init__(self) -> None:
        super().__init__()
        self.u = nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1))
        self.kappa = nn.Parameter(torch.tensor(0.3))

    def forward(self, t: Tensor, x: Tensor) -> Tensor:
        with torch.enable_grad():
            t, x = t.detach().requires_grad_(True), x.detach().requires_grad_(True)
            u = self.u(torch.stack([t, x], dim=-1)).squeeze(-1)
            u_t, u_x = torch.autograd.grad(u.sum(), (t, x), create_graph=True)
            (u_xx,) = torch.autograd.grad(u_x.sum(), x, create_graph=True)
            start = self.u(torch.stack([torch.zeros_like(x), x], dim=-1)).squeeze(-1) - x.sin()
        return torch.stack([u_t - self.kappa * u_xx, start], dim=-1)


@case
def pinn() -> Problem:
    return Problem(Poisson1D(), "residual", torch.linspace(-math.pi, math.pi, 6)[:, None], None)


@case
def pinn_two_inputs() -> Problem:
    return Problem(Heat(), "residual", (torch.rand(4), torch.randn(4)), None, sample_weights(4))


class TwoTowers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.left, self.right, self.head = nn.Linear(2, 3), nn.Linear(3, 3), nn.Linear(3, 2)

    def forward(self, left: Tensor, right: Tensor) -> Tensor:
        return self.head(self.left(left).tanh() * self.right(right))


@case
def tuple_inputs() -> Problem:
    return Problem(TwoTowers(), "mse", (torch.randn(4, 2), torch.randn(4, 3)), torch.randn(4, 2))


@case
def dict_inputs() -> Problem:
    x = {"right": torch.randn(4, 3), "left": torch.randn(4, 2)}
    return Problem(TwoTowers(), "cross_entropy", x, classes(2, 4), sample_weights(4))
