"""The table that fills in while runs are made."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("rich")

from rich.console import Console

from marquardt.cli import paper as screen
from marquardt.paper import logs, runs


def test_the_table_takes_medians_and_a_diverged_seed_as_the_worst() -> None:
    row = screen.Row("Adam", "mnist", seeds=3)
    assert [str(cell) for cell in row.cells()] == ["Adam", "waiting", "0/3", "–", "–", "–"]
    row.ended = [made(4, 0.97), made(6, 0.95)]
    assert [str(cell) for cell in row.cells()] == ["Adam", "under way", "2/3", "5", "96.00%", "2.0"]
    row.ended.append(replace(made(1, 0.99), status="diverged"))
    assert [str(cell) for cell in row.cells()] == ["Adam", "1 diverged", "3/3", "4", "95.00%", "2.0"]
    row.ended = [replace(log, status="unavailable") for log in row.ended]
    assert [str(cell) for cell in row.cells()] == ["Adam", "unavailable", "3/3", "–", "–", "–"]


def made(reached: int, accuracy: float) -> logs.Log:
    """90 % at step `reached`, `accuracy` at the end."""
    steps = {
        "step": [0, reached, 10],
        "seconds": [0, 1, 2],
        "train_loss": [2, 1, 1],
        "test_accuracy": [0, 0.9, accuracy],
    }
    columns = {key: [float(value) for value in values] for key, values in steps.items()}
    return logs.Log(Path(), {}, columns, {}, None, "finished", 10, "")


def test_a_low_screen_shows_the_rows_around_the_one_that_runs() -> None:
    plan = runs.plan(["sine"], seeds=1)
    shown = screen.Screen(Console(width=80, height=14), plan, len(plan))
    shown.start(plan[6])
    assert shown.table("sine", 4).row_count == 4
    lines = shown.console.render_lines(shown.picture())
    assert len(lines) < 14
    text = "".join(segment.text for line in lines for segment in line)
    assert plan[6].label in text
    assert plan[0].label not in text
