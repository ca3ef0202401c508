"""The paper's runs: which there are, and one of them from its first step to its log.

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
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from datetime import datetime, timezone
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from marquardt.paper import files, logs, problems
from marquardt.paper.data import Digits, find
from marquardt.paper.methods import ABLATION, METHODS, Method, Trainer, Unavailable

FORMAT = 1  # of the logs
BATCH = 600  # the paper's
SINE_STEPS = 200
DIVERGED = 10.0  # times the loss at the start
LEVEL = 0.9  # test accuracy: the paper's mark of speed
CURVES = (5, 20, 50, 200)  # steps at which the sine's fit is kept
CURVE_POINTS = 200
SPARSER = 1.05  # past the steps that have a line each, the next line when the clock has grown by this factor

WINNERS = Path(__file__).with_name("tuned.json")  # of 20 trials each, on MNIST and on the sine

EXPERIMENTS = ("sine", "mnist", "ablation", "swapped")
COLUMNS = ("published", "tuned")


# --- which runs there are ---


@dataclass(frozen=True)
class Run:
    """One method on one problem from one seed, to the end of `steps` and of `seconds`."""

    experiment: str  # "sine" | "mnist" | "ablation-sine" | "ablation-mnist" | "swapped"
    method: str
    label: str
    column: str
    seed: int
    steps: int  # 0: one pass over the data
    seconds: float = 0.0
    limit: float = math.inf  # of seconds: a slow method is cut off there
    hyper: Mapping[str, Any] = field(default_factory=dict)
    train_sample: int = 1000  # of the training set, evaluated after each step; the test set always is, whole
    device: str = "cpu"

    @property
    def problem(self) -> str:
        return "sine" if self.experiment.endswith("sine") else "mnist"

    @property
    def name(self) -> str:
        return f"{self.experiment}/{self.method}.{self.column}.{self.seed}"

    def log(self, out: Path) -> Path:
        return out / "logs" / f"{self.name}.jsonl"

    def spec(self) -> Method:
        return (ABLATION if self.experiment.startswith("ablation") else METHODS)[self.method]


class Size(NamedTuple):
    """How much is run: the seeds, steps and seconds of each experiment."""

    sine_seeds: int
    sine_seconds: float
    mnist_seeds: int
    mnist_steps: int
    ablation_steps: int
    train_sample: int
    limit: float = math.inf


QUICK = Size(
    sine_seeds=3, sine_seconds=1.0, mnist_seeds=1, mnist_steps=40, ablation_steps=20, train_sample=1000, limit=8.0
)
FULL = Size(sine_seeds=20, sine_seconds=2.0, mnist_seeds=10, mnist_steps=100, ablation_steps=100, train_sample=10_000)


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
    if unknown := [name for name in experiments if name not in EXPERIMENTS]:
        raise ValueError(f"no experiment {unknown[0]!r}: choose from {', '.join(EXPERIMENTS)}")
    if unknown := [name for name in methods or () if name not in METHODS]:
        raise ValueError(f"no optimizer {unknown[0]!r}: choose from {', '.join(METHODS)}")
    if unknown := [name for name in columns if name not in COLUMNS]:
        raise ValueError(f"no column {unknown[0]!r}: choose from {', '.join(COLUMNS)}")
    if seeds is not None and seeds < 1:
        raise ValueError(f"seeds={seeds}: how many seeds to run, at least 1")
    size = FULL if full else QUICK
    chosen = [method for key, method in METHODS.items() if methods is None or key in methods]
    sine = {"steps": SINE_STEPS, "limit": size.limit, "device": "cpu"}  # 31 parameters: a GPU only waits
    mnist = {"train_sample": size.train_sample, "limit": size.limit, "device": device}
    runs: list[Run] = []

    def add(experiment: str, specs: Iterable[Method], column: str, count: int, **options: Any) -> None:
        problem = "sine" if experiment.endswith("sine") else "mnist"
        for seed, spec in itertools.product(range(seeds or count), specs):
            hyper = spec.hyper(problem)
            if column == "tuned":
                if spec.key not in (tuned or {}).get(problem, {}):
                    continue
                hyper |= (tuned or {})[problem][spec.key]
            if problem == "sine" or not spec.sine_only:
                runs.append(Run(experiment, spec.key, spec.label, column, seed, hyper=hyper, **options))

    for column in columns:
        if "sine" in experiments:
            add("sine", chosen, column, size.sine_seeds, seconds=size.sine_seconds, **sine)
        if "mnist" in experiments:
            add("mnist", chosen, column, size.mnist_seeds, steps=size.mnist_steps, **mnist)
    if "ablation" in experiments:
        add("ablation-sine", ABLATION.values(), "published", size.sine_seeds, **sine)
        add("ablation-mnist", ABLATION.values(), "published", size.mnist_seeds, steps=size.ablation_steps, **mnist)
    if "swapped" in experiments:
        for column in columns:
            add("swapped", chosen, column, size.mnist_seeds, steps=0, **mnist)
    return runs


def winners(path: Path) -> dict[str, dict[str, dict[str, Any]]]:
    """{problem: {method: hyper-parameters}}, as `marquardt paper tune` wrote it."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(
            f"{path}: expected the JSON that `marquardt paper tune` writes ({error}); delete the file"
        ) from error
    if not isinstance(found, dict) or not all(isinstance(methods, dict) for methods in found.values()):
        raise ValueError(
            f"{path}: expected {{problem: {{optimizer: hyper-parameters}}}}, as `marquardt paper tune` writes it"
        )
    for problem, methods in found.items():
        if problem not in ("sine", "mnist"):
            raise ValueError(f"{path}: no problem {problem!r}: sine or mnist")
        for name, hyper in methods.items():
            if name not in METHODS:
                raise ValueError(f"{path}: no optimizer {name!r} in {problem!r}: choose from {', '.join(METHODS)}")
            known = METHODS[name].hyper(problem)
            if not isinstance(hyper, dict) or (unknown := [key for key in hyper if key not in known]):
                wrong = hyper if not isinstance(hyper, dict) else unknown[0]
                raise ValueError(f"{path}: {name} has no hyper-parameter {wrong!r}: choose from {', '.join(known)}")
    return found


def done(run: Run, out: Path, data: Digits | None = None) -> bool:
    """Whether there is a log of this very run, on this data, that came to its end."""
    try:
        log = logs.read(run.log(out))
    except (FileNotFoundError, ValueError):  # any other error may hide a log that is whole
        return False
    wanted = json.loads(json.dumps(_config(run, _about(run, data))))
    for line in (wanted, log.head):
        line["data"].pop("source", None)  # the same digits may lie elsewhere
    return log.status in ("finished", "diverged") and all(log.head.get(key) == wanted[key] for key in wanted)


@contextmanager
def held(out: Path) -> Iterator[None]:
    """The logs under `out` are this process's to write, without what is left of runs that were killed."""
    with files.held(out, "logs"):
        for part in logs.unfinished(out):
            part.unlink(missing_ok=True)
        yield


# --- problems, as a run sees them ---


class Problem(NamedTuple):
    loss: str
    model: nn.Module
    batches: Callable[[], Iterator[tuple[Tensor, Tensor]]]
    evaluate: Callable[[], dict[str, float]]
    data: dict[str, Any]
    samples: tuple[Tensor, Tensor] | None = None  # of the sine, to draw it


def _about(run: Run, data: Digits | None) -> dict[str, Any]:
    """What a log says of the data."""
    if run.problem == "sine":
        n = problems.SINE_POINTS
        return {"name": "sine", "train": n, "test": 0, "source": "sin x + 0.2·U(0, 1) at 1000 points"}
    if data is None:
        raise ValueError(f"{run.name} needs the digits: pass data=, from marquardt.paper.data.find()")
    data = data.swapped() if run.experiment == "swapped" else data
    return {"name": data.name, "train": len(data.train_labels), "test": len(data.test_labels), "source": data.source}


def _sine(run: Run) -> Problem:
    x, y = problems.sine(run.seed)
    model = problems.sine_mlp(run.seed)

    def evaluate() -> dict[str, float]:
        return {"train_loss": problems.mean_squared_error(model, x, y, len(x))}

    return Problem("mse", model, lambda: itertools.repeat((x, y)), evaluate, _about(run, None), (x, y))


def _digits(run: Run, data: Digits | None) -> Problem:
    about = _about(run, data)
    assert data is not None  # _about has said so
    data = (data.swapped() if run.experiment == "swapped" else data).to(run.device)
    model = problems.cnn_for(data)(run.seed, device=run.device)
    n = len(data.train_labels)
    seen = slice(0, min(run.train_sample, n))
    chunk = n if run.device.startswith("cuda") else problems.CHUNK

    def evaluate() -> dict[str, float]:
        train = problems.evaluate(model, data.train_images[seen], data.train_labels[seen], chunk)
        test = problems.evaluate(model, data.test_images, data.test_labels, chunk)
        return {
            "train_loss": train.loss, "train_accuracy": train.accuracy,
            "test_loss": test.loss, "test_accuracy": test.accuracy,
        }  # fmt: skip

    def batches() -> Iterator[tuple[Tensor, Tensor]]:
        for index in problems.batches(n, min(BATCH, n), run.seed):
            index = index.to(run.device)
            yield data.train_images[index], data.train_labels[index]

    return Problem("cross_entropy", model, batches, evaluate, about)


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
    a log that cannot be written is an error of its own. One process at a time: see `held`.
    """
    with files.whole(run.log(out)) as write:
        return _Recording(run, data, write, watch).run()


class _Recording:
    """A run in progress."""

    def __init__(
        self,
        run: Run,
        data: Digits | None,
        append: Callable[[str], None],
        watch: Callable[[dict[str, Any]], None] | None,
    ) -> None:
        self.spec, self.append, self.watch = run, append, watch
        if run.problem == "sine":
            self.problem = _sine(run)
        else:
            self.problem = _digits(run, data)
        self.steps = _steps(run, self.problem.data)
        self.clock = Clock(run.device)
        self.step = 0
        self.start = math.inf  # the loss before the first step
        self.last: dict[str, Any] = {}
        self.written = 0.0  # on the clock, at the last line
        self.steps_to_90: int | None = None
        self.diverged = False

    def run(self) -> Summary:
        run, problem = self.spec, self.problem
        self.write({"kind": "run", **_config(run, problem.data), **_surroundings(run.device, problem)})
        if problem.samples is not None:
            self.write({"kind": "data", **_points(*problem.samples)})
        status, message = "finished", ""
        try:
            self.warm_up()
            torch.manual_seed(run.seed)  # RReLU's noise, sampled rows
            trainer = run.spec().build(problem.model, problem.loss, run.hyper)
            self.observe(trainer)
            self.start = self.last["train_loss"]
            torch.manual_seed(run.seed)
            self.clock.start()
            trainer.run(self.clock.off(problem.batches()), lambda: self.after(trainer))
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
        problem = self.problem
        trainer = self.spec.spec().build(copy.deepcopy(problem.model), problem.loss, self.spec.hyper)
        trainer.run(problem.batches(), lambda: True)

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
            found = self.problem.evaluate()
            if self.problem.samples is not None and self.step in CURVES:
                x = torch.linspace(-10, 10, CURVE_POINTS, dtype=torch.float64).unsqueeze(1)
                self.write({"kind": "curve", "step": self.step, **_points(x, problems.predict(trainer.model, x))})
        self.last = {"kind": "step", "step": self.step, "seconds": self.clock.seconds, **found}
        self.written = self.clock.seconds
        self.diverged = not found["train_loss"] <= DIVERGED * self.start
        if self.steps_to_90 is None and found.get("test_accuracy", 0.0) >= LEVEL:
            self.steps_to_90 = self.step
        self.write(self.last)
        if self.watch is not None:
            self.watch(self.last)

    def write(self, line: dict[str, Any]) -> None:
        self.append(json.dumps(_finite(line), ensure_ascii=False, allow_nan=False) + "\n")


# --- what a log says of itself ---


def _config(run: Run, data: dict[str, Any]) -> dict[str, Any]:
    """What makes a run this run: a log with other values is of another."""
    same = {"problem": run.problem, "steps": _steps(run, data), "device": torch.device(run.device).type}
    found: dict[str, Any] = _finite({"format": FORMAT, **asdict(run), **same, "data": data})
    return found


def _steps(run: Run, data: dict[str, Any]) -> int:
    return run.steps or math.ceil(data["train"] / BATCH)


def _surroundings(device: str, problem: Problem) -> dict[str, Any]:
    return {
        "batch": problem.data["train"] if problem.samples is not None else min(BATCH, problem.data["train"]),
        "parameters": sum(p.numel() for p in problem.model.parameters()),
        "noise_floor": problems.SINE_NOISE_FLOOR if problem.samples is not None else None,
        "machine": machine(device),
        "versions": versions(),
        "started": datetime.now(timezone.utc).isoformat(timespec="seconds"),
    }


def machine(device: str) -> dict[str, Any]:
    gpu = torch.cuda.get_device_name(torch.device(device)) if device.startswith("cuda") else None
    return {
        "cpu": _processor(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "gpu": gpu,
        "system": f"{platform.system()} {platform.machine()}",
    }


def _processor() -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            return next(line.split(":", 1)[1].strip() for line in file if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def versions() -> dict[str, str]:
    found = {"python": platform.python_version(), "torch": str(torch.__version__)}
    for package in ("marquardt", "numpy", "scipy", "psgd-torch", "torch-levenberg-marquardt"):
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return found


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
    add("--data", default="mnist", help="mnist, mnist-5k or digits")
    add("--data-dir", type=Path, help="where MNIST's files lie")
    add(
        "--tuned",
        type=Path,
        default=WINNERS,
        help="what `marquardt paper tune` wrote; by default what comes with the package",
    )
    add("--out", type=Path, default=Path("paper-results"))
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
                    print(f"{run.name}: {_result(execute(run, options.out, digits))}", flush=True)
    except (files.Held, files.Unwritable) as error:
        parser.exit(1, f"{parser.prog}: error: {error}\n")


def _result(end: Summary) -> str:
    accuracy = "" if end.test_accuracy is None else f", test accuracy {end.test_accuracy:.2%}"
    result = f"{end.status} at step {end.step}, {end.seconds:.2f} s, loss {end.train_loss:.4g}{accuracy}"
    return f"{result} {end.message}".rstrip()


if __name__ == "__main__":
    main()
