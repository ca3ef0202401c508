"""∂²ℓ/∂z² by products: the blocks that hold it, and roots, against the matrix itself."""

from __future__ import annotations

import math

import pytest
import torch
from torch.func import hessian, vmap

from marquardt.losses import function as output_hessian
from support.losses import close

pytestmark = pytest.mark.usefixtures("double")

COUPLED = {
    "each": (0, lambda z: z.pow(4).sum()),
    "first": (1, lambda z: (z.logsumexp(0) + z.prod(0)).sum()),  # of one sample: dimension 1 of the batch
    "last": (2, lambda z: (z.logsumexp(1) + z.prod(1)).sum()),
    "all": (-1, lambda z: z.sum().square() + z.pow(3).sum()),
    "linear": (0, lambda z: 2 * z.sum()),
}
every_coupling = pytest.mark.parametrize(("dim", "fn"), COUPLED.values(), ids=COUPLED)


def made(fn, shape=(3, 2, 4)):
    torch.manual_seed(0)
    z = torch.randn(shape, requires_grad=True)
    (slope,) = torch.autograd.grad(vmap(fn)(z).sum(), z, create_graph=True)
    H = vmap(hessian(fn))(z.detach()).reshape(len(z), 1, z[0].numel(), z[0].numel())
    return output_hessian.product_of(slope, z), z.detach(), H


@every_coupling
def test_the_smallest_blocks_hold_all_of_it(dim, fn):
    product, z, H = made(fn)
    blocks = output_hessian.find(product, z, math.inf)
    assert blocks.dim == dim
    close(output_hessian.spread(blocks.H, dim, z), H)
    values, Q = output_hessian.eigen(blocks)
    S = output_hessian.spread(Q * values.sqrt()[..., None, :], dim, z)
    L, V = torch.linalg.eigh(H)
    close(S @ S.mT, V @ torch.diag_embed(L.abs()) @ V.mT, 1e-10)


def test_blocks_that_are_too_large_are_not_formed():
    product, z, _ = made(COUPLED["all"][1])
    calls = []
    assert output_hessian.find(lambda v: calls.append(v) or product(v), z, 7) is None
    assert len(calls) == 4  # the random vector, each alone, and one to rule out each dimension


@pytest.mark.parametrize("name", ["first", "all", "linear"])
def test_lanczos(name):
    """As many products as outputs: exact. The absolute value of H, whose eigenvalues have both signs."""
    product, z, H = made(COUPLED[name][1])
    e = torch.randn(z.shape)
    L, V = torch.linalg.eigh(H[:, 0])
    root = V @ torch.diag_embed(L.abs().sqrt()) @ V.mT
    close(output_hessian.lanczos(product, e), (root @ e.flatten(1)[..., None]).reshape(z.shape), 1e-7)
    if name != "linear":
        assert (L < -1e-3).any()


def test_lanczos_with_fewer_products_than_outputs():
    """Eigenvalues between 1 and 100, 200 outputs."""
    a = torch.logspace(0, 2, 200)
    Q, _ = torch.linalg.qr(torch.randn(200, 200))
    e = torch.randn(3, 200)
    found = output_hessian.lanczos(lambda v: v @ (Q * a) @ Q.mT, e)
    true = e @ (Q * a.sqrt()) @ Q.mT
    assert (found - true).norm() < 1e-3 * true.norm()
