"""Damping: running maxima, invariance, units."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import Tensor, nn

import marquardt as mq
from marquardt.curvature import Curvature
from marquardt.metric import Diagonal, Metric
from marquardt.model.parameters import Parameters
from marquardt.parts.direction import known
from support.parts import Always, Never, batch, decades, entries, flat, lm, mlp, seeds
from support.reference import error

f64 = torch.float64
NAN, INF = math.nan, math.inf


# Stand-ins: what a part is given, and nothing else.


class Values(Curvature):
    """G as damping sees it: a diagonal, of one layer."""

    def __init__(self, values: Tensor, rank: int = 1) -> None:
        holder = nn.Module()
        holder.theta = nn.Parameter(torch.zeros_like(values))
        super().__init__(SimpleNamespace(parameters=Parameters(holder, [holder.theta]), most=rank))
        self.values = values

    @property
    def rank(self) -> int:
        return self.lin.most

    def traces(self) -> list[tuple[list[int], Tensor, int]]:
        return [([0], self.values.sum(), min(len(self.values), self.lin.most))]

    def __matmul__(self, v: Tensor) -> Tensor:
        raise NotImplementedError

    def newton(self, damping: Diagonal | Tensor) -> Tensor:
        raise NotImplementedError

    def diagonal(self) -> Tensor:
        return self.values


# ---- damping


@given(seeds, st.integers(1, 8), st.integers(1, 6), st.sampled_from([0.0, 0.01, 0.7]))
def test_max_diagonal_is_a_running_maximum(seed, n, steps, floor):
    torch.manual_seed(seed)
    diagonals = torch.rand(steps, n, dtype=f64)
    part, D = mq.MaxDiagonal(floor), None
    for k, values in enumerate(diagonals):
        last = None if D is None else D.entries([n]).clone()
        new = part.update(D, Values(values.clone()))
        assert torch.equal(new.entries([n]), diagonals[: k + 1].amax(0).clamp(min=floor))
        assert last is None or torch.equal(D.entries([n]), last)  # a rejected step goes back to it
        assert torch.equal(values, diagonals[k])
        D = new


@given(seeds, st.integers(1, 8), st.integers(1, 6))
def test_mean_eigenvalue_is_one_number(seed, n, steps):
    torch.manual_seed(seed)
    diagonals = torch.rand(steps, n, dtype=f64)
    D = None
    for k, values in enumerate(diagonals):
        D = mq.MeanEigenvalue().update(D, Values(values, rank=3))
        assert D.parts is None
        assert D.scale.shape == ()
        assert D.scale.item() == pytest.approx(max(t.sum().item() / 3 for t in diagonals[: k + 1]), rel=1e-14)


class Followed:
    """MeanEigenvalue without a memory, and what it was given and has returned in every step"""

    def __init__(self) -> None:
        self.traces: list[float] = []
        self.taus: list[float] = []

    def update(self, D: Metric | None, G: Curvature) -> Metric:
        found = mq.MeanEigenvalue(memory=1.0).update(D, G)
        self.traces.append(float(G.trace()))
        self.taus.append(float(found.entries(G.parameters.sizes)[0]))
        return found


@pytest.mark.parametrize("batches", [(3, 40, 5), (40, 3)], ids=str)
@pytest.mark.parametrize(
    ("curvature", "rows", "per_sample"),
    [
        (mq.Dense(), mq.Exact(), 2),
        (mq.Gram(), mq.Exact(), 2),
        (mq.Gram(), mq.Sampled(1), 1),
        (mq.MatrixFree(), mq.Exact(), 2),
        (mq.Hessian(), mq.Exact(), 0),
    ],
    ids=str,
)
def test_what_the_mean_eigenvalue_divides_by(curvature, rows, per_sample, batches):
    """min(n, m), with the rows of the largest batch so far, whatever rank G has; n for a Hessian"""
    torch.manual_seed(0)
    model, damping = nn.Linear(4, 2).double(), Followed()
    model.weight.data[:, 1:] = 0
    opt = mq.LM(model, "mse", curvature=curvature, rows=rows, damping=damping, schedule=mq.Constant(1.0), average=None)
    n, most = 10, 0
    for N in batches:
        x = torch.randn(N, 1, dtype=f64).expand(N, 4)  # the columns are the same: G has a rank of 4 at most
        opt.step(x, torch.randn(N, 2, dtype=f64))
        most = max(most, per_sample * N)
        assert damping.taus[-1] == pytest.approx(damping.traces[-1] / (min(n, most) if per_sample else n), rel=1e-9)


class Scaled(nn.Module):
    """v·tanh(wx + b) + c with θ = (w, b, v, c) = scale·(what is stored)."""

    def __init__(self, theta: Tensor, scale: Tensor) -> None:
        super().__init__()
        self.stored = nn.Parameter(theta / scale)
        self.register_buffer("scale", scale)

    def forward(self, x: Tensor) -> Tensor:
        w, b, v, c = (self.scale * self.stored).split([3, 3, 3, 1])
        return (torch.tanh(x * w + b) * v).sum(1, keepdim=True) + c


def after_three_steps(scale: Tensor, **parts) -> Tensor:
    """The function, as its values."""
    torch.manual_seed(1)
    model = Scaled(torch.randn(10, dtype=f64), scale)
    x = torch.linspace(-2, 2, 20, dtype=f64)[:, None]
    opt = lm(model, schedule=mq.Constant(1.0), acceptance=mq.Decrease(), **parts)
    for _ in range(3):
        assert opt.step(x, torch.sin(2 * x)).accepted
    return model(x).detach()


@pytest.mark.parametrize("momentum", [None, mq.AdaptiveMomentum(0.9, INF, cap=True)])
@given(st.integers(0, 9), decades(-3, 3))
@example(0, 1e-3)
@example(9, 1e3)
def test_max_diagonal_is_invariant_to_rescaling_a_parameter(momentum, which, s):
    scale = torch.ones(10, dtype=f64)
    expected = after_three_steps(scale, damping=mq.MaxDiagonal(0.0), momentum=momentum)
    scale[which] = s
    found = after_three_steps(scale, damping=mq.MaxDiagonal(0.0), momentum=momentum)
    assert error(found, expected) < 1e-6


@pytest.mark.parametrize("damping", [mq.MaxDiagonal(0.0), mq.MeanEigenvalue()])
@pytest.mark.parametrize("factor", [1e-3, 1e3])
def test_damping_in_the_units_of_the_loss(damping, factor):
    x, y = batch()
    ends = []
    for c in (1.0, factor):
        model = mlp()
        opt = lm(model, mq.losses.SquaredError(factor=c), damping=damping)
        for _ in range(3):
            opt.step(x, y)
        ends.append(flat(model))
    assert error(ends[1], ends[0]) < 1e-8


def test_curvature_that_may_be_rounding_counts_as_rounding():
    """eps times the largest; none at all stays none."""
    eps = torch.finfo(f64).eps
    found = known(torch.tensor([4.0, 1e-300, 8 * eps, 0.0], dtype=f64))
    assert found.tolist() == [4, 4 * eps, 8 * eps, 0]


def test_a_rejected_step_leaves_D_alone():
    model, (x, y) = mlp(), batch()
    opt = lm(model, damping=mq.MaxDiagonal(0.01))
    opt.step(x, y)
    D = entries(opt)
    opt.acceptance = Never()
    assert not opt.step(10 * x, y).accepted
    assert torch.equal(entries(opt), D)
    opt.acceptance = Always()
    assert opt.step(10 * x, y).accepted
    assert not torch.equal(entries(opt), D)  # that batch would have changed it
