"""mq.fit: train a model on data, and say why it ended."""

from __future__ import annotations

import difflib
import inspect
import math
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..arguments import check_places, transformed, users
from ..diagnosis import Diagnosis
from ..losses import resolve
from ..model.checks import unwrapped
from ..model.decay import WeightDecay
from ..model.parameters import Parameters
from ..model.shards import refuse_sharded
from ..optimizer import LM
from ..ranks import cause, check_joined, of
from ..sources import Arrays, Indexed, Source, Stream, source
from ..surroundings import Surroundings, interrupt_of, surely, undisturbed
from ..uncertainty import Evidence, Posterior, posterior
from ..uncertainty.expansion import likelihood_of
from ..uncertainty.posterior import last_layer
from .batching import Batching, batching, check_batches, check_shared, interrupts
from .checkpoint import Saver, check_same_data, identity
from .history import CALLBACK, INTERRUPTED, Bar, Entry, History, Stops, bar_of
from .regularisation import Regularised, param_groups
from .run import Training, of_validation

# A model whose loss is lower than that of a constant by this share or more passes through the targets: what is left of
# them is a hundredth of their deviation.
BY_HEART = 1 - 1e-4


@dataclass(frozen=True)
class Running:
    """What a callback is given after every step."""

    step: Entry
    history: History
    model: nn.Module
    optimizer: LM


Callback = Callable[[Running], Any]


@dataclass(frozen=True)
class Fit:
    """What came of `mq.fit`. The model is the one that was given, with its best weights.

    >>> result = mq.fit(model, (x, y), "mse", steps=20)
    >>> result.loss <= result.history[0].loss, len(result.history) <= 20
    (True, True)
    """

    model: nn.Module  # the one that was given
    history: History  # of all steps
    reason: str  # why it ended, a sentence
    plan: str  # how the samples were given to the steps, how the curvature was represented, and why
    best_step: int  # whose weights the model has; 0 if there was none
    loss: float  # of the model, in eval mode, without weight decay: of the validation set, or else of the data
    optimizer: LM  # that has trained it
    data: Source  # that have trained it
    evidence: Regularised | None = None  # α, β and γ at the best step, if weight decay was found from the data by then

    def posterior(self, data: Any = None, **options: Any) -> Posterior:
        """`mq.posterior` of the model with the data and the weight decay that have trained it; of several ranks each
        makes its own, from all data"""
        opt = self.optimizer
        if data is None and isinstance(self.data, Stream) and of(opt.group).several:
            raise ValueError(
                f"the {type(self.data.data).__name__} has the samples of this rank alone, and a posterior needs all: "
                "pass all data, fit.posterior(data)"
            )
        if opt.towards is not None:
            raise ValueError(
                "the weights decay towards others than 0: call mq.posterior(model, loss, data, "
                "weight_decay=mq.WeightDecay(w, towards=weights)), with these as a list or by name"
            )
        by_name = dict(zip(Parameters(opt.model, opt.params).names, opt.weight_decays, strict=True))
        given = options.pop("params", opt.params)
        chosen = last_layer(self.model) if isinstance(given, str) and given == "last" else list(given)
        weights = [by_name[name] for name in Parameters(self.model, chosen).names]
        where = self.data if data is None else data
        return posterior(self.model, opt.loss, where, **{"weight_decay": weights, "params": chosen, **options})

    def __repr__(self) -> str:
        steps = f"{len(self.history)} steps, the best one {self.best_step}, loss {self.loss:.4g}"
        return f"Fit of {type(self.model).__name__}: {steps}\n  {self.plan}\n  ended: {self.reason}"


@undisturbed
def fit(
    model: nn.Module,
    data: Any,
    loss: Any,
    *,
    validation: Any = None,
    steps: int | None = 1000,
    seconds: float | None = None,
    goal: float | None = None,
    min_gradient: float | None = 1e-7,
    max_lam: float | None = 1e10,
    patience: int | None = 20,
    weight_decay: float | WeightDecay | Mapping[str, Any] | Evidence = 0.0,
    batch_size: int | str | None = None,
    seed: int = 0,
    callbacks: Callback | Iterable[Callback] = (),
    progress: bool | None = None,
    checkpoint: str | PathLike[str] | None = None,
    resume: bool = True,
    **options: Any,
) -> Fit:
    """Trains `model` on `data` by Levenberg–Marquardt until a stop is reached, and leaves the best weights in the
    model.

    >>> result = mq.fit(model, (x, y), "mse", validation=0.2)
    >>> reason, history = result.reason, result.history

    `data` are (inputs, targets) or (inputs, targets, weight) of tensors or arrays, a Dataset or a DataLoader. If a step
    on all samples is quick, every step uses all; otherwise the steps use mini-batches, and the averaged weights are the
    result. `batch_size`, a number or "all", decides it. `validation` is a fraction of the samples, drawn by `seed`, or
    a separate data set.

    The fit ends after a number of `steps` or `seconds`, at a loss of at most `goal`, at a gradient of at most
    `min_gradient` times the largest, at λ above `max_lam`, after `patience` validations (or estimates of the evidence)
    without a new best, or when nothing is left to gain; None switches a stop off. `callbacks` are called after every
    step with a `Running`, and end the fit by returning True. Ctrl-C ends it too; the best weights so far are then in
    the model.

    `weight_decay` is a number, a `WeightDecay`, a dict by the names of parameters as `Fit.evidence` has it, or
    `mq.Evidence()`: then weight decay and noise are estimated from the data every few steps (MATLAB's trainbr) until
    they settle, and the weights with the highest evidence are the best ones.

    `checkpoint` names a file in which the fit is saved about every second. If the file exists, the same call continues
    from it exactly; `resume=False` begins again. A file that mq.fit has not written is never replaced. All other
    `options` are those of `mq.LM`.

    Under `torchrun` all ranks make the same call with the same data: every batch is shared among them, and on any
    number of ranks the steps are the same. A DataLoader has this rank's samples, by a DistributedSampler. One rank's
    callback or Ctrl-C ends the fit of all, and what one rank raises, all raise. The checkpoint is then a folder.

    Args:
        model: an `nn.Module`, which is trained in place.
        data: (inputs, targets), (inputs, targets, weight), a Dataset or a DataLoader.
        loss: as `mq.LM` takes it.
        validation: the fraction of the samples that is held out, or a separate data set.
        steps: the number of steps, at most.
        seconds: the time, at most.
        goal: the loss that is low enough.
        min_gradient: the gradient that is small enough, as a share of the largest.
        max_lam: λ beyond which no step can be found.
        patience: validations without a new best, or estimates of the evidence.
        weight_decay: a number, an `mq.WeightDecay`, a dict by name, or `mq.Evidence()`.
        batch_size: samples per step, or "all"; None decides by the time that a step takes.
        seed: for the samples that are held out, and for the order of mini-batches.
        callbacks: one function of a `Running`, or several.
        progress: whether a line shows the progress; None shows it if the output is a terminal.
        checkpoint: a file to save the fit in, and to continue from.
        resume: whether to continue from a checkpoint that exists.
        options: of `mq.LM`.

    Returns:
        The model with its best weights, the history, and the reason why the fit ended.
    """
    if torch._C._functorch.get_dynamic_layer_stack_depth():
        raise transformed("mq.fit", "training")
    check_places("mq.fit(model, data, loss)", model, loss, data)
    here, group = Surroundings(), unwrapped(model, options.get("group"))[1]
    check_joined(group)
    ranks = of(group)
    with ranks.together():
        stops = Stops(steps, seconds, goal, min_gradient, max_lam, patience)
        bar, calls = bar_of(progress, stops, ranks.rank == 0), listed(callbacks)
        evidence = weight_decay if isinstance(weight_decay, Evidence) else None
        refuse_sharded(model.parameters(), "mq.fit")
        opt = optimizer(model, loss, weight_decay, options)
        train, held = sets(opt, data, validation, seed)
        check_shared(train, ranks, evidence is not None)
        ranks.same(f"mq.fit with {stops}, {seed=}, {batch_size=}, {checkpoint=}, {resume=}, {evidence}")
        plan = planned(opt, train, held, batch_size)
        run = Training(opt, train, held, plan, stops, seed, evidence)
        saver = None if checkpoint is None else Saver(Path(checkpoint), identity(run, seed), ranks)
        if saver is not None and resume and saver.there:
            saver.resume(run)
        else:
            if saver is not None:
                saver.check_replaceable()
            run.begin()
    reason = "an error ended it"
    try:
        with ranks.together(), interrupts(ranks) as interrupted:
            if bar is not None:
                bar.begin(run.words)
            reason = loop(run, bar, calls, saver, interrupted)
    except BaseException as error:
        if not isinstance(interrupt_of(cause(error)), KeyboardInterrupt):
            raise
        surely(partial(here.restore, error))
        reason = INTERRUPTED
    finally:
        if bar is not None:
            bar.end(reason)
    with ranks.together():
        run.end()
        words, found, told = f"{run.words}; {opt.plan}", run.loss(), remark(run, run.diagnosis())
        reason += f". But {told}" if told else ""
        result = Fit(model, run.history, reason, words, run.seen.best_step, found, opt, train, run.evidence)
    if told and ranks.rank == 0:
        warnings.warn(f"mq.fit: {told}", stacklevel=users())
    return result


def remark(run: Training, found: Diagnosis) -> str:
    """What the reason for the end leaves out: that little was learnt, or everything by heart."""
    told, noise = str(found), run.regularisation is not None
    if told:
        suspect = noise and found.learnt_nothing and not found.sizes
        return told + ("; or mq.Evidence() has taken all for noise: pass validation=0.2 instead" if suspect else "")
    whole = run.data.whole if isinstance(run.data, Arrays) else None
    n, m = sum(p.numel() for p in run.opt.params), math.inf  # of numbers that the outputs are compared with
    if whole is not None and isinstance(whole.targets, Tensor):
        m = whole.targets.numel()
    if noise or run.validation is not None or n < m or not found.explained >= BY_HEART:
        return ""
    return (
        f"the model passes through all {m:,} targets, as {n:,} parameters can through any: how good it is between them "
        "is unknown. Pass validation=0.2 to see it, or weight_decay=mq.Evidence() against it"
    )


def loop(
    run: Training, bar: Bar | None, calls: Sequence[Callback], saver: Saver | None, interrupted: Callable[[], bool]
) -> str:
    """Steps until there is a reason to stop."""
    reason = run.reason
    while reason is None:
        entry = run.step()
        if bar is not None:
            bar.update(entry)
        answers = [asks(call, Running(entry, run.history, run.model, run.opt)) for call in calls]
        wish = INTERRUPTED if interrupted() else CALLBACK if any(answers) else None
        reason = next((words for words in run.ranks.every(wish) if words), run.reason)
        if saver is not None and run.ranks.agreed(reason is not None or saver.due):
            saver.save(run)
    return reason


def planned(opt: LM, train: Source, held: Source | None, batch_size: int | str | None) -> Batching:
    """How the samples are given to the steps; all ranks must have the same, and a part of every batch."""
    ranks = of(opt.group)
    plan = ranks.agreed(batching(opt, train, batch_size))
    if ranks.several:
        for data in (train, held):
            if isinstance(data, Indexed):
                check_same_data(data, ranks)
        if isinstance(train, Indexed):
            check_batches(train.samples, plan, ranks)
    return plan


def asks(call: Callback, running: Running) -> bool:
    """Whether a callback asks for the end: by True, that of torch or NumPy included, or by StopIteration."""
    try:
        answer = call(running)
    except StopIteration:
        return True
    if str(getattr(answer, "dtype", type(answer).__name__)) not in ("bool", "torch.bool", "NoneType"):
        raise TypeError(
            f"a callback returned {answer!r}: True to end the fit, False or None to go on; bool(answer) makes it one "
            "of these"
        )
    return bool(answer)


def listed(callbacks: Any) -> list[Callback]:
    found = [callbacks] if callable(callbacks) else list(callbacks)
    for call in found:
        if not callable(call):
            raise TypeError(f"callbacks= holds a {type(call).__name__}: functions of a Running, one or several")
    return found


def optimizer(model: nn.Module, loss: Any, weight_decay: Any, options: dict[str, Any]) -> LM:
    """LM, with a parameter group for each α if these are found from the data."""
    check_known(options)
    if weight_decay is Evidence or isinstance(weight_decay, str):
        words = "the class Evidence" if weight_decay is Evidence else repr(weight_decay)
        raise TypeError(
            f"weight_decay is {words}: pass a number, an mq.WeightDecay, a dict, or mq.Evidence() to find it"
        )
    if not isinstance(weight_decay, (Evidence, Mapping)):
        return LM(model, loss, weight_decay=weight_decay, **options)
    if isinstance(weight_decay, Evidence):
        likelihood_of(resolve(loss))  # or there is no evidence
    return LM(model, loss, **{**options, "params": param_groups(model, options.get("params"), weight_decay)})


# What others call the arguments of fit.
ELSEWHERE = {
    "epochs": "steps", "max_epochs": "steps", "max_iter": "steps", "max_steps": "steps", "time": "seconds",
    "max_time": "seconds", "max_fail": "patience", "min_grad": "min_gradient", "mu_max": "max_lam", "mu": "schedule",
    "val": "validation", "validation_data": "validation", "validation_split": "validation", "verbose": "progress",
    "callback": "callbacks", "random_state": "seed", "l2": "weight_decay", "alpha": "weight_decay",
}  # fmt: skip


def check_known(options: Iterable[str]) -> None:
    own, of_lm = (list(inspect.signature(call).parameters) for call in (fit, LM))
    names = [name for name in dict.fromkeys([*own, *of_lm]) if name != "options"]
    for name in options:
        if name not in names:
            close = [ELSEWHERE[name]] if name in ELSEWHERE else difflib.get_close_matches(name, names, n=1)
            meant = f": did you mean {close[0]}=?" if close else "."
            raise TypeError(f"neither mq.fit nor mq.LM has an option {name!r}{meant} They have {', '.join(names[3:])}")


def sets(opt: LM, data: Any, validation: Any, seed: int) -> tuple[Source, Source | None]:
    """What trains, and what is held out, where the parameters are and in their precision."""
    if isinstance(seed, bool) or not isinstance(seed, int) or seed < 0:
        raise ValueError(f"seed={seed!r}: an integer of at least 0")
    p = opt.params[0]
    place = p.device, p.dtype if p.dtype in (torch.float32, torch.float64) else None
    train = source(data, *place)
    if validation is None:
        return train, None
    if isinstance(validation, (int, float)):
        if isinstance(validation, bool) or not 0 < validation < 1:
            raise ValueError(
                f"validation={validation!r}: a fraction of the samples, between 0 and 1, or data of its own; leave it "
                "out if nothing is to be held out"
            )
        return train.split(validation, seed)
    with of_validation():
        return train, source(validation, *place)
