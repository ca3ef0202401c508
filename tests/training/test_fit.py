"""mq.fit from outside: what it ends with, whatever the data are given as."""

from __future__ import annotations

import copy
import math
import re
import warnings

import numpy as np
import pytest
import torch
from torch import nn
from torch.func import grad, jacfwd, jacrev, vmap
from torch.utils.data import DataLoader, TensorDataset

import marquardt as mq
from marquardt.sources import source
from support.fits import mse, net, noisy_sine, refused, weights

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
    """Nor does what fails in it leave another mode."""
    model = nn.Sequential(nn.Linear(1, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Tanh(), nn.Linear(8, 1)).double()
    model[1].eval()
    modes, seen, stats, state = [m.training for m in model.modules()], [], model[1].running_mean.clone(), []
    model[2].register_forward_hook(lambda m, *_: seen.append(m.training))
    result = mq.fit(model, (X, Y), "mse", validation=(X, Y), steps=2, patience=None)
    assert set(seen) == {True, False}
    assert result.loss == pytest.approx(mse(copy.deepcopy(model).eval(), X, Y), rel=1e-12)
    state = torch.get_rng_state()
    mq.fit(model, (X, Y), "mse", validation=(X, Y), steps=0)
    assert torch.equal(torch.get_rng_state(), state)
    model[4].register_forward_hook(lambda m, *_: 1 / m.training and None)
    with pytest.raises(ZeroDivisionError):
        mq.fit(model, (X, Y), "mse", validation=(X, Y))
    assert [m.training for m in model.modules()] == modes
    assert torch.equal(model[1].running_mean, stats)


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


def test_the_loss_is_the_mean_of_the_last_steps_where_a_pass_is_long():
    """Thirty batches: after three steps they are gone through, after two they are not."""
    result = mq.fit(net(), Endless(), "mse", steps=12)
    assert result.loss == pytest.approx(sum(result.history["loss"][-10:]) / 10)
    x, y = noisy_sine(30)
    for steps in (2, 3):
        model = net()
        result = mq.fit(model, (x, y), "mse", batch_size=1, steps=steps)
        want = mse(model, x, y) if steps == 3 else sum(result.history["loss"]) / 2
        assert result.loss == pytest.approx(want, rel=1e-12)


@pytest.mark.usefixtures("double")
@pytest.mark.parametrize(
    ("loss", "targets"),
    [
        (nn.MSELoss(), lambda: torch.randn(20, 3)),
        (nn.MSELoss(reduction="sum"), lambda: torch.randn(20, 3)),
        (nn.CrossEntropyLoss(label_smoothing=0.1, ignore_index=1), lambda: torch.randint(3, (20,))),
        (nn.BCEWithLogitsLoss(), lambda: torch.rand(20, 3).round()),
        (nn.HuberLoss(), lambda: torch.randn(20, 3)),
        (nn.CrossEntropyLoss(ignore_index=0), lambda: torch.zeros(20, dtype=torch.long)),
    ],
    ids=lambda value: type(value).__name__,
)
def test_the_loss_of_the_validation_set_is_torchs(loss, targets):
    """Also over batches, and with weights of samples; where nothing weighs, it is refused."""
    x, y, model, w = torch.randn(20, 2), targets(), net(2, 5, 3), torch.rand(20)
    train = x, torch.full_like(y, 2) if y.ndim == 1 else y
    want = loss(model(x), y).item()
    if math.isnan(want):
        with pytest.raises(ValueError, match="the validation set: the total weight of the validation set is 0"):
            mq.fit(model, train, loss, validation=(x, y), steps=0)
        return
    for held in ((x, y), [(x[:7], y[:7]), (x[7:], y[7:])]):
        assert mq.fit(model, train, loss, validation=held, steps=0).loss == pytest.approx(want, rel=1e-12)
    if isinstance(loss, nn.MSELoss) and loss.reduction == "mean":
        want = (w[:, None] * (model(x) - y).square()).mean(1).sum() / w.sum()
        assert mq.fit(model, train, loss, validation=(x, y, w), steps=0).loss == pytest.approx(want.item(), rel=1e-12)


@pytest.mark.usefixtures("double")
def test_the_loss_of_a_model_that_differentiates_itself():
    class Slope(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = net(1, 5, 1)

        def forward(self, x):
            x = x.requires_grad_()
            (slope,) = torch.autograd.grad(self.inner(x).sum(), x, create_graph=True)
            return slope - x

    model, x = Slope(), torch.randn(9, 1)
    found = mq.fit(model, (x, None), mq.losses.Residual(), steps=0).loss
    assert found == pytest.approx(model(x).square().mean().item(), rel=1e-12)


def test_the_loss_of_a_model_that_cannot_be_evaluated():
    class TrainsOnly(nn.Linear):
        def forward(self, x):
            assert self.training, "no eval mode"
            return super().forward(x)

    with pytest.warns(UserWarning, match=re.escape("in eval mode cannot be found (AssertionError: no eval mode")):
        result = mq.fit(TrainsOnly(1, 1).double(), (X, Y), "mse", steps=3)
    assert result.loss == result.history[-1].loss


# Mini-batches.


@pytest.mark.parametrize("held", [None, noisy_sine(100, seed=3)], ids=["alone", "validated"])
def test_mini_batches_have_the_averaged_weights(held):
    """Validated every epoch; without validation the last ones stay."""
    x, y = noisy_sine(600)
    model, twin = net(), net()
    result = mq.fit(model, (x, y), "mse", batch_size=100, validation=held, steps=24, seed=1)
    opt = mq.LM(twin, "mse")
    for epoch in range(4):
        order = torch.randperm(600, generator=torch.Generator().manual_seed(1 + epoch))
        for index in order.split(100):
            opt.step(x[index], y[index])
    assert "mini-batches of 100 of 600" in result.plan
    assert [e.epoch for e in result.history] == [k // 6 for k in range(24)]
    seen = {e.step: e.validation for e in result.history if e.validation == e.validation}
    with opt.averaged():
        if held is None:
            assert torch.equal(weights(model), weights(twin))
            return
        assert mse(twin, *held) == pytest.approx(seen[24], rel=1e-12)
    assert list(seen) == [6, 12, 18, 24]
    assert mse(model, *held) == pytest.approx(min(seen.values()))


def test_a_loader_shuffles_as_it_does():
    loader = DataLoader(TensorDataset(X, Y), batch_size=10, shuffle=True, generator=torch.Generator().manual_seed(2))
    other = DataLoader(TensorDataset(X, Y), batch_size=10, shuffle=True, generator=torch.Generator().manual_seed(2))
    model, twin = net(), net()
    result = mq.fit(model, loader, "mse", steps=10)
    assert "as they come" in result.plan
    opt, batches = mq.LM(twin, "mse"), [b for _ in range(3) for b in other]
    assert result.history["loss"] == [opt.step(x, y).data_loss for x, y in batches[:10]]


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
    for kind in (np.bool_, torch.tensor, np.array):  # truth of any kind
        assert len(mq.fit(net(), (X, Y), "mse", callbacks=lambda r, k=kind: k(r.step.step == 2), steps=3).history) == 2


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


# What cannot work is refused before anything changes.


def spoilt(t, *where):
    t = t.clone()
    t[where] = torch.nan
    return t


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"data": (spoilt(X, 3), Y)}, "inputs[3, 0] is nan"),
        ({"data": (X, Y[:, 0])}, "broadcasting would pair the wrong elements"),
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
        ({"validation": 0}, "validation=0: a fraction of the samples, between 0 and 1, or data of its own; leave it"),
        ({"validation": True}, "validation=True: a fraction"),
        ({"steps": -1}, "steps=-1: at least 0"),
        ({"steps": 2.5}, "steps=2.5: an integer"),
        ({"patience": 1.5}, "patience=1.5: an integer"),
        ({"goal": "low"}, "goal='low': a number"),
        ({"min_gradient": float("nan")}, "min_gradient=nan"),
        ({"seconds": True}, "seconds=True"),
        ({"batch_size": 0}, "batch_size=0"),
        ({"batch_size": "half"}, "batch_size='half'"),
        ({"data": [(X, Y)], "batch_size": 8}, "batches of their own"),
        ({"data": DataLoader(TensorDataset(X, Y)), "validation": 0.2}, "pass a validation set of its own"),
        ({"seed": 1.5}, "seed=1.5"),
        ({"callbacks": [3]}, "callbacks= holds a int"),
        *(
            ({"callbacks": lambda r, a=a: a}, f"a callback returned {a!r}: True to end the fit")
            for a in (1, "stop", torch.tensor(1.0))
        ),
        ({"progress": "yes"}, "progress='yes'"),
        ({"weight_decay": -1.0}, "weight_decay=-1.0"),
        ({"weight_decay": mq.Evidence}, "weight_decay is the class Evidence: pass a number, an mq.WeightDecay, a dict"),
        ({"weight_decay": "evidence"}, "weight_decay is 'evidence': pass a number"),
        ({"atempts": 3}, "neither mq.fit nor mq.LM has an option 'atempts': did you mean attempts=? They have valid"),
        ({"epochs": 3}, "'epochs': did you mean steps=?"),
        ({"patiance": 3}, "'patiance': did you mean patience=?"),
        ({"zzz": 3}, "'zzz'. They have"),
        ({"model": nn.Tanh}, "mq.fit(model, data, loss) takes a model and not its class: make one, Tanh(…)"),
        ({"model": [net()]}, "mq.fit(model, data, loss) takes an nn.Module as its model, not a list"),
        ({"model": (X, Y), "data": net()}, "not a tuple; the model seems to be in the place of the data"),
    ],
    ids=lambda value: str(value)[:40] if isinstance(value, str) else None,
)
def test_refused(arguments, message):
    model = net()
    stepped = "a callback" in message  # which is asked after a step
    with refused(net() if stepped else model, re.escape(message)):
        mq.fit(**{"model": model, "data": (X, Y), "loss": "mse", **arguments})


@pytest.mark.parametrize("transform", [jacrev, jacfwd, grad, lambda f: vmap(f, randomness="same")])
def test_a_fit_inside_a_transform_is_refused(transform):
    model = net()
    with refused(model, r"inside a torch\.func transform.*call it outside"):
        transform(lambda x: mq.fit(model, (X, Y), "mse", steps=2).loss * x.sum())(torch.ones(2))


def test_a_bad_batch_later_on_ends_it_with_the_last_weights():
    model, twin = net(), net()
    batches = [(X[:20], Y[:20]), (X[20:], spoilt(Y[20:], 2))]
    with pytest.raises(ValueError, match=re.escape("targets[2, 0] is nan")):
        mq.fit(model, batches, "mse")
    mq.LM(twin, "mse").step(X[:20], Y[:20])
    assert torch.equal(weights(model), weights(twin))


def told(caught):
    return [str(w.message) for w in caught if str(w.message).startswith("mq.fit: ")]


@pytest.mark.usefixtures("double")
@pytest.mark.parametrize("options", [{"steps": 30}, {"weight_decay": mq.Evidence(), "steps": 60}, {"validation": 0.2}])
@pytest.mark.parametrize("classes", [False, True])
def test_a_fit_that_learnt_nothing_says_so(options, classes):
    """Inputs in pascal and kelvin saturate the first layer; standardised they do not. It is seen without a look at the
    result."""
    torch.manual_seed(0)
    x = torch.stack([250 + 80 * torch.rand(100), 8e4 + 4e4 * torch.rand(100)], 1)
    y = x[:, 1:] / (287 * x[:, :1])  # the density of air
    loss, targets = ("cross_entropy", (y[:, 0] > y.median()).long()) if classes else ("mse", y)
    for inputs, fails in ((x, True), ((x - x.mean(0)) / x.std(0), False)):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 2 if classes else 1))
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            result = mq.fit(model, (inputs, targets), loss, progress=False, **options)
        found = told(caught)
        assert len(found) == fails, found
        if fails:
            assert re.search(r"the inputs are of the size (9.9e\+04|1e\+05)", found[0])
            assert "standardise the inputs, x = (x - x.mean(0)) / x.std(0)" in found[0]
            assert found[0].removeprefix("mq.fit: ") in result.reason
            assert result.reason in str(result)
            assert caught[-1].filename == __file__


LINE = torch.linspace(-1, 1, 40, dtype=torch.float64)[:, None]


@pytest.mark.usefixtures("double")
@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({}, "the model passes through all 10 targets, as 100 parameters can through any"),
        ({"validation": 0.2}, ""),
        ({"weight_decay": mq.Evidence()}, ""),
        ({"weight_decay": 1e-2}, ""),
        ({"steps": 3}, ""),
        ({"model": nn.Linear(1, 1).double(), "data": (LINE, 2 * LINE + 1)}, ""),  # for a reason
        ({"data": torch.randn(2, 300, 1, dtype=torch.float64).unbind(), "weight_decay": mq.Evidence()}, "a constant"),
    ],
)
def test_what_has_learnt_too_much_or_nothing_says_so(options, words):
    torch.manual_seed(3)
    x = 2 * torch.rand(10, 1) - 1
    y = torch.sin(3 * x) + 0.2 * torch.randn(10, 1)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        result = mq.fit(**{"model": net(hidden=33), "data": (x, y), "loss": "mse", "steps": 200, **options})
    found = told(caught)
    assert [m.startswith(f"mq.fit: {words}") for m in found] == [True] * bool(words), found
    assert words in str(result)
    if words == "a constant":
        assert "or mq.Evidence() has taken all for noise: pass validation=0.2" in found[0]


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
@pytest.mark.parametrize(
    ("options", "near"),
    [
        ({}, 1e-3),
        ({"average": None}, 1e-3),
        ({"weight_decay": mq.Evidence(every=2)}, 1e-3),
        ({"batch_size": 50}, 0.2),  # of four batches by themselves
        ({"loader": True}, 0.2),
    ],
    ids=str,
)
def test_the_statistics_of_batch_norm_are_those_of_the_weights_that_stay(options, near, held):
    """Not those of the last ten steps, which other weights have taken."""
    model, (x, y), validation = normalised()
    given = dict(options)
    loader = given.pop("loader", False)
    data = DataLoader(TensorDataset(x, y), batch_size=50, shuffle=True) if loader else (x, y)
    result = mq.fit(model, data, "mse", steps=25, validation=validation if held else None, **given)
    assert model.training
    here = validation if held else (x, y)
    loss = mse(with_statistics_of(model, x), *here)
    assert mse(model.eval(), *here) == pytest.approx(result.loss, rel=1e-3 if near < 0.1 else 1e-9)
    assert result.loss == pytest.approx(loss, rel=near)
    assert loss < 0.3 * float(y.var())


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
