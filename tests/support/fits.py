"""Small models and data for mq.fit."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parameters_to_vector
from torch.utils.data import DataLoader, TensorDataset

import marquardt as mq


def net(inputs: int = 1, hidden: int = 8, outputs: int = 1, seed: int = 0) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return nn.Sequential(nn.Linear(inputs, hidden), nn.Tanh(), nn.Linear(hidden, outputs)).double()


def noisy_sine(N: int = 40, noise: float = 0.2, seed: int = 0) -> tuple[Tensor, Tensor]:
    """One period: (N, 1), (N, 1)"""
    g = torch.Generator().manual_seed(seed)
    x = 2 * torch.rand(N, 1, generator=g, dtype=torch.float64) - 1
    return x, torch.sin(math.pi * x) + noise * torch.randn(N, 1, generator=g, dtype=torch.float64)


def weights(model: nn.Module) -> Tensor:
    """θ: (n,)"""
    return parameters_to_vector(model.parameters()).detach().clone()


def mse(model: nn.Module, x: Tensor, y: Tensor) -> float:
    with torch.no_grad():
        return float((model(x) - y).square().mean())


@contextmanager
def refused(model: nn.Module, message: str) -> Iterator[None]:
    """A TypeError or a ValueError that matches, and neither weights nor random numbers have changed."""
    before, random = weights(model), torch.get_rng_state()
    with pytest.raises((TypeError, ValueError), match=message):
        yield
    assert torch.equal(weights(model), before)
    assert torch.equal(torch.get_rng_state(), random)


# Fits that differ in what they must remember: a model, and the arguments of mq.fit beside the loss.


def whole() -> tuple[nn.Module, dict[str, Any]]:
    return net(), {"data": noisy_sine(), "validation": noisy_sine(20, seed=5), "steps": 9, "patience": None}


def held() -> tuple[nn.Module, dict[str, Any]]:
    """Validated on batches that are shuffled, too"""
    items, g = TensorDataset(*noisy_sine(20, seed=5)), torch.Generator().manual_seed(6)
    loader = DataLoader(items, batch_size=7, shuffle=True, generator=g)
    return net(), {"data": noisy_sine(), "validation": loader, "steps": 9, "patience": None}


def mini() -> tuple[nn.Module, dict[str, Any]]:
    """Four batches an epoch, and random numbers in the model"""
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(1, 8), nn.Dropout(0.2), nn.Tanh(), nn.Linear(8, 1)).double()
    return model, {"data": noisy_sine(80), "batch_size": 20, "steps": 9, "validation": noisy_sine(20, seed=5)}


def loader() -> tuple[nn.Module, dict[str, Any]]:
    """Shuffled by a generator of its own, with a ragged last batch"""
    data, g = TensorDataset(*noisy_sine(50)), torch.Generator().manual_seed(6)
    return net(), {"data": DataLoader(data, batch_size=20, shuffle=True, generator=g), "steps": 9}


def shuffled() -> tuple[nn.Module, dict[str, Any]]:
    """By torch's own generator"""
    torch.manual_seed(8)
    return net(), {"data": DataLoader(TensorDataset(*noisy_sine(50)), batch_size=20, shuffle=True), "steps": 9}


def evidence() -> tuple[nn.Module, dict[str, Any]]:
    rule = mq.Evidence(every=3, groups="layers")
    return net(), {"data": noisy_sine(), "weight_decay": rule, "steps": 9}


def descents() -> tuple[nn.Module, dict[str, Any]]:
    """By evidence, one after the other: the second one begins after step 15"""
    torch.manual_seed(0)
    return nn.Linear(1, 1), {"data": noisy_sine(), "weight_decay": mq.Evidence(every=1, start=(1.0, 0.1)), "steps": 18}


def validated() -> tuple[nn.Module, dict[str, Any]]:
    """With evidence, whose best step is not the last"""
    model, given = evidence()
    return model, {**given, "data": noisy_sine(15), "validation": noisy_sine(20, noise=1.0, seed=5), "patience": None}


def streamed() -> tuple[nn.Module, dict[str, Any]]:
    x, y = noisy_sine()
    return net(), {"data": [(x[:15], y[:15]), (x[15:], y[15:])], "batch_size": "all", "steps": 9}


KINDS = {f.__name__: f for f in (whole, held, mini, loader, shuffled, evidence, descents, validated, streamed)}
