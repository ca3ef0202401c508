"""Parameter groups."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from marquardt.protocol import check_same_rate, grouped, weights
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


def test_weights_by_element():
    """Copies in the precision of θ, one for every element; a tensor of one value is a number."""
    p, q = torch.zeros(2, 3), torch.zeros(3)
    w = torch.tensor([0.0, 1.0, 2.0]).double()
    groups = [
        {"params": [p, q], "weight_decay": w},
        {"params": [p, q], "weight_decay": torch.full((3,), 0.5)},
        {"params": [torch.zeros(0)], "weight_decay": torch.rand(0)},
    ]
    found = weights(groups, [False, False, False, True, False])
    assert found.numbers == (1.0, 1.0, 0.5, 0.0, 0.0)
    assert list(found.elements) == [0, 1]
    assert torch.equal(found.elements[0], torch.tensor([0.0, 1.0, 2.0, 0.0, 1.0, 2.0]))
    assert found.gaps
    w.fill_(7.0)
    assert torch.equal(found.elements[1], torch.tensor([0.0, 1.0, 2.0]))
    assert weights(groups, [True, True, True, True, True]).elements == {}
    assert not weights([{"params": [q], "weight_decay": torch.tensor([1.0, 2.0, 3.0])}], [False]).gaps


def test_weights():
    p = torch.zeros(1)
    groups = [
        {"params": [p, p], "weight_decay": 0.1},
        {"params": [], "weight_decay": 3},
        {"params": [p], "weight_decay": 2},
    ]
    assert weights(groups, [False, True, False]).numbers == (0.1, 0.0, 2.0)
