"""What becomes of columns: numbers, categories, dates, missing values, and what is left out."""

from __future__ import annotations

import json
import math

import pandas as pd
import pytest
import torch

from marquardt.table.columns import LEVELS, RARE, Columns, learn
from marquardt.table.reading import BadTable

N = 40


def table(**columns):
    return pd.DataFrame({name: pd.Series(values, dtype="str") for name, values in columns.items()})


def text(values):
    return [None if value is None else str(value) for value in values]


def learnt(frame, train=None, **options):
    return learn(frame, torch.arange(len(frame)).numpy() if train is None else train, **options)


def done(columns):
    return {told.name: told.done for told in columns.told}


# --- numbers ---


def test_a_number_is_one_input_as_it_is():
    columns = learnt(table(a=["3", "1", "2"]))
    X, notes = columns.encode(table(a=["5", "-1"]))
    assert X.dtype == torch.float64
    assert X.tolist() == [[5.0], [-1.0]]
    assert notes == []
    assert done(columns) == {"a": "used as it is"}


def test_missing_numbers_are_the_median_of_the_training_rows_and_marked():
    frame = table(a=["1", None, "3", "100"])
    columns = learnt(frame, train=[0, 1, 2])
    X, _ = columns.encode(frame)
    assert columns.names == ["a", "a is missing"]
    assert X.tolist() == [[1, 0], [2, 1], [3, 0], [100, 0]]
    assert "median 2" in done(columns)["a"]


def test_a_value_that_is_missing_only_in_new_rows_is_told():
    columns = learnt(table(a=["1", "2", "9"]))
    X, [note] = columns.encode(table(a=[None, "5"]))
    assert X.tolist() == [[2.0], [5.0]]
    assert "'a': 1 value is missing, as none was in training; it is the median 2." in note


def test_what_counts_rows_is_told_and_kept():
    columns = learnt(table(id=text(range(N)), x=text(i / 7 for i in range(N))))
    assert columns.names == ["id", "x"]
    assert "--ignore" in done(columns)["id"]
    assert "--ignore" not in done(columns)["x"]


# --- categories ---


def test_levels_rare_levels_and_missing_ones():
    frame = table(a=["u"] * 5 + ["v"] * RARE + ["w"] * (RARE - 1) + [None])
    columns = learnt(frame)
    assert columns.names == ["a = u", "a = v", "a is another", "a is missing"]
    X, notes = columns.encode(table(a=["v", "w", "new", None]))
    assert X.tolist() == [[0, 1, 0, 0], [0, 0, 1, 0], [0, 0, 1, 0], [0, 0, 0, 1]]
    assert "'new', 'w'" in notes[0]


def test_a_level_that_was_not_there_has_no_input_and_is_told():
    columns = learnt(table(a=["u", "v"] * RARE))
    X, [note] = columns.encode(table(a=["u", "new", "newer", "new"]))
    assert X.tolist() == [[1, 0], [0, 0], [0, 0], [0, 0]]
    assert (
        "3 rows have a level that was rare or not there in training ('new', 'newer'); they have no level at all" in note
    )


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
    assert columns.columns[0].encode(table(a=["2"])["a"]).inputs.tolist() == [[0, 1, 0]]


# --- dates ---


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


@pytest.mark.parametrize(("values", "day", "said"), [
    (["01/02/2020", "03/04/2020"], "2020-01-02", "day/month/year would be possible too"),
    (["13/02/2020", "03/04/2020"], "2020-02-13", ""),
])  # fmt: skip
def test_dates_that_can_be_read_in_two_ways(values, day, said):
    frame = table(a=values)
    columns = learnt(frame)
    assert columns.encode(frame)[0][0, 0] == (pd.Timestamp(day) - pd.Timestamp("2000-01-01")).days
    assert ("possible too" in done(columns)["a"]) == bool(said)


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
    columns = learnt(table(a=values, x=text(range(N))))
    assert columns.names == ["x"]
    assert why in done(columns)["a"]
    assert done(columns)["a"].startswith("left out: ")
    with pytest.raises(BadTable, match="no column is left to learn from: 'a' was left out"):
        learnt(table(a=values))


def test_what_is_constant_is_judged_by_the_training_rows():
    columns = learnt(table(a=["5", "5", "6"], x=["1", "2", "3"]), train=[0, 1])
    assert columns.names == ["x"]


def test_columns_on_request_are_left_out():
    assert learnt(table(a=["1", "2"], x=["1", "2"]), ignore=("a",)).names == ["x"]


@pytest.fixture
def mixed():
    return table(
        n=["1", None, "3", "4", "5", "6"],
        c=["u", "v", "u", "v", "u", "v"],
        d=["2020-01-01", "2020-05-05", "2020-09-09", "2021-01-01", None, "2021-05-05"],
    )


def test_columns_survive_json(mixed):
    columns = learnt(mixed)
    again = Columns.from_json(json.loads(json.dumps(columns.to_json())))
    assert again.columns == columns.columns
    assert torch.equal(again.encode(mixed)[0], columns.encode(mixed)[0])


def test_groups_are_the_inputs_of_each_column(mixed):
    columns = learnt(mixed)
    groups = columns.groups
    assert list(groups) == ["n", "c", "d"]
    assert [place for places in groups.values() for place in places] == list(range(len(columns.names)))
    assert [columns.names[place] for place in groups["c"]] == ["c = u", "c = v"]


def test_a_column_that_new_rows_do_not_have(mixed):
    with pytest.raises(BadTable, match="no column 'c'"):
        learnt(mixed).encode(mixed.drop(columns="c"))
