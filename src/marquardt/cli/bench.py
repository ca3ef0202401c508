"""`marquardt bench`: runs a benchmark of the repository."""

from __future__ import annotations

import subprocess
import sys
from enum import Enum
from pathlib import Path
from typing import Annotated

import typer

from .base import complain, told

BENCHMARKS = {
    "arena": "arena.py",
    "regret": "regret.py",
    "step": "step.py",
    "scale": "scale.py",
    "precision": "precision.py",
    "time": "time_to_target.py",
    "line-search": "line_search.py",
    "quality": "quality.py",
    "models": "models.py",
    "least-squares": "least_squares.py",
    "tables": "tables.py",
    "trainbr": "trainbr.py",
    "uncertainty": "uncertainty.py",
    "resume": "resume.py",
}


class Benchmark(str, Enum):
    arena = "arena"
    regret = "regret"
    step = "step"
    scale = "scale"
    precision = "precision"
    time = "time"
    line_search = "line-search"
    quality = "quality"
    models = "models"
    least_squares = "least-squares"
    tables = "tables"
    trainbr = "trainbr"
    uncertainty = "uncertainty"
    resume = "resume"


def bench(
    name: Annotated[Benchmark, typer.Argument(help="Which one.")],
    arguments: Annotated[list[str] | None, typer.Argument(help="Passed on to it.")] = None,
) -> None:
    """Run a benchmark, from a checkout of the repository; `marquardt bench step --help` shows its own options."""
    file = BENCHMARKS[name.value]
    folders = (Path(__file__).parents[3] / "benchmarks", Path.cwd() / "benchmarks")
    script = next((folder / file for folder in folders if (folder / file).is_file()), None)
    if script is None:
        complain(
            f"no {file} in {' or '.join(map(str, folders))}: the benchmarks are in the repository, not in the package; "
            "run this in a checkout"
        )
        raise typer.Exit(2)
    with told(debug=False, extra="paper"):
        raise typer.Exit(subprocess.call([sys.executable, str(script), *(arguments or [])]))
