"""A LightningModule that LM trains: checkpoints, schedulers, logging and stopping as with any other optimizer.

>>> class Net(LMModule):
...     def __init__(self):
...         super().__init__()
...         self.layers = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 3))
...
...     def forward(self, x):
...         return self.layers(x)
...
...     def configure_optimizers(self):
...         return mq.LM(self, "cross_entropy")
>>> lightning.Trainer(max_epochs=5).fit(Net(), loader)
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor, nn

from .model.batch import Batch
from .model.parameters import changing
from .optimizer import LM

ENTRY = "marquardt"  # of a checkpoint, beside Lightning's own


class LMModule(LightningModule):
    """`configure_optimizers` returns an `LM`, with schedulers or without; there is no `training_step` to write.

    A batch is (inputs, targets) or (inputs, targets, weight), or what `unpack` makes of it. `train_loss` is logged for
    each step and as the mean of an epoch, `lam` and `accepted` for each step, and `on_train_batch_end` finds the `Step`
    in its outputs.

    Validation, tests and predictions see the averaged weights, if LM keeps an average. The weights in the module are
    the last ones otherwise, during and after `fit`; `with module.averaged():` shows the averaged ones. The `state_dict`
    of a checkpoint has the averaged weights, which were validated, and its entry "marquardt" the last ones, from which
    `fit(ckpt_path=…)` goes on.

    Args:
        args: of `LightningModule`.
        kwargs: of `LightningModule`.

    >>> class Sine(LMModule):
    ...     def __init__(self):
    ...         super().__init__()
    ...         self.net = nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 1))
    ...
    ...     def forward(self, x):
    ...         return self.net(x)
    ...
    ...     def configure_optimizers(self):
    ...         return mq.LM(self, "mse")
    >>> module = Sine()  # lightning.Trainer(max_epochs=5).fit(module, loader)
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._lm: LM | None = None  # the one that has moved the weights, unless others were loaded since
        self._shown = ExitStack()  # closed when the evaluation ends
        self._stepped = False
        self._resumed: dict[str, Any] = {}
        self.register_load_state_dict_post_hook(_forget)  # type: ignore[no-untyped-call]

    def unpack(self, batch: Any) -> Sequence[Any]:
        """(inputs, targets) or (inputs, targets, weight), as `LM.step` takes them."""
        if isinstance(batch, (tuple, list)) and len(batch) in (2, 3):
            return batch
        found = f"{len(batch)} items" if isinstance(batch, (tuple, list)) else f"a {type(batch).__name__}"
        raise TypeError(
            f"the batch is {found}, not (inputs, targets): override unpack(batch) in {type(self).__name__} to return "
            "(inputs, targets) of it"
        )

    def training_step(self, batch: Any, batch_idx: int = 0) -> dict[str, Any]:
        if not self._has_callback:
            raise RuntimeError(
                f"{type(self).__name__}.configure_callbacks leaves out what LM needs in the Trainer: return [*yours, "
                "*super().configure_callbacks()]"
            )
        parts = dict(zip(("inputs", "targets", "weight"), self.unpack(batch), strict=False))
        optimizer: Any = self.optimizers()
        step = optimizer.step(**parts)
        self._lm, self._stepped = optimizer.optimizer, True
        samples = Batch(**parts).samples or 1
        self.log("train_loss", step.loss, prog_bar=True, on_step=True, on_epoch=True, batch_size=samples)
        self.log("lam", step.lam, prog_bar=True)
        self.log("accepted", float(step.accepted))
        return {"loss": torch.tensor(step.loss), "step": step}

    def optimizer_step(  # type: ignore[override]
        self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Callable[[], Any]
    ) -> None:
        """The closure is `training_step`, which has taken the step when it returns."""
        self._stepped = False
        optimizer_closure()
        if not self._stepped:
            raise RuntimeError(
                f"{type(self).__name__}.training_step took no step: leave it out, or call super().training_step(batch)"
            )

    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        """Nothing: LM differentiates the model itself."""

    # Averaged weights.

    def averaged(self) -> AbstractContextManager[None]:
        """The module with its averaged weights; as it is, if there are none or if other weights were loaded since."""
        return nullcontext() if self._lm is None else self._lm.averaged()

    def _show(self) -> None:
        self._shown.enter_context(self.averaged())

    def on_validation_model_eval(self) -> None:
        self._show()
        super().on_validation_model_eval()

    def on_test_model_eval(self) -> None:
        self._show()
        super().on_test_model_eval()

    def on_predict_model_eval(self) -> None:
        self._show()
        super().on_predict_model_eval()

    # Checkpoints.

    def configure_callbacks(self) -> list[Callback]:
        return [] if self._has_callback else [LMCallback()]  # it is there from an earlier call of this Trainer

    @property
    def _has_callback(self) -> bool:
        trainer: Any = self.trainer
        return any(isinstance(c, LMCallback) for c in trainer.callbacks)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        if ENTRY not in checkpoint:  # of weights alone, for which Lightning does not ask callbacks
            self._keep_both(checkpoint)

    def _keep_both(self, checkpoint: dict[str, Any]) -> None:
        """The averaged weights as those of the model, and what a run needs to go on."""
        if self._lm is not None and self._lm.average is not None and self._lm._averaged:
            raise RuntimeError(
                "the module has its averaged weights now, and a checkpoint to go on from needs the last ones: save it "
                "after the evaluation, for example in on_train_epoch_end or by a ModelCheckpoint"
            )
        kept: dict[str, Any] = {
            "generators": [torch.get_rng_state(), *torch.cuda.get_rng_state_all()],
            "within_epoch": not self.trainer.is_last_batch,
        }
        if self._lm is not None and self._lm.average is not None:
            if "optimizer_states" in checkpoint:  # or nothing can go on from it
                kept["last"] = changing(self, self._lm.params)
            with self.averaged():
                checkpoint["state_dict"] = {**checkpoint["state_dict"], **changing(self, self._lm.params)}
        checkpoint[ENTRY] = kept


def _forget(module: nn.Module, _: Any) -> None:
    module._lm = None  # type: ignore[assignment]


class LMCallback(Callback):
    """What must come before the other callbacks save or after the Trainer is set up."""

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if stage == "fit":
            check_trainer(trainer)

    def on_save_checkpoint(  # type: ignore[override]
        self, trainer: Trainer, pl_module: LMModule, checkpoint: dict[str, Any]
    ) -> None:
        pl_module._keep_both(checkpoint)

    def on_load_checkpoint(  # type: ignore[override]
        self, trainer: Trainer, pl_module: LMModule, checkpoint: dict[str, Any]
    ) -> None:
        """A run goes on from the last weights, after the module has loaded the averaged ones."""
        if trainer.state.fn == "fit":
            pl_module._resumed = checkpoint.get(ENTRY, {})
            last = {**checkpoint["state_dict"], **pl_module._resumed.get("last", {})}
            trainer.strategy.load_model_state_dict({"state_dict": last}, strict=pl_module.strict_loading)

    def on_fit_start(self, trainer: Trainer, pl_module: LMModule) -> None:  # type: ignore[override]
        found = trainer.optimizers
        if len(found) != 1 or not isinstance(found[0], LM):
            kinds = ", ".join(type(o).__name__ for o in found) or "nothing"
            raise TypeError(f"configure_optimizers returned {kinds}: return one mq.LM(self, loss)")
        warn_of_shadowed(type(pl_module))
        pl_module._lm = found[0]
        self._draw_on(pl_module)  # the order of the next epoch is drawn soon

    def on_train_start(self, trainer: Trainer, pl_module: LMModule) -> None:  # type: ignore[override]
        if pl_module._resumed.get("within_epoch"):
            self._draw_on(pl_module)  # the loader has drawn for an epoch that has begun long ago
        pl_module._resumed = {}

    def _draw_on(self, module: LMModule) -> None:
        """Random numbers go on where the checkpoint was saved."""
        generators = module._resumed.get("generators")
        if generators:
            torch.set_rng_state(generators[0].cpu())
            torch.cuda.set_rng_state_all([state.cpu() for state in generators[1:]])

    def on_validation_end(self, trainer: Trainer, pl_module: LMModule) -> None:  # type: ignore[override]
        pl_module._shown.close()

    on_test_end = on_predict_end = on_validation_end  # type: ignore[assignment]

    def on_exception(  # type: ignore[override]
        self, trainer: Trainer, pl_module: LMModule, exception: BaseException
    ) -> None:
        pl_module._shown.close()


def warn_of_shadowed(kind: type[LMModule]) -> None:
    """A training_step that is not called, as that of Net in `class LMNet(LMModule, Net)`."""
    after = kind.__mro__[kind.__mro__.index(LMModule) + 1 : kind.__mro__.index(LightningModule)]
    shadowed = next((c.__name__ for c in after if "training_step" in vars(c)), None)
    if shadowed and kind.training_step is LMModule.training_step:
        warnings.warn(
            f"{shadowed}.training_step is not called in {kind.__name__}, since LM takes the step, and what it logs is "
            f'missing: log it in on_train_batch_end, which has the Step in outputs["step"], or write a training_step '
            f"in {kind.__name__} that returns super().training_step(batch, batch_idx)",
            stacklevel=2,
        )


def check_trainer(trainer: Trainer) -> None:
    """What LM cannot do, or has no use for."""
    scaler = getattr(trainer.precision_plugin, "scaler", None)
    refusals = [
        (
            trainer.world_size > 1,
            f"the Trainer has {trainer.world_size} processes, and LM does not add up over them, which would drift "
            "apart: Trainer(devices=1, num_nodes=1)",
        ),
        (
            trainer.gradient_clip_val,  # 0 is none
            f"gradient_clip_val={trainer.gradient_clip_val}: LM reads no gradients of parameters, and bounds its steps "
            "by λ: leave it out, or bound the step itself, mq.LM(self, loss, radius=0.1)",
        ),
        (
            trainer.accumulate_grad_batches != 1,
            f"accumulate_grad_batches={trainer.accumulate_grad_batches}: a step needs its batch as a whole: take "
            "larger batches, or use opt.step_over(batches) in a loop of your own",
        ),
        (
            scaler is not None,
            f"precision={trainer.precision!r} scales the loss for gradients in float16, which LM does not take: use "
            "precision='bf16-mixed' or '32-true'",
        ),
    ]
    for refused, words in refusals:
        if refused:
            raise ValueError(words)
