"""What columns hold; values that do not fit are named with their rows."""

from __future__ import annotations

import pandas as pd
import pytest

from marquardt.table import kinds
from marquardt.table.reading import BadTable


def text(values):
    return pd.Series(values, dtype="str")


@pytest.mark.parametrize(
    ("values", "kind"),
    [
        (["1", "2.5", "-3e4", None], "number"),
        (["a", "b", "1"], "category"),
        (["2020-01-02", "2021-12-31T10:00"], "date"),
        (["31.12.2020", "01.02.2021"], "date"),
        (["12/31/2020", "01/02/2021"], "date"),
        (["31/12/2020", "01/02/2021"], "date"),
        ([None, None], "empty"),
        (["True", "False"], "category"),
    ],
)
def test_the_kind_of_a_column(values, kind):
    assert kinds.kind("a", pd.Series(values, dtype="str")) == kind


@pytest.mark.parametrize(
    ("bad", "words"),
    [
        ("abc", "holds numbers, but also text: 'abc' in row 3"),
        ("1,000", "holds numbers, but also text: '1,000' in row 3"),
        ("inf", "holds numbers that are not finite: 'inf' in row 3"),
        ("-1e200", "holds numbers that are too large to compute with: '-1e200' in row 3"),
    ],
)
def test_text_among_numbers_is_named_with_its_row(bad, words):
    column = text(["1", "2", bad, "4", None, "6"])
    with pytest.raises(BadTable) as error:
        kinds.kind("a", column)
    for word in (words, "--missing", "--categorical a", "--ignore a"):
        assert word in str(error.value)


def test_only_some_of_many_mistakes_are_shown():
    column = text([*map(str, range(20)), *["x"] * 9])
    with pytest.raises(BadTable, match=r"'x' in row 25 and in 4 more rows"):
        kinds.kind("a", column)


def test_text_among_dates():
    column = text(["2020-01-01", "2020-01-02", "2020-02-30"])
    with pytest.raises(BadTable, match=r"holds dates \(year-month-day\), but also others: '2020-02-30' in row 3"):
        kinds.kind("a", column)


def test_rows_keep_their_numbers_if_others_were_left_out():
    column = text(["1", "x", "3", "4"]).iloc[1:]
    with pytest.raises(BadTable, match="'x' in row 2"):
        kinds.kind("a", column)


@pytest.mark.parametrize(
    ("values", "form"),
    [
        (["2020-01-02"], "ISO8601"),
        (["2020/01/02"], "ISO8601"),
        (["02.01.2020"], "%d.%m.%Y"),
        (["01/02/2020", "01/13/2020"], "%m/%d/%Y"),
        (["01/02/2020", "13/01/2020"], "%d/%m/%Y"),
    ],
)
def test_the_format_that_reads_every_date(values, form):
    assert kinds.date_format(text(values)) == form
    assert str(kinds.dates("a", text([*values, None]), form).iloc[0].date()) in ("2020-01-02", "2020-02-01")


def test_times_are_those_of_utc():
    found = kinds.dates("a", text(["2020-01-01T02:00:00+02:00", "2020-01-01"]), "ISO8601")
    assert found.tolist() == [pd.Timestamp("2020-01-01")] * 2


@pytest.mark.parametrize(("values", "same"), [([5.0, 5.0], True), ([5.0, 5.0 + 1e-13], True), ([5.0, 5.0001], False)])
def test_what_is_constant_up_to_rounding(values, same):
    assert kinds.constant(pd.Series(values).to_numpy()) == same
    assert kinds.constant(1e9 * pd.Series(values).to_numpy()) == same


@pytest.mark.parametrize(
    ("values", "looks"),
    [
        (["85.3 m2", "7 m2", "12 m2"], "numbers with 'm2': remove that"),
        (["85.3m²", "7m²", "unknown"], "numbers with 'm²': remove that"),
        (["10 km/h", "7.5 km/h"], "numbers with 'km/h': remove that"),
        (["$1", "$2.50"], "numbers with '$': remove that"),
        (["CHF 1'200.50", "CHF 7"], "numbers with 'CHF' and \"'\": remove that"),
        (["1,007", "2,300,000"], "numbers with ',': remove that"),
        (["1,5", "2,255"], "numbers with decimal commas: write points"),
        (["1,5 kg", "2,255 kg"], "numbers with 'kg': remove that"),
        (["house 1", "house 2", "house 3"], None),
        (["12a", "12b", "14c"], None),
        (["1st", "2nd", "3rd"], None),
        (["5-10", "10-20"], None),
        (["x", "y", "3 m2"], None),
        (["1", "2"], None),
    ],
)
def test_numbers_in_disguise(values, looks):
    assert kinds.disguised(pd.Series([*values, None], dtype="str")) == looks
