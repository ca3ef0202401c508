"""What a posterior is asked for: samples, covariances, predictions, and how it reads."""

import copy
import pickle
import warnings
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import pytest
import torch
from torch import nn
from torch.func import functional_call
from torch.utils.data import DataLoader, TensorDataset

import marquardt as mq
from marquardt.losses.base import Elementwise
from marquardt.uncertainty import expansion
from marquardt.uncertainty.posterior import Temper, predicted, without
from support.laplaced import classification, fitted, network, plain, plain_regression, quiet, regression
from support.reference import jacobian, trainable
from support.unchanged import changes, world

CURVATURES = [mq.Dense(), mq.Gram(), mq.Kronecker()]


@contextmanager
def loud():
    """A warning is an error."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


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
    torch.testing.assert_close(p.covariance("2.bias"), C[8:, 8:])
    order = [8, *range(4, 6)]
    torch.testing.assert_close(p.covariance(["2.bias", model[0].bias]), C[order][:, order])


def test_samples_go_into_the_model():
    """Of a linear model the predictions of samples have the predicted variance."""
    x = torch.randn(50, 2, dtype=torch.float64)
    model = fitted(nn.Linear(2, 1).double(), "mse", x, x.sum(1, keepdim=True) + 0.1 * torch.randn(50, 1), 1e-2)
    p = mq.posterior(model, "mse", (x, x.sum(1, keepdim=True)), weight_decay=1e-2, noise=0.1)
    draws = p.sample(5000, torch.Generator().manual_seed(0))
    outputs = torch.stack([functional_call(model, p.shaped(theta), (x[:3],)) for theta in draws])
    torch.testing.assert_close(outputs.std(0).detach(), p.predict(x[:3]).model_std, rtol=0.05, atol=0)
    assert list(p.shaped(draws[0])) == ["weight", "bias"]


def test_a_copy_predicts_the_same():
    for problem, loss in ((classification, "cross_entropy"), (regression, "mse")):
        model, x, y = problem()
        p = mq.posterior(model, loss, (x, y), weight_decay=0.02)
        for other in (copy.deepcopy(p), pickle.loads(pickle.dumps(p))):
            each = [q.predict(x).std if loss == "mse" else q.probabilities(x) for q in (p, other)]
            assert torch.equal(*each)
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


NAMES = ["0.weight", "0.bias", "2.weight", "2.bias"]
REPRESENTATIONS = [None, mq.Dense(), mq.Gram()]


def close(a, b, rtol=1e-8):
    a, b = (torch.as_tensor(t, dtype=torch.float64) for t in (a, b))
    torch.testing.assert_close(a, b, rtol=rtol, atol=1e-10)


@pytest.mark.parametrize("curvature", REPRESENTATIONS, ids=str)
def test_regression_is_that_of_dense_matrices(curvature):
    w = 1e-2
    model, x, y = regression(weight_decay=w)
    p = mq.posterior(model, "mse", (x, y), weight_decay=w, curvature=curvature)
    # f = mean r² + ½w‖θ‖² is (2/(βN)) (½βΣr² + ½α‖θ‖²) with α = wβN/2, and γ does not depend on β.
    free = plain_regression(model, x, y, w * len(y) / 2, 1.0)
    beta = float((len(y) - free.gamma.sum()) / (model(x) - y).detach().square().sum())
    found = plain_regression(model, x, y, w * beta * len(y) / 2, beta)
    close(p.noise, beta**-0.5)
    close(list(p.alpha.values()), [w * beta * len(y) / 2] * 4)
    close(p.gamma, found.gamma.sum())
    close(p.log_evidence, found.log_evidence)
    close(p.covariance(), found.covariance, 1e-6)
    g = beta * found.J.T @ (model(x) - y).detach().flatten() + found.alpha * found.theta
    close(p.decrement(), 0.5 * g @ found.covariance @ g, 1e-6)
    grid = 4 * torch.rand(7, 2, dtype=torch.float64) - 2
    prediction = p.predict(grid)
    close(prediction.mean, model(grid).detach())
    close(prediction.model_std.square(), found.variance(model, grid)[..., 0], 1e-6)
    close(prediction.std.square(), prediction.model_std.square() + 1 / beta)
    low, high = prediction.interval(0.95)
    close(high - prediction.mean, 1.959964 * prediction.std, 1e-6)
    close(prediction.mean - low, high - prediction.mean)
    near, far = (p.predict(s * torch.ones(1, 2).numpy()).model_std for s in (0.0, 3.0))  # arrays, too
    assert float(far) > 2 * float(near)


@pytest.mark.parametrize("curvature", REPRESENTATIONS, ids=str)
def test_classification_is_that_of_dense_matrices(curvature):
    w = 0.02
    model, x, y = classification(weight_decay=w)
    p = mq.posterior(model, "cross_entropy", (x, y), weight_decay=w, curvature=curvature)
    alpha = torch.full((p.parameters.n,), w * len(x), dtype=torch.float64)
    found = plain(model, nn.CrossEntropyLoss(reduction="sum"), x, y, alpha, 1.0, 0.0)
    close(list(p.alpha.values()), [w * len(x)] * 4)
    close([p.log_evidence, p.gamma], [found.log_evidence, found.gamma.sum()])
    close(list(p.gammas.values()), [t.sum() for t in found.gamma.split(p.parameters.sizes)])
    grid = torch.randn(5, 2, dtype=torch.float64)
    V = found.variance(model, grid)
    softened = model(grid) / (1 + torch.pi / 8 * V.diagonal(dim1=1, dim2=2)).sqrt()
    close(p.probabilities(grid, joint=False), softened.softmax(1).detach(), 1e-6)


@pytest.mark.parametrize("scale", [1e-3, 100.0])
def test_weights_that_are_no_counts_are_told(scale):
    """Unless the noise is known: with weights 1/σ² and noise=1 H is Σ∂zᵀ∂z/σ² and the prior."""
    model, x, y = regression()
    weight = 0.5 + torch.rand(len(x)).double()
    weight /= weight.mean()
    fitted(model, "mse", x, y, 1e-2, weight)
    with loud():
        right = mq.posterior(model, "mse", (x, y, weight), weight_decay=1e-2)
        known = mq.posterior(model, "mse", (x, y, scale * weight), weight_decay=1e-2, noise=scale**0.5)
        with quiet():  # other weights than those it was trained with
            mq.posterior(model, "mse", (x, y, 100 * torch.ones(len(x))), weight_decay=1e-2)
    J = jacobian(model, trainable(model), x)[0]
    H = (J * weight[:, None]).T @ J + 1e-2 * weight.sum() / 2 * torch.eye(J.shape[1])
    close(known.covariance(), torch.linalg.inv(H), 1e-6)
    with pytest.warns(
        UserWarning, match=rf"weights of the samples have the mean {scale:.3g} and are no counts"
    ) as told:
        wrong = mq.posterior(model, "mse", (x, y, scale * weight), weight_decay=1e-2)
    assert told[0].filename == __file__
    if scale > 1:  # nothing is left of N − γ with less
        factor = (wrong.noise / right.noise).square() / scale
        close(wrong.covariance(), factor * right.covariance(), 1e-6)
        assert 0.8 / scale < factor < 2.0 / scale


@pytest.mark.parametrize("curvature", [mq.Dense(), mq.Gram(), mq.Kronecker()], ids=str)
@pytest.mark.parametrize("task", [regression, classification])
def test_batches_and_weights_add_up(task, curvature):
    """Weights are counts."""
    model, x, y = task()
    loss, w = "mse" if y.is_floating_point() else "cross_entropy", torch.randint(0, 4, (len(x),)).double()
    fitted(model, loss, x, y, 1e-2, w)
    whole = mq.posterior(model, loss, (x, y, w), weight_decay=1e-2, curvature=curvature)
    loader = DataLoader(TensorDataset(x, y, w), batch_size=7, shuffle=True)
    repeated = x.repeat_interleave(w.long(), 0), y.repeat_interleave(w.long(), 0)
    for data in (repeated, loader):
        parts = mq.posterior(model, loss, data, weight_decay=1e-2, curvature=curvature)
        close([parts.gamma, parts.log_evidence], [whole.gamma, whole.log_evidence])
        close(parts.covariance(), whole.covariance(), 1e-6)
    if loss == "cross_entropy" and curvature == mq.Dense():
        one, other = (predicted(p.at, p.precision, [Temper(0.1), Temper(1.0, 2.0)]) for p in (whole, parts))
        close(one, other)
    # All batches have more rows than there are parameters.
    assert mq.posterior(model, loss, loader, weight_decay=1e-2).plan.startswith("Dense")


def test_many_samples_are_taken_in_chunks(monkeypatch):
    model, x, y = regression()
    whole = mq.posterior(model, "mse", (x, y), weight_decay=1e-2)
    expected = whole.predict(x)
    monkeypatch.setattr(expansion, "LOOK", 7)
    monkeypatch.setattr(expansion, "ROWS", 3 * whole.parameters.n)
    loader = DataLoader(TensorDataset(x, y), batch_size=11)
    for data, chunk in (((x, y), 7), (loader, None)):
        for curvature in (mq.Dense(), mq.Gram()):
            parts = mq.posterior(model, "mse", data, weight_decay=1e-2, curvature=curvature)
            assert (parts.at.chunk, parts.at.written) == (chunk, 3)
            close([parts.gamma, parts.log_evidence], [whole.gamma, whole.log_evidence])
            close(parts.predict(x).std, expected.std)


def test_the_prior_of_a_sum_and_of_reported_units():
    """f = Σr² + ½w‖θ‖² has α = ½βw, and so has any loss in the units in which it is reported."""
    model, x, y = regression()
    beta = 4.0
    for loss, expected in (
        (nn.MSELoss(reduction="sum"), 0.5 * beta * 0.3),
        (mq.losses.SquaredError(factor=0.5), beta * 0.3 * len(y)),
        (mq.losses.SquaredError(reduction="sum", factor=0.5, reported=mq.losses.SquaredError()), 0.15 * beta * len(y)),
    ):
        with quiet():  # θ is no minimum of these
            p = mq.posterior(model, loss, (x, y), weight_decay=0.3, noise=0.5)
        close(p.alphas[0], expected)
        close(p.weight_decay["0.weight"], 0.3)


def test_each_output_has_its_noise():
    model, x, y = regression(N=400, outputs=3, hidden=8, weight_decay=1e-3, quiet=0.02)
    with pytest.warns(UserWarning, match=r"with this noise, σ = 0\.0.*units of their noise, or pass noise=\"shared\""):
        p = mq.posterior(model, "mse", (x, y), weight_decay=1e-3)
    assert p.noise.shape == (3,)
    torch.testing.assert_close(p.noise[1:], torch.tensor([0.4, 0.2], dtype=torch.float64), rtol=0.15, atol=0)
    assert 0.02 < p.noise[0] < 0.06  # the quiet one is smoothed too much
    # The equations that hold at the end, by hand.
    beta = p.noise.pow(-2)
    n = p.parameters.n
    J, z = jacobian(model, trainable(model), x)
    J = J.view(len(x), 3, n)
    H = torch.einsum("noi,o,noj->ij", J, beta, J) + torch.tensor(p.alphas[0], dtype=torch.float64) * torch.eye(n)
    taken = torch.einsum("noi,ij,noj->o", J, torch.linalg.inv(H), J) * beta
    close(beta, (len(x) - taken) / (z - y).square().sum(0), 0.02)
    theta = torch.cat([t.detach().flatten() for t in model.parameters()])
    g = torch.einsum("noi,o,no->i", J, beta, (z - y).detach()) + p.alphas[0] * theta
    close(p.decrement(), 0.5 * g @ torch.linalg.inv(H) @ g, 1e-6)
    assert p.decrement() > 0.5 * p.gamma
    close(p.predict(x).noise_std[0], p.noise)
    y = y / torch.tensor([0.02, 0.4, 0.2])  # in units of their noise these are at their minimum
    fitted(model, "mse", x, y, 1e-3)
    with loud():
        p = mq.posterior(model, "mse", (x, y), weight_decay=1e-3)
        assert mq.posterior(model, "mse", (x, y), weight_decay=1e-3, noise="shared").noise.shape == ()
    assert p.noise.shape == (3,)
    assert p.decrement() < 0.1 * p.gamma


def test_a_known_noise_is_taken():
    model, x, y = regression(outputs=2)
    with pytest.warns(UserWarning, match=r"with this noise, σ = 0\.01, 1 by output"):
        p = mq.posterior(model, "mse", (x, y), weight_decay=1e-2, noise=[0.01, 1.0])
    assert p.decrement() > 1
    close(p.noise, [0.01, 1.0])
    close(p.predict(x).noise_std[4], [0.01, 1.0])
    with quiet():
        assert float(mq.posterior(model, "mse", (x, y), weight_decay=1e-2, noise=0.3).noise) == pytest.approx(0.3)


def test_float32_is_close_to_float64():
    model, x, y = regression(N=60, hidden=20)
    p = mq.posterior(model, "mse", (x, y), weight_decay=1e-2)
    std = p.predict(x).std
    single = mq.posterior(model.float(), "mse", (x.float(), y.float()), weight_decay=1e-2)
    assert single.predict(x.float()).std.dtype == torch.float32
    assert single.gamma == pytest.approx(p.gamma, rel=1e-4)
    torch.testing.assert_close(single.predict(x.float()).std.double(), std, rtol=1e-4, atol=1e-6)


def test_nothing_of_the_model_changes():
    """And the posterior stays where it was made."""
    model = nn.Sequential(nn.Linear(2, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Dropout(0.5), nn.Linear(6, 1)).double()
    x, y = torch.randn(30, 2).double(), torch.randn(30, 1).double()
    model(x)
    before = world(model)
    with quiet():  # an untrained model
        p = mq.posterior(model, "mse", (x, y), weight_decay=0.1)
    assert changes(before, world(model)) == []
    with torch.no_grad():
        found = p.predict(x)
    assert p.plan.endswith("BatchNorm1d '1', Dropout '3' as in eval mode")
    p.sample(2, torch.Generator().manual_seed(0))
    assert changes(before, world(model)) == []
    with torch.no_grad():
        for t in model.parameters():
            t.mul_(2)
    before = world(model)
    again = p.predict(x)
    assert torch.equal(again.mean, found.mean)
    assert torch.equal(again.std, found.std)
    assert changes(before, world(model)) == []
    with torch.no_grad():
        for t in model.parameters():
            t.div_(2)
    torch.testing.assert_close(found.mean, model.eval()(x).detach())


def stopped(steps, seed, **options):
    """A network on a sine; other inputs, and the true values there."""
    torch.manual_seed(seed)
    x, there = (2 * torch.rand(N, 1, dtype=torch.float64) - 1 for N in (200, 500))
    y = torch.sin(torch.pi * x) + 0.2 * torch.randn(200, 1, dtype=torch.float64)
    result = mq.fit(network(1, 20, 1), (x, y), "mse", steps=steps, weight_decay=mq.Evidence(), **options)
    return result, there, torch.sin(torch.pi * there)


def off(posterior, there, truth):
    """The error of the model over the standard deviation that the posterior has for it, root mean square"""
    found = posterior.predict(there)
    return float(((found.mean - truth) / found.model_std).square().mean().sqrt())


def test_what_is_left_is_judged_by_what_the_posterior_says():
    """Not at a minimum, and no further from it than samples of the posterior are: its errors are of their size. One
    that was stopped far too early is told."""
    with loud():
        result, *new = stopped(60, 42, batch_size=50)
        posterior = result.posterior()
    assert posterior.decrement() > max(1, 0.1 * posterior.gamma)
    assert off(posterior, *new) < 1.6
    for seed in (40, 41):
        result, *new = stopped(5, seed)
        with pytest.warns(UserWarning, match="no minimum of the loss with this weight decay: train on"):
            posterior = result.posterior()
        assert off(posterior, *new) > 3


def test_a_warning_points_at_the_call():
    """With the weight decay of the training or without"""
    x, y = torch.randn(30, 2).double(), torch.randn(30, 1).double()
    result = mq.fit(nn.Linear(2, 1).double(), (x, y), "mse", steps=0, weight_decay=0.1)
    asks = [partial(mq.posterior, result.model, "mse", (x, y), weight_decay=w) for w in (0.1, None)]
    for ask in (result.posterior, *asks):
        with pytest.warns(UserWarning, match="no minimum of the loss with this weight decay") as told:
            ask()
        assert told[0].filename == __file__


def test_many_parameters_without_a_prior_are_told():
    """As after mq.fit with validation, which ends early: the noise is that of an unfinished fit, divided by N − n."""
    torch.manual_seed(0)
    x = torch.rand(100, 2, dtype=torch.float64) * 2 - 1
    y = torch.sin(3 * x[:, :1]) * x[:, 1:] + 0.1 * torch.randn(100, 1, dtype=torch.float64)
    model = nn.Sequential(nn.Linear(2, 14), nn.Tanh(), nn.Linear(14, 1)).double()
    opt = mq.LM(model, "mse")
    for _ in range(40):
        opt.step(x, y)
    with pytest.warns(UserWarning, match=r"without a prior .* 57 parameters .* 100 targets .* weight_decay=None"):
        p = mq.posterior(model, "mse", (x, y), weight_decay=0.0)
    better = mq.posterior(model, "mse", (x, y), weight_decay=None)
    assert better.predict(x).model_std.mean() < 0.8 * p.predict(x).model_std.mean()


def test_the_last_layer_alone():
    model, x, y = regression()
    p = mq.posterior(model, "mse", (x, y), weight_decay=1e-2, params="last")
    assert p.names == ["2.weight", "2.bias"]
    features = torch.cat((model[:2](x), torch.ones(len(x), 1)), 1).detach()
    H = p.beta * features.T @ features + p.alphas[0] * torch.eye(6)
    close(p.covariance(), torch.linalg.inv(H.double()), 1e-6)
    assert "other parameters are taken as known" in p.plan


def test_what_does_not_fit_is_taken_by_layers(monkeypatch):
    monkeypatch.setattr(expansion, "LONG", 0.0)
    model, x, y = regression()
    p = mq.posterior(model, "mse", (x, y), weight_decay=1e-2)
    assert p.plan == "Kronecker, factors of 2 layers"

    class Scaled(nn.Module):
        def __init__(self):
            super().__init__()
            self.scale, self.head = nn.Parameter(torch.ones(2, 2)), nn.Linear(2, 1)

        def forward(self, x):
            return self.head((x @ self.scale.exp().cumsum(0)).tanh())

    model = fitted(Scaled().double(), "mse", x, y, 1e-2)
    p = mq.posterior(model, "mse", (x, y), weight_decay=1e-2)
    assert p.names == ["head.weight", "head.bias"]
    assert "4 other parameters are taken as known" in p.plan
    with pytest.raises(ValueError, match='or take params="last"'):
        mq.posterior(model, "mse", (x, y), weight_decay=1e-2, curvature=mq.Kronecker())


# Refused.


def own_loss(name):
    @dataclass(frozen=True, kw_only=True, eq=False)
    class LogCosh(Elementwise):
        likelihood = name

        def ell(self, z, y):
            return (z - y).cosh().log()

        def slope(self, z, y):
            return (z - y).tanh()

        def s(self, z, y):
            return 1 / (z - y).cosh()

    return LogCosh()


class Noisy(nn.Linear):
    def forward(self, x):
        return super().forward(x) + torch.randn(len(x), 1)


COUPLED = nn.Sequential(nn.BatchNorm1d(2, track_running_stats=False), nn.Linear(2, 1)).double()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"noise": -1.0}, r"noise=-1.0: the standard deviation"),
        ({"noise": "none"}, r"noise='none': the standard deviation"),
        ({"noise": [0.1, 0.2]}, r"noise= has the shape \(2,\), the outputs of a sample \(1,\)"),
        ({"weight_decay": -1.0}, r"weight_decay=-1.0"),
        ({"weight_decay": [1.0, 1.0]}, r"weight_decay= has 2 numbers, and there are 4 parameters"),
        ({"weight_decay": {"0.weight": 1.0}}, r"weight_decay= has no number for parameter '0.bias'"),
        ({"weight_decay": {**dict.fromkeys(NAMES, 1.0), "3.bias": 1.0}}, r"a number for '3.bias', which is none of"),
        ({"weight_decay": dict.fromkeys(NAMES, -1.0)}, r"weight_decay=-1.0"),
        ({"weight_decay": mq.WeightDecay(0.1, towards="start")}, r"towards='start': those weights are gone"),
        ({"curvature": mq.MatrixFree()}, r"curvature=MatrixFree\(\): a posterior is made of mq.Dense\(\)"),
        ({"curvature": mq.Auto(memory="1GiB")}, r"curvature=Auto\(memory='1GiB'\): a posterior is made of"),
        ({"curvature": type("Own", (mq.Dense,), {})()}, r"curvature=Own\(\): a posterior is made of"),
        ({"curvature": "dense"}, r"curvature='dense': a posterior is made of"),
        ({"curvature": mq.Dense}, r"curvature=<class .*Dense'>: a posterior is made of"),
        ({"curvature": mq.Dense(inertia=0.5)}, r"curvature=Dense\(inertia=0.5\): inertia is about steps"),
        ({"curvature": mq.Kronecker(every=3)}, r"curvature=Kronecker\(every=3\): every is about steps"),
        ({"weight_decay": 0.0, "curvature": mq.Gram()}, r"Gram needs a prior for every parameter"),
        ({"weight_decay": 0.0, "curvature": mq.Kronecker()}, r"Kronecker needs a prior for every parameter"),
        ({"model": "mse", "loss": nn.Tanh()}, r"as its model, not a str; .* in the place of the loss"),
        ({"data": "mse", "loss": (torch.ones(1), 1)}, r"the loss is a tuple, and the data are 'mse'"),
        ({"model": nn.Linear}, r"takes a model and not its class: make one, Linear\(…\)"),
        ({"model": nn.Tanh(), "params": "last"}, r'params="last": the model has no nn.Linear'),
        ({"model": Noisy(2, 1).double()}, "Noisy draws random numbers also in eval mode"),
        ({"model": COUPLED}, "layer '0'"),
        ({"loss": "poisson", "noise": 0.1}, r"noise=0.1: Poisson has no noise"),
        *(
            ({"loss": loss}, rf"{name}.* is no likelihood of the targets.*train with 'mse'")
            for loss, name in (
                ("huber", "Huber"), ("hinge", "Hinge"), ("quantile", "Quantile"), ("l1", "AbsoluteError"),
                ("student_t", "StudentT"), ("kl_div", "KLDivergence"), (own_loss(None), "LogCosh"),
                (lambda z, y: (z - y).square().mean(), "lambda"), ({"output": "mse"}, "Tasks"),
            )
        ),
        ({"loss": own_loss("cosh")}, r"likelihood = 'cosh': one of 'normal'"),
    ],
)  # fmt: skip
def test_wrong_options_are_refused(options, message):
    model, x, y = regression()
    before = world(model)
    with pytest.raises((TypeError, ValueError), match=message):
        mq.posterior(**{"model": model, "loss": "mse", "data": (x, y), "weight_decay": 1e-2, **options})
    assert changes(before, world(model)) == []


def test_wrong_questions_are_refused():
    model, x, y = regression()
    numbers = mq.posterior(model, "mse", (x, y), weight_decay=1e-2)
    model, x, y = classification()
    classes = mq.posterior(model, "cross_entropy", (x, y), weight_decay=0.02)
    for ask, message in (
        (lambda: numbers.sample(3, 0), "generator=0: a torch.Generator"),
        (lambda: numbers.sample(1.5), "k=1.5: the number of draws"),
        (lambda: numbers.sample(-1), "k=-1: the number of draws"),
        (lambda: numbers.predict(float("nan") * x), r"inputs\[0, 0\] is nan: drop or repair such samples$"),
        (lambda: numbers.predict(x).interval(95), "level=95: a probability between 0 and 1"),
        (lambda: numbers.covariance("3.bias"), "'3.bias' is none of the parameters"),
        (lambda: numbers.covariance(torch.zeros(1)), "a Tensor is none of the parameters"),
        (lambda: numbers.covariance([3]), "a int is none of the parameters"),
        (lambda: classes.predict(x), "has classes: use probabilities"),
        (lambda: classes.noise, "CrossEntropy has no noise"),
        (lambda: numbers.probabilities(x), "SquaredError has no classes: use predict"),
        (numbers.calibrated, "SquaredError has no classes"),
        (lambda: classes.tempered(0), "temperature=0: a finite"),
        (lambda: classes.tempered(1.0, -1.0), "sharpness=-1.0: a finite"),
    ):
        with pytest.raises((TypeError, ValueError), match=message):
            ask()


@pytest.mark.parametrize("kind", [mq.Dense, mq.Gram, mq.Kronecker])
def test_a_chunk_is_as_large_as_it_was_asked_for(kind):
    model, x, y = regression()
    seen = []
    handle = model.register_forward_hook(lambda module, inputs, z: seen.append(len(z)))
    parts = mq.posterior(model, "mse", (x, y), weight_decay=1e-2, curvature=kind(chunk=7))
    handle.remove()
    assert max(seen) <= 7 + 1  # one more when samples in other company are compared
    whole = mq.posterior(model, "mse", (x, y), weight_decay=1e-2, curvature=kind())
    close(parts.covariance(), whole.covariance(), 1e-6)


def test_without_a_prior():
    model, x, y = regression(weight_decay=0.0, hidden=1)
    p = mq.posterior(model, "mse", (x, y), weight_decay=0.0)
    assert p.gamma == p.parameters.n
    close(p.noise.square(), (model(x) - y).square().sum().detach() / (len(x) - p.parameters.n))
    with pytest.raises(ValueError, match=r"parameter '0.weight' has weight decay 0.*no evidence"):
        _ = p.log_evidence
    assert p.tuned().log_evidence > -1e6
    wide, x, y = regression(N=12, hidden=8)
    with pytest.raises(ValueError, match=r"12 targets for 33 parameters without a prior"):
        mq.posterior(wide, "mse", (x, y), weight_decay=0.0)
    with pytest.raises(ValueError, match=r"does not determine all parameters.*weight_decay"):
        mq.posterior(wide, "mse", (x, y), weight_decay=0.0, noise=0.1)


def test_a_prior_for_some_parameters():
    model, x, y = regression()
    rule = mq.WeightDecay(1e-2, exclude="2.bias")
    opt = mq.LM(model, "mse", weight_decay=rule)
    for _ in range(60):
        opt.step(x, y)
    p = mq.posterior(model, "mse", (x, y), weight_decay=rule)
    assert p.alpha["2.bias"] == 0
    assert p.gammas["2.bias"] == 1
    assert p.decrement() < 1e-2
    same = mq.posterior(model, "mse", (x, y), weight_decay=[1e-2, 1e-2, 1e-2, 0.0])
    assert same.gammas == p.gammas
    again = mq.posterior(model, "mse", (x, y), weight_decay=p.weight_decay)
    close(list(again.gammas.values()), list(p.gammas.values()))
    assert mq.posterior(model, "mse", (x, y), weight_decay=p.weight_decay, params="last").alpha["2.bias"] == 0
    with quiet():  # of fewer data
        assert mq.posterior(model, "mse", (x[:9], y[:9]), weight_decay=rule, noise=0.1).plan.startswith("Dense")
    with pytest.raises(ValueError, match=r"'2\.bias' has weight decay 0"):
        _ = p.log_evidence


def test_a_sample_that_is_left_out():
    """H without the rows of one sample, written out."""
    J, S = torch.randn(6, 2, 5, dtype=torch.float64), torch.randn(6, 2, 2, dtype=torch.float64)
    rows = S.mT @ J
    H = torch.einsum("nri,nrj->ij", rows, rows) + 0.3 * torch.eye(5)
    g = torch.randn(6, 2, dtype=torch.float64)
    shift, V = without((J @ torch.linalg.inv(H) @ J.mT)[:, None], S[:, None], g[:, None])
    for n in range(6):
        expected = J[n] @ torch.linalg.inv(H - rows[n].T @ rows[n]) @ J[n].T
        torch.testing.assert_close(V[n, 0], expected)
        torch.testing.assert_close(shift[n, 0], expected @ g[n])


@pytest.mark.parametrize(
    ("loss", "curvature"), [("cross_entropy", None), ("bce", None), ("bce", mq.Kronecker())], ids=str
)
def test_the_best_temperature_predicts_best(loss, curvature):
    """Under Kronecker factors some samples may determine their own outputs by more than 1: the exact H is taken."""
    model, x, y = classification(weight_decay=0.005)
    if loss == "bce":
        model = fitted(model, loss, x, torch.nn.functional.one_hot(y, 3).double(), 0.005)
        y = torch.nn.functional.one_hot(y, 3).double()
    p = mq.posterior(model, loss, (x, y), weight_decay=0.005, curvature=curvature)
    exact = None if curvature is None else mq.posterior(model, loss, (x, y), weight_decay=0.005).precision
    best = p.calibrated()
    here = best.temperature, best.sharpness
    others = [(here[0] * t, here[1] * s) for t, s in ((4.0, 1.0), (1.0, 1.3), (1.0, 1 / 1.3))]
    one, *rest = predicted(p.at, p.precision, [Temper(*x) for x in (here, *others)], exact)
    assert one < min(rest)
    assert here[0] < 1 or curvature is not None
    assert here[0] == 1 or f"temperature {best.temperature:.3g}" in repr(best)
    assert best.gamma == p.gamma
    assert best.log_evidence == p.log_evidence


def test_a_temperature_scales_the_covariance():
    model, x, y = classification()
    p = mq.posterior(model, "cross_entropy", (x, y), weight_decay=0.02)
    cold = p.tempered(0.25)
    torch.testing.assert_close(cold.covariance(), 0.25 * p.covariance())
    draws = [q.sample(3, torch.Generator().manual_seed(0)) - p.at.theta for q in (p, cold)]
    torch.testing.assert_close(draws[1], 0.5 * draws[0])
    plain = model(x).softmax(1).detach()
    gaps = [float((q.probabilities(x) - plain).norm()) for q in (p, cold, p.tempered(1e-8))]
    assert gaps[0] > gaps[1] > gaps[2]
    assert gaps[2] < 1e-6
    sharp = p.tempered(1e-8, 3.0)
    torch.testing.assert_close(sharp.probabilities(x), (3 * model(x)).softmax(1).detach())


@pytest.mark.parametrize("options", [{"curvature": mq.Kronecker()}, {"params": "last"}, {}], ids=str)
def test_samples_of_their_own_calibrate(options, monkeypatch):
    model, x, y = classification(weight_decay=1e-3)
    with quiet():  # of fewer data
        p = mq.posterior(model, "cross_entropy", (x[:40], y[:40]), weight_decay=1e-3, **options)
    weight = torch.randint(1, 3, (20,)).double()
    monkeypatch.setattr(expansion, "LONG", 0.0)  # the exact H would take too long
    best = p.calibrated((x[40:], y[40:], weight))
    here = best.temperature, best.sharpness
    loss = {}
    for T, s in (here, (1.0, 1.0), (1e-4, 1.0), (here[0], 0.5 * here[1])):
        told = p.tempered(T, s).probabilities(x[40:])[torch.arange(20), y[40:]].log()
        loss[T, s] = -float(weight @ told)
    assert min(loss, key=loss.get) == here
    loader = [(x[40:50], y[40:50], weight[:10]), (x[50:], y[50:], weight[10:])]
    assert p.calibrated(loader).temperature == best.temperature
    with pytest.warns(UserWarning, match="temperature 10 is the highest that was tried"):
        p.calibrated((x, (y + 1) % 3))
    if "curvature" in options:
        with pytest.raises(ValueError, match=r"exact H of 27 parameters is too large: pass calibrated\(data\)"):
            p.calibrated()
    if "params" in options:
        with pytest.warns(UserWarning, match=r"12 other parameters are taken as known.*calibrated\(data\)") as told:
            p.calibrated()
        assert told[0].filename == __file__
        for t in model[0].parameters():
            t.requires_grad_(False)
        with loud():
            p.calibrated()
