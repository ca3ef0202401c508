"""Every product of a Bilinear block against its own rows, written out."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import marquardt.layers.blocks as bilinear
from marquardt.layers.blocks import Bilinear, Product, Whitened
from marquardt.metric import Part
from support.reference import error

pytestmark = pytest.mark.usefixtures("double")

# R, N, P, G, O, I. With P = 7 the pairs of positions are dearer than the rows.
SHAPES = {
    "one row": (1, 4, 1, 1, 3, 2),
    "several rows": (2, 4, 1, 1, 3, 2),
    "groups": (2, 3, 1, 2, 3, 2),
    "few positions": (2, 3, 2, 1, 9, 8),
    "many positions": (2, 3, 7, 1, 3, 2),
    "positions and groups": (2, 3, 4, 2, 2, 3),
    "one output per group": (2, 3, 4, 3, 1, 2),
}
EVERY_SHAPE = pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
HALVES = pytest.mark.parametrize("halves", ["weight and bias", "weight", "bias", "weight and bias times one"])


def made(shape: tuple[int, ...], halves: str = "weight and bias", N: int | None = None, like: Bilinear | None = None):
    """A random block; with `like` one of the same parameters."""
    R, N, P, G, O, I = (shape[0], N or shape[1], *shape[2:])
    weight = torch.randn(G * O, I) if "weight" in halves else None
    bias = torch.randn(G * O) if "bias" in halves else None
    one = torch.tensor(0.7) if "one" in halves else None
    if like is not None:
        weight, bias = like.weight, like.bias
    a = torch.randn(N, P, G, 0 if weight is None else I)
    return Bilinear(a, torch.randn(R, N, P, G, O), weight, bias, one)


def written(block: Bilinear) -> Tensor:
    """Row r·N + n is Σₚ δ[r, n, p] ⊗ a[n, p] for the weight, and Σₚ δ[r, n, p] times what the bias multiplies."""
    rows = []
    for r in range(block.R):
        for n in range(block.N):
            outer = torch.zeros(block.G, block.O, block.I)
            for p in range(block.P):
                for g in range(block.G):
                    outer[g] += torch.outer(block.delta[r, n, p, g], block.a[n, p, g])
            row = [outer.flatten()] if block.weight is not None else []
            if block.bias is not None:
                one = 1.0 if block.one is None else block.one
                row.append(one * block.delta[r, n].sum(0).flatten())
            rows.append(torch.cat(row))
    return torch.stack(rows)


def by_sample(rows: Tensor, N: int) -> Tensor:
    """From row r·N + n to row n·R + r"""
    return torch.stack([rows[r * N + n] for n in range(N) for r in range(len(rows) // N)])


@EVERY_SHAPE
@HALVES
def test_products(shape, halves):
    block = made(shape, halves)
    J = written(block)
    sizes = [p.numel() for p in block.params]
    assert block.columns == J.shape[1]
    v, w, X = torch.randn(J.shape[1]), torch.randn(len(J)), torch.randn(len(J), 5)
    assert error(block.rows(torch.float64), J) < 1e-12
    assert error(block.apply(v.split(sizes)), J @ v) < 1e-12
    assert error(block.pull(w), J.T @ w) < 1e-12
    assert error(block.samples(torch.float64), by_sample(J, block.N)) < 1e-12
    assert error(block.against(X), X.T @ by_sample(J, block.N)) < 1e-12
    assert error(block.square(torch.float64), J.T @ J) < 1e-12
    assert error(block.diagonal(), J.square().sum(0)) < 1e-12
    assert error(block.trace(), J.square().sum()) < 1e-12


@EVERY_SHAPE
@HALVES
def test_gram(shape, halves):
    """Of one piece, with a product on the way, and of two pieces of different sizes; K is added to."""
    block = made(shape, halves)
    other = made(shape, halves, N=block.N + 2, like=block)
    J, L, v = written(block), written(other), torch.randn(block.columns)
    assert block.pairs_with(other)
    before = torch.randn(len(J), len(J))
    K, Jv = before.clone(), torch.ones(len(J))
    block.gram(K, block, Product(v.split([p.numel() for p in block.params]), Jv))
    assert error(K - before, J @ J.T) < 1e-12
    assert error(Jv - 1, J @ v) < 1e-12
    K = torch.zeros(len(J), len(L))
    block.gram(K, other)
    assert error(K, J @ L.T) < 1e-12


@EVERY_SHAPE
def test_in_slabs(monkeypatch, shape):
    """Rows in pieces of a few numbers are the same rows."""
    block = made(shape)
    J, v = written(block), torch.randn(block.columns)
    monkeypatch.setattr(bilinear, "SLAB", 20)
    columns = [columns for columns, _ in block.slabs(torch.float64)]
    assert len(columns) > 2
    assert [c.start for c in columns] == [0, *(c.stop for c in columns[:-1])]
    assert error(block.rows(torch.float64), J) < 1e-12
    assert error(block.square(torch.float64), J.T @ J) < 1e-12
    K, Jv = torch.zeros(len(J), len(J)), torch.zeros(len(J))
    block.gram(K, block, Product(v.split([p.numel() for p in block.params]), Jv))
    assert error(K, J @ J.T) < 1e-12
    assert error(Jv, J @ v) < 1e-12


def test_products_in_the_precision_of_what_is_multiplied():
    """Rows in float32, products in float64: as good as those of the same rows in float64."""
    block = made((2, 4, 1, 1, 3, 2))
    exact = Bilinear(block.a.float().double(), block.delta.float().double(), block.weight, block.bias)
    coarse = Bilinear(block.a.float(), block.delta.float(), block.weight.float(), block.bias.float())
    J, v, w = written(exact), torch.randn(block.columns), torch.randn(block.m)
    assert error(coarse.apply(v.split([6, 3])), J @ v) < 1e-12
    assert error(coarse.pull(w), J.T @ w) < 1e-12
    assert error(coarse.square(torch.float64), J.T @ J) < 1e-12


@EVERY_SHAPE
def test_without(shape):
    block = made(shape)
    J, size = written(block), block.weight.numel()
    for dropped, kept in ((block.weight, J[:, size:]), (block.bias, J[:, :size])):
        rest = block.without([dropped])
        (left,) = rest.params
        assert left is not dropped
        assert error(rest.rows(torch.float64), kept) < 1e-12
        assert error(rest.trace(), kept.square().sum()) < 1e-12
    assert block.without(block.params) is None
    assert error(block.without([torch.zeros(3)]).rows(torch.float64), J) < 1e-12


@EVERY_SHAPE
def test_beside(shape):
    """A layer that is called twice: the rows add up."""
    first = made(shape)
    second = made((*shape[:2], shape[2] + 1, *shape[3:]), like=first)
    both = first.beside([second])
    assert both.P == first.P + second.P
    assert error(both.rows(torch.float64), written(first) + written(second)) < 1e-12


def flat_root(block: Bilinear, D: list[Part]) -> Tensor:
    """√D by hand: (columns,)"""
    found = []
    for p, d in zip(block.params, D, strict=True):
        u = torch.ones(block.G, block.O, 1) if d.u is None else d.u
        v = torch.ones(1) if d.v is None else d.v
        whole = u * v * torch.ones(block.G, block.O, p.numel() // (block.G * block.O))
        found.append(whole.flatten() if d.entries is None else d.entries.expand(p.numel()))
    return torch.cat(found).sqrt()


def dampings(G: int, O: int, I: int) -> dict[str, list[Part]]:
    u, v = torch.rand(G, O, 1) + 0.1, torch.rand(G, 1, I) + 0.1
    number, bias = torch.tensor(0.3), torch.tensor(2.5)
    return {
        "u ⊗ v, u": [Part(u=u, v=v), Part(u=u)],
        "u ⊗ v, equal u": [Part(u=u, v=v), Part(u=u.clone())],
        "u ⊗ v, another u": [Part(u=u, v=v), Part(u=u + 1)],
        "u ⊗ v, a number": [Part(u=u, v=v), Part(number)],
        "a number each": [Part(number), Part(bias)],
        "a number, u": [Part(number), Part(u=u)],
        "entries": [Part(torch.rand(G * O * I) + 0.1), Part(torch.rand(G * O) + 0.1)],
        "a number, entries": [Part(number), Part(torch.rand(G * O) + 0.1)],
    }


@EVERY_SHAPE
@pytest.mark.parametrize("kind", dampings(1, 1, 1))
def test_whitened(shape, kind):
    block = made(shape)
    D = dampings(*shape[3:])[kind]
    root, sizes = flat_root(block, D), [p.numel() for p in block.params]
    J, white = written(block) / root, block.whitened(D)
    v, w, K = torch.randn(block.columns), torch.randn(block.m), torch.zeros(block.m, block.m)
    assert error(white.rows(torch.float64), J) < 1e-12
    assert error(white.apply(v.split(sizes)), J @ v) < 1e-12
    assert error(white.pull(w), J.T @ w) < 1e-12
    assert error(white.diagonal(), J.square().sum(0)) < 1e-12
    white.gram(K, white)
    assert error(K, J @ J.T) < 1e-12


@pytest.mark.parametrize("kind", dampings(1, 1, 1))
def test_whitened_stays_bilinear_if_it_can(kind):
    """Then the rows are never written out."""
    block = made(SHAPES["several rows"])
    kept = kind in ("u ⊗ v, u", "u ⊗ v, equal u", "a number each")
    assert type(block.whitened(dampings(1, 3, 2)[kind])) is (Bilinear if kept else Whitened)


@pytest.mark.parametrize("halves", ["weight", "bias"])
def test_whitened_half(halves):
    block, u, v = made(SHAPES["many positions"], halves), torch.rand(1, 3, 1) + 0.1, torch.rand(1, 1, 2) + 0.1
    D = [Part(u=u, v=v)] if halves == "weight" else [Part(u=u)]
    assert error(block.whitened(D).rows(torch.float64), written(block) / flat_root(block, D)) < 1e-12


# ---- what Kronecker factors ask for


def augmented(block: Bilinear) -> Tensor:
    """a with a 1 for the bias: (N, P, G, J)"""
    ones = torch.ones(*block.a.shape[:3], 0 if block.bias is None else 1)
    return torch.cat([block.a, ones], 3)


@EVERY_SHAPE
@pytest.mark.parametrize("halves", ["weight and bias", "weight", "bias"])
@pytest.mark.parametrize("weighted", [False, True])
def test_sums(shape, halves, weighted):
    block = made(shape, halves)
    each = torch.rand(block.N) if weighted else torch.ones(block.N)
    found, a = block.sums(each if weighted else None), augmented(block)
    assert (found.bias, found.table) == (block.bias is not None, False)
    if block.G > 1 and block.O == 1:
        x = torch.einsum("rnpg,npgj->rngj", block.delta[..., 0], a)
        assert found.B is None
        assert error(found.A, torch.einsum("rngi,rngj->gij", x, x)) < 1e-12
        return
    assert error(found.A, torch.einsum("n,npgi,npgj->gij", each, a, a)) < 1e-12
    assert error(found.B, torch.einsum("rnpgo,rnpgk->gok", block.delta, block.delta)) < 1e-12
    assert float(found.count) == pytest.approx(float(each.sum()) * block.P)


@EVERY_SHAPE
@pytest.mark.parametrize("halves", ["weight and bias", "weight", "bias"])
@pytest.mark.parametrize("sides", ["none", "left", "right", "both"])
def test_second_moments(shape, halves, sides):
    """diag QᵀJ̃ᵀJ̃Q with Q = left ⊗ right in every group."""
    block = made(shape, halves)
    a = augmented(block)
    J = a.shape[3]
    left = torch.randn(block.G, block.O, block.O) if sides in ("left", "both") else None
    right = torch.randn(block.G, J, J) if sides in ("right", "both") else None
    rows = torch.einsum("rnpgo,npgj->rngoj", block.delta, a).flatten(0, 1)  # (m, G, O, J)
    for g in range(block.G):
        L = torch.eye(block.O) if left is None else left[g]
        R = torch.eye(J) if right is None else right[g]
        expected = (rows[:, g].flatten(1) @ torch.kron(L, R)).square().sum(0).view(block.O, J)
        assert error(block.second_moments(left, right)[g], expected) < 1e-12


@pytest.mark.parametrize("missing", ["weight", "bias"])
def test_second_moments_of_half_a_layer(missing):
    """In the basis of the whole layer a parameter without influence has the input 0."""
    block = made(SHAPES["many positions"])
    right = torch.randn(1, 3, 3)
    rest = block.without([block.weight if missing == "weight" else block.bias])
    a = augmented(block)
    a[..., slice(0, 2) if missing == "weight" else 2] = 0
    rows = torch.einsum("rnpgo,npgj->rnoj", block.delta, a @ right[0]).flatten(0, 1)
    assert error(rest.second_moments(None, right)[0], rows.square().sum(0)) < 1e-12


@EVERY_SHAPE
def test_inputs(shape):
    block = made(shape)
    assert error(block.inputs(), block.a.square().mean((0, 1))[:, None]) < 1e-12
    assert made(shape, "bias").inputs() is None
    nowhere = Bilinear(block.a[:, :0], block.delta[:, :, :0], block.weight, block.bias)
    assert torch.equal(nowhere.inputs(), torch.zeros(block.G, 1, block.I))
