"""Text from outside: shown without control characters, and no formula in a cell."""

from __future__ import annotations

import re
import unicodedata

import pytest

from marquardt.values import cell, on_page, quoted, shortened, visible


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("plain, Zürich – 5 m²", "plain, Zürich – 5 m²"),
        ("\x1b[31mred\x07", "\\x1b[31mred\\x07"),
        ("\x9b2J\x7f", "\\x9b2J\\x7f"),
        ("a\r\nb\tc", "a\\r\\nb\\tc"),
        ("left \u202eright", "left \\u202eright"),
        ("caf\udce9", "caf\\xe9"),  # a byte of a file name
        ("\ud800", "\\ud800"),
        ("1\u00a0000\u202f0", "1\u00a0000\u202f0"),  # blanks
    ],
)
def test_what_does_not_show_itself_is_escaped(text: str, shown: str) -> None:
    assert visible(text) == shown
    assert visible(shown) == shown


def test_no_character_is_left_that_a_terminal_obeys() -> None:
    shown = visible("".join(map(chr, range(0x3000))))
    assert {unicodedata.category(c) for c in shown}.isdisjoint({"Cc", "Cf", "Cs", "Zl", "Zp"})


def test_tabs_and_lines_may_be_kept_and_markup_is_left() -> None:
    assert visible("a\n\tb\x1b", keep="\n\t") == "a\n\tb\\x1b"
    assert on_page("<b>\x1b") == "<b>\\x1b"
    assert on_page(3) == 3


def test_long_values_are_cut() -> None:
    assert shortened("abc") == "abc"
    assert shortened("x" * 1000) == "x" * 200 + "… (1,000 characters)"
    assert quoted("it's\n") == '"it\'s\\n"'
    assert len(quoted("y" * 10**6)) < 250


DANGEROUS = re.compile("(^|[;\t\n])[=+\\-@\t\n\uff1d\uff0b\uff0d\uff20]")
CELLS = (
    "=cmd|' /C calc'!A0", "@SUM(1)", "+1+cmd", "-2+3", "--1", "\t=1", "\n=1", "\uff1d1", "'=1", "''=1", "'-5", "a;=1",
    "a;b;'+1", "-", "=", "x\n@y", "-1-1", "+41 44 000", "-1;-2",
)  # fmt: skip


@pytest.mark.parametrize("text", CELLS)
def test_no_cell_begins_with_a_formula_and_one_apostrophe_less_gives_it_again(text: str) -> None:
    found = cell(text)
    assert not DANGEROUS.search(found), found
    assert re.sub("(^|[;\t\n])'(?='*[=+\\-@\t\n\uff1d\uff0b\uff0d\uff20])", r"\1", found) == text


@pytest.mark.parametrize(
    "text", ["-1", "+1", "-1.5e-3", "-1,5", "-1.234,5", "-.5", "-5 %", "-inf", "12", "", "don't", "a-b", "'t Hooft"]
)
def test_numbers_and_other_words_stay_as_they_are(text: str) -> None:
    assert cell(text) == text


def test_control_characters_of_a_cell_are_escaped() -> None:
    assert cell("a\x1b[31m\rb\tc\nd") == "a\\x1b[31m\\rb\tc\nd"
