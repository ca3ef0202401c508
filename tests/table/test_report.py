"""The page holds all that it shows, and can be read on a desktop and on a phone, in light and in dark."""

from __future__ import annotations

import html
import json
import math
import re
import shutil
import subprocess
from pathlib import Path
from xml.etree import ElementTree

import pandas as pd
import pytest

from marquardt.table import report, run
from marquardt.table.report import Axis, chart, ranking
from marquardt.table.request import Request
from support.tables import houses, write


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Of a number, of two numbers, and of a class; names and values look like HTML."""
    folder = tmp_path_factory.mktemp("pages")
    rows = [{**row, "city": row["city"].replace("Genf", "<b>Genf & co</b>")} for row in houses(60)]
    found = {}
    for name, targets in {"number": ("price",), "numbers": ("price", "rent"), "class": ("sold",)}.items():
        others = tuple({"price", "rent", "sold"} - set(targets))
        data = write(folder / f"{name}.csv", rows, without=others)
        asked = Request(data, targets, hidden=(3,), steps=4)
        run.fit(asked, folder / name, say=lambda _: None, watch=lambda _: None)
        found[name] = folder / name / "report.html"
    return found


@pytest.mark.parametrize("name", ["number", "numbers", "class"])
def test_a_page_is_small_needs_nothing_else_and_escapes_what_it_shows(pages: dict[str, Path], name: str) -> None:
    page = pages[name].read_text(encoding="utf-8")
    assert len(page) < 1.5e6
    assert re.findall(r"(?:src|href)=\"(?!#|data:)", page) == []
    assert "url(" not in page
    assert "<script" not in page
    assert "<b>Genf" not in page
    assert "&lt;b&gt;Genf &amp; co&lt;/b&gt;" in page


def test_what_pages_show(pages: dict[str, Path]) -> None:
    page, several, classes = (pages[name].read_text(encoding="utf-8") for name in ("number", "numbers", "class"))
    metrics = json.loads((pages["number"].parent / "metrics.json").read_text())
    for text in (
        f"{metrics['test']['price']['rmse']:.4g}", "Learning curve", "</i>training.", "price: predicted against true",
        "95 % interval. ", "price: residuals", "Importance of the columns", "The worst predictions",
        "What was done to the columns", "left out: it is always &#39;CH&#39;",
    ):  # fmt: skip
        assert text in page, text
    assert several.count(": residuals</strong>") == 2
    table = pd.read_csv(pages["number"].parent / "predictions.csv")
    test = table[table["set"] == "test"]
    worst = page.split("The worst predictions")[1].split("</table>")[0]
    first = int(test.loc[(test["predicted"] - test["true"]).abs().idxmax(), "row"])
    assert re.search(r'<th scope="row">(\d+)</th>', worst)[1] == str(first)
    assert worst.count("<tr>") == 1 + 10
    counts = [int(count) for count in re.findall(r"<span>(\d+)</span>", classes)]
    assert sum(counts) == json.loads((pages["class"].parent / "metrics.json").read_text())["rows"]["test"]
    for text in ("rows left out", "Reliability", "taken for which", "calibration error", "its probability"):
        assert text in classes, text


WATCH = """<script>addEventListener("load", () => { const out = parent.document.createElement("pre");
const boxes = [...document.querySelectorAll("svg")].map(s => s.getBoundingClientRect());
out.textContent = "seen" + JSON.stringify({width: document.documentElement.scrollWidth,
background: getComputedStyle(document.body).backgroundColor,
texts: [...document.querySelectorAll("svg text")].map(t => [getComputedStyle(t).fill, t.getBoundingClientRect().left >=
t.ownerSVGElement.getBoundingClientRect().left - 1 && t.getBoundingClientRect().right <=
t.ownerSVGElement.getBoundingClientRect().right + 1, t.textContent]),
charts: boxes.map(b => [b.width, b.height])}) + "seen"; parent.document.body.append(out); });</script>"""
FRAME = '<body style="margin:0"><iframe src="watched.html" style="border:0;width:{}px;height:900px"></iframe>'
LIGHT, DARK = ("rgb(255, 255, 255)", "rgb(28, 33, 38)"), ("rgb(21, 25, 29)", "rgb(228, 232, 236)")


@pytest.mark.parametrize(("name", "width", "scheme", "colours"), [("number", 1280, 1, LIGHT), ("class", 390, 0, DARK)])
def test_a_page_in_chromium(pages, tmp_path, name, width, scheme, colours) -> None:
    chromium = shutil.which("chromium")
    if chromium is None:
        pytest.skip("chromium is not installed")  # .ci/run installs it
    source = pages[name].read_text(encoding="utf-8")
    (tmp_path / "watched.html").write_text(source.replace("<head>", f"<head>{WATCH}", 1), encoding="utf-8")
    (tmp_path / "frame.html").write_text(FRAME.format(width), encoding="utf-8")
    command = [
        *(chromium, "--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"),
        *("--allow-file-access-from-files", "--enable-logging=stderr", "--v=0"),
        f"--user-data-dir={tmp_path / 'profile'}",
        *(f"--blink-settings=preferredColorScheme={scheme}", "--virtual-time-budget=20000"),
        *("--dump-dom", (tmp_path / "frame.html").as_uri()),
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "CONSOLE" not in done.stderr
    seen = json.loads(html.unescape(done.stdout.split("seen")[1]))
    assert seen["width"] == width  # wide things scroll in their own boxes
    assert seen["background"] == colours[0]
    assert len(seen["charts"]) == source.count("<svg")
    assert all(w > 250 and h > 60 for w, h in seen["charts"])
    assert colours[1] in {fill for fill, _, _ in seen["texts"]}
    assert [text for _, inside, text in seen["texts"] if not inside] == []


# --- charts ---


@pytest.mark.parametrize("low", [-1e3, -3.2, 0.0, 1e-9, 17.0])
@pytest.mark.parametrize("span", [1e-5, 0.37, 1.0, 42.0, 9e7])
def test_ticks_are_few_round_and_inside(low, span):
    scale = Axis.of([low, low + span], 0, 100)
    ticks = [tick for tick, _ in scale.ticks()]
    assert 4 <= len(ticks) <= 9
    assert all(-0.1 <= scale.at(tick) <= 100.1 for tick in ticks)
    every = ticks[1] - ticks[0]
    assert round(every / 10 ** math.floor(math.log10(every) + 1e-6), 3) in (1, 2, 5, 10)


def test_a_logarithmic_scale_if_all_values_are_positive():
    scale = Axis.of([1e-3, 1e2], 0, 100, log=True, room=0)
    assert scale.at(10**-0.5) == pytest.approx(50)
    assert [tick for tick, _ in scale.ticks()] == pytest.approx([1e-3, 1e-2, 1e-1, 1, 10, 100])
    assert not Axis.of([0.0, 1.0], 0, 1, log=True).log


@pytest.mark.parametrize("values", [[], [3.0], [0.0, 0.0], [math.nan, math.inf]])
def test_a_scale_of_hardly_anything(values):
    scale = Axis.of(values, 0, 100)
    assert 0 <= scale.at(3.0 if values == [3.0] else 0.5 if values != [0.0, 0.0] else 0.0) <= 100
    assert len(scale.ticks()) > 1


def test_charts_are_xml_and_everything_is_inside(pages: dict[str, Path]) -> None:
    drawn = chart([0.0, 1.0], [2.0, 3.0], "x", "y")
    drawn.draw([[(0.0, 2.0), (1.0, 3.0)]], "line first", "a line")
    drawn.dots([(0.5, 2.5)], "first")
    drawn.boxes([(0.1, 0.2, 2.0, 2.4)], "faint")
    assert drawn.legend == [("line first", "a line")]
    assert [style for style, _ in drawn.paths] == ["line first", "dots first", "box faint"]
    for _, path in drawn.paths:
        x, y = map(float, path[1:].split("L")[0].split())
        assert report.LEFT <= x <= report.WIDTH
        assert report.TOP <= y <= report.HEIGHT - report.BOTTOM
    ranked = ranking([("first", 2.0, 0.1), ("x" * 40, -0.5, 0.1)], "rise")
    assert [name for _, name in ranked.y.ticks()] == ["first", "x" * 21 + "…"]
    for page in pages.values():
        svgs = re.findall(r"<svg.*?</svg>", page.read_text(encoding="utf-8"), re.DOTALL)
        titles = [ElementTree.fromstring(svg).attrib["aria-label"] for svg in svgs]
        assert titles[-2:] == ["Importance of the columns", "Learning curve"]
