"""Whether numbers or classes are predicted, and targets that cannot be."""

from __future__ import annotations

import pandas as pd
import pytest
import torch

from marquardt.table import targets
from marquardt.table.reading import BadTable
from marquardt.table.targets import ClassTarget, NumberTarget, decide

N = 60


def table(**columns):
    return pd.DataFrame({name: pd.Series(list(map(str, values)), dtype="str") for name, values in columns.items()})


def test_numbers_are_predicted_as_numbers():
    frame = table(y=[i / 2 for i in range(N)], z=range(N))
    target, says = decide(frame, ("y", "z"), None)
    assert target == NumberTarget(("y", "z"))
    assert says == []
    assert target.values(frame).tolist() == [[i / 2, i] for i in range(N)]


def test_text_is_a_class():
    frame = table(y=["b", "a", "c"] * 20)
    target, [said] = decide(frame, ("y",), None)
    assert target == ClassTarget(("y",), ("a", "b", "c"))
    assert "text" in said
    assert target.values(frame)[:3].tolist() == [1, 0, 2]
    assert target.values(table(y=["c", "new"])).tolist() == [2, -1]


def test_few_whole_numbers_are_classes_and_that_can_be_changed():
    frame = table(y=[2, 10, 9] * 20)
    target, [said] = decide(frame, ("y",), None)
    assert target == ClassTarget(("y",), ("2", "9", "10"))  # in the order of numbers
    assert "--regress" in said
    assert decide(frame, ("y",), False) == (NumberTarget(("y",)), [])


@pytest.mark.parametrize("values", [[i % 11 for i in range(N)], [0.5 * (i % 3) for i in range(N)], range(N)])
def test_other_numbers_are_numbers(values):
    assert decide(table(y=values), ("y",), None)[0].task == "regression"


def test_several_targets_are_numbers():
    assert decide(table(y=[1, 2] * 30, z=[1, 2] * 30), ("y", "z"), None)[0].task == "regression"


def test_numbers_as_classes_on_request():
    frame = pd.DataFrame({"y": [0.0, 1.0, 2.5] * 20})
    assert decide(frame, ("y",), True)[0] == ClassTarget(("y",), ("0", "1", "2.5"))


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
    ],
)
def test_targets_that_cannot_be_learnt(columns, classify, words):
    with pytest.raises(BadTable) as error:
        decide(table(**columns), tuple(columns), classify)
    assert all(word in str(error.value) for word in words), error.value


def test_names_that_are_not_there():
    frame = table(a=[1], b=[2])
    targets.check_names(frame, ("a", "b"), "--target")
    with pytest.raises(BadTable, match="--target: there is no column 'c'; the table has 'a', 'b'"):
        targets.check_names(frame, ("c",), "--target")


def test_a_table_without_names_is_told():
    frame = pd.DataFrame([["3", "4"]], columns=["1.5", "-2"])
    with pytest.raises(BadTable, match="the first line must have the names"):
        targets.check_names(frame, ("y",), "--target")


@pytest.mark.parametrize("target", [NumberTarget(("a", "b")), ClassTarget(("c",), ("x", "y"))])
def test_json(target):
    assert targets.from_json(targets.to_json(target)) == target


def test_values_are_doubles():
    assert NumberTarget(("y",)).values(table(y=[1])).dtype == torch.float64


def test_classes_that_look_like_numbers_are_told():
    frame = pd.DataFrame({"y": pd.Series(["50%", "72%", "90%"] * 10, dtype="str")})
    target, says = targets.decide(frame, ("y",), None)
    assert target.classes == ("50%", "72%", "90%")
    assert says == [
        "'y' is text: a class is predicted. It looks like numbers with '%': remove that to predict it as numbers."
    ]
    assert targets.decide(frame, ("y",), True)[1] == []
    with pytest.raises(BadTable, match=r"the target 'y' is text \('50%'\), but looks like numbers with '%'"):
        targets.decide(frame, ("y",), False)
