"""Functions of every kind, and what they do to their arguments."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from marquardt import least_squares
from marquardt.fitting.problems import NoSecondDerivative, build
from support.decay.data import BEST, T, Y, decay, decay_numpy, near

# Single precision


@pytest.mark.parametrize("way", ["args", "kwargs", "closure"])
@pytest.mark.parametrize("batched", [False, True])
def test_data_of_single_precision_are_fitted_in_double(way: str, batched: bool):
    t, y = T.float(), Y.float()
    if way == "closure":
        given: dict[str, Any] = {}
    elif way == "args":
        given = {"args": (t.expand(2, -1), y.expand(2, -1)) if batched else (t, y)}
    else:
        given = {"kwargs": {"t": t, "y": y}}
    f = (lambda p: decay(p, t, y)) if way == "closure" else decay
    fit = least_squares(f, torch.ones(2, 3) if batched else torch.ones(3), batched=batched, **given)
    assert fit.x.dtype == fit.fun.dtype == fit.jac.dtype == torch.float64
    assert bool(torch.as_tensor(fit.success).all()), fit.message
    assert near(fit.x.reshape(-1, 3)[-1], BEST, 1e-5)


def test_residuals_of_single_precision_do_no_harm():
    fit = least_squares(lambda p: decay(p, T, Y).float(), torch.ones(3))
    assert fit.success, fit.message
    assert near(fit.x, BEST, 1e-3)


# What functions do to their arguments and their output


def test_a_function_may_reuse_its_output():
    array, tensor, matrix = np.zeros(2), torch.zeros(2, dtype=torch.float64), np.zeros((2, 2))

    def f(p: Any, out: Any) -> Any:
        out[0], out[1] = p[0] - 1, p[1] ** 2 - 4
        return out

    def jac(p: Any) -> Any:
        matrix[:] = [[1, 0], [0, 2 * p[1]]]
        return matrix

    fits = [
        least_squares(lambda p: f(p, array), np.array([3.0, 3.0])),
        least_squares(lambda p: f(p, tensor.detach()), torch.tensor([3.0, 3.0])),
        least_squares(lambda p: f(p, array), np.array([3.0, 3.0]), jac=jac),
    ]
    for fit in fits:
        assert near(fit.x, [1, 2])
        assert near(fit.jac, [[1, 0], [0, 4]])


@pytest.mark.parametrize(
    ("numpy", "options"),
    [(False, {}), (False, {"jac": "3-point"}), (False, {"geodesic": True}), (True, {}), (True, {"jac": "2-point"})],
)
@pytest.mark.parametrize("batched", [False, True])
def test_a_function_may_change_its_parameters(numpy: bool, options: dict[str, Any], batched: bool):
    t, y = (T.numpy(), Y.numpy()) if numpy else (T, Y)

    def doubled(p: Any) -> Any:
        p *= 2
        return (decay_numpy if numpy else decay)(p, t, y)

    x0: Any = np.ones((2, 3) if batched else 3) if numpy else torch.ones((2, 3) if batched else 3)
    fit = least_squares(doubled, x0, batched=batched, **options)
    assert near(fit.x.reshape(-1, 3)[-1], BEST / 2)
    assert bool((x0 == 1).all())


# Derivatives


class Cube(torch.autograd.Function):
    """p³ as old code has it: neither torch.func nor a second derivative."""

    @staticmethod
    def forward(ctx: Any, p: Tensor) -> Tensor:
        ctx.save_for_backward(p)
        return p**3

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, g: Tensor) -> Tensor:
        (p,) = ctx.saved_tensors
        return 3 * p**2 * g


@pytest.mark.parametrize("batched", [False, True])
def test_jacobians_row_by_row_are_exact(batched: bool):
    start = [2.0, 3.0]
    fit = least_squares(lambda p: Cube.apply(p) - 8.5, torch.tensor([start] * 2 if batched else start), batched=batched)
    assert "differences" not in fit.message
    assert near(fit.x, 8.5 ** (1 / 3))


def of(fun: Any, x: Tensor, jac: Any = "auto") -> Any:
    far = torch.full_like(x, math.inf)
    with torch.no_grad():
        return build(fun, x, jac, (), {}, False, -far, far, False)[0]


def test_exact_says_that_torch_has_second_derivatives():
    x = torch.tensor([[2.0, 3.0]], dtype=torch.float64)
    diagonal = lambda p: torch.diag(3 * p**2)  # noqa: E731
    assert of(lambda p: p**3 - 8, x).exact
    assert of(lambda p: p**3 - 8, x, diagonal).exact
    assert not of(lambda p: p.detach() ** 3 - 8, x, diagonal).exact
    rows = of(lambda p: Cube.apply(p) - 8, x)
    assert not rows.exact
    with pytest.raises(NoSecondDerivative, match="twice"):
        rows.curvature(x, x)


@pytest.mark.parametrize("fun", [lambda p: Cube.apply(p) - 8.5, lambda p: np.asarray(p) ** 3 - 8.5])
def test_geodesic_steps_need_second_derivatives(fun: Any):
    with pytest.raises(NoSecondDerivative, match=r"geodesic=True.* differentiate twice"):
        least_squares(fun, np.array([2.0, 3.0]), geodesic=True)


# Many problems


def test_the_first_finite_problem_tells_how_to_differentiate():
    y = torch.tensor([[math.nan, 2.0], [3.0, 4.0], [5.0, 6.0]])
    start = torch.tensor([[1.0, 2.0], [3.0, 4.0], [2.0, 2.0]])
    fit = least_squares(lambda p, y: p.detach() ** 2 - y, start, args=(y,), batched=True)
    assert fit.success.tolist() == [False, True, True]
    assert near(fit.x[1:], y[1:].sqrt())


def test_a_jacobian_that_vmap_refuses_is_called_for_one_problem_at_a_time():
    f = lambda p: torch.stack([10 * (p[1] - p[0] ** 2), 1 - p[0]])  # noqa: E731
    jac = lambda p: torch.tensor([[-20 * p[0].item(), 10.0], [-1.0, 0.0]])  # noqa: E731
    fit = least_squares(f, torch.tensor([[-1.2, 1.0], [2.0, 2.0]]), jac, batched=True)
    assert near(fit.x, 1)


@pytest.mark.parametrize("jac", ["auto", "2-point", "3-point", "given"])
@pytest.mark.parametrize("batched", [False, True])
def test_functions_may_reuse_tensors(jac, batched):
    """Buffers, which vmap refuses: the problems are gone through one by one, and differences compare two results."""
    t = torch.linspace(0, 1, 12, dtype=torch.float64)
    residuals, slopes = torch.empty(12, dtype=torch.float64), torch.empty(12, 2, dtype=torch.float64)

    def fun(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        residuals.copy_((x[0] * torch.exp(-x[1] * t) - y).detach())
        return residuals

    def given(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        e = torch.exp(-x[1] * t)
        slopes.copy_(torch.stack([e, -x[0] * t * e], 1))
        return slopes

    true = torch.tensor([[2.0, 1.5], [1.0, 0.5], [3.0, 2.0]], dtype=torch.float64)
    y = true[:, :1] * torch.exp(-true[:, 1:] * t)
    x0, data, wanted = (1.2 * true, y, true) if batched else (1.2 * true[0], y[0], true[0])
    fit = least_squares(fun, x0, jac=given if jac == "given" else jac, args=(data,), batched=batched)
    assert torch.as_tensor(fit.success).all()
    torch.testing.assert_close(fit.x, wanted, rtol=1e-6, atol=0)


def test_results_share_no_memory_with_what_was_given():
    A, b = torch.randn(3, 4, 2).double(), torch.randn(3, 4).double()
    given = {"args": (A, b), "batched": True}
    fits = [
        least_squares(lambda x, A, b: A @ x - b, torch.ones(3, 2), jac=lambda x, A, b: A, **given),
        least_squares(lambda x, A, b: b, torch.ones(3, 2), **given),
    ]
    kept = A.clone(), b.clone()
    for fit in fits:
        fit.jac.zero_()
        fit.fun.zero_()
    assert torch.equal(A, kept[0])
    assert torch.equal(b, kept[1])
