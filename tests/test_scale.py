"""Small twins of the large benchmark models: the path that scales, layer by layer, takes the dense float64 step."""

from __future__ import annotations

import copy
import itertools
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

import pytest
import torch
from torch import Tensor, nn

import marquardt as mq
from marquardt.curvature import direct as gram_module
from marquardt.jacobian.linearization import Linearization
from marquardt.jacobian.piece import Piece
from marquardt.layers import Block
from marquardt.layers.blocks import Bilinear
from support import reference
from support.reference import error


class Twin(NamedTuple):
    model: nn.Module
    loss: str
    x: Tensor
    y: Tensor


class Pooled(nn.Module):
    """nn.TransformerEncoder of 3 layers, the mean over the sequence, a linear head: (N, T, d) → (N, outputs)"""

    def __init__(self, outputs: int, d: int = 8) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(d, 2, 2 * d, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 3, enable_nested_tensor=False)
        self.head = nn.Linear(d, outputs)
        for p in self.encoder.parameters():
            if p.dim() > 1:
                nn.init.xavier_uniform_(p)  # the encoder copies one layer: they would all start alike

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.encoder(x).mean(1))


def mlp() -> Twin:
    """Four hidden ReLU layers, 10 classes: n = 850, m = 54"""
    widths = [20, 12, 12, 12, 12]
    hidden = [part for a, b in itertools.pairwise(widths) for part in (nn.Linear(a, b), nn.ReLU())]
    model = nn.Sequential(*hidden, nn.Linear(widths[-1], 10))
    return Twin(model, "cross_entropy", torch.randn(6, 20), torch.randint(10, (6,)))


def transformer_mse() -> Twin:
    return Twin(Pooled(1), "mse", torch.randn(7, 8, 8), torch.randn(7, 1))


def transformer_classes() -> Twin:
    return Twin(Pooled(10), "cross_entropy", torch.randn(4, 8, 8), torch.randint(10, (4,)))


def paper_cnn() -> Twin:
    """The paper's CNN, random slopes and all, on 16×16 images: n = 1,002, m = 54"""
    model = nn.Sequential(
        nn.Conv2d(1, 4, 5), nn.RReLU(), nn.MaxPool2d(2), nn.Conv2d(4, 8, 5), nn.RReLU(), nn.MaxPool2d(2), nn.Flatten(),
        nn.Linear(8, 10),
    )  # fmt: skip
    return Twin(model, "cross_entropy", torch.randn(6, 1, 16, 16), torch.randint(10, (6,)))


TWINS = {"mlp": mlp, "transformer-mse": transformer_mse, "transformer-classes": transformer_classes, "cnn": paper_cnn}
DAMPINGS = {
    "identity": mq.Identity(),
    "mean": mq.MeanEigenvalue(),
    "layer-mean": mq.LayerMeanEigenvalue(),
    "factored": mq.FactoredMaxDiagonal(),
}
MAX = {"max": mq.MaxDiagonal()}
ROWS = {"exact": mq.Exact(), "sampled": mq.Sampled(1)}
EVERY_TWIN = pytest.mark.parametrize("name", TWINS)
EVERY_DAMPING = pytest.mark.parametrize("damping", DAMPINGS)
EVERY_ROWS = pytest.mark.parametrize("rows", ROWS)


@cache
def twin(name: str, evaluation: bool = False) -> Twin:
    torch.manual_seed(0)
    model, loss, x, y = TWINS[name]()
    return Twin(model.double().train(not evaluation), loss, x.double(), y.double() if loss == "mse" else y)


def fresh(t: Twin, dtype: torch.dtype = torch.float64) -> Twin:
    """A copy to take a step with, under the random numbers that all of them share."""
    torch.manual_seed(1)
    y = t.y.to(dtype) if t.y.is_floating_point() else t.y
    return Twin(copy.deepcopy(t.model).to(dtype), t.loss, t.x.to(dtype), y)


@cache
def quadratic(name: str, rows: str, evaluation: bool) -> tuple[reference.Quadratic, int]:
    """G and g, dense in float64, and the number of rows; the G of sampled rows from the rows themselves."""
    t = fresh(twin(name, evaluation))
    q = reference.quadratic(*t)
    t = fresh(twin(name, evaluation))
    J = mq.linearize(*t, rows=ROWS[rows]).rows()  # (m, n)
    return (q if rows == "exact" else q._replace(G=J.T @ J)), len(J)


def expected_damping(name: str, damping: str, rows: str, evaluation: bool) -> Tensor:
    """D of a first step by its definition: (n,)"""
    q, m = quadratic(name, rows, evaluation)
    n = len(q.g)
    t = fresh(twin(name, evaluation))
    if damping == "identity":
        return torch.ones(n, dtype=torch.float64)
    if damping == "max":  # not one that scales, but it works: streamed, entry by entry
        return q.diagonal().clamp(min=0.01)
    if damping == "mean":
        return (q.G.trace() / min(n, m)).expand(n)
    if damping == "layer-mean":
        layers: dict[str, list[int]] = {}  # a weight and its bias
        names = [k for k, _ in t.model.named_parameters()]
        for i, k in enumerate(names):
            layers.setdefault(k.removesuffix("weight").removesuffix("bias"), []).append(i)
        sizes = [p.numel() for p in t.model.parameters()]
        traces = [d.sum() for d in q.diagonal().split(sizes)]
        D = [torch.empty(0)] * len(sizes)
        for members in layers.values():
            tau = sum(traces[i] for i in members) / min(sum(sizes[i] for i in members), m)
            for i in members:
                D[i] = tau.expand(sizes[i])
        return torch.cat(D)
    lin = mq.linearize(*t, rows=ROWS[rows])
    D = {**DAMPINGS, **MAX}[damping].update(None, mq.Dense().represent(lin)).positive().entries(lin.parameters.sizes)
    assert (q.diagonal() * n / min(n, m) <= D * (1 + 1e-12)).all()  # bounds the diagonal, in units of the mean
    return D


@dataclass(frozen=True)
class Always:
    """The step is what is tested, not whether it is good."""

    looks_back = False

    def judge(self, trial) -> str:
        return "decrease"


def step(t: Twin, damping: str, rows: str, lam: float, curvature=mq.Gram(whole=0)) -> Tensor:
    """θ after one step minus θ before: (n,) in float64"""
    parts = {"momentum": None, "line_search": None, "average": None, "acceptance": Always()}
    opt = mq.LM(
        t.model, t.loss, curvature=curvature, rows=ROWS[rows], damping={**DAMPINGS, **MAX}[damping],
        schedule=mq.Constant(lam), **parts,
    )  # fmt: skip
    before = torch.cat([p.detach().flatten() for p in t.model.parameters()]).double()
    assert opt.step(t.x, t.y).accepted
    return torch.cat([p.detach().flatten() for p in t.model.parameters()]).double() - before


# Of a step: whether the model is in eval mode, where random slopes are the same in other precision and in pieces.
WAYS = {
    "float64": (False, torch.float64, mq.Gram(whole=0), (1.0, 1e-2, 1e-4), 1e-8),
    "float32": (True, torch.float32, mq.Gram(whole=0), (1.0, 1e-2), 1e-3),
    "chunks": (True, torch.float64, mq.Gram(chunk=3, whole=0), (1e-2,), 1e-8),
}


@pytest.mark.parametrize(("damping", "way"), [*itertools.product(DAMPINGS, WAYS), ("max", "float64")])
@EVERY_ROWS
@EVERY_TWIN
def test_step(name, damping, rows, way):
    evaluation, dtype, curvature, every_lam, close = WAYS[way]
    D = expected_damping(name, damping, rows, evaluation)
    for lam in every_lam:
        expected = quadratic(name, rows, evaluation)[0].step(lam * D)
        assert error(step(fresh(twin(name, evaluation), dtype), damping, rows, lam, curvature), expected) < close


@EVERY_ROWS
@EVERY_DAMPING
@pytest.mark.parametrize("name", [*TWINS, "mlp-head"])
def test_rows_are_never_built(monkeypatch, name, damping, rows):
    """Of a layer with one position per sample, and nowhere the rows of a whole model."""
    seen = []

    def guarded(method):
        original = getattr(Bilinear, method)

        def call(self, *args, **kwargs):
            assert self.P > 1, f"{method} of a layer with one position"
            return original(self, *args, **kwargs)

        return call

    def refuse(*_: object) -> None:
        raise AssertionError("all rows at once")

    original = Bilinear.gram

    def gram(self, *args, **kwargs):
        seen.append(self.P)
        return original(self, *args, **kwargs)

    for method in ("slabs", "_outer", "_samples", "_gram_of_rows", "samples", "square", "against"):
        monkeypatch.setattr(Bilinear, method, guarded(method))
    monkeypatch.setattr(Bilinear, "gram", gram)
    monkeypatch.setattr(Piece, "dense", refuse)
    monkeypatch.setattr(gram_module, "dense", refuse)
    monkeypatch.setattr(Linearization, "rows", refuse)
    monkeypatch.setattr(Block, "rows", refuse)
    t = fresh(twin(name.removesuffix("-head")))
    if name.endswith("head"):  # without a bias, and with one weight of its own
        t = t._replace(model=nn.Sequential(nn.Linear(20, 9, bias=False), nn.Tanh(), nn.Linear(9, 10)).double())
    step(t, damping, rows, 0.1)
    assert 1 in seen  # the head at least
