"""Networks whose matrices would be too large: trained one after the other by `mq.fit`, with Kronecker factors."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from ..curvature import Kronecker
from ..training import fit
from .law import Classes, Law, TwoClasses
from .members import Given, Limits, Members
from .network import Network

# In float32 half the time, and such tables are not without noise.
DTYPE = torch.float32

# Of the mean loss. What is held out decides when to stop, so that it need not be exact.
DECAY = 0.003

MODULES = {"tanh": nn.Tanh, "silu": nn.SiLU, "relu": nn.ReLU, "identity": nn.Identity}


def module_of(network: Network, theta: Tensor) -> nn.Sequential:
    """The same network as a module: θ (n,)"""
    layers: list[nn.Module] = []
    for i, (a, b) in enumerate(zip(network.sizes, network.sizes[1:], strict=False)):
        linear = nn.Linear(a, b, dtype=DTYPE)
        with torch.no_grad():
            linear.weight.copy_(network.weight(theta[None], i)[0])
            linear.bias.copy_(network.bias(theta[None], i)[0, 0])
        layers += [linear, MODULES[network.activation]()]
    return nn.Sequential(*layers[:-1])


def theta_of(model: nn.Module) -> Tensor:
    return torch.cat([p.detach().double().flatten() for p in model.parameters()])


def batch(given: Given, i: int, law: Law) -> tuple[Tensor, Tensor, Tensor]:
    """Inputs, targets and weights of one member, as mq.fit takes them"""
    real = given.weight[i] > 0
    y = given.y[i][real]
    y = y if isinstance(law, Classes) else y[:, None].to(DTYPE) if isinstance(law, TwoClasses) else y.to(DTYPE)
    return given.x[i][real].to(DTYPE), y, given.weight[i][real].to(DTYPE)


def trained_wide(
    network: Network, law: Law, data: Given, held: Given | None, limits: Limits, generator: torch.Generator,
    watch: Callable[[int, Members, bool], None] | None = None,
) -> Members:  # fmt: skip
    """The members, each with the weights that are best on what it holds out"""
    k, n = len(data.x), network.n
    loss = {"Classes": "cross_entropy", "TwoClasses": "bce_with_logits"}.get(type(law).__name__, "mse")
    start = network.drawn(k, generator)
    found = Members(
        network, law, start, start.new_full((k, 1), DECAY), start.new_ones(k), torch.zeros(n, dtype=torch.long),
        torch.zeros(k, dtype=torch.long), start.new_full((k,), math.inf), start.new_full((k,), float(n)),
        None, [[] for _ in range(k)],
    )  # fmt: skip
    for i in range(k):
        model = module_of(network, start[i])
        seen: Any = None if watch is None else lambda running, i=i: watch(progress(running, i), found, False)
        with torch.enable_grad(), warnings.catch_warnings():
            warnings.filterwarnings("ignore", "mq.fit: ")  # a member that learns nothing counts for little
            result = fit(
                model, batch(data, i, law), loss, validation=None if held is None else batch(held, i, law),
                steps=limits.steps, patience=limits.patience, weight_decay=DECAY, curvature=Kronecker(), seed=i,
                batch_size=limits.rows or "all", progress=False, callbacks=() if seen is None else seen,
                group=False,  # every process that is asked for a committee trains one
            )  # fmt: skip
        found.theta[i], found.best_step[i] = theta_of(model), result.best_step
        found.error[i] = result.loss if math.isfinite(result.loss) else math.nan
        found.steps[i] = [(e.loss, e.validation, e.lam, e.accepted) for e in result.history]
    if watch is not None:
        watch(max(len(steps) for steps in found.steps), found, True)
    return found


def progress(running: Any, i: int) -> int:
    """The step of the member that is trained"""
    return int(running.step.step)
