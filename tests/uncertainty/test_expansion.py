"""Sums over all data at θ, and the rows of other inputs, against plain autograd."""

import math

import pytest
import torch
from torch import distributions as D
from torch import nn

import marquardt as mq
from marquardt.curvature.cost import Shapes
from marquardt.losses import resolve
from marquardt.model.parameters import Parameters
from marquardt.sources import source
from marquardt.uncertainty import expansion
from marquardt.uncertainty.expansion import LIKELIHOODS, Expansion, fits, likelihood_of
from marquardt.uncertainty.precision import DenseData, KroneckerData, RowsData, Scaled
from support.laplaced import classification, quiet, regression
from support.reference import jacobian, trainable


def made(model, loss, data):
    return Expansion(model, resolve(loss), Parameters(model, list(model.parameters())), source(data))


def test_sums():
    model, x, y = regression(outputs=2)
    w = torch.rand(len(x), dtype=torch.float64)
    at = made(model, "mse", (x, y, w))
    J, z = jacobian(model, trainable(model), x)
    r = z - y
    assert at.value == pytest.approx(float((w[:, None] * r**2).sum()))
    assert at.normaliser == pytest.approx(2 * float(w.sum()))
    torch.testing.assert_close(at.squares, (w[:, None] * r**2).sum(0))
    torch.testing.assert_close(at.gradient, 2 * J.T @ (w[:, None] * r).flatten())
    G = 2 * (J.T * w.repeat_interleave(2)) @ J
    torch.testing.assert_close(at.curvature(mq.Dense(), True).G, G)
    rows = torch.cat([piece.dense(torch.float64) for piece in at.pieces(written=True)])
    torch.testing.assert_close(rows.square().sum(), G.trace())


def test_rows_of_other_inputs():
    model, x, y = regression(outputs=3)
    at = made(model, "mse", (x, y))
    grid = torch.randn(4, 2, dtype=torch.float64)
    found, mean, rows = at.functional(grid)
    J, z = jacobian(model, trainable(model), grid)
    torch.testing.assert_close(found, z)
    torch.testing.assert_close(mean, z[..., None])
    torch.testing.assert_close(rows[:, :, 0], J.view(4, 3, -1))
    free = made(model, "residual", (x, None))  # needs no targets
    assert free.value == pytest.approx(float(model(x).detach().square().sum()))


def test_a_model_with_two_outputs():
    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.mean, self.log_variance = nn.Linear(2, 1), nn.Linear(2, 1)

        def forward(self, x):
            return self.mean(x), self.log_variance(x)

    model = Two().double()
    x, y = torch.randn(9, 2, dtype=torch.float64), torch.randn(9, 1, dtype=torch.float64)
    at = made(model, "gaussian_nll", (x, y))
    _, mean, rows = at.functional(x)
    torch.testing.assert_close(mean[:, 0], torch.cat(model(x), 1).detach())
    assert rows.shape == (9, 1, 2, 6)
    assert bool((rows[:, 0, 0, 3:] == 0).all())
    assert bool((rows[:, 0, 1, :3] == 0).all())


def test_what_has_room_and_time(monkeypatch):
    cpu = torch.device("cpu")
    small = Shapes(n=100, N=50, R=1, layers=(), itemsize=8)
    wide = Shapes(n=10_000_000, N=50, R=1, layers=(), itemsize=8)
    long = Shapes(n=1_000_000, N=1_000_000, R=1, layers=(), itemsize=8)
    monkeypatch.setattr(expansion, "free", lambda device: 2**33)
    assert [fits(s, s.m < s.n, cpu) for s in (small, wide, long)] == [True, False, False]
    monkeypatch.setattr(expansion, "free", lambda device: 2**37)
    assert [fits(s, s.m < s.n, cpu) for s in (small, wide, long)] == [True, True, False]
    monkeypatch.setattr(expansion, "free", lambda device: None)
    assert [fits(s, s.m < s.n, cpu) for s in (small, long)] == [True, False]


f64 = torch.float64
Z = torch.linspace(-1, 1.5, 6, dtype=f64)[:, None]

# loss, outputs, targets, log p(y|z)
LOG_P = {
    "poisson": (mq.losses.Poisson(), Z, torch.arange(6.0)[:, None], lambda z, y: D.Poisson(z.exp()).log_prob(y)),
    "negative binomial": (
        mq.losses.NegativeBinomial(dispersion=0.7),
        Z,
        torch.arange(6.0)[:, None],
        lambda z, y: D.NegativeBinomial(1 / 0.7, logits=z + math.log(0.7)).log_prob(y),
    ),
    "gamma": (
        mq.losses.Gamma(shape=2.5),
        Z,
        torch.rand(6, 1) + 0.1,
        lambda z, y: D.Gamma(2.5, 2.5 * (-z).exp()).log_prob(y),
    ),
    "normal with variance": (
        mq.losses.GaussianNLL(),
        torch.cat((Z, Z.flip(0)), 1),
        torch.randn(6, 1),
        lambda z, y: D.Normal(z[:, :1], (z[:, 1:] / 2).exp()).log_prob(y),
    ),
    "the same in full": (
        mq.losses.GaussianNLL(full=True, variance=True),
        torch.cat((Z, Z.exp()), 1),
        torch.randn(6, 1),
        lambda z, y: D.Normal(z[:, :1], z[:, 1:].sqrt()).log_prob(y),
    ),
    "categorical": (
        mq.losses.CrossEntropy(),
        torch.cat((Z, Z.flip(0), 0 * Z), 1),
        torch.tensor([0, 1, 2, 0, 1, 2]),
        lambda z, y: D.Categorical(logits=z).log_prob(y),
    ),
    "bernoulli": (
        mq.losses.BinaryCrossEntropy(),
        Z,
        torch.tensor([[0.0], [1], [0], [1], [0], [1]]),
        lambda z, y: D.Bernoulli(logits=z).log_prob(y),
    ),
    "margins": (
        mq.losses.SoftMargin(),
        Z,
        torch.tensor([[-1.0], [1], [-1], [1], [-1], [1]]),
        lambda z, y: D.Bernoulli(logits=z).log_prob((y + 1) / 2),
    ),
    "bernoulli probability": (
        mq.losses.BinaryProbabilities(),
        Z.sigmoid(),
        torch.tensor([[0.0], [1], [0], [1], [0], [1]]),
        lambda z, y: D.Bernoulli(z).log_prob(y),
    ),
}


def data(name):
    loss, z, y, log_p = LOG_P[name]
    return loss, z, y.to(f64) if y.is_floating_point() else y, log_p


@pytest.mark.parametrize("name", LOG_P)
def test_the_loss_and_its_constant_are_the_likelihood(name):
    loss, z, y, log_p = data(name)
    weight = torch.tensor([1.0, 2, 0, 1, 3, 0.5], dtype=f64)
    kind = likelihood_of(loss)(loss)
    expected = log_p(z, y).reshape(6, -1).sum(1)
    for w in (None, weight):
        found = kind.unit * loss.value(z, y, w) + kind.constant(y, w)
        torch.testing.assert_close(-found, (expected if w is None else w * expected).sum())


def test_every_likelihood_has_a_loss():
    named = {loss.likelihood for loss in mq.losses.resolve.__globals__["NAMES"].values()}
    assert named - {None} == set(LIKELIHOODS)


def drawn(z, V, k=200_000):
    """Outputs that are normal: (k, C)"""
    return D.MultivariateNormal(z, V).sample((k,))


@pytest.mark.parametrize("name", ["poisson", "negative binomial", "gamma", "normal with variance"])
def test_moments_are_those_of_draws(name):
    loss, *_ = data(name)
    two = name == "normal with variance"
    z, V = torch.tensor([0.4, -1.0][: 1 + two], dtype=f64), torch.diag(torch.tensor([0.09, 0.3][: 1 + two], dtype=f64))
    found = likelihood_of(loss)(loss).moments(z[None, None], V[None, None], torch.zeros(1))
    draws = drawn(z, V)
    mu = draws[:, 0] if two else draws.exp()
    noise = {"poisson": mu, "negative binomial": mu + 0.7 * mu**2, "gamma": mu**2 / 2.5}.get(name, draws[:, -1:].exp())
    for value, expected in zip(found, (mu.mean(), mu.var(), noise.mean()), strict=True):
        assert float(value) == pytest.approx(float(expected), rel=0.02)


def test_probabilities_are_those_of_draws():
    """The approximation is good to two digits, and the joint one knows that logits move together."""
    z = torch.tensor([1.0, 0.0, -0.5], dtype=f64)
    root = torch.tensor([[1.0, 0, 0], [0.8, 0.5, 0], [0.2, -0.3, 0.7]], dtype=f64)
    V = root @ root.T
    kind = likelihood_of(mq.losses.CrossEntropy())(mq.losses.CrossEntropy())
    expected = drawn(z, V).softmax(1).mean(0)
    joint, apart = (kind.probabilities(z[None, None], V[None, None], joint)[0, 0] for joint in (True, False))
    assert float((joint - expected).abs().max()) < 0.02
    assert float((joint - expected).norm()) < float((apart - expected).norm())
    common = V + 5.0  # the same number is added to all logits
    torch.testing.assert_close(kind.probabilities(z[None, None], common[None, None], True)[0, 0], joint)
    assert float(joint.sum()) == pytest.approx(1)


def test_two_classes_are_one_logit():
    z, V = torch.randn(4, 1, 2, dtype=f64), torch.eye(2, dtype=f64).expand(4, 1, 2, 2) * 0.7
    two, one = (likelihood_of(loss)(loss) for loss in (mq.losses.CrossEntropy(), mq.losses.BinaryCrossEntropy()))
    found = two.probabilities(z, V, True)[..., 1]
    expected = one.probabilities(z[..., 1:] - z[..., :1], 2 * V[..., :1, :1], True)[..., 0]
    torch.testing.assert_close(found, expected)
    p, slope = z[..., :1].sigmoid(), (z[..., :1].sigmoid() * (-z[..., :1]).sigmoid())
    other = resolve("binary_probabilities")
    probability = likelihood_of(other)(other).probabilities(p, V[..., :1, :1] * slope[..., None] ** 2, True)
    torch.testing.assert_close(probability, one.probabilities(z[..., :1], V[..., :1, :1], True))
    sharp, same = likelihood_of(other)(other).sharpened(p, V[..., :1, :1] * slope[..., None] ** 2, 1.7)
    again = likelihood_of(other)(other).probabilities(sharp, same, True)
    torch.testing.assert_close(again, one.probabilities(*one.sharpened(z[..., :1], V[..., :1, :1], 1.7), True))


def test_ordered_classes():
    z, V = torch.tensor([[[-1.0, 0.3, 1.2]]], dtype=f64), torch.eye(3, dtype=f64)[None, None] * 0.4
    loss = mq.losses.Ordinal()
    p = likelihood_of(loss)(loss).probabilities(z, V, True)[0, 0]
    assert p.shape == (4,)
    assert float(p.sum()) == pytest.approx(1)
    assert float(p.min()) > 0
    below = drawn(z[0, 0], V[0, 0]).sigmoid().mean(0)
    torch.testing.assert_close(p.cumsum(0)[:3], below, rtol=0.02, atol=0.01)


@pytest.mark.parametrize(
    ("loss", "outputs", "targets", "shape"),
    [
        ("gaussian_nll", 4, torch.randn(20, 2), (20, 2)),
        ("poisson", 1, torch.randint(0, 4, (20, 1)).float(), (20, 1)),
        ("bce", 2, torch.randint(0, 2, (20, 2)).float(), (20, 2)),
        ("cross_entropy", 3, torch.randint(0, 3, (20,)), (20, 3)),
        ("ordinal", 2, torch.randint(0, 3, (20,)), (20, 3)),
    ],
)
def test_predictions_have_the_shape_of_the_targets(loss, outputs, targets, shape):
    class Increasing(nn.Module):
        def forward(self, z):
            return z.exp().cumsum(1) if loss == "ordinal" else z

    model = nn.Sequential(nn.Linear(2, outputs), Increasing()).double()
    x = torch.randn(20, 2, dtype=f64)
    y = targets.to(f64) if targets.is_floating_point() else targets
    with quiet():  # untrained
        p = mq.posterior(model, loss, (x, y), weight_decay=1.0)
    if likelihood_of(resolve(loss)).classes:
        found = p.probabilities(x)
        assert bool((found > 0).all() & (found < 1).all())
    else:
        found = p.predict(x).std
        assert bool((found > 0).all())
    assert found.shape == shape


def test_classes_at_several_positions():
    model = nn.Conv1d(2, 3, 1).double()
    x, y = torch.randn(8, 2, 5, dtype=f64), torch.randint(0, 3, (8, 5))
    with quiet():
        p = mq.posterior(model, "cross_entropy", (x, y), weight_decay=0.1)
    flat = x.movedim(1, 2).reshape(-1, 2)
    head = nn.Linear(2, 3).double()
    head.load_state_dict({"weight": model.weight[..., 0].detach(), "bias": model.bias.detach()})
    with quiet():
        same = mq.posterior(head, "cross_entropy", (flat, y.flatten()), weight_decay=0.1)
    found = p.probabilities(x)
    assert found.shape == (8, 3, 5)
    torch.testing.assert_close(found.movedim(1, 2).reshape(-1, 3), same.probabilities(flat))
    assert p.log_evidence == pytest.approx(same.log_evidence)


N = 9


def rows(m):
    return torch.randn(m, N, dtype=torch.float64)


def kronecker(model, x, y):
    G = mq.Kronecker(decay=0.0).represent(mq.linearize(model, "cross_entropy", x, y))
    return KroneckerData(G.layers, G.parameters, G.lin.scale), G


def written_out(G):
    """The matrix of products with G, in Σ-units."""
    eye = torch.eye(G.parameters.n, dtype=torch.float64)
    return torch.stack([G @ v for v in eye]) / G.lin.scale


def dense_case():
    J = rows(20)
    return DenseData(J.T @ J), J.T @ J, [N]


def rows_case():
    J = rows(4)
    return RowsData(J), J.T @ J, [N]


def kronecker_case():
    model, x, y = classification()
    data, G = kronecker(model, x, y)
    return data, written_out(G), G.parameters.sizes


def convolution_case():
    model = nn.Sequential(nn.Conv1d(2, 4, 2, groups=2), nn.Tanh(), nn.GroupNorm(2, 4), nn.Flatten(), nn.Linear(8, 3))
    x, y = torch.randn(11, 2, 3).double(), torch.randint(0, 3, (11,))
    data, G = kronecker(model.double(), x, y)
    return data, written_out(G), G.parameters.sizes


def embedding_case():
    model = nn.Sequential(nn.Embedding(5, 3), nn.Flatten(), nn.Linear(6, 3, bias=False)).double()
    data, G = kronecker(model, torch.randint(0, 5, (11, 2)), torch.randint(0, 3, (11,)))
    return data, written_out(G), G.parameters.sizes


CASES = [dense_case, rows_case, kronecker_case, convolution_case, embedding_case]


@pytest.mark.parametrize("t", [1.0, 2.5])
@pytest.mark.parametrize("case", CASES)
def test_h(case, t):
    data, G, sizes = case()
    n = len(G)
    alpha = torch.cat([torch.full((size,), 0.3 + 0.2 * i, dtype=torch.float64) for i, size in enumerate(sizes)])
    H = t * (1.7 * G + alpha.diag())
    P = data.precision(1.7, alpha) if t == 1 else Scaled(data.precision(1.7, alpha), t)
    inverse = torch.linalg.inv(H)
    V = torch.randn(5, n, dtype=torch.float64)
    half, eye = P.half(V), torch.eye(n, dtype=torch.float64)
    torch.testing.assert_close(half @ half.T, V @ inverse @ V.T)
    torch.testing.assert_close(P.drawn(eye).T @ P.drawn(eye), inverse)
    torch.testing.assert_close(P.variances, inverse.diagonal().contiguous())
    assert P.log_determinant == pytest.approx(float(torch.linalg.slogdet(H)[1]))


@pytest.mark.parametrize("case", CASES)
def test_eigenvalues_and_trace(case):
    data, G, _ = case()
    found = data.eigenvalues().sort().values
    expected = torch.linalg.eigvalsh(G)[-len(found) :]
    torch.testing.assert_close(found[found > 1e-9], expected[expected > 1e-9])
    assert data.trace() == pytest.approx(float(G.diagonal().sum()))


def test_a_matrix_that_cannot_be_inverted_is_refused():
    J, none = rows(4), torch.zeros(N, dtype=torch.float64)
    for G in (J.T @ J, torch.zeros(N, N, dtype=torch.float64)):
        with pytest.raises(ValueError, match=r"does not determine all parameters.*weight_decay=None"):
            DenseData(G).precision(1.0, none)
    small = DenseData(J.T @ J).precision(1.0, none + 1e-9)
    expected = (N - 4) * math.log(1e-9) + float(torch.linalg.slogdet(J @ J.T)[1])
    assert small.log_determinant == pytest.approx(expected, rel=1e-4)
