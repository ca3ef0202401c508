"""least_squares: beside SciPy, kinds of functions, losses, batches, the way to the end."""

import math
from typing import Any

import numpy as np
import pytest
import torch
from scipy import optimize
from torch import Tensor, exp

from marquardt import least_squares
from marquardt.fitting.robust import LOSSES
from support.decay.residuals import decay, decay_numpy, grid

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


def test_branches_on_the_data_work():
    """vmap refuses them: one problem after the other."""

    def f(p: Tensor) -> Tensor:
        return decay(p) if p[0] > 0 else decay(p) * 2

    fit = least_squares(f, torch.ones(3))
    assert fit.success
    many = least_squares(f, torch.ones(2, 3), batched=True)
    assert many.success.all()
    assert torch.allclose(many.x[0], fit.x)


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


def test_errors_of_fun_are_its_own():
    def broken(p: Any) -> Any:
        raise KeyError("the user's own mistake")

    for x0 in ([1.0], torch.ones(1)):
        with pytest.raises(KeyError, match="own mistake"):
            least_squares(broken, x0)


OWN: dict[str, Any] = {
    "tensors": lambda z: (z.log1p(), 1 / (1 + z), -1 / (1 + z) ** 2),
    "one array": lambda z: np.add(np.zeros((3, z.size)), [np.log1p(z), 1 / (1 + z), -1 / (1 + z) ** 2]),
    "a buffer": lambda z, out=torch.empty(3, 40, dtype=torch.float64): torch.stack(
        (z.log1p(), 1 / (1 + z), -1 / (1 + z) ** 2), out=out
    ),
}  # fmt: skip


@pytest.mark.parametrize("loss", OWN.values(), ids=OWN)
def test_a_loss_of_ones_own_is_that_of_the_name(loss: Any):
    named, own = (least_squares(decay, [1.0, 1.0, 1.0], loss=rho, f_scale=0.1) for rho in ("cauchy", loss))
    assert own.x == pytest.approx(named.x, rel=1e-9)


@pytest.mark.parametrize("name", LOSSES)
def test_the_derivatives_of_losses(name: str):
    z = torch.tensor([1e-3, 0.3, 0.9, 1.1, 4.0, 50.0], dtype=torch.float64)
    for order in (0, 1):
        slope = torch.func.jvp(lambda t, k=order: LOSSES[name](t)[k], (z,), (torch.ones_like(z),))[1]
        assert torch.allclose(slope, LOSSES[name](z)[order + 1])
