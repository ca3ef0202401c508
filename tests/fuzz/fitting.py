"""Random problems for least_squares and curve_fit, judged beside SciPy.

A seed makes a problem. Three things must hold: nothing is raised but refusals that say why, no parameter lies outside
its bounds, and a success is one: SciPy, started where the fit has ended, with tolerances near rounding, finds no cost
that is lower by more than a millionth. Where it does, a point counts as stationary still if the residuals are at right
angles to all that J spans: plateaus of the loss and saddle points are such.

    python tests/fuzz/fitting.py --cases 1000 --seed 0
"""

from __future__ import annotations

import collections
import math
import sys
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

sys.path.append(str(Path(__file__).parents[1]))

import numpy as np
import torch
from scipy import optimize

from fuzz import attacks
from marquardt import curve_fit, least_squares
from marquardt.fitting.robust import LOSSES

TIGHT = {"ftol": 1e-15, "xtol": 1e-15, "gtol": 1e-15, "max_nfev": 500}
LOWER = 1e-6  # a cost this much lower, relatively, is another one
RIGHT = 1e-6  # cosine of what is called a right angle
REFUSALS = ("is not finite", "too large to square", "no fit:")  # of a start, and curve_fit's of a fit that failed
Model = Callable[..., Any]  # library, t, p → curve


def of_terms(term: Model, size: int) -> Model:
    """Σ term(library, t, its parameters) + the last parameter."""
    return lambda lib, t, p: sum(term(lib, t, p[i : i + size]) for i in range(0, len(p) - 1, size)) + p[-1]


def decay(lib: Any, t: Any, p: Any) -> Any:
    return p[0] * lib.exp(-p[1] * t)


def peak(lib: Any, t: Any, p: Any) -> Any:
    return p[0] * lib.exp(-(((t - p[1]) / p[2]) ** 2))


def wave(lib: Any, t: Any, p: Any) -> Any:
    return p[0] * lib.sin(p[1] * t + p[2])


# Each with the ranges of its true parameters.
MODELS: dict[str, tuple[Model, list[tuple[float, float]]]] = {
    "exponential": (of_terms(decay, 2), [(0.5, 5), (0.1, 2), (-1, 1)]),
    "two exponentials": (of_terms(decay, 2), [(0.5, 5), (0.1, 0.6), (0.5, 5), (0.8, 3), (-1, 1)]),
    "three exponentials": (
        of_terms(decay, 2), [(0.5, 5), (0.1, 0.3), (0.5, 5), (0.6, 1), (0.5, 5), (2, 4), (-1, 1)],
    ),
    "peak": (of_terms(peak, 3), [(0.5, 5), (1, 5), (0.3, 1.5), (-1, 1)]),
    "two peaks": (of_terms(peak, 3), [(0.5, 5), (1, 2.5), (0.3, 1), (0.5, 5), (3, 5), (0.3, 1), (-1, 1)]),
    "sine": (of_terms(wave, 3), [(0.5, 3), (0.5, 4), (0, 3), (-1, 1)]),
    "logistic": (lambda lib, t, p: p[0] / (1 + lib.exp(-p[1] * (t - p[2]))), [(1, 5), (0.5, 4), (1, 5)]),
    "Gompertz": (lambda lib, t, p: p[0] * lib.exp(-p[1] * lib.exp(-p[2] * t)), [(1, 5), (0.5, 4), (0.3, 2)]),
    "saturation": (lambda lib, t, p: p[0] * t / (p[1] + t), [(1, 5), (0.3, 4)]),
    "Hill": (lambda lib, t, p: p[0] * t ** p[1] / (p[2] + t ** p[1]), [(1, 5), (0.5, 4), (0.5, 9)]),
    "rational": (
        lambda lib, t, p: (p[0] + p[1] * t + p[2] * t**2) / (1 + p[3] * t + p[4] * t**2),
        [(-2, 2), (-2, 2), (-2, 2), (0.1, 1), (0.1, 1)],
    ),
    "power": (lambda lib, t, p: p[0] * t ** p[1] + p[2], [(0.5, 4), (-1.5, 2.5), (-1, 1)]),
    "beta": (lambda lib, t, p: p[0] * (t / 7) ** p[1] * (1 - t / 7) ** p[2], [(2, 9), (0.5, 3), (0.5, 3)]),
    "line": (lambda lib, t, p: p[0] + p[1] * t, [(-3, 3), (-3, 3)]),
    "polynomial": (lambda lib, t, p: sum(p[k] * t**k for k in range(5)), [(-3, 3)] * 5),
    "Rosenbrock": (
        lambda lib, t, p: 10 * (p[1] - p[0] ** 2) * (t > 3) + p[0] * (t <= 3), [(-2, 2), (-2, 2)],
    ),
    "sum of factors": (lambda lib, t, p: (p[0] + p[1]) * lib.exp(-p[2] * t), [(0.5, 3), (0.5, 3), (0.2, 2)]),
    "product of factors": (lambda lib, t, p: p[0] * p[1] * lib.exp(-p[2] * t), [(0.5, 3), (0.5, 3), (0.2, 2)]),
    "no influence": (lambda lib, t, p: p[0] * lib.exp(-p[1] * t) + 0 * p[2], [(0.5, 3), (0.2, 2), (-1, 1)]),
}  # fmt: skip


@dataclass
class Case:
    """One problem, or many of one model."""

    seed: int
    name: str
    size: np.ndarray  # (n,), units of the parameters
    t: np.ndarray  # (m,)
    y: np.ndarray  # (B, m)
    x0: np.ndarray  # (B, n)
    bounds: np.ndarray  # (2, B, n)
    loss: str
    f_scale: float
    dtype: torch.dtype
    batched: bool
    curve: bool  # by curve_fit
    arrays: bool  # a function of NumPy arrays

    def __str__(self) -> str:
        words = [f"seed {self.seed}: {self.name}", self.loss, str(self.dtype).removeprefix("torch.")]
        words += [word for word in ("batched", "curve", "arrays") if getattr(self, word)]
        return ", ".join([*words, "bounds"] if self.bounded else words)

    @property
    def bounded(self) -> bool:
        return bool(np.isfinite(self.bounds).any())

    def model(self, t: Any, p: Any, lib: Any) -> Any:
        size = torch.as_tensor(self.size) if lib is torch else self.size
        return MODELS[self.name][0](lib, t, [q * s for q, s in zip(p, size, strict=True)])


def make(seed: int) -> Case:
    rng = np.random.default_rng(seed)
    name = list(MODELS)[rng.integers(len(MODELS))]
    model, ranges = MODELS[name]
    low, high = np.array(ranges).T
    n, m = len(ranges), int(rng.integers(len(ranges) + 3, 40))
    batched = rng.random() < 0.2
    B = int(rng.integers(2, 5)) if batched else 1
    size = 10.0 ** rng.uniform(-8, 8, n) if rng.random() < 0.2 else np.ones(n)
    t = np.sort(rng.uniform(0.1, 6, m))
    truth = rng.uniform(low, high, (B, n))
    with np.errstate(all="ignore"):
        y = np.stack([model(np, t, p) for p in truth])
    y = y + rng.choice([0, 1e-6, 0.05, 0.3]) * rng.standard_normal((B, m))
    if rng.random() < 0.3:  # outliers
        y = np.where(rng.random((B, m)) < 0.1, y + 10 * rng.standard_normal((B, m)), y)
    x0 = truth * np.exp(rng.choice([0.1, 0.5, 1.5]) * rng.standard_normal((B, n)))
    if rng.random() < 0.1:
        x0 *= rng.choice([1, -1], (B, n))
    bounds = np.stack([np.full((B, n), -np.inf), np.full((B, n), np.inf)])
    kind = rng.choice(["none", "positive", "wide", "active"], p=[0.6, 0.1, 0.1, 0.2])
    if kind == "positive":
        bounds[0] = 0
        x0 = np.abs(x0)
    elif kind != "none":
        away = rng.uniform(0.05, 1, (2, B, n)) * np.abs(x0)
        bounds = np.stack([x0 - away[0], x0 + away[1]])
        if kind == "wide":
            bounds = np.stack([np.minimum(x0, truth) - away[0], np.maximum(x0, truth) + away[1]])
    return Case(
        seed, name, size, t, y, x0 / size, bounds / size,
        loss=str(rng.choice(["linear", "huber", "soft_l1", "cauchy", "arctan"], p=[0.6, 0.1, 0.1, 0.1, 0.1])),
        f_scale=float(rng.choice([0.1, 1.0])),
        dtype=torch.float32 if rng.random() < 0.1 else torch.float64,
        batched=batched,
        curve=rng.random() < 0.3,
        arrays=rng.random() < 0.1,
    )  # fmt: skip


def fit(case: Case) -> Any:
    """Our result, with a leading dimension of problems."""
    lib: Any = np if case.arrays else torch
    bounds = tuple(case.bounds if case.batched else case.bounds[:, 0])
    options: dict[str, Any] = {"loss": case.loss, "f_scale": case.f_scale, "dtype": case.dtype, "batched": case.batched}
    options["max_nfev"] = 600  # those that need more are not worth the time
    x0, y = (case.x0, case.y) if case.batched else (case.x0[0], case.y[0])
    if case.curve:
        parameters = ", ".join(f"p{j}" for j in range(x0.shape[-1]))
        f = eval(f"lambda t, {parameters}: model(t, [{parameters}], lib)", {"model": case.model, "lib": lib})
        return curve_fit(f, case.t, y, x0, bounds=bounds, **options).result
    fun = lambda p, y, t: case.model(t, p, lib) - y  # noqa: E731
    return least_squares(fun, x0, bounds=bounds, args=(y,), kwargs={"t": case.t}, **options)


def further(case: Case, i: int, x: np.ndarray) -> Any:
    """SciPy's result from x on, in float64 with exact derivatives."""
    t, y = torch.tensor(case.t), torch.tensor(case.y[i])
    fun = lambda p: case.model(t, p, torch) - y  # noqa: E731
    jac = torch.func.jacfwd(fun)
    plain = case.loss == "linear" and not case.bounded and len(y) >= len(x)
    return optimize.least_squares(
        lambda p: fun(torch.tensor(p)).numpy(), x, jac=lambda p: jac(torch.tensor(p)).numpy(), x_scale="jac",
        bounds=tuple(case.bounds[:, i]), loss=case.loss, f_scale=case.f_scale, method="lm" if plain else "trf", **TIGHT,
    )  # fmt: skip


def cost(case: Case, i: int, x: np.ndarray) -> tuple[float, float]:
    """The cost at x in float64, and what of it may be rounding of the fit's arithmetic."""
    t, y, p = torch.tensor(case.t), torch.tensor(case.y[i]), torch.tensor(x)
    fun = lambda p: case.model(t, p, torch) - y  # noqa: E731
    eps = torch.finfo(case.dtype).eps
    z = (fun(p) / case.f_scale) ** 2
    rho = z if case.loss == "linear" else LOSSES[case.loss](z)[0]
    wobble = 10 * eps * float(torch.func.jacfwd(fun)(p).norm(dim=0) @ p.abs() + y.norm())
    value = 0.5 * case.f_scale**2 * float(rho.sum())
    return value, wobble * math.sqrt(2 * value) + 0.5 * wobble**2


def cosine(J: np.ndarray, g: np.ndarray, cost: float) -> float:
    """Of the angle between the residuals and what the columns of J span, from the gradient g = Jᵀf."""
    length = np.linalg.norm(J, axis=0)
    if not (length > 0).any():
        return 0.0
    _, s, Vt = np.linalg.svd(J[:, length > 0] / length[length > 0], full_matrices=False)
    inside = s > len(g) * np.finfo(J.dtype).eps * s[0]
    return float(
        np.linalg.norm((Vt @ (g / np.where(length > 0, length, 1))[length > 0])[inside] / s[inside])
        / math.sqrt(2 * cost)
    )


def faults(case: Case) -> Iterator[tuple[str, str]]:
    """How each problem of the case ended, with a word on it; 'crash', 'outside' and 'false' are faults."""
    try:
        result = fit(case)
    except Exception as error:
        known = isinstance(error, (ValueError, RuntimeError)) and any(word in str(error) for word in REFUSALS)
        yield "refused" if known else "crash", f"{type(error).__name__}: {str(error)[:300]}"
        return
    for i in range(len(case.y)):
        one = result if not case.batched else SimpleNamespace(**{k: result[k][i] for k in result if k != "message"})
        yield judged(case, i, one)


def judged(case: Case, i: int, result: Any) -> tuple[str, str]:
    lower, upper = case.bounds[:, i]
    x = result.x.astype(float)
    if not ((lower.astype(result.x.dtype) <= x) & (x <= upper.astype(result.x.dtype))).all():
        return "outside", f"problem {i}: {x}, bounds {lower}, {upper}"
    if not result.success:
        return "unsolved", f"problem {i}: status {result.status}"
    x = x.clip(lower, upper)  # float32 may round beyond them
    (ours, rounding), theirs = cost(case, i, x), further(case, i, x).cost
    single = case.dtype == torch.float32
    eps = float(np.finfo(np.float32).eps)
    free = (result.active_mask * result.grad >= 0) & (lower < upper)
    right = cosine(result.jac[:, free], result.grad[free], result.cost) if result.cost > 0 else 0.0
    text = f"problem {i}: status {result.status}, x {x}, cost {ours:.12g}, SciPy's {theirs:.12g}, cosine {right:.2g}"
    lower_cost = ours - theirs > (1e3 * eps if single else LOWER) * ours + rounding
    return "false" if lower_cost and right > (1e3 * eps if single else RIGHT) else "solved", text


def one(seed: int) -> str:
    """How most problems of a case ended"""
    case = make(seed)
    with warnings.catch_warnings(), np.errstate(all="ignore"):
        warnings.simplefilter("ignore")
        ended = list(faults(case))
    for kind, text in ended:
        if kind in ("crash", "false", "outside"):
            raise attacks.Fault(f"{kind}: {case}: {text}")
    return collections.Counter(kind for kind, _ in ended).most_common(1)[0][0]


if __name__ == "__main__":
    attacks.main(__doc__, one)
