"""Is a step slower than at another commit? Both versions, each in a process of its own, step by turns in one run.

    git worktree add /tmp/old 772c54d
    python benchmarks/alternate.py --old /tmp/old/src
    python benchmarks/alternate.py --old /tmp/old/src --device cuda --cases cnn captured mlp

The ratio is that of the medians over the turns, new over old: what else the machine does meets both alike, and who
begins changes from turn to turn. The ratio of every turn stands beside it in the JSON. A version against itself
(`--new` the same folder as `--old`) tells how far to believe it: 0.94 to 1.00 in three runs of a step of 4 ms.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

CASES = {
    "cnn": "the paper's CNN, batch 600, exact rows",
    "captured": "the same, recorded as a CUDA graph",
    "one row": "the same, one row per sample",
    "mlp": "an MLP of 1.9 M parameters, batch 128 (Gram)",
    "wide": "an MLP of 37 M parameters, batch 128 (Gram), for a GPU",
    "huge": "scale.py's MLP of 818 M parameters, batch 128 (Gram), for a GPU",
    "encoder": "scale.py's TransformerEncoder of 85 M parameters, one output, for a GPU",
    "recorded encoder": "the same, recorded as a CUDA graph",
    "same data": "a sine by 61 parameters in float64, the same data in each step",
    "sine": "the paper's sine by 31 parameters in float64",
    "digits": "scikit-learn's digits by an MLP 64-32-10, batch 128",
    "pinn": "the Poisson equation by an MLP 2-32-32-1 in float64, 1,000 points",
    "surrogate": "a surrogate of 2,833 parameters in float64, 2,000 points, the same data in each step",
}
STEPS = {
    "cnn": 2, "captured": 16, "one row": 4, "mlp": 1, "wide": 4, "same data": 20, "huge": 2, "encoder": 4,
    "recorded encoder": 8, "sine": 40, "digits": 20, "pinn": 2, "surrogate": 1,
}  # fmt: skip


def work(case: str, device: str) -> None:
    """One version: for every line on stdin some steps, and how long one of them took."""
    import torch
    from torch import nn

    import marquardt as mq
    from marquardt.paper import problems

    torch.manual_seed(0)
    options: dict[str, Any] = {"capture": case in ("captured", "recorded encoder")}
    if case in ("cnn", "captured", "one row"):
        model: nn.Module = problems.mnist_cnn(0, device=device)
        # Labels that cannot be learnt: λ stays what it is, and no step needs more than another.
        x, y, loss = torch.randn(8, 600, 1, 28, 28), torch.randint(0, 10, (8, 600)), "cross_entropy"
        options |= {"rows": mq.Empirical()} if case == "one row" else {}
    elif case == "same data":
        model = nn.Sequential(nn.Linear(1, 20), nn.Tanh(), nn.Linear(20, 1)).double()
        x = torch.linspace(-3, 3, 200, dtype=torch.float64)[None, :, None]
        y, loss = torch.sin(2 * x) + 0.1 * torch.randn_like(x), "mse"
    elif case == "sine":
        model = nn.Sequential(nn.Linear(1, 10), nn.ELU(), nn.Linear(10, 1)).double()
        x = torch.linspace(-10, 10, 1000, dtype=torch.float64)[None, :, None]
        y, loss = torch.sin(x) + 0.2 * torch.rand_like(x), "mse"
    elif case == "digits":
        from sklearn.datasets import load_digits

        data, labels = load_digits(return_X_y=True)
        order = torch.randperm(len(data))[: 8 * 128]
        x, y = torch.tensor(data / 16, dtype=torch.float32)[order], torch.tensor(labels)[order]
        x, y, loss = x.view(8, 128, 64), y.view(8, 128), "cross_entropy"
        model = nn.Sequential(nn.Linear(64, 32), nn.Tanh(), nn.Linear(32, 10))
    elif case == "pinn":
        net = nn.Sequential(nn.Linear(2, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 1)).double()
        model, loss = poisson(net), "residual"
        x, y = torch.rand(1, 1000, 2, dtype=torch.float64), [None]
    elif case == "surrogate":
        model = nn.Sequential(nn.Linear(6, 48), nn.Tanh(), nn.Linear(48, 50), nn.Tanh(), nn.Linear(50, 1)).double()
        x = torch.rand(1, 2000, 6, dtype=torch.float64)
        y, loss = torch.sin(3 * x).prod(2, keepdim=True), "mse"
    elif case in ("huge", "encoder", "recorded encoder"):
        # As in scale.py, which another commit may not be able to import.
        options |= {"curvature": mq.Gram(), "momentum": None, "average": None}
        if case == "huge":
            widths = [1024, *[10_050] * 9]
            hidden = [part for a, b in pairwise(widths) for part in (nn.Linear(a, b), nn.ReLU())]
            model = nn.Sequential(*hidden, nn.Linear(widths[-1], 10))
            x, y, loss = torch.randn(8, 128, 1024), torch.randint(0, 10, (8, 128)), "cross_entropy"
            options |= {"damping": mq.Identity(), "acceptance": mq.Decrease()}
        else:
            layer = nn.TransformerEncoderLayer(768, 12, 3072, dropout=0.0, batch_first=True)
            encoder = nn.TransformerEncoder(layer, 12, enable_nested_tensor=False)
            model = nn.Sequential(encoder, nn.Flatten(), nn.Linear(64 * 768, 1))
            x, y, loss = torch.randn(8, 16, 64, 768), torch.randn(8, 16, 1), "mse"
    else:
        wide = 1024 if case == "mlp" else 5000
        model = nn.Sequential(nn.Linear(784, wide), nn.Tanh(), nn.Linear(wide, wide), nn.Tanh(), nn.Linear(wide, 10))
        x, y, loss = torch.randn(8, 128, 784), torch.randint(0, 10, (8, 128)), "cross_entropy"
    model, x = model.to(device), x.to(device)
    y = y.to(device) if isinstance(y, torch.Tensor) else y
    opt = mq.LM(model, loss, **options)
    taken = 0
    for line in sys.stdin:
        spare = 0 if device == "cpu" else max(1, int(line) // 4)  # a GPU changes over to this process first
        for k in range(-spare, int(line)):
            if k == 0:
                if device == "cuda":
                    torch.cuda.synchronize()
                began = time.perf_counter()
            opt.step(x[taken % len(x)], y[taken % len(x)])
            taken += 1
        if device == "cuda":
            torch.cuda.synchronize()
        print((time.perf_counter() - began) / int(line), flush=True)


def poisson(net: Any) -> Any:
    """Δu + sin πx · sin πy at each point, by derivatives of derivatives"""
    import torch
    from torch import nn

    class Residual(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = net

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = x.detach().requires_grad_()
            (slope,) = torch.autograd.grad(self.net(x).sum(), x, create_graph=True)
            second = [torch.autograd.grad(slope[:, i].sum(), x, create_graph=True)[0][:, i] for i in range(2)]
            return (second[0] + second[1] + (torch.pi * x).sin().prod(1))[:, None]

    return Residual()


def start(source: Path, case: str, device: str) -> subprocess.Popen[str]:
    here = [sys.executable, __file__, "--work", case, "--device", device]
    environment = {**os.environ, "PYTHONPATH": str(source)}
    return subprocess.Popen(here, env=environment, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE)


def turn(version: subprocess.Popen[str], steps: int) -> float:
    assert version.stdin is not None
    assert version.stdout is not None
    print(steps, file=version.stdin, flush=True)
    return float(version.stdout.readline())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--old", type=Path, help="the `src` folder of the other commit")
    parser.add_argument("--new", type=Path, default=Path(__file__).resolve().parent.parent / "src")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--cases", nargs="+", choices=CASES, default=["cnn", "one row", "mlp", "same data"])
    parser.add_argument("--turns", type=int, default=20)
    parser.add_argument("--pairs", type=int, default=4, help="of processes, one after the other, that share the turns")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--work", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.work is not None:
        return work(args.work, args.device)
    if args.old is None:
        parser.error("--old is needed: the `src` folder of the commit to compare with")
    for source in (args.old, args.new):
        if not (source / "marquardt").is_dir():  # otherwise both would be the version that is installed
            parser.error(f"{source} has no marquardt/: name the `src` folder of a commit")
    found = {}
    for case in args.cases:
        times = []
        for pair in range(args.pairs):  # how a process lies in memory is a matter of luck
            versions = [start(source, case, args.device) for source in (args.old, args.new)]
            for version in versions:
                turn(version, 10)  # proofs, plans and recordings
            for number in range(pair, args.turns, args.pairs):
                first = (number // args.pairs + pair) % 2
                took = {k: turn(versions[k], STEPS[case]) for k in (first, 1 - first)}
                times.append((took[0], took[1]))
            for version in versions:
                version.communicate()
        old, new = (statistics.median(column) for column in zip(*times, strict=True))
        found[case] = {"old": old, "new": new, "ratio": new / old, "turns": [b / a for a, b in times]}
        print(f"{case:10}  {1e3 * old:8.2f} → {1e3 * new:8.2f} ms   ratio {new / old:.3f}   {CASES[case]}", flush=True)
    if args.json is not None:
        args.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
