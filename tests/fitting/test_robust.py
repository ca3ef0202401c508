"""Losses: their derivatives, and those of one's own."""

import numpy as np
import pytest
import scipy.optimize
import torch

from marquardt import least_squares
from marquardt.fitting.robust import LOSSES
from support.decay.residuals import decay


def test_a_loss_of_ones_own_is_that_of_the_name():
    named = least_squares(decay, [1.0, 1.0, 1.0], loss="cauchy", f_scale=0.1)
    own = least_squares(decay, [1.0, 1.0, 1.0], loss=lambda z: (z.log1p(), 1 / (1 + z), -1 / (1 + z) ** 2), f_scale=0.1)
    assert own.x == pytest.approx(named.x, rel=1e-9)


@pytest.mark.parametrize("name", list(LOSSES))
def test_the_derivatives_of_losses(name: str):
    z = torch.tensor([1e-3, 0.3, 0.9, 1.1, 4.0, 50.0], dtype=torch.float64)
    first = torch.func.vmap(torch.func.grad(lambda t: LOSSES[name](t)[0]))
    _, d1, d2 = LOSSES[name](z)
    assert torch.allclose(first(z), d1)
    assert torch.allclose(torch.func.vmap(torch.func.grad(lambda t: LOSSES[name](t)[1]))(z), d2)


def test_a_loss_written_for_scipy():
    """One array of three rows, filled in."""

    def soft_l1(z):
        rows = np.empty((3, z.size))
        t = 1 + z
        rows[0], rows[1], rows[2] = 2 * (t**0.5 - 1), t**-0.5, -0.5 * t**-1.5
        return rows

    x = np.linspace(0, 4, 30)
    y = 2.5 * np.exp(-1.3 * x) + 0.5
    y[::7] += 2.0

    def residuals(p):
        return p[0] * np.exp(-p[1] * x) + p[2] - y

    options = {"loss": soft_l1, "f_scale": 0.1}
    ours = least_squares(residuals, np.ones(3), **options)
    theirs = scipy.optimize.least_squares(residuals, np.ones(3), xtol=1e-12, ftol=1e-12, gtol=1e-12, **options)
    np.testing.assert_allclose(ours.x, theirs.x, rtol=1e-5)
    assert ours.cost == pytest.approx(theirs.cost, rel=1e-8)


def test_a_loss_may_reuse_its_tensors():
    out = torch.empty(3, 5, dtype=torch.float64)

    def cauchy(z: torch.Tensor) -> torch.Tensor:
        out[0], out[1], out[2] = torch.log1p(z), 1 / (1 + z), -1 / (1 + z) ** 2
        return out

    y = torch.tensor([1.0, 1.1, 0.9, 1.0, 30.0], dtype=torch.float64)
    own, named = (least_squares(lambda x: x[0] - y, [3.0], loss=loss) for loss in (cauchy, "cauchy"))
    assert own.x == pytest.approx(named.x, rel=1e-9)
