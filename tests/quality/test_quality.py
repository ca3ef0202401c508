"""The paper's two problems in small: benchmarks/quality.py measures them in full."""

import torch

import marquardt as mq
from marquardt.paper import problems
from marquardt.paper.data import load_mnist


def test_the_default_fits_the_sine():
    """200 iterations reach 0.0042 in the median of 20 seeds; this is one of them, half the way."""
    x, y = problems.sine(0)
    model = problems.sine_mlp(0)
    opt = mq.LM(model, "mse")
    for _ in range(100):
        opt.step(x, y)
    with opt.averaged():
        assert problems.SINE_NOISE_FLOOR / 2 < problems.mean_squared_error(model, x, y) < 0.0045


def test_the_paper_preset_falls_on_the_sine():
    x, y = problems.sine(0)
    model = problems.sine_mlp(0)
    opt = mq.presets.paper(model, "mse")
    steps = [opt.step(x, y) for _ in range(30)]
    assert (
        steps[0].loss == torch.nn.functional.mse_loss(problems.sine_mlp(0)(x), y).item()
    )  # works in sums, reports means
    assert steps[-1].new_loss < 0.6 * steps[0].loss


def test_both_recipes_learn_the_digits(mnist_dir):
    """90 % of the test digits within 8 steps of 600: the targets are 6 for the default, 8 for the paper's."""
    data = load_mnist(mnist_dir)
    for build, average in ((mq.LM, True), (mq.presets.paper, False)):
        model = problems.mnist_cnn(0)
        opt = build(model, "cross_entropy")
        reached = 0.0
        for _, index in zip(range(8), problems.batches(len(data.train_labels), 600, 0), strict=False):
            opt.step(data.train_images[index], data.train_labels[index])
        if average:
            with opt.averaged():
                reached = problems.accuracy(model, data.test_images, data.test_labels)
        else:
            reached = problems.accuracy(model, data.test_images, data.test_labels)
        assert reached > 0.9
