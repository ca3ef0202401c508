"""`marquardt paper`: runs the paper's experiments, tunes the optimizers, writes the report."""

from __future__ import annotations

import json
import math
import shlex
import sys
from collections.abc import Sequence
from enum import Enum
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.progress import Progress, TimeElapsedColumn
from typer.core import TyperGroup

from .. import files
from ..paper import data, logs, plans, runs
from ..paper import tune as tuning
from ..paper.screen import Screen
from ..paper.trainers import Unavailable
from ..paper.vocabulary import CONTENT, EXPERIMENTS, LOGS, OPTIMIZERS, OUT, TUNED
from .base import Console, Debug, complain, make_folder, say, told

EXTRA = "paper"


class Experiment(str, Enum):
    sine = "sine"
    mnist = "mnist"
    ablation = "ablation"
    swapped = "swapped"
    all = "all"


class TuningProblem(str, Enum):
    sine = "sine"
    mnist = "mnist"


class ImageSet(str, Enum):
    mnist = "mnist"
    mnist_5k = "mnist-5k"
    digits = "digits"


class PaperGroup(TyperGroup):
    """`marquardt paper sine --full` stands for `marquardt paper run sine --full`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if not args or (args[0] not in self.commands and args[0] != "--help"):
            args = ["run", *args]
        return super().parse_args(ctx, args)


paper = typer.Typer(cls=PaperGroup)


def usable(device: str) -> str:
    try:
        torch.zeros(1, device=device).item()
    except (AssertionError, NotImplementedError, RuntimeError) as error:
        reason = str(error).splitlines()[0].rstrip(".")
        raise typer.BadParameter(f"{device!r} cannot be used here ({reason}); --device cpu always can") from None
    return device


Optimizers = Annotated[
    list[str] | None,
    typer.Option("--optimizers", metavar="NAME,…", help="These only, for example lm,adam.", show_default="all"),
]
Device = Annotated[str, typer.Option("--device", callback=usable, help="cpu, cuda, cuda:1, …")]
Images = Annotated[ImageSet, typer.Option("--data", help="mnist-5k: 5,000 of MNIST. digits: scikit-learn's 8×8.")]
Data = Annotated[
    Path | None,
    typer.Option(
        "--data-dir", exists=True, file_okay=False, help="Where MNIST is.", show_default="searched, then downloaded"
    ),
]
Out = Annotated[Path, typer.Option("--out", file_okay=False, help="Logs and report go here.")]


@paper.callback()
def paper_group() -> None:
    """Reproduce the paper: run its experiments, tune the optimizers, write the report.

    The word run can be left out: `marquardt paper`, `marquardt paper sine mnist --full`.
    `marquardt paper run --help` shows the options.
    """


@paper.command()
def run(
    experiments: Annotated[list[Experiment] | None, typer.Argument(help="What to run.", show_default="all")] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Minutes on two cores; this is the default.")] = False,
    full: Annotated[bool, typer.Option("--full", help="10 seeds (sine 20) at full length.")] = False,
    seeds: Annotated[int | None, typer.Option(min=1, help="How many seeds each method gets.")] = None,
    optimizers: Optimizers = None,
    device: Device = "cpu",
    images: Images = ImageSet.mnist,
    data_dir: Data = None,
    out: Out = OUT,
    debug: Debug = False,
) -> None:
    """Run experiments and write the report.

    Stop at any time: the same command goes on where it was, and skips what is done.
    A folder is for one process at a time; a second one is told which process has it.
    Every method runs with its default settings and with tuned ones: those that come with the package, or what
    `marquardt paper tune` has left in the output folder.
    """
    if quick and full:
        raise typer.BadParameter("--quick and --full exclude each other: choose one", param_hint="--quick")
    with told(debug, EXTRA):
        from ..paper import report  # it needs packages that the runs do not: they are missed now, not after an hour

        names = expand(experiments)
        tuned = plans.winners(out / TUNED if (out / TUNED).exists() else plans.WINNERS)
        options: dict[str, Any] = {"full": full, "seeds": seeds, "device": device, "tuned": tuned}
        methods = check_methods(optimizers, plans.plan(names, **options))
        plan = plans.plan(names, methods=methods, **options)
        found = find_data(plan, out, images.value, data_dir)
        make_folder(out)
        with runs.held(out):
            failed = execute(plan, out, found)
        say(Console(), f"Report: {report.write(out)}")
        if failed:
            complain(f"{failed} of {len(plan)} runs failed; the same command tries them again")
            raise typer.Exit(1)


def expand(experiments: Sequence[Experiment] | None) -> list[str]:
    asked = [experiment.value for experiment in experiments or [Experiment.all]]
    return list(EXPERIMENTS) if "all" in asked else list(dict.fromkeys(asked))


def check_methods(optimizers: Sequence[str] | None, plan: Sequence[plans.Run]) -> list[str] | None:
    """The names asked for, if all of them occur in the plan."""
    if not optimizers:
        return None
    asked = [name.strip() for several in optimizers for name in several.split(",")]
    planned = {run.method for run in plan}
    known = [name for name in OPTIMIZERS if name in planned]
    if not known:
        raise typer.BadParameter("the ablation has methods of its own: leave this out", param_hint="--optimizers")
    for name in asked:
        if name not in known:
            raise typer.BadParameter(f"{name!r} is none of {', '.join(known)}", param_hint="--optimizers")
    return asked


def execute(plan: Sequence[plans.Run], out: Path, found: dict[str, data.Digits]) -> int:
    """Makes the runs that are not done yet, and returns how many of them failed."""
    todo = [run for run in plan if not runs.done(run, out, found.get(run.problem))]
    screen = Screen(Console(), plan, len(todo))
    for digits in found.values():
        screen.say(f"Data: {digits.name}, {digits.source}")
    if len(todo) < len(plan):
        screen.say(f"{len(plan) - len(todo)} of {len(plan)} runs are done already.")
    names = {run.name for run in todo}
    failed = 0
    try:
        with screen.on():
            for run in plan:
                if run.name not in names:
                    screen.add(run, logs.read(run.log(out)))
                    continue
                screen.start(run)
                runs.execute(run, out, found.get(run.problem), partial(screen.step, run))
                log = logs.read(run.log(out))
                screen.end(run, log)
                failed += log.status == "failed"
    except KeyboardInterrupt:
        screen.print_unfinished()
        again = shlex.join(["marquardt", *sys.argv[1:]])
        draw = shlex.join(["marquardt", "paper", "report", *([] if out == OUT else ["--out", str(out)])])
        screen.say(
            f"Stopped: {len(plan) - len(todo) + screen.done} of {len(plan)} runs are done and kept in {out / LOGS}.\n"
            f"Go on: {again}\n"
            f"Report so far: {draw}"
        )
        raise typer.Exit(130) from None
    return failed


def find_data(plan: Sequence[plans.Run], out: Path, name: str, directory: Path | None) -> dict[str, data.Digits]:
    """{problem: images} of the problems in the plan; the sine has none.

    If `out` holds runs on other images than those found now, this is refused: one report cannot compare them.
    """
    found = {problem: data.find(name, directory) for problem in sorted({run.problem for run in plan} - {"sine"})}
    for log in logs.read_all(out):
        images, before = found.get(log.head["problem"]), log.head["data"]["name"]
        if images is not None and images.name != before:
            raise typer.BadParameter(
                f"{str(out)!r} holds runs on {before}, but the data found now are {images.name} ({images.source}): "
                "choose another folder, or the data of before",
                param_hint="--out",
            )
    return found


@paper.command()
def tune(
    problems: Annotated[
        list[TuningProblem] | None, typer.Argument(help="What to tune on.", show_default="both")
    ] = None,
    trials: Annotated[int, typer.Option(min=1, help="How many settings each optimizer may try.")] = tuning.TRIALS,
    limit: Annotated[
        float, typer.Option(min=0.1, help="Seconds of training at which a trial is cut off.", show_default="none")
    ] = math.inf,
    optimizers: Optimizers = None,
    device: Device = "cpu",
    data_dir: Data = None,
    out: Out = OUT,
    debug: Debug = False,
) -> None:
    """Tune every optimizer with the same number of trials.

    The next run uses the winners, beside the default settings. Each is kept as soon as it is found.
    """
    with told(debug, EXTRA):
        chosen = [problem.value for problem in problems or TuningProblem]
        plan = plans.plan(chosen, seeds=1)
        asked = check_methods(optimizers, plan)
        jobs = [(run.problem, run.method) for run in plan if asked is None or run.method in asked]
        if (out / TUNED).exists():
            plans.winners(out / TUNED)  # a damaged file is better found now than when there is a winner to add
        images = data.find("mnist", data_dir) if "mnist" in chosen else None
        make_folder(out)
        console = Console()
        bars = Progress(*Progress.get_default_columns(), TimeElapsedColumn(), console=console)
        failed = 0
        with files.held(out, "winners"), bars:
            bar = bars.add_task("", total=trials * len(jobs))
            for number, (problem, method) in enumerate(jobs, 1):
                bars.update(bar, description=f"{problem}, {OPTIMIZERS[method]}")
                try:
                    found = tuning.tune(
                        [method], problem, trials=trials, data=images if problem == "mnist" else None,
                        device=device, limit=limit, watch=lambda _: bars.advance(bar),
                    )  # fmt: skip
                except Unavailable:  # Optuna is missing; a method whose package is missing has no winner, and no error
                    raise
                except RuntimeError as error:
                    failed += 1
                    result = f"failed ({error})"
                else:
                    tuning.save(out / TUNED, problem, found)
                    result = json.dumps(found[method]) if found else "not available"
                say(console, f"{problem}/{method}: {result}")
                bars.update(bar, completed=number * trials)
        if failed:
            complain(f"{failed} of {len(jobs)} searches found nothing; more --trials may help")
            raise typer.Exit(1)
        say(console, f"Winners: {out / TUNED}")


@paper.command("report")
def write_report(out: Out = OUT, debug: Debug = False) -> None:
    """Draw figures, tables and the page again, from the logs alone, or from report.json if there are none."""
    with told(debug, EXTRA):
        from ..paper import report

        if not logs.read_all(out) and not (out / CONTENT).exists():
            raise typer.BadParameter(
                f"{str(out / LOGS)!r} holds no run: marquardt paper makes them", param_hint="--out"
            )
        say(Console(), f"Report: {report.write(out)}")
