"""Physics-informed networks: LM as it comes, Adam and L-BFGS, each for the same time on the same loss.

    python benchmarks/physics.py --device cuda --parallel 6 --json physics.json
    python benchmarks/physics.py --step --device cuda           # a step only, against rows by vmap
    python benchmarks/physics.py --methods adam --rate 0.003 0.01 --first-seed 0      # to choose a rate
    python benchmarks/physics.py --quick

Poisson: Δu = −2π² sin πx sin πy on the unit square, u = 0 on its edge; u = sin πx sin πy.
Heat: u_t = ¼u_xx on the unit square of (t, x), u = sin πx at t = 0, u = 0 at x = 0 and 1; u = exp(−π²t/4) sin πx.

A tanh network 2–32–32–1 in float64, 1,185 parameters. Per seed 1,500 points inside and 160 on the edge are drawn once:
every step of every method sees the same. The loss is the mean square of all residuals, those on the edge times a fixed
weight, the same for all methods. The error is ‖u − exact‖/‖exact‖ on a grid of 101 × 101 points, measured with the
clock off. With --parallel several runs share the machine (and the GPU, best with MPS): that slows every method down.

LM has no option set; it is evaluated with its averaged weights, as it is meant to be used (on the same data they are
the weights of the least loss; "last iterate" is the error without them). Adam is the fused one; its rate falls
from `--rate` to 0 as a cosine over the time that the run has. L-BFGS has strong Wolfe conditions, a history of 100 and
no tolerances, and begins anew if it gets stuck. On CUDA a step of Adam is one CUDA graph and so is a gradient of
L-BFGS, as LM records its steps; `--eager` leaves the graphs of these two out. Building a method and recording are on
the clock, loading kernels is not.
"""

from __future__ import annotations

import argparse
import math
import os
import warnings
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, jacfwd, vmap

import marquardt as mq
import measure
from measure import Verdict

INSIDE, EDGE = 1500, 160
STEP_INSIDE = 900  # of the step that is timed by itself, as in limits.py
# Of the residuals on the edge: of 1, 3, 10, 30 and 100 (seed 0, LM and L-BFGS), then 10 and 30 (seeds 1 and 2, all
# methods), the one with the least geometric mean of the methods' errors in runs of 8 to 10 s on a CPU.
WEIGHTS = {"poisson": 30.0, "heat": 10.0}
# Adam's first: the best of 0.001, 0.003 and 0.01 on seeds 0 and 1, 20 s on an H200, about 12,000 and 16,000 steps.
RATES = {"poisson": 0.003, "heat": 0.01}
MARKS = (10, 20, 40)  # seconds
PER_BLOCK = 10  # steps of Adam between two looks at the clock
ITERATIONS = 50  # of L-BFGS in a call: its first gradient is the last one of the call before

# Of the loss that L-BFGS sees: torch's drops every pair with yᵀs ≤ 1e-10, so that it stalls once the loss is small.
SCALE = 1e8

Points = tuple[Tensor, ...]


# --- problems ---


class Network(nn.Module):
    """u(x, y) or u(t, x); as a model it returns the residuals at points inside and on the edge."""

    twice: tuple[int, ...]  # the inputs by which u is differentiated twice
    sides: tuple[tuple[int, float], ...]  # which input has which value there; as many points on each

    def __init__(self, weight: float) -> None:
        super().__init__()
        self.u = nn.Sequential(nn.Linear(2, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 1))
        self.weight = weight

    def forward(self, inside: Tensor, edge: Tensor) -> Tensor:
        x = inside.detach().requires_grad_(True)
        (slope,) = torch.autograd.grad(self.u(x).sum(), x, create_graph=True)  # (N, 2)
        curved = [torch.autograd.grad(slope[:, i].sum(), x, create_graph=True)[0][:, i] for i in self.twice]
        outer = self.u(edge)[:, 0] - self.exact(edge)
        return torch.cat([self.equation(inside, slope, curved), self.weight * outer])  # (N + M,)

    def error(self) -> float:
        """Relative, in L2."""
        at = next(self.parameters())
        line = torch.linspace(0, 1, 101, dtype=at.dtype, device=at.device)
        grid = torch.cartesian_prod(line, line)
        with torch.no_grad():
            exact = self.exact(grid)
            return float((self.u(grid)[:, 0] - exact).norm() / exact.norm())

    def equation(self, x: Tensor, slope: Tensor, curved: Sequence[Tensor]) -> Tensor:
        raise NotImplementedError

    def exact(self, x: Tensor) -> Tensor:
        raise NotImplementedError


class Poisson(Network):
    twice = (0, 1)
    sides = ((0, 0.0), (0, 1.0), (1, 0.0), (1, 1.0))

    def equation(self, x: Tensor, slope: Tensor, curved: Sequence[Tensor]) -> Tensor:
        return curved[0] + curved[1] + 2 * math.pi**2 * self.exact(x)

    def exact(self, x: Tensor) -> Tensor:
        return torch.sin(math.pi * x[:, 0]) * torch.sin(math.pi * x[:, 1])


class Heat(Network):
    twice = (1,)
    sides = ((0, 0.0), (0, 0.0), (1, 0.0), (1, 1.0))  # half of the points at t = 0

    def equation(self, x: Tensor, slope: Tensor, curved: Sequence[Tensor]) -> Tensor:
        return slope[:, 0] - curved[0] / 4

    def exact(self, x: Tensor) -> Tensor:
        return torch.exp(-(math.pi**2) / 4 * x[:, 0]) * torch.sin(math.pi * x[:, 1])


PROBLEMS: dict[str, type[Network]] = {"poisson": Poisson, "heat": Heat}


def draw(problem: str, seed: int, weight: float, inside: int = INSIDE) -> tuple[Network, Points]:
    torch.manual_seed(seed)
    model = PROBLEMS[problem](weight).double()
    points = torch.rand(inside, 2, dtype=torch.float64)
    edge = torch.rand(EDGE, 2, dtype=torch.float64)
    for part, (axis, value) in zip(edge.chunk(4), model.sides, strict=True):
        part[:, axis] = value
    return model, (points, edge)


def build(problem: str, seed: int, options: argparse.Namespace, inside: int = INSIDE) -> tuple[Network, Points]:
    """The network and its points, the same on every device."""
    model, (points, edge) = draw(problem, seed, options.weight or WEIGHTS[problem], inside)
    return model.to(options.device), (points.to(options.device), edge.to(options.device))


# --- methods ---


class Method(NamedTuple):
    run: Callable[[float], int]  # a few steps, told the share of the time that is over; how many there were
    evaluated: Callable[[], AbstractContextManager[object]] = nullcontext  # the weights to be judged, while inside


def lm(model: Network, points: Points, options: argparse.Namespace, rate: float) -> Method:
    opt = mq.LM(model, "residual")

    def run(_: float) -> int:
        opt.step(points, None)
        return 1

    return Method(run, opt.averaged)


def adam(model: Network, points: Points, options: argparse.Namespace, rate: float) -> Method:
    gradient = gradient_of(model, points)
    # A tensor, so that a CUDA graph reads it anew in each step; the fused kernel takes it in float32 only.
    lr = torch.tensor(rate, dtype=torch.float32, device=options.device)
    opt = torch.optim.Adam(model.parameters(), lr=lr, fused=True, capturable=graphs(options))

    def once() -> None:
        gradient()
        opt.step()

    def forget() -> None:
        for state in opt.state.values():
            for value in state.values():
                value.zero_()

    step = graphed(once, model, forget) if graphs(options) else once

    def run(share: float) -> int:
        lr.fill_(rate * (1 + math.cos(math.pi * share)) / 2)
        for _ in range(PER_BLOCK):
            step()
        return PER_BLOCK

    return Method(run)


def lbfgs(model: Network, points: Points, options: argparse.Namespace, rate: float) -> Method:
    gradient = gradient_of(model, points, SCALE)
    closure = graphed(gradient, model) if graphs(options) else gradient

    def begun() -> torch.optim.LBFGS:
        return torch.optim.LBFGS(
            model.parameters(), max_iter=ITERATIONS, max_eval=2 * ITERATIONS, history_size=100, tolerance_grad=0,
            tolerance_change=0, line_search_fn="strong_wolfe",
        )  # fmt: skip

    opt, least = begun(), math.inf

    def run(_: float) -> int:
        nonlocal opt, least
        params = opt.param_groups[0]["params"]
        before, taken = [p.detach().clone() for p in params], opt.state[params[0]].get("n_iter", 0)
        loss = float(opt.step(closure))  # at the beginning of the call
        taken = opt.state[params[0]]["n_iter"] - taken
        finite = all(bool(p.isfinite().all()) for p in params)
        if not finite:
            with torch.no_grad():
                torch._foreach_copy_(params, before)
        stuck = not finite or loss >= least  # the call before gained nothing
        opt, least = (begun(), math.inf) if stuck else (opt, loss)
        return taken

    return Method(run)


METHODS = {"lm": lm, "adam": adam, "lbfgs": lbfgs}


class Entry(NamedTuple):
    method: str
    rate: float = math.nan  # Adam's

    def __str__(self) -> str:
        return {"lm": "LM", "adam": f"Adam, {self.rate:g}", "lbfgs": "L-BFGS"}[self.method]


def entries(problem: str, options: argparse.Namespace) -> list[Entry]:
    rates = options.rate or [RATES[problem]]
    return [e for m in options.methods for e in ([Entry(m, r) for r in rates] if m == "adam" else [Entry(m)])]


def graphs(options: argparse.Namespace) -> bool:
    return options.device.type == "cuda" and not options.eager


def gradient_of(model: Network, points: Points, scale: float = 1.0) -> Callable[[], Tensor]:
    """The loss, its gradient in p.grad: nothing is spent on the gradient at the points, which backward() would take."""
    params = list(model.parameters())
    for p in params:
        p.grad = torch.zeros_like(p)

    def gradient() -> Tensor:
        loss = scale * model(*points).square().mean()
        torch._foreach_copy_([p.grad for p in params], torch.autograd.grad(loss, params))
        return loss.detach()

    return gradient


def graphed(once: Callable[[], Any], model: nn.Module, forget: Callable[[], None] = lambda: None) -> Callable[[], Any]:
    """`once` as a CUDA graph; the weights are unchanged, and `forget` undoes what else its rehearsals did."""
    before = [p.detach().clone() for p in model.parameters()]
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):  # as torch's documentation of CUDA graphs has it
            once()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = once()
    with torch.no_grad():
        torch._foreach_copy_(list(model.parameters()), before)
        forget()

    def replay() -> Any:
        graph.replay()
        return None if result is None else result.clone()  # or the next replay would change it

    replay.holds = once  # the graph knows memory by its address only
    return replay


# --- runs ---


@dataclass
class Run:
    """One method on one problem and seed."""

    problem: str
    method: str
    seed: int
    steps: int = 0
    seconds: float = 0.0
    curve: list[tuple[float, float]] = field(default_factory=list)  # seconds, error
    last: float = math.nan  # the error of the last iterate, whichever weights the method is judged by

    @property
    def error(self) -> float:
        return self.curve[-1][1]

    def after(self, mark: float) -> float:
        """The error at this time: the first that was measured from then on."""
        return next((error for seconds, error in self.curve if seconds >= mark), math.nan)

    def record(self) -> dict[str, Any]:
        return vars(self) | {"error": self.error}


def trained(problem: str, seed: int, entry: Entry, options: argparse.Namespace) -> Run:
    warnings.simplefilter("ignore")
    if options.threads:
        torch.set_num_threads(options.threads)
    method, rate = METHODS[entry.method], entry.rate
    warm = method(*build(problem, 0, options), options, rate)
    for _ in range(12 if options.device.type == "cuda" else 1):  # loads the kernels, those of LM's CUDA graph too
        warm.run(0.0)
    del warm

    model, points = build(problem, seed, options)
    run, every = Run(problem, str(entry), seed), min(2.0, options.seconds / 5)
    run.seconds, (step, evaluated) = measure.timed(lambda: method(model, points, options, rate), options.device)
    due = every
    while run.seconds < options.seconds:
        share = run.seconds / options.seconds
        took, steps = measure.timed(lambda share=share: step(share), options.device)
        run.seconds, run.steps = run.seconds + took, run.steps + steps
        if run.seconds >= min(due, options.seconds):
            with evaluated():
                run.curve.append((run.seconds, model.error()))
            due = every * (run.seconds // every + 1)
    run.last = model.error()
    return run


def all_runs(options: argparse.Namespace) -> Iterable[Run]:
    """Seed by seed; with --parallel in processes, as they end."""
    seeds = range(options.seed, options.seed + options.seeds)
    tasks = [(p, s, e, options) for s in seeds for p in options.problems for e in entries(p, options)]
    if options.parallel == 1:
        yield from (trained(*task) for task in tasks)
        return
    with ProcessPoolExecutor(options.parallel, torch.multiprocessing.get_context("spawn")) as pool:
        for done in as_completed([pool.submit(trained, *task) for task in tasks]):
            yield done.result()


# --- a step only ---


def rows_by_vmap(model: Network, points: Points) -> Callable[[], Tensor]:
    """What one would write by hand: the rows of J point by point, (JᵀJ + λI)d = −Jᵀr by Cholesky, and no more."""
    params = {k: p.detach() for k, p in model.u.named_parameters()}
    n = sum(p.numel() for p in params.values())

    def u(x: Tensor, theta: dict[str, Tensor]) -> Tensor:
        return functional_call(model.u, theta, (x,))[0]

    def inside(theta: dict[str, Tensor], x: Tensor) -> tuple[Tensor, Tensor]:
        def slope(x: Tensor) -> tuple[Tensor, Tensor]:
            found = grad(u)(x, theta)  # (2,)
            return found, found

        H, first = jacfwd(slope, has_aux=True)(x)  # (2, 2)
        curved = [H[i, i].unsqueeze(0) for i in model.twice]
        r = model.equation(x.unsqueeze(0), first.unsqueeze(0), curved)[0]
        return r, r

    def edge(theta: dict[str, Tensor], x: Tensor) -> tuple[Tensor, Tensor]:
        r = model.weight * (u(x, theta) - model.exact(x.unsqueeze(0))[0])
        return r, r

    def step() -> Tensor:
        parts = [vmap(grad(f, has_aux=True), (None, 0))(params, x) for f, x in zip((inside, edge), points, strict=True)]
        J = torch.cat([torch.cat([g.flatten(1) for g in rows.values()], 1) for rows, _ in parts])  # (m, n)
        r = torch.cat([r for _, r in parts])  # (m,)
        A = J.T @ J
        A.diagonal().add_(1e-3 * A.diagonal().mean())
        return -torch.cholesky_solve((J.T @ r).unsqueeze(1), torch.linalg.cholesky(A)).reshape(n)

    return step


def compare_steps(options: argparse.Namespace, described: dict[str, Any]) -> None:
    model, points = build("poisson", options.seed, options, STEP_INSIDE)
    by_hand = rows_by_vmap(*build("poisson", options.seed, options, STEP_INSIDE))
    step = measure.lm(mq.LM(model, "residual"))
    contestants = {"LM": lambda: step(points, None), "rows by vmap, JᵀJ, Cholesky": by_hand}
    timings = measure.interleave(contestants, 2 if options.quick else 60, options.device, 2 if options.quick else 12)
    rows = [[name, measure.milliseconds(t.median), measure.span(t)] for name, t in timings.items()]
    ratio = Verdict("rows by vmap / LM", timings["rows by vmap, JᵀJ, Cholesky"].median / timings["LM"].median, "")
    print(measure.markdown(["one step", "median, ms", "quartiles, ms"], rows), measure.verdicts([ratio]), sep="\n\n")
    measure.write(options, described, results={k: t.record() for k, t in timings.items()}, verdicts=[ratio])


# --- figures: read the runs, never the models ---


def spread(values: Sequence[float]) -> str:
    """Median (least – largest)."""
    return f"{measure.median(values):.1e} ({min(values):.1e} – {max(values):.1e})"


def grouped(runs: Sequence[Run]) -> dict[tuple[str, str], list[Run]]:
    found: dict[tuple[str, str], list[Run]] = {}
    order = list(PROBLEMS)
    for run in sorted(runs, key=lambda run: (order.index(run.problem), run.method != "LM", run.method, run.seed)):
        found.setdefault((run.problem, run.method), []).append(run)
    return found


def table(runs: Sequence[Run], seconds: float) -> str:
    marks = [mark for mark in MARKS if mark < seconds]
    head = ["problem, method", f"error after {seconds:g} s", *(f"{mark:g} s" for mark in marks)]
    head += ["last iterate", "steps", "ms a step"]
    rows = [
        [
            f"{problem}, {method}",
            spread([run.error for run in own]),
            *(spread([run.after(mark) for run in own]) for mark in marks),
            spread([run.last for run in own]),
            f"{measure.median([run.steps for run in own]):,.0f}",
            measure.milliseconds(measure.median([run.seconds / run.steps for run in own])),
        ]
        for (problem, method), own in grouped(runs).items()
    ]
    return measure.markdown(head, rows)


def ratios(runs: Sequence[Run]) -> list[Verdict]:
    """Of the errors at the end."""
    errors = {key: measure.median([run.error for run in own]) for key, own in grouped(runs).items()}
    return [
        Verdict(f"{problem}: error of {method} / LM", error / errors[problem, "LM"], "")
        for (problem, method), error in errors.items()
        if method != "LM" and (problem, "LM") in errors
    ]


def arguments() -> argparse.Namespace:
    parser = measure.parser(__doc__)
    add = parser.add_argument
    add("--seconds", type=float, help="of training in each run (default 60)")
    add("--seeds", type=measure.positive, help="how many (default 5)")
    add(
        "--first-seed",
        dest="seed",
        type=int,
        help="default 1000; those below served to choose the weight and the rates",
    )
    add("--problems", nargs="+", choices=PROBLEMS, default=list(PROBLEMS))
    add("--methods", nargs="+", choices=METHODS, default=list(METHODS))
    add("--weight", type=float, help=f"of the residuals on the edge (default {WEIGHTS})")
    add("--rate", type=float, nargs="+", help=f"Adam's first learning rates (default {RATES})")
    add("--eager", action="store_true", help="no CUDA graphs for Adam and L-BFGS")
    add("--parallel", type=measure.positive, default=1, metavar="K", help="runs at a time, on the same device")
    add("--step", action="store_true", help="time a step only, against rows by vmap")
    parser.set_defaults(seed=1000)
    options = parser.parse_args()
    options.seconds = options.seconds or (1.0 if options.quick else 60.0)
    options.seeds = options.seeds or (1 if options.quick else 5)
    if options.parallel > 1 and options.threads is None:
        options.threads = max(1, (os.cpu_count() or 1) // options.parallel)
    return options


def main() -> None:
    options = arguments()
    described = measure.start(options)
    if options.step:
        compare_steps(options, described)
        return
    notes = ["Errors: median (least – largest) over the seeds."]
    if options.parallel > 1:
        notes.append(
            f"{options.parallel} runs at a time shared the machine: every method's steps take longer than alone."
        )
    if options.quick:
        notes.append("Quick: too short to be a result.")
    runs: list[Run] = []
    for run in all_runs(options):
        measure.note(f"{run.problem}, seed {run.seed}, {run.method}: {run.steps} steps, error {run.error:.1e}")
        runs.append(run)
        # After each run, so that a machine that is taken away leaves what there is.
        measure.write(options, described, runs=[run.record() for run in runs], verdicts=ratios(runs), notes=notes)
    shown = [table(runs, options.seconds)]
    shown += [measure.verdicts(verdicts)] if (verdicts := ratios(runs)) else []
    print(*shown, "\n".join(notes), sep="\n\n")


if __name__ == "__main__":
    main()
