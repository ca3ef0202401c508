"""The table of a fit: printed, written, read again and plotted."""

from __future__ import annotations

import csv
import math
import sys

import pytest

from marquardt.training.history import Entry, History

nan = math.nan


def entry(k: int, **change) -> Entry:
    given = Entry(k, k - 1, 1 / k, 1 / k, nan, 0.1, 0.5, "decrease", 1.0, 0.9, 0.01 * k)
    return given._replace(**change)


def table(steps: int = 3) -> History:
    return History([entry(k + 1) for k in range(steps)])


def test_entries_and_columns():
    found = table()
    assert (len(found), found[-1].step, found["loss"]) == (3, 3, [1, 0.5, 1 / 3])
    assert [e.step for e in found[1:]] == [2, 3]
    assert isinstance(found[1:], History)
    with pytest.raises(KeyError, match="los': the columns are step, epoch, loss"):
        found["los"]


def test_the_columns_are_all_of_it():
    found = table()
    assert History.restored(found.columns()) == found
    assert History.restored(History().columns()) == History()


def test_equality_is_that_of_all_but_times():
    later = History([e._replace(seconds=99.0, note="took 5 s") for e in table()])
    assert later == table()
    assert History([entry(1, validation=nan)]) == History([entry(1, validation=nan)])
    assert History([entry(1, loss=2.0)]) != History([entry(1)])
    assert table(2) != table(3)
    assert table() != 3


@pytest.mark.parametrize(
    ("rule", "accepted"),
    [("decrease", True), ("uphill", True), ("search", True), ("return", False), ("rejected", False)],
)
def test_accepted(rule, accepted):
    assert entry(1, rule=rule).accepted == accepted


def test_it_prints_itself():
    assert str(table()).splitlines() == [
        "step    loss  lam  gradient      rule  seconds",
        "   1       1  0.1       0.5  decrease     0.01",
        "   2     0.5  0.1       0.5  decrease     0.02",
        "   3  0.3333  0.1       0.5  decrease     0.03",
    ]
    assert repr(table()) == "History of 3 steps, loss 1 → 0.3333"
    assert repr(History([entry(1, validation=2.0)])) == "History of 1 steps, loss 1 → 1, validation 2"
    assert repr(History()) == "History of no steps"
    assert "validation" in str(History([entry(1), entry(2, validation=2.0)]))
    assert "gamma" in str(History([entry(1, gamma=2.0)]))
    long = str(table(100)).splitlines()
    assert len(long) == 22
    assert "…" in long[6]
    assert long[-1].split()[0] == "100"


def test_csv(tmp_path):
    table().to_csv(tmp_path / "history.csv")
    with open(tmp_path / "history.csv", newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    assert [float(row["loss"]) for row in rows] == table()["loss"]
    assert list(rows[0]) == list(Entry._fields)


def test_pandas():
    found = table().to_pandas()
    assert list(found.columns) == list(Entry._fields)
    assert found["loss"].tolist() == table()["loss"]


def test_a_figure():
    import matplotlib

    matplotlib.use("agg")
    import matplotlib.pyplot as plt

    found = History([entry(1, validation=3.0), entry(2, validation=2.0), entry(3, rule="rejected", validation=2.5)])
    figure = found.plot()
    top, bottom = figure.axes
    assert [line.get_label() for line in top.lines] == ["loss", "validation", "best, step 2"]
    assert top.lines[2].get_xdata().tolist() == [2]
    assert [line.get_xdata().tolist() for line in bottom.lines[1:]] == [[1, 2], [3]]
    assert (top.get_yscale(), bottom.get_ylabel()) == ("log", "λ")
    negative = History([entry(1, loss=-1.0)]).plot()
    assert negative.axes[0].get_yscale() == "linear"
    plt.close("all")


@pytest.mark.parametrize(("module", "method"), [("pandas", "to_pandas"), ("matplotlib.pyplot", "plot")])
def test_what_is_missing_is_named(module, method, monkeypatch):
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ImportError, match=f"History.{method} needs {module.split('.')[0]}: pip install"):
        getattr(table(), method)()
