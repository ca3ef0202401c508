"""LM in the hands of accelerate."""

from __future__ import annotations

import copy
import subprocess
import sys

import pytest
import torch
from accelerate import Accelerator
from accelerate.state import GradientState

import marquardt as mq
from support.cases import mlp
from support.steps import theta, trained
from support.unchanged import changes, progress, refused, same, world


@pytest.fixture(autouse=True)
def accelerator():
    yield Accelerator(cpu=True)
    Accelerator(cpu=True).state._reset_state(reset_partial_state=True)
    GradientState._reset_state()


def test_a_prepared_optimizer_steps_through_its_own(accelerator):
    model, x, y = mlp(2, 4, 3), torch.randn(9, 2), torch.randn(9, 3)
    twin = copy.deepcopy(model)
    plain = mq.LM(twin, "mse")
    opt = mq.LM(model, "mse")
    scheduler = torch.optim.lr_scheduler.StepLR(opt, step_size=1, gamma=0.5)
    model, prepared, scheduler = accelerator.prepare(model, opt, scheduler)
    rates = []
    for i in range(3):
        plain.param_groups[0]["lr"] = 0.5**i
        step = prepared.optimizer.step(x, y)
        assert step == plain.step(x, y)
        rates.append(step.lr)
        scheduler.step()
    assert rates == [1.0, 0.5, 0.25]
    assert same(theta(model), theta(twin))
    assert same(progress(prepared.state_dict()), progress(plain.state_dict()))


def test_accumulation_and_the_average_are_as_documented():
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=4)
    model, opt, x, y = trained()
    twin, other = copy.deepcopy((model, opt))
    model, prepared = accelerator.prepare(model, opt)
    for i in range(3):
        with accelerator.accumulate(model):
            assert prepared.optimizer.step(x, y + i) == other.step(x, y + i)
        assert same(theta(model), theta(twin))
    with prepared.optimizer.averaged(), other.averaged():
        assert same(theta(model), theta(twin))


def test_a_step_without_the_batch_names_the_way_out(accelerator):
    model, opt, _, _ = trained()
    prepared = accelerator.prepare(opt)
    before = world(model, opt)
    for ask in (prepared.step, lambda: prepared.step(lambda: 0.0)):
        with refused("step(inputs, targets)", "prepared.optimizer.step(inputs, targets)"):
            ask()
    assert changes(before, world(model, opt)) == []


def test_the_core_imports_no_trainer():
    packages = ["accelerate", "lightning", "peft", "pytorch_lightning", "transformers"]
    code = f"import sys; sys.modules.update(dict.fromkeys({packages})); import marquardt"  # importing one is an error
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert run.returncode == 0, run.stderr
