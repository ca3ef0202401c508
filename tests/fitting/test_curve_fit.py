"""curve_fit beside SciPy's: its names, its data, bad input; standard errors, bands, and how each fit has ended."""

import math
from typing import Any

import numpy as np
import pytest
import torch
from scipy import optimize, stats

from marquardt import curve_fit
from marquardt.fitting.curve_fit import quantile
from support.decay.curve import COVARIANCE, NOISE, SIGMA, TIGHT, X, Y, decay, decay_numpy, slopes

KINDS = pytest.mark.parametrize("kind", [np.array, torch.tensor, np.ndarray.tolist])
FUNCTIONS = pytest.mark.parametrize("function", [decay, decay_numpy])


@FUNCTIONS
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


@KINDS
def test_the_result_is_a_pair_of_what_was_given(kind: Any):
    fit = curve_fit(decay, kind(X), kind(Y))
    popt, pcov = fit
    assert fit[0] is fit[-2] is fit.popt is popt
    assert fit[1] is fit[-1] is fit.pcov is pcov
    assert len(fit) == len(fit[:]) == 2
    with pytest.raises(IndexError):
        fit[2]
    assert type(popt) is type(pcov) is (torch.Tensor if kind is torch.tensor else np.ndarray)
    assert np.asarray(fit.perr) ** 2 == pytest.approx(np.diag(pcov))
    assert np.asarray(fit.predict(kind(X))) == pytest.approx(decay_numpy(X, *np.asarray(popt)))


@KINDS
@pytest.mark.parametrize("p0", [None, np.array([[1.0, 1.0, 0.5]] * 3)], ids=["none", "each"])
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
        ({"p0": [1.0] * 4, "ydata": np.stack([Y, Y]), "batched": True}, ValueError, "p0 has length 4, f takes 3"),
        ({"p0": np.ones((3, 3)), "ydata": np.stack([Y, Y]), "batched": True}, ValueError, r"\(3, 3\) for 2 data sets"),
        ({"sigma": SIGMA[:39]}, ValueError, r"\(39,\)"),
        ({"sigma": -SIGMA}, ValueError, "positive"),
        ({"sigma": -COVARIANCE}, ValueError, "positive definite"),
        ({"bounds": ([0, 0], 9)}, ValueError, r"lower bound has shape \(2,\)"),
        ({"full_output": True}, ValueError, r"full_output=True.*\.result"),
        ({"nan_policy": "propagate"}, ValueError, "nan_policy='propagate'.*'omit'"),
        ({"ydata": np.stack([Y, Y * np.nan]), "batched": True, "nan_policy": "omit"}, ValueError, "one by one"),
        ({"xdata": 2.0, "ydata": Y * np.nan, "nan_policy": "omit"}, ValueError, "last dimension"),
        ({"maxfev": 9, "max_nfev": 9}, TypeError, "one of them"),
        ({"f": X, "xdata": decay}, TypeError, r"f is a ndarray of float64.*curve_fit\(f, xdata, ydata\)"),
        ({"xdata": decay}, TypeError, "xdata is a function: the arguments are f, xdata and ydata"),
        ({"ydata": None}, TypeError, "ydata is None"),
        ({"ydata": Y[:, None]}, ValueError, r"\(40, 1\).*ydata.reshape\(-1\)"),
        ({"xdata": X[:, None]}, ValueError, r"xdata of shape \(40, 1\).*xdata.reshape\(-1\)"),
        ({"f": lambda x, a, b: a * x[0] + b * x[1], "xdata": np.stack([X, X], 1)}, ValueError, r"\(40, 2\).*xdata.T"),
        ({"xdata": X[:39]}, ValueError, r"\(39,\) for ydata of shape \(40,\).*as many points in both"),
        ({"f": lambda x, a, b, c: decay(x, a, b, c)[:, None]}, ValueError, r"\(40, 1\).*a value for each point"),
        ({"f": lambda x, a: (a * x, a)}, ValueError, r"tuple of shapes \[\(\), \(40,\)\]"),
        ({"f": lambda x, a: "a curve"}, TypeError, "what f returns must hold real numbers, not 'a curve'"),
        ({"f": lambda x, p: x * p[0], "p0": [1.0, 1.0]}, ValueError, r"lambda x, \*p: f\(x, p\)"),
        ({"ydata": ["1.5"] * 40}, TypeError, "ydata must hold real numbers, not a list with '1.5'"),
        ({"ydata": [None, *Y[1:]]}, TypeError, "ydata must hold real numbers, not a list with None"),
        ({"ydata": [[1.0, 2.0], [3.0]]}, TypeError, "rows of different length"),
        ({"xdata": np.arange("2020-01-01", 40, dtype="datetime64[D]")}, TypeError, "datetime64.*time since the first"),
        ({"sigma": "small"}, TypeError, "sigma must hold real numbers, not 'small'"),
        ({"sigma": np.full(40, np.inf)}, ValueError, "not all of them"),
        ({"sigma": np.where(X > 3, np.nan, SIGMA)}, ValueError, "positive"),
        ({"p0": "abc"}, TypeError, "p0 must hold real numbers, not 'abc'"),
        ({"p0": [[1.0, 1.0, 1.0]]}, ValueError, r"p0 has shape \(1, 3\)"),
        ({"p0": [1.0, math.nan, 1.0]}, ValueError, "p0 is not finite"),
        ({"args": (2.0,)}, TypeError, "curve_fit takes no args"),
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
    known = pytest.approx(curve_fit(decay, X, Y).popt, rel=1e-12)
    table = pandas.DataFrame({"x": X, "y": Y})
    turned, nullable = table[::-1], table.astype("Float64")
    assert curve_fit(decay, turned["x"], turned["y"], sigma=pandas.Series(np.ones(40))).popt == pytest.approx(
        known.expected
    )
    for columns in (table, table.astype(object), nullable):
        assert curve_fit(decay, columns["x"], columns["y"]).popt == known
    nullable.loc[3, "y"] = pandas.NA
    with pytest.raises(ValueError, match="ydata contains NaN"):
        curve_fit(decay, nullable["x"], nullable["y"])


def test_parameters_of_f_are_positional_and_those_with_defaults_may_be_left_out():
    def scaled(x: Any, a: Any, b: Any, *, k: float = 2.0) -> Any:
        return k * a * np.exp(-b * x)

    def more(x: Any, a: Any, b: Any, *rest: Any, **options: Any) -> Any:
        return a * np.exp(-b * x)

    for function in (scaled, more):
        assert curve_fit(function, X, Y).popt == pytest.approx(optimize.curve_fit(function, X, Y, **TIGHT)[0], rel=1e-6)
    offset = lambda x, a, b, c=0.5: decay(x, a, b, c)  # noqa: E731
    assert [len(curve_fit(offset, X, Y, [1.0] * n).popt) for n in (2, 3)] == [2, 3]


@pytest.mark.parametrize(
    "listed",
    [lambda x, a, b: [a * v + b for v in x], lambda x, a, b: tuple(float(a) * float(v) + float(b) for v in x)],
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
@pytest.mark.parametrize("kind", [np.array, torch.tensor])
@FUNCTIONS
def test_a_jacobian_of_arrays_gets_arrays(function: Any, kind: Any, sigma: Any):
    fit = curve_fit(function, kind(X), kind(Y), jac=slopes, sigma=sigma)
    many = curve_fit(function, kind(np.stack([X, 1.1 * X])), kind(np.stack([Y, Y])), jac=slopes, batched=True)
    assert "differences" not in fit.result.message + many.result.message
    for popt, x, s in ((fit.popt, X, sigma), (many.popt[0], X, None), (many.popt[1], 1.1 * X, None)):
        known = optimize.curve_fit(decay_numpy, x, Y, jac=slopes, sigma=s, **TIGHT)[0]
        assert np.asarray(popt) == pytest.approx(known, rel=1e-6)


@pytest.mark.parametrize("kind", [list, np.array, torch.tensor])
def test_integers_are_taken_as_scipy_does(kind: Any):
    x, y, p0 = [1, 2, 3, 5], [2, 3, 5, 9], [1, 1]
    fit = curve_fit(lambda x, a, b: a / x + b * x, kind(x), kind(y), kind(p0), sigma=kind([1, 1, 2, 2]))
    known, known_cov = optimize.curve_fit(lambda x, a, b: a / x + b * x, x, y, p0, sigma=[1, 1, 2, 2])
    assert np.asarray(fit.popt) == pytest.approx(known, rel=1e-6)
    assert np.asarray(fit.pcov) == pytest.approx(known_cov, rel=1e-5)
    assert curve_fit(lambda x, a, b: a * x + b, kind(x), 3).popt.tolist() == pytest.approx([0, 3])  # of all points


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
    for given in (x, (X, np.sin(3 * X))):
        fit = curve_fit(lambda x, a, b: a * x[0] + b * torch.exp(x[1]), given, y)
        assert fit.popt.tolist() == pytest.approx([2, 3])
        assert fit.predict([1.0, 0.0]).tolist() == pytest.approx([5])  # a single point


@FUNCTIONS
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


# Bands


def test_bands_of_a_line_are_the_textbooks():
    """y = a + bx: s²(1/m + (x − x̄)²/Sxx), and s² more for an observation."""
    fit = curve_fit(lambda x, a, b: a + b * x, X, 1 + 2 * X + NOISE[1])
    x = np.array([-1.0, 0.3, 9.0])
    s2 = 2 * fit.result.cost / 38
    spread = s2 * (1 / 40 + (x - X.mean()) ** 2 / ((X - X.mean()) ** 2).sum())
    t = stats.t.ppf(0.95, 38)
    for (low, high), variance in ((fit.confidence_band(x, 0.9), spread), (fit.prediction_band(x, 0.9), spread + s2)):
        assert high - low == pytest.approx(2 * t * np.sqrt(variance), rel=1e-9)
        assert (high + low) / 2 == pytest.approx(fit.predict(x), rel=1e-12)


def test_bands_hold_what_they_promise():
    """Over 1000 data sets the curve at x = 1 lies in its 90 % band, and a new point in its own, that often."""
    clean = decay_numpy(X, 2.5, 1.3, 0.5)
    fit = curve_fit(decay, X, clean + 0.05 * NOISE, batched=True)
    assert fit.result.success.all()
    fresh = decay_numpy(1.0, 2.5, 1.3, 0.5) + 0.05 * np.random.default_rng(1).standard_normal(1000)
    low, high = fit.confidence_band([1.0], 0.9)
    hits = (low[:, 0] < decay_numpy(1.0, 2.5, 1.3, 0.5)) & (decay_numpy(1.0, 2.5, 1.3, 0.5) < high[:, 0])
    assert hits.mean() == pytest.approx(0.9, abs=0.03)  # three standard deviations
    low, high = fit.prediction_band([1.0], 0.9)
    assert ((low[:, 0] < fresh) & (fresh < high[:, 0])).mean() == pytest.approx(0.9, abs=0.03)


def test_a_band_beside_known_sigma():
    known = curve_fit(decay, X, Y, sigma=SIGMA, absolute_sigma=True)
    low, high = known.confidence_band([1.0])
    J = slopes(np.array([1.0]), *known.popt)
    assert (high - low)[0] == pytest.approx(
        2 * stats.norm.ppf(0.975) * math.sqrt((J @ known.pcov @ J.T)[0, 0]), rel=1e-6
    )
    with pytest.raises(ValueError, match="sigma="):
        known.prediction_band([1.0])
    with pytest.raises(ValueError, match="level=95"):
        known.confidence_band(X, level=95)
    with pytest.warns(UserWarning, match="could not be estimated"):
        short = curve_fit(decay, X[:3], Y[:3])
    with pytest.raises(ValueError, match="as many parameters as points"):
        short.confidence_band(X)
    wide = known.prediction_band([1.0], sigma=0.3)
    assert (wide[1] - wide[0])[0] > (high - low)[0]


@pytest.mark.parametrize("nu", [1, 2, 3, 7, 30, 1000, 1e5])
def test_quantiles_of_students_t(nu: float):
    for p in (0.5001, 0.6, 0.9, 0.975, 0.9995, 1 - 1e-6):
        assert quantile(p, torch.tensor([nu])).item() == pytest.approx(stats.t.ppf(p, nu), rel=1e-10)


# How fits have ended


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("kind", [np.array, torch.tensor])
@pytest.mark.parametrize("known", [False, True])
def test_fits_of_a_batch_that_fail_say_so(kind: Any, known: bool):
    """The second has too many steps to go, the third no start; the others are as if alone."""
    y = np.stack([Y, Y + 1e3 * np.cos(9 * X), Y, Y])
    y[2, 4] = np.nan
    p0 = np.array([[2.5, 1.3, 0.5], [1e3, 40.0, 1e3], [2.5, 1.3, 0.5], [2.4, 1.2, 0.6]])
    options = {"sigma": SIGMA, "absolute_sigma": True} if known else {}
    fit = curve_fit(decay, kind(X), kind(y), p0, check_finite=False, max_nfev=9, batched=True, **options)
    assert type(fit.success) is type(fit.status) is type(fit.popt)
    assert fit.success.tolist() == [True, False, False, True]
    assert fit.status.tolist()[1:3] == [0, -1]
    assert min(fit.status.tolist()[::3]) > 0
    assert [len(fit.message), fit.message[1]] == [4, "The maximum number of function evaluations is reached."]
    assert fit.message[2] == "The residuals or their Jacobian are not finite at the start."
    assert np.isposinf(np.asarray(fit.pcov[2])).all()
    for i in (0, 3):
        alone = curve_fit(decay, X, Y, p0[i], max_nfev=9, **options)
        assert alone.success is True
        assert (alone.status, alone.message) == (int(fit.status[i]), fit.message[i])
        assert alone.pcov == pytest.approx(np.asarray(fit.pcov[i]), rel=1e-6)


# Points that do not count

USED = 25  # the points after it are there to fill up the array


def padded(a: np.ndarray, value: float) -> np.ndarray:
    return np.where(np.arange(40) < USED, a, value)


FILLED = np.where(np.outer(padded(np.ones(40), 0), padded(np.ones(40), 0)) > 0, COVARIANCE, 1e40 * np.eye(40))
WITHOUT: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {  # options, and those of the points that count
    **{f"sigma {s}": ({"sigma": padded(SIGMA, s)}, {"sigma": SIGMA[:USED]}) for s in (1e7, 1e15, 1e150, np.inf)},
    "absolute": ({"sigma": padded(SIGMA, 1e30), "absolute_sigma": True},
                 {"sigma": SIGMA[:USED], "absolute_sigma": True}),
    "covariance": ({"sigma": FILLED}, {"sigma": COVARIANCE[:USED, :USED]}),
    **{f"weights, {loss}": ({"weights": padded(SIGMA**-2, 0.0), "loss": loss}, {"sigma": SIGMA[:USED], "loss": loss})
       for loss in ("linear", "huber", "cauchy")},
    "both": ({"sigma": padded(SIGMA, 1.0), "weights": padded(np.ones(40), 0.0)}, {"sigma": SIGMA[:USED]}),
}  # fmt: skip


@FUNCTIONS
@pytest.mark.parametrize("without", WITHOUT)
def test_points_without_weight_do_not_count(without: str, function: Any):
    options, own = WITHOUT[without]
    fit, short = curve_fit(function, X, padded(Y, 0.0), **options), curve_fit(function, X[:USED], Y[:USED], **own)
    assert fit.popt == pytest.approx(short.popt, rel=1e-6)
    assert fit.pcov == pytest.approx(short.pcov, rel=1e-4)
    assert fit.dof == short.dof == USED - 3
    low, high = fit.confidence_band([1.0])
    assert high - low == pytest.approx(np.subtract(*short.confidence_band([1.0])[::-1]), rel=1e-4)
    with pytest.raises(ValueError, match="sigma="):
        fit.prediction_band(X)


def test_points_of_little_weight_count_where_they_matter():
    """One point nearly exact, as if the curve had to meet it; data over twelve decades; tails where nothing happens."""
    pinned = np.ones(40)
    pinned[0] = 1e-6
    fit, known = curve_fit(decay, X, Y, sigma=pinned), optimize.curve_fit(decay_numpy, X, Y, [2, 1, 1], sigma=pinned)
    assert fit.dof == 37
    assert fit.perr[1:] == pytest.approx(np.sqrt(np.diag(known[1]))[1:], rel=0.01)
    x = np.logspace(0, 9, 20)
    y = 3 * x**-1.5 * (1 + 0.05 * np.sin(np.arange(20) ** 2))
    fit = curve_fit(lambda x, a, b: a * x**-b, x, y, [3, 1.5], sigma=0.05 * y)
    known = optimize.curve_fit(lambda x, a, b: a * x**-b, x, y, [3, 1.5], sigma=0.05 * y, **TIGHT)
    assert fit.dof == 18
    assert fit.pcov == pytest.approx(known[1], rel=1e-4)
    x = np.linspace(-50, 50, 101)
    y = np.round(100 * np.exp(-(x**2) / 2), 1)  # zeros but for a few
    assert curve_fit(lambda x, a, s: a * torch.exp(-((x / s) ** 2)), x, y).dof == 99


@FUNCTIONS
@pytest.mark.parametrize("sigma", [None, SIGMA])
@pytest.mark.parametrize("known", [False, True])
def test_a_fixed_parameter_has_no_error(known: bool, sigma: Any, function: Any):
    fit = curve_fit(function, X, Y, [1, 1, 0.5], sigma, known, bounds=([0, 0, 0.5], [9, 9, 0.5]))
    popt, pcov = optimize.curve_fit(
        lambda x, a, b: decay_numpy(x, a, b, 0.5), X, Y, sigma=sigma, absolute_sigma=known, **TIGHT
    )
    assert fit.popt[:2] == pytest.approx(popt, rel=1e-6)
    assert fit.pcov[:2, :2] == pytest.approx(pcov, rel=1e-4)
    assert not fit.pcov[2].any()
    assert not fit.pcov[:, 2].any()
    assert (fit.perr[2], fit.dof) == (0, 38)
    free = curve_fit(lambda x, a, b: function(x, a, b, 0.5), X, Y, [1, 1], sigma, known)
    for mine, theirs in zip(fit.confidence_band(X), free.confidence_band(X), strict=True):
        assert mine == pytest.approx(theirs, rel=1e-6)


@pytest.mark.filterwarnings("error")
def test_what_is_fixed_may_be_undetermined():
    line = lambda x, a, b, c: (a + b) * x + c + 0 * a  # noqa: E731
    fit = curve_fit(line, X, Y, [0.0, 0.3, 1.0], bounds=([-9, 0.3, -9], [9, 0.3, 9]))
    assert np.isfinite(fit.pcov).all()
    few = curve_fit(decay, X[:4], Y[:4], [1, 1, 0.5], bounds=([0, 0, 0.5], [9, 9, 0.5]))
    assert few.dof == 2
    all_fixed = curve_fit(decay, X, Y, [1, 1, 0.5], bounds=([1, 1, 0.5], [1, 1, 0.5]))
    assert not all_fixed.pcov.any()


def test_a_parameter_that_ends_at_a_bound_counts_as_scipys_does():
    bounds = (0, [2.2, 9, 9])
    fit, known = curve_fit(decay, X, Y, bounds=bounds), optimize.curve_fit(decay_numpy, X, Y, bounds=bounds, **TIGHT)
    assert fit.popt[0] == 2.2
    assert fit.pcov == pytest.approx(known[1], rel=1e-3)


def quartic(x: Any, a: Any, b: Any, c: Any, d: Any, e: Any) -> Any:
    return a + b * x + c * x**2 + d * x**3 + e * x**4


@pytest.mark.parametrize(
    ("f", "points", "options", "words"),
    [
        (quartic, 4, {}, "4 points do not determine 5 parameters"),
        (quartic, 4, {"absolute_sigma": True, "sigma": np.ones(4)}, "4 points do not determine 5 parameters"),
        (quartic, 5, {}, "as many points as parameters, 5, .*absolute_sigma=True"),
        (quartic, 8, {"sigma": [1] * 4 + [np.inf] * 4}, "4 points do not determine 5 parameters"),
        (lambda x, a, b, c: a * x + c + 0 * b, 40, {}, "does not depend on b there.*p0"),
        (lambda x, a, b, c: (a + b) * x + c, 40, {}, "do not tell a and b apart"),
        (lambda x, *p: p[0] * torch.exp(p[2] - p[1] * x), 40, {"p0": [1, 1, 0.1]}, "parameter 0 and parameter 2 apart"),
        (lambda a, b, x: a * torch.exp(-b * 0 + x), 40, {}, r"f is called with xdata first.*f\(xdata, b, x\)"),
    ],
)  # fmt: skip
def test_why_there_is_no_covariance(f: Any, points: int, options: dict[str, Any], words: str):
    with pytest.warns(UserWarning, match=rf"could not be estimated; infinite: .*{words}"):
        fit = curve_fit(f, X[:points], Y[:points], **options)
    assert np.isinf(fit.perr).all()


@pytest.mark.parametrize("kind", [np.array, torch.tensor])
def test_why_one_of_many_has_no_covariance(kind: Any):
    """It has ended in a minimum, so that `success` does not show it."""
    y = np.stack([Y, np.zeros(40), Y])
    with pytest.warns(UserWarning, match=r"of 1 of 3 data sets .*: in data set 1 the curve does not depend on b"):
        fit = curve_fit(decay, kind(X), kind(y), [0.0, 1.0, 0.0], batched=True)
    assert fit.success.all()
    assert np.isinf(np.asarray(fit.pcov)).all((1, 2)).tolist() == [False, True, False]
    assert np.isinf(np.asarray(fit.confidence_band(X)[1])).all(-1).tolist() == [False, True, False]
