"""Sums of squares, derivatives and Newton's steps of the classical problems in 80 digits.

The residuals are torch functions. `Digits` stands in for a tensor and carries mpmath numbers through them; the float64
data of a problem are taken as they are, so that what is certified is the very problem that float64 is to solve.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import mpmath
import numpy as np
import torch

mpmath.mp.dps = 80  # second differences with steps of 1e-20 leave 40 of them
STEP = mpmath.mpf(10) ** -20

FUNCTIONS: dict[str, Callable[..., Any]] = {  # by torch's name
    **{name: np.frompyfunc(getattr(mpmath, name), 1, 1) for name in ("exp", "sin", "cos")},
    "atan2": np.frompyfunc(mpmath.atan2, 2, 1),
    "stack": np.stack,
    "cat": np.concatenate,
    "add": np.add,
    "sub": np.subtract,
    "mul": np.multiply,
    "true_divide": np.true_divide,
    "div": np.true_divide,
    "matmul": np.matmul,
}


def unwrap(value: Any) -> Any:
    """An array of mpmath numbers; indices and sizes stay as they are."""
    if isinstance(value, Digits):
        return value.array
    if isinstance(value, torch.Tensor):
        return np.frompyfunc(mpmath.mpf, 1, 1)(value.double().numpy())
    if isinstance(value, (list, tuple)):
        return [unwrap(v) for v in value]
    return mpmath.mpf(value) if isinstance(value, float) else value


class Digits(np.lib.mixins.NDArrayOperatorsMixin):
    """A tensor of 80-digit numbers, as far as the classical problems go."""

    def __init__(self, array: Any) -> None:
        self.array = np.asarray(array, dtype=object)

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Digits:
        return cls(FUNCTIONS[function.__name__.strip("_")](*map(unwrap, args), **(kwargs or {})))

    def __array_ufunc__(self, function: Any, method: str, *args: Any, **kwargs: Any) -> Digits:
        return Digits(function(*map(unwrap, args), **kwargs))

    def __len__(self) -> int:
        return len(self.array)

    def __getitem__(self, index: Any) -> Digits:
        return Digits(self.array[index])

    def flip(self, dim: int) -> Digits:
        return Digits(np.flip(self.array, dim))

    def sum(self) -> Digits:
        return Digits(self.array.sum())

    def prod(self) -> Digits:
        return Digits(self.array.prod())


Residuals = Callable[[Any], Any]


def sum_of_squares(residuals: Residuals, x: Sequence[Any]) -> mpmath.mpf:
    f = residuals(Digits([mpmath.mpf(v) for v in x])).array
    return (f * f).sum()


def derivatives(residuals: Residuals, x: Sequence[float]) -> torch.Tensor:
    """∂f/∂x by central differences, exact to float64. (m, n)"""
    columns = []
    for i in range(len(x)):
        ahead, behind = ([mpmath.mpf(v) + s * STEP * (i == j) for j, v in enumerate(x)] for s in (1, -1))
        columns.append((residuals(Digits(ahead)).array - residuals(Digits(behind)).array) / (2 * STEP))
    return torch.from_numpy(np.stack(columns, 1).astype(np.float64))


def newton_step(residuals: Residuals, x: Sequence[Any]) -> mpmath.matrix:
    """−H⁻¹g of Σf², both by central differences in 80 digits; the shortest one where H is singular."""
    n = len(x)
    x = [mpmath.mpf(v) for v in x]
    h = [STEP * (abs(v) or 1) for v in x]

    def moved(*by: tuple[int, int]) -> mpmath.mpf:
        point = list(x)
        for i, sign in by:
            point[i] += sign * h[i]
        return sum_of_squares(residuals, point)

    here = moved()
    ahead, behind = [moved((i, 1)) for i in range(n)], [moved((i, -1)) for i in range(n)]
    g, H = mpmath.matrix(n, 1), mpmath.matrix(n, n)  # per step h: all parameters alike
    for i in range(n):
        g[i] = (ahead[i] - behind[i]) / 2 / STEP
        for j in range(i + 1):
            both = moved((i, 1), (j, 1)) + moved((i, -1), (j, -1))
            H[i, j] = H[j, i] = (both + 2 * here - ahead[i] - behind[i] - ahead[j] - behind[j]) / 2 / STEP**2
    values, Q = mpmath.eigsy(H)
    largest = max(abs(v) for v in values)
    step = mpmath.matrix(n, 1)
    for k in range(n):
        if values[k] < -largest * mpmath.mpf(10) ** -18:
            raise ValueError(f"no minimum: curvature {mpmath.nstr(values[k], 5)} beside {mpmath.nstr(largest, 5)}")
        if values[k] > largest * mpmath.mpf(10) ** -30:  # rounding of H: 1e-40
            step -= Q[:, k] * (Q[:, k].T * g)[0] / values[k]
    return mpmath.matrix([step[i] * h[i] / STEP for i in range(n)])
