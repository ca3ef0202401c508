"""Synthetic logs of the paper's experiments: smooth made-up curves that look like runs and measure nothing."""

import json
import math
from pathlib import Path

from marquardt.paper.vocabulary import RULE

DATA = {
    "sine": {"name": "synthetic sine", "train": 1000, "test": 0, "source": "made up for a test"},
    "mnist": {"name": "MNIST", "train": 60000, "test": 10000, "source": "made up for a test"},
    "swapped": {"name": "MNIST", "train": 10000, "test": 60000, "source": "made up for a test"},
}
METHODS = {  # label, decay per step, seconds per step
    "lm": ("LM (ours)", 0.08, 0.004),
    "lm-paper": ("LM (paper)", 0.05, 0.003),
    "lm-code": ("LM (authors' code)", 0.013, 0.003),
    "lm-vanilla": ("vanilla LM", 0.02, 0.002),
    "gauss-newton": ("Gauss-Newton", 0.03, 0.002),
    "newton": ("Newton", 0.01, 0.005),
    "bfgs": ("BFGS", 0.022, 0.002),
    "lbfgs": ("L-BFGS", 0.006, 0.001),
    "hessian-free": ("Hessian-free", 0.015, 0.02),
    "kfac": ("KFAC", 0.012, 0.003),
    "sgd": ("SGD", 0.004, 0.0003),
    "adam": ("Adam", 0.008, 0.0004),
    "psgd": ("PSGD", 0.009, 0.001),
    "tlm": ("torch-levenberg-marquardt", 0.035, 0.003),
}
NAMES = {
    "max-diagonal": "max-diagonal damping",
    "momentum": "momentum",
    "search": "line search",
    "uphill": "uphill acceptance",
    RULE: "gain ratio",
}
ABLATION = {"paper": ("LM (paper)", 0.05), "vanilla": ("vanilla", 0.02)}
ABLATION |= {f"paper-{part}": (f"without {name}", 0.045 - 0.005 * i) for i, (part, name) in enumerate(NAMES.items())}
ABLATION |= {"paper+uphill": ("with uphill acceptance", 0.03)}
ABLATION |= {
    f"vanilla+{part}": (f"vanilla + {name}", 0.022 + 0.004 * i) for i, (part, name) in enumerate(NAMES.items())
}


def head(experiment, method="adam", column="default", seed=0, **changes):
    problem = "sine" if experiment.endswith("sine") else "mnist"
    label = METHODS[method][0] if method in METHODS else ABLATION[method][0]
    return {
        **{"kind": "run", "format": 1, "experiment": experiment, "problem": problem, "method": method, "label": label},
        **{"column": column, "seed": seed, "steps": 100, "seconds": None, "batch": 600, "hyper": {"lr": 0.05}},
        **{"parameters": 2202, "noise_floor": None, "data": DATA.get(experiment, DATA[problem]), "device": "cpu"},
        "machine": {"cpu": "a made-up processor", "cores": 2, "gpu": None, "system": "Linux"},
        "versions": {"python": "3.11", "torch": "2.13.0", "marquardt": "0.1.0"},
        "started": f"2026-01-01T00:00:0{seed}+00:00",
        **changes,
    }


def write(out: Path, head, steps=(), status="finished", message="", extra=(), step=None) -> Path:
    """A log under `out`, from its head, its steps (without "kind") and its ending."""
    path = out / "logs" / head["experiment"] / f"{head['method']}.{head['column']}.{head['seed']}.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    last = step if step is not None else steps[-1]["step"] if steps else 0
    end = {"kind": "end", "status": status, "step": last, "message": message}
    lines = [head, *extra, *({"kind": "step", **line} for line in steps), end]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def sine_steps(decay, pace, seed, T=2.0):
    """A line a step to 200, then every 50th until T seconds have passed."""
    wobble = 1 + 0.25 * math.sin(2.1 * seed)
    last = max(200, math.ceil(T / pace))
    steps = [*range(201), *range(250, last, 50), *([last] if last > 200 else [])]
    return [
        {"step": t, "seconds": pace * t, "train_loss": 0.0035 + (0.5 + 0.05 * seed) * math.exp(-decay * wobble * t)}
        for t in steps
    ]


def digit_steps(decay, pace, seed, N=100):
    wobble = 1 + 0.2 * math.sin(2.1 * seed)
    error = [0.02 + 0.88 * math.exp(-8 * decay * wobble * t) for t in range(N + 1)]
    return [
        {
            **{"step": t, "seconds": 8 * pace * t, "train_loss": 2.4 * e, "train_accuracy": 1 - 0.9 * e},
            **{"test_loss": 2.45 * e, "test_accuracy": 1 - e},
        }
        for t, e in enumerate(error)
    ]


def digits(accuracies, **more):
    """Steps of a classification run with these test accuracies, half a second each."""
    return [
        {
            **{"step": t, "seconds": 0.5 * t, "train_loss": 1 - a, "train_accuracy": a},
            **{"test_loss": 1 - a, "test_accuracy": a},
            **more,
        }
        for t, a in enumerate(accuracies)
    ]


def losses(values, pace=0.5):
    return [{"step": t, "seconds": pace * t, "train_loss": value} for t, value in enumerate(values)]


def curves(decay):
    x = [-10 + 0.1 * i for i in range(201)]
    samples = {"kind": "data", "x": x, "y": [math.sin(v) + 0.2 * (0.5 + 0.5 * math.sin(97 * v)) for v in x]}
    fits = [
        {"kind": "curve", "step": t, "x": x, "y": [(1 - math.exp(-decay * t)) * math.sin(v) + 0.1 for v in x]}
        for t in (1, 5, 20, 100)
    ]
    return [samples, *fits]


def everything(out: Path, seeds=range(3)) -> None:
    """All experiments, tuned runs among them; one run diverges, one fails, one method is unavailable, one goes on."""
    for seed in seeds:
        for method, (_, decay, pace) in METHODS.items():
            if method == "tlm":
                for experiment, length in (("sine", 200), ("mnist", 100)):
                    run = head(experiment, method, seed=seed, steps=length, hyper={})
                    write(out, run, status="unavailable", message="No module named 'torch_levenberg_marquardt'")
                continue
            sine = {"steps": 200, "seconds": 2.0, "batch": 1000, "parameters": 31, "noise_floor": 0.2**2 / 12}
            steps = sine_steps(decay, pace, seed)
            broken = method == "newton" and seed == 1
            if broken:
                steps = [*steps[:30], {"step": 30, "seconds": 30 * pace, "train_loss": None}]
            ending = "diverged" if broken else "finished"
            write(out, head("sine", method, seed=seed, **sine), steps, ending, extra=curves(decay))
            if method in ("lm-paper", "sgd", "adam", "kfac"):
                steps = sine_steps(2 * decay, pace, seed)
                write(out, head("sine", method, "tuned", seed, hyper={"lr": 0.1}, **sine), steps, extra=curves(decay))
            if method in ("newton", "bfgs"):
                continue
            steps = digit_steps(decay, pace, seed)
            if method == "lbfgs" and seed == 1:
                write(out, head("mnist", method, seed=seed), steps[:41], "failed", "line search: <no> step | found")
            else:
                write(out, head("mnist", method, seed=seed), steps)
            write(out, head("swapped", method, seed=seed, steps=17), digit_steps(decay, pace, seed, 17))
            if method in ("lm-paper", "adam"):
                write(out, head("mnist", method, "tuned", seed, hyper={"lr": 0.1}), digit_steps(2 * decay, pace, seed))
        for method, (_, decay) in ABLATION.items():
            steps = sine_steps(decay, 0.01, seed)
            if method != "paper-uphill":
                write(out, head("ablation-sine", method, seed=seed, steps=200, seconds=2.0), steps)
            if method != "paper+uphill":
                write(out, head("ablation-mnist", method, seed=seed), digit_steps(decay, 0.01, seed))
    part = out / "logs" / "mnist" / "adam.default.99.0123abcd.part"
    part.write_text(json.dumps(head("mnist", seed=99)) + "\n")
