"""Runs of a few steps for tests, and what their logs hold."""

import json
from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch

from marquardt.paper import runs
from marquardt.paper.data import Digits
from marquardt.paper.methods import Trainer, ablation

from .made_logs import METHODS

LABELS = {key: label for key, (label, _, _) in METHODS.items()}  # in the order of tables
ON_DIGITS = [key for key in LABELS if key not in ("newton", "bfgs")]
EVERY = [
    (experiment, method)
    for experiment, methods in [
        ("sine", LABELS), ("mnist", ON_DIGITS),
        ("ablation-sine", ablation("sine")), ("ablation-mnist", ablation("mnist")),
    ]
    for method in methods
]  # fmt: skip


def digits(train=60, test=30, side=8, **changes):
    generator = torch.Generator().manual_seed(0)

    def some(n):
        images = torch.randn(n, 1, side, side, generator=generator)
        return images, torch.randint(10, (n,), generator=generator)

    return replace(Digits(*some(train), *some(test), "digits", "made up for a test"), **changes)


def made(method="sgd", experiment="sine", steps=3, hyper=None, **options):
    """A run with default hyper-parameters, but for those given."""
    options = {"column": "default", "seed": 0, "train_sample": 20, **options}
    run = runs.Run(experiment, method, "", steps=steps, **options)
    return replace(run, label=run.spec().label, hyper={**run.spec().hyper(run.problem), **(hyper or {})})


def lines_of(path):
    def refuse(name):
        raise AssertionError(f"{name} in the log")

    lines = [json.loads(line, parse_constant=refuse) for line in path.read_text(encoding="utf-8").splitlines()]
    if lines and lines[-1]["kind"] == "end":
        assert len(lines[-1].pop("sha256")) == 64
    return lines


def steps_of(path):
    return [line for line in lines_of(path) if line["kind"] == "step"]


def train(run, out, data=None):
    """The lines of its steps; a method whose package is missing is skipped."""
    log = runs.execute(run, out, data)
    if log.status == "unavailable":
        pytest.skip(log.message)
    assert log.status in ("finished", "diverged"), log.message
    return steps_of(run.log(out))


class Still(Trainer):
    """Does nothing."""

    def __init__(self, model, loss, hyper):
        super().__init__(model)
        self.hyper = hyper

    def step(self, x, y):
        pass


@contextmanager
def room_for(size):
    """The system writes so many bytes of a file, and refuses the rest."""
    resource = pytest.importorskip("resource")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
