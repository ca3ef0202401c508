"""What columns hold and become: numbers, categories, dates, missing values, what is left out; and the target."""

from __future__ import annotations

import json
import math

import pandas as pd
import pytest
import torch

from marquardt.table import columns as inputs
from marquardt.table.columns import (
    LEVELS,
    RARE,
    ClassTarget,
    Columns,
    NumberTarget,
    decide_target,
    kind_of,
    learn,
    target_from_json,
    target_to_json,
)
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
    with pytest.raises(BadTable) as error:
        kind_of("a", series(values))
    for word in (words, "--missing", "--categorical a", "--ignore a"):
        assert word in str(error.value)


def test_rows_keep_their_numbers_if_others_were_left_out():
    with pytest.raises(BadTable, match="'x' in row 2"):
        kind_of("a", series(["1", "x", "3", "4"]).iloc[1:])


@pytest.mark.parametrize(
    ("values", "form"),
    [
        (["2020-01-02"], "ISO8601"),
        (["2020/01/02"], "ISO8601"),
        (["02.01.2020"], "%d.%m.%Y"),
        (["01/02/2020", "01/13/2020"], "%m/%d/%Y"),
        (["02/01/2020", "13/01/2020"], "%d/%m/%Y"),
    ],
)
def test_the_format_that_reads_every_date(values, form):
    assert kind_of("a", series(values)) == "date"
    assert inputs.date_format(series(values)) == form
    assert str(inputs.dates("a", series([*values, None]), form).iloc[0].date()) == "2020-01-02"


def test_times_are_those_of_utc():
    found = inputs.dates("a", series(["2020-01-01T02:00:00+02:00", "2020-01-01"]), "ISO8601")
    assert found.tolist() == [pd.Timestamp("2020-01-01")] * 2


@pytest.mark.parametrize(("values", "same"), [([5.0, 5.0], True), ([5.0, 5.0 + 1e-13], True), ([5.0, 5.0001], False)])
def test_what_is_constant_up_to_rounding(values, same):
    assert inputs.constant(pd.Series(values).to_numpy()) == same
    assert inputs.constant(1e9 * pd.Series(values).to_numpy()) == same


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
         ["'a': 1 value is missing, as none was in training; it is the median 2."]),
        (["u"] * 5 + ["v"] * RARE + ["w"] * (RARE - 1) + [None], ["a = u", "a = v", "a is another", "a is missing"],
         ["v", "w", "new", None], [[0, 1, 0, 0], [0, 0, 1, 0], [0, 0, 1, 0], [0, 0, 0, 1]],
         ["'a': 2 rows have a level that was rare or not there in training ('new', 'w'); one input stands for all such "
          "levels."]),
        (["u", "v"] * RARE, ["a = u", "a = v"], ["u", "new", "newer", "new"], [[1, 0], [0, 0], [0, 0], [0, 0]],
         ["'a': 3 rows have a level that was rare or not there in training ('new', 'newer'); they have no level at "
          "all."]),
    ],
)  # fmt: skip
def test_numbers_and_categories(values, names, new, X, notes):
    columns = learnt(table(a=values))
    found, said = columns.encode(table(a=new))
    assert columns.names == names
    assert found.dtype == torch.float64
    assert found.tolist() == X
    assert said == notes


def test_what_counts_rows_is_told_and_kept():
    columns = learnt(table(id=range(N), x=[i / 7 for i in range(N)]))
    assert columns.names == ["id", "x"]
    assert "--ignore" in done(columns)["id"]
    assert "--ignore" not in done(columns)["x"]


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
    frame = table(a=["2020-01-01", "2020-07-01", "2021-03-05", "2020-11-30"])
    columns = learnt(frame)
    assert columns.names == [f"a ({part})" for part in ("days", "year, sin", "year, cos", "week, sin", "week, cos")]
    X, _ = columns.encode(table(a=["2000-01-03"]))  # a Monday, the third day of a year
    angle = 2 * math.pi * 2 / 365.25
    assert X[0].tolist() == pytest.approx([2.0, math.sin(angle), math.cos(angle), 0.0, 1.0])


def test_times_of_day_are_a_turn_too_and_missing_dates_are_the_middle():
    frame = table(a=["2020-01-01 06:00", "2020-01-01 18:00", None])
    columns = learnt(frame)
    assert [name for name in columns.names if "time" in name] == ["a (time, sin)"]  # the cosine is 0 at both
    assert columns.names[-1] == "a is missing"
    X, _ = columns.encode(frame)
    assert X[2, :-1].tolist() == X[0, :-1].tolist()
    assert X[:, -1].tolist() == [0, 0, 1]


# --- what is left out, and all of it together ---


@pytest.mark.parametrize(
    ("values", "why"),
    [
        (["5"] * N, "it is always 5"),
        ([f"{5 + 1e-13 * i!r}" for i in range(N)], "it is always 5"),
        (["x"] * N, "it is always 'x'"),
        (["2020-01-01"] * N, "it is always the same date"),
        ([None] * N, "it has no values"),
        ([f"name {i}" for i in range(N)], f"{N} different texts in {N} rows"),
    ],
)
def test_columns_that_say_nothing_are_left_out(values, why):
    columns = learnt(table(a=values, x=range(N)))
    assert columns.names == ["x"]
    assert why in done(columns)["a"]
    assert done(columns)["a"].startswith("left out: ")
    with pytest.raises(BadTable, match="no column is left to learn from: 'a' was left out"):
        learnt(table(a=values))


def test_medians_and_what_is_constant_are_those_of_the_training_rows():
    frame = table(a=["5", "5", "6"], b=["1", "3", "100"], x=["1", "2", "3"])
    assert learnt(frame, train=[0, 1], ignore=("x",)).names == ["b"]
    frame = table(a=["1", None, "3", "100"])
    columns = learnt(frame, train=[0, 1, 2])
    assert columns.encode(frame)[0].tolist() == [[1, 0], [2, 1], [3, 0], [100, 0]]
    assert "median 2" in done(columns)["a"]


@pytest.fixture
def mixed():
    return table(
        n=["1", None, "3", "4", "5", "6"],
        c=["u", "v", "u", "v", "u", "v"],
        d=["2020-01-01", "2020-05-05", "2020-09-09", "2021-01-01", None, "2021-05-05"],
    )


def test_columns_survive_json_and_group_their_inputs(mixed):
    columns = learnt(mixed)
    again = Columns.from_json(json.loads(json.dumps(columns.to_json())))
    assert again.columns == columns.columns
    assert torch.equal(again.encode(mixed)[0], columns.encode(mixed)[0])
    assert list(columns.groups) == ["n", "c", "d"]
    assert [place for places in columns.groups.values() for place in places] == list(range(len(columns.names)))
    assert [columns.names[place] for place in columns.groups["c"]] == ["c = u", "c = v"]
    with pytest.raises(BadTable, match="no column 'c'"):
        columns.encode(mixed.drop(columns="c"))


# --- the target ---


@pytest.mark.parametrize(
    ("columns", "classify", "target", "said"),
    [
        ({"y": [i / 2 for i in range(N)], "z": range(N)}, None, NumberTarget(("y", "z")), None),
        ({"y": [1, 2] * 30, "z": [1, 2] * 30}, None, NumberTarget(("y", "z")), None),
        ({"y": range(N)}, None, NumberTarget(("y",)), None),
        ({"y": [i % 11 for i in range(N)]}, None, NumberTarget(("y",)), None),
        ({"y": [0.5 * (i % 3) for i in range(N)]}, None, NumberTarget(("y",)), None),
        ({"y": [2, 10, 9] * 20}, False, NumberTarget(("y",)), None),
        ({"y": [2, 10, 9] * 20}, None, ClassTarget(("y",), ("2", "9", "10")), "--regress"),  # in the order of numbers
        ({"y": ["b", "a", "c"] * 20}, None, ClassTarget(("y",), ("a", "b", "c")), "is text: a class is predicted"),
        ({"y": ["0", "1", "2.5"] * 20}, True, ClassTarget(("y",), ("0", "1", "2.5")), None),
        ({"y": ["50%", "72%", "90%"] * 20}, None, ClassTarget(("y",), ("50%", "72%", "90%")),
         "It looks like numbers with '%': remove that to predict it as numbers."),
        ({"y": ["50%", "72%", "90%"] * 20}, True, ClassTarget(("y",), ("50%", "72%", "90%")), None),
    ],
)  # fmt: skip
def test_targets(columns, classify, target, said):
    found, says = decide_target(table(**columns), tuple(columns), classify)
    assert found == target_from_json(target_to_json(target)) == target
    assert [said in sentence for sentence in says] == [True] * (said is not None)


def test_values_of_targets():
    frame = table(y=["b", "a", "new"], z=[1.5, 2, 3])
    assert ClassTarget(("y",), ("a", "b")).values(frame).tolist() == [1, 0, -1]
    values = NumberTarget(("z",)).values(frame)
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
