"""Uses of parameters in a graph."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations

from marquardt.layers.capture import Misfit, Walk
from marquardt.layers.graph import Use, uses_in


def uses(z: Tensor, *params: Tensor, stops: set[int] | None = None) -> list[Use]:
    return uses_in(Walk(z, params), stops)


def names(found: list[Use]) -> list[tuple[str, int]]:
    return [(use.node.name(), use.slot) for use in found]


def test_layer():
    layer, x = nn.Linear(3, 2), torch.randn(4, 3)
    found = uses(layer(x).tanh(), layer.weight, layer.bias)
    assert sorted(names(found)) == [("AddmmBackward0", 0), ("AddmmBackward0", 2)]
    weight = next(use for use in found if use.slot == 2)
    assert (weight.direct, weight.turned, weight.params, weight.shape) == (True, True, {0}, (4, 2))


def test_derivative_within():
    """The weight is used once forwards and once backwards, where it is not transposed."""
    layer, x = nn.Linear(3, 2, bias=False), torch.randn(4, 3, requires_grad=True)
    (g,) = torch.autograd.grad(layer(x).tanh().sum(), x, create_graph=True)
    assert sorted(use.turned for use in uses(g, layer.weight)) == [False, True]


def test_leaf_that_is_no_parameter():
    x, p = torch.randn(3, requires_grad=True), nn.Parameter(torch.randn(3))
    assert names(uses(x * p, p)) == [("MulBackward0", 1)]
    assert uses(x * 2, p) == []


def test_made_of_parameters_alone():
    layer, x = parametrizations.weight_norm(nn.Linear(3, 2)), torch.randn(4, 3)
    g, v = layer.parametrizations.weight.original0, layer.parametrizations.weight.original1
    (use,) = uses(layer(x), g, v)
    assert (use.direct, use.params) == (False, {0, 1})


def test_node_that_may_see_samples():
    """2·p and x·p are the same node: only evidence tells."""
    p, x = nn.Parameter(torch.randn(3)), torch.randn(4, 3)
    z = x + p * 2
    walk = Walk(z, [p])
    assert sorted(names(uses_in(walk))) == [("AddBackward0", 1), ("MulBackward0", 0)]
    (number,) = {use.number for use in uses_in(walk) if use.node.name() == "MulBackward0"}
    assert names(uses_in(walk, {number})) == [("MulBackward0", 0)]
    assert names(uses_in(walk, set())) == []  # neither: all is made of parameters
    assert names(uses_in(walk, {use.number for use in uses_in(walk)} - {number})) == [("AddBackward0", 1)]


def test_node_that_sees_none():
    layer, grid, x = nn.Linear(3, 2), torch.randn(5, 3), torch.randn(4, 2)
    walk = Walk(x @ layer(grid).tanh().T, list(layer.parameters()))
    (number,) = {use.number for use in uses_in(walk, set())}
    (use,) = uses_in(walk, set(), {number})
    assert (use.node.name(), use.slot, use.params, use.direct) == ("MmBackward0", 1, {0, 1}, False)


def test_node_without_a_rule():
    p, x = nn.Parameter(torch.randn(3)), torch.rand(4, 3)
    (use,) = uses(torch.atan2(x, p), p)
    with pytest.raises(Misfit, match="Atan2Backward0"):
        use.form()
