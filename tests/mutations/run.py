"""Makes mutations, each in a copy of the source, and runs the tests that are to find them.

    python tests/mutations/run.py [--only WORDS ...] [--jobs 2] [--out FILE] [--resume] [--against FILE]

killed      a test failed; `by` has the first of them
survived    none did
timeout     they took longer than --limit seconds each (they do not, without the mutation)
broken      the tests could not even be collected: the mutation has to be restated
lost        the snippet is not in the source, or more than once, or a test is gone: the mutation has to be restated

With --against it exits with 1 if a mutation is not killed now that was killed then.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue
from threading import Lock
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from mutations.mutations import ROOT, SOURCE, Mutation, every, find, located, read

BASELINE = Path(__file__).with_name("baseline.json")
FOUND = ("killed", "timeout")
MOST = 5  # tests that are named, and after which no others run


def main() -> int:
    options = arguments()
    chosen = [m for m in every() if not options.only or any(word in m.name for word in options.only)]
    results: dict[str, Any] = {}
    if options.resume and options.out.exists():
        results = json.loads(options.out.read_text())["mutations"]
    todo = [m for m in chosen if results.get(m.name, {}).get("status") not in (*FOUND, "survived")]
    start, lock = time.monotonic(), Lock()
    with tempfile.TemporaryDirectory(prefix="mutations-") as folder:
        copies: SimpleQueue[Path] = SimpleQueue()
        for i in range(options.jobs):
            copies.put(copied(Path(folder) / str(i)))
        if todo and not options.no_control and not healthy(todo, copies, options.limit):
            return 2

        def take(m: Mutation) -> None:
            copy = copies.get()
            try:
                found = tried(m, copy, options.limit)
            finally:
                copies.put(copy)
            with lock:
                results[m.name] = found
                write(options.out, results)
                print(f"{found['status']:9}{found['seconds']:6.1f} s  {m.name}", flush=True)

        with ThreadPoolExecutor(options.jobs) as pool:
            list(pool.map(take, todo))
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


def pytest(copy: Path, tests: list[str], limit: float, most: int = MOST) -> tuple[int | None, str]:
    """Exit status, None after so many seconds, and output of the tests on this copy of the source"""
    environment = {**os.environ, "PYTHONPATH": str(copy), "PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-p", "no:xdist", "--tb=no", "-rfE"]
    try:
        done = subprocess.run(
            [*command, f"--maxfail={most}", *tests], cwd=ROOT, env=environment, timeout=limit, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return None, ""
    return done.returncode, done.stdout


def healthy(todo: list[Mutation], copies: SimpleQueue[Path], limit: float) -> bool:
    """Whether all tests pass on a copy without a mutation, and the copy is what they import"""
    tests = dict.fromkeys(found for m in todo for test in m.tests if (found := located(test)) is not None)
    files = {test for test in tests if "::" not in test}
    copy = copies.get()
    environment = {**os.environ, "PYTHONPATH": str(copy)}
    where = [sys.executable, "-c", "import marquardt; print(marquardt.__file__)"]
    imported = subprocess.run(where, env=environment, check=True, text=True, stdout=subprocess.PIPE).stdout
    if not Path(imported.strip()).is_relative_to(copy):
        print(f"the tests would import {imported.strip()}, and not the copy in {copy}")
        return False
    status, output = pytest(copy, [t for t in tests if t in files or t.partition("::")[0] not in files], 20 * limit)
    copies.put(copy)
    if status != 0:
        print(f"the tests do not pass without a mutation:\n{output[-4000:]}")
    return status == 0


def tried(m: Mutation, copy: Path, limit: float) -> dict[str, Any]:
    """One mutation, and what came of it"""
    start = time.monotonic()
    places, tests = find(m.snippet, read(copy)), [located(test) for test in m.tests]
    gone = [test for test, found in zip(m.tests, tests, strict=True) if found is None]
    if len(places) != 1 or gone:
        why = f"{len(places)} places in the source" if len(places) != 1 else f"no test {', '.join(gone)}"
        return {"status": "lost", "why": why, "seconds": 0.0}
    ((file, first, last),) = places
    path = copy / file
    text, times = path.read_text(), path.stat()
    mutated = text[:first] + m.mutant + text[last:]
    try:
        compile(mutated, str(file), "exec")
        path.write_text(mutated)
        status, output = pytest(copy, [test for test in tests if test is not None], limit)
    finally:
        path.write_text(text)
        os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
    told = {None: "timeout", 0: "survived", 1: "killed"}.get(status, "broken")
    found: dict[str, Any] = {"status": told, "file": file.relative_to("marquardt").as_posix()}
    if told == "killed":
        lines = [line.partition(" ")[2] for line in output.splitlines() if line.startswith(("FAILED ", "ERROR "))]
        found["by"] = [line.partition(" - ")[0] for line in lines]
    elif told != "timeout":
        found["tests"] = list(m.tests)
    if told == "broken":
        found["why"] = output[-1000:]
    return {**found, "seconds": round(time.monotonic() - start, 1)}


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
    dropped = sorted(set(then) - {m.name for m in every()})
    for name in missed:
        print(f"killed then, {results[name]['status']} now: {name}")
    for name in dropped:
        print(f"no longer in the list: {name}")
    return 1 if missed or dropped else 0


if __name__ == "__main__":
    sys.exit(main())
