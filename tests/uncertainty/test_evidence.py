"""α, β and γ of the highest evidence."""

import math

import pytest
import torch

import marquardt as mq
from marquardt.uncertainty import laplace, reestimate
from marquardt.uncertainty.evidence import alone, grouped_names, noise_precision
from support.laplaced import classification, network, plain_regression, regression


def test_the_fixed_point_is_the_highest_evidence():
    """At θ̂ the derivatives by log α and log β are 0, by differences of the evidence written out."""
    model, x, y = regression()
    p = mq.posterior(model, "mse", (x, y), weight_decay=1e-2).tuned()
    alpha, beta = p.alphas[0], p.beta
    here = plain_regression(model, x, y, alpha, beta).log_evidence
    assert p.log_evidence == pytest.approx(here)
    for factors in ((1.05, 1.0), (1 / 1.05, 1.0), (1.0, 1.05), (1.0, 1 / 1.05)):
        assert plain_regression(model, x, y, factors[0] * alpha, factors[1] * beta).log_evidence < here
    assert alpha == pytest.approx(p.gamma / sum(p.squares_by_tensor), rel=1e-6)
    assert beta == pytest.approx((len(y) - p.gamma) / float((model(x) - y).detach().square().sum()), rel=1e-6)


@pytest.mark.parametrize("groups", ["layers", "parameters", [["0.*"], ["2.weight", "2.bias"]]])
def test_groups_have_priors_of_their_own(groups):
    model, x, y = regression(N=80)
    one = mq.posterior(model, "mse", (x, y), weight_decay=1e-2).tuned()
    p = one.tuned(groups)
    assert p.log_evidence > one.log_evidence
    members = grouped_names(p.names, groups)
    assert len(set(p.alphas)) == len(members)
    for some in members:
        gamma, size = (sum(values[i] for i in some) for values in (p.gamma_by_tensor, p.squares_by_tensor))
        assert p.alphas[some[0]] == pytest.approx(gamma / size, rel=0.01)


def test_one_round_is_mackays():
    model, x, y = regression()
    p = laplace(model, "mse", (x, y), [1e-2] * 4)
    alpha, beta = reestimate(p)
    assert alpha == pytest.approx([p.gamma / sum(p.squares_by_tensor)] * 4)
    assert beta == pytest.approx((len(y) - p.gamma) / p.at.value)
    # as weight decay of the mean of squares, w = 2α/(βN)
    w = alpha[0] * p.decay_of_one(beta)
    assert w == pytest.approx(2 * alpha[0] / (beta * len(y)))
    again = laplace(model, "mse", (x, y), [w] * 4)
    assert again.alphas[0] == pytest.approx(alpha[0] * again.beta / beta)
    p = laplace(model, "mse", (x, y), [1e-2, 1e-2, 1e-2, 0.0])  # what has no prior has none afterwards
    alpha, _ = reestimate(p)
    assert (alpha[3], len(set(alpha[:3]))) == (0, 1)
    assert p.tuned().alphas[3] == 0


def test_classes_have_no_noise():
    model, x, y = classification()
    p = laplace(model, "cross_entropy", (x, y), 0.02)
    assert reestimate(p)[1] == 1
    assert p.decay_of_one(1.0) == pytest.approx(1 / len(x))
    assert p.tuned().log_evidence > p.log_evidence


def test_ends_of_the_range():
    """Parameters of size 0, targets that are fitted exactly, and nothing left of the targets."""
    x = torch.randn(30, 2, dtype=torch.float64)
    model = network(2, 4, 1)
    with torch.no_grad():
        for p in model.parameters():
            p.zero_()
    found = laplace(model, "mse", (x, x.sum(1, keepdim=True)), 0.1)
    assert found.alphas[0] < reestimate(found)[0][0] < math.inf
    exact = laplace(model, "mse", (x, 0 * x[:, :1]), 0.1)
    alpha, beta = reestimate(exact)
    assert 0 < beta < math.inf
    assert all(0 <= a * exact.decay_of_one(beta) < math.inf for a in alpha)
    targets, squares = torch.tensor(10.0), torch.tensor(2.0)
    assert float(noise_precision(targets, torch.tensor(10.0), squares, 0.0)) == pytest.approx(0.05)
    assert all(0 < each < math.inf for each in alone(torch.ones(3, dtype=torch.float64), 0.0, 3, 10.0, 0.0, 1e-16))


@pytest.mark.parametrize("factor", [1e-3, 1e3])
def test_units_of_the_targets_change_nothing(factor):
    model, x, y = regression(weight_decay=1e-2)
    one = mq.posterior(model, "mse", (x, y), weight_decay=1e-2)
    with torch.no_grad():
        model[2].weight.mul_(factor)
        model[2].bias.mul_(factor)
    decays = [1e-2 * factor**2, 1e-2 * factor**2, 1e-2, 1e-2]
    other = mq.posterior(model, "mse", (x, factor * y), weight_decay=decays)
    assert other.gamma == pytest.approx(one.gamma, rel=1e-6)
    torch.testing.assert_close(other.predict(x).std, factor * one.predict(x).std, rtol=1e-6, atol=0)
    assert other.log_evidence == pytest.approx(one.log_evidence - len(y) * math.log(factor), rel=1e-6)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"every": 0}, "every=0: steps from one estimate to the next"),
        ({"every": 2.5}, "every=2.5"),
        ({"start": 0.0}, "start=0.0: the weight decay of the first steps"),
        ({"start": ()}, r"start=\(\): the weight decay of the first steps, one or several numbers above 0"),
        ({"start": (1e-3, -1.0)}, r"start=\(0.001, -1.0\)"),
        ({"groups": "tensors"}, 'groups=\'tensors\': None, "layers", "parameters"'),
        *(
            ({"groups": groups}, r"every one of the parameters 0\.weight, 0\.bias belongs to one group")
            for groups in ([["0.weight"]], [["*"], ["0.bias"]], [["*"], ["none"]])
        ),
    ],
)
def test_wrong_options_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        grouped_names(["0.weight", "0.bias"], mq.Evidence(**options).groups)
