"""Whether the uncertainty of `mq.posterior` is right: intervals of regression, probabilities of classification.

    python benchmarks/uncertainty.py --json uncertainty.json
    python benchmarks/uncertainty.py --parts intervals --first 100      # seeds on which things are chosen

intervals  20 data sets of known functions and known noise, 1 to 8 inputs, 50 to 1,000 samples: how many of 2,000 new
           targets lie in the 95 % interval. Networks of 20 hidden units, weight decay by evidence with an α for each
           layer, everything else by default. Beside it the interval of the noise alone, as if the network were known.
digits     10 splits of scikit-learn's digits, 400 to train: negative log likelihood and expected calibration error
           (15 bins) of the test set. 12 hidden units, at most 100 steps. `plain` is a network without weight decay,
           `map` one with weight decay by evidence, both by their softmax; `laplace` are the probabilities of the
           posterior of the second, calibrated by its own samples, and without that (T = 1).

Seeds from 0 on are those that are reported.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import Tensor, nn
from torch.nn import functional as F

import marquardt as mq

HIDDEN, NEW = 20, 2000
DECAY = mq.Evidence(groups="layers")
LEVEL, WITHIN = 0.95, (0.93, 0.97)
BINS, TRAINED, UNITS, STEPS = 15, 400, 12, 100


def friedman1(x: Tensor) -> Tensor:
    u = (x + 1) / 2
    return 10 * (math.pi * u[:, 0] * u[:, 1]).sin() + 20 * (u[:, 2] - 0.5) ** 2 + 10 * u[:, 3] + 5 * u[:, 4]


def friedman3(x: Tensor) -> Tensor:
    u = (x + 1) / 2
    frequency = 40 * math.pi + 520 * math.pi * u[:, 1]
    inner = frequency * u[:, 2] - 1 / (frequency * (1 + 10 * u[:, 3]))
    return torch.atan(inner / (100 * u[:, 0]).clamp(min=0.1))


def ishigami(x: Tensor) -> Tensor:
    a, b, c = (math.pi * x[:, k] for k in range(3))
    return a.sin() + 7 * b.sin() ** 2 + 0.1 * c**4 * a.sin()


# function, inputs, samples, noise in units of the function's standard deviation; inputs in [−1, 1]
SETS: list[tuple[str, Callable[[Tensor], Tensor], int, int, float]] = [
    ("sine", lambda x: (math.pi * x[:, 0]).sin(), 1, 50, 0.2),
    ("two sines", lambda x: (2 * math.pi * x[:, 0]).sin() + 0.5 * (5 * x[:, 0]).sin(), 1, 100, 0.1),
    ("line", lambda x: 2 * x[:, 0] - 1, 1, 60, 0.5),
    ("step", lambda x: (8 * x[:, 0]).tanh(), 1, 200, 0.3),
    ("bump", lambda x: (-20 * x[:, 0] ** 2).exp(), 1, 80, 0.2),
    ("chirp", lambda x: (6 * (x[:, 0] + 1) ** 1.5).sin(), 1, 300, 0.4),
    ("waves", lambda x: (3 * x[:, 0]).sin() * (3 * x[:, 1]).cos(), 2, 150, 0.1),
    ("saddle", lambda x: x[:, 0] * x[:, 1], 2, 60, 0.3),
    ("ring", lambda x: (4 * x.square().sum(1)).cos(), 2, 400, 0.2),
    ("ridge", lambda x: (2 * x[:, 0] - x[:, 1]).tanh(), 2, 50, 1.0),
    ("ishigami", ishigami, 3, 1000, 0.1),
    ("products", lambda x: x[:, 0] * x[:, 1] + x[:, 1] * x[:, 2], 3, 100, 0.2),
    ("friedman 3", friedman3, 4, 400, 0.3),
    ("four sines", lambda x: (2 * x).sin().sum(1), 4, 200, 0.2),
    ("friedman 1", friedman1, 5, 200, 0.2),
    ("friedman 1, more inputs", friedman1, 8, 500, 0.1),
    ("plane", lambda x: x.sum(1), 6, 80, 0.5),
    ("two ridges", lambda x: (x[:, :3].sum(1)).tanh() + (x[:, 3:].sum(1)).sin(), 6, 1000, 0.5),
    ("few of many", lambda x: (3 * x[:, 0]).sin() + x[:, 1] ** 2, 7, 300, 0.3),
    ("quadric", lambda x: x.square().sum(1) - x[:, 0] * x[:, 7], 8, 1000, 0.2),
]


def network(inputs: int, outputs: int, hidden: int) -> nn.Module:
    return nn.Sequential(nn.Linear(inputs, hidden), nn.Tanh(), nn.Linear(hidden, outputs)).double()


def intervals(case: tuple[str, Callable[[Tensor], Tensor], int, int, float], seed: int) -> dict[str, Any]:
    name, function, inputs, samples, share = case
    g = torch.Generator().manual_seed(seed)
    x = 2 * torch.rand(samples + NEW, inputs, generator=g, dtype=torch.float64) - 1
    clean = function(x)[:, None]
    sigma = share * float(clean.std())
    y = clean + sigma * torch.randn(clean.shape, generator=g, dtype=torch.float64)
    mean, scale = y[:samples].mean(), y[:samples].std()
    y, sigma = (y - mean) / scale, sigma / float(scale)
    torch.manual_seed(seed)
    model, began = network(inputs, 1, HIDDEN), time.perf_counter()
    found = mq.fit(model, (x[:samples], y[:samples]), "mse", weight_decay=DECAY, progress=False, seed=seed)
    posterior = found.posterior()
    new = posterior.predict(x[samples:])
    low, high = new.interval(LEVEL)
    q = float((high - new.mean)[0] / new.std[0])
    inside = ((low <= y[samples:]) & (y[samples:] <= high)).double().mean()
    alone = ((y[samples:] - new.mean).abs() <= q * new.noise_std).double().mean()
    return {
        "name": name, "inputs": inputs, "samples": samples, "sigma": sigma, "noise": float(posterior.noise),
        "gamma": posterior.gamma, "parameters": posterior.parameters.n, "covered": float(inside),
        "covered by noise alone": float(alone), "rmse": float((y[samples:] - new.mean).square().mean().sqrt()),
        "reason": found.reason, "seconds": time.perf_counter() - began,
    }  # fmt: skip


def calibration_error(p: Tensor, y: Tensor) -> float:
    """Expected: |accuracy − confidence|, averaged over bins of confidence"""
    confidence, guess = p.max(1)
    right = (guess == y).double()
    place = (confidence * BINS).ceil().clamp(1, BINS)
    parts = [place == k for k in range(1, BINS + 1)]
    return float(sum((right[b].mean() - confidence[b].mean()).abs() * b.double().mean() for b in parts if b.any()))


def scores(p: Tensor, y: Tensor) -> dict[str, float]:
    nll = F.nll_loss(p.clamp(min=1e-300).log(), y)
    return {"nll": float(nll), "ece": calibration_error(p, y), "accuracy": float((p.argmax(1) == y).double().mean())}


def digits(seed: int) -> dict[str, Any]:
    data = load_digits()
    parts = train_test_split(data.data / 16, data.target, train_size=TRAINED, stratify=data.target, random_state=seed)
    x, new = (torch.tensor(t, dtype=torch.float64) for t in parts[:2])
    y, truth = (torch.tensor(t) for t in parts[2:])
    found: dict[str, Any] = {"seed": seed}
    for name, options in (("plain", {}), ("map", {"weight_decay": DECAY})):
        torch.manual_seed(seed)
        model, began = network(64, 10, UNITS), time.perf_counter()
        fit = mq.fit(model, (x, y), "cross_entropy", steps=STEPS, progress=False, seed=seed, **options)
        with torch.no_grad():
            found[name] = scores(model(new).softmax(1), truth) | {"seconds": time.perf_counter() - began}
    posterior = fit.posterior()
    calibrated = posterior.calibrated()
    found |= {"gamma": posterior.gamma, "reason": fit.reason, "temperature": calibrated.temperature}
    found["laplace"] = scores(calibrated.probabilities(new), truth)
    found["laplace, T = 1"] = scores(posterior.probabilities(new), truth)
    return found


def report_intervals(runs: list[dict[str, Any]]) -> dict[str, bool]:
    heads = ("function", "d", "N", "σ", "σ found", "γ", "n", "inside", "noise", "s")
    print("{:<24} {:>2} {:>5} {:>6} {:>8} {:>6} {:>4} {:>7} {:>6} {:>6}".format(*heads))
    for r in runs:
        print(
            f"{r['name']:<24} {r['inputs']:>2} {r['samples']:>5} {r['sigma']:>6.3f} {r['noise']:>8.3f} "
            f"{r['gamma']:>6.1f} {r['parameters']:>4} {r['covered']:>7.3f} {r['covered by noise alone']:>6.3f} "
            f"{r['seconds']:>6.1f}"
        )
    inside = [r["covered"] for r in runs]
    mean = statistics.mean(inside)
    print(f"inside: mean {mean:.4f}, least {min(inside):.3f}, most {max(inside):.3f}")
    low, high = WITHIN
    return {f"the 95 % interval covers {low:.0%} to {high:.0%} in the mean": low <= mean <= high}


def report_digits(runs: list[dict[str, Any]]) -> dict[str, bool]:
    ways = ("plain", "map", "laplace", "laplace, T = 1")
    print(f"{'digits':<18} {'NLL':>7} {'ECE':>7} {'accuracy':>9}")
    means = {way: {k: statistics.mean(r[way][k] for r in runs) for k in ("nll", "ece", "accuracy")} for way in ways}
    for way, m in means.items():
        print(f"{way:<18} {m['nll']:>7.4f} {m['ece']:>7.4f} {m['accuracy']:>9.4f}")
    return {
        f"{key.upper()} of laplace below that of {way}": means["laplace"][key] < means[way][key]
        for key in ("nll", "ece")
        for way in ("plain", "map")
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="+", choices=["intervals", "digits"], default=["intervals", "digits"])
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--splits", type=int, default=10)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    found: dict[str, Any] = {}
    held: dict[str, bool] = {}
    if "intervals" in args.parts:
        found["intervals"] = [intervals(case, args.first + k) for k, case in enumerate(SETS)]
        held |= report_intervals(found["intervals"])
    if "digits" in args.parts:
        found["digits"] = [digits(args.first + k) for k in range(args.splits)]
        held |= report_digits(found["digits"])
    for words, holds in held.items():
        print(f"{'holds' if holds else 'FAILS'}: {words}")
    if args.json is not None:
        args.json.write_text(json.dumps({**found, "verdicts": held}, indent=1) + "\n")


if __name__ == "__main__":
    main()
