"""Networks that mq.fit trains, in the form that the others have."""

from __future__ import annotations

import pytest
import torch

from marquardt.tabular.law import Classes, Numbers, TwoClasses
from marquardt.tabular.members import Given, Limits
from marquardt.tabular.network import Network
from marquardt.tabular.wide import module_of, theta_of, trained_wide


def given(law, seed: int) -> Given:
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(2, 80, 3, generator=g, dtype=torch.float64)
    y = x[..., :1].tanh()
    weight = torch.ones(2, 80, dtype=torch.float64)
    weight[1, -1] = 0
    return Given(x, y if isinstance(law, Numbers) else (y[..., 0] > 0).long(), weight)


@pytest.mark.parametrize("activation", ["tanh", "silu", "relu", "identity"])
def test_a_module_is_the_network(activation):
    network = Network((3, 5, 4, 2), activation)
    theta = network.drawn(1, torch.Generator().manual_seed(0)).float().double()
    x = torch.randn(6, 3, generator=torch.Generator().manual_seed(1))
    model = module_of(network, theta[0])
    torch.testing.assert_close(model(x).double(), network.outputs(theta, x.double())[0], rtol=1e-5, atol=1e-6)
    assert torch.equal(theta_of(model), theta[0])


@pytest.mark.parametrize("law", [Numbers(1), TwoClasses(), Classes(2)], ids=["numbers", "two", "classes"])
def test_members_learn_and_keep_what_is_best_on_what_they_hold_out(law):
    network = Network((3, 16, 2 if isinstance(law, Classes) else 1), "tanh")
    data, held = given(law, 0), given(law, 1)
    found = trained_wide(network, law, data, held, Limits(30, 10), torch.Generator().manual_seed(0))
    z = found.outputs(held.x)
    start = network.drawn(2, torch.Generator().manual_seed(0))
    before = law.value(network.outputs(start, held.x), held.y).mean()
    assert float(law.value(z, held.y).mean()) < 0.3 * float(before)
    assert bool((found.variance(held.x) == 0).all())
    for steps, best in zip(found.steps, found.best_step.tolist(), strict=True):
        errors = [error for _, error, _, _ in steps]
        assert errors[best - 1] == min(errors)


def test_without_anything_held_out():
    law = Numbers(1)
    found = trained_wide(
        Network((3, 8, 1), "silu"), law, given(law, 0), None, Limits(20, 20), torch.Generator().manual_seed(0)
    )
    assert float(law.value(found.outputs(given(law, 1).x), given(law, 1).y).mean()) < 0.05
