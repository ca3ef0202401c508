"""G as a matrix: every way to add it up, its running average, and what it refuses."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import marquardt as mq
from marquardt.curvature.dense import PAYS, symmetric
from support import reference
from support.reference import error

pytestmark = pytest.mark.usefixtures("double")


class Mixed(nn.Module):
    """A parameter without a rule between two layers, one with several positions, and one that is not used."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.unused = nn.Linear(2, 3), nn.Parameter(torch.ones(2))
        self.gain, self.head, self.last = nn.Parameter(torch.rand(3)), nn.Linear(3, 4), nn.Linear(4, 2, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.head((self.tokens(x).tanh() * self.gain**2).mean(1)).tanh())


def made(small: int, chunk: int | None = None, rows: mq.Rows = mq.Exact(), **options):
    torch.manual_seed(0)
    model, x, y = Mixed(), torch.randn(7, 5, 2), torch.randn(7, 2)
    lin = mq.linearize(model, "mse", x, y, chunk=chunk, rows=rows)
    return mq.Dense(small=small, **options).represent(lin), reference.quadratic(model, "mse", x, y)


@pytest.mark.parametrize("small", [0, 256], ids=["by pairs of layers", "in one product"])
@pytest.mark.parametrize("chunk", [None, 3])
def test_every_way_to_add_it_up(small, chunk):
    G, expected = made(small, chunk)
    assert error(G.G, expected.G) < 1e-12
    assert error(G.gradient, expected.g) < 1e-12
    A = torch.rand(len(expected.g)) + 0.1
    assert error(G.newton(A), -expected.step(A)) < 1e-10
    assert error(G.step(mq.Diagonal.of(A, G.parameters.sizes)), expected.step(A)) < 1e-10
    v = torch.randn(len(expected.g))
    assert error(G @ v, expected.G @ v) < 1e-12


@pytest.mark.parametrize("small", [0, 256], ids=["by pairs of layers", "in one product"])
def test_a_gradient_outside_the_range_of_the_rows(small):
    G, expected = made(small, rows=mq.Sampled(2))
    assert error(G.gradient, expected.g) < 1e-12
    assert error(G.G, G.lin.rows().T @ G.lin.rows()) < 1e-12


@pytest.mark.parametrize("q", [5, PAYS, PAYS + 1])
def test_symmetric(q):
    X = torch.randn(6, q)
    assert error(symmetric(X), X.T @ X) < 1e-13


def test_running_average():
    """Ḡ ← w·Ḡ + (1−w)·G with w = min(β, k/(k + 2)): a short memory at first."""
    G, expected = made(256, inertia=0.8)
    assert not G.averaged
    for k, w in ((1, 1 / 3), (2, 1 / 2), (100, 0.8)):
        G, expected = made(256, inertia=0.8)
        past = {"G": 2 * expected.G, "batches": torch.tensor(float(k))}
        G.recall(past, False)
        assert G.averaged
        assert error(G.G, (1 + w) * expected.G) < 1e-12
        kept = G.keep()
        assert kept["G"] is G.G
        assert kept["batches"] == k + 1
        assert error(past["G"], 2 * expected.G) == 0


def test_an_average_far_above_the_present_has_less_weight():
    """Its share of tr Ḡ is at most ten times the present: w·1000·10/1000"""
    G, expected = made(256, inertia=0.8)
    G.recall({"G": 1000 * expected.G, "batches": torch.tensor(100.0)}, False)
    w = 0.8 * 10 / 1000
    assert error(G.G, (1000 * w + 1 - w) * expected.G) < 1e-12


@pytest.mark.parametrize(("inertia", "same_data"), [(0.0, False), (0.8, True)])
def test_no_average(inertia, same_data):
    G, expected = made(256, inertia=inertia)
    G.recall({"G": 2 * expected.G, "batches": torch.tensor(5.0)}, same_data)
    assert not G.averaged
    assert error(G.G, expected.G) < 1e-12
    assert G.keep() is None


def test_formed_again_in_float64():
    """If the damping leaves too few digits of float32."""
    model, x, y = nn.Linear(3, 1).float(), torch.randn(8, 3), torch.randn(8, 1).float()
    x = (x * torch.tensor([1.0, 1.0, 1e-3])).float()
    G = mq.Dense(small=0).represent(mq.linearize(model, "mse", x, y))
    assert G.G.dtype == torch.float32
    G.newton(torch.tensor(1.0, dtype=torch.float32))
    assert G.notes == []
    d = G.newton(torch.tensor(1e-6, dtype=torch.float32))
    assert G.notes == ["curvature formed again in float64"]
    assert G.G.dtype == torch.float64
    assert d.dtype == torch.float32
    exact = reference.quadratic(model.double(), "mse", x.double(), y.double())
    assert error(d, -exact.step(1e-6)) < 1e-3


def test_what_an_earlier_step_kept_of_other_parameters():
    mq.Dense().check({"G": torch.zeros(3, 3)}, 3)
    mq.Dense().check({}, 3)
    with pytest.raises(ValueError, match="of 4 parameters, this optimizer has 3"):
        mq.Dense().check({"G": torch.zeros(4, 4)}, 3)
