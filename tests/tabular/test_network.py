"""Several networks at once against nn.Sequential, one after the other, and losses against automatic differentiation."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch.func import functional_call, hessian, jacrev

from marquardt.tabular.network import ACTIVATIONS, Classes, Network, Numbers, TwoClasses, probabilities, softened
from support.committees import drawn, generator, module


@pytest.mark.parametrize("activation", list(ACTIVATIONS))
@pytest.mark.parametrize("sizes", [(3, 2), (3, 4, 2), (2, 5, 3, 1)])
def test_outputs_and_derivatives_are_those_of_the_module(sizes, activation):
    network = Network(sizes, activation)
    theta, x = network.drawn(3, generator()), drawn(3, 5, sizes[0], seed=1)
    z, inputs, slopes = network.passed(theta, x)
    torch.testing.assert_close(z, network.outputs(theta, x))
    back = drawn(3, 5, 4, sizes[-1], seed=2)
    rows = network.rows(theta, inputs, slopes, back).unflatten(1, (5, 4))
    gradient = network.gradient(theta, inputs, slopes, back[:, :, 0])
    for i in range(3):
        model = module(network, theta[i])
        shapes = {name: p.shape for name, p in model.named_parameters()}

        def outputs(flat, model=model, shapes=shapes, i=i):
            parts = flat.split([s.numel() for s in shapes.values()])
            given = {name: p.view(s) for (name, s), p in zip(shapes.items(), parts, strict=True)}
            return functional_call(model, given, (x[i],))

        J = jacrev(outputs)(theta[i])  # (N, c, n)
        torch.testing.assert_close(z[i], model(x[i]).detach())
        torch.testing.assert_close(rows[i], torch.einsum("nrc,ncp->nrp", back[i], J))
        torch.testing.assert_close(gradient[i], torch.einsum("nc,ncp->p", back[i, :, 0], J))
    torch.testing.assert_close(network.outputs(theta, x[0])[:1], z[:1])  # inputs that all members share


def test_groups_number_columns_and_tensors_or_everything():
    network = Network((3, 2, 1), "tanh")  # weights 2×3 and 1×2
    assert network.groups("all").tolist() == [0] * 11
    assert network.groups("inputs").tolist() == [0, 1, 2, 0, 1, 2, 3, 3, 4, 4, 5]


def test_weights_are_drawn_as_those_of_linear():
    network = Network((16, 50, 4), "tanh")
    theta = network.drawn(20, generator())
    assert 0.24 < float(network.layer(theta, 0)[0].abs().max()) <= 0.25
    assert 0.13 < float(network.layer(theta, 1)[1].abs().max()) <= 50**-0.5


# --- losses ---


@pytest.mark.parametrize(
    ("law", "c", "y", "plain"),
    [
        (Numbers(3), 3, drawn(1, 6, 3, seed=1), lambda z, y: 0.5 * (z - y).square().sum(-1)),
        (
            TwoClasses(), 1, torch.tensor([[0, 1, 1, 0, 1, 0]]),
            lambda z, y: F.binary_cross_entropy_with_logits(z[..., 0], y.double(), reduction="none"),
        ),
        (
            Classes(4), 4, torch.tensor([[0, 3, 2, 1, 1, 0]]),
            lambda z, y: F.cross_entropy(z[0], y[0], reduction="none")[None],
        ),
    ],
    ids=["numbers", "two classes", "classes"],
)  # fmt: skip
def test_losses_and_their_derivatives(law, c, y, plain):
    z = 2 * drawn(1, 6, c)
    torch.testing.assert_close(law.value(z, y), plain(z, y))
    leaf = z.clone().requires_grad_()
    (expected,) = torch.autograd.grad(law.value(leaf, y).sum(), leaf)
    torch.testing.assert_close(law.slope(z, y), expected)
    root = law.root(z)
    assert root.shape == (1, 6, law.rank, c)
    for i in range(6):
        H = hessian(lambda one, i=i: law.value(one[None, None], y[:, i : i + 1]).sum())(z[0, i])
        torch.testing.assert_close(root[0, i].T @ root[0, i], H)


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
