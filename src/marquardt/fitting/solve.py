"""Levenberg–Marquardt with a trust region (Moré 1978), for B problems at once."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import TypeVar

import torch
from torch import Tensor

from ..deferred import Tape, capturing, recorded
from .factor import QRFactor, Subset, norm
from .problems import Problems

# Status codes: SciPy's, and STUCK.
RUNNING, STUCK, STOPPED, BAD, LIMIT, GTOL, FTOL, XTOL, BOTH = -9, -3, -2, -1, 0, 1, 2, 3, 4

ACCEPT = 1e-4  # least ratio of actual to predicted decrease: MINPACK
COMPACT = 0.7  # stopped problems leave the batch once fewer than this share is running
NOISE = 1e3  # in eps: relative decreases of the cost below this may be rounding
STATIONARY = 1e-6  # the largest cosine between residuals and a column of J at what may be called a minimum
NEAR = 1e-3  # the same cosine, where a test of the step or of the decrease may end a search
STALE = 1e-3  # a column of J this much shorter than D has it
BEND = 0.75  # most of ‖a‖/‖p‖, the acceleration of a geodesic step (Transtrum and Sethna 2012)

P = TypeVar("P", bound="Point")

_ready: set[torch.device] = set()  # libraries set up at their first calls in a process what cannot be recorded


@dataclass(frozen=True)
class Options:
    """Tolerances, limits and ways of a search."""

    ftol: float = 0.0
    xtol: float = 1e-10
    gtol: float = 1e-10
    max_nfev: int = 1000
    factor: float = 100.0  # the first radius is this times ‖Dx₀‖: MINPACK
    geodesic: bool = False
    restarts: bool = True
    capture: bool = False
    x_scale: Tensor | None = None  # 1/D, or None for the norms of the Jacobian's columns


@dataclass(frozen=True)
class Point:
    """Where B problems are. f and J carry the weights, the factor the loss's correction as well."""

    x: Tensor  # (B, n)
    f: Tensor  # (B, m)
    J: Tensor  # (B, m, n)
    factor: QRFactor
    scale: Tensor  # (B,), √(2·cost)
    cosine: Tensor  # (B,), of the angle between residuals and tangent space
    D: Tensor  # (B, n)

    @classmethod
    def of(cls: type[P], tensors: Iterable[Tensor]) -> P:
        x, f, J, Rc, *rest = tensors
        return cls(x, f, J, QRFactor(Rc), *rest)

    def tensors(self) -> list[Tensor]:
        return [value.Rc if isinstance(value, QRFactor) else value for value in vars(self).values()]

    def __getitem__(self: P, index: Tensor) -> P:
        return self.of(t[index] for t in self.tensors())

    def copy(self: P) -> P:
        return self.of(t.clone() for t in self.tensors())


@dataclass(frozen=True)
class Progress(Point):
    """And how they came there."""

    radius: Tensor  # (B,), Δ of ‖Dp‖ ≤ Δ
    change: Tensor  # (B,), the largest relative change of a parameter in the last step; infinite after a damped one
    nfev: Tensor  # (B,)
    njev: Tensor  # (B,)
    status: Tensor  # (B,)

    def at(self, part: Subset, point: Point) -> Progress:
        """This one, with some of the problems at other points."""
        if part.index is None or not part.whole:
            point = Point.of(map(part.into, self.tensors(), point.tensors()))
        return replace(self, **vars(point))

    @property
    def running(self) -> Tensor:
        return self.status == RUNNING

    def merge(self, index: Tensor, other: Progress) -> Progress:
        """This one, with the problems `index` replaced by those of the other."""
        if len(index) == len(self.x):
            return other
        return Progress.of(t.index_copy(0, index, new) for t, new in zip(self.tensors(), other.tensors(), strict=True))

    def improved(self, index: Tensor, new: Progress, limit: Tensor) -> Progress:
        """This one, with the problems `index` as in the other where its scale is within the limit, and all of its
        evaluations counted."""
        old, lower = self[index], (new.scale <= limit).nonzero().squeeze(-1)  # no NaN is
        best = old.merge(lower, new[lower])
        status = torch.where(new.status == STOPPED, STOPPED, best.status)  # the callback ends all attempts
        best = replace(best, status=status, nfev=old.nfev + new.nfev, njev=old.njev + new.njev)
        return self.merge(index, best)


Watcher = Callable[[Problems, Progress, int], None]  # the last is the number of the iteration


def solve(problems: Problems, x: Tensor, options: Options, watch: Watcher) -> Progress:
    """Run every problem until it stops. `watch` sees the progress after each iteration."""
    result = s = start(problems, x, options)
    which = torch.arange(len(x), device=x.device)  # of these are in s
    replay = RecordedIteration()
    advance, nit = replay if options.capture else iterate, 0
    try:
        watch(problems, s, nit)
        while True:
            running = s.running.nonzero().squeeze(-1)
            if not len(running) or (len(running) < COMPACT * len(s.x) and replay.graph is None):
                result = result.merge(which, s)
                if not len(running):
                    return result
                s, problems, which = s[running], problems[running], which[running]
            s = advance(problems, s, options)
            nit += 1
            watch(problems, s, nit)
    except StopIteration:
        return result.merge(which, replace(s, status=torch.where(s.running, STOPPED, s.status)))


def start(problems: Problems, x: Tensor, options: Options) -> Progress:
    f, J = problems.at_start(x)
    s = linearised(problems, x, f, J, torch.zeros_like(x), options)
    fine = s.scale.isfinite() & s.cosine.isfinite()  # numbers that are not finite reach R, and these
    if not bool(fine.all()):
        f, J = torch.where(fine[:, None], f, 0), torch.where(fine[:, None, None], J, 0)
        s = linearised(problems, x, f, J, torch.zeros_like(x), options)
    first = norm(s.D * x)
    # Where x₀ as a whole changes the residuals by less than rounding, it might as well be 0.
    first = torch.where(first > torch.finfo(x.dtype).eps * s.scale, first, 1.0)
    going = RUNNING if options.max_nfev > 1 else LIMIT
    status = torch.where(fine, torch.where((s.cosine <= options.gtol) | is_zero(s), GTOL, going), BAD)
    one = torch.ones_like(status)
    s = replace(s, scale=torch.where(fine, s.scale, torch.nan))
    return Progress(**vars(s), radius=options.factor * first, change=torch.full_like(first, torch.inf),
                    nfev=one, njev=one, status=status)  # fmt: skip


def linearised(problems: Problems, x: Tensor, f: Tensor, J: Tensor, D: Tensor, options: Options) -> Point:
    """What depends on the point alone, and D ← max(D, norms of the columns of J)."""
    scale = problems.loss.scale(f)
    unit = torch.where(scale > 0, scale, 1.0)
    ft, Jt = problems.loss.corrected(f, J)
    factor = QRFactor.of(Jt, ft, unit)
    if options.x_scale is None:
        D = torch.maximum(D, unit.unsqueeze(-1) * factor.length)
        D = torch.where(D > 0, D, 1.0)
    else:
        D = (1 / options.x_scale).expand_as(x)
    if problems.box is not None:
        factor = problems.box.free(factor, x)
    return Point(x, f, J, factor, scale, factor.decrement, D)


def iterate(problems: Problems, s: Progress, options: Options) -> Progress:
    """One step of every problem that is running: try it, judge it, and linearise again where it is accepted."""
    eps = torch.finfo(s.x.dtype).eps
    box = problems.box
    p, held = s.factor.within(s.radius, s.D) if box is None else box.within(s.factor, s.x, s.radius, s.D)
    step = p + 0.5 * bend(problems, s, p) if options.geodesic else p
    x = s.x + step if box is None else box.reach(s.x, step)
    f = problems.residuals(x)

    predicted = s.factor.predicted(p)
    actual = problems.loss.decrease(s.f, f, s.scale).nan_to_num(-torch.inf)
    ratio = torch.where(predicted > 0, actual / predicted, -torch.inf)
    running, downhill = s.running, ratio >= ACCEPT

    # Near the minimum the decrease drowns in rounding. There a full Gauss-Newton step counts if it brings the point
    # nearer to stationary; that takes the Jacobian to say.
    change = relative_change(s.x, x - s.x)
    full = ~held & (predicted >= 0.5 * s.cosine**2) & (actual > -3)
    noise = NOISE * eps + 4 * wobble(s.factor, s.x)
    flat = full & torch.where(downhill, torch.maximum(actual, predicted) <= NOISE * eps, predicted <= noise)

    trial = Subset(running & (downhill | flat))
    new, accepted = s, torch.zeros_like(held)
    if not trial.empty:
        y, r = trial.of(x, s.x), trial.of(f, s.f)
        part = trial.of(problems)
        J = part.jacobian(y)
        there = linearised(part, y, r, J, trial.of(s.D), options)
        usable = there.cosine.isfinite()  # a Jacobian that is not finite leaves no number in R
        nearer = there.cosine < 0.9 * trial.of(s.cosine)
        good = Subset(usable & (nearer | ~trial.of(flat)))
        moved = trial.narrowed(good.mask)
        new, accepted = s.at(moved, good.of(there)), moved.mask
        broken = trial.into(torch.zeros_like(held), ~usable)
        ratio, actual = (torch.where(broken, -torch.inf, t) for t in (ratio, actual))
        flat = flat & ~broken
    nfev = s.nfev + 1
    radius = torch.where(flat, s.radius, next_radius(s, p, actual, ratio, held))

    # Stopping. While steps shrink by a rate r, the distance to the limit is r/(1 − r) of the last one.
    rate = change / s.change
    error = torch.where(~held & (rate <= 0.5) & (s.change < 0.1), change * rate / (1 - rate), torch.inf)
    near = new.factor.slope <= NEAR  # a step may be small, or win little, far from any minimum
    by_x = accepted & near & ((error <= options.xtol) | (~held & (change <= eps)))
    by_f = accepted & (near | ~held) & (torch.maximum(actual.abs(), predicted) <= options.ftol) & (ratio <= 2)
    ended = ~accepted & (flat | (radius <= eps**2 * norm(s.D * s.x)) | (x == s.x).all(-1))
    stationary = is_stationary(new, options) | flat
    status = torch.where(nfev >= options.max_nfev, LIMIT, RUNNING)
    status = torch.where(ended, torch.where(stationary, FTOL, STUCK), status)
    status = torch.where(by_x, torch.where(by_f, BOTH, XTOL), torch.where(by_f, FTOL, status))
    status = torch.where((new.cosine <= options.gtol) | is_zero(new), GTOL, status)
    return replace(
        new,
        radius=torch.where(running, radius, s.radius),
        change=torch.where(accepted, torch.where(held, torch.inf, change), s.change),
        nfev=torch.where(running, nfev, s.nfev),
        njev=s.njev + trial.mask,
        status=torch.where(running, status, s.status),
    )


def next_radius(s: Progress, p: Tensor, actual: Tensor, ratio: Tensor, held: Tensor) -> Tensor:
    """MINPACK's: smaller after a poor step, by interpolation, and twice the step after a good one."""
    length = norm(s.D * p)
    slope = (s.factor.c * s.factor.product(p)).sum(-1)  # gᵀp in units of 2·cost
    # The parabola through cost, slope and new cost has its minimum at this part of the step.
    part = torch.where(actual > -99, slope / (2 * slope + actual), 0.1)
    shrink = torch.where(actual >= 0, 0.5, part).clamp(0.1, 0.5)
    radius = torch.where(s.nfev == 1, torch.minimum(s.radius, length), s.radius)
    radius = torch.where(ratio <= 0.25, shrink * torch.minimum(radius, 10 * length), radius)
    return torch.where((ratio >= 0.75) | (~held & (ratio > 0.25)), 2 * length, radius)


def bend(problems: Problems, s: Progress, p: Tensor) -> Tensor:
    """a: what the linear model misses of the residuals' second derivative along p (Transtrum and Sethna 2012)."""
    _, J = problems.loss.corrected(s.f, s.J)
    most = BEND * norm(s.D * p)
    a, held = QRFactor.of(J, problems.bend(s.x, p)).within(most, s.D)
    return torch.where((held | ~a.isfinite().all(-1)).unsqueeze(-1), 0, a)  # too much of it: the step is too long


def wobble(factor: QRFactor, x: Tensor) -> Tensor:
    """ε·Σ‖Jⱼ‖|xⱼ|/‖f‖: by how much rounding of x alone changes the residuals, at most: (B,)"""
    return torch.finfo(x.dtype).eps * (factor.length * x.abs()).sum(-1)


def is_zero(s: Point) -> Tensor:
    """Residuals that are nothing but rounding."""
    return (s.scale == 0) | (wobble(s.factor, s.x) >= 0.3)


def is_stationary(s: Point, options: Options) -> Tensor:
    """Residuals orthogonal to every column of J, up to rounding, but for columns that have vanished on the way.

    Such a column is that of a parameter on its way to infinity: it has faded, and to change all of the parameter
    would not change the cost.
    """
    eps = torch.finfo(s.x.dtype).eps
    small = s.factor.cosines <= max(STATIONARY, 1e3 * eps) + 10 * wobble(s.factor, s.x).unsqueeze(-1)
    gone = faded(s, options, STALE) & ((s.factor.gradient * s.x).abs() <= eps**0.5)
    settled: Tensor = small | gone
    return settled.all(-1)


def faded(s: Point, options: Options, share: float) -> Tensor:
    """Columns of J that are at most this share as long as they have been, by D: (B, n)."""
    unit = torch.where(s.scale > 0, s.scale, 1.0).unsqueeze(-1)
    short: Tensor = unit * s.factor.length <= share * s.D
    return short & (options.x_scale is None)  # a given D remembers nothing


def relative_change(x: Tensor, p: Tensor) -> Tensor:
    """max |pⱼ|/|xⱼ|: (B,)"""
    return torch.where(p == 0, 0, p.abs() / (x + p).abs()).amax(-1)


class RecordedIteration:
    """iterate(problems, progress, options), recorded once and then replayed.

    What is asked on the way is assumed to be answered by yes (..deferred). The problems of which that was not true take
    their step once more, without the recording, from where they were: `old`, which the graph itself takes over from
    `new`. All calls are for the same problems, each with the progress that the last one returned.
    """

    graph: torch.cuda.CUDAGraph | None = None
    refused = False

    def __call__(self, problems: Problems, s: Progress, options: Options) -> Progress:
        if self.graph is None and not self.refused and s.x.device in _ready:
            self._record(problems, s, options)
        if self.graph is None:
            _ready.add(s.x.device)
            return iterate(problems, s, options)
        self.graph.replay()
        index = self.wrong.nonzero().squeeze(-1)
        if len(index):
            again = iterate(problems[index], self.old[index], options)
            for t, part in zip(self.new.tensors(), again.tensors(), strict=True):
                t.index_copy_(0, index, part)
            if 2 * len(index) > int(self.old.running.sum()):  # the graph holds for too few of these problems
                self.graph, self.refused = None, True
        return Progress.of(self.new.tensors())  # without what was derived from these tensors before

    def _record(self, problems: Problems, s: Progress, options: Options) -> None:
        self.old, self.new = s.copy(), s.copy()
        try:
            with capturing(s.x.device):
                tape, graph, stream = Tape([]), torch.cuda.CUDAGraph(), torch.cuda.Stream()
                stream.wait_stream(torch.cuda.current_stream())
                with torch.cuda.stream(stream), recorded(tape):
                    graph.capture_begin()
                    try:
                        torch._foreach_copy_(self.old.tensors(), self.new.tensors())
                        new = iterate(problems, Progress.of(self.old.tensors()), options)
                        torch._foreach_copy_(self.new.tensors(), new.tensors())
                        self.wrong = ~torch.stack(tape.asked).all(0) & self.old.running
                    finally:
                        graph.capture_end()
                torch.cuda.current_stream().wait_stream(stream)
            self.graph = graph
        except Exception as error:  # CUDA refuses in many ways
            self.refused = True
            reason = str(error).partition("\n")[0]
            warnings.warn(f"capture=True: this fit cannot be recorded, it goes on without: {reason}", stacklevel=2)
