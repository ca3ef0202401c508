"""Models: parameters used more than once, attention and recurrence, forwards that do more than call layers."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations

from support.cases.problem import CASES, Fn, Problem, classification, mlp, regression, sample_weights

# ---- parameters used more than once, or not by their own module


def tied_linears() -> Problem:
    model = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 2))
    model[2].weight = model[0].weight
    return regression(model, (4, 3), 4, 2)


def weight_used_transposed() -> Problem:
    """An auto-encoder whose decoder borrows the encoder's weight, outside the encoder's forward."""

    def decoded(x: Tensor, encoder: nn.Linear, shift: Tensor) -> Tensor:
        return F.linear(encoder(x).tanh(), encoder.weight.T, shift)

    x = torch.randn(4, 4)
    return Problem(Fn(decoded, nn.Linear(4, 2), nn.Parameter(torch.randn(4))), "mse", x, x)


def unused_parameter() -> Problem:
    used, spare, loose = nn.Linear(3, 2), nn.Linear(3, 2), nn.Parameter(torch.randn(2))
    return regression(Fn(lambda x, used, spare, loose: used(x).tanh(), used, spare, loose), (4, 3), 4, 2)


def normed(norm: Callable[[nn.Module], nn.Module], width: int) -> nn.Module:
    return nn.Sequential(norm(nn.Linear(3, width)), nn.Tanh(), nn.Linear(width, 2))


def frozen_parameters() -> Problem:
    model = mlp(3, 4, 4, 2)
    model[0].requires_grad_(False)
    model[2].bias.requires_grad_(False)
    return regression(model, (4, 3), 4, 2)


def chosen_parameters() -> Problem:
    model = mlp(3, 4, 4, 2)
    return regression(model, (4, 3), 4, 2)._replace(params=[model[0].weight, *model[4].parameters()])


PARAMETERS: dict[str, Callable[[], Problem]] = {
    "called_twice": lambda: regression(
        Fn(lambda x, inner, head: head(inner(inner(x).tanh())), nn.Linear(3, 3), nn.Linear(3, 2)), (4, 3), 4, 2
    ),
    "tied_linears": tied_linears,
    "weight_used_transposed": weight_used_transposed,
    "unused_parameter": unused_parameter,
    "weight_norm": lambda: regression(normed(parametrizations.weight_norm, 4), (4, 3), 4, 2),
    "spectral_norm": lambda: regression(normed(parametrizations.spectral_norm, 4).eval(), (4, 3), 4, 2),
    "orthogonal": lambda: regression(normed(parametrizations.orthogonal, 3), (4, 3), 4, 2),
    "custom_scale": lambda: regression(
        Fn(
            lambda x, linear, scale, gain: scale * linear(x).tanh() + gain**2,
            nn.Linear(3, 2), nn.Parameter(torch.randn(2)), nn.Parameter(torch.randn(())),
        ),
        (4, 3), 4, 2,
    ),
    "custom_polynomial": lambda: regression(
        Fn(
            lambda x, coefficients: torch.stack([x**k for k in range(4)], dim=-1) @ coefficients.sin(),
            nn.Parameter(torch.randn(4)),
        ),
        (6,), 6,
    ),
    "frozen_parameters": frozen_parameters,
    "chosen_parameters": chosen_parameters,
}  # fmt: skip


# ---- attention and recurrence


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


def attend(x: Tensor, attention: nn.Module, head: nn.Module) -> Tensor:
    return head(attention(x, x, x, need_weights=False)[0].mean(1))


SEQUENCES: dict[str, Callable[[], Problem]] = {
    "multihead_attention": lambda: regression(
        Fn(attend, nn.MultiheadAttention(4, 2, batch_first=True), nn.Linear(4, 2)), (3, 3, 4), 3, 2
    ),
    "transformer_encoder_layer": lambda: regression(
        nn.TransformerEncoderLayer(4, 2, dim_feedforward=5, dropout=0.0, batch_first=True), (2, 3, 4), 2, 3, 4
    ),
    "transformer_masked": transformer_masked,
    "lstm": lambda: classification(Recurrent(nn.LSTM(2, 3, batch_first=True), 3), (4, 3, 2), 3, 4),
    "gru_time_major": lambda: regression(Recurrent(nn.GRU(2, 3), 2), (4, 3, 2), 4, 2),
}


# ---- forwards that do more than call layers


def branching(x: Tensor, plus: nn.Module, minus: nn.Module, head: nn.Module) -> Tensor:
    return torch.stack([head((plus(s) if s.sum() > 0 else minus(s)).tanh()) for s in x])


def routed(x: Tensor, plus: nn.Module, minus: nn.Module, head: nn.Module) -> Tensor:
    """Each sample goes to one of two experts, who see as many samples as they get: at first all, then some."""
    h, first = torch.zeros_like(x), x[:, 0] > 0
    h[first], h[~first] = plus(x[first]), minus(x[~first])
    return head(h.tanh())


def sorted_by(x: Tensor, inner: nn.Module, head: nn.Module) -> Tensor:
    """The layer sees the samples sorted, as packed sequences are: the first two are in order, the others are not."""
    order = x[:, 0].argsort()
    return head(inner(x[order]).tanh()[order.argsort()])


def led_by(first: list[float]) -> Tensor:
    x = torch.randn(len(first), 3)
    x[:, 0] = torch.tensor(first)
    return x


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


def heat(t: Tensor, x: Tensor, u: nn.Module, kappa: Tensor) -> Tensor:
    """Residual and start value of u_t = κ·u_xx with κ unknown, stacked: (N, 2)."""
    with torch.enable_grad():
        t, x = t.detach().requires_grad_(True), x.detach().requires_grad_(True)
        at = u(torch.stack([t, x], dim=-1)).squeeze(-1)
        u_t, u_x = torch.autograd.grad(at.sum(), (t, x), create_graph=True)
        (u_xx,) = torch.autograd.grad(u_x.sum(), x, create_graph=True)
        start = u(torch.stack([torch.zeros_like(x), x], dim=-1)).squeeze(-1) - x.sin()
    return torch.stack([u_t - kappa * u_xx, start], dim=-1)


def pinn_two_inputs() -> Problem:
    u = nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1))
    model, x = Fn(heat, u, nn.Parameter(torch.tensor(0.3))), (torch.rand(4), torch.randn(4))
    return Problem(model, "residual", x, None, sample_weights(4))


class TwoTowers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.left, self.right, self.head = nn.Linear(2, 3), nn.Linear(3, 3), nn.Linear(3, 2)

    def forward(self, left: Tensor, right: Tensor) -> Tensor:
        return self.head(self.left(left).tanh() * self.right(right))


def dict_inputs() -> Problem:
    x = {"right": torch.randn(4, 3), "left": torch.randn(4, 2)}
    return Problem(TwoTowers(), "cross_entropy", x, torch.randint(2, (4,)), sample_weights(4))


FORWARDS: dict[str, Callable[[], Problem]] = {
    "control_flow": lambda: regression(Fn(branching, nn.Linear(3, 3), nn.Linear(3, 3), nn.Linear(3, 2)), (5, 3), 5, 2),
    "routed_experts": lambda: regression(
        Fn(routed, nn.Linear(3, 3), nn.Linear(3, 3), nn.Linear(3, 2)), led_by([1.0, 2.0, -1.0, 1.0, -1.0, -2.0]), 6, 2
    ),
    "sorted_samples": lambda: regression(
        Fn(sorted_by, nn.Linear(3, 3), nn.Linear(3, 2)), led_by([1.0, 2.0, 4.0, 3.0, 6.0, 5.0]), 6, 2
    ),
    "pinn": lambda: Problem(Poisson1D(), "residual", torch.linspace(-math.pi, math.pi, 6)[:, None], None),
    "pinn_two_inputs": pinn_two_inputs,
    "tuple_inputs": lambda: regression(TwoTowers(), (torch.randn(4, 2), torch.randn(4, 3)), 4, 2),
    "dict_inputs": dict_inputs,
}
for cases in (PARAMETERS, SEQUENCES, FORWARDS):
    CASES.update(cases)
