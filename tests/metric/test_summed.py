"""Sums of D and a diagonal: exact for products, and what lies above them in the form of D."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import marquardt as mq
from marquardt.metric import Diagonal, Layered, Part
from marquardt.weights import Weights
from support.reference import error
from support.regularised import ELEMENTS, above, dense, made, weights

pytestmark = pytest.mark.usefixtures("double")

SIZES = [6, 2, 4]
W = {
    "uniform": Weights([0.3, 0.3, 0.3]),
    "none for the bias": Weights([0.3, 0.0, 0.1]),
    "only the bias": Weights([0.0, 0.3, 0.0]),
}
SOME = [torch.tensor(x).double() for x in ([0.1, 0.0, 0.3, 0.0, 0.2, 0.5], [0.1, 0.4], [0.0, 1.0, 2.0, 3.0])]
PARTLY = {
    "elements": Weights([1.0, 0.3, 2.0], {0: SOME[0], 2: SOME[2]}, gaps=True),
    "elements of the bias": Weights([0.2, 1.0, 0.0], {1: SOME[1]}),
}
EVERY_W = pytest.mark.parametrize("w", [*W.values(), *PARTLY.values()], ids=[*W, *PARTLY])


def diagonals() -> dict[str, Diagonal]:
    u = torch.rand(1, 2, 1) + 0.5
    scale = torch.tensor(0.7)
    return {
        "number": Diagonal(scale),
        "numbers": Diagonal(scale, [Part(torch.rand(())) for _ in SIZES]),
        "entries": Diagonal(scale, [Part(torch.rand(size)) for size in SIZES]),
        "u": Diagonal(scale, [Part(torch.rand(6)), Part(None, u), Part(torch.rand(4))]),
        "u ⊗ v": Diagonal(scale, [Part(None, u, torch.rand(1, 1, 3)), Part(None, u), Part(torch.rand(4))]),
    }


def spread(w: Weights) -> Tensor:
    return torch.cat([torch.zeros(size) + w[i] for i, size in enumerate(SIZES)])


@EVERY_W
@pytest.mark.parametrize("kind", diagonals())
def test_a_diagonal(kind, w):
    D = diagonals()[kind]
    exact = D.entries(SIZES) + spread(w)
    assert error(D.sum(w, SIZES).entries(SIZES), exact) < 1e-14
    raised = D.plus(w, SIZES).entries(SIZES)
    assert bool((raised >= exact * (1 - 1e-14)).all())
    if kind != "u ⊗ v":
        assert error(raised, exact) < 1e-14


@EVERY_W
def test_a_product_stays_one(w):
    D = diagonals()["u ⊗ v"]
    weight, bias, _ = D.plus(w, SIZES).parts
    assert torch.equal(weight.u, bias.u)
    assert weight.v.shape == (1, 1, 3)
    assert bias.v.shape == (1, 1, 1)
    assert error(D.plus(Weights([0.0] * 3), SIZES).entries(SIZES), D.entries(SIZES)) < 1e-14
    alone = D.with_scale(torch.zeros(())).plus(w, SIZES).entries(SIZES)
    assert error(alone, spread(w.by_columns([0, 1], 1, 2))) < 1e-14


def test_one_number_stays_one():
    D = Diagonal(torch.tensor(0.7))
    assert D.sum(Weights([0.3] * 3), SIZES).shape is None
    assert D.sum(Weights([0.3, 0.3, 0.0]), SIZES).shape is not None
    assert Diagonal(torch.tensor(0.7)).sum(Weights([1.0], {0: torch.arange(3.0)}), [3]).shape is not None


def test_a_product_of_several_groups():
    """(√s·u + √w/ρ) ⊗ (√s·v + ρ·E/√w), w the largest and E the largest of every column, group by group."""
    sizes, G, O = [12, 4], 2, 2
    u, v, s = torch.rand(G, O, 1) + 0.5, torch.rand(G, 1, 3) + 0.5, torch.tensor(0.7)
    elements = torch.rand(12).sub(0.2).clamp(min=0)
    D, w = Diagonal(s, [Part(None, u, v), Part(None, u)]), Weights([2.0, 0.3], {0: elements})
    raised = D.plus(w, sizes)
    rho, most = (v.mean() / u.mean()).sqrt(), 2 * elements.max()
    E = 2 * elements.view(G, O, 3).amax(1, keepdim=True)
    left = s.sqrt() * u + most.sqrt() / rho
    weight, bias = left * (s.sqrt() * v + rho * E / most.sqrt()), left * (s.sqrt() + rho * 0.3 / most.sqrt())
    assert error(raised.entries(sizes), torch.cat([weight.flatten(), bias.flatten()])) < 1e-14
    assert bool((raised.entries(sizes) >= D.sum(w, sizes).entries(sizes)).all())


class Mixed(nn.Module):
    """A convolution of two groups, a vector, an embedding and a linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm, self.head = nn.Conv1d(2, 4, 2, groups=2), nn.LayerNorm(3), nn.Linear(12, 2)
        self.table = nn.Embedding(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        rows = self.norm(self.conv(x)).tanh() + self.table(torch.tensor([1, 3, 1, 0]))
        return self.head(rows.flatten(1))


def layered(every: int, model: nn.Module | None = None) -> tuple[Layered, list[int]]:
    model = Mixed() if model is None else model
    lin = mq.linearize(model, "mse", torch.randn(5, 2, 4), torch.randn(5, 2))
    D = mq.KroneckerMetric(every=every).update(None, mq.Dense().represent(lin))
    assert isinstance(D, Layered)
    return D, lin.parameters.sizes


@pytest.mark.parametrize("every", [1, 10])
@pytest.mark.parametrize("kind", ["all", "weights", "biases", "several", *ELEMENTS])
def test_a_kronecker_product(kind, every):
    model = Mixed()
    D, sizes = layered(every, model)
    number = {"all": lambda i: 0.3, "weights": lambda i: 0.3 * (i % 2 == 0), "biases": lambda i: 0.3 * (i % 2)}
    given = [number.get(kind, lambda i: 0.1 * (i + 1))(i) for i in range(len(sizes))]
    if kind in ELEMENTS:
        given = [ELEMENTS[kind](p.detach()) for p in model.parameters()]
    w, diagonal = made(list(model.parameters()), given), weights(model, given).diag()
    A = 0.2 * D
    exact = 0.2 * dense(D, sizes) + diagonal
    assert error(dense(A.sum(w, sizes), sizes), exact) < 1e-12
    assert error(A.sum(w, sizes).diagonal(sizes), exact.diagonal()) < 1e-12
    raised = A.plus(w, sizes)
    expected = above(D, 0.2, diagonal.diagonal(), sizes)
    assert error(dense(raised, sizes), expected) < 1e-10
    assert torch.linalg.eigvalsh(expected - exact).min() > -1e-10
    v = torch.randn(sum(sizes))
    assert error(raised.solve(v.clone(), sizes), torch.linalg.solve(expected, v)) < 1e-9
    assert error((2.0 * raised).times(v, sizes), 2 * expected @ v) < 1e-10
    assert error(raised.to(v.float()).times(v.float(), sizes), expected @ v) < 1e-5
    assert error(dense(D.plus(Weights([0.0] * len(sizes)), sizes), sizes), dense(D, sizes)) < 1e-10
    if kind in ("all", "several"):
        assert error(dense((0.0 * D).plus(w, sizes), sizes), diagonal) < 1e-12


def test_a_sum_cannot_be_solved_with():
    D, sizes = layered(1)
    total = D.sum(Weights([0.3] * len(sizes)), sizes)
    with pytest.raises(TypeError, match="above"):
        total.solve(torch.ones(sum(sizes)), sizes)
    assert isinstance(total.above, Layered)
    assert D.above is D
