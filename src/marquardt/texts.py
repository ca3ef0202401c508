"""Text from outside, such as names of columns and files, cells, messages: as it may be shown, and as a cell of CSV."""

from __future__ import annotations

import re
import unicodedata

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


def short(text: str, most: int = LONG) -> str:
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
