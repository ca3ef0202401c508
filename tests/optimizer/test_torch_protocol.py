"""What torch.optim.Optimizer promises: copies, schedulers, hooks, gradients; and what is printed."""

from __future__ import annotations

import copy
import pickle
import re
import warnings
from typing import Any

import pytest
import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

import marquardt as mq
from marquardt.losses import CrossEntropy
from support.cases import mlp
from support.steps import lm, problem, theta, trained
from support.unchanged import changes, same, world

pytestmark = pytest.mark.usefixtures("double")


# ---- what torch.optim.Optimizer promises


def test_is_an_optimizer():
    model, _, _ = problem()
    opt = lm(model)
    assert isinstance(opt, torch.optim.Optimizer)
    assert len(opt.param_groups) == 1
    assert [id(p) for p in opt.param_groups[0]["params"]] == [id(p) for p in model.parameters()]
    assert "LM" in repr(opt)


def pickled(these: Any) -> Any:
    return pickle.loads(pickle.dumps(these))


COPIES = pytest.mark.parametrize("copied", [copy.deepcopy, pickled])


@COPIES
@pytest.mark.parametrize("started", [False, True], ids=["fresh", "started"])
def test_copies_go_their_own_way(copied, started):
    model, opt, x, y = trained()
    if not started:
        opt = lm(model)
    other_model, other = copied((model, opt))
    assert other.model is other_model
    assert other.params[0] is next(other_model.parameters())
    before = world(model, opt)
    steps = [other.step(x, y) for _ in range(3)]
    assert changes(before, world(model, opt)) == []
    assert [opt.step(x, y) for _ in range(3)] == steps
    assert same(model.state_dict(), other_model.state_dict())


@COPIES
def test_copies_with_a_scheduler(copied):
    model, x, y = problem()
    opt = lm(model)
    scheduler = torch.optim.lr_scheduler.StepLR(opt, step_size=2, gamma=0.5)
    opt.step(x, y)
    scheduler.step()
    runs = []
    for one, o, s in (copied((model, opt, scheduler)), (model, opt, scheduler)):
        steps = []
        for _ in range(4):
            steps.append(o.step(x, y))
            s.step()
        runs.append((steps, theta(one)))
    assert same(runs[0][1], runs[1][1])
    assert runs[0][0] == runs[1][0]
    assert [s.lr for s in runs[0][0]] == [1.0, 0.5, 0.5, 0.25]


def test_pickling_leaves_hooks_behind():
    """As torch's optimizers do: a hook is often a lambda, which cannot be pickled."""
    model, x, y = problem()
    opt = lm(model)
    opt.register_step_post_hook(lambda *_: None)
    other_model, other = pickled((model, opt))
    assert other.step(x, y) == opt.step(x, y)
    assert same(theta(other_model), theta(model))


def test_learning_rate_schedule_scales_the_step():
    model, x, y = problem()
    twin = copy.deepcopy(model)
    opt, fixed = lm(model), lm(twin, lr=0.25)
    scheduler = torch.optim.lr_scheduler.LambdaLR(opt, lambda t: 0.25 if t == 0 else 0.0)
    assert opt.step(x, y) == fixed.step(x, y)
    assert same(theta(model), theta(twin))
    scheduler.step()
    before = theta(model)
    step = opt.step(x, y)  # lr = 0: the step stays where it is, and that is no decrease
    assert (step.lr, step.accepted) == (0.0, False)
    assert torch.equal(theta(model), before)


@pytest.mark.parametrize("over", [False, True], ids=["step", "step_over"])
def test_hooks_around_a_step(over):
    """Its own, and those of all optimizers."""
    model, x, y = problem()
    opt, seen = lm(model), []
    everywhere = register_optimizer_step_pre_hook(lambda *_: seen.append(("every", None)))
    before = opt.register_step_pre_hook(lambda *given: seen.append(("pre", given, theta(model))))
    opt.register_step_post_hook(lambda *given: seen.append(("post", given, theta(model))))
    start = theta(model)
    try:
        opt.step_over([(x, y)]) if over else opt.step(x, y, weight=None)
    finally:
        everywhere.remove()
    assert [s[0] for s in seen] == ["every", "pre", "post"]
    for name, (o, args, kwargs), at in seen[1:]:
        assert o is opt
        assert over or same(args[1:], (x, y))
        assert kwargs == ({} if over else {"weight": None})
        assert torch.equal(at, start if name == "pre" else theta(model))
    before.remove()
    opt.step(x, y)
    assert [s[0] for s in seen[3:]] == ["post"]


def test_a_profile_names_the_step():
    _, opt, x, y = trained()
    with torch.profiler.profile() as found:
        opt.step(x, y)
    assert "Optimizer.step#LM.step" in {event.key for event in found.key_averages()}


def test_the_closure_of_a_wrapper_is_called_once_before_the_step():
    """As Lightning calls it: its hooks are in the closure."""
    model, x, y = problem()
    twin = copy.deepcopy(model)
    opt, seen, start = lm(model), [], theta(model)
    opt.register_step_pre_hook(lambda o, args, kwargs: seen.append(sorted(kwargs)))
    step = opt.step(closure=lambda: seen.append(theta(model)), inputs=x, targets=y)
    assert step == lm(twin).step(x, y)
    assert same(theta(model), theta(twin))
    assert same(seen, [["closure", "inputs", "targets"], start])


def test_a_closure_that_raises_leaves_everything_as_it_was():
    model, opt, x, y = trained()
    before = world(model, opt)
    with pytest.raises(ZeroDivisionError):
        opt.step(x, y, closure=lambda: 1 / 0)
    assert changes(before, world(model, opt)) == []


def test_scheduler_counts_a_step_over():
    model, x, y = problem()
    opt = lm(model)
    scheduler = torch.optim.lr_scheduler.StepLR(opt, step_size=1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # torch warns where a scheduler steps before its optimizer
        opt.step_over([(x, y)])
        scheduler.step()
    assert opt.step_over([(x, y)]).lr == pytest.approx(0.1)


@pytest.mark.parametrize("set_to_none", [True, False])
def test_zero_grad_and_no_grad_are_harmless(set_to_none):
    model, x, y = problem()
    twin = copy.deepcopy(model)
    opt, other = lm(model), lm(twin)
    for _ in range(2):
        opt.zero_grad(set_to_none=set_to_none)
        with torch.no_grad():
            step = opt.step(x, y)
            assert not torch.is_grad_enabled()
        assert torch.is_grad_enabled()
        assert step == other.step(x, y)
    opt.zero_grad(set_to_none=set_to_none)
    assert same(theta(model), theta(twin))


def test_gradients_are_left_alone():
    model, x, y = problem()
    first, *others = model.parameters()
    first.grad = torch.randn_like(first)
    kept, value = first.grad, first.grad.clone()
    x.requires_grad_(True)
    lm(model, line_search=mq.Grid(), lr=30.0).step(x, y)
    assert first.grad is kept
    assert torch.equal(kept, value)
    assert [p.grad for p in others] == [None] * len(others)
    assert x.grad is None


# ---- what is printed


def test_repr():
    model, x, _ = problem()
    opt = mq.LM(model, CrossEntropy(label_smoothing=0.1), momentum=None, curvature=mq.Auto(memory="1GiB"))
    assert repr(opt) == (
        "LM of Sequential, 27 parameters, CrossEntropy(label_smoothing=0.1)\n"
        "    curvature   Auto(memory='1GiB')\n"
        "    rows        None\n"
        "    damping     KroneckerMetric()\n"
        "    schedule    Balanced()\n"
        "    momentum    None\n"
        "    acceptance  Uphill(b=1.0, of_late=True)\n"
        "    line_search Backtracking()\n"
        "    average     EMA()\n"
        "    lr=1.0, attempts=1, capture=None, group=None\n"
        "    weight_decay=0.0, radius=None\n"
        "    λ = 3, steps: 0, accepted: 0"
    )
    opt.step(x, torch.arange(8) % 3)
    last = repr(opt).splitlines()[-3:]
    assert last[0].endswith("steps: 1, accepted: 1")
    assert last[1] == f"    plan: {opt.plan}"
    assert re.fullmatch(r"    a step takes about [\d.]+ m?s", last[2])


def test_repr_of_tensors_and_parts_of_ones_own():
    class Schedule:
        initial = 1.0

        def update(self, lam, outcome):
            return lam

        def __repr__(self):
            return "mine"

    opt = lm(mlp(2, 3), CrossEntropy(class_weight=torch.tensor([1.0, 2.0, 3.0])), schedule=Schedule())
    assert "class_weight=tensor([1., 2., 3.]" in repr(opt)
    assert "schedule    mine" in repr(opt)


# ---- Which ranks take a step together, as far as one process can tell: see tests/ranks for several.


@pytest.fixture
def two_ranks(monkeypatch):
    """What torch says in a process group, without one."""
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 2)
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: 1)


def test_runs_that_need_no_group(two_ranks, monkeypatch):
    """Independent ones, and one rank by itself"""
    model, x, y = problem()
    assert lm(model, group=False).step(x, y).accepted
    assert mq.presets.vanilla(model, "mse", group=False).step(x, y).accepted
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 1)
    model, x, y = problem()
    assert lm(model).step(x, y).accepted
