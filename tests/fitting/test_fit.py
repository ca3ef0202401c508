"""What curve_fit returns: a pair, bands, and how each fit has ended."""

import math
from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats

from marquardt import curve_fit
from support.decay.curve import NOISE, SIGMA, X, Y, decay, decay_numpy, slopes


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
    wide = known.prediction_band([1.0], sigma=0.3)
    assert (wide[1] - wide[0])[0] > (high - low)[0]


def test_a_covariance_that_does_not_exist():
    with pytest.warns(UserWarning, match="could not be estimated"):
        fit = curve_fit(lambda x, a, b: (a + b) * x, X, Y)
    assert np.isinf(fit.pcov).all()
    with pytest.warns(UserWarning, match="could not be estimated"):
        short = curve_fit(decay, X[:3], Y[:3])
    with pytest.raises(ValueError, match="as many parameters as points"):
        short.confidence_band(X)


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


def test_a_covariance_that_one_fit_of_many_has_not_is_no_secret():
    """It has ended in a minimum, so that `success` says nothing of it."""
    x = torch.tensor(X)
    with pytest.warns(UserWarning, match="could not be estimated"):
        fit = curve_fit(decay, x, torch.stack([torch.tensor(Y), torch.zeros(40)]), [0.0, 1.0, 0.0], batched=True)
    assert fit.success.all()
    assert fit.pcov.isinf().all(-1).all(-1).tolist() == [False, True]


def test_a_level_is_a_probability():
    with pytest.raises(ValueError, match="level=95"):
        curve_fit(decay, X, Y).confidence_band(X, level=95)
