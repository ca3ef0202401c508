"""Auto: the fastest representation that fits, said aloud; and the next smaller one where memory runs out."""

from __future__ import annotations

import math
import re

import pytest
import torch
from torch import Tensor, nn

import marquardt as mq
from marquardt.curvature import auto
from marquardt.curvature.direct import DenseCurvature, GramCurvature
from marquardt.curvature.matrix_free import MatrixFreeCurvature
from marquardt.jacobian.linearization import Trials
from support.reference import error
from support.steps import theta
from support.unchanged import changes, world

FAILURES = {
    "cuda": torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB"),
    "cpu": RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes"),
}


class Noisy(nn.Module):
    """Everything that a step could leave changed: parameters, a buffer that counts calls, random numbers."""

    def __init__(self, inputs: int, hidden: int, outputs: int) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(inputs, hidden), nn.Linear(hidden, outputs)
        self.drop = nn.Dropout(0.2)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.second(self.drop(self.first(x).tanh()))


def wide(noisy: bool = False) -> tuple[nn.Module, Tensor, Tensor]:
    """n = 507 parameters, m = 64 rows of 32 samples: Gram"""
    torch.manual_seed(0)
    model = Noisy(10, 36, 3) if noisy else nn.Sequential(nn.Linear(10, 36), nn.Tanh(), nn.Linear(36, 3))
    return model.double(), torch.randn(32, 10).double(), torch.randint(3, (32,))


def narrow(noisy: bool = False) -> tuple[nn.Module, Tensor, Tensor]:
    """n = 43 parameters, m = 64 rows of 32 samples: Dense, though there are fewer samples than parameters"""
    torch.manual_seed(0)
    model = Noisy(4, 5, 3) if noisy else nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3))
    return model.double(), torch.randn(32, 4).double(), torch.randint(3, (32,))


def make(model: nn.Module, curvature: mq.Representation | None = None, **parts) -> mq.LM:
    """Plain steps that depend on nothing but the solve, with all rows."""
    plain = {
        "rows": mq.Exact(),
        "damping": mq.MeanEigenvalue(),  # MatrixFree has partial traces from random rows
        "schedule": mq.Constant(3.0),
        "momentum": None,
        "acceptance": mq.Decrease(),
        "line_search": None,
        "average": None,
    }
    return mq.LM(model, "cross_entropy", curvature=curvature or auto_with(), **{**plain, **parts})


def auto_with(memory: str | int | None = None) -> mq.Auto:
    return mq.Auto(work=math.inf, memory=memory)


def dense_end(build, *args) -> Tensor:
    """θ after a step of Dense"""
    model, x, y = build(*args)
    make(model, mq.Dense()).step(x, y)
    return theta(model)


def after(plan: str) -> str:
    """Without the memory that is free, which may have changed"""
    return plan.rpartition(" of ")[0]


# ---- the choice


@pytest.mark.parametrize("build", [wide, narrow])
def test_smaller_budgets_smaller_plans(build):
    """Down from plenty: first whole, then in smaller and smaller chunks or by the other matrix, at last products; every
    plan is within its budget, and all steps are those of Dense."""
    expected = dense_end(build)
    seen: list[str] = []
    budget = 2**32
    while True:
        model, x, y = build()
        opt = make(model, auto_with(budget))
        try:
            step = opt.step(x, y)
        except ValueError:
            break
        choice = opt._state.plan
        kind = opt.curvature.of(choice)
        assert choice.bytes <= budget
        assert choice.budget == budget
        assert step.accepted
        assert error(theta(model), expected) < (1e-2 if isinstance(kind, mq.MatrixFree) else 1e-10)
        if str(kind) not in seen:
            seen.append(str(kind))
        budget = choice.bytes - 1
    names = [s.split("(")[0] for s in seen]
    assert names[0] == ("Gram" if build is wide else "Dense")
    assert "chunk=None" in seen[0]
    assert names[-1] == "MatrixFree"
    assert names == sorted(names, key=names.index)  # no way back to one that did not fit
    chunks = [int(s) for s in re.findall(r"^(?:Gram|Dense)\(chunk=(\d+)", "\n".join(seen), re.M)]
    assert chunks == sorted(chunks, reverse=True)
    assert chunks


@pytest.mark.parametrize(
    ("memory", "size"),
    [
        ("4GiB", 4 * 2**30),
        ("500MB", 5 * 10**8),
        (123_456_789, 123_456_789),
        (" 1.5 gib ", 3 * 2**29),
        ("2TB", 2 * 10**12),
    ],
    ids=str,
)
def test_plan_in_words(memory, size):
    model, x, y = wide()
    opt = make(model, auto_with(memory))
    assert "Auto" in opt.plan  # nothing is known before the first step
    opt.step(x, y)
    assert opt._state.plan.budget == size
    assert opt.plan.startswith("Gram(chunk=None): 507 parameters, 64 rows")
    assert opt.plan.endswith(f"of {auto.readable(size)}")


@pytest.mark.parametrize("build", [wide, narrow])
def test_too_small(build):
    """The error says how much would be needed, and that is true: with so much there is a plan."""
    model, x, y = build(noisy=True)
    opt = make(model, auto_with("2KB"))
    before = world(model, opt)
    with pytest.raises(ValueError, match=r"fits into 1\.95 KiB.*needs about") as info:
        opt.step(x, y)
    assert changes(before, world(model, opt)) == []
    name, size, unit = re.search(r"the smallest, (\w+), needs about ([\d.]+) ([KM]iB)", str(info.value)).groups()
    opt = make(model, auto_with(f"{float(size) * 1.01}{unit}"))  # three digits are given
    assert opt.step(x, y).accepted
    assert opt.plan.startswith(name)


# ---- remembered


def test_chosen_once(monkeypatch):
    """Free memory is not measured again while the shapes stay, though it changes from step to step."""
    calls = []
    monkeypatch.setattr(auto, "free", lambda device: calls.append(device) or 10**9 // len(calls))
    model, x, y = wide()
    opt = make(model)
    for _ in range(3):
        opt.step(x, y)
    assert len(calls) == 1
    opt.step(x[:20], y[:20])  # a ragged last batch
    opt.step(x, y)
    assert len(calls) == 1
    opt.step(torch.cat([x, x]), torch.cat([y, y]))  # a larger one counts
    assert len(calls) == 2


@pytest.mark.parametrize("rows", [mq.Exact(), mq.Sampled(1), mq.Fraction(0.5)], ids=str)
@pytest.mark.parametrize("build", [wide, narrow])
def test_ragged_batch(build, rows):
    """A last batch of few samples has fewer rows than parameters, and keeps the representation."""
    model, x, y = build()
    opt = make(model, rows=rows)
    plans = {opt.step(x[:N], y[:N]) and opt.plan for N in (32, 5, 32)}
    assert len(plans) == 1


def test_chunks_all_the_way():
    """Once the plan is known, nothing sees more samples than it says; but for the few forward passes that compare
    samples in other company, which may have two more."""
    model, x, y = wide()
    opt = make(model, auto_with("200KiB"))
    opt.step(x, y)
    assert opt.plan.startswith("Gram(chunk=2)")
    seen = []
    model.register_forward_hook(lambda module, inputs, output: seen.append(len(output)))
    assert opt.step(x, y).accepted
    assert opt.step(x[:20], y[:20]).accepted
    assert max(seen) <= 4
    assert seen.count(2) > 0.6 * len(seen)
    seen.clear()
    opt.step(torch.cat([x, x]), torch.cat([y, y]))  # larger: planned anew
    assert max(seen) > 2


# ---- memory runs out


def fail(monkeypatch, failure: Exception, times: int, classes=(DenseCurvature, GramCurvature, MatrixFreeCurvature)):
    """The first representations run out of memory: after the rows, the random numbers and a half-moved model."""
    failed = []

    def broken(cls):
        original = cls.__init__

        def init(self, lin, *args, **kwargs):
            original(self, lin, *args, **kwargs)
            if len(failed) < times:
                failed.append(cls)
                torch.rand(3)
                Trials(lin).loss(torch.ones_like(lin.theta), 1.0)
                raise failure

        return init

    for cls in classes:
        monkeypatch.setattr(cls, "__init__", broken(cls))
    return failed


@pytest.mark.parametrize("failure", FAILURES)
@pytest.mark.parametrize("times", [1, 2, 3, 4])
@pytest.mark.parametrize("build", [wide, narrow])
def test_out_of_memory(monkeypatch, build, times, failure):
    """The step is that of the next of the plans that shapes predict, as if it had been the first."""
    random_numbers, ends = torch.get_rng_state(), []
    for failures in (0, times):
        model, x, y = build(noisy=True)
        torch.set_rng_state(random_numbers)
        opt = make(model)
        with monkeypatch.context() as patch:
            failed = fail(patch, FAILURES[failure], failures)
            step = opt.step(x, y)
            assert len(failed) == failures
        assert step.accepted
        ends.append((opt.curvature.of(opt._state.plan), theta(model), torch.get_rng_state(), model.calls.clone()))
    (_, expected, *drawn), (kind, found, *others) = ends
    assert kind == [way.picked for way in opt.curvature._ways(opt._state.plan.shapes, steady=None)][times]
    assert f"out of memory, planned anew: {opt.plan}" in step.note
    if kind.chunk is None:  # dropout in chunks draws other masks
        assert error(found, expected) < (1e-2 if isinstance(kind, mq.MatrixFree) else 1e-10)
        assert all(torch.equal(a, b) for a, b in zip(drawn, others, strict=True))
    assert "planned anew" not in opt.step(x, y).note  # remembered


@pytest.mark.parametrize("failure", FAILURES)
@pytest.mark.parametrize("build", [wide, narrow])
def test_out_of_memory_for_good(monkeypatch, build, failure):
    """The error comes out, everything is as before, and the optimizer goes on when there is memory again."""
    model, x, y = build(noisy=True)
    opt = make(model)
    opt.step(x, y)
    plan, before = opt.plan, world(model, opt)
    with monkeypatch.context() as patch:
        failed = fail(patch, FAILURES[failure], 10**6)
        with pytest.raises(RuntimeError, match=r"out of memory|can't allocate memory"):
            opt.step(x, y)
        assert len(failed) > 3  # plans
    assert changes(before, world(model, opt)) == []
    assert opt.step(x[:16], y[:16]).accepted
    assert after(opt.plan) == after(plan)  # a smaller batch does not change it


def test_out_of_memory_elsewhere(monkeypatch):
    """In the forward pass itself, before the shapes are known."""
    model, x, y = wide(noisy=True)
    original, calls = nn.Linear.forward, []

    def forward(self, x):
        calls.append(len(x))
        if len(x) > 8:
            raise FAILURES["cpu"]
        return original(self, x)

    monkeypatch.setattr(nn.Linear, "forward", forward)
    opt = make(model)
    step = opt.step(x, y)
    assert step.accepted
    assert "planned anew" in step.note
    plan = opt._state.plan
    assert (plan.chunk, plan.squeeze, plan.shapes.N, plan.shapes.R, plan.shapes.out) == (8, 1, 32, 2, 3)
    tried = len(calls)
    assert opt.step(x, y).accepted
    assert max(calls[tried:]) <= 8  # remembered: not tried as a whole again


def test_out_of_memory_in_the_solve(monkeypatch):
    model, x, y = wide()
    original, failed = GramCurvature.gram, []

    def gram(self, factors, dtype):
        if len(failed) < 2:
            failed.append(len(self.layout.own_sizes))
            raise FAILURES["cuda"]
        return original(self, factors, dtype)

    monkeypatch.setattr(GramCurvature, "gram", gram)
    opt = make(model)
    step = opt.step(x, y)
    assert failed == [1, 4]  # whole, in quarters
    assert opt.curvature.of(opt._state.plan) == mq.Gram(chunk=2)
    assert "in chunks of 2" in step.note
    assert error(theta(model), dense_end(wide)) < 1e-10


@pytest.mark.parametrize(
    ("representation", "failure"),
    [
        *((kind, FAILURES["cuda"]) for kind in (mq.Dense(), mq.Gram(), mq.MatrixFree())),
        (auto_with(), RuntimeError("cuBLAS says no")),
    ],
    ids=str,
)
def test_no_other_plan(monkeypatch, representation, failure):
    """Who chooses a representation gets the error, as does an error that has nothing to do with memory."""
    model, x, y = wide(noisy=True)
    opt = make(model, representation)
    before, failed = world(model, opt), fail(monkeypatch, failure, 1)
    with pytest.raises(type(failure), match=str(failure)[-10:]):
        opt.step(x, y)
    assert len(failed) == 1
    assert changes(before, world(model, opt)) == []


# ---- several batches


@pytest.mark.parametrize("build", [wide, narrow])
def test_step_over(build):
    model, x, y = build()
    opt = make(model)
    opt.step_over(list(zip(x.split(20), y.split(20), strict=True)))
    assert opt.plan.startswith("Dense(")
    assert "several batches" in opt.plan
    assert error(theta(model), dense_end(build)) < 1e-10
    opt.step(x, y)  # and back to one
    assert opt.plan.startswith("Gram(" if build is wide else "Dense(")


def test_step_over_within_a_budget():
    """Where no n×n matrix fits, products."""
    model, x, y = wide()
    opt = make(model, auto_with("1MiB"))
    opt.step_over(list(zip(x.split(20), y.split(20), strict=True)))
    assert opt.plan.startswith("MatrixFree(")
    assert error(theta(model), dense_end(wide)) < 1e-2
    with pytest.raises(ValueError, match="MatrixFree, needs about"):
        make(model, auto_with("1KiB")).step_over([(x, y)])


def test_step_over_after_running_out(monkeypatch):
    """A step that had to be planned anew leaves a plan for one batch: step_over makes its own."""
    model, x, y = wide()
    opt = make(model)
    with monkeypatch.context() as patch:
        fail(patch, FAILURES["cuda"], 1)
        opt.step(x, y)
    assert opt.plan.startswith("Gram(chunk=8")
    assert opt.step_over(list(zip(x.split(20), y.split(20), strict=True))).accepted
    assert opt.plan.startswith(("Dense(", "MatrixFree("))
    assert opt.step(x, y).accepted
