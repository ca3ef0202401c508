"""1, 2 and 4 ranks take the same steps: every representation and damping, every part, the default recipe."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import marquardt as mq
from support.ranks import run, shard
from support.reference import error
from support.steps import theta

REPRESENTATIONS = {
    "dense": mq.Dense(),
    "dense-chunked": mq.Dense(chunk=12),
    "gram": mq.Gram(),
    "gram-layers": mq.Gram(whole=0),
    "gram-chunked": mq.Gram(chunk=12),
    # Iterations that end before the solution depend on rounding, whatever the number of ranks: here they go to the end.
    "matrix-free": mq.MatrixFree(tolerance=0.0, iterations=40, warm=0.0, backtrack=False),
    "matrix-free-chunked": mq.MatrixFree(chunk=20, tolerance=0.0, iterations=40, warm=0.0, backtrack=False),
    "kronecker": mq.Kronecker(),
    "kronecker-every": mq.Kronecker(every=3),
    "ekfac": mq.EKFAC(),
    "hessian": mq.Hessian(),
    "auto": mq.Auto(),
}
DAMPINGS = {
    "identity": mq.Identity(),
    "mean": mq.MeanEigenvalue(),
    "layer-mean": mq.LayerMeanEigenvalue(),
    "max": mq.MaxDiagonal(),
    "factored": mq.FactoredMaxDiagonal(),
    "kronecker": mq.KroneckerMetric(every=3),
    "kronecker-always": mq.KroneckerMetric(steady=None, every=1),
}
IMPOSSIBLE = {("ekfac", name) for name in ("layer-mean", "max", "factored")}
PARTS = {
    "plain": {"momentum": None, "acceptance": mq.Decrease(), "line_search": None, "average": None},
    "all": {
        "momentum": mq.AdaptiveMomentum(), "acceptance": mq.Uphill(), "line_search": mq.Grid(), "average": mq.EMA(),
        "weight_decay": 1e-3,
    },
}  # fmt: skip

# Samples of four ranks: 7 + 13 and 9 + 11 are those of two.
SIZES = (7, 13, 9, 11)


def network() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Conv1d(1, 2, 3), nn.Tanh(), nn.Flatten(), nn.Linear(8, 3), nn.LayerNorm(3), nn.Linear(3, 3))


def batches(loss: str) -> list[tuple[Tensor, Tensor, Tensor]]:
    torch.manual_seed(4)
    found = []
    for _ in range(3):
        y = torch.randint(3, (40,)) if loss == "cross_entropy" else torch.randn(40, 3)
        found.append((torch.randn(40, 1, 6), y, torch.rand(40) + 0.2))
    return found


def mine(batch: Any, sizes: tuple[int, ...] | None = SIZES) -> Any:
    rank, ranks = dist.get_rank(), dist.get_world_size()
    return tuple(shard(t, rank, ranks, sizes) for t in batch)


def several_steps(cases: list[tuple[str, dict[str, Any]]], number: int) -> list[tuple[Tensor, list[mq.Step]]]:
    """θ after the steps of every case, on changing batches and on the same, with a ragged last one."""
    found = []
    for loss, options in cases:
        model = network()
        opt = mq.LM(model, loss, group=dist.group.WORLD, **options)
        data = batches(loss)
        ragged = tuple(t[:11] for t in data[2])
        order = (*data[:2], data[1], *data, data[0], data[0], data[0], data[1])
        steps = [opt.step(*mine(batch)) for batch in order[: number - 1]]
        steps.append(opt.step(*mine(ragged, None)))
        assert len(steps) == number
        assert opt._ranks.size == dist.get_world_size()
        with opt.averaged() if opt.average is not None else torch.no_grad():
            averaged = theta(model)
        found.append((torch.cat([theta(model), averaged]), steps))
    return found


def every_case() -> dict[str, tuple[str, dict[str, Any]]]:
    cases = {}
    for number, ((r, curvature), (d, damping)) in enumerate(
        itertools.product(REPRESENTATIONS.items(), DAMPINGS.items())
    ):
        if (r, d) in IMPOSSIBLE:
            continue
        parts = "all" if number % 2 else "plain"
        if r == "kronecker-every" and parts == "all" and d not in ("identity", "mean"):
            parts = "plain"  # factors of other λ cannot hold weight decay, which is refused
        # Not smaller from step to step: a λ near 0 makes much of rounding, whatever the number of ranks.
        schedule = mq.Constant(300.0 if r == "hessian" else 30.0 if r.startswith("matrix-free") else 3.0)
        options = {"curvature": curvature, "damping": damping, "schedule": schedule, **PARTS[parts]}
        if parts == "all" and r == "kronecker-every":
            options["damping"] = mq.MeanEigenvalue()
        loss = "mse" if number % 3 == 0 else "cross_entropy"
        cases[f"{r}-{d}-{parts}"] = (loss, options)
    for rows in (mq.Sampled(1), mq.Fraction(0.5), mq.Empirical()):
        for r in ("dense", "gram", "gram-chunked", "kronecker", "matrix-free"):
            options = {
                "curvature": REPRESENTATIONS[r],
                "rows": rows,
                "schedule": mq.Constant(30.0 if r == "matrix-free" else 1.0),
            }
            cases[f"{r}-{type(rows).__name__}"] = ("cross_entropy", options)
    cases["default"] = ("cross_entropy", {})
    cases["default-mse"] = ("mse", {})
    cases["dense-average"] = ("mse", {"curvature": mq.Dense(inertia=0.8), "schedule": mq.Constant(0.3)})
    cases["radius"] = ("mse", {"radius": 0.05, "curvature": mq.Gram()})
    cases["quadratic"] = ("mse", {"momentum": mq.QuadraticMomentum(), "curvature": mq.Kronecker()})
    # Steps that are four times too long, of which some need a second attempt.
    again = {"attempts": 3, "lr": 4.0, "schedule": mq.TenFold(initial=1.0, minimum=1.0), **PARTS["plain"]}
    cases["attempts"] = ("mse", {"curvature": mq.Gram(), **again})
    return cases


CASES = every_case()

# Of the product of representations and dampings every sixth case is for two ranks, and every twelfth for four, for four
# steps. All of them on both for ten: pytest -m benchmark tests/ranks/test_steps.py
SHARES = {2: list(CASES)[::6], 4: list(CASES)[1::12]}


def test_shares():
    """Every representation and every damping has its turn."""
    names = [name for share in SHARES.values() for name in share]
    for part in (*REPRESENTATIONS, *DAMPINGS):
        assert any(f"-{part}-" in f"-{name}-" for name in names), part


def compare(ranks: int, names: list[str], steps: int) -> None:
    cases = [CASES[name] for name in names]
    (alone,) = run(several_steps, 1, cases, steps, timeout=600)
    found = run(several_steps, ranks, cases, steps, timeout=600)
    apart = {}
    for number, name in enumerate(names):
        expected, taken = alone[number]
        assert any(step.accepted for step in taken), name
        for rank in range(ranks):
            end, others = found[rank][number]
            assert torch.equal(end, found[0][number][0]), name  # bit for bit on all ranks
            same = [step.rule for step in others] == [step.rule for step in taken]
            close = math.isclose(others[-1].new_loss, taken[-1].new_loss, rel_tol=1e-9)
            if not (same and close and error(end, expected) < 1e-10):
                apart[name] = error(end, expected)
    assert apart == {}


@pytest.mark.parametrize("ranks", [2, 4])
def test_the_same_steps(double, ranks):
    compare(ranks, SHARES[ranks], steps=4)


@pytest.mark.benchmark
@pytest.mark.parametrize("ranks", [2, 4])
def test_all_of_them(double, ranks):
    compare(ranks, list(CASES), steps=10)
