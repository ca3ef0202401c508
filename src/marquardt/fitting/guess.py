"""Where a fit of a curve starts if nobody says so."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .arguments import limits
from .arrays import floating


def guess(f: Callable[..., Any], p0: Any, bounds: Any, y: Tensor, batched: bool) -> Tensor:
    """The start, as given or from the bounds: (n,), or (B, n)."""
    named, most = _parameters(f)
    if p0 is not None:
        p = floating("p0", p0).to(y.device)
        p = p.reshape(-1) if p.ndim == 0 else p
        if not sum(name.default is name.empty for name in named) <= p.shape[-1] <= most:
            takes = f"{len(named)} parameters after x ({', '.join(name.name for name in named)})"
            way = "pass a number for each of them"
            if len(named) == 1:  # a function of one vector, as of least_squares
                way += "; it is called as f(x, *p), so for an f(x, p) of a vector pass lambda x, *p: f(x, p)"
            raise ValueError(f"p0 has length {p.shape[-1]}, f takes {takes}: {way}")
        if p.ndim > 1 + batched or 0 in p.shape:
            wanted = "(n,), or a row for each data set" if batched else "a number for each parameter, (n,)"
            raise ValueError(f"p0 has shape {tuple(p.shape)}: pass {wanted}")
        if not bool(p.isfinite().all()):
            raise ValueError(f"p0 is not finite: {p.tolist()}")
        if batched and p.ndim == 2 and len(p) != len(y):
            raise ValueError(f"p0 has shape {tuple(p.shape)} for {len(y)} data sets: pass (n,), or a row for each set")
        return p.expand(len(y), -1).clone() if batched and p.ndim == 1 else p
    if not named:
        raise ValueError(
            "p0 is needed: the signature of f does not say how many parameters there are after x, as f(x, a, b) does"
        )
    p = y.new_ones(len(y) if batched else 1, len(named))
    low, high = limits(bounds, p)
    p = torch.where(low.isfinite() & high.isfinite(), (low + high) / 2, p)
    p = torch.where(low.isfinite() & ~high.isfinite(), low + 1, p)
    p = torch.where(~low.isfinite() & high.isfinite(), high - 1, p)
    return p if batched else p[0]


def names(f: Callable[..., Any], n: int) -> list[str]:
    """Of the n parameters that are fitted, as f has them, or by number."""
    known = [name.name for name in _parameters(f)[0]]
    return known[:n] if len(known) >= n else [f"parameter {j}" for j in range(n)]


def _parameters(f: Callable[..., Any]) -> tuple[list[inspect.Parameter], float]:
    """What f takes after x as far as it is named, and how many in all."""
    try:
        names = inspect.signature(f).parameters.values()
    except (TypeError, ValueError):  # a function of another language
        return [], math.inf
    positional = [name for name in names if name.kind in (name.POSITIONAL_ONLY, name.POSITIONAL_OR_KEYWORD)]
    return positional[1:], math.inf if any(name.kind == name.VAR_POSITIONAL for name in names) else len(positional) - 1
