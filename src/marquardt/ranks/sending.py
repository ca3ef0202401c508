"""An object as it is sent to other ranks: its tensors by themselves, everything else pickled around them."""

from __future__ import annotations

import io
import pickle
from collections.abc import Sequence
from typing import Any

from torch import Tensor


def packed(item: Any, shared: Sequence[Tensor]) -> tuple[bytes, list[Tensor]]:
    """What is left of an object without its tensors, and these. Tensors that are `shared` all ranks have: of them only
    the place is sent."""
    tensors: list[Tensor] = []
    places = {id(t): i for i, t in enumerate(shared)}
    numbers: dict[int, int] = {}  # of tensors that occur more than once

    class Pickler(pickle.Pickler):
        def persistent_id(self, part: Any) -> tuple[str, int] | None:
            if not isinstance(part, Tensor):
                return None
            if id(part) in places:
                return "shared", places[id(part)]
            if id(part) not in numbers:
                numbers[id(part)] = len(tensors)
                tensors.append(part)
            return "sent", numbers[id(part)]

    file = io.BytesIO()
    Pickler(file).dump(item)
    return file.getvalue(), tensors


def unpacked(data: bytes, tensors: Sequence[Tensor], shared: Sequence[Tensor]) -> Any:
    class Unpickler(pickle.Unpickler):
        def persistent_load(self, place: tuple[str, int]) -> Tensor:
            kind, number = place
            return shared[number] if kind == "shared" else tensors[number]

    return Unpickler(io.BytesIO(data)).load()
