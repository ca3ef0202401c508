"""Which runs there are: every method on every problem of the experiments, from every seed."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from .. import files
from ..files import typed
from .methods import METHODS, Method, ablation
from .vocabulary import COLUMNS, EXPERIMENTS, LOGS, PROBLEMS, TUNED, problem_of

SINE_STEPS = 200
FIRST_SEED = 1000  # of those that are reported: what is chosen, by hand or by a search, is chosen on seeds below
TRAIN_SAMPLE = 1000  # of the training set, evaluated after each step
VALUE: Any = float | str | bool | None  # of a hyper-parameter
WINNERS = Path(__file__).with_name(TUNED)  # of 20 trials each, on MNIST and on the sine


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


QUICK = Size(
    sine_seeds=3,
    sine_seconds=1.0,
    mnist_seeds=1,
    mnist_steps=40,
    ablation_steps=20,
    train_sample=TRAIN_SAMPLE,
    limit=8.0,
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
        problem = problem_of(experiment)
        for seed, spec in itertools.product(range(FIRST_SEED, FIRST_SEED + (seeds or count)), specs):
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
        add("ablation-sine", ablation("sine").values(), "default", size.sine_seeds, **sine)
        add(
            "ablation-mnist",
            ablation("mnist").values(),
            "default",
            size.mnist_seeds,
            steps=size.ablation_steps,
            **mnist,
        )
    if "swapped" in experiments:
        for column in columns:
            add("swapped", chosen, column, size.mnist_seeds, steps=0, **mnist)
    return runs


def winners(path: Path) -> dict[str, dict[str, dict[str, Any]]]:
    """{problem: {method: hyper-parameters}}, as `marquardt paper tune` wrote it."""
    try:
        found = files.loads(files.content_of(path))
    except ValueError as error:
        raise ValueError(
            f"{path}: expected the JSON that `marquardt paper tune` writes ({error}); move the file away"
        ) from error
    if not all(isinstance(methods, dict) for methods in found.values()):
        raise ValueError(
            f"{path}: expected {{problem: {{optimizer: hyper-parameters}}}}, as `marquardt paper tune` writes it"
        )
    for problem, methods in found.items():
        if problem not in PROBLEMS:
            raise ValueError(f"{path}: no problem {problem!r}: {' or '.join(PROBLEMS)}")
        for name, hyper in methods.items():
            if name not in METHODS:
                raise ValueError(f"{path}: no optimizer {name!r} in {problem!r}: choose from {', '.join(METHODS)}")
            known = METHODS[name].hyper(problem)
            if not isinstance(hyper, dict) or (unknown := [key for key in hyper if key not in known]):
                wrong = hyper if not isinstance(hyper, dict) else unknown[0]
                raise ValueError(f"{path}: {name} has no hyper-parameter {wrong!r}: choose from {', '.join(known)}")
            for key, value in hyper.items():
                typed(value, VALUE, f"{path}: {name}.{key}")
    return found
