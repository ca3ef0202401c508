"""A recorder that needs no GPU: what is recorded is simply done again."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn


class Repeated:
    """A replay does the work again and fills the same tensor. To record does it too, which a CUDA graph would not: so
    the model is put back."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.recordings = self.replays = 0

    def __call__(self, device: torch.device) -> Repeated:
        return self

    def record(self, work: Callable[[], Tensor]) -> Tensor:
        self.recordings += 1
        before = [p.detach().clone() for p in self.model.parameters()]
        self.work, self.out = work, work()
        with torch.no_grad():
            for p, value in zip(self.model.parameters(), before, strict=True):
                p.copy_(value)
        return self.out

    def replay(self) -> None:
        self.replays += 1
        self.out.copy_(self.work())
