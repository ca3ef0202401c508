"""What a default step costs on models of many kinds: against its prediction, and against a gradient.

    python benchmarks/limits.py                    # every model
    python benchmarks/limits.py --only token pinn --device cuda
    python benchmarks/limits.py --json limits.json
    python benchmarks/limits.py --quick

Every model takes default steps on a new batch each time, or on the same one ("same"); the first step, in which rules
are proven, is listed apart. A gradient is a forward and a backward pass of the loss. "Predicted" is `Step.predicted`,
which is made before the step begins; the worst ratio is that of the first step or of a later one, in either direction.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import marquardt as mq

Inputs = Any
Build = Callable[[], nn.Module]


@dataclass(frozen=True)
class Case:
    build: Build
    loss: str
    batch: Callable[[], tuple[Inputs, Any]]
    same: bool = False
    double: bool = False


def mlp(*sizes: int, act: type[nn.Module] = nn.Tanh) -> nn.Sequential:
    layers: list[nn.Module] = []
    for i, o in pairwise(sizes):
        layers += [nn.Linear(i, o), act()]
    return nn.Sequential(*layers[:-1])


def cnn(channels: int, norm: Callable[[int], nn.Module], classes: int = 10) -> nn.Sequential:
    c = channels
    return nn.Sequential(
        nn.Conv2d(1, c, 3, 2, 1), norm(c), nn.ReLU(), nn.Conv2d(c, 2 * c, 3, 2, 1), norm(2 * c), nn.ReLU(),
        nn.Conv2d(2 * c, 4 * c, 3, 2, 1), norm(4 * c), nn.ReLU(), nn.AdaptiveAvgPool2d(2), nn.Flatten(),
        nn.Linear(16 * c, classes),
    )  # fmt: skip


class Tokens(nn.Module):
    """A token model whose embedding is its output too; logits (N, C, T)."""

    def __init__(self, vocabulary: int = 60, width: int = 36) -> None:
        super().__init__()
        self.table = nn.Embedding(vocabulary, width)
        self.layers = mlp(width, width, width)
        self.norm, self.bias = nn.LayerNorm(width), nn.Parameter(torch.zeros(vocabulary))

    def forward(self, x: Tensor) -> Tensor:
        h = self.table(x)
        return F.linear(self.norm(h + self.layers(h)), self.table.weight, self.bias).movedim(-1, 1)


class Encoder(nn.Module):
    """A transformer layer with dropout and positions of its own."""

    def __init__(self, inputs: int = 12, width: int = 16, length: int = 8, classes: int = 10) -> None:
        super().__init__()
        self.inputs, self.positions = nn.Linear(inputs, width), nn.Parameter(0.1 * torch.randn(length, width))
        self.layer = nn.TransformerEncoderLayer(width, 2, 2 * width, dropout=0.1, batch_first=True)
        self.head = nn.Linear(width, classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layer(self.inputs(x) + self.positions).mean(1))


class Recurrent(nn.Module):
    def __init__(self, cell: type[nn.RNNBase], inputs: int = 4, width: int = 16) -> None:
        super().__init__()
        self.cell, self.head = cell(inputs, width, batch_first=True), nn.Linear(width, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.cell(x)[0][:, -1])


class Poisson(nn.Module):
    """Residuals of Δu = f on the unit square, and u on its edge."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.u = mlp(2, width, width, 1)

    def forward(self, inside: Tensor, edge: Tensor) -> Tensor:
        x = inside.detach().requires_grad_(True)
        (slope,) = torch.autograd.grad(self.u(x).sum(), x, create_graph=True)
        curved = [torch.autograd.grad(slope[:, i].sum(), x, create_graph=True)[0][:, i] for i in range(2)]
        f = -2 * math.pi**2 * torch.sin(math.pi * inside[:, 0]) * torch.sin(math.pi * inside[:, 1])
        return torch.cat([curved[0] + curved[1] - f, 10 * self.u(edge)[:, 0]])


def classes(N: int, shape: tuple[int, ...], C: int) -> Callable[[], tuple[Inputs, Any]]:
    return lambda: (torch.randn(N, *shape), torch.randint(0, C, (N,)))


def values(N: int, shape: tuple[int, ...], out: int = 1) -> Callable[[], tuple[Inputs, Any]]:
    return lambda: (torch.randn(N, *shape), torch.randn(N, out))


def tokens(N: int, T: int, V: int) -> Callable[[], tuple[Inputs, Any]]:
    return lambda: (torch.randint(0, V, (N, T)), torch.randint(0, V, (N, T)))


def points(inside: int, edge: int) -> Callable[[], tuple[Inputs, Any]]:
    def draw() -> tuple[Inputs, Any]:
        border = torch.rand(edge, 2)
        border[torch.arange(edge), torch.arange(edge) % 2] = torch.rand(edge).round()
        return (torch.rand(inside, 2), border), None

    return draw


def paper_cnn() -> nn.Module:
    from marquardt.paper import problems

    return problems.mnist_cnn(0)


CASES: dict[str, Case] = {
    "classes_300": Case(lambda: mlp(64, 64, 300), "cross_entropy", classes(128, (64,), 300)),
    "classes_1000": Case(lambda: mlp(128, 256, 1000), "cross_entropy", classes(256, (128,), 1000)),
    "tokens": Case(Tokens, "cross_entropy", tokens(32, 16, 60)),
    "tokens_500": Case(lambda: Tokens(500, 64), "cross_entropy", tokens(32, 32, 500)),
    "encoder": Case(Encoder, "cross_entropy", lambda: (torch.randn(128, 8, 12), torch.randint(0, 10, (128,)))),
    "poisson": Case(Poisson, "residual", points(900, 160), double=True),
    "poisson_same": Case(Poisson, "residual", points(900, 160), same=True, double=True),
    "curve_same": Case(lambda: mlp(1, 10, 1), "mse", values(200, (1,)), same=True),
    "surrogate_700_same": Case(lambda: mlp(2, 25, 25, 1), "mse", values(4000, (2,)), same=True, double=True),
    "surrogate_2800_same": Case(lambda: mlp(2, 51, 51, 1), "mse", values(4000, (2,)), same=True, double=True),
    "surrogate_2800": Case(lambda: mlp(2, 51, 51, 1), "mse", values(4000, (2,)), double=True),
    "mlp_mnist": Case(lambda: mlp(784, 128, 10, act=nn.ReLU), "cross_entropy", classes(600, (784,), 10)),
    "mlp_wide": Case(lambda: mlp(784, 1024, 1024, 10, act=nn.ReLU), "cross_entropy", classes(128, (784,), 10)),
    "regression_8": Case(lambda: mlp(16, 64, 64, 8), "mse", values(256, (16,), 8)),
    "autoencoder": Case(lambda: mlp(64, 32, 8, 32, 64), "mse", lambda: (torch.randn(256, 64), torch.randn(256, 64))),
    "cnn_groupnorm": Case(
        lambda: cnn(16, lambda c: nn.GroupNorm(4, c)), "cross_entropy", classes(600, (1, 28, 28), 10)
    ),
    "cnn_small": Case(lambda: cnn(4, lambda c: nn.Identity()), "cross_entropy", classes(256, (1, 28, 28), 10)),
    "cnn_batchnorm": Case(lambda: cnn(8, nn.BatchNorm2d), "cross_entropy", classes(128, (1, 28, 28), 10)),
    "cnn_100": Case(lambda: cnn(8, lambda c: nn.GroupNorm(4, c), 100), "cross_entropy", classes(128, (1, 28, 28), 100)),
    "paper_cnn": Case(paper_cnn, "cross_entropy", classes(600, (1, 28, 28), 10)),
    "gru": Case(lambda: Recurrent(nn.GRU), "mse", values(64, (20, 4))),
    "lstm": Case(lambda: Recurrent(nn.LSTM), "mse", values(64, (20, 4))),
    "binary": Case(lambda: mlp(30, 50, 50, 1), "bce", lambda: (torch.randn(512, 30), torch.rand(512, 1).round())),
    "deep": Case(lambda: mlp(8, *[32] * 10, 1), "mse", values(512, (8,))),
}


def moved(item: Any, device: str, double: bool) -> Any:
    def move(t: Any) -> Any:
        return t.to(device).double() if double and t.is_floating_point() else t.to(device)

    return torch.utils._pytree.tree_map_only(Tensor, move, item)


def gradient_time(model: nn.Module, case: Case, batch: tuple[Any, Any], device: str) -> float:
    loss = mq.losses.resolve(case.loss)
    inputs, y = batch
    times = []
    for _ in range(12):
        began = now(device)
        z = model(*inputs) if isinstance(inputs, tuple) else model(inputs)
        loss.value(z, y).backward()
        times.append(now(device) - began)
    return statistics.median(times[2:])


def now(device: str) -> float:
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


def measured(name: str, case: Case, device: str, steps: int) -> dict[str, Any]:
    torch.manual_seed(0)
    model = moved_model(case, device)
    fixed = moved(case.batch(), device, case.double)
    gradient = gradient_time(model, case, fixed, device)
    opt = mq.LM(model, case.loss)
    found = []
    for _ in range(steps):
        x, y = fixed if case.same else moved(case.batch(), device, case.double)
        step = opt.step(x, y)
        found.append((step.seconds, step.predicted))
    # The second step has no measured one to be corrected by but the first, which proves; the rest are as they go on.
    later = found[min(3, steps - 2) :]
    seconds = statistics.median(s for s, _ in later)
    worst = max((max(s / p, p / s) for s, p in [found[0], *later]), default=math.nan)
    return {
        "model": name, "n": sum(p.numel() for p in opt.params), "gradient": gradient, "first": found[0],
        "seconds": seconds, "predicted": later[-1][1], "in gradients": seconds / gradient, "worst ratio": worst,
        "nominal": seconds / opt._state.plan.seconds, "plan": opt.plan,
    }  # fmt: skip


def moved_model(case: Case, device: str) -> nn.Module:
    model = case.build().to(device)
    return model.double() if case.double else model


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", choices=CASES, default=list(CASES))
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--json")
    parser.add_argument("--quick", action="store_true", help="a few models and steps: to see that it runs")
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    if args.quick:
        args.only, args.steps = ["classes_300", "tokens", "poisson"], 4
    rows = []
    columns = (
        "model",
        "parameters",
        "gradient ms",
        "step ms",
        "in gradients",
        "predicted ms",
        "first ms",
        "worst",
        "plan",
    )
    print("| " + " | ".join(columns) + " |\n|" + " --- |" * len(columns))
    for name in args.only:
        r = measured(name, CASES[name], args.device, args.steps)
        rows.append(r)
        times = [1e3 * t for t in (r["gradient"], r["seconds"], r["predicted"], *r["first"])]
        print(
            f"| {name} | {r['n']:,} | {times[0]:.2f} | {times[1]:.1f} | {r['in gradients']:.1f} | {times[2]:.1f} | "
            f"{times[3]:.0f}, predicted {times[4]:.0f} | {r['worst ratio']:.2f} | {r['plan']} |",
            flush=True,
        )
    within = sum(r["worst ratio"] <= 3 for r in rows)
    print(f"\n{within} of {len(rows)} models within a factor of 3")
    if args.json:
        with open(args.json, "w") as file:
            json.dump(rows, file, indent=1)


if __name__ == "__main__":
    main()
