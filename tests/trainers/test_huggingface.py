"""LM in transformers' Trainer: what a user of any optimizer expects, and what is refused."""

from __future__ import annotations

import copy
from functools import partial
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file
from torch import nn
from transformers import BertForSequenceClassification, EarlyStoppingCallback, Trainer, TrainerCallback

import marquardt as mq
from marquardt.huggingface import LMTrainer, check_arguments
from support.steps import theta
from support.transformers_models import Rows, arguments, bert, gpt, tokens_bert, trainer
from support.unchanged import changes, progress, refused, same, world

# Steps fit their batches, so that the averaged weights are far from the last ones.
JUMPY = {"make": partial(mq.LM, schedule=mq.Constant(1e-3))}


class Watched(LMTrainer):
    """Remembers the batches of its steps."""

    def unpack(self, inputs):
        self.batches = [*getattr(self, "batches", []), dict(inputs)]
        return super().unpack(inputs)


class Watcher(TrainerCallback):
    def __init__(self, seen):
        self.seen = seen

    def on_train_begin(self, *args, **kwargs):
        self.seen()

    on_train_end = on_train_begin


class Normalized(nn.Module):
    """BatchNorm: the averaged weights have statistics of their own. No model of transformers."""

    def __init__(self, form=lambda z: {"logits": z}):
        super().__init__()
        torch.manual_seed(1)
        layers = nn.Flatten(), nn.Linear(5 * 4, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 3)
        self.words, self.layers, self.form = nn.Embedding(12, 4), nn.Sequential(*layers), form

    def forward(self, input_ids, attention_mask=None, labels=None):
        return self.form(self.layers(self.words(input_ids)))

    @staticmethod
    def loss_of(model):
        """On all rows, in eval mode"""
        with torch.no_grad():
            z = model.eval().layers(model.words(Rows().words))
        return nn.functional.cross_entropy(z, Rows().labels).item()


def watched(folder, model, loss="cross_entropy", kind="sentence", **options):
    return Watched(model, arguments(folder, **options), train_dataset=Rows(kind=kind), loss=loss)


def labels_of(batch):
    return {k: v for k, v in batch.items() if k != "labels"}, batch["labels"]


def test_a_run_is_that_of_a_plain_loop(tmp_path):
    model = bert(dropout=0.0)
    plain = copy.deepcopy(model)
    run = watched(tmp_path, model)
    output = run.train()
    opt = mq.LM(plain, "cross_entropy")
    steps = [opt.step(*labels_of(batch)) for batch in run.batches]
    assert output.global_step == len(steps) == 18
    with opt.averaged():
        assert same(dict(model.state_dict()), dict(plain.state_dict()))
    assert same(progress(run.optimizer.state_dict()), progress(opt.state_dict()))
    logged = [entry for entry in run.state.log_history if "loss" in entry]
    assert [entry["lam"] for entry in logged] == [step.lam for step in steps]
    assert [entry["loss"] for entry in logged] == pytest.approx([step.loss for step in steps], rel=1e-6)
    assert {entry["learning_rate"] for entry in logged} == {1.0}
    assert not any("grad_norm" in entry for entry in logged)


MODELS = {
    "sentence": (bert, "cross_entropy", "sentence"),
    "tokens": (tokens_bert, "cross_entropy", "tokens"),
    "causal": (gpt, "cross_entropy", "causal"),
    "regression": (partial(bert, num_labels=1), "mse", "regression"),
    "several labels": (partial(bert, problem_type="multi_label_classification"), "bce", "multi"),
}


@pytest.mark.parametrize(
    ("make", "loss", "kind", "smoothing"),
    [*((*m, 0.0) for m in MODELS.values()), *((*m, 0.1) for m in MODELS.values() if m[1] == "cross_entropy")],
)
def test_the_loss_is_that_of_the_model(make, loss, kind, smoothing, tmp_path):
    """In a step and in evaluation"""
    model = make(dropout=0.0)
    twin = copy.deepcopy(model)
    options = {"label_smoothing_factor": smoothing, "per_device_eval_batch_size": 48}
    run = watched(tmp_path, model, loss, kind, max_steps=1, **options)
    rows = Rows(kind=kind)
    predicted = run.predict(rows)
    run.batches = []
    run.train()
    usual = Trainer(twin, arguments(tmp_path, label_smoothing_factor=smoothing))
    own = usual.compute_loss(twin, dict(run.batches[0])).item()
    assert run.state.log_history[0]["loss"] == pytest.approx(own, rel=1e-5)
    assert run.compute_loss(twin, dict(run.batches[0])).item() == pytest.approx(own, rel=1e-5)
    assert not same(theta(model), theta(twin))
    batch = {k: torch.stack([row[k] for row in rows]) for k in rows[0]}
    own = usual.compute_loss(twin.eval(), dict(batch)).item()
    assert predicted.metrics["test_loss"] == pytest.approx(own, rel=1e-5)
    logits = predicted.predictions[0] if isinstance(predicted.predictions, tuple) else predicted.predictions
    torch.testing.assert_close(torch.from_numpy(logits), twin(**batch).logits.detach())


@pytest.mark.parametrize("form", [lambda z: z, lambda z: (z,), lambda z: {"logits": z}])
def test_evaluation_of_models_that_return_no_loss(form, tmp_path):
    model = Normalized(form)
    run = trainer(tmp_path, model)
    assert run.evaluate()["eval_loss"] == pytest.approx(Normalized.loss_of(model), rel=1e-5)
    assert run.predict(Rows()).predictions.shape == (48, 3)


def test_labels_are_shifted_as_told(tmp_path):
    run = trainer(tmp_path, gpt(), {"shift_labels": False}, kind="causal")
    batch = {"input_ids": torch.ones(2, 5), "labels": torch.arange(10).view(2, 5)}
    inputs, targets = run.unpack(batch)
    assert list(inputs) == ["input_ids"]
    assert torch.equal(targets, batch["labels"])
    run.shift_labels = None
    assert run.unpack(batch)[1].tolist() == [[1, 2, 3, 4, -100], [6, 7, 8, 9, -100]]


# ---- stop and go on


def lora(seed=1):
    return get_peft_model(
        bert(seed=seed), LoraConfig(r=2, target_modules=["query", "value"], modules_to_save=["classifier"])
    )


RUNS = {
    "within an epoch": (bert, "sentence", {"save_strategy": "steps", "save_steps": 9}, 9),
    "end of an epoch": (bert, "sentence", {"save_strategy": "epoch"}, 12),
    "LoRA": (lora, "sentence", {"save_strategy": "steps", "save_steps": 9}, 9),
    "causal": (partial(gpt, dropout=0.1), "causal", {"save_strategy": "steps", "save_steps": 9}, 9),
}


def told(run):
    """What was logged, less the clock."""
    clock = ("runtime", "per_second")
    return [{k: v for k, v in entry.items() if not k.endswith(clock)} for entry in run.state.log_history[:-1]]


@pytest.mark.parametrize(("make", "kind", "saving", "stop"), RUNS.values(), ids=RUNS)
def test_a_resumed_run_is_the_undisturbed_one(make, kind, saving, stop, tmp_path):
    options = {"eval_strategy": "epoch", "lr_scheduler_type": "cosine", **saving}
    run = trainer(tmp_path / "one", make(), JUMPY, kind=kind, **options)
    run.train()
    model = make(seed=2)
    if make is lora:  # the checkpoint has the adapter alone
        frozen = {k: v for k, v in make().state_dict().items() if "lora" not in k and "modules_to_save" not in k}
        model.load_state_dict(frozen, strict=False)
    other = trainer(tmp_path / "two", model, JUMPY, kind=kind, **options)
    other.train(resume_from_checkpoint=str(tmp_path / "one" / f"checkpoint-{stop}"))
    assert (run.state.global_step, other.state.global_step) == (18, 18)
    assert same(dict(model.state_dict()), dict(run.model.state_dict()))
    assert same(progress(other.optimizer.state_dict()), progress(run.optimizer.state_dict()))
    assert told(other) == told(run)


def test_a_second_run_goes_on_from_the_last_weights(tmp_path):
    model = bert(dropout=0.0)
    plain = copy.deepcopy(model)
    args = arguments(tmp_path, save_strategy="epoch")
    run = Watched(model, args, train_dataset=Rows(), loss="cross_entropy", **JUMPY)
    opt = JUMPY["make"](plain, "cross_entropy")
    for _ in range(2):
        run.batches = []
        run.train()
        for batch in run.batches:
            opt.step(*labels_of(batch))
        with opt.averaged():
            assert same(theta(model), theta(plain))
        assert not same(theta(model), theta(plain))
    other = bert(seed=5)
    model.load_state_dict(other.state_dict())  # they are to train now, and are not to be replaced
    start, kept = [], run.optimizer.state_dict()["last weights"]
    run.add_callback(Watcher(lambda: start.append(theta(model))))
    run.train()
    assert same(start[0], theta(other))
    assert not same(torch.load(tmp_path / "checkpoint-18" / "optimizer.pt")["last weights"], kept)


# ---- which weights


def test_everything_but_training_sees_the_averaged_weights(tmp_path, monkeypatch):
    model, ends = bert(dropout=0.0), []
    plain = copy.deepcopy(model)
    options = {"save_strategy": "epoch", "eval_strategy": "epoch"}
    run = Watched(model, arguments(tmp_path, **options), train_dataset=Rows(), eval_dataset=Rows(),
                  loss="cross_entropy", callbacks=[Watcher(lambda: ends.append(theta(model)))], **JUMPY)  # fmt: skip
    run.train()
    opt = JUMPY["make"](plain, "cross_entropy")
    for batch in run.batches[:6] + run.batches[8:14] + run.batches[16:22]:  # evaluation has batches too
        opt.step(*labels_of(batch))
    last = theta(plain)
    with opt.averaged():
        averaged = theta(plain)
    assert not torch.equal(averaged, last)
    assert same(theta(model), averaged)
    assert same(ends[1], averaged)  # callbacks that save the model at the end have them too

    evaluated = [entry["eval_loss"] for entry in run.state.log_history if "eval_loss" in entry]
    assert run.evaluate()["eval_loss"] == evaluated[-1]
    predicted = run.predict(Rows())
    assert predicted.metrics["test_loss"] == evaluated[-1]
    saved = torch.load(tmp_path / "checkpoint-18" / "optimizer.pt")["last weights"]
    assert same(torch.cat([saved[name].flatten() for name, _ in model.named_parameters()]), last)
    run.save_model(str(tmp_path / "final"))
    for folder in ("checkpoint-18", "final"):
        assert same(theta(BertForSequenceClassification.from_pretrained(tmp_path / folder)), averaged)
    monkeypatch.setattr(Trainer, "push_to_hub", lambda self: theta(self.model))
    assert same(run.push_to_hub(), averaged)
    assert same(theta(model), averaged)

    model.load_state_dict(bert(seed=5).state_dict())  # other weights, of which there is no average
    usual = Trainer(model, arguments(tmp_path), eval_dataset=Rows())
    assert run.evaluate()["eval_loss"] == pytest.approx(usual.evaluate()["eval_loss"], rel=1e-6)


def test_a_checkpoint_within_training_has_the_averaged_weights(tmp_path):
    """Also after an error in an evaluation the model has the last ones."""

    def fails(_):
        if run.state.global_step == 18 and not hasattr(fails, "during"):
            fails.during = theta(run.model)
            raise ZeroDivisionError
        return {}

    options = {"save_strategy": "steps", "save_steps": 9, "eval_strategy": "steps", "eval_steps": 9}
    lm = {**JUMPY, "compute_metrics": fails}
    run = trainer(tmp_path, Normalized(), lm, per_device_eval_batch_size=48, **options)
    with pytest.raises(ZeroDivisionError):
        run.train()
    assert not torch.equal(fails.during, theta(run.model))
    with run.averaged():
        assert same(fails.during, theta(run.model))
    run = trainer(tmp_path, Normalized(), JUMPY, per_device_eval_batch_size=48, **options)
    run.train()
    evaluated = [entry["eval_loss"] for entry in run.state.log_history if "eval_loss" in entry]
    for step, loss in zip((9, 18), evaluated, strict=True):
        model = Normalized()
        model.load_state_dict(load_file(tmp_path / f"checkpoint-{step}" / "model.safetensors"))
        assert Normalized.loss_of(model) == pytest.approx(loss, rel=1e-5)
    assert Normalized.loss_of(run.model) == pytest.approx(evaluated[-1], rel=1e-5)
    other = trainer(tmp_path / "two", Normalized(), JUMPY, **options)
    other.train(resume_from_checkpoint=str(tmp_path / "checkpoint-9"))
    assert same(dict(other.model.state_dict()), dict(run.model.state_dict()))


@pytest.mark.parametrize("alone", [False, True], ids=["checkpoints", "weights alone"])
@pytest.mark.parametrize("average", [mq.EMA(), None], ids=["average", "no average"])
def test_the_best_weights_at_the_end(average, alone, tmp_path):
    options = {"save_strategy": "epoch", "eval_strategy": "epoch", "load_best_model_at_end": True}
    options |= {"save_only_model": alone, "num_train_epochs": 5}
    patience = EarlyStoppingCallback(early_stopping_patience=1, early_stopping_threshold=10.0)  # at once
    lm = {"make": partial(JUMPY["make"], average=average), "callbacks": [patience]}
    run = trainer(tmp_path, bert(dropout=0.0), lm, **options)
    run.train()
    best = Path(run.state.best_model_checkpoint)
    assert run.state.global_step < 30
    assert run.evaluate()["eval_loss"] == run.state.best_metric
    assert same(theta(BertForSequenceClassification.from_pretrained(best)), theta(run.model))
    if not alone:
        found = torch.load(best / "optimizer.pt")
        assert same(progress(found), progress(run.lm.state_dict()))
        assert same(found.get("last weights"), run.optimizer.state_dict().get("last weights"))


def test_the_best_weights_keep_their_statistics(tmp_path):
    options = {"save_strategy": "epoch", "eval_strategy": "epoch", "load_best_model_at_end": True}
    patience = EarlyStoppingCallback(early_stopping_patience=1, early_stopping_threshold=10.0)  # after the best
    run = trainer(tmp_path, Normalized(), {**JUMPY, "callbacks": [patience]}, metric_for_best_model="eval_loss",
                  greater_is_better=True, num_train_epochs=5, **options)  # fmt: skip
    run.train()
    assert Path(run.state.best_model_checkpoint).name != f"checkpoint-{run.state.global_step}"
    assert run.evaluate()["eval_loss"] == run.state.best_metric
    assert Normalized.loss_of(run.model) == pytest.approx(run.state.best_metric, rel=1e-5)


# ---- arguments


@pytest.mark.parametrize(
    ("options", "rates"),
    [
        ({}, [1, 1, 1, 1]),
        ({"warmup_steps": 2}, [0, 0.5, 1, 1]),
        ({"lr_scheduler_type": "polynomial", "lr_scheduler_kwargs": {"lr_end": 0.2}}, [1, 0.8, 0.6, 0.4]),
    ],
    ids=["default", "warm-up", "polynomial"],
)
def test_schedules_multiply_a_rate_of_one(options, rates, tmp_path):
    args = arguments(tmp_path, max_steps=4, **options)
    kind = args.lr_scheduler_type
    run = LMTrainer(bert(), args, train_dataset=Rows(), loss="cross_entropy", make=partial(mq.LM, line_search=None))
    run.train()
    assert [e["learning_rate"] for e in run.state.log_history if "loss" in e] == pytest.approx(rates)
    assert args.lr_scheduler_type == kind  # of the user


def test_a_preset_and_a_model_that_is_made_anew(tmp_path):
    run = trainer(tmp_path, None, {"make": mq.presets.hessian_free, "model_init": lambda: bert()}, max_steps=2)
    run.train()
    first, opt = theta(run.model), run.lm
    assert isinstance(opt.curvature, mq.MatrixFree)
    assert 0 < run.evaluate()["eval_loss"] < 10  # without an average
    run.train()
    assert run.lm is not opt
    assert same(theta(run.model), first)  # the same seed


REFUSED = [
    ("learning_rate", 2e-5, "natural one is 1"),
    ("learning_rate", 0.0, "natural one is 1"),
    ("max_grad_norm", 0.5, "leave it out"),
    ("weight_decay", 0.01, "weight_decay"),
    ("gradient_accumulation_steps", 2, "per_device_train_batch_size"),
    ("optim", "sgd", "LM is the optimizer"),
    ("adam_beta2", 0.95, "LM is the optimizer"),
]
ELSEWHERE = [
    ("fp16", True, "bf16=True"), ("deepspeed", "config.json", "one device"), ("fsdp", ["full_shard"], "one device"),
]  # fmt: skip


def test_all_that_is_refused_is_told_at_once(tmp_path):
    """Whether a Trainer is made with it, or a search of hyperparameters has changed it"""
    model = bert()
    run, before = trainer(tmp_path, model), world(model)
    args = arguments(tmp_path, **{name: value for name, value, _ in REFUSED})
    for name, value, _ in ELSEWHERE:  # without a GPU transformers itself refuses some of them
        setattr(args, name, value)
    args._n_gpu = 2
    words = [part for name, value, says in [*REFUSED[1:], *ELSEWHERE] for part in (f"{name}={value!r}: ", says)]
    with refused(*words, "2 devices", "CUDA_VISIBLE_DEVICES=0"):
        check_arguments(args)
    for change in ({"learning_rate": 2e-5}, {"max_grad_norm": 0.5}):
        with refused(*(f"{name}={value}" for name, value in change.items())):
            trainer(tmp_path / "run", model, **change)
    run.args.learning_rate = 0.1
    with refused("learning_rate=0.1"):
        run.train()
    assert changes(before, world(model)) == []
    assert not (tmp_path / "run").exists()


def test_arguments_that_change_nothing(tmp_path):
    """Nor does bfloat16, but for rounding."""
    usual = {"learning_rate": 1.0, "optim": "adamw_torch", "max_grad_norm": 0.0}
    one, other, coarse = (
        trainer(tmp_path, bert(dropout=0.0), max_steps=3, **options) for options in ({}, usual, {"bf16": True})
    )
    for run in (one, other, coarse):
        run.train()
    assert same(theta(one.model), theta(other.model))
    assert told(one) == told(other)
    assert theta(coarse.model).dtype == torch.float32
    assert not torch.equal(theta(coarse.model), theta(bert(dropout=0.0)))
    assert coarse.evaluate()["eval_loss"] == pytest.approx(one.evaluate()["eval_loss"], rel=0.1)


@pytest.mark.parametrize(
    ("lm", "options", "says"),
    [
        ({"optimizers": (torch.optim.SGD([nn.Parameter(torch.ones(1))]), None)}, {}, ["optimizers", "make="]),
        ({"optimizer_cls_and_kwargs": (torch.optim.SGD, {})}, {}, ["optimizer_cls_and_kwargs", "make="]),
        ({"compute_loss_func": lambda *_: 0.0}, {}, ["compute_loss_func", "loss="]),
        ({"loss": "mse"}, {"label_smoothing_factor": 0.1}, ["label_smoothing_factor=0.1", "SquaredError"]),
        ({"loss": "crossentropy"}, {}, ["crossentropy", "cross_entropy"]),
    ],
    ids=["optimizer", "class", "loss function", "smoothing", "unknown loss"],
)  # fmt: skip
def test_what_cannot_go_together(lm, options, says, tmp_path):
    model = bert()
    before = world(model)
    with refused(*says):
        trainer(tmp_path, model, lm, **options)
    assert changes(before, world(model)) == []


def test_batches_without_labels_and_with_several(tmp_path):
    run = trainer(tmp_path, bert())
    with refused("no 'labels'", "input_ids"):
        run.unpack({"input_ids": torch.ones(2, 5)})
    run.label_names = ["start", "end"]
    with refused("start, end", "unpack(inputs)"):
        run.unpack({"input_ids": torch.ones(2, 5), "start": torch.ones(2), "end": torch.ones(2)})
