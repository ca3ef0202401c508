"""How rows are split, and that a committee is judged by rows that it has not seen."""

from __future__ import annotations

import pytest
import torch

from marquardt.table import run
from marquardt.table.reading import BadTable
from marquardt.table.request import Request
from support.tables import houses, write


@pytest.mark.parametrize("fraction", [0.0, 0.2, 0.9])
def test_every_row_is_in_one_of_both_sets(fraction, double):
    train, test = run.split(torch.randn(50, 1), fraction, seed=1)
    assert sorted(train.tolist() + test.tolist()) == list(range(50))
    assert len(test) == round(50 * fraction)
    assert torch.equal(run.split(torch.randn(50, 1), fraction, seed=1)[1], test)


def test_each_class_is_split_and_has_a_row_to_train_on():
    Y = torch.tensor([0] * 40 + [1] * 10 + [2])
    train, test = run.split(Y, 0.5, seed=0)
    assert torch.bincount(Y[test], minlength=3).tolist() == [20, 5, 0]
    assert torch.bincount(Y[train], minlength=3).tolist() == [20, 5, 1]


def test_another_seed_is_another_split():
    assert not torch.equal(run.split(torch.zeros(50, 1), 0.2, seed=0)[1], run.split(torch.zeros(50, 1), 0.2, seed=1)[1])


def test_columns_are_learnt_from_the_rows_to_train_on(tmp_path):
    """Every value of the rows kept back is changed: inputs and target of the others stay the same."""
    rows = houses(40)
    data = write(tmp_path / "data.csv", rows, without=("name", "rent", "sold"))
    before = run.prepare(Request(data, ("price",)))
    for i in before.test.tolist():
        rows[i] |= {"area": 1e6, "city": "Rom", "rooms": "", "built": "1800-01-01", "price": 1e6 + i}
    data = write(tmp_path / "data.csv", rows, without=("name", "rent", "sold"))
    after = run.prepare(Request(data, ("price",)))
    assert after.columns.columns == before.columns.columns
    assert torch.equal(after.X[after.train], before.X[before.train])
    assert not torch.equal(after.X[after.test], before.X[before.test])


def test_a_target_that_is_constant_in_the_rows_to_train_on(tmp_path):
    rows = [{"x": i, "y": 0.5} for i in range(20)]
    kept = run.split(torch.zeros(20, 1), 0.2, seed=0)[1].tolist()
    rows[kept[0]]["y"] = 7.5
    data = write(tmp_path / "data.csv", rows)
    with pytest.raises(
        BadTable, match=r"every value of the target 'y' is 0.5 in the rows to train on \(another --seed"
    ):
        run.prepare(Request(data, ("y",)))


def test_the_target_is_no_input(tmp_path):
    data = write(tmp_path / "data.csv", houses(40))
    prepared = run.prepare(Request(data, ("price", "rent"), ignore=("sold",)))
    assert list(prepared.columns.groups) == ["area", "city", "rooms", "built"]
    assert prepared.Y.shape == (40, 2)


def test_rare_classes_are_told(tmp_path):
    rows = houses(40)
    rows[3]["sold"] = "perhaps"
    data = write(tmp_path / "data.csv", rows)
    assert any("Classes with fewer than 3 rows to train on: 'perhaps'" in said
               for said in run.prepare(Request(data, ("sold",))).says)  # fmt: skip
