"""A fit under way: what one step after the other does to it."""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import asdict
from functools import cached_property, partial
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn

from ..agreement import take_buffers
from ..arguments import users
from ..diagnosis import Diagnosis, diagnosed, without_grad
from ..jacobian.objective import Objective
from ..jacobian.passes import Facts, Pass
from ..losses import Loss
from ..model.anatomy import Chance, submodules
from ..model.batch import Batch
from ..model.checks import FAILURES, explained
from ..model.parameters import changing, put
from ..model.statistics import NOTHING, counting, estimated
from ..model.statistics import Seen as Batches
from ..optimizer import LM
from ..ranks import ALONE, OtherRank, RankError, Ranks, of
from ..sources import Indexed, Source, Stream
from ..step import Step
from ..surroundings import back_afterwards, surely, unless_interrupted
from ..uncertainty.evidence import Evidence
from ..uncertainty.expansion import in_eval_mode
from .batching import Batching, Order, cut, divisible, generators, own, set_generators, unchanged
from .history import Entry, History, Seen, Stops, restored, valid
from .regularisation import Regularisation, Regularised, plain

# Mini-batches between two validations, unless an epoch has fewer; and the most samples that a validation goes through
# for each sample that trains in the meantime: a forward pass is a small part of a step.
EVERY, TIMES = 10, 10

# A model that goes on must have the outputs that it had on a few samples, up to the rounding of another machine.
FEW, SAME = 16, 1e-3


class Training:
    """The model, its optimizer, its data, and all that is known after the last step."""

    def __init__(
        self, opt: LM, data: Source, validation: Source | None, plan: Batching, stops: Stops, seed: int,
        evidence: Evidence | None = None,
    ) -> None:  # fmt: skip
        self.opt, self.data, self.validation, self.plan, self.stops = opt, data, validation, plan, stops
        self.history, self.seen = History(), Seen()
        self.best: dict[str, Tensor] | None = None  # weights and buffers,
        self.best_evidence: Regularised | None = None  # and what was known with them
        self.first: dict[str, Tensor] | None = None  # the weights at the start, if another descent follows
        self.ranks = of(opt.group)
        self.order = Order(data, plan.size, seed, self.ranks) if plan.mini else None
        self.regularisation = None if evidence is None else Regularisation(evidence, opt, data)
        self.seen.settled = None if evidence is None else False
        self.elapsed = 0.0  # seconds of earlier processes
        self.began = time.perf_counter()
        self.words = plan.words
        self._validated = math.nan  # the last loss of the validation set
        self._seen = self._samples(seed)  # from which the statistics of BatchNorm are found

    @property
    def model(self) -> nn.Module:
        return self.opt.model

    @property
    def seconds(self) -> float:
        return self.elapsed + time.perf_counter() - self.began

    @property
    def evidence(self) -> Regularised | None:
        return None if self.regularisation is None else self.regularisation.last

    @property
    def reason(self) -> str | None:
        return self.stops.reason(self.history[-1] if len(self.history) else None, self.seen)

    def begin(self) -> None:
        """The weights before the first step are the best so far; what cannot be validated is refused here."""
        if self.regularisation is not None and self.regularisation.more:
            self.first = changing(self.model, self.opt.params)
        if self.validation is not None:
            with of_validation():
                loss, weights = self._validation_loss(), self._weights()
            self.seen.found(loss, 0)
            self.best, self.best_evidence = weights

    def step(self) -> Entry:
        """One step, judged on the validation set, and written down."""
        number = len(self.history) + 1
        epoch = 0 if self.order is None else self.order.epoch
        step = self._advance()
        loss = self._comparable(number, step)
        rule = self.regularisation
        if rule is not None:  # α and β anew every few accepted steps, or epochs
            rule.waited += step.accepted if self.order is None else self.order.epoch > epoch
            if step.converged or rule.waited >= rule.evidence.every:
                with self._view():
                    self._estimate(rule, step.new_loss, number)
        entry = self._entry(number, step)
        self.history.entries.append(entry)
        # The loss of one mini-batch would be chance.
        self.seen.loss = math.inf if self.plan.mini and number < EVERY else self._recent_loss()
        self.seen.steepest = max(self.seen.steepest, 0.0 if math.isnan(step.slope) else step.slope)
        self.seen.lam = self.opt.lam
        if number == 1 and self.validation is None:
            self.seen.least = step.loss  # of the weights at the start, which stay if no step is accepted
        if loss is not None:
            self._compare(loss, number)
        if rule is not None and self._descent_ends:  # another one begins from the first weights
            assert self.first is not None
            put(self.model, self.first)
            self.opt.begin_anew()
            rule.begin_anew()
            self.seen.begin_anew()
            self.first = self.first if rule.more else None
        return entry

    def _recent_loss(self) -> float:
        """Of the last step, or the mean of the last mini-batches."""
        some = self.history[-EVERY if self.plan.mini else -1 :]["loss"]
        return sum(some) / len(some) if some else math.nan

    @property
    def _descent_ends(self) -> bool:
        """Whether another descent follows now."""
        rule = self.regularisation
        return rule is not None and rule.more and (rule.settled or self.stops.impatient(self.seen))

    def _estimate(self, rule: Regularisation, objective: float, number: int) -> None:
        """Without a validation set the evidence decides which weights are the best: α and β may lead from good ones to
        others that take all for noise, or nothing."""
        judged = rule.update(objective) and self.validation is None
        self.seen.settled = rule.settled
        if judged and rule.last is not None:
            weights = self._weights()
            if self.seen.judged(rule.last.log_evidence, number):
                self.best, self.best_evidence = weights

    def _advance(self) -> Step:
        """A step on the next mini-batch, or on all data."""
        if self.plan.kind == "streamed":
            return self.opt.step_over(own(self.data, self.plan.size, self.ranks)[0])
        batch = self._whole if self.order is None else self.order.next()
        return self.opt.step(batch.inputs, batch.targets, batch.weight)

    @cached_property
    def _whole(self) -> Batch:
        """This rank's part of all samples"""
        batch = next(iter(own(self.data, None, self.ranks)[0])) if self.ranks.several else self.data.whole
        assert batch is not None
        return batch

    def _entry(self, number: int, step: Step) -> Entry:
        loss, objective = step.new_data_loss, step.new_loss
        if self.plan.mini:  # after the step it would show how well the batch is fitted, and not the data
            loss, objective = step.data_loss, step.loss
        epoch = number - 1 if self.order is None else self.order.epoch
        known, note = self.evidence, step.note
        if self._descent_ends:
            note += f"{'; ' if note else ''}the next step begins anew from the first weights"
        return Entry(
            number, epoch, loss, objective, self._validated, step.lam, step.slope, step.rule, step.lr, step.gain,
            self.ranks.agreed(self.seconds), math.nan if known is None else known.gamma, step.converged, note,
        )  # fmt: skip

    # The best weights.

    def _comparable(self, number: int, step: Step) -> float | None:
        """The loss to compare with the best one, if there is one after this step"""
        mini = self.plan.mini
        if self.validation is None:  # losses with different weight decay cannot be compared
            return step.new_loss if not mini and step.accepted and self.regularisation is None else None
        if number % self._every if mini else not step.accepted:
            self._validated = math.nan if mini else self._validated
            return None
        self._validated = self._validation_loss()
        return self._validated

    def _validation_loss(self) -> float:
        data = self.validation
        assert data is not None
        with self._view(), unchanged(data) if isinstance(data, Stream) else nullcontext():
            return self._evaluated(data)

    def _evaluated(self, data: Source) -> float:
        """By parts, if they can be shared; otherwise by every rank, and as rank 0 has it."""
        return self.ranks.agreed(evaluated(self.model, self.opt.loss, *own(data, self.plan.size, self.ranks)))

    @property
    def _every(self) -> int:
        """Mini-batches between two validations."""
        N, size = self.data.samples, self.plan.size
        held = None if self.validation is None else self.validation.samples
        if N is None or held is None or size is None:
            return EVERY
        return max(1, min(-(-N // size), max(EVERY, held // (TIMES * size))))

    @contextmanager
    def _view(self, averaged: bool | None = None) -> Iterator[None]:
        """The averaged weights on changing batches; on the same data the last ones, unless they are asked for. The
        statistics of BatchNorm, which lag far behind the last steps, are found at these weights: the same on all ranks,
        each of which has seen other samples. Before the first step they are those of the model."""
        averaged = self.plan.mini if averaged is None else averaged
        with self.opt.averaged() if averaged and self.opt.average is not None else nullcontext():
            if not (self._seen.inputs and len(self.history)):
                yield
                return
            with estimated(self.model, self._seen):
                if self.ranks.several:
                    take_buffers(self.ranks, self.model)
                yield

    def _samples(self, seed: int) -> Batches:
        """What BatchNorm in train mode is shown: all samples if they are one batch, otherwise of some batches, the same
        ones in every process that goes on with the fit."""
        if not counting(self.model):
            return NOTHING
        with unchanged(self.data):
            if isinstance(self.data, Indexed) and self.plan.size is not None:
                order = torch.randperm(self.data.samples, generator=torch.Generator().manual_seed(seed))
                parts = cut(order[: EVERY * self.plan.size], self.plan.size)
                batches: Iterable[Batch] = map(self.data.take, parts)
            else:
                whole = self.data.whole
                batches = islice(self.data.batches(), EVERY) if whole is None else [whole]
            return Batches(tuple(b.inputs for b in batches), tuple(m for m in submodules(self.model) if m.training))

    def _compare(self, loss: float, number: int) -> None:
        weights = self._weights() if loss < self.seen.least else (self.best, self.best_evidence)
        if self.seen.found(loss, number):  # no interrupt comes between this and the weights
            self.best, self.best_evidence = weights
        if self.validation is None:
            self.seen.fails = 0  # the loss of the data has stops of its own

    def _weights(self) -> tuple[dict[str, Tensor], Regularised | None]:
        """The weights that count, and what is known with them"""
        with self._view():
            return changing(self.model, self.opt.params), self.evidence

    def end(self) -> None:
        """The best weights to the model. Without a validation set, on changing batches, the last ones, averaged; if
        weight decay is found, they take part in what is compared."""
        last, rule = len(self.history), self.regularisation
        judged = self.validation is None and last > 0
        if judged and rule is not None and (rule.waited or rule.last is None):
            with self._view(averaged=True):
                self._estimate(rule, self.history[-1].objective, last)
        elif judged and rule is None and self.plan.mini:
            self.best, self.best_evidence = self._weights()
            self.seen.best_step = last
        if self.best is not None:
            surely(partial(put, self.model, self.best))
            if rule is not None:
                rule.put(self.best_evidence)
        if self.best is None or self.seen.best_step:
            with self._view(averaged=False):
                stays = changing(self.model, self.opt.params)
            put(self.model, stays)

    def loss(self) -> float:
        """Of the model as it is now, in eval mode and without weight decay: of the validation set if there is one,
        otherwise of the data, if a pass through them is short beside the fit; if not, the mean of the last steps."""
        if self.validation is not None:
            return self.seen.least
        if self.plan.mini and not self._soon_through:
            return self._recent_loss()
        try:
            with unchanged(self.data), self.ranks.together():
                return self._evaluated(self.data)
        except Exception as error:  # the fit is not lost by it
            unless_interrupted(error)
            if isinstance(error, RankError) and not isinstance(error, OtherRank):
                raise
            if self.ranks.rank == 0:
                warnings.warn(
                    f"the loss of the model in eval mode cannot be found ({type(error).__name__}: {error}): the loss "
                    "of the fit is that of its last steps", stacklevel=users(),
                )  # fmt: skip
            return self._recent_loss()

    def diagnosis(self) -> Diagnosis:
        """Why the model as it is now may have learnt little, from the data that have trained it; nothing is found if a
        pass through them is long beside the fit, or if no rank has them all."""
        apart = self.ranks.several and isinstance(self.data, Stream)
        if not len(self.history) or apart or (self.plan.mini and not self._soon_through):
            return Diagnosis()
        objective = Objective(self.model, self.opt.loss, self.opt.params)
        with unchanged(self.data), in_eval_mode(self.model, objective.parameters.device):
            return self.ranks.agreed(diagnosed(objective, self.data.batches(self.plan.size)))

    @property
    def _soon_through(self) -> bool:
        """Whether the data have at most a few times the batches that the fit had."""
        batches: Any = own(self.data, self.plan.size, self.ranks)[0]
        try:
            few = len(batches) <= TIMES * max(1, len(self.history))
        except TypeError:  # of unknown length, and perhaps without an end
            few = False
        return self.ranks.agreed(few)

    # As it is saved.

    def state(self) -> dict[str, Any]:
        return {
            "weights": changing(self.model, self.opt.params),
            "outputs": self._outputs(),
            "optimizer": self.opt.state_dict(),
            "best": self.best,
            "first": self.first,
            "best_evidence": plain(self.best_evidence),
            "history": self.history.columns(),
            "seen": asdict(self.seen),
            "order": None if self.order is None else self.order.state(),
            "evidence": None if self.regularisation is None else self.regularisation.state(),
            "validated": self._validated,
            "seconds": self.seconds,
        }

    def random(self) -> dict[str, Any]:
        """The random numbers of this process, now and when the epoch began."""
        began = {} if self.order is None else {"began": self.order.began}
        return {"generators": generators(self.data), **began}

    def check(self, state: dict[str, Any]) -> None:
        """With the saved weights the model must compute what it did, whatever its code is. Nothing changes by it."""
        before, then = changing(self.model, self.opt.params), state["outputs"]
        known, mine = self.model.state_dict(keep_vars=True), {id(p) for p in self.opt.params}
        trained = [name for name in before if id(known[name]) in mine]
        check_weights("weights", state["weights"], before, trained)
        for name in ("best", "first"):
            if state[name] is not None:
                check_weights(name, state[name], before, trained)
        with back_afterwards(partial(put, self.model, before)):
            put(self.model, state["weights"])
            now = self._outputs()
        if now is None or then is None:
            return
        if any(not abs(a - b) <= SAME * then[0] for a, b in zip(now, then, strict=True)):
            raise ValueError("it is of another model: with the saved weights its outputs are not what they were")

    def _outputs(self) -> list[float] | None:
        """‖z‖ and Σz·cos(place) of the outputs z of the first samples, if these are the same in every process, that
        have a loss: in eval mode and with the same random numbers every time; None if the model works in train mode
        alone."""
        each = [data for data in (self.data, self.validation) if isinstance(data, Indexed) and data.steady]
        if not each:
            return None
        first = each[0].take(torch.arange(min(FEW, each[0].samples))) if divisible(each[0]) else each[0].whole
        batch, objective = first, Objective(self.model, self.opt.loss, list(self.model.parameters()))
        assert batch is not None

        def called() -> Tensor:
            torch.manual_seed(0)
            return objective.taken(objective.called(batch.inputs), batch)[1]

        try:
            with in_eval_mode(self.model, objective.parameters.device):
                values = without_grad(called).detach().double().flatten()
        except Exception as error:
            unless_interrupted(error)
            return None
        places = torch.arange(len(values), dtype=torch.float64, device=values.device)
        return [float(values.norm()), float(values @ places.cos())]

    def resume(self, state: dict[str, Any]) -> None:
        self.check(state)
        self.opt.load_state_dict(state["optimizer"])
        self.opt.keep_statistics()  # what BatchNorm is shown is known here
        put(self.model, state["weights"])
        self.best, self.first, rule = state["best"], state["first"], self.regularisation
        self.history, self.seen = History.restored(state["history"]), restored(Seen, state["seen"])
        self._validated, self.elapsed = (float(valid(k, state[k], float)) for k in ("validated", "seconds"))
        self.words += f"; goes on after step {len(self.history)}"
        if rule is not None:
            self.best_evidence = rule.restored(state["best_evidence"])
            rule.resume(state["evidence"])
            if rule.more and self.first is None:
                raise ValueError("it is damaged: it lacks the weights that the next descent begins from")
        if self.order is not None:
            self.order.resume(state["order"], state["began"])
        set_generators(state["generators"], self.data)

    @contextmanager
    def unchanged_by_errors(self) -> Iterator[None]:
        """The model and the random numbers are afterwards as they were, if something is raised within it."""
        before, random = changing(self.model, self.opt.params), generators(self.data)
        try:
            yield
        except BaseException:
            with back_afterwards(partial(put, self.model, before)):
                set_generators(random, self.data)
            raise


def check_weights(what: str, found: Any, here: dict[str, Tensor], trained: Iterable[str]) -> None:
    """Whether they are those of this model; buffers may be infinite."""
    if not isinstance(found, dict) or not all(isinstance(t, Tensor) for t in found.values()):
        raise ValueError(f"it is damaged: {what} are no weights")
    there, form = ({name: (t.shape, t.dtype) for name, t in some.items()} for some in (found, here))
    if there != form:
        raise ValueError(f"it is damaged: {what} are none of this model")
    for name in trained:
        if not bool(found[name].isfinite().all()):
            raise ValueError(f"it is damaged: {what} hold NaN or infinite values in {name}")


# The loss and the outputs of a model in eval mode, which do not train it.


@contextmanager
def of_validation() -> Iterator[None]:
    """Errors name the validation set."""
    try:
        yield
    except (TypeError, ValueError) as error:
        if type(error) not in (TypeError, ValueError):  # others may take something else than words
            raise
        raise type(error)(f"the validation set: {error}") from error


def evaluated(model: nn.Module, loss: Loss, batches: Iterable[Batch], ranks: Ranks = ALONE) -> float:
    """f over all batches, of all ranks, in the units in which it is reported, in eval mode."""
    objective = Objective(model, loss, list(model.parameters()))
    device = objective.parameters.device
    with in_eval_mode(model, device):
        total, normaliser = without_grad(lambda: _sums(objective, batches, ranks))
    if ranks.several:
        total, normaliser = ranks.sum(torch.tensor([total, normaliser], dtype=torch.float64, device=device)).tolist()
    if not normaliser > 0:
        raise ValueError("the total weight of the validation set is 0: every target has weight 0 or is ignored")
    return loss.report(total * loss.scale(normaliser), normaliser)


def _sums(objective: Objective, batches: Iterable[Batch], ranks: Ranks) -> tuple[float, float]:
    """Σwℓ and what the mean divides by, of the batches of this rank"""
    total = normaliser = 0.0
    if objective.given.surveys:
        found = [Pass(objective, batch, Facts(), Chance()).sums() for batch in batches]
        objective = objective.knowing(ranks.sum(torch.stack(found).sum(0)))
    for batch in batches:
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
        total += float(bound.value(z, batch).double())
        normaliser += float(bound.loss.normaliser(z, batch.targets, batch.weight))
    return total, normaliser
