"""Fits that look finished at their start, and points and parameters that must not count.

A seed makes one of two attacks. *Hidden*: residuals whose smallest cost is known, with parameters that start where
their columns of the Jacobian are zero (squares, cosines, products, cubes), in any units, and others without influence;
a success must have that cost, and what has no influence must be where it was. *Padded*: a curve fitted with points
without weight, with fixed parameters or both; popt, standard errors and bands must be those of the fit without them.

    python tests/fuzz/traps.py --cases 300 --seed 0
"""

from __future__ import annotations

import math
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parents[1]))

import numpy as np
import torch

from fuzz import attacks
from marquardt import curve_fit, least_squares

Term = Callable[[Any, list[Any]], Any]  # library, parameters in units of one → residual

# Residuals that can all be made zero, with the number of parameters; all have columns of zeros at the origin.
TERMS: dict[str, tuple[Term, int]] = {
    "square": (lambda lib, q: q[0] ** 2 - 1, 1),
    "cosine": (lambda lib, q: lib.cos(q[0]) - 0.3, 1),
    "bell": (lambda lib, q: lib.exp(-(q[0] ** 2)) - 0.4, 1),
    "cube": (lambda lib, q: q[0] ** 3 - 2, 1),
    "product": (lambda lib, q: q[0] * q[1] - 1.5, 2),
    "negative product": (lambda lib, q: q[0] * q[1] + 1.5, 2),
    "product of three": (lambda lib, q: q[0] * q[1] * q[2] - 0.7, 3),
    "difference of squares": (lambda lib, q: q[0] ** 2 - q[1] ** 2 - 1, 2),
}


def hidden(rng: np.random.Generator) -> str:
    names = [str(name) for name in rng.choice(list(TERMS), rng.integers(1, 4))]
    blind = sum(TERMS[name][1] for name in names)
    plain, dead = int(rng.integers(0, 3)), int(rng.integers(0, 3))
    n = blind + plain + dead
    lib: Any = torch if rng.random() < 0.6 else np
    batched = rng.random() < 0.2
    spread = rng.choice([0, 3])
    size = 10.0 ** rng.uniform(-spread, spread, n)
    A = np.eye(plain) + 0.2 * rng.standard_normal((plain, plain))
    truth = rng.uniform(-2, 2, plain)
    order = rng.permutation(n)

    def residuals(p: Any) -> Any:
        q = [p[int(j)] / size[j] for j in order]
        parts, at = [], 0
        for name in names:
            f, k = TERMS[name]
            parts.append(f(lib, q[at : at + k]))
            at += k
        for i in range(plain):
            parts.append(sum(A[i, j] * (q[blind + j] - truth[j]) for j in range(plain)))
        parts.append(1 + 0 * sum(p))  # what is left in the end
        return lib.stack(parts) if lib is torch else np.array(parts)

    start = np.zeros(n)
    without = order[blind + plain :]
    start[without] = rng.choice([0.0, 7.0, -0.3], dead) * size[without]
    start[order[blind : blind + plain]] = rng.standard_normal(plain) * size[order[blind : blind + plain]]
    kind = rng.choice(["none", "wide", "half"], p=[0.6, 0.2, 0.2])
    bounds: Any = (-math.inf, math.inf)
    if kind != "none":
        bounds = (np.minimum(start, 0) - 50 * size, np.maximum(start, 0) + 50 * size)
    loss = str(rng.choice(["linear", "soft_l1", "cauchy"], p=[0.7, 0.15, 0.15]))
    x0: Any = np.stack([start, start]) if batched else start
    fit = least_squares(
        residuals, torch.tensor(x0) if rng.random() < 0.5 else x0, bounds=bounds, loss=loss, batched=batched
    )
    xs, costs = np.atleast_2d(np.asarray(fit.x)), np.atleast_1d(np.asarray(fit.cost))
    least = 0.5 * {"linear": 1.0, "soft_l1": 2 * (math.sqrt(2) - 1), "cauchy": math.log(2)}[loss]
    text = f"{names}, {plain} plain, {dead} dead, {lib.__name__}, {loss}, bounds {kind}: x {xs}, cost {costs}"
    if (xs[:, without] != start[without]).any():
        raise attacks.Fault(f"moved what has no influence: {text}, start {start}")
    if not np.asarray(fit.success).all():
        return "unsolved"
    if (costs > least * (1 + 1e-6)).any():
        raise attacks.Fault(f"false success: {text}, least {least}")
    return "solved"


CURVES: list[tuple[Callable[..., Any], list[float]]] = [
    (lambda lib: lambda x, a, b, c: a * lib.exp(-b * x) + c, [2.5, 1.3, 0.5]),
    (lambda lib: lambda x, a, b, c: a * lib.exp(-(((x - b) / c) ** 2)), [2.0, 1.7, 0.8]),
    (lambda lib: lambda x, a, b: a * x / (b + x), [3.0, 0.7]),
    (lambda lib: lambda x, a, b, c, d: a + b * x + c * x**2 + d * x**3, [1.0, -2.0, 0.3, 0.1]),
]


def padded(rng: np.random.Generator) -> str:
    made, truth = CURVES[rng.integers(len(CURVES))]
    n, m, more = len(truth), int(rng.integers(12, 40)), int(rng.integers(0, 20))
    lib: Any = torch if rng.random() < 0.6 else np
    f = made(lib)
    x = np.sort(rng.uniform(0.1, 4, m))
    unit = 10.0 ** rng.uniform(-4, 4)  # of y and sigma
    sigma = unit * 0.05 * np.exp(rng.uniform(-1, 1, m))
    y = unit * np.asarray(made(np)(x, *truth)) + sigma * rng.standard_normal(m)
    curve = lambda x, *p: unit * f(x, *p)  # noqa: E731
    fixed = rng.random(n) < (0.4 if rng.random() < 0.6 else 0)
    fixed[rng.integers(n)] = False
    options: dict[str, Any] = {"loss": str(rng.choice(["linear", "huber"])), "absolute_sigma": bool(rng.random() < 0.5)}
    where = rng.permutation(m + more)
    X, Y = (
        np.concatenate([x, rng.uniform(0.1, 4, more)])[where],
        np.concatenate([y, unit * rng.choice([0, 1, 9], more)])[where],
    )
    p0, low, high = np.array(truth), np.full(n, -np.inf), np.full(n, np.inf)
    low[fixed] = high[fixed] = p0[fixed]
    weightless = float(rng.choice([1e9, 1e12, 1e30, np.inf])) * max(1.0, unit)
    S = np.concatenate([sigma, np.full(more, weightless)])[where]
    if rng.random() < 0.3:
        weights = np.where(weightless <= S, 0.0, (unit / S) ** 2)
        given: dict[str, Any] = {"weights": weights}
        used: dict[str, Any] = {"weights": (unit / sigma) ** 2}
    else:
        given, used = {"sigma": S}, {"sigma": sigma}
    free = np.flatnonzero(~fixed)

    def reduced(x: Any, *q: Any) -> Any:
        p = list(truth)
        for j, value in zip(free, q, strict=True):
            p[j] = value
        return curve(x, *p)

    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        try:
            plain = curve_fit(reduced, x, y, p0[free], **used, **options)
        except RuntimeError:
            return "unsolved"
        batched = rng.random() < 0.3
        if batched:
            given = {name: np.stack([value, value]) for name, value in given.items()}
            fit = curve_fit(curve, X, np.stack([Y, Y]), p0, bounds=(low, high), batched=True, **given, **options)
            popt, pcov, dof = fit.popt[1], fit.pcov[1], int(fit.dof[1])
            band = [side[1] for side in fit.confidence_band(x)]
        else:
            fit = curve_fit(curve, X, Y, p0, bounds=(low, high), **given, **options)
            popt, pcov, dof, band = fit.popt, fit.pcov, fit.dof, fit.confidence_band(x)
    text = f"{more} points of sigma {weightless}, fixed {fixed}, {lib.__name__}, {options}, batched {batched}"
    for name, mine, theirs in (
        ("dof", dof, plain.dof), ("popt", popt[free], plain.popt), ("pcov", pcov[np.ix_(free, free)], plain.pcov),
        ("lower", band[0], plain.confidence_band(x)[0]), ("upper", band[1], plain.confidence_band(x)[1]),
    ):  # fmt: skip
        if not np.allclose(mine, theirs, rtol=1e-3, atol=1e-4 * float(np.abs(theirs).max())):
            raise attacks.Fault(f"{name}: {text}: {mine}, without {theirs}")
    if pcov[fixed].any() or pcov[:, fixed].any():
        raise attacks.Fault(f"errors of fixed parameters: {text}: {pcov}")
    return "the same"


def one(seed: int) -> str:
    rng = np.random.default_rng(seed)
    with np.errstate(all="ignore"):
        return hidden(rng) if seed % 2 else padded(rng)


if __name__ == "__main__":
    attacks.main(__doc__, one)
