"""How figures look: the colours of page and text, and one style of line for each method."""

from __future__ import annotations

from typing import Any, NamedTuple

from .vocabulary import ADDED, REMOVED

INK, PAPER = "#1c2126", "#ffffff"
DARK_INK, DARK_PAPER = "#e4e8ec", "#15191d"  # in their place on a dark page
POINTS = "#8d959e"
RC = {
    "axes.edgecolor": INK,
    "axes.grid": True,
    "axes.labelcolor": INK,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "axes.titlecolor": INK,
    "axes.titlesize": 13,
    "font.size": 13,
    "grid.alpha": 0.2,
    "grid.color": INK,
    "legend.frameon": False,
    "svg.hashsalt": "marquardt",  # the same logs give the same bytes
    "text.color": INK,
    "xtick.color": INK,
    "ytick.color": INK,
}


class Style(NamedTuple):
    color: str
    dashes: Any = "-"
    width: float = 1.8


# Okabe and Ito's colours, safe for the colour-blind; two methods of one colour differ in their dashes.
BLUE, SKY, GREEN, ORANGE, RED, PURPLE = "#0072b2", "#56b4e9", "#009e73", "#e69f00", "#d55e00", "#cc79a7"
LONG = (0, (8, 2))
STYLES = {
    "lm": Style(RED, width=2.8),
    "lm-paper": Style(BLUE, width=2.8),
    "lm-code": Style(BLUE, ":"),
    "lm-vanilla": Style(SKY, "--"),
    "gauss-newton": Style(SKY, ":"),
    "newton": Style(INK, ":"),
    "bfgs": Style(INK, "--"),
    "lbfgs": Style(INK),
    "hessian-free": Style(PURPLE),
    "kfac": Style(GREEN),
    "sgd": Style(ORANGE, "-."),
    "adam": Style(ORANGE),
    "psgd": Style(GREEN, "--"),
    "tlm": Style(PURPLE, "--"),
}
PART_STYLES = (Style(PURPLE, "--"), Style(ORANGE, LONG), Style(GREEN, "-."), Style(INK, ":"), Style(RED, "--"))
STYLES |= dict(zip(REMOVED, (Style(BLUE, width=2.8), *PART_STYLES, Style(INK, ":")), strict=True))
STYLES |= dict(zip(ADDED, (Style(SKY, width=2.8), *PART_STYLES), strict=True))
