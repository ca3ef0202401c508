"""How many parameters a curve has."""

from typing import Any

import numpy as np
import pytest
from scipy import optimize

from marquardt import curve_fit
from support.decay.curve import TIGHT, X, Y, decay


def test_parameters_with_defaults_may_be_left_out():
    def offset(x: Any, a: Any, b: Any, c: Any = 0.5) -> Any:
        return decay(x, a, b, c)

    assert curve_fit(offset, X, Y, [1.0, 1.0]).popt.shape == (2,)
    assert curve_fit(offset, X, Y, [1.0, 1.0, 1.0]).popt.shape == (3,)


def test_parameters_are_positional():
    def scaled(x: Any, a: Any, b: Any, *, k: float = 2.0) -> Any:
        return k * a * np.exp(-b * x)

    def more(x: Any, a: Any, b: Any, *rest: Any, **options: Any) -> Any:
        return a * np.exp(-b * x)

    for function in (scaled, more):
        assert curve_fit(function, X, Y).popt == pytest.approx(optimize.curve_fit(function, X, Y, **TIGHT)[0], rel=1e-6)
