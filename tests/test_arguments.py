"""Checks of what LM is given that whole steps do not show (optimizer/test_bad_input.py), and parts in words."""

from __future__ import annotations

import warnings
from contextlib import nullcontext
from dataclasses import dataclass, field

import pytest
import torch
from torch import nn

import marquardt as mq
from marquardt.arguments import brief, check_part, check_rate, check_ready, check_sums
from marquardt.ranks import ALONE

PARTS = {
    "curvature": mq.Dense(),
    "rows": mq.Exact(),
    "damping": mq.Identity(),
    "schedule": mq.Constant(),
    "momentum": mq.AdaptiveMomentum(),
    "acceptance": mq.Uphill(),
    "line_search": mq.Grid(),
    "average": mq.EMA(),
}


@pytest.mark.parametrize("name", PARTS)
def test_a_part_in_the_place_of_another(name):
    """Each is taken in its own place, and refused by name in those of the others, if it is no such part."""
    check_part(name, PARTS[name])
    for other, part in PARTS.items():
        if other != name:
            with pytest.raises(TypeError, match=f"{name}=.*pass for example mq"):
                check_part(name, part)
    with pytest.raises(TypeError, match=rf"{name}=(\w+) is a class: pass an object of it, \1\(\)"):
        check_part(name, type(PARTS[name]))
    optional = name in ("rows", "momentum", "line_search", "average")
    with nullcontext() if optional else pytest.raises(TypeError, match=f"{name}=None"):
        check_part(name, None)


@pytest.mark.parametrize("name", ["curvature", "rows"])
def test_what_has_the_method_but_not_the_defaults(name):
    """These two are derived from: a lookalike would fail in the middle of a step."""

    class Lookalike:
        represent = draw = None

    with pytest.raises(TypeError, match=f"{name}="):
        check_part(name, Lookalike())


@pytest.mark.parametrize("lr", [0, 1, torch.tensor(0.5), torch.tensor(-1.0), torch.tensor(float("nan")), -1])
def test_rates(lr):
    with nullcontext() if lr >= 0 else pytest.raises(ValueError, match="lr="):
        check_rate(lr)


def test_several_batches_for_a_representation_that_needs_all_rows():
    check_sums(mq.Gram(), True, ALONE)
    check_sums(mq.Dense(), False, ALONE)
    with pytest.raises(ValueError, match=r"Gram needs all rows.*mq\.Dense\(\)"):
        check_sums(mq.Gram(), False, ALONE)


def test_brief():
    """Only the options that are not their defaults; a tensor is compared with nothing."""

    @dataclass(frozen=True)
    class Mine:
        weight: torch.Tensor = torch.zeros(2)
        names: list[str] = field(default_factory=list)

    assert brief(mq.Dense()) == "Dense()"
    assert brief(mq.Dense(chunk=3)) == "Dense(chunk=3)"
    assert brief(None) == "None"
    assert brief(Mine(torch.ones(2), ["a"])) == "Mine(weight=tensor([1., 1.]), names=['a'])"


def ready(model: nn.Module, params=None, **changed):
    known = {"lr": 1.0, "by_sample": True, "averaged": False}
    check_ready(model, list(model.parameters()) if params is None else params, **{**known, **changed})


def test_ready():
    ready(nn.Linear(2, 1))
    coupled = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    ready(coupled, by_sample=False)
    with pytest.raises(ValueError, match="BatchNorm1d"):
        ready(coupled)
    with pytest.raises(RuntimeError, match="averaged"):
        ready(nn.Linear(2, 1), averaged=True)
    with pytest.raises(ValueError, match="lr=-1"):
        ready(nn.Linear(2, 1), lr=-1)
    with torch.inference_mode(), pytest.raises(RuntimeError, match="inference_mode"):
        ready(nn.Linear(2, 1))


def test_parameters_that_are_no_longer_those_of_the_model():
    model = nn.Linear(2, 1)
    params = list(model.parameters())
    model.weight = nn.Parameter(torch.zeros(1, 2))
    with pytest.raises(ValueError, match="replaced"):
        ready(model, params)
    model = nn.Linear(2, 1)
    model.bias.requires_grad_(False)
    ready(model, [model.weight])
    with pytest.raises(ValueError, match="'bias' was frozen"):
        ready(model)


MAKES = {
    "LM": lambda model, lr: mq.LM(model, "mse", lr=lr),
    "a preset": lambda model, lr: mq.presets.paper(model, "mse", lr=lr),
    "groups": lambda model, lr: mq.LM(model, "mse", params=[{"params": [p], "lr": lr} for p in model.parameters()]),
    "fit": lambda model, lr: mq.fit(model, (torch.randn(5, 2), torch.randn(5, 1)), "mse", lr=lr, steps=1),
}


@pytest.mark.parametrize("make", MAKES.values(), ids=MAKES)
def test_a_learning_rate_of_first_order_methods_is_told(make):
    """1e-3 is the habit from Adam; here it is a thousandth of every step."""
    with pytest.warns(UserWarning, match="lr=0.001 makes every step 1e.03 times shorter.*leave lr at 1") as told:
        make(nn.Linear(2, 1), 1e-3)
    assert [w.filename for w in told if "lr=" in str(w.message)] == [__file__]


@pytest.mark.parametrize("make", MAKES.values(), ids=MAKES)
def test_learning_rates_without_a_word(make):
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="lr=")
        for lr in (1, 0.05, 0.0):
            make(nn.Linear(2, 1), lr)


def test_schedulers_may_go_as_low_as_they_like():
    """A warm-up begins with 0, and annealing ends there."""
    model, x, y = nn.Linear(2, 1), torch.randn(5, 2), torch.randn(5, 1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        opt = mq.LM(model, "mse")
        scheduler = torch.optim.lr_scheduler.LambdaLR(opt, lambda k: k * 1e-3)
        for _ in range(3):
            opt.step(x, y)
            scheduler.step()
    assert opt.lr == pytest.approx(3e-3)
