"""Some of the parameters train, the others stay."""

from __future__ import annotations

import copy

import pytest
import torch

from support.by_hand import RECIPES, ByHand
from support.reference import error
from support.steps import DENSE_AND_GRAM, lm, problem, theta
from support.unchanged import same

pytestmark = pytest.mark.usefixtures("double")


@pytest.mark.parametrize("recipe", RECIPES)
@DENSE_AND_GRAM
def test_chosen_parameters(recipe, curvature):
    model, x, y = problem()
    parts, options = RECIPES[recipe]
    chosen = [model[2].weight, model[0].bias]
    twin, start = copy.deepcopy(model), copy.deepcopy(model)
    hand = ByHand(twin, "mse", params=[twin[0].bias, twin[2].weight], **options)  # in the model's order
    opt = lm(model, params=iter(chosen), curvature=curvature, **parts)
    for _ in range(4):
        opt.step(x, y)
        hand.step(x, y)
    moved = [k for k, p in model.named_parameters() if not torch.equal(p, start.get_parameter(k))]
    assert moved == ["0.bias", "2.weight"]
    assert error(theta(model), theta(twin)) < 1e-8
    assert all(p.requires_grad for p in model.parameters())


def test_frozen_parameters():
    model, x, y = problem()
    model[0].requires_grad_(False)
    kept, twin = copy.deepcopy(model[0].state_dict()), copy.deepcopy(model)
    hand, opt = ByHand(twin, "mse", params=list(twin[2].parameters())), lm(model)
    for _ in range(4):
        assert opt.step(x, y).accepted
        hand.step(x, y)
    assert same(model[0].state_dict(), kept)
    assert error(theta(model), theta(twin)) < 1e-8
    assert [p.requires_grad for p in model.parameters()] == [False, False, True, True]
