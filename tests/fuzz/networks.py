"""Random networks, losses and optimizers: every step of mq.LM against the same step by brute force.

    python tests/fuzz/networks.py --cases 5000 --seed 0 --jobs 2
    python tests/fuzz/networks.py --only 1234            one case, in full
    python tests/fuzz/networks.py --shrink 1234          the same with all that can be left out left out

θ of every step is compared with −(G + λD)⁻¹g, momentum, trial and search from J, G and g by brute force. What comes
from the library: the rules of λ, of doubt, of momentum, of acceptance and of the search (each fed with brute-force
numbers), the D of the step before, the samples that `Fraction` picks, the signs of `Sampled`, and for
FactoredMaxDiagonal D itself, of which only D ≥ diag G is checked. With Kronecker, whose H is another one, only f, f at
the next θ and the descent are checked.
"""

from __future__ import annotations

import argparse
import collections
import itertools
import math
import multiprocessing
import re
import sys
import time
import traceback
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parents[1]))

import torch

import marquardt as mq
from fuzz.compared import run
from fuzz.drawn import Case, build, draw, make_loss
from fuzz.observed import Report

# ---- many cases


def one(seed: int) -> Report:
    torch.set_num_threads(1)
    try:
        return run(draw(seed))
    except Exception as error:  # of this file, not of the library
        text = "".join(traceback.format_exception(error)[-3:])
        return Report(seed, failures=[f"the fuzzer itself: {text}"])


def many(seeds: range, jobs: int, minutes: float) -> Iterator[Report]:
    until = time.monotonic() + 60 * minutes
    if jobs == 1:
        found: Iterator[Report] = map(one, seeds)
        yield from itertools.takewhile(lambda _: time.monotonic() < until, found)
        return
    with multiprocessing.get_context("spawn").Pool(jobs) as pool:
        for report in pool.imap_unordered(one, seeds, chunksize=8):
            yield report
            if time.monotonic() > until:
                return


def summary(reports: list[Report]) -> str:
    counted = ("steps", "compared", "rejected", "invalid", "ill", "close", "unsure", "doubted", "partly")
    total = {k: sum(getattr(r, k) for r in reports) for k in counted}
    failures = collections.Counter(kind_of(f) for r in reports for f in r.failures)
    refusals = collections.Counter(text for r in reports for text in r.refusals)
    worst = max((r.worst for r in reports), default=0.0)
    lines = [
        f"{len(reports)} cases, {total['steps']} steps, {total['compared']} compared ({total['ill']} ill-conditioned, "
        f"{total['close']} decisions that rounding turns, {total['unsure']} with D as it was), "
        f"{total['rejected']} rejected, {total['doubted']} in doubt of the batch, {total['partly']} Kronecker, "
        f"{total['invalid']} that plain autograd refuses; "
        f"{sum(refusals.values())} refusals, {sum(failures.values())} failures; worst relative error {worst:.2g}; "
        f"{sum(r.seconds for r in reports):.0f} s, longest {max((r.seconds for r in reports), default=0):.1f} s"
    ]
    lines += [f"  failure  {count:4d} × {text}" for text, count in failures.most_common()]
    lines += [f"  refusal  {count:4d} × {text}" for text, count in refusals.most_common()]
    return "\n".join(lines)


def kind_of(failure: str) -> str:
    return re.sub(r"\d+", "0", failure.split(": step ")[0])[:100]


# ---- one case, made smaller

SIMPLER: dict[str, list[Any]] = {
    "curvature": [mq.Dense(), mq.Gram()], "rows": [mq.Exact()], "damping": [mq.Identity()],
    "schedule": [mq.Constant(1.0)], "momentum": [None], "acceptance": [mq.Decrease()], "line_search": [None],
    "average": [None], "attempts": [1], "lr": [1.0], "weights": ["none"], "over": [False], "frozen": [0],
    "chosen": [False], "inputs": ["tensor"], "training": [False], "same": [False], "head": ["vector"], "loss": ["mse"],
    "kind": ["v", "s"],
}  # fmt: skip


def smaller(case: Case) -> Iterator[Case]:
    for i in range(len(case.pieces)):
        yield replace(case, pieces=case.pieces[:i] + case.pieces[i + 1 :])
    for name, values in SIMPLER.items():
        now = getattr(case, name)
        better = values[: values.index(now)] if now in values else values
        yield from (replace(case, **{name: value}) for value in better)
    if len(case.sizes) > 1:
        yield from (replace(case, sizes=sizes) for sizes in (case.sizes[:-1], case.sizes[1:]))
    for i, N in enumerate(case.sizes):
        if N > 2 and not case.same:
            yield replace(case, sizes=(*case.sizes[:i], 2, *case.sizes[i + 1 :]))


def shrink(case: Case) -> Case:
    """The same failure with all that can be left out left out."""

    def kind(case: Case) -> str | None:
        try:
            failures = run(case).failures
        except Exception:
            return None
        return kind_of(failures[0]) if failures else None

    wanted = kind(case)
    if wanted is None:
        return case
    while True:
        found = next((c for c in smaller(case) if kind(c) == wanted), None)
        if found is None:
            return case
        case = found


def show(case: Case, report: Report) -> None:
    print(case, build(case), make_loss(case), sep="\n")
    print(*report.failures, f"{replace(report, case='')}", sep="\n")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=5000)
    parser.add_argument("--seed", type=int, default=0, help="the first seed")
    parser.add_argument("--only", type=int, help="this seed alone, in full")
    parser.add_argument("--shrink", type=int, help="this seed, made smaller")
    parser.add_argument("--minutes", type=float, default=math.inf)
    parser.add_argument("--jobs", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.only is not None or options.shrink is not None:
        case = draw(options.only if options.only is not None else options.shrink)
        case = case if options.shrink is None else shrink(case)
        report = run(case)
        show(case, report)
        return bool(report.failures)
    reports = []
    for report in many(range(options.seed, options.seed + options.cases), options.jobs, options.minutes):
        reports.append(report)
        for failure in report.failures:
            print(f"{report.seed}  {failure}\n    {report.case}", flush=True)
    print(summary(reports))
    return any(report.failures for report in reports)


if __name__ == "__main__":
    sys.exit(main())
