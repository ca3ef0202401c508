"""Rows of J̃ layer by layer, from a layer's input a and the gradients δ at its output."""

from .blocks import Block, Explicit, Nothing
from .capture import RULES, Call, Misfit, Operand, Watch, assemble
from .graph import rows_by_loop, rows_by_vmap, rows_in_batches, rows_in_parts
from .shortcuts import Line

__all__ = [
    "RULES",
    "Block",
    "Call",
    "Explicit",
    "Line",
    "Misfit",
    "Nothing",
    "Operand",
    "Watch",
    "assemble",
    "rows_by_loop",
    "rows_by_vmap",
    "rows_in_batches",
    "rows_in_parts",
]
