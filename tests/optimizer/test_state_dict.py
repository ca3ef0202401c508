"""What is saved resumes bit for bit in a new process, and foreign states are refused."""

from __future__ import annotations

import copy
import math
import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_unflatten

import marquardt as mq
from support.cases import default_dtype, mlp
from support.resuming import RUNS, advance, begin
from support.steps import MAX_MOMENTUM, lm, problem, state, trained, unharmed
from support.unchanged import same

pytestmark = pytest.mark.usefixtures("double")


# ---- resuming in a new process


@pytest.fixture(scope="module")
def resumed(tmp_path_factory) -> dict[tuple[str, str], tuple[Any, Any]]:
    """What each run became here and in the new process, one process for all."""
    folder, here = tmp_path_factory.mktemp("resume"), {}
    with default_dtype(torch.float64):
        for i, (name, dtype) in enumerate(RUNS):
            torch.manual_seed(0)
            model, opt = begin(name, dtype)
            advance(name, dtype, opt, 0, 5)
            if "rejected" in name:
                opt.param_groups[0]["lr"] = 1e3
            (step,) = advance(name, dtype, opt, 5, 6)
            assert not ("rejected" in name and step.accepted)
            opt.param_groups[0]["lr"] = 1.0
            saved = {"model": model.state_dict(), "optimizer": opt.state_dict(), "generator": torch.get_rng_state()}
            torch.save(saved, folder / f"{i}.before")
            advance(name, dtype, opt, 6, 11)
            here[name, dtype] = copy.deepcopy({"model": model.state_dict(), "optimizer": opt.state_dict()})
    command = "import sys; from support.resuming import resume; resume(*sys.argv[1:])"
    subprocess.run(
        [sys.executable, "-c", command, str(folder), str(torch.get_num_threads())],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)},
        check=True,
    )
    there = [torch.load(folder / f"{i}.after", weights_only=True) for i in range(len(RUNS))]
    return {run: (here[run], there[i]) for i, run in enumerate(RUNS)}


@pytest.mark.parametrize(("name", "dtype"), RUNS)
def test_resumes_bit_for_bit_in_a_new_process(resumed, name, dtype):
    here, there = resumed[name, dtype]
    assert {k: v for k, v in here["model"].items() if not same(v, there["model"][k])} == {}
    assert same(dict(here["optimizer"]["marquardt"]), dict(there["optimizer"]["marquardt"]))
    assert same(here["optimizer"], there["optimizer"])


def test_loading_brings_back_the_past():
    """And what was saved is a copy."""
    model, opt, x, y = trained()
    saved, weights = opt.state_dict(), copy.deepcopy(model.state_dict())
    kept = copy.deepcopy(saved)
    first = [opt.step(x, y) for _ in range(3)]
    model.load_state_dict(weights)
    opt.load_state_dict(saved)
    assert [opt.step(x, y) for _ in range(3)] == first
    assert same(saved, kept)


def test_state_of_another_precision():
    """A float32 checkpoint continued in float64."""
    model, opt, x, y = trained()
    single = copy.deepcopy(model).float()
    other = lm(single, **MAX_MOMENTUM, average=mq.EMA())
    for i in range(3):
        other.step(x.float(), (y + i).float())
    model.load_state_dict(single.state_dict())
    opt.load_state_dict(other.state_dict())
    assert math.isfinite(opt.step(x, y).new_loss)
    with opt.averaged():
        assert all(p.dtype == torch.float64 for p in model.parameters())


def test_model_moved_to_another_precision():
    model, opt, x, y = trained()
    model.float()
    assert math.isfinite(opt.step(x.float(), y.float()).new_loss)


# ---- loaded states


Edit = Callable[[dict[str, Any]], Any]


def edited(**entries: Any) -> Edit:
    return lambda saved: saved["marquardt"].update(entries)


def nan_in(key: str) -> Edit:
    def spoilt(t: Any) -> Any:
        return torch.where(torch.arange(t.numel()).view(t.shape) == 0, math.nan, t) if isinstance(t, Tensor) else t

    return lambda saved: saved["marquardt"].update({key: tree_map(spoilt, saved["marquardt"][key])})


def without(key: str, *way: Any) -> Edit:
    return lambda saved: within(saved, *way).pop(key)


def other(make: Callable[[], dict[str, Any]]) -> Edit:
    return lambda saved: (found := make(), saved.clear(), saved.update(found))


def planned(*way: str, **entries: Any) -> Edit:
    def edit(saved: dict[str, Any]) -> None:
        plan = within(saved, "marquardt", "plan", *way)
        assert entries.keys() <= plan.keys()
        plan.update(entries)

    return edit


def within(saved: Any, *way: Any) -> Any:
    for name in way:
        saved = saved[name]
    return saved


def adam() -> dict[str, Any]:
    return torch.optim.Adam(mlp(2, 4, 3).parameters()).state_dict()


HUGE = 10**5000  # of which Python prints no digits

STATES: dict[str, tuple[Any, list[str]]] = {
    "of Adam": (
        other(adam), ["marquardt", "weights alone, model.load_state_dict", "ckpt_path=", "resume_from_checkpoint="],
    ),
    "empty": (other(dict), ["marquardt"]),
    "of a wider model": (other(lambda: trained((2, 7, 3))[1].state_dict()), ["45", "27"]),
    "of a deeper model": (other(lambda: trained((2, 4, 4, 3))[1].state_dict()), ["parameter"]),
    "λ NaN": (edited(lam=math.nan), ["'lam'", "nan"]),
    "λ infinite": (edited(lam=math.inf), ["'lam'", "inf"]),
    "λ negative": (edited(lam=-1.0), ["λ = -1.0"]),
    "λ zero": (edited(lam=0.0), ["λ = 0.0", "TenFold", "positive"]),
    "λ a string": (edited(lam="1"), ["'lam'", "'1'"]),
    "λ missing": (without("lam", "marquardt"), ["'lam'"]),
    "an unknown entry": (edited(temperature=1.0), ["'temperature'", "newer"]),
    "steps negative": (edited(steps=-1), ["'steps'", "-1"]),
    "accepted negative": (edited(accepted=-2), ["'accepted'", "-2"]),
    "steps half": (edited(steps=2.5), ["'steps'", "2.5", "integer"]),
    "best NaN": (edited(best=math.nan), ["'best'", "nan"]),
    "expected NaN": (edited(expected=math.nan), ["'expected'", "nan"]),
    "NaN in D": (nan_in("D"), ["damping D", "NaN"]),
    "NaN in previous": (nan_in("previous"), ["'previous'", "NaN"]),
    "NaN in mean": (nan_in("mean"), ["'mean'", "NaN"]),
    "NaN in past": (nan_in("past"), ["'past'", "NaN"]),
    "mean a list": (edited(mean=[1.0]), ["'mean'", "list"]),
    "past a list": (edited(past=[1.0]), ["'past'", "list"]),
    "D a number": (edited(D=1.0), ["D"]),
    "no dict": (lambda state: state.update(marquardt=[1.0]), ["'marquardt'", "list"]),
    "no groups": (without("param_groups"), ["'param_groups'"]),
    "no state": (without("state"), ["'state'"]),
    "no lr": (without("lr", "param_groups", 0), ["'lr'"]),
    "lr NaN": (lambda state: state["param_groups"][0].update(lr=math.nan), ["lr=nan"]),
    "steps of many digits": (edited(steps=HUGE), ["'steps'", "digits"]),
    "λ of many digits": (edited(lam=HUGE), ["'lam'", "digits"]),
    "a version of many digits": (edited(version=HUGE), ["version", "digits"]),
}  # fmt: skip
PLANS: dict[str, tuple[Any, list[str]]] = {
    "no memory for a plan": (planned(budget=0), ["the plan", "bytes of a budget of 0", "earlier"]),
    "too little memory for a plan": (planned(budget=1000), ["the plan", "bytes of a budget of 1,000"]),
    "a plan of more bytes than its memory": (planned(bytes=2**53), ["the plan", "bytes of a budget of"]),
    "a plan of more rows than there are": (planned(sampled=10**9), ["the plan", "draws 1,000,000,000 of 3 rows"]),
    "a plan for NaN bytes": (planned(budget=math.nan), ["'budget'", "nan"]),
    "others beyond all parameters": (planned("shapes", others=10**6), ["the plan", "1,000,000 others of 27"]),
    "others half": (planned("shapes", others=0.5), ["'others'", "0.5"]),
    "others negative": (planned("shapes", others=-1), ["'others'", "-1"]),
    "others of many digits": (planned("shapes", others=HUGE), ["'others'", "digits"]),
    "others a list": (planned("shapes", others=[1]), ["'others'", "[1]"]),
    "no samples": (planned("shapes", N=0), ["shapes", "N is 0"]),
    "no rows": (planned("shapes", R=0), ["shapes", "R is 0"]),
    "numbers of no bytes": (planned("shapes", itemsize=0), ["shapes", "itemsize is 0"]),
    "another number of parameters": (planned("shapes", n=5), ["for 5 parameters"]),
}


@pytest.mark.parametrize("case", [*STATES, *PLANS])
def test_state_that_is_refused(case):
    edit, says = (STATES | PLANS)[case]
    model, opt, x, y = trained(curvature=mq.Auto() if case in PLANS else mq.Dense(inertia=0.5))
    saved = opt.state_dict()
    edit(saved)
    with unharmed(model, opt, *says):
        opt.load_state_dict(saved)
    assert math.isfinite(opt.step(x, y).loss)


def mixed(item: Any, of: int, dtype: torch.dtype) -> Any:
    """With one of its tensors in another precision"""
    leaves, spec = tree_flatten(item)
    tensors = [i for i, t in enumerate(leaves) if isinstance(t, Tensor)]
    i = tensors[of % len(tensors)]
    leaves[i] = leaves[i].to(dtype)
    return tree_unflatten(leaves, spec)


DAMPINGS = {
    "default": {}, "max": {"damping": mq.MaxDiagonal()}, "factored max": {"damping": mq.FactoredMaxDiagonal()},
    "by layers": {"damping": mq.LayerMeanEigenvalue()},
    "every step": {"damping": mq.KroneckerMetric(every=1, steady=None)},
}  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("damping", DAMPINGS)
def test_a_tensor_of_the_damping_in_another_precision(damping, dtype):
    """All of D is brought to the finest one, and the steps go on: as they were, if nothing was lost."""
    coarser = {torch.float32: [torch.float64, torch.bfloat16, torch.float16], torch.float64: [torch.float32]}[dtype]
    torch.manual_seed(0)
    model, opt = (m := mlp(2, 4, 3).to(dtype)), mq.LM(m, "mse", **DAMPINGS[damping])
    data = [(torch.randn(8, 2, dtype=dtype), torch.randn(8, 3, dtype=dtype)) for _ in range(6)]
    for x, y in data[:4]:
        opt.step(x, y)
    weights, state = copy.deepcopy(model.state_dict()), opt.state_dict()

    def continued(state: dict[str, Any]) -> list[float]:
        model.load_state_dict(weights)
        opt = mq.LM(model, "mse", **DAMPINGS[damping])
        opt.load_state_dict(state)
        return [opt.step(x, y).new_loss for x, y in data[4:]]

    expected = continued(state)
    many = sum(isinstance(t, Tensor) for t in tree_leaves(state["marquardt"]["D"]))
    for i in range(many):
        for other in coarser:
            changed = copy.deepcopy(state)
            changed["marquardt"]["D"] = mixed(changed["marquardt"]["D"], i, other)
            found = continued(changed)
            assert found == expected if other == torch.float64 else found == pytest.approx(expected, rel=0.5)


@pytest.mark.parametrize("damping", DAMPINGS)
def test_a_model_in_another_precision_after_loading(damping):
    """What was saved in float64 is kept until the model has that precision too."""
    torch.manual_seed(0)
    data = [(torch.randn(8, 2), torch.randn(8, 3)) for _ in range(5)]
    model, opt = (m := mlp(2, 4, 3)), mq.LM(m, "mse", **DAMPINGS[damping])
    for x, y in data[:4]:
        opt.step(x, y)
    single = copy.deepcopy(model).float()
    other = mq.LM(single, "mse", **DAMPINGS[damping])
    other.load_state_dict(opt.state_dict())
    single.double().load_state_dict(model.state_dict())
    assert other.step(*data[4]) == opt.step(*data[4])


def test_entries_with_a_default_may_be_missing():
    """A state of an earlier version."""
    _, opt, x, y = trained()
    saved = opt.state_dict()
    defaults = {"repeats": 0, "best": math.inf, "expected": None, "most_rows": 0, "past": None}
    for key in defaults:
        del saved["marquardt"][key]
    opt.load_state_dict(saved)
    assert same(state(opt), {key: defaults.get(key, value) for key, value in state(opt).items()})
    assert math.isfinite(opt.step(x, y).loss)


def test_lambda_zero_where_the_schedule_has_it():
    model, x, y = problem()
    opt = lm(model, schedule=mq.Constant(0.0))
    opt.step(x, y)
    lm(model, schedule=mq.Constant(1.0)).load_state_dict(opt.state_dict())
