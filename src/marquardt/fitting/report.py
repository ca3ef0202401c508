"""What a fit says on its way and at its end: lines of text, the user's callback, the result."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from .bounds import Box
from .problems import Problems
from .progress import RUNNING, Progress
from .result import Result, describe
from .robust import RobustLoss


@dataclass(frozen=True)
class Report:
    loss: RobustLoss
    batched: bool
    numpy: bool
    verbose: int
    callback: Callable[[Result], Any] | None

    def __call__(self, s: Progress, box: Box | None, nit: int) -> None:
        """After an iteration."""
        if self.verbose == 2:
            if nit == 0:
                print(f"{'iteration':>9} {'running':>9} {'evaluations':>11} {'cost':>13} {'cosine':>10}")
            running = int((s.status == RUNNING).sum())
            print(f"{nit:>9} {running:>9} {_brief(s.nfev):>11} {_brief(s.scale**2 / 2):>13} {_brief(s.cosine):>10}")
        if self.callback is not None:
            s = s.copy()  # a recording goes on in the same memory
            self.callback(describe(s, self.loss, box, s.f, [f"Iteration {nit}."], self.batched, self.numpy))

    def end(self, s: Progress, box: Box | None, problems: Problems, note: str) -> Result:
        """`note` says how the Jacobian comes about, if that is worth a word."""
        n, notes = s.x.shape[-1], [note] if note else []
        m = problems.m if problems.weight is None else int((problems.weight != 0).sum(-1).min())
        if m < n:
            notes.append(f"There are fewer residuals ({m}) than parameters ({n}): the minimum is not unique.")
        result = describe(s, self.loss, box, problems.raw(s.x), notes, self.batched, self.numpy)
        if self.verbose:
            cost, nfev, njev = map(_brief, (s.scale**2 / 2, s.nfev, s.njev))
            print(f"{result.message}\ncost {cost}, {nfev} evaluations, {njev} Jacobians")
        return result


def _brief(values: Tensor) -> str:
    """Of many problems the median."""
    value = values.double().median().item() if len(values) > 1 else values.item()
    return f"{value:.6g}"
