"""Counts and positive quantities, by the log of their mean."""

from __future__ import annotations

import pytest
import torch

from marquardt.losses import Gamma, NegativeBinomial
from support.losses import MATRIX, close, conforms, f64, fraction, image, normal
from support.unchanged import refused

LOSSES = [NegativeBinomial(), NegativeBinomial(0.2), Gamma(), Gamma(3.5)]


def targets(loss, shape=MATRIX):
    return torch.randint(5, shape).to(f64) if isinstance(loss, NegativeBinomial) else 0.1 + 3 * fraction(shape)


@pytest.mark.parametrize("loss", LOSSES, ids=repr)
def test_conforms(loss):
    torch.manual_seed(0)
    conforms(loss, normal(MATRIX), targets(loss))


@pytest.mark.parametrize("loss", LOSSES, ids=repr)
def test_the_bound_is_the_saturated_model(loss):
    y = targets(loss)
    close(loss.lower_bound(y, y), loss.value(y.log().clamp(min=-700), y), 1e-12)


def test_they_are_the_densities():
    """Up to what does not depend on the mean."""
    torch.manual_seed(0)
    z, zero = normal(MATRIX), torch.zeros(MATRIX, dtype=f64)
    for a in (0.3, 2.0):
        y = targets(NegativeBinomial())
        density = lambda z, a=a, y=y: torch.distributions.NegativeBinomial(1 / a, logits=z + torch.tensor(a).log())  # noqa: E731
        loss = NegativeBinomial(a)
        change = density(zero).log_prob(y) - density(z).log_prob(y)
        close(loss.ell(z, y) - loss.ell(zero, y), change, 1e-6)
        y = targets(Gamma())
        change = [torch.distributions.Gamma(a, a * (-t).exp()).log_prob(y) for t in (zero, z)]
        close(Gamma(a).ell(z, y) - Gamma(a).ell(zero, y), change[0] - change[1], 1e-10)


@pytest.mark.parametrize("loss", [NegativeBinomial(0.5), Gamma(2.0)], ids=repr)
def test_extreme_outputs_in_float32(loss):
    z = torch.tensor([[-60.0, -20.0, 0.0, 20.0, 60.0]])
    y = torch.tensor([[1.0, 3.0, 2.0, 1.0, 7.0]])
    exact = loss.gradient(z.double(), y.double())
    for g in (loss.gradient(z, y), image(loss.root(z, y))[..., 0]):
        assert ((g.double() - exact).abs() <= 1e-5 * exact.abs()).all()


def test_what_is_refused():
    z = torch.zeros(2, 1)
    with refused("targets[1, 0] is -1", "not negative"):
        NegativeBinomial().check(z, torch.tensor([[0.0], [-1.0]]))
    with refused("targets[0, 0] is 0", "Gamma needs positive targets"):
        Gamma().check(z, torch.tensor([[0.0], [1.0]]))
    for make in (lambda: NegativeBinomial(0.0), lambda: Gamma(-1.0)):
        with refused("must be positive and finite"):
            make()
