"""The methods: what they are built as, their default hyper-parameters, and the ablation."""

import pytest
import torch

import marquardt as mq
from marquardt import presets
from marquardt.paper.methods import METHODS, OneOf, Range, ablation
from marquardt.paper.trainers import Unavailable
from marquardt.parts.direction import AdaptiveMomentum, Identity, MaxDiagonal
from marquardt.parts.judging import Decrease, Grid, Uphill
from support.made_trainers import EVERY, PROBLEMS, batches_for, build, model_for, trained, weights

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
        ("sgd", {"lr": 0.05}, {"lr": 0.1}),
        ("sgd", {"momentum": 0.9, "weight_decay": 5e-4}, {"momentum": 0.9, "weight_decay": 5e-4}),
        ("adam", {"lr": 0.01}, {"lr": 0.05}),
        ("lbfgs", {"lr": 0.005}, {"lr": 0.005}),
        ("hessian-free", {"lr": 0.1}, {"lr": 0.1}),
        ("kfac", {"lr": 0.05}, {"lr": 1.0}),
        ("lm-paper", {"lr": 1.0, "lam": 1.0}, {"lr": 1.0, "lam": 1.0}),
        ("lm-paper", {"xi": 0.9, "dP": 0.6, "b": None}, {"xi": 0.9, "dP": 1.0, "b": 2.0}),
        ("lm-code", {"lr": 1.0, "lam": 1.0, "xi": 0.9, "dP": 0.6}, {"lr": 1.0, "lam": 1.0, "b": 2.0}),
        ("lm-vanilla", {"lr": 1.0, "lam": 1.0, "factor": 10.0}, {"lr": 1.0, "lam": 1.0, "factor": 10.0}),
    ],
)
def test_default_hyper_parameters_are_the_papers(key, sine, mnist):
    for problem, wanted in [("sine", sine), ("mnist", mnist)]:
        found = METHODS[key].hyper(problem)
        assert {name: found[name] for name in wanted} == wanted
        group = build(key, problem).opt.param_groups[0]
        assert {name: group[name] for name in wanted if name in group} == {
            name: value for name, value in wanted.items() if name in group
        }
        assert group["lr"] == found["lr"]


@pytest.mark.parametrize("key", [key for key in METHODS if key != "lm"])
def test_the_paper_averages_no_weights(key):
    assert METHODS[key].hyper("sine")["average"] is METHODS[key].hyper("mnist")["average"] is None


def test_lbfgs_takes_the_iterations_it_is_given():
    assert build("lbfgs", "sine").opt.param_groups[0]["max_iter"] == 1
    assert build("lbfgs", "mnist").opt.param_groups[0]["max_iter"] == 20
    group = build("lbfgs", "sine", history=7, search="strong_wolfe").opt.param_groups[0]
    assert (group["history_size"], group["line_search_fn"]) == (7, "strong_wolfe")


@pytest.mark.parametrize(("problem", "key"), EVERY)
def test_every_hyper_parameter_is_read_and_no_other(problem, key):
    class Hyper(dict):
        def __getitem__(self, name):
            read.add(name)
            return super().__getitem__(name)

    read = set()
    spec = METHODS[key]
    try:
        trainer = spec.build(model_for(problem), PROBLEMS[problem], Hyper(spec.hyper(problem)))
    except Unavailable as error:
        pytest.skip(str(error))
    trainer.run(batches_for(problem), lambda: True)
    assert read == set(spec.hyper(problem))
    assert set(spec.choices(problem)) <= read


@pytest.mark.parametrize(("problem", "key"), EVERY)
def test_default_values_can_be_found_by_a_search(problem, key):
    spec = METHODS[key]
    for name, space in spec.choices(problem).items():
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


@pytest.mark.parametrize(
    ("key", "preset"),
    [
        ("lm-paper", presets.paper),
        ("lm-code", presets.authors_code),
        ("lm-vanilla", presets.vanilla),
        ("gauss-newton", presets.gauss_newton),
        ("newton", presets.newton),
        ("hessian-free", presets.hessian_free),
        ("kfac", presets.kfac),
    ],
)
@pytest.mark.parametrize("problem", PROBLEMS)
def test_relatives_are_the_presets(problem, key, preset):
    lr = METHODS[key].hyper(problem)["lr"]
    wanted = preset(model_for(problem), PROBLEMS[problem], lr=lr)
    assert differences(build(key, problem).opt, wanted) == set()


@pytest.mark.parametrize(
    ("key", "changes", "part", "values"),
    [
        ("lm", {"lam": 0.5}, "schedule", {"initial": 0.5}),
        ("lm", {"xi": 0.8}, "momentum", {"xi": 0.8}),
        ("lm", {"b": 2.0}, "acceptance", {"b": 2.0}),
        ("lm-paper", {"lam": 0.5}, "schedule", {"initial": 0.5}),
        ("lm-paper", {"rule": "tenfold"}, "schedule", {"factor": 10.0}),
        ("lm-paper", {"b": 1.0}, "acceptance", {"b": 1.0}),
        ("lm-code", {"lam": 0.5}, "schedule", {"initial": 0.5}),
        ("lm-code", {"b": 1.0}, "acceptance", {"b": 1.0}),
        ("lm-paper", {"xi": 0.8, "dP": 0.3}, "momentum", {"xi": 0.8, "dP": 0.3}),
        ("lm-vanilla", {"lam": 0.5, "factor": 3.0}, "schedule", {"initial": 0.5, "factor": 3.0}),
        ("newton", {"lam": 0.5}, "schedule", {"initial": 0.5}),
        ("hessian-free", {"lam": 0.5}, "schedule", {"initial": 0.5}),
        ("kfac", {"lam": 0.5}, "schedule", {"initial": 0.5}),
        ("kfac", {"average": 0.9}, "average", {"decay": 0.9}),
    ],
)
def test_hyper_parameter_changes_its_part_alone(key, changes, part, values):
    base, other = build(key, "sine").opt, build(key, "sine", **changes).opt
    assert differences(base, other) == {part}
    assert {name: getattr(getattr(other, part), name) for name in values} == values
    assert build(key, "sine", lr=0.25).opt.lr == 0.25


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


# --- rows and λ on digits ---


@pytest.mark.parametrize(
    ("key", "changes", "part", "wanted"),
    [
        ("lm", {"rows": "sampled"}, "rows", mq.Sampled(1)),
        ("lm", {"rows": "exact"}, "rows", mq.Exact()),
        ("lm", {"target": 0.9}, "schedule", mq.Balanced(target=0.9)),
        ("kfac", {"floor": 0.1}, "schedule", mq.GainRatio(floor=0.1)),
        ("lm-paper", {"rows": "empirical"}, "rows", mq.Empirical()),
    ],
)
def test_hyper_parameters_of_digits_alone(key, changes, part, wanted):
    base, other = build(key, "mnist").opt, build(key, "mnist", **changes).opt
    assert differences(base, other) == {part}
    assert getattr(other, part) == wanted
    assert not set(changes) & set(METHODS[key].choices("sine"))
