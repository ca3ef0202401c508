"""Charts are whole SVG pictures with round numbers at their axes."""

from __future__ import annotations

import math
from xml.etree import ElementTree

import pytest

from marquardt.table import charts
from marquardt.table.charts import Axis, chart, ranking, thinned


@pytest.mark.parametrize("low", [-1e3, -3.2, 0.0, 1e-9, 17.0])
@pytest.mark.parametrize("span", [1e-5, 0.37, 1.0, 42.0, 9e7])
def test_ticks_are_few_round_and_inside(low, span):
    scale = Axis.of([low, low + span], 0, 100)
    ticks = scale.ticks()
    assert 4 <= len(ticks) <= 9
    assert all(-0.1 <= scale.at(tick) <= 100.1 for tick in ticks)
    every = ticks[1] - ticks[0]
    assert round(every / 10 ** math.floor(math.log10(every) + 1e-6), 3) in (1, 2, 5, 10)


def test_a_logarithmic_scale_if_all_values_are_positive():
    scale = Axis.of([1e-3, 1e2], 0, 100, log=True, room=0)
    assert scale.at(10**-0.5) == pytest.approx(50)
    assert scale.ticks() == pytest.approx([1e-3, 1e-2, 1e-1, 1, 10, 100])
    assert not Axis.of([0.0, 1.0], 0, 1, log=True).log


@pytest.mark.parametrize("values", [[], [3.0], [0.0, 0.0], [math.nan, math.inf]])
def test_a_scale_of_hardly_anything(values):
    scale = Axis.of(values, 0, 100)
    assert 0 <= scale.at(3.0 if values == [3.0] else 0.5 if values != [0.0, 0.0] else 0.0) <= 100
    assert len(scale.ticks()) > 1


def test_a_chart_is_xml_and_everything_is_inside():
    drawn = chart([0.0, 1.0], [2.0, 3.0], "<x> & more", "y")
    drawn.line([(0.0, 2.0), (1.0, 3.0), (0.5, math.nan)], "first", "a <line>")
    drawn.dots([(0.5, 2.5)], "first")
    drawn.bars([(0.5, 2.2, 2.8)], "second", "bars")
    drawn.boxes([(0.1, 0.2, 2.4)], "faint")
    root = ElementTree.fromstring(drawn.svg("A & B"))
    assert root.attrib["aria-label"] == "A & B"
    words = ["".join(text.itertext()) for text in root.iter("text")]
    assert {"<x> & more", "a <line>", "bars"} <= set(words)
    line = next(path for path in root.iter("path") if path.attrib["class"] == "line first")
    assert "nan" not in line.attrib["d"]
    x, y = map(float, line.attrib["d"][1:].split("L")[0].split())
    assert charts.LEFT <= x <= charts.WIDTH
    assert charts.TOP <= y <= charts.HEIGHT - charts.BOTTOM


def test_a_ranking_has_all_its_names():
    root = ElementTree.fromstring(ranking([("first", 2.0, 0.1), ("x" * 40, -0.5, 0.1)], "rise", "Ranking"))
    words = ["".join(text.itertext()) for text in root.iter("text")]
    assert "first" in words
    assert "x" * 21 + "…" in words
    assert all(float(rect.attrib["width"]) >= 0 for rect in root.iter("rect"))


def test_too_many_points_are_thinned():
    points = [(float(i), 0.0) for i in range(10_001)]
    assert len(thinned(points)) <= charts.MOST_POINTS
    assert thinned(points[:50]) == points[:50]
