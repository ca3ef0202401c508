"""transformers' Trainer with LM: batches of a dataset, checkpoints, evaluation and stopping as usual.

>>> trainer = LMTrainer(model, TrainingArguments("run"), train_dataset=data, loss="cross_entropy")
>>> trainer.train()
"""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import fields, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad
from transformers import Trainer, TrainerCallback, TrainingArguments
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers.trainer_utils import SchedulerType

from .losses import CrossEntropy, Loss, resolve
from .model.batch import Batch, forward, full
from .model.parameters import changing, put
from .optimizer import LM
from .step import Step

LAST = "last weights"  # of a state_dict

# In the names of models that have the classes of every token last.
TEXT = ("CausalLM", "LMHead", "MaskedLM", "ConditionalGeneration", "TokenClassification")

ADAM = "it is one of AdamW, and LM is the optimizer here: leave it out"
# Arguments with defaults, which are for AdamW and count as not given; what another value would mean.
UNUSED = {
    "learning_rate": "it is one for AdamW, and LM's natural one is 1: leave it out, or make=partial(mq.LM, lr=0.5)",
    "max_grad_norm": "LM reads no gradients; leave it out, or bound the step, make=partial(mq.LM, radius=0.1)",
    "weight_decay": "it is AdamW's, times its rate; LM's is a part of the loss: make=partial(mq.LM, weight_decay=1e-4)",
    "gradient_accumulation_steps": "a step needs its batch as a whole: raise per_device_train_batch_size instead",
    "fp16": "it scales the loss for gradients in float16, which LM does not take: use bf16=True, or float32",
    "deepspeed": "LM does not add up over processes or shards: train on one device",
    "fsdp": "LM does not add up over processes or shards: train on one device",
    "optim": "it is another optimizer, and LM is the optimizer here: leave it out",
    **dict.fromkeys(["optim_args", "optim_target_modules", "adam_beta1", "adam_beta2", "adam_epsilon"], ADAM),
}
# Values that count as not given too: what people write for the default, and what LM has anyway.
IDLE = {"learning_rate": (1.0,), "optim": ("adamw_torch", "adamw_torch_fused")}


class LMTrainer(Trainer):
    """A `transformers.Trainer` whose steps are those of LM on the logits and the labels of a batch.

    `loss` is what LM takes for one: a name, a torch.nn loss or an object of `marquardt.losses`. `make` makes the
    optimizer of a model and a loss: `LM`, a preset, or `partial(mq.LM, curvature=…)`. `shift_labels` says whether the
    logits at a token are for the label of the next one; by default they are if the model is one for causal language
    modelling. Models whose labels are more than one tensor override `unpack`.

    Evaluation, prediction and all that is saved have the averaged weights, if LM keeps an average, and so has the model
    when `train` returns. In between it has the last ones, and `with trainer.averaged():` shows the others. The last
    ones, to go on from, are in the `optimizer.pt` of a checkpoint; a second `train` goes on from them too. With
    `load_best_model_at_end` all are those of the best checkpoint.

    `label_smoothing_factor` goes to the loss. A learning rate of 5e-5, gradients clipped to 1 and a linear schedule are
    what `TrainingArguments` have for AdamW if nothing is said, and count as not given: the learning rate is 1
    throughout, after a warm-up if there is one. Any other schedule multiplies it.

    Args:
        model: as `Trainer` takes it.
        args: `TrainingArguments`.
        loss: of the logits and the labels.
        make: makes the optimizer of a model and a loss.
        shift_labels: whether logits are for the next label; None asks the model.
        options: of `Trainer`: `train_dataset`, `eval_dataset`, …

    >>> from functools import partial
    >>> make = partial(mq.LM, curvature=mq.Auto(memory="4GiB"))
    >>> # LMTrainer(model, args, loss="cross_entropy", make=make, train_dataset=data).train()
    """

    def __init__(
        self,
        model: nn.Module | None = None,
        args: TrainingArguments | None = None,
        *,
        loss: Any,
        make: Callable[[nn.Module, Loss], LM] = LM,
        shift_labels: bool | None = None,
        **options: Any,
    ) -> None:
        args = copy.copy(args or TrainingArguments("tmp_trainer"))
        check_arguments(args)
        make_own = "pass make=, such as partial(mq.LM, radius=0.1)"
        own = {"optimizers": make_own, "optimizer_cls_and_kwargs": make_own, "compute_loss_func": "pass loss="}
        for name, way_out in own.items():
            if options.get(name) not in (None, (None, None)):
                raise ValueError(f"{name} is given, and this Trainer has an LM and a loss of its own: {way_out}")
        if args.lr_scheduler_type == SchedulerType.LINEAR:
            args.lr_scheduler_type = SchedulerType.CONSTANT_WITH_WARMUP
        self.lm: LM | None = None
        self.loss = smoothed(resolve(loss), args.label_smoothing_factor)
        self.make, self.shift_labels = make, shift_labels
        self._last_step: Step | None = None
        self._loop: LoopOptimizer | None = None
        self._sums: Tensor | None = None  # of the parameters as they were left here; None if LM is to begin
        super().__init__(model, args, **options)
        self.callback_handler.callbacks.insert(0, Ending(self))  # other callbacks may save the model

    # Training.

    def create_optimizer(self, model: nn.Module | None = None) -> torch.optim.Optimizer:
        if self.optimizer is None:
            assert self.model is not None
            self.lm = self.make(self.model, in_sequence(self.loss, self.model))
            self.optimizer = self._loop = LoopOptimizer(self.lm)
        return self.optimizer

    def train(self, *args: Any, **kwargs: Any) -> Any:
        check_arguments(self.args)  # a search of hyperparameters may have changed them
        if self._loop is not None:
            if not self._untouched:
                self._loop.last = None  # other weights were loaded, which are to train
            self._loop.go_on()
        self._sums = None
        return super().train(*args, **kwargs)

    def conclude(self) -> None:
        """The model gets its averaged weights, and LM has the last ones. If others were the best, those are loaded."""
        loop = self._loop
        assert loop is not None
        lm, best = loop.lm, self.state.best_model_checkpoint if self.args.load_best_model_at_end else None
        if best is not None:
            path = os.path.join(best, "optimizer.pt")
            if not os.path.isfile(path):  # weights were saved alone, which are not those that LM has left
                return
            loop.restore(torch.load(path, map_location="cpu", weights_only=True))
            lm.keep_statistics()  # those that were saved are those of these weights
        elif lm.average is not None:
            last = changing(lm.model, lm.params)
            with self.averaged():
                averaged = changing(lm.model, lm.params)
            put(lm.model, averaged)
            loop.last = last
        self._sums = sums(lm)

    def unpack(self, inputs: Mapping[str, Any]) -> tuple[dict[str, Any], Any]:
        """What the model takes, and the targets of its logits."""
        if len(self.label_names) != 1:
            raise ValueError(
                f"the model has several labels, {', '.join(self.label_names)}: override unpack(inputs) in a subclass "
                "to return the inputs and the targets"
            )
        rest = dict(inputs)
        targets = rest.pop(self.label_names[0], None)
        if targets is None:
            raise ValueError(f"the batch has no {self.label_names[0]!r}, only {', '.join(rest)}: LM needs the targets")
        if shifts(self.model) if self.shift_labels is None else self.shift_labels:
            targets = pad(targets[..., 1:], (0, 1), value=getattr(self.loss, "ignore_index", -100))
        if targets.is_floating_point() and targets.ndim == 1:
            targets = targets[:, None]  # the logits of a regression are (N, 1)
        return rest, targets

    def training_step(
        self, model: nn.Module, inputs: dict[str, Any], num_items_in_batch: Tensor | int | None = None
    ) -> Tensor:
        assert self.lm is not None
        model.train()
        self._last_step = self.lm.step(*self.unpack(self._prepare_inputs(inputs)))
        self._sums = sums(self.lm)
        return torch.tensor(self._last_step.loss, device=self.args.device)

    def compute_loss(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: Tensor | int | None = None,
    ) -> Any:
        """In evaluation, of the logits as in training: transformers divides by other numbers of tokens there."""
        batch = Batch(*self.unpack(inputs))
        raw = forward(model, batch.inputs)
        loss = value(in_sequence(self.loss, self.model), full(raw), batch)
        outputs = raw if isinstance(raw, dict) else (loss, *(raw if isinstance(raw, (tuple, list)) else [raw]))
        return (loss, outputs) if return_outputs else loss

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        if logs.pop("grad_norm", None) is not None and self._last_step is not None:  # of gradients that there are not
            logs.update(lam=self._last_step.lam, accepted=float(self._last_step.accepted))
        super().log(logs, start_time)

    # Averaged weights.

    @property
    def _untouched(self) -> bool:
        return self.lm is not None and (self._sums is None or torch.equal(self._sums, sums(self.lm)))

    def averaged(self) -> AbstractContextManager[None]:
        """The model with its averaged weights; as it is, if there are none or if other weights were loaded since."""
        return nullcontext() if self.lm is None or not self._untouched else self.lm.averaged()

    def evaluation_loop(self, *args: Any, **kwargs: Any) -> Any:
        with self.averaged():
            return super().evaluation_loop(*args, **kwargs)

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        with self.averaged():
            super().save_model(output_dir, _internal_call)

    def push_to_hub(self, *args: Any, **kwargs: Any) -> Any:
        with self.averaged():
            return super().push_to_hub(*args, **kwargs)


class LoopOptimizer(torch.optim.Optimizer):
    """LM as the Trainer's loop sees it: when that calls `step()`, `training_step` has taken the step."""

    def __init__(self, lm: LM) -> None:
        self.lm = lm
        self.last: dict[str, Tensor] | None = None  # to go on from, if the model has the averaged weights

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["lm"], name)

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        pass

    def state_dict(self) -> dict[str, Any]:
        if self.lm.average is None:
            return self.lm.state_dict()
        last = changing(self.lm.model, self.lm.params) if self.last is None else self.last
        return {**self.lm.state_dict(), LAST: last}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.restore(state_dict)
        self.go_on()

    def restore(self, state_dict: dict[str, Any]) -> None:
        """A state of LM, and the last weights that were saved with it"""
        self.lm.load_state_dict({k: v for k, v in state_dict.items() if k != LAST})
        self.last = state_dict.get(LAST)

    def go_on(self) -> None:
        """The last weights into the model, if it has the averaged ones."""
        if self.last is not None:
            put(self.lm.model, self.last)
            self.last = None


class Ending(TrainerCallback):
    """The first callback that is called when the training has ended."""

    def __init__(self, trainer: LMTrainer) -> None:
        self.trainer = trainer

    def on_train_end(self, *args: Any, **kwargs: Any) -> None:
        self.trainer.conclude()


def sums(lm: LM) -> Tensor:
    """One number for each parameter: other weights that are loaded have others."""
    return torch.stack([p.detach().sum(dtype=torch.float64) for p in lm.params])


def value(loss: Loss, raw: Any, batch: Batch) -> Tensor:
    """As LM reports it: (). NaN if all targets are ignored."""
    y, w = batch.targets, batch.weight
    loss = loss.bound(raw, y, w)
    z = loss.joined(raw)
    loss.check(z, y, w, part=True)
    scale: Any = (loss.reported or loss).scale
    found: Tensor = loss.value(z, y, w) * scale(loss.normaliser(z, y, w))
    return found


def base_of(model: Any) -> Any:
    """Without the adapters of peft"""
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def in_sequence(loss: Loss, model: Any) -> Loss:
    """Models of text have the classes last, (N, T, C), also if T = C."""
    text = any(kind in type(base_of(model)).__name__ for kind in TEXT)
    return replace(loss, class_dim=-1) if text and isinstance(loss, CrossEntropy) and loss.class_dim is None else loss


def shifts(model: Any) -> bool:
    """Whether it is one for causal language modelling: the logits at a token are for the next one."""
    base = base_of(model)
    return type(base).__name__ in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values() and not base.config.is_encoder_decoder


def smoothed(loss: Loss, factor: float) -> Loss:
    if not factor:
        return loss
    if not isinstance(loss, CrossEntropy) or loss.label_smoothing not in (0, factor):
        raise ValueError(f"label_smoothing_factor={factor} is one of cross-entropy, and the loss is {loss}")
    return replace(loss, label_smoothing=factor)


def check_arguments(args: TrainingArguments) -> None:
    """What LM cannot do, or has no use for."""
    found = []
    if args.world_size > 1 or args.n_gpu > 1:
        found.append(
            f"there are {max(args.world_size, args.n_gpu)} devices, and LM does not add up over them: train on one "
            "process with one of them, for example CUDA_VISIBLE_DEVICES=0"
        )
    usual = {f.name: f.default for f in fields(TrainingArguments)}
    for name, reason in UNUSED.items():
        given = getattr(args, name)
        unset = given in (usual[name], *IDLE.get(name, ())) or (not given and name != "learning_rate")
        if not unset:
            found.append(f"{name}={getattr(given, 'value', given)!r}: {reason}")
    if found:
        raise ValueError(";\n".join(found))
