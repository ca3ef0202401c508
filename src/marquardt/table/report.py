"""The report of a run: one HTML page with all it needs inside, light and dark."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import NamedTuple

import jinja2

from .. import __version__
from ..values import on_page, shortened
from .predictions import BINS, LEVEL, Findings, confusion, quantile, reliability
from .reading import counted

WORST = 10  # rows in the table of the worst
SHOWN = 6  # of their columns, the most important ones
RANKED = 20  # columns in the chart of importances
MOST_STEPS = 400  # drawn of a network
MOST_POINTS = 1500  # drawn of a target
ALIKE = 12  # names of columns to which the same was done
INTERVAL = f"{100 * LEVEL:.0f} % interval"
WIDTH, HEIGHT = 480, 340  # in units of the drawing; text of 13 of them can be read on a phone
LEFT, RIGHT, TOP, BOTTOM = 64, 14, 12, 46
HEIGHT_OF_BAR = 24

Points = Sequence[tuple[float, float]]


class Picture(NamedTuple):
    title: str
    chart: Chart
    caption: str


def _four(value: float) -> str:
    """Four digits of a number, a dash if there is none."""
    return f"{value:.4g}" if math.isfinite(value) else "–"


def _percent(value: float) -> str:
    return f"{100 * value:.1f} %"


TILES: dict[str, tuple[str, Callable[[float], str]]] = {
    "accuracy": ("accuracy", _percent),
    "accuracy_of_the_largest_class": ("the largest class alone", _percent),
    "log_loss": ("log loss", "{:.3g}".format),
    "calibration_error": ("calibration error", "{:.3f}".format),
    "rmse": ("RMSE", _four),
    "rmse_of_the_mean": ("RMSE of the mean alone", _four),
    "r2": ("R²", _four),
    "coverage": (f"inside the {INTERVAL}s", _percent),
}


def page(findings: Findings) -> str:
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent), autoescape=True, finalize=on_page,
        undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True,
    )  # fmt: skip
    prepared, networks = findings.prepared, len(findings.committee.history)
    target, rows = prepared.target, prepared.judged
    took = f"A committee of {counted(networks, 'network')} was trained in {findings.seconds:.3g} s."
    return environment.get_template("report.html.jinja").render(
        title=f"{', '.join(target.names)} from {findings.request.data.name}",
        judged="test" if len(prepared.test) else "training",
        tiles=_tiles(findings),
        sentences=[*findings.told, *prepared.says, *findings.chosen, took],
        columns=_columns(findings),
        learning=_learning(findings),
        pictures=_of_classes(findings) if target.classes else _of_numbers(findings),
        classes=target.classes,
        confusion=confusion(prepared.Y[rows], findings.predicted.mean[rows]) if target.classes else None,
        importance=_importance(findings),
        worst=_worst(findings),
        measured=_measures(findings),
        rows=len(rows),
        version=__version__,
        written=datetime.now().astimezone().isoformat(" ", timespec="minutes"),
    )


def _tiles(findings: Findings) -> list[tuple[str, str]]:
    found, prepared = findings.judged, findings.prepared
    size = (f"{len(prepared.judged):,}", f"{'test' if len(prepared.test) else 'training'} rows")
    if len(found) > 1:
        return [*((_four(m["r2"]), f"R² of {name}") for name, m in found.items()), size]
    [measures] = found.values()
    tiles = [(form(measures[key]), words) for key, (words, form) in TILES.items() if key in measures]
    return [*tiles, size]


def _columns(findings: Findings) -> list[tuple[str, str, str]]:
    """What was done to the columns; those to which the same was done share a line."""
    alike: dict[tuple[str, str], list[str]] = {}
    for name, read, done in findings.prepared.columns.told:
        alike.setdefault((read, done), []).append(name)
    return [
        (", ".join(names[:ALIKE]) + f" and {len(names) - ALIKE} more" * (len(names) > ALIKE), read, done)
        for (read, done), names in alike.items()
    ]


def _measures(findings: Findings) -> list[tuple[str, ...]]:
    """Rows of a table: set, target, measure by measure."""
    found = [(name, target, m) for name, targets in findings.measured.items() for target, m in targets.items()]
    head = ("rows", "target", *(key.replace("_", " ") for key in found[0][2]))
    return [head, *((name, target, *map(_four, m.values())) for name, target, m in found)]


def _worst(findings: Findings) -> tuple[list[str], list[list[str]]]:
    """The worst predictions: the names of a table, and its rows with the values of the columns that matter most."""
    prepared, (mean, std) = findings.prepared, findings.predicted
    target, Y, rows = prepared.target, prepared.Y, prepared.judged
    if target.classes:
        size = -mean[rows, Y[rows]]
        head = ["true", "its probability", "predicted", "its probability"]
    else:
        size = ((mean - Y)[rows] / Y[prepared.train].std(0)).abs().amax(1)
        head = [words for name in target.names for words in (f"true {name}", f"predicted {name}", "± (1 std)")]

    def cells(i: int) -> list[str]:
        if std is None:
            places = int(Y[i]), int(mean[i].argmax())
            return [text for k in places for text in (prepared.target.classes[k], f"{mean[i, k]:.3f}")]
        return [f"{value:.4g}" for triple in zip(Y[i], mean[i], std[i], strict=True) for value in triple]

    names = [importance.name for importance in findings.importances[:SHOWN]]
    numbers = {column.name for column in prepared.columns.columns if column.kind == "number"}
    body = []
    for i in rows[size.argsort(descending=True, stable=True)[:WORST]].tolist():
        values = [(prepared.frame[name].iloc[i], name in numbers) for name in names]
        shown = ["–" if v != v else _four(float(v)) if number else shortened(str(v)) for v, number in values]
        body.append([f"{prepared.frame.index[i] + 1:,}", *cells(i), *shown])
    return ["row", *head, *names], body


# --- pictures ---


def _learning(findings: Findings) -> Picture:
    histories = findings.committee.history
    curves = {}
    for key in ("loss", "validation"):
        lines = [[(e.step, y) for e in history if math.isfinite(y := getattr(e, key))] for history in histories]
        curves[key] = [line[:: -(-len(line) // MOST_STEPS)] for line in lines if line]
    points = [point for lines in curves.values() for line in lines for point in line]
    drawn = chart([x for x, _ in points], [y for _, y in points], "step", "loss", log=True)
    for key, style, words in (("loss", "first", "training"), ("validation", "second", "rows left out")):
        if curves[key]:
            drawn.draw(curves[key], f"line thin {style}", words)
    caption = f"Every line is one of the {len(histories)} networks, in units of the standardised target."
    return Picture("Learning curve", drawn, caption)


def _of_numbers(findings: Findings) -> list[Picture]:
    """Predicted against true, and residuals, for each target; some of the rows if they are too many to draw."""
    prepared, rows = findings.prepared, findings.prepared.judged
    some = rows[:: -(-len(rows) // MOST_POINTS)]
    few = "" if len(some) == len(rows) else f" {len(some):,} of {len(rows):,} rows are drawn."
    found, std = findings.predicted.of(some)
    assert std is not None
    pictures = []
    for k, name in enumerate(prepared.target.names):
        true, mean, half = (t[:, k].tolist() for t in (prepared.Y[some], found, quantile(LEVEL) * std))
        against = chart(true, mean, f"true {name}", f"predicted {name}", same=True)
        against.draw([[(low := min(true + mean), low), (high := max(true + mean), high)]], "line rule")
        ends = zip(true, mean, half, strict=True)
        spans = [[(t, max(m - h, against.y.low)), (t, min(m + h, against.y.high))] for t, m, h in ends]
        against.draw(spans, "spans second", INTERVAL)
        against.dots(list(zip(true, mean, strict=True)), "first")
        residuals = [m - t for t, m in zip(true, mean, strict=True)]
        left = chart(mean, [*residuals, 0.0], f"predicted {name}", "predicted − true")
        left.draw([[(min(mean), 0.0), (max(mean), 0.0)]], "line rule")
        left.dots(list(zip(mean, residuals, strict=True)), "first")
        right = f"On the line a prediction is right. Upright lines are {INTERVAL}s.{few}"
        pictures.append(Picture(f"{name}: predicted against true", against, right))
        shape = "A shape or a funnel in here is something that the network has not learnt."
        pictures.append(Picture(f"{name}: residuals", left, shape))
    return pictures


def _of_classes(findings: Findings) -> list[Picture]:
    rows = findings.prepared.judged
    bins = reliability(findings.prepared.Y[rows], findings.predicted.mean[rows])
    drawn = chart([0.0, 1.0], [0.0, 1.0], "probability of the predicted class", "part that is right")
    most, points = max(b.rows for b in bins), [(b.confidence, b.accuracy) for b in bins]
    places = [min(int(b.confidence * BINS), BINS - 1) for b in bins]
    boxes = [(k / BINS, (k + 0.97) / BINS, 0.0, 0.25 * b.rows / most) for k, b in zip(places, bins, strict=True)]
    drawn.boxes(boxes, "faint")
    drawn.draw([[(0.0, 0.0), (1.0, 1.0)]], "line rule")
    drawn.draw([points], "line first")
    drawn.dots(points, "first large")
    caption = "On the dotted line probabilities are what they say. Boxes show how many rows have such a probability."
    return [Picture("Reliability", drawn, caption)]


def _importance(findings: Findings) -> Picture:
    shown = findings.importances[:RANKED]
    what = "log loss" if findings.prepared.target.classes else "RMSE (in standard deviations)"
    more = len(findings.importances) - len(shown)
    caption = "How much worse predictions get once a column's values are dealt to other rows, and its spread."
    caption += f" Less important: {counted(more, 'further column')}." if more else ""
    return Picture("Importance of the columns", ranking(shown, f"rise of the {what}"), caption)


# --- charts as SVG: their colours are the page's, light or dark, by the classes that its style names ---


@dataclass(frozen=True)
class Axis:
    """Values to places between two ends, by themselves or by their logarithms; or names, a unit each."""

    low: float
    high: float
    first: float
    last: float
    log: bool = False
    names: Sequence[str] = ()

    @staticmethod
    def of(values: Sequence[float], first: float, last: float, *, log: bool = False, room: float = 0.04) -> Axis:
        """One that shows all of the values, with some room at both ends; by logarithms only if all are positive."""
        values = [value for value in values if math.isfinite(value)] or [0.0, 1.0]
        log = log and min(values) > 0
        low, high = (math.log10(value) if log else value for value in (min(values), max(values)))
        room *= (high - low) or abs(high) or 1.0
        low, high = low - room, high + room
        return Axis(10**low, 10**high, first, last, True) if log else Axis(low, high, first, last)

    def at(self, value: float) -> float:
        low, high, value = (math.log10(v) if self.log else v for v in (self.low, self.high, value))
        return round(self.first + (value - low) / (high - low) * (self.last - self.first), 1)

    def ticks(self) -> list[tuple[float, str]]:
        """Names, powers of ten, or four to eight round numbers: 1, 2 or 5 times a power of ten apart."""
        if self.names:
            return [(k + 0.5, name) for k, name in enumerate(self.names)]
        values: list[float] = []
        if self.log:
            low, high = math.log10(self.low), math.log10(self.high)
            every = max(1, round((high - low) / 5))
            values = [10.0**k for k in range(math.ceil(low), math.floor(high) + 1) if k % every == 0]
        if len(values) < 2:
            raw = (self.high - self.low) / 8
            power = 10.0 ** math.floor(math.log10(raw))
            step = next(power * factor for factor in (1, 2, 5, 10) if power * factor >= raw)
            values = [step * k for k in range(math.ceil(self.low / step), math.floor(self.high / step) + 1)]
        return [(value, _number(value)) for value in values if value > 0 or not self.log]


def _number(value: float) -> str:
    return f"{value:.4g}".replace("e-0", "e-").replace("e+0", "e").replace("e+", "e").replace("-", "−")


@dataclass
class Chart:
    """Axes, and paths with their classes in them; `legend` has the classes and words of what is in it."""

    x: Axis
    y: Axis
    xlabel: str
    ylabel: str = ""
    paths: list[tuple[str, str]] = field(default_factory=list)
    legend: list[tuple[str, str]] = field(default_factory=list)

    def draw(self, lines: Sequence[Points], style: str, words: str = "") -> None:
        """Lines, all of them as one path."""
        joined = ["M" + "L".join(f"{self.x.at(x)} {self.y.at(y)}" for x, y in line) for line in lines]
        self.paths.append((style, "".join(joined)))
        self.legend += [(style, words)] if words else []

    def dots(self, points: Points, style: str) -> None:
        """A line of no length with round ends is a dot."""
        self.draw([(point, point) for point in points], f"dots {style}")

    def boxes(self, boxes: Sequence[tuple[float, float, float, float]], style: str) -> None:
        """From x₀ to x₁, from y₀ to y₁."""
        self.draw([[(x0, y0), (x1, y0), (x1, y1), (x0, y1)] for x0, x1, y0, y1 in boxes], f"box {style}")


def chart(
    x: Sequence[float], y: Sequence[float], xlabel: str, ylabel: str, *, log: bool = False, same: bool = False
) -> Chart:
    """Axes for these values; `log`: upwards by logarithms; `same`: the same numbers on both axes."""
    x, y = ([*x, *y], [*x, *y]) if same else (x, y)
    across = Axis.of(x, LEFT, WIDTH - RIGHT)
    return Chart(across, Axis.of(y, HEIGHT - BOTTOM, TOP, log=log), xlabel, ylabel)


def ranking(rows: Sequence[tuple[str, float, float]], xlabel: str) -> Chart:
    """Horizontal bars with names before and spreads around their ends."""
    names = [name if len(name) <= 22 else name[:21] + "…" for name, _, _ in rows]
    ends = [0.0, *(value + sign * spread for _, value, spread in rows for sign in (1, -1))]
    x = Axis.of(ends, 16 + 7.2 * max(map(len, names)), WIDTH - RIGHT, room=0.02)
    found = Chart(x, Axis(0, len(rows), 4, 4 + HEIGHT_OF_BAR * len(rows), names=names), xlabel)
    found.boxes([(0.0, value, k + 0.17, k + 0.83) for k, (_, value, _) in enumerate(rows)], "first")
    found.draw([[(v - s, k + 0.5), (v + s, k + 0.5)] for k, (_, v, s) in enumerate(rows)], "spread")
    return found
