"""The rule of every kind of node, against one backward pass for every sample; and uses of parameters in a graph."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations

from marquardt.layers import Block
from marquardt.layers.blocks import Bilinear, Explicit, Lookup, Nothing
from marquardt.layers.capture import Misfit, Place, Walk
from marquardt.layers.graph import NODES, Glimpse, Use, block_of, uses_in
from support.blocks import agrees
from support.reference import error

pytestmark = pytest.mark.usefixtures("double")

R, N = 2, 5
X = torch.randn(N, 3, dtype=torch.float64) + 2
TOKENS = torch.tensor([[0, 1], [2, 2], [3, 0], [1, 1], [0, 3]])
IMAGES = torch.randn(N, 2, 4, 4, dtype=torch.float64, requires_grad=True)


def backwards(weight: Tensor) -> Tensor:
    y = F.conv2d(IMAGES, weight, None, 2, 1, 1, 2)
    return torch.autograd.grad(y, IMAGES, y.detach().sin(), create_graph=True)[0]


# name: (shape of the parameter, what is made of it, the dimension of the samples in δ)
USES: dict[str, tuple[tuple[int, ...], Callable[[Tensor], Tensor], int]] = {
    "AddBackward0": ((3,), lambda p: torch.add(X, p, alpha=2), 0),
    "AddmmBackward0": ((3, 4), lambda p: torch.addmm(X[:, :1], X, p, alpha=3), 0),
    "AddmmBackward0 bias": ((4,), lambda p: torch.addmm(p, X, torch.ones(3, 4), beta=3), 0),
    "AddmmBackward0 left": ((4, 3), lambda p: torch.addmm(torch.ones(4, 1), p, X.T, alpha=2), 0),
    "BaddbmmBackward0": ((2, 3, 4), lambda p: torch.baddbmm(X[:, :1], X.expand(2, -1, -1), p, alpha=2), 0),
    "BaddbmmBackward0 bias": ((2, 1, 3), lambda p: torch.baddbmm(p, X.expand(2, -1, -1), torch.ones(2, 3, 3)), 1),
    "BmmBackward0": ((2, 3, 4), lambda p: torch.bmm(X.expand(2, -1, -1), p), 0),
    "BmmBackward0 left": ((2, 4, 3), lambda p: torch.bmm(p, X.T.expand(2, -1, -1)), 0),
    "ConvolutionBackward0": ((4, 1, 2, 2), lambda p: F.conv2d(IMAGES.detach(), p, None, 2, 1, 1, 2), 0),
    "ConvolutionBackward0 transposed": (
        (2, 3, 2, 3),
        lambda p: F.conv_transpose2d(IMAGES.detach(), p, None, stride=2, padding=1, output_padding=1, groups=2),
        0,
    ),
    "ConvolutionBackward0 transposed, dilated": (
        (2, 3, 2, 2),
        lambda p: F.conv_transpose2d(IMAGES.detach(), p, None, dilation=2),
        0,
    ),
    "ConvolutionBackward0 transposed, bias": (
        (3,),
        lambda p: F.conv_transpose2d(IMAGES.detach(), torch.ones(2, 3, 2, 2), p),
        0,
    ),
    "ConvolutionBackward0 bias": ((3,), lambda p: F.conv2d(IMAGES.detach(), torch.ones(3, 2, 2, 2), p), 0),
    "ConvolutionBackwardBackward0": ((4, 1, 2, 2), backwards, 0),
    "DivBackward0": ((3,), lambda p: X / p, 0),
    "DivBackward0 left": ((3,), lambda p: p / X, 0),
    "EmbeddingBackward0": ((4, 3), lambda p: F.embedding(TOKENS, p, padding_idx=-1), 0),
    "ExpandBackward0": ((1, 3), lambda p: p.expand(N, 2, 3), 0),
    "MmBackward0": ((3, 4), lambda p: X @ p, 0),
    "MmBackward0 left": ((4, 3), lambda p: p @ X.T, 0),
    "MmBackward0 turned": ((4, 3), lambda p: X @ p.T, 0),
    "MulBackward0": ((3,), lambda p: p * X, 0),
    "MulBackward0 right": ((1,), lambda p: X * p, 0),
    "MvBackward0": ((3,), lambda p: X @ p, 0),
    "NativeLayerNormBackward0": ((3,), lambda p: F.layer_norm(X**2, (3,), p, torch.ones(3)), 0),
    "NativeLayerNormBackward0 bias": ((3,), lambda p: F.layer_norm(X**2, (3,), torch.ones(3), p), 0),
    "PreluKernelBackward0": ((3,), lambda p: F.prelu(X - 2, p), 0),
    "RepeatBackward0": ((1, 3), lambda p: p.repeat(N, 1), 0),
    "SubBackward0": ((3,), lambda p: torch.sub(X, p, alpha=2), 0),
    "SubBackward0 left": ((3,), lambda p: p - X, 0),
    "WhereBackward0": ((3,), lambda p: torch.where(X > 2, p, X), 0),
    "WhereBackward0 other": ((3,), lambda p: torch.where(X > 2, X, p), 0),
}


def test_every_kind_is_tested():
    assert {name.split()[0] for name in USES} == set(NODES)


@pytest.mark.parametrize("R", [1, R])
@pytest.mark.parametrize("name", USES)
def test_rule_of_a_node(name, R):
    shape, make, dim = USES[name]
    p = nn.Parameter(torch.rand(shape) + 0.5)
    y = make(p)
    walk = Walk(y, [p])
    (use,) = uses_in(walk, {len(walk.nodes) - 1})
    assert use.node.name() == name.split()[0]
    delta = torch.randn(R, *y.shape)
    rows = block_of(p, [Glimpse(use, Place(dim, 0, N), delta)], R, N).rows(p.dtype).view(R, N, -1)
    axis = y.shape.index(N)  # of the samples in y
    for r in range(R):
        for n in range(N):
            single = torch.zeros_like(y)
            single.select(axis, n).copy_(delta[r].select(axis, n))
            (expected,) = torch.autograd.grad(y, p, single, retain_graph=True)
            assert error(rows[r, n], expected.flatten()) < 1e-12


def test_what_was_changed_since_is_not_read():
    p, x = nn.Parameter(torch.rand(3)), torch.rand(N, 3)
    y = x * p
    (use,) = uses_in(Walk(y, [p]), {1})
    x.zero_()
    with pytest.raises(Misfit, match="inplace"):
        block_of(p, [Glimpse(use, Place(0, 0, N), torch.ones(1, N, 3))], 1, N)


def test_table_whose_gradient_is_scaled():
    p = nn.Parameter(torch.rand(4, 3))
    (use,) = uses_in(Walk(F.embedding(TOKENS, p, scale_grad_by_freq=True), [p]), set())
    with pytest.raises(Misfit):
        use.form()


# ---- uses of parameters in a graph


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


# ---- blocks of a parameter from its uses by parts of the samples


N = 5


def both(z: Tensor, p: Tensor, R: int, order: tuple[int, int]) -> tuple[Block, Tensor]:
    """The block of a parameter that is used by the first two samples and by the others, and its rows one by one"""
    found: list[Use] = sorted(uses_in(Walk(z, [p]), set()), key=lambda use: use.shape[0])
    S = torch.randn(R, *z.shape)
    glimpses = []
    for use, place in zip(found, (Place(0, 0, 2), Place(0, 2, 3)), strict=True):
        delta = torch.stack([torch.autograd.grad(z, [use.edge], s, retain_graph=True)[0] for s in S])
        glimpses.append(Glimpse(use, place, delta))
    rows = [
        torch.autograd.grad(z[n], p, S[r, n], retain_graph=True)[0].to_dense().flatten()
        for r in range(R)
        for n in range(N)
    ]
    return block_of(p, [glimpses[i] for i in order], R, N), torch.stack(rows)


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
@pytest.mark.parametrize("R", [1, 3])
@pytest.mark.parametrize("kind", ["weight", "other way round", "table", "bias"])
def test_parts_share_positions(kind, R, order):
    x, tokens = torch.randn(N, 4), torch.randint(0, 6, (N, 2))
    p = nn.Parameter(torch.randn({"bias": (3,), "table": (6, 4), "weight": (3, 4)}.get(kind, (4, 3))))
    made = {
        "weight": lambda i: F.linear(x[i], p),
        "other way round": lambda i: x[i] @ p,
        "table": lambda i: F.embedding(tokens[i], p).tanh().sum(1),
        "bias": lambda i: F.linear(x[i], torch.ones(3, 4), p),
    }[kind]
    block, rows = both(torch.cat([made(slice(0, 2)), made(slice(2, N))]).tanh(), p, R, order)
    assert isinstance(block, {"table": Lookup, "bias": Explicit}.get(kind, Bilinear))
    assert getattr(block, "P", None) == {"bias": None, "table": 2}.get(kind, 1)
    agrees(block, rows, N)
    assert block.inputs() is None
    assert block.sums(None) is None


def test_without_uses():
    p = nn.Parameter(torch.randn(3))
    assert isinstance(block_of(p, [], 2, N), Nothing)
