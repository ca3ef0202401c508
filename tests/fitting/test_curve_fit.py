"""curve_fit: beside SciPy's, its names, bad input."""

import math
from typing import Any

import numpy as np
import pytest
import torch
from scipy import optimize

from marquardt import curve_fit
from support.decay.curve import COVARIANCE, NOISE, SIGMA, TIGHT, X, Y, decay, decay_numpy, slopes


@pytest.mark.parametrize("function", [decay, decay_numpy])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"p0": [3.0, 1.0, 0.1]},
        {"sigma": SIGMA},
        {"sigma": SIGMA, "absolute_sigma": True},
        {"sigma": COVARIANCE},
        {"sigma": COVARIANCE, "absolute_sigma": True},
        {"bounds": (0, [3, 2, 1])},
    ],
)
def test_scipys_answers(function: Any, options: dict[str, Any]):
    popt, pcov = curve_fit(function, X, Y, **options)
    known, known_cov = optimize.curve_fit(decay_numpy, X, Y, jac=slopes, **options, **TIGHT)
    assert isinstance(popt, np.ndarray)
    assert popt == pytest.approx(known, rel=1e-7)
    assert pcov == pytest.approx(known_cov, rel=1e-5)


@pytest.mark.parametrize("sigma", [None, SIGMA, COVARIANCE], ids=["none", "1-D", "2-D"])
def test_a_jacobian_of_ones_own(sigma: Any):
    given, found = (curve_fit(decay_numpy, X, Y, sigma=sigma, jac=jac) for jac in (slopes, None))
    assert given.popt == pytest.approx(found.popt, rel=1e-8)
    assert "differences" in found.result.message
    assert "differences" not in given.result.message


def test_tensors_in_tensors_out():
    fit = curve_fit(decay, torch.tensor(X), torch.tensor(Y))
    popt, pcov = fit
    assert isinstance(popt, torch.Tensor)
    assert isinstance(pcov, torch.Tensor)
    assert torch.allclose(fit.perr**2, pcov.diagonal())
    assert torch.allclose(fit.predict(torch.tensor(X)), decay(torch.tensor(X), *popt))


@pytest.mark.parametrize("p0", [None, [1.0, 1.0, 0.5], np.array([[1.0, 1.0, 0.5]] * 3)], ids=["none", "one", "each"])
@pytest.mark.parametrize("kind", [np.array, torch.tensor, np.ndarray.tolist])
def test_bounds_of_each_data_set(kind: Any, p0: Any):
    y = decay_numpy(X, 2.5, 1.3, 0.5) + 0.05 * NOISE[:3]
    lower, upper = np.zeros((3, 3)), np.full((3, 3), 9.0)
    upper[0, 0], lower[1, 2], lower[2, 2] = 2.0, 0.1, 0.5  # the first holds
    many = curve_fit(decay, X, y, p0, bounds=(kind(lower), kind(upper)), batched=True)
    assert many.popt[0, 0] == 2.0
    for i in range(3):
        alone = curve_fit(decay, X, y[i], [1.0, 1.0, 0.5], bounds=(lower[i], upper[i]))
        assert many.popt[i] == pytest.approx(alone.popt, rel=1e-6)
    shared = curve_fit(decay, X, y, p0, bounds=np.stack([lower[0], upper[0]]), batched=True)  # as one array
    assert shared.popt[0] == pytest.approx(many.popt[0])


def test_scipys_names():
    for name in ("maxfev", "max_nfev"):
        with pytest.raises(RuntimeError, match="no fit"):
            curve_fit(decay, X, Y, **{name: 3})
    known = curve_fit(decay, X, Y).popt
    for options in ({"maxfev": 0}, {"method": None}, {"method": "trf"}, {"full_output": False}, {"check_finite": None}):
        assert curve_fit(decay, X, Y, **options).popt == pytest.approx(known, rel=1e-12)


def test_a_fit_that_fails_says_so():
    with pytest.raises(RuntimeError, match="no fit"):
        curve_fit(decay, X, Y, max_nfev=3)


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        ({"ydata": np.where(X > 3, np.nan, Y)}, ValueError, "ydata contains NaN"),
        ({"xdata": np.where(X > 3, np.inf, X)}, ValueError, "xdata contains NaN"),
        ({"ydata": Y[:39]}, ValueError, r"\(40,\)"),
        ({"ydata": Y.reshape(2, 20)}, ValueError, "batched"),
        ({"ydata": Y * 1j}, TypeError, "complex"),
        ({"f": lambda x, *p: decay(x, *p)}, ValueError, "p0 is needed"),
        ({"f": lambda x, a: None}, TypeError, "None"),
        ({"p0": [1j, 1, 1]}, TypeError, "p0 is complex"),
        ({"p0": [1.0, 1.0]}, ValueError, r"p0 has length 2, f takes 3 parameters after x \(a, b, c\)"),
        ({"p0": 1.0}, ValueError, "p0 has length 1, f takes 3"),
        ({"p0": [1.0] * 4}, ValueError, "p0 has length 4, f takes 3"),
        ({"p0": [1.0] * 4, "ydata": np.stack([Y, Y]), "batched": True}, ValueError, "p0 has length 4, f takes 3"),
        ({"p0": np.ones((3, 3)), "ydata": np.stack([Y, Y]), "batched": True}, ValueError, r"\(3, 3\) for 2 data sets"),
        ({"f": torch.mul}, ValueError, "p0 is needed"),
        ({"sigma": SIGMA[:39]}, ValueError, r"\(39,\)"),
        ({"sigma": -SIGMA}, ValueError, "positive"),
        ({"sigma": -COVARIANCE}, ValueError, "positive definite"),
        ({"bounds": (2, 1)}, ValueError, "above the upper"),
        ({"bounds": ([0, 0], 9)}, ValueError, r"lower bound has shape \(2,\)"),
        ({"bounds": (0, 1, 2)}, ValueError, r"bounds=\(0, 1, 2\)"),
        ({"method": "dogbox"}, ValueError, "'dogbox'.*'lm'.*'trf'"),
        ({"full_output": True}, ValueError, r"full_output=True.*\.result"),
        ({"nan_policy": "propagate"}, ValueError, "nan_policy='propagate'.*'omit'"),
        ({"ydata": np.stack([Y, Y * np.nan]), "batched": True, "nan_policy": "omit"}, ValueError, "one by one"),
        ({"xdata": 2.0, "ydata": Y * np.nan, "nan_policy": "omit"}, ValueError, "last dimension"),
        ({"maxfev": 9, "max_nfev": 9}, TypeError, "one of them"),
        ({"xdata": [math.nan, *X[1:]]}, ValueError, "xdata contains NaN"),
        ({"f": X, "xdata": decay}, TypeError, r"f is a ndarray of float64.*curve_fit\(f, xdata, ydata\)"),
        ({"f": "a * x"}, TypeError, "f is 'a \\* x'"),
        ({"xdata": decay}, TypeError, "xdata is a function: the arguments are f, xdata and ydata"),
        ({"ydata": decay}, TypeError, "ydata is a function"),
        ({"ydata": None}, TypeError, "ydata is None"),
        ({"ydata": Y[:, None]}, ValueError, r"\(40, 1\).*ydata.reshape\(-1\)"),
        ({"ydata": Y[None]}, ValueError, r"\(1, 40\).*ydata.reshape\(-1\)"),
        ({"xdata": X[:, None]}, ValueError, r"xdata of shape \(40, 1\).*xdata.reshape\(-1\)"),
        ({"f": lambda x, a, b: a * x[0] + b * x[1], "xdata": np.stack([X, X], 1)}, ValueError, r"\(40, 2\).*xdata.T"),
        ({"xdata": X[:39]}, ValueError, r"\(39,\) for ydata of shape \(40,\).*as many points in both"),
        ({"f": lambda x, a, b, c: decay(x, a, b, c)[:, None]}, ValueError, r"\(40, 1\).*a value for each point"),
        ({"f": lambda x, a: (a * x, a)}, ValueError, r"tuple of shapes \[\(\), \(40,\)\]"),
        ({"f": lambda x, a: "a curve"}, TypeError, "the curve that f returns must hold real numbers, not 'a curve'"),
        ({"f": lambda x, p: x * p[0], "p0": [1.0, 1.0]}, ValueError, r"lambda x, \*p: f\(x, p\)"),
        ({"f": lambda p, x: x * p[0], "p0": [1.0, 1.0]}, ValueError, r"lambda x, \*p: f\(x, p\)"),
        ({"ydata": ["1.5"] * 40}, TypeError, "ydata must hold real numbers, not a list with '1.5'"),
        ({"ydata": np.array(["1.5"] * 40)}, TypeError, "ydata must hold real numbers, not a ndarray of <U3"),
        ({"ydata": [None, *Y[1:]]}, TypeError, "ydata must hold real numbers, not a list with None"),
        ({"ydata": [[1.0, 2.0], [3.0]]}, TypeError, "rows of different length"),
        ({"xdata": ["1.5"] * 40}, TypeError, "xdata must hold real numbers"),
        ({"xdata": np.arange("2020-01-01", 40, dtype="datetime64[D]")}, TypeError, "datetime64.*time since the first"),
        ({"sigma": "small"}, TypeError, "sigma must hold real numbers, not 'small'"),
        ({"sigma": np.full(40, np.inf)}, ValueError, "not all of them"),
        ({"sigma": np.where(X > 3, np.nan, SIGMA)}, ValueError, "positive"),
        ({"p0": "abc"}, TypeError, "p0 must hold real numbers, not 'abc'"),
        ({"p0": {"a": 1.0}}, TypeError, "p0 must hold real numbers, not a dict"),
        ({"p0": [[1.0, 1.0, 1.0]]}, ValueError, r"p0 has shape \(1, 3\)"),
        ({"p0": [1.0, math.nan, 1.0]}, ValueError, "p0 is not finite"),
        ({"args": (2.0,)}, TypeError, "curve_fit takes no args"),
        ({"weights": "many"}, TypeError, "weights must hold real numbers"),
        ({"bounds": ("low", 9)}, TypeError, "the lower bound must hold real numbers"),
    ],
)
def test_bad_input_is_refused(change: dict[str, Any], error: type[Exception], words: str):
    with pytest.raises(error, match=words):
        curve_fit(**{"f": decay, "xdata": X, "ydata": Y, **change})


def test_an_error_of_f_says_how_f_was_called():
    """It stays what it is, with a note where Python has them."""
    with pytest.raises(TypeError) as caught:
        curve_fit(lambda x, a, b: a * math.exp(-b * x), X, Y)
    if hasattr(caught.value, "add_note"):
        assert any("f(x, a, b)" in note and "(40,)" in note for note in caught.value.__notes__)


def test_columns_of_tables_are_arrays():
    pandas = pytest.importorskip("pandas")
    known = curve_fit(decay, X, Y).popt
    table = pandas.DataFrame({"x": X, "y": Y})
    assert curve_fit(decay, table["x"], table["y"]).popt == pytest.approx(known, rel=1e-12)
    turned = table[::-1]
    assert curve_fit(decay, turned["x"], turned["y"], sigma=pandas.Series(np.ones(40))).popt == pytest.approx(known)
    objects = table.astype(object)
    assert curve_fit(decay, objects["x"], objects["y"]).popt == pytest.approx(known, rel=1e-12)
    nullable = table.astype("Float64")
    assert curve_fit(decay, nullable["x"], nullable["y"]).popt == pytest.approx(known, rel=1e-12)
    nullable.loc[3, "y"] = pandas.NA
    with pytest.raises(ValueError, match="ydata contains NaN"):
        curve_fit(decay, nullable["x"], nullable["y"])
    with pytest.raises(ValueError, match=r"ydata has shape \(40, 1\)"):
        curve_fit(decay, table["x"], table[["y"]])
