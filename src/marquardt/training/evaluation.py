"""The loss and the outputs of a model in eval mode, which do not train it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import TypeVar

import torch
from torch import Tensor, nn

from ..diagnosis import Diagnosis, diagnosed
from ..jacobian.objective import Objective
from ..jacobian.passes import Known, Pass
from ..losses import Loss
from ..model.anatomy import Chance, rng_state, set_rng_state
from ..model.batch import Batch
from ..model.checks import FAILURES, explained
from ..ranks import ALONE, Ranks
from ..surroundings import back_afterwards, unless_interrupted

T = TypeVar("T")


def evaluated(model: nn.Module, loss: Loss, batches: Iterable[Batch], ranks: Ranks = ALONE) -> float:
    """f over all batches, of all ranks, in the units in which it is reported, in eval mode."""
    return _in_eval_mode(model, lambda: _value(model, loss, batches, ranks))


def diagnosis(objective: Objective, batches: Iterable[Batch]) -> Diagnosis:
    """Of the model in eval mode."""
    with evaluating(objective.model):
        return diagnosed(objective, batches)


@contextmanager
def of_validation() -> Iterator[None]:
    """What is wrong with the validation set is said of it."""
    try:
        yield
    except (TypeError, ValueError) as error:
        if type(error) not in (TypeError, ValueError):  # others may take something else than words
            raise
        raise type(error)(f"the validation set: {error}") from error


def outputs(model: nn.Module, loss: Loss, batch: Batch) -> list[float] | None:
    """‖z‖ and Σz·cos(place) of the outputs z that have a loss, in eval mode and with the same random numbers every
    time; None if the model works in train mode alone."""
    objective = Objective(model, loss, list(model.parameters()))

    def called() -> Tensor:
        torch.manual_seed(0)
        return objective.taken(objective.called(batch.inputs), batch)[1]

    try:
        values = _in_eval_mode(model, called).detach().double().flatten()
    except Exception as error:
        unless_interrupted(error)
        return None
    places = torch.arange(len(values), dtype=torch.float64, device=values.device)
    return [float(values.norm()), float(values @ places.cos())]


def _in_eval_mode(model: nn.Module, call: Callable[[], T]) -> T:
    with evaluating(model):
        try:
            with torch.no_grad():
                return call()
        except RuntimeError as error:
            if "does not require grad" not in str(error):
                raise
        with torch.enable_grad():  # the model differentiates itself
            return call()


def _value(model: nn.Module, loss: Loss, batches: Iterable[Batch], ranks: Ranks) -> float:
    objective = Objective(model, loss, list(model.parameters()))
    if loss.surveys:
        found = [Pass(objective, batch, Known(), Chance()).sums() for batch in batches]
        objective = objective.knowing(ranks.sum(torch.stack(found).sum(0)))
    total = normaliser = 0.0
    for batch in batches:
        value, weight = _totals(objective, batch)
        total, normaliser = total + float(value), normaliser + float(weight)
    if ranks.several:
        device = next(model.parameters()).device
        total, normaliser = ranks.sum(torch.tensor([total, normaliser], dtype=torch.float64, device=device)).tolist()
    if not normaliser > 0:
        raise ValueError("the total weight of the validation set is 0: every target has weight 0 or is ignored")
    return loss.report(total * loss.scale(normaliser), normaliser)


def _totals(objective: Objective, batch: Batch) -> tuple[Tensor, Tensor]:
    """Σwℓ and what the mean divides by: (), ()"""
    try:
        raw = objective.called(batch.inputs)
    except FAILURES as error:
        reason = explained(error, objective.model, batch, objective.parameters.tensors[0])
        if reason is None:
            raise
        raise reason from error
    bound, z = objective.taken(raw, batch)
    z = z.detach()
    bound.loss.check(z, batch.targets, batch.weight, part=True)
    return bound.value(z, batch).double(), bound.loss.normaliser(z, batch.targets, batch.weight)


def evaluating(model: nn.Module) -> back_afterwards:
    """In eval mode; every module is then in the mode that it had, and random numbers go on as if nothing was drawn."""
    device = next(model.parameters()).device
    modes = [(m, m.training) for m in model.modules()]
    cpu, own = torch.get_rng_state(), rng_state(device)

    def back() -> None:
        for m, mode in modes:
            m.training = mode
        torch.set_rng_state(cpu)
        if own is not None:
            set_rng_state(device, own)

    return back_afterwards(back, model.eval)
