"""Tables and summaries of the cells that are there: they read records, never models."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import measure

from .contestants import CONTESTANTS
from .tasks import CHOICE, REPORT, TASKS

Record = dict[str, Any]
RIVALS = ("Adam", "L-BFGS")
TIE, FAR = 1.1, 10.0  # times the lowest
LATE = 1.1  # times the budget: a single step may take longer than all of it


@dataclass(frozen=True)
class Entry:
    """A contestant on a task: the test metric where validation was best, over the seeds."""

    found: tuple[float, ...]  # NaN if it diverged
    errors: tuple[str, ...]
    reason: str | None  # why it does not apply
    seconds: float  # of the slowest seed
    late: bool
    rate: float | None
    n: int | None

    @property
    def figure(self) -> float:
        """The mean; ∞ if a seed failed or diverged."""
        values = [v if math.isfinite(v) else math.inf for v in self.found] + [math.inf] * len(self.errors)
        return statistics.fmean(values) if values else math.nan

    def cell(self, best: bool) -> str:
        if self.reason is not None:
            return "–"
        if not math.isfinite(self.figure):
            return "failed" if self.errors else "diverged"
        text = f"**{shown(self.figure)}**" if best else shown(self.figure)
        whole = len(self.found) + len(self.errors)
        return text + (f" ({len(self.found)} of {whole})" if self.errors else "") + ("†" if self.late else "")


def shown(value: float) -> str:
    return f"{value:.2e}" if value < 1e-3 else f"{value:.3g}"


def load(folder: Path) -> list[Record]:
    return [json.loads(path.read_text("utf-8")) for path in sorted(folder.glob("*/*/*.json"))]


def ended(record: Record) -> bool:
    """Whether there is a figure at the end of the budget; a run that failed may have some before."""
    return "points" in record and "error" not in record


def best(record: Record) -> list[Any]:
    """The point of the least error on validation data: the weights that anybody would keep who stops early."""
    known = [p for p in record["points"] if p[3] is not None and p[4] is not None]
    return min(known, key=lambda p: p[3], default=record["points"][-1])


def entry(records: Iterable[Record]) -> Entry:
    own = list(records)
    last = [r["points"][-1] for r in own if ended(r)]
    seconds = max((p[0] for p in last), default=math.nan)
    budget = own[0]["budget"].get("seconds", math.inf)
    return Entry(
        found=tuple(math.nan if (p := best(r))[4] is None else p[4] for r in own if ended(r)),
        errors=tuple(r["error"] for r in own if "error" in r),
        reason=next((r["not applicable"] for r in own if "not applicable" in r), None),
        seconds=seconds,
        late=seconds > LATE * budget,
        rate=own[0]["rate"],
        n=own[0].get("n"),
    )


def runs(records: Sequence[Record]) -> dict[str, dict[str, dict[str, Entry]]]:
    """By device and budget, then task, then contestant; the trials of rates are left out."""
    groups: dict[tuple[str, str, str], list[Record]] = {}
    for r in records:
        if not r["trial"]:
            groups.setdefault((setting(r), r["task"], r["contestant"]), []).append(r)
    found: dict[str, dict[str, dict[str, Entry]]] = {}
    order = list(TASKS)
    for (where, task, contestant), own in sorted(groups.items(), key=lambda group: order.index(group[0][1])):
        found.setdefault(where, {}).setdefault(task, {})[contestant] = entry(own)
    return found


def setting(record: Record) -> str:
    budget = record["budget"]
    amount = f"{budget['seconds']:g} s" if "seconds" in budget else f"{budget['steps']:g} steps"
    return f"{record['device'].upper()}, {amount}"


# --- text ---


def table(entries: dict[str, dict[str, Entry]], use: str) -> str:
    names = [c for c in CONTESTANTS if any(c in row for row in entries.values())]
    rows = []
    for task in (t for t in TASKS.values() if t.use == use and t.name in entries):
        row = entries[task.name]
        lowest = lowest_of(row, names)
        cells = [row[c].cell(row[c].figure == lowest) if c in row else "" for c in names]
        n = max((e.n or 0 for e in row.values()), default=0)
        rows.append([task.name, task.metric, f"{n:,}", *cells])
    return measure.markdown(["task", "figure", "parameters", *names], rows) if rows else ""


def lowest_of(row: dict[str, Entry], names: Iterable[str]) -> float:
    return min((row[c].figure for c in names if c in row and not math.isnan(row[c].figure)), default=math.inf)


def summary(entries: dict[str, dict[str, Entry]], use: str | None = None) -> str:
    """In how many tasks LM is the lowest, or as good, or far better than the usual ways."""
    rows = [row for name, row in entries.items() if use in (None, TASKS[name].use) and "LM" in row and len(row) > 1]
    found = [(row["LM"].figure, lowest_of(row, row), lowest_of(row, RIVALS)) for row in rows]
    first = sum(ours <= lowest < math.inf for ours, lowest, _ in found)
    near = sum(ours <= TIE * lowest < math.inf for ours, lowest, _ in found)
    far = sum(FAR * ours <= usual < math.inf and ours < usual for ours, _, usual in found)
    return (
        f"LM has the lowest figure in {first} of {len(rows)} tasks, and one within {TIE:g} × of the lowest in {near}; "
        f"it is at least {FAR:g} × more accurate than the better of {' and '.join(RIVALS)} in {far}."
    )


def remarks(entries: dict[str, dict[str, Entry]]) -> list[str]:
    """Why cells are empty, and which rates stand at the end of their grid."""
    found: dict[str, list[str]] = {}
    for task, row in entries.items():
        for name, e in row.items():
            if e.reason is not None:
                found.setdefault(f"{name} does not apply ({e.reason}): ", []).append(task)
            for error in dict.fromkeys(e.errors):
                found.setdefault(f"{name} failed ({error.splitlines()[0][:200]}): ", []).append(task)
            if e.late:
                found.setdefault(f"† {name} ended a step after {e.seconds:.3g} s: ", []).append(task)
            if (rates := CONTESTANTS[name].rates) and e.rate in (rates[0], rates[-1]):
                end = "least" if e.rate == rates[0] else "largest"
                found.setdefault(f"{name}'s best rate was the {end} of its grid: ", []).append(task)
    return [f"- {text}{', '.join(tasks)}." for text, tasks in found.items()]


USES = {CHOICE: "Tasks whose validation data served for choices", REPORT: "The other tasks"}
TOLD = "gpu", "cpu", "torch", "commit", "threads", "cells at a time"


def machines(records: Sequence[Record]) -> str:
    """What the cells ran on, each kind once."""
    held = [r["machine"] for r in records if "machine" in r]
    told = [", ".join(f"{key} {m[key]}" for key in TOLD if key in m) for m in held]
    return "; or ".join(dict.fromkeys(told))


def page(records: Sequence[Record]) -> str:
    """Of each device and budget: the machine, both tables with a summary, and remarks."""
    parts = []
    for where, entries in sorted(runs(records).items()):
        own = [r for r in records if setting(r) == where and not r["trial"]]
        seeds = len({r["seed"] for r in own})
        parts += [f"### {where}", f"{machines(own)}. Mean of {seeds} seeds.".removeprefix(". ")]
        for use, title in USES.items():
            if text := table(entries, use):
                parts += [f"{title}:", text, summary(entries, use)]
        parts += [f"All tasks: {summary(entries)}", "\n".join(remarks(entries))]
    return "\n\n".join(part for part in parts if part)


def listed() -> str:
    """The tasks in words."""
    uses = {CHOICE: "choices", REPORT: "report"}
    return measure.markdown(["task", "what", "for"], [[t.name, t.what, uses[t.use]] for t in TASKS.values()])
