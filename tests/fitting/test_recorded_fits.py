"""Fits whose iterations are recorded as a CUDA graph: the same, and without one where there can be none."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from marquardt import deferred as tape
from marquardt import least_squares
from marquardt.fitting.factor import Box, QRFactor
from marquardt.fitting.problems import Problems, build
from marquardt.fitting.solve import Options, Progress, iterate, start

cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")

FREE = torch.full((60, 4), torch.inf, dtype=torch.float64)


def peak(x: Tensor, y: Tensor) -> Tensor:
    t = torch.linspace(0, 10, y.shape[-1], dtype=y.dtype, device=y.device)
    return x[0] * torch.exp(-(((t - x[1]) / x[2]) ** 2)) + x[3] - y


def data(problems: int = 60) -> tuple[Tensor, Tensor]:
    """Data and starts, some of them so bad that steps are damped and rejected."""
    generator = torch.Generator().manual_seed(1)
    true = torch.tensor([2.0, 5.0, 1.0, 0.5]) * (0.7 + 0.6 * torch.rand(problems, 4, generator=generator))
    y = torch.func.vmap(peak)(true.double(), torch.zeros(problems, 30).double())
    y = y + 0.05 * torch.randn(y.shape, generator=generator)
    return true.double() * (0.6 + 0.8 * torch.rand(problems, 4, generator=generator)), y


def problem(y: Tensor, x: Tensor) -> Problems:
    return build(peak, x, "auto", (y,), {}, True, (-FREE, FREE), False)[0]


def recorded(*arguments: Any) -> tuple[Progress, Tensor]:
    """An iteration as it would be recorded, and whose step it is."""
    asked = tape.Tape([])
    with tape.recorded(asked):
        new = iterate(*arguments)
    return new, torch.stack(asked.asked).all(0)


def test_an_iteration_is_recorded_as_it_is():
    """Without selecting problems: with those that stop or whose step is damped, rejected or neither."""
    x, y = data()
    several, options = problem(y, x), Options(xtol=1e-12)
    s = start(several, x, options)
    seen = set()
    while bool(s.running.any()):
        new, fine = recorded(several, s, options)
        s = iterate(several, s, options)
        seen.update(s.status.tolist())
        assert fine.double().mean() > 0.9
        for name in ("x", "f", "J", "scale", "radius"):
            torch.testing.assert_close(getattr(new, name)[fine], getattr(s, name)[fine], rtol=1e-6, atol=1e-9)
        assert all(torch.equal(getattr(new, name)[fine], getattr(s, name)[fine]) for name in ("nfev", "njev", "status"))
    assert len(s.njev.unique()) > 3
    assert bool((s.njev < s.nfev).any())  # rejected steps
    assert len(seen) > 2


def test_what_a_recording_assumes_is_asked():
    x, y = data()
    box = Box(torch.zeros_like(x), torch.where(torch.arange(4) == 1, 1.02 * x, 9.0))
    several, options = replace(problem(y, x), box=box), Options()
    s = start(several, x, options)
    new, fine = recorded(several, s, options)
    assert 0 < fine.sum() < len(fine)  # some meet a bound, which takes them another step
    torch.testing.assert_close(new.x[fine], iterate(several, s, options).x[fine], rtol=1e-9, atol=1e-12)

    flat = QRFactor.of(torch.ones(3, 5, 2, dtype=torch.float64), torch.rand(3, 5, dtype=torch.float64))
    asked = tape.Tape([])
    with tape.recorded(asked):
        flat.decrement  # noqa: B018
    assert not torch.stack(asked.asked).all(0).any()  # J without full rank


def test_a_recording_is_that_of_its_thread():
    """Another thread that records does not answer for this one."""
    x, y = data()
    options = {"args": (y,), "batched": True, "bounds": (0.0, x.max().item())}
    plain = least_squares(peak, x, **options)
    with ThreadPoolExecutor(1) as pool, tape.recorded(tape.Tape([])):
        other = pool.submit(least_squares, peak, x, **options).result()
    assert torch.equal(plain.x, other.x)


def test_capture_changes_nothing_on_a_cpu():
    x, y = data()
    one, other = (least_squares(peak, x, args=(y,), batched=True, capture=capture) for capture in (True, False))
    assert all(torch.equal(one[k], other[k]) for k in ("x", "nfev", "status"))


@cuda
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"loss": "soft_l1"},
        {"geodesic": True},
        {"bounds": (0.0, 5.1)},
        {"x_scale": 1.0},
        {"weights": [0.5] * 30},
    ],
    ids=str,
)
def test_a_recorded_fit_is_the_fit(options):
    x, y = (t.cuda() for t in data())
    x[:, 1] = x[:, 1].clamp(max=5.0)
    kept: list[Any] = []
    one = least_squares(peak, x, args=(y,), batched=True, capture=True, callback=kept.append, **options)
    other = least_squares(peak, x, args=(y,), batched=True, **options)
    assert one.success.all()
    torch.testing.assert_close(one.x, other.x, rtol=1e-9, atol=1e-12)
    assert one.message == other.message
    assert not torch.equal(kept[1].x, kept[2].x)  # each has its own memory


@cuda
def test_graphs_are_used_and_what_they_do_not_know_is_done_without():
    x, y = (t.cuda() for t in data())
    calls: list[int] = []

    def counted(x: Tensor, y: Tensor) -> Tensor:
        calls.append(1)
        return peak(x, y)

    def fit(**options: Any) -> int:
        calls.clear()
        assert least_squares(counted, x, args=(y,), batched=True, **options).success.all()
        return len(calls)

    fit()
    assert fit(capture=True) < 0.5 * fit()

    x[:3, 0] = 0  # a peak of no height: neither its place nor its width matters
    one, other = (least_squares(peak, x, args=(y,), batched=True, capture=capture) for capture in (True, False))
    torch.testing.assert_close(one.x, other.x, rtol=1e-9, atol=1e-12)
    assert one.message == other.message


@cuda
def test_what_cannot_be_recorded_is_fitted_without():
    x, y = (t.cuda() for t in data())

    def waits(x: Tensor, y: Tensor) -> Tensor:
        torch.cuda.synchronize()
        return peak(x, y)

    least_squares(peak, x, args=(y,), batched=True)
    with pytest.warns(UserWarning, match="cannot be recorded"):
        fit = least_squares(waits, x, args=(y,), batched=True, capture=True)
    assert torch.rand(3, device="cuda").isfinite().all()  # the generator is as before
    assert torch.equal(fit.x, least_squares(peak, x, args=(y,), batched=True).x)
