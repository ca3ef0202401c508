"""Residuals and Jacobians of B independent problems, from the user's function of one."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.func import jacfwd, jacrev, jvp, vmap

from ..surroundings import unless_interrupted
from .arrays import last_node, refuse_tracked, returned, tensor, unless_refused
from .factor import Box
from .robust import RobustLoss

Function = Callable[..., Any]
REVERSE = 2.0  # a reverse pass costs about this many forward ones


class NoSecondDerivative(RuntimeError):
    """torch cannot differentiate fun twice."""


@dataclass(frozen=True)
class Problems:
    """f: (B, n) → (B, m) and J: (B, n) → (B, m, n), with weights; the loss of the residuals and the bounds of x.

    `fun` and `jac` take one x of shape (n,) and `args`; the arguments in `cut` have a leading dimension of problems.
    """

    fun: Function
    jac: Function
    args: tuple[Any, ...]
    cut: tuple[int | None, ...]  # 0 or None for each of args, as torch.func.vmap has it
    batched: bool
    m: int
    weight: Tensor | None = None  # √w, (m,) or (B, m)
    loss: RobustLoss = RobustLoss()
    box: Box | None = None  # None where all of x is free
    loop: bool = False  # one problem after the other: a single one, NumPy, or what vmap cannot take
    exact: bool = True  # torch can differentiate fun, and as far as one can tell twice
    limits: tuple[Tensor, ...] = ()  # the bounds, (B, n) each, where jac takes them: differences stay inside
    origin: tuple[Tensor, ...] = ()  # x0, f and J of a single problem, without weights

    def __getitem__(self, index: Tensor) -> Problems:
        """The problems `index` alone."""
        if not self.batched:
            return self
        args = [
            a if d is None else a[index.to(a.device) if isinstance(a, Tensor) else index.cpu().numpy()]
            for a, d in zip(self.args, self.cut, strict=True)
        ]
        weight = self.weight[index] if self.weight is not None and self.weight.ndim == 2 else self.weight
        box, limits = self.box and self.box[index], tuple(t[index] for t in self.limits)
        return replace(self, args=tuple(args), weight=weight, box=box, limits=limits)

    def raw(self, x: Tensor) -> Tensor:
        """The residuals as the function returns them: (B, m)."""
        f = self._each(self.fun, x).detach()
        if f.shape != (len(x), self.m):
            raise ValueError(
                f"fun returned {f.shape[-1]} residuals, where it returned {self.m} at x0: keep their number"
            )
        return f

    def residuals(self, x: Tensor) -> Tensor:
        return self._weighted(self.raw(x))

    def jacobian(self, x: Tensor) -> Tensor:
        J = self._each(self.jac, x, *self.limits).detach()
        if J.shape != (len(x), self.m, x.shape[-1]):
            raise ValueError(
                f"jac returned shape {tuple(J.shape[1:])}: it must be {(self.m, x.shape[-1])}, residuals × parameters"
            )
        return self._weighted(J)

    def at_start(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """f and J where a search starts; at its x0 those of a single problem are known."""
        if not self.origin or not torch.equal(x, self.origin[0]):
            return self.residuals(x), self.jacobian(x)
        _, f, J = self.origin
        return self._weighted(f), self._weighted(J)

    def curvature(self, x: Tensor, f: Tensor) -> Tensor:
        """Σ fᵢ∇²fᵢ of the weighted residuals f, the part of the Hessian that Gauss-Newton leaves out: (B, n, n)."""
        inner = lambda x, f, *args: self.fun(x, *args) @ f  # noqa: E731
        return self._second(jacfwd(jacrev(inner)), x, self._weighted(f))

    def bend(self, x: Tensor, v: Tensor) -> Tensor:
        """d²f(x + tv)/dt², the second derivative of the weighted residuals along a step: (B, m)."""

        def along(x: Tensor, v: Tensor, *args: Any) -> Tensor:
            slope = lambda y: jvp(lambda z: self.fun(z, *args), (y,), (v,))[1]  # noqa: E731
            return jvp(slope, (x,), (v,))[1]  # type: ignore[no-any-return]

        return self._weighted(self._second(along, x, v))

    @property
    def plain(self) -> bool:
        """Whether Newton's method applies: no bounds, the sum of squares, second derivatives."""
        return self.box is None and self.loss.rho is None and self.exact

    def clamped(self, x: Tensor) -> Tensor:
        return x if self.box is None else x.clamp(self.box.lower, self.box.upper)

    def first(self, x: Tensor, differentiated: bool) -> Tensor:
        """The residuals at the start; an error where they carry a derivative that the fit would lose.

        `differentiated`: whether the caller is in grad mode, in which alone it shows what fun has captured.
        """
        before = last_node()
        try:
            with torch.set_grad_enabled(differentiated):
                f = self._each(self.fun, x)
                refuse_tracked("a tensor that fun uses", f, before=before)
        except Exception as error:  # such as of a function that writes to parameters, which only takes no_grad
            unless_refused(error)
            f = self._each(self.fun, x)
        return f.detach()

    def _weighted(self, t: Tensor) -> Tensor:
        """f or J times √w."""
        if self.weight is None:
            return t
        return t * (self.weight if t.ndim == 2 else self.weight.unsqueeze(-1))

    def _each(self, function: Function, *x: Tensor) -> Tensor:
        """The function of every problem; x and what else has a leading dimension B."""
        if not self.loop:
            value: Tensor = vmap(function, in_dims=(*(0 for _ in x), *self.cut))(*x, *self.args)
            return value
        # Copies: the function may use its output again, which vmap refuses.
        return torch.stack([function(*(t[i] for t in x), *self.own(i)).clone() for i in range(len(x[0]))])

    def own(self, i: int) -> list[Any]:
        """The arguments of problem i."""
        return [a if d is None else a[i] for a, d in zip(self.args, self.cut, strict=True)]

    def _second(self, function: Function, *x: Tensor) -> Tensor:
        needed = "second derivatives, as for geodesic=True, need a fun that torch can differentiate twice"
        if not self.exact:
            raise NoSecondDerivative(f"{needed}: pass geodesic=False")
        try:
            return self._each(function, *x)
        except Exception as error:  # torch has many
            unless_interrupted(error)
            raise NoSecondDerivative(f"{needed}: {_first_line(error)}") from error


def _first_line(error: Exception) -> str:
    return (str(error) or type(error).__name__).splitlines()[0]


@dataclass(frozen=True)
class UserFunction:
    """How the user wants fun to be called. It gets a copy of x, which it may change."""

    fun: Function
    kwargs: dict[str, Any]
    numpy: bool  # x as a NumPy array

    __name__ = "fun"  # torch.func asks for it, and would else print what the function holds

    def __call__(self, x: Tensor, *args: Any) -> Tensor:
        given = self.own(x)
        f = returned("fun", self.fun(given, *args, **self.kwargs), given, "the residuals, a vector")
        if f.is_complex():
            raise TypeError("fun returned complex residuals: return their real and imaginary parts as one real vector")
        if f.ndim > 1:
            way, m = "return it flat, .reshape(-1)", f.shape[0]
            if f.ndim == 2 and f.shape[1] == m > 1:
                way = f"a column {(m, 1)} less a vector {(m,)} gives such a square; make both vectors"
            raise ValueError(
                f"fun returned shape {tuple(f.shape)}: the residuals of one problem must be a vector; {way}"
            )
        return f.reshape(-1).to(x.device, x.dtype)

    def own(self, x: Tensor) -> Any:
        """A copy of x, of the kind that the user's functions take."""
        return x.detach().cpu().numpy().copy() if self.numpy else x.clone()


def build(
    fun: Function, x: Tensor, jac: Any, args: tuple[Any, ...], kwargs: dict[str, Any], batched: bool,
    limits: tuple[Tensor, Tensor], numpy: bool, differentiated: bool = False,
) -> tuple[Problems, str]:  # fmt: skip
    """The problems at their start x (B, n), and how their Jacobian comes about where that is worth a word.

    `limits` are the bounds, (B, n) each. `differentiated`: whether the caller is in grad mode, where a derivative that
    the fit would lose is an error.
    """
    cut: list[int | None] = []
    for i, a in enumerate(args):
        arraylike = hasattr(a, "shape") and hasattr(a, "dtype")
        if batched and arraylike and (len(a.shape) == 0 or a.shape[0] != len(x)):
            raise ValueError(
                f"args[{i}] has shape {tuple(a.shape)} for {len(x)} problems: args are cut along their first "
                "dimension, one entry for each problem; pass what all problems share as kwargs"
            )
        cut.append(0 if batched and arraylike else None)
    # Tensors by vmap, tensors one problem after the other, arrays; for a Jacobian of arrays, these first.
    of_tensors, of_arrays = [(False, False), (False, True)][not batched :], (True, True)
    ways = [of_arrays, *of_tensors] if numpy and callable(jac) else [*of_tensors, of_arrays]
    failures: dict[bool, Exception] = {}
    inexact: dict[bool, tuple[Problems, str]] = {}
    for as_numpy, loop in ways:
        if as_numpy in inexact:
            continue
        given = args if as_numpy else tuple(_to_tensor(a, x) for a in args)
        call = UserFunction(fun, kwargs if as_numpy else {k: _to_tensor(a, x) for k, a in kwargs.items()}, as_numpy)
        base = Problems(call, call, given, tuple(cut), batched, 0, loop=loop, exact=not as_numpy)
        try:
            with warnings.catch_warnings():
                if not as_numpy:  # NumPy deprecates what it does with tensors
                    warnings.simplefilter("ignore", DeprecationWarning)
                problems, note = _started(base, x, jac, limits, differentiated)
        except Exception as error:  # a function of NumPy arrays may raise anything on a tensor, and the reverse
            unless_refused(error)
            failures[as_numpy] = error
            continue
        if not note:
            return problems, note
        inexact[as_numpy] = problems, note
    if inexact:  # where NumPy functions take tensors, they do it with warnings
        return inexact[True in inexact][0], inexact[numpy if numpy in inexact else not numpy][1]
    foreign = numpy and "must be Tensor, not" in str(failures[True])  # a torch function has met an array
    raise failures[numpy and not foreign]


def _started(
    base: Problems, x: Tensor, jac: Any, limits: tuple[Tensor, Tensor], differentiated: bool
) -> tuple[Problems, str]:  # fmt: skip
    """With the number of residuals, the Jacobian, and a note where that is not exact."""
    f, i = base[torch.tensor([0], device=x.device)].first(x[:1], differentiated), 0
    if f.shape[-1] == 0:
        raise ValueError("fun returned no residuals")
    base = replace(base, m=f.shape[-1])
    if base.batched and not bool(f.isfinite().all()):
        i = int(base.raw(x).isfinite().all(-1).int().argmax())  # the first one that is finite
    problems, J, note = _with_jacobian(base, x, jac, limits, i)
    return problems if base.batched else replace(problems, origin=(x, f, J)), note


def _with_jacobian(
    base: Problems, x: Tensor, jac: Any, limits: tuple[Tensor, Tensor], i: int
) -> tuple[Problems, Tensor, str]:  # fmt: skip
    """With its Jacobian, that of problem i, and a note where it is not exact."""
    call, which, xi = base.fun, torch.tensor([i], device=x.device), x[i : i + 1]
    assert isinstance(call, UserFunction)
    lower, upper = (limit[i] for limit in limits)
    if callable(jac):

        def given(x: Tensor, *args: Any) -> Any:
            J = jac(call.own(x), *args, **call.kwargs)
            if J is None:
                raise TypeError("jac returned None: it must return the Jacobian, residuals × parameters")
            return tensor(J).to(x.device, x.dtype)

        problems = replace(base, jac=given)
        J = problems[which].jacobian(xi)
        # Second derivatives are those of fun where torch finds the first ones.
        own = _attempt(replace(base[which], jac=jacfwd(call)), xi) if base.exact else None
        exact = isinstance(own, Tensor) and bool((own - J).norm() <= 1e-3 * J.norm())
        return replace(problems, exact=exact), J, ""
    reason = "fun works on NumPy arrays, of which torch knows no derivative"
    if jac == "auto" and not call.numpy:
        whole = (jacfwd, jacrev) if x.shape[-1] <= REVERSE * base.m else (jacrev, jacfwd)  # the cheapest first
        for way in (*whole, rows):
            problems = replace(base, jac=way(call), loop=base.loop or way is rows, exact=way is not rows)
            one = problems[which]
            found = _attempt(one, xi)
            if isinstance(found, Exception):
                reason = f"torch cannot differentiate fun: {_first_line(found)}"
                continue
            if not bool(found.isfinite().all()) or agrees(one, xi[0], found[0], lower, upper):
                return problems, found, ""
            reason = "the derivative that torch finds is not that of fun; something in it is detached or not torch"
            break
    points, args = 2 if jac == "2-point" else 3, base.own(i)
    relative = steps(lambda x: call(x, *args).clone(), xi[0], lower, upper, points)
    problems = replace(base, jac=differences(call, relative, points), loop=True, exact=False, limits=limits)
    note = f"The Jacobian is by {points}-point differences" + (f": {reason}." if jac == "auto" else ".")
    return problems, problems[which].jacobian(xi), note


def _attempt(problems: Problems, x: Tensor) -> Tensor | Exception:
    """The Jacobian, or why there is none: no such derivative, in-place code, data-dependent branches."""
    try:
        return problems.jacobian(x)
    except Exception as error:  # any that torch, or fun on its kind of tensor, may raise
        unless_interrupted(error)
        return error


def _to_tensor(a: Any, x: Tensor) -> Any:
    """An array as a tensor where x is, real numbers in its precision."""
    if not isinstance(a, Tensor):
        if not (hasattr(a, "shape") and hasattr(a, "dtype")) or a.dtype.kind not in "fiub":
            return a
        a = tensor(a)
    return a.to(x) if a.is_floating_point() else a.to(x.device)


def rows(fun: Function) -> Function:
    """One backward pass per residual, for functions that torch.func cannot take."""

    def jac(x: Tensor, *args: Any) -> Tensor:
        J: Tensor = torch.autograd.functional.jacobian(lambda z: fun(z, *args), x)
        return J

    return jac


def differences(fun: Function, relative: Tensor, points: int) -> Function:
    """2- or 3-point differences that stay within the bounds; `relative` is the size of the steps, see `steps`."""

    def jac(x: Tensor, lower: Tensor, upper: Tensor, *args: Any) -> Tensor:
        f: Callable[[Tensor], Tensor] = lambda x: fun(x, *args).clone()  # noqa: E731
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


def agrees(problem: Problems, x: Tensor, J: Tensor, lower: Tensor, upper: Tensor) -> bool:
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
    problem: Problems, x: Tensor, here: Tensor, J: Tensor, v: Tensor, lower: Tensor, upper: Tensor
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
