"""What a posterior is asked for: samples, covariances, predictions, and how it reads."""

import copy
import pickle

import pytest
import torch
from torch import nn
from torch.func import functional_call

import marquardt as mq
from support.laplaced import classification, fitted, network, quiet, regression

CURVATURES = [mq.Dense(), mq.Gram(), mq.Kronecker()]


@pytest.mark.parametrize("curvature", CURVATURES, ids=str)
def test_samples_have_the_covariance(curvature):
    model, x, y = regression(hidden=2)
    p = mq.posterior(model, "mse", (x, y), weight_decay=1e-2, curvature=curvature)
    theta = p.sample(20_000, torch.Generator().manual_seed(1))
    assert theta.shape == (20_000, 9)
    C = p.covariance()
    scale = C.diagonal().sqrt()
    found = theta.T.cov() / scale / scale[:, None]
    torch.testing.assert_close(found, C / scale / scale[:, None], rtol=0, atol=0.05)
    torch.testing.assert_close(theta.mean(0), p.at.theta, rtol=0, atol=0.05 * float(scale.max()))
    again = p.sample(2, torch.Generator().manual_seed(1))
    assert torch.equal(again, p.sample(2, torch.Generator().manual_seed(1)))
    assert not torch.equal(again[0], again[1])


@pytest.mark.parametrize(
    ("options", "message"),
    [((3, 0), "generator=0: a torch.Generator"), ((1.5,), "k=1.5: the number of draws"), ((-1,), "k=-1: the number")],
)
def test_wrong_draws_are_refused(options, message):
    model, x, y = regression(hidden=2)
    p = mq.posterior(model, "mse", (x, y), weight_decay=1e-2)
    with pytest.raises((TypeError, ValueError), match=message):
        p.sample(*options)
    with pytest.raises(ValueError, match=r"inputs\[0, 0\] is nan: drop or repair such samples$"):
        p.predict(float("nan") * x)


def test_samples_go_into_the_model():
    """Of a linear model the predictions of samples have the predicted variance."""
    x = torch.randn(50, 2, dtype=torch.float64)
    model = fitted(nn.Linear(2, 1).double(), "mse", x, x.sum(1, keepdim=True) + 0.1 * torch.randn(50, 1), 1e-2)
    p = mq.posterior(model, "mse", (x, x.sum(1, keepdim=True)), weight_decay=1e-2, noise=0.1)
    draws = p.sample(5000, torch.Generator().manual_seed(0))
    outputs = torch.stack([functional_call(model, p.shaped(theta), (x[:3],)) for theta in draws])
    torch.testing.assert_close(outputs.std(0).detach(), p.predict(x[:3]).model_std, rtol=0.05, atol=0)
    assert list(p.shaped(draws[0])) == ["weight", "bias"]


def test_covariances_of_some_parameters():
    model, x, y = regression()
    p = mq.posterior(model, "mse", (x, y), weight_decay=1e-2)
    C = p.covariance()
    assert C.shape == (21, 21)
    torch.testing.assert_close(p.covariance("2.bias"), C[20:, 20:])
    torch.testing.assert_close(p.covariance(model[0].bias), C[10:15, 10:15])
    order = [20, *range(10, 15)]
    torch.testing.assert_close(p.covariance(["2.bias", model[0].bias]), C[order][:, order])
    for wrong, name in (("3.bias", "'3.bias'"), (torch.zeros(1), "a Tensor"), ([3], "a int")):
        with pytest.raises(ValueError, match=f"{name} is none of the parameters"):
            p.covariance(wrong)


def test_intervals():
    model, x, y = regression()
    found = mq.posterior(model, "mse", (x, y), weight_decay=1e-2).predict(x)
    low, high = found.interval(0.95)
    torch.testing.assert_close(high - found.mean, 1.959964 * found.std, rtol=1e-6, atol=0)
    torch.testing.assert_close(found.mean - low, high - found.mean)
    torch.testing.assert_close(found.std.square(), found.model_std.square() + found.noise_std.square())
    with pytest.raises(ValueError, match="level=95: a probability between 0 and 1"):
        found.interval(95)


def test_variance_grows_away_from_the_data():
    model, x, y = regression()
    p = mq.posterior(model, "mse", (x, y), weight_decay=1e-2)
    near, far = (p.predict(s * torch.ones(1, 2, dtype=torch.float64)).model_std for s in (0.0, 3.0))
    assert float(far) > 2 * float(near)


def test_evidence_prefers_the_model_that_made_the_data():
    """A line, by polynomials of degree 1, 2 and 6."""
    x = torch.linspace(-1, 1, 40, dtype=torch.float64)[:, None]
    y = 1.5 * x + 0.1 * torch.randn(40, 1, dtype=torch.float64)
    found = {}
    for degree in (0, 1, 6):
        powers = torch.cat([x**k for k in range(degree + 1)], 1)
        model = fitted(nn.Linear(degree + 1, 1, bias=False).double(), "mse", powers, y, 1e-4)
        found[degree] = mq.posterior(model, "mse", (powers, y), weight_decay=1e-4).tuned().log_evidence
    assert max(found, key=found.get) == 1


def test_a_copy_predicts_the_same():
    for problem, loss in ((classification, "cross_entropy"), (regression, "mse")):
        model, x, y = problem()
        p = mq.posterior(model, loss, (x, y), weight_decay=0.02)

        def predicted(p, x=x, loss=loss):
            return p.predict(x).std if loss == "mse" else p.probabilities(x)

        for other in (copy.deepcopy(p), pickle.loads(pickle.dumps(p))):
            assert torch.equal(predicted(other), predicted(p))
            assert other.log_evidence == p.log_evidence


def test_it_reads_as_what_it_is():
    model, x, y = regression(outputs=2)
    with quiet():  # outputs of different noise
        p = mq.posterior(model, "mse", (x, y), weight_decay=1e-2)
    lines = repr(p).splitlines()
    assert lines[0] == "Posterior of Sequential, 27 parameters, SquaredError"
    assert lines[1].strip() == "Dense, a matrix of 27 × 27"
    assert "noise σ = 0.1" in lines[2]
    assert "effective parameters" in lines[2]
    with quiet():
        rows = mq.posterior(network(2, 40, 2), "mse", (x[:9], y[:9]), weight_decay=10.0, noise="shared")
    assert rows.plan == "Gram, 18 rows of 202 parameters"
    assert p.log_likelihood > p.log_evidence


def test_probabilities_are_for_classes():
    model, x, y = regression()
    with pytest.raises(ValueError, match="SquaredError has no classes: use predict"):
        mq.posterior(model, "mse", (x, y), weight_decay=1e-2).probabilities(x)
