"""Rows that no rule of a layer covers, read from the graph, against brute force."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import marquardt as mq
from support import reference
from support.cases import Fn
from support.graph_models import GRAPH_CASES, Attentive, Equations, Parts
from support.parts import Always
from support.reference import error
from support.steps import ByHand, compared, lm, theta

pytestmark = pytest.mark.usefixtures("double")

INNER, EDGE = (7, 2), (4, 2)
STEPS: dict[str, Any] = {"acceptance": Always(), "schedule": mq.Constant(1.0), "curvature": mq.Dense()}


def linearized(model: nn.Module, x: object, y: Tensor | None, loss: str) -> tuple[mq.Linearization, float]:
    """And by how much J̃ᵀJ̃ differs from brute force with the same random numbers"""
    random = torch.get_rng_state()
    lin = mq.linearize(model, loss, x, y)
    J = lin.rows()
    torch.set_rng_state(random)
    J_z, z = reference.jacobian_by_rows(model, reference.trainable(model), x)
    return lin, error(J.T @ J, J_z.T @ reference.output_hessian(loss, z, y, None) @ J_z)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("name", GRAPH_CASES)
def test_rows_from_the_graph(name, dtype):
    """Every parameter by a rule or by the graph, and right; so in the next step, which trusts the proof."""
    case = GRAPH_CASES[name]
    model, loss = case.make().to(dtype), "mse" if case.outputs else "residual"
    lin, wrong = linearized(model, *case.data(dtype), loss)
    assert wrong < (1e-10 if dtype == torch.float64 else 1e-3)
    assert {"graph"} <= set(lin.paths.values()) <= {"rule", "graph", "none"}
    opt = lm(model, loss, **STEPS)
    for _ in range(2 * (dtype == torch.float64)):
        compared(opt, *case.data(dtype), loss=loss)


@pytest.mark.parametrize("loss", ["mse", "cross_entropy"])
def test_dropout_keeps_its_masks(loss):
    model = Attentive(0.4)
    opt = lm(model, loss, **STEPS)
    for N in (6, 6, 4):
        x, y = (torch.randn(N, 3, 3),), torch.randn(N, 3) if loss == "mse" else torch.randint(0, 3, (N,))
        lin, wrong = linearized(model, x, y, loss)
        assert wrong < 1e-10
        assert {lin.paths[name] for name in ("token", "positions", "scale")} == {"graph"}
        assert lin.paths["head.weight"] == "rule"
        compared(opt, x, y, loss=loss)


def test_parts_of_other_sizes():
    """Other sizes of the parts are other places, even if the sum is the same."""
    model = Parts()
    opt = lm(model, "residual", **STEPS)
    for inner, edge in [(7, 4), (4, 7), (7, 4), (1, 4), (5, 1), (5, 6)] * 2:
        x = (torch.randn(inner, 2), torch.randn(edge, 2))
        assert set(linearized(model, x, None, "residual")[0].paths.values()) == {"graph"}
        compared(opt, x, None, loss="residual")


def test_structure_that_changes_between_steps():
    class Changing(Parts):
        def forward(self, inner: Tensor, edge: Tensor) -> Tensor:
            found = super().forward(inner, edge)
            return found + self.net(torch.cat([inner, edge]))[:, 0] ** 2 if self.more else found

    model, x = Changing(), (torch.randn(5, 2), torch.randn(3, 2))
    opt = lm(model, "residual", **STEPS)
    for model.edge_first in (False, True, False):
        for model.more in (False, True, False):
            compared(opt, x, None, loss="residual")


def filtered(x: Tensor, first: nn.Module, last: nn.Module) -> Tensor:
    """Its complex numbers hold all samples of the batch."""
    low = torch.fft.fft(first(x), dim=0) * torch.linspace(1, 0.1, len(x), dtype=x.dtype)[:, None]
    return last(torch.fft.ifft(low, dim=0).real.tanh())


@pytest.mark.parametrize("curvature", [mq.Auto(), mq.Gram(), mq.MatrixFree(tolerance=0.0, warm=0.0, backtrack=False)])
def test_a_fourier_transform_over_the_samples(curvature):
    model, x, y = Fn(filtered, nn.Linear(2, 4), nn.Linear(4, 3)), torch.randn(6, 2), torch.randn(6, 3)
    twin = copy.deepcopy(model)
    opt, hand = lm(model, curvature=curvature), ByHand(twin, "mse")
    for _ in range(3):
        assert opt.step(x, y).accepted == hand.step(x, y)[2]
        assert error(theta(model), theta(twin)) < 1e-6


def test_use_without_a_gradient_at_first():
    """A layer behind one that starts at zero is read as its neighbours are, or found later."""
    model, x = Parts(), (torch.randn(INNER), torch.randn(EDGE))
    opt = lm(model, "residual", **STEPS)
    for change in (nn.init.zeros_, nn.init.normal_):
        change(model.net[4].weight)
        compared(opt, x, None, loss="residual")


def test_one_parameter_without_a_rule_leaves_the_others():
    class Odd(Parts):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.tensor(0.7))

        def forward(self, inner: Tensor, edge: Tensor) -> Tensor:
            return torch.atan2(super().forward(inner, edge), self.scale)

    lin, wrong = linearized(Odd(), (torch.randn(INNER), torch.randn(EDGE)), None, "residual")
    assert wrong < 1e-10
    assert {name for name, path in lin.paths.items() if path != "graph"} == {"scale"}


@pytest.mark.parametrize("rows", [mq.Exact(), mq.Sampled(2), mq.Fraction(0.5)], ids=str)
@pytest.mark.parametrize("curvature", [mq.Dense(), mq.Gram(), mq.Dense(chunk=3), mq.Gram(chunk=3)], ids=str)
def test_steps_on_rows_from_the_graph(curvature, rows):
    model, x = Equations(), torch.randn(8, 2)
    opt = mq.LM(model, "residual", curvature=curvature, rows=rows)
    steps = [opt.step((x,)) for _ in range(8)]
    assert steps[-1].new_loss < steps[0].loss
