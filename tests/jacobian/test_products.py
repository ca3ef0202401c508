"""Products with blocks that hold the parameters in another order, against J̃ written out."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from marquardt.jacobian.piece import adjoint, apply, dense, scattered, together
from marquardt.layers.blocks import Block, Explicit, Nothing
from marquardt.model.parameters import Parameters
from support.reference import error

pytestmark = pytest.mark.usefixtures("double")


def made() -> tuple[list[Block], Tensor, Parameters]:
    """Four parameters; one block holds the last and the first of them, one has no influence."""
    model = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1))
    parameters = Parameters(model, list(model.parameters()))
    a, b, c, d = parameters.tensors
    rows = torch.randn(4, 13)
    rows[:, 6:9] = 0
    blocks = [
        Explicit([d, a], torch.cat([rows[:, 12:], rows[:, :6]], 1), 4),
        Nothing([b], 4, 4),
        Explicit([c], rows[:, 9:12], 4),
    ]
    return blocks, rows, parameters


def test_products():
    blocks, J, parameters = made()
    v, w = torch.randn(13), torch.randn(4)
    assert torch.equal(dense(blocks, torch.float64, parameters), J)
    assert error(apply(blocks, v, parameters), J @ v) < 1e-14
    assert error(adjoint(blocks, w, parameters), J.T @ w) < 1e-14
    blocks[1].adjoint(w, [filled := torch.ones(3)])
    assert not filled.any()
    diagonals = ((block, block.diagonal()) for block in blocks)
    assert error(scattered(diagonals, parameters), J.square().sum(0)) < 1e-14


def test_precision():
    blocks, J, parameters = made()
    assert dense(blocks, torch.float32, parameters).dtype == torch.float32
    assert adjoint(blocks, torch.ones(4, dtype=torch.float32), parameters).dtype == torch.float32
    assert error(apply(blocks, torch.ones(13, dtype=torch.float32), parameters), J.sum(1)) < 1e-5


def test_blocks_that_share_a_group_of_parameters_are_one():
    """A parameter without influence has zeros in it, and leaves its block."""
    blocks, J, parameters = made()
    a, b, c, d = parameters.tensors
    one, rest = together([*blocks[:1], Nothing([b, c], 4, 4)], [(0, 1)], torch.float64, parameters)
    assert [id(p) for p in one.params] == [id(d), id(a), id(b)]
    assert torch.equal(one.rows(torch.float64), torch.cat([J[:, 12:], J[:, :9]], 1))
    assert rest.empty
    assert [id(p) for p in rest.params] == [id(c)]
    found = together(blocks, [(0, 2)], torch.float64, parameters)
    assert len(found) == 2
    assert torch.equal(dense(found, torch.float64, parameters), J)


def test_blocks_that_share_no_group_stay():
    blocks, _, parameters = made()
    for groups in ([], [(3, 0)], [(1,)]):
        assert together(blocks, groups, torch.float64, parameters) == blocks
    nothing = [Nothing([p], 4, 4) for p in parameters.tensors]
    assert together(nothing, [(0, 1)], torch.float64, parameters) == nothing
