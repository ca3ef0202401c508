"""ℓ, its derivative and the root of its second derivative against automatic differentiation."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch.func import hessian

from marquardt.tabular.law import Classes, Numbers, TwoClasses, probabilities, softened

CASES = {
    "numbers": (Numbers(3), 3, lambda g: torch.randn(1, 6, 3, generator=g, dtype=torch.float64)),
    "two": (TwoClasses(), 1, lambda g: torch.randint(0, 2, (1, 6), generator=g)),
    "classes": (Classes(4), 4, lambda g: torch.randint(0, 4, (1, 6), generator=g)),
}


@pytest.mark.parametrize("name", CASES)
def test_derivatives(name):
    law, c, targets = CASES[name]
    g = torch.Generator().manual_seed(0)
    z, y = 2 * torch.randn(1, 6, c, generator=g, dtype=torch.float64), targets(g)
    leaf = z.clone().requires_grad_()
    (expected,) = torch.autograd.grad(law.value(leaf, y).sum(), leaf)
    torch.testing.assert_close(law.slope(z, y), expected)
    root = law.root(z)
    assert root.shape == (1, 6, law.rank, c)
    for i in range(6):
        H = hessian(lambda one, i=i: law.value(one[None, None], y[:, i : i + 1]).sum())(z[0, i])
        torch.testing.assert_close(root[0, i].T @ root[0, i], H)


def test_values_are_those_of_torch():
    z = torch.randn(1, 5, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    y = torch.tensor([[0, 2, 1, 1, 0]])
    torch.testing.assert_close(Classes(3).value(z, y)[0], F.cross_entropy(z[0], y[0], reduction="none"))
    bits = (y > 0).double()
    one = F.binary_cross_entropy_with_logits(z[0, :, 0], bits[0], reduction="none")
    torch.testing.assert_close(TwoClasses().value(z[..., :1], bits)[0], one)


def test_probabilities_of_one_logit_and_of_several():
    z = torch.tensor([[0.7], [-30.0]], dtype=torch.float64)
    both = torch.cat((torch.zeros_like(z), z), 1)
    torch.testing.assert_close(probabilities(z), both.softmax(1))


def test_uncertain_logits_are_softened_towards_even_ones():
    z = torch.tensor([[2.0, 0.0, -1.0]], dtype=torch.float64)
    sharp, soft, even = (softened(z, torch.full_like(z, v)) for v in (0.0, 3.0, 1e9))
    torch.testing.assert_close(sharp, z.softmax(1))
    assert sharp[0, 0] > soft[0, 0] > 1 / 3
    torch.testing.assert_close(even, torch.full_like(z, 1 / 3), atol=1e-3, rtol=0)
