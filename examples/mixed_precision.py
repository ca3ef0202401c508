"""A convolutional network under bfloat16 autocast: LM and Adam, beside the same in float32.

python examples/mixed_precision.py            # writes examples/pictures/mixed_precision.png
python examples/mixed_precision.py --quick --out /tmp
"""

from functools import partial

import torch
import torch.nn.functional as F
from torch import nn

import marquardt as mq
from compare import arguments, compare, draw, panels, report, shuffled

SIZE, KINDS = 16, 4  # disc, ring, square, cross


def shapes(count: int, seed: int):
    """Images (N, 1, SIZE, SIZE) of one shape in noise, and its kind."""
    generator = torch.Generator().manual_seed(seed)

    def between(low, high):
        return low + (high - low) * torch.rand(count, 1, 1, generator=generator)

    down, across = torch.meshgrid(torch.arange(SIZE), torch.arange(SIZE), indexing="ij")
    dy, dx, radius = down - between(5, 11), across - between(5, 11), between(3, 5)
    away, far = (dy**2 + dx**2).sqrt(), torch.maximum(dy.abs(), dx.abs())
    masks = torch.stack([
        away < radius, (away < radius) & (away > radius - 1.5), far < 0.9 * radius,
        (far < radius) & (torch.minimum(dy.abs(), dx.abs()) < 1),
    ])  # fmt: skip
    kind = torch.randint(KINDS, (count,), generator=generator)
    image = masks[kind, torch.arange(count)] + 0.5 * torch.randn(count, SIZE, SIZE, generator=generator)
    return image.unsqueeze(1), kind


def build():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(8, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(16 * 4 * 4, KINDS),
    )  # fmt: skip


class Half:
    """An optimizer with its steps under autocast. The weights and the solve stay in float32."""

    def __init__(self, opt: mq.LM):
        self.opt, self.averaged = opt, opt.averaged

    def step(self, x, y):
        with torch.autocast("cpu", torch.bfloat16):
            return self.opt.step(x, y)


def main():
    picture, quick = arguments("mixed_precision", __doc__)
    (images, kinds), valid, test = shapes(2000, 0), shapes(500, 1), shapes(2000, 2)

    def loss(model, x, y, half=False):
        with torch.autocast("cpu", torch.bfloat16, enabled=half):
            return F.cross_entropy(model(x), y)

    @torch.no_grad()
    def validate(model):
        return loss(model, *valid).item()

    @torch.no_grad()
    def accuracy(model):
        return 100 * (model(test[0]).argmax(1) == test[1]).float().mean().item()

    def batches():
        return shuffled(images, kinds, len(kinds), 100)

    runs, steps = [], 4 if quick else 50
    for half in (False, True):
        kind = "bfloat16" if half else "float32"

        def make(model, half=half):
            opt = mq.LM(model, "cross_entropy")
            return Half(opt) if half else opt

        runs += compare(build, make, partial(loss, half=half), batches, validate, steps, suffix=f", {kind}")
    [found] = report(runs, ("test accuracy, %", accuracy, max))

    figure, (left, right) = panels(1.4, 1)
    draw(left, runs)
    for line in left.lines[2:]:
        line.set_linestyle("--")
    left.legend(fontsize="small")
    bars = right.barh([run.name for run in runs][::-1], found[::-1], color=["C1", "C0", "C1", "C0"])
    right.bar_label(bars, fmt="%.1f %%", padding=-40, color="white")
    right.set(xlabel="test accuracy, %", xlim=(0, 100))
    figure.savefig(picture)


if __name__ == "__main__":
    main()
