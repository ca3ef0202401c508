"""What curve_fit returns: parameters, their covariance, and bands around the curve."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .arrays import gathered, like, tensor
from .curve import Curve, independent
from .problems import build
from .result import MESSAGES, Result
from .student import quantile
from .tracked import readable, refuse


@dataclass(frozen=True, repr=False)
class CurveFit:
    """The outcome of curve_fit; unpacks and is indexed as the pair popt, pcov."""

    popt: Any  # (n,), or (B, n)
    pcov: Any  # (n, n), or (B, n, n)
    result: Result
    f: Callable[..., Any]
    dof: Any  # points with weight less free parameters; of many fits (B,)
    noise: Any  # standard deviation of a point with sigma = 1; estimated unless absolute_sigma
    known: bool  # sigma is absolute
    weighted: bool  # sigma or weights were given
    batched: bool
    x_ndim: int | None  # dimensions of the x that f takes; None where x is no array

    def __iter__(self) -> Iterator[Any]:
        return iter((self.popt, self.pcov))

    def __getitem__(self, index: int | slice) -> Any:
        return (self.popt, self.pcov)[index]

    def __len__(self) -> int:
        return 2

    def __repr__(self) -> str:
        return f"CurveFit(popt={self.popt}, perr={self.perr})"

    @property
    def success(self) -> Any:
        """Whether a minimum was found; of many fits (B,)."""
        return self.result.success

    @property
    def status(self) -> Any:
        """Why the fit ended, in the numbers of least_squares; of many (B,)."""
        return self.result.status

    @property
    def message(self) -> str | list[str]:
        """The same in words; of many fits a list, and result.message counts them."""
        return [MESSAGES[status] for status in self.status.tolist()] if self.batched else self.result.message

    @property
    def perr(self) -> Any:
        """Standard errors of the parameters."""
        return like(tensor(self.pcov).diagonal(dim1=-2, dim2=-1).sqrt(), self.popt)

    def predict(self, x: Any) -> Any:
        """The curve at x; of many fits (B, points), at an x for all of them or at one for each."""
        return like(self._curve(x)[0], self.popt)

    def confidence_band(self, x: Any, level: float = 0.95) -> tuple[Any, Any]:
        """Lower and upper limit of the curve at x: where it lies with this probability, point by point.

        f ± t·√diag(J·pcov·Jᵀ)     J = ∂f/∂p at x; Student's t, normal where sigma is absolute
        """
        y, variance = self._curve(x)
        return self._band(y, variance, level)

    def prediction_band(self, x: Any, level: float = 0.95, sigma: Any = None) -> tuple[Any, Any]:
        """Lower and upper limit of a new observation at x. `sigma` is its own, in the units of the fit's sigma."""
        if sigma is None and self.weighted:
            raise ValueError(
                "the fit has sigma or weights: pass sigma of the new observations, or 1/√weight: "
                "prediction_band(x, sigma=sigma)"
            )
        y, variance = self._curve(x)
        noise = tensor(self.noise).to(y).unsqueeze(-1) if self.batched else tensor(self.noise).to(y)
        own = noise * (1.0 if sigma is None else gathered(sigma).to(y))
        return self._band(y, variance + own**2, level)

    def _band(self, y: Tensor, variance: Tensor, level: float) -> tuple[Any, Any]:
        if not 0 < level < 1:
            raise ValueError(f"level={level!r}: a probability between 0 and 1, such as 0.95")
        dof = tensor(self.dof).to(y)
        if not self.known and bool((dof < 1).all()):
            raise ValueError("no band: as many parameters as points leave nothing to estimate the noise from")
        half = self._factor((1 + level) / 2, dof) * variance.sqrt()
        return like(y - half, self.popt), like(y + half, self.popt)

    def _factor(self, p: float, dof: Tensor) -> Tensor:
        """The quantile that a band is standard deviations wide: a number, or (B, 1). Where there is no dof its variance
        is infinite."""
        of = {nu: quantile(p, math.inf if self.known else max(nu, 1)) for nu in set(dof.flatten().tolist())}
        return dof.new_tensor([of[nu] for nu in dof.flatten().tolist()]).reshape(*dof.shape, -1)

    def _curve(self, x: Any) -> tuple[Tensor, Tensor]:
        """f and diag(J·pcov·Jᵀ): (k,) or (B, k)."""
        refuse("Call f(x, *popt) itself, which has one, or pass x.detach()", x=x)
        p, cov = tensor(self.popt), tensor(self.pcov)
        p, cov = (p, cov) if self.batched else (p.unsqueeze(0), cov.unsqueeze(0))
        at = independent(x, p)
        own: tuple[Tensor, ...] = ()
        if isinstance(at, Tensor) and self.x_ndim is not None and at.ndim > self.x_ndim:
            if not self.batched or at.ndim > self.x_ndim + 1 or len(at) != len(p):
                wanted = f"{self.x_ndim} dimensions" + f", or {len(p)} such x, one for each fit" * self.batched
                raise ValueError(f"x has shape {tuple(at.shape)}: it must have {wanted}, as xdata has")
            own = (at,)
        curve = Curve(self.f, at, self.x_ndim)
        far = torch.full_like(p, math.inf)
        numpy = not isinstance(self.popt, Tensor)
        with torch.no_grad():
            problems, _ = build(curve, p, "auto", own, {}, self.batched, -far, far, numpy)
            if numpy:
                readable(p)  # as the curve must be
            y, J = problems.raw(p), problems.jacobian(p)
        unknown = ~cov.isfinite().flatten(1).all(-1, keepdim=True)
        variance = torch.where(unknown, math.inf, ((J @ cov) * J).sum(-1).clamp(min=0))
        return (y, variance) if self.batched else (y[0], variance[0])
