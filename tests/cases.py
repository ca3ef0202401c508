"""Small models × losses × inputs, one of every kind that linearisation has to get right.

Each case is a builder registered under its own name: it runs under a fixed seed in float64 and returns a Problem. At
most 150 parameters and 6 samples, so that the dense reference takes milliseconds.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations


class Problem(NamedTuple):
    model: nn.Module
    loss: Any
    x: Any
    y: Any
    weight: Tensor | None = None
    params: list[nn.Parameter] | None = None


CASES: dict[str, Callable[[], Problem]] = {}


def case(builder: Callable[[], Problem]) -> Callable[[], Problem]:
    CASES[builder.__name__] = builder
    return builder


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def build(name: str, dtype: torch.dtype = torch.float64) -> Problem:
    """The case, the same at every call; the global RNG is left as it was."""
    with torch.random.fork_rng(devices=[]), default_dtype(dtype):
        torch.manual_seed(sum(map(ord, name)))
        problem = CASES[name]()
        with torch.no_grad():  # norms start at weight 1, bias 0: a point where mistakes cancel
            for p in problem.model.parameters():
                p.add_(0.1 * torch.randn_like(p))
    return problem


def classes(c: int, *shape: int) -> Tensor:
    return torch.randint(c, shape)


def counts(high: int, *shape: int) -> Tensor:
    return torch.randint(high, shape).to(torch.get_default_dtype())


def probabilities(c: int, *shape: int) -> Tensor:
    """Soft targets, the classes in dimension 1."""
    return torch.rand(shape[0], c, *shape[1:]).softmax(dim=1)


def sample_weights(N: int) -> Tensor:
    return torch.rand(N) + 0.3


def mlp(*sizes: int) -> nn.Sequential:
    layers: list[nn.Module] = []
    for i, o in pairwise(sizes):
        layers += [nn.Linear(i, o), nn.ELU()]
    return nn.Sequential(*layers[:-1])


def settled(model: nn.Module) -> nn.Module:
    """Eval mode with running statistics that are neither 0 nor 1."""
    for m in model.modules():
        if isinstance(m, nn.modules.batchnorm._BatchNorm):
            m.running_mean.normal_()
            m.running_var.uniform_(0.5, 2)
    return model.eval()


# ---- linear layers


@case
def mlp_elu() -> Problem:
    return Problem(mlp(2, 5, 3), "mse", torch.randn(5, 2), torch.randn(5, 3))


@case
def mlp_flat_output() -> Problem:
    """Outputs (N,), no dimension beside the samples'."""
    model = nn.Sequential(mlp(2, 4, 1), nn.Flatten(0))
    return Problem(model, "mse", torch.randn(5, 2), torch.randn(5))


@case
def mlp_one_sample() -> Problem:
    return Problem(mlp(3, 4, 2), "mse", torch.randn(1, 3), torch.randn(1, 2))


@case
def linear_leading_dims() -> Problem:
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
    return Problem(model, "mse", torch.randn(4, 3, 3), torch.randn(4, 3, 2), sample_weights(4))


@case
def linear_two_leading_dims() -> Problem:
    return Problem(nn.Linear(3, 2), "mse", torch.randn(3, 2, 2, 3), torch.randn(3, 2, 2, 2))


@case
def linear_no_bias() -> Problem:
    model = nn.Sequential(nn.Linear(3, 4, bias=False), nn.SiLU(), nn.Linear(4, 2, bias=False))
    return Problem(model, nn.MSELoss(), torch.randn(5, 3), torch.randn(5, 2))


@case
def flattened_time() -> Problem:
    """The layer sees (N·T, F): its first dimension is not the samples'."""

    class Flattened(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.head = nn.Linear(3, 4), nn.Linear(4, 2)

        def forward(self, x: Tensor) -> Tensor:
            h = self.inner(x.reshape(-1, x.shape[-1])).tanh()
            return self.head(h.reshape(*x.shape[:-1], -1).mean(1))

    return Problem(Flattened(), "mse", torch.randn(4, 3, 3), torch.randn(4, 2))


@case
def time_major() -> Problem:
    """The layer sees (T, N, F) with T = N, so that no shape gives it away."""

    class TimeMajor(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(3, 4), nn.Linear(4, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.second(self.first(x.transpose(0, 1)).tanh()).transpose(0, 1)

    return Problem(TimeMajor(), "mse", torch.randn(4, 4, 3), torch.randn(4, 4, 2))


@case
def bilinear_and_prelu() -> Problem:
    class Pair(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.pair, self.act, self.head = nn.Bilinear(2, 3, 4), nn.PReLU(4), nn.Linear(4, 2)

        def forward(self, left: Tensor, right: Tensor) -> Tensor:
            return self.head(self.act(self.pair(left, right)))

    return Problem(Pair(), "mse", (torch.randn(4, 2), torch.randn(4, 3)), torch.randn(4, 2))


# ---- convolutions


def convolution(layer: nn.Module, *size: int, N: int = 3) -> Problem:
    """The layer, a nonlinearity and a mean over space: a few outputs, each depending on every position."""
    model = nn.Sequential(layer, nn.Tanh(), nn.Flatten(2), Halves())
    x = torch.randn(N, layer.in_channels, *size)
    return Problem(model, "mse", x, torch.randn(N, layer.out_channels, 2))


class Halves(nn.Module):
    def forward(self, h: Tensor) -> Tensor:  # (N, C, L) → (N, C, 2)
        ramp = torch.linspace(-1, 1, h.shape[-1], dtype=h.dtype, device=h.device)
        return torch.stack([h.mean(-1), (h * ramp).mean(-1)], dim=-1)


CONVOLUTIONS: dict[str, Callable[[], Problem]] = {
    "conv1d": lambda: convolution(nn.Conv1d(2, 3, 3), 7),
    "conv1d_strided": lambda: convolution(nn.Conv1d(2, 3, 3, stride=2, padding=2, dilation=2), 9),
    "conv1d_circular": lambda: convolution(nn.Conv1d(2, 3, 3, padding=1, padding_mode="circular"), 6),
    "conv1d_same_even_kernel": lambda: convolution(nn.Conv1d(2, 3, 4, padding="same"), 6),  # pads unequally
    "conv2d": lambda: convolution(nn.Conv2d(2, 3, 3), 5, 4),
    "conv2d_no_bias": lambda: convolution(nn.Conv2d(2, 3, (2, 3), bias=False), 4, 5),
    "conv2d_strided": lambda: convolution(
        nn.Conv2d(2, 3, (3, 2), stride=(2, 1), padding=(1, 2), dilation=(1, 2)), 6, 5
    ),
    "conv2d_grouped": lambda: convolution(nn.Conv2d(4, 6, 3, groups=2, padding=1, stride=2), 5, 5),
    "conv2d_depthwise": lambda: convolution(nn.Conv2d(3, 6, 3, groups=3), 4, 5),
    "conv2d_circular": lambda: convolution(nn.Conv2d(2, 3, 3, padding=(1, 2), padding_mode="circular"), 4, 4),
    "conv2d_reflect": lambda: convolution(nn.Conv2d(2, 3, 3, padding=(2, 1), padding_mode="reflect"), 4, 4),
    "conv2d_replicate": lambda: convolution(nn.Conv2d(2, 3, 3, padding=1, padding_mode="replicate"), 4, 4),
    "conv2d_same": lambda: convolution(nn.Conv2d(2, 3, (3, 2), padding="same", dilation=(2, 1)), 5, 4),
    "conv2d_same_reflect": lambda: convolution(nn.Conv2d(2, 3, (3, 2), padding="same", padding_mode="reflect"), 5, 4),
    "conv3d": lambda: convolution(nn.Conv3d(2, 2, 2), 3, 3, 3),
    "conv3d_strided": lambda: convolution(nn.Conv3d(2, 4, (2, 3, 2), stride=(1, 2, 1), padding=1, groups=2), 3, 4, 2),
    "conv3d_circular": lambda: convolution(nn.Conv3d(1, 2, 2, padding=1, padding_mode="circular"), 2, 3, 2),
    "conv_transpose2d": lambda: convolution(nn.ConvTranspose2d(2, 3, 3, stride=2), 3, 2),
}
CASES.update(CONVOLUTIONS)


@case
def conv_unbatched_per_sample() -> Problem:
    """The layer is called once per sample with (C, L): no batch dimension at all."""

    class OneByOne(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv1d(2, 3, 3)

        def forward(self, x: Tensor) -> Tensor:
            return torch.stack([self.conv(xi).tanh().mean(-1) for xi in x])

    return Problem(OneByOne(), "mse", torch.randn(3, 2, 5), torch.randn(3, 3))


@case
def residual_block_in_place() -> Problem:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Conv2d(2, 2, 3, padding=1), nn.Conv2d(2, 2, 3, padding=1)
            self.relu, self.head = nn.ReLU(inplace=True), nn.Linear(2, 3)

        def forward(self, x: Tensor) -> Tensor:
            h = self.relu(self.first(x))
            h = self.second(h)
            h += x  # in place, on the layer's own output
            return self.head(self.relu(h).mean((2, 3)))

    return Problem(Block(), "cross_entropy", torch.randn(4, 2, 3, 3), classes(3, 4))


@case
def conv_batchnorm_classifier() -> Problem:
    model = nn.Sequential(
        nn.Conv2d(1, 3, 3, bias=False), nn.BatchNorm2d(3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(12, 4)
    )
    x = torch.randn(5, 1, 6, 6)
    return Problem(settled(model), nn.CrossEntropyLoss(), x, classes(4, 5), sample_weights(5))


@case
def dense_prediction() -> Problem:
    model = nn.Sequential(nn.Conv2d(2, 3, 3, padding=1), nn.GELU(), nn.Conv2d(3, 3, 1))
    y = classes(3, 2, 3, 4)
    y[0, 1] = 9
    return Problem(model, nn.CrossEntropyLoss(ignore_index=9), torch.randn(2, 2, 3, 4), y)


@case
def dense_prediction_soft() -> Problem:
    model = nn.Conv2d(2, 3, 3, padding=1)
    loss = nn.CrossEntropyLoss(weight=torch.tensor([0.5, 1.0, 2.0]))
    return Problem(model, loss, torch.randn(2, 2, 3, 3), probabilities(3, 2, 3, 3), sample_weights(2))


@case
def dense_prediction_weighted() -> Problem:
    model = nn.Conv1d(2, 3, 3, padding=1)
    loss = nn.CrossEntropyLoss(weight=torch.tensor([0.5, 1.0, 2.0]), label_smoothing=0.1)
    return Problem(model, loss, torch.randn(3, 2, 4), classes(3, 3, 4), sample_weights(3))


# ---- embeddings


class Tokens(nn.Module):
    def __init__(self, embedding: nn.Embedding, out: int) -> None:
        super().__init__()
        self.embedding, self.head = embedding, nn.Linear(embedding.embedding_dim, out)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.embedding(tokens).tanh().sum(1))


REPEATED = torch.tensor([[0, 1, 1, 3], [2, 2, 2, 2], [4, 0, 3, 1]])


@case
def embedding() -> Problem:
    return Problem(Tokens(nn.Embedding(5, 3), 3), "cross_entropy", REPEATED, classes(3, 3))


@case
def embedding_padding() -> Problem:
    return Problem(Tokens(nn.Embedding(5, 3, padding_idx=1), 2), "mse", REPEATED, torch.randn(3, 2))


@case
def embedding_negative_padding() -> Problem:
    return Problem(Tokens(nn.Embedding(5, 3, padding_idx=-1), 2), "mse", REPEATED, torch.randn(3, 2))


@case
def positional_embedding() -> Problem:
    """Positions are embedded without a batch dimension, and T = N hides it."""

    class Positions(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.token, self.position, self.head = nn.Embedding(5, 3), nn.Embedding(4, 3), nn.Linear(3, 2)

        def forward(self, tokens: Tensor) -> Tensor:
            h = self.token(tokens) + self.position(torch.arange(tokens.shape[1], device=tokens.device))
            return self.head(h.tanh())

    return Problem(Positions(), "mse", classes(5, 4, 4), torch.randn(4, 4, 2))


@case
def decoder_tied_functionally() -> Problem:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding, self.inner = nn.Embedding(5, 3), nn.Linear(3, 3)

        def forward(self, tokens: Tensor) -> Tensor:
            return F.linear(self.inner(self.embedding(tokens)).tanh(), self.embedding.weight).transpose(1, 2)

    return Problem(Tied(), "cross_entropy", classes(5, 3, 3), classes(5, 3, 3))


@case
def decoder_tied_by_module() -> Problem:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding, self.decoder = nn.Embedding(5, 3), nn.Linear(3, 5)
            self.decoder.weight = self.embedding.weight

        def forward(self, tokens: Tensor) -> Tensor:
            return self.decoder(self.embedding(tokens).tanh()).transpose(1, 2)

    return Problem(Tied(), "cross_entropy", classes(5, 3, 3), classes(5, 3, 3))


# ---- norms


@case
def layer_norm() -> Problem:
    model = nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4), nn.Tanh(), nn.Linear(4, 2))
    return Problem(model, "mse", torch.randn(4, 3), torch.randn(4, 2))


@case
def layer_norm_leading_dims() -> Problem:
    model = nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4, bias=False), nn.Linear(4, 2))
    return Problem(model, "mse", torch.randn(4, 3, 3), torch.randn(4, 3, 2))


@case
def layer_norm_many_dims() -> Problem:
    model = nn.Sequential(nn.Conv1d(2, 3, 2), nn.LayerNorm((3, 4)), nn.Tanh(), nn.Flatten(), nn.Linear(12, 2))
    return Problem(model, "mse", torch.randn(4, 2, 5), torch.randn(4, 2))


@case
def group_norm() -> Problem:
    model = nn.Sequential(nn.Conv2d(2, 4, 2), nn.GroupNorm(2, 4), nn.Tanh(), nn.Flatten(2), Halves())
    return Problem(model, "mse", torch.randn(3, 2, 4, 4), torch.randn(3, 4, 2))


@case
def instance_norm() -> Problem:
    """Train mode, and yet no sample sees another."""
    model = nn.Sequential(nn.Conv1d(2, 3, 2), nn.InstanceNorm1d(3, affine=True), nn.Tanh(), Halves())
    return Problem(model, "mse", torch.randn(3, 2, 6), torch.randn(3, 3, 2))


@case
def batch_norm_1d() -> Problem:
    x = torch.randn(5, 3)
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.ELU(), nn.Linear(4, 2))
    return Problem(settled(model), "mse", x, torch.randn(5, 2))


@case
def batch_norm_1d_sequence() -> Problem:
    x = torch.randn(3, 2, 5)
    model = nn.Sequential(nn.Conv1d(2, 3, 2), nn.BatchNorm1d(3), nn.Tanh(), Halves())
    return Problem(settled(model), "mse", x, torch.randn(3, 3, 2))


@case
def batch_norm_2d() -> Problem:
    x = torch.randn(3, 2, 3, 4)
    model = nn.Sequential(nn.BatchNorm2d(2), nn.Conv2d(2, 3, 2), nn.BatchNorm2d(3), nn.Tanh(), nn.Flatten(2), Halves())
    return Problem(settled(model), "mse", x, torch.randn(3, 3, 2))


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


# ---- losses, all on one small network


def network(loss: Any, y: Any, weighted: bool = False, out: int = 3, N: int = 5) -> Problem:
    return Problem(mlp(2, 4, out), loss, torch.randn(N, 2), y, sample_weights(N) if weighted else None)


def masked_weights(N: int) -> Tensor:
    """One sample counts nothing at all."""
    return torch.cat([torch.zeros(1), sample_weights(N - 1)])


def ignoring(index: int, c: int, N: int) -> Tensor:
    y = classes(c, N)
    y[1] = index
    return y


def class_weights() -> Tensor:
    return torch.tensor([0.5, 1.0, 3.0])


def both_sides(N: int, *out: int) -> Tensor:
    """Targets within and far outside δ of outputs of order 1."""
    y = torch.randn(N, *out)
    y[::2] *= 10
    return y


CE, BCE = nn.CrossEntropyLoss, nn.BCEWithLogitsLoss
LOSSES: dict[str, Callable[[], Problem]] = {
    "mse_weighted": lambda: network(nn.MSELoss(), torch.randn(5, 3), weighted=True),
    "mse_sum": lambda: network(nn.MSELoss(reduction="sum"), torch.randn(5, 3)),
    "mse_sum_weighted": lambda: network(nn.MSELoss(reduction="sum"), torch.randn(5, 3), weighted=True),
    "mse_masked": lambda: network("mse", torch.randn(5, 3))._replace(weight=masked_weights(5)),
    "ce": lambda: network("cross_entropy", classes(3, 5)),
    "ce_weighted": lambda: network("cross_entropy", classes(3, 5), weighted=True),
    "ce_masked": lambda: network("cross_entropy", classes(3, 5))._replace(weight=masked_weights(5)),
    "ce_sum": lambda: network(CE(reduction="sum"), classes(3, 5), weighted=True),
    "ce_class_weights": lambda: network(CE(weight=class_weights()), classes(3, 5)),
    "ce_class_weights_weighted": lambda: network(CE(weight=class_weights()), classes(3, 5), weighted=True),
    "ce_smooth": lambda: network(CE(label_smoothing=0.2), classes(3, 5)),
    "ce_smooth_class_weights": lambda: network(
        CE(weight=class_weights(), label_smoothing=0.2), classes(3, 5), weighted=True
    ),
    "ce_ignore": lambda: network(CE(), ignoring(-100, 3, 5)),
    "ce_ignore_weighted": lambda: network(CE(ignore_index=2), ignoring(2, 3, 5), weighted=True),
    "ce_ignore_everything_else": lambda: network(
        CE(weight=class_weights(), label_smoothing=0.1, ignore_index=0), ignoring(0, 3, 5), weighted=True
    ),
    "ce_probabilities": lambda: network(CE(), probabilities(3, 5)),
    "ce_probabilities_class_weights": lambda: network(CE(weight=class_weights()), probabilities(3, 5), weighted=True),
    "ce_probabilities_smooth": lambda: network(CE(label_smoothing=0.2), probabilities(3, 5)),
    "ce_two_classes": lambda: network("cross_entropy", classes(2, 5), out=2),
    "bce": lambda: network("bce", counts(2, 5, 1), out=1),
    "bce_soft_weighted": lambda: network(BCE(), torch.rand(5, 3), weighted=True),
    "bce_pos_weight": lambda: network(BCE(pos_weight=class_weights()), counts(2, 5, 3)),
    "bce_pos_weight_weighted": lambda: network(BCE(pos_weight=class_weights()), torch.rand(5, 3), weighted=True),
    "huber": lambda: network("huber", both_sides(5, 3)),
    "huber_delta_weighted": lambda: network(nn.HuberLoss(delta=0.5), both_sides(5, 3), weighted=True),
    "huber_inside": lambda: network(nn.HuberLoss(delta=50.0), torch.randn(5, 3)),
    "smooth_l1": lambda: network(nn.SmoothL1Loss(), both_sides(5, 2), out=2),
    "smooth_l1_beta_weighted": lambda: network(nn.SmoothL1Loss(beta=0.4), both_sides(5, 2), weighted=True, out=2),
    "poisson": lambda: network("poisson", counts(5, 5, 3)),
    "poisson_weighted": lambda: network(nn.PoissonNLLLoss(), counts(5, 5, 3), weighted=True),
    "residual": lambda: network("residual", None),
    "residual_weighted": lambda: network("residual", None, weighted=True),
}
CASES.update(LOSSES)
