"""Makes mutations, each in a copy of the source, and runs the tests that are to find them.

    python tests/mutations/run.py [--only WORDS ...] [--jobs 2] [--out FILE] [--resume] [--against FILE]

killed      a test failed; `by` has the first of them
survived    none did
timeout     they took longer than --limit seconds each (they do not, without the mutation)
broken      the tests could not even be collected: the mutation has to be restated
lost        the snippet is not in the source, or more than once, or a test is gone: the mutation has to be restated,
            or, if what it changed is gone for good, named in retired.py

With --against it exits with 1 if a mutation is not killed now that was killed then.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from mutations.mutations import ROOT, SOURCE, Mutation, every, find, located, read
from mutations.retired import NAMES

BASELINE = Path(__file__).with_name("baseline.json")
FOUND = ("killed", "timeout")
MOST = 3  # tests that are named, and after which no others run
STRANGER = 99  # exit status if the tests have not imported the copy


class Running(NamedTuple):
    """The tests of one mutation, in a process of their own."""

    mutation: Mutation | None  # None: without any
    copy: Path
    file: Path  # in the copy
    text: str  # of this file, before
    times: tuple[int, int]
    began: float

    @property
    def output(self) -> Path:
        return self.copy.with_suffix(".txt")


def main() -> int:
    options = arguments()
    chosen = [m for m in every() if not options.only or any(word in m.name for word in options.only)]
    results: dict[str, Any] = {}
    if options.out.exists() and (options.resume or options.only):
        results = json.loads(options.out.read_text())["mutations"]
    done = (*FOUND, "survived") if options.resume else ()
    todo = [m for m in chosen if results.get(m.name, {}).get("status") not in done]
    start = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="mutations-") as folder:
        copies = [copied(Path(folder) / str(i)) for i in range(options.jobs)]
        warm()
        if todo and not options.no_control and not healthy(todo, copies[0], options.limit):
            return 2

        def tell(m: Mutation, found: dict[str, Any]) -> None:
            results[m.name] = found
            write(options.out, results)
            print(f"{found['status']:9}{found['seconds']:6.1f} s  {m.name}", flush=True)

        each(todo, copies, options.limit, tell)
    summary({m.name: results[m.name] for m in chosen}, time.monotonic() - start)
    return 0 if options.against is None else compared(options.against, results, {m.name for m in chosen})


def each(
    todo: list[Mutation], free: list[Path], limit: float, tell: Callable[[Mutation, dict[str, Any]], None]
) -> None:
    """All of them, as many at once as there are copies"""
    waiting, running = list(todo), dict[int, Running]()
    while waiting or running:
        while waiting and free:
            m = waiting.pop(0)
            why = lost(m, free[-1])
            if why:
                tell(m, {"status": "lost", "why": why, "seconds": 0.0})
            else:
                copy = free.pop()
                running |= started(m, copy, [found for test in m.tests if (found := located(test))])
        for pid, run in list(running.items()):
            status = ended(pid, run, limit)
            if status is not None:
                del running[pid]
                free.append(run.copy)
                assert run.mutation is not None
                tell(run.mutation, told(run, status))
        time.sleep(0.02)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", default=[], help="mutations that have one of these words in their names")
    parser.add_argument("--jobs", type=int, default=1, help="how many at once")
    parser.add_argument("--out", type=Path, default=Path("mutations.json"), help="written after every mutation")
    parser.add_argument("--resume", action="store_true", help="leave out what --out has already")
    parser.add_argument("--against", type=Path, help=f"an earlier result, such as {BASELINE.relative_to(ROOT)}")
    parser.add_argument("--limit", type=float, default=300.0, help="seconds for the tests of one mutation")
    parser.add_argument("--no-control", action="store_true", help="take for granted that the tests pass as it is")
    return parser.parse_args()


def copied(copy: Path) -> Path:
    """The source and what Python makes of it, once: a mutated file alone is compiled again"""
    shutil.copytree(SOURCE, copy, ignore=shutil.ignore_patterns("__pycache__"))
    subprocess.run([sys.executable, "-m", "compileall", "-q", copy], check=True)
    return copy


def warm() -> None:
    """What all tests import and no mutation changes, once: the processes of the tests are forks of this one"""
    os.environ |= {"OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}
    sys.dont_write_bytecode = True
    os.chdir(ROOT)
    for name in ("torch", "torch.func", "torch.nn.utils", "numpy", "pytest", "_pytest.assertion", "hypothesis"):
        import_module(name)
    assert "marquardt" not in sys.modules


def started(m: Mutation | None, copy: Path, tests: list[str]) -> dict[int, Running]:
    """The tests on this copy of the source, with the mutation in it"""
    file, first, last = find(m.snippet, read(copy))[0] if m else (Path("marquardt/__init__.py"), 0, 0)
    path = copy / file
    text, times = path.read_text(), path.stat()
    run = Running(m, copy, path, text, (times.st_atime_ns, times.st_mtime_ns), time.monotonic())
    if m:
        path.write_text(text[:first] + m.mutant + text[last:])
    sys.stdout.flush()
    pid = os.fork()
    if pid:
        return {pid: run}
    status = STRANGER
    try:
        os.setpgid(0, 0)
        with run.output.open("w") as output:
            os.dup2(output.fileno(), 1)
            os.dup2(output.fileno(), 2)
        os.environ["PYTHONPATH"] = str(copy)
        sys.path.insert(0, str(copy))
        import pytest

        options = ["-p", "no:cacheprovider", "-p", "no:xdist", "--tb=no", "-rfE", "--durations=0"]
        code = int(pytest.main([*options, f"--maxfail={MOST}", *tests]))
        sys.stdout.flush()
        imported = sys.modules.get("marquardt")
        if imported is None or Path(str(imported.__file__)).is_relative_to(copy):
            status = code
    finally:
        os._exit(status)


def ended(pid: int, run: Running, limit: float) -> int | None:
    """The exit status, −1 after so many seconds; None if it is still running. The copy is as before then."""
    found, status = os.waitpid(pid, os.WNOHANG)
    code = os.waitstatus_to_exitcode(status)
    if not found:
        if time.monotonic() - run.began <= limit:
            return None
        os.killpg(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        code = -1
    run.file.write_text(run.text)
    os.utime(run.file, ns=run.times)
    return code


def healthy(todo: list[Mutation], copy: Path, limit: float) -> bool:
    """Whether all tests pass on a copy without a mutation"""
    tests = dict.fromkeys(found for m in todo for test in m.tests if (found := located(test)) is not None)
    ((pid, run),) = started(
        None, copy, [t for t in tests if "::" not in t or t.partition("::")[0] not in tests]
    ).items()
    while (status := ended(pid, run, 20 * limit)) is None:
        time.sleep(0.1)
    if status == STRANGER:
        print(f"the tests did not import the copy in {copy}")
    elif status:
        print(f"the tests do not pass without a mutation:\n{run.output.read_text()[-4000:]}")
    return status == 0


def lost(m: Mutation, copy: Path) -> str:
    """Why it cannot be made, "" if it can"""
    places, gone = find(m.snippet, read(copy)), [test for test in m.tests if located(test) is None]
    if len(places) != 1:
        return f"{len(places)} places in the source"
    if gone:
        return f"no test {', '.join(gone)}"
    ((file, first, last),) = places
    text = (copy / file).read_text()
    try:
        compile(text[:first] + m.mutant + text[last:], str(file), "exec")
    except SyntaxError as error:
        return f"it cannot be compiled: {error}"
    return ""


def told(run: Running, code: int) -> dict[str, Any]:
    """What came of it"""
    assert run.mutation is not None
    status = {-1: "timeout", 0: "survived", 1: "killed"}.get(code, "broken")
    found: dict[str, Any] = {"status": status, "file": run.file.relative_to(run.copy / "marquardt").as_posix()}
    output = run.output.read_text()
    if status == "killed":
        lines = [line.partition(" ")[2] for line in output.splitlines() if line.startswith(("FAILED ", "ERROR "))]
        found["by"] = [line.partition(" - ")[0] for line in lines]
    elif status != "timeout":
        found["tests"] = list(run.mutation.tests)
    if status == "broken":
        found["why"] = output[-1000:]
    return {**found, "seconds": round(time.monotonic() - run.began, 1)}


def write(out: Path, results: dict[str, Any]) -> None:
    """With the order of the list, and the commit that it is of"""
    git = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, text=True, stdout=subprocess.PIPE, check=False)
    order = {m.name: i for i, m in enumerate(every())}
    kept = sorted((name for name in results if name in order), key=order.__getitem__)
    document = {"commit": git.stdout.strip(), "mutations": {name: results[name] for name in kept}}
    whole = json.dumps(document, indent=1, ensure_ascii=False) + "\n"
    draft = out.with_suffix(".part")
    draft.write_text(whole)
    draft.replace(out)


def summary(results: dict[str, Any], seconds: float) -> None:
    areas = dict.fromkeys(name.partition(":")[0] for name in results)
    for area in areas:
        counts = Counter(r["status"] for name, r in results.items() if name.startswith(f"{area}:"))
        print(f"{area:12}" + ", ".join(f"{count} {status}" for status, count in counts.items()))
    for name, found in results.items():
        if found["status"] not in FOUND:
            print(f"{found['status']}: {name}")
    print(f"{len(results)} mutations in {seconds / 60:.0f} minutes")


def compared(against: Path, results: dict[str, Any], chosen: set[str]) -> int:
    """1 if a mutation is not killed now that was killed then"""
    then = json.loads(against.read_text())["mutations"]
    missed = [
        name
        for name, found in then.items()
        if found["status"] in FOUND and name in chosen and results.get(name, {}).get("status") not in FOUND
    ]
    dropped = sorted(set(then) - {m.name for m in every()} - NAMES)
    for name in missed:
        print(f"killed then, {results[name]['status']} now: {name}")
    for name in dropped:
        print(f"no longer in the list: {name}")
    return 1 if missed or dropped else 0


if __name__ == "__main__":
    sys.exit(main())
