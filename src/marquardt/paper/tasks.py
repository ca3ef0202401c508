"""A problem as one run sees it: data, network, batches and what is evaluated."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from torch import Tensor, nn

from . import problems
from .data import Digits
from .plans import Run


class Task(NamedTuple):
    loss: str
    model: nn.Module
    batches: Callable[[], Iterator[tuple[Tensor, Tensor]]]
    evaluate: Callable[[], dict[str, float]]
    data: dict[str, Any]  # what a log says of it
    batch: int
    samples: tuple[Tensor, Tensor] | None = None  # of the sine, to draw it


def build(run: Run, data: Digits | None) -> Task:
    return _sine(run) if run.problem == "sine" else _digits(run, data)


def about(run: Run, data: Digits | None) -> dict[str, Any]:
    """What a log says of the data."""
    if run.problem == "sine":
        n = problems.SINE_POINTS
        return {"name": "sine", "train": n, "test": 0, "source": f"sin x + {problems.SINE_NOISE}·U(0, 1) at {n} points"}
    data = _trained_on(run, data)
    return {"name": data.name, "train": len(data.train_labels), "test": len(data.test_labels), "source": data.source}


def length(run: Run, data: dict[str, Any]) -> int:
    """The number of steps; of one pass over the data if the run says 0."""
    return run.steps or math.ceil(data["train"] / problems.BATCH)


def _trained_on(run: Run, data: Digits | None) -> Digits:
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
    digits = _trained_on(run, data).to(run.device)
    model = problems.cnn_for(digits)(run.seed, device=run.device)
    n = len(digits.train_labels)
    batch = min(problems.BATCH, n)
    seen = slice(0, min(run.train_sample, n))
    chunk = n if run.device.startswith("cuda") else problems.CHUNK

    def evaluate() -> dict[str, float]:
        train = problems.evaluate(model, digits.train_images[seen], digits.train_labels[seen], chunk)
        test = problems.evaluate(model, digits.test_images, digits.test_labels, chunk)
        return {
            "train_loss": train.loss, "train_accuracy": train.accuracy,
            "test_loss": test.loss, "test_accuracy": test.accuracy,
        }  # fmt: skip

    def batches() -> Iterator[tuple[Tensor, Tensor]]:
        for index in problems.batches(n, batch, run.seed):
            index = index.to(run.device)
            yield digits.train_images[index], digits.train_labels[index]

    return Task("cross_entropy", model, batches, evaluate, about(run, data), batch)
