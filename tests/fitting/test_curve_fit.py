"""curve_fit: beside SciPy's, its names, its data, bad input."""

import math
from typing import Any

import numpy as np
import pytest
import torch
from scipy import optimize, stats

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
        ({"f": lambda x, a: "a curve"}, TypeError, "what f returns must hold real numbers, not 'a curve'"),
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


@pytest.mark.parametrize(
    "listed",
    [
        lambda x, a, b: [a * v + b for v in x],
        lambda x, a, b: [float(a) * float(v) + float(b) for v in x],
        lambda x, a, b: tuple(a * v + b for v in x),
    ],
)
def test_a_model_may_return_a_list(listed: Any):
    known, known_cov = optimize.curve_fit(lambda x, a, b: a * x + b, X, Y)
    fit = curve_fit(listed, X, Y)
    assert fit.popt == pytest.approx(known, rel=1e-6)
    assert fit.pcov == pytest.approx(known_cov, rel=1e-5)
    assert fit.predict(X[:3]) == pytest.approx(known[0] * X[:3] + known[1], rel=1e-6)


@pytest.mark.parametrize("constant", [lambda x, a: a, lambda x, a: float(a)])
def test_a_constant_model(constant: Any):
    fit = curve_fit(constant, X, Y)
    assert fit.popt == pytest.approx([Y.mean()])
    assert fit.pcov == pytest.approx(optimize.curve_fit(constant, X, Y)[1], rel=1e-6)
    assert fit.predict(X[:7]) == pytest.approx(np.full(7, Y.mean()))
    low, high = fit.confidence_band(X[:7])
    assert high - low == pytest.approx(np.full(7, 2 * stats.t.ppf(0.975, 39) * Y.std(ddof=1) / math.sqrt(40)), rel=1e-6)
    many = curve_fit(constant, X, np.stack([Y, Y + 1]), batched=True)
    assert many.predict(X[:7]) == pytest.approx(np.array([[Y.mean()] * 7, [Y.mean() + 1] * 7]))


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("sigma", [None, SIGMA, COVARIANCE], ids=["none", "1-D", "2-D"])
@pytest.mark.parametrize("as_tensor", [False, True])
@pytest.mark.parametrize("function", [decay, decay_numpy])
def test_a_jacobian_of_arrays_gets_arrays(function: Any, as_tensor: bool, sigma: Any):
    known = optimize.curve_fit(decay_numpy, X, Y, jac=slopes, sigma=sigma, **TIGHT)[0]
    x, y = (torch.tensor(X), torch.tensor(Y)) if as_tensor else (X, Y)
    fit = curve_fit(function, x, y, jac=slopes, sigma=sigma)
    assert isinstance(fit.popt, torch.Tensor) == as_tensor
    assert np.asarray(fit.popt) == pytest.approx(known, rel=1e-6)
    assert "differences" not in fit.result.message


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("as_tensor", [False, True])
def test_a_jacobian_of_arrays_of_many_data_sets(as_tensor: bool):
    kind: Any = torch.tensor if as_tensor else np.array
    x, y = np.stack([X, 1.1 * X]), np.stack([Y, Y])
    fit = curve_fit(decay_numpy, kind(x), kind(y), jac=slopes, batched=True)
    for i in range(2):
        known = optimize.curve_fit(decay_numpy, x[i], y[i], jac=slopes, **TIGHT)[0]
        assert np.asarray(fit.popt[i]) == pytest.approx(known, rel=1e-6)


@pytest.mark.parametrize("kind", [list, np.array, torch.tensor])
def test_integers_are_taken_as_scipy_does(kind: Any):
    x, y, p0 = [1, 2, 3, 5], [2, 3, 5, 9], [1, 1]
    fit = curve_fit(lambda x, a, b: a / x + b * x, kind(x), kind(y), kind(p0), sigma=kind([1, 1, 2, 2]))
    known, known_cov = optimize.curve_fit(lambda x, a, b: a / x + b * x, x, y, p0, sigma=[1, 1, 2, 2])
    assert np.asarray(fit.popt) == pytest.approx(known, rel=1e-6)
    assert np.asarray(fit.pcov) == pytest.approx(known_cov, rel=1e-5)


def test_one_number_for_all_points():
    constant = curve_fit(lambda x, a, b: a * x + b, [1, 2, 3], 3).popt
    assert constant == pytest.approx(optimize.curve_fit(lambda x, a, b: a * x + b, [1, 2, 3], 3)[0], abs=1e-7)


@pytest.mark.parametrize("sigma", [None, SIGMA, np.tile(SIGMA, (5, 1)), np.tile(COVARIANCE, (5, 1, 1))])
def test_many_data_sets(sigma: Any):
    y = decay_numpy(X, 2.5, 1.3, 0.5) + 0.05 * NOISE[:5]
    many = curve_fit(decay, X, y, p0=[1.0, 1.0, 1.0], sigma=sigma, batched=True)
    own = curve_fit(decay, np.tile(X, (5, 1)), y, p0=np.ones((5, 3)), sigma=sigma, batched=True)
    assert own.popt == pytest.approx(many.popt)
    for i in range(5):
        one = curve_fit(decay, X, y[i], sigma=sigma if sigma is None or sigma.ndim == 1 else sigma[i])
        assert many.popt[i] == pytest.approx(one.popt, rel=1e-8)
        assert many.pcov[i] == pytest.approx(one.pcov, rel=1e-6)
        assert many.confidence_band(X)[0][i] == pytest.approx(one.confidence_band(X)[0], rel=1e-6)


def test_two_independent_variables():
    x = torch.tensor(np.stack([X, np.sin(3 * X)]))
    y = 2 * x[0] + 3 * torch.exp(x[1])
    fit = curve_fit(lambda x, a, b: a * x[0] + b * torch.exp(x[1]), x, y)
    assert fit.popt.tolist() == pytest.approx([2, 3])
    assert fit.predict([1.0, 0.0]).tolist() == pytest.approx([5])  # a single point


@pytest.mark.parametrize("function", [decay, decay_numpy])
def test_x_of_each_data_set(function: Any):
    x = np.stack([X, 1.1 * X, 0.9 * X])
    y = decay_numpy(x, 2.5, 1.3, 0.5) + 0.05 * NOISE[:3]
    own, shared = curve_fit(function, x, y, batched=True), curve_fit(function, X, y, batched=True)
    each = [curve_fit(function, x[i], y[i]) for i in range(3)]
    assert own.popt == pytest.approx(np.stack([one.popt for one in each]), rel=1e-6)
    for many in (own, shared):
        for at in (x[:, :7], X[:7]):  # one for each, one for all
            p = many.popt[:, :, None]
            assert many.predict(at) == pytest.approx(decay_numpy(at, p[:, 0], p[:, 1], p[:, 2]))
            assert many.predict(at).shape == (3, 7)
    for band in ("confidence_band", "prediction_band"):
        low, high = getattr(own, band)(x[:, :7])
        for i, one in enumerate(each):
            assert low[i] == pytest.approx(getattr(one, band)(x[i, :7])[0], rel=1e-5)
            assert high[i] == pytest.approx(getattr(one, band)(x[i, :7])[1], rel=1e-5)
    for fit, at in ((own, x[:2]), (own, x[None]), (each[0], x)):
        with pytest.raises(ValueError, match="x has shape"):
            fit.predict(at)


@pytest.mark.parametrize("sets", [1, 2, 3])
@pytest.mark.parametrize("as_tensor", [False, True])
def test_two_variables_of_many_data_sets(sets: int, as_tensor: bool):
    """With two data sets the shape of xdata alone does not say whose it is."""
    x = np.stack([X, X**2])  # (2, 40)
    truth = np.array([[2.0, 1.0], [1.0, 3.0], [-1.0, 0.5]])[:sets]
    kind: Any = torch.tensor if as_tensor else np.array
    plane = lambda x, a, b: a * x[0] + b * x[1]  # noqa: E731
    for given in (x, np.tile(x, (sets, 1, 1))):  # for all, and one for each: (B, 2, 40)
        fit = curve_fit(plane, kind(given), kind(truth @ x), batched=True)
        assert np.asarray(fit.popt) == pytest.approx(truth)
        for at in (x[:, :7], np.tile(x[:, :7], (sets, 1, 1))):
            assert np.asarray(fit.predict(kind(at))) == pytest.approx(truth @ x[:, :7], abs=1e-9)


def test_an_x_that_could_be_of_all_or_of_each():
    grid = torch.tensor(X)
    with pytest.raises(ValueError, match=r"xdata of shape \(2, 40\) may be"):
        curve_fit(lambda x, a, b: a * x[0] + b * grid, np.stack([X, X]), np.stack([X, X]), batched=True)


@pytest.mark.parametrize("sigma", [None, SIGMA, COVARIANCE], ids=["none", "1-D", "2-D"])
def test_points_with_nan(sigma: Any):
    x, y = X.copy(), Y.copy()
    x[3], y[[7, 20]] = np.nan, np.nan
    for options in ({"nan_policy": "omit"}, {"nan_policy": "omit", "check_finite": False}):
        popt, pcov = curve_fit(decay, x, y, sigma=sigma, **options)
        known, known_cov = optimize.curve_fit(decay_numpy, x, y, sigma=sigma, jac=None, **options, **TIGHT)
        assert popt == pytest.approx(known, rel=1e-6)
        assert pcov == pytest.approx(known_cov, rel=1e-4)
    two = np.stack([X, X**2])
    two[1, 4] = np.nan
    fit = curve_fit(lambda x, a, b: a * x[0] + b * x[1], two, 2 * X + 3 * X**2, nan_policy="omit")
    assert fit.popt == pytest.approx([2, 3])
    assert curve_fit(decay, X, Y, nan_policy="raise").popt == pytest.approx(curve_fit(decay, X, Y).popt)
    for options in ({"nan_policy": "raise"}, {"nan_policy": "omit", "check_finite": True}, {}):
        with pytest.raises(ValueError, match="contains NaN"):
            curve_fit(decay, x, y, sigma=sigma, **options)
        with pytest.raises(ValueError):  # noqa: PT011, SciPy's words are its own
            optimize.curve_fit(decay_numpy, x, y, sigma=sigma, **options)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("layout", ["reversed", "strided", "big-endian", "read-only", "list", "float32"])
def test_arrays_of_any_layout(layout: str):
    def laid(a: np.ndarray) -> Any:
        if layout == "reversed":
            return np.flip(np.flip(a).copy())
        if layout == "strided":
            return np.repeat(a, 2, axis=-1)[..., ::2] if a.ndim == 1 else np.asfortranarray(a)
        if layout == "big-endian":
            return a.astype(">f8")
        if layout == "read-only":
            a = a.copy()
            a.flags.writeable = False
            return a
        return a.tolist() if layout == "list" else a.astype(np.float32)

    for sigma in (SIGMA, COVARIANCE):
        fit = curve_fit(decay, laid(X), laid(Y), laid(np.ones(3)), laid(sigma))
        plain = curve_fit(decay, X, Y, sigma=sigma)
        assert fit.popt == pytest.approx(plain.popt, rel=1e-5 if layout == "float32" else 1e-12)
        assert fit.predict(laid(X)) == pytest.approx(plain.predict(X), rel=1e-5)
        assert fit.prediction_band(laid(X), sigma=laid(SIGMA))[0] == pytest.approx(
            plain.prediction_band(X, sigma=SIGMA)[0], rel=1e-3
        )
    turned = lambda *args: np.flip(np.flip(slopes(*args)).copy())  # noqa: E731
    assert curve_fit(decay_numpy, laid(X), laid(Y), jac=turned).popt == pytest.approx(
        curve_fit(decay, X, Y).popt, rel=1e-5
    )
    x = (laid(X), laid(X**2))
    assert curve_fit(lambda x, a, b: a * x[0] + b * x[1], x, X + 2 * X**2).popt == pytest.approx([1, 2], rel=1e-5)
