"""Figures of made-up logs: what they show, and how their lines are told apart."""

import itertools
import json
import math
import re
import xml.etree.ElementTree as ET
from dataclasses import asdict, replace

import pytest

from marquardt.files import typed
from marquardt.paper import curves, figures, logs, panels, styles
from marquardt.paper.styles import DARK, FAMILIES, LIGHT, LINES, REFERENCE, STYLES
from support import made_logs
from support.made_logs import digits, losses


def test_ablations_in_part(tmp_path):
    for experiment, steps in (("ablation-sine", losses([1, 0.5])), ("ablation-mnist", digits([0.1, 1.0]))):
        made_logs.write(tmp_path, made_logs.head(experiment, "vanilla", steps=1), steps)
    drawn = figures.figures(logs.read_all(tmp_path))
    assert [figure.name for figure in drawn] == ["ablation-sine", "ablation-mnist", "ablation-mnist-more"]
    assert [len(figure.panels()) for figure in drawn] == [1, 2, 2]


def test_lines_are_medians_and_quartiles(tmp_path):
    for seed, end in enumerate([0.5, 0.1, 0.2, 0.3, None]):
        status = "finished" if end else "diverged"
        made_logs.write(tmp_path, made_logs.head("sine", "lm", seed=seed, steps=1), losses([1, end]), status)
    (line,) = figures.figures(logs.read_all(tmp_path))[0].charts[0].lines
    assert (line.x, line.median) == ([0, 1], [1, 0.3])
    assert (line.low, line.high) == ([1, 0.2], [1, 0.5])  # the run that diverged is above


def test_a_line_ends_in_a_cross_when_half_of_the_runs_have_diverged(tmp_path):
    for seed in range(3):
        status = "diverged" if seed else "finished"
        made_logs.write(tmp_path, made_logs.head("sine", "adam", seed=seed, steps=2), losses([1, 0.5, 0.1]), status)
    chart = figures.figures(logs.read_all(tmp_path))[0].charts[0]
    assert chart.lines[0].median == [1, 0.5, None]
    (panel,) = panels.panels(chart)
    assert 'class="cross"' in panel
    ends = replace(chart.lines[0], median=[1, 0.5, 0.1])
    assert 'class="cross"' not in panels.panels(replace(chart, lines=[ends]))[0]
    never = replace(chart.lines[0], median=[None] * 3)
    assert "no seed has a value: Adam" in panels.panels(replace(chart, lines=[never]))[0]


def test_figures_come_back_from_json(tmp_path):
    made_logs.everything(tmp_path, range(2))
    for figure in figures.figures(logs.read_all(tmp_path)):
        assert typed(json.loads(json.dumps(asdict(figure))), figures.Figure) == figure


def chart(*methods, ends=None):
    lines = [
        curves.Line(method, made_logs.METHODS[method][0], [0.0, 1.0], [None] * 2, [1.0, end], [None] * 2)
        for method, end in zip(methods, ends or [0.1] * len(methods), strict=True)
    ]
    return curves.Chart("mean squared error", "iterations", False, False, (0.0, 1.0), (0.01, 2.0), 0.0033, lines)


def test_every_method_is_in_one_panel_and_the_reference_in_all():
    drawn = panels.panels(chart(*made_logs.METHODS))
    assert len(drawn) == 3
    names = [re.findall(r'class="label"[^>]*>([^<]*)<', panel) for panel in drawn]
    assert all(styles.SHORT[REFERENCE] in some for some in names)
    counted = [name for some in names for name in some if name != styles.SHORT[REFERENCE]]
    assert sorted(counted) == sorted(styles.SHORT[method] for method in made_logs.METHODS if method != REFERENCE)


def test_a_method_of_a_later_version_is_drawn_too():
    new = replace(chart("adam").lines[0], method="new", label="New")
    drawn = panels.panels(replace(chart("adam"), lines=[*chart("adam").lines, new]))
    assert "Other methods" in drawn[-1]
    assert ">New<" in drawn[-1]


def test_names_do_not_stand_on_each_other():
    methods = [*FAMILIES["Levenberg–Marquardt"]]
    panel = ET.fromstring(panels.panels(chart(*methods, ends=[0.01, 0.0101, 0.5, 0.0102, 0.5]))[0])
    heights = sorted(float(text.get("y")) for text in panel.iter("text") if text.get("class") == "label")
    assert len(heights) == len(methods)
    assert min(b - a for a, b in itertools.pairwise(heights)) >= panels.ROOM - 1
    assert heights[-1] <= panels.TOP + panels.INNER[1] + 5


def test_paths_lose_points_but_not_their_shape():
    points = [(float(k), 50 * math.sin(k / 20)) for k in range(200)]
    kept = panels._simple(points)
    assert len(kept) < 60
    for x, y in points:
        (x0, y0), (x1, y1) = next(pair for pair in itertools.pairwise(kept) if pair[0][0] <= x <= pair[1][0])
        assert abs(y0 + (y1 - y0) * (x - x0) / (x1 - x0) - y) < 1.1


def test_every_method_has_its_own_look():
    looks = [STYLES[method] for method in made_logs.METHODS]
    assert len({(style.color, style.dashes) for style in looks}) == len(looks)


@pytest.mark.parametrize("family", FAMILIES)
def test_lines_of_a_panel_differ_in_colour_and_also_without_it(family):
    methods = {*FAMILIES[family]} - {"paper+uphill"}  # it takes the place of "paper-uphill"
    if methods <= {*made_logs.METHODS}:
        methods.add(REFERENCE)
    assert len({STYLES[method].color for method in methods}) == len(methods)
    assert len({STYLES[method].dashes for method in methods}) == len(methods)


@pytest.mark.parametrize("colors", [LIGHT, DARK], ids=["light", "dark"])
def test_colours_are_seen_on_the_page(colors):
    for name in LINES:
        assert contrast(colors[name], colors["paper"]) >= 3  # WCAG 2.1, 1.4.11
    assert contrast(colors["soft"], colors["paper"]) >= 4.5  # text


# What is left of linear RGB without one kind of cone (Machado, Oliveira and Fernandes 2009, severity 1).
CONES = {
    "all": ((1, 0, 0), (0, 1, 0), (0, 0, 1)),
    "no red": ((0.152, 1.053, -0.205), (0.115, 0.786, 0.099), (-0.004, -0.048, 1.052)),
    "no green": ((0.367, 0.861, -0.228), (0.280, 0.673, 0.047), (-0.012, 0.043, 0.969)),
    "no blue": ((1.256, -0.077, -0.179), (-0.078, 0.931, 0.148), (0.005, 0.691, 0.304)),
}


@pytest.mark.parametrize("cones", CONES)
@pytest.mark.parametrize("colors", [LIGHT, DARK], ids=["light", "dark"])
def test_colours_are_told_apart_by_the_colour_blind(colors, cones):
    seen = {name: lab(times(CONES[cones], linear(colors[name]))) for name in LINES}
    for a, b in itertools.combinations(LINES, 2):
        assert math.dist(seen[a], seen[b]) > 12, (a, b)  # 2.3 is a difference that is just seen


def times(matrix, vector):
    return [sum(m * v for m, v in zip(row, vector, strict=True)) for row in matrix]


def lab(rgb):
    """CIELAB, D65."""
    to_xyz = ((0.4124, 0.3576, 0.1805), (0.2126, 0.7152, 0.0722), (0.0193, 0.1192, 0.9505))
    xyz = times(to_xyz, [min(max(v, 0), 1) for v in rgb])
    x, y, z = (
        v ** (1 / 3) if v > 0.008856 else 7.787 * v + 16 / 116
        for v in (value / white for value, white in zip(xyz, (0.9505, 1, 1.089), strict=True))
    )
    return 116 * y - 16, 500 * (x - y), 200 * (y - z)


def linear(color):
    values = [int(color[k : k + 2], 16) / 255 for k in (1, 3, 5)]
    return [v / 12.92 if v <= 0.04045 else ((v + 0.055) / 1.055) ** 2.4 for v in values]


def contrast(a, b):
    low, high = sorted(sum(w * v for w, v in zip((0.2126, 0.7152, 0.0722), linear(c), strict=True)) for c in (a, b))
    return (high + 0.05) / (low + 0.05)
