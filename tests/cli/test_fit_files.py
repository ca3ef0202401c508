"""The files of `marquardt fit` and `predict`: whose they are, and what is noticed when they are not as they were."""

from __future__ import annotations

import json
import os
import random
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch

from marquardt import files as disk
from marquardt.tabular import building
from support.command_line import invoked, program, refused
from support.made_runs import room_for
from support.tables import houses, write

QUICK = ("--target", "price", "--hidden", "3", "--steps", "3")


def files(out: Path) -> dict[str, bytes | str]:
    """Contents by name; of a link where it leads."""
    return {
        str(path.relative_to(out)): os.readlink(path) if path.is_symlink() else path.read_bytes()
        for path in out.rglob("*")
        if (path.is_symlink() or path.is_file()) and path.name != ".run.lock"
    }


@contextmanager
def after_a_network(then: Callable[[], Any]) -> Iterator[None]:
    """Something happens when a network has been saved"""
    save = building.save_part
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(building, "save_part", lambda *given: (save(*given), then()))
        yield


def stop() -> None:
    raise KeyboardInterrupt


@pytest.fixture
def data(tmp_path: Path) -> Path:
    return write(tmp_path / "data.csv", houses(40), without=("rent", "sold", "name", "built", "country"))


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A whole model, another one, and a run that was stopped when the first of its two networks was there"""
    folder = tmp_path_factory.mktemp("models")
    data = write(folder / "data.csv", houses(40), without=("rent", "sold", "name", "built", "country"))
    assert invoked("fit", data, *QUICK, "--out", folder / "whole").exit_code == 0
    assert invoked("fit", data, *QUICK, "--out", folder / "other", "--seed", "5").exit_code == 0
    with after_a_network(stop):
        assert invoked("fit", data, *QUICK, "--out", folder / "stopped").exit_code == 130
    assert set(files(folder / "stopped")) == {"run.json", "checkpoint/configuration-1.pt"}
    return folder


@pytest.fixture
def stopped(models: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(models / "stopped", tmp_path / "out"))


@pytest.fixture
def whole(models: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(models / "whole", tmp_path / "out"))


def resumed(data: Path, out: Path) -> Any:
    return invoked("fit", data, *QUICK, "--out", out, "--resume")


# --- whose files they are ---


@pytest.mark.parametrize(
    "name", ["x.part", "model.part", "run.part", "report.html", "predictions.csv", "run.json", "checkpoint/a"]
)
def test_a_folder_with_files_of_the_user_is_refused_and_left_as_it_is(data: Path, tmp_path: Path, name: str) -> None:
    out = tmp_path / "out"
    (out / name).parent.mkdir(parents=True)
    (out / name).write_text("mine")
    for more in ((), ("--resume",)):
        refused(invoked("fit", data, *QUICK, "--out", out, *more), str(out), "choose another --out")
        assert files(out) == {name: b"mine"}


@pytest.mark.parametrize("name", ["model.pt", "preprocessing.json", "predictions.csv", "metrics.json", "report.html"])
@pytest.mark.parametrize("kind", ["file", "link", "dangling"])
def test_a_file_of_the_user_is_not_replaced_by_a_run_that_goes_on(
    data: Path, stopped: Path, tmp_path: Path, name: str, kind: str
) -> None:
    (tmp_path / "mine").write_text("mine")
    if kind == "file":
        (stopped / name).write_text("mine")
    else:
        (stopped / name).symlink_to(tmp_path / ("mine" if kind == "link" else "nowhere"))
    before = files(stopped)
    refused(resumed(data, stopped), str(stopped / name), "is there already", "move it")
    assert files(stopped) == before
    assert (tmp_path / "mine").read_text() == "mine"
    (stopped / name).unlink()
    assert resumed(data, stopped).exit_code == 0


def test_what_comes_while_a_network_is_trained_is_not_replaced(data: Path, stopped: Path) -> None:
    with after_a_network(lambda: (stopped / "report.html").write_text("mine")):
        result = resumed(data, stopped)
    assert result.exit_code == 1
    assert "report.html is there already" in result.stderr
    assert (stopped / "report.html").read_text() == "mine"
    assert not (stopped / "model.pt").exists()
    (stopped / "report.html").unlink()
    assert resumed(data, stopped).exit_code == 0


def test_files_of_the_user_in_the_folder_of_a_run_stay(data: Path, stopped: Path, tmp_path: Path) -> None:
    """What a killed process has left goes; a link in the place of the checkpoint is not followed."""
    (stopped / "notes").mkdir()
    for name in ("thesis.part", "notes/a.part", "checkpoint/notes.txt"):
        (stopped / name).write_text("mine")
    torch.save({"mine": 1}, stopped / "checkpoint/configuration-77.pt")
    for name in ("model.0123abcd.part", "checkpoint/configuration-2.0123abcd.part"):
        (stopped / name).write_text("what a killed process has left")
    shutil.move(stopped / "checkpoint", tmp_path / "elsewhere")
    (stopped / "checkpoint").symlink_to(tmp_path / "elsewhere")
    before = files(tmp_path / "elsewhere")
    refused(resumed(data, stopped), f"{stopped / 'checkpoint'} is no folder")
    assert files(tmp_path / "elsewhere") == before
    (stopped / "checkpoint").unlink()
    shutil.move(tmp_path / "elsewhere", stopped / "checkpoint")
    assert resumed(data, stopped).exit_code == 0
    mine = {"thesis.part", "notes/a.part", "checkpoint/notes.txt", "checkpoint/configuration-77.pt"}
    written = {"run.json", "model.pt", "preprocessing.json", "predictions.csv", "metrics.json", "report.html"}
    assert set(files(stopped)) == mine | written


def test_nothing_is_replaced_by_predictions(models: Path, data: Path, tmp_path: Path) -> None:
    (tmp_path / "p.csv").symlink_to(tmp_path / "nowhere")
    for there in (data, tmp_path / "p.csv"):
        result = invoked("predict", models / "whole", data, "--out", there)
        assert result.exit_code == 2
        assert "is there already" in result.output
    assert (tmp_path / "p.csv").is_symlink()


def test_the_words_and_the_data_are_checked_before_the_folder(data: Path, whole: Path, tmp_path: Path) -> None:
    misspelt = [word.replace("price", "prize") for word in QUICK]
    for more in ((), ("--resume",)):
        refused(invoked("fit", data, *misspelt, "--out", whole, *more), "no column 'prize'", "'price'")
    refused(invoked("fit", data, *QUICK, "--ignore", "color", "--out", whole), "--ignore", "no column 'color'")
    refused(invoked("fit", tmp_path / "dta.csv", *QUICK, "--out", whole), "dta.csv cannot be read")
    refused(invoked("fit", data, *QUICK, "--out", whole), "holds a run already")
    assert "finished: there is nothing to do" in resumed(data, whole).output
    (whole / "model.pt").unlink()
    refused(resumed(data, whole), "finished, but without model.pt", "choose another --out")


# --- damage ---


def flipped(draw: random.Random, content: bytes) -> bytes:
    """One bit of it"""
    at = draw.randrange(len(content))
    return content[:at] + bytes([content[at] ^ 1 << draw.randrange(8)]) + content[at + 1 :]


@pytest.mark.parametrize("name", ["model.pt", "preprocessing.json"])
def test_a_changed_bit_of_a_model_is_noticed(models: Path, data: Path, whole: Path, name: str) -> None:
    content, draw = (whole / name).read_bytes(), random.Random(0)
    for wrong in (b"x", b"{}", *(flipped(draw, content) for _ in range(40))):
        (whole / name).write_bytes(wrong)
        refused(invoked("predict", whole, data), "damaged", "train it again")
    (whole / name).write_bytes(content)
    shutil.copy(models / "other/model.pt", whole)
    refused(invoked("predict", whole, data), "are of two models")


def test_a_damaged_checkpoint_is_named_before_anything_is_trained(
    data: Path, stopped: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    paths = [stopped / f"checkpoint/configuration-{number}.pt" for number in (1, 2)]
    shutil.copy(*paths)  # there are two
    content, draw = paths[0].read_bytes(), random.Random(0)
    monkeypatch.setattr(building.Descent, "run", None)
    words = ("is damaged", "move it away, and the same command trains these networks again")
    for path in paths:
        for _ in range(10):
            path.write_bytes(flipped(draw, content))
            result = resumed(data, stopped)
            assert result.exit_code == 1
            assert all(word in result.stderr for word in (f"Error: {path} ", *words)), result.stderr
        path.write_bytes(content)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"versions.threads": 100_000}, "versions.threads is 100000, not 1 to 1024"),
        ({"versions.threads": 0}, "versions.threads is 0"),
        ({"versions.threads": "2"}, "versions.threads is '2', not a whole number"),
        ({"versions.threads": True}, "versions.threads is True, not a whole number"),
        ({"versions.torch": 2}, "versions.torch is 2, not text"),
        ({"data.path": ["a"]}, "data.path is ['a'], not text"),
        ({"data.bytes": -1}, "a size or a checksum that is none"),
        ({"data.sha256": "x"}, "a size or a checksum that is none"),
        ({"options.steps": "many"}, "options.steps is 'many'"),
        ({"options.hidden": [3.5]}, "options.hidden[0] is 3.5"),
        ({"options.more": 1}, "options has an entry 'more'"),
        ({"options": []}, "options is [], not an object"),
        ({"finished": "no"}, "finished is 'no', not true or false"),
        ({"written": ["../../x"]}, "a size or a checksum that is none"),
        ({"format": 3}, "the format '3', this version reads 2"),
        ({"more": 1}, "an entry 'more'"),
    ],
)
def test_every_entry_of_a_run_is_checked(data: Path, stopped: Path, changes: dict[str, Any], words: str) -> None:
    content, _ = disk.read(stopped / "run.json")
    [(place, value)] = changes.items()
    *way, last = place.split(".")
    holder = content[way[0]] if way else content
    holder[last] = value
    disk.write(stopped / "run.json", content)
    before, threads = files(stopped), torch.get_num_threads()
    refused(resumed(data, stopped), "run.json", words, "choose another --out")
    assert files(stopped) == before
    assert torch.get_num_threads() == threads


# --- files of an earlier version, which had no checksums ---


def unsealed(path: Path, **changes: Any) -> None:
    if path.suffix == ".pt":
        torch.save({**disk.load(path)[0], **changes}, path)
    else:
        found, _ = disk.read(path)
        found |= changes
        path.write_text(json.dumps({key: value for key, value in found.items() if value is not None}, indent=1))


def test_a_model_of_an_earlier_version_predicts_and_says_so(data: Path, whole: Path) -> None:
    expected = invoked("predict", whole, data).stdout
    for name in ("model.pt", "preprocessing.json"):
        before = (whole / name).read_bytes()
        unsealed(whole / name)
        refused(invoked("predict", whole, data), "damaged", "checksum is missing")
        (whole / name).write_bytes(before)
    unsealed(whole / "model.pt", format=1)
    refused(invoked("predict", whole, data), "not of one version")
    unsealed(whole / "preprocessing.json", format=1, model=None)
    result = invoked("predict", whole, data)
    assert result.stdout == expected
    assert "of an earlier version, without checksums: damage would not be noticed" in result.stderr
    unsealed(whole / "preprocessing.json", format=3)
    refused(invoked("predict", whole, data), "written by a newer marquardt (format 3)")


def test_a_run_of_an_earlier_version_is_refused(data: Path, stopped: Path) -> None:
    unsealed(stopped / "run.json", format=None, written=None)
    before = files(stopped)
    for more in ((), ("--resume",)):
        refused(invoked("fit", data, *QUICK, "--out", stopped, *more), "earlier version", "choose another --out")
    assert files(stopped) == before


# --- a disk that is full, and names that are no UTF-8 ---


@pytest.mark.parametrize("size", [0, 200, 1_000, 3_000])
def test_a_full_disk_is_told_with_the_file_and_the_way_out(data: Path, tmp_path: Path, size: int) -> None:
    out = tmp_path / "out"
    with room_for(size):
        result = invoked("fit", data, *QUICK, "--out", out)
    assert result.exit_code == 1, result.output
    [sentence] = [line for line in result.stderr.splitlines() if line.startswith("Error: ")]
    assert f"Error: {out}/" in sentence
    assert "could not be written (File too large): free some space or choose another folder" in sentence
    assert not list(out.rglob("*.part"))
    assert resumed(data, out).exit_code == 0


@pytest.mark.skipif(sys.platform != "linux", reason="other systems refuse such names")
def test_names_that_are_no_utf8_and_hold_control_characters(data: Path, tmp_path: Path, monkeypatch: Any) -> None:
    odd = Path(os.fsdecode(os.fsencode(tmp_path) + b"/caf\xe9\x1b[31m.csv"))
    data.rename(odd)
    model, words = odd.with_name(f"{odd.stem}-model"), ("fit", odd, *QUICK)
    monkeypatch.setattr(sys, "argv", ["marquardt", *map(str, words)])  # the lock tells whose it is
    shown = str(tmp_path / "caf\\xe9\\x1b[31m")
    result = invoked(*words)
    assert result.exit_code == 0, result.output
    assert f"Report: {shown}-model/report.html" in result.output
    refused(invoked(*words), f"{shown}-model holds a run already")
    assert "finished" in invoked(*words, "--resume").output
    assert invoked("predict", model, odd).exit_code == 0
    assert "\x1b" not in (model / "report.html").read_text(encoding="utf-8")
    pd.read_csv(odd).to_parquet(tmp_path / "plain.parquet")
    parquet = (tmp_path / "plain.parquet").rename(odd.with_suffix(".parquet"))
    assert invoked("predict", model, parquet).exit_code == 0
    os.truncate(parquet, 300)
    refused(invoked("predict", model, parquet), f"{shown}.parquet is a damaged Parquet file", "write it again")


# --- a run that is killed goes on to the same model, bit for bit ---

# Files are written in two moves, flushed and renamed. One process is there to be forked: each of its children fits, and
# is killed (−9) before or after one of these moves, or is not; how many moves there were is left in a file.
FORKS = """
import json, os, signal, sys
from pathlib import Path
import torch
from marquardt import cli
from marquardt.table import run

torch.set_num_threads(1)
moves = [os.fsync, os.replace]


def watched(move, at, late, count):
    def moved(*arguments):
        count.append(move.__name__)
        last = len(count) == at
        if last and not late:
            os.kill(os.getpid(), signal.SIGKILL)
        move(*arguments)
        if last:
            os.kill(os.getpid(), signal.SIGKILL)
    return moved


def child(words, at=0, late=False):
    process = os.fork()
    if process == 0:
        count = []
        os.fsync, os.replace = (watched(move, at, late, count) for move in moves)
        sys.argv = ["marquardt", *words]
        code = 0
        try:
            cli.main()
        except SystemExit as stop:
            code = stop.code or 0
        Path("moves").write_text(str(len(count)))
        os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])


data, folder = sys.argv[1:]
os.chdir(folder)
words = ["fit", data, "--target", "price", "--steps", "3", "--out"]
codes = {"whole": [child([*words, "whole"])]}
total = int(Path("moves").read_text())
for at, late in [(1, False), (2, True), (total // 3, True), (2 * total // 3, False), (total, False)]:
    name = f"killed-{at}-{late}"
    codes[name] = [child([*words, name], at, late), child([*words, name, "--resume"])]
Path("codes.json").write_text(json.dumps(codes))
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="processes are forked")
def test_killed_between_any_two_moves_and_resumed(tmp_path: Path) -> None:
    data = write(tmp_path / "data.csv", houses(30), without=("rent", "sold"))
    result = program("-c", FORKS, data, tmp_path)
    assert result.returncode == 0, result.stderr
    codes = json.loads((tmp_path / "codes.json").read_text())
    assert codes.pop("whole") == [0]
    assert list(codes.values()) == [[-9, 0]] * 5, codes
    whole = tmp_path / "whole"
    for name in codes:
        for file in ("model.pt", "preprocessing.json", "predictions.csv", "metrics.json"):
            assert (tmp_path / name / file).read_bytes() == (whole / file).read_bytes(), (name, file)
        found = {path.name for path in (tmp_path / name).iterdir()}
        assert found == {path.name for path in whole.iterdir()}  # nothing half-written stays
        assert json.loads((tmp_path / name / "run.json").read_text())["finished"]
