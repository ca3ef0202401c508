"""The table of a fit: printed, written, read again and plotted."""

from __future__ import annotations

import csv
import io
import math
import sys

import pytest
import torch
from torch import nn

import marquardt as mq
from marquardt.training.history import Entry, History, Seen, Stops, remaining, words
from support.fits import mse, net, noisy_sine

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
    assert History.restored(found.columns()) == found
    assert History.restored(History().columns()) == History()
    rules = ("decrease", "uphill", "search", "return", "rejected")
    assert [entry(1, rule=rule).accepted for rule in rules] == [True, True, True, False, False]


def test_equality_is_that_of_all_but_times():
    later = History([e._replace(seconds=99.0, note="took 5 s") for e in table()])
    assert later == table()
    assert History([entry(1, validation=nan)]) == History([entry(1, validation=nan)])
    assert History([entry(1, loss=2.0)]) != History([entry(1)])
    assert table(2) != table(3)
    assert table() != 3


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


def test_csv_and_pandas(tmp_path):
    table().to_csv(tmp_path / "history.csv")
    with open(tmp_path / "history.csv", newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    frame = table().to_pandas()
    assert [float(row["loss"]) for row in rows] == frame["loss"].tolist() == table()["loss"]
    assert list(rows[0]) == list(frame.columns) == list(Entry._fields)


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


X, Y = noisy_sine()
NONE = Stops(None, None, None, None, None, None)
TENTH = Entry(10, 9, 0.5, 0.6, 0.7, 1.0, 0.1, "decrease", 1.0, 1.0, 3.0)
SEEN = Seen(loss=0.5, steepest=10.0, lam=2.0, least=0.4, best_step=3, fails=7)


@pytest.mark.parametrize(
    ("stop", "seen", "words"),
    [
        ({"steps": 10}, {}, "10 steps are done"),
        ({"steps": 11}, {}, None),
        ({"seconds": 3.0}, {}, "3 s are over"),
        ({"seconds": 3.1}, {}, None),
        ({"goal": 0.5}, {}, "the goal is reached: the loss is 0.5, at most 0.5"),
        ({"goal": 0.49}, {}, None),
        ({"goal": 0.45}, {"loss": 0.1}, None),  # of one mini-batch
        ({"min_gradient": 0.01}, {}, "the gradient is 0.1, at most 0.01 of the largest"),
        ({"min_gradient": 0.009}, {}, None),
        ({"min_gradient": 1.0}, {"gradient": math.nan}, None),
        ({"min_gradient": 0.01}, {"settled": False}, None),  # one minimum follows another
        ({"max_lam": 1.9}, {}, "λ is 2, above 1.9: no step lowers the loss"),
        ({"max_lam": 2.0}, {}, None),
        ({"patience": 7}, {}, "validation: 7 in a row without a loss below 0.4"),
        ({"patience": 8}, {}, None),
        ({"patience": 0}, {}, None),
        (
            {"patience": 5},
            {"fails": 0, "idle": 5, "highest": -12.5},
            "the log evidence was -12.5, and lower in 5 estim",
        ),
        ({"patience": 6}, {"fails": 0, "idle": 5}, None),
        ({}, {"converged": True}, "converged: no decrease is left"),
        ({}, {"converged": True, "settled": False}, None),
        ({}, {"settled": True}, "settled: neither the effective parameters nor the noise"),
        ({}, {}, None),
    ],
)
def test_reasons(stop, seen, words):
    """After a step, of which `seen` has what differs from the others"""
    stops, entry = Stops(**{**vars(NONE), **stop}), {k: v for k, v in seen.items() if k in Entry._fields}
    others = {k: v for k, v in seen.items() if k not in entry}
    found = stops.reason(TENTH._replace(**entry), Seen(**{**vars(SEEN), **others}))
    assert found == words or (words and found.startswith(words))
    assert NONE.reason(None, Seen()) is None


def test_the_highest_evidence_so_far():
    """The last one of those that are alike."""
    seen = Seen()
    assert [seen.judged(value, k) for k, value in enumerate([-9.0, -3.0, -3.9, -4.1, math.nan, -3.5, -5.0])] == [
        True, True, True, False, False, True, False,
    ]  # fmt: skip
    assert (seen.highest, seen.best_step, seen.idle) == (-3.0, 5, 1)
    seen.begin_anew()
    assert [seen.judged(value, k) for k, value in enumerate([-9.0, -4.0, -3.0, -2.0, -2.5], 10)] == [
        False, False, False, True, True,
    ]  # fmt: skip
    assert (seen.highest, seen.best_step, seen.idle) == (-2.0, 14, 0)


# In whole fits.


def test_the_units_of_the_loss_do_not_matter():
    """A straight line: the same number of steps if targets and weights are in other units."""
    ends = []
    for units in (2.0**-20, 1.0, 2.0**20):
        torch.manual_seed(0)
        model = nn.Linear(1, 1).double()
        with torch.no_grad():
            for p in model.parameters():
                p.mul_(units)
        result = mq.fit(model, (X, units * (X * 3 + 1)), "mse", min_gradient=1e-5)
        assert result.loss < 1e-8 * units**2
        ends.append((result.reason.partition(" is ")[0], len(result.history)))
    assert ends == [("the gradient", ends[0][1])] * 3


class Never:
    looks_back = False

    def judge(self, trial):
        return None


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"goal": 0.1}, "the goal is reached"),
        ({"weight_decay": 0.1, "min_gradient": None}, "converged: no decrease is left"),
        ({"steps": 0}, "no steps were asked for"),
        ({"seconds": 0.0}, "0 ms are over"),
        ({"validation": (X, -Y), "patience": 4}, "validation: 4 in a row without a loss below"),
        # Where nothing is left to gain λ rises.
        (
            {"schedule": mq.TenFold(1.0), "max_lam": 10.0, "acceptance": Never(), "line_search": None},
            "λ is 1e+02, above",
        ),
    ],
)
def test_ends(options, words):
    """At the first step that has reached it"""
    model = net()
    before = mse(model, X, Y)
    result = mq.fit(model, (X, Y), "mse", **options)
    losses = result.history["loss"]
    assert result.reason.startswith(words)
    if "goal" in options:
        assert losses[-1] <= 0.1 < min(losses[:-1])
    if "max_lam" in options or "steps" in options:
        assert (result.best_step, mse(model, X, Y)) == (0, before)
    if "patience" in options:
        accepted = [e for e in result.history if e.accepted]
        best = [e.step for e in accepted].index(result.best_step) + 1 if result.best_step else 0
        assert len(accepted) == best + 4


SHOWN = Entry(10, 9, 0.5, 0.6, math.nan, 1.0, 0.1, "decrease", 1.0, 1.0, 4.0)
FIRST = SHOWN._replace(step=1, seconds=1.0)


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_a_terminal_shows_it(monkeypatch, capsys):
    mq.fit(net(), noisy_sine(), "mse", steps=2)
    assert capsys.readouterr() == ("", "")  # without one
    mq.fit(net(), noisy_sine(), "mse", steps=2, progress=True)
    assert "2 steps are done" in capsys.readouterr().err
    with pytest.raises(ZeroDivisionError):
        mq.fit(net(), noisy_sine(), "mse", progress=True, callbacks=lambda r: 1 / 0)
    assert "an error ended it" in capsys.readouterr().err
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setenv("COLUMNS", "200")
    mq.fit(net(), noisy_sine(), "mse", steps=3, validation=0.2)
    found = terminal.getvalue()
    for part in ("all samples in every step", "step 3", "loss", "validation", "λ", "gradient", "3 steps are done"):
        assert part in found
    terminal.truncate(0)
    mq.fit(net(), noisy_sine(), "mse", steps=3, progress=False)
    monkeypatch.setitem(sys.modules, "rich.console", None)
    mq.fit(net(), noisy_sine(), "mse", steps=3)
    assert terminal.getvalue().strip("\0") == ""
    with pytest.raises(ImportError, match="progress=True needs Rich: pip install rich"):
        mq.fit(net(), noisy_sine(), "mse", progress=True)


def test_what_is_left():
    """Nine steps took three seconds: ten more take ten thirds."""
    done, left = remaining(Stops(steps=20), SHOWN, FIRST)
    assert (done, left) == (0.5, pytest.approx(10 / 3))
    assert remaining(Stops(steps=20, seconds=5.0), SHOWN, FIRST) == (0.8, 1.0)
    assert remaining(Stops(steps=None), SHOWN, FIRST) == (0.0, math.inf)
    assert words(SHOWN, math.inf) == "loss 0.5  λ 1  gradient 0.1"
    assert words(SHOWN._replace(validation=2.0, gamma=3.0), 61.0) == (
        "loss 0.5  validation 2  λ 1  gradient 0.1  γ 3  1:01 left"
    )
