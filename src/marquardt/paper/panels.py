"""Panels of the figures as SVG: one for each family of methods, every line with its name at its end.

Colours are classes, for which `styles.CSS` has a light and a dark value; lengths are units of about a pixel.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from html import escape
from typing import NamedTuple

from ..values import visible
from .curves import Chart, Fit, Line
from .problems import SINE_ENDS, SINE_NOISE
from .styles import CSS, FAMILIES, REFERENCE, SHORT, STYLES, UNKNOWN, Style

WIDTH, HEIGHT = 400, 290
LEFT, RIGHT, TOP, BOTTOM = 48, 110, 44, 40
INNER = (WIDTH - LEFT - RIGHT, HEIGHT - TOP - BOTTOM)
ACCURACIES = (0, 0.5, 0.8, 0.9, 0.95, 0.98, 0.99, 0.995, 0.999)  # ticks
ROOM = 14  # from name to name, upright
FIT_RANGE = (-1.5, 1.7)

Point = tuple[float, float]
Place = Callable[[float], float]


def panels(chart: Chart) -> list[str]:
    """One for each family that has lines; LM of the paper is in all of them, to compare with."""
    known = {method for family in FAMILIES.values() for method in family}
    families = {**{name: [*family] for name, family in FAMILIES.items()}}
    families["Other methods"] = [line.method for line in chart.lines if line.method not in known]
    reference = [line for line in chart.lines if line.method == REFERENCE]
    made = []
    for name, methods in families.items():
        lines = [line for method in methods for line in chart.lines if line.method == method]
        if lines:
            others = [line for line in reference if line not in lines]
            made.append(_panel(chart, name, lines, others))
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
    low, high = (math.log10(end) if chart.seconds else end for end in chart.xlim)
    return lambda t: INNER[0] * ((math.log10(t) if chart.seconds else t) - low) / (high - low)


def _upwards(chart: Chart) -> Place:
    """Logarithms: of the loss, or of the error, so that 90, 99 and 99.9 % lie equally far apart."""

    def scaled(value: float) -> float:
        if chart.accuracy:
            return -math.log10(max(1.001 - value, 5e-4))  # 0.001 keeps 100 % on the scale
        return math.log10(max(value, 1e-300))

    low, high = map(scaled, chart.ylim)

    def place(value: float) -> float:
        at = INNER[1] * (high - scaled(value)) / (high - low)
        return min(max(at, -60.0), INNER[1] + 60.0)  # what is far outside is cut off there

    return place


def _axes(chart: Chart, x: Place, y: Place) -> str:
    foot, parts = TOP + INNER[1], []
    for tick in _x_ticks(chart):
        at = LEFT + x(tick)
        parts.append(f'<path class="grid" d="M{at:.1f} {TOP}V{foot}"/>{_text(at, foot + 16, f"{tick:g}")}')
    for tick in _y_ticks(chart):
        at = TOP + y(tick)
        label = f"{100 * tick:g} %" if chart.accuracy else f"{tick:g}"
        words = _text(LEFT - 6, at + 4.5, label, "end")
        parts.append(f'<path class="grid" d="M{LEFT} {at:.1f}H{LEFT + INNER[0]}"/>{words}')
    parts.append(f'<path class="axis" d="M{LEFT} {TOP}V{foot}H{LEFT + INNER[0]}"/>')
    parts.append(_text(LEFT + INNER[0] / 2, HEIGHT - 6, chart.xlabel, style="soft"))
    return "".join(parts)


def _x_ticks(chart: Chart) -> list[float]:
    low, high = chart.xlim
    if chart.seconds:
        return _powers(low, high)
    every = next(step for power in range(9) for k in (1, 2, 5) if (step := k * 10**power) * 5.5 >= high - low)
    first = max(0, math.ceil(low / every) * every)
    return [float(tick) for tick in range(first, math.floor(high) + 1, every)]


def _y_ticks(chart: Chart) -> list[float]:
    low, high = chart.ylim
    return [tick for tick in ACCURACIES if low <= tick <= high] if chart.accuracy else _powers(low, high)


def _powers(low: float, high: float) -> list[float]:
    """Powers of ten; 1, 2 and 5 times them if there is at most one."""
    exponents = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    several = (1,) if high >= 30 * low else (1, 2, 5)
    ticks = [k * 10.0**power for power in exponents for k in several if low <= k * 10.0**power <= high]
    every = math.ceil(len(ticks) / 7)
    return ticks[::every]


def _bands(line: Line, x: Place, y: Place) -> Iterator[str]:
    """From quartile to quartile, wherever both are finite."""
    low: list[Point] = []
    high: list[Point] = []
    for t, a, b in [*zip(line.x, line.low, line.high, strict=True), (0.0, None, None)]:
        if a is not None and b is not None:
            low.append((x(t), y(a)))
            high.append((x(t), y(b)))
        elif low:
            if any(p != q for p, q in zip(low, high, strict=True)):
                yield _path([*_simple(low), *_simple(high)[::-1]]) + "Z"
            low, high = [], []


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
    taken: list[tuple[float, float, float]] = []  # left, right, height
    for end in (end for end in ends if end not in outside):
        x, y = min(max(end.x, 0.0), width), min(max(end.y, 5.0), height - 4.0)
        left = min(x + 9, width + RIGHT - 12 - 6.9 * len(end.text))
        right = left + 6.9 * len(end.text)
        steps = (y + ROOM * k * sign for k in range(12) for sign in (1, -1))
        free = (
            at for at in steps if 4 <= at <= height - 4
            and all(abs(at - other) >= ROOM or right < a or left > b for a, b, other in taken)
            and all(abs(at - other) >= ROOM or right < width + 6 for other in heights)
        )  # fmt: skip
        at = next(free, y)
        taken.append((left, right, at))
        cross = f"M{LEFT + x - 4:.1f} {TOP + y - 4:.1f}l8 8m0 -8l-8 8"
        mark = f'<path class="cross" d="{cross}"/>' if end.broken else ""
        lead = f"M{LEFT + x:.1f} {TOP + y:.1f}L{LEFT + left - 2:.1f} {TOP + at:.1f}"
        mark += f'<path class="lead" d="{lead}"/>' if abs(at - y) > 3 else ""
        name = _text(LEFT + left, TOP + at + 4.5, end.text, "start", "label")
        parts.append(f'<g class="{end.style.color}">{mark}{name}</g>')
    return "".join(parts)


def _apart(heights: Sequence[float], low: float, high: float) -> list[float]:
    """The same order, moved as little as it takes for names to stand `ROOM` apart: down first, then up again."""
    moved: list[float] = []
    for height in heights:
        moved.append(max(height, moved[-1] + ROOM if moved else low))
    limit = high
    for k in reversed(range(len(moved))):
        moved[k] = min(moved[k], limit)
        limit = moved[k] - ROOM
    return moved


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
    """The panels as a picture of its own, three to a row."""
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
