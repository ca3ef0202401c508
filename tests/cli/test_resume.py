"""A run that is killed goes on to the same model, bit for bit."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from support.command_line import program
from support.tables import houses, write

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="processes are forked")

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
