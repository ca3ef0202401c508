"""Bad input is refused before anything changes, with a message that names the value and the way out."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import marquardt as mq
from support.cases import Fn, mlp
from support.steps import lm, theta, unharmed
from support.unchanged import changes, refused, same, world

pytestmark = pytest.mark.usefixtures("double")

NAN, INF = math.nan, math.inf


# ---- when the optimizer is made


def network(dtype: torch.dtype | None = None) -> nn.Sequential:
    return mlp(2, 4, 3).to(dtype)


class Mixed(nn.Module):
    """One parameter unlike the others."""

    def __init__(self, **odd: Any) -> None:
        super().__init__()
        self.inner, self.odd = nn.Linear(2, 3), nn.Parameter(torch.ones(3, **odd))

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x) * self.odd


def groups(model: nn.Module, key: str = "", value: float = 0.5) -> list[dict[str, Any]]:
    """One for every parameter; the second has another option"""
    return [{"params": [p], **({key: value} if i == 1 and key else {})} for i, p in enumerate(model.parameters())]


def complex_model() -> nn.Module:
    return Fn(lambda x, w: (x * w).real, nn.Parameter(torch.ones(2, dtype=torch.complex128)))


def only(p: nn.Parameter) -> list[nn.Parameter]:
    return [p]


LOSSES: dict[str, tuple[Any, list[str]]] = {
    "no such one": ("crossentropy", ["'crossentropy'", "did you mean", "'cross_entropy'"]),
    "none near it": ("xyz", ["'xyz'", "mse", "cross_entropy", "huber", "poisson"]),
    "in capitals": ("MSE", ["'MSE'", "did you mean", "'mse'"]),
    "a class": (nn.MSELoss, ["MSELoss()"]),
    "of pairs": (nn.functional.triplet_margin_loss, ["triplet", "as a tuple"]),
    "without curvature": (nn.CTCLoss(), ["CTCLoss", "differentiates it only once"]),
    "not reduced": (nn.MSELoss(reduction="none"), ["'none'", "mean", "sum"]),
    "None": (None, ["NoneType", "mse"]),
}
PARAMS: dict[str, tuple[Callable[[Any], Any], list[str]]] = {
    "empty": (lambda m: [], ["no trainable parameters", "params="]),
    "frozen": (lambda m: only(m[0].weight.requires_grad_(False)), ["no trainable parameters", "requires_grad"]),
    "foreign": (lambda m: copy.deepcopy(m).parameters(), ["params=", "not a parameter of the model", "model.param"]),
    "not parameters": (lambda m: [torch.ones(3, requires_grad=True)], ["params=", "not a parameter of the model"]),
    "one tensor": (lambda m: m[0].weight, ["params="]),
    "twice": (lambda m: [m[0].weight] * 2, ["params=", "twice"]),
    "by name": (lambda m: m.named_parameters(), ["params=", "tuple"]),
    "names": (lambda m: ["0.weight"], ["params=", "str"]),
    "groups of several lr": (lambda m: groups(m, "lr"), ["[1.0, 0.5, 1.0, 1.0]", "learning rates", "same"]),
    "groups of several momenta": (lambda m: groups(m, "momentum"), ["'momentum'", "weight_decay"]),
    "groups and parameters": (lambda m: [*groups(m), m[0].weight], ["params=", "Parameter", "groups"]),
    "in two groups": (lambda m: groups(m) * 2, ["params=", "twice"]),
    "decaying the wrong way": (lambda m: groups(m, "weight_decay", -0.5), ["weight_decay=-0.5", "at least 0"]),
}
OPTIONS: dict[str, tuple[Any, list[str]]] = {
    "weight_decay=-0.1": (-0.1, ["weight_decay=-0.1", "at least 0"]),
    "weight_decay=inf": (INF, ["weight_decay=inf", "finite"]),
    "weight_decay=nan": (NAN, ["weight_decay=nan"]),
    "weight_decay='1'": ("1", ["weight_decay='1'", "WeightDecay"]),
    "weight_decay=True": (True, ["weight_decay=True"]),
    "weight_decay=nothing": (mq.WeightDecay(0.1, "head.*"), ["'head.*'", "0.weight", "leave it out"]),
    "radius=0": (0, ["radius=0", "above 0", "None"]),
    "radius=nan": (NAN, ["radius=nan"]),
    "radius='1'": ("1", ["radius='1'"]),
    "lr=-0.1": (-0.1, ["lr=-0.1", "at least 0"]),
    "lr=inf": (INF, ["lr=inf"]),
    "lr=nan": (NAN, ["lr=nan"]),
    "lr='0.1'": ("0.1", ["lr='0.1'"]),
    "lr=None": (None, ["lr=None"]),
    "attempts=0": (0, ["attempts=0", "at least 1"]),
    "attempts=1.5": (1.5, ["attempts=1.5", "integer"]),
    "damping=name": ("max_diagonal", ["damping='max_diagonal'"]),
    "damping=another part": (mq.TenFold(), ["damping=TenFold"]),
    "schedule=class": (mq.TenFold, ["schedule=", "TenFold()"]),
    "schedule=None": (None, ["schedule=None"]),
    "curvature=dense": (mq.Dense(), ["BatchNorm1d", "'1'", "eval()", "GroupNorm"]),
    "group=True": (True, ["group=", "None", "False"]),
    "group=gloo": ("gloo", ["group=", "None", "False"]),
    "capture=1": (1, ["capture="]),
    "capture='auto'": ("auto", ["capture="]),
}
MODELS: dict[str, tuple[Callable[[], Any], list[str]]] = {
    "no parameters": (nn.Tanh, ["no trainable parameters", "requires_grad"]),
    "all frozen": (lambda: network().requires_grad_(False), ["no trainable parameters", "requires_grad"]),
    "a tensor": (lambda: network()[0].weight, ["LM(model, loss)", "Parameter"]),
    "parameters": (lambda: network().parameters(), ["LM(model, loss)", "generator"]),
    "a function": (lambda: torch.sin, ["LM(model, loss)"]),
    "several dtypes": (
        lambda: Mixed(dtype=torch.float32), ["several dtypes", "torch.float32", "torch.float64", "model.to"],
    ),
    "several dtypes, one coarse": (
        lambda: Mixed(dtype=torch.bfloat16), ["several dtypes", "torch.bfloat16", "torch.float64", "model.to"],
    ),
    "several devices": (lambda: Mixed(device="meta"), ["several devices", "cpu", "meta", "model.to"]),
    "complex": (complex_model, ["complex128", "float32", "float64"]),
    "DataParallel": (lambda: nn.DataParallel(network()), ["DataParallel", "model.module"]),
    "DataParallel within": (lambda: nn.Sequential(nn.DataParallel(network())), ["DataParallel", "model.module"]),
}  # fmt: skip


@pytest.mark.parametrize("case", [*LOSSES, *PARAMS, *OPTIONS])
def test_refused_when_made(case):
    model = nn.Sequential(network(), nn.BatchNorm1d(3)) if case == "curvature=dense" else network()
    given, says = {**LOSSES, **PARAMS, **OPTIONS}[case]
    given = given(model) if case in PARAMS else given
    with unharmed(model, None, *says):
        if case in LOSSES:
            mq.LM(model, given)
        else:
            mq.LM(model, "mse", **{"params" if case in PARAMS else case.partition("=")[0]: given})


@pytest.mark.parametrize("case", MODELS)
def test_models_that_are_refused(case):
    make, says = MODELS[case]
    model = make()
    with refused(*says):
        mq.LM(model, "mse")


def made_in_inference(model: nn.Module, name: str) -> nn.Module:
    """With a copy of one tensor that was made under inference_mode"""
    module, last = model.get_submodule(name.rpartition(".")[0]), name.rpartition(".")[2]
    with torch.inference_mode():
        if last in module._parameters:
            setattr(module, last, nn.Parameter(getattr(module, last).clone()))
        else:
            setattr(module, last, getattr(module, last).clone())
    return model


@pytest.mark.parametrize(("name", "late"), [("inner.0.bias", False), ("count", False), ("count", True)])
def test_tensors_of_the_model_made_in_inference_mode(name, late):
    model = Returning()
    opt = lm(model) if late else None
    made_in_inference(model, name)
    with refused(repr(name), "torch.inference_mode()", "torch.no_grad()"):
        (lm(model) if opt is None else opt).step(X, Y)


@pytest.mark.parametrize("what", ["inputs", "targets", "weight"])
@pytest.mark.parametrize("curvature", [mq.Auto(), mq.Dense(chunk=2), mq.Hessian()])
def test_data_made_in_inference_mode(what, curvature):
    model = network()
    opt = lm(model, curvature=curvature)
    data = {"inputs": X, "targets": Y, "weight": ONES}
    with torch.inference_mode():
        made = data[what].clone()
    with unharmed(model, opt, what, "torch.inference_mode()", ".clone()"):
        opt.step(**{**data, what: made})
    opt.step(**{**data, what: made.clone()})


def test_a_frozen_part_made_in_inference_mode():
    """As long as autograd need not keep it, it does no harm."""
    model = network()
    model[0].requires_grad_(False)
    with torch.inference_mode():
        model[0].weight = nn.Parameter(model[0].weight.clone(), requires_grad=False)
    assert lm(model).step(X, Y).accepted


@pytest.mark.parametrize("layout", ["to_sparse", "to_sparse_csr"])
def test_sparse_parameters(layout):
    model = network()
    model[0].weight = nn.Parameter(getattr(model[0].weight.detach(), layout)())
    with refused("'0.weight'", "sparse", ".to_dense()"):
        mq.LM(model, "mse")


@pytest.mark.parametrize("curvature", [mq.Auto(), mq.Gram(), mq.MatrixFree(), mq.Hessian()])
def test_sparse_gradients(curvature):
    """nn.Embedding(sparse=True) has dense parameters, and the step is that of a dense gradient."""
    found = []
    for sparse in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Embedding(5, 3, sparse=sparse), nn.Tanh(), nn.Linear(3, 3))
        lm(model, curvature=curvature).step(LABELS, Y)
        found.append(theta(model))
    torch.testing.assert_close(*found)


def test_integer_parameters():
    """They cannot require a gradient, so they are frozen: kept as they are, and refused where they are asked for."""
    model = Mixed(dtype=torch.float64)
    model.odd = nn.Parameter(torch.tensor([1, 2, 3]), requires_grad=False)
    assert lm(model).step(torch.randn(5, 2), torch.randn(5, 3)).accepted
    assert model.odd.tolist() == [1, 2, 3]
    with refused("no trainable parameters"):
        mq.LM(model, "mse", params=[model.odd])


def test_a_second_group_is_refused():
    opt = lm(model := network())
    with unharmed(model, opt, "one parameter group", "params="):
        opt.add_param_group({"params": [nn.Parameter(torch.ones(2))]})


def test_batch_norm_as_the_model():
    """The way out is a line that can be typed."""
    for model, line in ((nn.BatchNorm1d(3), "model.eval()"), (nn.Sequential(nn.BatchNorm1d(3)), "model[0].eval()")):
        with pytest.raises(ValueError, match="BatchNorm1d") as refusal:
            mq.LM(model, "mse", curvature=mq.Gram())
        assert line in str(refusal.value) or "get_submodule" in str(refusal.value)


# ---- when a step is asked for


class Returning(nn.Module):
    """A network and what is made of its output."""

    def __init__(self, change: Callable[[Tensor], Any] = lambda z: z) -> None:
        super().__init__()
        self.inner, self.drop, self.change = network(), nn.Dropout(0.5), change
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x: Tensor) -> Any:
        self.count += 1
        return self.change(self.inner(self.drop(x)))


def batch(N: int = 6) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(N, 2, generator=generator), torch.randn(N, 3, generator=generator)


def spoilt(t: Tensor, value: float) -> Tensor:
    t = t.clone()
    t[1, 0] = value
    return t


X, Y = (t.double() for t in batch())
LABELS = torch.tensor([0, 1, 2, 0, 1, 2])
ONES = torch.ones(6, dtype=torch.float64)
Asking = Callable[[mq.LM], Any]
STEPS: dict[str, tuple[str, Asking, list[str]]] = {  # loss, what is done, what the message must say
    "closure": ("mse", lambda o: o.step(lambda: 0.0), ["step(inputs, targets)", "closure"]),
    "a function": ("mse", lambda o: o.step(closure=lambda: 0.0), ["step(inputs, targets)"]),
    "nothing": ("mse", lambda o: o.step(), ["step(inputs, targets)", "LMModule", "LMTrainer"]),
    "NaN in the inputs": ("mse", lambda o: o.step(spoilt(X, NAN), Y), ["nan", "inputs"]),
    "∞ in the inputs": ("mse", lambda o: o.step(spoilt(X, INF), Y), ["inputs"]),
    "NaN in the targets": ("mse", lambda o: o.step(X, spoilt(Y, NAN)), ["nan", "targets", "[1, 0]"]),
    "∞ in the targets": ("mse", lambda o: o.step(X, spoilt(Y, INF)), ["inf", "targets", "[1, 0]"]),
    "label too large": ("cross_entropy", lambda o: o.step(X, LABELS + 1), ["targets[2]", "is 3", "0 to 2"]),
    "label negative": ("cross_entropy", lambda o: o.step(X, LABELS - 1), ["targets[0]", "is -1", "0 to 2"]),
    "labels as numbers": ("cross_entropy", lambda o: o.step(X, LABELS.double()), ["torch.float64", "targets.long()"]),
    "probability outside [0, 1]": ("bce", lambda o: o.step(X, spoilt(Y.sigmoid(), 1.5)), ["1.5", "[0, 1]"]),
    "count negative": ("poisson", lambda o: o.step(X, spoilt(Y.abs(), -2.0)), ["-2", "negative"]),
    "labels for a regression": ("mse", lambda o: o.step(X, LABELS), ["torch.int64", "cross_entropy"]),
    "targets too few": ("mse", lambda o: o.step(X, Y[:4]), ["(6, 3)", "(4, 3)"]),
    "labels too few": ("cross_entropy", lambda o: o.step(X, LABELS[:4]), ["(6, 3)", "(4,)"]),
    "targets too narrow": ("mse", lambda o: o.step(X, Y[:, :2]), ["(6, 3)", "(6, 2)"]),
    "targets that would broadcast": ("mse", lambda o: o.step(X, Y[:, 0]), ["(6, 3)", "(6,)"]),
    "targets missing": ("mse", lambda o: o.step(X), ["targets", "Residual"]),
    "targets in float32": ("mse", lambda o: o.step(X, Y.float()), ["torch.float32", "torch.float64", ".to("]),
    "targets elsewhere": ("mse", lambda o: o.step(X, Y.to("meta")), ["meta", "cpu", ".to("]),
    "empty batch": ("mse", lambda o: o.step(X[:0], Y[:0]), ["empty"]),
    "empty batch of labels": ("cross_entropy", lambda o: o.step(X[:0], LABELS[:0]), ["empty"]),
    "inputs in float32": ("mse", lambda o: o.step(X.float(), Y), ["inputs", "torch.float32", "torch.float64"]),
    "inputs as integers": ("mse", lambda o: o.step(X.long(), Y), ["inputs", "torch.int64", "torch.float64"]),
    "inputs elsewhere": ("mse", lambda o: o.step(X.to("meta"), Y), ["inputs", "meta", "cpu"]),
    "inputs None": ("mse", lambda o: o.step(None, Y), ["inputs", "None"]),
    "inputs a list of numbers": ("mse", lambda o: o.step(X.tolist(), Y), ["inputs", "tensor"]),
    "inputs an array": ("mse", lambda o: o.step(X.numpy(), Y), ["inputs", "ndarray"]),
    "inputs too wide": ("mse", lambda o: o.step(torch.cat([X, X], 1), Y), ["shapes cannot be multiplied"]),
    "inputs one number": ("mse", lambda o: o.step(torch.tensor(1.0), Y), ["inputs", "()"]),
    "weights too few": ("mse", lambda o: o.step(X, Y, ONES[:4]), ["weight", "(4,)", "(6,)"]),
    "weights as a column": ("mse", lambda o: o.step(X, Y, ONES[:, None]), ["weight", "(6, 1)", "(6,)"]),
    "weight negative": ("mse", lambda o: o.step(X, Y, -ONES), ["weight[0]", "-1", "negative"]),
    "weight NaN": ("mse", lambda o: o.step(X, Y, ONES * NAN), ["weight[0]", "nan"]),
    "weights all zero": ("mse", lambda o: o.step(X, Y, 0 * ONES), ["weight", "0"]),
    "weights as integers": ("mse", lambda o: o.step(X, Y, ONES.long()), ["weight", "torch.int64", ".to("]),
    "weights a list": ("mse", lambda o: o.step(X, Y, [1.0] * 6), ["weight", "tensor", "list"]),
    "no batches": ("mse", lambda o: o.step_over([]), ["step_over", "empty"]),
    "batches None": ("mse", lambda o: o.step_over(None), ["step_over", "None"]),
    "one batch instead of several": ("mse", lambda o: o.step_over((X, Y)), ["(inputs, targets)", "Tensor"]),
    "batches of inputs alone": ("mse", lambda o: o.step_over([X, X]), ["(inputs, targets)", "Tensor"]),
    "batches of one": ("mse", lambda o: o.step_over([(X,)]), ["(inputs, targets)", "1"]),
    "batches of four": ("mse", lambda o: o.step_over([(X, Y, ONES, ONES)]), ["(inputs, targets, weight)", "4"]),
    "batches as dicts": ("mse", lambda o: o.step_over([{"x": X, "y": Y}]), ["(inputs, targets)", "dict"]),
    "second batch malformed": ("mse", lambda o: o.step_over([(X, Y), X]), ["(inputs, targets)", "Tensor"]),
    "second batch empty": ("mse", lambda o: o.step_over([(X, Y), (X[:0], Y[:0])]), ["empty"]),
    "second batch with NaN": ("mse", lambda o: o.step_over([(X, Y), (X, Y * NAN)]), ["nan", "targets"]),
    "batches used up": ("mse", lambda o: o.step_over(iter([(X, Y)])), ["list or a DataLoader"]),
}
OUTPUTS: dict[str, tuple[Callable[[Tensor], Any], list[str]]] = {
    "a tuple": (lambda z: (z, z), ["tuple", "one tensor", "loss={0: "]),
    "a dict": (lambda z: {"a": z, "b": z}, ["dict", "one tensor", "loss={'a': "]),
    "nothing": (lambda z: None, ["None", "one tensor"]),
    "one number": (lambda z: z.mean(), ["0-dimensional", "row per sample"]),
    "a number of Python": (lambda z: z.mean().item(), ["float", "one tensor"]),
    "no dependence": (lambda z: z.detach(), ["do not depend on the trainable parameters"]),
    "NaN": (lambda z: z * NAN, ["nan", "the model"]),
    "∞": (lambda z: z + INF, ["inf", "the model"]),
}


def refuse_a_step(model: Returning, opt: mq.LM, ask: Asking, says: list[str]) -> None:
    """The refusal; nothing changed; and the next step is what it would have been without it."""
    (twin_model, twin), generator = copy.deepcopy((model, opt)), torch.get_rng_state()
    with unharmed(model, opt, *says):
        ask(opt)
    model.change = twin_model.change = lambda z: z
    y = LABELS if isinstance(opt.loss, mq.losses.CrossEntropy) else Y.sigmoid()
    step = opt.step(X, y)
    torch.set_rng_state(generator)
    assert twin.step(X, y) == step
    assert same(theta(model), theta(twin_model))


@pytest.mark.parametrize("case", STEPS)
def test_refused_in_a_step(case):
    loss, ask, says = STEPS[case]
    model = Returning()
    refuse_a_step(model, lm(model, loss), ask, says)


@pytest.mark.parametrize("curvature", [mq.Dense(), mq.Gram()], ids=str)
@pytest.mark.parametrize("case", ["NaN in the inputs", "targets too few", "inputs in float32", "weight negative"])
def test_refused_in_a_later_step(case, curvature):
    """With a state to lose."""
    loss, ask, says = STEPS[case]
    model = Returning()
    parts = {"damping": mq.MaxDiagonal(), "momentum": mq.AdaptiveMomentum(), "average": mq.EMA()}
    opt = lm(model, loss, curvature=curvature, **parts)
    opt.step(X, Y)
    opt.step(X, -Y)
    refuse_a_step(model, opt, ask, says)


def test_a_model_that_changes_its_inputs_in_place():
    class InPlace(Returning):
        def forward(self, x: Tensor) -> Any:
            return super().forward(x.mul_(2))

    with refused("in place", "clone"):
        lm(InPlace()).step(X.clone(), Y)


@pytest.mark.parametrize("case", OUTPUTS)
def test_outputs_that_are_refused(case):
    change, says = OUTPUTS[case]
    model = Returning(change)
    refuse_a_step(model, lm(model), lambda o: o.step(X, Y), says)


@pytest.mark.parametrize(
    ("what", "says"),
    [
        ({"targets": Y[:2]}, ["targets", "2", "6"]),
        ({"targets": Y[:3]}, ["targets", "3"]),
        ({"targets": Y, "weight": ONES[:2]}, ["weight", "2", "6"]),
    ],
    ids=["targets of a chunk", "targets too few", "weights of a chunk"],
)
@pytest.mark.parametrize("curvature", [mq.Dense(chunk=2), mq.Gram(chunk=2)], ids=["dense", "gram"])
def test_a_chunk_is_no_batch(what, says, curvature):
    """Targets or weights for two samples fit every chunk of two, and yet are wrong."""
    model = Returning()
    opt = lm(model, curvature=curvature)
    with unharmed(model, opt, *says):
        opt.step(X, **what)


@pytest.mark.parametrize("value", [NAN, INF])
def test_parameter_that_is_not_finite(value):
    model = network()
    opt = lm(model)
    kept = model[2].bias[1].item()
    with torch.no_grad():
        model[2].bias[1] = value
    before = world(model, opt)
    with refused("loss", "'2.bias'", "checkpoint"):
        opt.step(X, Y)
    unlike = changes(before, world(model, opt))
    assert unlike == [] or (unlike == ["parameters"] and math.isnan(value))  # NaN is unlike itself
    with torch.no_grad():
        model[2].bias[1] = kept
    assert opt.step(X, Y).accepted


def test_a_refused_batch_leaves_the_fast_rules():
    """NaN in the very first batch must not send every later step through the slow general path."""
    model, work = network(), []
    opt, other = lm(model), lm(copy.deepcopy(model))
    with refused("inputs"):
        opt.step(spoilt(X, NAN), Y)
    for one in (opt, other):
        one.step(X, Y)
        with torch.profiler.profile() as found:
            one.step(X, Y)
        work.append({event.key: event.count for event in found.key_averages()})
    assert work[0] == work[1]


def test_batch_norm_switched_to_train_mode():
    model = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3)).eval()
    opt = lm(model)
    opt.step(X, Y)
    model.train()
    before = world(model, opt)
    for ask in (lambda: opt.step(X, Y), lambda: opt.step_over([(X, Y)])):
        with refused("BatchNorm1d", "'1'", "eval()"):
            ask()
    assert changes(before, world(model, opt)) == []


CHANGES: dict[str, tuple[Callable[[Any, mq.LM], Any], list[str]]] = {
    "frozen": (lambda model, opt: model[0].weight.requires_grad_(False), ["'0.weight'", "frozen"]),
    "lr=-1.0": (lambda model, opt: opt.param_groups[0].update(lr=-1.0), ["lr=-1.0"]),
    "lr=nan": (lambda model, opt: opt.param_groups[0].update(lr=NAN), ["lr=nan"]),  # as a scheduler might
    "lr=inf": (lambda model, opt: opt.param_groups[0].update(lr=INF), ["lr=inf"]),
}


@pytest.mark.parametrize("case", CHANGES)
def test_what_was_spoilt_since_the_optimizer_was_made(case):
    change, says = CHANGES[case]
    model = network()
    opt = lm(model)
    change(model, opt)
    before = theta(model)
    with refused(*says):
        opt.step(X, Y)
    assert torch.equal(theta(model), before)


def test_model_on_the_meta_device():
    """Shapes without numbers: nothing to train."""
    with refused("meta"):
        lm(network().to("meta")).step(X, Y)


@pytest.mark.parametrize("exception", [RuntimeError, TypeError, torch.OutOfMemoryError, IndexError])
def test_errors_of_the_model_are_not_explained_away(exception):
    """Inputs of another dtype than the parameters, as tokens are, are not the reason of everything."""

    class Tokens(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(5, 3)

        def forward(self, x: Tensor) -> Tensor:
            self.table(x)
            raise exception("the model's own trouble")

    opt = lm(Tokens(), "cross_entropy")
    explained = (ValueError,) if exception is RuntimeError else ()  # as long as the model's own words are there
    with pytest.raises((exception, *explained), match="the model's own trouble"):
        opt.step(LABELS, LABELS)


@pytest.mark.parametrize("change", ["in place", "another tensor", "another size"])
def test_targets_that_were_right_in_the_last_step_are_looked_at_again(change):
    """The same tensor, unchanged, is not."""
    model = network()
    opt, x, y = mq.LM(model, "mse"), torch.randn(8, 2), torch.randn(8, 3)
    opt.step(x, y)
    opt.step(x, y)
    if change == "in place":
        y[0, 0] = NAN
    elif change == "another tensor":
        y = torch.where(torch.arange(8)[:, None] == 3, NAN, y)
    else:
        y.data = y.data[:, :2]
    before = theta(model)
    with pytest.raises(ValueError, match=r"non-finite|have shape|broadcasting"):
        opt.step(x, y)
    assert torch.equal(theta(model), before)
