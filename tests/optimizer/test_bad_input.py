"""Bad input is refused before anything changes, with a message that names the value and the way out."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

import marquardt as mq
from support.cases import mlp
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


class Complex(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.ones(2, dtype=torch.complex128))

    def forward(self, x: Tensor) -> Tensor:
        return (x * self.w).real


class Making(NamedTuple):
    make: Callable[[Any], Any]
    says: list[str]
    model: Callable[[], nn.Module] = network


MAKING: dict[str, Making] = {
    "no such loss": Making(lambda m: mq.LM(m, "crossentropy"), ["'crossentropy'", "did you mean", "'cross_entropy'"]),
    "no loss near it": Making(lambda m: mq.LM(m, "xyz"), ["'xyz'", "mse", "cross_entropy", "huber", "poisson"]),
    "loss in capitals": Making(lambda m: mq.LM(m, "MSE"), ["'MSE'", "did you mean", "'mse'"]),
    "class of a loss": Making(lambda m: mq.LM(m, nn.MSELoss), ["MSELoss()"]),
    "function of pairs": Making(lambda m: mq.LM(m, nn.functional.triplet_margin_loss), ["triplet", "as a tuple"]),
    "loss without curvature": Making(lambda m: mq.LM(m, nn.CTCLoss()), ["CTCLoss", "differentiates it only once"]),
    "loss not reduced": Making(lambda m: mq.LM(m, nn.MSELoss(reduction="none")), ["'none'", "mean", "sum"]),
    "no loss": Making(lambda m: mq.LM(m, None), ["NoneType", "mse"]),
    "no parameters": Making(lambda m: mq.LM(m, "mse"), ["no trainable parameters", "requires_grad"], nn.Tanh),
    "all frozen": Making(
        lambda m: mq.LM(m, "mse"),
        ["no trainable parameters", "requires_grad"],
        lambda: network().requires_grad_(False),
    ),
    "params empty": Making(lambda m: mq.LM(m, "mse", params=[]), ["no trainable parameters", "params="]),
    "params frozen": Making(
        lambda m: mq.LM(m, "mse", params=[m[0].weight]),
        ["no trainable parameters", "requires_grad"],
        lambda: network().requires_grad_(False),
    ),
    "params foreign": Making(
        lambda m: mq.LM(m, "mse", params=copy.deepcopy(m).parameters()),
        ["params=", "not a parameter of the model", "model.parameters()"],
    ),
    "params not parameters": Making(
        lambda m: mq.LM(m, "mse", params=[torch.ones(3, requires_grad=True)]),
        ["params=", "not a parameter of the model"],
    ),
    "params one tensor": Making(lambda m: mq.LM(m, "mse", params=m[0].weight), ["params="]),
    "params twice": Making(lambda m: mq.LM(m, "mse", params=[m[0].weight] * 2), ["params=", "twice"]),
    "params by name": Making(lambda m: mq.LM(m, "mse", params=m.named_parameters()), ["params=", "tuple"]),
    "params as names": Making(lambda m: mq.LM(m, "mse", params=["0.weight"]), ["params=", "str"]),
    "groups of several lr": Making(
        lambda m: mq.LM(m, "mse", params=groups(m, "lr")), ["[1.0, 0.5, 1.0, 1.0]", "learning rates", "same"]
    ),
    "groups of several momenta": Making(
        lambda m: mq.LM(m, "mse", params=groups(m, "momentum")), ["'momentum'", "weight_decay"]
    ),
    "groups and parameters": Making(
        lambda m: mq.LM(m, "mse", params=[*groups(m), m[0].weight]), ["params=", "Parameter", "groups"]
    ),
    "a parameter in two groups": Making(lambda m: mq.LM(m, "mse", params=groups(m) * 2), ["params=", "twice"]),
    "a group that decays the wrong way": Making(
        lambda m: mq.LM(m, "mse", params=groups(m, "weight_decay", -0.5)), ["weight_decay=-0.5", "at least 0"]
    ),
    "weight decay negative": Making(lambda m: mq.LM(m, "mse", weight_decay=-0.1), ["weight_decay=-0.1", "at least 0"]),
    "weight decay infinite": Making(lambda m: mq.LM(m, "mse", weight_decay=INF), ["weight_decay=inf", "finite"]),
    "weight decay NaN": Making(lambda m: mq.LM(m, "mse", weight_decay=NAN), ["weight_decay=nan"]),
    "weight decay a string": Making(lambda m: mq.LM(m, "mse", weight_decay="1"), ["weight_decay='1'", "WeightDecay"]),
    "weight decay a flag": Making(lambda m: mq.LM(m, "mse", weight_decay=True), ["weight_decay=True"]),
    "nothing to exclude": Making(
        lambda m: mq.LM(m, "mse", weight_decay=mq.WeightDecay(0.1, "head.*")), ["'head.*'", "0.weight", "leave it out"]
    ),
    "radius 0": Making(lambda m: mq.LM(m, "mse", radius=0), ["radius=0", "above 0", "None"]),
    "radius NaN": Making(lambda m: mq.LM(m, "mse", radius=NAN), ["radius=nan"]),
    "radius a string": Making(lambda m: mq.LM(m, "mse", radius="1"), ["radius='1'"]),
    "a tensor as model": Making(lambda m: mq.LM(m[0].weight, "mse"), ["LM(model, loss)", "Parameter"]),
    "parameters as model": Making(lambda m: mq.LM(m.parameters(), "mse"), ["LM(model, loss)", "generator"]),
    "a function as model": Making(lambda m: mq.LM(torch.sin, "mse"), ["LM(model, loss)"]),
    "several dtypes": Making(
        lambda m: mq.LM(m, "mse"),
        ["several dtypes", "torch.float32", "torch.float64", "model.to"],
        lambda: Mixed(dtype=torch.float32),
    ),
    "several dtypes, one coarse": Making(
        lambda m: mq.LM(m, "mse"),
        ["several dtypes", "torch.bfloat16", "torch.float64", "model.to"],
        lambda: Mixed(dtype=torch.bfloat16),
    ),
    "several devices": Making(
        lambda m: mq.LM(m, "mse"), ["several devices", "cpu", "meta", "model.to"], lambda: Mixed(device="meta")
    ),
    "complex": Making(lambda m: mq.LM(m, "mse"), ["complex128", "float32", "float64"], Complex),
    "BatchNorm in train mode": Making(
        lambda m: mq.LM(m, "mse", curvature=mq.Dense()),
        ["BatchNorm1d", "'1'", "eval()", "GroupNorm"],
        lambda: nn.Sequential(network(), nn.BatchNorm1d(3)),
    ),
    "lr negative": Making(lambda m: mq.LM(m, "mse", lr=-0.1), ["lr=-0.1", "at least 0"]),
    "lr infinite": Making(lambda m: mq.LM(m, "mse", lr=INF), ["lr=inf"]),
    "lr not a number": Making(lambda m: mq.LM(m, "mse", lr=NAN), ["lr=nan"]),
    "lr a string": Making(lambda m: mq.LM(m, "mse", lr="0.1"), ["lr='0.1'"]),
    "lr None": Making(lambda m: mq.LM(m, "mse", lr=None), ["lr=None"]),
    "no attempts": Making(lambda m: mq.LM(m, "mse", attempts=0), ["attempts=0", "at least 1"]),
    "half an attempt": Making(lambda m: mq.LM(m, "mse", attempts=1.5), ["attempts=1.5", "integer"]),
    "a part by name": Making(lambda m: mq.LM(m, "mse", damping="max_diagonal"), ["damping='max_diagonal'"]),
    "another part": Making(lambda m: mq.LM(m, "mse", damping=mq.TenFold()), ["damping=TenFold"]),
    "the class of a part": Making(lambda m: mq.LM(m, "mse", schedule=mq.TenFold), ["schedule=", "TenFold()"]),
    "a part missing": Making(lambda m: mq.LM(m, "mse", schedule=None), ["schedule=None"]),
}


@pytest.mark.parametrize("case", MAKING)
def test_refused_when_made(case):
    make, says, build = MAKING[case]
    model = build()
    before = world(model) if case != "several devices" else {}  # meta tensors have no values to compare
    with refused(*says):
        make(model)
    assert changes(before, world(model) if before else {}) == []


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


@pytest.mark.parametrize("case", ["NaN in the inputs", "label too large", "targets too few", "weight negative"])
def test_refused_in_a_step_with_gram(case):
    loss, ask, says = STEPS[case]
    model = Returning()
    refuse_a_step(model, lm(model, loss, curvature=mq.Gram()), ask, says)


@pytest.mark.parametrize("case", ["NaN in the inputs", "targets too few", "inputs in float32", "weight negative"])
def test_refused_in_a_later_step(case):
    """With a state to lose."""
    loss, ask, says = STEPS[case]
    model = Returning()
    parts = {"damping": mq.MaxDiagonal(), "momentum": mq.AdaptiveMomentum(), "average": mq.EMA()}
    opt = lm(model, loss, **parts)
    opt.step(X, Y)
    opt.step(X, -Y)
    refuse_a_step(model, opt, ask, says)


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
    model = network()
    opt, other = lm(model), lm(copy.deepcopy(model))
    with refused("inputs"):
        opt.step(spoilt(X, NAN), Y)
    opt.step(X, Y)
    other.step(X, Y)
    assert opt._known.proof.general == other._known.proof.general == {}
    assert opt._known.differentiates == other._known.differentiates


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


def test_parameter_frozen_after_the_optimizer_was_made():
    model = network()
    opt = lm(model)
    model[0].weight.requires_grad_(False)
    with unharmed(model, opt, "'0.weight'", "frozen"):
        opt.step(X, Y)


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


@pytest.mark.parametrize("lr", [-1.0, NAN, INF])
def test_learning_rate_spoilt_later(lr):
    """A scheduler writes into the group, past the constructor."""
    model = network()
    opt = lm(model)
    opt.param_groups[0]["lr"] = lr
    with unharmed(model, None, f"lr={lr}"):
        opt.step(X, Y)


def test_model_on_the_meta_device():
    """Shapes without numbers: nothing to train."""
    with refused("meta"):
        lm(network().to("meta")).step(X, Y)


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
