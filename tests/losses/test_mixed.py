"""Sε without S: over all signs the mean of Sε εᵀSᵀ is SSᵀ; and how many rows a sample has."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import pytest
import torch
from torch import Tensor

from marquardt.jacobian.linearization import linearize
from marquardt.losses import BinaryCrossEntropy, CrossEntropy, Huber, Loss, Poisson, Residual, SquaredError
from support.losses import CLASS_WEIGHT, IMAGE, MATRIX, VECTOR, close, f64, fraction, labels, normal, some_ignored


def soft(shape):
    return 2 * fraction(shape)  # that they add up to 1 is not asked


def patterns(shape: tuple[int, ...]) -> Tensor:
    """Every pattern of signs in the last dimension, the same in all groups: (2ʳ, N, P, r)"""
    signs = torch.cartesian_prod(*[torch.tensor([-1.0, 1.0], dtype=f64)] * shape[-1]).reshape(-1, shape[-1])
    return signs[:, None, None].expand(-1, *shape)


@dataclass(frozen=True, kw_only=True, eq=False)
class Doubled(CrossEntropy):
    """A root of its own: twice the curvature, in C columns instead of C − 1."""

    majorises: ClassVar[bool] = True

    def factors(self, z: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        S, u = super().factors(z, y)
        return torch.cat([S, torch.zeros_like(S[..., :1])], -1) * 2**0.5, torch.cat([u, u[..., :1]], -1) / 2**0.5


CASES = {
    "labels": (CrossEntropy(), MATRIX, labels),
    "class weights": (CrossEntropy(class_weight=CLASS_WEIGHT), MATRIX, labels),
    "smoothed": (CrossEntropy(label_smoothing=0.2, class_weight=CLASS_WEIGHT), MATRIX, labels),
    "soft": (CrossEntropy(), MATRIX, soft),
    "soft, class weights": (CrossEntropy(class_weight=CLASS_WEIGHT, label_smoothing=0.1), IMAGE, soft),
    "ignored": (CrossEntropy(class_weight=CLASS_WEIGHT), IMAGE, some_ignored),
    "ignored, smoothed": (CrossEntropy(label_smoothing=0.3), IMAGE, some_ignored),
    "a root of its own": (Doubled(), MATRIX, labels),
    "squared error": (SquaredError(), MATRIX, normal),
    "residual": (Residual(), VECTOR, lambda shape: None),
    "huber": (Huber(), IMAGE, normal),
    "binary": (BinaryCrossEntropy(pos_weight=torch.tensor(2.0, dtype=f64)), MATRIX, fraction),
    "poisson": (Poisson(), MATRIX, fraction),
}
EVERY_CASE = pytest.mark.parametrize("case", CASES)


def drawn(case: str) -> tuple[Loss, Tensor, Tensor | None]:
    loss, shape, targets = CASES[case]
    return loss, normal(shape), targets(shape)


@EVERY_CASE
@pytest.mark.parametrize("weighted", [False, True])
def test_the_mean_over_all_signs(case, weighted):
    """E[Sε εᵀSᵀ] = SSᵀ, exactly: different signs are not correlated."""
    loss, z, y = drawn(case)
    weight = torch.tensor([0.5, 2.0, 0.0, 3.0], dtype=f64) if weighted else None
    found = loss.mixed(z, y, weight, patterns)  # (2ʳ, N, P, C)
    S = loss.root(z, y, weight).S
    close(torch.einsum("knpc,knpd->npcd", found, found) / len(found), S @ S.mT)


@EVERY_CASE
def test_one_sign_after_the_other(case):
    """Linear in ε: columns by themselves give SSᵀ too."""
    loss, z, y = drawn(case)

    def columns(shape: tuple[int, ...]) -> Tensor:
        return torch.eye(shape[-1], dtype=f64)[:, None, None].expand(-1, *shape)

    found = loss.mixed(z, y, None, columns)  # (r, N, P, C)
    S = loss.root(z, y, None).S
    close(torch.einsum("rnpc,rnpd->npcd", found, found), S @ S.mT)


def test_ignored_positions_have_no_rows():
    loss, z, y = drawn("ignored")
    ignored = (y == -100).reshape(4, -1)
    found = loss.mixed(z, y, None, patterns)
    assert (found[:, ignored] == 0).all()
    assert (found[:, ~ignored] != 0).any()


@pytest.mark.parametrize("dtype", [torch.float32, f64])
def test_extreme_logits(dtype):
    z = torch.tensor([[120.0, -120.0, 0.0], [-1e4, 1e4, 0.0]], dtype=dtype)
    found = CrossEntropy().mixed(z, torch.tensor([1, 0]), None, lambda shape: patterns(shape).to(dtype))
    assert found.isfinite().all()
    assert (found.sum(-1).abs() <= 1e-6).all()  # S is orthogonal to 1


@EVERY_CASE
def test_how_many_rows_a_sample_has(case):
    """As many as there are columns in the root of one of them, whichever rows are formed."""
    loss, z, y = drawn(case)
    S = loss.root(z, y).S
    first = None if y is None else y[:1]
    assert loss.count(z[:1], first) == S.shape[1] * S.shape[3]


@EVERY_CASE
def test_rows_of_a_linearisation(case):
    """The count is that of the rows that Exact forms."""
    loss, z, y = drawn(case)

    class Passing(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.shift = torch.nn.Parameter(torch.zeros((), dtype=f64))

        def forward(self, x: Tensor) -> Tensor:
            return x + self.shift

    piece = linearize(Passing(), loss, z, y).whole()
    assert piece.exact_rows() == piece.jacobian.R


def test_many_classes_are_counted_without_their_root():
    """It would have 7·50,000² numbers."""
    z, y = torch.zeros(1, 50_000, 7), torch.zeros(1, 7, dtype=torch.long)
    assert CrossEntropy().count(z, y) == 7 * 49_999
