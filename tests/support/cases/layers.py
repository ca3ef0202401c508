"""Layers: linear, convolutions, embeddings, norms."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from support.cases.problem import (
    CASES,
    Problem,
    case,
    classes,
    mlp,
    probabilities,
    sample_weights,
    settled,
)

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
