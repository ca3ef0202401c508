"""What the commands share: errors as one sentence, folders, the option --debug."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import rich.console
import typer
from rich.text import Text

from ..values import shortened, visible

Debug = Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")]


MOST = 5000  # characters of a message


class Console(rich.console.Console):
    """Shows names, cells and messages without the control characters in them; those that rich writes are its own."""

    def render(self, renderable: Any, options: Any = None) -> Iterator[Any]:
        for segment in super().render(renderable, options):
            yield segment if segment.control else segment._replace(text=visible(segment.text, keep="\n"))


@contextmanager
def error_messages(debug: bool, extra: str) -> Iterator[None]:
    """Prints an error as one sentence and ends the program with its exit code; `debug` lets the traceback through.

    `extra` is the one that installs a package that is missing.
    """
    try:
        yield
    except (typer.Exit, typer.BadParameter):
        raise
    except KeyboardInterrupt:
        complain("stopped")
        raise typer.Exit(130) from None
    except ModuleNotFoundError as error:
        if debug:
            raise
        complain(f"this needs {str(error.name).partition('.')[0]}: pip install 'marquardt[{extra}]'")
        raise typer.Exit(2) from None
    except Exception as error:
        if debug:
            raise
        plain = isinstance(error, (OSError, RuntimeError, ValueError))
        complain(f"{error}" if plain else f"{type(error).__name__}: {error} (--debug shows where)")
        raise typer.Exit(1) from None


def superfluous() -> bool:
    """Whether torchrun has started this process beside another one that does all the work: networks of a table are
    chosen one after the other, and the runs of the paper measure time, which they must not share."""
    count = int(os.environ.get("WORLD_SIZE", 1)) if "TORCHELASTIC_RUN_ID" in os.environ else 1
    if count == 1:
        return False
    first = os.environ.get("RANK") == "0"
    if first:
        Console(stderr=True).print(f"Of the {count} processes of torchrun the first does the work, the others end.")
    return not first


def say(console: rich.console.Console, sentence: str, style: str = "", *, whole: bool = True) -> None:
    """`whole` leaves a path or a command in one piece; otherwise lines have the width of the terminal."""
    words = visible(shortened(sentence, MOST))
    console.print(words, style=style, markup=False, highlight=False, soft_wrap=whole)


def complain(message: str) -> None:
    """On one line."""
    words = visible(shortened(" ".join(message.split("\n")), MOST))
    Console(stderr=True).print(Text.assemble(("Error: ", "bold red"), words), soft_wrap=True)


def make_folder(out: Path) -> None:
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        hint = f"{str(out)!r} cannot be made ({error.strerror}): choose another folder"
        raise typer.BadParameter(hint, param_hint="--out") from None
