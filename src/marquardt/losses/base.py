"""Losses: the outputs that a loss is taken of; value, gradient and curvature root of a loss, side by side; and the
elementwise losses.

z, y    outputs of the model (N, …) and targets; w sample weights (N,), or None for 1
value   Σᵢ wᵢ ℓᵢ: a sum, so that batches add up; f = factor · value / normaliser
S, u    SSᵀ = ∂²ℓ/∂z² and Su = ∂ℓ/∂z of each group of outputs that ℓ couples:
        N samples, P groups per sample, C outputs per group, r columns
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from itertools import accumulate
from numbers import Real
from typing import Any, ClassVar, NamedTuple, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from ..deferred import ask_here, current

Name: TypeAlias = Any  # a string, an integer for a position, or a tuple of them

# The name of the output of a model that returns one tensor.
ALONE = "output"


def named(raw: Any) -> dict[Name, Any]:
    """The outputs by key, field or attribute; those of a tuple or list by position."""
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
    """The names of the outputs, with the shapes of tensors, for error messages."""
    found = named(raw)
    parts = [f"{k!r} {tuple(t.shape) if isinstance(t, Tensor) else type(t).__name__}" for k, t in found.items()]
    return f"a {type(raw).__name__} of {', '.join(parts) or 'nothing'}"


def can_have_loss(t: Any) -> bool:
    """A tensor of floating-point numbers can; a single number, such as a loss computed by the model, cannot."""
    return isinstance(t, Tensor) and t.is_floating_point() and t.ndim > 0


def taken(raw: Any, count: int = 1) -> Tensor:
    """z of a single loss: the tensor that the model returns, its `logits`, or the only floating-point tensor in what it
    returns. If the loss takes several outputs, z is all of them in their order, flattened and put side by side; outputs
    of a dict have names but no order, and are refused."""
    if isinstance(raw, Tensor) and raw.ndim:
        return raw
    found = named(raw)
    logits = found.get("logits")
    if count == 1 and isinstance(logits, Tensor) and logits.ndim:
        return logits
    z = [t for t in tree_leaves(list(found.values())) if can_have_loss(t)]  # nested or not
    choice = [k for k, t in found.items() if can_have_loss(t)]
    if len(z) == count:
        if count > 1 and len(choice) > 1 and not isinstance(raw, (tuple, list)):
            orders = " or ".join(f"loss={{({', '.join(map(repr, names))}): loss}}" for names in (choice, choice[::-1]))
            raise ValueError(
                f"the model returned {shown(raw)}, and the loss takes {count} outputs in an order that their names do "
                f"not tell (a mean comes before its variance): say it, {orders}"
            )
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
    """Outputs (N, *shape) as one tensor (N, K)"""
    if len({(t.shape[:1], t.device) for t in parts}) != 1 or not all(t.is_floating_point() for t in parts):
        kinds = ", ".join(dict.fromkeys(f"{t.dtype} on {t.device}" for t in parts))
        raise ValueError(
            f"the model returned {shown(raw)}, {kinds}: outputs that have a loss need floating-point numbers with the "
            "samples first, as many in each, on one device; residuals of several sets of points are one output, joined "
            "by torch.cat, and a number that is the same for all samples is expanded to one for each"
        )
    return torch.cat([t.reshape(len(t), -1) for t in parts], 1)


def picked(raw: Any, name: Name) -> Any:
    """One output by its name, or several by a tuple of names; positions in a named tuple count as names."""
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
    """Which outputs have a loss, and the shape of each for one sample: side by side they are z (N, K).

    >>> raw = {"mean": torch.zeros(5, 2), "scale": torch.ones(5)}
    >>> layout = mq.losses.OutputLayout.of(raw)  # all floating-point tensors that the model returns, none within others
    >>> z = layout.joined(raw)  # (N, K)
    >>> z.shape, layout.structure(z).scale.shape  # and back to what the model returned
    (torch.Size([5, 3]), torch.Size([5]))

    Args:
        names: of the outputs.
        shapes: of each, for one sample.
        length: the length of a tuple or list; 0 if the model returns a tensor, None if outputs have names.
    """

    names: tuple[Name, ...]
    shapes: tuple[tuple[int, ...], ...]
    length: int | None = None

    @classmethod
    def of(cls, raw: Any) -> OutputLayout:
        found = {k: t for k, t in named(raw).items() if can_have_loss(t)}
        if not found:
            raise TypeError(f"the model returned {shown(raw)}: there is no floating-point tensor with a row per sample")
        positions = isinstance(raw, (tuple, list)) and not hasattr(raw, "_asdict")
        return cls.like(found, 0 if isinstance(raw, Tensor) else len(raw) if positions else None)

    @classmethod
    def like(cls, found: Mapping[Name, Tensor], length: int | None = None) -> OutputLayout:
        """The layout of all these tensors."""
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
        """z (N, K) as tensors (N, *shape) by name"""
        parts = zip(self.columns.items(), self.shapes, strict=True)
        return {k: z[:, some].reshape(len(z), *shape) for (k, some), shape in parts}

    def structure(self, z: Tensor) -> Any:
        """A tensor if the model returns a tensor; a tuple for a tuple or list, with None for outputs that are left out;
        otherwise, since outputs have names, a dict whose keys are attributes as well."""
        found = self.split(z)
        if self.length is None:
            return Outputs(found)
        return found[ALONE] if self.length == 0 else tuple(found.get(i) for i in range(self.length))


# --- The base class: value, gradient and curvature root side by side, in the symbols of the docstring of this file.


Target: TypeAlias = Any  # a tensor; None is allowed for Residual

WEIGHTS = "sample weights must be finite and not negative"
NON_FINITE = "the targets are non-finite; drop or repair such samples"


class Root(NamedTuple):
    """SSᵀ = ∂²value/∂z² and Su + v = ∂value/∂z, group by group.

    Attributes:
        S: the root of the curvature, (N, P, C, r).
        u: (N, P, r).
        v: the part of the gradient that is not Su, (N, P, C); None means 0.

    >>> S, u, v = mq.losses.SquaredError().root(model(x), y)
    >>> S.shape, u.shape
    (torch.Size([64, 1, 1, 1]), torch.Size([64, 1, 1]))
    """

    S: Tensor  # (N, P, C, r)
    u: Tensor  # (N, P, r)
    v: Tensor | None = None  # (N, P, C); None means 0


class Fault(NamedTuple):
    """A condition on the data that must hold nowhere, and advice to the user if it does.

    Attributes:
        bad: where the condition holds, shaped like `data`.
        data: the numbers that are checked.
        name: the name of the data, for the message.
        advice: the way out.

    >>> t = torch.tensor([1.0, -2.0])
    >>> print(mq.losses.Fault(t < 0, t, "targets", "sizes are positive"))
    targets[1] is -2: sizes are positive
    """

    bad: Tensor  # where the condition holds, shaped like `data`
    data: Tensor
    name: str
    advice: str

    def __str__(self) -> str:
        index = [int(i) for i in self.bad.nonzero()[0]]  # the first place where the condition holds
        value = self.data[tuple(index)].item()
        return f"{self.name}{index or ''} is {value:{'g' if isinstance(value, float) else ''}}: {self.advice}"


class Domain(NamedTuple):
    """The targets for which a loss is defined."""

    outside: Callable[[Tensor], Tensor]  # where targets are not in it
    words: str


COUNTS = Domain(lambda y: y < 0, "targets that are not negative")
POSITIVE = Domain(lambda y: ~(y > 0), "positive targets")
FRACTIONS = Domain(lambda y: (y < 0) | (y > 1), "targets in [0, 1]")
SIGNS = Domain(lambda y: y.abs() != 1, "targets −1 and 1: 2y − 1 of 0 and 1")


def weighted(t: Tensor, weight: Tensor | None) -> Tensor:
    """wᵢ tᵢ for t (N, …)."""
    return t if weight is None else t * weight.reshape(-1, *[1] * (t.ndim - 1))


def part(item: Any, index: Tensor, N: int, dtype: torch.dtype | None = None) -> Any:
    """Some of the N samples, in another precision if given; items without a row per sample stay whole."""

    def take(t: Any) -> Any:
        if not isinstance(t, Tensor):
            return t
        t = t[index.to(t.device)] if t.ndim and len(t) == N else t
        return t.to(dtype) if dtype is not None and t.is_floating_point() else t

    return tree_map(take, item)


def alone(*items: Any) -> Iterator[Any]:
    """The items of each sample by itself; the first of them has a row per sample."""
    N = len(items[0])
    return (part(items, i, N) for i in torch.arange(N, device=items[0].device)[:, None])


def noise(z: Tensor, seed: int) -> Tensor:
    """The same random numbers on every device and in every precision, like z."""
    return torch.randn(z.shape, generator=torch.Generator("cpu").manual_seed(seed), dtype=torch.float64).to(z)


@dataclass(frozen=True, kw_only=True, eq=False)
class Loss(ABC):
    """f = factor · Σᵢ wᵢ ℓ(zᵢ, yᵢ) / normaliser with reduction="mean", factor · Σᵢ wᵢ ℓ(zᵢ, yᵢ) with "sum".

    A loss defines ℓ (`ell`), ∂ℓ/∂z (`slope`) and the factors S, u of its curvature (`factors`). It may also define how
    outputs are grouped, what targets are allowed, and the empirical rows; weights and normalisation are the same for
    all losses.

    On the first step a user's loss is compared with its `ell` on a few samples: `slope` with ∂ℓ/∂z, Su with `slope`,
    SSᵀ with ∂²ℓ/∂z². If SSᵀ is above ∂²ℓ/∂z² on purpose, as for a loss that is not convex, the class sets `majorises =
    True`; if SSᵀ is the mean of ∂²ℓ/∂z² over the targets that the outputs predict, it sets `fisher = True`, and SSᵀ is
    not compared. A loss that is a sum of squared residuals sets `sum_of_squares = True`, by which `presets.paper`
    chooses its parts. A loss of several outputs, such as a mean and a variance, sets their number, `outputs_taken = 2`:
    z (N, K) has them flattened and side by side. A loss that is −log p(y|z), up to a constant, names p, such as
    `likelihood = "categorical"`, see uncertainty/expansion.py; `mq.posterior` requires it.

    Args:
        reduction: "mean", as in torch, or "sum".
        factor: a factor of the whole loss.
        reported: the same loss in the units in which it is reported, if they are different.

    >>> loss = mq.losses.SquaredError(reduction="sum", factor=0.5)
    >>> opt = mq.LM(model, loss)
    """

    majorises: ClassVar[bool] = False
    fisher: ClassVar[bool] = False
    automatic: ClassVar[bool] = False  # its derivatives come from autograd, which therefore cannot check them
    recordable: ClassVar[bool] = True  # it never reads values from the device, so that a step can be a CUDA graph
    sum_of_squares: ClassVar[bool] = False
    outputs_taken: ClassVar[int] = 1
    surveys: ClassVar[bool] = False
    likelihood: ClassVar[str | None] = None
    positive_options: ClassVar[tuple[str, ...]] = ()  # options that are positive numbers, beside the factor
    weight_options: ClassVar[tuple[str, ...]] = ()  # options that are weights of outputs or classes, or None
    target_domain: ClassVar[Domain | None] = None  # of the targets; None if every number is one
    reduction: str = "mean"
    factor: float = 1.0
    reported: Loss | None = None  # the same loss in the units in which it is reported, if they are different

    def __post_init__(self) -> None:
        if self.reduction not in ("mean", "sum"):
            raise ValueError(f'reduction must be "mean" or "sum" (one number to minimise), got {self.reduction!r}')
        for name in ("factor", *self.positive_options):
            check_positive(getattr(self, name), name)
        for name in self.weight_options:
            check_weights(getattr(self, name), name)

    def __eq__(self, other: object) -> bool:
        if type(self) is not type(other):
            return NotImplemented
        mine, theirs = ([getattr(loss, f.name) for f in fields(self) if f.compare] for loss in (self, other))
        return all(
            torch.equal(a, b) if isinstance(a, Tensor) and isinstance(b, Tensor) else a is b or a == b
            for a, b in zip(mine, theirs, strict=True)
        )

    def __hash__(self) -> int:
        return hash((type(self), self.reduction, self.factor))

    @property
    def display_name(self) -> str:
        return type(self).__name__

    @property
    def curvature_kind(self) -> str:
        """The kind of SSᵀ: "hessian" is ∂²ℓ/∂z², "fisher" its mean over predicted targets, "majoriser" a matrix above
        it."""
        return "fisher" if self.fisher else "majoriser" if self.majorises else "hessian"

    # Required of a loss, for weight 1.
    @abstractmethod
    def ell(self, z: Tensor, y: Tensor) -> Tensor:
        """ℓ, one entry per group, with the samples first."""

    @abstractmethod
    def slope(self, z: Tensor, y: Tensor) -> Tensor:
        """∂ℓ/∂z, like z."""

    @abstractmethod
    def factors(self, z: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        """S (N, P, C, r) and u (N, P, r) with SSᵀ = ∂²ℓ/∂z² and Su = ∂ℓ/∂z."""

    # Optional: by default all outputs of a sample are one group, and targets have the shape of the outputs.
    def empirical_factors(self, z: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        """S and u with the gradients of log-likelihood terms as columns of S: here one per group, S = ∂ℓ/∂z."""
        g = self.group(self.slope(z, y))
        return g[..., None], torch.ones_like(g[..., :1])

    def group(self, t: Tensor, z: Tensor | None = None) -> Tensor:
        """t (…, *z.shape) → (…, N, P, C); without z, t has no leading dimensions."""
        z = t if z is None else z
        return t.reshape(*t.shape[: t.ndim - z.ndim], z.shape[0], 1, math.prod(z.shape[1:]))

    def ungroup(self, t: Tensor, z: Tensor) -> Tensor:
        """t (…, N, P, C) → (…, *z.shape): the inverse of `group`."""
        return t.reshape(*t.shape[:-3], *z.shape)

    def faults(self, z: Tensor, y: Target) -> list[Fault]:
        """Raises an error for targets of the wrong shape or dtype; the faults are conditions on their values."""
        name = type(self).__name__
        if y is None:
            raise TypeError(
                f'{name} needs targets, got None: opt.step(inputs, targets), or the loss "residual" if the model '
                "returns residuals"
            )
        if isinstance(y, Tensor) and not y.dtype.is_floating_point:
            raise TypeError(
                f"targets are {y.dtype}: {name} needs floating-point targets, "
                f'targets.to({z.dtype}); for class labels use the loss "cross_entropy"'
            )
        check_like(y, z, "targets")
        if y.shape != z.shape:
            way_out = "give the targets the shape of the outputs"
            if (*y.shape, 1) == z.shape:
                way_out = "use targets.unsqueeze(-1), or outputs.squeeze(-1) in the model"
            elif (*z.shape, 1) == y.shape:
                way_out = "use targets.squeeze(-1)"
            elif [d for d in z.shape if d != 1] == [d for d in y.shape if d != 1]:
                way_out = f"use targets.reshape({tuple(z.shape)})"
            raise ValueError(
                f"outputs have shape {tuple(z.shape)}, targets {tuple(y.shape)}: "
                f"broadcasting would pair the wrong elements; {way_out}"
            )
        for option in self.weight_options:
            check_broadcasts(getattr(self, option), z, option)
        found = [Fault(~y.isfinite(), y, "targets", NON_FINITE)]
        if self.target_domain is not None:
            found.append(Fault(self.target_domain.outside(y), y, "targets", f"{name} needs {self.target_domain.words}"))
        return found

    # The outputs of the model.
    def bound(self, raw: Any, y: Target, weight: Tensor | None = None, sums: Tensor | None = None) -> Loss:
        """The loss for outputs of this form, if the form adds information to z and y; it is valid for any number of
        samples."""
        return self

    def joined(self, raw: Any) -> Tensor:
        """z, the outputs that the loss is taken of."""
        return taken(raw, self.outputs_taken)

    def sums(self, z: Tensor, y: Target, weight: Tensor | None = None) -> Tensor:
        """If the loss `surveys`: numbers from all data that `bound` needs, which add up over batches, (k,)."""
        raise NotImplementedError(f"{self.display_name} says `surveys`, and has no `sums`")

    # Called by the optimizer.
    def value(self, z: Tensor, y: Target, weight: Tensor | None = None) -> Tensor:
        """Σᵢ wᵢ ℓᵢ."""
        ell = self.ell(z, y)
        return ell.sum() if weight is None else weighted(ell, weight).sum()

    def gradient(self, z: Tensor, y: Target, weight: Tensor | None = None) -> Tensor:
        """∂value/∂z, like z."""
        slope = self.slope(z, y)
        return slope if weight is None else weighted(slope, weight)

    def root(self, z: Tensor, y: Target, weight: Tensor | None = None) -> Root:
        """√w S and √w u: SSᵀ = ∂²value/∂z², Su = ∂value/∂z."""
        root_w = None if weight is None else weight.sqrt()
        S, u = self._shaped("factors", self.factors(z, y), z.shape[0])
        return Root(S, u) if root_w is None else Root(weighted(S, root_w), weighted(u, root_w))

    def mixed(self, z: Tensor, y: Target, weight: Tensor | None, signs: Callable[[tuple[int, ...]], Tensor]) -> Tensor:
        """Sε for random signs ε (k, N, P, r), drawn in the shape (N, P, r): (k, N, P, C)"""
        S = self.root(z, y, weight).S
        return torch.einsum("npcr,knpr->knpc", S, signs((*S.shape[:2], S.shape[3])))

    def count(self, z: Tensor, y: Target, weight: Tensor | None = None) -> int:
        """The number of columns of S of one sample, over all its groups; z and y are those of one sample."""
        S = self.root(z, y, weight).S
        return S.shape[1] * S.shape[3]

    def empirical(self, z: Tensor, y: Target, weight: Tensor | None = None) -> Root:
        """The gradients of the samples as rows: S = √w ∂ℓ/∂z, u = √w, so that SSᵀ = w ∇ℓ∇ℓᵀ and Su = ∂value/∂z."""
        root_w = None if weight is None else weight.sqrt()
        S, u = self._shaped("empirical_factors", self.empirical_factors(z, y), z.shape[0])
        return Root(S, u) if root_w is None else Root(weighted(S, root_w), weighted(u, root_w))

    def _shaped(self, method: str, found: Any, N: int) -> tuple[Tensor, Tensor]:
        """S and u as returned by a user's loss, after a check of their shapes"""
        name = f"{type(self).__name__}.{method}"
        if not (isinstance(found, tuple) and len(found) == 2 and found[0].__class__ is found[1].__class__ is Tensor):
            raise TypeError(
                f"{name} returned {type(found).__name__}: it returns two tensors, S (N, P, C, r) and u (N, P, r)"
            )
        S, u = found
        if S.ndim != 4 or u.ndim != 3 or S.shape[0] != N or u.shape != (*S.shape[:2], S.shape[3]):
            shapes = tuple(S.shape), tuple(u.shape)
            raise ValueError(
                f"{name}: S has the shape {shapes[0]} and u {shapes[1]}, expected ({N}, P, C, r) and ({N}, P, r)"
            )
        return S, u

    def normaliser(self, z: Tensor, y: Target, weight: Tensor | None = None) -> Tensor:
        """The divisor of torch's mean: P · Σw."""
        groups = self.group(z[:1]).shape[-2]
        return z.new_full((), groups * z.shape[0]) if weight is None else groups * weight.sum()

    def totals(
        self, z: Tensor, y: Target, weight: Tensor | None = None
    ) -> tuple[Tensor, Tensor | float, Tensor | float]:
        """Value, normaliser and lower bound; as plain numbers those that do not depend on the data."""
        kind, value = type(self), self.value(z, y, weight)
        plain = weight is None and kind.normaliser is Loss.normaliser
        normaliser = float(math.prod(self.group(z).shape[:2])) if plain else self.normaliser(z, y, weight)
        return value, normaliser, 0.0 if kind.lower_bound is Loss.lower_bound else self.lower_bound(z, y, weight)

    def scale(self, normaliser: float) -> float:
        """f / value."""
        return self.factor / normaliser if self.reduction == "mean" else self.factor

    def report(self, f: float, normaliser: float) -> float:
        """f in the units of `reported`."""
        if self.reported is None:
            return f
        return f * self.reported.scale(normaliser) / self.scale(normaliser)

    def lower_bound(self, z: Tensor, y: Target, weight: Tensor | None = None) -> Tensor:
        """A number that is never above value, whatever z; −∞ if there is none."""
        return z.new_zeros(())

    def check(self, z: Tensor, y: Target, weight: Tensor | None = None, *, part: bool = False) -> None:
        """Raises ValueError or TypeError, with the way out, if the loss is undefined for these arguments.

        With `part`, a batch whose total weight is 0 is allowed.
        """
        if not isinstance(z, Tensor):
            raise TypeError(f"the model must return one tensor, got {type(z).__name__}: wrap it so that it does")
        if z.dtype not in (torch.float32, torch.float64):
            raise TypeError(
                f"outputs are {z.dtype}: the model must return torch.float32 or torch.float64 (in autocast: .float())"
            )
        if z.ndim == 0:
            raise ValueError("outputs have shape (): the first dimension must be the samples, as in (N, …)")
        if z.numel() == 0:
            raise ValueError(f"the batch is empty: outputs have shape {tuple(z.shape)}; leave such batches out")
        faults = self.faults(z, y)
        if weight is not None:
            check_weight(weight, z)
            bad = ~(weight >= 0) | weight.isinf()
            faults.insert(0, Fault(bad, weight, "weight", WEIGHTS))  # first: sums of such weights are faults as well
        if not part:
            total = self.normaliser(z, y, weight)
            nothing = "every target has weight 0 or is ignored (ignore_index), leave this batch out"
            faults.append(Fault(~(total > 0), total, "the total weight of the batch", nothing))
        if not faults:
            return
        bad = faults[0].bad.any() if len(faults) == 1 else torch.stack([fault.bad.any() for fault in faults]).any()
        if bool(bad) if current.tape is None else not ask_here(~bad):
            raise ValueError(str(next(fault for fault in faults if fault.bad.any())))


def spread(loss: Loss, root: Root, z: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
    """One row for each column of S in each group, zero outside its group: (R, N, *out), (R, N), v (N, *out)"""
    S, u, v = root
    N, P, C, r = S.shape
    rest = None if v is None else loss.ungroup(v, z)
    if P == r == 1:
        return loss.ungroup(S[None, ..., 0], z), u.view(1, N), rest
    if P == 1:
        E = S.permute(3, 0, 1, 2)  # (r, N, 1, C)
    else:
        E = S.new_zeros(P, r, N, P, C)
        E.diagonal(dim1=0, dim2=3).copy_(S.permute(3, 0, 2, 1))  # (r, N, C, P)
        E = E.flatten(0, 1)  # (R, N, P, C)
    return loss.ungroup(E, z), u.permute(1, 2, 0).reshape(P * r, N), rest


def check_like(t: Any, z: Tensor, name: str) -> None:
    """Checks that t is a tensor with the dtype and device of the outputs."""
    if t.__class__ is not Tensor and not isinstance(t, Tensor):
        raise TypeError(
            f"{name} must be a tensor, got {type(t).__name__}: use torch.as_tensor({name}, dtype={z.dtype})"
        )
    if t.dtype != z.dtype:
        raise TypeError(f"{name}: dtype {t.dtype}, but the outputs are {z.dtype}: use {name}.to({z.dtype})")
    if t.device != z.device:
        same_device(t, z, name)


def mistyped(t: Any, needs: str, way_out: str = "") -> TypeError:
    """The error for data of another kind than the loss needs."""
    return TypeError(f"{needs}, got {t.dtype if isinstance(t, Tensor) else type(t).__name__}{way_out}")


def check_weight(weight: Any, z: Tensor) -> None:
    check_like(weight, z, "weight")
    if weight.shape != z.shape[:1]:
        shape, way_out = tuple(weight.shape), "; use weight.flatten()" if weight.numel() == len(z) else ""
        raise ValueError(f"weight has shape {shape}: one weight per sample is needed, {tuple(z.shape[:1])}{way_out}")


def same_device(t: Tensor, z: Tensor, name: str) -> None:
    if t.device != z.device:
        raise ValueError(f"{name} on {t.device}, but the outputs are on {z.device}: use {name}.to({str(z.device)!r})")


def check_weights(t: Any, name: str) -> None:
    """Checks an option of a loss: None, or a floating-point tensor, finite, not negative and not all zero."""
    if t is None:
        return
    if not isinstance(t, Tensor) or not t.is_floating_point():
        raise TypeError(f"{name} must be a floating-point tensor, got {t!r}")
    if t.numel() == 0 or not bool(t.isfinite().all() & (t >= 0).all() & (t > 0).any()):
        raise ValueError(f"{name} must be finite, not negative and not all zero, got {t.tolist()}")


def check_broadcasts(t: Tensor | None, z: Tensor, name: str) -> None:
    """Checks that t broadcasts to the outputs of one sample: weights of samples are given to the step."""
    given, shape = () if t is None else tuple(t.shape), (1, *z.shape[1:])
    if len(given) > len(shape) or any(i not in (1, j) for i, j in zip(given[::-1], shape[::-1], strict=False)):
        raise ValueError(f"{name} of shape {given} does not broadcast to the outputs of one sample, {shape}")


def check_number(value: Any, name: str) -> None:
    """Checks an option of a loss."""
    if not (isinstance(value, Real) or (isinstance(value, Tensor) and value.ndim == 0)):
        raise TypeError(f"{name} must be a number, got {value!r}")


def check_positive(value: Any, name: str) -> None:
    check_number(value, name)
    if not 0 < value < math.inf:
        raise ValueError(f"{name} must be positive and finite, got {value!r}")


# --- Losses of separate outputs: squared error, Huber, binary cross-entropy, Poisson.


@dataclass(frozen=True, kw_only=True, eq=False)
class Elementwise(Loss):
    """ℓ(zₒ, yₒ) of each output separately: P = outputs per sample, C = r = 1.

    S = s = √ℓ″ and u = ℓ′/s. Empirical rows are also per output: S = ℓ′, u = 1.

    A user's loss defines three functions, which are compared with each other on the first step:

    >>> @dataclass(frozen=True, kw_only=True, eq=False)
    ... class LogCosh(mq.losses.Elementwise):
    ...     def ell(self, z, y):
    ...         return torch.logaddexp(z - y, y - z) - 0.6931471805599453
    ...
    ...     def slope(self, z, y):
    ...         return (z - y).tanh()
    ...
    ...     def s(self, z, y):
    ...         return 1 / (z - y).cosh()
    >>> step = mq.LM(model, LogCosh()).step(x, y)
    """

    @abstractmethod
    def s(self, z: Tensor, y: Tensor) -> Tensor:
        """√ℓ″, or with `majorises` the root of something larger, like z."""

    def factors(self, z: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        # s·(ℓ′/s) is the gradient for any s > 0; thanks to the floor also where ℓ″ underflows and ℓ′ does not
        s = self.s(z, y).clamp(min=torch.finfo(z.dtype).eps)
        return self.group(s)[..., None], self.group(self.slope(z, y) / s)

    def group(self, t: Tensor, z: Tensor | None = None) -> Tensor:
        if z is None:
            return t.reshape(t.shape[0], -1, 1)
        return t.reshape(*t.shape[: t.ndim - z.ndim], z.shape[0], math.prod(z.shape[1:]), 1)


@dataclass(frozen=True, kw_only=True, eq=False)
class SquaredError(Elementwise):
    """ℓ = (z − y)²,  ℓ′ = 2(z − y),  s = √2:  `nn.MSELoss`.

    >>> opt = mq.LM(model, mq.losses.SquaredError())  # or "mse"
    """

    sum_of_squares: ClassVar[bool] = True
    likelihood: ClassVar[str | None] = "normal"

    def error(self, z: Tensor, y: Tensor) -> Tensor:
        return z - y

    def ell(self, z: Tensor, y: Tensor) -> Tensor:
        return self.error(z, y).square()

    def slope(self, z: Tensor, y: Tensor) -> Tensor:
        return 2 * self.error(z, y)

    def s(self, z: Tensor, y: Tensor) -> Tensor:
        return torch.full_like(z, math.sqrt(2))

    def factors(self, z: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        # s is a constant: ℓ′/s takes no division
        return self.group(self.s(z, y)).unsqueeze(-1), self.group(math.sqrt(2) * self.error(z, y))


@dataclass(frozen=True, kw_only=True, eq=False)
class Residual(SquaredError):
    """ℓ = z²: the squared error of residuals that the model itself returns; targets are ignored.

    >>> opt = mq.LM(model, mq.losses.Residual())  # or "residual"
    >>> step = opt.step(x)
    """

    def error(self, z: Tensor, y: Tensor) -> Tensor:
        return z

    def faults(self, z: Tensor, y: Target) -> list[Fault]:
        return []


@dataclass(frozen=True, eq=False)
class Huber(Elementwise):
    """With e = z − y:  ℓ = ½e² if |e| ≤ δ else δ(|e| − ½δ),  ℓ′ = min(1, δ/|e|) e,  s = √min(1, δ/|e|).

    Beyond δ the curvature is 0 although the gradient is not: s is the root of the curvature of the quadratic that
    touches ℓ at e and lies above it everywhere, so that Su = ℓ′ holds on both sides.

    Args:
        delta: δ, the largest error that is squared.

    >>> opt = mq.LM(model, mq.losses.Huber(delta=0.5))  # or "huber"
    """

    majorises: ClassVar[bool] = True
    positive_options: ClassVar[tuple[str, ...]] = ("delta",)
    delta: float = 1.0

    def ell(self, z: Tensor, y: Tensor) -> Tensor:
        return F.huber_loss(z, y, reduction="none", delta=self.delta)

    def slope(self, z: Tensor, y: Tensor) -> Tensor:
        return (z - y).clamp(-self.delta, self.delta)

    def s(self, z: Tensor, y: Tensor) -> Tensor:
        return (self.delta / (z - y).abs().clamp(min=self.delta)).sqrt()


@dataclass(frozen=True, kw_only=True, eq=False)
class BinaryCrossEntropy(Elementwise):
    """On logits, σ = sigmoid(z), a = pos_weight, b = output_weight:  ℓ = b(−a y log σ − (1 − y) log(1 − σ)),
    ℓ′ = b((1 − y)σ − a y(1 − σ)),  s = √(b(a y + 1 − y) σ(1 − σ)):  `nn.BCEWithLogitsLoss`.

    Args:
        pos_weight: a, for targets of 1; broadcasts against the outputs of a sample.
        output_weight: b, one per output; broadcasts likewise.

    >>> opt = mq.LM(model, mq.losses.BinaryCrossEntropy())  # or "bce"
    >>> step = opt.step(x, (y > 0).float())
    """

    likelihood: ClassVar[str | None] = "bernoulli"
    weight_options: ClassVar[tuple[str, ...]] = ("pos_weight", "output_weight")
    target_domain: ClassVar[Domain | None] = FRACTIONS
    pos_weight: Tensor | None = None  # broadcasts against one sample's outputs
    output_weight: Tensor | None = None  # broadcasts likewise

    def ell(self, z: Tensor, y: Tensor) -> Tensor:
        return F.binary_cross_entropy_with_logits(z, y, self.b(z), pos_weight=self.a(z), reduction="none")

    def slope(self, z: Tensor, y: Tensor) -> Tensor:
        # 1 − σ(z) = σ(−z), without cancellation
        return self.b(z) * ((1 - y) * z.sigmoid() - self.a(z) * y * (-z).sigmoid())

    def s(self, z: Tensor, y: Tensor) -> Tensor:
        return (self.b(z) * (self.a(z) * y + 1 - y) * z.sigmoid() * (-z).sigmoid()).sqrt()

    def a(self, z: Tensor) -> Tensor:
        return z.new_ones(()) if self.pos_weight is None else self.pos_weight.to(z)

    def b(self, z: Tensor) -> Tensor:
        return z.new_ones(()) if self.output_weight is None else self.output_weight.to(z)


@dataclass(frozen=True, kw_only=True, eq=False)
class Poisson(Elementwise):
    """Counts y with log-rate z:  ℓ = e^z − y z,  ℓ′ = e^z − y,  s = e^{z/2}:  `nn.PoissonNLLLoss`.

    >>> opt = mq.LM(model, mq.losses.Poisson())  # or "poisson"
    >>> step = opt.step(x, y.abs().round())
    """

    likelihood: ClassVar[str | None] = "poisson"
    target_domain: ClassVar[Domain | None] = COUNTS

    def ell(self, z: Tensor, y: Tensor) -> Tensor:
        return z.exp() - y * z

    def slope(self, z: Tensor, y: Tensor) -> Tensor:
        return z.exp() - y

    def s(self, z: Tensor, y: Tensor) -> Tensor:
        return (z / 2).exp()

    def lower_bound(self, z: Tensor, y: Target, weight: Tensor | None = None) -> Tensor:
        """Σ w (y − y log y): the saturated model, z = log y."""
        return weighted(y - torch.xlogy(y, y), weight).sum()
