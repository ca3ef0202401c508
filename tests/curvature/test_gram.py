"""Gram: the step in the rows, and the matrix K formed once."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import marquardt as mq
from marquardt.curvature.direct import GramCurvature
from marquardt.layers import blocks
from support.by_layers import BY_LAYER, EVERY_NET, FACTORED, disturb, net, represented, samples
from support.cases import build
from support.linearized import expected, linearize
from support.parts import Never, lm
from support.reference import error

f64 = torch.float64


@pytest.mark.parametrize("part", [FACTORED, BY_LAYER], ids=lambda p: type(p).__name__)
@EVERY_NET
@pytest.mark.parametrize("chunk", [None, 3])
def test_dual_step_with_damping_by_layers(name, part, chunk):
    """Gram with D in factors is Dense with D written out."""
    model = net(name)
    D = part.update(None, represented(name, model, 1))
    disturb(model, 0)
    dual, primal = represented(name, model, 0, chunk), represented(name, model, 0, chunk, mq.Dense)
    A = part.update(D, dual).positive()
    full = A.entries(dual.lin.parameters.sizes)
    assert full.unique().numel() > 1
    for lam in (1e-3, 1.0):
        expected = primal.newton(lam * full)
        assert error(dual.newton(lam * A), expected) < 1e-9
        assert error(primal.newton(lam * A), expected) < 1e-9


EVERY_DAMPING = [mq.Identity(), mq.MeanEigenvalue(), BY_LAYER, FACTORED, mq.MaxDiagonal()]


@pytest.mark.parametrize("part", EVERY_DAMPING, ids=lambda p: type(p).__name__)
@pytest.mark.parametrize(
    ("dtype", "N", "lam"),
    [(f64, 7, 1e-3), (f64, 40, 1e-3), (torch.float32, 7, 1.0), (torch.float32, 7, 1e-9), (torch.float32, 40, 1.0)],
    ids=["float64", "float64, tall", "float32", "float32, small λ", "float32, tall"],
)
def test_another_lambda_needs_no_other_gram_matrix(monkeypatch, part, dtype, N, lam):
    """K is formed once for every precision that is needed, not for every λ."""
    formed: list[torch.dtype] = []
    original = GramCurvature.gram

    def gram(self: GramCurvature, factors, precision: torch.dtype) -> Tensor:
        formed.append(precision)
        return original(self, factors, precision)

    monkeypatch.setattr(GramCurvature, "gram", gram)
    x, y = samples("mlp", 0, N)
    opt = lm(
        net("mlp").to(dtype), "cross_entropy", curvature=mq.Gram(), damping=part, schedule=mq.TenFold(lam, 1.5),
        acceptance=Never(), attempts=5,
    )  # fmt: skip
    step = opt.step(x.to(dtype), y)
    assert step.note.count("rejected") == 5
    assert len(formed) == len(set(formed)), formed


@pytest.mark.parametrize("name", ["transformer_encoder_layer", "conv2d", "embedding", "linear_leading_dims"])
def test_sampled_rows_in_every_form_of_the_gram_matrix(monkeypatch, name):
    """A gradient outside the range of the rows, with pairs of positions and with explicit rows, in small slabs."""
    p, rows = build(name), mq.Sampled(2)
    J, g = linearize(p, rows=rows).rows(), expected(name).g
    step = torch.linalg.solve(J.T @ J + 0.1 * torch.eye(len(g)), g)
    for limit in (1 << 26, 64, 0):  # SLAB: 0 leaves explicit rows only
        monkeypatch.setattr(blocks, "SLAB", limit)
        C = mq.Gram(whole=0).represent(linearize(p, rows=rows))
        assert error(C.newton(torch.tensor(0.1).double()), step) < 1e-9
        assert error(C @ g, J.T @ (J @ g)) < 1e-10


def test_slope_belongs_to_its_own_metric():
    """Also after a solve with another one."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()
    x, y = torch.randn(5, 3).double(), torch.randn(5, 2).double()
    G = mq.Gram().represent(mq.linearize(model, "mse", x, y))
    D, E = (mq.Diagonal.of(torch.rand(G.lin.n).double() + 0.1, G.parameters.sizes) for _ in range(2))
    G.step(0.3 * D)
    for metric in (D, E, mq.Diagonal(torch.tensor(2.0).double())):
        expected = (G.gradient.square() / metric.entries(G.parameters.sizes)).sum()
        assert error(G.slope(metric), expected) < 1e-10
