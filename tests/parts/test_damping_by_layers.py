"""Damping by layers: factors by hand, invariance, dead units, resuming."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import marquardt as mq
from marquardt.layers.blocks import Bilinear
from support import reference
from support.by_layers import BY_LAYER, EVERY_NET, FACTORED, disturb, net, represented, samples
from support.cases import build
from support.parts import decades, entries, flat, lm
from support.reference import error

f64 = torch.float64
NAN, INF = math.nan, math.inf


def factors_by_hand(model: nn.Module, x: Tensor, diagonals: dict[str, Tensor], old: dict[str, tuple[Tensor, Tensor]]):
    """(u, v) of every linear, convolutional and layer-norm layer: v ← max(v, mean a²), u ← max(u, max diag/v)."""
    layers = {k: m for k, m in model.named_modules() if isinstance(m, (nn.Linear, nn.Conv2d, nn.LayerNorm))}

    def squares(layer: nn.Module, a: Tensor) -> Tensor:
        """a² by positions: (…, G, 1, I)"""
        if isinstance(layer, nn.Linear):
            return a.square()[..., None, None, :]
        if isinstance(layer, nn.LayerNorm):
            return nn.functional.layer_norm(a, layer.normalized_shape, eps=layer.eps).square()[..., None, None]
        patches = nn.functional.unfold(a, layer.kernel_size, layer.dilation, layer.padding, layer.stride)  # (N, CK, P)
        return patches.square().transpose(1, 2).unflatten(2, (layer.groups, 1, -1))

    seen: dict[str, list[Tensor]] = {k: [] for k in layers}
    handles = [
        m.register_forward_pre_hook(lambda m, args, k=k: seen[k].append(squares(m, args[0]).detach().flatten(0, -4)))
        for k, m in layers.items()
    ]
    model(x)
    for handle in handles:
        handle.remove()
    found: dict[str, tuple[Tensor, Tensor]] = {}
    for k, calls in seen.items():
        if not calls:  # reached by another way than its module
            continue
        v = torch.cat(calls).mean(0)  # (G, 1, I)
        v = torch.maximum(old[k][1], v) if k in old else v
        diagonal = diagonals[f"{k}.weight"].view(len(v), -1, v.shape[2])  # (G, O, I)
        u = (diagonal / v.where(v > 0, INF)).amax(2, keepdim=True)  # (G, O, 1); an input that was never there has none
        if f"{k}.bias" in diagonals:
            u = torch.maximum(u, diagonals[f"{k}.bias"].view_as(u))
        found[k] = (torch.maximum(old[k][0], u) if k in old else u, v)
    return found


@EVERY_NET
@pytest.mark.parametrize("chunk", [None, 3])
def test_factored_max_diagonal_bounds_every_diagonal(name, chunk):
    """Over several steps on other data at other weights; u and v are running maxima, no larger than they must be."""
    model, D, hand = net(name), None, {}
    names = [k for k, _ in model.named_parameters()]
    sizes = [p.numel() for p in model.parameters()]
    largest = torch.zeros(sum(sizes), dtype=f64)
    for seed in range(5):
        x, y = samples(name, seed)
        G = represented(name, model, seed, chunk)
        diagonal = reference.quadratic(model, "cross_entropy", x, y).diagonal()
        largest = torch.maximum(largest, diagonal)
        old, last = D, None if D is None else D.entries(sizes).clone()
        D = FACTORED.update(D, G)
        assert last is None or torch.equal(old.entries(sizes), last)  # a rejected step goes back to it
        assert (D.entries(sizes) >= largest * (1 - 1e-12)).all()
        assert last is None or (D.entries(sizes) >= last).all()
        hand = factors_by_hand(model, x, dict(zip(names, diagonal.split(sizes), strict=True)), hand)
        assert hand
        assert D.scale.item() == pytest.approx(sum(sizes) / G.rank, rel=1e-12)  # columns over rank
        for k, (u, v) in hand.items():
            found = D.parts[names.index(f"{k}.weight")].factors
            assert error(found[0], u) < 1e-10, k
            assert error(found[1], v) < 1e-10, k
            if f"{k}.bias" in names:
                (bias,) = D.parts[names.index(f"{k}.bias")].factors
                assert error(bias, u) < 1e-10, k
        for k, part, size in zip(names, D.parts, sizes, strict=True):
            if "table" in k:  # no factors: element by element
                assert part.entries.numel() == size
        disturb(model, seed)


@pytest.mark.parametrize("part", [FACTORED, BY_LAYER], ids=lambda p: type(p).__name__)
@EVERY_NET
def test_damping_of_chunks_is_that_of_the_whole(name, part):
    model = net(name)
    sizes = [p.numel() for p in model.parameters()]
    whole, *others = (represented(name, model, 0, chunk) for chunk in (None, 3, 1))
    D = part.update(None, whole)
    assert (D.entries(sizes) > 0).any()
    for G in [*others, represented(name, model, 0, 2, mq.Dense), represented(name, model, 0, None, mq.Dense)]:
        found = part.update(None, G)
        for factors, expected in zip(found.parts, D.parts, strict=True):
            for f, e in zip(factors.factors, expected.factors, strict=True):
                assert error(f, e) < 1e-10


# A hidden unit or channel: (layer in, layer out, of how many inputs of the latter each unit is).
RELU_NETS = {
    "mlp": (
        lambda: nn.Sequential(nn.Linear(3, 5), nn.ReLU(), nn.Linear(5, 4), nn.ReLU(), nn.Linear(4, 3)),
        [(0, 2, 1), (2, 4, 1)],
    ),
    "conv": (
        lambda: nn.Sequential(
            nn.Conv2d(2, 4, 2, padding=1), nn.ReLU(), nn.Conv2d(4, 3, 2), nn.ReLU(), nn.Flatten(), nn.Linear(48, 3)
        ),
        [(0, 2, 1), (2, 5, 16)],
    ),
}  # fmt: skip


def rescale(model: nn.Module, into: int, out: int, width: int, unit: int, c: float) -> None:
    """Unit times c, what follows it divided by c: the same function."""
    with torch.no_grad():
        model[into].weight[unit] *= c
        model[into].bias[unit] *= c
        model[out].weight[:, unit * width : (unit + 1) * width] /= c


def rescaled_apart(name: str, which: int, unit: int, c: float, **parts) -> float:
    """How far training of the rescaled network is from the rescaled trained network, relative to the way gone."""
    make, places = RELU_NETS[name]
    torch.manual_seed(5)
    model = make().double()
    other = copy.deepcopy(model)
    rescale(other, *places[which], unit, c)
    ways = []
    for one in (model, other):
        start = flat(one)
        opt = lm(one, "cross_entropy", schedule=mq.Constant(3.0), **parts)
        for seed in range(2):
            assert opt.step(*samples(name, seed, N=9)).accepted
        ways.append(flat(one) - start)
    nn.utils.vector_to_parameters(ways[0], model.parameters())
    rescale(model, *places[which], unit, c)
    found = ways[1].split([p.numel() for p in other.parameters()])
    return max(error(d, p.detach().flatten()) for d, p in zip(found, model.parameters(), strict=True))


@pytest.mark.parametrize("representation", [mq.Gram(), mq.Gram(chunk=4), mq.Dense()], ids=str)
@pytest.mark.parametrize("name", RELU_NETS)
@pytest.mark.parametrize("which", [0, 1])
@settings(max_examples=5)
@given(unit=st.integers(0, 2), c=decades(-2, 2))
def test_factored_max_diagonal_is_covariant_to_rescaling_a_unit(representation, name, which, unit, c):
    assert rescaled_apart(name, which, unit, c, damping=FACTORED, curvature=representation) < 1e-8


@pytest.mark.parametrize(
    "part", [FACTORED, BY_LAYER, mq.Identity(), mq.MeanEigenvalue()], ids=lambda p: type(p).__name__
)
@pytest.mark.parametrize("chunk", [None, 3])
def test_damping_by_layers_never_builds_J(monkeypatch, part, chunk):
    original = Bilinear.slabs

    def slabs(self: Bilinear, dtype: torch.dtype):
        assert not self.P == self.G == 1, "rows were built"
        return original(self, dtype)

    monkeypatch.setattr(Bilinear, "slabs", slabs)
    x, y = samples("mlp", 0)
    opt = lm(net("mlp"), "cross_entropy", curvature=mq.Gram(chunk, whole=0), damping=part)
    for _ in range(2):
        assert opt.step(x, y).accepted
    with pytest.raises(AssertionError, match="rows were built"):  # where one number for every weight asks for them
        lm(net("mlp"), "cross_entropy", curvature=mq.Gram(chunk, whole=0), damping=mq.MaxDiagonal()).step(x, y)


@EVERY_NET
@pytest.mark.parametrize("chunk", [None, 3])
def test_layer_mean_eigenvalue(name, chunk):
    """τ = tr G / rank G of a layer, the largest so far."""
    model, D, hand = net(name), None, {}
    for seed in range(4):
        G = represented(name, model, seed, chunk)
        D = BY_LAYER.update(D, G)
        q = reference.quadratic(model, "cross_entropy", *samples(name, seed))
        params = list(model.named_parameters())
        diagonals = dict(zip([k for k, _ in params], q.diagonal().split(G.lin.parameters.sizes), strict=True))
        for (k, _), part in zip(params, D.parts, strict=True):
            tau = part.entries
            if "attn" in k:
                continue
            layer = [v for name, v in diagonals.items() if name.rpartition(".")[0] == k.rpartition(".")[0]]
            mean = sum(v.sum().item() for v in layer) / min(sum(map(len, layer)), G.lin.m)
            hand[k] = max(hand.get(k, 0.0), mean)
            assert tau.shape == ()
            assert (D.scale * tau).item() == pytest.approx(hand[k], rel=1e-9), k
        disturb(model, seed)


@pytest.mark.parametrize("part", [FACTORED, BY_LAYER, mq.MaxDiagonal(0.0)], ids=lambda p: type(p).__name__)
@pytest.mark.parametrize("representation", [mq.Gram(), mq.Gram(chunk=3), mq.Dense()], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, f64], ids=str)
def test_dead_units_with_damping_by_layers(part, representation, dtype):
    """An input that is always 0 and a unit that is never active: nothing there moves, everything else does."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 3)).to(dtype)
    with torch.no_grad():
        model[0].bias.copy_(torch.tensor([0.5, -1e3, 0.5, 0.5]))
    dead = torch.cat([m.flatten() for m in dead_parts()])
    opt = lm(model, "cross_entropy", curvature=representation, damping=part, schedule=mq.Constant(30.0))
    for seed in range(3):
        x, y = samples("mlp", seed, N=20)
        x[:, 2] = 0
        before = flat(model)
        step = opt.step(x.to(dtype), y)
        assert step.accepted, step.note
        moved = flat(model) != before
        assert flat(model).isfinite().all()
        assert not moved[dead].any()
        assert moved[~dead].all()
        if part is FACTORED:
            assert entries(opt).isfinite().all()
    x, y = samples("mlp", 3, N=20)  # the input comes to life, and its damping with it
    before = flat(model)
    assert opt.step(x.to(dtype), y).accepted
    moved = flat(model) != before
    assert moved[[2, 8, 11]].all()
    assert not moved[3:6].any()
    diagonal = reference.quadratic(restored(model, before), "cross_entropy", x.to(dtype), y).diagonal()
    assert part is not FACTORED or (entries(opt) >= diagonal * (1 - 1e-5)).all()


def dead_parts() -> list[Tensor]:
    """Of a network 3-4-3: the last input, and hidden unit 1."""
    first, bias, second, last = (torch.zeros(s, dtype=torch.bool) for s in ((4, 3), (4,), (3, 4), (3,)))
    first[:, 2] = first[1] = bias[1] = second[:, 1] = True
    return [first, bias, second, last]


def restored(model: nn.Module, theta: Tensor) -> nn.Module:
    trial = copy.deepcopy(model)
    nn.utils.vector_to_parameters(theta, trial.parameters())
    return trial


@pytest.mark.parametrize("part", [FACTORED, BY_LAYER], ids=lambda p: type(p).__name__)
@pytest.mark.parametrize("representation", [mq.Gram(), mq.Gram(chunk=3), mq.Dense(), mq.Dense(chunk=3)], ids=str)
def test_layers_that_some_batches_do_not_reach(part, representation):
    """What a layer has seen stays, and the bound holds again when it is reached again."""

    class Branches(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.plus, self.minus, self.head = nn.Linear(3, 4), nn.Linear(3, 4), nn.Linear(4, 3)

        def forward(self, x: Tensor) -> Tensor:
            h = self.plus(x) if x[0, 0] > 0 else self.minus(x)
            return self.head(h.tanh())

    torch.manual_seed(0)
    model = Branches().double()
    opt = lm(model, "cross_entropy", curvature=representation, damping=part)
    largest = 0 * flat(model)
    for k, sign in enumerate((1, -1, -1, 1, 1, -1)):
        x, y = samples("mlp", k)
        x[:, 0] = sign * x[:, 0].abs()
        diagonal = reference.quadratic(model, "cross_entropy", x, y).diagonal()
        last = None if k == 0 else entries(opt)
        largest = torch.maximum(largest, diagonal)
        assert opt.step(x, y).accepted
        assert last is None or (entries(opt) >= last * (1 - 1e-12)).all()
        if part is FACTORED:
            assert (entries(opt) >= largest * (1 - 1e-12)).all()
            _, factors = opt.state_dict()["marquardt"]["D"]
            assert [len(f) for f in factors[::2]] == [2, 2 if k > 0 else 1, 2]  # never written out
            assert sum(t.numel() for f in factors for t in f) < 2 * len(largest)


@pytest.mark.parametrize("part", [FACTORED, BY_LAYER], ids=lambda p: type(p).__name__)
@pytest.mark.parametrize("name", ["routed_experts", "sorted_samples"])
@pytest.mark.parametrize("chunk", [None, 1, 2])
def test_damping_where_a_layer_sees_some_of_the_samples(name, part, chunk):
    """Also none of them: an expert that a chunk does not ask."""
    p = build(name)
    q = reference.quadratic(*p)
    lin = mq.linearize(p.model, p.loss, p.x, p.y, p.weight, chunk=chunk)
    D = part.update(None, mq.Gram(chunk).represent(lin))
    assert D.entries(lin.parameters.sizes).isfinite().all()
    if part is FACTORED:
        assert (D.entries(lin.parameters.sizes) >= q.diagonal() * (1 - 1e-12)).all()
    A = D.positive()
    assert error(-mq.Gram(chunk).represent(lin).newton(A), q.step(A.entries(lin.parameters.sizes))) < 1e-9
