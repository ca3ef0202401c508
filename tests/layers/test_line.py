"""Convolutions at all points of a line at once."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from marquardt.layers import Line

pytestmark = pytest.mark.usefixtures("double")


class Convolutions(nn.Module):
    """Twice the same weights, several groups, no bias, a bias that does not train, another padding; weights that the
    model itself changes."""

    def __init__(self, changes: bool) -> None:
        super().__init__()
        self.changes = changes
        self.twice = nn.Conv2d(2, 2, 3, padding=1)
        self.groups = nn.Conv2d(2, 4, 3, groups=2)
        self.plain = nn.Conv1d(4, 3, 2, bias=False, padding=1, padding_mode="circular")
        self.frozen = nn.Conv1d(3, 2, 1)
        self.frozen.bias.requires_grad_(False)
        self.volume = nn.Conv3d(1, 2, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.changes:
            with torch.no_grad():
                self.twice.weight.clamp_(-0.1, 0.1)
        x = self.groups(torch.tanh(self.twice(torch.tanh(self.twice(x))))).flatten(2)
        x = self.frozen(torch.tanh(self.plain(x)))
        return self.volume(torch.tanh(x).reshape(len(x), 1, 2, 5, 2)).flatten(1)[:, :3]


def on_a_line(model: nn.Module, x: torch.Tensor, d: dict[str, torch.Tensor], rates: torch.Tensor) -> torch.Tensor:
    """The outputs at all rates, as linearize has them on a GPU."""
    origin = {name: p.detach() for name, p in model.named_parameters() if p.requires_grad}

    def at(lr: torch.Tensor) -> torch.Tensor:
        point = {name: p + lr * d[name] for name, p in origin.items()}
        with Line(origin, d, point, lr):
            return torch.func.functional_call(model, point, (x,))

    with torch.no_grad():
        return torch.func.vmap(at)(rates)


@pytest.mark.parametrize("changes", [False, True])
def test_convolutions_of_all_trials_at_once(changes):
    torch.manual_seed(0)
    model, x = Convolutions(changes).double(), torch.randn(4, 2, 5, 5).double()
    d = {name: torch.randn_like(p) for name, p in model.named_parameters()}
    rates = torch.tensor([1e-6, 0.25, 1.0, 4.0]).double()
    together = on_a_line(model, x, d, rates)
    for lr, z in zip(rates, together, strict=True):
        other = copy.deepcopy(model)
        with torch.no_grad():
            for name, p in other.named_parameters():
                p += lr * d[name] if p.requires_grad else 0
            torch.testing.assert_close(z, other(x), rtol=1e-10, atol=1e-12)
