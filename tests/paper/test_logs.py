"""Logs as they are read: values at a step and at a time, damage that is named, quantiles, results.csv."""

import csv
import json
import math
import re

import numpy as np
import pytest

from marquardt.paper import logs
from support import made_logs
from support.made_logs import digits, losses


def test_a_log_is_read_as_columns(tmp_path):
    steps = losses([0.5, 0.25, None])
    path = made_logs.write(tmp_path, made_logs.head("sine"), steps, "diverged", "not finite", made_logs.curves(0.1))
    log = logs.read(path)
    assert (log.experiment, log.method, log.label, log.column, log.seed) == ("sine", "adam", "Adam", "default", 0)
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
    diverged = logs.read(made_logs.write(tmp_path, made_logs.head("sine"), steps, "diverged", "10×"))
    assert diverged.at(9, "train_loss") == 0.3
    assert math.isnan(diverged.at(10, "train_loss"))  # there it diverged


def test_accuracies_are_reached_from_below(tmp_path):
    log = logs.read(made_logs.write(tmp_path, made_logs.head("mnist"), digits([0.1, 0.89, 0.9, 0.95])))
    assert (log.steps_to(), log.seconds_to()) == (2, 1.0)


def test_runs_in_progress_are_left_out(tmp_path):
    made_logs.write(tmp_path, made_logs.head("mnist", "sgd"), digits([0.1, 0.9]))
    made_logs.write(tmp_path, made_logs.head("mnist", "lm"), digits([0.1, 0.9]))
    part = tmp_path / "logs" / "mnist" / "adam.default.0.0123abcd.part"
    part.write_text(json.dumps(made_logs.head("mnist"))[:40])
    (part.parent / "adam.part").write_text("of somebody else")
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
    way_out = "move the file away, and `marquardt paper` runs it again"
    with pytest.raises(ValueError, match=re.escape(f"{path}, {message}; {way_out}")):
        logs.read_all(tmp_path)


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
    first, second = csv.DictReader(logs.as_csv(logs.read_all(tmp_path)).splitlines(keepends=True))
    assert (first["method"], first["status"]) == ("adam", "finished")
    assert (first["steps_to_90"], first["seconds_to_90"]) == ("2.0", "1.0")
    assert (first["test_accuracy"], first["data"], first["hyper"]) == ("0.9", "MNIST", '{"lr": 0.05}')
    assert (second["status"], second["message"], second["train_loss"]) == ("failed", "no, 2\nlines", "")
