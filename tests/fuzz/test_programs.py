"""Every program of this folder can be called by hand, from any folder, without pytest's paths."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent

# One process for all: importing torch takes longest. Each finds its own modules anew, and ends before its first case.
CALLED = """
import runpy, sys

paths = list(sys.path)
for program in sys.argv[1:]:
    for name in [name for name in sys.modules if name.partition(".")[0] in ("fuzz", "support")]:
        del sys.modules[name]
    sys.path[:], sys.argv = [program.rpartition("/")[0], *paths], [program, "--minutes", "1e-9"]
    try:
        runpy.run_path(program, run_name="__main__")
    except SystemExit as end:
        assert not end.code, program
    print(program)
"""


def test_they_are_called_by_hand(tmp_path):
    programs = [str(path) for path in sorted(HERE.glob("*.py")) if '__name__ == "__main__"' in path.read_text()]
    assert len(programs) >= 9
    bare = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    done = subprocess.run(
        [sys.executable, "-c", CALLED, *programs], capture_output=True, text=True, cwd=tmp_path, env=bare
    )
    assert done.returncode == 0, done.stderr
    assert [line for line in done.stdout.splitlines() if line in programs] == programs
