"""The paper's runs: which there are, and each from its first step to its log.

Imports torch alone, so that it runs where nothing else is installed; figures and tables are drawn from the logs.
Within a seed every method has the same initial weights and the same batches. The clock runs while a method trains;
a first step of a copy, fetching a batch, evaluating and writing are off it.
"""

from __future__ import annotations

import argparse
import copy
import itertools
import json
import math
import os
import platform
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from datetime import datetime, timezone
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from .. import files
from ..files import typed
from . import logs, problems
from .data import NAMES, Digits, find
from .methods import METHODS, Method, Trainer, Unavailable, ablation
from .vocabulary import COLUMNS, EXPERIMENTS, LOGS, MEASURES, OUT, PROBLEMS, TUNED, problem_of

SINE_STEPS = 200
FIRST_SEED = 1000  # of those that are reported: what is chosen, by hand or by a search, is chosen on seeds below
TRAIN_SAMPLE = 1000  # of the training set, evaluated after each step
VALUE: Any = float | str | bool | None  # of a hyper-parameter
FORM = "{problem: {optimizer: hyper-parameters}} in JSON"
WINNERS = Path(__file__).with_name(TUNED)  # of 20 trials each, on MNIST and on the sine

DIVERGED = 10.0  # times the loss at the start
CURVES = (5, 20, 50, 200)  # steps at which the sine's fit is kept
CURVE_POINTS = 200
Watch = Callable[[dict[str, Any]], None]  # called with every line of a step
SPARSER = 1.05  # past the steps that have a line each, the next line when the clock has grown by this factor


# --- which runs there are ---


@dataclass(frozen=True)
class Run:
    """One method on one problem from one seed, to the end of `steps` and of `seconds`."""

    experiment: str  # one of vocabulary.TITLES
    method: str
    label: str
    column: str
    seed: int
    steps: int  # 0: one pass over the data
    seconds: float = 0.0
    limit: float = math.inf  # of seconds: a slow method is cut off there
    hyper: Mapping[str, Any] = field(default_factory=dict)
    train_sample: int = TRAIN_SAMPLE  # the test set is always evaluated whole
    device: str = "cpu"

    @property
    def problem(self) -> str:
        return problem_of(self.experiment)

    @property
    def name(self) -> str:
        return f"{self.experiment}/{self.method}.{self.column}.{self.seed}"

    def log(self, out: Path) -> Path:
        return out / LOGS / f"{self.name}.jsonl"

    def spec(self) -> Method:
        return (ablation(self.problem) if self.experiment.startswith("ablation") else METHODS)[self.method]


class Size(NamedTuple):
    """How much is run: the seeds, steps and seconds of each experiment."""

    sine_seeds: int
    sine_seconds: float
    mnist_seeds: int
    mnist_steps: int
    ablation_steps: int
    train_sample: int
    limit: float = math.inf


QUICK = Size(3, 1.0, 1, 40, 20, TRAIN_SAMPLE, limit=8.0)
FULL = Size(20, 2.0, 10, 100, 100, 10_000)


def plan(
    experiments: Sequence[str],
    *,
    full: bool = False,
    seeds: int | None = None,
    methods: Sequence[str] | None = None,
    columns: Sequence[str] = COLUMNS,
    device: str = "cpu",
    tuned: Mapping[str, Mapping[str, Any]] | None = None,
) -> list[Run]:
    """All runs of these experiments. `tuned[problem][method]` has hyper-parameters: without them, no tuned column."""
    check_names("experiment", experiments, EXPERIMENTS)
    check_names("optimizer", methods or (), METHODS)
    check_names("column", columns, COLUMNS)
    if seeds is not None and seeds < 1:
        raise ValueError(f"seeds={seeds}: how many seeds to run, at least 1")
    size, best = FULL if full else QUICK, tuned or {}
    chosen = [method for key, method in METHODS.items() if methods is None or key in methods]
    runs: list[Run] = []

    def add(experiment: str, column: str, specs: Iterable[Method] = chosen, **options: Any) -> None:
        problem = problem_of(experiment)
        is_sine = problem == "sine"
        if not is_sine:  # the sine is always on the CPU: a GPU only waits for 31 parameters
            options |= {"train_sample": size.train_sample, "device": device}
        count = seeds or (size.sine_seeds if is_sine else size.mnist_seeds)
        for seed, spec in itertools.product(range(FIRST_SEED, FIRST_SEED + count), specs):
            changes = {} if column == "default" else best.get(problem, {}).get(spec.key)
            if changes is not None and (is_sine or not spec.sine_only):
                hyper = {**spec.hyper(problem), **changes}
                runs.append(
                    Run(experiment, spec.key, spec.label, column, seed, limit=size.limit, hyper=hyper, **options)
                )

    for column in columns:
        if "sine" in experiments:
            add("sine", column, steps=SINE_STEPS, seconds=size.sine_seconds)
        if "mnist" in experiments:
            add("mnist", column, steps=size.mnist_steps)
    if "ablation" in experiments:
        add("ablation-sine", "default", ablation("sine").values(), steps=SINE_STEPS)
        add("ablation-mnist", "default", ablation("mnist").values(), steps=size.ablation_steps)
    for column in columns if "swapped" in experiments else ():
        add("swapped", column, steps=0)
    return runs


def winners(path: Path) -> dict[str, dict[str, dict[str, Any]]]:
    """{problem: {method: hyper-parameters}}, as `marquardt paper tune` wrote it."""
    try:
        content = files.loads(files.content_of(path))
        typed(content, dict[str, dict[str, dict[str, VALUE]]])
        for problem, methods in content.items():
            check_names("problem", [problem], PROBLEMS)
            check_names("optimizer", methods, METHODS)
            for name, hyper in methods.items():
                check_names(f"hyper-parameter of {name}", hyper, METHODS[name].hyper(problem))
    except ValueError as error:
        raise ValueError(
            f"{path}: {error}; expected {FORM}, as `marquardt paper tune` writes it: correct the file or move it away"
        ) from error
    return content


def check_names(what: str, asked: Iterable[str], known: Iterable[str]) -> None:
    for name in asked:
        if name not in known:
            raise ValueError(f"no {what} {name!r}: choose from {', '.join(known)}")


# --- a problem as one run sees it: data, network, batches and what is evaluated ---


class Task(NamedTuple):
    loss: str
    model: nn.Module
    batches: Callable[[], Iterator[tuple[Tensor, Tensor]]]
    evaluate: Callable[[], dict[str, float]]
    data: dict[str, Any]  # as in the head of a log
    batch: int
    samples: tuple[Tensor, Tensor] | None = None  # of the sine, to draw it


def about(run: Run, data: Digits | None) -> dict[str, Any]:
    """The data, as in the head of a log."""
    if run.problem == "sine":
        n = problems.SINE_POINTS
        return {"name": "sine", "train": n, "test": 0, "source": f"sin x + {problems.SINE_NOISE}·U(0, 1) at {n} points"}
    data = _images(run, data)
    return {"name": data.name, "train": len(data.train_labels), "test": len(data.test_labels), "source": data.source}


def length(run: Run, data: dict[str, Any]) -> int:
    """The number of steps; that of one pass over the data where the run has 0."""
    return run.steps or math.ceil(data["train"] / problems.BATCH)


def _images(run: Run, data: Digits | None) -> Digits:
    if data is None:
        raise ValueError(f"{run.name} needs the digits: pass data=, from marquardt.paper.data.find()")
    return data.swapped() if run.experiment == "swapped" else data


def _sine(run: Run) -> Task:
    x, y = problems.sine(run.seed)
    model = problems.sine_mlp(run.seed)

    def evaluate() -> dict[str, float]:
        return {"train_loss": problems.mean_squared_error(model, x, y, len(x))}

    return Task("mse", model, lambda: itertools.repeat((x, y)), evaluate, about(run, None), len(x), (x, y))


def _digits(run: Run, data: Digits | None) -> Task:
    digits = _images(run, data).to(run.device)
    model = problems.cnn_for(digits)(run.seed, device=run.device)
    n = len(digits.train_labels)
    batch = min(problems.BATCH, n)
    seen = slice(0, min(run.train_sample, n))
    chunk = n if run.device.startswith("cuda") else problems.CHUNK

    def evaluate() -> dict[str, float]:
        train = problems.evaluate(model, digits.train_images[seen], digits.train_labels[seen], chunk)
        test = problems.evaluate(model, digits.test_images, digits.test_labels, chunk)
        return dict(zip(MEASURES, (*train, *test), strict=True))

    def batches() -> Iterator[tuple[Tensor, Tensor]]:
        for index in problems.batches(n, batch, run.seed):
            index = index.to(run.device)
            yield digits.train_images[index], digits.train_labels[index]

    return Task("cross_entropy", model, batches, evaluate, about(run, data), batch)


# --- what is done already ---


def done(run: Run, out: Path, data: Digits | None = None) -> bool:
    """Whether there is a log of this very run, on this data, that came to its end."""
    try:
        log = logs.read(run.log(out))
    except (FileNotFoundError, ValueError):  # any other error may hide a log that is whole
        return False
    wanted = json.loads(json.dumps(_finite(_config(run, about(run, data)))))
    for line in (wanted, log.head):
        line["data"].pop("source", None)  # the same digits may lie elsewhere
    wanted.pop("format")  # of the log, and not of the run
    return log.status in ("finished", "diverged") and all(log.head.get(key) == wanted[key] for key in wanted)


@contextmanager
def held(out: Path) -> Iterator[None]:
    """The logs under `out` are this process's to write, without what is left of runs that were killed."""
    with files.held(out, LOGS):
        for part in logs.unfinished(out):
            part.unlink()
        yield


# --- one run ---


class Clock:
    """Seconds of training; whatever is done under `paused` is off it, and the device has finished at both ends."""

    def __init__(self, device: str) -> None:
        self.seconds, self.started = 0.0, 0.0
        self.cuda = device.startswith("cuda")

    def _now(self) -> float:
        if self.cuda:
            torch.cuda.synchronize()
        return time.perf_counter()

    def start(self) -> None:
        self.started = self._now()

    def stop(self) -> None:
        self.seconds += self._now() - self.started

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


def execute(run: Run, out: Path, data: Digits | None = None, watch: Watch | None = None) -> logs.Log:
    """Train, and write the log: it gets its name when the run has ended, so an interrupted run leaves none.

    `watch` is called with every line of a step. An error of the method ends the run as "failed", with its message;
    a log that cannot be written is raised as an error, and so is another file of that name, which stays. One process
    at a time: see `held`.
    """
    check_free(run.log(out))
    with files.whole(run.log(out)) as write:
        _Recording(run, data, write, watch).run()
    return logs.read(run.log(out))


def check_free(path: Path) -> None:
    """Only a log is replaced, and it is whole."""
    try:
        if path.is_symlink():
            raise ValueError(f"{path} is a link; {logs.WAY_OUT}")
        if path.exists():
            logs.read(path)
    except ValueError as error:
        raise files.Foreign(f"no log can be written: {error}") from None


class _Recording:
    """A run in progress."""

    def __init__(self, run: Run, data: Digits | None, append: Callable[[bytes], None], watch: Watch | None) -> None:
        self.spec, self.lines, self.watch = run, files.SealedLines(append), watch
        self.task = _sine(run) if run.problem == "sine" else _digits(run, data)
        self.steps = length(run, self.task.data)
        self.clock = Clock(run.device)
        self.step = 0
        self.start = math.inf  # the loss before the first step
        self.loss = math.inf  # at the last line
        self.written = 0.0  # on the clock, at the last line
        self.diverged = False

    def run(self) -> None:
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
            self.start = self.loss
            torch.manual_seed(run.seed)
            self.clock.start()
            trainer.run(self.clock.off(task.batches()), lambda: self.after(trainer))
            self.clock.stop()
            if self.diverged:
                status = "diverged"
                message = f"the loss was {self.loss:g} after step {self.step}, {self.start:g} at the start"
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
            measures = self.task.evaluate()
            if self.task.samples is not None and self.step in CURVES:
                x = torch.linspace(*problems.SINE_ENDS, CURVE_POINTS, dtype=torch.float64).unsqueeze(1)
                self.write({"kind": "curve", "step": self.step, **_points(x, problems.predict(trainer.model, x))})
        line = {"kind": "step", "step": self.step, "seconds": self.clock.seconds, **measures}
        self.written, self.loss = self.clock.seconds, measures["train_loss"]
        self.diverged = not self.loss <= DIVERGED * self.start
        self.write(line)
        if self.watch is not None:
            self.watch(line)

    def write(self, line: dict[str, Any]) -> None:
        self.lines.add(_finite(line), last=line["kind"] == "end")


# --- the head of a log ---


def _config(run: Run, data: dict[str, Any]) -> dict[str, Any]:
    """What makes a run this run: a log with other values is of another."""
    same = {"problem": run.problem, "steps": length(run, data), "device": torch.device(run.device).type}
    return {"format": logs.FORMAT, **asdict(run), **same, "data": data}


def _surroundings(device: str, task: Task) -> dict[str, Any]:
    gpu = torch.cuda.get_device_name(torch.device(device)) if device.startswith("cuda") else None
    return {
        "batch": task.batch,
        "parameters": sum(p.numel() for p in task.model.parameters()),
        "noise_floor": problems.SINE_NOISE_FLOOR if task.samples is not None else None,
        "machine": {
            **{"cpu": _processor(), "cores": os.cpu_count(), "threads": torch.get_num_threads(), "gpu": gpu},
            "system": f"{platform.system()} {platform.machine()}",
        },
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


def _processor() -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            return next(line.split(":", 1)[1].strip() for line in file if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def versions() -> dict[str, str]:
    numbers = {"python": platform.python_version(), "torch": str(torch.__version__)}
    for package in ("marquardt", "numpy", "scipy", "psgd-torch", "torch-levenberg-marquardt"):
        with suppress(metadata.PackageNotFoundError):
            numbers[package] = metadata.version(package)
    return numbers


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
    wrote = "what `marquardt paper tune` wrote; by default what comes with the package"
    add("--tuned", type=Path, default=WINNERS, help=wrote)
    add("--out", type=Path, default=OUT)
    options = parser.parse_args()
    try:
        tuned = winners(options.tuned)
        todo = plan(
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
                    print(f"{run.name}: {execute(run, options.out, digits).summary()}", flush=True)
    except (files.Held, files.Unwritable) as error:
        parser.exit(1, f"{parser.prog}: error: {error}\n")


if __name__ == "__main__":
    main()
