"""Levenberg–Marquardt of several members against plain dense matrices, and evidence against mq.posterior."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import marquardt as mq
from marquardt.tabular.law import Classes, Numbers
from marquardt.tabular.members import Descent, Given, Limits
from marquardt.tabular.network import Network
from support import reference

K, N, D = 3, 40, 3


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def given(law, k: int = K, samples: int = N, seed: int = 0) -> Given:
    g = generator(seed)
    x = torch.randn(k, samples, D, generator=g, dtype=torch.float64)
    weight = torch.randint(0, 3, (k, samples), generator=g).double()
    if isinstance(law, Classes):
        return Given(x, torch.randint(0, 3, (k, samples), generator=g), weight)
    noise = 0.1 * torch.randn(k, samples, 2, generator=g, dtype=torch.float64)
    return Given(x, torch.stack((x.sum(2).tanh(), x[..., 0] ** 2), 2) + noise, weight)


def descent(law, limits=None, held=None, data=None, outputs=None, groups="tensors", seed: int = 1) -> Descent:
    outputs = outputs or (3 if isinstance(law, Classes) else 2)
    network = Network((D, 4, outputs), "tanh")
    limits = limits or Limits(20, 20)
    return Descent(network, law, groups, data or given(law), held, limits, generator(seed))


def module(network: Network, theta: torch.Tensor) -> nn.Sequential:
    sizes = network.sizes
    found = nn.Sequential(nn.Linear(sizes[0], sizes[1]), nn.Tanh(), nn.Linear(sizes[1], sizes[2])).double()
    nn.utils.vector_to_parameters(theta, found.parameters())
    return found


@pytest.mark.parametrize("law", [Numbers(2), Classes(3)], ids=["numbers", "classes"])
def test_gradient_and_matrix_are_those_of_the_reference(law):
    run = descent(law)
    run.linearise(torch.arange(K))
    loss = nn.MSELoss(reduction="sum") if isinstance(law, Numbers) else nn.CrossEntropyLoss(reduction="sum")
    factor = 0.5 if isinstance(law, Numbers) else 1.0
    for i in range(K):
        repeats = run.data.weight[i].long()  # a weight is so many samples
        x, y = (t[i].repeat_interleave(repeats, 0) for t in (run.data.x, run.data.y))
        plain = reference.quadratic(module(run.network, run.theta[i]), loss, x, y)
        torch.testing.assert_close(run.loss[i], factor * plain.f)
        torch.testing.assert_close(run.g[i], factor * plain.g)
        torch.testing.assert_close(run.G[i], factor * plain.G)


def test_rows_that_are_drawn_have_the_matrix_as_their_mean():
    law = Classes(3)
    run = descent(law, Limits(1, 1, rows=30))
    exact = descent(law)
    run.linearise(torch.arange(K))
    exact.linearise(torch.arange(K))
    torch.testing.assert_close(run.g, exact.g)
    total = torch.zeros_like(run.G)
    for _ in range(400):
        run.linearise(torch.arange(K))
        total += run.G
    error = float((total / 400 - exact.G).norm() / exact.G.norm())
    assert error < 0.1
    assert float((run.G - exact.G).norm() / exact.G.norm()) > error


def test_evidence_is_that_of_the_posterior():
    """γ of one α, and the α and β that follow, from mq.posterior of the same network"""
    law = Numbers(2)
    run = descent(law, groups="all")
    run.run()
    everyone = torch.arange(K)
    run.linearise(everyone)
    alpha, beta = run.alpha.clone(), run.beta.clone()
    run.estimate(everyone)
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
    run = descent(Numbers(2))
    everyone = torch.arange(K)
    run.linearise(everyone)
    theta, loss, lam = run.theta.clone(), run.loss.clone(), run.lam.clone()
    a = run.alpha[:, run.groups]
    accepted = run.move(everyone)
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


def test_patience_ends_it():
    held = given(Numbers(2), seed=5)
    found = descent(Numbers(2), Limits(200, 4), held=held).run()
    assert max(len(steps) for steps in found.steps) < 200


def test_variance_is_that_of_the_dense_inverse():
    run = descent(Numbers(2))
    found = run.run()
    x = torch.randn(7, D, generator=generator(9), dtype=torch.float64)
    variance = found.variance(x)
    run.linearise(torch.arange(K))
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
