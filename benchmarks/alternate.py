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
}
STEPS = {
    "cnn": 2, "captured": 16, "one row": 4, "mlp": 1, "wide": 4, "same data": 20, "huge": 2, "encoder": 4,
    "recorded encoder": 8,
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
    model, x, y = model.to(device), x.to(device), y.to(device)
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
