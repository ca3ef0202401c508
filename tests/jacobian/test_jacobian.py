"""J̃ = SᵀJ of one pass: its products, its random numbers, and every way to its rows."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from marquardt.jacobian.objective import Objective
from marquardt.jacobian.passes import PATHS, Jacobian, Known, Pass
from marquardt.losses import resolve
from marquardt.model.anatomy import Chance
from marquardt.model.batch import Batch
from support.reference import error, jacobian, trainable

pytestmark = pytest.mark.usefixtures("double")

R, N, OUT = 3, 4, 2


def made(rows: int = R, layer: nn.Module | None = None) -> tuple[Jacobian, Tensor]:
    """With J̃ by hand: row r·N + n is Σ S[r, n]·∂z[n]/∂θ"""
    middle = nn.Tanh() if layer is None else layer
    model, x = nn.Sequential(nn.Linear(3, 5), middle, nn.Linear(5, OUT)), torch.randn(N, 3)
    objective = Objective(model, resolve("mse"), list(model.parameters()))
    S = torch.randn(rows, N, OUT)
    with torch.no_grad():
        forward = Pass(objective, Batch(x), Known(), Chance())
    if layer is not None:
        return Jacobian(forward, S), torch.empty(0)
    J = jacobian(model, trainable(model), x)[0].view(N, OUT, -1)
    return Jacobian(forward, S), torch.einsum("rno,noj->rnj", S, J).reshape(rows * N, -1)


def test_products():
    J, rows = made()
    w, Jv = torch.randn(R, N), torch.randn(N, OUT)
    assert (J.R, J.N, J.m) == (R, N, R * N)
    assert error(J.adjoint(w), rows.T @ w.flatten()) < 1e-12
    expected = torch.stack([torch.stack([J.S[r, n] @ Jv[n] for n in range(N)]) for r in range(R)])
    assert error(J.seen(Jv), expected) < 1e-12
    assert torch.equal(J.seen(None), torch.zeros(R, N))
    assert error((J.cotangent(w) * Jv).sum(), (w * expected).sum()) < 1e-12


def test_random_numbers_are_the_same_every_time():
    J, _ = made()
    state = torch.get_rng_state()
    assert torch.equal(J.random(), J.random())
    assert not torch.equal(J.random(), J.random(1))
    assert J.random().shape == (R, N)
    assert torch.equal(state, torch.get_rng_state())


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("which", [[0, 1, 2, 3], [2], [1, 3]])
def test_every_way_to_the_rows(path, which):
    J, rows = made()
    columns = rows.split(J.parameters.sizes, 1)
    with torch.no_grad():
        assert error(J.explicit(path, which), torch.cat([columns[i] for i in which], 1)) < 1e-12


def test_parts_refuse_a_random_model():
    J, _ = made(layer=nn.Dropout(0.5))
    with pytest.raises(ValueError, match="random"):
        J.explicit("parts", [0])


@pytest.mark.parametrize("rows", [1, R])
def test_deltas(rows):
    """The gradient of a row at the output of the last layer is its S; the bias of the first has their sums."""
    J, expected = made(rows)
    assert J.deltas({}) == {}
    first, last = J.deltas({i: call.edge for i, call in enumerate(J.forward.watch.calls)}).values()
    assert error(last, J.S) < 1e-15
    assert error(first.reshape(rows * N, -1), expected[:, 15:20]) < 1e-12
