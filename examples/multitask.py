"""One trunk and two heads: which shape is in an image, and how large it is. Each head has a loss, and a weight.

python examples/multitask.py            # writes examples/pictures/multitask.png
python examples/multitask.py --quick --out /tmp
"""

import torch
import torch.nn.functional as F
from torch import nn

import marquardt as mq
from compare import arguments, compare, draw, panels, report, shuffled

SIZE, KINDS = 16, ("disc", "ring", "square", "cross")


def shapes(count: int, seed: int):
    """Images (N, 1, SIZE, SIZE) of one shape in noise; its kind, and its radius in pixels."""
    generator = torch.Generator().manual_seed(seed)

    def between(low, high):
        return low + (high - low) * torch.rand(count, 1, 1, generator=generator)

    down, across = torch.meshgrid(torch.arange(SIZE), torch.arange(SIZE), indexing="ij")
    dy, dx, radius = down - between(5, 10), across - between(5, 10), between(2.5, 5)
    away, far = (dy**2 + dx**2).sqrt(), torch.maximum(dy.abs(), dx.abs())
    disc, square = away < radius, far < radius
    ring, cross = disc & (away > radius - 1.5), square & (torch.minimum(dy.abs(), dx.abs()) < 1)
    kind = torch.randint(len(KINDS), (count,), generator=generator)
    image = torch.stack([disc, ring, square, cross])[kind, torch.arange(count)]
    noise = 0.3 * torch.randn(count, SIZE, SIZE, generator=generator)
    return (image + noise).unsqueeze(1), {"kind": kind, "size": radius[:, 0]}


class TwoHeads(nn.Module):
    def __init__(self):
        super().__init__()
        self.trunk = nn.Sequential(
            nn.Conv2d(1, 6, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
            nn.Conv2d(6, 12, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
            nn.Flatten(), nn.Linear(12 * 4 * 4, 24), nn.Tanh(),
        )  # fmt: skip
        self.kind, self.size = nn.Linear(24, len(KINDS)), nn.Linear(24, 1)

    def forward(self, x):
        h = self.trunk(x)
        return {"kind": self.kind(h), "size": 4 + self.size(h)}


def build():
    torch.manual_seed(0)
    return TwoHeads()


def main():
    picture, quick = arguments("multitask", __doc__)
    (images, targets), valid, test = shapes(2000, 0), shapes(500, 1), shapes(1000, 2)

    def loss(model, x, y):
        z = model(x)
        return F.cross_entropy(z["kind"], y["kind"]) + 0.1 * F.huber_loss(z["size"], y["size"])

    @torch.no_grad()
    def validate(model):
        return loss(model, *valid).item()

    runs = compare(
        build,
        lambda model: mq.LM(model, {"kind": ("cross_entropy", 1.0), "size": ("huber", 0.1)}),
        loss,
        lambda: shuffled(images, targets, len(images), 100),
        validate,
        steps=4 if quick else 60,
    )

    @torch.no_grad()
    def right(model):
        return 100 * (model(test[0])["kind"].argmax(1) == test[1]["kind"]).float().mean().item()

    @torch.no_grad()
    def error(model):
        return (model(test[0])["size"] - test[1]["size"]).abs().mean().item()

    shares, _ = report(runs, ("right kinds, %", right, max), ("error of the size", error, min))

    figure, (left, *others) = panels(1.4, 1, 1)
    draw(left, runs)
    for axes, run, share in zip(others, runs, shares, strict=True):
        with torch.no_grad():
            size = run.model(test[0])["size"]
        axes.plot([2, 6], [2, 6], color="0.7")
        for kind, name in enumerate(KINDS):
            these = test[1]["kind"] == kind
            axes.plot(test[1]["size"][these], size[these], ".", markersize=2, label=name)
        axes.set(xlabel="radius", ylabel="found", xlim=(2, 6), ylim=(2, 6), aspect="equal")
        axes.set_title(f"{run.name}\n{share:.1f} % of kinds right", fontsize="medium")
        axes.legend(fontsize="small", markerscale=4, loc="upper left")
    figure.savefig(picture)


if __name__ == "__main__":
    main()
