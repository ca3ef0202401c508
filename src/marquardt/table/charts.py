"""Charts as SVG in a page: their colours are the page's, light or dark, by the classes that its style names."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from html import escape

from ..values import visible

WIDTH, HEIGHT = 480, 340  # in units of the drawing; text of 13 of them can be read on a phone
LEFT, RIGHT, TOP, BOTTOM = 64, 14, 12, 46
HEIGHT_OF_BAR = 24

Points = Sequence[tuple[float, float]]


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
        return self.first + (value - low) / (high - low) * (self.last - self.first)

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
    """Axes with something in them; `svg` is the whole, `legend` has the classes and words of what is in it."""

    x: Axis
    y: Axis
    xlabel: str
    ylabel: str = ""
    parts: list[str] = field(default_factory=list)
    legend: list[tuple[str, str]] = field(default_factory=list)

    def draw(self, lines: Sequence[Points], style: str, words: str = "") -> None:
        """Lines, all of them as one path."""
        joined = ["M" + "L".join(f"{self.x.at(x):.1f} {self.y.at(y):.1f}" for x, y in line) for line in lines]
        self.parts.append(f'<path class="{style}" d="{"".join(joined)}"/>')
        self.legend += [(style, words)] if words else []

    def dots(self, points: Points, style: str) -> None:
        """A line of no length with round ends is a dot."""
        self.draw([(point, point) for point in points], f"dots {style}")

    def boxes(self, boxes: Sequence[tuple[float, float, float, float]], style: str) -> None:
        """From x₀ to x₁, from y₀ to y₁."""
        for x0, x1, y0, y1 in boxes:
            left, right = sorted(map(self.x.at, (x0, x1)))
            top, foot = sorted(map(self.y.at, (y0, y1)))
            size = f'x="{left:.1f}" y="{top:.1f}" width="{right - left:.1f}" height="{foot - top:.1f}"'
            self.parts.append(f'<rect class="{style}" {size}/>')

    def svg(self, title: str) -> str:
        left, right, top, foot = (
            self.x.first,
            self.x.last,
            min(self.y.first, self.y.last),
            max(self.y.first, self.y.last),
        )
        parts = []
        for value, words in self.x.ticks():
            x = self.x.at(value)
            parts.append(f'<path class="grid" d="M{x:.1f} {top}V{foot}"/>{_text(x, foot + 18, words)}')
        for value, words in self.y.ticks():
            y = self.y.at(value)
            parts.append(
                f'<path class="grid" d="M{left:.1f} {y:.1f}H{right}"/>{_text(left - 7, y + 4.5, words, "end")}'
            )
        parts.append(f'<path class="axis" d="M{left:.1f} {top}V{foot}H{right}"/>')
        parts.append(_text((left + right) / 2, foot + 38, self.xlabel, style="label"))
        if self.ylabel:
            label = _text(0, 0, self.ylabel, style="label")
            parts.append(f'<g transform="translate(14 {(top + foot) / 2:.1f}) rotate(-90)">{label}</g>')
        size = f'viewBox="0 0 {WIDTH} {foot + BOTTOM}" role="img" aria-label="{escape(visible(title))}"'
        return f"<svg {size}>{''.join([*parts, *self.parts])}</svg>"


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


def _text(x: float, y: float, words: str, anchor: str = "middle", style: str = "") -> str:
    kind = f' class="{style}"' if style else ""
    return f'<text{kind} x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(visible(words))}</text>'
