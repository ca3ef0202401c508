"""Rows of J̃ layer by layer, from a layer's input a and the gradients δ at its output."""

from .blocks import Block, Explicit, Nothing
from .capture import RULES, Call, Misfit, Operand, Watch, assemble
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
]
