"""LM: linearise the batch, represent the curvature G, solve (G + λD)d = −g, add momentum, try, judge, update λ."""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import wraps
from operator import is_
from typing import Any, NamedTuple, ParamSpec, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._functorch import get_dynamic_layer_stack_depth as transforms
from torch.autograd import _profiler_enabled  # type: ignore[attr-defined]
from torch.optim.optimizer import _global_optimizer_post_hooks as POST_HOOKS
from torch.optim.optimizer import _global_optimizer_pre_hooks as PRE_HOOKS

from . import arguments
from .agreement import check_alike, take_buffers
from .arguments import Unscaled, brief, users
from .curvature import Auto, Representation
from .curvature.cost import Plan
from .deferred import AS_IS, current
from .diagnosis import diagnosed
from .jacobian.linearization import Linearization
from .jacobian.objective import Objective, Rows
from .jacobian.passes import Coupled, Facts, Pass
from .losses import resolve
from .model.anatomy import Chance, anatomy, rng_state, set_rng_state
from .model.batch import Batch, Batches, uncompiled, without_autocast
from .model.checks import check_coupling, unwrapped
from .model.decay import WeightDecay
from .model.parameters import Parameters
from .model.statistics import NOTHING, Seen, estimated, tracking
from .pace import Pace
from .parts.direction import AdaptiveMomentum, Damping, KroneckerMetric, Momentum
from .parts.judging import EMA, Acceptance, Average, Backtracking, Balanced, LineSearch, Schedule, Uphill
from .protocol import FOREIGN, check_groups, check_same_rate, copied, grouped, loaded, saved, weights
from .ranks import ALONE, AVAILABLE, Ranks, cause, check_joined, of
from .recordings import RECORDERS, Recordings
from .step import Parts, State, Step, changed, rows_of, take
from .surroundings import Surroundings, back_afterwards, settled
from .weights import Weights

# Facts about the model, and whether it holds the averaged weights: they are no part of the state.
OF_THE_MODEL = ("_known", "_recordings", "_pace", "_averaged", "_seen", "_program")


T = TypeVar("T")
P = ParamSpec("P")


class Program(NamedTuple):
    """What was checked and made for a step. It is valid for the next steps as long as nothing it depends on has
    changed. Facts about the model are in `Facts`, by the graph of its passes."""

    objects: list[Any]  # that it depends on: the same ones
    values: list[Any]  # and equal ones
    parts: Parts
    objective: Objective


def hooked(step: Callable[P, T]) -> Callable[P, T]:
    """A step inside torch's wrapper only if there are hooks to call or a profiler runs: the wrapper takes a twentieth
    of a small step."""
    wrapped = torch.optim.Optimizer.profile_hook_step(step)

    @wraps(step)
    def either(*args: P.args, **kwargs: P.kwargs) -> T:
        opt: Any = args[0]
        hooks = PRE_HOOKS or POST_HOOKS or opt._optimizer_step_pre_hooks or opt._optimizer_step_post_hooks
        return wrapped(*args, **kwargs) if hooks or _profiler_enabled() else step(*args, **kwargs)

    either.hooked = True  # type: ignore[attr-defined]
    return either


class LM(Unscaled, torch.optim.Optimizer):
    """Levenberg–Marquardt.

    >>> opt = mq.LM(model, "mse")
    >>> for inputs, targets in loader:
    ...     step = opt.step(inputs, targets)

    One step, on the loss f of a batch:

        f, g, G  ←  linearise the model at θ                        rows, curvature
        f, g, W  ←  f + ½w‖θ‖², g + wθ, w                           weight_decay
        D        ←  damping of the parameters                       damping
        d        ←  −(G + W + λD)⁻¹g
        d        ←  α·d + β·dθ, at most of the length of the radius momentum, radius
        accept θ + lr·d if the loss falls, or rises a little        acceptance
          in the direction of the previous step;
        otherwise search along −(G + W + λD)⁻¹g                     line_search
        λ        ←  smaller after a good step, larger after a bad   schedule
        θ̄        ←  average of θ                                    average

    A part that is None is left out. Parts are independent of each other, but the defaults belong together: Balanced
    follows an average over about twenty steps, such as EMA; on data that stay the same, KroneckerMetric leaves D to
    MeanEigenvalue, the momentum begins and the average starts again. What is remembered of earlier steps, and what
    prevents an uphill move, are the policies: docs/steps.md.

    Args:
        loss: a name, a torch.nn loss, an object of `mq.losses`, a function of outputs and targets, or a dict of these
            by the names of the model's outputs.
        params: chooses the parameters that train, in one list or in groups with a weight decay each, a number or a
            tensor that broadcasts to the shapes of the group: a number for every element.
        weight_decay: added to the loss that is reported, for all parameters; `WeightDecay` excludes some, or decays
            them towards other weights than 0.
        capture: on a GPU, steps on batches of one shape are recorded as a CUDA graph and replayed: several times faster
            for small networks. The model must then do the same for every batch, for its Python code is not run again;
            steps that do not go as recorded (rejected ones, bad input) are undone and taken without the graph. Before
            the eighth replay, the sixteenth, the thirty-second and so on the model is called, and both losses must be
            the same. None records the second of two equal steps, if there is memory for another step, and replays it
            and the following ones; True forces and False forbids recording.
        group: the ranks of torch.distributed that take every step together, each with a part of the batch: None for
            those of the default process group, if one is initialised. The step is that of the whole batch. With False
            this run is independent of the other ranks.
    """

    def __init__(
        self,
        model: torch.nn.Module,  # an `nn.Module`, as it is
        loss: Any,
        *,
        params: Iterable[Any] | None = None,
        lr: float = 1.0,  # the step is lr·d; 1 is the right length
        weight_decay: float | WeightDecay = 0.0,
        radius: float | None = None,  # the length ‖lr·d‖ of a step, at most
        curvature: Representation = Auto(),  # how G is represented
        rows: Rows | None = None,  # rows of J̃ that are formed; None for as many as there is time for
        damping: Damping = KroneckerMetric(),  # D
        schedule: Schedule = Balanced(),  # the rule for λ
        momentum: Momentum | None = AdaptiveMomentum(dP=math.inf, cap=True, same_data=True),  # of the previous step
        acceptance: Acceptance = Uphill(b=1.0, of_late=True),  # which trial points are accepted
        line_search: LineSearch | None = Backtracking(),  # what is tried if the step is not
        average: Average | None = EMA(),  # of the weights, for `averaged`
        attempts: int = 1,  # how many λ a failed step may try
        capture: bool | None = None,
        group: Any = None,
    ) -> None:
        model, group = unwrapped(model, group)
        groups, rule = grouped(model, params), WeightDecay.of(weight_decay)
        options = {"lr": lr, "weight_decay": rule.w}
        check_same_rate([{**options, **each} for each in groups])
        arguments.check_options(attempts, capture, radius, of(group))
        self.curvature, self.rows, self.damping, self.schedule = curvature, rows, damping, schedule
        self.momentum, self.acceptance, self.line_search = momentum, acceptance, line_search
        self.average, self.attempts, self.capture, self.group, self.radius = average, attempts, capture, group, radius
        parts = self.parts
        arguments.check_parts(parts)
        arguments.check_shards(model, parts, groups, towards=rule.towards)
        if curvature.needs.by_sample:
            check_coupling(model)
        self.model, self.loss = model, resolve(loss)
        parameters = Parameters(model, [p for each in groups for p in each["params"]])
        self._spared = rule.spared(model, parameters)  # from weight decay
        towards = rule.anchor(parameters, self._spared)
        self._planned: Plan | None = None  # for the attempt under way: if memory runs out, the next one is smaller
        self._begin_facts()
        super().__init__(groups, options)
        arguments.warn_of_small(self.lr)
        self._state = State(lam=schedule.initial, towards=towards)  # last: `add_param_group` asks for it

    def _begin_facts(self) -> None:
        """What is no part of the state, and is found out again by a copy."""
        self._known, self._recordings, self._pace = Facts(), Recordings(), Pace()  # about the model and the machine
        self._averaged = False  # whether the model holds the averaged weights
        self._program: Program | None = None  # what the last step has prepared for the next
        self._diagnosis: str | None = None  # why a run that has converged may be a poor one; None if it has not
        self._seen: Seen | None = None  # what BatchNorm has seen in the last step; None if there was none since

    @property
    def params(self) -> list[Tensor]:
        """The parameters of all groups, in their order: θ"""
        return [p for group in self.param_groups for p in group["params"]]

    @property
    def lr(self) -> float:
        return float(self.param_groups[0]["lr"])  # schedulers may make it a tensor

    @property
    def lam(self) -> float:
        """λ of the next step."""
        return self._state.lam

    @property
    def weight_decays(self) -> list[Any]:
        """Of every parameter, as its group has it; 0 for those that are excluded."""
        weights = [group["weight_decay"] for group in self.param_groups for _ in group["params"]]
        return [0.0 if free else w for w, free in zip(weights, self._spared, strict=True)]

    @property
    def towards(self) -> Tensor | None:
        """The weights that decay leads to, as one vector; None for 0."""
        return self._state.towards

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        if "_state" in vars(self):
            raise ValueError(
                "LM solves for all parameters together: give them as params= when it is made, one parameter group or "
                "several"
            )
        super().add_param_group(param_group)

    # The algorithm.

    @hooked
    def step(  # type: ignore[override]
        self, inputs: Any = None, targets: Any = None, weight: Tensor | None = None, *, closure: Any = None
    ) -> Step:
        """One iteration on one batch.

        Args:
            inputs: passed to the model as they are: a tensor or an object as model(x), a tuple as model(*x), a dict or
                the result of a tokenizer as model(**x). An object is never divided, so it goes with no `chunk`.
            targets: as the loss takes them; None if it takes none.
            weight: of the samples, f = Σwℓ/Σw.
            closure: for trainers that wrap optimizers and keep their hooks in it: it is called once, before the step,
                and its result is not used.
        """
        ranks = self._ranks
        with ranks.together() if ranks.several else AS_IS:
            if transforms():
                raise arguments.transformed("opt.step", "a step")
            if inputs.__class__ is not Tensor:
                arguments.check_batch(inputs, targets)
            if closure is not None:
                closure()
            batches = inputs if inputs.__class__ is Batches else [Batch(inputs, targets, weight)]
            return self._step(batches, ranks)

    def step_over(self, batches: Iterable[Any]) -> Step:
        """One iteration on all batches together, (inputs, targets) or (inputs, targets, weight) each.

        The step is exact: f, g and G are those of all the data, and so is the loss by which it is accepted or rejected.
        The batches are iterated several times; only one of them is in memory.

        >>> step = opt.step_over([(x[:32], y[:32]), (x[32:], y[32:])])
        """
        return self.step(Batches(batches))  # through `step`, where hooks and schedulers are

    @property
    def plan(self) -> str:
        """How the curvature is represented and why; with Auto, once there was a step."""
        return str(self._state.plan or self.curvature)

    # Around the step, which step.py tells.

    def _step(self, batches: Iterable[Batch], ranks: Ranks) -> Step:
        """The step, as a recording or with the largest plan that there is memory for; checks come before it, the time
        that it took and a diagnosis after it."""
        parts, objective = self._prepared(batches.__class__ is not Batches)
        if ranks.several:
            others = {"lr": self.lr, "weight decay": self._weights, "attempts": self.attempts, "loss": brief(self.loss)}
            check_alike(ranks, self.model, Parameters(self.model, self.params), parts, self._state, others)
        began, here = time.perf_counter(), Surroundings()
        plan, device = self._state.plan, objective.parameters.device
        records = device.type in RECORDERS and self.capture is not False and not ranks.several
        step = self._by_recording(parts, objective, batches, here) if records and isinstance(batches, list) else None
        while step is None:
            self._planned = plan
            try:
                # An error on one of several ranks is raised on all.
                with ranks.together() if ranks.several else AS_IS, ranks.deciding() if ranks.several else AS_IS:
                    step = self._by_plan(parts, objective, batches, ranks, plan, here, records)
            except (RuntimeError, Coupled) as error:
                # Memory has run out, or rows turned out to be too expensive, or samples cannot be separated. Everything
                # is as it was before the step: try again with the next smaller plan, if there is one.
                plan = self.curvature.smaller(self._planned, cause(error))
                if plan is None:
                    raise
                if device.type == "cuda":
                    torch.cuda.empty_cache()
        if step.converged and not ranks.several:  # no single rank has all data
            step = self._explained(step, batches)
        else:
            self._diagnosis = None
        return self._pace.timed(step, time.perf_counter() - began)

    def _prepared(self, single: bool) -> tuple[Parts, Objective]:
        """The parts of the step and the objective. They are checked and made again if anything they depend on has
        changed since the last step, or may have changed in place, as learning rates or weights of weight decay that are
        tensors, and shards, may."""
        known, program, state = self._known, self._program, self._state
        form = known.anatomy = anatomy(self.model, known.anatomy)
        objects: list[Any] = [
            form, self.model, self.loss, self.curvature, self.rows, self.damping, self.schedule, self.momentum,
            self.acceptance, self.line_search, self.average, self.group, state.towards,
        ]  # fmt: skip
        values: list[Any] = [single, self._averaged, self.radius, torch.is_inference_mode_enabled()]
        first = self.param_groups[0]["params"][0]
        lasting = first.__class__ is torch.nn.Parameter and not torch.is_autocast_enabled(first.device.type)
        for group in self.param_groups:
            lr, w = group["lr"], group["weight_decay"]
            lasting = lasting and lr.__class__ in (float, int) and w.__class__ in (float, int)
            values += (lr, w)
            objects += group["params"]
        if program is not None and lasting and (len(objects), values) == (len(program.objects), program.values):
            unchanged = all(map(is_, objects, program.objects))
            if unchanged:
                return program.parts, program.objective
        parts = self.parts
        arguments.check_shards(self.model, parts, self.param_groups, single=single)
        arguments.check_ready(self.model, self.params, self.lr, parts.curvature.needs.by_sample, self._averaged)
        check_same_rate(self.param_groups)
        arguments.check_radius(self.radius)
        check_joined(self.group)
        objective = self._objective()
        lasting = lasting and not objective.parameters.coarse  # of which every step leaves another θ
        self._program = Program(objects, values, parts, objective) if lasting else None
        return parts, objective

    def _by_plan(
        self, parts: Parts, objective: Objective, batches: Iterable[Batch], ranks: Ranks, plan: Plan | None,
        here: Surroundings, records: bool,
    ) -> Step:  # fmt: skip
        """The step with this plan or one derived from it; after an error everything is as it was before."""
        old, lr, space = self._state, self.lr, objective.parameters
        lin = Linearization(
            objective, batches, rows_of(parts, plan), parts.curvature.needs,
            known=self._known, seed=old.steps, single=batches.__class__ is not Batches, most=old.most_rows,
            ranks=ranks, form=self._known.anatomy,
        )  # fmt: skip
        theta, before = lin.theta, lin.start

        def undo() -> None:
            if self._state is old:
                space.recover(theta)
                before.restore()
                self._known = Facts()  # the fault may have struck while this was written

        try:
            torch.set_grad_enabled(False)  # after an error `here` restores it
            with without_autocast(space.device.type), uncompiled():
                objective.eager = True
                current.drawn = [] if records else None
                representation = self._representation(parts, lin, plan)
                if ranks.several or not lin.single or space.shards is not None:
                    arguments.check_sums(representation, lin.single, ranks, space.shards is not None)
                needs = representation.needs
                if self._planned is not plan or not lin.in_one or needs.chunk is not None or needs.graph:
                    lin = lin.made_for(needs, rows_of(parts, self._planned))
                self._pace.expect(self._planned, space.device, self._known.totals is not None, ranks.rank == 0)
                step, state = take(parts, lin, representation, self._planned, old, lr, self.attempts)
            torch.set_grad_enabled(here.grad)
            # Seen from outside there was one forward pass, whose changes of buffers stay only if the step does.
            if not step.accepted:
                before.restore()
            if lin.end.buffers or lin.chance.drawn:
                lin.end.restore(buffers=step.accepted)
            if ranks.several:
                if step.accepted and not ranks.all(lin.steady):
                    take_buffers(ranks, self.model)
                ranks.same(f"after step {state.steps}: loss {step.new_loss!r}, λ = {state.lam!r}")
            self._known.totals, self._known.steady = lin.totals(), records and lin.steady
            self._known.drawn, current.drawn = current.drawn or (), None
            master = space.unrounded() if space.coarse else None
            statistics = Seen.of(lin.end.form, batches) if lin.end.form.tracking else NOTHING
            if master is not state.master:
                state = changed(state, master=master)
            self._state, self._seen = state, statistics  # an error before this line undoes everything
            return step
        except BaseException as error:
            try:
                here.undone(error, undo)
            except BaseException:  # a moment before this has begun, or after it
                here.undone(error, undo)
                raise
            raise
        finally:
            objective.eager = False
            lin.close()

    def _representation(self, parts: Parts, lin: Linearization, plan: Plan | None) -> Representation:
        """The representation of G, with its plan in `_planned`: those of the last step, while everything they were
        chosen by is the same, including the shapes of the batch."""
        known, steady = self._known, self._state.same_data.steady(self._state.steps)
        (batch, *_) = lin.batches if lin.in_one and not lin.share.ranks.several else (None,)
        shapes = None if batch is None else batch.form
        now = (plan, parts, steady, lin.start.form)
        if known.chosen is not None and shapes is not None:
            before, earlier, picked = known.chosen
            if earlier == shapes and all(map(is_, now, before)):
                self._planned = plan
                return picked  # type: ignore[return-value]
        picked, self._planned = parts.curvature.choose(lin, plan, parts.rows, steady)
        known.chosen = ((self._planned, *now[1:]), shapes, picked)
        return picked

    def _by_recording(
        self, parts: Parts, objective: Objective, batches: list[Batch], here: Surroundings
    ) -> Step | None:
        """The step by replaying a recording; None if there is no recording (yet), or if the step did not go as
        recorded."""
        old, device, known = self._state, objective.parameters.device, self._known
        (batch,) = batches
        recording = self._recordings.of(parts, objective, batch, old, known, self.lr, self.capture is True)
        if recording is None:
            return None
        rng, statistics = rng_state(device), Seen.of(known.look(self.model), batches)
        step: Step | None = None

        def undo() -> None:
            if step is None:
                self._state = recording.undo(old)
                if rng is not None:
                    set_rng_state(device, rng)

        try:
            self._pace.expect(old.plan, device, True)
            value = self._value(objective, batch) if recording.looks else None
            if rng is not None:
                set_rng_state(device, rng)
            recording.run(batch, old, objective)
            conclusion = recording.concluded(old) if self._recordings.confirmed(objective) else None
            if value is not None and not self._recordings.agrees(recording, value):
                conclusion = None
            if conclusion is not None:
                (step, self._state), self._seen = conclusion, statistics
            undo()
            return step
        except BaseException as error:
            try:
                here.undone(error, undo)
            except BaseException:  # a moment before this has begun, or after it
                here.undone(error, undo)
                raise
            raise

    def _value(self, objective: Objective, batch: Batch) -> float:
        """Σwℓ of a batch, by a pass through the model as it is now."""
        with torch.no_grad(), without_autocast(objective.parameters.device.type), uncompiled():
            forward = Pass(objective, batch, self._known, Chance())
            return float(forward.objective.value(forward.z, batch))

    def _explained(self, step: Step, batches: Iterable[Batch]) -> Step:
        """A converged step with a note on what may have kept the run from learning, found once."""
        if self._diagnosis is None:
            plan = self._state.plan
            chunk = self.curvature.needs.chunk if plan is None or plan.kind is None else plan.chunk
            self._diagnosis = str(diagnosed(self._objective(), batches, chunk))
        return changed(step, note=f"{step.note}; {self._diagnosis}") if self._diagnosis else step

    @property
    def _weights(self) -> Weights:
        return weights(self.param_groups, self._spared)

    def _objective(self) -> Objective:
        return Objective(self.model, self.loss, self.params, self._weights, self._state.towards, self._state.master)

    @property
    def _ranks(self) -> Ranks:
        alone = self.group is None and not (AVAILABLE and dist.is_initialized())
        return ALONE if alone else of(self.group)

    @property
    def parts(self) -> Parts:
        return Parts(
            self.curvature, self.rows, self.damping, self.schedule, self.momentum, self.acceptance, self.line_search,
            self.average, self.radius,
        )  # fmt: skip

    def begin_anew(self) -> None:
        """Returns to the state before the first step, except for the facts about the model."""
        self._state = State(lam=self.schedule.initial, towards=self._state.towards)

    def keep_statistics(self) -> None:
        """Declares that the running statistics of BatchNorm fit the present weights: until the next step `averaged`
        does not estimate others."""
        self._seen = NOTHING

    # Averaged weights, and what torch.optim.Optimizer promises.

    @contextmanager
    def averaged(self) -> Iterator[None]:
        """The model with its averaged weights, for evaluation. A step inside would be lost, and is refused. If the
        average has recently lagged behind the last weights, or none is kept (`average=None`), the last weights are
        used. The running statistics of BatchNorm and InstanceNorm are those of the last batch at the weights in use,
        for layers that were in train mode then; afterwards they are as before."""
        parameters, outer = Parameters(self.model, self.params), self._averaged
        theta = parameters.vector()
        mean = None if self._state.lag.behind or self.average is None else self._state.mean
        if mean is not None and self._seen is None and tracking(self.model) and not torch.equal(mean.to(theta), theta):
            warnings.warn(
                "no step was taken since this state was loaded, so that the running statistics of BatchNorm cannot be "
                "found for the averaged weights: they are those that the model has, of the last weights; take a step "
                "first, or call torch.optim.swa_utils.update_bn(loader, model) inside the block",
                stacklevel=users(),
            )

        def back() -> None:
            parameters.assign(theta)
            self._averaged = outer

        with settled(), back_afterwards(back):
            self._averaged = True
            if mean is not None:
                parameters.assign(mean)
            with estimated(self.model, self._seen or NOTHING):
                yield

    def state_dict(self) -> dict[str, Any]:
        # Beside torch's own entries: torch casts those to the dtype of the parameters.
        own = saved(self._state, self.damping, self.curvature, self.params)
        return copied(super().state_dict()) | {"marquardt": own}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        state, before = self._checked(state_dict), dict(self.__dict__)
        of_the_model = {name: before[name] for name in OF_THE_MODEL}
        decays = [group["weight_decay"] for group in self.param_groups]
        try:
            super().load_state_dict({k: v for k, v in state_dict.items() if k != "marquardt"})
            for group, w in zip(self.param_groups, decays, strict=True):
                group.setdefault("weight_decay", w)  # a state of marquardt 0.1.0 does not have it
            self.__dict__.update(of_the_model | {"_state": state})
        except BaseException:
            self.__dict__.update(before)
            raise

    def _checked(self, state_dict: Any) -> State:
        """The state that `load_state_dict` will take, if it fits this optimizer; nothing is changed here."""
        if not isinstance(state_dict, dict) or "marquardt" not in state_dict:
            raise ValueError(f"this state_dict has no entry 'marquardt': {FOREIGN}")
        parameters, towards = Parameters(self.model, self.params), self._state.towards
        state = loaded(state_dict["marquardt"], self.schedule, self.damping, self.curvature, parameters, towards)
        check_groups(state_dict, self.param_groups)
        return state

    def __getstate__(self) -> dict[str, Any]:
        # Hooks stay behind, as torch has it, and the wrapper that schedulers put in the place of `step`.
        transient = ("step", "_known", "_recordings", "_pace", "_seen", "_diagnosis", "_program")
        return {k: v for k, v in self.__dict__.items() if k not in transient and not k.startswith("_optimizer_")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._begin_facts()

    def __repr__(self) -> str:
        plan, n = self._state.plan, sum(p.numel() for p in self.params)
        options = f"lr={self.lr}, attempts={self.attempts}, capture={self.capture}, group={self.group}"
        decay = f"weight_decay={self._weights}, radius={self.radius}"
        more = [] if plan is None else [f"plan: {self.plan}", self._pace.words(plan)]
        more += [self._recordings.note] if self._recordings.note else []
        head = f"LM of {type(self.model).__name__}, {n:,} parameters, {brief(self.loss)}"
        parts = [f"{name:<12}{brief(part)}" for name, part in vars(self.parts).items() if name != "radius"]
        counts = f"λ = {self.lam:.3g}, steps: {self._state.steps}, accepted: {self._state.accepted}"
        return "\n    ".join([head, *parts, options, decay, counts, *more])
