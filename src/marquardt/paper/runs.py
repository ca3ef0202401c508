"""The paper's runs, each from its first step to its log.

Imports torch alone, so that it runs where nothing else is installed; figures and tables are drawn from the logs.
Within a seed every method has the same initial weights and the same batches. The clock runs while a method trains;
a first step of a copy, fetching a batch, evaluating and writing are off it.
"""

from __future__ import annotations

import argparse
import copy
import json
import math
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .. import files
from . import logs, plans, problems, tasks
from .data import NAMES, Digits, find
from .machine import machine, versions
from .methods import METHODS
from .plans import Run
from .trainers import Trainer, Unavailable
from .vocabulary import COLUMNS, EXPERIMENTS, LOGS, OUT, TARGET

DIVERGED = 10.0  # times the loss at the start
CURVES = (5, 20, 50, 200)  # steps at which the sine's fit is kept
CURVE_POINTS = 200
SPARSER = 1.05  # past the steps that have a line each, the next line when the clock has grown by this factor


# --- what is done already ---


def done(run: Run, out: Path, data: Digits | None = None) -> bool:
    """Whether there is a log of this very run, on this data, that came to its end."""
    try:
        log = logs.read(run.log(out))
    except (FileNotFoundError, ValueError):  # any other error may hide a log that is whole
        return False
    wanted = json.loads(json.dumps(_config(run, tasks.about(run, data))))
    for line in (wanted, log.head):
        line["data"].pop("source", None)  # the same digits may lie elsewhere
    wanted.pop("format")  # of the log, and not of the run
    return log.status in ("finished", "diverged") and all(log.head.get(key) == wanted[key] for key in wanted)


@contextmanager
def held(out: Path) -> Iterator[None]:
    """The logs under `out` are this process's to write, without what is left of runs that were killed."""
    with files.held(out, LOGS):
        for part in logs.unfinished(out):
            part.unlink(missing_ok=True)
        yield


# --- one run ---


class Clock:
    """Seconds of training; whatever is done under `paused` is off it, and the device has finished at both ends."""

    def __init__(self, device: str) -> None:
        self.seconds = 0.0
        self.started: float | None = None
        self.cuda = device.startswith("cuda")

    def _now(self) -> float:
        if self.cuda:
            torch.cuda.synchronize()
        return time.perf_counter()

    def start(self) -> None:
        self.started = self._now()

    def stop(self) -> None:
        if self.started is not None:
            self.seconds += self._now() - self.started
            self.started = None

    @contextmanager
    def paused(self) -> Iterator[None]:
        self.stop()
        yield
        self.start()

    def off(self, batches: Iterator[Any]) -> Iterator[Any]:
        """The batches, fetched off the clock."""
        while True:
            with self.paused():
                batch = next(batches)
            yield batch


class Summary(NamedTuple):
    """What a table needs of a run."""

    status: str  # "finished" | "diverged" | "failed" | "unavailable"
    step: int
    seconds: float
    message: str = ""
    train_loss: float = math.nan
    test_accuracy: float | None = None
    steps_to_90: int | None = None


def execute(
    run: Run, out: Path, data: Digits | None = None, watch: Callable[[dict[str, Any]], None] | None = None
) -> Summary:
    """Train, and write the log: it gets its name when the run has ended, so an interrupted run leaves none.

    `watch` is called with every line of a step. An error of the method ends the run as "failed", with its message;
    a log that cannot be written is an error of its own, and so is another file of that name, which stays. One process
    at a time: see `held`.
    """
    check_free(run.log(out))
    with files.whole(run.log(out)) as write:
        return _Recording(run, data, write, watch).run()


def check_free(path: Path) -> None:
    """Only a log is replaced, and it is whole."""
    if not os.path.lexists(path):
        return
    try:
        if path.is_symlink():
            raise ValueError(f"{path} is a link; {logs.WAY_OUT}")
        logs.read(path)
    except ValueError as error:
        raise files.Foreign(f"no log can be written: {error}") from None


class _Recording:
    """A run in progress."""

    def __init__(
        self,
        run: Run,
        data: Digits | None,
        append: Callable[[bytes], None],
        watch: Callable[[dict[str, Any]], None] | None,
    ) -> None:
        self.spec, self.lines, self.watch = run, files.SealedLines(append), watch
        self.task = tasks.build(run, data)
        self.steps = tasks.length(run, self.task.data)
        self.clock = Clock(run.device)
        self.step = 0
        self.start = math.inf  # the loss before the first step
        self.last: dict[str, Any] = {}
        self.written = 0.0  # on the clock, at the last line
        self.steps_to_90: int | None = None
        self.diverged = False

    def run(self) -> Summary:
        run, task = self.spec, self.task
        self.write({"kind": "run", **_config(run, task.data), **_surroundings(run.device, task)})
        if task.samples is not None:
            self.write({"kind": "data", **_points(*task.samples)})
        status, message = "finished", ""
        try:
            self.warm_up()
            torch.manual_seed(run.seed)  # RReLU's noise, sampled rows
            trainer = run.spec().build(task.model, task.loss, run.hyper)
            self.observe(trainer)
            self.start = self.last["train_loss"]
            torch.manual_seed(run.seed)
            self.clock.start()
            trainer.run(self.clock.off(task.batches()), lambda: self.after(trainer))
            self.clock.stop()
            if self.diverged:
                status = "diverged"
                message = (
                    f"the loss was {self.last['train_loss']:g} after step {self.step}, {self.start:g} at the start"
                )
            elif self.step < self.steps:
                cause = "it stopped by itself" if self.clock.seconds < run.limit else f"cut off at {run.limit:g} s"
                message = f"{cause}, after step {self.step} of {self.steps}"
        except Unavailable as error:
            status, message = "unavailable", str(error)
        except files.Unwritable:
            raise
        except Exception as error:
            status, message = "failed", f"{type(error).__name__}: {error}"
        self.write({"kind": "end", "status": status, "step": self.step, "message": message})
        loss, accuracy = self.last.get("train_loss", math.nan), self.last.get("test_accuracy")
        return Summary(status, self.step, self.clock.seconds, message, loss, accuracy, self.steps_to_90)

    def warm_up(self) -> None:
        """One step of a copy, off the clock: whoever calls a kernel first waits for it to be loaded."""
        model = copy.deepcopy(self.task.model)
        trainer = self.spec.spec().build(model, self.task.loss, self.spec.hyper)
        trainer.run(self.task.batches(), lambda: True)

    def after(self, trainer: Trainer) -> bool:
        """Look at the model after a step; whether it was the last."""
        self.step += 1
        with self.clock.paused():
            seconds = self.clock.seconds
            ends = (self.step >= self.steps and seconds >= self.spec.seconds) or seconds >= self.spec.limit
            due = self.step <= self.steps or seconds >= SPARSER * self.written
            if ends or due:
                self.observe(trainer)
            return ends or self.diverged

    def observe(self, trainer: Trainer) -> None:
        with trainer.evaluated():
            found = self.task.evaluate()
            if self.task.samples is not None and self.step in CURVES:
                x = torch.linspace(*problems.SINE_ENDS, CURVE_POINTS, dtype=torch.float64).unsqueeze(1)
                self.write({"kind": "curve", "step": self.step, **_points(x, problems.predict(trainer.model, x))})
        self.last = {"kind": "step", "step": self.step, "seconds": self.clock.seconds, **found}
        self.written = self.clock.seconds
        self.diverged = not found["train_loss"] <= DIVERGED * self.start
        if self.steps_to_90 is None and found.get("test_accuracy", 0.0) >= TARGET:
            self.steps_to_90 = self.step
        self.write(self.last)
        if self.watch is not None:
            self.watch(self.last)

    def write(self, line: dict[str, Any]) -> None:
        self.lines.add(_finite(line), last=line["kind"] == "end")


# --- what a log says of itself ---


def _config(run: Run, data: dict[str, Any]) -> dict[str, Any]:
    """What makes a run this run: a log with other values is of another."""
    same = {"problem": run.problem, "steps": tasks.length(run, data), "device": torch.device(run.device).type}
    found: dict[str, Any] = _finite({"format": logs.FORMAT, **asdict(run), **same, "data": data})
    return found


def _surroundings(device: str, task: tasks.Task) -> dict[str, Any]:
    return {
        "batch": task.batch,
        "parameters": sum(p.numel() for p in task.model.parameters()),
        "noise_floor": problems.SINE_NOISE_FLOOR if task.samples is not None else None,
        "machine": machine(device),
        "versions": versions(),
        "started": datetime.now(timezone.utc).isoformat(timespec="seconds"),
    }


def _points(x: Tensor, y: Tensor) -> dict[str, list[float]]:
    return {"x": [round(v, 6) for v in x.flatten().tolist()], "y": [round(v, 6) for v in y.flatten().tolist()]}


def _finite(value: Any) -> Any:
    """NaN and infinity as None: JSON has neither."""
    if isinstance(value, dict):
        return {key: _finite(v) for key, v in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(v) for v in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


# --- without the command line, where torch is all there is ---


def main() -> None:
    """python -m marquardt.paper.runs: `marquardt paper` without its screen and its report."""
    parser = argparse.ArgumentParser(prog="python -m marquardt.paper.runs", description=__doc__)
    add = parser.add_argument
    add("experiments", nargs="*", default=list(EXPERIMENTS), help=f"of {', '.join(EXPERIMENTS)}; all by default")
    add("--full", action="store_true", help="10 seeds, 20 of the sine, at full length")
    add("--seeds", type=int)
    add("--optimizers", nargs="+", help=f"of {', '.join(METHODS)}")
    add("--columns", nargs="+", default=list(COLUMNS))
    add("--device", default="cpu")
    add("--data", default="mnist", help=f"one of {', '.join(NAMES)}")
    add("--data-dir", type=Path, help="where MNIST's files lie")
    add(
        "--tuned",
        type=Path,
        default=plans.WINNERS,
        help="what `marquardt paper tune` wrote; by default what comes with the package",
    )
    add("--out", type=Path, default=OUT)
    options = parser.parse_args()
    try:
        tuned = plans.winners(options.tuned)
        todo = plans.plan(
            options.experiments, full=options.full, seeds=options.seeds, methods=options.optimizers,
            columns=options.columns, device=options.device, tuned=tuned,
        )  # fmt: skip
        digits = find(options.data, options.data_dir) if any(run.problem == "mnist" for run in todo) else None
    except (ImportError, OSError, ValueError) as error:
        parser.error(str(error))
    try:
        with held(options.out):
            for run in todo:
                if not done(run, options.out, digits):
                    print(f"{run.name}: {_result(execute(run, options.out, digits))}", flush=True)
    except (files.Held, files.Unwritable) as error:
        parser.exit(1, f"{parser.prog}: error: {error}\n")


def _result(end: Summary) -> str:
    accuracy = "" if end.test_accuracy is None else f", test accuracy {end.test_accuracy:.2%}"
    result = f"{end.status} at step {end.step}, {end.seconds:.2f} s, loss {end.train_loss:.4g}{accuracy}"
    return f"{result} {end.message}".rstrip()


if __name__ == "__main__":
    main()
