"""Levenberg–Marquardt of several members against plain dense matrices, evidence against mq.posterior, and members that
mq.fit trains."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import marquardt as mq
from marquardt.tabular.members import Descent, Given, Limits, module_of, trained_wide
from marquardt.tabular.network import Classes, Network, Numbers, TwoClasses
from support import reference
from support.committees import drawn, generator, module

K, N, D = 3, 40, 3
EVERYONE = torch.arange(K)


def given(law, seed: int = 0) -> Given:
    g = generator(seed)
    x = torch.randn(K, N, D, generator=g, dtype=torch.float64)
    weight = torch.randint(0, 3, (K, N), generator=g).double()
    if isinstance(law, Classes):
        return Given(x, torch.randint(0, 3, (K, N), generator=g), weight)
    noise = 0.1 * torch.randn(K, N, 2, generator=g, dtype=torch.float64)
    return Given(x, torch.stack((x.sum(2).tanh(), x[..., 0] ** 2), 2) + noise, weight)


def descent(law, limits=None, held=None, data=None, groups="all") -> Descent:
    network = Network((D, 4, law.rank), "tanh")
    return Descent(network, law, groups, data or given(law), held, limits or Limits(20, 20), generator(1))


@pytest.mark.parametrize("law", [Numbers(2), Classes(3)], ids=["numbers", "classes"])
def test_gradient_and_matrix_are_those_of_the_reference(law):
    run = descent(law)
    run.linearise(EVERYONE)
    loss = nn.MSELoss(reduction="sum") if isinstance(law, Numbers) else nn.CrossEntropyLoss(reduction="sum")
    factor = 0.5 if isinstance(law, Numbers) else 1.0
    for i in range(K):
        repeats = run.data.weight[i].long()  # a weight counts equal samples
        x, y = (t[i].repeat_interleave(repeats, 0) for t in (run.data.x, run.data.y))
        plain = reference.quadratic(module(run.network, run.theta[i]), loss, x, y)
        torch.testing.assert_close(run.loss[i], factor * plain.f)
        torch.testing.assert_close(run.g[i], factor * plain.g)
        torch.testing.assert_close(run.G[i], factor * plain.G)


def test_rows_that_are_drawn_have_the_matrix_as_their_mean():
    law = Classes(3)
    run = descent(law, Limits(1, 1, rows=30))
    exact = descent(law)
    run.linearise(EVERYONE)
    exact.linearise(EVERYONE)
    torch.testing.assert_close(run.g, exact.g)
    total = torch.zeros_like(run.G)
    for _ in range(400):
        run.linearise(EVERYONE)
        total += run.G
    error = float((total / 400 - exact.G).norm() / exact.G.norm())
    assert error < 0.1
    assert float((run.G - exact.G).norm() / exact.G.norm()) > error


def test_evidence_is_that_of_the_posterior():
    """γ of one α, and the α and β that follow, from mq.posterior of the same network"""
    law = Numbers(2)
    run = descent(law)
    run.run()
    run.linearise(EVERYONE)
    alpha, beta = run.alpha.clone(), run.beta.clone()
    run.estimate(EVERYONE)
    for i in range(K):
        kept = run.data.weight[i] > 0
        data = tuple(t[i][kept] for t in (run.data.x, run.data.y, run.data.weight))
        decay = float(alpha[i, 0] / beta[i] * 2 / run.targets[i])  # α = w·β·N/2
        model = module(run.network, run.theta[i])
        found = mq.posterior(model, "mse", data, weight_decay=decay, noise=float(beta[i]) ** -0.5)
        assert float(run.gamma[i]) == pytest.approx(found.gamma, rel=1e-6)
        size = float(run.theta[i].square().sum())
        assert float(run.alpha[i, 0]) == pytest.approx(found.gamma / size, rel=1e-6)
        left = float(run.targets[i]) - found.gamma
        assert float(run.beta[i]) == pytest.approx(left / float(2 * run.loss[i]), rel=1e-6)


def test_a_step_solves_the_damped_equations_and_lowers_the_objective():
    run = descent(Numbers(2), groups="inputs")
    run.linearise(EVERYONE)
    theta, loss, lam = run.theta.clone(), run.loss.clone(), run.lam.clone()
    a = run.alpha[:, run.groups]
    accepted = run.move(EVERYONE)
    for i in range(K):
        H = run.beta[i] * run.G[i] + a[i].diag()
        H = H + lam[i] * H.diagonal().mean() * torch.eye(len(H), dtype=H.dtype)
        new = theta[i] - torch.linalg.solve(H, run.beta[i] * run.g[i] + a[i] * theta[i])
        z = run.network.outputs(new[None], run.data.x[i])
        value = (run.data.weight[i] * run.law.value(z, run.data.y[i])[0]).sum()
        before = loss[i] + 0.5 * (a[i] * theta[i] ** 2).sum()
        after = value + 0.5 * (a[i] * new**2).sum()
        assert bool(accepted[i]) == bool(after < before)
        torch.testing.assert_close(run.theta[i], new if accepted[i] else theta[i])
        assert float(run.lam[i]) == (0.25 if accepted[i] else 4.0)
    assert accepted.any()


def test_members_do_not_depend_on_each_other():
    law, held = Numbers(2), given(Numbers(2), seed=5)
    together = descent(law, held=held)
    start = together.theta.clone()
    found = together.run()
    data = given(law)
    for i in range(K):
        one = torch.tensor([i])
        alone = descent(law, held=held.of(one), data=data.of(one))
        alone.theta[:] = start[i]
        alone.best.theta[:] = start[i]
        result = alone.run()
        torch.testing.assert_close(result.theta[0], found.theta[i], rtol=1e-6, atol=1e-8)
        assert int(result.best_step[0]) == int(found.best_step[i])


def test_the_best_weights_on_what_is_held_out_are_kept():
    law, held = Numbers(2), given(Numbers(2), seed=5)
    found = descent(law, Limits(60, 60), held=held).run()
    for i in range(K):
        errors = [e for _, e, _, accepted in found.steps[i] if accepted]
        assert float(found.error[i]) <= min(errors)
        z = found.network.outputs(found.theta[i : i + 1], held.x[i])
        error = (held.weight[i] * law.value(z, held.y[i])[0]).sum() / held.weight[i].sum()
        assert float(error) == pytest.approx(float(found.error[i]), rel=1e-9)
    assert int(found.best_step.max()) < 60  # some stopped being better before the end
    impatient = descent(law, Limits(200, 4), held=held).run()
    assert max(len(steps) for steps in impatient.steps) < 200


def test_variance_is_that_of_the_dense_inverse():
    run = descent(Numbers(2), groups="inputs")
    found = run.run()
    x = drawn(7, D, seed=9)
    variance = found.variance(x)
    run.linearise(EVERYONE)
    for i in range(K):
        H = found.beta[i] * run.G[i] + found.alpha[i][found.groups].diag()
        model = module(found.network, found.theta[i])
        J = reference.quadratic(model, nn.MSELoss(), x, torch.zeros(7, 2, dtype=torch.float64)).J
        expected = (J @ torch.linalg.solve(H, J.T)).diagonal().view(7, 2)
        torch.testing.assert_close(variance[i], found.beta[i].sqrt() * expected, rtol=1e-4, atol=1e-8)


def test_exact_fits_and_targets_of_zero_stay_finite():
    """Σr² → 0 and ‖θ‖ → 0: α and β are bounded, and nothing is NaN"""
    data = given(Numbers(2))
    for y in (torch.zeros_like(data.y), data.x[..., :2]):
        found = descent(Numbers(2), Limits(80, 80), data=Given(data.x, y, data.weight)).run()
        for t in (found.theta, found.alpha, found.beta, found.root):
            assert bool(t.isfinite().all())


# --- wide networks ---


def given_to_wide(law, seed: int) -> Given:
    x = drawn(2, 80, 3, seed=seed)
    y = x[..., :1].tanh()
    weight = torch.ones(2, 80, dtype=torch.float64)
    weight[1, -1] = 0
    return Given(x, y if isinstance(law, Numbers) else (y[..., 0] > 0).long(), weight)


def test_a_module_is_the_network():
    network = Network((3, 5, 4, 2), "silu")
    theta, x = network.drawn(1, generator()), drawn(6, 3, seed=1)
    found = module_of(network, theta[0])(x.float()).double()
    torch.testing.assert_close(found, network.outputs(theta, x)[0], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("law", [Numbers(1), TwoClasses(), Classes(2)], ids=["numbers", "two", "classes"])
def test_members_learn_and_keep_what_is_best_on_what_they_hold_out(law):
    network = Network((3, 16, 2 if isinstance(law, Classes) else 1), "tanh")
    data, held = given_to_wide(law, 0), given_to_wide(law, 1)
    found = trained_wide(network, law, data, held, Limits(30, 10), generator())
    z = found.outputs(held.x)
    start = network.drawn(2, generator())
    before = law.value(network.outputs(start, held.x), held.y).mean()
    assert float(law.value(z, held.y).mean()) < 0.3 * float(before)
    assert bool((found.variance(held.x) == 0).all())
    for steps, best in zip(found.steps, found.best_step.tolist(), strict=True):
        errors = [error for _, error, _, _ in steps]
        assert errors[best - 1] == min(errors)
    z = trained_wide(network, law, data, None, Limits(20, 20), generator()).outputs(held.x)  # nothing is held out
    assert float(law.value(z, held.y).mean()) < 0.5 * float(before)
