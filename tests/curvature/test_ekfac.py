"""EKFAC: second moments of whole rows in KFAC's eigenbasis, against a plain dense computation."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import Tensor, nn

import marquardt as mq
from support import reference
from support.kronecker import EVERY_NETWORK, NETWORKS, build
from support.kronecker import represent as kronecker
from support.reference import error
from support.steps import theta


def represent(model, loss, x, y, weight=None, rows=mq.Exact(), chunk=None, **options):
    return mq.EKFAC(**options).represent(mq.linearize(model, loss, x, y, weight, rows=rows, chunk=chunk))


def dense(K) -> Tensor:
    """G by its products: (n, n)"""
    return torch.stack([K @ e for e in torch.eye(K.lin.n, dtype=K.lin.theta.dtype)])


def tokens() -> tuple[nn.Module, str, Tensor, Tensor]:
    torch.manual_seed(3)
    model = nn.Sequential(nn.Embedding(7, 3), nn.Tanh(), nn.Flatten(), nn.Linear(12, 4)).double()
    return model, "cross_entropy", torch.randint(5, (9, 4)), torch.randint(4, (9,))


def normalised() -> tuple[nn.Module, str, Tensor, Tensor]:
    """Scales and a depthwise convolution: outputs with inputs of their own."""
    torch.manual_seed(4)
    model = nn.Sequential(
        nn.Conv1d(4, 4, 3, groups=4), nn.Tanh(), nn.LayerNorm([4, 6]), nn.Flatten(), nn.Linear(24, 2)
    ).double()
    return model, "mse", torch.randn(9, 4, 8).double(), torch.randn(9, 2).double()


def layers(K) -> list[Tensor]:
    """The places of each layer's parameters in θ"""
    places = torch.arange(K.lin.n).split(K.lin.parameters.sizes)
    return [torch.cat([places[i] for i in layer.members]) for layer in K.layers]


PROBLEMS = {**{name: partial(build, name) for name in NETWORKS}, "embedding": tokens, "small blocks": normalised}


@pytest.mark.parametrize("name", PROBLEMS)
@pytest.mark.parametrize("rows", [mq.Exact(), mq.Empirical()], ids=str)
def test_nearer_to_the_curvature_than_kfac(name, rows):
    """In the Frobenius norm, in every layer; and with the trace of the layer's block."""
    problem = PROBLEMS[name]()
    J = mq.linearize(*problem, rows=rows).rows()
    G, K = J.T @ J, kronecker(*problem, rows=rows)
    ours, theirs = dense(represent(*problem, rows=rows)), dense(K)
    for layer, at in zip(K.layers, layers(K), strict=True):
        exact, near, far = (M[at[:, None], at] for M in (G, ours, theirs))
        assert (exact - near).norm() <= (exact - far).norm() + 1e-12 * exact.norm()
        assert error(near.trace(), exact.trace()) < 1e-10
        if layer.small:  # blocks of single outputs are taken as they are
            assert error(near, far) < 1e-10
    assert error(ours, ours.T) < 1e-12


@EVERY_NETWORK
def test_s_is_the_diagonal_in_the_basis_of_the_factors(name):
    """diag QᵀGQ with Q = Q_B ⊗ Q_A by torch.kron, and nothing else of QᵀGQ."""
    problem = build(name)
    G, K = reference.quadratic(*problem).G, kronecker(*problem)
    found = dense(represent(*problem))
    for layer, at in zip(K.layers, layers(K), strict=True):
        O, J = layer.left.shape[1], layer.right.shape[1]
        places = [p.reshape(O, -1) for p in at.split([O * w for w in layer.widths])]
        at = torch.cat(places, 1).flatten()  # of [W b], row by row
        Q = torch.kron(torch.linalg.eigh(layer.left[0])[1], torch.linalg.eigh(layer.right[0])[1])
        s = (Q.T @ G[at[:, None], at] @ Q).diagonal()
        assert len(s) == O * J
        assert error(found[at[:, None], at], Q @ s.diag() @ Q.T) < 1e-10


@EVERY_NETWORK
def test_newton(name):
    """Q(s + λ)⁻¹Qᵀg, and what the optimizer asks for beside it"""
    E = represent(*build(name))
    G, g, lam = dense(E), E.gradient, torch.tensor(0.03).double()
    H = G + lam * torch.eye(len(g)).double()
    assert error(E.newton(lam), torch.linalg.solve(H, g)) < 1e-10
    v = torch.randn(len(g)).double()
    assert error(E.damped_quadratic(v, mq.Diagonal(lam)), v @ H @ v) < 1e-10
    assert error(E.quadratic(v), v @ G @ v) < 1e-10
    assert error(E.diagonal(), G.diagonal()) < 1e-10
    assert error(E.trace(), G.trace()) < 1e-10
    assert error(torch.stack([t for _, t, _ in E.traces()]).sum(), G.trace()) < 1e-10


@EVERY_NETWORK
def test_chunks_change_nothing(name):
    problem = build(name)
    assert error(dense(represent(*problem, chunk=2)), dense(represent(*problem))) < 1e-10


@pytest.mark.parametrize(
    "damping", [mq.MaxDiagonal(), mq.FactoredMaxDiagonal(), mq.LayerMeanEigenvalue()], ids=lambda d: type(d).__name__
)
def test_another_damping_is_refused(damping):
    model, loss, x, y = build("linear ce")
    opt, before = mq.LM(model, loss, curvature=mq.EKFAC(), damping=damping), theta(model).clone()
    with pytest.raises(ValueError, match=r"one number.*MeanEigenvalue.*Kronecker"):
        opt.step(x, y)
    assert torch.equal(theta(model), before)


def test_running_average():
    """Of s, from the second batch on; none on the same data; and what is far above the present counts ten times it."""
    problem = build("linear mse")
    fresh = represent(*problem)
    past = fresh.keep()

    def averaged(times: float, same_data: bool) -> mq.Curvature:
        E = represent(*problem)
        E.recall(past | {k: times * v for k, v in past.items() if k.startswith("s of")}, same_data)
        return E

    assert error(dense(averaged(9.0, True)), dense(fresh)) < 1e-12
    for ours, once in zip(averaged(3.0, False).bases, fresh.bases, strict=True):
        assert error(ours.s, (3 * 0.5 + 0.5) * once.s) < 1e-10
    assert averaged(1e4, False).trace() < 11 * fresh.trace()


@pytest.mark.parametrize("curvature", [mq.Kronecker, mq.EKFAC], ids=lambda c: c.__name__)
@pytest.mark.parametrize("order", [1, -1])
def test_a_bias_that_has_influence_in_one_chunk_alone(curvature, order):
    """InstanceNorm hides it, unless an activation between the two cuts something off: still one layer, not two."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(1, 3, 3), nn.ReLU(), nn.InstanceNorm2d(3), nn.Flatten(), nn.Linear(48, 4)).double()
    nn.init.constant_(model[0].bias, 4.0)
    x = torch.randn(20, 1, 6, 6).double() * torch.tensor([0.1, 10.0]).double().repeat_interleave(10).view(-1, 1, 1, 1)
    x, y = x if order == 1 else x.flip(0), torch.randint(4, (20,))
    G, whole = (curvature(chunk=c).represent(mq.linearize(model, "cross_entropy", x, y)) for c in (10, None))
    assert [layer.members for layer in G.layers] in ([[0, 1], [2, 3]], [[2, 3], [0, 1]])
    assert error(G.diagonal().sum(), G.trace()) < 1e-12
    assert error(G.trace(), whole.trace()) < 0.05
    assert error(dense(G), dense(whole)) < 0.05
    lam = torch.tensor(0.1).double()
    assert error(G.newton(lam), whole.newton(lam)) < 0.05
