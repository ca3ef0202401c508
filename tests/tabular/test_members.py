"""Several networks at once against nn.Sequential, one after the other; Levenberg–Marquardt of several members against
plain dense matrices, evidence against mq.posterior, and members that mq.fit trains."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import marquardt as mq
from marquardt.tabular.members import (
    ACTIVATIONS,
    Descent,
    Given,
    Law,
    Limits,
    Network,
    module_of,
    probabilities,
    softened,
    trained_wide,
)
from support import reference
from support.committees import drawn, generator, module

K, N, D = 3, 40, 3
EVERYONE = torch.arange(K)
NUMBERS, TWO, THREE = (Law.of(f, 2) for f in (None, torch.ones(2), torch.ones(3)))


def given(law: Law, seed: int = 0) -> Given:
    g = generator(seed)
    x = torch.randn(K, N, D, generator=g, dtype=torch.float64)
    weight = torch.randint(0, 3, (K, N), generator=g).double()
    if law is not NUMBERS:
        classes = torch.randint(0, max(law.outputs, 2), (K, N), generator=g)
        return Given(x, torch.stack([*map(law.targets, classes)]), weight)
    noise = 0.1 * torch.randn(K, N, 2, generator=g, dtype=torch.float64)
    return Given(x, torch.stack((x.sum(2).tanh(), x[..., 0] ** 2), 2) + noise, weight)


def descent(law: Law, limits=None, held=None, data=None, groups="all") -> Descent:
    network = Network((D, 4, law.outputs), "tanh")
    return Descent(network, law, groups, data or given(law), held, limits or Limits(20, 20), generator(1))


# --- networks ---


@pytest.mark.parametrize("activation", list(ACTIVATIONS))
@pytest.mark.parametrize("sizes", [(3, 2), (3, 4, 2), (2, 5, 3, 1)])
def test_outputs_and_derivatives_are_those_of_the_module(sizes, activation):
    network, c = Network(sizes, activation), sizes[-1]
    theta, x = network.drawn(3, generator()), drawn(3, 5, sizes[0], seed=1)
    z, inputs, slopes = network.passed(theta, x)
    back = drawn(3, 5, 4, c, seed=2)
    rows = network.rows(theta, inputs, slopes, back).unflatten(1, (5, 4))
    gradient = network.gradient(theta, inputs, slopes, back[:, :, 0])
    for i in range(3):
        model, zero = module(network, theta[i]), torch.zeros(5, c, dtype=torch.float64)
        J = reference.quadratic(model, nn.MSELoss(), x[i], zero).J.unflatten(0, (5, c))
        torch.testing.assert_close(z[i], model(x[i]).detach())
        torch.testing.assert_close(rows[i], torch.einsum("nrc,ncp->nrp", back[i], J))
        torch.testing.assert_close(gradient[i], torch.einsum("nc,ncp->p", back[i, :, 0], J))
        single = module_of(network, theta[i])(x[i].float()).double()
        torch.testing.assert_close(z[i], single, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(network.outputs(theta, x), z)
    torch.testing.assert_close(network.outputs(theta, x[0])[:1], z[:1])  # inputs that all members share


def test_weights_are_grouped_and_drawn_as_those_of_linear():
    network = Network((3, 2, 1), "tanh")  # weights 2×3 and 1×2
    assert network.groups("all").tolist() == [0] * 11
    assert network.groups("inputs").tolist() == [0, 1, 2, 0, 1, 2, 3, 3, 4, 4, 5]
    network = Network((16, 50, 4), "tanh")
    theta = network.drawn(20, generator())
    assert 0.24 < float(network.layer(theta, 0)[0].abs().max()) <= 0.25
    assert 0.13 < float(network.layer(theta, 1)[1].abs().max()) <= 50**-0.5


def test_probabilities_of_one_logit_and_of_several():
    """Uncertain logits are softened towards even ones."""
    z = torch.tensor([[0.7], [-30.0]], dtype=torch.float64)
    torch.testing.assert_close(probabilities(z), torch.cat((torch.zeros_like(z), z), 1).softmax(1))
    z = torch.tensor([[2.0, 0.0, -1.0]], dtype=torch.float64)
    sharp, soft, even = (softened(z, torch.full_like(z, v)) for v in (0.0, 3.0, 1e9))
    torch.testing.assert_close(sharp, z.softmax(1))
    assert sharp[0, 0] > soft[0, 0] > 1 / 3
    torch.testing.assert_close(even, torch.full_like(z, 1 / 3), atol=1e-3, rtol=0)


# --- members that are trained together ---


@pytest.mark.parametrize(
    ("law", "loss", "factor"),
    [(NUMBERS, nn.MSELoss, 0.5), (TWO, nn.BCEWithLogitsLoss, 1.0), (THREE, nn.CrossEntropyLoss, 1.0)],
    ids=["numbers", "two classes", "three classes"],
)
def test_gradient_and_matrix_are_those_of_the_reference(law, loss, factor):
    run = descent(law)
    run.linearise(EVERYONE)
    for i in range(K):
        repeats = run.data.weight[i].long()  # a weight counts equal samples
        x, y = (t[i].repeat_interleave(repeats, 0) for t in (run.data.x, run.data.y))
        plain = reference.quadratic(module(run.network, run.theta[i]), loss(reduction="sum"), x, y)
        for found, expected in ((run.loss, plain.f), (run.g, plain.g), (run.G, plain.G)):
            torch.testing.assert_close(found[i], factor * expected)


def test_rows_that_are_drawn_have_the_matrix_as_their_mean():
    run, exact = descent(THREE, Limits(1, 1, rows=30)), descent(THREE)
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


@pytest.mark.filterwarnings("ignore:the parameters are no minimum")
def test_evidence_is_that_of_the_posterior():
    """γ of one α, and the α and β that follow, from mq.posterior of the same network"""
    run = descent(NUMBERS)
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
    run = descent(NUMBERS, groups="inputs")
    run.linearise(EVERYONE)
    theta, loss, lam = run.theta.clone(), run.loss.clone(), run.lam.clone()
    a = run.alpha[:, run.groups]
    accepted = run.move(EVERYONE)
    for i in range(K):
        H = run.beta[i] * run.G[i] + a[i].diag()
        H = H + lam[i] * H.diagonal().mean() * torch.eye(len(H), dtype=H.dtype)
        new = theta[i] - torch.linalg.solve(H, run.beta[i] * run.g[i] + a[i] * theta[i])
        z = run.network.outputs(new[None], run.data.x[i])
        value = (run.data.weight[i] * run.law.value(z, run.data.y[i : i + 1])[0]).sum()
        before = loss[i] + 0.5 * (a[i] * theta[i] ** 2).sum()
        after = value + 0.5 * (a[i] * new**2).sum()
        assert bool(accepted[i]) == bool(after < before)
        torch.testing.assert_close(run.theta[i], new if accepted[i] else theta[i])
        assert float(run.lam[i]) == (0.25 if accepted[i] else 4.0)
    assert accepted.any()


def test_members_do_not_depend_on_each_other():
    held = given(NUMBERS, seed=5)
    together = descent(NUMBERS, held=held)
    start = together.theta.clone()
    found, data = together.run(), given(NUMBERS)
    for i in range(K):
        one = torch.tensor([i])
        alone = descent(NUMBERS, held=held.of(one), data=data.of(one))
        alone.theta[:] = start[i]
        alone.best.theta[:] = start[i]
        result = alone.run()
        torch.testing.assert_close(result.theta[0], found.theta[i], rtol=1e-6, atol=1e-8)
        assert int(result.best_step[0]) == int(found.best_step[i])


def test_the_best_weights_on_what_is_held_out_are_kept():
    held = given(NUMBERS, seed=5)
    found = descent(NUMBERS, Limits(60, 60), held=held).run()
    errors = (held.weight * NUMBERS.value(found.outputs(held.x), held.y)).sum(1) / held.weight.sum(1)
    torch.testing.assert_close(found.error, errors, rtol=1e-9, atol=0)
    for i in range(K):
        assert float(found.error[i]) <= min(e for _, e, _, accepted in found.steps[i] if accepted)
    assert int(found.best_step.max()) < 60  # some stopped being better before the end
    impatient = descent(NUMBERS, Limits(200, 4), held=held).run()
    assert max(len(steps) for steps in impatient.steps) < 200


def test_variance_is_that_of_the_dense_inverse():
    run = descent(NUMBERS, groups="inputs")
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
    data = given(NUMBERS)
    for y in (torch.zeros_like(data.y), data.x[..., :2]):
        found = descent(NUMBERS, Limits(80, 80), data=Given(data.x, y, data.weight)).run()
        for t in (found.theta, found.alpha, found.beta, found.root):
            assert bool(t.isfinite().all())


# --- wide networks ---


@pytest.mark.parametrize("law", [Law.of(None, 1), TWO, THREE], ids=["numbers", "two", "three"])
def test_members_learn_and_keep_what_is_best_on_what_they_hold_out(law):
    def data(seed: int) -> Given:
        x = drawn(2, 80, 3, seed=seed)
        weight = torch.ones(2, 80, dtype=torch.float64)
        weight[1, -1] = 0
        y = x[..., :1].tanh() if law.factor != 1 else torch.stack([law.targets((a[:, 0] > 0).long()) for a in x])
        return Given(x, y, weight)

    network = Network((3, 16, law.outputs), "tanh")
    held = data(1)
    found = trained_wide(network, law, data(0), held, Limits(30, 10), generator())
    before = float(law.value(network.outputs(network.drawn(2, generator()), held.x), held.y).mean())
    assert float(law.value(found.outputs(held.x), held.y).mean()) < 0.3 * before
    assert bool((found.variance(held.x) == 0).all())
    for steps, best in zip(found.steps, found.best_step.tolist(), strict=True):
        errors = [error for _, error, _, _ in steps]
        assert errors[best - 1] == min(errors)
    z = trained_wide(network, law, data(0), None, Limits(20, 20), generator()).outputs(held.x)  # nothing is held out
    assert float(law.value(z, held.y).mean()) < 0.5 * before
