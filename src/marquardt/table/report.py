"""The report of a run: one HTML page with all it needs inside, light and dark.

Charts are SVG in the page; their colours are the page's, by the classes that its style names.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import datetime
from html import escape
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import jinja2

from .. import __version__
from ..texts import on_page, short, visible
from .columns import ClassTarget
from .findings import BINS, LEVEL, Findings, confusion, quantile, reliability
from .reading import counted

WORST = 10  # rows in the table of the worst
SHOWN = 6  # of their columns, the most important ones
RANKED = 20  # columns in the chart of importances
MOST_STEPS = 400  # drawn of a network
ALIKE = 12  # names of columns to which the same was done

WIDTH, HEIGHT = 480, 340  # in units of the drawing; text of 13 of them can be read on a phone
LEFT, RIGHT, TOP, BOTTOM = 64, 14, 12, 46
HEIGHT_OF_BAR = 24
MOST_POINTS = 1500

T = TypeVar("T")
Points = Sequence[tuple[float, float]]


class Picture(NamedTuple):
    title: str
    svg: str
    caption: str


def page(findings: Findings) -> str:
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent), autoescape=True, finalize=on_page,
        undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True,
    )  # fmt: skip
    prepared, networks = findings.prepared, len(findings.committee.history)
    took = f"A committee of {counted(networks, 'network')} was trained in {findings.seconds:.3g} s."
    classes = isinstance(prepared.target, ClassTarget)
    return environment.get_template("report.html.jinja").render(
        title=f"{', '.join(prepared.target.names)} from {findings.request.data.name}",
        judged="test" if len(prepared.test) else "training",
        tiles=_tiles(findings),
        sentences=[*findings.told, *prepared.says, *findings.chosen, took],
        columns=_columns(findings),
        learning=_learning(findings),
        pictures=_of_classes(findings) if classes else _of_numbers(findings),
        confusion=_confusion(findings) if classes else None,
        importance=_importance(findings),
        worst=_worst(findings),
        measured=_measures(findings),
        rows=len(prepared.judged),
        version=__version__,
        written=datetime.now().astimezone().isoformat(" ", timespec="minutes"),
    )


def _tiles(findings: Findings) -> list[tuple[str, str]]:
    found, prepared = findings.judged, findings.prepared
    first = next(iter(found.values()))
    size = (f"{len(prepared.judged):,}", f"{'test' if len(prepared.test) else 'training'} rows")
    if "accuracy" in first:
        shares = [(first["accuracy"], "accuracy"), (first["accuracy_of_the_largest_class"], "the largest class alone")]
        return [
            *((f"{100 * value:.1f} %", words) for value, words in shares),
            (f"{first['log_loss']:.3g}", "log loss"), (f"{first['calibration_error']:.3f}", "calibration error"), size,
        ]  # fmt: skip
    if len(found) > 1:
        return [*((_four(m["r2"]), f"R² of {name}") for name, m in found.items()), size]
    values = [("rmse", "RMSE"), ("rmse_of_the_mean", "RMSE of the mean alone"), ("r2", "R²")]
    inside = (f"{100 * first['coverage']:.1f} %", f"inside the {100 * LEVEL:.0f} % intervals")
    return [*((_four(first[key]), words) for key, words in values), inside, size]


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
    rows: list[tuple[str, ...]] = []
    for name, found in findings.measured.items():
        for target, values in found.items():
            if not rows:
                rows.append(("rows", "target", *(key.replace("_", " ") for key in values)))
            rows.append((name, target, *(_four(value) for value in values.values())))
    return rows


def _four(value: float) -> str:
    """Four digits of a number, a dash if there is none."""
    return f"{value:.4g}" if math.isfinite(value) else "–"


def _worst(findings: Findings) -> tuple[list[str], list[list[str]]]:
    """The worst predictions: the names of a table, and its rows with the values of the columns that matter most."""
    prepared, (mean, std) = findings.prepared, findings.predicted
    target, Y, rows = prepared.target, prepared.Y, prepared.judged
    if isinstance(target, ClassTarget):
        size = -mean[rows, Y[rows]]
        head = ["true", "its probability", "predicted", "its probability"]
    else:
        size = ((mean - Y)[rows] / Y[prepared.train].std(0)).abs().amax(1)
        head = [words for name in target.names for words in (f"true {name}", f"predicted {name}", "± (1 std)")]

    def cells(i: int) -> list[str]:
        if isinstance(target, ClassTarget):
            return [
                text for k in (int(Y[i]), int(mean[i].argmax())) for text in (target.classes[k], f"{mean[i, k]:.3f}")
            ]
        assert std is not None
        return [f"{value:.4g}" for triple in zip(Y[i], mean[i], std[i], strict=True) for value in triple]

    names = [importance.name for importance in findings.importances[:SHOWN]]
    numbers = {column.name for column in prepared.columns.columns if column.kind == "number"}
    body = []
    for i in rows[size.argsort(descending=True, stable=True)[:WORST]].tolist():
        values = [(prepared.frame[name].iloc[i], name in numbers) for name in names]
        shown = ["–" if v != v else _four(float(v)) if number else short(str(v)) for v, number in values]
        body.append([f"{prepared.frame.index[i] + 1:,}", *cells(i), *shown])
    return ["row", *head, *names], body


# --- pictures ---


def _learning(findings: Findings) -> Picture:
    histories = findings.committee.history
    curves = []
    for key, style, words in (("loss", "first thin", "training"), ("validation", "second thin", "rows left out")):
        lines = [[(e.step, y) for e in history if (y := getattr(e, key)) == y] for history in histories]
        curves += [
            (thinned(line, MOST_STEPS), style, words if k == 0 else "") for k, line in enumerate(filter(None, lines))
        ]
    points = [point for line, _, _ in curves for point in line]
    drawn = chart([x for x, _ in points], [y for _, y in points], "step", "loss", log=True)
    for curve in curves:
        drawn.line(*curve)
    caption = f"Every line is one of the {len(histories)} networks, in units of the standardised target."
    return Picture("Learning curve", drawn.svg("Loss by step"), caption)


def _of_numbers(findings: Findings) -> list[Picture]:
    """Predicted against true, and residuals, for each target."""
    prepared, rows = findings.prepared, findings.prepared.judged
    mean, std = findings.predicted.of(rows)
    assert std is not None
    half = quantile(LEVEL) * std
    pictures = []
    for k, name in enumerate(prepared.target.names):
        triples = list(zip(*(t[:, k].tolist() for t in (prepared.Y[rows], mean, half)), strict=True))
        pictures += _pair(name, thinned(triples), len(rows))
    return pictures


def _pair(name: str, triples: Sequence[tuple[float, float, float]], rows: int) -> list[Picture]:
    true, mean, _ = (list(values) for values in zip(*triples, strict=True))
    few = "" if len(triples) == rows else f" {len(triples):,} of {rows:,} rows are drawn."
    against = chart(true, mean, f"true {name}", f"predicted {name}", same=True)
    against.corner = "left"  # far from the line, nothing is there
    against.line([(low := min(true + mean), low), (high := max(true + mean), high)], "rule")
    spans = [(t, max(m - h, against.y.low), min(m + h, against.y.high)) for t, m, h in triples]
    against.bars(spans, "second", f"{100 * LEVEL:.0f} % interval")
    against.dots(list(zip(true, mean, strict=True)), "first")
    residuals = [m - t for t, m, _ in triples]
    left = chart(mean, [*residuals, 0.0], f"predicted {name}", "predicted − true")
    left.line([(min(mean), 0.0), (max(mean), 0.0)], "rule")
    left.dots(list(zip(mean, residuals, strict=True)), "first")
    return [
        Picture(f"{name}: predicted against true", against.svg(f"{name}, predicted against true"),
                f"On the line a prediction is right. Upright lines are {100 * LEVEL:.0f} % intervals.{few}"),
        Picture(f"{name}: residuals", left.svg(f"{name}, residuals"),
                "A shape or a funnel in here is something that the network has not learnt."),
    ]  # fmt: skip


def _of_classes(findings: Findings) -> list[Picture]:
    rows = findings.prepared.judged
    bins = reliability(findings.prepared.Y[rows], findings.predicted.mean[rows])
    drawn = chart([0.0, 1.0], [0.0, 1.0], "probability of the predicted class", "part that is right")
    most, width = max(b.rows for b in bins), 1 / BINS
    boxes = [(k := min(int(b.confidence / width), BINS - 1) * width, k + width, 0.25 * b.rows / most) for b in bins]
    drawn.boxes(boxes, "faint")
    drawn.line([(0.0, 0.0), (1.0, 1.0)], "rule")
    drawn.line([(b.confidence, b.accuracy) for b in bins], "first")
    drawn.dots([(b.confidence, b.accuracy) for b in bins], "first large")
    caption = "On the dotted line probabilities are what they say. Boxes show how many rows have such a probability."
    return [Picture("Reliability", drawn.svg("Reliability diagram"), caption)]


def _confusion(findings: Findings) -> dict[str, Any]:
    prepared, rows = findings.prepared, findings.prepared.judged
    assert isinstance(prepared.target, ClassTarget)
    counts = confusion(prepared.Y[rows], findings.predicted.mean[rows])
    shares = [[count / max(sum(row), 1) for count in row] for row in counts]
    cells = [list(zip(row, share, strict=True)) for row, share in zip(counts, shares, strict=True)]
    return {"classes": prepared.target.classes, "rows": list(zip(prepared.target.classes, cells, strict=True))}


def _importance(findings: Findings) -> Picture:
    shown = findings.importances[:RANKED]
    what = "log loss" if isinstance(findings.prepared.target, ClassTarget) else "RMSE (in standard deviations)"
    svg = ranking([(i.name, i.rise, i.spread) for i in shown], f"rise of the {what}", "Importance of the columns")
    more = len(findings.importances) - len(shown)
    caption = "How much worse predictions get once a column's values are dealt to other rows, and its spread."
    if more:
        caption += f" {'One more column matters' if more == 1 else f'{more} more columns matter'} less."
    return Picture("Importance of the columns", svg, caption)


# --- charts ---


@dataclass(frozen=True)
class Axis:
    """Values to places between two ends, by themselves or by their logarithms."""

    low: float
    high: float
    first: float
    last: float
    log: bool = False

    @staticmethod
    def of(values: Sequence[float], first: float, last: float, *, log: bool = False, room: float = 0.04) -> Axis:
        """One that shows all of the values, with some room at both ends; by logarithms only if all are positive."""
        values = [value for value in values if math.isfinite(value)] or [0.0, 1.0]
        low, high = min(values), max(values)
        if log and low > 0:
            low, high = math.log10(low), math.log10(high)
        else:
            log = False
        span = (high - low) or abs(high) or 1.0
        low, high = low - room * span, high + room * span
        return Axis(10**low, 10**high, first, last, True) if log else Axis(low, high, first, last)

    def at(self, value: float) -> float:
        low, high, value = (math.log10(v) if self.log else v for v in (self.low, self.high, value))
        return self.first + (value - low) / (high - low) * (self.last - self.first)

    def ticks(self) -> list[float]:
        if not self.log:
            return _ticks(self.low, self.high)
        low, high = math.log10(self.low), math.log10(self.high)
        every = max(1, round((high - low) / 5))
        powers = [10.0**k for k in range(math.ceil(low), math.floor(high) + 1) if k % every == 0]
        return powers if len(powers) > 1 else [tick for tick in _ticks(self.low, self.high) if tick > 0]


def _ticks(low: float, high: float) -> list[float]:
    """Four to eight round numbers: 1, 2 or 5 times a power of ten apart."""
    raw = (high - low) / 8
    power = 10.0 ** math.floor(math.log10(raw))
    every = next(power * factor for factor in (1, 2, 5, 10) if power * factor >= raw)
    return [every * k for k in range(math.ceil(low / every), math.floor(high / every) + 1)]


def _number(value: float) -> str:
    return f"{value:.4g}".replace("e-0", "e-").replace("e+0", "e").replace("e+", "e").replace("-", "−")


def thinned(points: Sequence[T], most: int = MOST_POINTS) -> Sequence[T]:
    """Points at even distances, if there are too many to draw."""
    every = math.ceil(len(points) / most)
    return points[::every] if every > 1 else points


@dataclass
class Chart:
    """Axes with something in them; `svg` is the whole."""

    x: Axis
    y: Axis
    xlabel: str
    ylabel: str
    parts: list[str] = field(default_factory=list)
    legend: list[tuple[str, str]] = field(default_factory=list)  # class and words
    corner: str = "right"  # of the legend, at the top

    def dots(self, points: Points, style: str, words: str = "") -> None:
        """A line of no length with round ends is a dot, and all of them are one path."""
        self._path("".join(f"M{self.x.at(x):.1f} {self.y.at(y):.1f}h0" for x, y in points), f"dots {style}", words)

    def bars(self, bars: Sequence[tuple[float, float, float]], style: str, words: str = "") -> None:
        """Upright lines from one value to another."""
        path = "".join(f"M{self.x.at(x):.1f} {self.y.at(low):.1f}V{self.y.at(high):.1f}" for x, low, high in bars)
        self._path(path, f"spans {style}", words)

    def line(self, points: Points, style: str, words: str = "") -> None:
        places = [f"{self.x.at(x):.1f} {self.y.at(y):.1f}" for x, y in points if math.isfinite(y)]
        self._path("M" + "L".join(places), f"line {style}", words)

    def boxes(self, boxes: Sequence[tuple[float, float, float]], style: str) -> None:
        """From x₀ to x₁, from the axis up to y."""
        for x0, x1, y in boxes:
            left, right, top, foot = self.x.at(x0), self.x.at(x1), self.y.at(y), self.y.first
            size = f'x="{left:.1f}" y="{top:.1f}" width="{max(right - left - 1, 0.5):.1f}" height="{foot - top:.1f}"'
            self.parts.append(f'<rect class="{style}" {size}/>')

    def _path(self, path: str, style: str, words: str) -> None:
        self.parts.append(f'<path class="{style}" d="{path}"/>')
        if words:
            self.legend.append((style, words))

    def svg(self, title: str) -> str:
        return _whole(title, self._axes() + "".join(self.parts) + self._legend())

    def _axes(self) -> str:
        foot, left = HEIGHT - BOTTOM, LEFT
        parts = []
        for tick in self.x.ticks():
            x = self.x.at(tick)
            parts.append(f'<path class="grid" d="M{x:.1f} {TOP}V{foot}"/>{_text(x, foot + 18, _number(tick))}')
        for tick in self.y.ticks():
            y = self.y.at(tick)
            words = _text(left - 7, y + 4.5, _number(tick), "end")
            parts.append(f'<path class="grid" d="M{left} {y:.1f}H{WIDTH - RIGHT}"/>{words}')
        parts.append(f'<path class="axis" d="M{left} {TOP}V{foot}H{WIDTH - RIGHT}"/>')
        parts.append(_text((left + WIDTH - RIGHT) / 2, HEIGHT - 8, self.xlabel, style="label"))
        label = _text(0, 0, self.ylabel, style="label")
        parts.append(f'<g transform="translate(14 {(TOP + foot) / 2:.1f}) rotate(-90)">{label}</g>')
        return "".join(parts)

    def _legend(self) -> str:
        """On a ground that hides what is behind."""
        if not self.legend:
            return ""
        wide = 36 + 7.0 * max(len(words) for _, words in self.legend)
        left = LEFT + 4 if self.corner == "left" else WIDTH - RIGHT - wide - 4
        parts = [
            f'<rect class="ground" x="{left:.1f}" y="{TOP}" width="{wide:.1f}" height="{len(self.legend) * 18 + 6}"/>'
        ]
        for k, (style, words) in enumerate(self.legend):
            y = TOP + 14 + 18 * k
            mark = f"M{left + 15:.1f} {y}h0" if style.startswith("dots") else f"M{left + 5:.1f} {y}h20"
            parts.append(f'<path class="{style}" d="{mark}"/>{_text(left + 31, y + 4.5, words, "start")}')
        return "".join(parts)


def chart(
    x: Sequence[float], y: Sequence[float], xlabel: str, ylabel: str, *, log: bool = False, same: bool = False
) -> Chart:
    """Axes for these values; `log`: upwards by logarithms; `same`: the same numbers on both axes."""
    x, y = ([*x, *y], [*x, *y]) if same else (x, y)
    across = Axis.of(x, LEFT, WIDTH - RIGHT)
    return Chart(across, Axis.of(y, HEIGHT - BOTTOM, TOP, log=log), xlabel, ylabel)


def ranking(rows: Sequence[tuple[str, float, float]], xlabel: str, title: str) -> str:
    """Horizontal bars with names before and spreads around their ends."""
    names = [name if len(name) <= 22 else name[:21] + "…" for name, _, _ in rows]
    left = 16 + 7.2 * max(map(len, names))
    high = HEIGHT_OF_BAR * len(rows)
    ends = [0.0, *(value + spread for _, value, spread in rows), *(value - spread for _, value, spread in rows)]
    x = Axis.of(ends, left, WIDTH - RIGHT, room=0.02)
    parts = []
    for tick in x.ticks():
        at = x.at(tick)
        parts.append(f'<path class="grid" d="M{at:.1f} 4V{high + 4}"/>{_text(at, high + 22, _number(tick))}')
    for k, ((_, value, spread), name) in enumerate(zip(rows, names, strict=True)):
        y = 4 + HEIGHT_OF_BAR * k
        start, end = sorted((x.at(0.0), x.at(value)))
        parts.append(_text(left - 7, y + 16.5, name, "end"))
        parts.append(f'<rect class="first" x="{start:.1f}" y="{y + 4}" width="{end - start:.1f}" height="16"/>')
        parts.append(f'<path class="spread" d="M{x.at(value - spread):.1f} {y + 12}H{x.at(value + spread):.1f}"/>')
    parts.append(_text((left + WIDTH - RIGHT) / 2, high + 42, xlabel, style="label"))
    return _whole(title, "".join(parts), high + 50)


def _text(x: float, y: float, words: str, anchor: str = "middle", style: str = "") -> str:
    kind = f' class="{style}"' if style else ""
    return f'<text{kind} x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(visible(words))}</text>'


def _whole(title: str, inside: str, height: float = HEIGHT) -> str:
    return f'<svg viewBox="0 0 {WIDTH} {height:.0f}" role="img" aria-label="{escape(visible(title))}">{inside}</svg>'
