"""What the outputs of a network say of the targets: ℓ, its derivative and a root of its second derivative."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod

import torch
from torch import Tensor


class Law(ABC):
    """−log p(y|z) of every sample is β·ℓ + a constant. z is (k, N, c)."""

    noisy: bool  # whether there is a β to be found, or it is 1
    rank: int  # rows of a root, of one sample

    @abstractmethod
    def value(self, z: Tensor, y: Tensor) -> Tensor:
        """ℓ: (k, N)"""

    @abstractmethod
    def slope(self, z: Tensor, y: Tensor) -> Tensor:
        """∂ℓ/∂z: (k, N, c)"""

    @abstractmethod
    def root(self, z: Tensor) -> Tensor:
        """Sᵀ with SSᵀ = ∂²ℓ/∂z²: (k, N, rank, c)"""

    def error(self, z: Tensor, y: Tensor) -> Tensor:
        """What is compared on samples that were held out: (k, N)"""
        return self.value(z, y)


class Numbers(Law):
    """ℓ = ½‖z − y‖², y (k, N, c)."""

    noisy = True

    def __init__(self, outputs: int) -> None:
        self.rank = outputs

    def value(self, z: Tensor, y: Tensor) -> Tensor:
        return 0.5 * (z - y).square().sum(-1)

    def slope(self, z: Tensor, y: Tensor) -> Tensor:
        return z - y

    def root(self, z: Tensor) -> Tensor:
        return torch.eye(self.rank, dtype=z.dtype).expand(*z.shape[:2], self.rank, self.rank)


class TwoClasses(Law):
    """ℓ = −log σ(±z) of two classes, one logit; y (k, N) is 0 or 1."""

    noisy, rank = False, 1

    def value(self, z: Tensor, y: Tensor) -> Tensor:
        z = z[..., 0]
        return torch.nn.functional.softplus(z) - y * z

    def slope(self, z: Tensor, y: Tensor) -> Tensor:
        return torch.sigmoid(z) - y[..., None]

    def root(self, z: Tensor) -> Tensor:
        return (torch.sigmoid(z) * torch.sigmoid(-z)).sqrt()[..., None]


class Classes(Law):
    """ℓ = −log softmax(z)ᵧ; y (k, N) is the class. S = (1 − p1ᵀ)diag √p."""

    noisy = False

    def __init__(self, classes: int) -> None:
        self.rank = classes

    def value(self, z: Tensor, y: Tensor) -> Tensor:
        return z.logsumexp(-1) - z.gather(-1, y[..., None].long())[..., 0]

    def slope(self, z: Tensor, y: Tensor) -> Tensor:
        return z.softmax(-1) - torch.nn.functional.one_hot(y.long(), self.rank).to(z)

    def root(self, z: Tensor) -> Tensor:
        p = z.softmax(-1)
        s = p.sqrt()
        return torch.diag_embed(s) - s[..., None] * p[..., None, :]


def probabilities(z: Tensor) -> Tensor:
    """Of the classes, from one logit or several: (…, classes)"""
    return torch.cat((torch.sigmoid(-z), torch.sigmoid(z)), -1) if z.shape[-1] == 1 else z.softmax(-1)


def softened(z: Tensor, variance: Tensor) -> Tensor:
    """Probabilities if every logit is normal around z, MacKay's approximation: p(z/√(1 + π/8·variance))"""
    return probabilities(z / (1 + math.pi / 8 * variance).sqrt())
