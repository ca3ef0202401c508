"""Makes mutations, each in a copy of the source, and runs the tests that are to find them.

    python tests/mutations/run.py [--only WORDS ...] [--jobs 2] [--out FILE] [--resume] [--against FILE]

killed      a test failed, or took longer than --limit seconds; `by` has the first of them
survived    none did
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
from importlib import import_module
from multiprocessing import get_context
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from mutations.mutations import ROOT, SOURCE, Mutation, every, find, located, read
from mutations.retired import NAMES

BASELINE = Path(__file__).with_name("baseline.json")
FOUND = ("killed", "timeout")  # the second in results of earlier versions
MOST = 3  # tests that are named, and after which no others run
STRANGER = 99  # exit status if the tests have not imported the copy
FREE: Any = None  # copies of the source, for as many processes
LIMIT = 300.0


def main() -> int:
    global FREE, LIMIT
    options = arguments()
    LIMIT = options.limit
    chosen = [m for m in every() if not options.only or any(word in m.name for word in options.only)]
    results: dict[str, Any] = {}
    if options.out.exists() and (options.resume or options.only):
        results = json.loads(options.out.read_text())["mutations"]
    done = (*FOUND, "survived") if options.resume else ()
    todo = [m for m in chosen if results.get(m.name, {}).get("status") not in done]
    start, context = time.monotonic(), get_context("fork")
    with tempfile.TemporaryDirectory(prefix="mutations-") as folder:
        FREE = context.SimpleQueue()
        for i in range(options.jobs):
            FREE.put(copied(Path(folder) / str(i)))
        warm()
        with context.Pool(options.jobs, maxtasksperchild=1) as pool:
            if todo and not options.no_control and not healthy(pool.apply(tried, (None, control(todo)))):
                return 2
            for name, found in pool.imap_unordered(one, todo):
                results[name] = found
                write(options.out, results)
                print(f"{found['status']:9}{found['seconds']:6.1f} s  {name}", flush=True)
    summary({m.name: results[m.name] for m in chosen}, time.monotonic() - start)
    return 0 if options.against is None else compared(options.against, results, {m.name for m in chosen})


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


def one(m: Mutation) -> tuple[str, dict[str, Any]]:
    """What comes of a mutation, in a process of its own"""
    began, why = time.monotonic(), lost(m)
    if why:
        return m.name, {"status": "lost", "why": why, "seconds": 0.0}
    code, output = tried(m, [found for test in m.tests if (found := located(test))])
    ((file, _, _),) = find(m.snippet, read())
    found: dict[str, Any] = {"status": {0: "survived", 1: "killed"}.get(code, "broken")}
    found["file"] = file.relative_to("marquardt").as_posix()
    if found["status"] == "killed":
        lines = [line.partition(" ")[2] for line in output.splitlines() if line.startswith(("FAILED ", "ERROR "))]
        found["by"] = [line.partition(" - ")[0] for line in lines]
    else:
        found["tests"] = list(m.tests)
    if found["status"] == "broken":
        found["why"] = output[-1000:]
    return m.name, {**found, "seconds": round(time.monotonic() - began, 1)}


def tried(m: Mutation | None, tests: list[str]) -> tuple[int, str]:
    """Exit status and output of the tests on a copy of the source with the mutation in it, and as before then"""
    copy: Path = FREE.get()
    file, first, last = find(m.snippet, read(copy))[0] if m else (Path("marquardt/__init__.py"), 0, 0)
    path, output = copy / file, copy.with_suffix(".txt")
    text, times = path.read_text(), path.stat()
    if m:
        path.write_text(text[:first] + m.mutant + text[last:])
    try:
        with output.open("w") as there:
            os.dup2(there.fileno(), 1)
            os.dup2(there.fileno(), 2)
        os.environ["PYTHONPATH"] = str(copy)
        sys.path.insert(0, str(copy))
        import pytest

        signal.signal(signal.SIGALRM, late)
        signal.setitimer(signal.ITIMER_REAL, LIMIT if m else 20 * LIMIT, 5.0)  # again in the next test
        options = ["-p", "no:cacheprovider", "-p", "no:xdist", "--tb=no", "-rfE", "--durations=0"]
        code = int(pytest.main([*options, f"--maxfail={MOST}", *tests]))
        signal.setitimer(signal.ITIMER_REAL, 0)
        sys.stdout.flush()
        imported = sys.modules.get("marquardt")
        strange = imported is not None and not Path(str(imported.__file__)).is_relative_to(copy)
        return STRANGER if strange else code, output.read_text()
    finally:
        path.write_text(text)
        os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
        FREE.put(copy)


def late(*_: object) -> None:
    raise TimeoutError("the tests take too long")


def control(todo: list[Mutation]) -> list[str]:
    """All tests, once"""
    tests = dict.fromkeys(found for m in todo for test in m.tests if (found := located(test)) is not None)
    return [t for t in tests if "::" not in t or t.partition("::")[0] not in tests]


def healthy(found: tuple[int, str]) -> bool:
    """Whether all tests pass on a copy without a mutation"""
    if found[0] == STRANGER:
        print("the tests did not import the copy")
    elif found[0]:
        print(f"the tests do not pass without a mutation:\n{found[1][-4000:]}")
    return found[0] == 0


def lost(m: Mutation) -> str:
    """Why it cannot be made, "" if it can"""
    sources, gone = read(), [test for test in m.tests if located(test) is None]
    places = find(m.snippet, sources)
    if len(places) != 1:
        return f"{len(places)} places in the source"
    if gone:
        return f"no test {', '.join(gone)}"
    ((file, first, last),) = places
    try:
        compile(sources[file][:first] + m.mutant + sources[file][last:], str(file), "exec")
    except SyntaxError as error:
        return f"it cannot be compiled: {error}"
    return ""


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
