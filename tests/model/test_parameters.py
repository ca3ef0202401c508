"""Some of the parameters train, the others stay; θ as one vector."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from marquardt.model.parameters import Parameters, Position, changing
from support.reference import error
from support.steps import DENSE_AND_GRAM, RECIPES, ByHand, lm, problem, theta
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


# ---- θ as one vector


def made() -> tuple[nn.Module, Parameters]:
    """Sizes 6, 3, 3, 1 in the model's order."""
    model = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1))
    return model, Parameters(model, list(model.parameters()))


def test_vector_and_model():
    model, parameters = made()
    first = parameters.vector()
    assert torch.equal(first, theta(model))
    assert (parameters.n, len(parameters), parameters.names) == (13, 4, ["0.weight", "0.bias", "1.weight", "1.bias"])
    other, d = torch.randn(13), torch.randn(13)
    parameters.assign(other)
    assert torch.equal(theta(model), other)
    parameters.shift(d, -0.5)
    assert error(theta(model), other - 0.5 * d) < 1e-15
    assert not torch.equal(first, other)  # a copy, as it was


def test_joined():
    """None is 0; the gradient of an embedding may be sparse."""
    _, parameters = made()
    grads = [torch.arange(6.0).view(3, 2), None, torch.ones(1, 3).to_sparse(), torch.tensor([7.0])]
    assert parameters.joined(grads).tolist() == [0, 1, 2, 3, 4, 5, 0, 0, 0, 1, 1, 1, 7]


@pytest.mark.parametrize(
    ("which", "expected"),
    [
        ((0,), [((0, 6), (0, 6))]),
        ((0, 1), [((0, 9), (0, 9))]),
        ((1, 2, 3), [((6, 13), (0, 7))]),
        ((0, 2, 3), [((0, 6), (0, 6)), ((9, 13), (6, 10))]),
        ((1, 0), [((6, 9), (0, 3)), ((0, 6), (3, 9))]),  # neighbours, but not in this order
        ((), []),
    ],
)
def test_ranges(which, expected):
    _, parameters = made()
    found = parameters.ranges(parameters.tensors[i] for i in which)
    assert [((a.start, a.stop), (b.start, b.stop)) for a, b in found] == expected


def test_without():
    _, parameters = made()
    v = torch.arange(1.0, 14)
    assert parameters.without(v, iter([1, 3])).tolist() == [1, 2, 3, 4, 5, 6, 0, 0, 0, 10, 11, 12, 0]
    assert v.all()
    assert parameters.without(v, []) is v


def test_position_there_and_back(monkeypatch):
    """To θ + lr·d from wherever it is, and back to θ to the last bit; the same point again costs nothing."""
    model, parameters = made()
    position, start = Position(parameters), theta(model)
    d, e = torch.randn(13), torch.randn(13)
    for direction, lr in ((d, 0.3), (d, 0.7), (e, 0.7), (e, 0.7)):
        position.move(direction, lr)
        assert torch.equal(theta(model), start.add(direction, alpha=lr))
    for _ in range(2):
        position.move()
        assert torch.equal(theta(model), start)
    position.move(d, 0.5)
    monkeypatch.setattr(parameters, "shift", lambda *_: pytest.fail("gone again"))
    position.move(d, 0.5)


def test_what_changes_in_a_state_dict():
    """Parameters that train under all their names, and buffers; neither frozen ones nor what is no tensor."""

    class Extra(nn.Linear):
        def get_extra_state(self):
            return "words"

        def set_extra_state(self, state):
            pass

    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2), nn.BatchNorm1d(2), Extra(2, 2))
    model[1].weight = model[0].weight
    params = [model[0].weight, model[3].bias]
    found = changing(model, params)
    buffers = [f"2.{name}" for name in ("running_mean", "running_var", "num_batches_tracked")]
    assert list(found) == ["0.weight", "1.weight", *buffers, "3.bias"]
    assert same(found, {name: model.state_dict()[name] for name in found})
    model[0].weight.data.zero_()
    assert found["1.weight"].any()  # a copy
