"""Figures of the paper's experiments, drawn from logs: which there are, with their titles and captions."""

from __future__ import annotations

import io
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from .. import files
from . import panels
from .logs import Log, attempted, equal_seconds, place, runs_of, select
from .panels import SINE_MEAN, SINGLE, Group
from .problems import SINE_NOISE_FLOOR
from .styles import RC
from .vocabulary import ADDED, REMOVED, TARGET_LABEL

BAND = (
    "Lines are medians over the seeds, bands quartiles. Runs that diverged or failed count as the worst: a band ends "
    "where they reach a quartile, a line, with a cross, where they reach the median. Runs that ended early keep their "
    "last value."
)
FLOOR = f"Dotted line: the noise floor {SINE_NOISE_FLOOR:.4f}."
GOAL = f"Dotted line: {TARGET_LABEL}."


class Made(NamedTuple):
    """A figure that is not on disk yet."""

    name: str
    experiment: str
    title: str
    caption: str
    figure: Figure


@dataclass(frozen=True)
class Drawn:
    """A figure on disk: `path` is its SVG, the PNG lies beside it."""

    name: str
    experiment: str
    title: str
    caption: str
    path: Path
    wide: bool


def draw(logs: Sequence[Log], folder: Path) -> list[Drawn]:
    """Every figure that the logs have something for, as SVG and PNG."""
    drawn = []
    with matplotlib.rc_context(RC):  # type: ignore[arg-type]  # the keys are literals in the stubs
        for name, experiment, title, caption, figure in _figures(logs):
            FigureCanvasAgg(figure)
            with files.whole(folder / f"{name}.svg") as write:
                write(_shorten(_saved(figure, format="svg", metadata={"Date": None}).decode("utf-8")))
            figure.set_layout_engine("none")  # it stands, and laying out again costs as much as drawing
            with files.whole(folder / f"{name}.png") as write:
                write(_saved(figure, format="png", dpi=150))
            wide = figure.get_figwidth() > SINGLE[0]
            drawn.append(Drawn(name, experiment, title, caption, folder / f"{name}.svg", wide))
    return drawn


def _shorten(svg: str) -> str:
    """Paths to a tenth of a point and without line breaks, which halves the file."""

    def shorter(match: re.Match[str]) -> str:
        return re.sub(r"(\d\.\d)\d+", r"\1", match[0]).replace("\n", "")

    return re.sub(r' d="M [^"]*"', shorter, svg)


def _saved(figure: Figure, **options: Any) -> bytes:
    content = io.BytesIO()
    figure.savefig(content, **options)
    return content.getvalue()


def _figures(logs: Sequence[Log]) -> Iterator[Made]:
    yield from _compared(logs, "default")
    for made in _compared(logs, "tuned"):
        yield made._replace(
            name=f"{made.name}-tuned",
            title=f"{made.title}, tuned hyper-parameters",
            caption=f"{made.caption} Dagger: not tuned, shown with default hyper-parameters.",
        )
    yield from _sine_ablation(_groups(logs, "ablation-sine", "default"))
    yield from _mnist_ablation(_groups(logs, "ablation-mnist", "default"))


def _compared(logs: Sequence[Log], column: str) -> Iterator[Made]:
    yield from _sine(_groups(logs, "sine", column))
    yield from _mnist(_groups(logs, "mnist", column))
    yield from _swapped(_groups(logs, "swapped", column))


def _sine(groups: Sequence[Group]) -> Iterator[Made]:
    family = [group for group in groups if group.method in ("lm", "lm-paper", "lm-code", "lm-vanilla")]
    if family:
        yield Made(
            "fig1a",
            "sine",
            "Figure 1a: vanilla against modified LM",
            f"Mean squared error on the sine, full batch. {BAND} {FLOOR}",
            panels.sine_over_steps(family),
        )
    if groups:
        yield Made(
            "fig1b-iterations",
            "sine",
            "Figure 1b: all methods over iterations",
            f"Mean squared error on the sine. {BAND} {FLOOR}",
            panels.sine_over_steps(groups),
        )
    if equal_seconds(run for group in groups for run in group.runs) > 0:
        yield Made(
            "fig1b-seconds",
            "sine",
            "Figure 1b: all methods at equal wall-clock time",
            f"The same runs over seconds of training, evaluation off the clock. {BAND} {FLOOR}",
            panels.sine_over_seconds(groups),
        )
    shown = ("lm", "lm-paper", "kfac", "adam")
    fitted = [group for group in groups if group.method in shown and panels.with_curves(group)]
    if fitted:
        yield Made(
            "sine-fits",
            "sine",
            "The fitted curve after few iterations",
            f"Grey: samples; dotted: {SINE_MEAN}, their mean; solid: the network of the first seed.",
            panels.fits(fitted),
        )


def _mnist(groups: Sequence[Group]) -> Iterator[Made]:
    if groups:
        data = _data_name(groups)
        yield Made(
            "mnist",
            "mnist",
            f"{data}: loss and accuracy over steps",
            f"Read after every step. {BAND} Accuracies on a scale of the logarithm of the error. {GOAL}",
            panels.four_measures(groups),
        )
        yield Made(
            "mnist-seconds",
            "mnist",
            f"{data}: test accuracy over time",
            f"Seconds of training, evaluation off the clock; each line ends with its fastest run. {BAND} {GOAL}",
            panels.accuracy_over_seconds(groups),
        )


def _swapped(groups: Sequence[Group]) -> Iterator[Made]:
    if groups:
        title = f"{_data_name(groups)}: train and test sets swapped, one pass"
        yield Made("swapped", "swapped", title, f"{BAND} {GOAL}", panels.four_measures(groups))


def _sine_ablation(groups: Sequence[Group]) -> Iterator[Made]:
    by_title = {
        title: some
        for title, methods in (("one part removed, or uphill added", REMOVED), ("one part added", ADDED))
        if (some := [group for group in groups if group.method in methods])
    }
    if by_title:
        caption = f"Mean squared error on the sine. {BAND} {FLOOR}"
        figure = panels.sine_side_by_side(by_title)
        yield Made("ablation-sine", "ablation-sine", "Ablation on the sine", caption, figure)


def _mnist_ablation(groups: Sequence[Group]) -> Iterator[Made]:
    for name, methods, what in (
        ("ablation-mnist", REMOVED, "one part removed from LM (paper)"),
        ("ablation-mnist-added", ADDED, "one part added to vanilla LM"),
    ):
        some = [group for group in groups if group.method in methods]
        if some:
            title = f"Ablation on {_data_name(some)}: {what}"
            yield Made(name, "ablation-mnist", title, f"{BAND} {GOAL}", panels.four_measures(some))


def _groups(logs: Sequence[Log], experiment: str, column: str) -> list[Group]:
    """By method, in the order of tables, those that made a step; empty where no run has this column."""
    if not attempted(select(logs, experiment, column=column)):
        return []
    methods = sorted({log.method for log in select(logs, experiment) if log.steps}, key=place)
    found = {method: runs for method in methods if (runs := runs_of(logs, experiment, method, column))}
    return [Group(method, runs[0].label + " †" * (runs[0].column != column), runs) for method, runs in found.items()]


def _data_name(groups: Sequence[Group]) -> str:
    return str(groups[0].runs[0].head["data"]["name"])
