"""Several processes on one machine: time of a step, bytes sent against the cost model, and efficiency.

    python benchmarks/distributed.py                      # 1 and 2 processes over gloo, one thread each
    python benchmarks/distributed.py --json out.json --rounds 9
    python benchmarks/distributed.py --device cuda        # NCCL with a group of one: every representation and damping

The network is the paper's CNN (2,202 parameters), the batch 2,400 images in all, noise around one pattern per class.
"Independent" are two processes with one thread each that share nothing but the machine, with a batch of 2,400 each:
they do twice the work of the group in one step, so the efficiency of a group is its samples per second over theirs.
Rounds alternate between all of them, and the median counts.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn

import marquardt as mq
from marquardt.curvature.cost import look
from marquardt.paper import problems

BATCH = 2400
WARM = 3  # steps before the clock starts: proofs, plans

# λ is constant, so that every step is one solve and one trial; momentum, average and D cost the same for all.
PLAIN: dict[str, Any] = {
    "damping": mq.Identity(), "schedule": mq.Constant(1.0), "momentum": None, "line_search": None, "average": None,
    "acceptance": mq.Decrease(),
}  # fmt: skip
CURVATURES = {
    "Dense": (mq.Dense(), mq.Exact(), BATCH),
    "Gram": (mq.Gram(whole=0), mq.Empirical(), 600),
    "MatrixFree": (mq.MatrixFree(iterations=10, tolerance=0.0, backtrack=False, warm=0.0), mq.Exact(), 600),
    "Kronecker": (mq.Kronecker(), mq.Exact(), 600),
}


def batch(N: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    patterns = torch.randn(problems.MNIST_CLASSES, 1, 28, 28, generator=generator)
    y = torch.randint(problems.MNIST_CLASSES, (N,), generator=generator)
    return patterns[y] / 4 + torch.randn(N, 1, 28, 28, generator=generator), y


def network(device: str) -> nn.Module:
    return problems.mnist_cnn(0, device=device)


class Runner:
    """One representation on this rank; `group` is None for a process by itself."""

    def __init__(self, name: str, device: str, group: Any) -> None:
        self.curvature, rows, N = CURVATURES[name]
        self.model = network(device)
        self.opt = mq.LM(self.model, "cross_entropy", curvature=self.curvature, rows=rows, group=group, **PLAIN)
        self.start = {k: v.clone() for k, v in self.model.state_dict().items()}
        ranks, rank = (1, 0) if group is False else (dist.get_world_size(), dist.get_rank())
        self.x, self.y = (t[N * rank // ranks : N * (rank + 1) // ranks].to(device) for t in batch(N))
        self.N, self.device = N, device
        for _ in range(WARM):
            self.step()

    def step(self) -> float:
        self.model.load_state_dict(self.start)
        if self.device == "cuda":
            torch.cuda.synchronize()
        began = time.perf_counter()
        self.opt.step(self.x, self.y)
        if self.device == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter() - began

    def sent(self) -> tuple[int, float]:
        """Bytes of a step in the mean over the ranks, and what the model says."""
        ranks = self.opt._ranks
        before = ranks.sent
        self.step()
        measured = sum(ranks.numbers(ranks.sent - before)) / ranks.size
        plan = self.opt._state.plan
        if plan is not None and plan.shapes is not None:
            shapes = plan.shapes
        else:  # a representation that plans nothing
            from marquardt.jacobian.linearization import Linearization
            from marquardt.model.batch import Batch

            lin = Linearization(self.opt._objective(), [Batch(self.x, self.y)], self.opt.rows, ranks=ranks)
            shapes = look(lin, None)
            lin.close()
        return measured, self.curvature.sent(shapes) or 0.0


REPRESENTATIONS = {
    "Dense": mq.Dense(), "Dense in chunks": mq.Dense(chunk=20), "Gram": mq.Gram(), "Gram by layers": mq.Gram(whole=0),
    "Gram in chunks": mq.Gram(chunk=20), "MatrixFree": mq.MatrixFree(), "Kronecker": mq.Kronecker(),
    "Kronecker, every third": mq.Kronecker(every=3), "EKFAC": mq.EKFAC(), "Hessian": mq.Hessian(), "Auto": mq.Auto(),
}  # fmt: skip
DAMPINGS = [
    mq.Identity(), mq.MeanEigenvalue(), mq.LayerMeanEigenvalue(), mq.MaxDiagonal(), mq.FactoredMaxDiagonal(),
    mq.KroneckerMetric(),
]  # fmt: skip


def paths(device: str) -> dict[str, float]:
    """Three steps with the group and three without, by every representation and damping: how far apart they end."""
    found = {}
    x, y = (t.to(device) for t in batch(60))
    for name, curvature in REPRESENTATIONS.items():
        for damping in DAMPINGS:
            if name == "EKFAC" and not isinstance(damping, (mq.Identity, mq.MeanEigenvalue, mq.KroneckerMetric)):
                continue  # refused
            ends = []
            for group in (dist.group.WORLD, False):
                torch.manual_seed(0)
                model = nn.Sequential(
                    nn.Conv2d(1, 4, 5, stride=3),
                    nn.Tanh(),
                    nn.Flatten(),
                    nn.Linear(256, 12),
                    nn.Tanh(),
                    nn.Linear(12, 10),
                ).to(device, torch.float64)
                schedule = mq.Constant(30.0 if name == "Hessian" else 1.0)
                options = {"curvature": curvature, "damping": damping, "schedule": schedule, "capture": False}
                opt = mq.LM(model, "cross_entropy", group=group, **options)
                for _ in range(3):
                    opt.step(x.double(), y)
                ends.append(torch.cat([p.detach().flatten() for p in model.parameters()]))
            found[f"{name}, {type(damping).__name__}"] = float((ends[0] - ends[1]).norm() / ends[1].norm())
    return found


def rank_main(rank: int, ranks: int, store: str, device: str, rounds: int, queue: Any) -> None:
    torch.set_num_threads(1)
    backend = "nccl" if device == "cuda" else "gloo"
    dist.init_process_group(
        backend, init_method=f"file://{store}", rank=rank, world_size=ranks, timeout=timedelta(minutes=5),
        device_id=torch.device("cuda", rank) if device == "cuda" else None,
    )  # fmt: skip
    found: dict[str, Any] = {}
    every = paths(device) if device == "cuda" else {}
    for name in CURVATURES:
        together, alone = Runner(name, device, dist.group.WORLD), Runner(name, device, False)
        times: dict[str, list[float]] = {"together": [], "independent": [], "alone": []}
        for _ in range(rounds):
            dist.barrier()
            times["together"].append(together.step())
            dist.barrier()
            times["independent"].append(alone.step())  # all ranks at once, each for itself
            dist.barrier()
            if rank == 0:
                times["alone"].append(alone.step())  # while the others wait
            dist.barrier()
        measured, predicted = together.sent()
        slowest = {}
        for kind, values in times.items():
            own = torch.tensor(values if values else [0.0] * rounds, dtype=torch.float64)
            own = own.to(device) if device == "cuda" else own
            dist.all_reduce(own, op=dist.ReduceOp.MAX)
            slowest[kind] = statistics.median(own.tolist())
        found[name] = {
            **slowest,
            "sent": measured,
            "model": predicted,
            "samples": together.N,
        }
    if rank == 0:
        queue.put((found, every))
    dist.barrier()
    dist.destroy_process_group()


def run(ranks: int, device: str, rounds: int) -> tuple[dict[str, Any], dict[str, float]]:
    with tempfile.TemporaryDirectory() as folder:
        queue = mp.get_context("spawn").SimpleQueue()
        mp.spawn(rank_main, (ranks, str(Path(folder) / "store"), device, rounds, queue), ranks)
        return queue.get()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    ranks = [1] if options.device == "cuda" else options.ranks
    results: dict[Any, Any] = {}
    print(f"{'':<12}{'ranks':>6}{'step':>10}{'independent':>13}{'efficiency':>12}{'sent':>12}{'model':>12}{'ratio':>8}")
    for count in ranks:
        results[count], every = run(count, options.device, options.rounds)
        if every:
            far, worst = max((error, name) for name, error in every.items())
            print(f"a group of one, {len(every)} pairs of curvature and damping: {far:.1e} apart at most ({worst})")
            results["paths"] = every
        for name, r in results[count].items():
            # Samples per second of the group over those of as many processes by themselves.
            r["efficiency"] = r["independent"] / (count * r["together"])
            ratio = f"{r['sent'] / r['model']:.3f}" if r["model"] else ""
            print(
                f"{name:<12}{count:>6}{1e3 * r['together']:>8.1f}ms{1e3 * r['independent']:>11.1f}ms"
                f"{r['efficiency']:>12.2f}{r['sent'] / 1e6:>10.2f}MB{r['model'] / 1e6:>10.2f}MB{ratio:>8}"
            )
    if options.json is not None:
        options.json.write_text(json.dumps({"ranks": results, "torch": torch.__version__, "batch": BATCH}, indent=1))


if __name__ == "__main__":
    main()
