"""What an earlier commit has written into tests/fixtures, and how it goes on: by names that both versions know."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import marquardt as mq

COMMIT = "b47703e"
FOLDER = Path(__file__).parents[1] / "fixtures" / COMMIT

f64 = torch.float64
BEFORE, AFTER = 6, 3  # steps until the state is saved, and those that are compared


def net() -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, 1)).double()


def wave(N: int = 24, shift: float = 0.0) -> tuple[Tensor, Tensor]:
    """(N, 2), (N, 1): of no generator, which another version of torch might have otherwise"""
    i = torch.arange(N, dtype=f64)
    x = torch.stack([(1.7 * i + shift).sin(), (0.9 * i * i + shift).cos()], dim=1)
    return x, (2 * x[:, :1]).sin() + 0.5 * x[:, 1:] + 0.1 * (5.3 * i[:, None]).sin()


# --- optimizers ---


Batches = Callable[[int], tuple[Tensor, Tensor]]
OPTIONS: dict[str, dict[str, Any]] = {
    "default-same": {},
    "default-changing": {},
    "kronecker-changing": {"curvature": mq.Kronecker()},
    "ekfac-changing": {"curvature": mq.EKFAC(), "damping": mq.MeanEigenvalue()},
    "dense-same": {
        "curvature": mq.Dense(), "damping": mq.MaxDiagonal(), "schedule": mq.GainRatio(), "average": mq.Polyak(),
        "weight_decay": mq.WeightDecay(1e-3, towards="start"),
    },
    "factored-changing": {"curvature": mq.Gram(), "damping": mq.FactoredMaxDiagonal()},
    "matrix-free-same": {
        "curvature": mq.MatrixFree(iterations=6), "damping": mq.MeanEigenvalue(), "momentum": None,
    },
    "inertia-changing": {"curvature": mq.Dense(inertia=0.8)},  # which remembers the curvature of earlier batches
}  # fmt: skip


def optimizer(name: str, model: nn.Module) -> mq.LM:
    return mq.LM(model, "mse", **OPTIONS[name])


def batches(name: str) -> Batches:
    """By number: all the same, or others every time"""
    return lambda i: wave() if name.endswith("-same") else wave(12, shift=0.7 * i)


def continued(opt: mq.LM, batches: Batches) -> dict[str, Any]:
    """The losses before and after each step, and its λ"""
    steps = [opt.step(*batches(i)) for i in range(BEFORE, BEFORE + AFTER)]
    losses = [[step.loss, step.new_loss, step.lam] for step in steps]
    return {"steps": losses, "weights": [p.detach().flatten().tolist() for p in opt.params]}


# --- mq.fit ---

STEPS = 8  # of the whole fit; half of them are before the checkpoint


def whole() -> dict[str, Any]:
    return {"data": wave(), "validation": wave(12, shift=0.3), "patience": None}


def mini() -> dict[str, Any]:
    return {"data": wave(), "batch_size": 8, "validation": wave(12, shift=0.3), "patience": None}


def evidence() -> dict[str, Any]:
    return {"data": wave(), "weight_decay": mq.Evidence(every=2, groups="layers")}


FITS: dict[str, Callable[[], dict[str, Any]]] = {f.__name__: f for f in (whole, mini, evidence)}


def fitted(given: dict[str, Any], path: Path, steps: int = STEPS, callbacks: Any = ()) -> dict[str, Any]:
    data = given["data"]
    result = mq.fit(net(), data, "mse", **{k: v for k, v in given.items() if k != "data"}, steps=steps, seed=3,
                    checkpoint=path, callbacks=callbacks, progress=False)  # fmt: skip
    with torch.no_grad():
        outputs = result.model(data[0]).flatten().tolist()
    columns = [[e.loss, e.lam, e.validation] for e in result.history]
    rows = [[None if v is None or math.isnan(v) else v for v in row] for row in columns]
    return {"steps": rows, "loss": result.loss, "best_step": result.best_step, "outputs": outputs}


# --- tables ---

TABLES = {"number": ("--target", "y", "--ignore", "kind"), "class": ("--target", "kind", "--ignore", "y")}
QUICK = ("--hidden", "2", "--steps", "5", "--seed", "1")


def table(rows: int = 40, shift: int = 0) -> str:
    """A CSV of numbers, a gap and words"""
    lines = ["a,b,colour,y,kind"]
    for i in range(shift, shift + rows):
        a, b, colour = math.sin(1.3 * i), math.cos(0.7 * i * i), ("red", "green", "blue")[i * i % 7 % 3]
        y = math.sin(2 * a) + b + (colour == "red")
        lines.append(f"{a:.4f},{'' if i % 9 == 4 else f'{b:.4f}'},{colour},{y:.4f},{'high' if y > 0.5 else 'low'}")
    return "\n".join(lines) + "\n"


# --- scikit-learn ---


def estimator(kind: str) -> Any:
    from marquardt.sklearn import LMClassifier, LMRegressor

    make = LMRegressor if kind == "regressor" else LMClassifier
    return make(hidden=(3,), members=2, max_steps=5, random_state=0)


def samples(kind: str) -> tuple[Any, Any]:
    x, y = wave(40)
    t = y[:, 0].numpy()
    return x.numpy(), t if kind == "regressor" else (t > 0)


def answers(kind: str, model: Any) -> dict[str, Any]:
    x = wave(6, shift=0.2)[0].numpy()
    if kind == "regressor":
        mean, std = model.predict(x, return_std=True)
        return {"mean": mean.tolist(), "std": std.tolist()}
    return {"classes": model.predict(x).tolist(), "probabilities": model.predict_proba(x).tolist()}
