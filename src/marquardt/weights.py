"""The weights of weight decay as a diagonal matrix: a number for every parameter, or one for each of its elements."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import reduce

import torch
from torch import Tensor


class Weights:
    """diag w. Parameter i has the number cᵢ, times its `elements` eᵢ if it has some: flat, and not all equal."""

    def __init__(
        self, numbers: Sequence[float] = (), elements: Mapping[int, Tensor] | None = None, gaps: bool = False
    ) -> None:
        self.numbers = tuple(numbers)
        self.elements = dict(elements or {})  # by number of the parameter, at least 0: (size,)
        self.gaps = gaps  # whether one of these is 0

    @property
    def shape(self) -> object:
        """All but the elements themselves, which may be other ones in the next step."""
        return self.numbers, tuple(self.elements), self.gaps

    @property
    def any(self) -> bool:
        """Whether anything decays."""
        return any(self.numbers)

    @property
    def everywhere(self) -> bool:
        """Whether everything decays."""
        return all(self.numbers) and not self.gaps

    @property
    def number(self) -> float | None:
        """The one number that all have, if there is one"""
        return self.numbers[0] if len(set(self.numbers)) == 1 and not self.elements else None

    def __getitem__(self, i: int) -> float | Tensor:
        """Of one parameter: a number, or (size,)"""
        return self.numbers[i] * self.elements[i] if i in self.elements else self.numbers[i]

    def __iter__(self) -> Iterator[float | Tensor]:
        return map(self.__getitem__, range(len(self)))

    def __len__(self) -> int:
        return len(self.numbers)

    def __str__(self) -> str:
        each = [
            f"{c * float(self.elements[i].min()):.3g} to {c * float(self.elements[i].max()):.3g} by element"
            if i in self.elements
            else str(c)
            for i, c in enumerate(self.numbers)
        ]
        return ", ".join(dict.fromkeys(each))

    def scaled(self, c: float) -> Weights:
        return Weights([c * x for x in self.numbers], self.elements, self.gaps)

    def of(self, members: Sequence[int]) -> Weights:
        """Those of some parameters, by number"""
        elements = {k: self.elements[i] for k, i in enumerate(members) if i in self.elements}
        return Weights([self.numbers[i] for i in members], elements, self.gaps)

    def flat(self, sizes: Sequence[int], like: Tensor) -> Tensor:
        """All of them, as another tensor is: (n,)"""
        found = like.new_empty(sum(sizes))
        for i, part in enumerate(found.split(list(sizes))):
            part[...] = self[i]
        return found

    def multiply(self, parts: Sequence[Tensor]) -> None:
        """x ← w·x for every parameter, flat"""
        for i, part in enumerate(parts):
            part.mul_(self[i])

    def squares(self, parts: Sequence[Tensor]) -> Tensor:
        """Σwx² of all parameters, each in its shape: () in float64"""
        each = [
            x.double() * self.elements[i].double().sqrt().view_as(x) if i in self.elements else x
            for i, x in enumerate(parts)
        ]
        squares = torch._foreach_pow(torch._foreach_norm(each, 2, torch.float64), 2)
        return torch.stack(torch._foreach_mul(squares, list(self.numbers))).sum()

    # As columns of the matrix (G, O, I) that a parameter is in its layer, with G groups of O rows.

    @property
    def most(self) -> float | Tensor:
        """The largest: a number, or ()"""
        plain = max((c for i, c in enumerate(self.numbers) if i not in self.elements), default=0.0)
        largest = [self.numbers[i] * e.amax() for i, e in self.elements.items()]
        return reduce(torch.maximum, largest).clamp(min=plain) if largest else plain

    def shares(self, G: int, O: int) -> list[float | Tensor]:
        """What the largest of every column has of `most`, by parameter: a number, or (G, 1, I)"""
        if not self.any:
            return [0.0] * len(self)
        most = self.most
        return [
            c * self._columns(i, G, O) / most if i in self.elements else c / most for i, c in enumerate(self.numbers)
        ]

    def by_columns(self, members: Sequence[int], G: int, O: int) -> Weights:
        """What lies above: every element of some parameters has the largest of its column."""
        changed = {
            i: self._columns(i, G, O).expand(G, O, -1).flatten() for i in members if i in self.elements
        }  # fmt: skip
        return Weights(self.numbers, self.elements | changed, self.gaps)

    def _columns(self, i: int, G: int, O: int) -> Tensor:
        """The largest element of every column: (G, 1, I)"""
        return self.elements[i].view(G, O, -1).amax(1, keepdim=True)
