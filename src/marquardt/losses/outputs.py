"""What a model returns: the outputs by name, and some of them as one tensor."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

Name: TypeAlias = str | int

# The name of the only output of a model that returns a tensor.
ALONE = "output"


def named(raw: Any) -> dict[Name, Any]:
    """By key, field or attribute; those of a tuple or list by position."""
    if isinstance(raw, Tensor):
        return {ALONE: raw}
    if isinstance(raw, Mapping):
        return dict(raw)
    if isinstance(raw, tuple) and hasattr(raw, "_asdict"):
        return dict(raw._asdict())
    if isinstance(raw, (tuple, list)):
        return dict(enumerate(raw))
    if is_dataclass(raw):
        return {f.name: getattr(raw, f.name) for f in fields(raw)}
    return dict(getattr(raw, "__dict__", {}))


def shown(raw: Any) -> str:
    """The names, with the shapes of tensors, for errors."""
    found = named(raw)
    parts = [f"{k!r} {tuple(t.shape) if isinstance(t, Tensor) else type(t).__name__}" for k, t in found.items()]
    return f"a {type(raw).__name__} of {', '.join(parts) or 'nothing'}"


def floating(raw: Any) -> list[Tensor]:
    """All that a loss can be taken of, nested or not; a single number, such as a loss of the model's own, is not."""
    leaves = tree_leaves(list(named(raw).values()))
    return [t for t in leaves if isinstance(t, Tensor) and t.is_floating_point() and t.ndim]


def taken(raw: Any, count: int = 1) -> Tensor:
    """z of a single loss: the tensor that the model returns, its `logits`, or the only floating-point tensor in what it
    returns. If the loss takes several outputs, all of them, flattened and side by side."""
    if isinstance(raw, Tensor) and raw.ndim:
        return raw
    found = named(raw)
    logits = found.get("logits")
    if count == 1 and isinstance(logits, Tensor) and logits.ndim:
        return logits
    z = floating(raw)
    if len(z) == count:
        return z[0] if count == 1 else side_by_side(z, raw)
    if isinstance(raw, Tensor):
        raise TypeError("the model returned a 0-dimensional tensor: it must return outputs with a row per sample")
    choice = [k for k, t in found.items() if isinstance(t, Tensor) and t.is_floating_point() and t.ndim]
    example = ", ".join(f"{k!r}: {loss}" for k, loss in zip(choice, ('"mse"', '("huber", 0.1)'), strict=False))
    way_out = f"name the outputs that have a loss, such as loss={{{example}}}" if choice else "wrap it in one that does"
    several = "it is taken of one tensor" if count == 1 else f"it takes {count} of them"
    raise TypeError(
        f"the model returned {shown(raw)}, and the loss cannot tell which of them is meant ({several}): {way_out}"
    )


def side_by_side(parts: Sequence[Tensor], raw: Any) -> Tensor:
    """(N, *shape) each → (N, K)"""
    alike = {(len(t), t.dtype, t.device) for t in parts if t.ndim}
    if len(alike) != 1 or not all(t.ndim for t in parts):
        dtypes = ", ".join(dict.fromkeys(f"{t.dtype} on {t.device}" for t in parts))
        raise ValueError(
            f"the model returned {shown(raw)}, {dtypes}: outputs that have a loss need the samples first, as many in "
            "each, in one dtype on one device"
        )
    return torch.cat([t.reshape(len(t), -1) for t in parts], 1)


@dataclass(frozen=True)
class OutputLayout:
    """Which outputs are taken and what the shape of each is for one sample: side by side they are z (N, K).

    >>> layout = OutputLayout.of(raw)                # all floating-point tensors, or those that are named
    >>> z = layout.joined(raw)                 # (N, K)
    >>> layout.structure(z)                    # a tuple or dict of (N, *shape); the tensor if the model returns one
    """

    names: tuple[Name, ...]
    shapes: tuple[tuple[int, ...], ...]  # of one sample
    alone: bool = False  # the model returns a tensor

    @classmethod
    def of(cls, raw: Any, names: Sequence[Name] | None = None) -> OutputLayout:
        found = named(raw)
        if names is None:
            names = [k for k, t in found.items() if isinstance(t, Tensor) and t.is_floating_point() and t.ndim]
        missing = [k for k in names if not isinstance(found.get(k), Tensor)]
        if missing or not names:
            wanted = ", ".join(map(repr, missing)) or "a floating-point tensor"
            raise ValueError(
                f"the model returned {shown(raw)}: there is no tensor {wanted}; the losses are for "
                f"{', '.join(map(repr, names))}"
            )
        return cls(tuple(names), tuple(tuple(found[k].shape[1:]) for k in names), isinstance(raw, Tensor))

    @property
    def columns(self) -> dict[Name, slice]:
        """The place of each output in z."""
        ends = [0]
        for shape in self.shapes:
            ends.append(ends[-1] + math.prod(shape))
        return {k: slice(*ends[i : i + 2]) for i, k in enumerate(self.names)}

    def joined(self, raw: Any) -> Tensor:
        """z: (N, K)"""
        found = named(raw)
        return side_by_side([found[k] for k in self.names], raw)

    def split(self, z: Tensor) -> dict[Name, Tensor]:
        """(N, K) → (N, *shape) by name"""
        parts = zip(self.columns.items(), self.shapes, strict=True)
        return {k: z[:, some].reshape(len(z), *shape) for (k, some), shape in parts}

    def structure(self, z: Tensor) -> Any:
        """What the model returned, as far as it is taken: a tensor, a tuple, or a dict."""
        found = self.split(z)
        if self.alone:
            return found[ALONE]
        return tuple(found.values()) if all(isinstance(k, int) for k in found) else found
