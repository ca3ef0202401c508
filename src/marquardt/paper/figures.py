"""Figures of the paper's experiments, drawn from logs: medians as lines, quartiles as bands."""

from __future__ import annotations

import io
import math
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullFormatter

from . import files
from .logs import (
    COLUMNS,
    PARTS,
    TARGET,
    Log,
    attempted,
    equal_seconds,
    horizon,
    or_worst,
    place,
    quantile,
    runs_of,
    select,
)
from .tables import NOISE_FLOOR

INK, PAPER = "#1c2126", "#ffffff"  # the report replaces both on a dark page
POINTS = "#8d959e"
RC = {
    "axes.edgecolor": INK,
    "axes.grid": True,
    "axes.labelcolor": INK,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "axes.titlecolor": INK,
    "axes.titlesize": 13,
    "font.size": 13,
    "grid.alpha": 0.2,
    "grid.color": INK,
    "legend.frameon": False,
    "svg.hashsalt": "marquardt",  # the same logs give the same bytes
    "text.color": INK,
    "xtick.color": INK,
    "ytick.color": INK,
}


class Style(NamedTuple):
    color: str
    dashes: Any = "-"
    width: float = 1.8


# Okabe and Ito's colours, safe for the colour-blind; two methods of one colour differ in their dashes.
BLUE, SKY, GREEN, ORANGE, RED, PURPLE = "#0072b2", "#56b4e9", "#009e73", "#e69f00", "#d55e00", "#cc79a7"
LONG = (0, (8, 2))
STYLES = {
    "lm": Style(RED, width=2.8),
    "lm-paper": Style(BLUE, width=2.8),
    "lm-vanilla": Style(SKY, "--"),
    "gauss-newton": Style(SKY, ":"),
    "newton": Style(INK, ":"),
    "bfgs": Style(INK, "--"),
    "lbfgs": Style(INK),
    "hessian-free": Style(PURPLE),
    "kfac": Style(GREEN),
    "sgd": Style(ORANGE, "-."),
    "adam": Style(ORANGE),
    "psgd": Style(GREEN, "--"),
    "tlm": Style(PURPLE, "--"),
    "paper": Style(BLUE, width=2.8),
    "vanilla": Style(SKY, width=2.8),
}
PART_STYLES = (Style(PURPLE, "--"), Style(ORANGE, LONG), Style(GREEN, "-."), Style(INK, ":"))
STYLES |= {f"paper-{part}": style for part, style in zip(PARTS, PART_STYLES, strict=True)}
STYLES |= {f"vanilla+{part}": style for part, style in zip(PARTS, PART_STYLES, strict=True)}

ACCURACIES = (0, 0.5, 0.8, 0.9, 0.95, 0.98, 0.99, 0.995, 0.999)  # ticks
LABELS = {
    "train_loss": "training loss",
    "test_loss": "test loss",
    "train_accuracy": "training accuracy",
    "test_accuracy": "test accuracy",
}
SINGLE, PAIR, QUAD = (6.4, 6.0), (10.5, 5.8), (10.5, 9.4)  # inches: text of 13 points is read on a phone
BAND = (
    "Lines are medians over the seeds, bands quartiles. Runs that diverged or failed count as the worst: a band ends "
    "where they reach a quartile, a line, with a cross, where they reach the median. Runs that ended early keep their "
    "last value."
)


Made = tuple[str, str, str, str, Figure]  # name, experiment, title, caption, figure


@dataclass(frozen=True)
class Drawn:
    """A figure on disk: `path` is its SVG, the PNG lies beside it."""

    name: str
    experiment: str
    title: str
    caption: str
    path: Path
    wide: bool


@dataclass(frozen=True)
class Group:
    """The seeds of a method, as one line."""

    method: str
    label: str
    runs: list[Log]

    @property
    def style(self) -> Style:
        return STYLES.get(self.method, Style(POINTS))


def _shorten(svg: str) -> str:
    """Paths to a tenth of a point and without line breaks, which halves the file."""

    def shorter(match: re.Match[str]) -> str:
        return re.sub(r"(\d\.\d)\d+", r"\1", match[0]).replace("\n", "")

    return re.sub(r' d="M [^"]*"', shorter, svg)


def _saved(figure: Figure, **options: Any) -> bytes:
    content = io.BytesIO()
    figure.savefig(content, **options)
    return content.getvalue()


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


def _figures(logs: Sequence[Log]) -> Iterator[Made]:
    for column in COLUMNS:
        if any(log.column == column for log in logs):
            yield from _comparisons(logs, column)
    yield from _ablations(logs)


def _comparisons(logs: Sequence[Log], column: str) -> Iterator[Made]:
    ending, words = ("", "") if column == "published" else (f"-{column}", f", {column} hyper-parameters")
    as_published = " Dagger: not tuned, shown as published." if column == "tuned" else ""

    sine = _groups(logs, "sine", column)
    floor = f" Dotted line: the noise floor {NOISE_FLOOR:.4f}."
    family = [group for group in sine if group.method in ("lm", "lm-paper", "lm-vanilla")]
    if family:
        figure = _sine_steps(family)
        caption = f"Mean squared error on the sine, full batch. {BAND}{floor}{as_published}"
        yield f"fig1a{ending}", "sine", f"Figure 1a: vanilla against modified LM{words}", caption, figure
    if sine:
        yield (
            f"fig1b-iterations{ending}",
            "sine",
            f"Figure 1b: all methods over iterations{words}",
            f"Mean squared error on the sine. {BAND}{floor}{as_published}",
            _sine_steps(sine),
        )
    if sine and equal_seconds(run for group in sine for run in group.runs) > 0:
        yield (
            f"fig1b-seconds{ending}",
            "sine",
            f"Figure 1b: all methods at equal wall-clock time{words}",
            f"The same runs over seconds of training, evaluation off the clock. {BAND}{floor}{as_published}",
            _sine_seconds(sine),
        )
    fits = [group for group in sine if group.method in ("lm", "lm-paper", "kfac", "adam") and _with_curves(group)]
    if fits:
        yield (
            f"sine-fits{ending}",
            "sine",
            f"The fitted curve after few iterations{words}",
            f"Grey: samples; dotted: sin x + 0.1, their mean; solid: the network of the first seed.{as_published}",
            _fits(fits),
        )
    mnist = _groups(logs, "mnist", column)
    if mnist:
        data = mnist[0].runs[0].head["data"]["name"]
        yield (
            f"mnist{ending}",
            "mnist",
            f"{data}: loss and accuracy over steps{words}",
            f"Read after every step. {BAND} Accuracies on a scale of the logarithm of the error. "
            f"Dotted line: 90 %.{as_published}",
            _four(mnist),
        )
        yield (
            f"mnist-seconds{ending}",
            "mnist",
            f"{data}: test accuracy over time{words}",
            f"Seconds of training, evaluation off the clock; each line ends with its fastest run. {BAND} "
            f"Dotted line: 90 %.{as_published}",
            _accuracy_seconds(mnist),
        )
    swapped = _groups(logs, "swapped", column)
    if swapped:
        data = swapped[0].runs[0].head["data"]["name"]
        yield (
            f"swapped{ending}",
            "swapped",
            f"{data}: train and test sets swapped, one pass{words}",
            f"{BAND} Dotted line: 90 %.{as_published}",
            _four(swapped),
        )


def _ablations(logs: Sequence[Log]) -> Iterator[Made]:
    removed, added = ("paper", *(f"paper-{p}" for p in PARTS)), ("vanilla", *(f"vanilla+{p}" for p in PARTS))
    sine = _groups(logs, "ablation-sine", "published")
    panels = {
        title: some
        for title, methods in (("one part removed", removed), ("one part added", added))
        if (some := [group for group in sine if group.method in methods])
    }
    if panels:
        figure, axes = _canvas((PAIR[0] * len(panels) / 2, PAIR[1]), 1, len(panels))
        for ax, (title, some) in zip(axes, panels.items(), strict=True):
            _over_steps(ax, some, "train_loss", horizon(run for group in sine for run in group.runs))
            ax.set(title=title, xlabel="iterations", ylabel="mean squared error" if ax is axes[0] else "")
            ax.axhline(NOISE_FLOOR, color=INK, linestyle=":", linewidth=1)
            ax.legend(loc="upper center", bbox_to_anchor=(0.5, -0.16), handlelength=2.6)
        low, high = zip(*(ax.get_ylim() for ax in axes), strict=True)
        for ax in axes:
            ax.set_ylim(min(low), max(high))
        caption = f"Mean squared error on the sine. {BAND} Dotted line: the noise floor {NOISE_FLOOR:.4f}."
        yield "ablation-sine", "ablation-sine", "Ablation on the sine", caption, figure
    mnist = _groups(logs, "ablation-mnist", "published")
    for name, methods, title in (
        ("ablation-mnist", removed, "one part removed from the full method"),
        ("ablation-mnist-added", added, "one part added to vanilla LM"),
    ):
        some = [group for group in mnist if group.method in methods]
        if some:
            data = some[0].runs[0].head["data"]["name"]
            caption = f"{BAND} Dotted line: 90 %."
            yield name, "ablation-mnist", f"Ablation on {data}: {title}", caption, _four(some)


def _groups(logs: Sequence[Log], experiment: str, column: str) -> list[Group]:
    """By method, in the order of tables, those that made a step; empty where no run has this column."""
    if not attempted(select(logs, experiment, column=column)):
        return []
    methods = sorted({log.method for log in select(logs, experiment) if log.steps}, key=place)
    found = {method: runs for method in methods if (runs := runs_of(logs, experiment, method, column))}
    return [Group(method, runs[0].label + " †" * (runs[0].column != column), runs) for method, runs in found.items()]


# --- panels -----------------------------------------------------------------------------------------------------------


def _canvas(size: tuple[float, float], rows: int = 1, columns: int = 1) -> tuple[Figure, list[Axes]]:
    figure = Figure(figsize=size, layout="constrained", facecolor=PAPER)
    figure.get_layout_engine().set(w_pad=0.08, h_pad=0.08)  # type: ignore[union-attr, call-arg]
    axes = figure.subplots(rows, columns, squeeze=False)
    for ax in axes.flat:
        ax.set_facecolor("none")
    return figure, list(axes.flat)


def _sine_steps(groups: Sequence[Group]) -> Figure:
    figure, (ax,) = _canvas(SINGLE)
    _over_steps(ax, groups, "train_loss", horizon(run for group in groups for run in group.runs))
    return _sine_finish(figure, ax, "iterations")


def _sine_seconds(groups: Sequence[Group]) -> Figure:
    figure, (ax,) = _canvas(SINGLE)
    runs = [run for group in groups for run in group.runs]
    T = equal_seconds(runs)
    start = min((t for run in runs for t in run.steps.get("seconds", ()) if t > 0), default=T)
    times = np.geomspace(min(max(start, T / 1e4), T / 2), T, 240)
    for group in groups:
        _line(ax, group, "train_loss", times, [[run.at_seconds(t, "train_loss") for run in group.runs] for t in times])
    _loss_range(ax, groups, "train_loss")
    ax.set(xscale="log", xlim=(times[0], T))
    _plain_ticks(ax.xaxis)
    return _sine_finish(figure, ax, "seconds of training")


def _sine_finish(figure: Figure, ax: Axes, xlabel: str) -> Figure:
    ax.axhline(NOISE_FLOOR, color=INK, linestyle=":", linewidth=1)
    ax.set(xlabel=xlabel, ylabel="mean squared error")
    _legend_below(figure, ax, 2)
    return figure


def _four(groups: Sequence[Group]) -> Figure:
    """The paper's four panels."""
    figure, axes = _canvas(QUAD, 2, 2)
    N = horizon(run for group in groups for run in group.runs)
    for ax, key in zip(axes, ("train_loss", "train_accuracy", "test_loss", "test_accuracy"), strict=True):
        _over_steps(ax, groups, key, N)
        ax.set(title=LABELS[key], xlabel="steps" if key.startswith("test") else "")
    _legend_below(figure, axes[0], 3)
    return figure


def _accuracy_seconds(groups: Sequence[Group]) -> Figure:
    figure, (ax,) = _canvas(SINGLE)
    start = min((t for group in groups for run in group.runs for t in run.steps.get("seconds", ()) if t > 0), default=1)
    for group in groups:
        ends = [run.final("seconds") for run in group.runs if run.status == "finished"]
        end = min(ends, default=max(run.final("seconds") for run in group.runs if run.steps))
        times = np.geomspace(start, max(start, end), 240)
        values = [[run.at_seconds(t, "test_accuracy") for run in group.runs] for t in times]
        _line(ax, group, "test_accuracy", times, values)
    _accuracy_range(ax, groups, "test_accuracy")
    ax.set(xscale="log", xlabel="seconds of training", ylabel="test accuracy")
    _plain_ticks(ax.xaxis)
    _legend_below(figure, ax, 2)
    return figure


def _over_steps(ax: Axes, groups: Sequence[Group], key: str, N: int) -> None:
    steps = np.arange(N + 1)
    for group in groups:
        _line(ax, group, key, steps, [[run.at(step, key) for run in group.runs] for step in range(N + 1)])
    (_loss_range if key.endswith("loss") else _accuracy_range)(ax, groups, key)
    ax.set_xlim(0, N)
    ax.xaxis.set_major_locator(MaxNLocator(6, integer=True))


def _line(ax: Axes, group: Group, key: str, x: Any, values: Iterable[Sequence[float]]) -> None:
    """Median and quartiles at each x; a run that broke off counts as the worst there is."""
    ranked = [[or_worst(value, key) for value in at_x] for at_x in values]
    low, median, high = (np.array([quantile(at_x, q) for at_x in ranked]) for q in (0.25, 0.5, 0.75))
    color, dashes, width = group.style
    alive = np.isfinite(median)
    shown = np.where(alive, median, np.nan)
    ax.plot(x, shown, color=color, linestyle=dashes, linewidth=width, label=group.label)
    if len(group.runs) > 1:
        ax.fill_between(x, low, high, where=np.isfinite(low) & np.isfinite(high), color=color, alpha=0.13, linewidth=0)
    if not alive.all() and alive.any():
        last = int(np.flatnonzero(alive)[-1])
        ax.plot(x[last], median[last], "x", color=color, markersize=9, markeredgewidth=2.4)


def _loss_range(ax: Axes, groups: Sequence[Group], key: str) -> None:
    """From the lowest median to twice the highest start: what diverges leaves the panel at the top."""
    starts = [run.at(0, key) for group in groups for run in group.runs]
    lines = [np.asarray(line.get_ydata(), dtype=np.float64) for line in ax.get_lines()]
    finite = np.concatenate([*lines, np.asarray(starts, dtype=np.float64)])
    finite = finite[np.isfinite(finite) & (finite > 0)]
    ax.set_yscale("log")
    if finite.size:
        ax.set_ylim(0.7 * finite.min(), 2 * max((start for start in starts if start > 0), default=finite.max()))
        if finite.max() < 30 * finite.min():
            ax.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    _plain_ticks(ax.yaxis)


def _accuracy_range(ax: Axes, groups: Sequence[Group], key: str) -> None:
    """−log(1 − accuracy): 90, 99 and 99.9 % lie equally far apart."""
    small = 1e-3  # keeps 100 % on the scale
    forward: Callable[[Any], Any] = lambda a: -np.log10(np.maximum(1 + small - a, small / 2))  # noqa: E731
    inverse: Callable[[Any], Any] = lambda s: 1 + small - 10.0 ** (-s)  # noqa: E731
    reached = [v for group in groups for run in group.runs for v in run.steps.get(key, ()) if math.isfinite(v)]
    best = max(reached, default=TARGET)
    top = best + 0.2 * (1 + small - best)
    ax.set_yscale("function", functions=(forward, inverse))
    ax.set_ylim(0, max(top, 0.93))
    ax.set_yticks([tick for tick in ACCURACIES if tick <= max(top, 0.93)])
    ax.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{100 * value:g} %"))
    ax.axhline(TARGET, color=INK, linestyle=":", linewidth=1)


def _plain_ticks(axis: Axis) -> None:
    """0.01 rather than 10⁻², which is too small on a phone."""
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axis.set_minor_formatter(NullFormatter())


def _legend_below(figure: Figure, ax: Axes, columns: int) -> None:
    handles = [line for line in ax.get_lines() if not str(line.get_label()).startswith("_")]
    figure.legend(handles=handles, loc="outside lower center", ncols=columns, handlelength=2.6)


def _with_curves(group: Group) -> list[Log]:
    return [run for run in group.runs if any(run.curves)]  # after step 0


def _fits(groups: Sequence[Group]) -> Figure:
    runs = [_with_curves(group)[0] for group in groups]
    steps = sorted({step for run in runs for step in run.curves if step > 0})[:4]
    figure, axes = _canvas((2.65 * len(steps), 1.9 * len(groups) + 0.9), len(groups), len(steps))
    for row, (group, run) in enumerate(zip(groups, runs, strict=True)):
        for column, step in enumerate(steps):
            ax = axes[row * len(steps) + column]
            if run.data:
                ax.plot(*run.data, ".", color=POINTS, markersize=1.5, rasterized=True)
                x = np.array(run.data[0])
                ax.plot(x, np.sin(x) + 0.1, color=INK, linestyle=":", linewidth=1)
            if step in run.curves:
                ax.plot(*run.curves[step], color=group.style.color, linewidth=2.4)
            ax.set(ylim=(-1.5, 1.7), yticks=(-1, 0, 1), xticks=(-10, 0, 10))
            ax.grid(False)
            if row == 0:
                ax.set_title(f"{step} iteration{'s' * (step > 1)}")
            if row < len(groups) - 1:
                ax.set_xticklabels([])
            if column:
                ax.set_yticklabels([])
            else:
                ax.set_ylabel(group.label)
    handles = [
        Line2D([], [], color=POINTS, marker=".", linestyle=""),
        Line2D([], [], color=INK, linestyle=":", linewidth=1),
        Line2D([], [], color=INK, linewidth=2.4),
    ]
    figure.legend(handles, ["samples", "sin x + 0.1", "network"], loc="outside lower center", ncols=3)
    return figure
