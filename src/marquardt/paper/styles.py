"""How figures look: colours for light and dark pages, and one style of line for each method."""

from __future__ import annotations

from typing import NamedTuple

from .vocabulary import ADDED, OPTIMIZERS, REMOVED

# The hues of Okabe and Ito, darker for a light page and lighter for a dark one: a contrast of at least 3 with the page,
# and apart from each other for the colour-blind too. tests/paper/test_figures.py has both as numbers.
LIGHT = {
    "ink": "#1c2126", "soft": "#59636e", "paper": "#ffffff", "line": "#d5dae0", "shade": "#f4f6f8",
    "blue": "#0068ad", "red": "#a92b00", "green": "#00916a", "purple": "#b0408a", "amber": "#b07d00",
}  # fmt: skip
DARK = {
    "ink": "#e4e8ec", "soft": "#9aa5b1", "paper": "#15191d", "line": "#333b43", "shade": "#1d2328",
    "blue": "#4a97f0", "red": "#f5713a", "green": "#35d6a0", "purple": "#ee7ec4", "amber": "#f7d774",
}  # fmt: skip
LINES = ("ink", "blue", "red", "green", "purple", "amber")  # the colours that a line may have


class Style(NamedTuple):
    color: str
    dashes: str = ""  # lengths of dashes and gaps in points, as SVG writes them
    width: float = 1.8


SOLID, DASHED, DOTTED, MIXED, LONG, TWICE = "", "6 3", "1.5 3", "7 3 1.5 3", "12 3", "7 3 1.5 3 1.5 3"
REFERENCE = "lm-paper"  # drawn in the panels of the other families too
FAMILIES = {  # the panels of a figure: no two lines in one have the same colour, nor the same dashes
    "Levenberg–Marquardt": {
        "lm": Style("red", LONG, 2.6),
        "lm-paper": Style("blue", SOLID, 2.6),
        "lm-code": Style("purple", MIXED),
        "lm-vanilla": Style("green", DASHED),
        "tlm": Style("amber", DOTTED, 2.2),
    },
    "Newton’s method and its relatives": {
        "gauss-newton": Style("red", DASHED),
        "newton": Style("green", LONG),
        "bfgs": Style("purple", TWICE),
        "lbfgs": Style("amber", MIXED),
        "hessian-free": Style("ink", DOTTED, 2.2),
    },
    "KFAC and first-order methods": {
        "kfac": Style("green", MIXED),
        "psgd": Style("purple", LONG),
        "adam": Style("amber", DASHED),
        "sgd": Style("red", DOTTED, 2.2),
    },
}
_PARTS = (Style("red", DASHED), Style("green", LONG), Style("purple", MIXED), Style("amber", DOTTED, 2.2))
_REST = Style("ink", TWICE)
FAMILIES["LM (paper) with one part changed"] = dict(
    zip(REMOVED, (Style("blue", width=2.6), *_PARTS, _REST, _PARTS[-1]), strict=True)  # uphill: removed or added
)
FAMILIES["Vanilla LM with one part added"] = dict(
    zip(ADDED, (Style("blue", width=2.6), *_PARTS, _REST), strict=True)  # the same look for the same part
)
STYLES = {method: style for family in FAMILIES.values() for method, style in family.items()}
UNKNOWN = Style("soft")  # a method that this version does not know

SHORT = {  # beside the lines
    **OPTIMIZERS,
    "lm-code": "LM (authors)",
    "tlm": "torch-LM",
    **{method: label.replace("without ", "− ").replace("with ", "+ ") for method, label in REMOVED.items()},
    **{method: label.replace("vanilla + ", "+ ") for method, label in ADDED.items()},
}
SHORT = {
    method: label.replace("max-diagonal damping", "max-diag.").replace(" acceptance", "")
    for method, label in SHORT.items()
}


def variables(colors: dict[str, str]) -> str:
    return " ".join(f"--{name}: {value};" for name, value in colors.items())


CSS = f"""
:root {{ color-scheme: light dark; {variables(LIGHT)} }}
@media (prefers-color-scheme: dark) {{ :root {{ {variables(DARK)} }} }}
svg text {{ font: 12.5px system-ui, sans-serif; fill: var(--ink); }}
svg .name {{ font-weight: 600; font-size: 13.5px; }}
svg .soft {{ fill: var(--soft); }}
svg .grid {{ stroke: var(--line); stroke-width: 1; fill: none; }}
svg .level {{ stroke: var(--ink); stroke-width: 1; stroke-dasharray: 1 3; fill: none; }}
svg .axis {{ stroke: var(--ink); stroke-width: 1; fill: none; }}
svg .curve {{ fill: none; stroke: currentColor; stroke-linejoin: round; }}
svg .band {{ fill: currentColor; fill-opacity: .13; }}
svg .lead {{ fill: none; stroke: currentColor; stroke-width: .8; }}
svg .cross {{ fill: none; stroke: currentColor; stroke-width: 2.4; }}
svg .label {{ fill: currentColor; paint-order: stroke; stroke: var(--paper); stroke-width: 3; stroke-linejoin: round; }}
svg .samples {{ fill: var(--soft); stroke: var(--soft); stroke-width: 3; opacity: .35; }}
{" ".join(f".{color} {{ color: var(--{color}); }}" for color in (*LINES, "soft"))}
"""
