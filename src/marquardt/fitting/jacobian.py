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


def differences(
    fun: Function, lower: Tensor, upper: Tensor, points: int, as_tensor: Callable[[Any], Tensor]
) -> Function:
    """2- or 3-point differences that stay within the bounds."""

    def jac(x: Tensor, *args: Any) -> Tensor:
        eps = torch.finfo(x.dtype).eps
        size = torch.where(x == 0, 1.0, x.abs())
        h = size * (eps ** (1 / 2) if points == 2 else eps ** (1 / 3))  # where truncation and rounding balance
        reach = h if points == 2 else 2 * h
        h = torch.where((x + h > upper) | ((x - h < lower) & (x + reach > upper)), -h, h)
        inside = (x - h.abs() >= lower) & (x + h.abs() <= upper)
        f0 = as_tensor(fun(x, *args))
        columns = []
        for j in range(len(x)):
            step = torch.zeros_like(x)
            step[j] = (x[j] + h[j]) - x[j]  # what the addition really adds
            one = as_tensor(fun(x + step, *args))
            if points == 2:
                slope = one - f0
            elif inside[j]:
                slope = (one - as_tensor(fun(x - step, *args))) / 2
            else:
                slope = (-3 * f0 + 4 * one - as_tensor(fun(x + 2 * step, *args))) / 2
            columns.append(slope / step[j])
        return torch.stack(columns, -1)

    return jac


def order(n: int, m: int) -> list[tuple[str, Callable[[Function], Function]]]:
    """The ways to an exact Jacobian, the cheapest first."""
    ways: list[tuple[str, Callable[[Function], Function]]] = [("forward", forward), ("reverse", reverse)]
    return [*(ways if n <= REVERSE * m else ways[::-1]), ("rows", rows)]


class Residuals(Protocol):
    def raw(self, x: Tensor) -> Tensor: ...


def agrees(problem: Residuals, x: Tensor, J: Tensor) -> bool:
    """Whether J is the slope of the residuals along one direction: what is detached inside has slope 0."""
    eps = torch.finfo(x.dtype).eps
    size = torch.where(x == 0, 1.0, x.abs())
    v = size * torch.linspace(0.6, 1.4, len(x), dtype=x.dtype, device=x.device)  # no symmetry of x hides in it
    h = eps ** (1 / 3)
    here, up, down = (problem.raw((x + k * h * v).unsqueeze(0))[0] for k in (0, 1, -1))
    Jv, noise = J @ v, 10 * eps * (up.abs() + down.abs()) / h
    # One side may lie beyond a jump or a kink, or where fun has no value.
    slopes = [(up - here) / h, (here - down) / h, (up - down) / (2 * h)]
    near = [(s - Jv).norm() <= 1e-2 * (s.norm() + Jv.norm()) + noise.norm() for s in slopes if bool(s.isfinite().all())]
    return not near or any(near)
