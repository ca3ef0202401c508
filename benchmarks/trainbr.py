"""Weight decay by evidence (`mq.Evidence`, MATLAB's trainbr): networks of 5 to 50 hidden units are all as good.

    python benchmarks/trainbr.py --json trainbr.json
    python benchmarks/trainbr.py --first 100 --seeds 5      # seeds on which things are chosen

One period of a sine with noise, 100 points. The test error is the RMSE to the sine itself, without noise, on 500
points. Beside it: one α for all parameters as trainbr has it, a fifth held out for validation, and no weight decay at
all, to the end (1,000 steps or converged). Seeds from 0 on are those that are reported.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import marquardt as mq

SIZES = (5, 10, 20, 30, 50)
POINTS, NOISE = 100, 0.2
WITHIN = 1.1  # times the error of the best size
WAYS: dict[str, dict[str, Any]] = {
    "evidence": {"weight_decay": mq.Evidence()},  # an α for each layer
    "one α": {"weight_decay": mq.Evidence(groups=None)},
    "validation": {"validation": 0.2},
    "no decay": {},
}


def data(seed: int, noise: float) -> tuple[Tensor, Tensor]:
    """(100, 1), (100, 1)"""
    g = torch.Generator().manual_seed(seed)
    x = 2 * torch.rand(POINTS, 1, generator=g, dtype=torch.float64) - 1
    return x, torch.sin(math.pi * x) + noise * torch.randn(POINTS, 1, generator=g, dtype=torch.float64)


def error(model: nn.Module) -> float:
    x = torch.linspace(-1, 1, 500, dtype=torch.float64)[:, None]
    with torch.no_grad():
        return float((model(x) - torch.sin(math.pi * x)).square().mean().sqrt())


def run(way: str, hidden: int, seed: int, noise: float) -> dict[str, Any]:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(1, hidden), nn.Tanh(), nn.Linear(hidden, 1)).double()
    began = time.perf_counter()
    found = mq.fit(model, data(seed, noise), "mse", progress=False, seed=seed, **WAYS[way])
    took = time.perf_counter() - began
    gamma = math.nan if found.evidence is None else found.evidence.gamma
    n = sum(p.numel() for p in model.parameters())
    return {"way": way, "hidden": hidden, "seed": seed, "error": error(model), "gamma": gamma, "parameters": n,
            "steps": len(found.history), "seconds": took, "reason": found.reason}  # fmt: skip


def median(runs: list[dict[str, Any]], way: str, hidden: int, key: str) -> float:
    return statistics.median(r[key] for r in runs if (r["way"], r["hidden"]) == (way, hidden))


def table(runs: list[dict[str, Any]], sizes: list[int], ways: list[str]) -> list[str]:
    """By way and size: medians over the seeds"""
    lines = [f"{'':<12}{'hidden':>6} {'n':>4} {'γ':>6} {'error':>8} {'/best':>6} {'steps':>6} {'s':>6}"]
    for way in ways:
        best = min(median(runs, way, h, "error") for h in sizes)
        for h in sizes:
            keys = ("parameters", "gamma", "error", "steps", "seconds")
            n, gamma, error, steps, took = (median(runs, way, h, key) for key in keys)
            size = f"{h:>6} {n:>4.0f} {gamma:>6.2f}"
            lines.append(f"{way:<12}{size} {error:>8.4f} {error / best:>6.3f} {steps:>6.0f} {took:>6.2f}")
    return lines


def verdicts(runs: list[dict[str, Any]], sizes: list[int]) -> dict[str, bool]:
    found = {h: median(runs, "evidence", h, "error") for h in sizes}
    fewer = all(r["gamma"] < r["parameters"] for r in runs if r["way"] == "evidence")
    return {
        f"every size within {WITHIN} times the error of the best": max(found.values()) <= WITHIN * min(found.values()),
        "γ below the number of parameters in every run": fewer,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ways", nargs="+", choices=list(WAYS), default=list(WAYS))
    parser.add_argument("--sizes", type=int, nargs="+", default=list(SIZES))
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--noise", type=float, default=NOISE)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    seeds = range(args.first, args.first + args.seeds)
    ways = list(dict.fromkeys(["evidence", *args.ways]))
    runs = [run(way, h, seed, args.noise) for way in ways for h in args.sizes for seed in seeds]
    print("\n".join(table(runs, args.sizes, ways)))
    held = verdicts(runs, args.sizes)
    for words, holds in held.items():
        print(f"{'holds' if holds else 'FAILS'}: {words}")
    if args.json is not None:
        args.json.write_text(json.dumps({"noise": args.noise, "runs": runs, "verdicts": held}, indent=1) + "\n")


if __name__ == "__main__":
    main()
