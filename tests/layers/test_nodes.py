"""The rule of every kind of node, against one backward pass for every sample."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from marquardt.layers.capture import Misfit, Place, Walk
from marquardt.layers.graph import NODES, Glimpse, block_of, uses_in
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
