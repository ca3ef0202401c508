"""Named assemblies of parts."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from .curvature import Auto, Hessian, Kronecker, MatrixFree
from .jacobian.objective import Empirical, Exact, Sampled
from .losses import CrossEntropy, Loss, SquaredError, resolve
from .optimizer import LM
from .parts.direction import AdaptiveMomentum, Identity, MaxDiagonal, MeanEigenvalue, QuadraticMomentum
from .parts.judging import Backtracking, Constant, Decrease, GainRatio, Grid, RelativeDecrease, TenFold, Uphill


def _in_sums(loss: Any) -> Loss:
    """Squared error as the authors take it, ½Σr²: λ, δP and D₀ carry its units. Reported as the user has it."""
    loss = resolve(loss)
    return replace(loss, reduction="sum", factor=0.5, reported=loss) if isinstance(loss, SquaredError) else loss


def paper(model: torch.nn.Module, loss: Any, **parts: Any) -> LM:
    """The paper's LM: max-diagonal damping, adaptive momentum and learning-rate line search; uphill acceptance too,
    unless the loss is a sum of squares (`Loss.sum_of_squares`).

    So the paper has it: three parts on its regression, all four on its classification. What it does not print was
    settled by measurement, docs/paper/choices.md: λ by the gain ratio, δP (in the units of the root of the loss) and
    its cap, exact rows.

    Args:
        model: what is trained.
        loss: as `mq.LM` takes it.
        parts: keywords of `mq.LM`, in the place of those of the preset.

    Returns:
        An `mq.LM` of these parts.

    >>> opt = mq.presets.paper(model, "mse")
    >>> step = opt.step(x, y)
    """
    loss = _in_sums(loss)
    ours: dict[str, Any] = {
        "curvature": Auto(),
        "rows": Exact(),
        "damping": MaxDiagonal(),
        "schedule": GainRatio(),
        "momentum": AdaptiveMomentum(dP=0.6 if loss.sum_of_squares else 1.0, cap=True),
        "acceptance": Decrease() if loss.sum_of_squares else Uphill(),
        "line_search": Grid(),
        "average": None,
    }
    return LM(model, loss, **{**ours, **parts})


def authors_code(model: torch.nn.Module, loss: Any, **parts: Any) -> LM:
    """What the authors' code does if the paper is silent or says something else: λ falls only after a decrease by three
    quarters, δP is fixed, the search goes along the step with its momentum and takes its best point even uphill, and
    cross-entropy has empirical rows. Uphill acceptance on every loss.

    Args:
        model: what is trained.
        loss: as `mq.LM` takes it.
        parts: keywords of `mq.LM`, in the place of those of the preset.

    Returns:
        An `mq.LM` of these parts.

    >>> opt = mq.presets.authors_code(model, "mse")
    >>> step = opt.step(x, y)
    """
    loss = resolve(loss)
    ours: dict[str, Any] = {
        "rows": Empirical() if isinstance(loss, CrossEntropy) else Exact(),
        "schedule": RelativeDecrease(),
        "momentum": AdaptiveMomentum(),
        "acceptance": Uphill(),
        "line_search": Grid(0.01, 2.0, 0.05, power=3.0, along_step=True, uphill=True),
    }
    return paper(model, loss, **{**ours, **parts})


def vanilla(model: torch.nn.Module, loss: Any, **parts: Any) -> LM:
    """Levenberg's LM: identity damping, λ/10 after success and 10λ after failure.

    Args:
        model: what is trained.
        loss: as `mq.LM` takes it.
        parts: keywords of `mq.LM`, in the place of those of the preset.

    Returns:
        An `mq.LM` of these parts.

    >>> opt = mq.presets.vanilla(model, "mse")
    >>> step = opt.step(x, y)
    """
    ours: dict[str, Any] = {
        "curvature": Auto(),
        "rows": Exact(),
        "damping": Identity(),
        "schedule": TenFold(),
        "momentum": None,
        "acceptance": Decrease(),
        "line_search": None,
        "average": None,
    }
    return LM(model, _in_sums(loss), **{**ours, **parts})


def gauss_newton(model: torch.nn.Module, loss: Any, **parts: Any) -> LM:
    """λ = 0, with a line search after a failed step.

    Args:
        model: what is trained.
        loss: as `mq.LM` takes it.
        parts: keywords of `mq.LM`, in the place of those of the preset.

    Returns:
        An `mq.LM` of these parts.

    >>> opt = mq.presets.gauss_newton(model, "mse")
    >>> step = opt.step(x, y)
    """
    return vanilla(model, loss, **{"schedule": Constant(0.0), "line_search": Grid(), **parts})


def hessian_free(model: torch.nn.Module, loss: Any, **parts: Any) -> LM:
    """Martens' Hessian-free optimisation: conjugate gradients, ⅔λ at a gain ratio above ¾ and 3/2·λ below ¼.

    Gauss-Newton products; `curvature=MatrixFree(hessian=True)` takes those of the full Hessian.

    Args:
        model: what is trained.
        loss: as `mq.LM` takes it.
        parts: keywords of `mq.LM`, in the place of those of the preset.

    Returns:
        An `mq.LM` of these parts.

    >>> opt = mq.presets.hessian_free(model, "mse")
    >>> step = opt.step(x, y)
    """
    ours: dict[str, Any] = {
        "curvature": MatrixFree(),
        "rows": None,
        "schedule": GainRatio(down=2 / 3, up=1.5, slow_down=2 / 3, slow_up=1.5, floor=1e-12),
        "line_search": Backtracking(),
    }
    return vanilla(model, loss, **{**ours, **parts})


def newton(model: torch.nn.Module, loss: Any, **parts: Any) -> LM:
    """Newton's method on the full Hessian; λ is raised until it is positive definite and the step goes down.

    Args:
        model: what is trained.
        loss: as `mq.LM` takes it.
        parts: keywords of `mq.LM`, in the place of those of the preset.

    Returns:
        An `mq.LM` of these parts.

    >>> opt = mq.presets.newton(model, "mse")
    >>> step = opt.step(x, y)
    """
    ours = {"curvature": Hessian(), "rows": None, "line_search": Backtracking(), "attempts": 10}
    return vanilla(model, loss, **{**ours, **parts})


def kfac(model: torch.nn.Module, loss: Any, **parts: Any) -> LM:
    """Martens & Grosse's KFAC: Kronecker factors from one sampled row per sample, averaged over the batches, factored
    damping with λ by the gain ratio, and the lengths of the step and of its momentum by the model of the batch.

    Args:
        model: what is trained.
        loss: as `mq.LM` takes it.
        parts: keywords of `mq.LM`, in the place of those of the preset.

    Returns:
        An `mq.LM` of these parts.

    >>> opt = mq.presets.kfac(model, "mse")
    >>> step = opt.step(x, y)
    """
    ours: dict[str, Any] = {
        "curvature": Kronecker(),
        "rows": Sampled(1),
        "damping": MeanEigenvalue(),
        "schedule": GainRatio(floor=0.3),  # factors that are averaged fit less noise than the rows of a batch
        "momentum": QuadraticMomentum(),
        "acceptance": Decrease(),
        "line_search": Backtracking(along_step=True),  # its length is found; that of the plain step is not
        "average": None,
    }
    return LM(model, loss, **{**ours, **parts})
