"""The reference against closed forms, finite differences and plain backward: what judges the rest is judged here."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from support import reference
from support.cases import CASES, build
from support.modules import Fn


@pytest.mark.usefixtures("double")
def test_the_reference_leaves_a_module_with_two_names_whole():
    layer = nn.Linear(2, 2)
    model = Fn(lambda x, f, g: g(f(x).tanh()), layer, layer)
    kept = dict(layer.named_parameters())
    reference.quadratic(model, "mse", torch.randn(3, 2), torch.randn(3, 2))
    assert all(layer._parameters[name] is p for name, p in kept.items())


def close(a, b, tol=1e-12):
    torch.testing.assert_close(a, b, rtol=tol, atol=tol)


@pytest.fixture
def X():
    torch.manual_seed(0)
    return torch.randn(6, 3, dtype=torch.float64)  # (N, F)


def linear(inputs, outputs):
    return nn.Linear(inputs, outputs, bias=False, dtype=torch.float64)


def test_linear_regression(X):
    """f = ‖Xw − y‖²/N: g = 2Xᵀr/N, G = 2XᵀX/N, and the undamped step solves the least-squares problem."""
    N, y, model = len(X), X.sin().sum(1, keepdim=True), linear(3, 1)
    q = reference.quadratic(model, "mse", X, y)
    w = model.weight.detach().reshape(-1)
    r = X @ w - y[:, 0]
    close(q.f, r @ r / N)
    close(q.g, 2 * X.T @ r / N)
    close(q.G, 2 * X.T @ X / N)
    close(w + q.step(0.0), torch.linalg.lstsq(X, y).solution[:, 0])


def test_weighted_linear_regression(X):
    """f = Σw r²/Σw: G = 2XᵀWX/Σw; as a sum: 2XᵀWX."""
    w, y = torch.rand(6, dtype=torch.float64), X[:, :1].cos()
    close(reference.quadratic(linear(3, 1), "mse", X, y, w).G, 2 * X.T @ (w[:, None] * X) / w.sum())
    close(reference.quadratic(linear(3, 1), nn.MSELoss(reduction="sum"), X, y, w).G, 2 * X.T @ (w[:, None] * X))


def test_softmax_regression(X):
    """G = (1/N) Σ (diag p − ppᵀ) ⊗ xxᵀ, g = (1/N) Σ (p − q) ⊗ x; empirical: (1/N) Σ (p − q)(p − q)ᵀ ⊗ xxᵀ."""
    N, model, y = len(X), linear(3, 4), torch.tensor([0, 1, 2, 3, 1, 1])
    p = (X @ model.weight.detach().T).softmax(1)  # (N, c)
    e = p - nn.functional.one_hot(y, 4)
    H = torch.diag_embed(p) - p[:, :, None] * p[:, None, :]  # (N, c, c)
    q = reference.quadratic(model, "cross_entropy", X, y)
    close(q.g, torch.einsum("nc,ni->ci", e, X).reshape(-1) / N)
    close(q.G, torch.einsum("ncd,ni,nj->cidj", H, X, X).reshape(12, 12) / N)
    close(q.diagonal(), torch.einsum("ncc,ni->ci", H, X**2).reshape(-1) / N)
    q = reference.quadratic(model, "cross_entropy", X, y, rows="empirical")
    close(q.G, torch.einsum("nc,nd,ni,nj->cidj", e, e, X, X).reshape(12, 12) / N)


def test_logistic_and_poisson_regression(X):
    """G = (1/N) Σ h xxᵀ with h = σ(1 − σ)(ay + 1 − y) and h = eᶻ."""
    N, model, y = len(X), linear(3, 1), torch.tensor([[0.0], [1], [1], [0], [1], [0]]).double()
    z = X @ model.weight.detach().T
    a = torch.tensor([3.0]).double()
    h = z.sigmoid() * (1 - z.sigmoid()) * (a * y + 1 - y)
    close(reference.quadratic(model, nn.BCEWithLogitsLoss(pos_weight=a), X, y).G, X.T @ (h * X) / N)
    close(reference.quadratic(model, "poisson", X, y).G, X.T @ (z.exp() * X) / N)


def test_huber_majoriser(X):
    """G = (1/N) Σ min(1, δ/|r|) xxᵀ, and the quadratic with this curvature lies above the loss."""
    N, model, loss = len(X), linear(3, 1), nn.HuberLoss(delta=0.5)
    r = torch.tensor([[0.1], [-0.4], [0.6], [-3.0], [10.0], [0.0]]).double()
    y = X @ model.weight.detach().T - r
    q = reference.quadratic(model, loss, X, y)
    close(q.G, X.T @ ((0.5 / r.abs()).clamp(max=1) * X) / N)
    theta = model.weight.detach()
    for d in torch.randn(20, 3, dtype=torch.float64):
        above = q.f + q.g @ d + d @ q.G @ d / 2
        assert loss(X @ (theta + d).T, y) <= above + 1e-12


@pytest.mark.parametrize("name", CASES)
def test_small_and_interesting(name):
    p = build(name)
    q = reference.quadratic(*p)
    assert len(q.g) <= 150
    assert q.z.shape[0] <= 6
    assert q.z.numel() <= 100
    assert q.g.norm() > 1e-3
    close(q.G, q.G.T)
    assert torch.linalg.eigvalsh(q.G)[0] > -1e-12 * q.G.norm()


@pytest.mark.parametrize("name", CASES)
def test_value_is_torchs(name):
    p = build(name)
    if p.weight is None:
        loss = reference.NAMED.get(p.loss, p.loss) if isinstance(p.loss, str) else p.loss
        z = reference.call(p.model, p.x).detach()
        f = nn.functional.mse_loss(z, torch.zeros_like(z)) if loss == "residual" else loss(z, p.y)
        close(reference.objective(p.loss, z, p.y, None), f, 1e-14)


@pytest.mark.parametrize("name", CASES)
def test_jacobian(name):
    """Against central differences along a random direction; both ways of computing it; and g against backward."""
    p = build(name)
    theta = reference.trainable(p.model, p.params)
    q = reference.quadratic(*p)
    rows, _ = reference.jacobian_by_rows(p.model, theta, p.x)
    close(rows, q.J)

    reference.objective(p.loss, reference.call(p.model, p.x), p.y, p.weight).backward()
    close(torch.cat([(torch.zeros_like(t) if t.grad is None else t.grad).reshape(-1) for t in theta.values()]), q.g)

    h, v = 1e-6, torch.randn(len(q.g), dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    parts = [
        part.view_as(t) for part, t in zip(v.split([t.numel() for t in theta.values()]), theta.values(), strict=True)
    ]

    def moved(by):
        with torch.no_grad():
            for t, part in zip(theta.values(), parts, strict=True):
                t.add_(by * part)
            return reference.call(p.model, p.x).detach()

    z_plus = moved(h)
    z_minus = moved(-2 * h)
    slope = (z_plus - z_minus).reshape(-1) / (2 * h)
    if name.endswith("padding"):  # torch defines the gradient of the padding row as 0, whatever the output does
        return
    torch.testing.assert_close(slope, q.J @ v, rtol=1e-6, atol=1e-6 * (1 + slope.abs().max().item()))


@pytest.mark.parametrize("name", ["mlp_elu", "lstm", "pinn", "ce"])
def test_step(name):
    """(G + diag A)δ = −g for A a number and a vector."""
    q = reference.quadratic(*build(name))
    D = torch.rand(len(q.g), dtype=torch.float64) + 0.1
    close(q.G @ q.step(0.1) + 0.1 * q.step(0.1), -q.g, 1e-10)
    close(q.G @ q.step(D) + D * q.step(D), -q.g, 1e-10)


@pytest.mark.parametrize("seed", range(5))
def test_adaptive_momentum(seed):
    """gᵀdθ = −ξδP√I_GG, dθᵀH dθ = δP², and the paper's α and β."""
    G = torch.Generator().manual_seed(seed)
    B, g, previous = (torch.randn(*s, dtype=torch.float64, generator=G) for s in [(7, 7), (7,), (7,)])
    H, xi, dP = B @ B.T + 0.1 * torch.eye(7, dtype=torch.float64), 0.9, 0.6
    d = reference.adaptive_momentum(H, g, previous, xi, dP)
    newton = torch.linalg.solve(H, g)
    I_GG, I_GF, I_FF = g @ newton, g @ previous, previous @ H @ previous
    close(g @ d, -xi * dP * I_GG.sqrt(), 1e-10)
    close((d @ H @ d).sqrt(), torch.tensor(dP, dtype=torch.float64), 1e-10)
    beta = ((1 - xi**2) * I_GG * dP**2 / (I_FF * I_GG - I_GF**2)).sqrt()
    alpha = (xi * dP * I_GG.sqrt() + beta * I_GF) / I_GG
    close(d, -alpha * newton + beta * previous, 1e-10)
