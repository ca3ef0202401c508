"""LM under Lightning's Trainer: what a user of any optimizer expects, and what is refused."""

from __future__ import annotations

import copy
import pickle
import warnings
from contextlib import nullcontext

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import EarlyStopping, LearningRateMonitor, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.plugins.precision import MixedPrecision
from torch import nn
from torch.nn.functional import cross_entropy
from torch.optim.lr_scheduler import ReduceLROnPlateau, StepLR
from torch.utils.data import DataLoader

import marquardt as mq
from marquardt.lightning import LMModule, check_trainer, warn_of_shadowed
from support.lightning_nets import QUIET, Net, Resumable, data, loader, made, trainer
from support.steps import theta
from support.unchanged import changes, progress, refused, same, world

pytestmark = [pytest.mark.filterwarnings(w) for w in QUIET]


class Normalized(Net):
    """BatchNorm in train mode: the averaged weights have statistics of their own."""

    def __init__(self, **parts):
        super().__init__(**parts)
        self.layers = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 3))


def by_hand(net, epochs):
    """The same run without Lightning, and the losses of validation at the end of each epoch."""
    opt, losses = net.configure_optimizers(), []
    batches = Resumable(data(), 16)
    for _ in range(epochs):
        for x, y in batches:
            opt.step(x, y)
        with opt.averaged() if opt.average is not None else nullcontext(), torch.no_grad():
            net.eval()
            losses.append(float(torch.stack([cross_entropy(net(x), y) for x, y in loader(shuffle=False)]).mean()))
        net.train()
    return opt, losses


class Losses(L.Callback):
    def __init__(self):
        self.seen = []

    def on_validation_end(self, trainer, pl_module):
        if not trainer.sanity_checking:
            self.seen.append(float(trainer.callback_metrics["val_loss"]))


@pytest.mark.parametrize(
    ("kind", "parts"),
    [(Net, {}), (Net, {"average": None, "rows": mq.Sampled(1)}), (Normalized, {"curvature": mq.MatrixFree()})],
    ids=["default", "no average", "BatchNorm"],
)
def test_a_run_is_that_of_a_plain_loop(kind, parts, tmp_path):
    net, plain = made(kind, **parts), made(kind, **parts)
    seen = Losses()
    run = trainer(tmp_path, max_epochs=3, callbacks=[seen])
    torch.manual_seed(5)
    run.fit(net, Resumable(data(), 16), loader(shuffle=False))
    torch.manual_seed(5)
    opt, losses = by_hand(plain, 3)
    assert run.global_step == 18
    assert same(theta(net), theta(plain))
    assert same(progress(run.optimizers[0].state_dict()), progress(opt.state_dict()))
    assert seen.seen == pytest.approx(losses, rel=1e-6)


# ---- stop and go on


CHECKPOINTS = {  # how it is saved, which of them, the loader, whether there is validation
    "end of an epoch": ({"every_n_epochs": 1}, "epoch=1", loader, False),
    "end of an epoch, validation": ({"monitor": "val_loss"}, "epoch=1", loader, True),
    "last batch of an epoch": ({"every_n_train_steps": 6}, "step=12", loader, False),
    "within an epoch": ({"every_n_train_steps": 9}, "step=9", lambda: Resumable(data(), 16), False),
    "within an epoch, validation": ({"every_n_train_steps": 9}, "step=9", lambda: Resumable(data(), 16), True),
}


@pytest.mark.parametrize(("saving", "stop", "batches", "validates"), CHECKPOINTS.values(), ids=CHECKPOINTS)
def test_a_resumed_run_is_the_undisturbed_one(saving, stop, batches, validates, tmp_path):
    validation = [loader(shuffle=False)] if validates else []
    net, again = made(), made(seed=2)
    run = trainer(tmp_path, max_epochs=4, callbacks=[ModelCheckpoint(tmp_path, save_top_k=-1, **saving)])
    run.fit(net, batches(), *validation)
    (saved,) = tmp_path.glob(f"*{stop}*")
    assert not same(torch.load(saved)["state_dict"], dict(net.state_dict()))
    torch.manual_seed(9)
    other = trainer(tmp_path, max_epochs=4)
    other.fit(again, batches(), *validation, ckpt_path=saved)
    assert (run.global_step, other.global_step) == (24, 24)
    assert same(dict(again.state_dict()), dict(net.state_dict()))
    assert same(progress(other.optimizers[0].state_dict()), progress(run.optimizers[0].state_dict()))
    assert other.callback_metrics == run.callback_metrics


def test_a_checkpoint_saved_after_fit_goes_on_too(tmp_path):
    net, first, second = made(), made(), made(seed=2)
    torch.manual_seed(5)
    trainer(tmp_path, max_epochs=4).fit(net, loader(), loader(shuffle=False))
    torch.manual_seed(5)
    half = trainer(tmp_path, max_epochs=2)
    half.fit(first, loader(), loader(shuffle=False))
    half.save_checkpoint(tmp_path / "half.ckpt")
    first.trainer = None
    for other in (copy.deepcopy(first), pickle.loads(pickle.dumps(first))):
        with first.averaged(), other.averaged():
            assert same(theta(other), theta(first))
        assert same(theta(other), theta(first))
    trainer(tmp_path, max_epochs=4).fit(second, loader(), loader(shuffle=False), ckpt_path=tmp_path / "half.ckpt")
    assert same(theta(second), theta(net))


# ---- which weights

# Steps fit their batches, so that the averaged weights are far from the last ones, and better.
JUMPY = {"schedule": mq.Constant(1e-3)}


class Unaware(L.LightningModule):
    """Loads what others have saved, without LM."""

    def __init__(self, layers):
        super().__init__()
        self.layers = layers


@pytest.mark.parametrize("kind", [Net, Normalized])
@pytest.mark.parametrize(
    ("alone", "options"),
    [(False, {}), (True, {}), (False, {"val_check_interval": 2})],
    ids=["checkpoint", "weights alone", "saved in eval mode"],
)
def test_a_file_has_the_weights_that_were_validated(kind, alone, options, tmp_path):
    net = made(kind, **JUMPY, curvature=mq.MatrixFree())
    best = ModelCheckpoint(tmp_path, monitor="val_loss", save_weights_only=alone)
    trainer(tmp_path, max_epochs=3, callbacks=[best], **options).fit(net, loader(), loader(shuffle=False))
    other = Unaware.load_from_checkpoint(best.best_model_path, layers=kind().layers)
    plain = kind()
    plain.load_state_dict(torch.load(best.best_model_path)["state_dict"])
    assert ("last" in torch.load(best.best_model_path)["marquardt"]) == (not alone)
    for layers in (other.layers.eval(), plain.layers.eval()):
        with torch.no_grad():
            losses = [cross_entropy(layers(x), y) for x, y in loader(shuffle=False)]
        assert float(torch.stack(losses).mean()) == pytest.approx(float(best.best_model_score), rel=1e-6)


@pytest.mark.parametrize("kind", [Net, Normalized])
def test_a_module_with_hooks_of_its_own_goes_on_from_the_last_weights(kind, tmp_path):
    class Own(kind):
        def on_save_checkpoint(self, checkpoint):
            checkpoint["mine"] = 1

        def on_load_checkpoint(self, checkpoint):
            self.loaded = dict(checkpoint["state_dict"])

    parts = {**JUMPY, "curvature": mq.MatrixFree()}
    net = made(Own, **parts)
    run = trainer(tmp_path, max_epochs=2)
    run.fit(net, loader())
    run.save_checkpoint(tmp_path / "two.ckpt")
    again = made(Own, seed=2, **parts)
    trainer(tmp_path, max_epochs=2).fit(again, loader(), ckpt_path=tmp_path / "two.ckpt")
    assert same(dict(again.state_dict()), dict(net.state_dict()))
    assert not same(again.loaded, dict(net.state_dict()))
    with net.averaged():
        assert same(again.loaded, dict(net.state_dict()))


def test_everything_but_training_sees_the_averaged_weights(tmp_path):
    net, seen = made(**JUMPY), Losses()
    best = ModelCheckpoint(tmp_path, monitor="val_loss", save_top_k=1)
    run = trainer(tmp_path, max_epochs=3, callbacks=[seen, best])
    run.fit(net, loader(), loader(shuffle=False))
    last = theta(net)
    with net.averaged():
        averaged = theta(net)
    assert not torch.equal(last, averaged)

    (tested,) = run.test(net, loader(shuffle=False), verbose=False)
    assert tested["test_loss"] == pytest.approx(seen.seen[-1], rel=1e-6)
    predicted = torch.cat(run.predict(net, loader(shuffle=False)))
    assert same(theta(net), last)
    with net.averaged(), torch.no_grad():
        assert same(predicted, net.eval()(data().tensors[0]))

    saved = torch.load(best.best_model_path)
    loaded = Net.load_from_checkpoint(best.best_model_path)
    (validated,) = trainer(tmp_path).validate(loaded, loader(shuffle=False), verbose=False)
    assert validated["val_loss"] == pytest.approx(float(best.best_model_score), rel=1e-6)
    assert same(dict(loaded.state_dict()), saved["state_dict"])

    (tested,) = run.test(net, loader(shuffle=False), ckpt_path="best", verbose=False)  # into the module of this run
    assert tested["test_loss"] == pytest.approx(float(best.best_model_score), rel=1e-6)
    assert same(theta(net), theta(loaded))


def test_a_file_has_both_weights_of_tied_layers_and_one_of_frozen_ones(tmp_path):
    class Tied(Net):
        def __init__(self):
            super().__init__()
            self.frozen = nn.Linear(4, 4).requires_grad_(False)
            self.one = nn.Linear(4, 4)
            self.two = nn.Linear(4, 4)
            self.two.weight = self.one.weight

        def forward(self, x):
            return self.layers(self.two(self.one(self.frozen(x)).tanh()))

    net = made(Tied)
    run = trainer(tmp_path, max_steps=3)
    run.fit(net, loader())
    run.save_checkpoint(tmp_path / "tied.ckpt")
    saved = torch.load(tmp_path / "tied.ckpt")["marquardt"]["last"]
    assert same(saved, {name: t for name, t in net.state_dict().items() if name in saved})
    assert [name for name in net.state_dict() if name not in saved] == ["frozen.weight", "frozen.bias"]
    loaded = Tied.load_from_checkpoint(tmp_path / "tied.ckpt")
    with net.averaged():
        assert same(dict(loaded.state_dict()), dict(net.state_dict()))


def test_an_error_in_validation_puts_the_weights_back(tmp_path):
    class Failing(Net):
        def validation_step(self, batch, batch_idx):
            if self.trainer.global_step == 18:
                self.during = theta(self)
                raise ZeroDivisionError

    net, before = made(Failing, **JUMPY), []
    run = trainer(tmp_path, max_epochs=3, callbacks=[L.pytorch.callbacks.LambdaCallback(
        on_train_batch_end=lambda *_: before.append(theta(net)))])  # fmt: skip
    with pytest.raises(ZeroDivisionError):
        run.fit(net, loader(), loader(shuffle=False))
    assert same(theta(net), before[-1])
    assert not torch.equal(net.during, theta(net))


def test_a_checkpoint_of_the_averaged_weights_is_refused(tmp_path):
    class Saving(Net):
        def on_validation_epoch_end(self):
            if self.trainer.global_step:
                self.trainer.save_checkpoint(tmp_path / "averaged.ckpt")

    with pytest.raises(RuntimeError, match=r"averaged weights now.*on_train_epoch_end"):
        trainer(tmp_path, max_epochs=1).fit(made(Saving), loader(), loader(shuffle=False))
    assert not (tmp_path / "averaged.ckpt").exists()


# ---- what a Trainer does


def test_logged_counted_and_stopped(tmp_path):
    logger, seen = CSVLogger(tmp_path, name="", version=""), Losses()
    stop = EarlyStopping("train_loss", stopping_threshold=10.0)  # at once
    run = trainer(tmp_path, max_epochs=50, logger=logger, log_every_n_steps=1, callbacks=[stop], limit_train_batches=4)
    run.fit(made(), loader())
    assert (run.global_step, run.current_epoch) == (4, 1)
    header, *rows = (tmp_path / "metrics.csv").read_text().splitlines()
    assert {"train_loss_step", "train_loss_epoch", "lam", "accepted", "step"} <= set(header.split(","))
    assert len(rows) == 5  # four steps and an epoch
    net, options = made(), {"precision": "bf16-mixed", "gradient_clip_val": 0}  # which is none
    start = theta(net)
    run = trainer(tmp_path, max_steps=8, val_check_interval=2, callbacks=[seen], **options)
    run.fit(net, loader(), loader(shuffle=False))
    assert (run.global_step, len(seen.seen)) == (8, 4)
    assert theta(net).dtype == torch.float32
    assert theta(net).isfinite().all()
    assert not torch.equal(theta(net), start)


class Opaque:
    """Inputs of which only the model knows how many they are."""

    def __init__(self, x):
        self.x = x

    def __len__(self):
        return 1


@pytest.mark.parametrize("whole", [False, True])
def test_an_epoch_has_the_mean_of_its_losses(whole, tmp_path):
    """Of batches in any form, with weights"""

    class Own(Net):
        def unpack(self, batch):
            return (Opaque(batch["x"]) if whole else batch["x"]), batch["y"], batch["w"]

        def forward(self, x):
            return self.layers(x.x if isinstance(x, Opaque) else x)

    x, y = data().tensors
    sizes = [40, 40, 16]
    batches = [{"x": a, "y": b, "w": torch.arange(1.0, len(a) + 1)} for a, b in zip(x.split(40), y.split(40))]  # noqa: B905
    steps, best, net = Steps(), ModelCheckpoint(tmp_path, monitor="train_loss"), made(Own)
    opt = (twin := copy.deepcopy(net)).configure_optimizers()
    run = trainer(tmp_path, max_epochs=1, callbacks=[steps, best])
    torch.manual_seed(5)
    loaded = DataLoader(batches, batch_size=None)
    run.fit(net, loaded)
    losses = torch.tensor([step.loss for step in steps.taken])
    expected = pytest.approx(float((torch.tensor(sizes) * losses).sum() / sum(sizes)), rel=1e-5)
    for name in ("train_loss", "train_loss_epoch"):
        assert float(run.callback_metrics[name]) == expected
    assert float(best.best_model_score) == expected
    assert float(run.callback_metrics["train_loss_step"]) == pytest.approx(float(losses[-1]))
    torch.manual_seed(5)
    for batch in loaded:
        opt.step(*twin.unpack(batch))
    assert same(theta(net), theta(twin))


class Steps(L.Callback):
    def __init__(self):
        self.taken = []

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        assert float(outputs["loss"]) == pytest.approx(outputs["step"].loss)
        self.taken.append(outputs["step"])


@pytest.mark.parametrize(
    ("scheduler", "rates"),
    [
        (lambda opt: StepLR(opt, 1, 0.5), [1, 1, 0.5, 0.5, 0.25, 0.25]),
        (lambda opt: {"scheduler": StepLR(opt, 1, 0.5), "interval": "step"}, [1, 0.5, 0.25, 0.125, 0.0625, 0.03125]),
        (lambda opt: {"scheduler": ReduceLROnPlateau(opt, factor=0.1, patience=0, threshold=1e9),
                      "monitor": "val_loss"}, [1, 1, 0.1, 0.1, 0.01, 0.01]),
    ],
    ids=["by epochs", "by steps", "by a plateau"],
)  # fmt: skip
def test_schedulers(scheduler, rates, tmp_path):
    class Scheduled(Net):
        def configure_optimizers(self):
            opt = mq.LM(self, "cross_entropy", line_search=None)
            return {"optimizer": opt, "lr_scheduler": scheduler(opt)}

    steps, logger = Steps(), CSVLogger(tmp_path)
    callbacks = [steps, LearningRateMonitor()]
    run = trainer(
        tmp_path, max_epochs=3, limit_train_batches=2, logger=logger, log_every_n_steps=1, callbacks=callbacks
    )
    run.fit(made(Scheduled), loader(), loader(shuffle=False))
    assert [step.lr for step in steps.taken] == pytest.approx(rates)


def test_hooks_of_a_step_and_a_training_step_of_ones_own(tmp_path):
    class Hooked(Net):
        def training_step(self, batch, batch_idx):
            self.seen = [*getattr(self, "seen", []), "begin"]
            return super().training_step(batch, batch_idx)

        def on_before_optimizer_step(self, optimizer):
            assert isinstance(optimizer, mq.LM)
            self.seen.append("step")

    net = made(Hooked)
    trainer(tmp_path, max_steps=2).fit(net, loader())
    assert net.seen == ["begin", "step"] * 2


class Usual(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.layers = nn.Linear(4, 3)

    def forward(self, x):
        return self.layers(x)

    def training_step(self, batch, batch_idx):
        raise AssertionError("LM takes the step")


class Both(LMModule, Usual):
    def configure_optimizers(self):
        return mq.LM(self, "cross_entropy")


class Knowing(Both):
    def training_step(self, batch, batch_idx):
        return super().training_step(batch, batch_idx)


def test_a_module_that_had_another_optimizer(tmp_path):
    run = trainer(tmp_path, max_steps=2)
    with pytest.warns(UserWarning, match=r"Usual.training_step is not called in Both.*outputs\[.step.\]"):
        run.fit(Both(), loader())
    assert run.global_step == run.optimizers[0].state_dict()["marquardt"]["steps"] == 2
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warn_of_shadowed(Knowing)
        warn_of_shadowed(Net)


def test_one_trainer_calls_upon_a_module_several_times(tmp_path, caplog):
    net, run = made(), trainer(tmp_path, max_steps=2)
    with caplog.at_level("INFO", logger="lightning.pytorch"):
        run.fit(net, loader(), loader(shuffle=False))
        run.validate(net, loader(shuffle=False), verbose=False)
        run.test(made(seed=2), loader(shuffle=False), verbose=False)
    assert not [r for r in caplog.records if "will override" in r.message]
    assert [type(c).__name__ for c in run.callbacks].count("LMCallback") == 1


# ---- what is refused


def scaled():
    return MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu"))


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"gradient_clip_val": 0.5}, ["gradient_clip_val=0.5", "leave it out"]),
        ({"accumulate_grad_batches": 4}, ["accumulate_grad_batches=4", "larger batches", "step_over"]),
        ({"plugins": scaled}, ["16-mixed", "bf16-mixed"]),
        ({"devices": 2, "strategy": "ddp"}, ["2 processes", "devices=1"]),
    ],
    ids=["clipping", "accumulation", "float16", "processes"],
)
def test_what_the_trainer_cannot_do_for_lm(options, says, tmp_path):
    net = made()
    run = trainer(tmp_path, max_steps=1, **{k: v() if callable(v) else v for k, v in options.items()})
    before = world(net)
    with refused(*says):
        check_trainer(run) if "devices" in options else run.fit(net, loader())
    assert changes(before, world(net)) == []


class Forgetful(Net):
    def training_step(self, batch, batch_idx):
        return cross_entropy(self(batch[0]), batch[1])


class Alone(Net):
    def configure_callbacks(self):
        return [Losses()]


class Other(Net):
    automatic_optimization = False  # or Lightning itself refuses several

    def configure_optimizers(self):
        return self.parts["make"](self.parameters())


@pytest.mark.filterwarnings("ignore:.*returned `None`, this fit will run with no optimizer")
@pytest.mark.parametrize(
    ("kind", "parts", "batches", "says"),
    [
        *(
            (Other, {"make": make}, None, r"configure_optimizers returned.*mq\.LM\(self, loss\)")
            for make in (torch.optim.SGD, lambda p: [torch.optim.SGD([q]) for q in p], lambda p: None)
        ),
        (Forgetful, {}, None, r"Forgetful.training_step took no step.*super\(\).training_step"),
        (Alone, {}, None, r"Alone.configure_callbacks leaves out .*super\(\).configure_callbacks"),
        *(
            (Net, {}, [batch], r"the batch is .*unpack\(batch\) in Net")
            for batch in ({"x": torch.ones(2, 4)}, torch.ones(2, 4), [torch.ones(2, 4)])
        ),
    ],
)
def test_modules_that_are_refused(kind, parts, batches, says, tmp_path):
    net = made(kind, **parts)
    start = theta(net)
    with pytest.raises((TypeError, RuntimeError), match=says):
        trainer(tmp_path, max_steps=1).fit(net, loader() if batches is None else DataLoader(batches, batch_size=None))
    assert same(theta(net), start)
