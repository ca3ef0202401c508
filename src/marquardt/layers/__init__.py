"""Rows of J̃ layer by layer, from a layer's input a and the gradients δ at its output."""

from .block import Block, Explicit, Nothing
from .capture import Call, Capture, Misfit, Replay, assemble
from .generic import rows_by_loop, rows_by_vmap, rows_in_batches, rows_in_parts
from .line import Line
from .substituted import call_with

__all__ = [
    "Block",
    "Call",
    "Capture",
    "Explicit",
    "Line",
    "Misfit",
    "Nothing",
    "Replay",
    "assemble",
    "call_with",
    "rows_by_loop",
    "rows_by_vmap",
    "rows_in_batches",
    "rows_in_parts",
]
