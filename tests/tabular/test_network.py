"""Several networks at once against nn.Sequential and its derivatives, one after the other."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.func import functional_call, jacrev

from marquardt.tabular.network import ACTIVATIONS, Network

MODULES = {"tanh": nn.Tanh, "silu": nn.SiLU, "relu": nn.ReLU, "identity": nn.Identity}
SIZES = [(3, 2), (3, 4, 2), (2, 5, 3, 1)]


def drawn(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def module(network: Network, theta: torch.Tensor) -> nn.Sequential:
    layers = []
    for a, b in zip(network.sizes, network.sizes[1:], strict=False):
        layers += [nn.Linear(a, b).double(), MODULES[network.activation]()]
    found = nn.Sequential(*layers[:-1])
    nn.utils.vector_to_parameters(theta, found.parameters())
    return found


def case(sizes, activation, k=3, N=5):
    network = Network(sizes, activation)
    x = torch.randn(k, N, sizes[0], generator=drawn(1), dtype=torch.float64)
    return network, network.drawn(k, drawn(0)), x


@pytest.mark.parametrize("activation", list(ACTIVATIONS))
@pytest.mark.parametrize("sizes", SIZES)
def test_outputs_and_derivatives_are_those_of_the_module(sizes, activation):
    network, theta, x = case(sizes, activation)
    z, inputs, slopes = network.passed(theta, x)
    torch.testing.assert_close(z, network.outputs(theta, x))
    back = torch.randn(3, 5, 4, sizes[-1], generator=drawn(2), dtype=torch.float64)
    rows = network.rows(theta, inputs, slopes, back).unflatten(1, (5, 4))
    gradient = network.gradient(theta, inputs, slopes, back[:, :, 0])
    for i in range(3):
        model = module(network, theta[i])
        names = [name for name, _ in model.named_parameters()]

        def outputs(flat, model=model, names=names, i=i):
            shapes = [p.shape for p in model.parameters()]
            parts = flat.split([s.numel() for s in shapes])
            given = {name: p.view(s) for name, p, s in zip(names, parts, shapes, strict=True)}
            return functional_call(model, given, (x[i],))

        J = jacrev(outputs)(theta[i])  # (N, c, n)
        torch.testing.assert_close(z[i], model(x[i]).detach())
        torch.testing.assert_close(rows[i], torch.einsum("nrc,ncp->nrp", back[i], J))
        torch.testing.assert_close(gradient[i], torch.einsum("nc,ncp->p", back[i, :, 0], J))


def test_inputs_that_all_members_share():
    network, theta, x = case((3, 4, 2), "tanh")
    torch.testing.assert_close(network.outputs(theta, x[0])[1:2], network.outputs(theta[1:2], x[:1]))


def test_groups_number_columns_tensors_or_everything():
    network = Network((3, 2, 1), "tanh")  # weights 2×3 and 1×2
    assert network.groups("all").tolist() == [0] * 11
    assert network.groups("tensors").tolist() == [0] * 6 + [1] * 2 + [2] * 2 + [3]
    assert network.groups("inputs").tolist() == [0, 1, 2, 0, 1, 2, 3, 3, 4, 4, 5]


def test_weights_are_drawn_as_those_of_linear():
    network = Network((16, 50, 4), "tanh")
    theta = network.drawn(20, drawn(0))
    assert 0.24 < float(network.weight(theta, 0).abs().max()) <= 0.25
    assert 0.13 < float(network.bias(theta, 1).abs().max()) <= 50**-0.5
