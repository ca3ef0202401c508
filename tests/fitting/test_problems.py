"""Functions of every kind, what they do to their arguments, their derivatives, and arrays of every layout."""

from __future__ import annotations

import math
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from marquardt import curve_fit, least_squares
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


# What functions do to their arguments and their output


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


# Derivatives: how they come about, and that they are right. Function, start, options, solution, by differences.


def numpy_jacobian(p: Any) -> Any:
    e, t = np.exp(-p[1] * T.numpy()), T.numpy()
    return np.stack([e, -p[0] * t * e, np.ones_like(t)], 1)


ONES, TENSOR = [1.0, 1.0, 1.0], torch.tensor([1.0, 2.0])
OF_DECAY = lambda p: decay(p, T, Y)  # noqa: E731
OF_ARRAYS = lambda p: decay_numpy(p, T.numpy(), Y.numpy())  # noqa: E731
DERIVATIVES: dict[str, tuple[Any, Any, dict[str, Any], Any, bool]] = {
    "arrays": (OF_ARRAYS, ONES, {}, BEST, True),
    "arrays from a tensor": (OF_ARRAYS, torch.ones(3), {}, BEST, True),
    "2-point": (OF_DECAY, torch.ones(3), {"jac": "2-point", "bounds": (0, [9, 9, 1])}, BEST, True),
    "3-point": (OF_DECAY, torch.ones(3), {"jac": "3-point", "bounds": (0, [9, 9, 1])}, BEST, True),
    "given": (OF_DECAY, torch.ones(3), {"jac": torch.func.jacrev(OF_DECAY)}, BEST, False),
    "given as an array": (OF_ARRAYS, np.ones(3), {"jac": numpy_jacobian}, BEST, False),
    "row by row": (lambda p: Cube.apply(p) - 8.5, torch.tensor([2.0, 3.0]), {}, 8.5 ** (1 / 3), False),
    "row by row, batched": (lambda p: Cube.apply(p) - 8.5, torch.ones(2, 2), {"batched": True}, 8.5 ** (1 / 3), False),
    "of single precision": (lambda p: decay(p, T, Y).float(), torch.ones(3), {}, BEST, False),
    "noisy": (lambda p: np.round(OF_ARRAYS(p), 9), np.ones(3), {}, BEST, True),
    "detached": (lambda p: p.detach() ** 2 - 2, TENSOR, {}, 2**0.5, True),
    "detached in part": (lambda p: torch.cat([p[:1].detach() ** 2 - 2, p[1:] - 3]), TENSOR, {}, [2**0.5, 3], True),
    "detached beside steeper": (lambda p: torch.cat([p[:1].detach() ** 2 - 2, 1e4 * (p[1:] - 3)]), TENSOR, {},
                                [2**0.5, 3], True),
    "detached in a curve": (lambda p: p[0] * torch.exp(-p[1].detach() * T) - torch.exp(-T), TENSOR, {}, [1, 1], True),
    "detached factors": (lambda p: torch.exp(p * (p / p).detach()) * p.detach() - 1, TENSOR, {}, 0.5671432904, True),
    "no slope": (lambda p: torch.stack([p[0] ** 2 + 1, p[1] ** 2 + p[0] ** 3 - 2]), [0, 2], {}, [0, 2**0.5], False),
    "a jump at the start": (lambda p: torch.stack([torch.atan2(p[1], p[0]) / 7, p[0] ** 2 + p[1] ** 2 - 1]),
                            [-1.0, 0.0], {}, [1, 0], False),
    "not a number at the first trial point": (lambda p: torch.log(p) - 1, [30.0], {}, math.e, False),
    "a step held short": (lambda p: p - 1, [1e-14], {"ftol": 1e-8}, 1, False),
    "a start of almost nothing, whose size is no measure": (lambda p: p - 1, [1e-30, -1e-300], {}, 1, False),
    "one residual with a minimum above zero": (lambda p: ((p - 2) ** 2).sum()[None] + 1, [3.0, 1.0], {}, 2, False),
}  # fmt: skip


@pytest.mark.parametrize("kind", DERIVATIVES)
def test_minima_are_reached_whatever_the_derivative(kind: str):
    fun, x0, options, x, by_differences = DERIVATIVES[kind]
    fit = least_squares(fun, x0, **options)
    assert np.all(np.asarray(fit.success)) or kind == "noisy", fit.message
    assert near(fit.x, x, {"noisy": 1e-2, "of single precision": 1e-3}.get(kind, 1e-6))
    assert ("differences" in fit.message) == by_differences
    assert ("detached" in fit.message) == ("detached" in kind)


def of(fun: Any, x: Tensor, jac: Any = "auto") -> Any:
    far = torch.full_like(x, math.inf)
    with torch.no_grad():
        return build(fun, x, jac, (), {}, False, (-far, far), False)[0]


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


@pytest.mark.parametrize("jac", ["auto", "2-point", "3-point", "given"])
@pytest.mark.parametrize("batched", [False, True])
@pytest.mark.parametrize("lib", [torch, np])
def test_functions_may_reuse_buffers(jac: str, batched: bool, lib: Any):
    """Which vmap refuses: the problems are gone through one by one, and differences compare two results."""
    t = T.numpy() if lib is np else T
    residuals, slopes = lib.empty(40, dtype=lib.float64), lib.empty((40, 2), dtype=lib.float64)

    def fun(x: Any, y: Any) -> Any:
        residuals[:] = x[0] * lib.exp(-x[1] * t) - y
        return residuals

    def given(x: Any, y: Any) -> Any:
        slopes[:, 0] = lib.exp(-x[1] * t)
        slopes[:, 1] = -x[0] * t * slopes[:, 0]
        return slopes

    true = torch.tensor([[2.0, 1.5], [1.0, 0.5], [3.0, 2.0]], dtype=torch.float64)
    data = true[:, :1] * torch.exp(-true[:, 1:] * T)
    x0, data, true = (true, data, true) if batched else (true[0], data[0], true[0])
    x0, data = (1.2 * x0, data) if lib is torch else (1.2 * x0.numpy(), data.numpy())
    fit = least_squares(fun, x0, jac=given if jac == "given" else jac, args=(data,), batched=batched)
    assert np.all(np.asarray(fit.success))
    assert near(fit.x, true)


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


DAYS = np.linspace(2450000.0, 2450010.0, 201)
HERTZ = np.linspace(1e9 - 100, 1e9 + 100, 201)
SECONDS = np.linspace(0, 1000, 4001)
STIFF = {
    "Gaussian": (lambda p, t, lib: p[0] * lib.exp(-0.5 * ((t - p[1]) / p[2]) ** 2), DAYS,
                 [2.0, 2450004.3, 0.7], [1.0, 2450004.0, 1.0]),
    "Lorentzian": (lambda p, t, lib: p[0] / (1 + ((t - p[1]) / p[2]) ** 2), HERTZ,
                   [3.0, 1e9 + 7, 12.0], [1.0, 1e9, 20.0]),
    "sine": (lambda p, t, lib: p[0] * lib.sin(p[1] * t + p[2]), SECONDS, [2.0, 100.001, 0.3], [1.0, 100.0003, 0.2]),
}  # fmt: skip


@pytest.mark.parametrize("kind", ["torch", "numpy", "2-point"])
@pytest.mark.parametrize("name", STIFF)
def test_stiff_parameters_are_fitted(name: str, kind: str):
    model, t, true, start = STIFF[name]
    data = model(true, t, np) + 0.01 * np.sin(np.arange(len(t)) ** 2)
    td, tt = torch.tensor(data), torch.tensor(t)
    if kind == "torch":
        fit = least_squares(lambda p: model(p, tt, torch) - td, start)
        assert "differences" not in fit.message
    else:
        fit = least_squares(lambda p: model(p, t, np) - data, start, jac="auto" if kind == "numpy" else kind)
        assert "differences" in fit.message
    assert fit.success, fit.message
    assert np.abs((fit.x - true) / [1, t.max() - t.min() if name != "sine" else 1, true[2]]).max() < 0.01


@pytest.mark.parametrize("kind", ["torch", "numpy"])
def test_nothing_is_evaluated_outside_the_bounds(kind: str):
    def f(p: Any) -> Any:
        assert ((p >= 0) & (p <= 9)).all(), "outside"
        return (torch if kind == "torch" else np).log1p(p) - 1

    fit = least_squares(f, np.array([0.0, 9.0]), bounds=(0, 9))
    assert near(fit.x, math.e - 1)
    assert ("differences" in fit.message) == (kind == "numpy")


@pytest.mark.parametrize("jac", ["auto", "2-point", "3-point"])
def test_differences_keep_to_the_bounds_of_each_problem(jac: str):
    low = np.array([[0.0], [5.0]])

    def f(p: Any, low: Any) -> Any:
        p, low = np.asarray(p), np.asarray(low)
        assert (p >= low).all(), "outside"
        return np.sqrt(p - low) - 1

    fit = least_squares(f, low + 1e-6, jac, (low, np.inf), args=(low,), batched=True)
    assert near(fit.x, low + 1)


# NumPy's layouts and numbers


LAYOUTS = {
    "reversed": lambda a: np.ascontiguousarray(a[::-1])[::-1],
    "big-endian": lambda a: a.astype(">f8"),
    "read-only": lambda a: np.lib.stride_tricks.as_strided(a, writeable=False),
}


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("f", [decay, decay_numpy])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_arrays_of_every_layout_are_taken(layout: str, f: Any):
    lay = LAYOUTS[layout]
    x0, t, y = lay(np.ones(3)), lay(T.numpy()), lay(Y.numpy())
    curve = curve_fit(lambda t, *p: f(p, t, 0), t, y, x0, lay(np.eye(40)))
    lines = curve_fit(lambda x, a, b: a * x[0] + b * x[1], (t, lay(T.numpy() ** 2)), T.numpy() + 2 * T.numpy() ** 2)
    fits = [
        least_squares(f, x0, args=(t, y), weights=lay(np.ones(40)), bounds=(lay(np.zeros(3)), np.inf)).x,
        least_squares(f, x0, kwargs={"t": t, "y": y}).x,
        least_squares(lambda p: lay(decay_numpy(p, T.numpy(), Y.numpy())), np.ones(3)).x,
        curve.popt,
    ]
    assert all(near(x, BEST) for x in fits)
    assert near(lines.popt, [1, 2])
    assert near(curve.prediction_band(t, sigma=lay(np.ones(40)))[0], curve.prediction_band(T.numpy(), sigma=1.0)[0])


@pytest.mark.parametrize("x0", [1, np.int64(1), [1, 2], torch.tensor([1, 2]), np.array([1, 2], "u1")], ids=repr)
def test_integer_starts_are_real_numbers_and_options_may_be_numpys(x0: Any):
    fit = least_squares(
        lambda p: torch.exp(p) - 1.5, x0, ftol=np.float32(1e-12), gtol=np.float32(0), loss="huber",
        f_scale=np.float32(10), max_nfev=np.int64(500),
    )  # fmt: skip
    assert fit.x.dtype == (torch.float64 if isinstance(x0, Tensor) else np.float64)
    assert near(fit.x, math.log(1.5))


# Without NumPy


WITHOUT = """
import sys
class Missing:
    def find_spec(self, name, *_):
        if name.partition(".")[0] == "numpy":
            raise ModuleNotFoundError(name)
sys.meta_path.insert(0, Missing())
import torch
import marquardt as mq

fit = mq.least_squares(lambda p: torch.stack([p[0] - 1, 10 * (p[1] - p[0] ** 2)]), [-1, 2], bounds=([-2, -2], [2, 2]))
assert torch.allclose(fit.x, torch.ones(2, dtype=torch.float64)), fit
f = lambda x, a, b: a * torch.exp(-b * x)
x, y = [0, 1, 2, 3, 4], [5.0, 3.1, 1.9, 1.2, 0.7]
popt, pcov = one = mq.curve_fit(f, x, y)
many = mq.curve_fit(f, [x, x], [y, y], [1, 1], batched=True, loss="huber")
assert torch.allclose(many.popt, popt.expand(2, 2), rtol=1e-6), (popt, many.popt)
assert one.predict([1.0, 2.0]).shape == (2,) and many.confidence_band(x)[0].shape == (2, 5)
try:
    mq.least_squares(lambda p: [float(p[0])], [1.0])
except TypeError as error:
    assert "must return a tensor" in str(error), error
else:
    raise AssertionError("a function of plain numbers")
assert "numpy" not in sys.modules
"""


def test_plain_numbers_are_fitted_without_numpy():
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", WITHOUT], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
