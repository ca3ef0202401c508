"""Who takes part: each contestant builds, from a problem, how it steps and which weights are evaluated.

On CUDA a step of Adam and of Muon is one CUDA graph, and so is a gradient of L-BFGS, as LM records its steps.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import marquardt as mq
import physics
from marquardt.paper.methods import Peer

from .tasks import Problem

# The best is chosen on validation data of a seed that is not reported. On a CPU, 10 s, small regressions took 0.03 as
# the largest of a grid that began at 0.0005.
ADAM_RATES = (0.001, 0.004, 0.015, 0.06)
MUON_RATES = (0.002, 0.008, 0.03, 0.12)
ITERATIONS = 20  # of L-BFGS in a call, torch's default: its first gradient is the last one of the call before


class NotApplicable(RuntimeError):
    """This contestant does not take such a problem, by its own rules."""


class Method(NamedTuple):
    run: Callable[[float, int], int]  # told the share of the budget that is over, and at most how many steps; how many
    evaluated: Callable[[], AbstractContextManager[object]] = nullcontext  # the weights to be judged, while inside
    least: int = 1  # steps that a call takes if there is room for them


@dataclass(frozen=True)
class Contestant:
    name: str
    build: Callable[[Problem, int, float], Method]  # problem, seed of the batches, rate
    rates: tuple[float, ...] = ()


# --- what they share ---


class Feed:
    """The training data: all of it, or after each `advance` another batch of the order that the seed gives.

    The tensors stay the same ones, so that a CUDA graph reads the new batch. What is left of a pass is left out.
    """

    def __init__(self, problem: Problem, seed: int) -> None:
        self.x, self.y = problem.train
        self.size = problem.batch
        self.device = next(problem.model.parameters()).device
        if self.size is not None:
            self.order = self.endless(seed)
            self.index = torch.arange(self.size, device=self.device)  # until the first batch

    def endless(self, seed: int) -> Iterator[Tensor]:
        generator = torch.Generator().manual_seed(seed)
        whole = len(self.x) // self.size * self.size
        while True:
            order = torch.randperm(len(self.x), generator=generator)[:whole].to(self.device)
            yield from order.split(self.size)

    def advance(self) -> None:
        if self.size is not None:
            self.index.copy_(next(self.order))

    def batch(self) -> tuple[Any, Tensor | None]:
        if self.size is None:
            return self.x, self.y
        return self.x[self.index], self.y[self.index]


def value(problem: Problem, feed: Feed) -> Tensor:
    x, y = feed.batch()
    z = problem.model(*x) if isinstance(x, tuple) else problem.model(x)
    if problem.loss == "residual":
        return z.square().mean()
    return {"mse": F.mse_loss, "cross_entropy": F.cross_entropy}[problem.loss](z, y)


def gradient_of(problem: Problem, feed: Feed, scale: float = 1.0) -> Callable[[], Tensor]:
    """The loss, its gradient in p.grad."""
    params = list(problem.model.parameters())
    for p in params:
        p.grad = torch.zeros_like(p)

    def gradient() -> Tensor:
        loss = scale * value(problem, feed)
        torch._foreach_copy_([p.grad for p in params], torch.autograd.grad(loss, params))
        return loss.detach()

    return gradient


def averaging(model: nn.Module) -> tuple[Callable[[], None], Callable[[], AbstractContextManager[None]]]:
    """The average that LM keeps by default, mq.EMA: its update after a step, and the weights while evaluated."""
    decay, weights = mq.EMA().decay, [p.detach() for p in model.parameters()]
    means, count = [w.clone() for w in weights], 0

    def update() -> None:
        nonlocal count
        torch._foreach_lerp_(means, weights, 1 - (0.0 if count == 0 else min(decay, (1 + count) / (10 + count))))
        count += 1

    @contextmanager
    def evaluated() -> Iterator[None]:
        kept = [w.clone() for w in weights]
        torch._foreach_copy_(weights, means)
        try:
            yield
        finally:
            torch._foreach_copy_(weights, kept)

    return update, evaluated


# --- LM and its relatives ---


def lm(problem: Problem, seed: int, rate: float) -> Method:
    opt = mq.LM(problem.model, problem.loss)
    return Method(fed(opt.step, Feed(problem, seed)), opt.averaged)


def kfac(problem: Problem, seed: int, rate: float) -> Method:
    return Method(fed(mq.presets.kfac(problem.model, problem.loss).step, Feed(problem, seed)))


def torch_lm(problem: Problem, seed: int, rate: float) -> Method:
    """Its defaults, with its fastest solver."""
    if problem.loss == "residual":
        raise NotApplicable("it takes one row of inputs and targets for each residual")
    peer = Peer(problem.model, problem.loss, {"lr": 1.0, "lam": 1e-3, "attempts": 10, "average": None})
    return Method(fed(peer.step, Feed(problem, seed)))


def fed(step: Callable[[Any, Any], object], feed: Feed) -> Callable[[float, int], int]:
    def run(_: float, count: int) -> int:
        for _ in range(count):
            feed.advance()
            step(*feed.batch())
        return count

    return run


# --- first order ---


def adam(problem: Problem, seed: int, rate: float) -> Method:
    params = list(problem.model.parameters())
    lr = rate_of(params)
    opt = torch.optim.Adam(params, lr=lr, fused=True, capturable=problem.graphs)
    return falling(problem, seed, rate, lr, {opt.step: opt})


def muon(problem: Problem, seed: int, rate: float) -> Method:
    """Matrices by Muon, the rest, tables of embeddings too, by AdamW; neither with weight decay."""
    params = list(problem.model.parameters())
    tables = {id(m.weight) for m in problem.model.modules() if isinstance(m, nn.Embedding)}
    matrices = [p for p in params if p.ndim == 2 and id(p) not in tables]
    others = [p for p in params if p.ndim != 2 or id(p) in tables]
    if not matrices:
        raise NotApplicable("no parameter is a matrix")
    lr = rate_of(params)
    steps: dict[Callable[[], object], torch.optim.Optimizer] = {}
    opt = torch.optim.Muon(matrices, lr=1.0 if lr.is_cuda else lr, weight_decay=0.0, adjust_lr_fn="match_rms_adamw")
    steps[scaled(opt.step, matrices, lr) if lr.is_cuda else opt.step] = opt
    if others:
        rest = torch.optim.AdamW(others, lr=lr, weight_decay=0.0, fused=True, capturable=problem.graphs)
        steps[rest.step] = rest
    return falling(problem, seed, rate, lr, steps)


def rate_of(params: list[nn.Parameter]) -> Tensor:
    """A tensor, so that a CUDA graph reads it anew in each step; the fused kernel takes it in float32 only."""
    return torch.zeros((), dtype=torch.float32, device=params[0].device)


def scaled(step: Callable[[], object], params: list[nn.Parameter], lr: Tensor) -> Callable[[], None]:
    """lr times a step of rate 1, for a rule that is linear in its rate but takes it as a number."""

    @torch.no_grad()
    def run() -> None:
        before = [p.clone() for p in params]
        step()
        for p, b in zip(params, before, strict=True):
            p.copy_(b + lr * (p - b))

    return run


def falling(
    problem: Problem, seed: int, rate: float, lr: Tensor, steps: dict[Callable[[], object], torch.optim.Optimizer]
) -> Method:
    """The rate falls to 0 as a cosine over the budget; an average of the weights if there are batches."""
    feed = Feed(problem, seed)
    gradient = gradient_of(problem, feed)

    def once() -> None:
        gradient()
        for step in steps:
            step()

    def forget() -> None:
        for held in (held for opt in steps.values() for state in opt.state.values() for held in state.values()):
            held.zero_()

    step = physics.graphed(once, problem.model, forget) if problem.graphs else once
    update, evaluated = averaging(problem.model)
    average = problem.batch is not None

    def run(share: float, count: int) -> int:
        lr.fill_(rate * (1 + math.cos(math.pi * min(share, 1.0))) / 2)
        for _ in range(count):
            feed.advance()
            step()
            if average:
                update()
        return count

    return Method(run, evaluated if average else nullcontext)


# --- L-BFGS ---


def lbfgs(problem: Problem, seed: int, rate: float) -> Method:
    """On all rows with a history of 100, begun anew if it gets stuck; on batches with 10, each batch for one call."""
    feed, params = Feed(problem, seed), list(problem.model.parameters())
    full = problem.batch is None
    gradient = gradient_of(problem, feed, physics.SCALE if full else 1.0)
    closure = physics.graphed(gradient, problem.model) if problem.graphs else gradient

    def begun() -> torch.optim.LBFGS:
        return torch.optim.LBFGS(
            params, history_size=100 if full else 10, tolerance_grad=0, tolerance_change=0,
            line_search_fn="strong_wolfe",
        )  # fmt: skip

    opt, least = begun(), math.inf

    def run(_: float, count: int) -> int:
        nonlocal opt, least
        feed.advance()
        opt.param_groups[0].update(max_iter=min(count, ITERATIONS), max_eval=2 * ITERATIONS)
        before, taken = [p.detach().clone() for p in params], opt.state[params[0]].get("n_iter", 0)
        loss = float(opt.step(closure))  # at the beginning of the call
        taken = opt.state[params[0]].get("n_iter", 0) - taken
        finite = all(bool(p.isfinite().all()) for p in params)
        if not finite:
            with torch.no_grad():
                torch._foreach_copy_(params, before)
        stuck = not finite or (full and loss >= least)  # the call before gained nothing
        opt, least = (begun(), math.inf) if stuck else (opt, loss)
        return max(taken, 1)

    return Method(run, least=ITERATIONS)


CONTESTANTS: dict[str, Contestant] = {
    c.name: c
    for c in (
        Contestant("LM", lm),
        Contestant("Adam", adam, ADAM_RATES),
        Contestant("L-BFGS", lbfgs),
        Contestant("Muon", muon, MUON_RATES),
        Contestant("torch-lm", torch_lm),
        Contestant("kfac", kfac),
    )
}
