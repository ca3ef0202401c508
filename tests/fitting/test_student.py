"""Quantiles of Student's t."""

import math

import pytest
from scipy import stats

from marquardt.fitting.fit import quantile


@pytest.mark.parametrize("nu", [1, 2, 3, 7, 30, 1000, 1e5, math.inf])
def test_quantiles_of_students_t(nu: float):
    for p in (0.5, 0.6, 0.9, 0.975, 0.9995, 0.2, 1e-6):
        known = stats.t.ppf(p, nu) if nu < math.inf else stats.norm.ppf(p)
        assert quantile(p, nu) == pytest.approx(known, rel=1e-10, abs=1e-15)
