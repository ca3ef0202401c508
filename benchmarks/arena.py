"""LM as it comes against the optimizers that people use, on 21 tasks, for equal time and for equal steps.

    python benchmarks/arena.py --data ~/data --device cuda --jobs 6     # what is there already is not run again
    python benchmarks/arena.py --steps 200 --tasks franke borehole
    python benchmarks/arena.py --quick
    python benchmarks/arena.py table --json arena.json      # of what is there
    python benchmarks/arena.py plots                        # error over seconds; needs matplotlib
    python benchmarks/arena.py page                         # the tables into docs/when.md
    python benchmarks/arena.py --export-tables tables.npz   # for --tables, on a machine without scikit-learn

A cell is a task, a contestant, a seed, a device and a budget, and one file under --out. Every contestant starts from
the same weights and sees the same rows or batches, which lie on the device. Building it and its first steps are on the
clock; loading kernels and evaluating are not. A run ends before the step that would not end in time. The figure of a
run is its test error where its validation error was least, of 13 looks in the course of the budget.

LM is `mq.LM(model, loss)`, evaluated with its averaged weights. Adam and Muon (matrices by Muon, the rest by AdamW)
have the best of four first rates, by the validation data of a seed that is not reported, which fall to 0 as a cosine
over the budget; on batches they are evaluated with the same average as LM. L-BFGS has strong Wolfe conditions; on
batches it takes a call of 20 iterations on each. torch-lm is the package torch-levenberg-marquardt, kfac is
`mq.presets.kfac`. On CUDA a step of Adam and of Muon is a CUDA graph, and so is a gradient of L-BFGS, as LM records its
steps; --eager leaves these out.

With --jobs several runs share the machine: that slows every contestant down.
"""

from __future__ import annotations

import argparse
import math
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import measure
from contest import cells, plots, pool, tables
from contest.cells import Budget, Cell
from contest.contestants import CONTESTANTS
from contest.tasks import TASKS, Setup, Unavailable, export_tables
from marquardt.paper.data import data_directory

SEEDS = (0, 1, 2)
TRIAL_SEED = 1000  # on which rates are chosen
QUICK = ("peaks-noisy", "franke", "sums")
PAGE = Path(__file__).parents[1] / "docs" / "when.md"


# --- which cells ---


def budgets(task: str, options: argparse.Namespace) -> Sequence[Budget]:
    if options.steps:
        return [Budget(steps=options.steps)]
    return [Budget(seconds) for seconds in options.budget or TASKS[task].budgets]


def reported(options: argparse.Namespace) -> Iterator[Cell]:
    for task in options.tasks:
        for budget in budgets(task, options):
            for contestant in options.contestants:
                for seed in options.seeds:
                    yield Cell(task, contestant, seed, options.device.type, budget)


def trials(options: argparse.Namespace) -> Iterator[Cell]:
    """One for each rate of those that have to choose among some."""
    for cell in dict.fromkeys(Cell(c.task, c.contestant, TRIAL_SEED, c.device, c.budget) for c in reported(options)):
        for rate in CONTESTANTS[cell.contestant].rates:
            yield Cell(cell.task, cell.contestant, TRIAL_SEED, cell.device, cell.budget, rate)


def chosen(cell: Cell, folder: Path) -> float | None:
    """The rate of the least error on validation data; the first one if none came to an end."""
    rates = CONTESTANTS[cell.contestant].rates

    def error(rate: float) -> float:
        record = cells.read(folder, Cell(cell.task, cell.contestant, TRIAL_SEED, cell.device, cell.budget, rate))
        found = tables.best(record)[3] if record and tables.ended(record) else None
        return math.inf if found is None else found

    return min(rates, key=error, default=None)


def missing(wanted: Iterator[Cell], options: argparse.Namespace) -> list[Cell]:
    def there(cell: Cell) -> bool:
        record = cells.read(options.out, cell)
        return record is not None and not (options.again and "error" in record)

    return [cell for cell in wanted if not there(cell)]


def available(options: argparse.Namespace) -> list[str]:
    """The tasks whose data are here."""
    found = []
    for name in options.tasks:
        try:
            TASKS[name].build(0, options.setup)
            found.append(name)
        except Unavailable as error:
            print(f"skipped {name}: {error}", flush=True)
    return found


# --- commands ---


def run(options: argparse.Namespace) -> None:
    described = measure.start(options)
    measure.find_peer(options.peers)  # the processes get its path
    options.tasks = available(options)
    done = 0

    def told(cell: Cell, record: dict[str, Any]) -> None:
        nonlocal done
        done += 1
        end = record["points"][-1] if tables.ended(record) else None
        said = f"{end[1]} steps, {end[0]:.1f} s, test {end[4]}" if end else record.get("error") or "does not apply"
        measure.note(f"{done} of {total}  {cell}: {said}")

    for wanted in (trials, reported):
        jobs = [(c, chosen(c, options.out) if c.rate is None else c.rate) for c in missing(wanted(options), options)]
        total, done = len(jobs), 0
        pool.run(jobs, options.out, options.jobs, options.threads, options.setup, described, told)
    table(options)


def table(options: argparse.Namespace) -> None:
    records = tables.load(options.out)
    print(tables.page(records))
    measure.write(options, measure.machine(options.device, options.commit), cells=records)


def page(options: argparse.Namespace) -> None:
    text = options.page.read_text("utf-8")
    records = tables.load(options.out)
    for name, found in (("tasks", tables.listed()), ("figures", tables.page(records))):
        text = filled(text, name, found)
    options.page.write_text(text, "utf-8")


def filled(text: str, name: str, found: str) -> str:
    """`found` between the marks of that name."""
    begin, end = f"<!-- {name}: begin -->", f"<!-- {name}: end -->"
    before, rest = text.split(begin)
    return f"{before}{begin}\n\n{found}\n\n{end}{rest.split(end)[1]}"


def draw(options: argparse.Namespace) -> None:
    print(plots.write(tables.load(options.out), options.out / "arena.html"))


COMMANDS = {"run": run, "table": table, "plots": draw, "page": page}


def arguments(given: Sequence[str] | None = None) -> argparse.Namespace:
    parser = measure.parser(__doc__)
    add = parser.add_argument
    add("command", nargs="?", choices=COMMANDS, default="run")
    add("--out", type=Path, default=Path("arena-results"), help="folder of the cells (default arena-results)")
    add("--data", type=Path, default=data_directory(), help="MNIST's folder (default: MARQUARDT_DATA)")
    add("--tables", type=Path, metavar="FILE", help="what --export-tables wrote, in place of scikit-learn")
    add("--export-tables", type=Path, metavar="FILE", help="write scikit-learn's tables there, and no more")
    add("--peers", type=Path, help="a folder or a wheel to find torch-levenberg-marquardt in")
    add("--tasks", nargs="+", choices=TASKS)
    add("--contestants", nargs="+", choices=CONTESTANTS, default=list(CONTESTANTS))
    add("--seeds", nargs="+", type=int)
    add("--budget", nargs="+", type=float, metavar="SECONDS", help="default: 10, regression and physics 60 too")
    add("--steps", type=measure.positive, help="equal steps in place of equal time")
    add("--jobs", type=int, default=1, help="cells at a time, on the same device; 0: in this process, to debug")
    add("--eager", action="store_true", help="no CUDA graphs for Adam, Muon and L-BFGS")
    add("--again", action="store_true", help="run the cells that failed again")
    add("--page", type=Path, default=PAGE, help="of the command page (default docs/when.md)")
    options = parser.parse_args(given)
    options.tasks = options.tasks or list(QUICK if options.quick else TASKS)
    options.seeds = options.seeds or list(SEEDS[:1] if options.quick else SEEDS)
    options.budget = options.budget or ([2.0] if options.quick else None)
    options.setup = Setup(options.data, options.tables, options.eager)
    if options.threads is None:
        options.threads = max(1, (os.cpu_count() or 1) // max(1, options.jobs))
    return options


def main() -> None:
    options = arguments()
    if options.export_tables is not None:
        export_tables(options.export_tables)
        return
    COMMANDS[options.command](options)


if __name__ == "__main__":
    main()
