"""The folder of a run; how its rows are split, and that a committee is judged by rows that it has not seen."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch

from marquardt import files
from marquardt.table import run
from marquardt.table.reading import BadTable
from marquardt.table.request import CHECKPOINT, RUN, Request, begin, end, finished
from support.tables import houses, write


@pytest.fixture
def asked(tmp_path):
    (tmp_path / "data.csv").write_text("a,y\n1,2\n")
    return Request(tmp_path / "data.csv", ("y",), hidden=(4,))


@pytest.fixture
def out(tmp_path):
    (tmp_path / "model").mkdir()
    return tmp_path / "model"


def test_a_run_begins_goes_on_and_ends(asked, out, tmp_path):
    """Also with data that have moved; what a killed process left is no obstacle."""
    (out / ".run.lock").touch()
    (out / "run.0123abcd.part").touch()
    [said] = begin(out, asked, resume=True)
    assert "has no run to go on with" in said
    assert {path.name for path in out.iterdir()} == {".run.lock", RUN}
    assert not finished(out)
    (out / CHECKPOINT).mkdir()
    moved = asked.data.rename(tmp_path / "moved.csv")
    assert begin(out, replace(asked, data=moved), resume=True) == []
    end(out)
    assert finished(out)
    assert not (out / CHECKPOINT).exists()
    found = json.loads((out / RUN).read_text())
    assert set(found["options"]) == set(Request.__dataclass_fields__) - {"data"}
    assert found["options"]["targets"] == ["y"]
    assert found["data"]["bytes"] == moved.stat().st_size


def test_a_run_goes_on_with_its_threads_and_tells_other_versions(asked, out):
    begin(out, asked, resume=False)
    threads = torch.get_num_threads()
    found, _ = files.read(out / RUN)
    found["versions"] |= {"threads": threads + 1, "torch": "1.0"}
    files.write(out / RUN, found)
    try:
        [said] = begin(out, asked, resume=True)
        assert torch.get_num_threads() == threads + 1
    finally:
        torch.set_num_threads(threads)
    assert "torch was 1.0 and is" in said


# --- rows to train on and to test with ---


@pytest.mark.parametrize("fraction", [0.0, 0.2, 0.9])
def test_every_row_is_in_one_of_both_sets(fraction, double):
    train, test = run.split(torch.randn(50, 1), fraction, seed=1)
    assert sorted(train.tolist() + test.tolist()) == list(range(50))
    assert len(test) == round(50 * fraction)
    assert torch.equal(run.split(torch.randn(50, 1), fraction, seed=1)[1], test)
    assert fraction == 0 or not torch.equal(run.split(torch.randn(50, 1), fraction, seed=2)[1], test)


def test_each_class_is_split_and_has_a_row_to_train_on():
    Y = torch.tensor([0] * 40 + [1] * 10 + [2])
    train, test = run.split(Y, 0.5, seed=0)
    assert torch.bincount(Y[test], minlength=3).tolist() == [20, 5, 0]
    assert torch.bincount(Y[train], minlength=3).tolist() == [20, 5, 1]


def test_columns_are_learnt_from_the_rows_to_train_on(tmp_path):
    """Every value of the rows kept back is changed: inputs and target of the others stay the same."""
    rows, data = houses(40), tmp_path / "data.csv"
    before = run.prepare(Request(write(data, rows, without=("name", "rent", "sold")), ("price",)))
    for i in before.test.tolist():
        rows[i] |= {"area": 1e6, "city": "Rom", "rooms": "", "built": "1800-01-01", "price": 1e6 + i}
    after = run.prepare(Request(write(data, rows, without=("name", "rent", "sold")), ("price",)))
    assert after.columns.columns == before.columns.columns
    assert torch.equal(after.X[after.train], before.X[before.train])
    assert not torch.equal(after.X[after.test], before.X[before.test])


def test_a_target_that_hardly_varies_in_the_rows_to_train_on(tmp_path):
    rows = [{"x": i, "y": 0.5} for i in range(20)]
    rows[int(run.split(torch.zeros(20, 1), 0.2, seed=0)[1][0])]["y"] = 7.5
    words = r"every value of the target 'y' is 0.5 in the rows to train on \(another --seed"
    with pytest.raises(BadTable, match=words):
        run.prepare(Request(write(tmp_path / "data.csv", rows), ("y",)))
    rows = houses(40)
    rows[3]["sold"] = "perhaps"
    says = run.prepare(Request(write(tmp_path / "data.csv", rows), ("sold",))).says
    assert any("Classes with fewer than 3 rows to train on: 'perhaps'" in said for said in says)
