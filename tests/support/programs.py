"""Programs as if by `python -c`, in processes forked from one that has imported torch and marquardt.

    done = run(text, folder)    # like subprocess.run: returncode, stdout, stderr

The imports take longer than most of the programs do. Each has a `__main__`, a folder and random numbers of its own, and
nothing in its names that it has not imported. (The forkserver of `ranks` has imported more, which could hide a missing
import of a page.)
"""

from __future__ import annotations

import atexit
import json
import os
import random
import signal
import subprocess
import sys
import traceback
from pathlib import Path
from types import ModuleType
from typing import NoReturn

_server: subprocess.Popen[str] | None = None


def run(text: str, folder: Path, *, timeout: float = 240) -> subprocess.CompletedProcess[str]:
    """After `timeout` seconds the program ends by a signal, and its return code is negative."""
    global _server
    if _server is None:
        _server = subprocess.Popen([sys.executable, __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        atexit.register(_server.kill)
    assert _server.stdin is not None
    assert _server.stdout is not None
    files = {name: str(folder.parent / f"{folder.name}.{name}") for name in ("stdout", "stderr")}
    asked = {"text": text, "folder": str(folder), "timeout": timeout, **files}
    print(json.dumps(asked), file=_server.stdin, flush=True)
    code = int(_server.stdout.readline())
    stdout, stderr = (Path(file).read_text(encoding="utf-8") for file in files.values())
    return subprocess.CompletedProcess(["python", "-c", text], code, stdout, stderr)


# The process that forks


def serve() -> None:
    import torch
    import torch._dynamo  # torch.optim imports it at the first step

    import marquardt  # noqa: F401

    torch.set_num_threads(1)
    for line in sys.stdin:
        asked = json.loads(line)
        child = os.fork()
        if child == 0:
            _program(asked)
        _, status = os.waitpid(child, 0)
        print(os.waitstatus_to_exitcode(status), flush=True)


def _program(asked: dict[str, str]) -> NoReturn:
    signal.alarm(int(asked["timeout"]))
    for name, number in (("stdout", 1), ("stderr", 2)):
        os.dup2(os.open(asked[name], os.O_WRONLY | os.O_CREAT | os.O_TRUNC), number)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.chdir(asked["folder"])
    sys.argv, sys.path[0] = ["-c"], ""
    random.seed()
    main = sys.modules["__main__"] = ModuleType("__main__")
    code = 0
    try:
        exec(compile(asked["text"], "<string>", "exec"), main.__dict__)
    except BaseException:
        traceback.print_exc()
        code = 1
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # at once: to take all modules apart takes a second


if __name__ == "__main__":
    serve()
