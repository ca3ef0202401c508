"""Quantiles of Student's t."""

from __future__ import annotations

import math
from statistics import NormalDist


def beta_fraction(a: float, b: float, x: float) -> float:
    """The continued fraction of the incomplete beta function, by Lentz's method (DLMF 8.17.22)."""
    tiny = 1e-300
    c, d = 1.0, 1 / (1 - (a + b) * x / (a + 1) or tiny)
    value = d
    for m in range(1, 10_000):
        for term in (m * (b - m) * x / ((a + 2 * m - 1) * (a + 2 * m)),
                     -(a + m) * (a + b + m) * x / ((a + 2 * m) * (a + 2 * m + 1))):  # fmt: skip
            d, c = 1 / (1 + term * d or tiny), (1 + term / c) or tiny
            value *= c * d
        if abs(c * d - 1) < 1e-16:
            break
    return value


def tail(t: float, nu: float) -> float:
    """P(T > t) for t ≥ 0: half of the regularised incomplete beta function I_x(ν/2, ½) at x = ν/(ν + t²)."""
    a, b, y = nu / 2, 0.5, t * t / (nu + t * t)
    x = nu / (nu + t * t)
    if x <= 0 or y <= 0:
        return 0.0 if x <= 0 else 0.5
    log = math.lgamma(a + b) - math.lgamma(a) - math.lgamma(b) + a * -math.log1p(t * t / nu) + b * math.log(y)
    if x < (a + 1) / (a + b + 2):
        return 0.5 * math.exp(log) * beta_fraction(a, b, x) / a
    return 0.5 - 0.5 * math.exp(log) * beta_fraction(b, a, y) / b


def quantile(p: float, nu: float) -> float:
    """t with P(T ≤ t) = p, for ν degrees of freedom; of the normal distribution for ν = ∞."""
    if p < 0.5:
        return -quantile(1 - p, nu)
    if p == 0.5:
        return 0.0
    if math.isinf(nu):
        return NormalDist().inv_cdf(p)
    low, high = 0.0, 1.0
    while tail(high, nu) > 1 - p:
        low, high = high, 2 * high
    while high - low > 4e-16 * high:
        middle = (low + high) / 2
        if middle in (low, high):
            break
        low, high = (middle, high) if tail(middle, nu) > 1 - p else (low, middle)
    return (low + high) / 2
