"""The models of benchmarks/models.py: a default step is taken on each, and what is measured is told."""

from __future__ import annotations

import math
import sys

import pytest
import torch

import marquardt as mq
import models
from brought import CASES
from models import Run

SMALL = [name for name in CASES if name != "bert"]  # the same model with fewer words is here


@pytest.mark.parametrize("name", SMALL)
def test_a_default_step(name):
    """Of the loss that Adam is given; Dropout draws the same in both."""
    case = CASES[name]
    model = models.built(case, 0)
    x, y = case.draw()
    with torch.random.fork_rng(), torch.no_grad():
        expected = case.value(models.called(model, x), y).item()
    opt = mq.LM(model, case.loss)
    step = opt.step(x, y)
    assert step.accepted
    assert step.loss == pytest.approx(expected, rel=1e-4)
    assert "Gram" in opt.plan


def test_steps_to_the_mark():
    run = Run(losses=[1.0, 0.5, 0.7], steps=[10, 20, 30], seconds=[1.0, 2.0, 3.0])
    assert run.best == 0.5
    assert run.reached(0.8) == (20, 2.0)
    assert run.reached(0.1) == (math.inf, math.inf)


def test_what_is_missing_is_named(monkeypatch, capsys):
    monkeypatch.setattr(models, "find_spec", lambda package: None)
    monkeypatch.setattr(sys, "argv", ["models.py", "--quick", "--untrained", "--only", "gcn, classes", "tied tokens"])
    models.main()
    told = capsys.readouterr().out
    assert "torch_geometric is not installed: its models are left out." in told
    assert "| tied tokens" in told
    assert "| gcn" not in told
