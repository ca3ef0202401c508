"""The Jacobian: exact where the function can be differentiated, by differences where it cannot."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.func import jacfwd, jacrev

Function = Callable[..., Any]
REVERSE = 2.0  # a reverse pass costs about this many forward ones


def forward(fun: Function) -> Function:
    return jacfwd(fun)


def reverse(fun: Function) -> Function:
    return jacrev(fun)


def rows(fun: Function) -> Function:
    """One backward pass per residual, for functions that torch.func cannot take."""

    def jac(x: Tensor, *args: Any) -> Tensor:
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            f = fun(x, *args)
            grads = [torch.autograd.grad(r, x, retain_graph=True, allow_unused=True)[0] for r in f]
        return torch.stack([torch.zeros_like(x) if g is None else g for g in grads]).detach()

    return jac


def differences(fun: Function, relative: Tensor, points: int, as_tensor: Callable[[Any], Tensor]) -> Function:
    """2- or 3-point differences that stay within the bounds; `relative` is the size of the steps, see `steps`."""

    def jac(x: Tensor, lower: Tensor, upper: Tensor, *args: Any) -> Tensor:
        def f(x: Tensor) -> Tensor:
            return as_tensor(fun(x, *args))

        h, f0 = relative * _size(x), f(x)
        return torch.stack([_slope(f, x, f0, j, h[j], lower, upper, points) for j in range(len(x))], -1)

    return jac


def steps(f: Callable[[Tensor], Tensor], x: Tensor, lower: Tensor, upper: Tensor, points: int) -> Tensor:
    """The relative size of the steps: (n,).

    Truncation and rounding balance where the function varies on the scale of x. One that varies much faster, such as a
    narrow peak far from 0, shows by a slope that changes with the step: then that step is taken whose slope is most
    like that of a step a hundred times smaller.
    """
    usual = torch.finfo(x.dtype).eps ** (1 / points)
    f0, size = f(x), _size(x)
    relative = torch.full_like(x, usual)
    for j in range(len(x)):
        best = 0.05  # in noise the slopes are further apart
        last = _slope(f, x, f0, j, usual * size[j], lower, upper, points)
        for h in (1e-2 * usual, 1e-4 * usual, 1e-6 * usual):
            slope = _slope(f, x, f0, j, h * size[j], lower, upper, points)
            apart = float((slope - last).norm() / last.norm())  # NaN or infinite where the longer step shows no slope
            if apart < best:
                best, relative[j] = apart, 1e2 * h
            if best <= 1e-4:
                break
            last = slope
    return relative


def _size(x: Tensor) -> Tensor:
    return torch.where(x == 0, 1.0, x.abs())


def _slope(
    f: Callable[[Tensor], Tensor], x: Tensor, f0: Tensor, j: int, h: Tensor, lower: Tensor, upper: Tensor, points: int
) -> Tensor:
    """∂f/∂xⱼ by a step of size h, within the bounds: (m,)."""
    reach = h if points == 2 else 2 * h
    if x[j] + h > upper[j] or (x[j] - h < lower[j] and x[j] + reach > upper[j]):
        h = -h
    step = torch.zeros_like(x)
    step[j] = (x[j] + h) - x[j]  # what the addition really adds
    one = f(x + step)
    if points == 2:
        slope = one - f0
    elif lower[j] <= x[j] - h.abs() and x[j] + h.abs() <= upper[j]:
        slope = (one - f(x - step)) / 2
    else:
        slope = 2 * (one - f0) - (f(x + 2 * step) - f0) / 2  # exactly 0 where nothing changes
    return slope / step[j]


def order(n: int, m: int) -> list[tuple[str, Callable[[Function], Function]]]:
    """The ways to an exact Jacobian, the cheapest first."""
    ways: list[tuple[str, Callable[[Function], Function]]] = [("forward", forward), ("reverse", reverse)]
    return [*(ways if n <= REVERSE * m else ways[::-1]), ("rows", rows)]


class Residuals(Protocol):
    def raw(self, x: Tensor) -> Tensor: ...


def agrees(problem: Residuals, x: Tensor, J: Tensor, lower: Tensor, upper: Tensor) -> bool:
    """Whether J is the slope of the residuals, along one direction of all parameters and one of those without slope.

    What is detached inside has slope 0.
    """
    here = problem.raw(x.unsqueeze(0))[0]
    # Parameters of great influence move less, lest they hide the others; different factors leave no symmetry of x.
    influence = J.norm(dim=0) * _size(x)
    part = (here.norm() / influence).nan_to_num(1.0).clamp(1e-6, 1.0)
    v = part * _size(x) * torch.linspace(0.6, 1.4, len(x), dtype=x.dtype, device=x.device)
    still = influence == 0
    directions = [v, v * still] if bool(still.any()) and not bool(still.all()) else [v]
    return all(_straight(problem, x, here, J, v, lower, upper) for v in directions)


def _straight(
    problem: Residuals, x: Tensor, here: Tensor, J: Tensor, v: Tensor, lower: Tensor, upper: Tensor
) -> bool:  # fmt: skip
    """Whether the residuals change along v as J says, at some distance within the bounds that tells it from rounding.

    How far they are straight is not known: one distance is as good as another.
    """
    eps = torch.finfo(x.dtype).eps
    h, told = eps ** (1 / 3), False
    while h > 1e3 * eps:
        ends = [(x + sign * h * v).clamp(lower, upper) for sign in (1, -1)]
        up, down = (problem.raw(end.unsqueeze(0))[0] for end in ends)
        noise = 10 * eps * (up.abs() + down.abs() + here.abs()).nan_to_num().norm()
        # One side may lie beyond a jump or a kink, or where fun has no value.
        ways = [(up - here, J @ (ends[0] - x)), (here - down, J @ (x - ends[1])), (up - down, J @ (ends[0] - ends[1]))]
        ways = [(change, Jd) for change, Jd in ways if bool(change.isfinite().all())]
        if any(bool(change.norm() + Jd.norm() > 10 * noise) for change, Jd in ways):
            told = True
            if any(bool((c - Jd).norm() <= 1e-2 * (c.norm() + Jd.norm()) + noise) for c, Jd in ways):
                return True
        h /= 10
    return not told
