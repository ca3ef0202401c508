"""mq.least_squares beside scipy.optimize: the classical problems one by one, and 10,000 small fits at once.

    python benchmarks/least_squares.py --json cpu.json
    python benchmarks/least_squares.py --device cuda --only batch --against cpu.json     # SciPy's times from that run
    python benchmarks/least_squares.py --quick

Classical: the problems of tests/support/classical, on the CPU, from the standard starts and 10 and 100 times these.
SciPy's `lm` (MINPACK) and `trf` get the same residuals, the same exact Jacobian and the same tolerances as we do, and
the scaling by the Jacobian (x_scale="jac"). Solved is a problem whose Σf² is within 1e-6 of a known minimum, relative,
or at most 1e-12 where that is 0. Digits are those of the worst parameter, from the standard start: from afar a solver
may end in one of the minimisers that are not listed, periods of a sine and the like.

Batch: a peak on an offset, y = a·exp(−(t − c)²/2w²) + b with noise, 50 points, four parameters, every fit with data and
a start of its own. One batched call of ours against a loop over SciPy with a NumPy function and its exact NumPy
Jacobian, by `least_squares` and by `leastsq`, which does less around MINPACK. Errors are those of the worst parameter
of the worst fit, by Newton's method with the full Hessian.

Without SciPy only our side is measured; --against takes SciPy's times and answers from the JSON of an earlier run.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor

import measure
from marquardt import least_squares
from measure import Verdict

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from support.classical import PROBLEMS, Problem

try:
    import numpy as np
    from scipy import optimize
    from scipy import version as scipy_version
except ImportError:
    optimize = None

OURS, OURS_GIVEN = "marquardt", "marquardt, Jacobian given"
CAPTURED = ", captured"
LM, TRF = "SciPy lm", "SciPy trf"
LEASTSQ, LEAST_SQUARES = "SciPy leastsq, one by one", "SciPy least_squares lm, one by one"
TOLERANCES = (1e-8, 1e-15)  # SciPy's default, and the least that MINPACK takes
EVALUATIONS = 1000  # the most that anyone gets
FACTORS = (10.0, 100.0)
FITS, POINTS, NOISE = 10_000, 50, 0.05
TIGHT = {"ftol": 1e-14, "xtol": 1e-14, "gtol": 1e-14}  # the batch: what 8 digits of every parameter take with MINPACK
ENOUGH = {"xtol": 1e-12, "gtol": 1e-12}  # and what they take with ours, whose xtol is the error that remains
KEPT = 100  # fits whose answers stay in the JSON


# --- the classical problems ---


@dataclass(frozen=True)
class Outcome:
    """How one solver did on one problem."""

    solved: bool
    success: bool  # what it says itself
    nfev: int
    njev: int  # as counted here: SciPy's lm leaves out the Jacobian that it evaluates at the end
    digits: float


class Counted:
    """A function, and how often it was called."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        self.function, self.calls = function, 0

    def __call__(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.function(x)


def marquardt(residuals: Counted, jacobian: Counted, x0: Tensor, tolerance: float) -> Any:
    tolerances = dict.fromkeys(("ftol", "xtol", "gtol"), tolerance)
    result = least_squares(residuals, x0, jac=jacobian, max_nfev=EVALUATIONS, **tolerances)
    jacobian.calls = max(jacobian.calls, int(result.njev))  # second derivatives count there, and are no call
    return result


def scipy_solver(method: str) -> Callable[[Counted, Counted, Tensor, float], Any]:
    def solve(residuals: Counted, jacobian: Counted, x0: Tensor, tolerance: float) -> Any:
        return optimize.least_squares(
            lambda x: residuals(torch.from_numpy(x)).numpy(),
            x0.numpy(),
            jac=lambda x: jacobian(torch.from_numpy(x)).numpy(),
            method=method,
            x_scale="jac",
            ftol=tolerance,
            xtol=tolerance,
            gtol=tolerance,
            max_nfev=EVALUATIONS,
        )

    return solve


SOLVERS = {OURS: marquardt} | ({LM: scipy_solver("lm"), TRF: scipy_solver("trf")} if optimize else {})


def attempt(solver: str, problem: Problem, factor: float, tolerance: float) -> Outcome:
    """A start where the residuals are not finite is refused by everyone: not solved."""
    residuals, jacobian = Counted(problem.residuals), Counted(problem.jacobian)
    try:
        result = SOLVERS[solver](residuals, jacobian, problem.x0(factor), tolerance)
    except ValueError:
        return Outcome(False, False, 0, 0, math.nan)
    solved = problem.solved(result.x) is not None
    return Outcome(solved, bool(result.success), residuals.calls, jacobian.calls, problem.digits(result.x))


Outcomes = dict[str, dict[str, Outcome]]  # by solver, by problem


def run_all(problems: tuple[Problem, ...], factor: float, tolerance: float) -> Outcomes:
    problems = tuple(p for p in problems if p.far or factor == 1)
    measure.note(f"{len(problems)} problems, {factor:g} × the start, tolerances {tolerance:g}")
    return {solver: {p.name: attempt(solver, p, factor, tolerance) for p in problems} for solver in SOLVERS}


def each(problems: tuple[Problem, ...], found: Outcomes) -> str:
    """Problem by problem; – where it was not solved."""
    head = ["problem", "n", "m"] + [f"{solver}: {what}" for solver in found for what in ("nfev", "njev", "digits")]
    rows = []
    for p in problems:
        row = [p.name, str(len(p.start)), str(len(p.residuals(p.x0())))]
        for outcomes in found.values():
            o = outcomes[p.name]
            row += (
                [str(o.nfev), str(o.njev), "" if math.isnan(o.digits) else f"{o.digits:.1f}"] if o.solved else ["–"] * 3
            )
        rows.append(row)
    return measure.markdown(head, rows)


def summary(found: dict[tuple[float, float], Outcomes]) -> str:
    """Runs by start and tolerance; the medians are over what the solver solved."""
    head = ["start", "tolerances", "solver", "solved", "median nfev", "median njev", "least digits", "missed"]
    rows = []
    for (factor, tolerance), run in found.items():
        for solver, outcomes in run.items():
            solved = [o for o in outcomes.values() if o.solved]
            digits = [o.digits for o in solved if not math.isnan(o.digits)] if factor == 1 else []
            rows.append(
                [
                    f"{factor:g} ×",
                    f"{tolerance:g}",
                    solver,
                    f"{len(solved)} of {len(outcomes)}",
                    measure.number(measure.median([o.nfev for o in solved])),
                    measure.number(measure.median([o.njev for o in solved])),
                    f"{min(digits):.1f}" if digits else "–",
                    ", ".join(name.replace(", ", " ") for name, o in outcomes.items() if not o.solved) or "none",
                ]
            )
    return measure.markdown(head, rows)


def judge(found: dict[tuple[float, float], Outcomes]) -> list[Verdict]:
    """What SciPy solves and we do not; Jacobians where both solve; from afar, how many fewer are solved."""
    lines = []
    for (factor, tolerance), run in found.items():
        mine, where = run[OURS], f"{factor:g} × the start, {tolerance:g}"
        for solver in run.keys() - {OURS}:
            theirs = run[solver]
            if factor == 1:
                lost = sum(o.solved and not mine[name].solved for name, o in theirs.items())
                lines.append(Verdict(f"solved by {solver} alone, {where}", lost, "≤", 0))
                both = [name for name, o in theirs.items() if o.solved and mine[name].solved]
                ratio = median(mine[name].njev for name in both) / median(theirs[name].njev for name in both)
                lines.append(Verdict(f"median njev, marquardt / {solver}, {where}", ratio, "≤", 1.0))
                ratio = median(mine[name].njev / theirs[name].njev for name in both)
                lines.append(
                    Verdict(f"njev problem by problem, median of marquardt / {solver}, {where}", ratio, "≤", 1.0)
                )
            else:
                more = sum(o.solved for o in mine.values()) - sum(o.solved for o in theirs.values())
                lines.append(Verdict(f"solved more than by {solver}, {where}", more, "≥" if solver == LM else "", 0))
    return sorted(lines, key=lambda line: line.what)


# --- the batch ---


@dataclass(frozen=True)
class Peaks:
    """Data and starts of B fits."""

    t: Tensor  # (m,)
    y: Tensor  # (B, m)
    x0: Tensor  # (B, 4), a, c, w, b

    @staticmethod
    def draw(fits: int, seed: int) -> Peaks:
        generator = torch.Generator().manual_seed(seed)

        def uniform(low: float, high: float) -> Tensor:
            return low + (high - low) * torch.rand(fits, generator=generator, dtype=torch.float64)

        t = torch.linspace(0, 10, POINTS, dtype=torch.float64)
        true = torch.stack([uniform(1, 3), uniform(3, 7), uniform(0.5, 1.5), uniform(0.5, 1.5)], 1)
        noise = torch.randn(fits, POINTS, generator=generator, dtype=torch.float64)
        a, c, w, b = (true[:, i : i + 1] for i in range(4))
        y = a * torch.exp(-((t - c) ** 2) / (2 * w**2)) + b + NOISE * noise
        spread = torch.stack([uniform(0.7, 1.4), uniform(0.9, 1.1), uniform(0.7, 1.4), uniform(0.7, 1.4)], 1)
        return Peaks(t, y, true * spread)

    def residuals(self, x: Tensor, y: Tensor) -> Tensor:
        """Of one fit. (4,), (m,) → (m,)"""
        return x[0] * torch.exp(-((self.t - x[1]) ** 2) / (2 * x[2] ** 2)) + x[3] - y

    def on(self, device: torch.device) -> Peaks:
        return Peaks(self.t.to(device), self.y.to(device), self.x0.to(device))

    def __len__(self) -> int:
        return len(self.x0)


def batched(peaks: Peaks, given: bool, capture: bool = False) -> Callable[[], Tensor]:
    """All fits in one call; the Jacobian by torch, or `given` as SciPy gets it; on a GPU with or without a graph."""

    def jacobian(x: Tensor, y: Tensor) -> Tensor:
        z = (peaks.t - x[1]) / x[2]
        e = torch.exp(-(z**2) / 2)
        slope = x[0] / x[2] * e * z
        return torch.stack([e, slope, slope * z, torch.ones_like(e)]).mT  # (m, 4)

    jac = jacobian if given else "auto"
    options = {"jac": jac, "args": (peaks.y,), "batched": True, "capture": capture, **ENOUGH}
    return lambda: least_squares(peaks.residuals, peaks.x0, **options).x


def one_by_one(peaks: Peaks, interface: str) -> Callable[[], Tensor]:
    """A loop over SciPy, in NumPy throughout."""
    t, ys, starts = peaks.t.numpy(), peaks.y.numpy(), peaks.x0.numpy()
    ones = np.ones_like(t)

    def residuals(x: Any, y: Any) -> Any:
        return x[0] * np.exp(-((t - x[1]) ** 2) / (2 * x[2] ** 2)) + x[3] - y

    def columns(x: Any, y: Any) -> Any:
        z = (t - x[1]) / x[2]
        e = np.exp(-(z**2) / 2)
        slope = x[0] / x[2] * e * z
        return np.array([e, slope, slope * z, ones])  # (4, m)

    def jacobian(x: Any, y: Any) -> Any:
        return columns(x, y).T

    def leastsq(x0: Any, y: Any) -> Any:
        return optimize.leastsq(residuals, x0, (y,), columns, col_deriv=True, **TIGHT)[0]

    def least_squares_lm(x0: Any, y: Any) -> Any:
        return optimize.least_squares(residuals, x0, jacobian, args=(y,), method="lm", x_scale="jac", **TIGHT).x

    fit = {LEASTSQ: leastsq, LEAST_SQUARES: least_squares_lm}[interface]
    return lambda: torch.from_numpy(np.stack([fit(x0, y) for x0, y in zip(starts, ys, strict=True)]))


def polished(peaks: Peaks, x: Tensor) -> Tensor:
    """The minimisers next to x, by Newton's method with the full Hessian: what both sides should have found."""

    def cost(x: Tensor, y: Tensor) -> Tensor:
        return (peaks.residuals(x, y) ** 2).sum() / 2

    gradient, hessian = torch.func.grad(cost), torch.func.hessian(cost)
    for _ in range(4):
        g, H = (torch.func.vmap(of)(x, peaks.y) for of in (gradient, hessian))  # (B, 4), (B, 4, 4)
        x = x - torch.linalg.solve(H, g)
    return x


def difference(x: Tensor, known: Tensor) -> float:
    """The largest of all parameters of all fits, relative."""
    known = known.to(x.device)
    return float(((x[: len(known)] - known) / known).abs().max())


@dataclass(frozen=True)
class Earlier:
    """SciPy's side of an earlier run."""

    machine: str
    seconds: dict[str, float]
    answers: Tensor  # (KEPT, 4)

    @staticmethod
    def read(path: Path, peaks: Peaks) -> Earlier:
        full = json.loads(path.read_text("utf-8"))
        batch = full.get("batch") or {}
        if not batch.get("scipy_answers"):
            sys.exit(f"--against {path}: holds no batch fitted by SciPy; make it on a machine with SciPy, with --json")
        if batch["fits"] != len(peaks) or not math.isclose(batch["sum_of_data"], float(peaks.y.sum()), rel_tol=1e-9):
            sys.exit(f"--against {path}: was run on other data; use the same --seed and the same --quick")
        machine = full["machine"]
        seconds = {name: r["median"] for name, r in batch["results"].items() if name.startswith("SciPy")}
        described = f"{machine['cpu']}, {machine['cores']} cores, {machine['date']}, commit {machine['commit']}"
        return Earlier(described, seconds, torch.tensor(batch["scipy_answers"], dtype=torch.float64))


def run_batch(options: argparse.Namespace) -> tuple[list[str], list[Verdict], dict[str, Any]]:
    device: torch.device = options.device
    peaks = Peaks.draw(200 if options.quick else FITS, options.seed)
    there = peaks.on(device)
    contestants = {OURS: batched(there, given=False), OURS_GIVEN: batched(there, given=True)}
    if device.type == "cuda":
        contestants |= {OURS + CAPTURED: batched(there, False, True), OURS_GIVEN + CAPTURED: batched(there, True, True)}
    mine = list(contestants)
    if optimize and not options.against:
        contestants |= {name: one_by_one(peaks, name) for name in (LEASTSQ, LEAST_SQUARES)}
    answers = {}
    for name, run in contestants.items():
        measure.note(f"{len(peaks)} fits: {name}")
        answers[name] = run()  # a warm-up too
    rounds = options.rounds or (1 if options.quick else 7)
    timings = measure.interleave(contestants, rounds, device, warmup=0)

    seconds = {name: timing.median for name, timing in timings.items()}
    notes, known = [], answers.get(LEASTSQ)
    if options.against:
        earlier = Earlier.read(options.against, peaks)
        seconds |= earlier.seconds
        known = earlier.answers
        notes.append(f"SciPy's times and first {len(known)} answers are of an earlier run: {earlier.machine}.")
    elif not optimize:
        notes.append("SciPy is not installed: install it, or take its times from an earlier run with --against.")

    lines = []
    if known is not None:
        for name in mine:
            apart = difference(answers[name], known)
            lines.append(Verdict(f"{name}: largest relative difference to SciPy leastsq", apart, "≤", 1e-8))
    exact = polished(peaks, answers[OURS].cpu())
    errors = {name: difference(x.cpu(), exact) for name, x in answers.items()}
    lines.append(Verdict(f"{OURS}: largest relative error", errors[OURS], "≤", 1e-8))
    bound = 50.0 if device.type == "cuda" else 5.0
    for scipy in (name for name in seconds if name.startswith("SciPy")):
        for ours in mine:
            lines.append(Verdict(f"{scipy} / {ours}", seconds[scipy] / seconds[ours], "≥", bound))
    rows = [
        [
            name,
            measure.number(s),
            measure.span(timings[name]) if name in timings else "earlier",
            f"{1e6 * s / len(peaks):.1f}",
            f"{errors[name]:.1e}" if name in errors else "–",
        ]
        for name, s in seconds.items()
    ]
    head = [f"{len(peaks):,} fits", "median, s", "quartiles, ms", "µs per fit", "largest relative error"]
    table = measure.markdown(head, rows)
    results = {name: timing.record() | {"error": errors[name]} for name, timing in timings.items()}
    record = {"fits": len(peaks), "sum_of_data": float(peaks.y.sum()), "results": results}
    record["scipy_answers"] = known[:KEPT].tolist() if known is not None else None
    return [table, *notes], lines, record


# --- the run ---


def arguments() -> argparse.Namespace:
    parser = measure.parser(__doc__)
    add = parser.add_argument
    add("--only", choices=("classical", "batch"), help="one of the two parts (default: both)")
    add("--rounds", type=measure.positive, help="times that the batch is fitted (default 7)")
    add("--against", type=Path, metavar="FILE", help="JSON of an earlier run, for SciPy's side of the batch")
    options = parser.parse_args()
    if options.against and not options.against.is_file():
        parser.error(f"--against {options.against}: there is no such file")
    return options


def run_classical(quick: bool) -> tuple[list[str], list[Verdict], list[dict[str, Any]]]:
    problems = PROBLEMS[:8] if quick else PROBLEMS
    runs = [(1.0, tolerance) for tolerance in TOLERANCES]
    if not quick:
        runs += [(factor, TOLERANCES[-1]) for factor in FACTORS]
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*encountered", RuntimeWarning)  # NumPy's, where SciPy tries too far away
        found = {run: run_all(problems, *run) for run in runs}
    texts = [f"Standard start, tolerances {t:g}:\n\n{each(problems, found[1.0, t])}" for t in TOLERANCES]
    records = [
        {
            "factor": factor,
            "tolerance": tolerance,
            "outcomes": {s: {name: asdict(o) for name, o in outcomes.items()} for s, outcomes in run.items()},
        }
        for (factor, tolerance), run in found.items()
    ]
    return [*texts, summary(found)], judge(found), records


def main() -> None:
    options = arguments()
    described = measure.start(options) | {"scipy": scipy_version.version if optimize else None}
    texts: list[str] = []
    lines: list[Verdict] = []
    classical = batch = None
    if options.only != "batch":
        found, judged, classical = run_classical(options.quick)
        texts += found
        lines += judged
    if options.only != "classical":
        found, judged, batch = run_batch(options)
        texts += found
        lines += judged
    print(*texts, measure.verdicts(lines), sep="\n\n")
    measure.write(options, described, classical=classical, batch=batch, verdicts=lines)


if __name__ == "__main__":
    main()
