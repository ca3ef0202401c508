"""The line that shows how a fit gets on."""

from __future__ import annotations

import io
import math
import sys

import pytest

import marquardt as mq
from marquardt.training.history import Bar, Entry, Shown, Stops, remaining, shown, words
from support.fits import net, noisy_sine

ENTRY = Entry(10, 9, 0.5, 0.6, math.nan, 1.0, 0.1, "decrease", 1.0, 1.0, 4.0)
FIRST = ENTRY._replace(step=1, seconds=1.0)


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_nothing_without_a_terminal(capsys):
    mq.fit(net(), noisy_sine(), "mse", steps=2)
    assert capsys.readouterr() == ("", "")
    assert type(shown(None, Stops())) is Shown


def test_a_terminal_shows_it(monkeypatch):
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setenv("COLUMNS", "200")
    mq.fit(net(), noisy_sine(), "mse", steps=3, validation=0.2)
    found = terminal.getvalue()
    for part in ("all samples in every step", "step 3", "loss", "validation", "λ", "gradient", "3 steps are done"):
        assert part in found
    terminal.truncate(0)
    mq.fit(net(), noisy_sine(), "mse", steps=3, progress=False)
    assert terminal.getvalue().strip("\0") == ""


def test_true_shows_it_anywhere(capsys):
    mq.fit(net(), noisy_sine(), "mse", steps=2, progress=True)
    assert "2 steps are done" in capsys.readouterr().err


def test_an_error_ends_it(capsys):
    def fails(running):
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        mq.fit(net(), noisy_sine(), "mse", progress=True, callbacks=fails)
    assert "an error ended it" in capsys.readouterr().err


def test_without_rich(monkeypatch):
    monkeypatch.setitem(sys.modules, "rich.console", None)
    monkeypatch.setattr(sys, "stderr", Terminal())
    assert type(shown(None, Stops())) is Shown
    with pytest.raises(ImportError, match="progress=True needs Rich: pip install rich"):
        shown(True, Stops())
    monkeypatch.undo()
    assert isinstance(shown(True, Stops()), Bar)


def test_what_is_left():
    """Nine steps took three seconds: ten more take ten thirds."""
    done, left = remaining(Stops(steps=20), ENTRY, FIRST)
    assert (done, left) == (0.5, pytest.approx(10 / 3))
    assert remaining(Stops(steps=20, seconds=5.0), ENTRY, FIRST) == (0.8, 1.0)
    assert remaining(Stops(steps=None), ENTRY, FIRST) == (0.0, math.inf)


def test_the_words():
    assert words(ENTRY, math.inf) == "loss 0.5  λ 1  gradient 0.1"
    assert words(ENTRY._replace(validation=2.0, gamma=3.0), 61.0) == (
        "loss 0.5  validation 2  λ 1  gradient 0.1  γ 3  1:01 left"
    )
