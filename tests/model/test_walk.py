"""The same modules and tensors as torch finds."""

from __future__ import annotations

import torch
from torch import nn

from marquardt.model.anatomy import held, submodules


class Shared(nn.Module):
    """A module twice, a tied weight, a module that is None, buffers, and a module that holds its owner."""

    def __init__(self):
        super().__init__()
        self.first = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
        self.again, self.missing = self.first[0], None
        self.register_module("none", None)
        self.tied = nn.Linear(2, 2, bias=False)
        self.tied.weight = self.first[0].weight
        self.register_buffer("own", torch.zeros(1))
        self.list = nn.ModuleList([nn.Identity(), nn.Sequential(nn.GRU(2, 2))])


def test_submodules_and_tensors():
    model = Shared()
    for _ in range(2):
        assert {id(m) for m in submodules(model)} == {id(m) for m in model.modules()}
        assert len(submodules(model)) == len(list(model.modules()))
        assert submodules(model) == submodules(model)
        assert {id(t) for t in held(model)} == {id(t) for t in [*model.parameters(), *model.buffers()]}
        model.tied.owner = model  # a circle ends
