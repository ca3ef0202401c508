"""Figures of the paper's experiments: which there are, what they show as numbers, and their panels as SVG.

What a figure shows is computed from logs: medians and quartiles over the seeds. It is drawn in panels, one for each
family of methods, every line with its name at its end. Colours are classes, for which `CSS` has a light and a dark
value; lengths are units of about a pixel.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from html import escape
from itertools import accumulate, groupby
from typing import NamedTuple

import numpy as np

from ..values import visible
from .logs import Log, attempted, data_name, equal_seconds, horizon, or_worst, place, quantile, runs_of, select
from .problems import SINE_ENDS, SINE_NOISE, SINE_NOISE_FLOOR
from .vocabulary import ADDED, MEASURES, OPTIMIZERS, REMOVED, TARGET

FITTED = ("lm", "lm-paper", "kfac", "adam")  # whose fits of the sine are shown
FIRST, MORE = ("test_accuracy", "train_loss"), ("train_accuracy", "test_loss")  # of the paper's four measures
TIMES = 120  # points of a line over seconds
Values = list[float | None]  # None: not finite, which JSON has no word for
WIDTH, HEIGHT = 400, 290
LEFT, RIGHT, TOP, BOTTOM = 48, 110, 44, 40
INNER = (WIDTH - LEFT - RIGHT, HEIGHT - TOP - BOTTOM)
ACCURACIES = (0, 0.5, 0.8, 0.9, 0.95, 0.98, 0.99, 0.995, 0.999)  # ticks
ROOM = 14  # from name to name, upright
FIT_RANGE = (-1.5, 1.7)

# --- what they show, as numbers ---


@dataclass(frozen=True, eq=False)
class Group:
    """The seeds of a method, as one line."""

    method: str
    label: str
    runs: list[Log]


@dataclass(frozen=True)
class Line:
    """The median over the seeds and the quartiles at each x: None from the x on where runs that broke off would make it
    infinite."""

    method: str
    label: str
    x: list[float]
    low: Values
    median: Values
    high: Values


@dataclass(frozen=True)
class Chart:
    """Lines that share their axes; y is the logarithm of a loss, or of 1 − accuracy."""

    measure: str
    xlabel: str
    accuracy: bool
    seconds: bool  # along x, by logarithms; else steps
    xlim: tuple[float, float]
    ylim: tuple[float, float]
    level: float | None  # a dotted line
    lines: list[Line]


@dataclass(frozen=True)
class Fit:
    """The function that a network has learned on the sine, after some numbers of steps; x is the same for all."""

    method: str
    label: str
    x: list[float]
    y: dict[str, Values]  # by the number of steps: JSON's keys are text


def groups(logs: Sequence[Log], experiment: str, column: str) -> list[Group]:
    """By method, in the order of tables, those that made a step; empty if no run has this column."""
    if not attempted(select(logs, experiment, column=column)):
        return []
    methods = sorted({log.method for log in select(logs, experiment) if log.steps}, key=place)
    seeds = [runs for method in methods if (runs := runs_of(logs, experiment, method, column))]
    return [Group(runs[0].method, runs[0].label + " †" * (runs[0].column != column), runs) for runs in seeds]


def over_steps(groups: Sequence[Group], key: str) -> Chart:
    N = horizon(_runs(groups))
    steps = [float(step) for step in range(N + 1)]
    return _chart(groups, key, [_line(group, key, steps) for group in groups], (0.0, float(max(N, 1))))


def loss_over_seconds(groups: Sequence[Group]) -> Chart:
    """Up to the time that all runs were given."""
    T = equal_seconds(_runs(groups))
    times = _times(min(max(_first_step(groups, T), T / 1e4), T / 2), T)
    lines = [_line(group, "train_loss", times, "seconds") for group in groups]
    return _chart(groups, "train_loss", lines, (times[0], T), seconds=True)


def accuracy_over_seconds(groups: Sequence[Group]) -> Chart:
    """Every line up to the end of its fastest run."""
    start = _first_step(groups, 1.0)
    lines = []
    for group in groups:
        ends = [run.final("seconds") for run in group.runs if run.status == "finished"]
        end = min(ends, default=max(run.final("seconds") for run in group.runs if run.steps))
        lines.append(_line(group, "test_accuracy", _times(start, max(start, end)), "seconds"))
    last = max(line.x[-1] for line in lines)
    return _chart(groups, "test_accuracy", lines, (start, last if last > start else 2 * start), seconds=True)


def _runs(groups: Sequence[Group]) -> list[Log]:
    return [run for group in groups for run in group.runs]


def _first_step(groups: Sequence[Group], default: float) -> float:
    """The seconds of the fastest first step."""
    return min((t for run in _runs(groups) for t in run.steps.get("seconds", ()) if t > 0), default=default)


def fits(groups: Sequence[Group], methods: Sequence[str]) -> list[Fit]:
    """Of the first seed that has curves, after at most four numbers of steps."""
    curves = {
        group: next(run.curves for run in group.runs if any(run.curves))  # after step 0
        for group in groups
        if group.method in methods and any(any(run.curves) for run in group.runs)
    }
    steps = sorted({step for fitted in curves.values() for step in fitted if step > 0})[:4]
    made = []
    for group, fitted in curves.items():
        if of := [step for step in steps if step in fitted]:
            y = {str(step): [_short(value) for value in fitted[step][1]] for step in of}
            made.append(Fit(group.method, group.label, fitted[of[0]][0], y))
    return made


def _times(start: float, end: float) -> list[float]:
    return [float(f"{t:.5g}") for t in np.geomspace(start, end, TIMES)]


def _line(group: Group, key: str, x: list[float], clock: str = "step") -> Line:
    """A run that broke off counts as the worst there is."""
    ranked = [[or_worst(run.at(t, key, clock), key) for run in group.runs] for t in x]
    low, median, high = ([_short(quantile(values, q)) for values in ranked] for q in (0.25, 0.5, 0.75))
    return Line(group.method, group.label, x, low, median, high)


def _chart(
    groups: Sequence[Group], key: str, lines: list[Line], xlim: tuple[float, float], seconds: bool = False
) -> Chart:
    sine = groups[0].runs[0].head["problem"] == "sine"
    measure = "mean squared error" if sine else MEASURES[key]
    xlabel = "seconds of training" if seconds else "iterations" if sine else "steps"
    accuracy = key.endswith("accuracy")
    runs = _runs(groups)
    if accuracy:
        best = max((v for run in runs for v in run.steps.get(key, ()) if math.isfinite(v)), default=TARGET)
        ylim = 0.0, max(best + 0.2 * (1.001 - best), 0.93)
    else:  # from the lowest median to twice the highest start: what diverges leaves the panel at the top
        starts = [start for run in runs if 0 < (start := run.at(0, key)) < math.inf]
        values = [value for line in lines for value in line.median if value is not None and value > 0]
        ylim = 0.7 * min(values + starts, default=0.1), 2 * max(starts or values, default=1.0)
    level = SINE_NOISE_FLOOR if sine else TARGET if accuracy else None
    return Chart(measure, xlabel, accuracy, seconds, xlim, ylim, level, lines)


def _short(value: float) -> float | None:
    """To four digits, which is finer than a pixel."""
    return float(f"{value:.4g}") if math.isfinite(value) else None


# --- which there are ---


@dataclass(frozen=True)
class Figure:
    name: str
    experiment: str
    title: str
    caption: str
    charts: list[Chart] = field(default_factory=list)
    fits: list[Fit] = field(default_factory=list)
    folded: bool = False  # on the page

    def panels(self) -> list[str]:
        """As SVG."""
        return [*(panel for chart in self.charts for panel in chart_panels(chart)), *map(fit_panel, self.fits)]


def figures(logs: Sequence[Log]) -> list[Figure]:
    """Every figure that the logs have something for."""
    dagger = "A dagger marks a method that was not tuned: it has its default values."
    drawings = [*_compared(logs, "default")]
    for figure in _compared(logs, "tuned"):
        name, title = f"{figure.name}-tuned", f"{figure.title}, tuned values"
        caption = f"{figure.caption} {dagger}".strip()
        drawings.append(replace(figure, name=name, title=title, caption=caption, folded=True))
    if parts := groups(logs, "ablation-sine", "default"):
        charts = [over_steps(parts, "train_loss")]
        drawings.append(Figure("ablation-sine", "ablation-sine", "The sine: the parts one by one", "", charts))
    return [*drawings, *_mnist(groups(logs, "ablation-mnist", "default"), "ablation-mnist", ": the parts one by one")]


def _compared(logs: Sequence[Log], column: str) -> Iterator[Figure]:
    yield from _sine(groups(logs, "sine", column))
    digits = groups(logs, "mnist", column)
    yield from _mnist(digits, "mnist", "", ": test accuracy and training loss over steps")
    if digits:
        title = f"{data_name(digits[0].runs)}: test accuracy over seconds"
        caption = "Each line ends with the fastest run of its method."
        yield Figure("mnist-seconds", "mnist", title, caption, [accuracy_over_seconds(digits)])
    yield from _mnist(groups(logs, "swapped", column), "swapped", ": train and test sets swapped, one pass")


def _sine(groups: Sequence[Group]) -> Iterator[Figure]:
    if not groups:
        return
    title = "Figure 1: the error on the sine over iterations"
    caption = "The first panel is the paper’s Figure 1a, all of them together its Figure 1b."
    yield Figure("fig1-iterations", "sine", title, caption, [over_steps(groups, "train_loss")])
    if equal_seconds(_runs(groups)) > 0:
        title = "Figure 1b again: the error on the sine over seconds"
        yield Figure("fig1-seconds", "sine", title, "The same runs.", [loss_over_seconds(groups)])
    if fitted := fits(groups, FITTED):
        title = "What the network has learned of the sine"
        caption = "The samples lie in the grey band, the line is the network of the first seed."
        yield Figure("sine-fits", "sine", title, caption, fits=fitted)


def _mnist(groups: Sequence[Group], experiment: str, what: str, first: str = "") -> Iterator[Figure]:
    if groups:
        title = data_name(groups[0].runs) + what
        yield Figure(experiment, experiment, title + first, "", [over_steps(groups, key) for key in FIRST])
        more, charts = f"{title}: training accuracy and test loss", [over_steps(groups, key) for key in MORE]
        yield Figure(f"{experiment}-more", experiment, more, "", charts, folded=True)


# --- how lines look: colours for light and dark pages, and one style for each method ---

# The hues of Okabe and Ito, darker for a light page and lighter for a dark one: a contrast of at least 3 with the page,
# and apart from each other for the colour-blind too. tests/paper/test_report.py has both as numbers.
LIGHT = {
    "ink": "#1c2126", "soft": "#59636e", "paper": "#ffffff", "line": "#d5dae0", "shade": "#f4f6f8",
    "blue": "#0068ad", "red": "#a92b00", "green": "#00916a", "purple": "#b0408a", "amber": "#b07d00",
}  # fmt: skip
DARK = {
    "ink": "#e4e8ec", "soft": "#9aa5b1", "paper": "#15191d", "line": "#333b43", "shade": "#1d2328",
    "blue": "#4a97f0", "red": "#f5713a", "green": "#35d6a0", "purple": "#ee7ec4", "amber": "#f7d774",
}  # fmt: skip
LINES = ("ink", "blue", "red", "green", "purple", "amber")  # the colours that a line may have


class Style(NamedTuple):
    color: str
    dashes: str = ""  # lengths of dashes and gaps in points, as SVG writes them
    width: float = 1.8


SOLID, DASHED, DOTTED, MIXED, LONG, TWICE = "", "6 3", "1.5 3", "7 3 1.5 3", "12 3", "7 3 1.5 3 1.5 3"
REFERENCE = "lm-paper"  # drawn in the panels of the other families too
FAMILIES = {  # the panels of a figure: no two lines in one have the same colour, nor the same dashes
    "Levenberg–Marquardt": {
        "lm": Style("red", LONG, 2.6),
        "lm-paper": Style("blue", SOLID, 2.6),
        "lm-code": Style("purple", MIXED),
        "lm-vanilla": Style("green", DASHED),
        "tlm": Style("amber", DOTTED, 2.2),
    },
    "Newton’s method and its relatives": {
        "gauss-newton": Style("red", DASHED),
        "newton": Style("green", LONG),
        "bfgs": Style("purple", TWICE),
        "lbfgs": Style("amber", MIXED),
        "hessian-free": Style("ink", DOTTED, 2.2),
    },
    "KFAC and first-order methods": {
        "kfac": Style("green", MIXED),
        "psgd": Style("purple", LONG),
        "adam": Style("amber", DASHED),
        "sgd": Style("red", DOTTED, 2.2),
    },
}
_PARTS = (Style("red", DASHED), Style("green", LONG), Style("purple", MIXED), Style("amber", DOTTED, 2.2))
_REST = Style("ink", TWICE)
FAMILIES["LM (paper) with one part changed"] = dict(
    zip(REMOVED, (Style("blue", width=2.6), *_PARTS, _REST, _PARTS[-1]), strict=True)  # uphill: removed or added
)
FAMILIES["Vanilla LM with one part added"] = dict(
    zip(ADDED, (Style("blue", width=2.6), *_PARTS, _REST), strict=True)  # the same look for the same part
)
STYLES = {method: style for family in FAMILIES.values() for method, style in family.items()}
UNKNOWN = Style("soft")  # a method that this version does not know

_SHORTER = {  # beside the lines
    "LM (authors' code)": "LM (authors)", "torch-levenberg-marquardt": "torch-LM", "without ": "− ", "with ": "+ ",
    "vanilla + ": "+ ", "max-diagonal damping": "max-diag.", " acceptance": "",
}  # fmt: skip
SHORT = {**OPTIMIZERS, **REMOVED, **ADDED}
for long, short in _SHORTER.items():
    SHORT = {method: label.replace(long, short) for method, label in SHORT.items()}


def _variables(colors: dict[str, str]) -> str:
    return " ".join(f"--{name}: {value};" for name, value in colors.items())


CSS = f"""
:root {{ color-scheme: light dark; {_variables(LIGHT)} }}
@media (prefers-color-scheme: dark) {{ :root {{ {_variables(DARK)} }} }}
svg text {{ font: 12.5px system-ui, sans-serif; fill: var(--ink); }}
svg .name {{ font-weight: 600; font-size: 13.5px; }}
svg .soft {{ fill: var(--soft); }}
svg .grid {{ stroke: var(--line); stroke-width: 1; fill: none; }}
svg .level {{ stroke: var(--ink); stroke-width: 1; stroke-dasharray: 1 3; fill: none; }}
svg .axis {{ stroke: var(--ink); stroke-width: 1; fill: none; }}
svg .curve {{ fill: none; stroke: currentColor; stroke-linejoin: round; }}
svg .band {{ fill: currentColor; fill-opacity: .13; }}
svg .lead {{ fill: none; stroke: currentColor; stroke-width: .8; }}
svg .cross {{ fill: none; stroke: currentColor; stroke-width: 2.4; }}
svg .label {{ fill: currentColor; paint-order: stroke; stroke: var(--paper); stroke-width: 3; stroke-linejoin: round; }}
svg .samples {{ fill: var(--soft); stroke: var(--soft); stroke-width: 3; opacity: .35; }}
{" ".join(f".{color} {{ color: var(--{color}); }}" for color in (*LINES, "soft"))}
"""


# --- panels ---

Point = tuple[float, float]
Place = Callable[[float], float]


def chart_panels(chart: Chart) -> list[str]:
    """One for each family that has lines; LM of the paper is in all of them, to compare with."""
    families = {name: [*family] for name, family in FAMILIES.items()}
    families["Other methods"] = [line.method for line in chart.lines if line.method not in STYLES]
    made = []
    for name, methods in families.items():
        lines = [line for method in methods for line in chart.lines if line.method == method]
        others = [line for line in chart.lines if line.method == REFERENCE and line not in lines]
        made += [_panel(chart, name, lines, others)] if lines else []
    return made


class End(NamedTuple):
    """Where a line ends, and what is written there."""

    x: float
    y: float
    text: str
    style: Style
    broken: bool


def _panel(chart: Chart, name: str, lines: Sequence[Line], reference: Sequence[Line]) -> str:
    x, y = _across(chart), _upwards(chart)
    inside, ends, missing = [], [], []
    for line in [*reference, *lines]:
        style = STYLES.get(line.method, UNKNOWN)
        points = [(x(t), y(v)) for t, v in zip(line.x, line.median, strict=True) if v is not None]
        text = SHORT.get(line.method, line.label) + "†" * line.label.endswith(" †")
        if not points:
            missing.append(text)
            continue
        if line not in reference:
            inside += [f'<path class="band {style.color}" d="{path}"/>' for path in _bands(line, x, y)]
        inside.append(_stroke(points, style))
        ends.append(End(*points[-1], text, style, len(points) < len(line.median)))
    level = "" if chart.level is None else f'<path class="level" d="M0 {y(chart.level):.1f}H{INNER[0]}"/>'
    window = f'<svg x="{LEFT}" y="{TOP}" width="{INNER[0]}" height="{INNER[1]}">{level}{"".join(inside)}</svg>'
    note = f"; no seed has a value: {', '.join(missing)}" if missing else ""
    words = _text(4, 16, name, "start", "name") + _text(4, 34, chart.measure + note, "start", "soft")
    title = f"{chart.measure} over {chart.xlabel}: {', '.join(end.text for end in ends)}"
    return _whole(title, words + _axes(chart, x, y) + window + _names(ends))


def _across(chart: Chart) -> Place:
    scaled: Place = math.log10 if chart.seconds else float
    low, high = map(scaled, chart.xlim)
    return lambda t: INNER[0] * (scaled(t) - low) / (high - low)


def _upwards(chart: Chart) -> Place:
    """Logarithms: of the loss, or of the error, so that 90, 99 and 99.9 % lie equally far apart."""

    def scaled(value: float) -> float:
        if chart.accuracy:
            return -math.log10(max(1.001 - value, 5e-4))  # 0.001 keeps 100 % on the scale
        return math.log10(max(value, 1e-300))

    low, high = map(scaled, chart.ylim)  # what is far outside is cut off there
    return lambda value: min(max(INNER[1] * (high - scaled(value)) / (high - low), -60.0), INNER[1] + 60.0)


def _axes(chart: Chart, x: Place, y: Place) -> str:
    foot, parts = TOP + INNER[1], []
    for tick in _powers(*chart.xlim) if chart.seconds else _evenly(*chart.xlim):
        at = LEFT + x(tick)
        parts.append(f'<path class="grid" d="M{at:.1f} {TOP}V{foot}"/>{_text(at, foot + 16, f"{tick:g}")}')
    low, high = chart.ylim
    for tick in [tick for tick in ACCURACIES if low <= tick <= high] if chart.accuracy else _powers(low, high):
        at = TOP + y(tick)
        label = f"{100 * tick:g} %" if chart.accuracy else f"{tick:g}"
        words = _text(LEFT - 6, at + 4.5, label, "end")
        parts.append(f'<path class="grid" d="M{LEFT} {at:.1f}H{LEFT + INNER[0]}"/>{words}')
    parts.append(f'<path class="axis" d="M{LEFT} {TOP}V{foot}H{LEFT + INNER[0]}"/>')
    parts.append(_text(LEFT + INNER[0] / 2, HEIGHT - 6, chart.xlabel, style="soft"))
    return "".join(parts)


def _evenly(low: float, high: float) -> list[float]:
    every = next(step for power in range(9) for k in (1, 2, 5) if (step := k * 10**power) * 5.5 >= high - low)
    first = max(0, math.ceil(low / every) * every)
    return [float(tick) for tick in range(first, math.floor(high) + 1, every)]


def _powers(low: float, high: float) -> list[float]:
    """Powers of ten; 1, 2 and 5 times them if there is at most one."""
    exponents = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    several = (1,) if high >= 30 * low else (1, 2, 5)
    ticks = [k * 10.0**power for power in exponents for k in several if low <= k * 10.0**power <= high]
    every = math.ceil(len(ticks) / 7)
    return ticks[::every]


def _bands(line: Line, x: Place, y: Place) -> Iterator[str]:
    """From quartile to quartile, wherever both are finite."""
    quartiles = zip(line.x, line.low, line.high, strict=True)
    for is_finite, stretch in groupby(quartiles, lambda point: None not in point):
        if is_finite:
            low, high = zip(
                *(((x(t), y(a)), (x(t), y(b))) for t, a, b in stretch if a is not None and b is not None), strict=True
            )
            if low != high:
                yield _path([*_simple(low), *_simple(high)[::-1]]) + "Z"


def _stroke(points: Sequence[Point], style: Style) -> str:
    dashes = f' stroke-dasharray="{style.dashes}"' if style.dashes else ""
    return f'<path class="curve {style.color}" stroke-width="{style.width:g}"{dashes} d="{_path(_simple(points))}"/>'


def _path(points: Sequence[Point]) -> str:
    return "M" + " ".join(f"{a:.1f} {b:.1f}".replace(".0", "") for a, b in points)


def _simple(points: Sequence[Point], tolerance: float = 0.3) -> list[Point]:
    """Without the points that lie closer than this to the line through those that stay (Douglas and Peucker)."""
    keep = {0, len(points) - 1}
    stretches = [(0, len(points) - 1)]
    while stretches:
        first, last = stretches.pop()
        (x0, y0), (x1, y1) = points[first], points[last]
        length = math.hypot(x1 - x0, y1 - y0) or 1.0
        far = [
            (abs((x1 - x0) * (points[k][1] - y0) - (y1 - y0) * (points[k][0] - x0)) / length, k)
            for k in range(first + 1, last)
        ]
        if far and max(far)[0] > tolerance:
            k = max(far)[1]
            keep.add(k)
            stretches += [(first, k), (k, last)]
    return [points[k] for k in sorted(keep)]


def _names(ends: Sequence[End]) -> str:
    """Of lines that reach the right edge beside the panel, of the others in it, at their ends; none on another."""
    width, height = INNER
    parts = []
    outside = sorted((end for end in ends if not end.broken and end.x > 0.9 * width), key=lambda end: end.y)
    heights = _apart([min(max(end.y, 4.0), height - 2.0) for end in outside], 4.0, height - 1.0)
    for end, at in zip(outside, heights, strict=True):
        lead = f"M{LEFT + end.x:.1f} {TOP + min(max(end.y, 0), height):.1f}L{LEFT + width + 6} {TOP + at:.1f}"
        name = _text(LEFT + width + 9, TOP + at + 4.5, end.text, "start", "label")
        parts.append(f'<g class="{end.style.color}"><path class="lead" d="{lead}"/>{name}</g>')
    places: list[tuple[float, float, float]] = []  # left, right, height
    for end in (end for end in ends if end not in outside):
        x, y = min(max(end.x, 0.0), width), min(max(end.y, 5.0), height - 4.0)
        left = min(x + 9, width + RIGHT - 12 - 6.9 * len(end.text))
        right = left + 6.9 * len(end.text)
        steps = (y + ROOM * k * sign for k in range(12) for sign in (1, -1))
        free = (
            at for at in steps if 4 <= at <= height - 4
            and all(abs(at - other) >= ROOM or right < a or left > b for a, b, other in places)
            and all(abs(at - other) >= ROOM or right < width + 6 for other in heights)
        )  # fmt: skip
        at = next(free, y)
        places.append((left, right, at))
        cross = f"M{LEFT + x - 4:.1f} {TOP + y - 4:.1f}l8 8m0 -8l-8 8"
        mark = f'<path class="cross" d="{cross}"/>' if end.broken else ""
        lead = f"M{LEFT + x:.1f} {TOP + y:.1f}L{LEFT + left - 2:.1f} {TOP + at:.1f}"
        mark += f'<path class="lead" d="{lead}"/>' if abs(at - y) > 3 else ""
        name = _text(LEFT + left, TOP + at + 4.5, end.text, "start", "label")
        parts.append(f'<g class="{end.style.color}">{mark}{name}</g>')
    return "".join(parts)


def _apart(heights: Sequence[float], low: float, high: float) -> list[float]:
    """The same order, moved as little as it takes for names to stand `ROOM` apart: down first, then up again."""
    down = [*accumulate(heights, lambda before, height: max(height, before + ROOM), initial=low - ROOM)][1:]
    return [*accumulate(down[::-1], lambda before, height: min(height, before - ROOM), initial=high + ROOM)][:0:-1]


def fit_panel(fit: Fit) -> str:
    """What one network has learned, step by step, on the band in which the samples lie."""
    style = STYLES.get(fit.method, UNKNOWN)
    wide, high = (WIDTH - 36) / 2 - 8, HEIGHT / 2 - 60
    low_x, high_x = SINE_ENDS
    low_y, high_y = FIT_RANGE
    x: Place = lambda t: wide * (t - low_x) / (high_x - low_x)  # noqa: E731
    y: Place = lambda v: min(max(high * (high_y - v) / (high_y - low_y), -20), high + 20)  # noqa: E731
    grid = [low_x + (high_x - low_x) * k / 120 for k in range(121)]
    below, above = ([(x(t), y(math.sin(t) + noise)) for t in grid] for noise in (0.0, SINE_NOISE))
    samples = f'<path class="samples" d="{_path([*_simple(below), *_simple(above)[::-1]])}Z"/>'
    parts = [_text(4, 16, fit.label, "start", "name")]
    for k, (step, values) in enumerate(fit.y.items()):
        left, top = 28 + (wide + 16) * (k % 2), 44 + (high + 46) * (k // 2)
        points = [(x(t), y(v)) for t, v in zip(fit.x, values, strict=True) if v is not None]
        drawn = samples + (_stroke(points, Style(style.color, width=2.4)) if points else "")
        parts.append(_text(left, top - 6, f"{step} iteration{'s' * (step != '1')}", "start", "soft"))
        parts.append(f'<svg x="{left:.1f}" y="{top:.1f}" width="{wide:.1f}" height="{high:.1f}">{drawn}</svg>')
        parts.append(f'<path class="axis" d="M{left:.1f} {top:.1f}v{high:.1f}h{wide:.1f}"/>')
        for tick in (-1, 0, 1) if k % 2 == 0 else ():
            parts.append(_text(left - 5, top + y(tick) + 4.5, f"{tick}".replace("-", "−"), "end"))
        for end, anchor in ((low_x, "start"), (high_x, "end")):
            parts.append(_text(left + x(end), top + high + 14, f"{end:g}".replace("-", "−"), anchor))
    return _whole(f"{fit.label}: the learned function after {', '.join(fit.y)} iterations", "".join(parts))


def sample(method: str) -> str:
    """A piece of the method's line, for the legend."""
    line = _stroke([(1, 6), (47, 6)], STYLES.get(method, UNKNOWN))
    return f'<svg class="sample" viewBox="0 0 48 12" width="48" height="12" aria-hidden="true">{line}</svg>'


def alone(drawn: Sequence[str]) -> str:
    """The panels as one picture that stands alone, three to a row."""
    columns = 3 if len(drawn) % 3 == 0 else 2
    rows = math.ceil(len(drawn) / columns)
    size = f'viewBox="0 0 {WIDTH * columns} {HEIGHT * rows}" width="{WIDTH * columns}" height="{HEIGHT * rows}"'
    placed = "\n".join(
        f'<svg x="{WIDTH * (k % columns)}" y="{HEIGHT * (k // columns)}" width="{WIDTH}" height="{HEIGHT}">{one}</svg>'
        for k, one in enumerate(drawn)
    )
    ground = '<rect width="100%" height="100%" fill="var(--paper)"/>'
    return f'<svg xmlns="http://www.w3.org/2000/svg" {size}><style>{CSS}</style>{ground}\n{placed}</svg>\n'


def _text(x: float, y: float, words: str, anchor: str = "middle", style: str = "") -> str:
    kind = f' class="{style}"' if style else ""
    where = "" if anchor == "start" else f' text-anchor="{anchor}"'
    return f'<text{kind} x="{x:.0f}" y="{y:.0f}"{where}>{escape(visible(words))}</text>'


def _whole(title: str, inside: str) -> str:
    return f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(visible(title))}">{inside}</svg>'
