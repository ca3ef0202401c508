"""`marquardt bench`, the version, and the program itself."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import get_args

import pytest

import marquardt
from marquardt import cli
from support.command_line import invoked, program
from support.tables import houses, write


@pytest.mark.parametrize("name", get_args(cli.Benchmark))
def test_bench_passes_arguments_on(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    called: list[list[str]] = []
    monkeypatch.setattr(subprocess, "call", lambda command: called.append(command) or 3)
    result = invoked("bench", name, "--quick", "--help", "x")
    assert result.exit_code == 3
    [(python, script, *arguments)] = called
    assert python == sys.executable
    assert Path(script).is_file()
    assert arguments == ["--quick", "--help", "x"]


def test_bench_outside_a_checkout(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(cli, "__file__", str(tmp_path / "lib/marquardt/cli/__init__.py"))
    result = invoked("bench", "step")
    assert result.exit_code == 2
    assert "checkout" in result.output
    (tmp_path / "benchmarks").mkdir()
    (tmp_path / "benchmarks/step.py").write_text("import sys; sys.exit(len(sys.argv) + 40)")
    assert invoked("bench", "step", "--one").exit_code == 42  # the one in the current directory


def test_version() -> None:
    assert invoked("--version").output == f"marquardt {marquardt.__version__}\n"


def test_python_m() -> None:
    assert program("-m", "marquardt", "--version").stdout == f"marquardt {marquardt.__version__}\n"


@pytest.mark.parametrize("package", ["typer", "rich"])
def test_without_the_packages_of_the_command_line(package: str) -> None:
    code = f"import sys; sys.modules[{package!r}] = None; from marquardt.cli import main; main()"
    result = program("-c", code)
    assert result.returncode == 2
    assert result.stderr == f"the command line needs {package}: pip install 'marquardt[paper]'\n"


def test_under_torchrun_the_first_process_does_the_work(tmp_path: Path) -> None:
    """The others end, and say nothing."""
    for rank, said in ((0, f"marquardt {marquardt.__version__}\n"), (1, "")):
        ranked = {"TORCHELASTIC_RUN_ID": "x", "WORLD_SIZE": "2", "RANK": str(rank)}
        result = program("-m", "marquardt", "--version", **ranked)
        assert (result.returncode, result.stdout) == (0, said)
        assert ("Of the 2 processes of torchrun the first does the work" in result.stderr) == (rank == 0)


def test_a_table_under_torchrun(tmp_path: Path) -> None:
    data = write(tmp_path / "data.csv", houses(), without=("rent", "sold"))
    quick = ("--hidden", "3", "--steps", "4", "--target", "price")
    alone = invoked("fit", data, *quick, "--out", tmp_path / "alone")
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "marquardt", "fit")
    result = program(*torchrun, data, *quick, "--out", tmp_path / "ranks")
    assert (alone.exit_code, result.returncode) == (0, 0), result.stderr
    assert result.stdout.count("Report: ") == 1
    written = [(tmp_path / where / "predictions.csv").read_bytes() for where in ("alone", "ranks")]
    assert written[0] == written[1]
