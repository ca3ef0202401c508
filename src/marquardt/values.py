"""Values and texts from outside: checked before anything changes, with the entry by name, and texts (names of columns
and files, cells, messages) as they may be shown, or written as a cell of CSV.

A dataclass says in its annotations what its fields may hold:

    int      a count, from 0 on; True is none
    float    a number; NaN or infinite only if the default is
    bool, str, dict[str, float], and None beside another

What else a field may be is for its owner to check.
"""

from __future__ import annotations

import math
import re
import reprlib
import unicodedata
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, fields
from typing import Any

import torch
from torch import Tensor

# What a count may reach: beyond it floats no longer tell one from the next.
MOST = 2**53

WAY_OUT = "it is damaged, load an earlier one"


def check_fields(kind: Any, found: Any, where: str) -> None:
    """A dict that has a value for every field of a dataclass that has no default, and no others; or of these fields"""
    if not isinstance(found, dict):
        raise ValueError(f"{where} is {type(found).__name__}, not a dict: {WAY_OUT}")
    entries = kind if isinstance(kind, Mapping) else {f.name: f for f in fields(kind)}
    for name in found:
        if name not in entries:
            raise ValueError(f"{where} has an entry {name!r} that this version does not know: load it in a newer one")
    for name, entry in entries.items():
        if name in found:
            check_value(
                found[name], getattr(entry.type, "__name__", str(entry.type)), entry.default, f"{where} {name!r}"
            )
        elif entry.default is MISSING and entry.default_factory is MISSING:
            raise ValueError(f"{where} has no entry {name!r}: {WAY_OUT}")


def check_value(value: Any, annotation: str, default: Any, where: str) -> None:
    """One value; an annotation that is not known here says nothing"""
    kinds = set(annotation.split(" | "))
    if (value is None and "None" in kinds) or not kinds <= {*RULES, "None"}:
        return
    rules = [rule for kind, rule in RULES.items() if kind in kinds]
    if not any(holds(value, default) for holds, _ in rules):
        raise ValueError(f"{where} is {short(value)}: it must be {' or '.join(words for _, words in rules)}; {WAY_OUT}")


def is_count(value: Any, default: Any = None) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= MOST


def is_number(value: Any, default: Any = None) -> bool:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return False
    if isinstance(default, float) and not math.isfinite(default) and str(value) == str(default):
        return True
    return abs(value) < MAX


MAX = torch.finfo(torch.float64).max
RULES: dict[str, tuple[Callable[[Any, Any], bool], str]] = {
    "int": (is_count, "an integer of at least 0"),
    "float": (is_number, "a finite number"),
    "bool": (lambda value, _: isinstance(value, bool), "True or False"),
    "str": (lambda value, _: isinstance(value, str), "words"),
    "dict[str, float]": (
        lambda value, _: isinstance(value, dict) and all(isinstance(k, str) and is_number(v) for k, v in value.items()),
        "a dict of finite numbers",
    ),
}


def short(value: Any) -> str:
    try:
        return f"a tensor of {value.dtype}" if isinstance(value, Tensor) else reprlib.repr(value)
    except ValueError:  # Python prints no integers of more than some thousand digits
        return f"{type(value).__name__} of too many digits to be printed"


def check_tensor(
    t: Any, where: str, shape: Sequence[int | None] | None = None, dtype: torch.dtype | None = None
) -> None:
    """Real numbers, all of them finite, also in another precision; None in a shape is any length. Without a shape they
    may be integers too."""
    if not isinstance(t, Tensor):
        raise ValueError(f"{where} is {type(t).__name__}: it must be a tensor; {WAY_OUT}")
    real = t.is_floating_point() or (shape is None and t.dtype in (torch.int64, torch.int32))
    if not real or t.layout != torch.strided or t.is_meta or t.is_quantized:
        raise ValueError(
            f"{where} is of {t.dtype}, {t.layout} on {t.device}: real numbers in a dense tensor; {WAY_OUT}"
        )
    fits = shape is None or (t.ndim == len(shape) and all(b in (None, a) for a, b in zip(t.shape, shape, strict=True)))
    if not fits:
        sizes = ["any" if size is None else str(size) for size in shape or ()]
        wanted = f"({sizes[0]},)" if len(sizes) == 1 else f"({', '.join(sizes)})"
        raise ValueError(
            f"{where} has the shape {tuple(t.shape)}, and {wanted} is needed: load the state of this model"
        )
    if not bool((t if dtype is None or not t.is_floating_point() else t.to(dtype)).isfinite().all()):
        raise ValueError(f"{where} holds NaN or infinite values: load an earlier one")


def check_above(t: Tensor, where: str, least: float = 0.0, *, strictly: bool = False) -> None:
    """Of numbers that were checked before"""
    if not bool((t > least if strictly else t >= least).all()):
        words = "above" if strictly else "at least"
        raise ValueError(f"{where} holds {float(t.min()):.3g}, and all must be {words} {least:g}: {WAY_OUT}")


def check_square(M: Tensor, where: str) -> None:
    """Symmetric and positive semidefinite, up to rounding: (…, d, d)"""
    check_above(M.diagonal(dim1=-2, dim2=-1), f"{where} on its diagonal")
    M = M.double()
    size = M.diagonal(dim1=-2, dim2=-1).sum(-1, keepdim=True)
    if bool(((M - M.mT).abs() > ROUNDING * size[..., None]).any()):
        raise ValueError(f"{where} is not symmetric: {WAY_OUT}")
    raised = M + torch.diag_embed((ROUNDING * size).where(size > 0, 1).expand(M.shape[:-1]))
    if bool(torch.linalg.cholesky_ex(raised).info.any()):
        raise ValueError(f"{where} has negative eigenvalues: {WAY_OUT}")


# Of a symmetric matrix in float32 or coarser, over its trace.
ROUNDING = 1e-3


def check_keys(found: Mapping[Any, Any], known: Sequence[str], where: str) -> None:
    for key in found:
        if key not in known:
            raise ValueError(f"{where} has an entry {short(key)} that this version does not know: {WAY_OUT}")


# Texts.

LONG = 200  # characters of one value in a sentence or on a page

# Where a spreadsheet begins a cell: at the start, and behind what some of them take for a separator. What begins there
# with one of these signs is a formula to it, and numbers are none.
FORMULA = re.compile("(^|[;\t\n])(?='*[=+\\-@\t\n\N{FULLWIDTH EQUALS SIGN}\N{FULLWIDTH PLUS SIGN}"
                     "\N{FULLWIDTH HYPHEN-MINUS}\N{FULLWIDTH COMMERCIAL AT}])")  # fmt: skip
NUMBER = re.compile(r"[+-]?(\d+([.,]\d+)*|[.,]\d+)([eE][+-]?\d+)?( ?%)?|[+-]?(inf|nan)")


def visible(text: str, keep: str = "") -> str:
    r"""The text with escapes like \x1b for what does not show itself: control characters, which a terminal obeys, signs
    that turn the direction of writing, and the bytes of a file name that are no UTF-8. `keep` are left."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() or c in keep or unicodedata.category(c) == "Zs" else _escape(c) for c in text)


def _escape(c: str) -> str:
    byte = ord(c) - 0xDC00  # which Python has put there for a byte of a name
    return f"\\x{byte:02x}" if 0x80 <= byte <= 0xFF else c.encode("unicode_escape", "surrogatepass").decode()


def on_page(value: object) -> object:
    """What is written into a page: text from outside without control characters, markup as it is."""
    return visible(value, keep="\n\t") if isinstance(value, str) and not hasattr(value, "__html__") else value


def shortened(text: str, most: int = LONG) -> str:
    return text if len(text) <= most else f"{text[:most]}… ({len(text):,} characters)"


def quoted(value: object) -> str:
    """In quotes, on one line, and not too long."""
    text = str(value)
    return repr(text) if len(text) <= LONG else f"{text[:LONG]!r}… ({len(text):,} characters)"


def cell(text: str) -> str:
    """The text as a cell of CSV. A spreadsheet would run what begins with =, +, − or @: such a cell gets an apostrophe
    in front, also if it has some already, so that taking one off gives the text again. Numbers stay numbers. Control
    characters other than tabs and ends of lines are escaped."""
    text = visible(text, keep="\n\t")
    return text if NUMBER.fullmatch(text) else FORMULA.sub(r"\1'", text)
