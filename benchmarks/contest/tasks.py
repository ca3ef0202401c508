"""What is learnt: each task builds a model and its data from a seed, without a network and the same on every device.

Half of the tasks are for choices: their validation data may decide on defaults. The others are for the report.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import physics
from marquardt.paper import data as paper_data
from marquardt.paper import problems

from . import functions, series, tokens

SCORED = 2000  # rows for the training loss, which is only reported
CHUNK = 2500  # samples of a forward pass if a model is scored
VALIDATION_DIGITS = 5000  # the last of MNIST's training set

CHOICE, REPORT = "choice", "report"
SHORT, LONG = (10.0,), (10.0, 60.0)  # seconds


class Unavailable(RuntimeError):
    """The data of this task are not here."""


class Rows(NamedTuple):
    x: Any  # a tensor, or a tuple of them as the model takes it
    y: Tensor | None


class Setup(NamedTuple):
    """What holds for all cells of a run."""

    mnist: Path | None = None  # its folder
    tables: Path | None = None  # what --export-tables wrote; without it scikit-learn is asked
    eager: bool = False  # no CUDA graphs for LM's rivals


class Score(NamedTuple):
    loss: float  # on training rows
    validation: float
    test: float


@dataclass(eq=False)
class Problem:
    """A model at its first weights, and its data."""

    model: nn.Module
    train: Rows
    scores: Callable[[nn.Module], Score]
    source: str = "made from the seed"
    loss: str = "mse"
    batch: int | None = None
    graphs: bool = False  # whether a step may be recorded in a CUDA graph

    @property
    def n(self) -> int:
        return sum(p.numel() for p in self.model.parameters())


@dataclass(frozen=True)
class Task:
    name: str
    use: str  # CHOICE or REPORT
    what: str
    build: Callable[[int, Setup], Problem]
    loss: str = "mse"
    batch: int | None = None  # all rows in every step
    dtype: torch.dtype = torch.float64
    budgets: tuple[float, ...] = LONG
    metric: str = "RMSE/deviation"

    def problem(self, seed: int, setup: Setup, device: torch.device) -> Problem:
        """Drawn on the CPU; the RNG is left at the seed."""
        torch.manual_seed(seed)
        found = self.build(seed, setup)
        found.loss, found.batch, found.graphs = self.loss, self.batch, device.type == "cuda" and not setup.eager
        found.model.to(device, self.dtype)
        found.train = Rows(*(on(part, device, self.dtype) for part in found.train))
        torch.manual_seed(seed)
        return found


def on(item: Any, device: torch.device, dtype: torch.dtype) -> Any:
    if isinstance(item, tuple):
        return tuple(on(part, device, dtype) for part in item)
    if item is None:
        return None
    return item.to(device, dtype if item.is_floating_point() else item.dtype)


def mlp(*sizes: int) -> nn.Sequential:
    layers: list[nn.Module] = []
    for i, o in pairwise(sizes):
        layers += [nn.Linear(i, o), nn.Tanh()]
    return nn.Sequential(*layers[:-1])


# --- scores ---


@dataclass(frozen=True, eq=False)
class Scored:
    """Root mean square relative to the deviation of the targets, or the share of wrong classes."""

    train: Rows
    validation: Rows
    test: Rows
    classes: bool = False
    moved: dict[Any, tuple[Rows, ...]] = field(default_factory=dict)

    def __call__(self, model: nn.Module) -> Score:
        at = next(model.parameters())
        train, validation, test = self.rows(at.device, at.dtype)
        z = problems.predict(model, train.x, CHUNK)
        loss = (F.cross_entropy if self.classes else F.mse_loss)(z, train.y)
        return Score(float(loss), self.error(model, validation), self.error(model, test))

    def rows(self, device: torch.device, dtype: torch.dtype) -> tuple[Rows, ...]:
        if device not in self.moved:
            first = Rows(self.train.x[:SCORED], self.train.y[:SCORED])
            kept = (first, self.validation, self.test)
            self.moved[device] = tuple(Rows(on(r.x, device, dtype), on(r.y, device, dtype)) for r in kept)
        return self.moved[device]

    def error(self, model: nn.Module, rows: Rows) -> float:
        z = problems.predict(model, rows.x, CHUNK)
        if self.classes:
            return float((z.argmax(1) != rows.y).double().mean())
        return float(((z - rows.y).square().mean(0).sqrt() / rows.y.std(0)).mean())


def supervised(model: nn.Module, train: Rows, validation: Rows, test: Rows, **more: Any) -> Problem:
    return Problem(model, train, Scored(train, validation, test, **more))


# --- smooth functions ---


def smooth(function: functions.Function, rows: int, *hidden: int, noise: float = 0.0) -> Callable[..., Problem]:
    """Inputs in [−1, 1], targets of mean 0 and deviation 1; noise as a share of that deviation.

    Training and validation targets are noisy, those of the test are the function itself.
    """

    def build(seed: int, _: Setup) -> Problem:
        sizes = {"train": rows, "validation": max(500, rows // 5), "test": 5000}
        drawn = {name: torch.rand(size, function.inputs, dtype=torch.float64) for name, size in sizes.items()}
        values = {name: function(x) for name, x in drawn.items()}  # (N, outputs)
        mean, deviation = values["train"].mean(0), values["train"].std(0)

        def made(name: str) -> Rows:
            y = (values[name] - mean) / deviation
            if name != "test":
                y = y + noise * torch.randn(y.shape, dtype=torch.float64)
            return Rows(2 * drawn[name] - 1, y)

        outputs = values["train"].shape[1]
        return supervised(mlp(function.inputs, *hidden, outputs), made("train"), made("validation"), made("test"))

    return build


# --- a time series ---


def mackey_glass(model: Callable[[], nn.Module], delays: int, apart: int, rows: int) -> Callable[..., Problem]:
    """x(t + 6) from x(t), x(t − apart), …; training, validation and test follow each other in time."""

    def build(seed: int, _: Setup) -> Problem:
        x, y = series.embedded(series.mackey_glass(seed), delays, apart, ahead=6)
        first, second = rows, rows + 500
        parts = [slice(first), slice(first, second), slice(second, second + 1000)]
        return supervised(model(), *(Rows(x[part], y[part]) for part in parts))

    return build


class Recurrent(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.cell, self.head = nn.GRU(1, width, batch_first=True), nn.Linear(width, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.cell(x.unsqueeze(-1))[0][:, -1])


# --- physics ---


def pinn(name: str) -> Callable[..., Problem]:
    """The problems of benchmarks/physics.py. Validation is the root mean square of the residuals at other points."""

    def build(seed: int, _: Setup) -> Problem:
        model, points = physics.draw(name, seed, physics.WEIGHTS[name])
        _, others = physics.draw(name, seed + 500_000, physics.WEIGHTS[name])

        def scores(model: nn.Module) -> Score:
            at = next(model.parameters())
            own, fresh = (on(p, at.device, at.dtype) for p in (points, others))
            losses = [float(model(*p).detach().square().mean()) for p in (own, fresh)]
            return Score(losses[0], math.sqrt(losses[1]), model.error())

        return Problem(model, Rows(points, None), scores)

    return build


# --- tables ---

TABLES = {"diabetes": "load_diabetes", "digits": "load_digits", "cancer": "load_breast_cancer"}


def read_table(name: str, setup: Setup) -> tuple[Tensor, Tensor, str]:
    if setup.tables is not None:
        import numpy as np

        with np.load(setup.tables) as held:
            return torch.tensor(held[f"{name}_x"]), torch.tensor(held[f"{name}_y"]), f"{setup.tables.name}"
    try:
        import sklearn
        from sklearn import datasets
    except ImportError as error:
        raise Unavailable(
            f"{name}: needs scikit-learn, or --tables with what --export-tables wrote elsewhere ({error})"
        ) from error
    x, y = getattr(datasets, TABLES[name])(return_X_y=True)
    return torch.tensor(x), torch.tensor(y), f"scikit-learn {sklearn.__version__}"


def export_tables(path: Path) -> None:
    import numpy as np

    held = {}
    for name in TABLES:
        x, y, _ = read_table(name, Setup())
        held |= {f"{name}_x": x.numpy(), f"{name}_y": y.numpy()}
    np.savez_compressed(path, **held)


def table(name: str, *hidden: int, classes: int = 0) -> Callable[..., Problem]:
    """60 % of the rows for training, 20 % for validation, 20 % for the test, in an order of the seed's."""

    def build(seed: int, setup: Setup) -> Problem:
        x, y, source = read_table(name, setup)
        order = torch.randperm(len(x))
        x, y = x[order].double(), y[order]
        first, second = int(0.6 * len(x)), int(0.8 * len(x))
        x = (x - x[:first].mean(0)) / x[:first].std(0).clamp(min=1e-8)
        y = y.long() if classes else ((y - y[:first].mean()) / y[:first].std()).double().unsqueeze(1)
        parts = [slice(first), slice(first, second), slice(second, None)]
        model = mlp(x.shape[1], *hidden, classes or 1)
        found = supervised(model, *(Rows(x[part], y[part]) for part in parts), classes=bool(classes))
        found.source = source
        return found

    return build


# --- images ---


@lru_cache(1)
def read_mnist(folder: Path | None) -> paper_data.Digits:
    try:
        return paper_data.load_mnist(folder)
    except FileNotFoundError as error:
        raise Unavailable(str(error)) from error


def mnist(model: Callable[[int], nn.Module]) -> Callable[..., Problem]:
    def build(seed: int, setup: Setup) -> Problem:
        digits = read_mnist(setup.mnist)
        images, labels = digits.train_images, digits.train_labels
        first = len(labels) - min(VALIDATION_DIGITS, len(labels) // 6)
        train, validation = Rows(images[:first], labels[:first]), Rows(images[first:], labels[first:])
        found = supervised(model(seed), train, validation, Rows(digits.test_images, digits.test_labels), classes=True)
        found.source = digits.source
        return found

    return build


def groupnorm_cnn(_: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1), nn.GroupNorm(4, 16), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 3, padding=1), nn.GroupNorm(4, 32), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(32, 64, 3, padding=1), nn.GroupNorm(4, 64), nn.ReLU(), nn.AdaptiveAvgPool2d(2),
        nn.Flatten(), nn.Linear(256, 10),
    )  # fmt: skip


def flat_mlp(*sizes: int) -> nn.Sequential:
    return nn.Sequential(nn.Flatten(), *mlp(*sizes))


# --- tokens ---


def sums(width: int) -> Callable[..., Problem]:
    def build(seed: int, _: Setup) -> Problem:
        x, y = tokens.sums()
        order = torch.randperm(len(x))
        x, y = x[order], y[order]
        parts = [slice(5000), slice(5000, 6000), slice(6000, None)]
        return supervised(tokens.Mixer(width), *(Rows(x[part], y[part]) for part in parts), classes=True)

    return build


# --- all of them ---

CLASSES: dict[str, Any] = {"loss": "cross_entropy", "dtype": torch.float32, "budgets": SHORT, "metric": "error rate"}
FLAT = 28 * 28

TASKS: dict[str, Task] = {
    task.name: task
    for task in (
        Task(
            "peaks-noisy", CHOICE, "peaks, 2-D, 10 % noise, 2–25–1, 400 rows",
            smooth(functions.PEAKS, 400, 25, noise=0.1),
        ),
        Task("borehole", CHOICE, "borehole, 8-D, 8–32–32–1, 2,000 rows", smooth(functions.BOREHOLE, 2000, 32, 32)),
        Task(
            "rosenbrock", CHOICE, "Rosenbrock, 4-D, 4–32–32–1, 2,000 rows",
            smooth(functions.ROSENBROCK, 2000, 32, 32),
        ),
        Task(
            "circuit", CHOICE, "OTL circuit, 6-D, 6–128–128–1, 50,000 rows, batches of 1,000",
            smooth(functions.CIRCUIT, 50_000, 128, 128), batch=1000,
        ),
        Task(
            "mackey-mlp", CHOICE, "Mackey–Glass, four delays, 4–20–20–1, 1,500 rows",
            mackey_glass(lambda: mlp(4, 20, 20, 1), 4, 6, 1500),
        ),
        Task("poisson", CHOICE, "Poisson's equation, 2–32–32–1", pinn("poisson"), "residual", metric="relative L2"),
        Task(
            "diabetes", CHOICE, "scikit-learn's diabetes, 10–10–1, 265 rows",
            table("diabetes", 10), budgets=SHORT,
        ),
        Task(
            "digits", CHOICE, "scikit-learn's digits, 64–32–10, 1,078 rows",
            table("digits", 32, classes=10), **CLASSES,
        ),
        Task(
            "mnist-cnn", CHOICE, "MNIST, the paper's CNN, batches of 600",
            mnist(problems.mnist_cnn), batch=600, **CLASSES,
        ),
        Task(
            "mnist-mlp", CHOICE, "MNIST, tanh 784–128–64–10, batches of 600",
            mnist(lambda _: flat_mlp(FLAT, 128, 64, 10)), batch=600, **CLASSES,
        ),
        Task("franke", REPORT, "Franke, 2-D, 2–20–20–1, 1,000 rows", smooth(functions.FRANKE, 1000, 20, 20)),
        Task("robot-arm", REPORT, "robot arm, 8-D, 8–48–48–1, 3,000 rows", smooth(functions.ROBOT_ARM, 3000, 48, 48)),
        Task(
            "friedman-noisy", REPORT, "Friedman, 10-D, 20 % noise, 10–10–10–1, 1,000 rows",
            smooth(functions.FRIEDMAN, 1000, 10, 10, noise=0.2),
        ),
        Task(
            "oscillator", REPORT, "a driven oscillator, 4-D, 3 outputs, 4–32–32–3, 2,000 rows",
            smooth(functions.OSCILLATOR, 2000, 32, 32),
        ),
        Task(
            "piston-noisy", REPORT, "piston, 7-D, 5 % noise, 7–64–64–1, 20,000 rows, batches of 1,000",
            smooth(functions.PISTON, 20_000, 64, 64, noise=0.05), batch=1000,
        ),
        Task(
            "mackey-gru", REPORT, "Mackey–Glass, GRU of 16 over 20 values, 1,000 rows",
            mackey_glass(lambda: Recurrent(16), 20, 2, 1000),
        ),
        Task("heat", REPORT, "heat equation, 2–32–32–1", pinn("heat"), "residual", metric="relative L2"),
        Task(
            "cancer", REPORT, "scikit-learn's breast cancer, 30–10–2, 341 rows",
            table("cancer", 10, classes=2), **CLASSES,
        ),
        Task(
            "mnist-wide", REPORT, "MNIST, tanh 784–1024–1024–10, batches of 600",
            mnist(lambda _: flat_mlp(FLAT, 1024, 1024, 10)), batch=600, **CLASSES,
        ),
        Task(
            "mnist-groupnorm", REPORT, "MNIST, CNN 16–32–64 with GroupNorm, batches of 600",
            mnist(groupnorm_cnn), batch=600, **CLASSES,
        ),
        Task(
            "sums", REPORT, "digits of a sum from its characters, attention of width 48, batches of 500",
            sums(48), batch=500, **CLASSES,
        ),
    )
}  # fmt: skip
