"""Auto by work: how many rows a step has time for, from shapes alone; that is said, saved and repeated."""

from __future__ import annotations

import copy
import math
import pickle
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset

import marquardt as mq
from marquardt.curvature import auto
from marquardt.curvature.auto import QUICK, SAVES, UNTOLD, WORK, WORK_OF_ROWS, _fewer
from marquardt.curvature.cost import Layer, Plan, Shapes
from marquardt.losses import Residual
from support.modules import Messages
from support.steps import theta
from support.unchanged import changes, world


class Tokens(nn.Module):
    """Logits (N, C, T), or with `flat` those of all tokens in one list: (N·T, C)"""

    def __init__(self, C: int = 12, flat: bool = False) -> None:
        super().__init__()
        self.table, self.head, self.flat = nn.Embedding(C, 8), nn.Linear(8, C), flat

    def forward(self, x: Tensor) -> Tensor:
        z = self.head(self.table(x))  # (N, T, C)
        return z.flatten(0, 1) if self.flat else z.movedim(-1, 1)


class Points(nn.Module):
    """Residuals inside and at the edge, joined."""

    def __init__(self) -> None:
        super().__init__()
        self.u = nn.Sequential(nn.Linear(1, 6), nn.Tanh(), nn.Linear(6, 1))

    def forward(self, inner: Tensor, edge: Tensor) -> Tensor:
        return torch.cat([self.u(inner) - inner, self.u(edge)])


@dataclass
class Graph:
    """An object that the model takes whole."""

    x: Tensor


class OfGraph(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)

    def forward(self, graph: Graph) -> Tensor:
        return self.layer(graph.x)


def wide(classes: int) -> nn.Module:
    hidden = 2 if classes > 9 else 20  # a matrix of few parameters in both cases
    return nn.Sequential(nn.Linear(6, hidden), nn.Tanh(), nn.Linear(hidden, classes))


def labelled(t: int, N: int = 64, classes: int = 300) -> tuple[Tensor, Tensor]:
    """Batch number t"""
    draw = torch.Generator().manual_seed(t)
    return torch.randn(N, 6, generator=draw), torch.randint(classes, (N,), generator=draw)


def regression(t: int, N: int) -> tuple[Tensor, Tensor]:
    x, _ = labelled(t, N)
    return x, x.sin().sum(1, keepdim=True)


def tokens(t: int, N: int = 64, T: int = 9, C: int = 12) -> Tensor:
    return torch.randint(C, (N, T), generator=torch.Generator().manual_seed(t))


ROOMY = mq.Auto(work=30.0)  # more rows than one are in time for these small models


def run(opt: mq.LM, batches: list[Any]) -> Plan:
    for batch in batches:
        opt.step(*batch)
    assert opt._state.plan is not None
    return opt._state.plan


# ---- which rows


def deep(width: int) -> nn.Module:
    return nn.Sequential(nn.Linear(6, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh(), nn.Linear(width, 1))


AUTO = mq.Auto()
CHOICES = {  # model, loss, curvature, batch number t, rows, all rows of a sample, what they keep to
    "few classes": (lambda: wide(3), "cross_entropy", ROOMY, lambda t: labelled(t, 64, 3), mq.Exact, 2, "work"),
    "a small one": (lambda: nn.Linear(6, 3), "cross_entropy", AUTO, lambda t: labelled(t, 64, 3), mq.Exact, 2, "work"),
    "residuals": (lambda: wide(3), "mse", AUTO, lambda t: (labelled(t)[0], torch.randn(64, 3)), mq.Exact, 3, "work"),
    "a moment": (lambda: deep(32), "mse", AUTO, lambda t: regression(t, 1500), mq.Exact, 1, "seconds"),
    "no moment": (lambda: deep(32), "mse", ROOMY, lambda t: regression(t, 1500), mq.Fraction, 1, "work"),
    "many samples": (lambda: deep(64), "mse", ROOMY, lambda t: regression(t, 2048), mq.Fraction, 1, "work"),
    "many classes": (lambda: wide(300), "cross_entropy", ROOMY, labelled, mq.Sampled, 299, "work"),
    "positions": (Tokens, "cross_entropy", ROOMY, lambda t: (tokens(t), tokens(t)), mq.Sampled, 9 * 11, "work"),
    "the same data": (lambda: wide(300), "cross_entropy", AUTO, lambda t: labelled(0), mq.Exact, 299, "nothing"),
    "any work": (lambda: wide(300), "cross_entropy", mq.Auto(work=math.inf), labelled, mq.Exact, 299, "nothing"),
}  # fmt: skip


@pytest.mark.parametrize("name", CHOICES)
def test_which_rows(name):
    """All of them if there is time for all, or it takes next to none; the rows of R count every position."""
    build, loss, curvature, batch, rows, R, limit = CHOICES[name]
    opt = mq.LM(build(), loss, curvature=curvature)
    plan = run(opt, [batch(t) for t in range(4)])
    assert type(plan.rows) is rows
    assert plan.shapes.R == R
    assert plan.steady == (name == "the same data")
    assert plan.work <= WORK if limit == "work" else plan.work > WORK
    assert plan.seconds <= QUICK or limit != "seconds"
    if name == "the same data":  # until they change, and after that
        assert run(opt, [labelled(t) for t in range(1, 4)]).sampled is not None
        assert run(opt, [labelled(9)] * 4).rows == mq.Exact()


def test_more_rows_of_a_sample_cost_little_or_are_left_out():
    """By default, of a loss with classes: up to six gradients, or if one row costs nearly as much."""
    batches = [labelled(t, classes=40) for t in range(4)]
    few, roomy = (run(mq.LM(wide(40), "cross_entropy", curvature=c), batches) for c in (AUTO, ROOMY))
    one = run(mq.LM(wide(40), "cross_entropy", rows=mq.Sampled(1)), batches)
    assert few.sampled is not None
    assert few.work <= max(WORK_OF_ROWS, SAVES * one.work) < roomy.work


def test_many_classes():
    """At first all rows, if they are formed within a moment; on changing batches as many as there is time for."""
    opt = mq.LM(wide(300), "cross_entropy", curvature=ROOMY)
    plan = run(opt, [labelled(0)])
    assert (plan.steady, plan.shapes.R) == (None, 299)
    assert plan.seconds <= UNTOLD or plan.work <= opt.curvature.work
    plan = run(opt, [labelled(t) for t in range(1, 4)])
    assert plan.steady is False
    assert plan.sampled in {2**i for i in range(9)}
    assert plan.fraction is None
    assert plan.rows == mq.Sampled(plan.sampled)
    assert plan.work <= opt.curvature.work
    assert f"{plan.sampled} of 299 rows per sample" in opt.plan
    assert opt._state.most_rows == 64 * plan.sampled


def test_as_many_rows_as_fit():
    """Twice as many would take more work than is allowed."""
    opt = mq.LM(wide(300), "cross_entropy", curvature=ROOMY)
    plan = run(opt, [labelled(t) for t in range(4)])
    allowing = replace(opt.curvature, work=1.001 * plan.work)
    again = run(mq.LM(wide(300), "cross_entropy", curvature=allowing), [labelled(t) for t in range(4)])
    assert again.sampled == plan.sampled
    less = replace(opt.curvature, work=0.999 * plan.work)
    fewer = run(mq.LM(wide(300), "cross_entropy", curvature=less), [labelled(t) for t in range(4)])
    assert fewer.sampled < plan.sampled
    ways = [share for share in _fewer(plan.shapes) if share.sampled == 2 * plan.sampled]
    for kind in (mq.Dense(), mq.Gram()):
        s = ways[0].shapes
        assert replace(plan, shapes=plan.shapes).with_cost(s, kind.cost(s)).work > opt.curvature.work


def test_work_that_no_plan_meets(monkeypatch):
    """Few rows, but no fewer than it pays to leave out; and a word of it."""
    plan = run(mq.LM(wide(300), "cross_entropy", curvature=mq.Auto(work=1)), [labelled(t) for t in range(4)])
    assert plan.work > 1
    assert plan.sampled in (1, 2, 4)
    shares = list(_fewer(plan.shapes))
    least = min(plan.with_cost(share.shapes, mq.Gram().cost(share.shapes)).work for share in shares)
    assert plan.work <= auto.SAVES * least
    more = next(share.shapes for share in shares if share.sampled == 2 * plan.sampled)
    assert plan.with_cost(more, mq.Gram().cost(more)).work > auto.SAVES * least
    monkeypatch.setattr(auto, "SAVES", 1.0)
    opt = mq.LM(wide(300), "cross_entropy", curvature=mq.Auto(work=1))
    assert run(opt, [labelled(t) for t in range(4)]).rows == mq.Fraction(0.25, mq.Sampled(1))  # 16 samples
    assert "1 of 299 rows of one sample in 4" in opt.plan
    assert opt._state.most_rows == 16


WHOLE = {
    "an object": (OfGraph, "cross_entropy", lambda t: (Graph(torch.randn(64, 4)), torch.randint(3, (64,)))),
    "points of two kinds": (Points, Residual(), lambda t: ((torch.rand(40, 1), torch.rand(24, 1)),)),
    "tokens in one list": (lambda: Tokens(flat=True), "cross_entropy", lambda t: (tokens(t), tokens(t).flatten())),
}


@pytest.mark.parametrize("curvature", [mq.Auto(work=1), mq.Auto(memory="400KiB")], ids=["work", "memory"])
@pytest.mark.parametrize("kind", WHOLE)
def test_what_cannot_be_cut(monkeypatch, kind, curvature):
    """Fewer rows of every sample at most: neither chunks nor a part of the samples."""
    monkeypatch.setattr(auto, "SAVES", 1.0)
    build, loss, batch = WHOLE[kind]
    plan = run(mq.LM(build(), loss, curvature=curvature), [batch(t) for t in range(4)])
    assert (plan.fraction, plan.chunk) == (None, None)


@pytest.mark.parametrize(
    ("rows", "expected"),
    [(mq.Exact(), 299 * 8), (mq.Sampled(3), 3 * 8), (mq.Fraction(0.5), 299 * 4), (mq.Empirical(), 8)],
    ids=str,
)
def test_given_rows_are_kept(rows, expected):
    """And where they are slow, the plan says what is faster."""
    opt = mq.LM(wide(300), "cross_entropy", rows=rows, curvature=mq.Auto(work=2))
    plan = run(opt, [labelled(t, 8) for t in range(4)])
    assert (plan.sampled, plan.fraction, plan.steady) == (None, None, False)
    assert opt._state.most_rows == expected
    assert rows != mq.Exact() or "rows=mq.Sampled(1)" in plan.faster


def test_step_over_is_never_cut():
    """It goes through all data, each time the same."""
    opt = mq.LM(wide(300), "cross_entropy")
    for t in range(3):
        opt.step_over([labelled(t, 8), labelled(t + 10, 8)])
    plan = opt._state.plan
    assert (plan.rows, plan.steady, plan.shapes.single, plan.shapes.N) == (mq.Exact(), True, False, 16)


class Stream(IterableDataset):
    def __iter__(self):
        return iter([labelled(0, 4, 3), labelled(1, 4, 3)])


def test_step_over_without_a_length():
    """A DataLoader has the method, and raises if its data have none."""
    opt = mq.LM(wide(3), "cross_entropy")
    step = opt.step_over(DataLoader(Stream(), batch_size=None))
    assert step.accepted
    assert opt._state.plan.shapes.N == 4  # nothing tells


def test_larger_batches_in_chunks():
    """That chunks are given does not hide how many samples there are."""
    opt = mq.LM(wide(3), "cross_entropy", curvature=mq.Auto(chunk=8, work=math.inf))
    assert run(opt, [labelled(0, 4, 3)]).kind == "Gram"
    plan = run(opt, [labelled(1, 400, 3)])
    assert (plan.kind, plan.shapes.N) == ("Dense", 400)
    assert run(opt, [labelled(2, 4, 3)]).kind == "Dense"


@pytest.mark.parametrize("R", [1, 2, 3, 9, 256, 299])
def test_fewer_and_fewer(R):
    s = Shapes(1000, 256, R, (Layer(1, 1, 9, R),), 4)
    shares = list(_fewer(s))
    assert shares[0].shapes == s
    assert [share.sampled for share in shares if share.fraction is None and share.sampled] == [
        k for k in (256, 128, 64, 32, 16, 8, 4, 2, 1) if k < R
    ]
    assert [share.fraction for share in shares if share.fraction] == [1 / 2, 1 / 4, 1 / 8, 1 / 16]
    assert [share.shapes.m for share in shares] == sorted({share.shapes.m for share in shares}, reverse=True)
    assert not any(share.fraction for share in _fewer(replace(s, divisible=False)))
    assert not any(share.fraction for share in _fewer(s, chunk=8))


# ---- samples that depend on each other


def normalised(affine: bool = True) -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8, affine=affine), nn.Tanh(), nn.Linear(8, 3))


@pytest.mark.parametrize("affine", [True, False])
def test_batch_norm_in_both_modes(affine):
    """Products in train mode, with few iterations on changing batches; rows in eval mode; and back."""
    model = normalised(affine)
    opt = mq.LM(model, "cross_entropy")
    batches = iter([labelled(t, classes=3) for t in range(12)])
    for _ in range(2):
        model.train()
        plan = run(opt, [next(batches) for _ in range(3)])
        assert (plan.kind, plan.rows, plan.couples) == ("MatrixFree", mq.Exact(), True)
        assert plan.iterations < mq.MatrixFree().iterations
        assert "samples that depend on each other, as in BatchNorm, have no rows" in opt.plan
        model.eval()
        plan = run(opt, [next(batches) for _ in range(3)])
        assert plan.kind in ("Dense", "Gram")
        assert not plan.couples


def test_batch_norm_after_a_part_of_the_samples(monkeypatch):
    """The rows of the last plan are not asked for in the look that makes the next one."""
    monkeypatch.setattr(auto, "_fewer", lambda s, *_: [auto._Share(replace(s, N=s.N // 4), None, 0.25)])
    model = normalised().eval()
    opt = mq.LM(model, "cross_entropy", curvature=mq.Auto(work=1))
    assert run(opt, [labelled(t, classes=3) for t in range(3)]).fraction == 0.25
    model.train()
    assert run(opt, [labelled(3, classes=3)]).kind == "MatrixFree"


def test_batch_norm_on_the_same_data():
    model = normalised()
    plan = run(mq.LM(model, "cross_entropy"), [labelled(0, classes=3)] * 4)
    assert (plan.kind, plan.iterations, plan.steady) == ("MatrixFree", None, True)


# ---- the same again

CASES = {
    "sampled": (lambda: wide(60), lambda t: labelled(t, 64, 60), {}),
    "part of the samples": (lambda: wide(40), lambda t: labelled(t, 64, 40), {"curvature": mq.Auto(work=2)}),
    "all rows": (lambda: wide(3), lambda t: labelled(t, 24, 3), {}),
    "batch norm": (normalised, lambda t: labelled(t, 24, 3), {}),
    "the same data": (lambda: wide(30), lambda t: labelled(0, 24, 30), {}),
    "ragged": (lambda: wide(30), lambda t: labelled(t, 24 + 7 * (t % 3), 30), {}),
}  # fmt: skip
EVERY_CASE = pytest.mark.parametrize("case", CASES)


def begin(case: str) -> mq.LM:
    torch.manual_seed(0)
    build, _, parts = CASES[case]
    return mq.LM(build(), "cross_entropy", **parts)


def go_on(opt: mq.LM, case: str, first: int, last: int) -> list[str]:
    plans = []
    for t in range(first, last):
        opt.step(*CASES[case][1](t))
        plans.append(opt.plan.rpartition(" of ")[0])  # the memory that is free may differ
    return plans


def resumed(opt: mq.LM, case: str) -> mq.LM:
    again = begin(case)
    again.model.load_state_dict(opt.model.state_dict())
    again.load_state_dict(copy.deepcopy(opt.state_dict()))
    return again


COPIES = {
    "resumed": resumed,
    "copied": lambda opt, _: copy.deepcopy(opt),
    "pickled": lambda opt, _: pickle.loads(pickle.dumps(opt)),
}


@EVERY_CASE
@pytest.mark.parametrize(
    ("way", "stop"), [("resumed", 1), ("resumed", 2), ("resumed", 4), ("copied", 3), ("pickled", 3)]
)
def test_it_goes_on_from_the_middle(case, way, stop):
    """Before and after it is known whether the data change: bit for bit the run that was not interrupted. A plan is
    made from shapes alone: of no measured time and no random number."""
    whole, first = begin(case), begin(case)
    plans = go_on(whole, case, 0, 6)
    assert go_on(first, case, 0, stop) == plans[:stop]
    second = COPIES[way](first, case)
    assert second._state.plan == first._state.plan
    assert go_on(second, case, stop, 6) == plans[stop:]
    assert torch.equal(theta(second.model), theta(whole.model))


def test_a_plan_of_an_earlier_version():
    """It knew nothing of work: there is another one after the next step, and nothing else is lost."""
    opt = begin("sampled")
    go_on(opt, "sampled", 0, 3)
    state = copy.deepcopy(opt.state_dict())
    now = state["marquardt"]["plan"]
    kept = ("kind", "chunk", "name", "bytes", "budget", "why", "input_size", "squeeze")
    shapes = {"n": 500, "N": 64, "R": 299, "inputs": 26.0, "outputs": 320.0, "itemsize": 4, "others": 0, "single": True}
    options = [None, 0.8, None]  # there was no `work`
    state["marquardt"]["plan"] = {**{k: now[k] for k in kept}, "options": options, "shapes": shapes}
    again = begin("sampled")
    again.model.load_state_dict(opt.model.state_dict())
    again.load_state_dict(state)
    assert again._state.plan is None
    assert go_on(again, "sampled", 3, 4) == go_on(opt, "sampled", 3, 4)
    assert again._state.plan.sampled == opt._state.plan.sampled


def test_a_failed_look_changes_nothing():
    """An error in the forward pass that finds out the shapes: of the first batch, and of a larger one later."""
    model = nn.Sequential(nn.Linear(6, 5), nn.Dropout(0.2), nn.Linear(5, 40))
    opt, failing = mq.LM(model, "cross_entropy"), [True]

    def fail(*_: object) -> None:
        if failing[0]:
            torch.rand(3)
            raise ArithmeticError("a pass")

    model[2].register_forward_hook(fail)
    for N in (24, 48):
        failing[0] = True
        before = world(model, opt)
        with pytest.raises(ArithmeticError):
            opt.step(*labelled(0, N, 40))
        assert changes(before, world(model, opt)) == []
        failing[0] = False
        for t in range(3):
            opt.step(*labelled(t, N, 40))
        assert opt._state.plan.shapes.N == N


def test_samples_that_see_each_other():
    """A row of one node takes a backward pass through all: rows of all together, once the data are known to change."""
    torch.manual_seed(0)
    model = Messages(200, width=8)
    opt = mq.LM(model, "cross_entropy")
    for _ in range(4):
        assert opt.step(torch.randn(200, 3), torch.randint(0, 2, (200,))).accepted
        assert opt._state.plan.joined
    plan = opt._state.plan
    assert plan.rows == mq.Sampled(plan.sampled, together=True)
    assert "of 200 rows, each of all samples together" in opt.plan
    assert plan.work <= WORK
    assert opt._known.proof.general == {}  # all by rules
    again = mq.LM(copy.deepcopy(model), "cross_entropy")
    again.load_state_dict(opt.state_dict())
    x, y = torch.randn(200, 3), torch.randint(0, 2, (200,))
    assert again.step(x, y).new_loss == opt.step(x, y).new_loss
    assert again._state.plan == opt._state.plan


@pytest.mark.parametrize("rows", [mq.Exact(), mq.Sampled(1)])
def test_rows_that_were_given_stay(rows):
    torch.manual_seed(0)
    opt = mq.LM(Messages(30), "cross_entropy", rows=rows)
    opt.step(torch.randn(30, 3), torch.randint(0, 2, (30,)))
    assert not opt._state.plan.joined
    assert "rows" in opt._known.proof.general.values()
