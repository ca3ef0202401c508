"""The page holds all that it shows, and can be read on a desktop and on a phone, in light and in dark."""

from __future__ import annotations

import html
import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from marquardt.table import run
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


def test_what_a_page_of_numbers_shows(pages: dict[str, Path]) -> None:
    page = pages["number"].read_text(encoding="utf-8")
    metrics = json.loads((pages["number"].parent / "metrics.json").read_text())
    for text in (
        f"{metrics['test']['price']['rmse']:.4g}", "Learning curve", "price: predicted against true",
        "price: residuals", "Importance of the columns", "The worst predictions", "What was done to the columns",
        "left out: it is always &#39;CH&#39;",
    ):  # fmt: skip
        assert text in page, text
    worst = page.split("The worst predictions")[1].split("</table>")[0]
    assert worst.count("<tr>") == 1 + 10
    assert pages["numbers"].read_text(encoding="utf-8").count(": residuals</strong>") == 2


def test_the_worst_row_stands_first(pages: dict[str, Path]) -> None:
    import pandas as pd

    table = pd.read_csv(pages["number"].parent / "predictions.csv")
    test = table[table["set"] == "test"]
    worst = int(test.loc[(test["predicted"] - test["true"]).abs().idxmax(), "row"])
    page = pages["number"].read_text(encoding="utf-8").split("The worst predictions")[1]
    assert re.search(r'<th scope="row">(\d+)</th>', page)[1] == str(worst)


def test_what_a_page_of_classes_shows(pages: dict[str, Path]) -> None:
    page = pages["class"].read_text(encoding="utf-8")
    counts = [int(count) for count in re.findall(r"<span>(\d+)</span>", page)]
    assert sum(counts) == json.loads((pages["class"].parent / "metrics.json").read_text())["rows"]["test"]
    for text in ("Reliability", "taken for which", "calibration error", "its probability"):
        assert text in page, text


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
        *(
            chromium,
            "--headless=new",
            "--no-sandbox",
            "--disable-gpu",
            "--hide-scrollbars",
            "--allow-file-access-from-files",
        ),
        *("--enable-logging=stderr", "--v=0", f"--user-data-dir={tmp_path / 'profile'}"),
        *(f"--blink-settings=preferredColorScheme={scheme}", "--virtual-time-budget=20000"),
        *("--dump-dom", (tmp_path / "frame.html").as_uri()),
    ]
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
