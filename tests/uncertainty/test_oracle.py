"""Against laplace-torch: the same networks, priors and noise, by another library."""

import pytest
import torch
from laplace import Laplace
from laplace.curvature import BackPackGGN, CurvlinopsGGN
from torch.utils.data import DataLoader, TensorDataset

import marquardt as mq
from support.laplaced import classification, regression

pytestmark = pytest.mark.usefixtures("double")  # laplace-torch has its prior in the default dtype

GRID = torch.linspace(-2, 2, 10, dtype=torch.float64).view(5, 2)


def theirs(ours, task, x, y, subset="all", structure="full", backend=CurvlinopsGGN):
    options = {"sigma_noise": float(ours.noise)} if task == "regression" else {}
    found = Laplace(
        ours.at.model, task, subset_of_weights=subset, hessian_structure=structure, backend=backend,
        prior_precision=ours.alphas[0], **options,
    )  # fmt: skip
    found.fit(DataLoader(TensorDataset(x, y), batch_size=len(x)))
    return found


# Without biases in the hidden layers: laplace-torch has blocks of their own for these, and the factors here have them
# together with the weight.
CASES = [
    ("all", "full", {"curvature": mq.Dense()}, True),
    ("all", "full", {"curvature": mq.Gram()}, True),
    ("all", "kron", {"curvature": mq.Kronecker()}, False),
    ("last_layer", "full", {"params": "last"}, True),
    ("last_layer", "kron", {"params": "last", "curvature": mq.Kronecker()}, False),
]


@pytest.mark.parametrize("backend", [CurvlinopsGGN, BackPackGGN])
@pytest.mark.parametrize(("subset", "structure", "options", "bias"), CASES, ids=lambda case: str(case)[:40])
@pytest.mark.parametrize("task", [regression, classification])
def test_evidence_and_predictions(task, subset, structure, options, bias, backend):
    model, x, y = task(bias=bias)
    loss, w = ("mse", 1e-2) if task is regression else ("cross_entropy", 0.02)
    ours = mq.posterior(model, loss, (x, y), weight_decay=w, **options)
    other = theirs(ours, task.__name__, x, y, subset, structure, backend)
    assert ours.log_evidence == pytest.approx(float(other.log_marginal_likelihood()), rel=1e-8)
    if task is classification:
        expected = other(GRID, link_approx="probit").detach()
        torch.testing.assert_close(ours.probabilities(GRID, joint=False), expected, rtol=1e-7, atol=1e-12)
        return
    mean, variance = other(GRID)
    found = ours.predict(GRID)
    torch.testing.assert_close(found.mean, mean.detach())
    torch.testing.assert_close(found.model_std.square(), variance[..., 0].detach(), rtol=1e-7, atol=1e-12)


def test_parameters_have_the_same_covariance():
    model, x, y = classification(hidden=2)
    for options in ({"curvature": mq.Dense()}, {"curvature": mq.Gram()}):
        ours = mq.posterior(model, "cross_entropy", (x, y), weight_decay=0.02, **options)
        expected = theirs(ours, "classification", x, y).posterior_covariance
        torch.testing.assert_close(ours.covariance(), expected, rtol=1e-6, atol=1e-10)


def test_the_prior_of_the_highest_evidence():
    model, x, y = classification()
    ours = mq.posterior(model, "cross_entropy", (x, y), weight_decay=0.02).tuned()
    other = theirs(ours, "classification", x, y)
    best = other.log_marginal_likelihood(torch.tensor(ours.alphas[0], dtype=torch.float64))
    for factor in (0.9, 1.1):
        assert other.log_marginal_likelihood(torch.tensor(factor * ours.alphas[0], dtype=torch.float64)) < best
