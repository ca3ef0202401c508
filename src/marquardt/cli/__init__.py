"""The command line: `marquardt fit` and `predict` are for tables, `paper` reproduces the paper, `bench` measures."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Annotated, Literal

from .. import __version__

try:
    import typer

    from . import fit, paper
    from .base import complain, error_messages, superfluous
except ModuleNotFoundError as error:
    missing, extra = str(error.name).partition(".")[0], "table" if {"fit", "predict"} & set(sys.argv[1:2]) else "paper"
    sys.stderr.write(f"the command line needs {missing}: pip install 'marquardt[{extra}]'\n")
    raise SystemExit(2) from None

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)
app.command()(fit.fit)
app.command()(fit.predict)
app.add_typer(paper.paper, name="paper")


def main() -> None:
    if not superfluous():
        app(prog_name="marquardt")


def show_version(asked: bool) -> None:
    if asked:
        typer.echo(f"marquardt {__version__}")
        raise typer.Exit()


@app.callback()
def marquardt(
    version: Annotated[
        bool, typer.Option("--version", callback=show_version, is_eager=True, help="The version, nothing else.")
    ] = False,
) -> None:
    """Levenberg–Marquardt for PyTorch: networks for tables, the paper's experiments and the benchmarks."""


Benchmark = Literal[
    "arena", "regret", "step", "scale", "precision", "time", "line-search", "quality", "models", "least-squares",
    "tables", "trainbr", "uncertainty", "resume",
]  # fmt: skip


@app.command(context_settings={"allow_interspersed_args": False})
def bench(
    name: Annotated[Benchmark, typer.Argument(help="Which one.")],
    arguments: Annotated[list[str] | None, typer.Argument(help="Passed on to it.")] = None,
) -> None:
    """Run a benchmark, from a checkout of the repository; `marquardt bench step --help` shows its own options."""
    file = {"time": "time_to_target"}.get(name, name.replace("-", "_")) + ".py"
    folders = (Path(__file__).parents[3] / "benchmarks", Path.cwd() / "benchmarks")
    script = next((folder / file for folder in folders if (folder / file).is_file()), None)
    if script is None:
        complain(
            f"no {file} in {' or '.join(map(str, folders))}: the benchmarks are in the repository, not in the package; "
            "run this in a checkout"
        )
        raise typer.Exit(2)
    with error_messages(debug=False, extra="paper"):
        raise typer.Exit(subprocess.call([sys.executable, str(script), *(arguments or [])]))
