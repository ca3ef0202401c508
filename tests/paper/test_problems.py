"""The paper's two problems: the sine, the networks, batches and evaluation."""

import math
from itertools import islice

import pytest
import torch
from torch import nn
from torch.nn.utils import parameters_to_vector

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
from support.cases import default_dtype
from support.made_runs import digits


def test_sine_is_the_papers_recipe():
    x, y = sine(0)
    assert x.shape == y.shape == (1000, 1)
    assert x.dtype == y.dtype == torch.float64
    assert (x[0].item(), x[-1].item()) == (-10, 10)
    torch.testing.assert_close(x.diff(dim=0), torch.full((999, 1), 20 / 999, dtype=torch.float64))
    noise = y - x.sin()
    assert 0 <= noise.min() < 0.01 < 0.19 < noise.max() < 0.2
    assert noise.var().item() == pytest.approx(SINE_NOISE_FLOOR, rel=0.15)
    assert pytest.approx(0.2**2 / 12) == SINE_NOISE_FLOOR
    for exact, rounded in zip(sine(3), sine(3, dtype=torch.float32), strict=True):
        assert torch.equal(rounded, exact.float())


@pytest.mark.parametrize(
    "made",
    [
        lambda seed: sine(seed)[1],
        *(lambda seed, build=build: parameters_to_vector(build(seed).parameters()) for build in
          (sine_mlp, mnist_cnn, digits_cnn)),
        lambda seed: torch.cat(list(islice(batches(50, 5, seed), 20))),
    ],
    ids=["sine", "sine_mlp", "mnist_cnn", "digits_cnn", "batches"],
)  # fmt: skip
def test_all_follow_their_seed_and_nothing_else(made):
    before = torch.get_rng_state()
    first = made(1)
    assert torch.equal(torch.get_rng_state(), before)
    torch.rand(7)
    assert torch.equal(made(1), first)
    assert not torch.equal(made(2), first)


# --- the networks ---


@pytest.mark.parametrize(
    ("build", "count", "shape", "out", "dtype"),
    [
        (sine_mlp, 31, (5, 1), (5, 1), torch.float64),
        (mnist_cnn, 2202, (5, 1, 28, 28), (5, 10), torch.float32),
        (digits_cnn, 506, (5, 1, 8, 8), (5, 10), torch.float32),
    ],
)
def test_networks_have_their_size_and_the_same_weights_in_every_precision(double, build, count, shape, out, dtype):
    model = build(1)
    assert {p.dtype for p in model.parameters()} == {dtype}
    assert sum(p.numel() for p in model.parameters()) == count
    assert model.training
    assert model(torch.zeros(shape, dtype=dtype)).shape == out
    single = build(1, dtype=torch.float32)
    with default_dtype(torch.float32):
        again = build(1, dtype=torch.float64)
    for a, b in zip(single.parameters(), again.parameters(), strict=True):
        assert torch.equal(a.double(), b)


def test_layers_and_their_initialisation_are_torchs():
    kinds = [type(layer).__name__ for layer in mnist_cnn(0)]
    assert kinds == ["Conv2d", "RReLU", "MaxPool2d", "Conv2d", "RReLU", "MaxPool2d", "Flatten", "Linear"]
    torch.manual_seed(5)
    assert torch.equal(sine_mlp(5, dtype=torch.float32)[0].weight, nn.Linear(1, 10).weight)


def test_the_network_for_images_of_a_size():
    assert [cnn_for(digits(side=side)) for side in (8, 28)] == [digits_cnn, mnist_cnn]
    with pytest.raises(ValueError, match="digits: expected images of side 28 or 8, found 32"):
        cnn_for(digits(side=32))


# --- batches ---


@pytest.mark.parametrize(
    ("n", "size", "lengths"),
    [(10, 3, [3, 3, 3, 1]), (6, 3, [3, 3]), (4, 4, [4]), (3, 1, [1, 1, 1]), (60_000, 600, [600] * 100)],
)
def test_every_index_once_per_pass(n, size, lengths):
    endless = batches(n, size, 1)
    orders = []
    for _ in range(3):
        a_pass = list(islice(endless, len(lengths)))
        assert [len(batch) for batch in a_pass] == lengths
        orders.append(torch.cat(a_pass))
        assert torch.equal(orders[-1].sort().values, torch.arange(n))
    assert n < 100 or not torch.equal(orders[0], orders[1])
    for wrong in (0, n + 1):
        with pytest.raises(ValueError, match=f"number of samples {n}, got {wrong}"):
            batches(n, wrong, 0)  # at the call


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


def test_evaluation_is_in_eval_mode_without_gradients_in_chunks_and_restores_every_flag():
    model = Probe()
    y = torch.tensor([1, 0, 1, 1, 0])
    for outer, inner in [(True, True), (True, False), (False, True)]:
        model.train(outer)
        model.inner.train(inner)
        model.calls.clear()
        result = evaluate(model, torch.zeros(5, 2), y, chunk=2)
        assert model.calls == [(False, False, False, 2), (False, False, False, 2), (False, False, False, 1)]
        assert (model.training, model.inner.training) == (outer, inner)
    assert result.accuracy == accuracy(model, torch.zeros(5, 2), y) == 3 / 5
    assert result.loss == pytest.approx((3 * math.log(1 + math.exp(-1)) + 2 * math.log(1 + math.e)) / 5, rel=1e-6)
    model = mnist_cnn(0)
    with pytest.raises(RuntimeError):  # after an exception too
        predict(model, torch.zeros(3, 1, 2, 2))
    assert all(module.training for module in model.modules())
    for score in (evaluate, accuracy, mean_squared_error):
        for n, targets in ((3, 2), (0, 0)):
            with pytest.raises(ValueError, match=f"got {targets} for {n}"):
                score(Probe(), torch.zeros(n, 2), torch.zeros(targets, dtype=torch.int64))


def test_chunks_do_not_change_the_answer_and_rrelu_is_not_random():
    model = mnist_cnn(0, dtype=torch.float64)
    x = torch.randn(11, 1, 28, 28, dtype=torch.float64)
    before = torch.get_rng_state()
    torch.testing.assert_close(predict(model, x, chunk=4), predict(model, x))
    assert torch.equal(torch.get_rng_state(), before)
    x, y = sine(0)
    model = sine_mlp(0)
    expected = (model(x) - y).square().mean().item()
    assert mean_squared_error(model, x, y, chunk=300) == pytest.approx(expected, rel=1e-12)
