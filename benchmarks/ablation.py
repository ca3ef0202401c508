"""What each policy of a default step is worth: one is switched off at a time, on validation data.

    python benchmarks/ablation.py --data ~/data --out ablation.jsonl --cores 16 --minutes 8
    python benchmarks/ablation.py --table ablation.jsonl            # policies down, tasks across
    python benchmarks/ablation.py --table ablation.jsonl --all      # every figure, with quartiles
    python benchmarks/ablation.py --export digits.npz --data ~/data # both kinds of digits in one file, for --data
    python benchmarks/ablation.py --quick --data ~/data

A policy that is an option of `mq.LM` is switched off by it, one that is woven into the step by a change of the package
for the length of a run: PATCHES. Runs of one seed have the same first weights and the same batches. No figure is of a
test set, and no seed is reported elsewhere. What a cell has is the median over the seeds of loss without the policy by
loss with it, so that more than 1 says what the policy is worth, and the interval of that median by the sign test, which
assumes nothing of the distribution and covers at least 95 %; it is bold if it excludes 1. "=" says that not one figure
differs. The first row changes nothing but the last digits of the first weights: what it shows is chance.

The digits are scikit-learn's if that is installed, or what `--export` wrote where it is; otherwise those of MNIST, made
8×8. Results are written as they come, and what is there is not run again. After `--minutes` no run begins.

Not here: convergence, which is a report and changes no step; bounds of a loss without one, and steps with `radius`,
`attempts` or other schedules, which are no defaults.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import marquardt as mq
import marquardt.metric.layered
import marquardt.metric.sides
import marquardt.parts.judging
import marquardt.step
import measure
from contest import functions, tasks
from contest.contestants import Feed
from marquardt.paper import data as paper_data
from marquardt.paper import problems
from marquardt.policies.lag import Lag
from marquardt.policies.outliers import Outliers
from marquardt.policies.same_data import SameData

FIRST_SEED = 3000
COVERED = 0.95
MNIST_ROWS, MNIST_HELD_OUT = 10_000, 3000
FINITE = 1e30  # stands for ∞ in a ratio
SHOWN = 5e-4  # a ratio that differs less from 1 is printed as 1.000


# --- policies that are woven into the step: what is changed while they are off ---

Change = tuple[Any, str, Any]  # an object, the name of what it has, and what it has instead

BEGIN, JUDGE, NEXT_LAM = marquardt.step.begin, marquardt.step.judge, marquardt.step.next_lam


def at_once(*rest: Any) -> Any:
    start = BEGIN(*rest)
    return start._replace(same_data=start.repeats > 0)


def always_judged(parts: Any, old: Any, start: Any, trial: Any, *rest: Any) -> Any:
    judgement = JUDGE(parts, old, start, trial, *rest)
    if judgement.judged:
        return judgement
    lr = rest[-1]
    predicted = -lr * trial.gd - 0.5 * lr**2 * trial.dGd
    gain = marquardt.step.gain_ratio(start.level.f - trial.new_loss, predicted)
    return judgement._replace(judged=True, gain=gain)


def next_lam_as_after(rule: str) -> Callable[..., float]:
    """λ as if steps of that rule were ordinary ones."""

    def next_lam(parts: Any, start: Any, lam: float, end: Any, *rest: Any) -> float:
        return NEXT_LAM(parts, start, lam, end._replace(rule="decrease") if end.rule == rule else end, *rest)

    return next_lam


PATCHES: dict[str, Sequence[Change]] = {
    "never detected": [(SameData, "repeated", lambda *_: 0)],
    "known from the start": [(SameData, "repeated", lambda *_: 2)],
    "detected at once": [(marquardt.step, "begin", at_once)],
    "no doubt": [(Outliers, "excess", lambda *_: 1.0)],
    "always judged": [(marquardt.step, "judge", always_judged)],
    "λ may fall after a search": [(marquardt.step, "next_lam", next_lam_as_after("search"))],
    "λ rises after uphill": [(marquardt.step, "next_lam", next_lam_as_after("uphill"))],
    "λ falls for ever": [(marquardt.parts.judging, "NEGLIGIBLE", -1.0)],
    "λ falls on while unjudged": [(marquardt.parts.judging, "ENOUGH", math.inf)],
    "reweighting is new data": [(marquardt.step, "reweighted", lambda old, *_: old)],
    "the past is always trusted": [(marquardt.metric.sides, "trusted", lambda past, present: torch.ones(()))],
    "averaged even if it lags": [(Lag, "behind", property(lambda lag: False))],
    "no early renewals": [(marquardt.metric.layered, "EARLY", 0)],
}


@contextmanager
def patched(changes: Sequence[Change]) -> Iterator[None]:
    before = [(owner, name, vars(owner)[name]) for owner, name, _ in changes]
    for change in changes:
        setattr(*change)
    try:
        yield
    finally:
        for change in before:
            setattr(*change)


# --- policies: how each is switched off ---

SAME, BATCHES = "same", "batches"  # kinds of tasks: the same data in every step, or mini-batches


@dataclass(frozen=True)
class Policy:
    name: str
    without: str  # what is done instead
    kinds: tuple[str, ...] = (SAME, BATCHES)  # where it can act
    options: dict[str, Any] = field(default_factory=dict)
    changes: Sequence[Change] = ()
    jitter: float = 0.0  # by which share the first weights are changed


DEFAULT, CHANCE, LAST = "default", "nothing", "evaluation of the average"


def momentum(**options: Any) -> mq.AdaptiveMomentum:
    return mq.AdaptiveMomentum(**{"dP": math.inf, "cap": True, "same_data": True} | options)


def patch(name: str) -> Sequence[Change]:
    return PATCHES[name]


ONE, OTHER = (SAME,), (BATCHES,)
STEADY = mq.MeanEigenvalue  # the damping on the same data
POLICIES: dict[str, Policy] = {
    p.name: p
    for p in (
        Policy(DEFAULT, ""),
        Policy(CHANCE, "first weights changed by 1e-6 of them", jitter=1e-6),
        # Which data.
        Policy("detection of the same data", "every batch counts as new", ONE, changes=patch("never detected")),
        Policy("detection, not knowledge", "known before the first step", ONE, changes=patch("known from the start")),
        Policy("detection by two steps", "by one", changes=patch("detected at once")),
        Policy("reweighting", "another weight decay is new data", ONE, changes=patch("reweighting is new data")),
        # What is accepted.
        Policy("uphill moves", "Decrease()", options={"acceptance": mq.Decrease()}),
        Policy("of_late", "uphill to any height", ONE, {"acceptance": mq.Uphill(b=1.0)}),
        Policy("doubt", "every batch is believed", changes=patch("no doubt")),
        Policy("unjudged steps", "rounding counts as failure", changes=patch("always judged")),
        # λ
        Policy("λ stays after a search", "it may fall", changes=patch("λ may fall after a search")),
        Policy("λ stays after uphill", "it rises", changes=patch("λ rises after uphill")),
        Policy("λ stays if negligible", "it falls for ever", ONE, changes=patch("λ falls for ever")),
        Policy("λ₀ after five unjudged", "λ falls on", changes=patch("λ falls on while unjudged")),
        Policy("λ₀ = 3", "λ₀ = 1", options={"schedule": mq.Balanced(initial=1.0)}),
        Policy("λ by the average", "gain ratio alone", OTHER, {"schedule": mq.GainRatio(initial=3.0, floor=1e-20)}),
        Policy("λ by the average (2)", "gain ratio, λ ≥ 3", OTHER, {"schedule": mq.GainRatio(initial=3.0)}),
        Policy("λ ≤ 100 by the average", "no bound", OTHER, {"schedule": mq.Balanced(most=math.inf)}),
        # The average
        Policy("average", "None", options={"average": None}),
        Policy("average restarts", "it goes on", ONE, {"average": mq.EMA(restarts=False)}),
        Policy("no average that lags", "it is shown", OTHER, changes=patch("averaged even if it lags")),
        # The step
        Policy("momentum", "None", ONE, {"momentum": None}),
        Policy("no momentum on batches", "momentum everywhere", options={"momentum": momentum(same_data=False)}),
        Policy("momentum's cap", "dP = 0.6, no cap", ONE, {"momentum": momentum(dP=0.6, cap=False)}),
        Policy("line search", "None", options={"line_search": None}),
        # D
        Policy("KroneckerMetric", "MeanEigenvalue()", OTHER, {"damping": mq.MeanEigenvalue()}),
        Policy("steady", "KroneckerMetric throughout", ONE, {"damping": mq.KroneckerMetric(steady=None)}),
        Policy("D remembers", "the present one", ONE, {"damping": mq.KroneckerMetric(steady=STEADY(memory=1))}),
        Policy("D forgets", "the largest of all", ONE, {"damping": mq.KroneckerMetric(steady=STEADY(memory=math.inf))}),
        Policy("running average of D", "this batch alone", OTHER, {"damping": mq.KroneckerMetric(decay=0.0)}),
        Policy("trusted", "any past is averaged", OTHER, changes=patch("the past is always trusted")),
        Policy("doubt, trusted", "neither", OTHER, changes=[*patch("no doubt"), *patch("the past is always trusted")]),
        Policy("every = 10", "every = 1", OTHER, {"damping": mq.KroneckerMetric(every=1)}),
        Policy("early renewals", "every = 10 at once", OTHER, changes=patch("no early renewals")),
    )
}


# --- tasks ---

Scores = dict[str, float]


class Digits(NamedTuple):
    small: Tensor  # (N, 64), any scale
    small_labels: Tensor
    large: Tensor  # (N, 28, 28), bytes of MNIST's training set
    large_labels: Tensor
    source: str


@dataclass
class Posed:
    """A model at its first weights, and its data."""

    model: nn.Module
    batch: Callable[[int], tuple[Tensor, Tensor]]  # of a step, from 1
    score: Callable[[nn.Module], Scores]
    loss: str = "mse"
    before: Callable[[mq.LM, int], None] = lambda opt, k: None
    options: dict[str, Any] = field(default_factory=dict)


class Figure(NamedTuple):
    """What a table has of a run."""

    title: str
    step: int
    key: str = "error"
    last: bool = False  # of the last weights, whatever the average
    solved: float | None = None  # counts the runs below it


@dataclass(frozen=True)
class Task:
    name: str
    kind: str
    what: str
    build: Callable[[int, Digits | None], Posed]
    figures: tuple[Figure, ...]
    more: tuple[int, ...] = ()  # other steps that are looked at
    often: int = 1  # seeds for each one of other tasks
    digits: bool = False

    @property
    def steps(self) -> int:
        return max(f.step for f in self.figures)

    @property
    def looks(self) -> set[int]:
        return {f.step for f in self.figures} | set(self.more)


CPU = torch.device("cpu")
SINE_SOLVED = 0.004  # on new data: the noise alone has 0.0033, and what 31 parameters learn of it adds 0.0004


def sine(dtype: torch.dtype) -> Callable[..., Posed]:
    """The error that new data would show, in the mean over their noise."""

    def build(seed: int, _: Digits | None) -> Posed:
        x, y = problems.sine(seed, dtype)
        between = (x[1:] + x[:-1]).double() / 2
        truth = between.sin() + problems.SINE_NOISE / 2

        def score(model: nn.Module) -> Scores:
            z = problems.predict(model, between.to(dtype)).double()
            return {"error": float(F.mse_loss(z, truth)) + problems.SINE_NOISE_FLOOR}

        return Posed(problems.sine_mlp(seed, dtype), lambda k: (x, y), score)

    return build


MOVED = 150


def moved(seed: int, _: Digits | None) -> Posed:
    """A fit that has ended long before its data become others, as in a stream: of sin 2x, then of cos 2x."""
    noise = 0.1 * torch.randn(200, 1, generator=torch.Generator().manual_seed(seed))
    x = torch.linspace(-3, 3, 200).unsqueeze(1)
    first, second = (2 * x).sin(), (2 * x).cos()
    model, at = tasks.mlp(1, 4, 1), [0]

    def batch(k: int) -> tuple[Tensor, Tensor]:
        at[0] = k
        return x, (first if k <= MOVED else second) + noise

    def score(model: nn.Module) -> Scores:
        return {"error": float(F.mse_loss(problems.predict(model, x), first if at[0] <= MOVED else second))}

    return Posed(model, batch, score)


def regression(build: Callable[..., tasks.Problem], batch: int | None = None) -> Callable[..., Posed]:
    """A task of the arena. The error is the root mean square on validation data, relative to their deviation."""

    def built(seed: int, _: Digits | None) -> Posed:
        problem = tasks.Task("", tasks.CHOICE, "", build, batch=batch).problem(seed, tasks.Setup(), CPU)
        feed, scored = Feed(problem, seed), problem.scores
        assert isinstance(scored, tasks.Scored)

        def next_batch(k: int) -> tuple[Tensor, Tensor]:
            feed.advance()
            return feed.batch()

        validation = scored.validation
        return Posed(problem.model, next_batch, lambda model: {"error": scored.error(model, validation)})

    return built


RENEWED = 10  # steps from one weight decay to the next


def decaying(build: Callable[..., Posed]) -> Callable[..., Posed]:
    """With a weight decay that falls as one goes along, as evidence would have it."""

    def built(seed: int, digits: Digits | None) -> Posed:
        def before(opt: mq.LM, k: int) -> None:
            if k % RENEWED == 0:
                opt.param_groups[0]["weight_decay"] *= 0.8

        posed = build(seed, digits)
        posed.before, posed.options = before, {"weight_decay": 1e-3}
        return posed

    return built


def broken(build: Callable[..., Posed], at: int, spoil: Callable[[Tensor, Tensor], Any]) -> Callable[..., Posed]:
    """With one batch that is corrupt."""

    def built(seed: int, digits: Digits | None) -> Posed:
        posed = build(seed, digits)
        sound = posed.batch
        posed.batch = lambda k: spoil(*sound(k)) if k == at else sound(k)
        return posed

    return built


def one_reading(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """One target of a sensor that failed."""
    y = y.clone()
    y[0] = 1000.0
    return x, y


def shifted_labels(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """Images beside the labels of others."""
    return x, (y + 1) % 10


def raw_inputs(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """Pixels that nobody has normalised, in a quarter of the images"""
    x = x.clone()
    x[: len(x) // 4] = 100 * (x[: len(x) // 4] + 1)
    return x, y


def classes(model: Callable[[int], nn.Module], large: bool, size: int) -> Callable[..., Posed]:
    """Most of the small digits or most of the large ones train; a part of the rest is for validation."""

    def build(seed: int, digits: Digits | None) -> Posed:
        assert digits is not None
        x, y = (digits.large, digits.large_labels) if large else (digits.small, digits.small_labels)
        order = torch.randperm(len(x), generator=torch.Generator().manual_seed(seed))
        held_out = MNIST_HELD_OUT if large else int(0.4 * len(x))
        train, rest = order[held_out:], order[:held_out]
        x = x.unsqueeze(1).float() if large else x.float()
        x = (x - x[train].mean()) / x[train].std()
        order_of = problems.batches(len(train), size, seed)

        def batch(k: int) -> tuple[Tensor, Tensor]:
            index = train[next(order_of)]
            return x[index], y[index]

        def score(model: nn.Module) -> Scores:
            found = problems.evaluate(model, x[rest], y[rest])
            return {"nll": found.loss, "error": 1 - found.accuracy}

        return Posed(model(seed), batch, score, "cross_entropy")

    return build


def seeded(build: Callable[[], nn.Module]) -> Callable[[int], nn.Module]:
    def built(seed: int) -> nn.Module:
        torch.manual_seed(seed)
        return build()

    return built


SMALL = classes(seeded(lambda: tasks.mlp(64, 32, 10)), False, 128)
SMALL_RELU = classes(seeded(lambda: nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))), False, 128)
LARGE_MLP = classes(seeded(lambda: tasks.flat_mlp(784, 32, 10)), True, 200)
LARGE_CNN = classes(problems.mnist_cnn, True, 150)
CIRCUIT = regression(tasks.smooth(functions.CIRCUIT, 8000, 20, 20), 200)
NOISY = regression(tasks.smooth(functions.CIRCUIT, 8000, 20, 20, noise=0.05), 200)
BROKEN = 60


def broken_task(name: str, what: str, build: Callable[..., Posed], spoil: Any, key: str, digits: bool) -> Task:
    figures = (
        Figure(f"{name}: just after", BROKEN, key, last=True),
        Figure(f"{name}: 10 steps later", BROKEN + 10, key),
        Figure(f"{name}: at the end", 2 * BROKEN, key),
    )
    return Task(name, BATCHES, what, broken(build, BROKEN, spoil), figures, (BROKEN - 1,), digits=digits)


TASKS: dict[str, Task] = {
    task.name: task
    for task in (
        Task(
            "sine", SAME, "the paper's, 1–10–1, float64", sine(torch.float64),
            (
                Figure("sine, 200 steps", 200), Figure("sine, 500 steps", 500),
                Figure("sine, solved", 500, solved=SINE_SOLVED),
            ), (50, 100), often=2,
        ),
        Task(
            "sine, float32", SAME, "the same in float32", sine(torch.float32), (Figure("sine, float32, 300", 300),),
            (100, 200),
        ),
        Task(
            "peaks", SAME, "2–20–1, 300 rows, 10 % noise, weight decay renewed every ten steps",
            decaying(regression(tasks.smooth(functions.PEAKS, 300, 20, noise=0.1))), (Figure("peaks", 200),),
            (50, 100),
        ),
        Task(
            "borehole", SAME, "8–10–10–1, 500 rows", regression(tasks.smooth(functions.BOREHOLE, 500, 10, 10)),
            (Figure("borehole", 250),), (50, 100),
        ),
        Task(
            "circuit", SAME, "6–10–10–1, 500 rows", regression(tasks.smooth(functions.CIRCUIT, 500, 10, 10)),
            (Figure("circuit", 200),), (50, 100),
        ),
        Task(
            "mackey-glass", SAME, "four delays, 4–10–10–1, 1,000 rows",
            regression(tasks.mackey_glass(lambda: tasks.mlp(4, 10, 10, 1), 4, 6, 1000)),
            (Figure("Mackey–Glass", 250),), (50, 100),
        ),
        Task(
            "moved", SAME, f"1–4–1, 200 rows, float32; after {MOVED} steps the targets are others", moved,
            (
                Figure("moved: before", MOVED), Figure("moved: 10 steps later", MOVED + 10),
                Figure("moved: 50 steps later", MOVED + 50),
            ), often=3,
        ),
        Task(
            "circuit by batches", BATCHES, "6–20–20–1, 8,000 rows, batches of 200", CIRCUIT,
            (Figure("circuit, 60 steps", 60), Figure("circuit, 200 steps", 200)), (20,),
        ),
        broken_task("one target", "circuit with 5 % noise; one target is 1,000", NOISY, one_reading, "error", False),
        broken_task("wrong labels", "digits; all labels of a batch", SMALL, shifted_labels, "nll", True),
        broken_task("raw inputs", "digits, ReLU; a quarter not normalised", SMALL_RELU, raw_inputs, "nll", True),
        Task(
            "digits", BATCHES, "8×8, 64–32–10, batches of 128", SMALL,
            (Figure("digits, 40 steps", 40, "nll"), Figure("digits, 150 steps", 150, "nll")), digits=True,
        ),
        Task(
            "mnist", BATCHES, "784–32–10, 7,000 images, batches of 200", LARGE_MLP,
            (Figure("MNIST MLP, 30 steps", 30, "nll"), Figure("MNIST MLP, 100 steps", 100, "nll")), digits=True,
        ),
        Task(
            "mnist-cnn", BATCHES, "the paper's CNN, 7,000 images, batches of 150", LARGE_CNN,
            (Figure("MNIST CNN, 15 steps", 15, "nll"), Figure("MNIST CNN, 40 steps", 40, "nll")), digits=True,
        ),
    )
}  # fmt: skip


# --- the digits ---


@lru_cache(1)
def read_digits(path: Path | None) -> Digits:
    """From a folder with MNIST, or from a file that --export wrote."""
    if path is not None and path.is_file():
        import numpy as np

        with np.load(path) as held:
            return Digits(*(torch.tensor(held[name]) for name in Digits._fields[:-1]), str(held["source"]))
    mnist = paper_data.load_mnist(path)
    spread = torch.randperm(len(mnist.train_labels), generator=torch.Generator().manual_seed(0))
    chosen = spread[:MNIST_ROWS]
    pixels = mnist.train_images[spread] * paper_data.MNIST_STD + paper_data.MNIST_MEAN
    large, labels = (255 * pixels[:MNIST_ROWS, 0]).round().to(torch.uint8), mnist.train_labels[chosen]
    try:
        from sklearn import datasets

        x, y = datasets.load_digits(return_X_y=True)
        return Digits(torch.tensor(x).to(torch.uint8), torch.tensor(y).long(), large, labels, "scikit-learn, MNIST")
    except ImportError:
        others = slice(MNIST_ROWS, MNIST_ROWS + 1797)
        small = F.avg_pool2d(F.pad(pixels[others], (2, 2, 2, 2)), 4).flatten(1)  # (1797, 64)
        return Digits(small, mnist.train_labels[spread[others]], large, labels, "MNIST, for both")


def export(path: Path, data: Path | None) -> None:
    import numpy as np

    digits = read_digits(data)
    np.savez_compressed(path, **{k: v if isinstance(v, str) else v.numpy() for k, v in digits._asdict().items()})


# --- runs ---


class Job(NamedTuple):
    task: str
    policy: str
    seed: int


def run(job: Job, data: Path | None, shorter: float = 1.0) -> dict[str, Any]:
    """The scores at every look, of the averaged and of the last weights, and how the steps ended."""
    task, policy = TASKS[job.task], POLICIES[job.policy]
    torch.manual_seed(job.seed)
    posed = task.build(job.seed, read_digits(data) if task.digits else None)
    torch.manual_seed(job.seed)
    if policy.jitter:
        with torch.no_grad():
            for p in posed.model.parameters():
                p.mul_(1 + policy.jitter * torch.randn(p.shape, generator=torch.Generator().manual_seed(1)).to(p))
    looks: dict[int, list[int]] = {}  # by the step where they are; in a shorter run several may share one
    for look in sorted(task.looks):
        looks.setdefault(max(1, round(look * shorter)), []).append(look)
    scores: dict[str, dict[int, Scores]] = {"averaged": {}, "last": {}}
    rules: Counter[str] = Counter()
    careful, started = 0, time.process_time()
    with patched(policy.changes):
        opt = mq.LM(posed.model, posed.loss, capture=False, **posed.options, **policy.options)
        for k in range(1, max(looks) + 1):
            posed.before(opt, k)
            step = opt.step(*posed.batch(looks.get(k, [k])[-1]))
            rules[step.rule] += 1
            careful += "a careful step" in step.note
            if k in looks:
                scores["last"] |= dict.fromkeys(looks[k], posed.score(posed.model))
                with opt.averaged():
                    scores["averaged"] |= dict.fromkeys(looks[k], posed.score(posed.model))
    seconds = round(time.process_time() - started, 3)
    return {**job._asdict(), **scores, "rules": dict(rules), "careful": careful, "lam": opt.lam, "seconds": seconds}


def safely(job: Job, data: Path | None, shorter: float) -> dict[str, Any]:
    try:
        return run(job, data, shorter)
    except Exception as error:
        return {**job._asdict(), "failed": f"{type(error).__name__}: {error}"}


LIMITS: dict[str, float] = {}


def begin(deadline: float) -> None:
    torch.set_num_threads(1)
    LIMITS["deadline"] = deadline


def work(arguments: tuple[Job, Path | None, float]) -> dict[str, Any] | None:
    return None if time.time() > LIMITS["deadline"] else safely(*arguments)


def jobs(names: Sequence[str], policies: Sequence[str], seeds: int, first: int) -> Iterator[Job]:
    """Seed by seed, so that a run that is stopped has all policies of some seeds."""
    for round_ in range(seeds):
        for name in names:
            task = TASKS[name]
            for k in range(task.often):
                for policy in policies:
                    if task.kind in POLICIES[policy].kinds:
                        yield Job(name, policy, first + round_ * task.often + k)


def read(path: Path) -> dict[Job, dict[str, Any]]:
    lines = path.read_text("utf-8").splitlines() if path.exists() else []
    records = (json.loads(line) for line in lines if line.endswith("}"))  # the last one may have been cut short
    return {Job(r["task"], r["policy"], r["seed"]): r for r in records if "task" in r}


def experiment(options: argparse.Namespace) -> None:
    done = {job for job, r in read(options.out).items() if "failed" not in r}
    left = [j for j in jobs(options.tasks, options.policies, options.seeds, options.first) if j not in done]
    deadline, started = time.time() + 60 * options.minutes, time.perf_counter()
    os.environ |= {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    count, spent = 0, 0.0
    with (
        torch.multiprocessing.get_context("spawn").Pool(options.cores, begin, (deadline,)) as pool,
        options.out.open("a", encoding="utf-8") as out,
    ):
        described = measure.machine(CPU, options.commit) | {"cores used": options.cores}
        out.write(json.dumps({"machine": described}, ensure_ascii=False) + "\n")
        given = ((job, options.data, options.shorter) for job in left)
        for record in pool.imap_unordered(work, given):
            if record is None:
                continue
            out.write(json.dumps(record, ensure_ascii=False) + "\n")
            out.flush()
            count, spent = count + 1, spent + record.get("seconds", 0.0)
            if count % 200 == 0 or "failed" in record:
                took = time.perf_counter() - started
                said = f"{count} of {len(left)} runs, {spent:.0f} s of work in {took:.0f} s"
                measure.note(said + (f"; {record}" if "failed" in record else ""))
    measure.note(f"{count} of {len(left)} runs in {time.perf_counter() - started:.0f} s, {spent:.0f} s of work")


# --- the table ---


class Compared(NamedTuple):
    """One figure without a policy beside the default, seed by seed."""

    pairs: list[tuple[float, float]]  # without, with
    failed: str = ""

    @property
    def ratios(self) -> list[float]:
        return sorted(min(a, FINITE) / min(b, FINITE) for a, b in self.pairs)

    @property
    def alike(self) -> bool:
        return all(a == b for a, b in self.pairs)

    @property
    def interval(self) -> tuple[float, float]:
        """Of the median, from order statistics; ∞ where the seeds are too few for it."""
        ratios, k = self.ratios, order(len(self.pairs))
        return (ratios[k - 1], ratios[-k]) if k else (0.0, math.inf)

    @property
    def verdict(self) -> int:
        """1 if the policy is worth something, −1 if it does harm, 0 if neither can be told."""
        low, high = self.interval
        return 1 if low > 1 + SHOWN else -1 if high < 1 - SHOWN else 0

    def cell(self) -> str:
        if not self.pairs:
            return "failed" if self.failed else "–"
        if self.alike:
            return "="
        low, high = self.interval
        text = f"{short(statistics.median(self.ratios))} [{short(low)}, {short(high)}]"
        return f"**{text}**" if self.verdict else text

    def detailed(self) -> str:
        if not self.pairs or self.alike:
            return self.cell()
        without, default = (quartiles(column) for column in zip(*self.pairs, strict=True))
        worse = sum(a > b for a, b in self.pairs)
        return f"{self.cell()}; {without} / {default}; worse in {worse} of {len(self.pairs)}"


class Solved(Compared):
    """How many runs get there."""

    @property
    def verdict(self) -> int:
        """McNemar's exact test"""
        gained, lost = sum(a < b for a, b in self.pairs), sum(a > b for a, b in self.pairs)
        n, least = gained + lost, min(gained, lost)
        p = 2 * sum(math.comb(n, i) for i in range(least + 1)) / 2**n
        return 0 if p > 1 - COVERED else 1 if lost > gained else -1

    def cell(self) -> str:
        if not self.pairs:
            return super().cell()
        if self.alike:
            return "="
        there, default = (sum(value == 0 for value in column) for column in zip(*self.pairs, strict=True))
        text = f"{there} for {default} of {len(self.pairs)}"
        return f"**{text}**" if self.verdict else text

    detailed = cell


def order(n: int) -> int:
    """The largest k for which the k-th of n values from below and that from above cover the median; 0 for none."""
    k = 0
    while 2 * sum(math.comb(n, i) for i in range(k + 1)) / 2**n <= 1 - COVERED:
        k += 1
    return k


def short(value: float) -> str:
    if not 1e-3 <= abs(value) < 1e4:
        return "∞" if value > 1e15 else f"{value:.1g}" if value else "0"
    if value < 0.1:
        return f"{value:.2g}"
    return f"{value:.3f}" if 0.9 < value < 1.1 else f"{value:.2f}" if value < 10 else f"{value:.3g}"


def quartiles(values: Sequence[float]) -> str:
    if len(values) < 2:
        return f"{values[0]:.3g}"
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    return f"{middle:.3g} ({low:.3g} to {high:.3g})"


def value(record: dict[str, Any], figure: Figure, last: bool) -> float:
    found = record["last" if last or figure.last else "averaged"][str(figure.step)][figure.key]
    if math.isnan(found):
        found = math.inf
    return found if figure.solved is None else float(found > figure.solved)


def compared(records: dict[Job, dict[str, Any]], task: Task, policy: str, figure: Figure) -> Compared:
    """`LAST` is the default itself, judged by its last weights."""
    kind, last = (Compared if figure.solved is None else Solved), policy == LAST
    own = {j.seed: r for j, r in records.items() if (j.task, j.policy) == (task.name, DEFAULT if last else policy)}
    default = {j.seed: r for j, r in records.items() if (j.task, j.policy) == (task.name, DEFAULT)}
    failed = next((r["failed"] for r in own.values() if "failed" in r), "")
    both = [s for s in sorted(own.keys() & default.keys()) if "failed" not in own[s] and "failed" not in default[s]]
    return kind([(value(own[s], figure, last), value(default[s], figure, False)) for s in both], failed)


def tables(records: dict[Job, dict[str, Any]], details: bool) -> str:
    text = []
    for kind, title in ((SAME, "The same data"), (BATCHES, "Mini-batches")):
        held = {job.task for job in records}
        columns = [(t, f) for t in TASKS.values() if t.kind == kind and t.name in held for f in t.figures]
        if not columns:
            continue
        found = {
            (name, f): compared(records, t, name, f)
            for name in [*(n for n, p in POLICIES.items() if n != DEFAULT and kind in p.kinds), LAST]
            for t, f in columns
        }
        names = list(dict.fromkeys(name for name, _ in found))
        defaults = [compared(records, t, DEFAULT, f) for t, f in columns]
        absolute = ["default: median", "", *(middle(c) for c in defaults), ""]
        rows = [absolute]
        for name in names:
            cells = [found[name, f] for _, f in columns]
            told = [c.verdict for c in cells]
            score = f"{told.count(1)} / {told.count(-1)}"
            without = POLICIES[name].without if name in POLICIES else "last weights"
            rows.append([name, without, *(c.detailed() if details else c.cell() for c in cells), score])
        titles = [f"{f.title} ({len(c.pairs)})" for (_, f), c in zip(columns, defaults, strict=True)]
        head = ["without", "instead", *titles, "+ / −"]
        text += [f"### {title}", measure.markdown(head, rows)]
        text += [
            f"{t.name}: {t.what}; rules of the default: {ended(records, t.name)}"
            for t in TASKS.values()
            if t.kind == kind and t.name in held
        ]
    failures = {f"{j.task}, {j.policy}: {r['failed']}" for j, r in records.items() if "failed" in r}
    return "\n\n".join([*text, *sorted(failures)])


def middle(defaults: Compared) -> str:
    values = [b for _, b in defaults.pairs]
    if isinstance(defaults, Solved):
        return f"{values.count(0)} of {len(values)}"
    return quartiles(values) if values else "–"


def ended(records: dict[Job, dict[str, Any]], task: str) -> str:
    """How the steps of the default ended, in all runs"""
    total: Counter[str] = Counter()
    for job, r in records.items():
        if job.task == task and job.policy == DEFAULT and "rules" in r:
            total.update(r["rules"] | {"careful": r["careful"]})
    return ", ".join(f"{rule} {count:,}" for rule, count in total.most_common() if count)


# --- the command line ---


def arguments() -> argparse.Namespace:
    parser = measure.parser(__doc__)
    add = parser.add_argument
    add("--data", type=Path, default=paper_data.data_directory(), help="MNIST's folder, or what --export wrote")
    add("--export", type=Path, metavar="FILE", help="write the digits that are used into one file, and end")
    add("--out", type=Path, default=Path("ablation.jsonl"), help="results, which are added to (ablation.jsonl)")
    add("--table", type=Path, metavar="FILE", help="print the tables of these results, and end")
    add("--all", action="store_true", help="tables with medians and quartiles")
    add("--cores", type=measure.positive, default=os.cpu_count(), help="runs at a time, of one thread each")
    add("--minutes", type=float, default=math.inf, help="after which no run begins")
    add(
        "--seeds",
        type=measure.positive,
        default=20,
        help="of a task (20); the sine has twice, `moved` three times as many",
    )
    add("--first", type=int, default=FIRST_SEED, help=f"the first seed ({FIRST_SEED})")
    add("--tasks", nargs="+", choices=list(TASKS), default=list(TASKS))
    add("--policies", nargs="+", choices=list(POLICIES), default=list(POLICIES))
    return parser.parse_args()


def main() -> None:
    options = arguments()
    if options.table:
        print(tables(read(options.table), options.all))
        return
    if options.export:
        export(options.export, options.data)
        return
    options.policies = list(dict.fromkeys([DEFAULT, *options.policies]))
    options.shorter = 1.0
    if options.quick:
        options.seeds, options.shorter = 1, 0.05
    if any(TASKS[name].digits for name in options.tasks):
        try:
            measure.note(f"digits: {read_digits(options.data).source}")
        except FileNotFoundError as error:
            options.tasks = [name for name in options.tasks if not TASKS[name].digits]
            print(f"Without digits: {error}", file=sys.stderr)
    experiment(options)
    print(tables(read(options.out), options.all))


if __name__ == "__main__":
    main()
