"""What to do when memory runs out: the one place that knows how torch says so."""

from __future__ import annotations

import torch


class Exhausted(torch.OutOfMemoryError):
    """There is no smaller plan: what was tried last is in the message."""


def out_of_memory(error: BaseException) -> bool:
    """Whether memory ran out, on a GPU or on a CPU: that is no fault of the way that was tried."""
    words = ("out of memory", "can't allocate memory")
    return isinstance(error, torch.OutOfMemoryError) or any(w in str(error) for w in words)
