"""The methods: what they average and evaluate, that they are what they say, their default hyper-parameters, and the
ablation."""

import copy
import itertools
import sys

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import parameters_to_vector, vector_to_parameters

import marquardt as mq
from marquardt import presets
from marquardt.paper import problems
from marquardt.paper.methods import METHODS, OneOf, Ours, Range, Trainer, Unavailable, ablation, deterministic, peer
from marquardt.parts.direction import AdaptiveMomentum, Identity, MaxDiagonal
from marquardt.parts.judging import Decrease, Grid, Uphill
from support.made_trainers import EVERY, PROBLEMS, batches_for, build, evaluated, model_for, trained, weights

# --- averages ---


class Walk(Trainer):
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
    path = torch.randn(2, 31, dtype=torch.float64)
    trainer = Walk(problems.sine_mlp(0), 0.5)
    assert torch.equal(evaluated(trainer), weights(problems.sine_mlp(0)))  # no step yet
    trainer.run(zip(path, path, strict=True), iter([False, True]).__next__)
    assert not torch.equal(evaluated(trainer), path[-1])
    with pytest.raises(KeyError), trainer.evaluated():
        raise KeyError
    assert torch.equal(weights(trainer.model), path[-1])
    assert [p.requires_grad for p in trainer.model.parameters()] == [True] * 4
    plain = Walk(problems.sine_mlp(0), None)
    plain.run(zip(path, path, strict=True), iter([False, True]).__next__)
    assert torch.equal(evaluated(plain), path[-1])


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
def test_weights_are_averaged_without_disturbing_the_training(problem, key):
    """With decay 0 the average is the last point: looking at it must change nothing."""

    def path(average, look=weights):
        torch.manual_seed(0)
        return trained(build(key, problem, average=average), problem, 4, look)

    plain = path(0.0 if key == "lm" else None)  # λ of Balanced follows the average, and is another without one
    assert torch.equal(plain, path(0.0, evaluated))
    if key in ("bfgs", "sgd", "psgd", "tlm"):
        assert not torch.equal(plain[0], plain[-1])
        torch.testing.assert_close(path(0.8, evaluated), by_hand(plain, 0.8))


# --- torch.optim ---


@pytest.mark.parametrize("problem", PROBLEMS)
@pytest.mark.parametrize(
    ("key", "make"),
    [
        ("sgd", lambda p: torch.optim.SGD(p, lr=0.03, momentum=0.7, weight_decay=0.01)),
        ("adam", lambda p: torch.optim.Adam(p, lr=0.03, betas=(0.8, 0.95))),
        ("lbfgs", lambda p: torch.optim.LBFGS(p, lr=0.03, max_iter=3, history_size=2, line_search_fn="strong_wolfe")),
    ],
)
def test_torch_optimizers_are_torchs(problem, key, make):
    hyper = {
        "sgd": {"lr": 0.03, "momentum": 0.7, "weight_decay": 0.01},
        "adam": {"lr": 0.03, "beta1": 0.8, "beta2": 0.95},
        "lbfgs": {"lr": 0.03, "iterations": 3, "history": 2, "search": "strong_wolfe"},
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
    assert nn.RReLU not in map(type, trainer.model.modules())
    assert torch.equal(weights(trainer.model), start)
    x, _ = next(batches_for("mnist"))
    torch.testing.assert_close(problems.predict(trainer.model, x), problems.predict(before, x))
    trained(trainer, "mnist", 1)
    assert not torch.equal(weights(trainer.model), start)

    inner = nn.Sequential(nn.Linear(3, 3), nn.RReLU(0.1, 0.5))
    model = nn.Sequential(nn.Linear(2, 3), nn.RReLU(), inner, nn.ReLU(), nn.LeakyReLU(0.7))
    twin = copy.deepcopy(model)
    parameters = list(model.parameters())
    assert deterministic(model) is model
    assert all(a is b for a, b in zip(parameters, model.parameters(), strict=True))
    assert [type(module) for module in model] == [nn.Linear, nn.LeakyReLU, nn.Sequential, nn.ReLU, nn.LeakyReLU]
    assert (inner[1].negative_slope, model[4].negative_slope) == (pytest.approx(0.3), 0.7)
    x = torch.randn(50, 2)
    torch.testing.assert_close(model(x), twin.eval()(x))
    assert torch.equal(model.train()(x), model.eval()(x))


@pytest.mark.parametrize("key", ["psgd", "tlm", "bfgs"])
def test_other_libraries_print_nothing(key, capsys):
    trained(build(key, "sine"), "sine", 3)
    assert capsys.readouterr().out == ""


def test_peer_whose_package_cannot_be_imported_whole(monkeypatch, tmp_path):
    """Its __init__ wants Lightning, its step does not."""
    for name in [name for name in sys.modules if name.split(".")[0] == "torch_levenberg_marquardt"]:
        monkeypatch.delitem(sys.modules, name)
    folder = tmp_path / "torch_levenberg_marquardt"
    folder.mkdir()
    (folder / "__init__.py").write_text("import a_package_that_nobody_has\n")
    (folder / "loss.py").write_text("kind = 'loss'\n")
    (folder / "training.py").write_text("from .loss import kind\n")
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    try:
        assert peer("training").kind == peer("loss").kind == "loss"
    finally:
        for name in [name for name in sys.modules if name.split(".")[0] == "torch_levenberg_marquardt"]:
            del sys.modules[name]


# --- the table of methods ---

PARTS = ("curvature", "rows", "damping", "schedule", "momentum", "acceptance", "line_search", "average")


def parts_of(opt):
    return {name: getattr(opt, name) for name in (*PARTS, "lr", "attempts", "capture", "loss")}


def differences(first, second):
    a, b = parts_of(first), parts_of(second)
    return {name for name in a if a[name] != b[name]}


# --- default hyper-parameters ---


@pytest.mark.parametrize(
    ("key", "sine", "mnist"),
    [
        ("sgd", {"lr": 0.05, "momentum": 0.9, "weight_decay": 5e-4}, {"lr": 0.1}),
        ("adam", {"lr": 0.01}, {"lr": 0.05}),
        ("lbfgs", {"lr": 0.005, "iterations": 1}, {"iterations": 20}),
        ("hessian-free", {"lr": 0.1}, {}),
        ("kfac", {"lr": 0.05}, {"lr": 1.0}),
        ("lm-paper", {"lr": 1.0, "lam": 1.0, "xi": 0.9, "dP": 0.6, "b": None}, {"dP": 1.0, "b": 2.0}),
        ("lm-code", {"lr": 1.0, "lam": 1.0, "xi": 0.9, "dP": 0.6, "b": 2.0}, {}),
        ("lm-vanilla", {"lr": 1.0, "lam": 1.0, "factor": 10.0}, {}),
    ],
)
def test_default_hyper_parameters_are_the_papers(key, sine, mnist):
    for problem, wanted in [("sine", sine), ("mnist", sine | mnist)]:
        found = METHODS[key].hyper(problem)
        assert found == found | wanted
        assert found["average"] is None  # the paper averages no weights
        group = build(key, problem).opt.param_groups[0]
        assert {name: group[name] for name in wanted if name in group} == {
            name: value for name, value in wanted.items() if name in group
        }


@pytest.mark.parametrize(("problem", "key"), EVERY)
def test_every_hyper_parameter_is_read_and_no_other(problem, key):
    class Hyper(dict):
        def __getitem__(self, name):
            read.add(name)
            return super().__getitem__(name)

    read = set()
    spec, model = METHODS[key], model_for(problem)
    try:
        trainer = spec.build(model, PROBLEMS[problem], Hyper(spec.hyper(problem)))
    except Unavailable as error:
        pytest.skip(str(error))
    assert trainer.model is model
    assert all(module.training for module in model.modules())
    trainer.run(batches_for(problem), lambda: True)
    assert read == set(spec.hyper(problem))
    assert set(spec.choices(problem)) <= read
    for name, space in spec.choices(problem).items():  # a search can find the default values
        value = spec.hyper(problem)[name]
        if isinstance(space, OneOf):
            assert value in space.values
        else:
            assert isinstance(space, Range)
            assert space.low <= value <= space.high
    assert None in spec.choices(problem)["average"].values


# --- ours are the library's ---


@pytest.mark.parametrize("problem", PROBLEMS)
def test_lm_is_the_default_of_the_library(problem):
    trainer = build("lm", problem)
    default = mq.LM(model_for(problem), PROBLEMS[problem])
    assert differences(trainer.opt, default) == set()
    torch.manual_seed(0)  # RReLU's noise
    for x, y in batches_for(problem, 3):
        default.step(x, y)
    torch.manual_seed(0)
    assert torch.equal(trained(trainer, problem, 3)[-1], weights(default.model))


RELATIVES = {"lm-paper": "paper", "lm-code": "authors_code", "lm-vanilla": "vanilla"}
RELATIVES |= {key: key.replace("-", "_") for key in ("gauss-newton", "newton", "hessian-free", "kfac")}


@pytest.mark.parametrize(("key", "preset"), RELATIVES.items())
@pytest.mark.parametrize("problem", PROBLEMS)
def test_relatives_are_the_presets(problem, key, preset):
    lr = METHODS[key].hyper(problem)["lr"]
    wanted = getattr(presets, preset)(model_for(problem), PROBLEMS[problem], lr=lr)
    assert differences(build(key, problem).opt, wanted) == set()


@pytest.mark.parametrize(
    ("key", "changes", "part", "values"),
    [
        ("lm", {"xi": 0.8}, "momentum", {"xi": 0.8}),
        ("lm", {"b": 2.0}, "acceptance", {"b": 2.0}),
        ("lm-paper", {"rule": "tenfold"}, "schedule", {"factor": 10.0}),
        ("lm-paper", {"b": 1.0}, "acceptance", {"b": 1.0}),
        ("lm-paper", {"xi": 0.8, "dP": 0.3}, "momentum", {"xi": 0.8, "dP": 0.3}),
        ("lm-code", {"b": 1.0}, "acceptance", {"b": 1.0}),
        ("lm-vanilla", {"lam": 0.5, "factor": 3.0}, "schedule", {"initial": 0.5, "factor": 3.0}),
        *(
            (key, {"lam": 0.5}, "schedule", {"initial": 0.5})
            for key in ("lm", "lm-paper", "lm-code", "newton", "hessian-free", "kfac")
        ),
        ("kfac", {"average": 0.9}, "average", {"decay": 0.9}),
        # of digits alone
        ("lm", {"rows": "sampled"}, "rows", mq.Sampled(1)),
        ("lm", {"rows": "exact"}, "rows", mq.Exact()),
        ("lm", {"target": 0.9}, "schedule", mq.Balanced(target=0.9)),
        ("kfac", {"floor": 0.1}, "schedule", mq.GainRatio(floor=0.1)),
        ("lm-paper", {"rows": "empirical"}, "rows", mq.Empirical()),
    ],
)
def test_a_hyper_parameter_changes_its_part_alone(key, changes, part, values):
    problem = "sine" if isinstance(values, dict) else "mnist"
    base, other = build(key, problem).opt, build(key, problem, **changes).opt
    assert differences(base, other) == {part}
    if problem == "sine":
        assert {name: getattr(getattr(other, part), name) for name in values} == values
    else:
        assert getattr(other, part) == values
        assert not set(changes) & set(METHODS[key].choices("sine"))
    assert build(key, problem, lr=0.25).opt.lr == 0.25


# --- ablation ---

IMPROVEMENTS = {  # part, the paper's, what is there without it
    "max-diagonal": ("damping", MaxDiagonal(), Identity()),
    "momentum": ("momentum", AdaptiveMomentum(cap=True), None),
    "search": ("line_search", Grid(), None),
    "uphill": ("acceptance", Uphill(), Decrease()),
    "gain": ("schedule", mq.GainRatio(), mq.TenFold()),
}


@pytest.mark.parametrize("problem", PROBLEMS)
@pytest.mark.parametrize("key", IMPROVEMENTS)
def test_ablation_changes_one_part(problem, key):
    part, improved, plain = IMPROVEMENTS[key]
    if (problem, key) == ("mnist", "momentum"):
        improved = AdaptiveMomentum(dP=1.0, cap=True)
    full = ("paper", f"paper-{key}", improved, plain)
    if (problem, key) == ("sine", "uphill"):
        full = ("paper", "paper+uphill", plain, improved)
    for base, variant, before, after in [full, ("vanilla", f"vanilla+{key}", plain, improved)]:
        first, second = (build(name, problem, table=ablation(problem)).opt for name in (base, variant))
        assert differences(first, second) == {part}
        assert (getattr(first, part), getattr(second, part)) == (before, after)


@pytest.mark.parametrize("problem", PROBLEMS)
def test_both_ends_of_the_ablation(problem):
    model, loss = model_for(problem), PROBLEMS[problem]
    paper, vanilla = (build(name, problem, table=ablation(problem)).opt for name in ("paper", "vanilla"))
    assert differences(paper, presets.paper(model, loss)) == set()
    assert differences(vanilla, presets.vanilla(model, loss)) == set()
    parts = {part for key, (part, _, _) in IMPROVEMENTS.items() if (problem, key) != ("sine", "uphill")}
    assert differences(paper, vanilla) == parts
