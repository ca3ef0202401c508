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
from . import derivatives, tracked
from .arrays import floating, tensor
from .derivatives import Function


class NoSecondDerivative(RuntimeError):
    """torch cannot differentiate fun twice."""


@dataclass(frozen=True)
class Problems:
    """f: (B, n) → (B, m) and J: (B, n) → (B, m, n), with weights.

    `fun` and `jac` take one x of shape (n,) and `args`; the arguments in `cut` have a leading dimension of problems.
    """

    fun: Function
    jac: Function
    args: tuple[Any, ...]
    cut: tuple[int | None, ...]  # 0 or None for each of args, as torch.func.vmap has it
    batched: bool
    like: Tensor  # dtype and device
    m: int
    weight: Tensor | None = None  # √w, (m,) or (B, m)
    loop: bool = False  # one problem after the other: NumPy, or what vmap cannot take
    exact: bool = True  # torch can differentiate fun, and as far as one can tell twice
    box: tuple[Tensor, ...] = ()  # the bounds, (B, n) each, where jac needs them: differences stay inside
    seen: tuple[Tensor, ...] = ()  # x, f and J of a single problem, without weights: from looking how to call it

    def __getitem__(self, index: Tensor) -> Problems:
        """The problems `index` alone."""
        if not self.batched:
            return self
        args = tuple(a if d is None else a[_like(index, a)] for a, d in zip(self.args, self.cut, strict=True))
        weight = self.weight[index] if self.weight is not None and self.weight.ndim == 2 else self.weight
        return replace(self, args=args, weight=weight, box=tuple(b[index] for b in self.box))

    def raw(self, x: Tensor) -> Tensor:
        """The residuals as the function returns them: (B, m)."""
        f = self._each(self.fun, x)
        if f.shape != (len(x), self.m):
            raise ValueError(
                f"fun returned {f.shape[-1]} residuals, where it returned {self.m} at x0: keep their number"
            )
        return f

    def residuals(self, x: Tensor) -> Tensor:
        f = self.raw(x)
        return f if self.weight is None else f * self.weight

    def jacobian(self, x: Tensor) -> Tensor:
        J = self._each(self.jac, x, *self.box)
        if J.shape != (len(x), self.m, x.shape[-1]):
            raise ValueError(
                f"jac returned shape {tuple(J.shape[1:])}: it must be {(self.m, x.shape[-1])}, residuals × parameters"
            )
        return J if self.weight is None else J * self.weight.unsqueeze(-1)

    def at_start(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """f and J where a search starts; at its x0 those of a single problem are known."""
        if len(self.seen) < 3 or not torch.equal(x, self.seen[0]):
            return self.residuals(x), self.jacobian(x)
        _, f, J = self.seen
        return (f, J) if self.weight is None else (f * self.weight, J * self.weight.unsqueeze(-1))

    def curvature(self, x: Tensor, f: Tensor) -> Tensor:
        """Σ fᵢ∇²fᵢ of the weighted residuals f, the part of the Hessian that Gauss-Newton leaves out: (B, n, n)."""
        f = f if self.weight is None else f * self.weight
        inner = lambda x, f, *args: self.fun(x, *args) @ f  # noqa: E731
        return self._second(jacfwd(jacrev(inner)), x, f)

    def bend(self, x: Tensor, v: Tensor) -> Tensor:
        """d²f(x + tv)/dt², the second derivative of the weighted residuals along a step: (B, m)."""

        def along(x: Tensor, v: Tensor, *args: Any) -> Tensor:
            slope = lambda y: jvp(lambda z: self.fun(z, *args), (y,), (v,))[1]  # noqa: E731
            return jvp(slope, (x,), (v,))[1]  # type: ignore[no-any-return]

        f = self._second(along, x, v)
        return f if self.weight is None else f * self.weight

    def _second(self, function: Function, *x: Tensor) -> Tensor:
        needed = "second derivatives, as for geodesic=True, need a fun that torch can differentiate twice"
        if not self.exact:
            raise NoSecondDerivative(f"{needed}: pass geodesic=False")
        try:
            return self._each(function, *x)
        except Exception as error:  # torch has many
            unless_interrupted(error)
            raise NoSecondDerivative(f"{needed}: {_first_line(error)}") from error

    def knowing(self, J: Tensor) -> Problems:
        return self if self.batched else replace(self, seen=(*self.seen, J))

    def first(self, x: Tensor, differentiated: bool) -> Tensor:
        """The residuals at the start; an error where they carry a derivative that the fit would lose.

        `differentiated`: whether the caller is in grad mode, in which alone it shows what fun has captured.
        """
        before = tracked.last_node()
        try:
            with torch.set_grad_enabled(differentiated):
                return self._each(self.fun, x, look=lambda f: tracked.refuse_captured(f, before))
        except tracked.DerivativeLost:
            raise
        except Exception as error:  # such as of a function that writes to parameters, which only takes no_grad
            unless_interrupted(error)
            return self._each(self.fun, x)

    def _each(self, function: Function, *x: Tensor, look: Callable[[Any], None] = lambda f: None) -> Tensor:
        """The function of every problem, looked at; x and what else has a leading dimension B."""
        if not self.batched:
            value = function(*(t[0] for t in x), *self.args)
            look(value)
            return self.tensor(value).unsqueeze(0)
        if not self.loop:
            value = vmap(function, in_dims=(*(0 for _ in x), *self.cut))(*x, *self.args)
            look(value)
            return tensor(value).to(self.like)
        values = []
        for i in range(len(x[0])):
            args = [a if d is None else a[i] for a, d in zip(self.args, self.cut, strict=True)]
            value = function(*(t[i] for t in x), *args)
            look(value)
            values.append(self.tensor(value))
        return torch.stack(values)

    def tensor(self, value: Any) -> Tensor:
        """A copy: the function may use its own again, which vmap refuses."""
        return tensor(value).to(self.like, copy=True)


def _first_line(error: Exception) -> str:
    return (str(error) or type(error).__name__).splitlines()[0]


def _like(index: Tensor, a: Any) -> Any:
    return index.to(a.device) if isinstance(a, Tensor) else index.cpu().numpy()


@dataclass(frozen=True)
class UserFunction:
    """How the user wants fun to be called. It gets a copy of x, which it may change; `Problems.tensor` copies f."""

    fun: Function
    kwargs: dict[str, Any]
    numpy: bool  # x as a NumPy array

    __name__ = "fun"  # torch.func asks for it, and would else print what the function holds

    def __call__(self, x: Tensor, *args: Any) -> Any:
        f = self.fun(self.own(x), *args, **self.kwargs)
        if f is None:
            raise TypeError("fun returned None: it must return the residuals, a vector")
        if isinstance(f, (list, tuple)) and any(isinstance(r, Tensor) for r in f):
            f = torch.stack([torch.as_tensor(r, dtype=x.dtype, device=x.device) for r in f])
        if not isinstance(f, Tensor):
            if not self.numpy:
                raise TypeError(f"fun returned {type(f).__name__} for a tensor: it must return a tensor of residuals")
            f = floating("what fun returns", f)
        if f.is_complex():
            raise TypeError("fun returned complex residuals: return their real and imaginary parts as one real vector")
        if f.ndim > 1:
            way = "return it flat, .reshape(-1)"
            if f.ndim == 2 and f.shape[0] == f.shape[1] > 1:
                m = f.shape[0]
                way = f"a column {(m, 1)} less a vector {(m,)} gives such a square; make both vectors"
            raise ValueError(
                f"fun returned shape {tuple(f.shape)}: the residuals of one problem must be a vector; {way}"
            )
        return f.reshape(-1).to(x.dtype)

    def own(self, x: Tensor) -> Any:
        """A copy of x, of the kind that the user's functions take."""
        return x.detach().cpu().numpy().copy() if self.numpy else x.clone()


def build(
    fun: Function, x: Tensor, jac: Any, args: tuple[Any, ...], kwargs: dict[str, Any], batched: bool,
    lower: Tensor, upper: Tensor, numpy: bool, differentiated: bool = False,
) -> tuple[Problems, str]:  # fmt: skip
    """The problems at their start x (B, n), and how their Jacobian comes about where that is worth a word.

    `differentiated`: whether the caller is in grad mode, where a derivative that the fit would lose is an error.
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
    failures: dict[bool, Exception] = {}
    inexact: dict[bool, tuple[Problems, str]] = {}
    for as_numpy in (True, False) if numpy and callable(jac) else (False, True):
        given = args if as_numpy else tuple(_to_tensor(a, x) for a in args)
        call = UserFunction(fun, kwargs if as_numpy else {k: _to_tensor(a, x) for k, a in kwargs.items()}, as_numpy)
        base = Problems(call, call, given, tuple(cut), batched, x[0], 0, loop=as_numpy, exact=not as_numpy)
        try:
            with warnings.catch_warnings():
                if not as_numpy:  # NumPy deprecates what it does with tensors
                    warnings.simplefilter("ignore", DeprecationWarning)
                base, i = _sized(base, x, differentiated)
                problems, note = _with_jacobian(base, x, jac, lower, upper, i)
        except tracked.DerivativeLost:
            raise
        except Exception as error:  # a function of NumPy arrays may raise anything on a tensor, and the reverse
            unless_interrupted(error)
            tracked.refuse_unreadable(error)
            failures[as_numpy] = error
            continue
        if not note:
            return problems, note
        inexact[as_numpy] = problems, note
    if inexact:  # where NumPy functions take tensors, they do it with warnings
        problems, _ = inexact[True in inexact]
        _, note = inexact[numpy if numpy in inexact else not numpy]
        return problems, note
    raise failures[numpy and not _foreign(failures[True])]


def _foreign(error: Exception) -> bool:
    """Whether the error says that a torch function met a NumPy array."""
    return "must be Tensor, not" in str(error)


def _only(i: int, x: Tensor) -> Tensor:
    return torch.tensor([i], device=x.device)


def _sized(base: Problems, x: Tensor, differentiated: bool) -> tuple[Problems, int]:
    """With the number of residuals, without vmap where it cannot take the function; and a problem to look at."""
    one = base[_only(0, x)]
    try:
        f = one.first(x[:1], differentiated)
    except tracked.DerivativeLost:
        raise
    except Exception as error:
        unless_interrupted(error)
        if not base.batched or base.loop:
            raise
        base = replace(base, loop=True)
        f = replace(one, loop=True).first(x[:1], differentiated)
    if f.shape[-1] == 0:
        raise ValueError("fun returned no residuals")
    base = replace(base, m=f.shape[-1], seen=() if base.batched else (x, f))
    if not base.batched or bool(f.isfinite().all()):
        return base, 0
    return base, int(base.raw(x).isfinite().all(-1).int().argmax())  # the first one that is finite


def _with_jacobian(
    base: Problems, x: Tensor, jac: Any, lower: Tensor, upper: Tensor, i: int
) -> tuple[Problems, str]:  # fmt: skip
    """With its Jacobian, tried on problem i, and a note where that is not exact."""
    call, which, xi = base.fun, _only(i, x), x[i : i + 1]
    assert isinstance(call, UserFunction)
    if callable(jac):

        def given(x: Tensor, *args: Any) -> Any:
            J = jac(call.own(x), *args, **call.kwargs)
            if J is None:
                raise TypeError("jac returned None: it must return the Jacobian, residuals × parameters")
            return J if isinstance(J, Tensor) else tensor(J)

        problems = replace(base, jac=given)
        try:
            J = problems[which].jacobian(xi)
        except Exception as error:  # as in _sized
            unless_interrupted(error)
            if not base.batched or base.loop:
                raise
            problems = replace(problems, loop=True)
            J = problems[which].jacobian(xi)
        return replace(problems, exact=not call.numpy and _derived(base[which], xi, J)).knowing(J), ""
    reason = "fun works on NumPy arrays, of which torch knows no derivative"
    if jac == "auto" and not call.numpy:
        for name, way in derivatives.order(x.shape[-1], base.m):
            problems = replace(
                base, jac=way(call), loop=base.loop or (name == "rows" and base.batched), exact=name != "rows"
            )
            one = problems[which]
            try:
                J = one.jacobian(xi)
            except Exception as error:  # no such derivative, in-place code, data-dependent branches
                unless_interrupted(error)
                reason = f"torch cannot differentiate fun: {_first_line(error)}"
                continue
            if not bool(J.isfinite().all()) or derivatives.agrees(one, xi[0], J[0], lower[i], upper[i]):
                return problems.knowing(J), ""
            reason = "the derivative that torch finds is not that of fun; something in it is detached or not torch"
            break
    points = 2 if jac == "2-point" else 3
    one = base[which]
    args = tuple(a if d is None else a[0] for a, d in zip(one.args, one.cut, strict=True))
    relative = derivatives.steps(lambda x: base.tensor(call(x, *args)), xi[0], lower[i], upper[i], points)
    by_differences = derivatives.differences(call, relative, points, base.tensor)
    return (
        replace(base, jac=by_differences, loop=base.batched, exact=False, box=(lower, upper)),
        f"The Jacobian is by {jac} differences." if jac != "auto" else
        f"The Jacobian is by 3-point differences: {reason}.",
    )  # fmt: skip


def _derived(one: Problems, x: Tensor, J: Tensor) -> bool:
    """Whether torch finds the Jacobian that was given, so that second derivatives are those of fun."""
    try:
        found = replace(one, jac=derivatives.forward(one.fun)).jacobian(x)
    except Exception as error:  # any that torch, or fun on its kind of tensor, may raise
        unless_interrupted(error)
        return False
    return bool((found - J).norm() <= 1e-3 * J.norm())


def _to_tensor(a: Any, x: Tensor) -> Any:
    """An array as a tensor where x is, real numbers in its precision."""
    if not isinstance(a, Tensor):
        if not (hasattr(a, "shape") and hasattr(a, "dtype")) or a.dtype.kind not in "fiub":
            return a
        a = tensor(a)
    return a.to(x) if a.is_floating_point() else a.to(x.device)
