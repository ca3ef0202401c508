"""What a model returns: the outputs by name, and some of them as one tensor."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from itertools import accumulate
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

Name: TypeAlias = Any  # a string, an integer for a position, or a tuple of them

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
    returns. If the loss takes several outputs, all of them in their order, flattened and side by side: those of a dict
    have names and no order."""
    if raw.__class__ is Tensor and raw.ndim:
        return raw
    if isinstance(raw, Tensor) and raw.ndim:
        return raw
    found = named(raw)
    logits = found.get("logits")
    if count == 1 and isinstance(logits, Tensor) and logits.ndim:
        return logits
    z = floating(raw)
    choice = [k for k, t in found.items() if isinstance(t, Tensor) and t.is_floating_point() and t.ndim]
    if len(z) == count and count > 1 and len(choice) > 1 and not isinstance(raw, (tuple, list)):
        orders = " or ".join(f"loss={{({', '.join(map(repr, names))}): …}}" for names in (choice, choice[::-1]))
        raise ValueError(
            f"the model returned {shown(raw)}, and the loss takes {count} outputs in an order that their names do not "
            f"tell (a mean comes before its variance): say it, {orders}"
        )
    if len(z) == count:
        return z[0] if count == 1 else side_by_side(z, raw)
    if isinstance(raw, Tensor):
        raise TypeError("the model returned a 0-dimensional tensor: it must return outputs with a row per sample")
    example = ", ".join(f"{k!r}: {loss}" for k, loss in zip(choice, ('"mse"', '("huber", 0.1)'), strict=False))
    way_out = f"name the outputs that have a loss, such as loss={{{example}}}" if choice else "wrap it in one that does"
    several = "it is taken of one tensor" if count == 1 else f"it takes {count} of them"
    raise TypeError(
        f"the model returned {shown(raw)}, and the loss cannot tell which of them is meant ({several}): {way_out}"
    )


def side_by_side(parts: Sequence[Tensor], raw: Any) -> Tensor:
    """(N, *shape) each → (N, K)"""
    if len({(t.shape[:1], t.device) for t in parts}) != 1 or not all(t.is_floating_point() for t in parts):
        kinds = ", ".join(dict.fromkeys(f"{t.dtype} on {t.device}" for t in parts))
        raise ValueError(
            f"the model returned {shown(raw)}, {kinds}: outputs that have a loss need floating-point numbers with the "
            "samples first, as many in each, on one device; residuals of several sets of points are one output, joined "
            "by torch.cat, and a number that is the same for all samples is expanded to one for each"
        )
    return torch.cat([t.reshape(len(t), -1) for t in parts], 1)


def picked(raw: Any, name: Name) -> Any:
    """One output by its name, or several by a tuple of names; positions in a named tuple are names too."""
    if isinstance(name, tuple):
        return tuple(picked(raw, one) for one in name)
    found = dict(enumerate(raw)) if isinstance(raw, tuple) and isinstance(name, int) else named(raw)
    if name not in found:
        raise ValueError(f"the model returned {shown(raw)}: there is no output {name!r} for the loss that names it")
    return found[name]


class Outputs(dict[Name, Tensor]):
    """Some outputs of a model by name, as keys and as attributes."""

    def __getattr__(self, name: str) -> Tensor:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(
                f"there is no output {name!r}, only {', '.join(map(repr, self))}: a function is given the tensors of "
                "floating-point numbers with a row per sample, and none that are nested in others"
            ) from None


@dataclass(frozen=True)
class OutputLayout:
    """Which outputs are taken, and the shape of each for one sample: side by side they are z (N, K).

    >>> raw = {"mean": torch.zeros(5, 2), "scale": torch.ones(5)}
    >>> layout = mq.losses.OutputLayout.of(raw)  # all floating-point tensors that the model returns, none within others
    >>> z = layout.joined(raw)  # (N, K)
    >>> z.shape, layout.structure(z).scale.shape  # and back to what the model returned
    (torch.Size([5, 3]), torch.Size([5]))

    Args:
        names: of the outputs.
        shapes: of each, for one sample.
        length: of a tuple or list; 0 if the model returns a tensor, None if it returns names.
    """

    names: tuple[Name, ...]
    shapes: tuple[tuple[int, ...], ...]  # of one sample
    length: int | None = None  # of a tuple or list; 0 if the model returns a tensor, None if it returns names

    @classmethod
    def of(cls, raw: Any) -> OutputLayout:
        found = {k: t for k, t in named(raw).items() if isinstance(t, Tensor) and t.is_floating_point() and t.ndim}
        if not found:
            raise TypeError(f"the model returned {shown(raw)}: there is no floating-point tensor with a row per sample")
        positions = isinstance(raw, (tuple, list)) and not hasattr(raw, "_asdict")
        return cls.like(found, 0 if isinstance(raw, Tensor) else len(raw) if positions else None)

    @classmethod
    def like(cls, found: Mapping[Name, Tensor], length: int | None = None) -> OutputLayout:
        """Of all these tensors."""
        return cls(tuple(found), tuple(tuple(t.shape[1:]) for t in found.values()), length)

    @property
    def columns(self) -> dict[Name, slice]:
        """The place of each output in z."""
        ends = list(accumulate((math.prod(shape) for shape in self.shapes), initial=0))
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
        """A tensor if the model returns one; a tuple for a tuple or list, with None in the place of what is not taken;
        for everything that has names a dict whose keys are attributes too."""
        found = self.split(z)
        if self.length is None:
            return Outputs(found)
        return found[ALONE] if self.length == 0 else tuple(found.get(i) for i in range(self.length))
