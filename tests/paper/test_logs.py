"""Logs and the other files of `marquardt paper`: how they are read, what is noticed when they are not as they were,
whose they are, and what text in them is to those who open them."""

import csv
import json
import math
import os
import random
import re
from functools import reduce
from operator import getitem
from pathlib import Path

import numpy as np
import pytest

from marquardt import files
from marquardt.files import Foreign
from marquardt.paper import logs, report, runs, tune
from support import made_logs
from support.command_line import invoked, refused
from support.made_logs import digits, losses
from support.made_runs import made

# --- logs as they are read ---


def test_a_log_is_read_as_columns(tmp_path):
    steps = losses([0.5, 0.25, None])
    path = made_logs.write(tmp_path, made_logs.head("sine"), steps, "diverged", "not finite", made_logs.curves(0.1))
    log = logs.read(path)
    assert (log.experiment, log.method, log.label, log.column, log.seed) == ("sine", "adam", "Adam", "default", 0)
    assert log.steps["train_loss"][:2] == [0.5, 0.25]
    assert math.isnan(log.final("train_loss"))
    assert math.isnan(log.final("test_accuracy"))
    assert sorted(log.curves) == [1, 5, 20, 100]
    assert (log.status, log.end, log.message) == ("diverged", 2, "not finite")


def test_values_at_a_step_and_at_a_time(tmp_path):
    steps = [losses([0.5, 0.4, 0.3])[t] for t in (0, 1, 2)] + [{"step": 10, "seconds": 5.0, "train_loss": 0.1}]
    log = logs.read(made_logs.write(tmp_path, made_logs.head("sine"), steps))
    assert log.at(1, "train_loss") == 0.4
    assert log.at(9, "train_loss") == 0.3  # the last line before it
    assert log.at(11, "train_loss") == 0.1  # it had finished
    assert log.at(0.99, "train_loss", "seconds") == 0.4
    assert log.at(60.0, "train_loss", "seconds") == 0.1  # it had finished
    assert log.steps_to() == math.inf
    broken = logs.read(made_logs.write(tmp_path, made_logs.head("sine"), steps, "failed", "why"))
    assert broken.at(10, "train_loss") == 0.1
    assert math.isnan(broken.at(11, "train_loss"))
    assert math.isnan(broken.at(60.0, "train_loss", "seconds"))
    diverged = logs.read(made_logs.write(tmp_path, made_logs.head("sine"), steps, "diverged", "10×"))
    assert diverged.at(9, "train_loss") == 0.3
    assert math.isnan(diverged.at(10, "train_loss"))  # there it diverged
    log = logs.read(made_logs.write(tmp_path, made_logs.head("mnist"), digits([0.1, 0.89, 0.9, 0.95])))
    assert (log.steps_to(), log.seconds_to()) == (2, 1.0)  # an accuracy is reached from below


@pytest.mark.parametrize(
    ("line", "text", "message"),
    [
        (2, '{"kind": "step", "st', "not JSON"),
        (1, '{"kind": "run"}'.encode("utf-16"), "not UTF-8, at byte 1"),
        (3, b'{"k\xefnd": "step"}', "not UTF-8, at byte 4"),
        (2, '{"step": 3}', "no 'kind'"),
        (2, '{"kind": ["step"]}', "unknown kind ['step']"),
        (2, '{"kind": "step", "step": 0.5}', "'step' is 0.5, not a whole number"),
        (2, '{"kind": "step", "step": true}', "'step' is True, not a whole number"),
        (2, '{"kind": "step", "step": 0}', "no 'seconds'"),
        (2, '{"kind": "step", "step": 0, "seconds": 0, "train_loss": 1, "more": {}}', "{} is not a number"),
        (2, f'{{"kind": "step", "step": 0, "seconds": 0, "train_loss": 1{"0" * 400}}}', "int too large"),
        (2, "[" * 100_000, "not JSON"),
        (3, '{"kind": "step", "step": 0, "seconds": 1, "train_loss": 1}', "step 0 after step 0"),
        (2, '{"kind": "data", "x": 1, "y": [1]}', "'x' is 1, not a list"),
        (2, '{"kind": "data", "x": [0, "1"], "y": [0, 1]}', "'1' is not a number"),
        (2, '{"kind": "curve", "step": 5, "x": [0, 1], "y": [0]}', "2 values of x and 1 of y"),
        (4, '{"kind": "end", "status": "finished", "step": "1", "message": ""}', "'step' is '1', not a whole"),
        (4, '{"kind": "end", "status": "bored", "step": 1, "message": ""}', "'status' is 'bored', not 'finished' or "),
        (4, "", "the log breaks off"),
        (5, '{"kind": "step", "step": 2}', "a line after the end"),
        (2, "[]", "not a JSON object"),
        (1, '{"kind": "step", "step": 0}', "the head"),
        (1, '{"kind": "run", "format": 7}', "format 7"),
        (1, '{"kind": "run", "format": 1}', "the head has no experiment, problem"),
        *(
            (1, json.dumps({**made_logs.head("sine"), **changes}), message)
            for changes, message in (
                ({"seed": "0"}, "'seed' is '0', not a whole number"),
                ({"seconds": "2"}, "'seconds' is '2', not a finite number"),
                ({"label": 3}, "'label' is 3, not text"),
                ({"hyper": [["lr", 1]]}, "'hyper' is [['lr', 1]], not an object"),
                ({"data": {"name": "MNIST", "train": 1, "test": 1}}, "no 'source'"),
                ({"train_sample": "all"}, "'train_sample' is 'all', not a whole number"),
            )
        ),
    ],
)
def test_a_damaged_log_is_named(tmp_path, line, text, message):
    path = made_logs.write(tmp_path, made_logs.head("sine"), losses([0.5, 0.4]))
    lines = path.read_bytes().splitlines()
    lines[line - 1 : line] = [text if isinstance(text, bytes) else text.encode()] if text else []
    path.write_bytes(b"\n".join(lines) + b"\n")
    told = re.escape(f"{path}, line {line if text else 3}: {message}") + ".*; move the file away, and"
    with pytest.raises(ValueError, match=told):
        logs.read_all(tmp_path)


def test_quantiles_are_numpys_and_take_infinity():
    values = np.random.default_rng(0).normal(size=7)
    for q in (0, 0.25, 0.5, 0.9, 1):
        assert logs.quantile(list(values), q) == pytest.approx(np.quantile(values, q))
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


CONTROL = re.compile(r"[\x00-\x09\x0b-\x1f\x7f-\x9f]")


def contents(out: Path) -> dict[str, bytes]:
    found = (path for path in out.rglob("*") if path.is_file() and not path.name.endswith(".lock"))
    return {str(path.relative_to(out)): path.read_bytes() for path in found}


@pytest.fixture(scope="module")
def log(tmp_path_factory):
    """The log of a run, as it is written now"""
    out = tmp_path_factory.mktemp("log")
    runs.execute(made("sgd", seed=1000), out)
    return made("sgd", seed=1000).log(out)


@pytest.fixture
def drawn(tmp_path):
    """A folder with a report"""
    made_logs.write(tmp_path, made_logs.head("sine"), losses([0.5, 0.25, 0.125]))
    report.write(tmp_path)
    return tmp_path


# --- damage ---


def test_a_changed_bit_of_a_log_is_noticed(log, tmp_path):
    whole, draw = log.read_bytes(), random.Random(0)
    digits = [at for at, byte in enumerate(whole) if chr(byte).isdigit()]  # what would be another result
    for at in [*draw.sample(digits, 60), *draw.sample(range(len(whole)), 60)]:
        (tmp_path / log.name).write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
        with pytest.raises(ValueError, match=rf"{log.name}.*; move the file away, and `marquardt paper` runs it again"):
            logs.read(tmp_path / log.name)


def test_a_log_without_its_checksum_is_of_an_earlier_version_or_damaged(log, tmp_path):
    run = made("sgd", seed=1000)
    path = run.log(tmp_path)
    path.parent.mkdir(parents=True)
    bare = re.sub(rb', "sha256": "[0-9a-f]{64}"', b"", log.read_bytes())
    path.write_bytes(bare)
    with pytest.raises(ValueError, match="it has lost its checksum; move the file away"):
        logs.read(path)
    path.write_bytes(bare.replace(b'"format": 2', b'"format": 1', 1))
    assert logs.read(path).steps == logs.read(log).steps
    assert runs.done(run, tmp_path)  # it is not made again


def test_a_changed_byte_of_a_report_is_noticed(drawn, tmp_path):
    whole, draw = (drawn / "report.json").read_bytes(), random.Random(0)
    out = tmp_path / "alone"
    out.mkdir()
    for at in draw.sample(range(len(whole)), 60):
        (out / "report.json").write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
        with pytest.raises(ValueError, match=r"report\.json .*move it away|report\.json is damaged"):
            report.write(out)
        assert set(contents(out)) == {"report.json"}


@pytest.mark.parametrize("what", ["tables", "figures"])
@pytest.mark.parametrize("name", ["../../../stolen", "{}/stolen", "a/b", ""])
def test_a_report_writes_nothing_outside_its_folder(drawn, tmp_path, what, name):
    found, _ = files.read(drawn / "report.json")
    found["content"][what][0]["name"] = name.format(tmp_path)
    out = tmp_path / "deep" / "er" / "alone"
    files.write(out / "report.json", found)
    before = contents(tmp_path)
    with pytest.raises(ValueError, match="is no name of a table or a figure"):
        report.write(out)
    assert contents(tmp_path) == before


VERDICT = ("claim", "source", "outcome", "finding", "evidence", "experiment")


@pytest.mark.parametrize(
    ("place", "value"),
    [
        (("figures", 0, "charts", 0, "xlim"), [1e9, 1e9]),
        (("figures", 0, "charts", 0, "ylim"), [0.0, 0.0]),
        (("figures", 0, "charts", 0, "lines", 0, "x"), []),
        (("verdicts",), {"default": [dict.fromkeys(VERDICT, "x")]}),
        (("runs",), "many"),
        (("tables", 0, "rows"), [[1]]),
    ],
)
def test_what_cannot_be_drawn_is_told_in_a_sentence(drawn, tmp_path, place, value):
    found, _ = files.read(drawn / "report.json")
    *path, last = place
    reduce(getitem, path, found["content"])[last] = value
    files.write(tmp_path / "alone/report.json", found)
    result = invoked("paper", "report", "--out", tmp_path / "alone")
    refused(result, str(tmp_path / "alone/report.json"))
    assert re.search(r"is damaged|holds what cannot be drawn", result.output)
    assert set(contents(tmp_path / "alone")) == {"report.json"}


# --- whose files they are ---


@pytest.mark.parametrize(
    "name", ["results.csv", "report.html", "report.json", "tables/sine.md", "figures/fig1-iterations.svg"]
)
@pytest.mark.parametrize("kind", ["file", "link", "dangling"])
def test_a_report_replaces_no_file_of_the_user(tmp_path, name, kind):
    out = tmp_path / "out"
    made_logs.write(out, made_logs.head("sine"), losses([0.5, 0.25, 0.125]))
    (tmp_path / "mine").write_text("mine")
    (out / name).parent.mkdir(exist_ok=True)
    if kind == "file":
        (out / name).write_text("mine")
    else:
        (out / name).symlink_to(tmp_path / ("mine" if kind == "link" else "nowhere"))
    before = contents(out)
    result = invoked("paper", "report", "--out", out)
    assert result.exit_code == 1
    assert f"Error: {out / name} " in result.output
    assert "move it away" in result.output
    assert contents(out) == before
    assert (tmp_path / "mine").read_text() == "mine"
    (out / name).unlink()
    assert invoked("paper", "report", "--out", out).exit_code == 0


def test_a_report_is_drawn_again_also_after_it_was_killed(drawn, monkeypatch):
    made_logs.write(drawn, made_logs.head("sine", seed=1), losses([0.5, 0.4, 0.3]))
    whole, count = files.whole, []

    def killed(path):
        count.append(path)
        if len(count) == 3:
            raise KeyboardInterrupt
        return whole(path)

    with monkeypatch.context() as patch:
        patch.setattr(files, "whole", killed)
        with pytest.raises(KeyboardInterrupt):
            report.write(drawn)
    page = report.write(drawn)
    assert page == report.write(drawn)
    page.write_text("edited by hand")
    with pytest.raises(Foreign, match=r"report\.html is there already, and is not as marquardt has written it"):
        report.write(drawn)


@pytest.mark.parametrize("content", [b"mine", b'{"kind": "run"}\n', b""])
def test_a_run_replaces_nothing_but_a_log(tmp_path, content):
    run = made("sgd")
    path = run.log(tmp_path)
    path.parent.mkdir(parents=True)
    path.write_bytes(content)
    with pytest.raises(Foreign, match=rf"no log can be written: {path}.*; move the file away"):
        runs.execute(run, tmp_path)
    assert contents(tmp_path) == {str(path.relative_to(tmp_path)): content}
    path.unlink()
    path.symlink_to(tmp_path / "mine")
    with pytest.raises(Foreign, match="is a link"):
        runs.execute(run, tmp_path)
    assert not (tmp_path / "mine").exists()


def test_only_what_a_killed_run_has_left_is_removed(tmp_path):
    folder = tmp_path / "logs/sine"
    made_logs.write(tmp_path, made_logs.head("sine", "lm"), losses([0.5, 0.25]))
    mine = ("notes.part", "sgd.default.1000.part", "lm.default.0.jsonl")
    for name in (*mine[:2], "lm.default.1000.0123abcd.part", "lm.default.1001.0123abcd.part"):
        (folder / name).touch()
    (folder / "sgd.default.1001.0123abcd.part").symlink_to(folder / "notes.part")
    (folder / "x.part").mkdir()
    assert [log.method for log in logs.read_all(tmp_path)] == ["lm"]
    left = [f"lm.default.{seed}.0123abcd.part" for seed in (1000, 1001)]
    assert [path.name for path in logs.unfinished(tmp_path)] == left
    with runs.held(tmp_path):
        assert {path.name for path in folder.iterdir()} == {*mine, "sgd.default.1001.0123abcd.part", "x.part"}


def test_a_link_is_not_replaced_by_winners(tmp_path):
    (tmp_path / "shared.json").write_text("{}")
    (tmp_path / "tuned.json").symlink_to(tmp_path / "shared.json")
    with pytest.raises(Foreign, match=r"tuned\.json is a link"):
        tune.save(tmp_path / "tuned.json", "sine", {"sgd": {"lr": 0.5}})
    assert os.readlink(tmp_path / "tuned.json") == str(tmp_path / "shared.json")
    assert runs.winners(tmp_path / "tuned.json") == {}


# --- text in logs ---


def test_text_of_a_log_is_obeyed_by_nobody(tmp_path):
    evil = "=cmd|' /C calc'!A0 \x1b[31m <img src=x> [bold]b[/bold] | x\udcff"
    made_logs.write(tmp_path, made_logs.head("sine", label="@LM"), losses([0.5, 0.25]), "failed", evil)
    result = invoked("paper", "report", "--out", tmp_path)
    assert result.exit_code == 0, result.output
    for name, content in contents(tmp_path).items():
        if not name.startswith("logs/"):
            assert not CONTROL.search(content.decode()), name
            assert name.endswith((".csv", ".json")) or b"<img" not in content, name
    [row] = csv.DictReader((tmp_path / "results.csv").read_text().splitlines())
    assert row["message"].startswith("'=cmd")
    assert row["label"] == "'@LM"


def test_a_path_with_markup_is_shown_as_it_is(tmp_path):
    out = tmp_path / "[bold]x[/bold]\x1b[31m"
    made_logs.write(out, made_logs.head("sine"), losses([0.5, 0.25]))
    result = invoked("paper", "report", "--out", out)
    assert f"Report: {tmp_path}/[bold]x[/bold]\\x1b[31m/report.html" in result.output
