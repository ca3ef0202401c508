"""Tensors, NumPy arrays and plain numbers, the ways between them, and tensors that torch differentiates or maps."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch._C import _functorch
from torch.autograd import forward_ad

from ..surroundings import unless_interrupted

try:
    torch.empty(0).numpy()
    HAS_NUMPY = True
except RuntimeError:  # torch makes no arrays: NumPy is no dependency
    HAS_NUMPY = False


def tensor(value: Any) -> Tensor:
    """Without a gradient; plain numbers in float64, where torch would take its default."""
    if isinstance(value, Tensor):
        return value.detach()
    if hasattr(value, "__array__"):  # torch takes neither foreign byte orders nor negative strides
        value = value.__array__()
        value = value.astype("f8" if value.dtype == "O" else value.dtype.newbyteorder("="), order="C")
        return torch.as_tensor(value)
    return torch.as_tensor(value, dtype=torch.complex128 if _complex(value) else torch.float64)


def _complex(value: Any) -> bool:
    return isinstance(value, complex) or (isinstance(value, (list, tuple)) and any(map(_complex, value)))


def floating(name: str, data: Any) -> Tensor:
    """Real numbers in float64; `name` is that of the argument in errors."""
    try:
        t = gathered(data)
    except (TypeError, ValueError, RuntimeError, OverflowError) as error:
        raise TypeError(f"{name} must hold real numbers, not {kind(data)}") from error
    if t.is_complex():
        raise TypeError(f"{name} is complex: fit real and imaginary parts as one real vector")
    return t.to(torch.float64)


def kind(data: Any) -> str:
    """What somebody gave instead of numbers, in words."""
    name, dtype = type(data).__name__, str(getattr(data, "dtype", ""))
    if "datetime" in dtype or "timedelta" in dtype:
        return f"a {name} of {dtype}: pass the time since the first in seconds or days"
    if callable(data):
        return "a function"
    if isinstance(data, (list, tuple)):
        if len({len(part) for part in data if hasattr(part, "__len__") and not isinstance(part, str)}) > 1:
            return f"a {name} of rows of different length"
        odd = [part for part in leaves(data, (list, tuple)) if part is None or isinstance(part, (str, bytes, dict))]
        return f"a {name} with {odd[0]!r}" if odd else f"a {name}"
    return f"{data!r}" if data is None or isinstance(data, str) else f"a {name}{f' of {dtype}' if dtype else ''}"


def leaves(data: Any, nested: tuple[type, ...]) -> Iterator[Any]:
    """What is no number in lists of lists, or in whatever else is `nested`."""
    if not isinstance(data, nested):
        yield data
        return
    parts: Any = data.values() if isinstance(data, dict) else data
    for part in parts:
        if not isinstance(part, (int, float)):
            yield from leaves(part, nested)


def gathered(data: Any) -> Tensor:
    """A tensor of arrays, or of lists of such."""
    if isinstance(data, (list, tuple)) and any(getattr(part, "ndim", 0) for part in data):
        return torch.stack([gathered(part) for part in data])
    return tensor(data)


def array(data: Any) -> Any:
    """A tensor as an array; anything else as it is."""
    return data.detach().cpu().numpy() if isinstance(data, Tensor) else data


def like(data: Any, p: Any) -> Any:
    """A tensor as it is if p is one, too, and as an array if not; anything else as it is."""
    return data if isinstance(p, Tensor) else array(data)


def returned(name: str, value: Any, x: Any, wanted: str) -> Tensor:
    """What a user's function has returned for x: of tensors a tensor, or a list that holds some."""
    if value is None:
        raise TypeError(f"{name} returned None: it must return {wanted}")
    if isinstance(value, (list, tuple)) and any(isinstance(part, Tensor) for part in value):
        device = getattr(x, "device", None)
        return torch.stack([torch.as_tensor(part, dtype=torch.float64, device=device) for part in value])
    if isinstance(x, Tensor) and not isinstance(value, Tensor):
        raise TypeError(f"{name} returned {type(value).__name__} for tensors: it must return a tensor, {wanted}")
    return value if isinstance(value, Tensor) else floating(f"what {name} returns", value)


# A fit has no derivative: where one would be lost, it is refused.

WAY_OUT = (
    "Detach it (.detach()), or call it under torch.no_grad(), if that derivative is not wanted; if it is, write it as "
    "that of the minimum: docs/least_squares.md, the derivative of a fit"
)


class DerivativeLost(ValueError):
    """The derivative of a fit is asked for, and would be zero."""


def refuse(way_out: str = WAY_OUT, /, **given: Any) -> None:
    """An error for the arguments, alone or in lists, of which a derivative would be lost without a word."""
    for name, value in given.items():
        for part in leaves(value, (list, tuple, dict)):
            if isinstance(part, Tensor):
                refuse_tracked(name, part, way_out)


def refuse_tracked(name: str, t: Tensor, way_out: str = WAY_OUT, before: int | None = None) -> None:
    """The same for one tensor, or for residuals of fun, called with x alone, which has brought something into them.

    `before` is then the number of autograd's last node before the call. What was computed earlier, and a leaf that is
    no parameter of a module, come from outside. The weights of a network inside fun are constants of the fit.
    """
    lost = f"and the result of a fit has no derivative: it would be lost. {way_out}"
    if torch.is_grad_enabled() and t.requires_grad and (before is None or _from_outside(t, before)):
        raise DerivativeLost(f"{name} requires grad, {lost}")
    if forward_ad.unpack_dual(t).tangent is not None:
        raise DerivativeLost(f"{name} carries a tangent of forward-mode AD, {lost}")
    while _functorch.is_functorch_wrapped_tensor(t):
        if _functorch.is_batchedtensor(t):
            raise DerivativeLost(f"{name} is mapped by torch.func.vmap: pass all problems in one call, batched=True")
        t = _functorch.get_unwrapped(t)


def refuse_unreadable(error: Exception) -> None:
    """The same where an array was to be made of what torch.func differentiates or maps, if that is the error."""
    if "Cannot access data pointer" in str(error) and _functorch.get_dynamic_layer_stack_depth():
        raise DerivativeLost(
            "an array is made of a tensor inside a torch.func transform, and the result of a fit has no derivative: it "
            "would be lost. Call it outside of the transform, or pass tensors (x0 or p0 too), write the function with "
            "torch and detach what it uses (.detach()), if that derivative is not wanted; if it is, write it as that "
            "of the minimum: docs/least_squares.md, the derivative of a fit"
        ) from error


def readable(t: Tensor) -> Any:
    """It as an array, or this error: torch.func may wrap what is made inside of it."""
    try:
        return array(t)
    except RuntimeError as error:
        refuse_unreadable(error)
        raise


def unless_refused(error: Exception) -> None:
    """Raises what is no reason to try a function in another way: interrupts, and derivatives that would be lost."""
    unless_interrupted(error)
    refuse_unreadable(error)
    if isinstance(error, DerivativeLost):
        raise error


def last_node() -> int:
    with torch.enable_grad():
        return int(torch.zeros((), requires_grad=True).clone().grad_fn._sequence_nr())  # type: ignore[union-attr]


def _from_outside(f: Tensor, before: int) -> bool:
    """Whether a tensor depends on a node of autograd up to `before`, or on a leaf that is no parameter of a module."""
    seen, going = set(), [f.grad_fn]
    while going:
        node: Any = going.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        leaf = getattr(node, "variable", None)
        if node._sequence_nr() <= before if leaf is None else not isinstance(leaf, torch.nn.Parameter):
            return True
        going += [following for following, _ in node.next_functions]
    return False
