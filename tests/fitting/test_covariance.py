"""Standard errors: what counts as a point, what as a parameter, and why there may be none."""

from typing import Any

import numpy as np
import pytest
import torch
from scipy import optimize, stats

from marquardt import curve_fit
from support.decay.curve import COVARIANCE, SIGMA, TIGHT, X, Y, decay, decay_numpy

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


def test_why_one_of_many_has_no_covariance():
    y = np.stack([Y, np.zeros(40), Y])
    with pytest.warns(UserWarning, match=r"of 1 of 3 data sets .*: in data set 1 the curve does not depend on b"):
        fit = curve_fit(decay, X, y, [0.0, 1.0, 0.0], batched=True)
    assert np.isinf(fit.confidence_band(X)[1]).all(-1).tolist() == [False, True, False]


def test_bands_have_the_t_of_the_points_that_count():
    fit = curve_fit(lambda x, a: a + 0 * x, X, Y, sigma=padded(np.ones(40), np.inf))
    low, high = fit.confidence_band([1.0])
    half = stats.t.ppf(0.975, USED - 1) * Y[:USED].std(ddof=1) / np.sqrt(USED)
    assert (high - low) / 2 == pytest.approx([half])
