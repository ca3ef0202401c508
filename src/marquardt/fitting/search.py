"""What comes around the solver: Newton's method where Gauss-Newton cannot finish, further attempts, and the way out of
stationary points that are no minimum, where J has lost rank and cannot see the way down."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace

import torch
from torch import Tensor

from .factor import QRFactor, Subset, norm
from .problems import NoSecondDerivative, Problems
from .solve import (
    BAD,
    FTOL,
    LIMIT,
    STALE,
    STATIONARY,
    STOPPED,
    STUCK,
    Options,
    Progress,
    Watcher,
    faded,
    linearised,
    relative_change,
    solve,
)

SADDLES = 3  # most saddle points to leave, one after the other
ALIKE = 1e8  # condition of J, its columns of one length, from which on some of them are taken for the same
NOUGHT = 1e-6  # residuals this much smaller than at the start count as zero: nothing lower is worth a search
NEGATIVE = -1e-9  # of the largest eigenvalue of the Hessian: below it is not rounding
NEAR = (2.0, 1.0, 0.5, 0.2, 0.1, 1e-2, 1e-3, 1e-4)  # parts of the way along which the cost would fall to nothing
# Of a parameter whose scale is not known.
ANYWHERE = tuple(10.0**k for k in (*range(-16, -8, 2), *range(-8, 9), *range(10, 17, 2)))
NEARLY_ALL = (0.9, 0.99, 0.999, 1 - 1e-6)  # of the way from a parameter to zero
SIGNS = 4  # most sets of signs with which parameters are moved together

# Further attempts: the first radius in units of ‖Dx₀‖, and what the parameters that lost their influence are multiplied
# by at the start. Found by trying, docs/least_squares.md.
ATTEMPTS = ((0.1, 1.0), (1.0, 0.1), (0.01, 1.0), (1.0, 1e-3))
NEWTON = 5  # most Newton steps of a finish
FADED = 1e-6  # of its length: a column of J that is shorter than this is of a parameter that has lost its influence

Attempt = Callable[[Problems, Tensor, Options], Progress]


def search(problems: Problems, x: Tensor, options: Options, watch: Watcher) -> Progress:
    """Solve; where that ends in no minimum, again from the start in other ways, on half of the evaluations."""

    def attempt(problems: Problems, x: Tensor, options: Options) -> Progress:
        return finish(problems, solve(problems, x, options, watch), options)

    if not options.restarts:
        return attempt(problems, x, options)
    few = options.max_nfev < 20 * len(ATTEMPTS)
    best = attempt(problems, x, options if few else replace(options, max_nfev=options.max_nfev // 2))
    best, x0, dead = escape(problems, x, best, attempt, options)
    if few:
        return put_back(problems, x, best)
    share = options.max_nfev // 4 // len(ATTEMPTS)
    for factor, shift in ATTEMPTS:
        again = doubtful(problems, x0, best, dead, options).nonzero().squeeze(-1)
        if not len(again) or bool((best.status == STOPPED).any()):
            break
        old, part, begin, idle = best[again], problems[again], x0[again], dead[again]
        shifted = torch.where(faded(old, options, FADED) & ~idle, shift * begin, begin)
        new = attempt(part, part.clamped(shifted), replace(options, max_nfev=share, factor=factor))
        still = doubtful(part, begin, new, idle, options)
        best = best.improved(again, new, torch.where(still, 1 - 1e-9, 1 + 1e-9) * old.scale)
    # What ran out of its share goes on from where it is, with what is left. So does what is stuck with a D that is that
    # of columns which have faded since: ‖Dp‖ ≤ Δ held their parameters, and a new start measures D anew.
    while not bool((best.status == STOPPED).any()):
        stale = (faded(best, options, STALE) & (best.J != 0).any(1)).any(-1)
        going = (best.status == LIMIT) | ((best.status == STUCK) & stale)
        again = (going & (best.nfev < options.max_nfev - 1)).nonzero().squeeze(-1)
        if not len(again):
            break
        old, left = best[again], options.max_nfev - int(best.nfev[again].max())
        best = best.improved(again, attempt(problems[again], old.x, replace(options, max_nfev=left)), old.scale)
    return put_back(problems, x, best)


def put_back(problems: Problems, x0: Tensor, s: Progress) -> Progress:
    """With parameters that change no residual where they were at the start: an attempt may have moved them."""
    idle = (s.J == 0).all(1) & (s.x != x0)
    for j in idle.any(0).nonzero().flatten().tolist():
        x = torch.where(idle & (torch.arange(x0.shape[-1], device=x0.device) == j), x0, s.x)
        same = (problems.residuals(x) == s.f).all(-1, keepdim=True)
        s = replace(s, x=torch.where(same, x, s.x), nfev=s.nfev + idle[:, j])
    return s


def doubtful(problems: Problems, x0: Tensor, s: Progress, dead: Tensor, options: Options) -> Tensor:
    """No minimum, or one at infinity, or one where parameters have become alike and J has lost its rank: (B,)."""
    doubt = (s.status != BAD) & ((s.status <= 0) | (faded(s, options, FADED) & ~dead).any(-1))
    index = (~doubt & (s.factor.condition > ALIKE) & (s.f.shape[-1] >= s.x.shape[-1])).nonzero().squeeze(-1)
    if len(index):
        doubt[index] = lost_rank(problems[index], x0[index], s[index])
    return doubt


def lost_rank(problems: Problems, x0: Tensor, s: Progress) -> Tensor:
    """Where J has no full rank: whether it had at the start, and neither cost nor Hessian shows a minimum: (B,)."""
    f, J = problems.at_start(x0)
    first = QRFactor.of(*reversed(problems.loss.corrected(f, J)))
    lost = (first.condition <= ALIKE) & (s.scale > NOUGHT * problems.loss.scale(f))
    if problems.plain:
        with suppress(NoSecondDerivative):
            value = torch.linalg.eigvalsh(scaled_hessian(problems, s).nan_to_num(0.0, 0.0, 0.0))
            lost &= value[:, 0] <= 1e-9 * value[:, -1]
    return lost


def finish(problems: Problems, s: Progress, options: Options) -> Progress:
    """Newton's method with the whole Hessian JᵀJ + Σfᵢ∇²fᵢ, where the cost is flat to rounding and J cannot finish.

    With large residuals Gauss-Newton steps need not contract: the cost then tells x to half of the digits only. A step
    counts if it makes the gradient smaller.
    """
    enough = options.ftol > 10 * torch.finfo(s.x.dtype).eps  # the caller's least decrease to go on for
    if enough or not problems.plain:
        return s
    index = ((s.status == FTOL) | (s.status == STUCK)) & (s.cosine > options.gtol) & (s.factor.slope < 1e-3)
    index &= s.nfev + NEWTON <= options.max_nfev
    for _ in range(NEWTON):
        which = index.nonzero().squeeze(-1)
        if not len(which):
            break
        some, old = problems[which], s[which]
        d = old.D.unsqueeze(-1)
        try:
            L, failed = torch.linalg.cholesky_ex(scaled_hessian(some, old))
        except NoSecondDerivative:
            break
        p = -torch.cholesky_solve(old.J.mT @ old.f.unsqueeze(-1) / d, L) / d  # (B, n, 1)
        x = old.x + torch.where(failed[:, None, None] > 0, 0, p).squeeze(-1)  # where H is not positive definite, x
        there = linearised(some, x, some.residuals(x), some.jacobian(x), old.D, options)
        slope = there.factor.slope
        better = Subset((slope < 0.9 * old.factor.slope) & (there.scale <= (1 + 1e-9) * old.scale))  # false for a NaN
        status = torch.where(better.mask & (slope <= STATIONARY), FTOL, old.status)
        new = replace(old.at(better, better.of(there)), status=status, nfev=old.nfev + 1, njev=old.njev + 2)
        s = s.merge(which, new)  # a Jacobian more, and a Hessian as another
        index[which] = better.mask & (relative_change(old.x, x - old.x) > options.xtol)
    return s


def escape(
    problems: Problems, x0: Tensor, s: Progress, attempt: Attempt, options: Options
) -> tuple[Progress, Tensor, Tensor]:
    """Leave saddle points. Also where the start is off them, (B, n), and which parameters change nothing there, (B, n).

    A parameter at its maximum has a column of zeros, and two terms of a sum that have become alike, such as
    exponentials of one rate, have columns that are.
    """
    dead = torch.zeros_like(s.x, dtype=torch.bool)
    going = (s.scale > 0) & (s.status != STOPPED)
    for _ in range(SADDLES):
        flat = (s.factor.slope < 1e-3) & (s.cosine > 1e-3)
        blind = flat | ((s.factor.length == 0) & ~dead).any(-1) | (s.factor.condition > ALIKE)
        index = (going & blind & (s.nfev < options.max_nfev)).nonzero().squeeze(-1)
        if len(index):
            index = index[s.scale[index] > NOUGHT * problems.loss.scale(problems[index].residuals(x0[index]))]
        if not len(index):
            break
        old, left = s[index], options.max_nfev - int(s.nfev[index].max())
        trials = Trials(problems[index], old, options, min(left, options.max_nfev // 2))
        dead[index] |= trials.made(~dead[index])
        s = s.merge(index, replace(old, nfev=old.nfev + trials.nfev, njev=old.njev + trials.njev))
        lower = trials.scale <= (1 - 1e-9) * old.scale
        down, left = index[lower], left - trials.nfev
        if not len(down) or left < 1:
            break
        more = replace(options, max_nfev=min(left, max(options.max_nfev // 4 // SADDLES, 20)))
        # Parameters that have not moved would begin another attempt on the same saddle.
        x0 = x0.index_copy(0, down, torch.where(x0[down] == s.x[down], trials.x[lower], x0[down]))
        new, limit = attempt(problems[down], trials.x[lower], more), (1 - 1e-9) * s.scale[down]
        s = s.improved(down, new, limit)
        going = torch.zeros_like(going).index_copy(0, down, (new.scale <= limit) & (new.status != STOPPED))
    return s, x0, dead


class Trials:
    """The lowest points found around those of s: x (B, n), of this scale (B,)."""

    def __init__(self, problems: Problems, s: Progress, options: Options, most: int) -> None:
        self.problems, self.s, self.most = problems, s, most
        self.x, self.f, self.scale, self.nfev, self.njev = s.x, s.f, s.scale, 0, 0
        self.size = torch.where(s.x == 0, 1.0 if options.x_scale is None else options.x_scale, s.x.abs())
        f, J = problems.loss.corrected(s.f, s.J)
        self.zero = (J == 0).all(1)  # columns (B, n)
        box = problems.box
        self.free = torch.ones_like(self.zero) if box is None else ~box.held(s.x, (f.unsqueeze(-2) @ J).squeeze(-2))

    def made(self, unknown: Tensor) -> Tensor:
        """Try what may lead down; which of the unknown parameters nothing shows an influence of: (B, n)."""
        try:
            far, directions, seen = self.downhill()
        except NoSecondDerivative:
            far, directions, seen = self.null_space()
        for k in range(far.shape[-1]):
            self.along(far[:, k : k + 1] * directions[..., k], NEAR)
        flat = self.zero & self.free & unknown & ~seen
        most, number = int(flat.sum(-1).max()), flat.cumsum(-1) - 1
        size = (1 + 0.618 * number % 1) * self.size  # of one size, they might cancel
        still = flat.any(-1)
        for k in range(SIGNS if most > 1 else most):
            signs = 1 - 2 * ((number >> (k - 1)) & 1) if k else torch.ones_like(number)
            still &= ~self.along(torch.where(flat, signs * size, 0), ANYWHERE)
        still &= ~self.along(torch.where(flat, -self.s.x, 0), NEARLY_ALL)
        apart, index = flat & ~still.unsqueeze(-1), torch.arange(flat.shape[-1], device=flat.device)
        alone = {j: torch.where(apart & (index == j), self.size, 0) for j in apart.any(0).nonzero().flatten().tolist()}
        for d in alone.values() if most > 1 else ():
            self.along(d, ANYWHERE)
        for one, other in itertools.combinations(alone.values(), 2) if most > 2 else ():
            # Others spoil what two do together.
            both = (one != 0).any(-1, keepdim=True) & (other != 0).any(-1, keepdim=True)
            for sign in (1, -1):
                self.along(torch.where(both, one + sign * other, 0), ANYWHERE[::2])
        return flat & still.unsqueeze(-1)

    def downhill(self) -> tuple[Tensor, Tensor, Tensor]:
        """Directions in which the Hessian is negative, the columns of (B, n, n), how far it is along them to where it
        promises no cost at all, and which parameters it knows, (B, n) each.

        Its rows and columns are brought to one size first, so that units of the parameters change nothing.
        """
        H = hessian(self.problems, self.s).nan_to_num(0.0, 0.0, 0.0)
        self.njev += 1
        H = torch.where(self.free.unsqueeze(-1) & self.free.unsqueeze(-2), H, 0)
        unit = torch.ones_like(self.x)
        for _ in range(8):
            row = (H * unit.unsqueeze(-1) * unit.unsqueeze(-2)).abs().amax(-1)
            unit = torch.where(row > 0, unit / row.sqrt(), unit)
        value, vector = torch.linalg.eigh(H * unit.unsqueeze(-1) * unit.unsqueeze(-2))
        down = value < NEGATIVE * value.abs().amax(-1, keepdim=True)
        far = torch.where(down, self.s.scale.unsqueeze(-1) / torch.where(down, -value, 1).sqrt(), 0)
        return far, unit.unsqueeze(-1) * vector, H.abs().amax(-1) > 0

    def null_space(self) -> tuple[Tensor, Tensor, Tensor]:
        """The same of the null space of J, where no Hessian gives a length, or knows a parameter."""
        length, visible = self.s.factor.length, self.free & ~self.zero
        R = torch.where(visible.unsqueeze(-2), self.s.factor.unit, 0).nan_to_num(0.0, 0.0, 0.0)
        _, value, vector = torch.linalg.svd(torch.cat([R, torch.diag_embed(~visible).to(R)], 1), full_matrices=False)
        far = torch.where(ALIKE * value < value[:, :1], norm(self.s.D * self.s.x).unsqueeze(-1), 0)
        directions = vector.mT / torch.where(length > 0, length, 1).unsqueeze(-1)
        return far.flip(-1), directions.flip(-1), torch.zeros_like(visible)

    def along(self, d: Tensor, parts: tuple[float, ...]) -> Tensor:
        """Try x ± parts of d, x the lowest so far, and whether that changes any residual: (B,)."""
        x0, f0 = self.x, self.f
        influence = torch.zeros_like(self.scale, dtype=torch.bool)
        if not bool((d != 0).any()):
            return influence
        for step in (way * part for part in parts for way in (1, -1)):
            if self.nfev >= self.most:
                return torch.ones_like(influence)  # perhaps
            x = self.problems.clamped(x0 + step * d)
            f = self.problems.residuals(x)
            self.nfev += 1
            influence |= (f != f0).any(-1)
            scale = self.problems.loss.scale(f).nan_to_num(torch.inf, torch.inf)
            lower = scale < self.scale
            self.x, self.f = (torch.where(lower.unsqueeze(-1), *pair) for pair in ((x, self.x), (f, self.f)))
            self.scale = torch.where(lower, scale, self.scale)
        return influence


def hessian(problems: Problems, s: Progress) -> Tensor:
    """Of the cost, ρ″ < 0 left out: JᵀJ + Σρ′fᵢ∇²fᵢ (B, n, n)."""
    _, J = problems.loss.corrected(s.f, s.J)
    return J.mT @ J + problems.curvature(s.x, problems.loss.pull(s.f))


def scaled_hessian(problems: Problems, s: Progress) -> Tensor:
    """D⁻¹HD⁻¹: (B, n, n)."""
    return hessian(problems, s) / s.D.unsqueeze(-1) / s.D.unsqueeze(-2)
