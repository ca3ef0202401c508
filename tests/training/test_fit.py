"""mq.fit from outside: what it ends with, whatever the data are given as."""

from __future__ import annotations

import copy
import re
import warnings

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.func import grad, jacfwd, jacrev, vmap
from torch.utils.data import DataLoader, TensorDataset

import marquardt as mq
from marquardt import step
from marquardt.losses import resolve
from marquardt.sources import source
from marquardt.training.run import evaluated
from support.fits import mse, net, noisy_sine, weights

X, Y = noisy_sine()


def test_five_lines():
    model = net()
    before = mse(model, X, Y)
    result = mq.fit(model, (X, Y), "mse", steps=30)
    assert result.model is model
    assert result.loss == pytest.approx(mse(model, X, Y), rel=1e-10) == min(result.history["loss"])
    assert result.loss < before / 5
    assert len(result.history) == 30
    assert result.reason == "30 steps are done"
    assert "all samples in every step" in result.plan
    assert "Dense" in result.plan
    assert repr(result).startswith("Fit of Sequential: 30 steps")


def test_the_steps_are_those_of_lm():
    """A fit with all data is opt.step again and again."""
    model, twin = net(), net()
    opt = mq.LM(twin, "mse", weight_decay=0.01)
    steps = [opt.step(X, Y) for _ in range(15)]
    found = mq.fit(model, (X, Y), "mse", weight_decay=0.01, steps=15).history
    assert found["objective"] == [s.new_loss for s in steps]
    assert found["loss"] == [s.new_data_loss for s in steps]
    assert found["lam"] == [s.lam for s in steps]
    assert found["gradient"] == [s.slope for s in steps]
    assert found["rule"] == [s.rule for s in steps]


@pytest.mark.parametrize(
    "data",
    [
        (X.float(), Y.float()),
        (X.numpy(), Y.tolist()),
        TensorDataset(X, Y),
        DataLoader(TensorDataset(X, Y), batch_size=40),
        [(X[:15], Y[:15]), (X[15:], Y[15:])],
    ],
    ids=["float32", "arrays", "Dataset", "DataLoader", "batches"],
)
def test_every_form_of_data(data):
    """The same fit, up to the rounding of sums over batches."""
    want, model = net(), net()
    mq.fit(want, (X, Y), "mse", steps=5)
    mq.fit(model, data, "mse", steps=5, batch_size="all")
    torch.testing.assert_close(weights(model), weights(want), rtol=1e-4, atol=1e-4)


def test_weights_of_samples():
    """A sample of weight 2 counts as two."""
    w = torch.ones(40, dtype=torch.float64)
    w[:5] = 2
    once, twice = net(), net()
    mq.fit(once, (X, Y, w), "mse", steps=5)
    mq.fit(twice, (torch.cat([X, X[:5]]), torch.cat([Y, Y[:5]])), "mse", steps=5)
    torch.testing.assert_close(weights(once), weights(twice), rtol=1e-6, atol=1e-6)


def test_classification():
    x = torch.randn(60, 2, dtype=torch.float64)
    y = (x.prod(1) > 0).long()
    model = net(2, 8, 2)
    result = mq.fit(model, (x, y), "cross_entropy", steps=50, weight_decay=1e-3)
    assert (model(x).argmax(1) == y).double().mean() > 0.95
    assert result.history[-1].objective > result.history[-1].loss


# Validation and the best weights.


def test_the_best_weights_by_validation_are_restored():
    model = net(hidden=30)
    held = noisy_sine(20, seed=5)
    result = mq.fit(model, (X[:20], Y[:20]), "mse", validation=held, steps=60, patience=None)
    found = result.history["validation"]
    assert result.loss == min(found) == found[result.best_step - 1]
    assert mse(model, *held) == pytest.approx(result.loss, rel=1e-12)
    assert result.best_step < 60  # it overfits after that
    assert mse(model, X[:20], Y[:20]) > result.history[-1].loss


def test_a_fraction_is_held_out():
    """The fit is that of the others alone, validated on these."""
    from marquardt.sources import source

    train, held = source((X, Y)).split(0.25, seed=7)
    one, other = net(), net()
    a = mq.fit(one, (X, Y), "mse", validation=0.25, seed=7, steps=20)
    b = mq.fit(other, (train.whole.inputs, train.whole.targets), "mse", steps=20,
               validation=(held.whole.inputs, held.whole.targets))  # fmt: skip
    assert a.history == b.history
    assert torch.equal(weights(one), weights(other))
    assert mq.fit(net(), (X, Y), "mse", validation=0.25, seed=8, steps=20).history != a.history


def test_weights_that_only_become_worse_stay():
    model = net()
    mq.fit(model, (X, Y), "mse", steps=100)
    before = weights(model)
    result = mq.fit(model, (X, -Y), "mse", validation=(X, Y), steps=5)
    assert result.best_step == 0
    assert torch.equal(weights(model), before)


def test_validation_is_in_eval_mode_and_draws_nothing():
    model = nn.Sequential(nn.Linear(1, 8), nn.Dropout(0.5), nn.Tanh(), nn.Linear(8, 1)).double()
    state, modes = torch.get_rng_state(), []
    model[1].register_forward_hook(lambda m, *_: modes.append(m.training))
    with_set = mq.fit(model, (X, Y), "mse", validation=(X, Y), steps=2, patience=None)
    assert set(modes) == {True, False}
    assert model.training
    assert all(m.training for m in model.modules())
    assert with_set.loss == pytest.approx(mse(model.eval(), X, Y), rel=1e-12)
    del state


def test_uphill_steps_do_not_count():
    """Without a validation set the least loss is what counts."""
    model = net(hidden=20)
    result = mq.fit(model, (X, Y), "mse", steps=57)
    assert any(rule == "uphill" for rule in result.history["rule"])
    assert mse(model, X, Y) == pytest.approx(min(result.history["objective"]), rel=1e-12)
    assert result.history["objective"][result.best_step - 1] == min(result.history["objective"])
    assert result.loss == pytest.approx(min(result.history["objective"]), rel=1e-12)


LOADER = DataLoader(TensorDataset(X, Y), batch_size=10, shuffle=True)


@pytest.mark.parametrize(
    "options",
    [
        {"weight_decay": 0.05},
        {"weight_decay": mq.Evidence(every=2)},
        {"batch_size": 10, "weight_decay": 0.05},
        {"data": LOADER},
        {"data": LOADER, "batch_size": "all"},
        {"data": [(X[:15], Y[:15]), (X[15:], Y[15:])], "batch_size": "all"},
        {"steps": 0},
        {"validation": (X, Y), "batch_size": 10, "weight_decay": 0.05},
    ],
    ids=["decay", "evidence", "mini", "loader", "streamed", "list", "no steps", "validation"],
)
def test_the_loss_is_that_of_the_model(options):
    """Without weight decay, of all data, whatever the steps were given."""
    model = nn.Sequential(nn.Linear(1, 8), nn.Dropout(0.2), nn.Tanh(), nn.Linear(8, 1)).double()
    result = mq.fit(model, **{"data": (X, Y), "loss": "mse", "steps": 13, **options})
    assert result.loss == pytest.approx(mse(model.eval(), X, Y), rel=1e-12)


class Endless:
    def __iter__(self):
        while True:
            yield X[:20], Y[:20]


def test_the_loss_of_batches_without_end():
    result = mq.fit(net(), Endless(), "mse", steps=12)
    assert result.loss == pytest.approx(sum(result.history["loss"][-10:]) / 10)


def test_few_steps_are_not_followed_by_a_long_pass():
    """Thirty batches: after three steps they are gone through, after two they are not."""
    x, y = noisy_sine(30)
    for steps in (2, 3):
        model = net()
        result = mq.fit(model, (x, y), "mse", batch_size=1, steps=steps)
        want = mse(model, x, y) if steps == 3 else sum(result.history["loss"]) / 2
        assert result.loss == pytest.approx(want, rel=1e-12)


def test_the_loss_of_a_model_that_cannot_be_evaluated():
    class TrainsOnly(nn.Linear):
        def forward(self, x):
            assert self.training, "no eval mode"
            return super().forward(x)

    with pytest.warns(UserWarning, match=re.escape("in eval mode cannot be found (AssertionError: no eval mode")):
        result = mq.fit(TrainsOnly(1, 1).double(), (X, Y), "mse", steps=3)
    assert result.loss == result.history[-1].loss


# Mini-batches.


def test_mini_batches_validate_the_averaged_weights():
    x, y = noisy_sine(600)
    model, twin = net(), net()
    result = mq.fit(model, (x, y), "mse", batch_size=100, validation=noisy_sine(100, seed=3), steps=24, seed=1)
    assert "mini-batches of 100 of 600" in result.plan
    assert [e.step for e in result.history if e.validation == e.validation] == [6, 12, 18, 24]
    assert [e.epoch for e in result.history] == [k // 6 for k in range(24)]
    opt = mq.LM(twin, "mse")
    for epoch in range(4):
        order = torch.randperm(600, generator=torch.Generator().manual_seed(1 + epoch))
        for index in order.split(100):
            opt.step(x[index], y[index])
    with opt.averaged():
        assert mse(twin, *noisy_sine(100, seed=3)) == pytest.approx(result.history[-1].validation, rel=1e-12)
    assert mse(model, *noisy_sine(100, seed=3)) == pytest.approx(min(v for v in result.history["validation"] if v == v))


def test_mini_batches_end_with_the_averaged_weights():
    x, y = noisy_sine(600)
    model, twin = net(), net()
    mq.fit(model, (x, y), "mse", batch_size=100, steps=10, seed=4)
    opt = mq.LM(twin, "mse")
    orders = [torch.randperm(600, generator=torch.Generator().manual_seed(4 + e)) for e in range(2)]
    for index in [i for order in orders for i in order.split(100)][:10]:
        opt.step(x[index], y[index])
    with opt.averaged():
        assert torch.equal(weights(model), weights(twin))


def test_a_loader_shuffles_as_it_does():
    loader = DataLoader(TensorDataset(X, Y), batch_size=10, shuffle=True, generator=torch.Generator().manual_seed(2))
    other = DataLoader(TensorDataset(X, Y), batch_size=10, shuffle=True, generator=torch.Generator().manual_seed(2))
    model, twin = net(), net()
    result = mq.fit(model, loader, "mse", steps=10)
    assert "as they come" in result.plan
    opt, batches = mq.LM(twin, "mse"), [b for _ in range(3) for b in other]
    assert result.history["loss"] == [opt.step(x, y).data_loss for x, y in batches[:10]]


def test_a_smooth_average_is_left_out_if_asked_for():
    x, y = noisy_sine(600)
    model = net()
    result = mq.fit(model, (x, y), "mse", batch_size=100, steps=5, average=None)
    assert result.best_step == 5


# Callbacks and interrupts.


def test_callbacks():
    seen = []

    def watch(running):
        seen.append((running.step.step, len(running.history), running.model is model))
        return running.step.step == 4

    model = net()
    result = mq.fit(model, (X, Y), "mse", callbacks=watch)
    assert seen == [(k, k, True) for k in range(1, 5)]
    assert result.reason == "a callback asked for it"

    def raises(running):
        raise StopIteration

    assert len(mq.fit(net(), (X, Y), "mse", callbacks=[lambda r: None, raises]).history) == 1


@pytest.mark.parametrize("kind", [bool, np.bool_, torch.tensor, np.array], ids=["bool", "NumPy", "torch", "array"])
def test_truth_of_any_kind_ends_it(kind):
    result = mq.fit(net(), (X, Y), "mse", callbacks=lambda r: kind(r.step.step == 2), steps=3)
    assert (len(result.history), result.reason) == (2, "a callback asked for it")


@pytest.mark.parametrize("answer", [1, 0, "stop", 0.5, torch.tensor(1.0)], ids=repr)
def test_answers_that_are_neither_true_nor_false(answer):
    with pytest.raises(TypeError, match=re.escape(f"a callback returned {answer!r}: True to end the fit")):
        mq.fit(net(), (X, Y), "mse", callbacks=lambda r: answer, steps=3)


@pytest.mark.parametrize("validation", [None, noisy_sine(20, seed=5)], ids=["alone", "validated"])
def test_an_interrupt_returns_the_best_so_far(validation):
    model, twin = net(), net()

    def interrupt(running):
        if running.step.step == 7:
            raise KeyboardInterrupt

    result = mq.fit(model, (X, Y), "mse", validation=validation, callbacks=interrupt)
    other = mq.fit(twin, (X, Y), "mse", validation=validation, steps=7)
    assert result.reason == "interrupted"
    assert result.history == other.history
    assert torch.equal(weights(model), weights(twin))


def test_an_interrupt_within_a_step(monkeypatch):
    model, twin = net(), net()
    attempt = step.attempt

    def interrupted(parts, lin, matrices, old, *args):
        if old.steps == 5:
            raise KeyboardInterrupt
        return attempt(parts, lin, matrices, old, *args)

    monkeypatch.setattr(step, "attempt", interrupted)
    result = mq.fit(model, (X, Y), "mse")
    assert (result.reason, len(result.history)) == ("interrupted", 5)
    monkeypatch.undo()
    mq.fit(twin, (X, Y), "mse", steps=5)
    assert torch.equal(weights(model), weights(twin))


# What cannot work is refused before anything changes.


def spoilt(t, *where):
    t = t.clone()
    t[where] = torch.nan
    return t


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"data": (spoilt(X, 3), Y)}, "inputs[3, 0] is nan"),
        ({"data": (X, spoilt(Y, 39))}, "targets[39, 0] is nan"),
        ({"data": (X, Y[:, 0])}, "broadcasting would pair the wrong elements"),
        ({"data": (X[:30], Y)}, "there are 40 samples"),
        ({"validation": (X, Y[:, 0])}, "the validation set: outputs have shape (40, 1), targets (40,): broadcasting"),
        ({"validation": (spoilt(X, 0), Y)}, "the validation set: inputs[0, 0] is nan"),
        ({"validation": X}, "the validation set: data of the type Tensor"),
        (
            {"validation": (torch.cat([X, X], 1), Y)},
            "the validation set: the model failed, since layer Linear '0' takes (N, 1), and the inputs have the shape",
        ),
        ({"data": (X[:, 0], Y)}, "takes (N, 1), and the inputs have the shape (40,): pass one row for each sample"),
        ({"data": "mse", "loss": (X, Y)}, "the loss is a tuple, and the data are 'mse'. Inputs and targets are one"),
        ({"data": X, "loss": Y}, "the loss is a Tensor, both are tensors. Inputs and targets are one argument"),
        ({"validation": 0.001}, "a fraction of 0.001 of 40 samples"),
        ({"validation": 1.5}, "validation=1.5: a fraction of the samples, between 0 and 1"),
        ({"validation": 20}, "validation=20: a fraction"),
        (
            {"validation": 0},
            "validation=0: a fraction of the samples, between 0 and 1, or data of its own; leave it out",
        ),
        ({"validation": True}, "validation=True: a fraction"),
        ({"steps": -1}, "steps=-1: at least 0"),
        ({"steps": 2.5}, "steps=2.5: an integer"),
        ({"patience": 1.5}, "patience=1.5: an integer"),
        ({"goal": "low"}, "goal='low': a number"),
        ({"min_gradient": float("nan")}, "min_gradient=nan"),
        ({"max_lam": -1.0}, "max_lam=-1.0"),
        ({"seconds": True}, "seconds=True"),
        ({"batch_size": 0}, "batch_size=0"),
        ({"batch_size": "half"}, "batch_size='half'"),
        ({"data": [(X, Y)], "batch_size": 8}, "batches of their own"),
        ({"data": DataLoader(TensorDataset(X, Y)), "validation": 0.2}, "pass a validation set of its own"),
        ({"seed": 1.5}, "seed=1.5"),
        ({"callbacks": [3]}, "callbacks= holds a int"),
        ({"progress": "yes"}, "progress='yes'"),
        ({"weight_decay": -1.0}, "weight_decay=-1.0"),
        (
            {"weight_decay": mq.Evidence},
            "weight_decay is the class Evidence: pass a number, an mq.WeightDecay, a dict, or mq.Evidence()",
        ),
        ({"weight_decay": "evidence"}, "weight_decay is 'evidence': pass a number"),
        (
            {"atempts": 3},
            "neither mq.fit nor mq.LM has an option 'atempts': did you mean attempts=? They have validation, ",
        ),
        ({"epochs": 3}, "'epochs': did you mean steps=?"),
        ({"max_fail": 3}, "'max_fail': did you mean patience=?"),
        ({"patiance": 3}, "'patiance': did you mean patience=?"),
        ({"zzz": 3}, "'zzz'. They have"),
    ],
    ids=lambda value: str(value)[:40] if isinstance(value, str) else None,
)
def test_refused(arguments, message):
    model = net()
    before, state = weights(model), torch.get_rng_state()
    with pytest.raises((TypeError, ValueError), match=re.escape(message)):
        mq.fit(model, **{"data": (X, Y), "loss": "mse", **arguments})
    assert torch.equal(weights(model), before)
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize(
    ("model", "data", "message"),
    [
        ((X, Y), net(), "takes an nn.Module as its model, not a tuple; the model seems to be in the place of the data"),
        (nn.Tanh, (X, Y), "takes a model and not its class: make one, Tanh(…)"),
        ([net()], (X, Y), "takes an nn.Module as its model, not a list"),
    ],
)
def test_models_that_are_none(model, data, message):
    with pytest.raises(TypeError, match=re.escape(f"mq.fit(model, data, loss) {message}")):
        mq.fit(model, data, "mse")


@pytest.mark.parametrize("transform", [jacrev, jacfwd, grad, lambda f: vmap(f, randomness="same")])
def test_a_fit_inside_a_transform_is_refused(transform):
    model = net()
    before, random = weights(model), torch.get_rng_state()
    with pytest.raises(ValueError, match=r"inside a torch\.func transform.*call it outside"):
        transform(lambda x: mq.fit(model, (X, Y), "mse", steps=2).loss * x.sum())(torch.ones(2))
    assert torch.equal(weights(model), before)
    assert torch.equal(torch.get_rng_state(), random)


def test_a_bad_batch_later_on_ends_it_with_the_last_weights():
    model, twin = net(), net()
    batches = [(X[:20], Y[:20]), (X[20:], spoilt(Y[20:], 2))]
    with pytest.raises(ValueError, match=re.escape("targets[2, 0] is nan")):
        mq.fit(model, batches, "mse")
    mq.LM(twin, "mse").step(X[:20], Y[:20])
    assert torch.equal(weights(model), weights(twin))


def physical() -> tuple[Tensor, Tensor]:
    """The density of air at kelvin and pascal"""
    torch.manual_seed(0)
    x = torch.stack([250 + 80 * torch.rand(100), 8e4 + 4e4 * torch.rand(100)], 1)
    return x, x[:, 1:] / (287 * x[:, :1])


@pytest.mark.usefixtures("double")
@pytest.mark.parametrize("options", [{"steps": 30}, {"weight_decay": mq.Evidence(), "steps": 60}, {"validation": 0.2}])
@pytest.mark.parametrize("classes", [False, True])
def test_a_fit_that_learnt_nothing_says_so(options, classes):
    """Inputs in pascal and kelvin saturate the first layer; standardised they do not. It is seen without a look at the
    result."""
    x, y = physical()
    loss, targets = ("cross_entropy", (y[:, 0] > y.median()).long()) if classes else ("mse", y)
    for inputs, told in ((x, True), ((x - x.mean(0)) / x.std(0), False)):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 2 if classes else 1))
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            result = mq.fit(model, (inputs, targets), loss, progress=False, **options)
        found = [str(w.message) for w in caught if str(w.message).startswith("mq.fit: ")]
        assert len(found) == told, found
        if told:
            assert re.search(r"the inputs are of the size (9.9e\+04|1e\+05)", found[0])
            assert "standardise the inputs, x = (x - x.mean(0)) / x.std(0)" in found[0]
            assert found[0].removeprefix("mq.fit: ") in result.reason
            assert result.reason in str(result)
            assert caught[-1].filename == __file__


@pytest.mark.usefixtures("double")
def test_evidence_that_takes_all_for_noise_says_so():
    torch.manual_seed(0)
    x, y = torch.randn(300, 1), torch.randn(300, 1)
    with pytest.warns(
        UserWarning, match=r"a constant has the same loss.*or mq.Evidence\(\) has taken all for noise: pass"
    ):
        mq.fit(net(hidden=10), (x, y), "mse", weight_decay=mq.Evidence(), steps=200)


@pytest.mark.usefixtures("double")
@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({}, True),
        ({"validation": 0.2}, False),
        ({"weight_decay": mq.Evidence()}, False),
        ({"weight_decay": 1e-2}, False),
        ({"steps": 3}, False),
    ],
)
def test_a_model_that_passes_through_all_points_says_so(options, told):
    torch.manual_seed(3)
    x = 2 * torch.rand(10, 1) - 1
    y = torch.sin(3 * x) + 0.2 * torch.randn(10, 1)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        result = mq.fit(net(hidden=33), (x, y), "mse", **{"steps": 200, **options})
    words = "the model passes through all 10 targets, as 100 parameters can through any"
    assert [str(w.message).startswith(f"mq.fit: {words}") for w in caught] == [True] * told
    assert (words in str(result)) == told


# BatchNorm.


def normalised(N: int = 300):
    """A network with BatchNorm, and data that are not standardised, in two parts"""
    torch.manual_seed(1)
    x = torch.randn(N, 3) * torch.tensor([1.0, 3.0, 0.3]) + torch.tensor([0.0, 2.0, 5.0])
    y = torch.sin(x[:, :1]) + x[:, 1:2] * x[:, 2:] / 5 + 0.1 * torch.randn(N, 1)
    model = nn.Sequential(nn.Linear(3, 12), nn.BatchNorm1d(12), nn.Tanh(), nn.Linear(12, 1))
    return model, (x[:200], y[:200]), (x[200:], y[200:])


def with_statistics_of(model, x):
    """A copy in eval mode, with the statistics of these samples"""
    found = copy.deepcopy(model).train()
    for layer in found:
        if isinstance(layer, nn.BatchNorm1d):
            layer.reset_running_stats()
            layer.momentum = None
    with torch.no_grad():
        found(x)
    return found.eval()


@pytest.mark.usefixtures("double")
@pytest.mark.parametrize("held", [False, True])
@pytest.mark.parametrize("options", [{}, {"average": None}, {"weight_decay": mq.Evidence(every=2)}], ids=str)
def test_the_statistics_of_batch_norm_are_those_of_the_weights_that_stay(options, held):
    """Not those of the last ten steps, which other weights have taken."""
    model, (x, y), validation = normalised()
    data = {"validation": validation} if held else {}
    result = mq.fit(model, (x, y), "mse", steps=25, **data, **options)
    assert model.training
    loss = mse(with_statistics_of(model, x), *(validation if held else (x, y)))
    assert mse(model.eval(), *(validation if held else (x, y))) == pytest.approx(loss, rel=1e-3)
    assert result.loss == pytest.approx(loss, rel=1e-3)
    assert loss < 0.3 * float(y.var())


@pytest.mark.usefixtures("double")
@pytest.mark.parametrize("loader", [False, True])
@pytest.mark.parametrize("held", [False, True])
def test_the_statistics_of_batch_norm_on_mini_batches(loader, held):
    model, (x, y), validation = normalised()
    data = DataLoader(TensorDataset(x, y), batch_size=50, shuffle=True) if loader else (x, y)
    options = {"validation": validation} if held else {}
    result = mq.fit(model, data, "mse", steps=30, **({} if loader else {"batch_size": 50}), **options)
    here = validation if held else (x, y)
    loss = mse(with_statistics_of(model, x), *here)
    assert mse(model.eval(), *here) == pytest.approx(result.loss, rel=1e-9)
    assert result.loss == pytest.approx(loss, rel=0.2)  # of four batches by themselves


@pytest.mark.usefixtures("double")
def test_the_statistics_of_batch_norm_stay_with_weights_that_stay():
    model, (x, y), _ = normalised()
    with_statistics_of(model, x)
    model[1].running_mean.add_(0.1)
    before = {k: t.clone() for k, t in model.state_dict().items()}
    mq.fit(model, (x, y), "mse", steps=0)
    mq.fit(model, (x, -y), "mse", validation=(x, model.eval()(x).detach()), steps=3)
    assert all(torch.equal(t, before[k]) for k, t in model.state_dict().items())
    frozen = copy.deepcopy(model[1].running_mean)
    model[1].eval()
    mq.fit(model, (x, y), "mse", steps=5)
    assert torch.equal(model[1].running_mean, frozen)


@pytest.mark.usefixtures("double")
def test_a_fit_with_batch_norm_goes_on_as_if_it_had_not_stopped(tmp_path):
    ends = []
    for parts in ([24], [7, 24]):
        model, (x, y), validation = normalised()
        for steps in parts:
            mq.fit(model, (x, y), "mse", steps=steps, batch_size=50, validation=validation,
                   checkpoint=tmp_path / f"{len(parts)}.pt")  # fmt: skip
        again = mq.fit(model, (x, y), "mse", steps=24, batch_size=50, validation=validation,
                       checkpoint=tmp_path / f"{len(parts)}.pt")  # fmt: skip
        ends.append((again.loss, [t.clone() for t in model.state_dict().values()]))
    assert ends[0][0] == ends[1][0]
    assert all(torch.equal(a, b) for a, b in zip(ends[0][1], ends[1][1], strict=True))


@pytest.mark.usefixtures("double")
def test_few_parameters_pass_through_points_for_a_reason():
    x = torch.linspace(-1, 1, 40)[:, None]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        result = mq.fit(nn.Linear(1, 1), (x, 2 * x + 1), "mse")
    assert result.loss < 1e-10


@pytest.mark.parametrize(
    ("loss", "targets"),
    [
        (nn.MSELoss(), lambda: torch.randn(20, 3)),
        (nn.MSELoss(reduction="sum"), lambda: torch.randn(20, 3)),
        (nn.CrossEntropyLoss(label_smoothing=0.1, ignore_index=1), lambda: torch.randint(3, (20,))),
        (nn.BCEWithLogitsLoss(), lambda: torch.rand(20, 3).round()),
        (nn.HuberLoss(), lambda: torch.randn(20, 3)),
    ],
    ids=lambda value: type(value).__name__,
)
@pytest.mark.usefixtures("double")
def test_it_is_torchs(loss, targets):
    x, y, model = torch.randn(20, 2), targets(), net(2, 5, 3)
    for size in (20, 7):
        found = evaluated(model, resolve(loss), source((x, y)).batches(size))
        assert found == pytest.approx(loss(model(x), y).item(), rel=1e-12)


@pytest.mark.usefixtures("double")
def test_weights_of_samples_count_in_evaluation():
    x, y, w, model = torch.randn(20, 2), torch.randn(20, 1), torch.rand(20), net(2, 5, 1)
    found = evaluated(model, resolve("mse"), source((x, y, w)).batches(6))
    want = (w[:, None] * (model(x) - y).square()).sum() / w.sum()
    assert found == pytest.approx(want.item(), rel=1e-12)


@pytest.mark.usefixtures("double")
def test_a_model_that_differentiates_itself():
    class Slope(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = net(1, 5, 1)

        def forward(self, x):
            x = x.requires_grad_()
            (slope,) = torch.autograd.grad(self.inner(x).sum(), x, create_graph=True)
            return slope - x

    model, x = Slope(), torch.randn(9, 1)
    found = evaluated(model, resolve(mq.losses.Residual()), source((x, None)).batches(4))
    assert found == pytest.approx(model(x).square().mean().item(), rel=1e-12)


@pytest.mark.usefixtures("double")
def test_modes_and_random_numbers_stay():
    model = nn.Sequential(nn.Linear(2, 4), nn.Dropout(0.5), nn.BatchNorm1d(4), nn.Linear(4, 1))
    model[2].eval()
    x, y = torch.randn(8, 2), torch.randn(8, 1)
    modes, state = [m.training for m in model.modules()], torch.get_rng_state()
    stats = model[2].running_mean.clone()
    first = evaluated(model, resolve("mse"), source((x, y)).batches())
    assert [m.training for m in model.modules()] == modes
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(model[2].running_mean, stats)
    assert evaluated(model, resolve("mse"), source((x, y)).batches()) == first

    def fails(*_):
        raise ZeroDivisionError

    model[3].register_forward_hook(fails)
    with pytest.raises(ZeroDivisionError):
        evaluated(model, resolve("mse"), source((x, y)).batches())
    assert [m.training for m in model.modules()] == modes


@pytest.mark.usefixtures("double")
def test_nothing_to_weigh():
    loss = resolve(nn.CrossEntropyLoss(ignore_index=0))
    data = source((torch.randn(4, 2), torch.zeros(4, dtype=torch.long))).batches()
    with pytest.raises(ValueError, match="the total weight of the validation set is 0"):
        evaluated(net(2, 3, 3), loss, data)
