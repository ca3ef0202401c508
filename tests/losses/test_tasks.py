"""Several outputs and losses at once, against the dense computation in float64."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import marquardt as mq
from marquardt import losses
from marquardt.recordings import RECORDERS
from support.recorder import Repeated
from support.reference import Quadratic, error
from support.several import FORMS, Heads, as_dict, data, quadratic
from support.steps import lm, theta
from support.unchanged import changes, refused, world

pytestmark = pytest.mark.usefixtures("double")

MASK, DEPTH = nn.CrossEntropyLoss(label_smoothing=0.1), nn.HuberLoss(delta=0.5)
TERMS = [("mask", MASK, 0.7), ("depth", DEPTH, 0.3)]
BOTH = {"mask": (MASK, 0.7), "depth": (DEPTH, 0.3)}
# To the end: an earlier iterate may have a lower loss, and is not what the reference has.
PRODUCTS = mq.MatrixFree(tolerance=1e-14, iterations=500, backtrack=False)
CURVATURES = [
    mq.Dense(inertia=0.0), mq.Dense(chunk=4, inertia=0.0), mq.Gram(), mq.Gram(chunk=4),
    PRODUCTS, replace(PRODUCTS, chunk=4),
]  # fmt: skip


def agrees(lin: mq.Linearization, expected: Quadratic) -> None:
    rows = lin.rows()
    assert lin.loss == pytest.approx(float(expected.f), rel=1e-13)
    assert error(rows.T @ rows, expected.G) < 1e-12
    assert error(lin.gradient, expected.g) < 1e-12


@pytest.mark.parametrize("form", FORMS)
def test_every_form_of_outputs(form):
    model, (x, y) = Heads(FORMS[form]), data()
    plain = Heads()
    plain.load_state_dict(model.state_dict())
    loss, target = ([BOTH["mask"], BOTH["depth"]], (y["mask"], y["depth"])) if form in ("tuple", "list") else (BOTH, y)
    agrees(mq.linearize(model, loss, x, target), quadratic(plain, TERMS, x, y))


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize(
    ("curvature", "over"), [*((c, False) for c in CURVATURES), (CURVATURES[0], True), (PRODUCTS, True)], ids=str
)
def test_steps_against_the_reference(curvature, weighted, over):
    """One step of damping λ, with the normalisers of the whole batch though it comes in chunks, or in batches of which
    the first ignores all targets of a task."""
    model, (x, y) = Heads(), data(9)
    y["mask"][: 2 * over] = -100
    weight = torch.rand(9) + 0.1 if weighted else None
    expected, before = quadratic(model, TERMS, x, y, weight), theta(model)
    cuts = [slice(0, 2), slice(2, 5), slice(5, 9)]
    batches = [(x[i], {k: t[i] for k, t in y.items()}, None if weight is None else weight[i]) for i in cuts]
    opt = lm(model, BOTH, curvature=curvature, schedule=mq.Constant(0.1))
    step = opt.step_over(batches) if over else opt.step(x, y, weight)
    assert step.accepted
    assert step.loss == pytest.approx(float(expected.f), rel=1e-12)
    assert step.new_loss == pytest.approx(float(quadratic(model, TERMS, x, y, weight).f), rel=1e-12)
    assert error(theta(model) - before, expected.step(0.1)) < 1e-8


def test_batches_of_different_lengths():
    """A task with more positions in one batch than in another: each target counts the same."""

    class Tagger(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.tags, self.kind = nn.Linear(3, 4), nn.Linear(3, 2)

        def forward(self, x: Tensor) -> dict[str, Tensor]:
            return {"tags": self.tags(x), "kind": self.kind(x.mean(1))}

    model = Tagger()
    batches = [(torch.randn(2, T, 3), {"tags": torch.randn(2, T, 4), "kind": torch.tensor([0, 1])}) for T in (3, 5)]
    lin = lm(model, {"tags": "mse", "kind": "cross_entropy"})
    with torch.no_grad():
        pairs = [(model(x), y) for x, y in batches]
        tags = torch.cat([(z["tags"] - y["tags"]).flatten() for z, y in pairs])
        kind = nn.functional.cross_entropy(*(torch.cat([p[i]["kind"] for p in pairs]) for i in (0, 1)))
        expected = float(tags.square().mean() + kind)
    assert lin.step_over(batches).loss == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_a_sum_among_means(reduction):
    model, (x, y) = Heads(), data()
    terms = [
        ("mask", MASK, 2.0),
        ("depth", nn.MSELoss(reduction="sum"), 0.3),
        ("depth", nn.SmoothL1Loss(beta=0.3), 0.5),
    ]
    terms = terms[1:] if reduction == "sum" else terms
    loss: dict[str, Any] = {k: [(each, c) for name, each, c in terms if name == k] for k, _, _ in terms}
    expected = quadratic(model, terms, x, {k: y[k] for k in loss})
    for chunk in (None, 4):
        agrees(mq.linearize(model, loss, x, {k: y[k] for k in loss}, chunk=chunk), expected)


@pytest.mark.parametrize("weight", [None, torch.arange(6.0)], ids=["plain", "weighted"])
def test_the_bound_is_that_of_all_tasks(weight):
    """Each with the weight of its task: that of Poisson is no 0."""
    model, x = Heads(lambda mask, depth, hidden: (depth, hidden)), torch.randn(6, 4)
    counts, weight = torch.randint(1, 6, (6, 2, 2)).double(), None if weight is None else weight.double()
    lin = mq.linearize(model, [("poisson", 0.7), ("mse", 0.3)], x, (counts, torch.randn(6, 5)), weight)
    alone = mq.linearize(model, ["poisson"], x, (counts,), weight)
    assert alone.level.low != 0
    assert lin.level.low == pytest.approx(0.7 * alone.level.low)


def test_rows_are_counted_without_padding():
    """10 classes beside 64 pixels: 9 + 64 rows for every sample, each zero outside its own task."""

    class Wide(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.kind, self.depth = nn.Linear(4, 10), nn.Linear(4, 64)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            return self.kind(x), self.depth(x).view(-1, 8, 8)

    x, y = torch.randn(5, 4), (torch.randint(10, (5,)), torch.randn(5, 8, 8))
    lin = mq.linearize(Wide(), ("cross_entropy", "mse"), x, y)
    assert lin.m == 5 * (9 + 64)
    piece = lin.whole()
    assert piece.exact_rows() == 9 + 64
    assert piece.cotangents.S.count_nonzero() <= 5 * (10 * 9 + 64)


def test_sampled_rows_are_unbiased():
    """The signs of two tasks are independent of each other: their covariance vanishes in the mean."""
    model, (x, y) = Heads(), data(3)
    expected = quadratic(model, TERMS, x, y)
    loss = losses.resolve(BOTH).bound(model(x), y)
    z = loss.joined(model(x)).detach()
    S, exact = (rows.draw(loss, z, y, None, 0).S for rows in (mq.Sampled(4000), mq.Exact()))  # (R, N, K)
    mean, expected_mean = (torch.einsum("rna,rnb->nab", rows, rows) for rows in (S, exact))
    assert error(mean, expected_mean) < 0.1
    assert mean[:, :12, 12:].norm() < 0.1 * mean.norm()
    # And rows of a part of the batch.
    rows = [mq.linearize(model, BOTH, x, y, rows=mq.Fraction(2 / 3, seed=i)).rows() for i in range(40)]
    assert error(torch.stack([r.T @ r for r in rows]).mean(0), expected.G) < 0.2


def test_empirical_rows_span_the_gradient():
    model, (x, y) = Heads(), data()
    lin = mq.linearize(model, BOTH, x, y, rows=mq.Empirical())
    assert error(lin.gradient, quadratic(model, TERMS, x, y).g) < 1e-12
    step = lm(model, BOTH, rows=mq.Empirical()).step(x, y)
    assert step.accepted
    assert step.new_loss < step.loss


@pytest.mark.parametrize(
    "parts",
    [{}, {"curvature": mq.Kronecker()}, {"rows": mq.Sampled(1)}, {"rows": mq.Fraction(0.5)}],
    ids=str,
)
def test_training(parts):
    """The losses of both tasks fall, and a copy goes on as the original does."""
    model, (x, y) = Heads(), data(12)
    opt = mq.LM(model, {"mask": "cross_entropy", "depth": ("mse", 0.1)}, **parts)
    first = opt.step(x, y)
    twin = pickle.loads(pickle.dumps(copy.deepcopy(opt)))
    steps = [(opt.step(x, y), twin.step(x, y)) for _ in range(6)]
    assert all(a.new_loss == b.new_loss for a, b in steps)
    assert steps[-1][0].new_loss < 0.7 * first.loss


def test_second_derivatives():
    model, (x, y) = Heads(), data()
    terms = [("mask", MASK, 0.7), ("depth", nn.MSELoss(), 0.3)]
    loss = {"mask": (MASK, 0.7), "depth": ("mse", 0.3)}
    lin = mq.linearize(model, loss, x, y, needs=mq.Hessian().needs)
    names, theta = zip(*model.named_parameters(), strict=True)

    def f(*params: Tensor) -> Tensor:
        z = torch.func.functional_call(model, dict(zip(names, params, strict=True)), (x,))
        return torch.stack([c * each(z[k], y[k]) for k, each, c in terms]).sum()

    H = torch.autograd.functional.hessian(f, theta)
    dense = torch.cat([torch.cat([b.reshape(p.numel(), -1) for b in row], 1) for p, row in zip(theta, H, strict=True)])
    v = torch.randn(lin.n)
    assert error(mq.Hessian().represent(lin) @ v, dense @ v) < 1e-12


def test_a_loss_of_ones_own_is_proven_within_tasks():
    class Wrong(losses.SquaredError):
        def slope(self, z: Tensor, y: Tensor) -> Tensor:
            return z - y

    model, (x, y) = Heads(), data()
    opt = lm(model, {"mask": "cross_entropy", "depth": Wrong()})
    before = world(model, opt)
    with refused("Wrong.slope", "differentiating ell"):
        opt.step(x, y)
    assert changes(before, world(model, opt)) == []


def test_targets_in_every_form():
    model, (x, y) = Heads(), data()
    expected = mq.linearize(model, BOTH, x, y).loss
    assert mq.linearize(model, BOTH, x, (y["mask"], y["depth"])).loss == expected
    alone = mq.linearize(model, {"depth": "mse"}, x, y["depth"]).loss
    assert alone == mq.linearize(model, {"depth": "mse"}, x, {"depth": y["depth"]}).loss
    residual = {"depth": "residual", "mask": MASK}
    assert mq.linearize(model, residual, x, {"mask": y["mask"]}).loss > 0
    one = nn.Linear(4, 2)
    both = mq.linearize(one, {"output": ["mse", ("huber", 0.1)]}, x, y["depth"][:, 0]).loss
    single = [mq.linearize(one, loss, x, y["depth"][:, 0]).loss for loss in ("mse", "huber")]
    assert both == pytest.approx(single[0] + 0.1 * single[1], rel=1e-13)


def less(y: dict[str, Tensor], **change: Tensor | None) -> dict[str, Tensor]:
    return {k: t for k, t in {**y, **change}.items() if t is not None}


HEADS = {
    "float": lambda mask, depth, _: {"mask": mask, "depth": depth.long()},
    "samples": lambda mask, depth, _: {"mask": mask, "depth": depth[1:]},
    "number": lambda mask, depth, _: {"mask": mask, "depth": depth.sum()},
    "none": lambda mask, depth, _: {"mask": mask, "depth": None},
}
MISFITS: dict[str, tuple[Any, Callable[..., Any], Any, list[str]]] = {  # loss, outputs, targets (and weight) from y
    "another name": ({"mask": MASK, "dept": DEPTH}, as_dict, lambda y: (y,), ["'dept'", "'depth' (", "'hidden'"]),
    "a target less": (BOTH, as_dict, lambda y: (less(y, depth=None),), ["{'mask', 'depth'}", "targets for {'mask'}"]),
    "a target more": ({"mask": MASK}, as_dict, lambda y: (y,), ["{'mask'}", "the targets for {'mask', 'depth'}"]),
    "one target": (BOTH, as_dict, lambda y: (y["depth"],), ["the targets are Tensor", "{'mask', 'depth'}"]),
    "a shape": (BOTH, as_dict, lambda y: (less(y, depth=torch.zeros(6, 4)),), ["output 'depth'", ", 4)"]),
    "a class": (
        BOTH, as_dict, lambda y: (less(y, mask=y["mask"] * 0 + 3),), ["output 'mask'", "is 3", "3 classes"],
    ),
    "all ignored": (BOTH, as_dict, lambda y: (less(y, mask=y["mask"] * 0 - 100),), ["output 'mask'", "ignored"]),
    "no names": ("mse", as_dict, lambda y: (y,), ["'mask' (", "loss={'mask'"]),
    "positions": ((MASK, DEPTH), as_dict, lambda y: (y,), ["output 0", "'mask' ("]),
    "weight": (BOTH, as_dict, lambda y: (y, torch.ones(6, 1)), ["weight has shape (", ", 1)"]),
    # Not targets that are all ignored; in chunks the sum over all of them may come first.
    "a negative weight": (
        BOTH, as_dict, lambda y: (y, -torch.full((6,), 0.5)), ["weight[0] is -0.5", "must be finite and not negative"],
    ),
    "no weight": (BOTH, as_dict, lambda y: (y, torch.arange(6.0).log()), ["must be finite and not negative"]),
    "fewer samples": (BOTH, HEADS["samples"], lambda y: (y,), ["'depth' (", ", 2, 2)"]),
    "integers": (BOTH, HEADS["float"], lambda y: (y,), ["torch.int64"]),
    "a number": (BOTH, HEADS["number"], lambda y: (y,), ["output 'depth': the model returned a 0-dimensional tensor"]),
    "nothing": (BOTH, HEADS["none"], lambda y: (y,), ["'depth'"]),
}  # fmt: skip


@pytest.mark.parametrize("chunk", [None, 4])
@pytest.mark.parametrize("case", MISFITS)
def test_what_does_not_fit_is_refused(case, chunk):
    loss, form, given, says = MISFITS[case]
    model, (x, y) = Heads(form), data()
    opt = lm(model, loss, curvature=mq.Dense(chunk=chunk, inertia=0.0))
    before = world(model, opt)
    with refused(*says):
        opt.step(x, *given(y))
    assert changes(before, world(model, opt)) == []


@pytest.mark.parametrize(
    ("loss", "says"),
    [
        ({"a": ("mse", -1.0)}, ["'a'", "-1.0"]),
        ({"a": ("mse", "huber")}, ["'a'", "'huber'"]),
        ({"a": {"b": "mse"}}, ["'a'", "(loss, weight)"]),
        ({}, ["no loss"]),
        ((None, None), ["no loss"]),
        ({"a": "mes"}, ["'mes'", "mse"]),
    ],
)
def test_losses_that_are_none(loss, says):
    with refused(*says):
        mq.LM(Heads(), loss)


@pytest.mark.parametrize("over", [False, True], ids=["chunks", "batches"])
def test_random_models_in_parts(over):
    """The forward passes that count the targets come first, and leave no trace: losses and trials see one dropout."""
    model, (x, y) = Heads(), data(8, ignored=False)
    model.depth = nn.Sequential(nn.Dropout(0.5), model.depth)
    loss = {"mask": (MASK, 0.7), "depth": (DEPTH, 0.3)}
    state, before = torch.get_rng_state(), theta(model)
    with torch.no_grad():  # in the same parts; all count the same
        first, second = (model(part) for part in x.split(4))
    z = {k: torch.cat([first[k], second[k]]) for k in y}
    expected, after = float(sum(c * each(z[k], y[k]) for k, each, c in TERMS)), torch.get_rng_state()
    torch.set_rng_state(state)
    assert mq.linearize(model, loss, x, y, chunk=4).loss == pytest.approx(expected, rel=1e-12)
    torch.set_rng_state(state)
    opt = lm(model, loss, curvature=mq.Dense(chunk=None if over else 4, inertia=0.0), lr=0.0)
    batches = [(x[i], {k: t[i] for k, t in y.items()}) for i in (slice(0, 4), slice(4, 8))]
    step = opt.step_over(batches) if over else opt.step(x, y)
    assert step.loss == pytest.approx(expected, rel=1e-12)
    assert step.new_loss == pytest.approx(step.loss, rel=1e-12)
    assert torch.equal(torch.get_rng_state(), after)
    assert torch.equal(theta(model), before)


def test_recorded_steps(monkeypatch):
    """A replay finds the normaliser of every task anew, in batches that ignore other numbers of targets."""
    (model, (x, _)), plain = (Heads(), data(8)), Heads()
    plain.load_state_dict(model.state_dict())
    recorder = Repeated(model)
    monkeypatch.setitem(RECORDERS, "cpu", recorder)
    batches = [data(8)[1] for _ in range(7)]
    for i, y in enumerate(batches):
        y["mask"][1, : i % 2, : 1 + i % 2] = -100
    parts = {
        "damping": mq.Identity(),
        "momentum": None,
        "schedule": mq.Constant(3.0),
        "curvature": mq.Dense(inertia=0.0),
    }
    opt, twin = mq.LM(model, BOTH, capture=True, **parts), mq.LM(plain, BOTH, capture=False, **parts)
    for y in batches:
        one, other = opt.step(x, y), twin.step(x, y)
        assert one.loss == pytest.approx(other.loss, rel=1e-10)
        assert one.new_loss == pytest.approx(other.new_loss, rel=1e-10)
    assert recorder.replays > 2
