"""Panels of the figures: medians as lines, quartiles as bands, and the fitted curves of the sine."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullFormatter

from .logs import Log, equal_seconds, horizon, or_worst, quantile
from .problems import SINE_ENDS, SINE_NOISE, SINE_NOISE_FLOOR
from .styles import INK, PAPER, POINTS, STYLES, Style
from .vocabulary import MEASURES, TARGET

ACCURACIES = (0, 0.5, 0.8, 0.9, 0.95, 0.98, 0.99, 0.995, 0.999)  # ticks
SINGLE, PAIR, QUAD = (6.4, 6.0), (10.5, 5.8), (10.5, 9.4)  # inches: text of 13 points is read on a phone
SINE_MEAN = f"sin x + {SINE_NOISE / 2:g}"


@dataclass(frozen=True)
class Group:
    """The seeds of a method, as one line."""

    method: str
    label: str
    runs: list[Log]

    @property
    def style(self) -> Style:
        return STYLES.get(self.method, Style(POINTS))


def _canvas(size: tuple[float, float], rows: int = 1, columns: int = 1) -> tuple[Figure, list[Axes]]:
    figure = Figure(figsize=size, layout="constrained", facecolor=PAPER)
    figure.get_layout_engine().set(w_pad=0.08, h_pad=0.08)  # type: ignore[union-attr, call-arg]
    axes = figure.subplots(rows, columns, squeeze=False)
    for ax in axes.flat:
        ax.set_facecolor("none")
    return figure, list(axes.flat)


def sine_over_steps(groups: Sequence[Group]) -> Figure:
    figure, (ax,) = _canvas(SINGLE)
    _over_steps(ax, groups, "train_loss", horizon(run for group in groups for run in group.runs))
    return _sine_finish(figure, ax, "iterations")


def sine_over_seconds(groups: Sequence[Group]) -> Figure:
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
    ax.axhline(SINE_NOISE_FLOOR, color=INK, linestyle=":", linewidth=1)
    ax.set(xlabel=xlabel, ylabel="mean squared error")
    _legend_below(figure, ax, 2)
    return figure


def sine_side_by_side(panels: Mapping[str, Sequence[Group]]) -> Figure:
    """A panel for each title, all with the same axes."""
    figure, axes = _canvas((PAIR[0] * len(panels) / 2, PAIR[1]), 1, len(panels))
    N = horizon(run for groups in panels.values() for group in groups for run in group.runs)
    for ax, (title, groups) in zip(axes, panels.items(), strict=True):
        _over_steps(ax, groups, "train_loss", N)
        ax.set(title=title, xlabel="iterations", ylabel="mean squared error" if ax is axes[0] else "")
        ax.axhline(SINE_NOISE_FLOOR, color=INK, linestyle=":", linewidth=1)
        ax.legend(loc="upper center", bbox_to_anchor=(0.5, -0.16), handlelength=2.6)
    low, high = zip(*(ax.get_ylim() for ax in axes), strict=True)
    for ax in axes:
        ax.set_ylim(min(low), max(high))
    return figure


def four_measures(groups: Sequence[Group]) -> Figure:
    """The paper's four panels."""
    figure, axes = _canvas(QUAD, 2, 2)
    N = horizon(run for group in groups for run in group.runs)
    for ax, (key, label) in zip(axes, MEASURES.items(), strict=True):
        _over_steps(ax, groups, key, N)
        ax.set(title=label, xlabel="steps" if key.startswith("test") else "")
    _legend_below(figure, axes[0], 3)
    return figure


def accuracy_over_seconds(groups: Sequence[Group]) -> Figure:
    figure, (ax,) = _canvas(SINGLE)
    start = min((t for group in groups for run in group.runs for t in run.steps.get("seconds", ()) if t > 0), default=1)
    for group in groups:
        ends = [run.final("seconds") for run in group.runs if run.status == "finished"]
        end = min(ends, default=max(run.final("seconds") for run in group.runs if run.steps))
        times = np.geomspace(start, max(start, end), 240)
        values = [[run.at_seconds(t, "test_accuracy") for run in group.runs] for t in times]
        _line(ax, group, "test_accuracy", times, values)
    _accuracy_range(ax, groups, "test_accuracy")
    ax.set(xscale="log", xlabel="seconds of training", ylabel=MEASURES["test_accuracy"])
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


def with_curves(group: Group) -> list[Log]:
    return [run for run in group.runs if any(run.curves)]  # after step 0


def fits(groups: Sequence[Group]) -> Figure:
    runs = [with_curves(group)[0] for group in groups]
    steps = sorted({step for run in runs for step in run.curves if step > 0})[:4]
    figure, axes = _canvas((2.65 * len(steps), 1.9 * len(groups) + 0.9), len(groups), len(steps))
    for row, (group, run) in enumerate(zip(groups, runs, strict=True)):
        for column, step in enumerate(steps):
            ax = axes[row * len(steps) + column]
            if run.data:
                ax.plot(*run.data, ".", color=POINTS, markersize=1.5, rasterized=True)
                x = np.array(run.data[0])
                ax.plot(x, np.sin(x) + SINE_NOISE / 2, color=INK, linestyle=":", linewidth=1)
            if step in run.curves:
                ax.plot(*run.curves[step], color=group.style.color, linewidth=2.4)
            ax.set(ylim=(-1.5, 1.7), yticks=(-1, 0, 1), xticks=(SINE_ENDS[0], 0, SINE_ENDS[1]))
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
    figure.legend(handles, ["samples", SINE_MEAN, "network"], loc="outside lower center", ncols=3)
    return figure
