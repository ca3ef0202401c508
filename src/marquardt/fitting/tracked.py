"""Tensors that torch differentiates or maps: a fit has no derivative, and says so where one would be lost."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch._C import _functorch
from torch.autograd import forward_ad

WAY_OUT = (
    "Detach it (.detach()), or call it under torch.no_grad(), if that derivative is not wanted; if it is, write it as "
    "that of the minimum: docs/least_squares.md, the derivative of a fit"
)


class DerivativeLost(ValueError):
    """Somebody wants the derivative of a fit, and would get zeros."""


def refuse(way_out: str = WAY_OUT, /, **given: Any) -> None:
    """An error for the arguments, alone or in lists, of which a derivative would be lost without a word."""
    for name, value in given.items():
        for t in _tensors(value):
            _check(name, t, _requires_grad(t), way_out)


def refuse_captured(f: Any, before: int) -> None:
    """The same for what fun, called with x alone, has brought into its residuals f.

    `before` is the number of autograd's last node before the call. What was computed earlier, and a leaf that is no
    parameter of a module, come from outside. The weights of a network inside fun are constants of the fit.
    """
    if isinstance(f, Tensor):
        _check("a tensor that fun uses", f, _requires_grad(f) and _from_outside(f, before), WAY_OUT)


def refuse_unreadable(error: Exception) -> None:
    """The same where an array was to be made of what torch.func differentiates or maps, if that is the error."""
    if isinstance(error, RuntimeError) and "Cannot access data pointer" in str(error) and in_transform():
        raise DerivativeLost(
            "an array is made of a tensor inside a torch.func transform, and the result of a fit has no derivative: it "
            "would be lost. Call it outside of the transform, or pass tensors (x0 or p0 too), write the function with "
            "torch and detach what it uses (.detach()), if that derivative is not wanted; if it is, write it as that "
            "of the minimum: docs/least_squares.md, the derivative of a fit"
        ) from error


def readable(t: Tensor) -> Any:
    """It as an array, or this error: torch.func may wrap what is made inside of it."""
    try:
        return t.cpu().numpy()
    except RuntimeError as error:
        refuse_unreadable(error)
        raise


def in_transform() -> bool:
    """Whether this is called by a function that torch.func differentiates or maps."""
    return bool(_functorch.get_dynamic_layer_stack_depth())


def _check(name: str, t: Tensor, differentiated: bool, way_out: str) -> None:
    lost = f"and the result of a fit has no derivative: it would be lost. {way_out}"
    if differentiated:
        raise DerivativeLost(f"{name} requires grad, {lost}")
    if forward_ad.unpack_dual(t).tangent is not None:
        raise DerivativeLost(f"{name} carries a tangent of forward-mode AD, {lost}")
    if _mapped(t):
        raise DerivativeLost(f"{name} is mapped by torch.func.vmap: pass all problems in one call, batched=True")


def _requires_grad(t: Tensor) -> bool:
    return torch.is_grad_enabled() and t.requires_grad


def last_node() -> int:
    with torch.enable_grad():
        return int(torch.zeros((), requires_grad=True).clone().grad_fn._sequence_nr())  # type: ignore[union-attr]


def _mapped(t: Tensor) -> bool:
    """Whether torch.func.vmap gives it a dimension that is out of sight."""
    while _functorch.is_functorch_wrapped_tensor(t):
        if _functorch.is_batchedtensor(t):
            return True
        t = _functorch.get_unwrapped(t)
    return False


def _from_outside(f: Tensor, before: int) -> bool:
    seen, going = set(), [f.grad_fn]
    while going:
        node: Any = going.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        leaf = getattr(node, "variable", None)
        if leaf is None and node._sequence_nr() <= before:
            return True
        if leaf is not None and not isinstance(leaf, torch.nn.Parameter):
            return True
        going += [following for following, _ in node.next_functions]
    return False


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict):
        yield from _tensors(list(value.values()))
    elif isinstance(value, (list, tuple)):
        for part in value:
            if not isinstance(part, (int, float)):
                yield from _tensors(part)
