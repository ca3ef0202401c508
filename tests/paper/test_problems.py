import math
from dataclasses import replace
from itertools import islice

import pytest
import torch
from torch import nn

from marquardt.paper.data import Digits
from marquardt.paper.problems import (
    SINE_NOISE_FLOOR,
    accuracy,
    batches,
    cnn_for,
    digits_cnn,
    evaluate,
    mean_squared_error,
    mnist_cnn,
    predict,
    sine,
    sine_mlp,
)

MODELS = [sine_mlp, mnist_cnn, digits_cnn]


def parameters(model):
    return sum(p.numel() for p in model.parameters())


# --- the sine ---


def test_sine_is_the_papers_recipe():
    x, y = sine(0)
    assert x.shape == y.shape == (1000, 1)
    assert x.dtype == y.dtype == torch.float64
    assert (x[0].item(), x[-1].item()) == (-10, 10)
    torch.testing.assert_close(x.diff(dim=0), torch.full((999, 1), 20 / 999, dtype=torch.float64))
    noise = y - x.sin()
    assert noise.min() >= 0
    assert noise.max() < 0.2
    assert noise.max() - noise.min() > 0.19
    assert noise.var().item() == pytest.approx(SINE_NOISE_FLOOR, rel=0.15)
    assert pytest.approx(0.2**2 / 12) == SINE_NOISE_FLOOR


def test_sine_follows_its_seed_and_nothing_else():
    before = torch.get_rng_state()
    x, y = sine(3)
    assert torch.equal(torch.get_rng_state(), before)
    torch.rand(7)
    assert torch.equal(sine(3)[1], y)
    assert not torch.equal(sine(4)[1], y)
    x32, y32 = sine(3, dtype=torch.float32)
    assert torch.equal(x32, x.float())
    assert torch.equal(y32, y.float())


# --- the networks ---


@pytest.mark.parametrize(
    ("build", "count", "shape", "out"),
    [
        (sine_mlp, 31, (5, 1), (5, 1)),
        (mnist_cnn, 2202, (5, 1, 28, 28), (5, 10)),
        (digits_cnn, 506, (5, 1, 8, 8), (5, 10)),
    ],
)
def test_networks_have_the_size_they_claim(build, count, shape, out):
    model = build(0, dtype=torch.float64)
    assert parameters(model) == count
    assert model.training
    assert model(torch.zeros(shape, dtype=torch.float64)).shape == out


def test_default_precisions():
    assert {p.dtype for p in sine_mlp(0).parameters()} == {torch.float64}
    assert {p.dtype for p in mnist_cnn(0).parameters()} == {torch.float32}
    assert {p.dtype for p in digits_cnn(0).parameters()} == {torch.float32}


def test_cnn_layers():
    kinds = [type(layer).__name__ for layer in mnist_cnn(0)]
    assert kinds == ["Conv2d", "RReLU", "MaxPool2d", "Conv2d", "RReLU", "MaxPool2d", "Flatten", "Linear"]


def test_the_network_for_images_of_a_size():
    labels = torch.zeros(2, dtype=torch.int64)
    small, large = torch.zeros(2, 1, 8, 8), torch.zeros(2, 1, 28, 28)
    data = Digits(small, labels, small, labels, "digits", "made up")
    assert cnn_for(data) is digits_cnn
    assert cnn_for(replace(data, train_images=large)) is mnist_cnn
    with pytest.raises(ValueError, match="digits: expected images of side 28 or 8, found 32"):
        cnn_for(replace(data, train_images=torch.zeros(2, 1, 32, 32)))


@pytest.mark.parametrize("build", MODELS)
def test_networks_follow_their_seed_and_nothing_else(build):
    before = torch.get_rng_state()
    first = nn.utils.parameters_to_vector(build(1).parameters())
    assert torch.equal(torch.get_rng_state(), before)
    torch.rand(7)
    assert torch.equal(nn.utils.parameters_to_vector(build(1).parameters()), first)
    assert not torch.equal(nn.utils.parameters_to_vector(build(2).parameters()), first)


@pytest.mark.parametrize("build", MODELS)
def test_same_weights_in_every_precision(build):
    single = build(1, dtype=torch.float32)
    double = build(1, dtype=torch.float64)
    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        again = build(1, dtype=torch.float32)
    finally:
        torch.set_default_dtype(default)
    for a, b, c in zip(single.parameters(), double.parameters(), again.parameters(), strict=True):
        assert torch.equal(a.double(), b)
        assert torch.equal(a, c)


def test_initialisation_is_torchs_default():
    torch.manual_seed(5)
    expected = nn.Linear(1, 10)
    assert torch.equal(sine_mlp(5, dtype=torch.float32)[0].weight, expected.weight)


# --- batches ---


def test_a_hundred_batches_of_600_are_one_pass():
    order = list(islice(batches(60000, 600, 0), 200))
    assert {len(batch) for batch in order} == {600}
    first, second = torch.cat(order[:100]), torch.cat(order[100:])
    assert torch.equal(first.sort().values, torch.arange(60000))
    assert torch.equal(second.sort().values, torch.arange(60000))
    assert not torch.equal(first, second)


@pytest.mark.parametrize(
    ("n", "size", "lengths"), [(10, 3, [3, 3, 3, 1]), (6, 3, [3, 3]), (4, 4, [4]), (3, 1, [1, 1, 1])]
)
def test_every_index_once_per_pass(n, size, lengths):
    endless = batches(n, size, 1)
    for _ in range(3):
        a_pass = list(islice(endless, len(lengths)))
        assert [len(batch) for batch in a_pass] == lengths
        assert torch.cat(a_pass).sort().values.tolist() == list(range(n))


def test_batches_follow_their_seed_and_nothing_else():
    before = torch.get_rng_state()
    first = torch.cat(list(islice(batches(50, 5, 1), 20)))
    assert torch.equal(torch.get_rng_state(), before)
    torch.rand(7)
    assert torch.equal(torch.cat(list(islice(batches(50, 5, 1), 20))), first)
    assert not torch.equal(torch.cat(list(islice(batches(50, 5, 2), 20))), first)


@pytest.mark.parametrize("size", [0, -1, 11])
def test_batches_refuse_an_impossible_size_at_the_call(size):
    with pytest.raises(ValueError, match=f"number of samples 10, got {size}"):
        batches(10, size, 0)


# --- evaluation ---


class Probe(nn.Module):
    """Answers class 1 everywhere, and notes the mode, the gradient mode and the chunk sizes it was called with."""

    def __init__(self):
        super().__init__()
        self.inner = nn.BatchNorm1d(2)
        self.calls = []

    def forward(self, x):
        self.calls.append((self.training, self.inner.training, torch.is_grad_enabled(), len(x)))
        return torch.tensor([0.0, 1.0]).expand(len(x), 2)


def test_evaluation_is_in_eval_mode_without_gradients_in_chunks():
    model = Probe()
    y = torch.tensor([1, 0, 1, 1, 0])
    result = evaluate(model, torch.zeros(5, 2), y, chunk=2)
    assert model.calls == [(False, False, False, 2), (False, False, False, 2), (False, False, False, 1)]
    assert result.accuracy == accuracy(model, torch.zeros(5, 2), y) == 3 / 5
    assert result.loss == pytest.approx((3 * math.log(1 + math.exp(-1)) + 2 * math.log(1 + math.e)) / 5, rel=1e-6)


@pytest.mark.parametrize(("outer", "inner"), [(True, True), (True, False), (False, True), (False, False)])
def test_evaluation_restores_every_training_flag(outer, inner):
    model = Probe()
    model.train(outer)
    model.inner.train(inner)
    predict(model, torch.zeros(3, 2))
    assert (model.training, model.inner.training) == (outer, inner)


def test_flags_are_restored_after_an_exception():
    model = mnist_cnn(0)
    with pytest.raises(RuntimeError):
        predict(model, torch.zeros(3, 1, 2, 2))
    assert all(module.training for module in model.modules())


def test_chunks_do_not_change_the_answer_and_rrelu_is_not_random():
    model = mnist_cnn(0, dtype=torch.float64)
    x = torch.randn(11, 1, 28, 28, dtype=torch.float64)
    before = torch.get_rng_state()
    torch.testing.assert_close(predict(model, x, chunk=4), predict(model, x))
    assert torch.equal(torch.get_rng_state(), before)


def test_mean_squared_error():
    x, y = sine(0)
    model = sine_mlp(0)
    expected = (model(x) - y).square().mean().item()
    assert mean_squared_error(model, x, y, chunk=300) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("score", [evaluate, accuracy, mean_squared_error])
@pytest.mark.parametrize(("n", "targets"), [(3, 2), (0, 0)])
def test_evaluation_needs_a_target_for_each_sample(score, n, targets):
    with pytest.raises(ValueError, match=f"got {targets} for {n}"):
        score(Probe(), torch.zeros(n, 2), torch.zeros(targets, dtype=torch.int64))
