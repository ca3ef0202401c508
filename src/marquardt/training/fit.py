"""mq.fit: train a model on data, and say why it ended."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..losses import resolve
from ..model.decay import WeightDecay
from ..model.parameters import Parameters
from ..model.shards import refuse_sharded
from ..optimizer import LM
from ..sources import Source, source
from ..uncertainty import Evidence, Posterior, posterior
from ..uncertainty.build import last_layer
from ..uncertainty.likelihood import likelihood_of
from .batching import batching
from .checkpoint import Saver, identity
from .history import Entry, History
from .progress import Shown, shown
from .regularisation import Regularised, decayed_params, decays, grouped_params
from .run import Training
from .stops import CALLBACK, INTERRUPTED, Stops


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
    """What came of `mq.fit`. The model is the one that was given, with its best weights."""

    model: nn.Module
    history: History
    reason: str  # why it ended, a sentence
    plan: str  # how the samples were given to the steps, how the curvature was represented, and why
    best_step: int  # whose weights the model has; 0 if there was none
    loss: float  # of the model, in eval mode, without weight decay: of the validation set, or else of the data
    optimizer: LM
    data: Source  # that have trained it
    evidence: Regularised | None = None  # α, β and γ at the best step, if weight decay was found from the data by then

    def posterior(self, data: Any = None, **options: Any) -> Posterior:
        """`mq.posterior` of the model with the data and the weight decay that have trained it"""
        opt = self.optimizer
        if opt._state.towards is not None:
            raise ValueError(
                "the weights decay towards others than 0: call mq.posterior(model, loss, data, "
                "weight_decay=mq.WeightDecay(w, towards=…)) with these"
            )
        by_name = dict(zip(Parameters(opt.model, opt.params).names, decays(opt), strict=True))
        given = options.pop("params", opt.params)
        chosen = last_layer(self.model) if isinstance(given, str) and given == "last" else list(given)
        weights = [by_name[name] for name in Parameters(self.model, chosen).names]
        where = self.data if data is None else data
        return posterior(self.model, opt.loss, where, **{"weight_decay": weights, "params": chosen, **options})

    def __repr__(self) -> str:
        steps = f"{len(self.history)} steps, the best one {self.best_step}, loss {self.loss:.4g}"
        return f"Fit of {type(self.model).__name__}: {steps}\n  {self.plan}\n  ended: {self.reason}"


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
    """Trains `model` on `data` by Levenberg–Marquardt until something says stop; the best weights stay in the model.

    >>> result = mq.fit(model, (x, y), "mse", validation=0.2)
    >>> print(result.reason, result.history)

    `data` are (inputs, targets) or (inputs, targets, weight) of tensors or arrays, a Dataset or a DataLoader. If a step
    with all of them is quick, every step has them all; otherwise there are mini-batches, and the averaged weights
    count. `batch_size` says it: a number, or "all". `validation` is a fraction of the samples, drawn by `seed`, or data
    of its own.

    It ends after so many `steps` or `seconds`, with a loss of at most `goal`, a gradient of at most `min_gradient`
    times the largest, λ above `max_lam`, after `patience` validations without a new best, or if nothing is left to
    gain; None leaves a stop out. `callbacks` are called after every step with a `Running`, and end the fit by
    returning True. Ctrl-C ends it too; the best weights so far are then in the model.

    `weight_decay` is a number, a `WeightDecay`, a dict by the names of parameters as `Fit.evidence` has it, or
    `mq.Evidence()`: then it is found from the data, every few steps, as is the noise (MATLAB's trainbr), until they
    settle.

    `checkpoint` names a file that the fit is saved in about every second. The same call goes on with it, exactly, if
    the file is there; `resume=False` begins anew. All other `options` are those of `mq.LM`.
    """
    stops = Stops(steps, seconds, goal, min_gradient, max_lam, patience)
    bar, calls = shown(progress, stops), listed(callbacks)
    evidence = weight_decay if isinstance(weight_decay, Evidence) else None
    refuse_sharded(model.parameters(), "mq.fit")
    opt = optimizer(model, loss, weight_decay, options)
    train, held = sets(opt, data, validation, seed)
    run = Training(opt, train, held, batching(opt, train, batch_size), stops, seed, evidence)
    saver = None if checkpoint is None else Saver(Path(checkpoint), identity(run, seed))
    if saver is not None and resume and saver.path.exists():
        run.resume(saver.load())
    else:
        run.begin()
    reason = "an error ended it"
    try:
        bar.begin(run.words)
        reason = loop(run, bar, calls, saver)
    except KeyboardInterrupt:
        reason = INTERRUPTED
    finally:
        bar.end(reason)
    run.end()
    words = f"{run.words}; {opt.plan}"
    return Fit(model, run.history, reason, words, run.seen.best_step, run.loss(), opt, train, run.evidence)


def loop(run: Training, bar: Shown, calls: Sequence[Callback], saver: Saver | None) -> str:
    """Steps until something says stop."""
    reason = run.reason
    while reason is None:
        entry = run.step()
        bar.update(entry)
        reason = run.reason
        answers = [asks(call, Running(entry, run.history, run.model, run.opt)) for call in calls]
        reason = CALLBACK if any(answers) else reason
        if saver is not None and (reason is not None or saver.due):
            saver.save(run.state())
    return reason


def asks(call: Callback, running: Running) -> bool:
    """Whether a callback asks for the end: by True, that of torch or NumPy included, or by StopIteration."""
    try:
        answer = call(running)
    except StopIteration:
        return True
    if answer is None:
        return False
    if isinstance(answer, bool) or str(getattr(answer, "dtype", "")) in ("bool", "torch.bool"):
        return bool(answer)
    raise TypeError(
        f"a callback returned {answer!r}: True to end the fit, False or None to go on; bool(…) makes it one of these"
    )


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
    if isinstance(weight_decay, Mapping):
        return LM(model, loss, **{**options, "params": decayed_params(model, options.get("params"), weight_decay)})
    if not isinstance(weight_decay, Evidence):
        return LM(model, loss, weight_decay=weight_decay, **options)
    likelihood_of(resolve(loss))  # or there is no evidence
    groups = grouped_params(model, options.get("params"), weight_decay)
    return LM(model, loss, weight_decay=weight_decay.start, **{**options, "params": groups})


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
            known = ELSEWHERE.get(name)
            close = [known] if known else difflib.get_close_matches(name, names, n=1)
            meant = f": did you mean {close[0]}=?" if close else "."
            raise TypeError(f"neither mq.fit nor mq.LM has an option {name!r}{meant} They have {', '.join(names[3:])}")


def sets(opt: LM, data: Any, validation: Any, seed: int) -> tuple[Source, Source | None]:
    """What trains, and what is held out, where the parameters are and in their precision."""
    if isinstance(seed, bool) or not isinstance(seed, int) or seed < 0:
        raise ValueError(f"seed={seed!r}: an integer of at least 0")
    p = opt.params[0]
    dtype = p.dtype if p.dtype in (torch.float32, torch.float64) else None
    train = source(data, device=p.device, dtype=dtype)
    if validation is None:
        return train, None
    if isinstance(validation, (int, float)):
        if isinstance(validation, bool) or not 0 < validation < 1:
            raise ValueError(
                f"validation={validation!r}: a fraction of the samples, between 0 and 1, or data of its own; leave it "
                "out if nothing is to be held out"
            )
        return train.split(validation, seed)
    return train, source(validation, device=p.device, dtype=dtype)
