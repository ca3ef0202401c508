"""H⁻¹ = RRᵀ in every representation, against the matrix written out."""

import math

import pytest
import torch
from torch import nn

import marquardt as mq
from marquardt.uncertainty.precision import DenseData, KroneckerData, RowsData, Scaled
from support.laplaced import classification

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
