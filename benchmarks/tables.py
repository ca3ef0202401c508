"""LMRegressor() and LMClassifier() on small tables, beside scikit-learn's networks and boosted trees.

    python benchmarks/tables.py --jobs 2 --runs tables.jsonl --json tables.json   # what is in --runs is not run again
    python benchmarks/tables.py --tables diabetes boston --methods LM adam --splits 3
    python benchmarks/tables.py --uci UCI_Datasets --methods LM trees             # published splits, published results
    python benchmarks/tables.py --quick
    python benchmarks/tables.py --export embedded.npz    # for --embedded, on a machine without mlxtend

Ten splits of each table, a quarter of the rows for the test; Friedman's functions have 200 new rows for training and
1,000 for the test (rows.py). All methods see the same inputs and targets, standardised by the training rows. "adam" and
"lbfgs" are MLPRegressor and MLPClassifier as they come, "long" with 2,000 and 5,000 iterations, "best of 20" with the
best of 20 settings in three folds of the training rows, then fitted to all of them (learners.py). "trees" is
HistGradientBoosting as it comes. The bar is the best network by mean test error on each table, seen afterwards.

Every fit has one thread; --jobs fits run at a time, which slows each of them down. Seconds are of the last fit, without
the search. A run is a line of --runs as soon as it is done; what failed is run again, with
--again everything; the last line counts.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import os
import statistics
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
from threadpoolctl import threadpool_limits

import measure
import rows
from learners import FOLDS, METHODS, NETWORKS, SEARCHED, measured
from measure import Verdict
from rows import CITED, PUBLISHED, Table

NEAR = 1.02  # × the best network, at most, on each table
SECONDS = 10.0  # of a fit, at most
QUICK = ("iris, width", "iris")
Record = dict[str, Any]


# --- which runs ---


@dataclass(frozen=True)
class Source:
    """Where tables are read, here and in other processes"""

    embedded: Path | None = None
    uci: Path | None = None

    def tables(self) -> dict[str, Table]:
        return rows.published(self.uci) if self.uci else rows.embedded(self.embedded)


@dataclass(frozen=True)
class Run:
    table: str
    split: int
    method: str
    published: bool = False  # splits of UCI's

    def mark(self, folds: int) -> str:
        """What the method tries: a line of --runs counts only if it is the same."""
        tried = METHODS[self.method].settings
        return hashlib.sha256(repr((tried, folds if len(tried) > 1 else 0)).encode()).hexdigest()[:8]

    def key(self, folds: int) -> tuple[Any, ...]:
        return self.table, self.split, self.method, self.published, self.mark(folds)


def key(record: Record) -> tuple[Any, ...]:
    return tuple(record[name] for name in ("table", "split", "method", "published", "mark"))


def wanted(options: argparse.Namespace, tables: dict[str, Table]) -> list[Run]:
    """Searches first: they take longest, and others fill up the end."""
    runs = [
        Run(table, k, method, options.uci is not None)
        for table in options.tables
        for method in options.methods
        for k in range(min(options.splits or tables[table].splits, tables[table].splits))
    ]
    return sorted(runs, key=lambda run: run.method not in SEARCHED)


def read(path: Path | None) -> dict[tuple[Any, ...], Record]:
    """The last line of each run, but for failures; a line that was cut off when a process was killed is none."""
    found: dict[tuple[Any, ...], Record] = {}
    for line in path.read_text("utf-8").splitlines() if path and path.exists() else []:
        try:
            record = json.loads(line)
        except json.JSONDecodeError:
            measure.note(f"{path}: a line is cut off and left out: {line[:60]}…")
            continue
        found[key(record)] = record
    return {k: record for k, record in found.items() if "failure" not in record}


# --- runs ---


@contextmanager
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with threadpool_limits(1):
            yield
    finally:
        torch.set_num_threads(threads)


def single(run: Run, source: Source, folds: int, commit: str) -> Record:
    """One run on one thread. A fit that raises is told of in the record."""
    table = source.tables()[run.table]
    try:
        with one_thread():
            found = measured(METHODS[run.method], table.split(run.split), table.classes, run.split, folds)
    except Exception as error:
        found = {"failure": f"{type(error).__name__}: {error}"[:500]}
    where = f"{measure.cpu_name()}, {os.cpu_count()} cores"
    return {**vars(run), "mark": run.mark(folds), "commit": commit, "machine": where, **found}


def finished(runs: Sequence[Run], jobs: int, source: Source, folds: int, commit: str) -> Iterator[Record]:
    work = partial(single, source=source, folds=folds, commit=commit)
    if jobs == 1:
        yield from map(work, runs)
        return
    with ProcessPoolExecutor(jobs, mp_context=get_context("spawn")) as pool:
        for done in as_completed([pool.submit(work, run) for run in runs]):
            yield done.result()


def append(path: Path | None, record: Record) -> None:
    if path is None:
        return
    cut = path.exists() and path.stat().st_size > 0 and not path.read_bytes().endswith(b"\n")
    with path.open("a", encoding="utf-8") as file:
        file.write("\n" * cut + json.dumps(measure.plain(record), ensure_ascii=False) + "\n")


def told(record: Record) -> str:
    where = f"{record['table']}, split {record['split']}, {record['method']}: "
    if "failure" in record:
        return where + record["failure"]
    name = "accuracy" if "accuracy" in record else "rmse"
    searching = f", searched for {record['searching']:.0f} s" if record["searching"] > 1 else ""
    return f"{where}{name} {record[name]:.4g}, {record['seconds']:.2f} s{searching}"


# --- what came of them ---


@dataclass(frozen=True)
class Cell:
    """The splits of one method on one table"""

    records: Sequence[Record]

    def values(self, name: str) -> list[float]:
        return [r[name] for r in self.records if r.get(name) is not None]

    def mean(self, name: str) -> float:
        """NaN if a split failed: a mean of the others is of easier ones."""
        found = self.values(name)
        return statistics.fmean(found) if found and len(found) == len(self.records) else math.nan

    def error(self, name: str) -> float:
        """The standard error of the mean"""
        found = self.values(name)
        return statistics.stdev(found) / math.sqrt(len(found)) if len(found) > 1 else math.nan

    def text(self, name: str) -> str:
        """Figures of the mean as far as its error reaches"""
        mean, error = self.mean(name), self.error(name)
        if math.isnan(mean) or math.isnan(error) or error == 0:
            return measure.number(mean, 4)
        decimals = max(0, 1 - math.floor(math.log10(error)))
        return f"{mean:,.{decimals}f} ± {error:,.{decimals}f}"

    def most(self, name: str) -> float:
        return max(self.values(name), default=math.nan)


Cells = dict[str, dict[str, Cell]]  # by table and method


def cells(records: Iterable[Record]) -> Cells:
    found: dict[str, dict[str, list[Record]]] = {}
    for record in records:
        found.setdefault(record["table"], {}).setdefault(record["method"], []).append(record)
    return {table: {m: Cell(held) for m, held in by.items()} for table, by in found.items()}


def best(by: dict[str, Cell], name: str, among: Sequence[str], largest: bool = False) -> str | None:
    """The method with the best mean; None if there is none."""
    means = {m: by[m].mean(name) for m in among if m in by}
    means = {m: mean for m, mean in means.items() if not math.isnan(mean)}
    return (max if largest else min)(means, key=lambda m: means[m]) if means else None


def ratio(by: dict[str, Cell], method: str) -> float:
    """Mean test RMSE in that of the best network"""
    bar = best(by, "rmse", NETWORKS)
    return by[method].mean("rmse") / by[bar].mean("rmse") if bar and method in by else math.nan


def geometric(values: Sequence[float]) -> float:
    return statistics.geometric_mean(values) if values and not any(map(math.isnan, values)) else math.nan


def regression(found: Cells, methods: Sequence[str]) -> str:
    lines = [[t, *(by[m].text("rmse") if m in by else "–" for m in methods)] for t, by in found.items()]
    return measure.markdown(["test RMSE", *methods], lines)


def ratios(found: Cells, methods: Sequence[str]) -> str:
    """Of mean test RMSE to the best network's, and the geometric mean"""
    lines = [[t, *(measure.number(ratio(by, m)) for m in methods)] for t, by in found.items()]
    means = [measure.number(geometric([ratio(by, m) for by in found.values()])) for m in methods]
    return measure.markdown(["÷ the best network's", *methods], [*lines, ["geometric mean", *means]])


def figures(found: Cells, methods: Sequence[str], names: Sequence[str]) -> str:
    lines = [
        [f"{table}, {name}", *(by[m].text(name) if m in by else "–" for m in methods)]
        for table, by in found.items()
        for name in names
    ]
    return measure.markdown(["", *methods], lines)


def costs(found: Cells, methods: Sequence[str]) -> str:
    """The median of a split's fit, and the share of fits that converged"""

    def cell(held: Cell | None) -> str:
        if held is None or not held.values("seconds"):
            return "–"
        share = statistics.fmean(held.values("converged"))
        return measure.number(statistics.median(held.values("seconds"))) + (
            "" if share == 1 else f", {share:.0%} conv."
        )

    lines = [[table, *(cell(by.get(m)) for m in methods)] for table, by in found.items()]
    return measure.markdown(["seconds of a fit", *methods], lines)


# --- verdicts ---


def judged(values: Cells, classes: Cells) -> list[Verdict]:
    found = [Verdict(f"{t}: RMSE ÷ the best network's", ratio(by, "LM"), "≤", NEAR) for t, by in values.items()]
    if values:
        together = geometric([ratio(by, "LM") for by in values.values()])
        found.append(Verdict("geometric mean of these", together, "≤", 1.0))
    found += [verdict for table, by in classes.items() if (verdict := accurate(table, by))]
    for table, by in {**values, **classes}.items():
        if "LM" in by:
            found.append(Verdict(f"{table}: the longest fit, s", by["LM"].most("seconds"), "≤", SECONDS))
    return found


def accurate(table: str, by: dict[str, Cell]) -> Verdict | None:
    """In standard errors of the best of 20's mean accuracy"""
    bar = best(by, "accuracy", SEARCHED, largest=True)
    if bar is None or "LM" not in by:
        return None
    behind = by[bar].mean("accuracy") - by["LM"].mean("accuracy")
    error = by[bar].error("accuracy")
    in_errors = behind / error if error else math.copysign(math.inf, behind) if behind else 0.0
    return Verdict(f"{table}: accuracy behind {bar}, in its standard errors", in_errors, "≤", 1.0)


def beside(found: Cells, methods: Sequence[str]) -> str:
    """UCI's: RMSE and log likelihood beside what was published on the same splits"""
    lines = []
    for table, by in found.items():
        for i, name in enumerate(("rmse", "log likelihood")):
            ours = [by[m].text(name) if m in by else "–" for m in methods]
            theirs = [f"{held[table][i]:g}" if table in held else "–" for held in PUBLISHED.values()]
            lines.append([f"{table}, {name}", *ours, *theirs])
    cited = "; ".join(f"{name}: {where}" for name, where in CITED.items())
    return f"{measure.markdown(['', *methods, *PUBLISHED], lines)}\n\n{cited}."


def notes(records: Sequence[Record]) -> list[str]:
    failures = [f"Failed: {told(r)}" for r in records if "failure" in r]
    commits = Counter(r["commit"] for r in records if r["method"] == "LM")
    mixed = [f"LM's runs are of several commits: {dict(commits)}"] if len(commits) > 1 else []
    machines = Counter(r.get("machine", "not recorded") for r in records)
    if len(machines) > 1:
        mixed.append(f"Runs are of several machines, so seconds cannot be compared: {dict(machines)}")
    return failures + mixed


def report(records: Sequence[Record], tables: dict[str, Table], methods: Sequence[str]) -> tuple[str, list[Verdict]]:
    found = cells(records)
    values = {t: by for t, by in found.items() if not tables[t].classes}
    classes = {t: by for t, by in found.items() if tables[t].classes}
    parts, verdicts = [], []
    if any(r["published"] for r in records):
        parts.append(beside(values, methods))
    else:
        verdicts = judged(values, classes)
        parts += [regression(values, methods), ratios(values, methods)] if values else []
        parts += [figures(classes, methods, ("accuracy", "log loss"))] if classes else []
    if "LM" in methods and values:
        parts.append(figures(values, ["LM"], ("log likelihood", "coverage")))
    parts.append(costs(found, methods))
    parts += [measure.verdicts(verdicts)] if verdicts else []
    return "\n\n".join([*parts, *notes(records)]), verdicts


# --- the run ---


def arguments() -> argparse.Namespace:
    parser = measure.parser(__doc__)
    add = parser.add_argument
    add("--tables", nargs="+", metavar="NAME", help="these tables (default: all)")
    add("--methods", nargs="+", choices=list(METHODS), default=list(METHODS), help="these methods (default: all)")
    add("--splits", type=measure.positive, help="the first splits (default: all, 10 of a table that is none of UCI's)")
    add("--folds", type=measure.positive, default=FOLDS, help=f"folds of a search (default {FOLDS})")
    add("--jobs", type=measure.positive, default=1, help="runs at a time (default 1)")
    add("--runs", type=Path, metavar="FILE", help="JSON lines to read what is there from, and to append to")
    add("--again", action="store_true", help="measure what is there anew")
    add("--uci", type=Path, metavar="DIR", help="tables with published splits in place of the embedded ones")
    add("--embedded", type=Path, metavar="FILE", help="what --export wrote")
    add("--export", type=Path, metavar="FILE", help="write the tables that need mlxtend, and end")
    return parser.parse_args()


def main() -> None:
    options = arguments()
    if options.export:
        rows.export(options.export)
        return
    source = Source(options.embedded, options.uci)
    tables = source.tables()
    if unknown := set(options.tables or ()) - set(tables):
        sys.exit(f"--tables: no {sorted(unknown)}; there are {', '.join(tables)}")
    options.tables = options.tables or [t for t in tables if not options.quick or t in QUICK or options.uci]
    if options.quick:
        options.splits, options.methods = options.splits or 2, [m for m in options.methods if m not in SEARCHED]
    described = measure.start(options)

    runs = wanted(options, tables)
    keys = {run.key(options.folds): run for run in runs}
    held = {k: record for k, record in read(options.runs).items() if k in keys}
    left = [run for k, run in keys.items() if options.again or k not in held]
    for record in finished(left, options.jobs, source, options.folds, described["commit"]):
        append(options.runs, record)
        held[key(record)] = record
        measure.note(told(record))
    records = [held[k] for k in keys]
    text, verdicts = report(records, tables, options.methods)
    print(text)
    measure.write(options, described, results=records, verdicts=verdicts, notes=notes(records))


if __name__ == "__main__":
    main()
