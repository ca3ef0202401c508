"""Kronecker: the damped solve, and the factored maximum."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import marquardt as mq
from marquardt.metric import Part
from marquardt.parts.direction import factored_maximum
from support.cases import mlp
from support.kronecker import NETWORKS, build, damped, represent
from support.reference import error


@pytest.mark.parametrize("every", [1, 3])
@pytest.mark.parametrize("name", ["linear mse", "linear ce", "conv ce", "tokens ce"])
def test_newton_solves_with_the_damped_factors(name, every):
    K = represent(*build(name), every=every)
    v = torch.randn(K.lin.n).double()
    for damping in (mq.Identity(), mq.FactoredMaxDiagonal(), mq.MaxDiagonal()):
        D = damping.update(None, K)
        for lam in (1e2, 1.0, 1e-2, 1e-4):
            H = damped(K, lam, D)
            assert error(K.newton(lam * D), torch.linalg.solve(H, K.gradient)) < 1e-9
            assert error(K.damped_quadratic(v, lam * D), v @ H @ v) < 1e-12


@pytest.mark.parametrize("every", [1, 3])
def test_one_number_for_a_layer(every):
    K = represent(*build("conv ce"), every=every)
    D = mq.LayerMeanEigenvalue().update(None, K)
    traces, start = [], 0
    for weight in (0, 2, 4):
        stop = start + K.lin.parameters.sizes[weight] + K.lin.parameters.sizes[weight + 1]
        traces.append(K.diagonal()[start:stop].sum() / min(stop - start, K.lin.most))
        start = stop
    assert error(torch.stack([part.entries for part in D.parts]), torch.stack(traces).repeat_interleave(2)) < 1e-12
    flat = mq.Diagonal(torch.tensor(0.3).double())
    same = mq.Diagonal(torch.tensor(1.0).double(), [Part(torch.tensor(0.3).double())] * 6)
    assert error(K.newton(same), K.newton(flat)) < 1e-12
    assert error(K.gradient @ K.newton(D), K.damped_quadratic(K.newton(D), D)) < 1e-12


@pytest.mark.parametrize("every", [1, 2])
def test_float32(every):
    model, loss, x, y = build("conv ce")
    K = represent(model, loss, x, y, every=every)
    expected = {lam: K.newton(torch.tensor(lam).double()) for lam in (1.0, 1e-3)}
    L = represent(model.float(), loss, x.float(), y, every=every)
    for lam in expected:
        found = L.newton(torch.tensor(lam))
        assert found.dtype == torch.float32
        assert error(found, expected[lam]) < 1e-4


def test_singular_in_float32_is_factored_in_float64():
    """Two inputs that are nearly the same, and no damping."""
    x = torch.randn(8, 1).repeat(1, 2) + torch.tensor([0.0, 1e-6])
    opt = mq.presets.gauss_newton(nn.Linear(2, 1), "mse", curvature=mq.Kronecker())
    step = opt.step(x, torch.randn(8, 1))
    assert "factored in float64" in step.note
    assert step.accepted


def test_invariant_to_rescaling_units_with_the_factored_maximum():
    """Inputs and outputs of a layer in other units: the step is the same one in those units."""
    model, x, y = mlp(3, 4, 2).double(), torch.randn(6, 3).double(), torch.randn(6, 2).double()
    model[1] = nn.ReLU()
    scale = torch.tensor([1e-2, 10.0, 3.0, 1e2]).double()
    other = mlp(3, 4, 2).double()
    other[1] = nn.ReLU()
    with torch.no_grad():
        other.load_state_dict(model.state_dict())
        other[0].weight *= scale[:, None]
        other[0].bias *= scale
        other[2].weight /= scale
    factor = torch.cat([scale.repeat_interleave(3), scale, (1 / scale).repeat(2), torch.ones(2).double()])
    K, L = (represent(m, "mse", x, y) for m in (model, other))
    A, B = (0.1 * mq.FactoredMaxDiagonal().update(None, C) for C in (K, L))
    assert error(L.newton(B), factor * K.newton(A)) < 1e-10


@pytest.mark.parametrize("name", ["linear ce", "linear no bias", "conv ce"])
def test_the_maximum_is_at_least_every_diagonal(name):
    model, loss, _, y = build(name)
    shape = NETWORKS[name]()[2].shape
    for floor in (0.0, 1e-4):
        D = None
        seen = []
        for k in range(4):
            K = represent(model, loss, torch.randn(shape).double() * (2 if k == 1 else 0.5), y)
            seen.append(K.diagonal())
            D = mq.MaxDiagonal(floor).update(D, K) if floor else factored_maximum(D, K, 0.0)
            entries = D.entries(K.lin.parameters.sizes)
            assert (entries >= torch.stack(seen).amax(0) * (1 - 1e-12)).all()
            if k == 0:
                assert (entries >= floor * (1 - 1e-12)).all()
                if not floor:
                    assert error(entries, seen[0]) < 1e-12


def test_the_factored_maximum_is_tight():
    """v ← max(v, diag A), u ← max(u, max_i diag B·A_ii/v_i): inputs that were larger once leave room in v."""
    model, loss, x, y = build("linear no bias")
    big, small = (represent(model, loss, c * x, y) for c in (3.0, 1.0))
    D = factored_maximum(factored_maximum(None, big, 0.0), small, 0.0)
    for i, (old, new) in enumerate(zip(big.layers, small.layers, strict=True)):
        B, A, C = (M[0].diagonal() for M in (old.left, old.right, new.right))
        v = torch.maximum(A, C)
        u = torch.maximum(B, new.left[0].diagonal() * (C / v).max())
        assert error(D.parts[i].u.flatten(), u) < 1e-12
        assert error(D.parts[i].v.flatten(), v) < 1e-12


U, V = torch.rand(1, 2, 1).double() + 0.1, torch.rand(1, 1, 3).double() + 0.1
NUMBER = torch.tensor(0.3, dtype=torch.float64)
ONE, ONES = torch.ones(2).double(), torch.ones(1).double()
PRODUCTS = {  # D of a layer of 3 × 2 in parts, and the u and v of which it is the product
    "u ⊗ v, u": ([Part(u=U, v=V), Part(u=U)], U.flatten(), torch.cat([V.flatten(), ONES])),
    "a number each": ([Part(NUMBER), Part(2 * NUMBER)], ONE, NUMBER * torch.tensor([1, 1, 1, 2])),
    "a number, entries of 1": ([Part(NUMBER), Part(ONE)], ONE, torch.cat([NUMBER.expand(3), ONES])),
    "u ⊗ v, entries like u": ([Part(u=U, v=V), Part(U.flatten())], U.flatten(), torch.cat([V.flatten(), ONES])),
    "by column": ([Part(V.expand(1, 2, 3).flatten()), Part(ONE)], ONE, torch.cat([V.flatten(), ONES])),
}


@pytest.mark.parametrize("kind", PRODUCTS)
def test_forms_of_a_product(kind):
    parts, u, v = PRODUCTS[kind]
    K = represent(nn.Linear(3, 2).double(), "mse", torch.randn(7, 3).double(), torch.randn(7, 2).double())
    A = mq.Diagonal(NUMBER, parts)
    order = torch.cat([torch.arange(6).view(2, 3), torch.arange(6, 8).view(2, 1)], 1).flatten()  # of [W b]
    assert error(A.entries([6, 2])[order], NUMBER * torch.kron(u, v)) < 1e-12
    (layer,) = K.layers
    B, C, root = layer.left[0], layer.right[0], NUMBER.sqrt()
    pi = ((C.diagonal() / v).mean() / (B.diagonal() / u).mean()).sqrt()
    H = torch.kron(B + root / pi * u.diag(), C + root * pi * v.diag())
    assert error(K.newton(A)[order], torch.linalg.solve(H, K.gradient[order])) < 1e-10


NO_PRODUCTS = {
    "entries of the weight": [Part(torch.rand(6).double()), Part(NUMBER)],
    "another u": [Part(u=U, v=V), Part(u=U + 1)],
    "a number beside u": [Part(u=U, v=V), Part(NUMBER)],
    "entries of the bias": [Part(NUMBER), Part(torch.rand(2).double())],
}


@pytest.mark.parametrize("kind", NO_PRODUCTS)
def test_what_is_no_product_is_refused(kind):
    K = represent(nn.Linear(3, 2).double(), "mse", torch.randn(7, 3).double(), torch.randn(7, 2).double())
    with pytest.raises(ValueError, match=r"'weight,bias'.*mq\.FactoredMaxDiagonal\(\), mq\.Identity\(\)"):
        K.newton(mq.Diagonal(NUMBER, NO_PRODUCTS[kind]))
