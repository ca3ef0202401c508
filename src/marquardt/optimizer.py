"""LM: linearise the batch, represent the curvature G, solve (G + λD)δ = −g, add momentum, try, judge, update λ."""

from __future__ import annotations

import inspect
import math
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import MISSING, dataclass, fields, is_dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from .curvature import Auto, Curvature, Representation
from .curvature.auto import Exhausted
from .curvature.contract import FactorizationError
from .deferred import numbers
from .jacobian.chunk import EVERY, Plan
from .jacobian.linearization import Linearization
from .jacobian.rows import Exact, Rows
from .losses import resolve
from .metric import Diagonal
from .model.batch import Batch, Batches
from .model.checks import check_coupling, check_group, trainable
from .model.parameters import assign, flatten
from .parts.acceptance import Acceptance, Trial, Uphill, cosine_of
from .parts.average import EMA, Average
from .parts.damping import Damping, MeanEigenvalue
from .parts.line_search import Backtracking, LineSearch
from .parts.momentum import AdaptiveMomentum, Damped, Momentum
from .parts.schedule import GainRatio, Outcome, Schedule
from .recorded import Recorded, record, signature
from .state import UNHEARD, State

# A decrease of so many roundings of the loss is taken for one. A run on the same data has converged if so many steps in
# a row, with several λ, predict no more than so many roundings each, and have found no more all in all.
ROUNDINGS, IDLE, FAINT = 4, 10, 64


@dataclass(frozen=True)
class Step:
    """What one step did."""

    loss: float  # f before
    new_loss: float  # f after: where the step was rejected, the same
    accepted: bool
    rule: str  # "decrease" | "uphill" | "search" | "return" | "rejected"
    lam: float  # λ of this step
    lr: float  # learning rate of this step; after a line search the one it found
    gain: float  # ρ, actual over predicted decrease of the full step; NaN if both are below the rounding of the loss
    note: str = ""  # escalations, in words
    slope: float = math.nan  # √(gᵀD⁻¹g): the length of the gradient in the metric of the damping
    converged: bool = False  # on the same data: no decrease is left that could be told from the rounding of the loss


class Attempt(NamedTuple):
    """What came of one λ."""

    rule: str
    lr: float
    d: Tensor | None  # (n,), None where rejected
    loss: float  # f where it ends
    full_loss: float  # f after the full step, before any search
    gain: float
    note: str
    slope: float = math.nan
    length: float = math.nan  # ‖d‖
    judged: bool = True  # whether its decrease, predicted or found, exceeds the rounding of f
    predicted: float = math.inf  # the decrease, or its absolute value
    share: float = 1.0  # of damping in the step: see schedule.Outcome


class LM(torch.optim.Optimizer):
    """Levenberg–Marquardt.

    >>> opt = LM(model, "cross_entropy")
    >>> for x, y in loader:
    ...     step = opt.step(x, y)

    One step, on the loss f of a batch:

        f, g, G  ←  linearise the model at θ                        rows, curvature
        D        ←  damping of the parameters                       damping
        d        ←  −(G + λD)⁻¹g
        d        ←  α·d + β·dθ                                      momentum
        accept θ + lr·d if the loss falls, or rises a little        acceptance
          in the direction of the previous step;
        otherwise search along −(G + λD)⁻¹g                         line_search
        λ        ←  smaller after a good step, larger after a bad   schedule
        θ̄        ←  average of θ                                    average

    `loss` is a name, a torch.nn loss or an object of `marquardt.losses`; `params` chooses the parameters that train;
    `attempts` is how many λ a failed step may try. A part that is None is left out.

    `capture`: on a GPU, steps on batches of one shape are recorded as a CUDA graph and replayed: several times faster
    for small networks. The model must then do the same for every batch, its Python code is not run again; steps that do
    not go as recorded (rejected ones, bad input) are taken back and done without the graph, and so is every eighth.

    `group`: nothing here adds up over the ranks of a process group, so that a group of several is refused. False says
    that this run is independent of the other ranks.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        loss: Any,
        *,
        params: Iterable[Tensor] | None = None,
        lr: float = 1.0,
        curvature: Representation = Auto(inertia=0.8),
        rows: Rows = Exact(),
        damping: Damping = MeanEigenvalue(),
        schedule: Schedule = GainRatio(),
        momentum: Momentum | None = AdaptiveMomentum(dP=math.inf, cap=True, same_data=True),
        acceptance: Acceptance = Uphill(b=1.0),
        line_search: LineSearch | None = Backtracking(),
        average: Average | None = EMA(),
        attempts: int = 1,
        capture: bool = False,
        group: bool | None = None,
    ) -> None:
        chosen = trainable(model, params)
        check_group(group)
        check_rate(lr)
        if not isinstance(attempts, int) or attempts < 1:
            raise ValueError(f"attempts={attempts!r}: how many λ a step may try, an integer of at least 1")
        parts = {
            "curvature": curvature, "rows": rows, "damping": damping, "schedule": schedule, "momentum": momentum,
            "acceptance": acceptance, "line_search": line_search, "average": average,
        }  # fmt: skip
        for name, part in parts.items():
            check_part(name, part)
        if curvature.by_sample:
            check_coupling(model)
        self.model, self.loss = model, resolve(loss)
        self.curvature, self.rows, self.damping, self.schedule = curvature, rows, damping, schedule
        self.momentum, self.acceptance, self.line_search = momentum, acceptance, line_search
        self.average, self.attempts, self.capture, self.group = average, attempts, capture, group
        self._recorded: tuple[Any, Recorded | None] | None = None  # for these shapes; None where it failed
        self._last: Any = None  # shapes of the last step
        self._averaged = False  # whether the model holds the averaged weights
        self._plan = Plan()
        self._state = State(lam=schedule.initial)
        super().__init__(chosen, {"lr": lr})

    @property
    def params(self) -> list[Tensor]:
        return self.param_groups[0]["params"]  # type: ignore[no-any-return]

    @property
    def lr(self) -> float:
        return float(self.param_groups[0]["lr"])  # schedulers may make it a tensor

    @property
    def lam(self) -> float:
        """λ of the next step."""
        return self._state.lam

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        if self.param_groups:
            raise ValueError(
                "LM solves for all parameters together: one parameter group, given as params= when it is made"
            )
        super().add_param_group(param_group)

    # The algorithm.

    def step(  # type: ignore[override]
        self, inputs: Any = None, targets: Any = None, weight: Tensor | None = None, *, closure: Any = None
    ) -> Step:
        """One iteration on one batch; `weight` weighs the samples, f = Σwℓ/Σw.

        `inputs` go to the model as they are: a tensor or an object as model(x), a tuple as model(*x), a dict as
        model(**x). An object is never cut, so that it takes no `chunk`.
        """
        # Not every callable is a closure: a graph of PyG is one too.
        callback = inspect.isroutine(inputs) or isinstance(inputs, (partial, type))
        if closure is not None or callback or (inputs is None and targets is None):
            raise TypeError(
                "LM.step takes the batch, step(inputs, targets), not a closure: it evaluates the model itself, "
                "because it needs the outputs and not only the loss"
            )
        return self._step(inputs if isinstance(inputs, Batches) else [Batch(inputs, targets, weight)])

    def step_over(self, batches: Iterable[Any]) -> Step:
        """One iteration on all batches together, (inputs, targets) or (inputs, targets, weight) each.

        Exact: f, g and G are those of the whole data, and so is the loss that accepts or rejects. The batches are gone
        through several times; only one of them is in memory.
        """
        return self.step(Batches(batches))  # through `step`, where hooks and schedulers are

    @property
    def plan(self) -> str:
        """How the curvature is represented and why; with Auto, once there was a step."""
        return str(self._plan.choice or self.curvature)

    def _step(self, batches: Iterable[Batch]) -> Step:
        self._check()
        if self.capture and isinstance(batches, list):
            step = self._replay(batches[0])
            if step is not None:
                return step
        while True:
            plan = self._plan
            try:
                return self._try(batches)
            except RuntimeError as error:
                if not out_of_memory(error) or not getattr(self.curvature, "adapts", False):
                    raise
                if isinstance(error, Exhausted) or plan.squeeze > 8:
                    self._plan = Plan()  # the next step begins afresh: its batch may be smaller
                    raise
                # Everything is as it was before the step: again, with the next smaller plan.
                self._plan = Plan(squeeze=plan.squeeze + 1, shapes=plan.shapes)
            if self.params[0].is_cuda:
                torch.cuda.empty_cache()

    def _try(self, batches: Iterable[Batch]) -> Step:
        old = self._state
        lin = Linearization(
            self.model, self.loss, self.params, batches, self.rows, self.curvature.chunk,
            plan=self._plan, seed=old.steps, single=not isinstance(batches, Batches), most=old.rows,
        )  # fmt: skip
        try:
            with torch.no_grad(), torch.autocast(lin.device.type, enabled=False):
                step, state = self._iterate(lin)
            # Seen from outside, one forward pass took place; the buffers it changed count only if its step does.
            if not step.accepted:
                lin.start.restore()
            lin.end.restore(buffers=step.accepted)
            self._plan.numbers = lin.totals()
            self._state = state  # one assignment: whatever is raised before it, an interrupt too, undoes the step
        except BaseException:
            if self._state is old:
                assign(self.params, lin.theta)
                lin.start.restore()
                self._plan = Plan()  # what this step found out may be half of it
            raise
        finally:
            lin.close()
        return step

    def _replay(self, batch: Batch) -> Step | None:
        """The step by a CUDA graph; None if there is none (yet), or if it did not go as recorded."""
        old, plan, device = self._state, self._plan, self.params[0].device
        steady = self.momentum is None or getattr(self.momentum, "same_data", False)
        if device.type != "cuda" or plan.numbers is None or batch.opaque:  # what an object holds cannot be copied
            return None
        if not plan.only_slopes or not getattr(self.rows, "recordable", False) or not steady or old.D is None:
            return None
        if next(self.model.buffers(), None) is not None or old.repeats or old.steps % EVERY == EVERY - 1:
            return None
        key = signature(self, batch, old)
        if self._recorded is None or self._recorded[0] != key:
            if self._last == key:
                self._recorded = (key, record(self, batch, old, plan.numbers))
            self._last = key
            return None
        recorded = self._recorded[1]
        if recorded is None:
            return None
        rng = torch.cuda.get_rng_state(device)
        step = None
        try:
            recorded.run(batch, old)
            with torch.no_grad():  # while the device is at work
                averaged = self._average(old, False)
            judged = self._judge(recorded, averaged)
            if judged is not None:
                step, self._state = judged
        finally:
            if step is None and self._state is old:  # also if something was raised
                self._state = recorded.undo(self)
                torch.cuda.set_rng_state(rng, device)
        return step

    def _judge(self, recorded: Recorded, averaged: State) -> tuple[Step, State] | None:
        """What a replay came to; None unless it went as most steps do."""
        old, found = self._state, recorded.result()
        if found is None:
            return None
        scale = self.loss.scale(recorded.normaliser)
        f, low, rounding = (x * scale for x in (found.value, found.lower_bound, found.rounding))
        repeats = old.starts_with(f, self.params[0].dtype)
        predicted = -self.lr * found.gd - 0.5 * self.lr**2 * found.dGd
        rule = self.acceptance.judge(Trial(f, found.new_loss, low, min(old.best, f), found.cosine))
        if rule is None or repeats > 1 or old.doubt(f, low, False) > 1 or not abs(predicted) > ROUNDINGS * rounding:
            return None
        gain = gain_ratio(f - found.new_loss, predicted)
        lam = self.schedule.update(old.lam, Outcome(f, found.new_loss, gain, rule, False, recorded.averaged))
        state = averaged.after(f, found.new_loss, low, lam).settled(f, found.new_loss, low, recorded.theta, False)
        stride = self.lr * found.length
        state = replace(state, accepted=old.accepted + 1, repeats=repeats, unjudged=0, idle=0, stride=stride)
        before, after = (self.loss.report(x, recorded.normaliser) for x in (f, found.new_loss))
        slope = math.sqrt(max(found.gDg, 0.0))
        return Step(before, after, True, rule, old.lam, self.lr, gain, slope=slope), recorded.keep(state)

    def _check(self) -> None:
        """What may have changed since the optimizer was made."""
        if self._averaged:
            raise RuntimeError(
                "a step within `with opt.averaged():` would be lost when the weights are put back: end the block first"
            )
        check_group(self.group)
        if self.curvature.by_sample:
            check_coupling(self.model)
        check_rate(self.lr)
        if torch.is_inference_mode_enabled():
            raise RuntimeError("a step needs gradients: call it outside torch.inference_mode()")
        own = {id(p) for p in self.model.parameters()}
        if not all(id(p) in own for p in self.params):
            raise ValueError("the model's parameters were replaced since this LM was made: make a new one")
        frozen = {id(p) for p in self.params if not p.requires_grad}
        for name in [name for name, p in self.model.named_parameters() if id(p) in frozen] if frozen else []:
            raise ValueError(f"parameter {name!r} was frozen since this LM was made: make a new one, or unfreeze it")

    def _iterate(self, lin: Linearization) -> tuple[Step, State]:
        """The algorithm box: the step and the next state; the model ends at the next θ."""
        old = self._state.like(lin.theta)
        G = self.curvature.represent(lin)
        f, low = lin.loss, lin.lower_bound
        repeats = old.starts_with(f, lin.theta.dtype)
        same_data = repeats > 1  # once may be chance, on large batches
        doubt = old.doubt(f, low, same_data)
        G.recall(old.past, old.steps, same_data)
        D = self.damping.update(old.D, G)
        A = D.positive()
        lam, unjudged, notes = old.lam, old.unjudged, list[str]()
        if doubt > 1:
            notes.append(f"the loss is {UNHEARD * doubt:.2g} times those of late: a careful step, λ times {doubt:.2g}")
        for _ in range(self.attempts):
            used = doubt * lam
            attempt = self._attempt(lin, G, A, used, old, same_data, doubt)
            unjudged = 0 if attempt.judged else unjudged + 1
            outcome = Outcome(
                f, attempt.full_loss, attempt.gain, attempt.rule, same_data, G.averaged, unjudged, attempt.share
            )
            lam = self.schedule.update(lam, outcome) if doubt == 1 else lam
            if attempt.note:
                notes.append(attempt.note)
            if attempt.rule != "rejected":
                break
            if not attempt.judged:
                notes.append("rejected: rounding of the loss hides what the step would gain")
                break
            notes.append(f"rejected at λ = {used:.3g}, next {lam:.3g}")
        if old.tired(attempt.loss, same_data):
            attempt = attempt._replace(rule="return", d=None, loss=old.haven_loss)
            notes.append(f"back to where the loss was {old.away} steps ago")
        # Steps that all in all have found next to nothing; a λ above λ₀ may be why they predict so little.
        faint = same_data and min(attempt.predicted, f - low) <= FAINT * lin.rounding
        start = old.idle_from if old.idle else f
        idle = old.idle + 1 if faint and abs(start - attempt.loss) <= FAINT * lin.rounding else 0
        converged = idle >= IDLE and used <= self.schedule.initial
        if converged:
            notes.clear()
            notes.append("converged: no decrease is left that could be told from the rounding of the loss")

        lin.move(attempt.d, attempt.lr)
        state = old.after(f, attempt.loss, low, lam, doubt).settled(f, attempt.loss, low, lin.theta, same_data)
        state = replace(state, repeats=repeats, rows=lin.most, unjudged=unjudged, idle=idle, idle_from=start)
        if attempt.rule == "return" and old.haven is not None:
            assign(self.params, old.haven)
            state = self._average(replace(state, previous=None), same_data)
        if attempt.d is not None:
            state = replace(state, accepted=old.accepted + 1)
            if doubt == 1:
                state = replace(state, D=D, past=G.keep(), stride=attempt.lr * attempt.length)
            if self.momentum is not None or self.acceptance.looks_back:
                state = replace(state, previous=attempt.d if attempt.lr == 1 else attempt.lr * attempt.d)
            state = self._average(state, same_data)
        before, after = (self.loss.report(x, lin.normaliser) for x in (f, attempt.loss))
        step = Step(
            before, after, attempt.d is not None, attempt.rule, used, attempt.lr, attempt.gain, "; ".join(notes),
            attempt.slope, converged,
        )  # fmt: skip
        return step, state

    def _attempt(
        self, lin: Linearization, G: Curvature, D: Diagonal, lam: float, old: State, same_data: bool, doubt: float
    ) -> Attempt:
        """Solve (G + λD)d = −g, add momentum, try; if that fails, search. In doubt of the batch the step is shorter
        than the last one, and only a decrease counts."""
        f, lr = lin.loss, self.lr
        H = Damped(G, lam * D)
        try:
            plain = H.step()
        except FactorizationError as error:
            self._blame_gradient(G.gradient)
            return Attempt("rejected", lr, None, f, math.nan, -math.inf, str(error))
        d = plain if self.momentum is None else self.momentum.refine(plain, old.previous, H, same_data)
        if doubt > 1:
            d = d * (old.stride / math.sqrt(doubt) / torch.linalg.vector_norm(d)).clamp(max=1)
        back = None if old.previous is None else cosine_of(plain, old.previous)
        # One synchronisation for all that the judgement needs.
        f_new, gd, dGd, gDg, length, *cosine = numbers(
            lin.evaluate(d, lr), *G.model(d), G.slope(D), torch.linalg.vector_norm(d), *([] if back is None else [back])
        )
        predicted = -lr * gd - 0.5 * lr**2 * dGd
        # The step can be judged if the decrease, as predicted or as found, can be told from rounding. What is estimated
        # of that knows nothing of the layers within: if θ hardly moves, the change that is found is rounding too.
        least = ROUNDINGS * lin.rounding
        hidden = abs(predicted) <= least and (abs(f - f_new) <= least or lin.hardly_moves(lr * length))
        judged = f_new != f and not hidden
        gain = gain_ratio(f - f_new, predicted) if judged else math.nan
        share = 1.0
        if same_data and judged and predicted > 0:
            share = 0.5 * lam * lr**2 * float(D.quadratic(d, lin.sizes)) / predicted
        note = "; ".join([*G.notes, *([] if math.isfinite(f_new) else [f"the trial loss is {f_new}"])])
        G.notes.clear()
        found = partial(
            Attempt, full_loss=f_new, gain=gain, note=note, slope=math.sqrt(max(gDg, 0.0)), length=length,
            judged=judged, predicted=abs(predicted), share=share,
        )  # fmt: skip

        sure = judged and doubt == 1
        direction = cosine[0] if cosine and sure and f_new <= old.ceiling else None  # without one there is no uphill
        rule = self.acceptance.judge(Trial(f, f_new, lin.lower_bound, min(old.best, f), direction))
        if rule is not None:
            return found(rule, lr, d, f_new)
        if self.line_search is not None and lr > 0 and sure:
            line = d if self.line_search.along_step else plain
            tried = (lr, f_new) if line is d else None
            point = self.line_search.search(partial(lin.evaluate_along, line), f, lr, tried)
            if point is not None:
                return found("search", point[0], line, point[1], length=float(torch.linalg.vector_norm(line)))
        return found("rejected", lr, None, f)

    def _average(self, state: State, same_data: bool) -> State:
        """θ̄ after another θ."""
        if self.average is None:
            return state
        theta = flatten(self.params)
        if state.mean is None or (same_data and self.average.restarts):
            return replace(state, mean=theta, points=1)
        return replace(state, mean=self.average.update(state.mean, theta, state.points), points=state.points + 1)

    def _blame_gradient(self, g: Tensor) -> None:
        """A gradient that is not finite is an error, not a matter of λ."""
        for p, part in zip(self.params, g.split([p.numel() for p in self.params]), strict=True):
            if not bool(part.isfinite().all()):
                name = next(name for name, q in self.model.named_parameters() if q is p)
                raise ValueError(f"the gradient of parameter {name!r} is not finite, though the loss is; see its layer")

    # Averaged weights, and what torch.optim.Optimizer promises.

    @contextmanager
    def averaged(self) -> Iterator[None]:
        """The model with its averaged weights, for evaluation: a step would be lost, and is refused."""
        if self.average is None:
            raise ValueError("this optimizer keeps no average: pass average=mq.EMA() or mq.Polyak()")
        theta, outer = flatten(self.params), self._averaged
        if self._state.mean is not None:
            assign(self.params, self._state.mean)
        self._averaged = True
        try:
            yield
        finally:
            self._averaged = outer
            assign(self.params, theta)

    def state_dict(self) -> dict[str, Any]:
        state = {k: v.state() if isinstance(v, Diagonal) else v for k, v in vars(self._state).items()}
        state = tree_map(lambda v: v.clone() if isinstance(v, Tensor) else v, state)
        # Beside torch's own entries: torch casts those to the dtype of the parameters.
        return {**super().state_dict(), "marquardt": state}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        if "marquardt" not in state_dict:
            raise ValueError("this state_dict has no entry 'marquardt': it was not made by marquardt.LM")
        loaded = check_state(state_dict["marquardt"], self.schedule, [p.numel() for p in self.params])
        check_groups(state_dict)
        where = self.params[0].device
        loaded = tree_map(lambda v: v.clone().to(where) if isinstance(v, Tensor) else v, loaded)
        if loaded.get("D") is not None:
            loaded["D"] = Diagonal.restored(loaded["D"])
        state = State(**loaded)
        known = self._plan, self._recorded, self._last, self._averaged  # of the model, not of the state
        super().load_state_dict({k: v for k, v in state_dict.items() if k != "marquardt"})
        self._state = state
        self._plan, self._recorded, self._last, self._averaged = known

    def __getstate__(self) -> dict[str, Any]:
        # Hooks stay behind, as torch has it, and so does the wrapper that schedulers put in the place of `step`.
        left = ("step", "_plan", "_recorded", "_last")
        return {k: v for k, v in self.__dict__.items() if k not in left and not k.startswith("_optimizer_")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._plan, self._recorded, self._last, self._averaged = Plan(), None, None, False

    def __repr__(self) -> str:
        names = ("curvature", "rows", "damping", "schedule", "momentum", "acceptance", "line_search", "average")
        parts = [f"    {name:<12}{brief(getattr(self, name))}" for name in names]
        options = ", ".join(f"{name}={getattr(self, name)!r}" for name in ("lr", "attempts", "capture", "group"))
        n, state = sum(p.numel() for p in self.params), self._state
        return "\n".join(
            [
                f"LM of {type(self.model).__name__}, {n:,} parameters, {brief(self.loss)}",
                *parts,
                f"    {options}",
                f"    λ = {state.lam:.3g}, steps: {state.steps}, accepted: {state.accepted}",
                *([] if self._plan.choice is None else [f"    plan: {self._plan.choice}"]),
            ]
        )


def out_of_memory(error: BaseException) -> bool:
    return isinstance(error, torch.OutOfMemoryError) or "can't allocate memory" in str(error)


def gain_ratio(decrease: float, predicted: float) -> float:
    """ρ = (f − f_new) / (−lr·gᵀd − ½lr²·dᵀGd); a model that predicts no decrease counts as failure."""
    return decrease / predicted if predicted > 0 and not math.isnan(decrease) else -math.inf


def check_rate(lr: Any) -> None:
    if not isinstance(lr, (int, float, Tensor)):
        raise TypeError(f"lr={lr!r}: the learning rate must be a number; LM's natural one is 1")
    if not 0 <= lr < math.inf:
        raise ValueError(f"lr={lr!r}: the learning rate must be finite and at least 0; LM's natural one is 1")


def check_state(state: Any, schedule: Schedule, sizes: list[int]) -> dict[str, Any]:
    """A loaded State, as a dict, of parameters of these sizes; entries with a default may be missing."""
    if not isinstance(state, dict):
        raise TypeError(f"the entry 'marquardt' of this state_dict is {type(state).__name__}, not a dict of LM's state")
    entries = {f.name: f for f in fields(State)}
    for key in state:
        if key not in entries:
            raise ValueError(f"the state has an entry {key!r} that this version does not know: load it in a newer one")
    for key, entry in entries.items():
        if key not in state and entry.default is MISSING:
            raise ValueError(f"the state has no entry {key!r}: it is not one that marquardt.LM saved")
        if key in state:
            check_entry(key, state[key], entry.default)
    check_lam(state["lam"], schedule)
    n = sum(sizes)
    past = state.get("past")
    if not isinstance(past, (dict, type(None))):
        raise ValueError(f"the state 'past' is {type(past).__name__}: it must be a dict of tensors, or None")
    for key, t in (("previous", state.get("previous")), ("mean", state.get("mean")), ("past", (past or {}).get("G"))):
        if not isinstance(t, (Tensor, type(None))):
            raise ValueError(f"the state {key!r} is {type(t).__name__}: it must be a tensor, or None")
        if t is not None and len(t) != n:
            raise ValueError(f"the state {key!r} is of {len(t)} parameters, this optimizer has {n}")
    D = state.get("D")
    if D is not None and not (isinstance(D, list) and len(D) == 2 and Diagonal.restored(D).fits(sizes)):
        raise ValueError("the damping D in this state is that of another model: load the state of this one")
    return dict(state)


def check_entry(key: str, value: Any, default: Any) -> None:
    """Counters count, and nothing is NaN."""
    if isinstance(default, int) and (not isinstance(value, int) or value < 0):
        raise ValueError(f"the state {key!r} is {value!r}: it must be an integer of at least 0, load an earlier one")
    for t in tree_leaves(value):
        if isinstance(t, float) and math.isnan(t):
            raise ValueError(f"the state {key!r} is {value!r}: load an earlier one")
        if isinstance(t, Tensor) and not bool(t.isfinite().all()):
            raise ValueError(f"the state {key!r} holds NaN or infinite values: load an earlier one")


def check_lam(lam: Any, schedule: Schedule) -> None:
    if isinstance(lam, bool) or not isinstance(lam, (int, float)) or not 0 <= lam < math.inf:
        raise ValueError(f"the state has λ = {lam!r}: it must be finite and at least 0, load an earlier one")
    if is_dataclass(schedule) and "initial" in {f.name for f in fields(schedule)}:
        try:
            replace(schedule, initial=lam)
        except ValueError as error:
            raise ValueError(f"the state has λ = {lam!r}, which this schedule does not start from: {error}") from None


def check_groups(state_dict: dict[str, Any]) -> None:
    """torch's own part of a state_dict, as far as torch does not look at it."""
    for key in ("state", "param_groups"):
        if key not in state_dict:
            raise ValueError(f"this state_dict has no entry {key!r}: it was not made by marquardt.LM")
    for group in state_dict["param_groups"]:
        if "lr" not in group:
            raise ValueError("this state_dict has a parameter group without 'lr': it was not made by marquardt.LM")
        check_rate(group["lr"])


def brief(part: Any) -> str:
    """A part with the options that are not its defaults."""
    if not is_dataclass(part):
        return str(part)
    found = [(f.name, getattr(part, f.name), f.default) for f in fields(part)]
    options = [f"{k}={v!r}" for k, v, usual in found if v is not usual and (isinstance(v, Tensor) or v != usual)]
    return f"{type(part).__name__}({', '.join(options)})"


def check_part(name: str, part: Any) -> None:
    """Parts are objects: not their names, not their classes, not another part's."""
    method, examples, optional = {
        "curvature": ("represent", "mq.Dense() or mq.Gram()", False),
        "rows": ("draw", "mq.Exact() or mq.Sampled(1)", False),
        "damping": ("update", "mq.Identity() or mq.MaxDiagonal()", False),
        "schedule": ("initial", "mq.GainRatio() or mq.Constant(1.0)", False),
        "momentum": ("refine", "mq.AdaptiveMomentum() or None", True),
        "acceptance": ("judge", "mq.Decrease() or mq.Uphill()", False),
        "line_search": ("search", "mq.Grid() or None", True),
        "average": ("update", "mq.EMA() or None", True),
    }[name]
    if part is None and optional:
        return
    if isinstance(part, type):
        raise TypeError(f"{name}={part.__name__} is a class: pass an object of it, {part.__name__}()")
    kin = method == "update" and hasattr(part, "initial")  # a schedule has an update too
    if not hasattr(part, method) or kin:
        raise TypeError(f"{name}={part!r} is no {name.replace('_', ' ')}: pass for example {examples}")
