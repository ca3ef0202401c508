"""Every product of a block of columns against its own rows, written out by hand."""

from __future__ import annotations

import copy
from functools import partial

import pytest
import torch
from torch import Tensor, nn

import marquardt as mq
import marquardt.layers.blocks as blocks
from marquardt.layers.blocks import HALF, Bilinear, Block, CachedRows, Lookup, Whitened, add_product, add_square
from marquardt.metric import Part
from support.blocks import E, V, agrees, bilinear, by_hand, lookup
from support.modules import PLAIN, routed
from support.reference import error
from support.steps import theta

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
HALVES = ["weight and bias", "weight", "bias", "weight and bias times one"]


def kept(
    shape, halves: str = "weight and bias", there: bool = True, more: int = 0, like: Block | None = None
) -> CachedRows:
    """Rows that are there, or are not formed as yet."""
    found = blocks.cached_rows(bilinear(shape, halves, more, None if like is None else like.block))
    assert isinstance(found, CachedRows)
    if there:
        found.partial_traces()
    assert found._there(torch.float64) == there
    return found


LONG = {
    "plain": (2, 4, 9, 1, 3, 2),
    "one row": (1, 4, 9, 1, 3, 2),
    "groups": (2, 4, 9, 2, 3, 2),
    "scale": (3, 4, 9, 4, 1, 1),
}
BLOCKS = {
    **{f"{name}, {halves}": partial(bilinear, shape, halves) for name, shape in SHAPES.items() for halves in HALVES},
    **{f"table, {P}, {white}": partial(lookup, P, white) for P in (1, 5) for white in (False, True)},
    **{f"kept, {name}, {there}": partial(kept, shape, there=there) for name, shape in LONG.items() for there in (0, 1)},
    **{f"kept, no bias, {there}": partial(kept, LONG["plain"], "weight", there) for there in (0, 1)},
}
EVERY_BLOCK = pytest.mark.parametrize("make", BLOCKS.values(), ids=BLOCKS)


@EVERY_BLOCK
def test_products(make):
    block = make()
    agrees(block, by_hand(block))


@EVERY_BLOCK
def test_gram_of_two_pieces_of_different_sizes(make):
    block = make()
    other = make(more=2, like=block)
    J, L = by_hand(block), by_hand(other)
    assert block.pairs_with(other)
    K = torch.zeros(len(J), len(L))
    block.gram(K, other)
    assert error(K, J @ L.T) < 1e-12


@pytest.mark.parametrize(
    "make", [*(partial(bilinear, s) for s in SHAPES.values()), partial(lookup, 1), partial(lookup, 5)]
)
def test_in_slabs(monkeypatch, make):
    """Rows in pieces of a few numbers are the same rows."""
    block = make()
    monkeypatch.setattr(blocks, "SLAB", 20)
    columns = [columns for columns, _ in block.slabs(torch.float64)]
    assert len(columns) > 2
    assert [c.start for c in columns] == [0, *(c.stop for c in columns[:-1])]
    agrees(block, by_hand(block))


def test_products_in_the_precision_of_what_is_multiplied():
    """Rows in float32, products in float64: as good as those of the same rows in float64."""
    block = bilinear((2, 4, 1, 1, 3, 2))
    exact = Bilinear(block.a.float().double(), block.delta.float().double(), block.weight, block.bias)
    coarse = Bilinear(block.a.float(), block.delta.float(), block.weight.float(), block.bias.float())
    J, v, w = by_hand(exact), torch.randn(block.columns), torch.randn(block.m)
    assert error(coarse.apply(v.split([6, 3])), J @ v) < 1e-12
    assert error(coarse.pull(w), J.T @ w) < 1e-12
    assert error(coarse.square(torch.float64), J.T @ J) < 1e-12


@EVERY_SHAPE
def test_without(shape):
    block = bilinear(shape)
    J, size = by_hand(block), block.weight.numel()
    for dropped, rest_of_J in ((block.weight, J[:, size:]), (block.bias, J[:, :size])):
        rest = block.without([dropped])
        (left,) = rest.params
        assert left is not dropped
        assert error(rest.rows(torch.float64), rest_of_J) < 1e-12
        assert error(rest.trace(), rest_of_J.square().sum()) < 1e-12
    assert block.without(block.params) is None
    assert error(block.without([torch.zeros(3)]).rows(torch.float64), J) < 1e-12
    table = lookup(1)
    assert table.without([table.table]) is None


@pytest.mark.parametrize("make", [*(partial(bilinear, shape) for shape in SHAPES.values()), partial(lookup, 1)])
def test_beside(make):
    """A layer that is called several times: the rows add up."""
    first = make()
    if isinstance(first, Lookup):
        others = [lookup(3, like=first), lookup(2, like=first)]
    else:
        R, N, P, *sizes = make.args[0]
        others = [bilinear((R, N, P + 1, *sizes), like=first)]
    both = first.beside(others)
    assert sum(block.P for block in (first, *others)) == both.P
    assert error(both.rows(torch.float64), sum(map(by_hand, [first, *others]))) < 1e-12


def flat_root(block: Block, D: list[Part], G: int, O: int) -> Tensor:
    """√D by hand: (columns,)"""
    found = []
    for p, d in zip(block.params, D, strict=True):
        u = torch.ones(G, O, 1) if d.u is None else d.u
        v = torch.ones(1) if d.v is None else d.v
        whole = u * v * torch.ones(G, O, p.numel() // (G * O))
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


WHITE = {**{name: (partial(bilinear, s), *s[3:]) for name, s in SHAPES.items()}, "table": (partial(lookup, 5), 1, V, E)}
WHITE |= {f"kept, {bool(there)}": (partial(kept, LONG["plain"], there=there), 1, 3, 2) for there in (0, 1)}


@pytest.mark.parametrize("name", WHITE)
@pytest.mark.parametrize("kind", dampings(1, 1, 1))
def test_whitened(name, kind):
    make, *sizes = WHITE[name]
    block = make()
    D = dampings(*sizes)[kind][: len(block.params)]
    agrees(block.whitened(D), by_hand(block) / flat_root(block, D, *sizes[:2]))


@pytest.mark.parametrize("kind", dampings(1, 1, 1))
def test_whitened_stays_of_its_form_if_it_can(kind):
    """Then the rows are never written out."""
    of_form = kind in ("u ⊗ v, u", "u ⊗ v, equal u", "a number each")
    block = bilinear(SHAPES["several rows"])
    assert type(block.whitened(dampings(1, 3, 2)[kind])) is (Bilinear if of_form else Whitened)
    assert type(lookup(1).whitened(dampings(1, V, E)[kind][:1])) is Lookup


@pytest.mark.parametrize("halves", ["weight", "bias"])
def test_whitened_half(halves):
    block, u, v = bilinear(SHAPES["many positions"], halves), torch.rand(1, 3, 1) + 0.1, torch.rand(1, 1, 2) + 0.1
    D = [Part(u=u, v=v)] if halves == "weight" else [Part(u=u)]
    assert error(block.whitened(D).rows(torch.float64), by_hand(block) / flat_root(block, D, 1, 3)) < 1e-12


# ---- what Kronecker factors ask for


def augmented(block: Bilinear) -> Tensor:
    """a with a 1 for the bias: (N, P, G, J)"""
    ones = torch.ones(*block.a.shape[:3], 0 if block.bias is None else 1)
    return torch.cat([block.a, ones], 3)


@EVERY_SHAPE
@pytest.mark.parametrize("halves", HALVES[:3])
@pytest.mark.parametrize("weighted", [False, True])
def test_sums(shape, halves, weighted):
    block = bilinear(shape, halves)
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


@pytest.mark.parametrize("P", [1, 5])
@pytest.mark.parametrize("weighted", [False, True])
def test_sums_of_a_table(P, weighted):
    """A counts the tokens, and is the diagonal of a matrix."""
    block = lookup(P)
    each = torch.rand(3) if weighted else torch.ones(3)
    counts = torch.zeros(1, V)
    for n in range(3):
        for p in range(P):
            counts[0, block.index[n, p]] += each[n]
    found = block.sums(each if weighted else None)
    assert (found.bias, found.table) == (False, True)
    assert error(found.A, counts) < 1e-12
    assert error(found.B[0], sum(torch.outer(d, d) for d in block.delta.reshape(-1, E))) < 1e-12
    assert float(found.count) == pytest.approx(float(each.sum()) * P)


@pytest.mark.parametrize(
    "make",
    [
        *(partial(bilinear, shape, halves) for shape in SHAPES.values() for halves in HALVES[:3]),
        *(partial(lookup, P) for P in (1, 5)),
    ],
)
@pytest.mark.parametrize("sides", ["none", "left", "right", "both"])
def test_second_moments(make, sides):
    """diag QᵀJ̃ᵀJ̃Q with Q = left ⊗ right in every group; a table has no left."""
    block = make()
    if isinstance(block, Lookup):
        rows, sides = by_hand(block).view(-1, 1, V, E), sides.replace("left", "none").replace("both", "right")
    else:
        rows = torch.einsum("rnpgo,npgj->rngoj", block.delta, augmented(block)).flatten(0, 1)  # (m, G, O, J)
    G, O, J = rows.shape[1:]
    left = torch.randn(G, O, O) if sides in ("left", "both") else None
    right = torch.randn(G, J, J) if sides in ("right", "both") else None
    for g in range(G):
        L = torch.eye(O) if left is None else left[g]
        R = torch.eye(J) if right is None else right[g]
        expected = (rows[:, g].flatten(1) @ torch.kron(L, R)).square().sum(0).view(O, J)
        assert error(block.second_moments(left, right)[g], expected) < 1e-12


@pytest.mark.parametrize("missing", ["weight", "bias"])
def test_second_moments_of_half_a_layer(missing):
    """In the basis of the whole layer a parameter without influence has the input 0."""
    block = bilinear(SHAPES["many positions"])
    right = torch.randn(1, 3, 3)
    rest = block.without([block.weight if missing == "weight" else block.bias])
    a = augmented(block)
    a[..., slice(0, 2) if missing == "weight" else 2] = 0
    rows = torch.einsum("rnpgo,npgj->rnoj", block.delta, a @ right[0]).flatten(0, 1)
    assert error(rest.second_moments(None, right)[0], rows.square().sum(0)) < 1e-12


@EVERY_SHAPE
def test_inputs(shape):
    block = bilinear(shape)
    assert error(block.inputs(), block.a.square().mean((0, 1))[:, None]) < 1e-12
    assert bilinear(shape, "bias").inputs() is None
    nowhere = Bilinear(block.a[:, :0], block.delta[:, :, :0], block.weight, block.bias)
    assert torch.equal(nowhere.inputs(), torch.zeros(block.G, 1, block.I))


# ---- rows that are kept because they are fewer numbers than a and δ


@pytest.mark.parametrize("shape", LONG.values(), ids=LONG)
def test_traces_of_rows_that_are_kept(shape):
    block = bilinear(shape)
    for here, there in zip(blocks.cached_rows(block).partial_traces(), block.partial_traces(), strict=True):
        assert [id(p) for p in here.params] == [id(p) for p in there.params]
        assert error(here.left, there.left) < 1e-13
        assert (here.right is None) == (there.right is None)
        assert here.right is None or error(here.right, there.right) < 1e-13


def test_another_precision():
    """Rows of float32 are not taken for those of float64."""
    block = bilinear(LONG["plain"])
    block.factors = block.a.float(), block.delta.float()
    block.weight, block.bias = block.weight.float(), block.bias.float()
    block.params = [block.weight, block.bias]
    found = blocks.cached_rows(block)
    found.partial_traces()
    w = torch.randn(block.m)
    assert found.pull(w).dtype == torch.float64
    assert error(found.pull(w), block.rows(torch.float64).T @ w) < 1e-13


@pytest.mark.parametrize(
    "shape", [(2, 4, 1, 1, 3, 2), (9, 4, 2, 1, 8, 8)], ids=["one position", "more rows than positions"]
)
def test_left_alone(shape):
    block = bilinear(shape)
    assert blocks.cached_rows(block) is block


@pytest.mark.parametrize("rows", [mq.Exact(), mq.Sampled(3)])
def test_convolution_with_a_kronecker_metric(rows):
    """Steps with written rows agree with those of a matrix: many positions, up and down."""
    x, y = torch.randn(6, 2, 6, 6), torch.randint(0, 3, (6, 3, 3))
    net = nn.Sequential(
        nn.Conv2d(2, 4, 3, padding=1), nn.GroupNorm(2, 4), nn.Tanh(), nn.AvgPool2d(2),
        nn.ConvTranspose2d(4, 3, 2, 2), nn.Tanh(), nn.Conv2d(3, 3, 2, 2),
    )  # fmt: skip
    loss = nn.CrossEntropyLoss()
    blocks = mq.linearize(net, loss, x, y, rows=rows).whole().blocks
    assert sum(isinstance(block, CachedRows) for block in blocks) >= 3
    found = []
    for curvature in (mq.Gram(), mq.Dense()):
        model = nn.Sequential(*net)
        start = [p.detach().clone() for p in model.parameters()]
        opt = mq.LM(model, loss, curvature=curvature, rows=rows, schedule=mq.Constant(0.1))
        for shift in range(3):
            opt.step(x + shift, y)
        found.append(torch.cat([p.detach().flatten() for p in model.parameters()]))
        with torch.no_grad():
            for p, old in zip(model.parameters(), start, strict=True):
                p.copy_(old)
    assert error(found[0], found[1]) < 1e-8


# ---- layers that see none of the samples, and sums of products


def test_an_expert_without_samples_has_empty_rows():
    model, x, y = routed(4), torch.randn(6, 3), torch.randn(6, 2)
    other = copy.deepcopy(model)
    mq.LM(model, "mse", curvature=mq.Dense(small=0), damping=mq.Identity(), **PLAIN).step(x, y)
    mq.LM(other, "mse", curvature=mq.Gram(), damping=mq.Identity(), **PLAIN).step(x, y)
    assert error(theta(model), theta(other)) < 1e-10


@pytest.mark.parametrize("m", [5, HALF, HALF + 1])
def test_half_of_a_symmetric_product(m):
    """Added to what is there, also in a part of a larger matrix."""
    X, whole = torch.randn(m, 6), torch.ones(m + 2, m + 2)
    add_square(whole[1:-1, 1:-1], X)
    add_product(whole[1:-1, 1:-1], X, X)
    expected = torch.ones(m + 2, m + 2)
    expected[1:-1, 1:-1] += 2 * X @ X.T
    assert error(whole, expected) < 1e-13
