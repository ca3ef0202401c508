"""least_squares: hard starts, precision, batches, bounds, losses, NumPy functions, bad input."""

import math
import warnings
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from scipy import optimize
from torch import Tensor, exp

from certify import newton_step
from marquardt import least_squares
from marquardt.fitting.factor import QRFactor, norm
from marquardt.fitting.robust import LOSSES

# --- regression problems with noise, from starts that are far off ---


@dataclass(frozen=True)
class Curve:
    name: str
    f: Any  # (b, x) → y
    b: tuple[float, ...]  # the parameters that made the data
    x: Tensor
    noise: float
    starts: tuple[tuple[float, ...], ...]

    @property
    def y(self) -> Tensor:
        """Noise without a random number generator, the same everywhere; eight digits are kept."""
        i = torch.arange(len(self.x), dtype=torch.float64)
        y = self.f(torch.tensor(self.b, dtype=torch.float64), self.x) + self.noise * torch.sin(12.9898 * i * i + 1)
        return torch.tensor([float(f"{v:.8g}") for v in y.tolist()], dtype=torch.float64)

    def residuals(self, b: Any) -> Any:
        return self.f(b, self.x) - self.y


def grid(a: float, b: float, n: int) -> Tensor:
    return torch.linspace(a, b, n, dtype=torch.float64)


CURVES = (
    Curve("saturation", lambda b, x: b[0] * (1 - exp(-b[1] * x)), (83, 2.1e-3), grid(20, 300, 15), 0.05,
          ((8, 0.02), (3, 3), (8300, 2.1e-5))),
    Curve("saturation, few points", lambda b, x: b[0] * (1 - exp(-b[1] * x)), (31, 0.8), grid(0.5, 6, 6), 2,
          ((3, 12), (300, 0.02))),
    Curve("two exponentials", lambda b, x: b[0] * exp(-b[1] * x) + b[2] * exp(-b[3] * x), (1, 2, 2.5, 0.6),
          grid(0, 3, 30), 1e-3, ((1, 20, 1, 0.01), (0.13, 7.25, 7.04, 1.75))),
    Curve("three exponentials", lambda b, x: b[0] * exp(-b[1] * x) + b[2] * exp(-b[3] * x) + b[4] * exp(-b[5] * x),
          (0.3, 0.7, 1.1, 2.6, 2, 5.5), grid(0, 1.5, 30), 1e-5, ((3, 0.1, 3, 1, 3, 20), (1, 0.1, 1, 2, 1, 20))),
    Curve("peaks on a decay", lambda b, x: b[0] * exp(-b[1] * x) + b[2] * exp(-((x - b[3]) / b[4]) ** 2)
          + b[5] * exp(-((x - b[6]) / b[7]) ** 2), (20, 0.3, 12, 2.5, 0.6, 7, 6.5, 0.9), grid(0, 10, 60), 0.4,
          ((10, 1, 10, 2, 1, 10, 7, 1), (30, 0.1, 5, 3, 1.5, 5, 6, 0.4))),
    Curve("quadratic over cubic", lambda b, x: (b[0] + b[1] * x + b[2] * x**2)
          / (1 + b[3] * x + b[4] * x**2 + b[5] * x**3),
          (5, 3, 2, 0.4, 0.5, 0.1), grid(0, 6, 40), 0.05, ((1, 1, 1, 1, 1, 1), (50, 0, 0, 0, 0, 0.01))),
    Curve("logistic", lambda b, x: b[0] / (1 + exp(b[1] - b[2] * x)), (12, 4, 0.5), grid(0, 20, 11), 0.2,
          ((120, 0.4, 5), (1, 1, 1))),
    Curve("generalised logistic", lambda b, x: b[0] / (1 + exp(b[1] - b[2] * x)) ** (1 / b[3]), (9, 3, 0.6, 2),
          grid(0, 18, 20), 0.15, ((30, 1, 1, 0.3), (90, 0.5, 0.1, 5))),
    Curve("power law", lambda b, x: b[0] * (b[1] + x) ** (-1 / b[2]), (40, 3, 1.4), grid(0, 60, 50), 0.01,
          ((400, 10, 0.5), (1, 1, 1))),
    Curve("shifted reciprocal in an exponential", lambda b, x: b[0] * exp(b[1] / (x + b[2])), (0.03, 900, 120),
          grid(5, 60, 16), 0.2, ((0.3, 300, 60), (1e-3, 3000, 400))),
    Curve("decay over a line", lambda b, x: exp(-b[0] * x) / (b[1] + b[2] * x), (0.4, 0.05, 0.02), grid(0.2, 5, 40),
          0.1, ((0.2, 0.5, 0.2), (0.04, 0.5, 0.002))),
    Curve("growing exponential of tiny scale", lambda b, x: b[0] - b[1] * x * exp(b[2] * x), (7, 3e-7, 0.11),
          grid(50, 110, 30), 0.2, ((14, 3e-5, 0.05), (70, 1e-5, 0.05))),
)  # fmt: skip


@pytest.mark.parametrize(("curve", "x0"), [pytest.param(c, s, id=f"{c.name} {s}") for c in CURVES for s in c.starts])
def test_hard_starts_end_at_the_certified_minimum(curve: Curve, x0: tuple[float, ...]):
    """Newton's method in 80 digits moves no parameter in its first 8 digits, and no lower point is known."""
    known = least_squares(curve.residuals, torch.tensor(curve.b, dtype=torch.float64))
    fit = least_squares(curve.residuals, torch.tensor(x0, dtype=torch.float64))
    assert fit.success, fit.message
    assert fit.cost <= known.cost * (1 + 1e-10)
    left = torch.tensor([float(d) for d in newton_step(curve.residuals, fit.x.tolist())], dtype=torch.float64)
    assert (left / fit.x).abs().max() < 1e-8


def test_tolerances_of_1e_15_are_reachable():
    for curve in CURVES:
        tight = least_squares(curve.residuals, curve.b, ftol=1e-15, xtol=1e-15, gtol=1e-15)
        assert tight.success
        assert tight.nfev < 100


def test_newton_finishes_what_gauss_newton_cannot():
    """Freudenstein and Roth's local minimum: large residuals, J singular, the cost flat to 1e-8 of x."""

    def f(x: Tensor) -> Tensor:
        u, v = x
        return torch.stack([u - 13 + ((5 - v) * v - 2) * v, u - 29 + ((v + 1) * v - 14) * v])

    fit = least_squares(f, torch.tensor([0.5, -2.0]))
    assert fit.success
    assert fit.x.tolist() == pytest.approx([(53 - 4 * math.sqrt(22)) / 3, (2 - math.sqrt(22)) / 3], rel=1e-12)


# --- the linear algebra of a step ---


@pytest.mark.parametrize("deficient", [False, True])
def test_the_damped_step_is_the_minimiser_within_the_region(deficient: bool):
    torch.manual_seed(0)
    J, f = torch.randn(50, 7, 4, dtype=torch.float64), torch.randn(50, 7, dtype=torch.float64)
    J[..., 3] = J[..., 2] if deficient else J[..., 3]
    D = 10 ** (4 * torch.rand(50, 4, dtype=torch.float64) - 2)
    factor = QRFactor.of(J, f)
    radius = 0.3 * torch.rand(50, dtype=torch.float64) + 1e-3
    p, held = factor.within(radius, D)
    assert (norm(D * p) <= 1.1001 * radius).all()
    # Kuhn and Tucker: Jᵀ(f + Jp) = −λD²p for one λ ≥ 0, zero where the region does not hold the step.
    g = (J.mT @ (f + (J @ p.unsqueeze(-1)).squeeze(-1)).unsqueeze(-1)).squeeze(-1) / D
    lam = -(g * D * p).sum(-1) / (D * p).norm(dim=-1) ** 2
    assert (
        (g + lam.unsqueeze(-1) * D * p).norm(dim=-1) <= 1e-9 * (J.mT @ f.unsqueeze(-1)).squeeze(-1).div(D).norm(dim=-1)
    ).all()
    assert (lam >= -1e-9).all()
    assert (lam[~held].abs() < 1e-9).all()
    assert (lam > 1e-3).any()


def test_columns_of_any_scale():
    """R is solved, not RᵀR: the step survives columns 1e±120 long and a condition of 1e12."""
    torch.manual_seed(0)
    J, p = torch.randn(5, 9, 3, dtype=torch.float64), torch.tensor([1.0, -2.0, 3.0], dtype=torch.float64)
    J[..., 2] = J[..., 1] + 1e-10 * J[..., 2]
    size = torch.tensor([1e120, 1.0, 1e-120], dtype=torch.float64)
    f = -(J @ p)
    assert torch.allclose(QRFactor.of(J * size, f).undamped() * size, p.expand(5, 3), rtol=1e-4)


# --- beside SciPy ---

T = grid(0, 4, 40)  # 40 points
Y = 2.5 * exp(-1.3 * T) + 0.5 + 0.05 * torch.sin(12.9898 * torch.arange(40.0) ** 2) + (T[5] == T)  # one outlier


def decay(p: Any) -> Any:
    return p[0] * exp(-p[1] * T) + p[2] - Y


def decay_numpy(p: Any) -> Any:
    return p[0] * np.exp(-p[1] * T.numpy()) + p[2] - Y.numpy()


TIGHT = {"ftol": 1e-15, "xtol": 1e-15, "gtol": 1e-15}


@pytest.mark.parametrize("loss", ["linear", *LOSSES])
@pytest.mark.parametrize("bounds", [(-np.inf, np.inf), ([0, 0, 0], [2.2, 9, 9]), ([0, 0, 0.6], [3, 1.0, 9])])
def test_losses_and_bounds_are_scipys(loss: str, bounds: Any):
    x0 = [1.0, 1.0, 1.0]
    ours = least_squares(decay, x0, loss=loss, f_scale=0.1, bounds=bounds)
    theirs = optimize.least_squares(decay_numpy, x0, "3-point", bounds, loss=loss, f_scale=0.1, **TIGHT)
    assert ours.success
    assert ours.x == pytest.approx(theirs.x, rel=1e-7)
    assert ours.cost == pytest.approx(theirs.cost, rel=1e-10)
    assert ours.fun == pytest.approx(theirs.fun, abs=1e-7)
    assert ours.jac == pytest.approx(theirs.jac, abs=1e-5)
    assert ours.grad == pytest.approx(theirs.grad, abs=1e-6)
    assert ours.active_mask.tolist() == theirs.active_mask.tolist()


def test_a_bound_that_holds_is_met_exactly():
    fit = least_squares(decay, [1.0, 1.0, 1.0], bounds=([0, 0, 0.6], [3, 1.0, 9]))
    assert fit.active_mask.tolist() == [0, 1, 1] or fit.x[1] == 1.0
    assert fit.optimality < 1e-10


def test_starts_on_a_bound_and_fixed_parameters():
    fit = least_squares(decay, [0.0, 0.0, 0.5], bounds=([0, 0, 0.5], [9, 9, 0.5]))
    assert fit.success
    assert fit.x[2] == 0.5
    free = least_squares(lambda p: decay([p[0], p[1], 0.5]), [1.0, 1.0])
    assert fit.x[:2] == pytest.approx(free.x, rel=1e-8)


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


def test_weights_count_residuals():
    """A weight of 3 is the same residual three times."""
    w = torch.where(torch.arange(40) % 3 == 0, 3.0, 1.0)
    weighted = least_squares(decay, [1.0, 1.0, 1.0], weights=w)
    repeated = least_squares(lambda p: decay(p).repeat_interleave(w.long()), [1.0, 1.0, 1.0])
    assert weighted.x == pytest.approx(repeated.x, rel=1e-9)
    assert weighted.cost == pytest.approx(repeated.cost)
    assert weighted.fun == pytest.approx(decay(weighted.x).numpy())


# --- kinds of functions and Jacobians ---


def test_kinds_in_and_out():
    tensor = least_squares(decay, torch.ones(3))
    array = least_squares(decay, np.ones(3))
    assert isinstance(tensor.x, Tensor)
    assert tensor.x.dtype == torch.float64
    assert isinstance(array.x, np.ndarray)
    assert isinstance(array.cost, float)
    assert array["x"] is array.x
    assert "differences" not in tensor.message + array.message
    assert array.x == pytest.approx(tensor.x.numpy(), rel=1e-12)


@pytest.mark.parametrize("x0", [[1.0, 1.0, 1.0], torch.ones(3)])
def test_a_numpy_function_works_and_says_how(x0: Any):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fit = least_squares(decay_numpy, x0)
    assert fit.success
    assert "3-point" in fit.message
    assert np.asarray(fit.x) == pytest.approx(least_squares(decay, [1.0, 1.0, 1.0]).x, rel=1e-8)


def test_a_derivative_that_is_lost_on_the_way_is_noticed():
    fit = least_squares(lambda p: p[0] * exp(-p[1].detach() * T) + p[2] - Y, torch.ones(3))
    assert "3-point" in fit.message
    assert "detached" in fit.message
    assert fit.x.tolist() == pytest.approx(least_squares(decay, torch.ones(3)).x.tolist(), rel=1e-7)


def test_a_kink_or_jump_at_the_start_is_no_lost_derivative():
    fit = least_squares(lambda p: torch.stack([torch.atan2(p[1], p[0]) / 7, p[0] ** 2 + p[1] ** 2 - 1]), [-1.0, 0.0])
    assert "differences" not in fit.message


@pytest.mark.parametrize(
    "jac", ["2-point", "3-point", torch.func.jacrev(decay)], ids=["2-point", "3-point", "function"]
)
def test_jacobians_of_every_kind(jac: Any):
    fit = least_squares(decay, torch.ones(3), jac=jac, bounds=([0, 0, 0], [9, 9, 1]))
    assert fit.x.tolist() == pytest.approx(least_squares(decay, torch.ones(3)).x.tolist(), rel=1e-6)


def test_a_numpy_jacobian():
    def jac(p: Any) -> Any:
        e, t = np.exp(-p[1] * T.numpy()), T.numpy()
        return np.stack([e, -p[0] * t * e, np.ones_like(t)], 1)

    fit = least_squares(decay_numpy, [1.0, 1.0, 1.0], jac=jac)
    assert fit.x == pytest.approx(least_squares(decay, [1.0, 1.0, 1.0]).x, rel=1e-9)
    assert "differences" not in fit.message


def test_branches_on_the_data_work():
    """vmap refuses them: one problem after the other."""

    def f(p: Tensor) -> Tensor:
        return decay(p) if p[0] > 0 else decay(p) * 2

    fit = least_squares(f, torch.ones(3))
    assert fit.success
    many = least_squares(f, torch.ones(2, 3), batched=True)
    assert many.success.all()
    assert torch.allclose(many.x[0], fit.x)


def test_arguments_and_keywords_reach_fun():
    fit = least_squares(
        lambda p, y, t: p[0] * exp(-p[1] * t) + p[2] - y, np.ones(3), args=(Y.numpy(),), kwargs={"t": T}
    )
    assert fit.x == pytest.approx(least_squares(decay, [1.0, 1.0, 1.0]).x, rel=1e-9)


# --- batches ---


def peak(p: Any, y: Any, t: Any) -> Any:
    return p[0] * exp(-((t - p[1]) ** 2) / (2 * p[2] ** 2)) + p[3] - y


def batch(B: int) -> tuple[Tensor, Tensor, Tensor]:
    g = torch.Generator().manual_seed(0)
    u = torch.rand(B, 4, generator=g, dtype=torch.float64)
    p = torch.tensor([1.0, -0.5, 0.6, 0.0]) + u * torch.tensor([3.0, 1.0, 0.6, 0.5])
    t = grid(-3, 3, 30)
    y = torch.func.vmap(lambda p: peak(p, 0.0, t))(p)
    y += 0.03 * torch.randn(B, 30, generator=g, dtype=torch.float64)
    return p * (1 + 0.2 * torch.randn(B, 4, generator=g, dtype=torch.float64)), y, t


@pytest.mark.parametrize(
    "options", [{}, {"loss": "soft_l1", "f_scale": 0.05}, {"bounds": (-0.4, 3.0)}, {"geodesic": True}]
)
def test_many_problems_are_each_as_if_alone(options: dict[str, Any]):
    x0, y, t = batch(60)
    x0 = x0.clamp(-0.4, 3.0)
    many = least_squares(peak, x0, args=(y,), kwargs={"t": t}, batched=True, **options)
    assert many.success.all()
    for i in range(0, 60, 7):
        one = least_squares(peak, x0[i], args=(y[i],), kwargs={"t": t}, **options)
        assert torch.allclose(many.x[i], one.x, rtol=1e-8)
        assert int(many.nfev[i]) == one.nfev
        assert int(many.njev[i]) == one.njev
        assert float(many.cost[i]) == pytest.approx(one.cost, rel=1e-12)
        assert many.jac[i].shape == one.jac.shape


def test_stopped_problems_cost_nothing():
    """All but one start at their minimum: later calls are of few problems."""
    x0, y, t = batch(100)
    x0 = least_squares(peak, x0, args=(y,), kwargs={"t": t}, batched=True).x
    x0[17] *= 1.3
    sizes: list[int] = []
    fit = least_squares(
        peak, x0, args=(y,), kwargs={"t": t}, batched=True, callback=lambda r: sizes.append(len(r.x)), gtol=1e-8
    )
    assert fit.success.all()
    assert sizes[0] == 100
    assert set(sizes[1:]) == {1}
    assert (fit.nfev[torch.arange(100) != 17] == 1).all()


def test_a_bad_problem_does_not_spoil_the_others():
    x0, y, t = batch(5)
    y[3, 4] = math.nan
    fit = least_squares(peak, x0, args=(y,), kwargs={"t": t}, batched=True)
    assert fit.success.tolist() == [True, True, True, False, True]
    assert fit.status[3] == -1
    assert "4 of 5" in fit.message


def test_numpy_batches():
    x0, y, t = batch(4)
    many = least_squares(
        lambda p, y: p[0] * np.exp(-((t.numpy() - p[1]) ** 2) / (2 * p[2] ** 2)) + p[3] - y,
        x0.numpy(), args=(y.numpy(),), batched=True,
    )  # fmt: skip
    assert isinstance(many.x, np.ndarray)
    exact = least_squares(peak, x0, args=(y,), kwargs={"t": t}, batched=True)
    assert many.x == pytest.approx(exact.x.numpy(), rel=1e-7)


# --- the end of a fit, and the way there ---


def test_steps_into_nowhere_are_shortened():
    """log of a negative number at the first trial point."""
    fit = least_squares(lambda x: torch.log(x) - 1, [30.0])
    assert fit.success
    assert fit.x == pytest.approx([math.e], rel=1e-9)


def test_jacobians_with_nans_and_lost_rank_at_once_are_survived():
    """√x at a trial point of 0 has an infinite slope, beside a column of zeros."""
    fit = least_squares(lambda p: torch.stack([torch.sqrt(p[0]) - 0.1, 0 * p[1], p[0] + 0 * p[1]]), [1.0, 1.0])
    assert fit.x[0] > 0
    assert math.isfinite(fit.cost)
    R = torch.tensor([[[math.nan, 1.0], [0.0, 0.0]], [[1.0, 1.0], [0.0, 0.0]]], dtype=torch.float64)
    Rc = torch.cat([R, torch.ones(2, 2, 1, dtype=torch.float64)], -1)
    assert QRFactor(Rc).decrement.isnan().tolist() == [True, False]


def test_no_success_without_a_minimum():
    """exp falls for ever; a function evaluation limit is no success either."""
    fit = least_squares(lambda x: torch.stack([exp(-x[0]) + 1, exp(-x[0]) - 1]), [0.0], max_nfev=7)
    assert not fit.success
    assert fit.status == 0
    assert fit.nfev <= 7


def test_a_wrong_jacobian_is_not_called_success():
    fit = least_squares(decay, torch.ones(3), jac=lambda p: -torch.func.jacfwd(decay)(p))
    assert not fit.success
    assert fit.status == -3
    assert torch.allclose(fit.x, torch.ones(3, dtype=torch.float64))


def test_fewer_residuals_than_parameters():
    fit = least_squares(lambda x: (x.sum() - 3).reshape(1), [0.0, 0.0])
    assert fit.success
    assert fit.cost < 1e-25
    assert "fewer residuals" in fit.message


def test_callback_and_verbose(capsys: pytest.CaptureFixture[str]):
    seen: list[float] = []

    def callback(intermediate_result: Any) -> None:
        seen.append(intermediate_result.cost)
        if len(seen) == 3:
            raise StopIteration

    fit = least_squares(decay, [1.0, 1.0, 1.0], callback=callback, verbose=2)
    assert fit.status == -2
    assert not fit.success
    assert seen[2] == fit.cost < seen[0]
    printed = capsys.readouterr().out
    assert len(printed.splitlines()) == 1 + 3 + 2


def test_geodesic_acceleration_takes_fewer_jacobians_in_a_curved_valley():
    def f(x: Tensor) -> Tensor:
        return torch.stack([10 * (x[1] - x[0] ** 2), 1 - x[0]])

    plain, bent = (least_squares(f, [-1.2, 1.0], geodesic=g) for g in (False, True))
    assert bent.x == pytest.approx([1, 1])
    assert bent.njev < plain.njev


def test_x_and_data_are_left_alone():
    x0, y = torch.ones(3, dtype=torch.float64), Y.clone()

    def rude(p: Tensor) -> Tensor:
        f = decay(p)
        p.mul_(0)
        return f

    least_squares(rude, x0)
    assert torch.equal(x0, torch.ones(3, dtype=torch.float64))
    assert torch.equal(y, Y)


# --- bad input ---

calls = {"n": 0}


def changing(p: Tensor) -> Tensor:
    calls["n"] += 1
    return decay(p)[: 40 if calls["n"] < 12 else 39]


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        ({"x0": [1.0, math.nan, 1.0]}, ValueError, r"x0 is not finite at \(1,\)"),
        ({"x0": torch.ones(3, dtype=torch.complex128)}, TypeError, "complex"),
        ({"x0": torch.ones(2, 3)}, ValueError, "batched=True"),
        ({"x0": []}, ValueError, "shape"),
        ({"x0": "abc"}, TypeError, "vector of real numbers"),
        ({"fun": lambda p: None}, TypeError, "returned None"),
        ({"fun": lambda p: decay(p) * 1j}, TypeError, "complex"),
        ({"fun": lambda p: decay(p).reshape(4, 10)}, ValueError, r"\(4, 10\)"),
        ({"fun": lambda p: decay(p) / 0}, ValueError, "not finite"),
        ({"fun": changing}, ValueError, "39 residuals"),
        ({"jac": lambda p: torch.ones(3, 40)}, ValueError, r"\(40, 3\)"),
        ({"jac": lambda p: None}, TypeError, "returned None"),
        ({"jac": "cs"}, ValueError, "'cs'"),
        ({"bounds": (2, 3)}, ValueError, "infeasible"),
        ({"bounds": (3, 2)}, ValueError, "above the upper"),
        ({"bounds": ([0, 0], 3)}, ValueError, "lower bound"),
        ({"bounds": (math.nan, 3)}, ValueError, "NaN"),
        ({"bounds": 3}, ValueError, "lower, upper"),
        ({"method": "dogbox"}, ValueError, "dogbox"),
        ({"loss": "l1"}, ValueError, "'l1'"),
        ({"loss": "huber", "f_scale": 0}, ValueError, "f_scale=0"),
        ({"loss": lambda z: z}, ValueError, "ρ"),
        ({"x_scale": -1.0}, ValueError, "positive"),
        ({"x_scale": "jack"}, ValueError, "'jack'"),
        ({"xtol": -1.0}, ValueError, "xtol=-1.0"),
        ({"max_nfev": 0}, ValueError, "max_nfev=0"),
        ({"verbose": 3}, ValueError, "verbose=3"),
        ({"weights": torch.ones(39)}, ValueError, r"\(39,\)"),
        ({"weights": -torch.ones(40)}, ValueError, "at least 0"),
        ({"x0": torch.ones(2, 3), "batched": True, "args": (torch.ones(3),)}, ValueError, "kwargs"),
    ],
)  # fmt: skip
def test_bad_input_is_refused(change: dict[str, Any], error: type[Exception], words: str):
    calls["n"] = 0
    x0 = torch.ones(3)
    with pytest.raises(error, match=words):
        least_squares(**{"fun": decay, "x0": x0, **change})
    assert torch.equal(x0, torch.ones(3))


def test_errors_of_fun_are_its_own():
    def broken(p: Any) -> Any:
        raise KeyError("the user's own mistake")

    for x0 in ([1.0], torch.ones(1)):
        with pytest.raises(KeyError, match="own mistake"):
            least_squares(broken, x0)
