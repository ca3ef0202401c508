"""One forward pass, its repetition, backward passes through it, and every way to its rows."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch import Tensor, nn

from marquardt.jacobian.objective import Objective
from marquardt.jacobian.passes import PATHS, Facts, Jacobian, Pass
from marquardt.losses import resolve
from marquardt.model.anatomy import Chance
from marquardt.model.batch import Batch
from support.reference import error, jacobian, trainable

pytestmark = pytest.mark.usefixtures("double")


def passed(model: nn.Module, x: Tensor, known: Facts | None = None) -> Pass:
    objective = Objective(model, resolve("mse"), list(model.parameters()))
    with torch.no_grad():
        return Pass(objective, Batch(x), known or Facts(), Chance())


def test_backward_passes():
    model, x = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)), torch.randn(5, 3)
    forward, (J, _) = passed(model, x), jacobian(model, trainable(model), x)
    w = torch.randn(5, 2)
    assert torch.equal(forward.z, model(x).detach())
    assert not forward.z.requires_grad
    assert forward.N == 5
    for _ in range(2):  # the graph stays
        assert error(forward.vjp(w), J.T @ w.flatten()) < 1e-12


class Unused(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.used, self.unused = nn.Linear(3, 2), nn.Parameter(torch.ones(2))

    def forward(self, x: Tensor) -> Tensor:
        return self.used(x)


def test_parameters_that_the_outputs_do_not_depend_on():
    model = Unused()
    forward, w = passed(model, torch.randn(5, 3)), torch.randn(5, 2)
    assert [g is None for g in forward.pull(w, list(model.parameters()))] == [True, False, False]
    assert not forward.vjp(w)[:2].any()
    assert forward.vjp(w)[2:].any()


def test_gradients_of_a_table_are_dense():
    model = nn.Embedding(5, 2, sparse=True)
    forward = passed(model, torch.tensor([1, 1, 3]))
    (found,) = forward.pull(torch.ones(3, 2), list(model.parameters()))
    assert found.tolist() == [[0, 0], [2, 2], [0, 0], [1, 1], [0, 0]]


def test_repeated_with_other_parameters_and_the_same_chance():
    """The same masks, the buffers of before, and everything left as it was after the pass."""
    model = nn.Sequential(nn.Linear(3, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 2))
    x = torch.randn(6, 3)
    forward = passed(model, x)
    buffers, state = [b.clone() for b in model.buffers()], torch.get_rng_state()
    assert forward.chance.drawn
    assert error(forward.repeated({}), forward.z) < 1e-12
    bias = model[3].bias
    with torch.no_grad():
        shifted = forward.repeated({id(bias): bias + 1})
    assert error(shifted, forward.z + 1) < 1e-12
    assert all(torch.equal(a, b) for a, b in zip(buffers, model.buffers(), strict=True))
    assert torch.equal(state, torch.get_rng_state())
    with pytest.raises(RuntimeError):  # before any mask is drawn
        forward.repeated({id(model[0].bias): torch.zeros(5)})
    assert torch.equal(state, torch.get_rng_state())
    assert not torch.equal(model(x), forward.z)  # other masks


def test_a_model_without_chance():
    forward = passed(nn.Linear(3, 2), torch.randn(4, 3))
    assert not forward.chance.drawn


def test_what_another_thread_drew_is_not_the_models_chance():
    """The generator has moved, but none of the model's operations draws."""

    class Noticed(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            torch.set_rng_state(torch.Generator().manual_seed(int(x.numel())).get_state())
            return super().forward(x)

    known = Facts()
    assert not passed(Noticed(3, 2), torch.randn(4, 3), known).chance.drawn
    assert not known.random


class Differentiates(nn.Module):
    """Its outputs are a derivative, which is zero without gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(3, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = x.detach().requires_grad_()
        y = self.inner(x).square()
        return torch.autograd.grad(y.sum(), x, create_graph=True)[0] if torch.is_grad_enabled() else torch.zeros_like(x)


def test_same_without_grad():
    assert passed(nn.Linear(3, 2), torch.randn(4, 3)).same_without_grad()
    assert not passed(Differentiates(), torch.randn(4, 3)).same_without_grad()


def test_what_no_pass_can_be_made_of():
    class InPlace(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x.mul_(2))

    with pytest.raises(ValueError, match=r"in place.*clone"):
        passed(InPlace(3, 2), torch.randn(4, 3))

    class Detached(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x).detach()

    with pytest.raises(ValueError, match="nothing to optimise"):
        passed(Detached(3, 2), torch.randn(4, 3))
    with pytest.raises(ValueError, match=r"the inputs are torch\.float32, the parameters torch\.float64: convert"):
        passed(nn.Linear(3, 2), torch.randn(4, 3, dtype=torch.float32))
    with pytest.raises(ValueError, match="shapes cannot be multiplied"):
        passed(nn.Linear(3, 2), torch.randn(4, 2))


def test_release():
    forward = passed(nn.Linear(3, 2), torch.randn(4, 3))
    forward.release(graph=False)
    assert forward.graph.requires_grad
    assert not hasattr(forward, "watch")


# ---- j̃ = SᵀJ of one pass: its products, its random numbers, and every way to its rows


R, N, OUT = 3, 4, 2


def made(rows: int = R, layer: nn.Module | None = None) -> tuple[Jacobian, Tensor]:
    """With J̃ by hand: row r·N + n is Σ S[r, n]·∂z[n]/∂θ"""
    middle = nn.Tanh() if layer is None else layer
    model, x = nn.Sequential(nn.Linear(3, 5), middle, nn.Linear(5, OUT)), torch.randn(N, 3)
    objective = Objective(model, resolve("mse"), list(model.parameters()))
    S = torch.randn(rows, N, OUT)
    with torch.no_grad():
        forward = Pass(objective, Batch(x), Facts(), Chance())
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


def test_a_copy_finds_out_again():
    """What is proven is not copied, nor read from a pickle of an earlier version."""
    facts = Facts(batched_rows=False, proven="so")
    assert copy.deepcopy(facts) == pickle.loads(pickle.dumps(facts)) == Facts()
    old = Facts.__new__(Facts)
    old.__setstate__({"proof": {"layouts": {}}, "batched_rows": False})
    assert old == Facts()
