"""The step does not depend on units: the batch's size, its chunks, its weights, the scale of the loss."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch
from torch import Tensor

import marquardt as mq
from support.by_hand import RECIPES
from support.cases import sample_weights
from support.reference import error
from support.steps import CURVATURES, EVERY_CURVATURE, EVERY_LOSS, MAX_MOMENTUM, lm, problem, theta

pytestmark = pytest.mark.usefixtures("double")


@EVERY_CURVATURE
@pytest.mark.parametrize("recipe", ["plain", "both"])
def test_chunks_change_nothing(curvature, recipe):
    model, x, y = problem("cross_entropy")
    twin, weight = copy.deepcopy(model), sample_weights(8)
    parts = {**RECIPES[recipe][0], "line_search": mq.Grid(1e-6, 2, 0.25)}
    opt, other = lm(model, "cross_entropy", curvature=curvature, **parts), lm(twin, "cross_entropy", **parts)
    for lr in (1.0, 1.0, 40.0, 1.0):
        opt.param_groups[0]["lr"] = other.param_groups[0]["lr"] = lr
        step, expected = opt.step(x, y, weight), other.step(x, y, weight)
        assert (step.rule, step.lr) == (expected.rule, expected.lr)
        assert step.new_loss == pytest.approx(expected.new_loss, rel=1e-9)
    assert error(theta(model), theta(twin)) < 1e-8


@pytest.mark.parametrize("curvature", [CURVATURES["dense-chunked"], CURVATURES["gram-chunked"]], ids=["dense", "gram"])
@pytest.mark.parametrize("how", ["ignored", "weight"])
def test_chunks_in_which_nothing_counts(curvature, how):
    """The batch has some weight; that one of its chunks has none is no reason to refuse it."""
    model, x, y = problem("cross_entropy")
    twin, weight = copy.deepcopy(model), None
    if how == "ignored":
        y[:3] = -100
    else:
        weight = torch.tensor([0.0, 0, 0, 1, 1, 1, 1, 1])
    step = lm(model, "cross_entropy", curvature=curvature).step(x, y, weight)
    expected = lm(twin, "cross_entropy").step(x, y, weight)
    assert step.loss == pytest.approx(expected.loss, rel=1e-12)
    assert error(theta(model), theta(twin)) < 1e-9


@EVERY_LOSS
@pytest.mark.parametrize("recipe", RECIPES)
def test_duplicated_samples_change_nothing(loss, recipe):
    """λ does not depend on the size of the batch."""
    model, x, y = problem(loss)
    twin, parts = copy.deepcopy(model), RECIPES[recipe][0]
    opt, other = lm(model, loss, **parts), lm(twin, loss, **parts)
    for _ in range(4):
        step, expected = opt.step(x, y), other.step(x.repeat(3, 1), y.repeat(3, *[1] * (y.ndim - 1)))
        assert (step.rule, step.lam) == (expected.rule, expected.lam)
        assert step.loss == pytest.approx(expected.loss, rel=1e-9)
        assert error(theta(model), theta(twin)) < 1e-8


@EVERY_LOSS
@EVERY_CURVATURE
def test_integer_weights_are_repeated_samples(loss, curvature):
    model, x, y = problem(loss)
    counts, twin = torch.tensor([1, 2, 0, 1, 3, 1, 0, 2]), copy.deepcopy(model)
    opt, other = lm(model, loss, curvature=curvature, **MAX_MOMENTUM), lm(twin, loss, **MAX_MOMENTUM)
    for _ in range(3):
        step = opt.step(x, y, counts.double())
        expected = other.step(x.repeat_interleave(counts, 0), y.repeat_interleave(counts, 0))
        assert step.rule == expected.rule
        assert step.loss == pytest.approx(expected.loss, rel=1e-9)
        assert error(theta(model), theta(twin)) < 1e-8


@EVERY_LOSS
def test_scale_of_the_weights_is_irrelevant(loss):
    model, x, y = problem(loss)
    twin, weight = copy.deepcopy(model), sample_weights(8)
    opt, other = lm(model, loss, **MAX_MOMENTUM), lm(twin, loss, **MAX_MOMENTUM)
    for scale in (1e-3, 1.0, 1e4):
        step, expected = opt.step(x, y, scale * weight), other.step(x, y, weight)
        assert step.loss == pytest.approx(expected.loss, rel=1e-9)
        assert error(theta(model), theta(twin)) < 1e-8


FACTORS = pytest.mark.parametrize("factor", [1e-3, 1e3])


def default_run(loss: mq.losses.Loss, mini: bool) -> tuple[Tensor, list[mq.Step]]:
    torch.manual_seed(0)
    labels = isinstance(loss, mq.losses.CrossEntropy)
    model, x, y = problem("cross_entropy" if labels else "mse", N=60, sizes=(2, 5, 3))
    opt, path, steps = mq.LM(model, loss), [], []
    for t in range(10):
        some = slice(t * 6, t * 6 + 6) if mini else slice(None)
        steps.append(opt.step(x[some], y[some]))
        path.append(theta(model))
    return torch.stack(path), steps


@FACTORS
@pytest.mark.parametrize("loss", [mq.losses.SquaredError(), mq.losses.CrossEntropy()], ids=["mse", "cross_entropy"])
@pytest.mark.parametrize("mini", [False, True], ids=["full batch", "mini-batches"])
def test_default_recipe_ignores_the_scale_of_the_loss(factor, loss, mini):
    path, steps = default_run(loss, mini)
    scaled_path, scaled_steps = default_run(replace(loss, factor=factor), mini)
    assert [s.rule for s in scaled_steps] == [s.rule for s in steps]
    assert [s.lam for s in scaled_steps] == pytest.approx([s.lam for s in steps], rel=1e-6)
    assert [s.loss for s in scaled_steps] == pytest.approx([factor * s.loss for s in steps], rel=1e-6)
    assert error(scaled_path, path) < 1e-6
