"""Weight decay in every representation: H is what each of them documents, by a dense float64 computation."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import marquardt as mq
from marquardt.curvature.contract import Damped
from marquardt.metric import Layered
from support import reference
from support.cases import mlp
from support.reference import error
from support.regularised import DECAYS, ELEMENTS, above, by_parameter, dense, linearized, weights

pytestmark = pytest.mark.usefixtures("double")

LAM = 0.2
EVERY_DECAY = pytest.mark.parametrize("name", [*DECAYS, *ELEMENTS])
DAMPINGS = {
    "identity": mq.Identity(),
    "layers": mq.LayerMeanEigenvalue(),
    "max": mq.MaxDiagonal(),
    "factored": mq.FactoredMaxDiagonal(),
    "kronecker": mq.KroneckerMetric(every=1),
    "kronecker, older": mq.KroneckerMetric(every=10),
}
EXACT = mq.MatrixFree(tolerance=0.0, iterations=400, backtrack=False)


class Mixed(nn.Sequential):
    """A convolution of two groups, vectors, a linear layer and an embedding, two rows of which are never looked up."""

    def __init__(self) -> None:
        super().__init__(nn.Conv1d(2, 4, 2, groups=2), nn.LayerNorm(3), nn.Linear(12, 2))
        self.table = nn.Embedding(5, 3)

    def forward(self, x):
        rows = self[1](self[0](x)).tanh() + self.table(torch.tensor([1, 3, 1, 0]))
        return self[2](rows.flatten(1))


def data(model):
    shape = (6, 2, 4) if isinstance(model, Mixed) else (6, 3)
    return torch.randn(shape), torch.randn(6, 2)


class Case:
    """G, g and W by hand beside a representation with its damping."""

    def __init__(self, curvature, damping, name="all", model=None, lam=LAM):
        self.model = Mixed() if model is None else model
        self.x, self.y = data(self.model)
        self.by_parameter = by_parameter(self.model, name)
        exact = reference.quadratic(self.model, "mse", self.x, self.y)
        self.W = weights(self.model, self.by_parameter)
        self.theta = nn.utils.parameters_to_vector(self.model.parameters()).detach()
        self.G, self.g = exact.G, exact.g + self.W * self.theta
        if name in ELEMENTS:
            self.lin = linearized(self.model, self.x, self.y, self.by_parameter, curvature.needs)
        else:
            given = DECAYS[name][0]
            self.lin = mq.linearize(self.model, "mse", self.x, self.y, needs=curvature.needs, weight_decay=given)
        self.curvature = curvature.represent(self.lin)
        self.sizes = self.lin.parameters.sizes
        self.D = damping.update(None, self.curvature)
        self.H = Damped(self.curvature, lam * self.D.positive())

    def check(self, H, tolerance=1e-8):
        """The step and vᵀHv are those of H, the model of the loss is that of G + W."""
        step, v = self.H.step(), torch.randn_like(self.g)
        assert error(step, -torch.linalg.solve(H, self.g)) < tolerance
        assert error(self.H.quadratic(v), v @ H @ v) < tolerance
        gd, dGd = self.H.model(v)
        assert error(gd, self.g @ v) < tolerance
        assert error(self.H.gradient, self.g) < tolerance
        return dGd, v


@EVERY_DECAY
@pytest.mark.parametrize("damping", DAMPINGS)
@pytest.mark.parametrize("curvature", [mq.Dense(), mq.Dense(small=0), mq.Gram(), mq.Gram(whole=0), EXACT], ids=str)
def test_step(curvature, damping, name):
    """G + W + λD; with Gram and a D that is a Kronecker product, what lies above W + λD."""
    case = Case(curvature, DAMPINGS[damping], name)
    A = LAM * dense(case.D.positive(), case.sizes) + case.W.diag()
    if isinstance(case.D, Layered) and isinstance(curvature, mq.Gram):
        raised = above(case.D, LAM, case.W, case.sizes)
        assert torch.linalg.eigvalsh(raised - A).min() > -1e-10
        A = raised
    dGd, v = case.check(case.G + A)
    assert error(dGd, v @ (case.G + case.W.diag()) @ v) < 1e-8
    V = torch.randn(2, len(v))
    exact = case.G + LAM * dense(case.D.positive(), case.sizes) + case.W.diag()
    assert error(case.H.products(V), V @ exact @ V.T) < 1e-8


@pytest.mark.parametrize("rows", [mq.Exact(), mq.Sampled(1), mq.Empirical(), mq.Fraction(0.5)], ids=str)
@pytest.mark.parametrize("curvature", [mq.Dense(chunk=4), mq.Gram(chunk=4), mq.Gram(), mq.Dense()], ids=str)
def test_chunks_and_other_rows(curvature, rows):
    """Whatever G is made of, g is that of the objective."""
    model = Mixed()
    x, y = data(model)
    decay = mq.WeightDecay(0.3, exclude="bias")
    lin = mq.linearize(model, "mse", x, y, rows=rows, needs=curvature.needs, weight_decay=decay)
    G = curvature.represent(lin)
    W = weights(model, by_parameter(model, "no bias"))
    theta = nn.utils.parameters_to_vector(model.parameters()).detach()
    g = reference.quadratic(model, "mse", x, y).g + W * theta
    H = lin.rows().T @ lin.rows() + LAM * torch.eye(len(W)) + W.diag()
    step = Damped(G, mq.Diagonal(torch.tensor(LAM))).step()
    assert error(step, -torch.linalg.solve(H, g)) < 1e-8
    assert error(G.gradient, g) < 1e-10


@pytest.mark.parametrize("curvature", [mq.Dense(small=0), mq.Gram(), mq.Gram(whole=0)], ids=["dense", "gram", "layers"])
@pytest.mark.parametrize("lam", [1e-6, 1.0])
@pytest.mark.parametrize("w", [1e-6, 1.0])
def test_in_float32(w, lam, curvature):
    """To what the rows themselves are good for, at any λ and w."""
    model = Mixed().float()
    x, y = (t.float() for t in data(model))
    lin = mq.linearize(model, "mse", x, y, needs=curvature.needs, weight_decay=w)
    step = Damped(curvature.represent(lin), mq.Diagonal(torch.tensor(lam).float())).step()
    theta = nn.utils.parameters_to_vector(model.parameters()).detach().double()
    exact = reference.quadratic(model.double(), "mse", x.double(), y.double())
    assert error(step, -torch.linalg.solve(exact.damped(lam + w), exact.g + w * theta)) < 1e-3


@EVERY_DECAY
def test_hessian(name):
    lam = 20.0  # it is not positive definite here
    case = Case(mq.Hessian(), mq.MeanEigenvalue(), name, lam=lam)
    names = [k for k, _ in case.model.named_parameters()]

    def f(theta):
        parts = theta.split(case.sizes)
        at = {k: part.view_as(p) for k, part, p in zip(names, parts, case.model.parameters(), strict=True)}
        data = nn.functional.mse_loss(torch.func.functional_call(case.model, at, case.x), case.y)
        return data + 0.5 * (case.W * theta**2).sum()

    H = torch.autograd.functional.hessian(f, case.theta)  # torch.func.hessian is wrong for a LayerNorm
    dGd, v = case.check(H + lam * dense(case.D, case.sizes))
    assert error(dGd, v @ H @ v) < 1e-8


@EVERY_DECAY
def test_the_statistics_that_dampings_ask_for_are_those_of_the_data(name):
    for curvature in (mq.Dense(), mq.Gram(), mq.Hessian(), EXACT):
        case = Case(curvature, mq.Identity(), name)
        plain = curvature.represent(mq.linearize(case.model, "mse", case.x, case.y, needs=curvature.needs))
        assert torch.equal(case.curvature.trace(), plain.trace())
        assert torch.equal(case.curvature.diagonal(), plain.diagonal())
        assert case.curvature.rank == plain.rank


@pytest.mark.parametrize("damping", [mq.Identity(), mq.KroneckerMetric()], ids=["identity", "kronecker"])
@pytest.mark.parametrize("name", ["all", "no bias", "by column"])
@pytest.mark.parametrize("curvature", [mq.Dense(), mq.Gram()], ids=["dense", "gram"])
def test_without_damping_it_is_the_minimum_of_the_model(curvature, name, damping):
    """λ = 0; what does not decay has fewer unknowns than rows here, and the limit is the same."""
    case = Case(curvature, damping, name, model=nn.Linear(3, 2))
    step = Damped(case.curvature, 0.0 * case.D).step()
    limit = 1e-5 if name != "all" and isinstance(curvature, mq.Gram) else 1e-8
    assert error(step, -torch.linalg.solve(case.G + case.W.diag(), case.g)) < limit


def place(case: Case, layer, block):
    """The block of a layer in a matrix of all parameters: (n, n)"""
    where = torch.arange(case.lin.n).split(case.sizes)
    order = torch.cat([where[i].view(len(layer.left[0]), -1) for i in layer.members], 1).flatten()
    found = torch.zeros(case.lin.n, case.lin.n)
    found[order[:, None], order] = block
    return found


@pytest.mark.parametrize("name", ["all", "no bias", *ELEMENTS])
@pytest.mark.parametrize("damping", [mq.MeanEigenvalue(), mq.LayerMeanEigenvalue(), mq.FactoredMaxDiagonal()], ids=str)
def test_kronecker(damping, name):
    """(B + diag u/π) ⊗ (A + π·diag v), with λD + W as u ⊗ v in every layer; W, or the largest of each column of it."""
    case = Case(mq.Kronecker(), damping, name, model=mlp(3, 4, 2))
    entries, H = LAM * case.D.entries(case.sizes), torch.zeros_like(case.G)
    for layer in case.curvature.layers:
        B, A = layer.left[0], layer.right[0]
        w = in_layer(case, layer, case.W).amax(0)  # (I,)
        root = w.max().sqrt()
        D = in_layer(case, layer, entries)  # (O, I)
        u, v = (D[:, 0] / D[0, 0]).clone(), D[0].clone()  # of u ⊗ v, up to a factor
        if isinstance(damping, mq.FactoredMaxDiagonal):
            rho = (v[:-1].mean() / u.mean()).sqrt()
            u, v = u + root / rho, v + rho * w / root
        else:
            v = v + w
        pi = ((A.diagonal() / v).mean() / (B.diagonal() / u).mean()).sqrt()
        H += place(case, layer, torch.kron(B + u.diag() / pi, A + pi * v.diag()))
    dGd, v = case.check(H)
    assert error(dGd, (case.lin.rows() @ v).square().sum() + v @ (case.W * v)) < 1e-8


def in_layer(case: Case, layer, vector):
    """The entries of a layer as a matrix: (O, I)"""
    parts = vector.split(case.sizes)
    return torch.cat([parts[i].view(len(layer.left[0]), -1) for i in layer.members], 1)


@EVERY_DECAY
def test_ekfac(name):
    """Q·diag(s + λ + w)·Qᵀ, w the diagonal of QᵀWQ."""
    case = Case(mq.EKFAC(), mq.MeanEigenvalue(), name, model=mlp(3, 4, 2))
    E, H = case.curvature, torch.zeros_like(case.G)
    for layer, basis in zip(E.layers, E.bases, strict=True):
        Q = torch.kron(basis.left[0], basis.right[0])
        w = Q.T @ in_layer(case, layer, case.W).flatten().diag() @ Q
        values = basis.s[0].flatten() + LAM * case.D.scale + w.diagonal()
        H += place(case, layer, Q @ values.diag() @ Q.T)
    case.check(H)
    if name == "all":  # in every basis the same
        assert error(H, dense_of(E) + LAM * case.D.scale * torch.eye(len(H)) + case.W.diag()) < 1e-10


def dense_of(G):
    return torch.stack([G @ unit for unit in torch.eye(G.lin.n)])


def test_kronecker_refuses_what_its_old_factors_cannot_be():
    model = mlp(3, 4, 2)
    x, y = torch.randn(6, 3), torch.randn(6, 2)
    parts = {"curvature": mq.Kronecker(every=3), "damping": mq.MeanEigenvalue()}
    assert mq.LM(model, "mse", weight_decay=0.3, **parts).step(x, y).accepted
    opt = mq.LM(model, "mse", weight_decay=mq.WeightDecay(0.3, "bias"), **parts)
    with pytest.raises(ValueError, match=r"Kronecker\(every=3\).*every=1"):
        opt.step(x, y)
