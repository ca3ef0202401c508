"""Functions that others fit too, most from the Virtual Library of Simulation Experiments (sfu.ca/~ssurjano)."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

TURN = 2 * math.pi


@dataclass(frozen=True)
class Function:
    inputs: int
    value: Callable[..., Tensor]  # of the columns of x, each (N,), in their own units
    ranges: tuple[tuple[float, float], ...] = ()  # of the inputs; without them all are in [0, 1]

    def __call__(self, x: Tensor) -> Tensor:
        """x: (N, inputs) in [0, 1]; (N, outputs)."""
        if self.ranges:
            low, high = torch.tensor(self.ranges, dtype=x.dtype).T
            x = low + (high - low) * x
        found = self.value(*x.unbind(1))
        return found if found.ndim == 2 else found.unsqueeze(1)


def franke(x: Tensor, y: Tensor) -> Tensor:
    return (
        0.75 * torch.exp(-((9 * x - 2) ** 2) / 4 - (9 * y - 2) ** 2 / 4)
        + 0.75 * torch.exp(-((9 * x + 1) ** 2) / 49 - (9 * y + 1) / 10)
        + 0.5 * torch.exp(-((9 * x - 7) ** 2) / 4 - (9 * y - 3) ** 2 / 4)
        - 0.2 * torch.exp(-((9 * x - 4) ** 2) - (9 * y - 7) ** 2)
    )


def peaks(x: Tensor, y: Tensor) -> Tensor:
    return (
        3 * (1 - x) ** 2 * torch.exp(-(x**2) - (y + 1) ** 2)
        - 10 * (x / 5 - x**3 - y**5) * torch.exp(-(x**2) - y**2)
        - torch.exp(-((x + 1) ** 2) - y**2) / 3
    )


def rosenbrock(*x: Tensor) -> Tensor:
    """The logarithm of 1 + it: the values range over four decades."""
    return torch.log1p(sum(100 * (b - a**2) ** 2 + (1 - a) ** 2 for a, b in pairwise(x)))


def borehole(rw: Tensor, r: Tensor, Tu: Tensor, Hu: Tensor, Tl: Tensor, Hl: Tensor, L: Tensor, K: Tensor) -> Tensor:
    ratio = torch.log(r / rw)
    return TURN * Tu * (Hu - Hl) / (ratio * (1 + 2 * L * Tu / (ratio * rw**2 * K) + Tu / Tl))


def robot_arm(*x: Tensor) -> Tensor:
    """How far an arm of four parts reaches: four angles, four lengths."""
    angles, lengths = torch.stack(x[:4]).cumsum(0), torch.stack(x[4:])  # (4, N)
    return ((lengths * angles.cos()).sum(0) ** 2 + (lengths * angles.sin()).sum(0) ** 2).sqrt()


def friedman(a: Tensor, b: Tensor, c: Tensor, d: Tensor, e: Tensor, *idle: Tensor) -> Tensor:
    """The last five inputs are without effect."""
    return 10 * torch.sin(math.pi * a * b) + 20 * (c - 0.5) ** 2 + 10 * d + 5 * e


def circuit(Rb1: Tensor, Rb2: Tensor, Rf: Tensor, Rc1: Tensor, Rc2: Tensor, beta: Tensor) -> Tensor:
    Vb1 = 12 * Rb2 / (Rb1 + Rb2)
    gain = beta * (Rc2 + 9)
    return (Vb1 + 0.74) * gain / (gain + Rf) + 11.35 * Rf / (gain + Rf) + 0.74 * Rf * gain / ((gain + Rf) * Rc1)


def piston(M: Tensor, S: Tensor, V0: Tensor, k: Tensor, P0: Tensor, Ta: Tensor, T0: Tensor) -> Tensor:
    A = P0 * S + 19.62 * M - k * V0 / S
    V = S / (2 * k) * ((A**2 + 4 * k * P0 * V0 * Ta / T0).sqrt() - A)
    return TURN * (M / (k + S**2 * P0 * V0 * Ta / (T0 * V**2))).sqrt()


def oscillator(omega: Tensor, damping: Tensor, force: Tensor, t: Tensor) -> Tensor:
    """ẍ + 2ζωẋ + ω²x = force from rest: place, speed and energy at the time t."""
    own = omega * (1 - damping**2).sqrt()
    decay = torch.exp(-damping * omega * t)
    place = force / omega**2 * (1 - decay * (torch.cos(own * t) + damping * omega / own * torch.sin(own * t)))
    speed = force / own * decay * torch.sin(own * t)
    return torch.stack([place, speed, (speed**2 + (omega * place) ** 2) / 2], 1)  # (N, 3)


FRANKE = Function(2, franke)
PEAKS = Function(2, peaks, ((-3, 3),) * 2)
ROSENBROCK = Function(4, rosenbrock, ((-2, 2),) * 4)
BOREHOLE = Function(
    8, borehole,
    (
        (0.05, 0.15), (100, 50_000), (63_070, 115_600), (990, 1110), (63.1, 116), (700, 820), (1120, 1680),
        (9855, 12_045),
    ),
)  # fmt: skip
ROBOT_ARM = Function(8, robot_arm, ((0, TURN),) * 4 + ((0, 1),) * 4)
FRIEDMAN = Function(10, friedman)
CIRCUIT = Function(6, circuit, ((50, 150), (25, 70), (0.5, 3), (1.2, 2.5), (0.25, 1.2), (50, 300)))
PISTON = Function(
    7, piston,
    ((30, 60), (0.005, 0.02), (0.002, 0.01), (1000, 5000), (90_000, 110_000), (290, 296), (340, 360)),
)  # fmt: skip
OSCILLATOR = Function(4, oscillator, ((1, 3), (0.05, 0.5), (0.5, 2), (0, 5)))
