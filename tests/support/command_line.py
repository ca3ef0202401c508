"""The program `marquardt`, in this process or in one of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import marquardt


def environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(Path(marquardt.__file__).parents[1]), "OMP_NUM_THREADS": "1"}


def program(*arguments: str | Path, **variables: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, env=environment() | variables, timeout=120)


def invoked(*arguments: str | Path) -> Any:
    """Its exit code and output; wide, so that no message is broken into lines."""
    from typer.testing import CliRunner

    from marquardt import cli

    return CliRunner(env={"COLUMNS": "400"}).invoke(cli.app, list(map(str, arguments)), prog_name="marquardt")


def refused(result: Any, *words: str) -> None:
    """One clear sentence, and nothing of a traceback."""
    assert result.exit_code == 1, result.output
    assert result.output.strip().count("\n") == 0, result.output
    assert result.output.startswith("Error: ")
    for word in ("Traceback", "--debug"):
        assert word not in result.output
    for word in words:
        assert word in result.output, result.output
