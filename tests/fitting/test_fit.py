"""What curve_fit returns: a pair, standard errors, bands, and how each fit has ended."""

import math
from typing import Any

import numpy as np
import pytest
import torch
from scipy import optimize, stats

from marquardt import curve_fit
from marquardt.fitting.curve_fit import quantile
from support.decay.curve import COVARIANCE, NOISE, SIGMA, TIGHT, X, Y, decay, decay_numpy, slopes


def test_a_fit_is_scipys_pair():
    fit = curve_fit(decay, X, Y)
    assert fit[0] is fit[-2] is fit.popt
    assert fit[1] is fit[-1] is fit.pcov
    assert len(fit) == len(fit[:]) == 2
    with pytest.raises(IndexError):
        fit[2]


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


USED = 25  # the points after it are there to fill up the array
WITHOUT = [1e7, 1e10, 1e15, 1e30, 1e150, np.inf]


def padded(a: np.ndarray, value: float) -> np.ndarray:
    return np.where(np.arange(40) < USED, a, value)


@pytest.mark.parametrize("function", [decay, decay_numpy])
@pytest.mark.parametrize("known", [False, True])
@pytest.mark.parametrize("sigma", WITHOUT)
def test_points_without_weight_do_not_count(sigma: float, known: bool, function: Any):
    fit = curve_fit(function, X, padded(Y, 0.0), sigma=padded(SIGMA, sigma), absolute_sigma=known)
    popt, pcov = optimize.curve_fit(decay_numpy, X[:USED], Y[:USED], sigma=SIGMA[:USED], absolute_sigma=known, **TIGHT)
    assert fit.popt == pytest.approx(popt, rel=1e-6)
    assert fit.pcov == pytest.approx(pcov, rel=1e-4)
    assert fit.dof == USED - 3
    low, high = fit.confidence_band([1.0])
    short = curve_fit(function, X[:USED], Y[:USED], sigma=SIGMA[:USED], absolute_sigma=known)
    assert high - low == pytest.approx(np.subtract(*short.confidence_band([1.0])[::-1]), rel=1e-4)


@pytest.mark.parametrize("loss", ["linear", "huber", "cauchy"])
def test_weights_of_zero_do_not_count(loss: str):
    fit = curve_fit(decay, X, Y, weights=padded(SIGMA**-2, 0.0), loss=loss)
    short = curve_fit(decay, X[:USED], Y[:USED], sigma=SIGMA[:USED], loss=loss)
    assert fit.pcov == pytest.approx(short.pcov, rel=1e-6)
    assert fit.dof == short.dof == USED - 3
    with pytest.raises(ValueError, match="weights"):
        fit.prediction_band(X)
    both = curve_fit(decay, X, Y, sigma=padded(SIGMA, 1.0), weights=padded(np.ones(40), 0.0), loss=loss)
    assert both.pcov == pytest.approx(short.pcov, rel=1e-6)


def test_points_without_weight_in_a_covariance():
    sigma = COVARIANCE.copy()
    sigma[USED:], sigma[:, USED:] = 0, 0
    sigma[range(USED, 40), range(USED, 40)] = 1e40
    fit = curve_fit(decay, X, Y, sigma=sigma)
    short = curve_fit(decay, X[:USED], Y[:USED], sigma=COVARIANCE[:USED, :USED])
    assert fit.pcov == pytest.approx(short.pcov, rel=1e-6)


@pytest.mark.parametrize("kind", [np.array, torch.tensor])
def test_points_without_weight_in_one_of_many_data_sets(kind: Any):
    sigma = np.stack([SIGMA, padded(SIGMA, np.inf)])
    many = curve_fit(decay, kind(X), kind(np.stack([Y, Y])), sigma=kind(sigma), batched=True)
    alone = [curve_fit(decay, X, Y, sigma=SIGMA), curve_fit(decay, X[:USED], Y[:USED], sigma=SIGMA[:USED])]
    assert many.dof.tolist() == [37, USED - 3]
    for i, one in enumerate(alone):
        assert np.asarray(many.perr[i]) == pytest.approx(one.perr, rel=1e-6)
        for band in ("confidence_band", "prediction_band"):
            more = {"sigma": 0.1} if band == "prediction_band" else {}
            for mine, theirs in zip(getattr(many, band)(X, **more), getattr(one, band)(X, **more), strict=True):
                assert np.asarray(mine[i]) == pytest.approx(theirs, rel=1e-6)


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


@pytest.mark.parametrize("function", [decay, decay_numpy])
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


def test_parameters_fixed_in_some_of_many_data_sets():
    low, high = np.array([[0, 0, 0], [0, 0, 0.5]]), np.array([[9, 9, 9], [9, 9, 0.5]])
    many = curve_fit(decay, X, np.stack([Y, Y]), [1, 1, 0.5], bounds=(low, high), batched=True)
    for i in range(2):
        one = curve_fit(decay, X, Y, [1, 1, 0.5], bounds=(low[i], high[i]))
        assert many.pcov[i] == pytest.approx(one.pcov, rel=1e-6)
    assert many.dof.tolist() == [37, 38]


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


def test_bands_have_the_t_of_the_points_that_count():
    fit = curve_fit(lambda x, a: a + 0 * x, X, Y, sigma=padded(np.ones(40), np.inf))
    low, high = fit.confidence_band([1.0])
    half = stats.t.ppf(0.975, USED - 1) * Y[:USED].std(ddof=1) / np.sqrt(USED)
    assert (high - low) / 2 == pytest.approx([half])


@pytest.mark.parametrize("nu", [1, 2, 3, 7, 30, 1000, 1e5])
def test_quantiles_of_students_t(nu: float):
    for p in (0.5001, 0.6, 0.9, 0.975, 0.9995, 1 - 1e-6):
        assert quantile(p, torch.tensor([nu])).item() == pytest.approx(stats.t.ppf(p, nu), rel=1e-10)
