"""What random networks have found, each as the smallest case that shows it; see tests/fuzz."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import marquardt as mq
import reference
from marquardt.jacobian.chunk import Plan
from marquardt.jacobian.linearization import Linearization
from marquardt.losses import resolve
from marquardt.model.batch import Batch
from reference import error

PLAIN: dict[str, Any] = {"schedule": mq.Constant(1.0), "momentum": None, "line_search": None, "average": None}


class Fn(nn.Module):
    """A function of the input and of modules."""

    def __init__(self, function: Callable[..., Tensor], *modules: nn.Module) -> None:
        super().__init__()
        self.function, self.parts = function, nn.ModuleList(modules)

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x, *self.parts)


def theta(model: nn.Module) -> Tensor:
    return torch.cat([p.detach().flatten() for p in model.parameters()])


@pytest.fixture(autouse=True)
def double():
    torch.manual_seed(0)
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


# ---- RReLU on inputs that are not contiguous

SWAPPED = Fn(lambda x: x.transpose(0, 1))
LAST = Fn(lambda x: x.to(memory_format=torch.channels_last))
STRIDED = {
    "time major": lambda: nn.Sequential(SWAPPED, nn.Linear(2, 3), SWAPPED, nn.RReLU(), nn.Flatten(), nn.Linear(12, 1)),
    "channels last": lambda: nn.Sequential(
        nn.Unflatten(1, (1, 4)), LAST, nn.Conv2d(1, 3, 1), nn.RReLU(), nn.Flatten(), nn.Linear(24, 1)
    ),
    "dropout after it": lambda: nn.Sequential(
        SWAPPED, nn.Linear(2, 3), SWAPPED, nn.RReLU(), nn.Dropout(), nn.Flatten(), nn.Linear(12, 1)
    ),
}


@pytest.mark.parametrize("name", STRIDED)
def test_the_slopes_of_rrelu_are_those_of_the_model(name):
    model, x, y = STRIDED[name](), torch.randn(6, 4, 2), torch.randn(6, 1)
    torch.manual_seed(1)
    f = F.mse_loss(model(x), y).detach()
    torch.manual_seed(1)
    lin = mq.linearize(model, "mse", x, y)
    assert lin.loss == pytest.approx(float(f), rel=1e-12)
    rows, d = lin.rows(), torch.zeros_like(lin.theta)
    assert float(lin.evaluate(d, 1.0)) == pytest.approx(float(f), rel=1e-12)  # trials have the same
    torch.manual_seed(1)
    g = torch.autograd.grad(F.mse_loss(model(x), y), list(model.parameters()))
    assert error(lin.gradient, torch.cat([part.flatten() for part in g])) < 1e-12
    torch.manual_seed(1)
    residuals = (model(x).detach() - y).flatten() * (2 / 6) ** 0.5
    assert error(rows.T @ residuals, lin.gradient) < 1e-12


@pytest.mark.parametrize("T", [4, 6])  # 6 samples: both dimensions look like theirs
def test_fraction_finds_the_slopes_of_its_samples_wherever_they_are(T):
    model = nn.Sequential(SWAPPED, nn.Linear(2, 3), nn.RReLU(), SWAPPED, nn.Flatten(), nn.Linear(3 * T, 1))
    x, y, rows = torch.randn(6, T, 2), torch.randn(6, 1), mq.Fraction(0.5)
    torch.manual_seed(1)
    whole = mq.linearize(model, "mse", x, y).rows()
    torch.manual_seed(1)
    part = mq.linearize(model, "mse", x, y, rows=rows).rows()
    assert error(part, whole[rows.pick(6, 0)] * 2**0.5) < 1e-12


def test_fraction_refuses_slopes_that_belong_to_no_sample():
    mixed = Fn(lambda x, f: f(x.flatten(0, 1)).unflatten(0, x.shape[:2]).flatten(1), nn.RReLU())
    model = nn.Sequential(nn.Linear(2, 3), mixed, nn.Linear(12, 1))
    lm, before = mq.LM(model, "mse", rows=mq.Fraction(0.5)), theta(model)
    state = torch.get_rng_state()
    with pytest.raises(ValueError, match=r"3 of 6 samples.*\(12, 3\) in the place of \(24, 3\).*mq\.Exact\(\)"):
        lm.step(torch.randn(6, 4, 2, generator=torch.Generator().manual_seed(0)), torch.zeros(6, 1))
    assert torch.equal(theta(model), before)
    assert torch.equal(torch.get_rng_state(), state)


# ---- curvature that is rounding


class Attention(nn.Module):
    def __init__(self, batch_first: bool = True) -> None:
        super().__init__()
        self.attention, self.head = nn.MultiheadAttention(4, 2, batch_first=batch_first), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.attention(x, x, x, need_weights=False)[0].mean(1))


@pytest.mark.parametrize("curvature", [mq.Dense(), mq.Gram(), mq.MatrixFree()], ids=lambda c: type(c).__name__)
def test_the_bias_of_the_keys_stays_where_it_is(curvature):
    """It has no influence on the outputs; those of queries and values, in the same parameter, have."""
    model, x, y = Attention(), torch.randn(12, 5, 4), torch.randint(3, (12,))
    lm = mq.LM(model, "cross_entropy", curvature=curvature, damping=mq.MaxDiagonal(floor=0.0))
    for _ in range(6):
        lm.step(x, y)
    assert model.attention.in_proj_bias[4:8].abs().max() < 1e3


@pytest.mark.parametrize("damping", [mq.MaxDiagonal(floor=0.0), mq.FactoredMaxDiagonal()], ids=["entries", "factors"])
@pytest.mark.parametrize("curvature", [mq.Dense(), mq.Gram(), mq.Kronecker()], ids=lambda c: type(c).__name__)
def test_a_saturated_unit_stays_where_it_is(curvature, damping):
    """Of tanh′ = 1 − tanh² nothing but rounding is left."""
    model = nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, 1))
    with torch.no_grad():
        model[0].bias[0] = 18.4
    x, y = torch.randn(8, 2), torch.randn(8, 1)
    assert 0 < mq.linearize(model, "mse", x, y).diagonal()[8] < 1e-28
    mq.LM(model, "mse", curvature=curvature, damping=damping, **PLAIN).step(x, y)
    assert model[0].weight[0].norm() < 1e3
    assert (model[0].bias[0] - 18.4).abs() < 1e3


def test_a_layer_without_influence_stays_where_it_is():
    faint, plain = nn.Linear(2, 1), nn.Linear(2, 1)
    model = Fn(lambda x, f, g: g(x) + 1e-20 * f(x), faint, plain)
    mq.LM(model, "mse", damping=mq.LayerMeanEigenvalue(), **PLAIN).step(torch.randn(8, 2), torch.randn(8, 1))
    assert theta(faint).norm() < 1e3


def test_inputs_of_any_size_keep_their_own_curvature():
    """What is small because of its input is no rounding: diag G is right to its last digit."""
    model, x, y = nn.Linear(2, 3), torch.randn(8, 2) * torch.tensor([1.0, 1e-12]), torch.randn(8, 3)
    lin = mq.linearize(model, "mse", x, y)
    D = mq.MaxDiagonal(floor=0.0).update(None, mq.Dense().represent(lin))
    assert error(D.entries(lin.sizes)[1:6:2], lin.diagonal()[1:6:2]) < 1e-12


@pytest.mark.parametrize("curvature", [mq.Dense(), mq.Gram()], ids=lambda c: type(c).__name__)
def test_a_gradient_without_any_curvature_is_a_gradient_step(curvature):
    """The samples that Fraction picks have no weight."""
    model, x, y, rows = nn.Linear(2, 1), torch.randn(6, 2), torch.randn(6, 1), mq.Fraction(0.5)
    weight = torch.ones(6)
    weight[rows.pick(6, 0)] = 0
    g, before = mq.linearize(model, "mse", x, y, weight).gradient, theta(model)
    parts = {**PLAIN, "schedule": mq.Constant(4.0), "damping": mq.MeanEigenvalue()}
    mq.LM(model, "mse", curvature=curvature, rows=rows, **parts).step(x, y, weight)
    assert error(theta(model) - before, -g / 4) < 1e-10


class Silent(nn.Module):
    """A bias before InstanceNorm, which has an influence only on samples with both signs between the two."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Conv1d(1, 2, 1), nn.LeakyReLU(0.3), nn.InstanceNorm1d(2), nn.Flatten())
        self.head = nn.Linear(10, 1)
        with torch.no_grad():
            self.layers[0].weight.fill_(1.0)
            self.layers[0].bias.zero_()

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layers(x).square())


@pytest.mark.parametrize("rows", [mq.Exact(), mq.Sampled(1)], ids=["exact", "sampled"])
@pytest.mark.parametrize("order", [[0, 0, 0, 1], [1, 0, 0, 0], [0, 1, 0, 0]], ids=str)
def test_a_bias_is_heard_in_the_chunks_where_it_has_an_influence(order, rows):
    model, x, y = Silent(), torch.randn(8, 1, 5), torch.randn(8, 1)
    both = torch.tensor(order).repeat_interleave(2).bool()[:, None, None]
    x = torch.where(both, x, x.abs())
    wanted = torch.autograd.grad(F.mse_loss(model(x), y), list(model.parameters()))
    lin = mq.linearize(model, "mse", x, y, chunk=2, rows=rows)
    G = mq.Dense(small=0).represent(lin)
    assert error(G.gradient, torch.cat([g.flatten() for g in wanted])) < 1e-10
    assert error(lin.gradient, torch.cat([g.flatten() for g in wanted])) < 1e-10
    assert G.diagonal()[2:4].min() > 1e-6  # the bias


# ---- layers without samples, and gradients in another order


def routed(width: int) -> nn.Module:
    """All samples go to the second of two experts."""

    def f(x: Tensor, f: nn.Module, g: nn.Module) -> Tensor:
        first = x[:, 0] > 100
        out = x.new_zeros(len(x), width)
        out[first], out[~first] = f(x[first]), g(x[~first])
        return out.tanh()

    return nn.Sequential(Fn(f, nn.Linear(3, width), nn.Linear(3, width)), nn.Linear(width, 2))


def test_an_expert_without_samples_has_empty_rows():
    model, x, y = routed(4), torch.randn(6, 3), torch.randn(6, 2)
    other = copy.deepcopy(model)
    mq.LM(model, "mse", curvature=mq.Dense(small=0), damping=mq.Identity(), **PLAIN).step(x, y)
    mq.LM(other, "mse", curvature=mq.Gram(), damping=mq.Identity(), **PLAIN).step(x, y)
    assert error(theta(model), theta(other)) < 1e-10


def test_an_expert_without_samples_has_kronecker_factors():
    model, x, y = routed(4), torch.randn(6, 3), torch.randn(6, 2)
    expert = copy.deepcopy(model[0].parts[0])
    step = mq.LM(model, "mse", curvature=mq.Kronecker(), **PLAIN).step(x, y)
    assert (step.rule, step.note) == ("decrease", "")
    assert torch.equal(theta(model[0].parts[0]), theta(expert))


def test_kronecker_takes_the_gradients_of_an_embedding_in_any_order():
    head = nn.Sequential(nn.Linear(3, 3), nn.Tanh())
    table, last = nn.Embedding(5, 3), nn.Linear(3, 1)
    plain = nn.Sequential(table, head, Fn(lambda x: x.mean(1)), last)
    swapped = copy.deepcopy(nn.Sequential(table, SWAPPED, head, SWAPPED, Fn(lambda x: x.mean(1)), last))
    x, y = torch.randint(5, (6, 4)), torch.randn(6, 1)
    for model in (plain, swapped):
        mq.LM(model, "mse", curvature=mq.Kronecker(), damping=mq.Identity(), **PLAIN).step(x, y)
    assert error(theta(swapped), theta(plain)) < 1e-10


# ---- one sample, then many


@pytest.mark.parametrize("batch_first", [True, False])
def test_what_is_proven_on_one_sample_holds_for_no_other_batch(batch_first):
    model, x, y = Attention(batch_first), torch.randn(8, 8, 4), torch.randint(3, (8,))
    parts = {"curvature": mq.Gram(chunk=2), "damping": mq.Identity(), **PLAIN}
    lm = mq.LM(model, "cross_entropy", **parts)
    lm.step(x[:1], y[:1])
    other = copy.deepcopy(model)
    lm.step(x, y)
    mq.LM(other, "cross_entropy", **parts).step(x, y)
    assert error(theta(model), theta(other)) < 1e-10


# ---- trial points of a model that draws random numbers


class Far(nn.Module):
    """Dropout on an input that is not contiguous has other masks in a batched pass; they do not show if the bias is
    large."""

    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(1))
        self.layers = nn.Sequential(SWAPPED, nn.Linear(4, 4), SWAPPED, nn.Dropout())

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x).mean(1) + self.bias


@pytest.mark.parametrize(("trains", "samples"), [(True, 6), (False, 6), (True, 1)], ids=["same", "eval", "one sample"])
def test_trial_points_have_the_random_numbers_of_the_linearisation(trains, samples):
    """Also if the way to their losses was proven in eval mode, or on one sample, for which strides do not count."""
    model, plan, x, y = Far(), Plan(), torch.randn(6, 5, 4), torch.randn(6, 4)
    rates = [0.0, 0.5, 1.0]
    for mode, N in ((trains, samples), (True, 6)):
        model.train(mode)
        batch = Batch(x[:N], y[:N])
        lin = Linearization(model, resolve("mse"), list(model.parameters()), [batch], mq.Exact(), plan=plan)
        d = torch.zeros_like(lin.theta)
        d[:1] = 1e3  # the bias
        f = lin.loss
        losses = lin.evaluate_along(d, rates)
        assert losses[0] == pytest.approx(f, rel=1e-12)
        assert losses == pytest.approx([float(lin.evaluate(d, lr)) for lr in rates], rel=1e-12)


# ---- the reference itself


def test_the_reference_leaves_a_module_with_two_names_whole():
    layer = nn.Linear(2, 2)
    model = Fn(lambda x, f, g: g(f(x).tanh()), layer, layer)
    kept = dict(layer.named_parameters())
    reference.quadratic(model, "mse", torch.randn(3, 2), torch.randn(3, 2))
    assert all(layer._parameters[name] is p for name, p in kept.items())
