"""A physics-informed network solves the wave equation u_tt = u_xx, with boundary and initial conditions.

The model returns its residuals, those of each condition times a weight: no targets, and the loss "residual".

python examples/pinn.py            # writes examples/pictures/pinn.png
python examples/pinn.py --quick --out /tmp
"""

from itertools import repeat
from math import pi

import torch
from torch import nn
from torch.func import jvp

import marquardt as mq
from compare import arguments, compare, draw, panels, report

WEIGHTS = {"inside": 1.0, "edge": 5.0, "start": 5.0, "speed": 5.0}  # of the residuals, before they are squared


def exact(x, t):
    return torch.sin(pi * x) * torch.cos(pi * t) + 0.5 * torch.sin(3 * pi * x) * torch.cos(3 * pi * t)


class Wave(nn.Module):
    """u(x, t) is `self.u`; forward has the residuals at points inside, at the edges and at the start."""

    def __init__(self, width=24):
        super().__init__()
        self.u = nn.Sequential(nn.Linear(2, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh(), nn.Linear(width, 1))

    def forward(self, inside, edge, start):  # (N, 2), (M, 2), (K, 2), of x and t
        along_x, along_t = torch.eye(2, dtype=inside.dtype)

        def first(points, along):
            return jvp(self.u, (points,), (along.expand_as(points),))[1]

        def second(points, along):
            return jvp(lambda p: first(p, along), (points,), (along.expand_as(points),))[1]

        residuals = {
            "inside": second(inside, along_t) - second(inside, along_x),
            "edge": self.u(edge),
            "start": self.u(start) - exact(*start.split(1, dim=1)),
            "speed": first(start, along_t),
        }
        # The loss is the mean over all points; each condition is to count as the mean over its own.
        count = sum(len(r) for r in residuals.values())
        return torch.cat([WEIGHTS[name] * (count / len(r)) ** 0.5 * r for name, r in residuals.items()])


def build():
    torch.manual_seed(0)
    return Wave().double()


def points(seed: int):
    """x in [0, 1] and t in [0, 1]: 600 inside, 100 at the edges x = 0 and x = 1, 100 at t = 0."""
    generator = torch.Generator().manual_seed(seed)
    inside, edge, start = (torch.rand(n, 2, generator=generator, dtype=torch.float64) for n in (600, 100, 100))
    edge[:, 0], start[:, 1] = edge[:, 0].round(), 0
    return inside, edge, start


def main():
    picture, quick = arguments("pinn", __doc__)
    train, valid = points(0), points(1)

    def validate(model):
        with torch.no_grad():
            return model(*valid).square().mean().item()

    runs = compare(
        build,
        lambda model: mq.LM(model, "residual"),
        lambda model, x, y: model(*x).square().mean(),
        lambda: repeat((train, None)),  # the same points in every step
        validate,
        steps=8 if quick else 100,
    )
    side = torch.linspace(0, 1, 51, dtype=torch.float64)
    t, x = torch.meshgrid(side, side, indexing="ij")
    true = exact(x, t)

    def solution(model):
        with torch.no_grad():
            return model.u(torch.stack([x, t], dim=2).reshape(-1, 2)).reshape(x.shape)

    report(runs, ("relative L2 error", lambda model: ((solution(model) - true).norm() / true.norm()).item(), min))

    figure, (left, middle, *others) = panels(1.6, 1, 1, 1)
    draw(left, runs)
    square = {"origin": "lower", "extent": (0, 1, 0, 1), "aspect": "auto", "interpolation": "nearest"}
    figure.colorbar(middle.imshow(true.numpy(), cmap="RdBu", **square), ax=middle)
    middle.set(title="exact u", xlabel="x", ylabel="t")
    for axes, run in zip(others, runs, strict=True):
        error = (solution(run.model) - true).abs().log10()
        image = axes.imshow(error.numpy(), vmin=-5, vmax=0, **square)
        axes.set(title=run.name, xlabel="x", ylabel="t")
    figure.colorbar(image, ax=others, label="log₁₀ |error|")
    figure.savefig(picture)


if __name__ == "__main__":
    main()
