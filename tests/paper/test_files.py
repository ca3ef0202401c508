"""The files of `marquardt paper`: whose they are, what is noticed when they are not as they were, and what text in them
is to those who open them."""

import csv
import json
import os
import random
import re
from pathlib import Path

import pytest

from marquardt import files
from marquardt.files import Foreign
from marquardt.paper import logs, plans, report, runs, tune
from support import made_logs
from support.command_line import invoked
from support.made_logs import losses
from support.made_runs import made

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
    path = tmp_path / log.name
    bare = re.sub(rb', "sha256": "[0-9a-f]{64}"', b"", log.read_bytes())
    path.write_bytes(bare)
    with pytest.raises(ValueError, match="it has lost its checksum; move the file away"):
        logs.read(path)
    path.write_bytes(bare.replace(b'"format": 2', b'"format": 1', 1))
    assert logs.read(path).steps == logs.read(log).steps


def test_a_run_of_an_earlier_version_is_not_made_again(log, tmp_path):
    run = made("sgd", seed=1000)
    run.log(tmp_path).parent.mkdir(parents=True)
    bare = re.sub(rb', "sha256": "[0-9a-f]{64}"', b"", log.read_bytes())
    run.log(tmp_path).write_bytes(bare.replace(b'"format": 2', b'"format": 1', 1))
    assert runs.done(run, tmp_path)


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
    holder = found["content"]
    for key in place[:-1]:
        holder = holder[key]
    holder[place[-1]] = value
    files.write(tmp_path / "alone/report.json", found)
    result = invoked("paper", "report", "--out", tmp_path / "alone")
    assert result.exit_code == 1
    assert re.match(r"Error: .*report\.json (is damaged|holds what cannot be drawn)", result.output), result.output
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
    folder.mkdir(parents=True)
    head = json.dumps(made_logs.head("sine"))
    mine = {
        "notes.part": "mine",
        "sgd.default.1000.part": head,
        "sgd.default.1000.0123abcd.part": "mine",
        "a.part.jsonl": "",
    }
    for name, content in mine.items():
        (folder / name).write_text(content)
    (folder / "sgd.default.1001.0123abcd.part").symlink_to(folder / "notes.part")
    (folder / "lm.default.1000.0123abcd.part").write_text(head)
    (folder / "lm.default.1001.0123abcd.part").touch()
    (folder / "x.part").mkdir()
    with runs.held(tmp_path):
        assert {path.name for path in folder.iterdir()} == {*mine, "sgd.default.1001.0123abcd.part", "x.part"}


def test_a_link_is_not_replaced_by_winners(tmp_path):
    (tmp_path / "shared.json").write_text("{}")
    (tmp_path / "tuned.json").symlink_to(tmp_path / "shared.json")
    with pytest.raises(Foreign, match=r"tuned\.json is a link"):
        tune.save(tmp_path / "tuned.json", "sine", {"sgd": {"lr": 0.5}})
    assert os.readlink(tmp_path / "tuned.json") == str(tmp_path / "shared.json")
    assert plans.winners(tmp_path / "tuned.json") == {}


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
