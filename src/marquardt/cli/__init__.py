"""The command line: `marquardt fit` and `predict` are for tables, `paper` reproduces the paper, `bench` measures."""

from __future__ import annotations

import sys
from typing import Annotated

from .. import __version__

try:
    import typer

    from . import bench, fit, paper
    from .base import superfluous
except ModuleNotFoundError as error:
    missing, extra = str(error.name).partition(".")[0], "table" if {"fit", "predict"} & set(sys.argv[1:2]) else "paper"
    sys.stderr.write(f"the command line needs {missing}: pip install 'marquardt[{extra}]'\n")
    raise SystemExit(2) from None

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)
app.command()(fit.fit)
app.command()(fit.predict)
app.add_typer(paper.paper, name="paper")
app.command(context_settings={"allow_interspersed_args": False})(bench.bench)


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
