"""What a fit returns."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor

from .problems import Problems
from .solve import BAD, BOTH, FTOL, GTOL, LIMIT, RUNNING, STOPPED, STUCK, XTOL, Progress

MESSAGES = {
    RUNNING: "The fit is under way.",
    STUCK: "No step makes the cost smaller, though the point is not stationary.",
    STOPPED: "`callback` raised StopIteration.",
    BAD: "The residuals or their Jacobian are not finite at the start.",
    LIMIT: "The maximum number of function evaluations is reached.",
    GTOL: "The residuals are orthogonal to the Jacobian to within `gtol`.",
    FTOL: "The cost cannot be made smaller, to within `ftol` or the precision of the arithmetic.",
    XTOL: "The parameters are known to within `xtol`.",
    BOTH: "Both `ftol` and `xtol` are reached.",
}


@dataclass(frozen=True, repr=False)
class Result:
    """SciPy's fields. Of many problems each has a leading dimension, except `message`.

    `fun` is what the function returned; `jac` and `grad` include weights and loss: `jac.T @ jac` approximates the
    Hessian of the cost. `status` is SciPy's, and −3 where no step succeeds at a point that is not stationary.
    """

    x: Any
    cost: Any
    fun: Any
    jac: Any
    grad: Any
    optimality: Any  # largest gradient component among the variables that are not held by a bound
    active_mask: Any  # −1 at a lower bound, 1 at an upper one, 0 between
    nfev: Any
    njev: Any
    status: Any
    message: str
    success: Any

    def __getitem__(self, name: str) -> Any:
        if name not in self.keys():
            raise KeyError(name)
        return getattr(self, name)

    def __iter__(self) -> Iterator[str]:
        return iter(self.keys())

    def keys(self) -> list[str]:
        return [field.name for field in fields(self)]

    def __repr__(self) -> str:
        return "\n".join(f"{name:>12}: {str(self[name]).replace(chr(10), chr(10) + ' ' * 14)}" for name in self.keys())


def describe(problems: Problems, s: Progress, raw: Tensor, notes: list[str], numpy: bool) -> Result:
    """The result of what has been reached; `raw` are the residuals without weights."""
    ft, J = problems.loss.corrected(s.f, s.J)
    g = (J.mT @ ft.unsqueeze(-1)).squeeze(-1)  # (B, n)
    box = problems.box
    held = torch.zeros_like(s.x, dtype=torch.bool) if box is None else box.held(s.x, g)
    side = torch.zeros_like(s.x, dtype=torch.int64) if box is None else box.side(s.x)
    values = {  # copies, where they may be what the functions were given
        "x": s.x, "cost": 0.5 * s.scale**2, "fun": raw.clone(), "jac": J.clone(), "grad": g,
        "optimality": torch.where(held, 0, g).abs().amax(-1), "active_mask": side,
        "nfev": s.nfev, "njev": s.njev, "status": s.status, "success": s.status > 0,
    }  # fmt: skip
    if problems.batched:
        text = f"{int((s.status > 0).sum()):,} of {len(s.x):,} problems solved."
        for code, message in MESSAGES.items():
            count = int((s.status == code).sum())
            text += f" {count:,}: {message}" if count else ""
        out: dict[str, Any] = {k: v.cpu().numpy() if numpy else v for k, v in values.items()}
    else:
        text = MESSAGES[int(s.status)]
        out = {k: v[0] for k, v in values.items()}
        out = {k: v.item() if v.ndim == 0 else v.cpu().numpy() if numpy else v for k, v in out.items()}
    return Result(message=" ".join([text, *notes]), **out)


@dataclass(frozen=True)
class Report:
    """Lines of text and the user's callback after each iteration, and the result at the end."""

    numpy: bool
    verbose: int
    callback: Callable[[Result], Any] | None

    def __call__(self, problems: Problems, s: Progress, nit: int) -> None:
        """After an iteration."""
        if self.verbose == 2:
            if nit == 0:
                print(f"{'iteration':>9} {'running':>9} {'evaluations':>11} {'cost':>13} {'cosine':>10}")
            running = int((s.status == RUNNING).sum())
            print(f"{nit:>9} {running:>9} {_brief(s.nfev):>11} {_brief(s.scale**2 / 2):>13} {_brief(s.cosine):>10}")
        if self.callback is not None:
            s = s.copy()  # a recording goes on in the same memory
            self.callback(describe(problems, s, s.f, [f"Iteration {nit}."], self.numpy))

    def end(self, problems: Problems, s: Progress, note: str) -> Result:
        """`note` says how the Jacobian comes about, if that is worth a word."""
        n, notes = s.x.shape[-1], [note] if note else []
        m = problems.m if problems.weight is None else int((problems.weight != 0).sum(-1).min())
        if m < n:
            notes.append(f"There are fewer residuals ({m}) than parameters ({n}): the minimum is not unique.")
        result = describe(problems, s, problems.raw(s.x), notes, self.numpy)
        if self.verbose:
            cost, nfev, njev = map(_brief, (s.scale**2 / 2, s.nfev, s.njev))
            print(f"{result.message}\ncost {cost}, {nfev} evaluations, {njev} Jacobians")
        return result


def _brief(values: Tensor) -> str:
    """Of many problems the median."""
    value = values.double().median().item() if len(values) > 1 else values.item()
    return f"{value:.6g}"
