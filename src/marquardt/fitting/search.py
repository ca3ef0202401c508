"""What comes around the solver: Newton's method where Gauss-Newton cannot finish, and further attempts."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace

import torch
from torch import Tensor

from .bounds import Box
from .factor import QRFactor, Subset, norm
from .options import Options
from .problems import NoSecondDerivative, Problems
from .progress import BAD, FTOL, LIMIT, STOPPED, STUCK, Progress, better_of
from .robust import RobustLoss
from .saddles import ALIKE, NOUGHT, escape, scaled_hessian
from .solve import STALE, STATIONARY, Watcher, linearised, relative_change, solve

# Further attempts: the first radius in units of ‖Dx₀‖, and what the parameters that lost their influence are multiplied
# by at the start. Found by trying, docs/least_squares.md.
ATTEMPTS = ((0.1, 1.0), (1.0, 0.1), (0.01, 1.0), (1.0, 1e-3))
NEWTON = 5  # most Newton steps of a finish
FADED = 1e-6  # a column of J this much shorter than it was: its parameter has lost its influence


def search(
    problems: Problems, x: Tensor, loss: RobustLoss, box: Box | None, options: Options, watch: Watcher
) -> Progress:
    """Solve; where that ends in no minimum, again from the start in other ways, on half of the evaluations."""

    def attempt(problems: Problems, x: Tensor, box: Box | None, options: Options) -> Progress:
        return finish(problems, solve(problems, x, loss, box, options, watch), loss, box, options)

    if not options.restarts:
        return attempt(problems, x, box, options)
    few = options.max_nfev < 20 * len(ATTEMPTS)
    best = attempt(problems, x, box, options if few else replace(options, max_nfev=options.max_nfev // 2))
    given = x
    best, x, dead = escape(problems, given, best, loss, box, attempt, options)
    if few:
        return put_back(problems, given, best)
    share = options.max_nfev // 4 // len(ATTEMPTS)
    for factor, shift in ATTEMPTS:
        again = doubtful(problems, x, best, dead, loss, box, options).nonzero().squeeze(-1)
        if not len(again) or bool((best.status == STOPPED).any()):
            break
        old, part = best[again], box and box[again]
        x0 = torch.where(faded(old, loss, options) & ~dead[again], shift * x[again], x[again])
        x0 = x0 if part is None else x0.clamp(part.lower, part.upper)
        new = attempt(problems[again], x0, part, replace(options, max_nfev=share, factor=factor))
        still = doubtful(problems[again], x[again], new, dead[again], loss, part, options)
        limit = torch.where(still, 1 - 1e-9, 1 + 1e-9) * old.scale
        best = best.merge(again, better_of(old, new, limit, again))
    # What ran out of its share goes on from where it is, with what is left. So does what is stuck with a D that is that
    # of columns which have faded since: ‖Dp‖ ≤ Δ held their parameters, and a new start measures D anew.
    while not bool((best.status == STOPPED).any()):
        stale = (faded(best, loss, options, STALE) & (best.J != 0).any(1)).any(-1)
        going = (best.status == LIMIT) | ((best.status == STUCK) & stale)
        again = (going & (best.nfev < options.max_nfev - 1)).nonzero().squeeze(-1)
        if not len(again):
            break
        old, part, left = best[again], box and box[again], options.max_nfev - int(best.nfev[again].max())
        new = attempt(problems[again], old.x, part, replace(options, max_nfev=left))
        best = best.merge(again, better_of(old, new, old.scale, again))
    return put_back(problems, given, best)


def put_back(problems: Problems, x0: Tensor, s: Progress) -> Progress:
    """With parameters that change no residual where they were at the start: an attempt may have moved them."""
    idle = (s.J == 0).all(1) & (s.x != x0)
    for j in idle.any(0).nonzero().flatten().tolist():
        x = torch.where(idle & (torch.arange(x0.shape[-1], device=x0.device) == j), x0, s.x)
        same = (problems.residuals(x) == s.f).all(-1, keepdim=True)
        s = replace(s, x=torch.where(same, x, s.x), nfev=s.nfev + idle[:, j])
    return s


def faded(s: Progress, loss: RobustLoss, options: Options, share: float = FADED) -> Tensor:
    """Which parameters have lost their influence, all but this share of it: (B, n)."""
    if options.x_scale is not None:  # D remembers nothing
        return torch.zeros_like(s.x, dtype=torch.bool)
    return norm(loss.corrected(s.f, s.J)[1], 1) <= share * s.D


def doubtful(
    problems: Problems, x0: Tensor, s: Progress, dead: Tensor, loss: RobustLoss, box: Box | None, options: Options
) -> Tensor:
    """No minimum, or one at infinity, or one where parameters have become alike and J has lost its rank: (B,)."""
    found = (s.status != BAD) & ((s.status <= 0) | (faded(s, loss, options) & ~dead).any(-1))
    index = (~found & (s.factor.condition > ALIKE) & (s.f.shape[-1] >= s.x.shape[-1])).nonzero().squeeze(-1)
    if len(index):
        found[index] = lost_rank(problems[index], x0[index], s[index], loss, box)
    return found


def lost_rank(problems: Problems, x0: Tensor, s: Progress, loss: RobustLoss, box: Box | None) -> Tensor:
    """Where J has no full rank: whether it had at the start, and neither cost nor Hessian says minimum: (B,)."""
    f, J = problems.at_start(x0)
    first = QRFactor.of(*reversed(loss.corrected(f, J)))
    lost = (first.condition <= ALIKE) & (s.scale > NOUGHT * loss.scale(f))
    if box is None and loss.rho is None and problems.exact:
        with suppress(NoSecondDerivative):
            value = torch.linalg.eigvalsh(scaled_hessian(problems, s, loss).nan_to_num(0.0, 0.0, 0.0))
            lost &= value[:, 0] <= 1e-9 * value[:, -1]
    return lost


def finish(problems: Problems, s: Progress, loss: RobustLoss, box: Box | None, options: Options) -> Progress:
    """Newton's method with the whole Hessian JᵀJ + Σfᵢ∇²fᵢ, where the cost says no more and J cannot finish.

    With large residuals Gauss-Newton steps need not contract: the cost then tells x to half of the digits only. A step
    counts if it makes the gradient smaller.
    """
    asked = (
        options.ftol > 10 * torch.finfo(s.x.dtype).eps
    )  # the caller has said what decrease is too small to go on for
    if asked or box is not None or loss.rho is not None or not problems.exact:
        return s
    index = ((s.status == FTOL) | (s.status == STUCK)) & (s.cosine > options.gtol) & (s.factor.slope < 1e-3)
    index &= s.nfev + NEWTON <= options.max_nfev
    for _ in range(NEWTON):
        which = index.nonzero().squeeze(-1)
        if not len(which):
            break
        some, old = problems[which], s[which]
        try:
            x = old.x + newton(some, old)
        except NoSecondDerivative:
            break
        there = linearised(x, some.residuals(x), some.jacobian(x), old.D, loss, None, options)
        slope = there.factor.slope
        better = Subset((slope < 0.9 * old.factor.slope) & (there.scale <= (1 + 1e-9) * old.scale))  # false for a NaN
        status = torch.where(better.mask & (slope <= STATIONARY), FTOL, old.status)
        new = replace(old.at(better, better.of(there)), status=status, nfev=old.nfev + 1, njev=old.njev + 2)
        s = s.merge(which, new)  # a Jacobian more, and a Hessian as another
        index[which] = better.mask & (relative_change(old.x, x - old.x) > options.xtol)
    return s


def newton(problems: Problems, s: Progress) -> Tensor:
    """−(JᵀJ + Σfᵢ∇²fᵢ)⁻¹Jᵀf, zero where that is not positive definite: (B, n)."""
    d, H = s.D.unsqueeze(-1), scaled_hessian(problems, s, RobustLoss())
    L, failed = torch.linalg.cholesky_ex(H)
    p = -torch.cholesky_solve(s.J.mT @ s.f.unsqueeze(-1) / d, L) / d
    return torch.where(failed.unsqueeze(-1) > 0, 0, p.squeeze(-1))
