"""Trainers: what they average and evaluate, and that they are what they say."""

import copy
import io
import itertools
import sys
from contextlib import redirect_stdout

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import parameters_to_vector, vector_to_parameters

import marquardt as mq
from marquardt.paper import problems, trainers
from marquardt.paper.methods import METHODS
from marquardt.paper.trainers import Ours, Stepwise, Unavailable, deterministic
from support.made_trainers import EVERY, PROBLEMS, batches_for, build, evaluated, model_for, trained, weights

# --- averages ---


class Walk(Stepwise):
    """Weights that go where the batch says."""

    def step(self, x, y):
        vector_to_parameters(x.clone(), self.model.parameters())


def by_hand(path, decay):
    """mq.EMA of a path of weights (t, n)."""
    rule, mean, found = mq.EMA(decay), None, []
    for count, theta in enumerate(path):
        mean = theta if mean is None else rule.update(mean, theta, count)
        found.append(mean)
    return torch.stack(found)


@pytest.mark.parametrize("decay", [0.0, 0.5, 0.95])
def test_average_of_a_trainer_is_an_ema(decay):
    path = torch.randn(30, 31, dtype=torch.float64).cumsum(0)
    trainer = Walk(problems.sine_mlp(0), decay)
    seen, kept = [], []

    def after():
        seen.append(evaluated(trainer))
        kept.append(weights(trainer.model))
        return len(seen) == 30

    trainer.run(zip(path, path, strict=True), after)
    torch.testing.assert_close(torch.stack(seen), by_hand(path, decay), rtol=1e-13, atol=1e-13)
    assert torch.equal(torch.stack(kept), path)
    if decay == 0.95:  # its first points, written out: β = 2/11, 3/12, …
        torch.testing.assert_close(seen[1], 2 / 11 * path[0] + 9 / 11 * path[1])
        torch.testing.assert_close(seen[2], 0.25 * seen[1] + 0.75 * path[2])


def test_weights_come_back_after_an_error():
    trainer = Walk(problems.sine_mlp(0), 0.5)
    path = torch.randn(2, 31, dtype=torch.float64)
    trainer.run(zip(path, path, strict=True), iter([False, True]).__next__)
    flags = [p.requires_grad for p in trainer.model.parameters()]
    assert not torch.equal(evaluated(trainer), path[-1])
    with pytest.raises(KeyError), trainer.evaluated():
        raise KeyError
    assert torch.equal(weights(trainer.model), path[-1])
    assert flags == [p.requires_grad for p in trainer.model.parameters()] == [True] * 4


def test_without_an_average_the_weights_are_evaluated():
    for average in (None, 0.9):
        trainer = Walk(problems.sine_mlp(0), average)
        assert torch.equal(evaluated(trainer), weights(problems.sine_mlp(0)))  # no step yet
    trainer = Walk(problems.sine_mlp(0), None)
    path = torch.randn(3, 31, dtype=torch.float64)
    trainer.run(zip(path, path, strict=True), iter([False, False, True]).__next__)
    assert torch.equal(evaluated(trainer), path[-1])


@pytest.mark.parametrize("problem", PROBLEMS)
def test_ours_evaluates_what_lm_averages(problem):
    trainer = build("lm", problem)
    assert isinstance(trainer, Ours)
    assert torch.equal(evaluated(trainer), weights(trainer.model))
    trained(trainer, problem, 3)
    with trainer.opt.averaged():
        averaged = weights(trainer.model)
    assert torch.equal(evaluated(trainer), averaged)
    if problem == "mnist":  # on the same data it starts anew
        assert not torch.equal(averaged, weights(trainer.model))
    before = weights(trainer.model)
    with pytest.raises(KeyError), trainer.evaluated():
        raise KeyError
    assert torch.equal(weights(trainer.model), before)
    plain = build("lm", problem, average=None)
    trained(plain, problem, 2)
    assert torch.equal(evaluated(plain), weights(plain.model))


@pytest.mark.parametrize(("problem", "key"), EVERY)
def test_average_does_not_disturb_the_training(problem, key):
    """With decay 0 the average is the last point: looking at it must change nothing."""
    torch.manual_seed(0)
    none = 0.0 if key == "lm" else None  # λ of Balanced follows the average, and is another without one
    plain = trained(build(key, problem, average=none), problem, 4)
    torch.manual_seed(0)
    averaged = trained(build(key, problem, average=0.0), problem, 4, evaluated)
    assert torch.equal(plain, averaged)


@pytest.mark.parametrize(("problem", "key"), [pair for pair in EVERY if pair[1] in ("bfgs", "sgd", "psgd", "tlm")])
def test_every_method_can_have_its_weights_averaged(problem, key):
    torch.manual_seed(0)
    path = trained(build(key, problem, average=None), problem, 4)
    torch.manual_seed(0)
    found = trained(build(key, problem, average=0.8), problem, 4, evaluated)
    assert not torch.equal(path[0], path[-1])
    torch.testing.assert_close(found, by_hand(path, 0.8))


# --- torch.optim ---


@pytest.mark.parametrize("problem", PROBLEMS)
@pytest.mark.parametrize(
    ("key", "make"),
    [
        ("sgd", lambda p: torch.optim.SGD(p, lr=0.03, momentum=0.7, weight_decay=0.01)),
        ("adam", lambda p: torch.optim.Adam(p, lr=0.03, betas=(0.8, 0.95))),
        ("lbfgs", lambda p: torch.optim.LBFGS(p, lr=0.03, max_iter=3, history_size=2)),
    ],
)
def test_torch_optimizers_are_torchs(problem, key, make):
    hyper = {
        "sgd": {"lr": 0.03, "momentum": 0.7, "weight_decay": 0.01},
        "adam": {"lr": 0.03, "beta1": 0.8, "beta2": 0.95},
        "lbfgs": {"lr": 0.03, "iterations": 3, "history": 2},
    }[key]
    trainer = build(key, problem, deterministic(model_for(problem)), **hyper)
    model = deterministic(model_for(problem))
    opt, loss = make(model.parameters()), {"sine": F.mse_loss, "mnist": F.cross_entropy}[problem]
    for x, y in batches_for(problem, 3):

        def closure(x=x, y=y):
            opt.zero_grad()
            value = loss(model(x), y)
            value.backward()
            return value

        opt.step(closure)
    torch.testing.assert_close(trained(trainer, problem, 3)[-1], weights(model), rtol=1e-4, atol=1e-6)


# --- BFGS ---


def test_bfgs_is_one_call_of_scipy(monkeypatch):
    optimize = pytest.importorskip("scipy.optimize")
    x, y = problems.sine(0)
    model = problems.sine_mlp(0)

    def value_and_gradient(theta):
        vector_to_parameters(torch.tensor(theta), model.parameters())
        value = F.mse_loss(model(x), y)
        return value.item(), parameters_to_vector(torch.autograd.grad(value, model.parameters())).numpy()

    path = []
    minimize = optimize.minimize
    found = minimize(
        value_and_gradient,
        weights(model).numpy(),
        jac=True,
        method="BFGS",
        callback=lambda theta: path.append(torch.tensor(theta)),
        options={"gtol": 0.0, "maxiter": 25, "c2": 0.5},
    )
    calls = []
    monkeypatch.setattr(optimize, "minimize", lambda *a, **k: calls.append(1) or minimize(*a, **k))
    trainer = build("bfgs", "sine", c2=0.5)
    ours = trained(trainer, "sine", 25)
    assert torch.equal(ours, torch.stack(path))
    assert torch.equal(weights(trainer.model), torch.tensor(found.x))
    assert len(calls) == 1


def test_bfgs_stops_where_nothing_is_left_to_do():
    pytest.importorskip("scipy")
    model = nn.Linear(1, 1).double()
    x = torch.linspace(-1, 1, 9, dtype=torch.float64).unsqueeze(1)
    trainer = build("bfgs", "sine", model)
    steps = []
    trainer.run(itertools.repeat((x, 2 * x + 1)), lambda: steps.append(weights(model)) or len(steps) > 100)
    assert 1 <= len(steps) < 100
    torch.testing.assert_close(weights(model), torch.tensor([2.0, 1.0], dtype=torch.float64))


# --- the other libraries ---


def test_peer_gets_leaky_relus():
    before = problems.digits_cnn(0)
    start = weights(before)
    trainer = build("tlm", "mnist")
    kinds = [type(module) for module in trainer.model.modules()]
    assert nn.RReLU not in kinds
    assert kinds.count(nn.LeakyReLU) == 2
    assert torch.equal(weights(trainer.model), start)
    x, _ = next(batches_for("mnist"))
    torch.testing.assert_close(problems.predict(trainer.model, x), problems.predict(before, x))
    trained(trainer, "mnist", 1)
    assert not torch.equal(weights(trainer.model), start)


@pytest.mark.parametrize(("problem", "key"), EVERY)
def test_model_of_the_run_is_the_one_that_is_trained(problem, key):
    model = model_for(problem)
    trainer = build(key, problem, model)
    assert trainer.model is model
    assert all(module.training for module in model.modules())


def test_deterministic():
    inner = nn.Sequential(nn.Linear(3, 3), nn.RReLU(0.1, 0.5))
    model = nn.Sequential(nn.Linear(2, 3), nn.RReLU(), inner, nn.ReLU(), nn.LeakyReLU(0.7))
    twin = copy.deepcopy(model)
    parameters = list(model.parameters())
    assert deterministic(model) is model
    assert all(a is b for a, b in zip(parameters, model.parameters(), strict=True))
    kinds = [nn.Linear, nn.LeakyReLU, nn.Sequential, nn.ReLU, nn.LeakyReLU]
    assert [type(module) for module in model] == kinds
    assert inner[1].negative_slope == pytest.approx(0.3)
    assert model[4].negative_slope == 0.7
    x = torch.randn(50, 2)
    torch.testing.assert_close(model(x), twin.eval()(x))
    assert torch.equal(model.train()(x), model.eval()(x))


@pytest.mark.parametrize("key", ["psgd", "tlm", "bfgs"])
def test_other_libraries_print_nothing(key):
    said = io.StringIO()
    with redirect_stdout(said):
        trained(build(key, "sine"), "sine", 3)
    assert said.getvalue() == ""


@pytest.mark.parametrize(
    ("key", "module", "package"), [("psgd", "psgd_torch", "psgd-torch"), ("bfgs", "scipy.optimize", "scipy")]
)
def test_missing_package_is_named(monkeypatch, key, module, package):
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(Unavailable, match=f"needs the package {package}: pip install {package}"):
        METHODS[key].build(problems.sine_mlp(0), "mse", METHODS[key].hyper("sine"))


def test_missing_peer_is_named(monkeypatch, tmp_path):
    for name in [name for name in sys.modules if name.split(".")[0] == "torch_levenberg_marquardt"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    with pytest.raises(Unavailable, match="needs the package torch-levenberg-marquardt: pip install --no-deps"):
        trainers.peer("training")
    assert "torch_levenberg_marquardt" not in sys.modules


def test_peer_whose_package_cannot_be_imported_whole(monkeypatch, tmp_path):
    """Its __init__ wants Lightning, its step does not."""
    for name in [name for name in sys.modules if name.split(".")[0] == "torch_levenberg_marquardt"]:
        monkeypatch.delitem(sys.modules, name)
    folder = tmp_path / "torch_levenberg_marquardt"
    folder.mkdir()
    (folder / "__init__.py").write_text("from . import loss\nimport a_package_that_nobody_has\n")
    (folder / "loss.py").write_text("kind = 'loss'\n")
    (folder / "training.py").write_text("from .loss import kind\n")
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    sys.path_importer_cache.pop(str(tmp_path), None)
    try:
        assert trainers.peer("training").kind == "loss"
        assert trainers.peer("loss").kind == "loss"
    finally:
        for name in [name for name in sys.modules if name.split(".")[0] == "torch_levenberg_marquardt"]:
            del sys.modules[name]
