"""Weight decay by evidence: MacKay's formulas by hand, the fixed point that a fit ends at, and what it is good for."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

import marquardt as mq
from marquardt.sources import source
from marquardt.training import regularisation
from marquardt.training.regularisation import CLOSE, LONG, TIMID, Regularisation, Regularised
from marquardt.uncertainty.posterior import laplace
from marquardt.uncertainty.precision import SINGULAR
from support.fits import net, noisy_sine, refused

pytestmark = pytest.mark.usefixtures("double")


def line(N: int = 30, d: int = 4, noise: float = 0.3) -> tuple[nn.Linear, Tensor, Tensor]:
    x = torch.randn(N, d)
    return nn.Linear(d, 1), x, x @ torch.arange(1.0, d + 1)[:, None] + 0.5 + noise * torch.randn(N, 1)


def by_hand(x: Tensor, y: Tensor, rounds: int = 500) -> tuple[float, float, float, Tensor]:
    """Linear regression with one α: α, β and γ of the highest evidence, and the mean of θ (the bias last)."""
    A = torch.cat([x, torch.ones(len(x), 1)], 1)
    alpha, beta = 1.0, 1.0
    for _ in range(rounds):
        H = beta * A.T @ A + alpha * torch.eye(A.shape[1])
        theta = beta * torch.linalg.solve(H, A.T @ y)
        gamma = float(A.shape[1] - alpha * torch.linalg.inv(H).trace())
        alpha = gamma / float(theta.square().sum())
        beta = (len(x) - gamma) / float((A @ theta - y).square().sum())
    return alpha, beta, gamma, theta


def test_a_linear_model_ends_at_the_fixed_point():
    model, x, y = line()
    result = mq.fit(model, (x, y), "mse", weight_decay=mq.Evidence(every=2, groups=None))
    alpha, beta, gamma, theta = by_hand(x, y)
    found = result.evidence
    assert result.reason.startswith("settled")
    assert set(found.alpha) == {"weight", "bias"}
    assert found.alpha["weight"] == pytest.approx(alpha, rel=1e-2)
    assert (found.beta, found.gamma) == (pytest.approx(beta, rel=1e-2), pytest.approx(gamma, rel=1e-2))
    weights = torch.cat([model.weight.detach()[0], model.bias.detach()])
    torch.testing.assert_close(weights, theta[:, 0], rtol=1e-2, atol=1e-2)
    # f = mean r² + ½w‖θ‖² is −2/(βN) log p(θ|y): w = 2α/(βN)
    assert found.weight_decay["bias"] == pytest.approx(2 * alpha / (beta * len(x)), rel=2e-2)
    assert result.optimizer.param_groups[0]["weight_decay"] == found.weight_decay["weight"]
    assert len(result.optimizer.param_groups) == 1
    groups = mq.fit(model, (x, y), "mse", weight_decay=mq.Evidence(every=2, groups="parameters"))
    found = groups.evidence
    assert found.alpha["weight"] != pytest.approx(found.alpha["bias"], rel=0.1)
    decays = [group["weight_decay"] for group in groups.optimizer.param_groups]
    assert decays == [found.weight_decay["weight"], found.weight_decay["bias"]]


def test_classes_have_no_noise():
    x = torch.randn(80, 2)
    y = ((x[:, 0] + 0.7 * torch.randn(80)) > 0).long()
    result = mq.fit(net(2, 6, 2), (x, y), "cross_entropy", weight_decay=mq.Evidence())
    found = result.evidence
    assert (found.beta, result.reason[:7]) == (1, "settled")
    assert 0 < found.gamma < 6  # one direction out of 32
    assert found.weight_decay["0.weight"] == pytest.approx(found.alpha["0.weight"] / 80)


@pytest.mark.parametrize("hidden", [5, 50])
def test_large_networks_do_not_overfit(hidden):
    """A sine with noise: more parameters than points, and about as many effective ones as in the small network."""
    x, y = noisy_sine(100)
    model = net(hidden=hidden)
    result = mq.fit(model, (x, y), "mse", weight_decay=mq.Evidence())
    there = torch.linspace(-1, 1, 200)[:, None]
    with torch.no_grad():
        rmse = (model(there) - torch.sin(math.pi * there)).square().mean().sqrt().item()
    assert rmse < 0.1  # with noise of 0.2; without weight decay 50 units have 0.15 and more
    assert 4 < result.evidence.gamma < 10
    assert result.evidence.beta**-0.5 == pytest.approx(0.2, rel=0.15)
    assert result.reason.startswith(("settled", "the log evidence"))
    assert result.history[result.best_step - 1].gamma == result.evidence.gamma


def test_estimates_come_every_few_accepted_steps_or_epochs():
    """Changes of α and β do not end what full batches are known by."""
    seen, rule = [], mq.Evidence(every=4)
    result = mq.fit(net(), noisy_sine(), "mse", weight_decay=rule, steps=20,
                    callbacks=lambda r: seen.append(r.optimizer._state.same_data.repeats))  # fmt: skip
    assert seen == list(range(20))
    accepted = [e.accepted for e in result.history]
    assert all(math.isnan(e.gamma) for e in result.history if sum(accepted[: e.step]) < 4)
    assert len({e.gamma for e in result.history if not math.isnan(e.gamma)}) in range(2, 6)
    result = mq.fit(net(), noisy_sine(200), "mse", weight_decay=mq.Evidence(every=2), batch_size=50, steps=24)
    assert min(e.epoch for e in result.history if not math.isnan(e.gamma)) == 2
    assert 2 < result.evidence.gamma < 10
    for options in ({}, {"batch_size": 5}):  # ends between two estimates, or before the first epoch does
        result = mq.fit(net(), noisy_sine(), "mse", weight_decay=mq.Evidence(every=7), steps=4, **options)
        assert result.best_step == 4
        assert result.evidence.gamma > 0


def wave(N: int, periods: int, noise: float) -> tuple[Tensor, Tensor]:
    x = torch.linspace(-1.7, 1.7, N)[:, None]
    return x, torch.sin(2 * math.pi * periods * x / 3.4) + noise * torch.randn(N, 1)


def test_weight_decay_at_most_doubles():
    """Unless it is small beside the curvature: 1e-12 is a start that doubling would take long to leave."""
    model, x, y = line()
    opt = mq.LM(model, "mse", weight_decay=1e-3)
    rule = Regularisation(mq.Evidence(groups=None), opt, source((x, y)))
    with torch.no_grad():
        model.weight.mul_(0.01)  # nothing of it is learnt, and α = γ/‖θ‖² large
    rule.update(1.0)
    assert set(rule.last.weight_decay.values()) == {2e-3}
    there = laplace(model, opt.loss, source((x, y)), [2e-3, 2e-3], params=opt.params)
    one = there.changed([1.0, 1.0], rule.last.beta).decay_of_one(rule.last.beta)
    assert [a * one for a in rule.last.alpha.values()] == pytest.approx([2e-3, 2e-3])
    model, x, y = line()
    rule = Regularisation(mq.Evidence(groups=None), mq.LM(model, "mse", weight_decay=1e-12), source((1e4 * x, y)))
    rule.update(1.0)
    decay = rule.last.weight_decay["weight"]
    curvature = 2 * (1e8 * x.square().sum() / len(x) + 1) / 5  # of the mean of squares, by parameter
    assert decay == pytest.approx(min(decay, TIMID * curvature))
    assert decay > 1e-3


def test_the_weights_of_the_highest_evidence_stay():
    """More parameters than samples: in the end the network passes through all of them, and the evidence falls."""
    torch.manual_seed(0)
    x = torch.rand(60, 5)
    clean = (math.pi * x[:, :1] * x[:, 1:2]).sin() * 3 + 2 * x[:, 3:4]
    y = clean + 0.4 * torch.randn(60, 1)
    model, seen = net(5, 20, 1), []
    result = mq.fit(model, (x, y), "mse", weight_decay=mq.Evidence(), patience=8,
                    callbacks=lambda r: seen.append([p.detach().clone() for p in r.model.parameters()]))  # fmt: skip
    assert result.best_step < len(result.history)
    assert result.reason.startswith("the log evidence was")
    assert "and lower in 8 estimates since" in result.reason
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), seen[result.best_step - 1], strict=True))
    assert result.history[result.best_step - 1].gamma == result.evidence.gamma


@pytest.mark.parametrize("start", [(0.3, 1e-5), mq.Evidence().start])
def test_descents_from_the_same_weights(start):
    """Six periods take more than five steps. With a large weight decay they are all noise; the evidence of the other
    descent is higher."""
    x, y = wave(200, 6, 0.1)
    model = net(1, 30, 1)
    result = mq.fit(model, (x, y), "mse", weight_decay=mq.Evidence(start=start))
    (ended,) = [e.step for e in result.history if "begins anew" in e.note]
    first, again = result.history[0], result.history[ended]  # the step after it
    assert again.lam == first.lam
    assert math.isnan(again.gamma)
    assert result.evidence.beta**-0.5 == pytest.approx(0.1, rel=0.2)
    assert (model(x) - torch.sin(2 * math.pi * 6 * x / 3.4)).square().mean().sqrt() < 0.06
    if start[0] == 0.3:
        assert result.history[ended - 1].loss > 0.4  # a constant has 0.5
        assert result.best_step > ended


def test_the_best_of_the_first_descent_may_stay():
    x, y = noisy_sine()
    model, alone = net(), net()
    alone.load_state_dict(model.state_dict())
    one = mq.fit(alone, (x, y), "mse", weight_decay=mq.Evidence(start=1e-3))
    both = mq.fit(model, (x, y), "mse", weight_decay=mq.Evidence(start=(1e-3, 1e-3)))
    assert len(both.history) == 2 * len(one.history)  # the second one is the same, and no better
    assert both.best_step == one.best_step
    assert both.evidence == one.evidence
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), alone.parameters(), strict=True))


def test_the_evidence_is_that_of_the_best_step():
    """And so is the weight decay of the optimizer, which the posterior has."""
    x, y = noisy_sine()
    result = mq.fit(net(), (x, y), "mse", weight_decay=mq.Evidence(every=1), validation=(x, 0.7 * y), steps=20)
    assert result.loss == min(result.history["validation"])
    assert result.best_step < 15  # on the way to y it passes by
    assert result.history[result.best_step - 1].gamma == result.evidence.gamma
    assert abs(result.history[-1].gamma - result.evidence.gamma) > 0.1
    decays = {group["weight_decay"] for group in result.optimizer.param_groups}
    assert decays == set(result.evidence.weight_decay.values())


def test_no_evidence_before_the_first_estimate():
    model = net()
    x, y = noisy_sine()
    mq.fit(model, (x, y), "mse", steps=100)
    result = mq.fit(model, (x, -y), "mse", weight_decay=mq.Evidence(every=1), validation=(x, y), steps=5)
    assert (result.best_step, result.evidence) == (0, None)
    assert {group["weight_decay"] for group in result.optimizer.param_groups} == {mq.Evidence().starts[0]}


def test_the_posterior_has_its_prior():
    model, x, y = line()
    result = mq.fit(model, (x, y), "mse", weight_decay=mq.Evidence(every=2))
    found = result.posterior()
    assert found.alpha["weight"] == pytest.approx(result.evidence.alpha["weight"], rel=1e-2)
    assert float(found.noise) == pytest.approx(result.evidence.beta**-0.5, rel=1e-2)
    assert found.predict(x).mean.shape == (30, 1)
    assert result.posterior((x.repeat(2, 1), y.repeat(2, 1))).at.normaliser == 60
    assert result.posterior(params="last").names == ["weight", "bias"]
    elsewhere = mq.fit(net(), noisy_sine(), "mse", weight_decay=mq.WeightDecay(0.1, towards="start"), steps=2)
    with pytest.raises(ValueError, match="decay towards others than 0"):
        elsewhere.posterior()


def test_weight_decay_by_name():
    """As it was found, for a fit that goes on or another one."""
    x, y = noisy_sine()
    found = mq.fit(net(), (x, y), "mse", weight_decay=mq.Evidence()).evidence.weight_decay
    model, twin = net(), net()
    mq.fit(model, (x, y), "mse", weight_decay=dict(reversed(found.items())), steps=5)
    groups = [{"params": [p], "weight_decay": found[name]} for name, p in twin.named_parameters()]
    mq.fit(twin, (x, y), "mse", params=groups, steps=5)
    assert len(set(found.values())) == 2
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), twin.parameters(), strict=True))


# Settling.


def regularised(**change) -> Regularised:
    given = {"alpha": {"w": 2.0, "b": 9.0}, "beta": 25.0, "gamma": 4.0, "gammas": {"w": 4.0, "b": 0.0},
             "log_evidence": 0.0, "weight_decay": {"w": 0.01, "b": 0.045}, "objective": 0.5}  # fmt: skip
    return Regularised(**{**given, **change})


@pytest.mark.parametrize(
    ("change", "close"),
    [
        ({}, True),
        ({"alpha": {"w": 2.0 * (1 + 0.9 * CLOSE), "b": 9.0}}, True),
        ({"alpha": {"w": 2.0 * (1 + 1.1 * CLOSE), "b": 9.0}}, False),
        ({"alpha": {"w": 2.0, "b": 18.0}}, True),  # nothing of it is determined by the data
        ({"beta": 25.0 * (1 - 1.1 * CLOSE)}, False),
        ({"gamma": 4.0 * (1 + 1.1 * CLOSE)}, False),
        ({"objective": 0.5 + 0.9 * 4 * CLOSE / 200}, True),  # 200 nats in a unit of the loss, 4 effective parameters
        ({"objective": 0.5 + 1.1 * 4 * CLOSE / 200}, False),
    ],
)
def test_close(change, close):
    assert regularised(**change).close_to(regularised()) == close


def test_a_curvature_that_cannot_be_inverted_leaves_alpha_and_beta(monkeypatch):
    """These weights are not judged by the evidence of others; two estimates without a change settle it."""
    model, x, y = line()
    opt = mq.LM(model, "mse", weight_decay=0.01)
    rule = Regularisation(mq.Evidence(groups=None), opt, source((x, y)))

    def singular(*args, **options):
        raise ValueError(SINGULAR)

    with monkeypatch.context() as patch:
        patch.setattr(regularisation, "laplace", singular)
        with pytest.raises(ValueError, match="the curvature does not determine all parameters"):
            rule.update(1.0)
    assert rule.update(1.0)
    first = rule.last
    with monkeypatch.context() as patch:
        patch.setattr(regularisation, "laplace", singular)
        for settled in (False, True):
            assert not rule.update(1.0)
            assert rule.settled == settled
    assert rule.last == first
    assert opt.param_groups[0]["weight_decay"] == first.weight_decay["weight"]
    with torch.no_grad():
        model.weight.mul_(1.5)
    rule.update(1.0)
    assert not rule.settled


@pytest.mark.parametrize(("drift", "settled"), [(0.0, True), (0.5 * CLOSE, False)])
def test_what_differs_in_alpha_alone_settles_in_the_end(drift, settled, monkeypatch):
    """Not if γ moves: a little from one estimate to the next, and much in all."""
    opt = mq.LM(nn.Linear(4, 1), "mse", weight_decay=0.01)
    rule = Regularisation(mq.Evidence(), opt, source((torch.randn(9, 4), torch.randn(9, 1))))
    for k in range(LONG + 1):
        assert not rule.settled
        found = Regularised(
            {"weight": 2.0**k, "bias": 9.0}, 25.0, 4.0 * (1 + drift * k), {"weight": 4.0, "bias": 0.0}, 0.0,
            {"weight": 0.01, "bias": 0.045}, 0.5,
        )  # fmt: skip
        monkeypatch.setattr(rule, "_estimate", lambda objective, found=found: found)
        rule.update(0.5)
    assert rule.settled == settled


# What cannot work.


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"loss": "huber"}, "is no likelihood of the targets"),
        ({"params": [{"params": []}]}, "params= holds groups"),
        ({"weight_decay": mq.Evidence(groups=[["nothing"]])}, "belongs to one group"),
        ({"weight_decay": {"0.weight": 0.1, "9.bias": 0.1}}, "Without one are .*'0.bias', '2.weight', .*'9.bias'"),
        ({"weight_decay": {"0.weight": 0.1}, "params": [{"params": []}]}, "weight_decay=a dict makes its own"),
    ],
)
def test_refused(arguments, message):
    model = net()
    with refused(model, message):
        mq.fit(model, **{"data": noisy_sine(), "loss": "mse", "weight_decay": mq.Evidence(), **arguments})
