"""What columns hold and become: numbers, categories, dates, missing values, what is left out; and the target."""

from __future__ import annotations

import math

import pandas as pd
import pytest
import torch

from marquardt.files import typed
from marquardt.table import columns as inputs
from marquardt.table.columns import LEVELS, RARE, Columns, Target, decide_target, kind_of, learn
from marquardt.table.reading import BadTable

N = 60


def series(values):
    return pd.Series([None if value is None else str(value) for value in values], dtype="str")


def table(**columns):
    return pd.DataFrame({name: series(values) for name, values in columns.items()})


def learnt(frame, train=None, **options):
    return learn(frame, torch.arange(len(frame)).numpy() if train is None else train, **options)


def done(columns):
    return {told.name: told.done for told in columns.told}


# --- what a column holds ---


@pytest.mark.parametrize(
    ("values", "kind"),
    [
        (["1", "2.5", "-3e4", None], "number"),
        (["a", "b", "1"], "category"),
        (["2020-01-02", "2021-12-31T10:00"], "date"),
        ([None, None], "empty"),
        (["True", "False"], "category"),
    ],
)
def test_the_kind_of_a_column(values, kind):
    assert kind_of("a", series(values)) == kind


@pytest.mark.parametrize(
    ("values", "words"),
    [
        (["1", "2", "abc", "4", None, "6"], "holds numbers, but also text: 'abc' in row 3"),
        (["1", "2", "1,000", "4"], "holds numbers, but also text: '1,000' in row 3"),
        (["1", "2", "inf"], "holds numbers that are not finite: 'inf' in row 3"),
        (["1", "2", "-1e200"], "holds numbers that are too large to compute with: '-1e200' in row 3"),
        ([*range(20), *["x"] * 9], "'x' in row 25 and in 4 more rows"),
        (["2020-01-01", "2020-01-02", "2020-02-30"], "dates (year-month-day), but also others: '2020-02-30' in row 3"),
    ],
)
def test_values_that_do_not_fit_are_named_with_their_rows(values, words):
    """A row keeps its number if others were left out."""
    for some in (series(values), series(values).iloc[1:]):
        with pytest.raises(BadTable) as error:
            kind_of("a", some)
        for word in (words, "--missing", "--categorical a", "--ignore a"):
            assert word in str(error.value)


@pytest.mark.parametrize(
    ("values", "form"),
    [
        (["2020-01-02"], "ISO8601"),
        (["2020/01/02"], "ISO8601"),
        (["2020-01-02T02:00:00+02:00"], "ISO8601"),  # times are those of UTC
        (["02.01.2020"], "%d.%m.%Y"),
        (["01/02/2020", "01/13/2020"], "%m/%d/%Y"),
        (["02/01/2020", "13/01/2020"], "%d/%m/%Y"),
    ],
)
def test_the_format_that_reads_every_date(values, form):
    assert kind_of("a", series(values)) == "date"
    assert inputs.date_format(series(values)) == form
    assert inputs.dates("a", series([*values, None]), form).iloc[0] == pd.Timestamp("2020-01-02")


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
    assert inputs.disguised(pd.Series([*values, None], dtype="str")) == looks


# --- what a column becomes ---


@pytest.mark.parametrize(
    ("values", "names", "new", "X", "notes"),
    [
        (["3", "1", "2"], ["a"], ["5", "-1"], [[5], [-1]], []),
        (["1", None, "3"], ["a", "a is missing"], ["100", None], [[100, 0], [2, 1]], []),
        (["1", "2", "9"], ["a"], [None, "5"], [[2], [5]],
         ["'a': 1 missing value, and none in training: read as the median 2."]),
        (["u"] * 5 + ["v"] * RARE + ["w"] * (RARE - 1) + [None], ["a = u", "a = v", "a is another", "a is missing"],
         ["v", "w", "new", None], [[0, 1, 0, 0], [0, 0, 1, 0], [0, 0, 1, 0], [0, 0, 0, 1]],
         ["'a': 2 rows with a level that was rare or not there in training ('new', 'w'), read as another level."]),
        (["u", "v"] * RARE, ["a = u", "a = v"], ["u", "new", "or", "new"], [[1, 0], [0, 0], [0, 0], [0, 0]],
         ["'a': 3 rows with a level that was rare or not there in training ('new', 'or'), read as no level at all."]),
        (["2020-01-01 06:00", "2020-01-01 18:00", None], ["a (days)", "a (time, sin)", "a is missing"],  # cos: always 0
         ["2000-01-03 06:00", None], [[2.25, 1, 0], [7305.25, 1, 1]], []),
    ],
)  # fmt: skip
def test_what_a_column_becomes(values, names, new, X, notes):
    columns = learnt(table(a=values))
    found, said = columns.encode(table(a=new))
    assert columns.names == names
    assert found.dtype == torch.float64
    assert found.tolist() == X
    assert said == notes


def test_many_levels_share_an_input_beyond_the_most_frequent():
    often = [f"often {i:02}" for i in range(LEVELS) for _ in range(RARE + 1)]
    seldom = [f"seldom {i}" for i in range(5) for _ in range(RARE)]
    columns = learnt(table(a=seldom + often))
    assert columns.names == [f"a = often {i:02}" for i in range(LEVELS)] + ["a is another"]


def test_numbers_as_categories_on_request():
    frame = pd.DataFrame({"a": [1.0, 2.0, 1.0, 2.0, 1.0, 2.0, None], "d": pd.to_datetime(["2020-01-01"] * 6 + [None])})
    columns = learnt(frame, categorical=("a", "d"))
    assert columns.names == ["a = 1", "a = 2", "a is missing", "d = 2020-01-01 00:00:00", "d is missing"]
    assert columns.encode(frame)[0][5:].tolist() == [[0, 1, 0, 1, 0], [0, 0, 1, 0, 1]]
    assert columns.columns[0].encode(table(a=["2"])["a"])[0].tolist() == [[0, 1, 0]]


def test_a_date_as_days_and_as_turns_of_year_and_week():
    columns = learnt(table(a=["2020-01-01", "2020-07-01", "2021-03-05", "2020-11-30"]))
    assert columns.names == [f"a ({part})" for part in ("days", "year, sin", "year, cos", "week, sin", "week, cos")]
    X, _ = columns.encode(table(a=["2000-01-03"]))  # a Monday, the third day of a year
    angle = 2 * math.pi * 2 / 365.25
    assert X[0].tolist() == pytest.approx([2.0, math.sin(angle), math.cos(angle), 0.0, 1.0])


# --- what is left out, and all of it together ---


@pytest.mark.parametrize(
    ("values", "why"),
    [
        (["5"] * N, "it is always 5"),
        ([f"{5 + 1e-13 * i!r}" for i in range(N)], "it is always 5"),
        ([f"{5e9 + 1e-4 * i!r}" for i in range(N)], "it is always 5e+09"),
        (["x"] * N, "it is always 'x'"),
        (["2020-01-01"] * N, "it is always the same date"),
        ([None] * N, "it has no values"),
        ([f"name {i}" for i in range(N)], f"{N} different texts in {N} rows"),
    ],
)
def test_columns_that_say_nothing_are_left_out(values, why):
    columns = learnt(table(a=values, x=range(N), y=[5 + 1e-4 * i for i in range(N)]))
    assert columns.names == ["x", "y"]
    assert done(columns)["a"].startswith(f"left out: {'it has ' * why[0].isdigit()}{why}")
    assert [name for name in "xy" if "--ignore" in done(columns)[name]] == ["x"]  # it seems to count the rows
    with pytest.raises(BadTable, match="no column is left to learn from: 'a' was left out"):
        learnt(table(a=values))


def test_medians_and_what_is_constant_are_those_of_the_training_rows():
    frame = table(a=["5", "5", "6"], b=["1", "3", "100"], x=["1", "2", "3"])
    assert learnt(frame, train=[0, 1], ignore=("x",)).names == ["b"]
    frame = table(a=["1", None, "3", "100"])
    columns = learnt(frame, train=[0, 1, 2])
    assert columns.encode(frame)[0].tolist() == [[1, 0], [2, 1], [3, 0], [100, 0]]
    assert "median 2" in done(columns)["a"]


def test_columns_group_their_inputs_and_all_of_them_are_needed():
    mixed = table(n=["1", None, "3", "4", "5", "6"], c=["u", "v"] * 3, d=["2020-01-01"] * 5 + ["2020-05-05"])
    columns = learnt(mixed)
    assert list(columns.groups) == ["n", "c", "d"]
    assert [place for places in columns.groups.values() for place in places] == list(range(len(columns.names)))
    assert [columns.names[place] for place in columns.groups["c"]] == ["c = u", "c = v"]
    with pytest.raises(BadTable, match="no column 'c'"):
        columns.encode(mixed.drop(columns="c"))


@pytest.mark.parametrize(
    "made",
    [
        lambda: Columns(()),
        lambda: Columns((inputs.NumberColumn("a", False, 1.0, True),) * 2),
        lambda: Columns((inputs.NumberColumn("a", False, 1.0, False),)),
        lambda: inputs.DateColumn("a", False, "%H", "2020-01-01", ("days",)),
        lambda: Target(()),
        lambda: typed({"names": ["a", "b"], "classes": ["x", "y"]}, Target),
        lambda: Target(("a",), ("x",)),
    ],
)
def test_what_no_table_gives_is_refused(made):
    with pytest.raises(ValueError, match=r"columns|no dates|target"):
        made()


# --- the target ---


@pytest.mark.parametrize(
    ("columns", "classify", "target", "said"),
    [
        ({"y": [i / 2 for i in range(N)], "z": range(N)}, None, Target(("y", "z")), None),
        ({"y": [1, 2] * 30, "z": [1, 2] * 30}, None, Target(("y", "z")), None),
        ({"y": range(N)}, None, Target(("y",)), None),
        ({"y": [i % 11 for i in range(N)]}, None, Target(("y",)), None),
        ({"y": [0.5 * (i % 3) for i in range(N)]}, None, Target(("y",)), None),
        ({"y": [2, 10, 9] * 20}, False, Target(("y",)), None),
        ({"y": [2, 10, 9] * 20}, None, Target(("y",), ("2", "9", "10")), "--regress"),  # in the order of numbers
        ({"y": ["b", "a", "c"] * 20}, None, Target(("y",), ("a", "b", "c")), "is text: a class is predicted"),
        ({"y": ["0", "1", "2.5"] * 20}, True, Target(("y",), ("0", "1", "2.5")), None),
        ({"y": ["50%", "72%", "90%"] * 20}, None, Target(("y",), ("50%", "72%", "90%")),
         "It looks like numbers with '%': remove that to predict it as numbers."),
        ({"y": ["50%", "72%", "90%"] * 20}, True, Target(("y",), ("50%", "72%", "90%")), None),
    ],
)  # fmt: skip
def test_targets(columns, classify, target, said):
    found, says = decide_target(table(**columns), tuple(columns), classify)
    assert found == target
    assert [said in sentence for sentence in says] == [True] * (said is not None)


def test_values_of_targets():
    frame = table(y=["b", "a", "new"], z=[1.5, 2, 3])
    assert Target(("y",), ("a", "b")).values(frame).tolist() == [1, 0, -1]
    values = Target(("z",)).values(frame)
    assert values.dtype == torch.float64
    assert values.tolist() == [[1.5], [2], [3]]
    assert decide_target(pd.DataFrame({"y": [0.0, 1.0, 2.5] * 20}), ("y",), True)[0].classes == ("0", "1", "2.5")


@pytest.mark.parametrize(
    ("columns", "classify", "words"),
    [
        ({"y": ["a"] * N}, None, ["one class only", "'a'"]),
        ({"y": [3] * N}, None, ["one class only", "'3'"]),
        ({"y": [3.5] * N}, None, ["every value", "3.5"]),
        ({"y": [3] * N}, False, ["every value", "3"]),
        ({"y": [5 + 1e-13 * i for i in range(N)]}, None, ["every value", "5"]),
        ({"y": [*range(N - 1), 1e200]}, None, ["too large", "'1e+200' in row 60"]),
        ({"y": [f"t{i}" for i in range(N)]}, None, ["60 different values in 60 rows"]),
        ({"y": range(N)}, True, ["60 different values", "--regress"]),
        ({"y": ["a", "b"] * 30}, False, ["is text ('a', 'b')", "--regress"]),
        ({"y": ["a", "b"] * 30, "z": range(N)}, None, ["is text", "alone"]),
        ({"y": range(N), "z": range(N)}, True, ["--classify takes one --target"]),
        ({"y": ["2020-01-01", "2020-01-02"] * 30}, None, ["is a date"]),
        ({"y": [*range(N - 1), "x"]}, None, ["'x' in row 60"]),
        ({"y": ["50%", "72%", "90%"] * 20}, False, ["is text ('50%'), but looks like numbers with '%'"]),
    ],
)
def test_targets_that_cannot_be_learnt(columns, classify, words):
    with pytest.raises(BadTable) as error:
        decide_target(table(**columns), tuple(columns), classify)
    assert all(word in str(error.value) for word in words), error.value
