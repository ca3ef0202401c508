"""Layers: linear, convolutions, embeddings, norms."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from support.cases.problem import (
    CASES,
    Fn,
    Problem,
    classes,
    classification,
    mlp,
    probabilities,
    regression,
    sample_weights,
    settled,
)  # fmt: skip


def chain(*layers: nn.Module) -> nn.Module:
    return nn.Sequential(*layers)


def flattened(x: Tensor, inner: nn.Module, head: nn.Module) -> Tensor:
    """The layer sees (N·T, F): its first dimension is not the samples'."""
    h = inner(x.reshape(-1, x.shape[-1])).tanh()
    return head(h.reshape(*x.shape[:-1], -1).mean(1))


def time_major(x: Tensor, first: nn.Module, second: nn.Module) -> Tensor:
    """The layer sees (T, N, F) with T = N, so that no shape gives it away."""
    return second(first(x.transpose(0, 1)).tanh()).transpose(0, 1)


LINEAR: dict[str, Callable[[], Problem]] = {
    "mlp_elu": lambda: regression(mlp(2, 5, 3), (5, 2), 5, 3),
    "mlp_flat_output": lambda: regression(chain(mlp(2, 4, 1), nn.Flatten(0)), (5, 2), 5),  # nothing beside the samples
    "mlp_one_sample": lambda: regression(mlp(3, 4, 2), (1, 3), 1, 2),
    "linear_leading_dims": lambda: regression(
        chain(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)), (4, 3, 3), 4, 3, 2, weighted=True
    ),
    "linear_two_leading_dims": lambda: regression(nn.Linear(3, 2), (3, 2, 2, 3), 3, 2, 2, 2),
    "linear_no_bias": lambda: regression(
        chain(nn.Linear(3, 4, bias=False), nn.SiLU(), nn.Linear(4, 2, bias=False)), (5, 3), 5, 2
    ),
    "flattened_time": lambda: regression(Fn(flattened, nn.Linear(3, 4), nn.Linear(4, 2)), (4, 3, 3), 4, 2),
    "time_major": lambda: regression(Fn(time_major, nn.Linear(3, 4), nn.Linear(4, 2)), (4, 4, 3), 4, 4, 2),
    "bilinear_and_prelu": lambda: regression(
        Fn(lambda l, r, pair, act, head: head(act(pair(l, r))), nn.Bilinear(2, 3, 4), nn.PReLU(4), nn.Linear(4, 2)),
        (torch.randn(4, 2), torch.randn(4, 3)), 4, 2,
    ),
}  # fmt: skip


# ---- convolutions


class Halves(nn.Module):
    def forward(self, h: Tensor) -> Tensor:  # (N, C, L) → (N, C, 2)
        ramp = torch.linspace(-1, 1, h.shape[-1], dtype=h.dtype, device=h.device)
        return torch.stack([h.mean(-1), (h * ramp).mean(-1)], dim=-1)


def convolution(layer: nn.Module, *size: int, N: int = 3) -> Problem:
    """The layer, a nonlinearity and a mean over space: a few outputs, each depending on every position."""
    model = nn.Sequential(layer, nn.Tanh(), nn.Flatten(2), Halves())
    x = torch.randn(N, layer.in_channels, *size)
    return Problem(model, "mse", x, torch.randn(N, layer.out_channels, 2))


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


def in_place(x: Tensor, first: nn.Module, second: nn.Module, relu: nn.Module, head: nn.Module) -> Tensor:
    """A residual block"""
    h = second(relu(first(x)))
    h += x  # in place, on the layer's own output
    return head(relu(h).mean((2, 3)))


def conv_batchnorm_classifier() -> Problem:
    layers = nn.Conv2d(1, 3, 3, bias=False), nn.BatchNorm2d(3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten()
    model, x = nn.Sequential(*layers, nn.Linear(12, 4)), torch.randn(5, 1, 6, 6)
    return Problem(settled(model), nn.CrossEntropyLoss(), x, classes(4, 5), sample_weights(5))


def dense_prediction() -> Problem:
    model = nn.Sequential(nn.Conv2d(2, 3, 3, padding=1), nn.GELU(), nn.Conv2d(3, 3, 1))
    y = classes(3, 2, 3, 4)
    y[0, 1] = 9
    return Problem(model, nn.CrossEntropyLoss(ignore_index=9), torch.randn(2, 2, 3, 4), y)


def weighted_classes(model: nn.Module, x: Tensor, y: Tensor, smoothing: float) -> Problem:
    loss = nn.CrossEntropyLoss(weight=torch.tensor([0.5, 1.0, 2.0]), label_smoothing=smoothing)
    return Problem(model, loss, x, y, sample_weights(len(y)))


IMAGES: dict[str, Callable[[], Problem]] = {
    # The layer is called once per sample with (C, L): no batch dimension at all.
    "conv_unbatched_per_sample": lambda: regression(
        Fn(lambda x, conv: torch.stack([conv(xi).tanh().mean(-1) for xi in x]), nn.Conv1d(2, 3, 3)), (3, 2, 5), 3, 3
    ),
    "residual_block_in_place": lambda: classification(
        Fn(in_place, *(nn.Conv2d(2, 2, 3, padding=1) for _ in range(2)), nn.ReLU(inplace=True), nn.Linear(2, 3)),
        (4, 2, 3, 3), 3, 4,
    ),
    "conv_batchnorm_classifier": conv_batchnorm_classifier,
    "dense_prediction": dense_prediction,
    "dense_prediction_soft": lambda: weighted_classes(
        nn.Conv2d(2, 3, 3, padding=1), torch.randn(2, 2, 3, 3), probabilities(3, 2, 3, 3), 0.0
    ),
    "dense_prediction_weighted": lambda: weighted_classes(
        nn.Conv1d(2, 3, 3, padding=1), torch.randn(3, 2, 4), classes(3, 3, 4), 0.1
    ),
}  # fmt: skip


# ---- embeddings


REPEATED = torch.tensor([[0, 1, 1, 3], [2, 2, 2, 2], [4, 0, 3, 1]])


def tokens(embedding: nn.Embedding, out: int) -> nn.Module:
    return Fn(lambda t, embedding, head: head(embedding(t).tanh().sum(1)), embedding, nn.Linear(3, out))


def positions(t: Tensor, token: nn.Module, position: nn.Module, head: nn.Module) -> Tensor:
    """Positions are embedded without a batch dimension, and T = N hides it."""
    return head((token(t) + position(torch.arange(t.shape[1], device=t.device))).tanh())


def tied_functionally(t: Tensor, table: nn.Embedding, inner: nn.Module) -> Tensor:
    return F.linear(inner(table(t)).tanh(), table.weight).transpose(1, 2)


def decoder_tied_by_module() -> Problem:
    table, decoder = nn.Embedding(5, 3), nn.Linear(3, 5)
    decoder.weight = table.weight
    model = Fn(lambda t, table, decoder: decoder(table(t).tanh()).transpose(1, 2), table, decoder)
    return Problem(model, "cross_entropy", classes(5, 3, 3), classes(5, 3, 3))


EMBEDDINGS: dict[str, Callable[[], Problem]] = {
    "embedding": lambda: Problem(tokens(nn.Embedding(5, 3), 3), "cross_entropy", REPEATED, classes(3, 3)),
    "embedding_padding": lambda: regression(tokens(nn.Embedding(5, 3, padding_idx=1), 2), REPEATED, 3, 2),
    "embedding_negative_padding": lambda: regression(tokens(nn.Embedding(5, 3, padding_idx=-1), 2), REPEATED, 3, 2),
    "positional_embedding": lambda: regression(
        Fn(positions, nn.Embedding(5, 3), nn.Embedding(4, 3), nn.Linear(3, 2)), classes(5, 4, 4), 4, 4, 2
    ),
    "decoder_tied_functionally": lambda: classification(
        Fn(tied_functionally, nn.Embedding(5, 3), nn.Linear(3, 3)), classes(5, 3, 3), 5, 3, 3
    ),
    "decoder_tied_by_module": decoder_tied_by_module,
}  # fmt: skip


# ---- norms


NORMS: dict[str, Callable[[], Problem]] = {
    "layer_norm": lambda: regression(
        chain(nn.Linear(3, 4), nn.LayerNorm(4), nn.Tanh(), nn.Linear(4, 2)), (4, 3), 4, 2
    ),
    "layer_norm_leading_dims": lambda: regression(
        chain(nn.Linear(3, 4), nn.LayerNorm(4, bias=False), nn.Linear(4, 2)), (4, 3, 3), 4, 3, 2
    ),
    "layer_norm_many_dims": lambda: regression(
        chain(nn.Conv1d(2, 3, 2), nn.LayerNorm((3, 4)), nn.Tanh(), nn.Flatten(), nn.Linear(12, 2)), (4, 2, 5), 4, 2
    ),
    "group_norm": lambda: regression(
        chain(nn.Conv2d(2, 4, 2), nn.GroupNorm(2, 4), nn.Tanh(), nn.Flatten(2), Halves()), (3, 2, 4, 4), 3, 4, 2
    ),
    # Train mode, and yet no sample sees another.
    "instance_norm": lambda: regression(
        chain(nn.Conv1d(2, 3, 2), nn.InstanceNorm1d(3, affine=True), nn.Tanh(), Halves()), (3, 2, 6), 3, 3, 2
    ),
    "batch_norm_1d": lambda: regression(
        settled(chain(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.ELU(), nn.Linear(4, 2))), (5, 3), 5, 2
    ),
    "batch_norm_1d_sequence": lambda: regression(
        settled(chain(nn.Conv1d(2, 3, 2), nn.BatchNorm1d(3), nn.Tanh(), Halves())), (3, 2, 5), 3, 3, 2
    ),
    "batch_norm_2d": lambda: regression(
        settled(
            chain(nn.BatchNorm2d(2), nn.Conv2d(2, 3, 2), nn.BatchNorm2d(3), nn.Tanh(), nn.Flatten(2), Halves())
        ),
        (3, 2, 3, 4), 3, 3, 2,
    ),
}  # fmt: skip
for cases in (LINEAR, CONVOLUTIONS, IMAGES, EMBEDDINGS, NORMS):
    CASES.update(cases)
