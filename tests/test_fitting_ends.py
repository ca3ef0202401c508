"""How a fit ends: never a success far from a minimum, always one where rounding is all that is left."""

import pytest
import torch

import marquardt as mq

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
