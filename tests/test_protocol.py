"""State that other versions have saved."""

from __future__ import annotations

import copy
import io
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import marquardt as mq
from marquardt.curvature import auto
from marquardt.protocol import VERSION, check_same_rate, grouped, weights
from support.cases import mlp
from support.reference import error
from support.unchanged import same

f64 = torch.float64

# The parts of LM(nn.Linear(2, 1), "mse", damping=FactoredMaxDiagonal()) of 0.1.0, what it had saved after three steps
# on `batch(i)`, and its fourth step, on `batch(3)`.
PARTS = {"curvature": mq.Auto(inertia=0.8), "damping": mq.FactoredMaxDiagonal(), "schedule": mq.GainRatio()}
OF_0_1_0 = torch.load(Path(__file__).parent / "fixtures" / "0.1.0" / "state.pt", weights_only=True)


def batch(i: int) -> tuple[torch.Tensor, torch.Tensor]:
    x = torch.tensor([[1, 2], [0.5, -1], [2, 0.25], [-1, 1], [0, 3]], dtype=f64)
    return x + 0.1 * i, torch.tensor([[1], [0], [2], [-1], [0.5]], dtype=f64)


def optimizer() -> mq.LM:
    model = torch.nn.Linear(2, 1).double()
    model.load_state_dict(OF_0_1_0["model"])
    return mq.LM(model, "mse", **PARTS)


def test_a_state_of_0_1_0_goes_on():
    opt = optimizer()
    opt.load_state_dict(copy.deepcopy(OF_0_1_0["optimizer"]))
    step = opt.step(*batch(3))
    assert [step.loss, step.new_loss] == pytest.approx(OF_0_1_0["losses"], rel=1e-12)
    assert error(torch.cat([p.detach().flatten() for p in opt.params]), OF_0_1_0["weights"]) < 1e-12


def file_of(opt: mq.LM) -> dict[str, Any]:
    torch.save(opt.state_dict(), buffer := io.BytesIO())
    buffer.seek(0)
    found: dict[str, Any] = torch.load(buffer, weights_only=True)
    return found


@pytest.mark.parametrize("dtype", [torch.float32, f64], ids=str)
def test_the_defaults_go_on_bit_for_bit(dtype):
    """With the lag of the average, through steps that renew D and steps that do not."""
    made = [torch.nn.Linear(2, 1).to(dtype) for _ in range(2)]
    opt, again = (mq.LM(model, "mse") for model in made)
    for i in range(26):
        data = [t.to(dtype) for t in batch(i)]
        step = opt.step(*data)
        if i in (0, 1, 7, 15):
            made[1].load_state_dict(made[0].state_dict())
            again.load_state_dict(file_of(opt))
        elif i > 0:
            other = again.step(*data)
            assert same(
                vars(replace(step, seconds=0.0, predicted=0.0)), vars(replace(other, seconds=0.0, predicted=0.0))
            )
        assert same(opt.state_dict(), again.state_dict())
    assert isinstance(opt._state.lag.lag, float)


def test_a_state_without_the_lag_of_the_average():
    """As those before had none."""
    opt, again = optimizer(), optimizer()
    for i in range(3):
        opt.step(*batch(i))
    assert opt._state.lag.lag is not None
    state = opt.state_dict()
    state["marquardt"]["lag"] = math.nan
    with pytest.raises(ValueError, match="'lag' is nan"):
        again.load_state_dict(state)
    assert again._state.steps == 0
    del state["marquardt"]["lag"]
    again.load_state_dict(state)
    assert again._state.lag.lag is None
    assert not again._state.lag.behind


@pytest.mark.parametrize("version", [VERSION + 1, 0, "2", None])
def test_a_state_of_an_unknown_version_is_refused_by_name(version):
    opt = optimizer()
    state = opt.state_dict()
    assert state["marquardt"]["version"] == VERSION
    state["marquardt"]["version"] = version
    with pytest.raises(ValueError, match=f"version {version!r}.*newer marquardt"):
        opt.load_state_dict(state)
    assert opt._state.steps == 0


@pytest.mark.parametrize(
    ("curvature", "bytes", "fits"),
    [
        (mq.Auto(inertia=0.8), None, True),
        (mq.Auto(inertia=0.8, memory="1GiB"), None, False),
        (PARTS["curvature"], 10, False),
    ],
    ids=["as it was", "other options", "another machine"],
)
def test_the_plan_is_saved_and_taken_up_where_it_still_fits(curvature, bytes, fits, monkeypatch):
    """It is a part of the state: a run that is resumed does not plan anew, unless memory or options are others."""
    opt = optimizer()
    opt.step(*batch(0))
    state = file_of(opt)
    assert state["marquardt"]["plan"]["kind"] == "Dense"
    if bytes is not None:
        monkeypatch.setattr(auto, "free", lambda device: bytes)
    again = mq.LM(torch.nn.Linear(2, 1).double(), "mse", damping=mq.FactoredMaxDiagonal(), curvature=curvature)
    again.load_state_dict(state)
    assert again._state.plan == (opt._state.plan if fits else None)
    if bytes is None:
        assert again.step(*batch(1)).accepted


@pytest.mark.parametrize(
    ("saved", "here", "match"),
    [
        ({"damping": mq.MaxDiagonal()}, {"damping": mq.Identity()}, "damping=MaxDiagonal, this optimizer has Identity"),
        ({}, {"damping": mq.MeanEigenvalue()}, "damping=FactoredMaxDiagonal, this optimizer has MeanEigenvalue"),
        ({"curvature": mq.Kronecker()}, {"curvature": mq.EKFAC()}, "curvature=Kronecker, this optimizer has EKFAC"),
        ({"curvature": mq.Kronecker()}, {"curvature": mq.Dense()}, "curvature=Kronecker, this optimizer has Dense"),
        (PARTS, {"curvature": mq.Kronecker()}, "curvature=Auto, this optimizer has Kronecker"),
    ],
)
def test_a_state_of_other_parts_is_refused_by_name(saved, here, match):
    """Before anything changes: D and what the curvature keeps would be taken for their own."""
    fixed = {"damping": mq.FactoredMaxDiagonal()}
    one, other = (mq.LM(torch.nn.Linear(2, 1).double(), "mse", **{**fixed, **parts}) for parts in (saved, here))
    one.step(*batch(0))
    before = other._state
    with pytest.raises(ValueError, match=match):
        other.load_state_dict(one.state_dict())
    assert other._state is before


@pytest.mark.parametrize(
    ("saved", "here"),
    [(mq.Auto(inertia=0.8), mq.Dense(inertia=0.8)), (mq.Dense(), mq.Gram()), (mq.Gram(), mq.Auto())],
)
def test_what_auto_may_pick_goes_on_with_each_other(saved, here):
    one, other = (mq.LM(torch.nn.Linear(2, 1).double(), "mse", curvature=c) for c in (saved, here))
    one.step(*batch(0))
    other.load_state_dict(one.state_dict())
    assert other.step(*batch(1)).accepted


def test_a_state_of_other_shapes_is_refused_though_there_are_as_many_numbers():
    def network(width: int, outputs: int) -> mq.LM:
        layers = torch.nn.Linear(3, width, bias=False), torch.nn.Linear(width, outputs, bias=False)
        return mq.LM(torch.nn.Sequential(*layers).double(), "mse")

    with pytest.raises(
        ValueError, match=r"20 parameters of the shapes \[\[4, 3\], \[2, 4\]\], .* \[\[5, 3\], \[1, 5\]\]"
    ):
        network(5, 1).load_state_dict(network(4, 2).state_dict())


# ---- Parameter groups.


def names(model: nn.Module, groups) -> list[list[str]]:
    known = {id(p): name for name, p in model.named_parameters()}
    return [[known[id(p)] for p in group["params"]] for group in groups]


def test_groups():
    """Each with its options; what is frozen is left out, and a parameter may stand alone."""
    model = mlp(2, 3, 1)
    assert names(model, grouped(model, None)) == [[name for name, _ in model.named_parameters()]]
    assert names(model, grouped(model, model[2].parameters())) == [["2.weight", "2.bias"]]
    assert names(model, grouped(model, [{"params": model[0].weight}])) == [["0.weight"]]
    model[0].bias.requires_grad_(False)
    given = [{"params": model[2].parameters(), "weight_decay": 0.1}, {"params": model[0].parameters(), "name": "first"}]
    found = grouped(model, iter(given))
    assert names(model, found) == [["2.weight", "2.bias"], ["0.weight"]]
    assert found[0]["weight_decay"] == 0.1
    assert found[1]["name"] == "first"
    with pytest.raises(TypeError, match="'params'"):
        grouped(model, [{"weight_decay": 0.1}])


def test_rates_may_be_tensors():
    groups = [{"lr": torch.tensor(0.5), "weight_decay": 0}, {"lr": 0.5, "weight_decay": 0.1}]
    check_same_rate(groups)
    groups[1]["lr"] = 0.25
    with pytest.raises(ValueError, match=r"\[0.5, 0.25\]"):
        check_same_rate(groups)


def test_weights_of_groups():
    """Copies in the precision of θ, one for every element; a tensor of one value is a number, and so are numbers."""
    p, q = torch.zeros(2, 3), torch.zeros(3)
    w = torch.tensor([0.0, 1.0, 2.0]).double()
    groups = [
        {"params": [p, q], "weight_decay": w},
        {"params": [p, q], "weight_decay": torch.full((3,), 0.5)},
        {"params": [torch.zeros(0)], "weight_decay": torch.rand(0)},
        {"params": [], "weight_decay": 3},
        {"params": [p, q], "weight_decay": 0.1},
    ]
    found = weights(groups, [False, False, False, True, False, False, True])
    assert found.numbers == (1.0, 1.0, 0.5, 0.0, 0.0, 0.1, 0.0)
    assert list(found.elements) == [0, 1]
    assert torch.equal(found.elements[0], torch.tensor([0.0, 1.0, 2.0, 0.0, 1.0, 2.0]))
    assert found.gaps
    w.fill_(7.0)
    assert torch.equal(found.elements[1], torch.tensor([0.0, 1.0, 2.0]))
    assert weights(groups, [True] * 7).elements == {}
    assert not weights([{"params": [q], "weight_decay": torch.tensor([1.0, 2.0, 3.0])}], [False]).gaps
