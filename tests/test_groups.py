"""Parameter groups."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from marquardt.groups import check_same_rate, grouped, weights
from support.cases import mlp


def names(model: nn.Module, groups) -> list[list[str]]:
    known = {id(p): name for name, p in model.named_parameters()}
    return [[known[id(p)] for p in group["params"]] for group in groups]


def test_one_group():
    model = mlp(2, 3, 1)
    every = [name for name, _ in model.named_parameters()]
    assert names(model, grouped(model, None)) == [every]
    assert names(model, grouped(model, model[2].parameters())) == [["2.weight", "2.bias"]]


def test_several_groups():
    """Each with its options; what is frozen is left out, and a parameter may stand alone."""
    model = mlp(2, 3, 1)
    model[0].bias.requires_grad_(False)
    given = [{"params": model[2].parameters(), "weight_decay": 0.1}, {"params": model[0].parameters(), "name": "first"}]
    found = grouped(model, iter(given))
    assert names(model, found) == [["2.weight", "2.bias"], ["0.weight"]]
    assert found[0]["weight_decay"] == 0.1
    assert found[1]["name"] == "first"
    assert names(model, grouped(model, [{"params": model[0].weight}])) == [["0.weight"]]


def test_a_group_without_parameters_is_refused():
    with pytest.raises(TypeError, match="'params'"):
        grouped(mlp(2, 3, 1), [{"weight_decay": 0.1}])


def test_rates_may_be_tensors():
    groups = [{"lr": torch.tensor(0.5), "weight_decay": 0}, {"lr": 0.5, "weight_decay": 0.1}]
    check_same_rate(groups)
    groups[1]["lr"] = 0.25
    with pytest.raises(ValueError, match=r"\[0.5, 0.25\]"):
        check_same_rate(groups)


def test_weights():
    p = torch.zeros(1)
    groups = [
        {"params": [p, p], "weight_decay": 0.1},
        {"params": [], "weight_decay": 3},
        {"params": [p], "weight_decay": 2},
    ]
    assert weights(groups, [False, True, False]).numbers == (0.1, 0.0, 2.0)
