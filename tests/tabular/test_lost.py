"""Members of a committee that are lost do not predict."""

from __future__ import annotations

import pytest
import torch

from marquardt.tabular import Settings, train
from marquardt.tabular.building import Rounds
from marquardt.tabular.choosing import Divided


@pytest.fixture(scope="module")
def clean() -> tuple[torch.Tensor, torch.Tensor]:
    x = torch.rand(60, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    return x, torch.sin(3 * x[:, :1]) + x[:, 1:].square()


@pytest.fixture(scope="module")
def committee(clean):
    return train(*clean, Settings(hidden=(6,), members=3, steps=40))


def rounds(committee, clean) -> Rounds:
    x, y = clean
    table = Divided(committee.inputs.apply(x), committee.targets.apply(y), torch.ones(len(x)).double(), None, 3)
    found = Rounds.__new__(Rounds)
    found.table = table
    return found


def test_a_member_that_fits_worse_than_others_predict_is_left_out(committee, clean):
    (part,) = committee.parts
    before = part.some(torch.arange(len(part.theta)))
    before.error[:] = 0.5 * 0.2**2
    lost = part.some(torch.arange(len(part.theta)))
    lost.theta[1] = 0.0  # predicts the mean
    kept = rounds(committee, clean).sound(lost, before)
    assert len(kept.theta) == len(part.theta) - 1
    assert not any(torch.equal(t, lost.theta[1]) for t in kept.theta)
    assert len(kept.steps) == len(kept.root) == len(kept.theta)


def test_those_that_chose_stay_if_all_others_are_lost(committee, clean):
    (part,) = committee.parts
    before = part.some(torch.arange(len(part.theta)))
    before.error[:] = 0.5 * 0.2**2
    lost = part.some(torch.arange(len(part.theta)))
    lost.theta[:] = 0.0
    assert rounds(committee, clean).sound(lost, before) is before


def test_members_that_disagree_widen_the_intervals(committee, clean):
    x, _ = clean
    (part,) = committee.parts
    mean, std = committee.predict(x)
    shift = 0.5
    last = part.network.sizes[-1]
    theta = part.theta.clone()
    part.theta[:, -last:] += torch.tensor([-shift, 0.0, shift])[: len(part.theta), None]
    try:
        far, wide = committee.predict(x)
    finally:
        part.theta[:] = theta
    assert torch.allclose(far, mean, atol=1e-6 + 0.5 * float(std.max()))
    spread = shift * (2 / 3) ** 0.5 * committee.targets.spread
    assert bool((wide >= 0.9 * spread).all())
