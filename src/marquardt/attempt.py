"""One λ of a step: propose, judge; if that fails, search along the line."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from .curvature.solve import FactorizationError
from .deferred import floats
from .iteration import FAILED, Ending, Found, Judgement, Matrices, Parts, Proposal, Start, judge, propose
from .jacobian.linearization import Linearization
from .model.parameters import Parameters
from .trials import Trials


def attempt(
    parts: Parts, lin: Linearization, matrices: Matrices, start: Start, lam: float, lr: float, notes: list[str]
) -> Ending:
    try:
        proposal = propose(parts, lin, matrices, lam, lr, start.old, start.same_data, start.doubt)
    except FactorizationError as error:
        blame_gradient(lin.parameters, matrices.G.gradient)
        notes.append(str(error))
        return Ending("rejected", lr, None, start.level.f, None, FAILED)
    finally:
        notes += matrices.G.notes
        matrices.G.notes.clear()
    d, readings = proposal.d, proposal.readings
    found = readings.read(floats(*readings.tensors()))  # one synchronisation for all that the judgement needs
    if not math.isfinite(found.new_loss):
        notes.append(f"the trial loss is {found.new_loss}")
    judgement = judge(parts, start, found, lam, lr, torch.finfo(d.dtype).eps)
    if found.new_loss == start.level.f and lin.parameters.coarse:  # rounded to the same weights: θ goes on, they follow
        judgement = judgement._replace(rule="decrease")
    if judgement.rule is not None:
        return Ending(judgement.rule, lr, d, found.new_loss, found, judgement, found.length)
    if parts.line_search is not None and lr > 0 and judgement.judged and start.doubt == 1:
        end = searched(parts, lin, proposal, found, judgement, start.level.f, lr)
        if end is not None:
            return end
    return Ending("rejected", lr, None, start.level.f, found, judgement, found.length)


def searched(
    parts: Parts, lin: Linearization, proposal: Proposal, found: Found, judgement: Judgement, f: float, lr: float
) -> Ending | None:
    """A point on the line of the step, or of the plain one, within the radius."""
    assert parts.line_search is not None
    line = proposal.d if parts.line_search.along_step else proposal.plain
    tried = (lr, found.new_loss) if line is proposal.d else None
    (length,) = floats(lin.parameters.norm(line))
    # Both were cut back with this lr, so that rounding does not leave it out.
    longest = math.inf if parts.radius is None else max(lr, parts.radius / length if length else math.inf)

    def along(rates: Sequence[float]) -> list[float]:
        inside = [rate for rate in rates if rate <= longest]
        losses = iter(Trials(lin).losses(line, inside) if inside else [])
        return [next(losses) if rate <= longest else math.inf for rate in rates]

    point = parts.line_search.search(along, f, lr, tried)
    return None if point is None else Ending("search", point[0], line, point[1], found, judgement, length)


def blame_gradient(parameters: Parameters, g: Tensor) -> None:
    """A gradient that is not finite is an error, not a matter of λ."""
    for name, part in zip(parameters.names, parameters.split(g), strict=True):
        if not bool(parameters.finite(part)):
            raise ValueError(
                f"the gradient of parameter {name!r} is not finite, though the loss is; see its layer (if it computes "
                "in float16, numbers end at 65504: take bfloat16, whose range is that of float32)"
            )
