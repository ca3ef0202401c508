"""Weight decay: which parameters it is of, what it pulls towards, and its value."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from marquardt.model.decay import Penalty, WeightDecay
from marquardt.model.parameters import Parameters
from marquardt.weights import Weights
from support.reference import error

pytestmark = pytest.mark.usefixtures("double")


class RMSNorm(nn.Module):
    """One of a package that torch does not know."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale


def network() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4), RMSNorm(), nn.GRU(4, 2))


def parameters(model: nn.Module) -> Parameters:
    return Parameters(model, list(model.parameters()))


GRU = [f"3.{kind}_{side}_l0" for kind in ("weight", "bias") for side in ("ih", "hh")]
EXCLUDED = {
    "nothing": ((), set()),
    "bias": ("bias", {"0.bias", "1.bias", *GRU[2:]}),
    "norm": (["norm"], {"1.weight", "1.bias", "2.scale"}),
    "both": (("bias", "norm"), {"0.bias", "1.weight", "1.bias", "2.scale", *GRU[2:]}),
    "pattern": (["3.*", "0.w*"], {"0.weight", *GRU}),
    "layer": ("3", set(GRU)),
    "whole name": ("1.weight", {"1.weight"}),
    "last part": (["weight", "scale"], {"0.weight", "1.weight", "2.scale"}),
    "function": (lambda name, p: p.ndim > 1, {"0.weight", *GRU[:2]}),
}


@pytest.mark.parametrize("case", EXCLUDED)
def test_excluded(case):
    exclude, expected = EXCLUDED[case]
    model = network()
    spared = WeightDecay(0.1, exclude).spared(model, parameters(model))
    assert {name for name, free in zip(parameters(model).names, spared, strict=True) if free} == expected


def test_kinds_may_match_nothing_and_patterns_may_not():
    model = nn.Linear(2, 2, bias=False)
    assert WeightDecay(0.1, ("bias", "norm")).spared(model, parameters(model)) == [False]
    whole = network()
    some = Parameters(whole, list(whole[0].parameters()))  # what a pattern matches may be frozen
    assert WeightDecay(0.1, "3.*").spared(whole, some) == [False, False]
    with pytest.raises(ValueError, match=r"exclude='biass' matches none of the parameters weight: correct it"):
        WeightDecay(0.1, ("bias", "biass")).spared(model, parameters(model))


def test_parts_of_names():
    model = nn.ModuleDict({"encoder": nn.ModuleDict({"LayerNorm": nn.LayerNorm(2), "head": nn.Linear(2, 2)}),
                           "heads": nn.Linear(2, 2)})  # fmt: skip
    names = parameters(model).names

    def excluded(*patterns):
        spared = WeightDecay(0.1, patterns).spared(model, parameters(model))
        return [name for name, free in zip(names, spared, strict=True) if free]

    assert excluded("LayerNorm.weight") == ["encoder.LayerNorm.weight"]
    assert excluded("head") == ["encoder.head.weight", "encoder.head.bias"]
    assert excluded("encoder") == names[:4]
    assert excluded("head*") == names[4:]  # of whole names
    for pattern in ("ayerNorm.weight", "LayerNorm.w", "encoder.weight", "Norm", "layernorm.weight", "", "."):
        with pytest.raises(ValueError, match=r"matches none of .*LayerNorm.weight.*between dots.*whole names"):
            excluded(pattern)


def test_names_are_those_before_torch_compile():
    model = torch.compile(network())
    for pattern in ("0.*", "0", "0.weight"):
        assert WeightDecay(0.1, pattern).spared(model, parameters(model))[0]


@pytest.mark.parametrize("exclude", [3, [1], None])
def test_what_exclude_cannot_be(exclude):
    with pytest.raises(TypeError, match=r"exclude=.*patterns for names"):
        WeightDecay(0.1, exclude)


def test_towards():
    model = network()
    space, other = parameters(model), network()
    spared = [False] * len(space)
    assert WeightDecay(0.1).anchor(space, spared) is None
    start = WeightDecay(0.1, towards="start").anchor(space, spared)
    assert torch.equal(start, space.vector())
    nn.init.zeros_(model[0].weight)
    assert not torch.equal(start, space.vector())  # a copy
    expected = parameters(other).vector()
    for given in (other.state_dict(), list(other.parameters()), [p.float() for p in other.parameters()]):
        assert error(WeightDecay(0.1, towards=given).anchor(space, spared), expected) < 1e-7


def test_what_towards_cannot_be():
    model = nn.Linear(2, 2)
    space, state = parameters(model), model.state_dict()
    with pytest.raises(ValueError, match=r"towards='begin'.*start"):
        WeightDecay(0.1, towards="begin")
    with pytest.raises(TypeError, match=r"towards=3.*start"):
        WeightDecay(0.1, towards=3)
    bad = {
        "NoneType for parameter 'bias'": {"weight": state["weight"]},
        r"\(3,\) for parameter 'bias'.*\(2,\)": {**state, "bias": torch.zeros(3)},
        "1 tensors, and 2 parameters": [state["weight"]],
        "for parameter 'weight': it takes finite": {**state, "weight": torch.full((2, 2), torch.nan)},
    }
    for match, towards in bad.items():
        with pytest.raises(ValueError, match=match):
            WeightDecay(0.1, towards=towards).anchor(space, [False, False])
    found = WeightDecay(0.1, "bias", {"weight": state["weight"]}).anchor(space, [False, True])
    assert torch.equal(found, torch.cat([state["weight"].flatten(), torch.zeros(2)]))


@pytest.mark.parametrize("anchored", [True, False])
@pytest.mark.parametrize("weights", [[0.3, 0.3], [0.3, 0.0], [2.0, 0.3]])
def test_value_and_derivatives(weights, anchored):
    """The first weight of the last case is that of each element."""
    space = parameters(nn.Linear(3, 2))
    elements = {0: torch.rand(6).sub(0.3).clamp(min=0)} if weights[0] == 2 else {}
    towards = torch.randn(space.n) if anchored else None
    w = torch.cat([weights[0] * elements.get(0, torch.ones(6)), torch.full((2,), weights[1])])
    penalty, theta, d = Penalty(space, Weights(weights, elements), towards), space.vector(), torch.randn(space.n)

    def by_hand(theta):
        return 0.5 * (w * (theta if towards is None else theta - towards) ** 2).sum()

    assert error(penalty.value(space.tensors), by_hand(theta)) < 1e-14
    assert error(penalty.value([p.float() for p in space.tensors]), by_hand(theta)) < 1e-6
    assert error(penalty.slope(theta), torch.func.grad(by_hand)(theta)) < 1e-14
    assert error(penalty.times(d), w * d) < 1e-14
    assert error(penalty.quadratic(d), d @ (w * d)) < 1e-14
    assert error(penalty.scaled(2.0).slope(theta), 2 * torch.func.grad(by_hand)(theta)) < 1e-14
    rates = [0.0, 0.5, 3.0]
    assert penalty.along(theta, d, rates) == pytest.approx([float(by_hand(theta + lr * d)) for lr in rates], rel=1e-13)


def test_of_float32_it_is_added_up_in_float64():
    model = nn.Linear(1000, 100).float()
    found = Penalty(parameters(model), Weights([1.0, 1.0])).value(list(model.parameters()))
    exact = 0.5 * sum(p.double().square().sum() for p in model.parameters())
    assert found.dtype == torch.float64
    assert error(found, exact.detach()) < 1e-12
