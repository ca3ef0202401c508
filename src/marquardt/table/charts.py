"""Charts as SVG in a page: their colours are the page's, light or dark, by the classes that its style names."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from html import escape
from typing import TypeVar

from ..values import visible

WIDTH, HEIGHT = 480, 340  # in units of the drawing; text of 13 of them can be read on a phone
LEFT, RIGHT, TOP, BOTTOM = 64, 14, 12, 46
HEIGHT_OF_BAR = 24
MOST_POINTS = 1500

T = TypeVar("T")
Points = Sequence[tuple[float, float]]


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
