"""How a fit ends: never a success far from a minimum, always one where rounding is all that is left."""

import pytest
import torch

import marquardt as mq
from marquardt.fitting.options import Options
from marquardt.fitting.robust import RobustLoss
from marquardt.fitting.solve import is_stationary, linearised

D = torch.float64


def offset(p):
    """The root is 0.92 above 1e10, a relative change of 1e-10."""
    return torch.exp(p - 1e10) - 2.5


def stiff(p):
    return torch.exp(1e9 * (p - 1)) - 2.5


def residual_of_an_offset(p):
    return torch.cat([torch.exp(p - 1e12) - 1.5, p - 1e12])


@pytest.mark.parametrize(
    ("fun", "x0"), [(offset, 1e10), (stiff, 1.0), (residual_of_an_offset, 1e12 + 1)], ids=["offset", "stiff", "mixed"]
)
def test_a_small_relative_step_is_no_minimum(fun, x0):
    result = mq.least_squares(fun, torch.tensor([x0], dtype=D))
    # what one rounding of x changes the residuals by
    wobble = torch.finfo(D).eps * result.jac.abs().amax() * result.x.abs().amax()
    assert result.success
    assert result.grad.abs().amax() <= 10 * wobble * result.jac.abs().amax()


def hump(p):
    """Two outliers draw it into a peak: the factor grows without end, and its column of J fades."""
    return p[0] * (T / 6) ** p[1] * (1 - T / 6) ** p[2] - Y


T = torch.tensor(
    [0.1148, 0.44, 0.5762, 0.7213, 0.8927, 1.0094, 1.8051, 2.3155, 2.4914, 2.6606, 2.9414, 3.151, 3.6257, 3.8999,
     3.9891, 4.2585, 4.2949, 4.4653, 4.6562, 4.9709], dtype=D)  # fmt: skip
Y = 4 * (T / 6) ** 1.2 * (1 - T / 6) ** 2
Y[6], Y[7] = Y[6] - 1.57, Y[7] + 11.67


@pytest.mark.parametrize("restarts", [False, True])
def test_a_factor_on_its_way_to_infinity_is_no_minimum(restarts):
    result = mq.least_squares(hump, torch.tensor([4.53, 1.95, 2.02], dtype=D), restarts=restarts, max_nfev=800)
    cosines = result.grad.abs() / result.jac.norm(dim=0) / result.fun.norm()
    assert not result.success or cosines.amax() < 1e-6
    assert result.cost < 48 or not restarts  # with the lengths that the columns have now it goes on


def test_a_column_that_was_longer_is_no_column_of_nothing():
    """The cosine of the only column is 0.6; that D is 1e10 times its length says nothing about the point."""
    f, J = torch.tensor([[3.0, 4.0]], dtype=D), torch.tensor([[[1.0], [0.0]]], dtype=D)
    x, options = torch.tensor([[2.0]], dtype=D), Options()
    assert not is_stationary(linearised(x, f, J, torch.full_like(x, 1e10), RobustLoss(), None, options), options)
    # One that changes nothing even if its parameter is doubled is another matter.
    assert is_stationary(linearised(x, f, 1e-10 * J, torch.ones_like(x), RobustLoss(), None, options), options)


def test_a_parameter_at_its_bound_is_not_measured_by_another_ones_column():
    """Columns 1e8 and 1e-8 long: their products with parameters of 1e-8 and 1e8 are those of an ordinary problem."""

    def residuals(p):
        return torch.stack([1e8 * p[0] + 1e-8 * p[1] - 3, 1e8 * p[0] - 1e-8 * p[1] - 1])

    result = mq.least_squares(residuals, torch.tensor([1e-9, 5e7], dtype=D), bounds=(0, torch.tensor([1.0, 5e7])))
    assert result.success
    torch.testing.assert_close(result.x, torch.tensor([2e-8, 5e7], dtype=D), rtol=1e-9, atol=0)


def test_a_step_held_short_does_not_end_the_search():
    result = mq.least_squares(lambda p: p - 1, torch.tensor([1e-14], dtype=D), ftol=1e-8)
    assert result.success
    assert result.x.item() == pytest.approx(1.0, rel=1e-12)


@pytest.mark.parametrize("loss", ["linear", "huber"])
def test_residuals_of_pure_rounding_are_a_success(loss):
    for seed in range(40):
        generator = torch.Generator().manual_seed(seed)
        n = 1 + seed % 5
        A = torch.randn(n, n, generator=generator, dtype=D)
        b = torch.randn(n, generator=generator, dtype=D)
        result = mq.least_squares(lambda q, A=A, b=b: A @ q - b, torch.zeros(n, dtype=D), loss=loss)
        assert result.success, (seed, result.message)
        assert result.fun.norm() <= 1e-13 * (A.norm() * result.x.norm() + b.norm())


def test_data_without_noise_are_fitted():
    x = torch.linspace(-2, 3, 30, dtype=D)
    for seed in range(20):
        c = torch.randn(4, generator=torch.Generator().manual_seed(seed), dtype=D)
        y = c[0] + c[1] * x + c[2] * x**2 + c[3] * x**3
        popt, _ = mq.curve_fit(lambda x, a, b, c, d: a + b * x + c * x**2 + d * x**3, x, y)
        torch.testing.assert_close(popt, c, rtol=1e-11, atol=1e-12)


def test_float32_reaches_its_minimum():
    x = torch.linspace(0, 4, 40)
    for seed in range(20):
        y = 2.5 * torch.exp(-1.3 * x) + 0.5 + 0.05 * torch.randn(40, generator=torch.Generator().manual_seed(seed))

        def residuals(p, y=y):
            return p[0] * torch.exp(-p[1] * x.to(p)) + p[2] - y.to(p)

        result = mq.least_squares(residuals, torch.ones(3), dtype=torch.float32)
        assert result.success, (seed, result.message)
        torch.testing.assert_close(
            result.x.double(), mq.least_squares(residuals, torch.ones(3)).x, rtol=1e-3, atol=1e-4
        )


def test_one_residual_with_a_minimum_above_zero():
    result = mq.least_squares(lambda p: ((p - 2) ** 2).sum()[None] + 1, torch.tensor([3.0, 1.0], dtype=D))
    assert result.success
    torch.testing.assert_close(result.x, torch.full((2,), 2.0, dtype=D), rtol=1e-6, atol=0)


def test_a_callback_stops_further_attempts_too():
    calls = []

    def callback(intermediate_result):
        calls.append(intermediate_result.nfev)
        if calls.count(1) > 1:  # the second attempt has begun
            raise StopIteration

    def residuals(q):  # no minimum in reach: the first column never vanishes
        return torch.stack([q[0].abs() + 1, q[1] - 1])

    result = mq.least_squares(residuals, torch.tensor([1.0, 2.0], dtype=D), callback=callback)
    assert calls.count(1) == 2
    assert result.status == -2
    assert not result.success
