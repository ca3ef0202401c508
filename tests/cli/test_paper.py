"""`marquardt paper`, on real but tiny runs; drawing and the search of hyper-parameters are replaced."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from rich.console import Console
from typer.testing import Result

import marquardt
import marquardt.paper
from marquardt import files as locks
from marquardt.cli import paper
from marquardt.paper import logs, methods, runs
from marquardt.paper.data import Digits
from marquardt.paper.methods import Unavailable
from marquardt.paper.vocabulary import EXPERIMENTS
from support.command_line import environment, invoked, program

Invoke = Callable[..., Result]


@pytest.fixture
def out(tmp_path: Path) -> Path:
    return tmp_path / "results"


@pytest.fixture
def winners(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Takes the place of the tuned settings that come with the package: none."""
    file = tmp_path_factory.mktemp("package") / "tuned.json"
    file.write_text("{}")
    return file


@pytest.fixture
def invoke(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, winners: Path) -> Invoke:
    """Runs of three steps on 60 made-up images; a report that only says which runs it saw."""
    monkeypatch.chdir(tmp_path)
    small = runs.QUICK._replace(
        sine_seeds=2, sine_seconds=0.0, mnist_seeds=1, mnist_steps=3, ablation_steps=1, train_sample=20
    )
    monkeypatch.setattr(runs, "QUICK", small)
    monkeypatch.setattr(runs, "SINE_STEPS", 3)
    monkeypatch.setattr(runs, "WINNERS", winners)
    monkeypatch.setattr(paper.data, "find", lambda name, *_: digits({"mnist": "MNIST"}.get(name, name)))
    monkeypatch.setattr(marquardt.paper, "report", SimpleNamespace(write=list_runs), raising=False)

    def run(*arguments: str | Path) -> Result:
        words = [str(argument) for argument in arguments]
        monkeypatch.setattr(sys, "argv", ["marquardt", *words])
        return invoked(*words)

    return run


def digits(name: str) -> Digits:
    g = torch.Generator().manual_seed(0)
    images, labels = torch.randn(80, 1, 28, 28, generator=g), torch.arange(80) % 10
    return Digits(images[:60], labels[:60], images[60:], labels[60:], name=name, source="made up")


def list_runs(out: Path) -> Path:
    page = out / "report.html"
    page.write_text("\n".join(f"{log.experiment}/{log.method}.{log.seed}" for log in logs.read_all(out)))
    return page


def names(out: Path) -> set[str]:
    return {f"{path.parent.name}/{path.stem}" for path in (out / "logs").glob("*/*.jsonl")}


def broken_by(monkeypatch: pytest.MonkeyPatch, method: str, error: BaseException) -> None:
    def build(*_: Any) -> Any:
        raise error

    monkeypatch.setitem(methods.METHODS, method, replace(methods.METHODS[method], build=build))


# --- runs ---


def test_runs_are_made_told_and_drawn(invoke: Invoke, out: Path) -> None:
    result = invoke("paper", "sine", "mnist", "--optimizers", "sgd,adam", "--out", out)
    assert result.exit_code == 0, result.output
    expected = {f"sine/{m}.default.{s}" for m in ("sgd", "adam") for s in (1000, 1001)}
    expected |= {"mnist/sgd.default.1000", "mnist/adam.default.1000"}
    assert names(out) == expected
    for name in expected:
        assert f"  {name}: " in result.output  # a line per run where the output is no terminal
    loss = logs.read(out / "logs/sine/adam.default.1001.jsonl").final("train_loss")
    assert f"6  sine/adam.default.1001: MSE {loss:.3g} after 3 steps" in result.output
    accuracy = logs.read(out / "logs/mnist/adam.default.1000.jsonl").final("test_accuracy")
    assert f"90 % not reached, {accuracy:.2%} after 3" in result.output
    assert "Data: MNIST, made up" in result.output
    assert f"Report: {out / 'report.html'}" in result.output
    assert len((out / "report.html").read_text().split()) == 6


def test_without_a_word_every_experiment_runs(invoke: Invoke, out: Path) -> None:
    result = invoke("paper", "--out", out, "--optimizers", "adam", "--seeds", "1")
    assert result.exit_code == 0, result.output
    assert [word.value for word in paper.Experiment] == [*EXPERIMENTS, "all"]
    experiments = {name.split("/")[0] for name in names(out)}
    assert experiments == {"sine", "mnist", "ablation-sine", "ablation-mnist", "swapped"}


def test_a_terminal_shows_bars_drawn_between_the_steps(
    invoke: Invoke, out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    execute, threads, before = runs.execute, [], threading.active_count()

    def watched(*arguments: Any) -> logs.Log:
        threads.append(threading.active_count())
        return execute(*arguments)

    monkeypatch.setattr(runs, "execute", watched)
    monkeypatch.setattr(paper, "REFRESH", 0.0)
    monkeypatch.setattr(paper, "Console", partial(paper.Console, force_terminal=True, width=80, height=24))
    result = invoke("paper", "sine", "swapped", "--seeds", "1", "--optimizers", "adam,sgd", "--out", out)
    assert result.exit_code == 0, result.output
    assert threads == [before] * 4  # a thread that draws would take time from the steps
    for text in ("all runs", "Adam, seed 1000", "step 2", "running", "waiting", "done", "Report: "):
        assert text in result.output
    assert "sine/adam.default.1000" not in result.output  # the lines of a pipe


def test_the_table_takes_medians_and_a_diverged_seed_as_the_worst() -> None:
    row = paper.Row("Adam", "mnist", seeds=3)
    assert [str(cell) for cell in row.cells()] == ["Adam", "waiting", "0/3", "–", "–", "–"]
    row.ended = [log_of(4, 0.97), log_of(6, 0.95)]
    assert [str(cell) for cell in row.cells()] == ["Adam", "under way", "2/3", "5", "96.00%", "2.0"]
    row.ended.append(replace(log_of(1, 0.99), status="diverged"))
    assert [str(cell) for cell in row.cells()] == ["Adam", "1 diverged", "3/3", "4", "95.00%", "2.0"]
    row.ended = [replace(log, status="unavailable") for log in row.ended]
    assert [str(cell) for cell in row.cells()] == ["Adam", "unavailable", "3/3", "–", "–", "–"]


def log_of(reached: int, accuracy: float) -> logs.Log:
    """90 % at step `reached`, `accuracy` at the end."""
    steps = {
        "step": [0, reached, 10],
        "seconds": [0, 1, 2],
        "train_loss": [2, 1, 1],
        "test_accuracy": [0, 0.9, accuracy],
    }
    columns = {key: [float(value) for value in values] for key, values in steps.items()}
    return logs.Log(Path(), {}, columns, {}, "finished", 10, "", "mnist", "adam", "Adam", "default", 0)


def test_a_low_screen_shows_the_rows_around_the_one_that_runs() -> None:
    plan = runs.plan(["sine"], seeds=1)
    shown = paper.Screen(Console(width=80, height=14), plan, len(plan))
    shown.start(plan[6])
    assert shown.table("sine", 4).row_count == 4
    lines = shown.console.render_lines(shown.picture())
    assert len(lines) < 14
    text = "".join(segment.text for line in lines for segment in line)
    assert plan[6].label in text
    assert plan[0].label not in text


def test_what_is_done_is_skipped(invoke: Invoke, out: Path) -> None:
    assert invoke("paper", "sine", "--optimizers", "adam", "--out", out).exit_code == 0
    before = {path: path.read_text() for path in out.glob("logs/*/*")}
    result = invoke("paper", "sine", "--optimizers", "adam", "--optimizers", "kfac", "--out", out)
    assert result.exit_code == 0
    assert "2 of 4 runs are done already" in result.output
    assert "sine/adam" not in result.output
    assert "1/2  sine/kfac.default.1000" in result.output
    assert all(path.read_text() == text for path, text in before.items())
    table = result.output[result.output.index("method") :]
    assert [line.split()[:3] for line in table.splitlines()[2:4]] == [["KFAC", "done", "2/2"], ["Adam", "done", "2/2"]]


def test_ctrl_c_keeps_what_is_done_and_says_how_to_go_on(
    invoke: Invoke, out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        broken_by(patch, "adam", KeyboardInterrupt())
        result = invoke("paper", "sine", "--optimizers", "sgd,adam", "--out", out)
    assert result.exit_code == 130
    assert names(out) == {"sine/sgd.default.1000"}
    assert not list(out.glob("logs/*/*.part"))
    assert not (out / "report.html").exists()
    assert "1 of 4 runs are done" in result.output
    assert f"marquardt paper sine --optimizers sgd,adam --out {out}" in result.output
    assert f"marquardt paper report --out {out}" in result.output
    again = invoke("paper", "sine", "--optimizers", "sgd,adam", "--out", out)
    assert again.exit_code == 0
    assert len(names(out)) == 4


@pytest.mark.parametrize(
    ("error", "status", "code"),
    [
        (RuntimeError("no [bold] luck"), "failed at step 0 (", 1),
        (Unavailable("needs a package"), "unavailable at step 0 (", 0),
        (None, "diverged at step 1", 0),
    ],
)
def test_a_run_that_does_not_come_to_its_end_stops_no_other(
    invoke: Invoke, out: Path, monkeypatch: pytest.MonkeyPatch, error: Exception | None, status: str, code: int
) -> None:
    sgd = methods.METHODS["sgd"]
    if error is None:
        monkeypatch.setitem(methods.METHODS, "sgd", replace(sgd, default={**sgd.default, "lr": 1e6}))
    else:
        broken_by(monkeypatch, "sgd", error)
    result = invoke("paper", "sine", "--seeds", "1", "--optimizers", "sgd,adam", "--out", out)
    assert result.exit_code == code
    assert f"sine/sgd.default.1000: {status}" in result.output
    assert str(error or "") in result.output
    assert "sine/adam.default.1000: MSE" in result.output
    assert (out / "report.html").exists()
    assert ("1 of 2 runs failed" in result.output) == (code == 1)


def test_winners_of_the_tuning_run_too(invoke: Invoke, out: Path, winners: Path) -> None:
    out.mkdir()
    (out / "tuned.json").write_text(json.dumps({"sine": {"adam": {"lr": 0.123}}}))
    assert invoke("paper", "sine", "--seeds", "1", "--optimizers", "adam,sgd", "--out", out).exit_code == 0
    assert names(out) == {"sine/adam.default.1000", "sine/sgd.default.1000", "sine/adam.tuned.1000"}
    assert logs.read(out / "logs/sine/adam.tuned.1000.jsonl").head["hyper"]["lr"] == 0.123
    winners.write_text(json.dumps({"sine": {"adam": {"lr": 0.456}}}))  # as if they came with the package
    other = out.with_name("other")
    assert invoke("paper", "sine", "--seeds", "1", "--optimizers", "adam", "--out", other).exit_code == 0
    assert logs.read(other / "logs/sine/adam.tuned.1000.jsonl").head["hyper"]["lr"] == 0.456


# --- what is refused, before anything is run ---


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["sinus"], ["sinus", "sine", "mnist", "ablation", "swapped", "all"]),
        (["sine", "--optimizers", "adam,adamw"], ["'adamw'", "lm-paper", "sgd", "--optimizers"]),
        (["mnist", "--optimizers", "newton"], ["'newton'", "--optimizers"]),
        (["ablation", "--optimizers", "adam"], ["--optimizers", "ablation"]),
        (["--seeds", "0"], ["--seeds"]),
        (["--device", "abacus"], ["--device", "'abacus'", "cpu"]),
        (["--device", "meta"], ["--device", "'meta'", "cpu"]),
        (["--quick", "--full"], ["--quick", "--full"]),
        (["--data-dir", "nowhere"], ["--data-dir", "nowhere"]),
        (["--out", "file"], ["--out", "file"]),
        (["--out", "file/below"], ["--out", "file"]),
        (["report", "--out", "nowhere"], ["--out", "nowhere", "no run"]),
        (["tune", "--trials", "0"], ["--trials"]),
    ],
)
def test_bad_usage(invoke: Invoke, tmp_path: Path, arguments: list[str], words: list[str]) -> None:
    (tmp_path / "file").touch()
    result = invoke("paper", *arguments)
    assert result.exit_code == 2
    assert all(word in result.output for word in words), result.output
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_other_data_than_before(invoke: Invoke, out: Path) -> None:
    assert invoke("paper", "mnist", "--data", "digits", "--optimizers", "adam", "--out", out).exit_code == 0
    assert logs.read(out / "logs/mnist/adam.default.1000.jsonl").head["data"]["name"] == "digits"
    result = invoke("paper", "mnist", "--optimizers", "sgd", "--out", out)
    assert result.exit_code == 2
    assert "holds runs on digits, but the data found now are MNIST" in result.output
    assert names(out) == {"mnist/adam.default.1000"}


def test_an_error_is_a_sentence_and_debug_shows_where(
    invoke: Invoke, out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def missing(*_: Any) -> None:
        raise FileNotFoundError("no MNIST anywhere")

    monkeypatch.setattr(paper.data, "find", missing)
    result = invoke("paper", "mnist", "--out", out)
    assert result.exit_code == 1
    assert result.output.strip() == "Error: no MNIST anywhere"
    assert not out.exists()
    debug = invoke("paper", "mnist", "--out", out, "--debug")
    assert isinstance(debug.exception, FileNotFoundError)


@pytest.mark.parametrize("content", [b"{", b"\xff", b'{"sine": {"adamw": {}}}'])
def test_a_damaged_file_of_winners(invoke: Invoke, out: Path, content: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(paper.tuning, "tune", None)  # refused before an hour of searching
    out.mkdir()
    (out / "tuned.json").write_bytes(content)
    for command in ("run", "tune"):
        result = invoke("paper", command, "sine", "--out", out)
        assert result.exit_code == 1
        assert f"Error: {out / 'tuned.json'}" in result.output
        assert [path.name for path in out.iterdir()] == ["tuned.json"]


@pytest.mark.parametrize("damage", [b"\xff\xfe", b"[]\n", b'{"kind": "run"'])
def test_a_damaged_log_is_told_before_a_run(invoke: Invoke, out: Path, damage: bytes) -> None:
    assert invoke("paper", *SINE, "--out", out).exit_code == 0
    path = out / "logs/sine/sgd.default.1000.jsonl"
    whole = path.read_bytes()
    path.write_bytes(damage + whole)
    for command in (["run", *SINE], ["report"]):
        result = invoke("paper", *command, "--out", out)
        assert result.exit_code == 1
        assert f"Error: {path}, line 1: " in result.output
        assert "move the file away, and `marquardt paper` runs it again" in result.output
        assert path.read_bytes() == damage + whole
    path.unlink()
    assert invoke("paper", *SINE, "--out", out).exit_code == 0


def test_a_full_disk_is_told_with_the_file(invoke: Invoke, out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", full)
        result = invoke("paper", *SINE, "--out", out)
    assert result.exit_code == 1
    log = out / "logs/sine/sgd.default.1000.jsonl"
    assert f"Error: {log} could not be written (No space left on device): free some space" in result.output
    assert not names(out)
    assert not list(out.rglob("*.part"))
    assert invoke("paper", *SINE, "--out", out).exit_code == 0


# --- two processes at once ---

HOLDER = """
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import marquardt.paper
from marquardt import cli
from marquardt.paper import methods, runs

sgd = methods.METHODS["sgd"]


def build(*arguments):
    print("at work", flush=True)
    sys.stdin.readline()
    return sgd.build(*arguments)


marquardt.paper.report = SimpleNamespace(write=lambda out: out)
methods.METHODS["sgd"] = replace(sgd, build=build)
runs.SINE_STEPS, runs.WINNERS = 3, Path(sys.argv.pop(1))
runs.QUICK = runs.QUICK._replace(sine_seconds=0.0, train_sample=20)
runs.FULL = runs.FULL._replace(sine_seconds=0.0)
sys.exit(runs.main() if sys.argv[1] != "paper" else cli.main())
"""
SINE = ("sine", "--optimizers", "sgd", "--seeds", "1")
TUNE = ("tune", "sine", "--optimizers", "sgd", "--trials", "1")


@pytest.fixture
def holder(winners: Path, out: Path) -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Another process, which waits in the midst of its first run until its input ends."""
    started: list[subprocess.Popen[str]] = []

    def start(*arguments: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-c", HOLDER, str(winners), *arguments, "--out", str(out)]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        process = subprocess.Popen(command, text=True, env=environment(), **pipes)
        started.append(process)
        assert any("at work" in line for line in process.stdout), process.stderr.read()
        return process

    yield start
    for process in started:
        process.kill()
        process.communicate()


def files(out: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in out.rglob("*") if path.is_file()}


@pytest.mark.parametrize("command", [("paper", *SINE), SINE])
def test_the_second_process_is_told_and_writes_nothing(
    invoke: Invoke, holder: Any, out: Path, command: tuple[str, ...]
) -> None:
    assert invoke("paper", "sine", "--optimizers", "adam", "--seeds", "1", "--out", out).exit_code == 0
    first = holder(*command)
    before = files(out)
    result = invoke("paper", *SINE, "--out", out)
    module = program("-m", "marquardt.paper.runs", *SINE, "--out", out)
    for code, said in ((result.exit_code, result.output), (module.returncode, module.stderr)):
        assert code == 1
        assert f"{out} is in use, process {first.pid} on " in said
        assert shlex.join([*command, "--out", str(out)]) in said
        assert "writes its logs: wait until that has ended, or choose another --out" in said
    assert files(out) == before
    assert invoke("paper", "report", "--out", out).exit_code == 0  # of what is done so far
    _, errors = first.communicate()
    assert (first.returncode, errors) == (0, "")
    assert names(out) == {"sine/adam.default.1000", "sine/sgd.default.1000"}
    assert [log.status for log in logs.read_all(out)] == ["finished"] * 2
    assert "1 of 1 runs are done already" in invoke("paper", *SINE, "--out", out).output


def test_what_a_killed_process_leaves_stands_in_nobodys_way(invoke: Invoke, holder: Any, out: Path) -> None:
    first = holder("paper", *SINE)
    assert len(list(out.rglob("*.part"))) == 1
    first.kill()
    first.wait()
    for _ in range(2):
        result = invoke("paper", *SINE, "--out", out)
        assert result.exit_code == 0, result.output
    assert names(out) == {"sine/sgd.default.1000"}
    assert not list(out.rglob("*.part"))


def test_two_searches_at_once(invoke: Invoke, holder: Any, out: Path) -> None:
    first = holder("paper", *TUNE)
    result = invoke("paper", *TUNE, "--out", out)
    assert result.exit_code == 1
    assert f"{out} is in use, process {first.pid} on " in result.output
    assert "writes its winners: wait" in result.output
    assert not (out / "tuned.json").exists()
    _, errors = first.communicate()
    assert (first.returncode, errors) == (0, "")
    assert list(runs.winners(out / "tuned.json")["sine"]) == ["sgd"]


def test_a_folder_that_cannot_be_locked(invoke: Invoke, out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> None:
        raise OSError(38, "Function not implemented")

    monkeypatch.setattr(locks, "_lock", refuse)
    result = invoke("paper", *SINE, "--out", out)
    assert result.exit_code == 1
    assert f"{out / '.logs.lock'} cannot be locked (Function not implemented): choose another --out" in result.output


# --- tune, report ---


def test_tune(invoke: Invoke, out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    def tune(names: list[str], problem: str, **options: Any) -> dict[str, Any]:
        calls.append((problem, *names, options["trials"], options["data"] and options["data"].name))
        return {name: {"lr": 0.5} for name in names if name != "psgd"}  # whose package is missing

    monkeypatch.setattr(paper.tuning, "tune", tune)
    result = invoke("paper", "tune", "--trials", "7", "--optimizers", "psgd,adam", "--out", out)
    assert result.exit_code == 0, result.output
    problems = {"sine": None, "mnist": "MNIST"}
    assert calls == [(problem, name, 7, data) for problem, data in problems.items() for name in ("adam", "psgd")]
    assert 'sine/adam: {"lr": 0.5}' in result.output
    assert "mnist/psgd: not available" in result.output
    assert json.loads((out / "tuned.json").read_text()) == {problem: {"adam": {"lr": 0.5}} for problem in problems}
    calls.clear()
    assert invoke("paper", "tune", "mnist", "--out", out).exit_code == 0
    assert {call[0] for call in calls} == {"mnist"}
    assert {call[1] for call in calls} == {key for key, method in methods.METHODS.items() if not method.sine_only}


@pytest.mark.parametrize(
    ("error", "code", "found"),
    [
        (RuntimeError("no trial came to its end"), 1, ["lm-vanilla", "adam"]),  # the others go on
        (Unavailable("needs the package optuna"), 1, ["lm-vanilla"]),  # no other can
        (KeyboardInterrupt(), 130, ["lm-vanilla"]),
    ],
)
def test_a_search_that_fails(
    invoke: Invoke, out: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException, code: int, found: list[str]
) -> None:
    def tune(names: list[str], problem: str, **_: Any) -> dict[str, Any]:
        if names == ["sgd"]:
            raise error
        return {name: {"lr": 0.5} for name in names}

    monkeypatch.setattr(paper.tuning, "tune", tune)
    result = invoke("paper", "tune", "sine", "--optimizers", "lm-vanilla,sgd,adam", "--out", out)
    assert result.exit_code == code
    assert str(error) in result.output
    assert json.loads((out / "tuned.json").read_text()) == {"sine": {name: {"lr": 0.5} for name in found}}


def test_report_draws_from_logs_alone_or_from_its_content(
    invoke: Invoke, out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert invoke("paper", "report", "--out", out).exit_code == 2
    out.mkdir()
    (out / "report.json").write_text("{}")
    result = invoke("paper", "report", "--out", out)
    assert result.exit_code == 0
    assert f"Report: {out / 'report.html'}" in result.output
    assert invoke("paper", "sine", "--seeds", "1", "--optimizers", "adam", "--out", out).exit_code == 0
    (out / "report.html").unlink()
    monkeypatch.setattr(runs, "execute", None)
    assert invoke("paper", "report", "--out", out).exit_code == 0
    assert (out / "report.html").read_text() == "sine/adam.1000"


def test_a_package_for_drawing_is_missed_before_the_first_run(
    invoke: Invoke, out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(marquardt.paper, "report")
    monkeypatch.delitem(sys.modules, "marquardt.paper.report", raising=False)
    monkeypatch.delitem(sys.modules, "marquardt.paper.figures", raising=False)
    monkeypatch.setitem(sys.modules, "jinja2", None)
    result = invoke("paper", "sine", "--out", out)
    assert result.exit_code == 2
    assert "needs jinja2: pip install 'marquardt[paper]'" in result.output
    assert not out.exists()
