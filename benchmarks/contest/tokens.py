"""Sums of two numbers below 100 as characters, and a small causal attention model that reads them."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

PLUS, EQUALS, VOCABULARY = 10, 11, 12
ANSWER = 3  # digits of a sum, the last one first: so each follows from those before it


def sums() -> tuple[Tensor, Tensor]:
    """All 10,000 of them: "ab+cd=xy" as tokens (N, 8) and the answer "xyz" (N, 3)."""
    first, second = torch.cartesian_prod(torch.arange(100), torch.arange(100)).unbind(1)
    answer = [(first + second) // 10**k % 10 for k in range(ANSWER)]
    sign = torch.full_like(first, PLUS), torch.full_like(first, EQUALS)
    shown = [first // 10, first % 10, sign[0], second // 10, second % 10, sign[1], *answer]
    tokens = torch.stack(shown, 1)  # (N, 9)
    return tokens[:, :-1], tokens[:, -ANSWER:]


class Mixer(nn.Module):
    """One layer of causal attention and one of perceptrons: logits (N, C, 3) of the answer's digits."""

    def __init__(self, width: int, length: int = 8) -> None:
        super().__init__()
        self.table = nn.Embedding(VOCABULARY, width)
        self.places = nn.Embedding(length, width)
        self.mixed = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.layers = nn.Sequential(nn.Linear(width, 2 * width), nn.Tanh(), nn.Linear(2 * width, width))
        self.head = nn.Linear(width, VOCABULARY)
        self.register_buffer("place", torch.arange(length))
        self.register_buffer("later", torch.ones(length, length, dtype=torch.bool).triu(1))

    def forward(self, x: Tensor) -> Tensor:
        h = self.table(x) + self.places(self.place.expand_as(x))  # (N, T, width)
        query, key, value = self.mixed(h).chunk(3, -1)
        scores = query @ key.transpose(-1, -2) / math.sqrt(h.shape[-1])  # (N, T, T)
        h = h + self.out(F.softmax(scores.masked_fill(self.later, -math.inf), -1) @ value)
        h = h + self.layers(h)
        return self.head(h)[:, -ANSWER:].movedim(-1, 1)
