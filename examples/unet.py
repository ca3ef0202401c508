"""A small U-Net with GroupNorm finds discs and squares in noisy images.

python examples/unet.py            # writes examples/pictures/unet.png
python examples/unet.py --quick --out /tmp
"""

import torch
import torch.nn.functional as F
from torch import nn

import marquardt as mq
from compare import arguments, compare, draw, panels, report, shuffled

SIZE, CLASSES = 24, 3  # background, disc, square


def shapes(count: int, seed: int):
    """Images (N, 1, SIZE, SIZE) with a disc and a square in noise, and the class of each pixel."""
    generator = torch.Generator().manual_seed(seed)

    def between(low, high):
        return low + (high - low) * torch.rand(count, 1, 1, generator=generator)

    down, across = torch.meshgrid(torch.arange(SIZE), torch.arange(SIZE), indexing="ij")
    labels = torch.zeros(count, SIZE, SIZE, dtype=torch.long)
    image = torch.zeros(count, SIZE, SIZE)
    for kind in (1, 2):
        dy, dx, radius = down - between(5, 19), across - between(5, 19), between(3, 6)
        inside = dy**2 + dx**2 < radius**2 if kind == 1 else torch.maximum(dy.abs(), dx.abs()) < radius
        labels[inside] = kind
        image = torch.where(inside, between(0.5, 1.5), image)
    return (image + 0.4 * torch.randn(image.shape, generator=generator)).unsqueeze(1), labels


def block(inputs: int, outputs: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(inputs, outputs, 3, padding=1), nn.GroupNorm(2, outputs), nn.ReLU(),
        nn.Conv2d(outputs, outputs, 3, padding=1), nn.GroupNorm(2, outputs), nn.ReLU(),
    )  # fmt: skip


class UNet(nn.Module):
    def __init__(self, width=4):
        super().__init__()
        self.down = nn.ModuleList([block(1, width), block(width, 2 * width)])
        self.bottom = block(2 * width, 4 * width)
        self.lift = nn.ModuleList(
            [nn.ConvTranspose2d(4 * width, 2 * width, 2, 2), nn.ConvTranspose2d(2 * width, width, 2, 2)]
        )
        self.up = nn.ModuleList([block(4 * width, 2 * width), block(2 * width, width)])
        self.out = nn.Conv2d(width, CLASSES, 1)

    def forward(self, x):  # (N, 1, SIZE, SIZE)
        skipped = []
        for block in self.down:
            skipped.append(block(x))
            x = F.max_pool2d(skipped[-1], 2)
        x = self.bottom(x)
        for lift, block in zip(self.lift, self.up, strict=True):
            x = block(torch.cat([skipped.pop(), lift(x)], dim=1))
        return self.out(x)  # (N, CLASSES, SIZE, SIZE)


def build():
    torch.manual_seed(0)
    return UNet()


@torch.no_grad()
def overlap(model, images, labels) -> float:
    """Intersection over union, the mean over the classes."""
    found = model(images).argmax(1)
    pairs = [(found == kind, labels == kind) for kind in range(CLASSES)]
    return sum(((a & b).sum() / (a | b).sum()).item() for a, b in pairs) / CLASSES


def main():
    picture, quick = arguments("unet", __doc__)
    (images, labels), valid, test = shapes(1000, 0), shapes(100, 1), shapes(200, 2)

    def loss(model, x, y):
        return F.cross_entropy(model(x), y)

    def validate(model):
        with torch.no_grad():
            return loss(model, *valid).item()

    runs = compare(
        build,
        lambda model: mq.LM(model, "cross_entropy"),
        loss,
        lambda: shuffled(images, labels, len(images), 16),
        validate,
        steps=3 if quick else 120,
    )
    report(runs, ("test IoU", lambda model: overlap(model, *test), max))

    figure, (left, *others) = panels(1.6, 1, 1, 1, 1)
    draw(left, runs)
    shown = [("image", test[0][0, 0]), ("truth", test[1][0])]
    with torch.no_grad():
        shown += [(run.name.partition(",")[0], run.model(test[0][:1]).argmax(1)[0]) for run in runs]
    for axes, (name, values) in zip(others, shown, strict=True):
        axes.imshow(values.numpy(), cmap="gray" if name == "image" else "viridis")
        axes.set(title=name, xticks=[], yticks=[])
    figure.savefig(picture)


if __name__ == "__main__":
    main()
