"""Runs that stop and go on in a new process."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

import marquardt as mq
from support.cases import default_dtype, mlp
from support.modules import noisy
from support.steps import MAX_MOMENTUM, lm, targets

SCENARIOS: dict[str, tuple[Callable[[], nn.Module], str, dict[str, Any] | None, bool]] = {
    # model, loss, parts (None: the defaults), whether the batches change
    "plain": (lambda: mlp(2, 4, 3), "mse", {}, False),
    "rejected": (lambda: mlp(2, 4, 3), "mse", {}, False),
    "max-diagonal and momentum": (lambda: mlp(2, 4, 3), "cross_entropy", MAX_MOMENTUM, False),
    "max-diagonal and momentum, rejected": (lambda: mlp(2, 4, 3), "mse", MAX_MOMENTUM, True),
    "average, random layers": (noisy, "cross_entropy", {"average": mq.EMA(0.9), "schedule": mq.GainRatio()}, True),
    "average, random layers, rejected": (noisy, "mse", {"average": mq.Polyak(), "line_search": None}, True),
    "grid, uphill": (lambda: mlp(2, 4, 3), "mse", {"line_search": mq.Grid(), "acceptance": mq.Uphill()}, True),
    "sampled rows": (noisy, "cross_entropy", {"rows": mq.Sampled(1), "curvature": mq.Gram()}, True),
    "defaults": (noisy, "cross_entropy", None, True),
    "defaults, one batch": (lambda: mlp(2, 4, 3), "mse", None, False),
}
DTYPES = {"float32": torch.float32, "float64": torch.float64}
RUNS = [(name, dtype) for name in SCENARIOS for dtype in DTYPES]


def begin(name: str, dtype: str) -> tuple[nn.Module, mq.LM]:
    build, loss, parts, _ = SCENARIOS[name]
    model = build().to(DTYPES[dtype])
    return model, mq.LM(model, loss) if parts is None else lm(model, loss, **parts)


def advance(name: str, dtype: str, opt: mq.LM, first: int, last: int) -> list[mq.Step]:
    _, loss, _, changing = SCENARIOS[name]
    steps = []
    for t in range(first, last):
        with torch.random.fork_rng(devices=[]), default_dtype(DTYPES[dtype]):
            torch.manual_seed(t if changing else 0)
            x, y = torch.randn(9, 2), targets(loss, 9, 3)
        steps.append(opt.step(x, y))
    return steps


def resume(folder: str, threads: str) -> None:
    """The new process: another model, another optimizer, and what was saved."""
    torch.set_num_threads(int(threads))
    torch.manual_seed(1)
    for i, (name, dtype) in enumerate(RUNS):
        saved = torch.load(Path(folder, f"{i}.before"), weights_only=True)
        with default_dtype(torch.float64):
            model, opt = begin(name, dtype)
            model.load_state_dict(saved["model"])
            opt.load_state_dict(saved["optimizer"])
            torch.set_rng_state(saved["generator"])
            advance(name, dtype, opt, 6, 11)
        torch.save({"model": model.state_dict(), "optimizer": opt.state_dict()}, Path(folder, f"{i}.after"))
