"""What of a model's outputs a loss is taken of."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import marquardt as mq
from marquardt.losses import OutputLayout
from marquardt.losses.base import named, taken
from support.reference import error
from support.several import FORMS, Heads
from support.steps import lm
from support.unchanged import changes, refused, world

pytestmark = pytest.mark.usefixtures("double")

MASK, DEPTH, HIDDEN = torch.rand(4, 3, 2), torch.rand(4), torch.rand(4, 2)
OWN_LOSS, TOKENS = torch.rand(()), torch.arange(4)


@pytest.mark.parametrize(
    "raw",
    [
        MASK,
        {"logits": MASK, "hidden": HIDDEN},
        OrderedDict(loss=OWN_LOSS, logits=MASK, states=(HIDDEN, HIDDEN)),
        FORMS["object"](MASK, None, TOKENS),
        (OWN_LOSS, MASK, TOKENS),
        [MASK],
        {"found": {"deep": MASK}, "ids": TOKENS, "kind": "text", "none": None},
    ],
    ids=lambda raw: type(raw).__name__,
)
def test_the_tensor_of_a_single_loss(raw):
    assert taken(raw) is MASK


@pytest.mark.parametrize(
    "raw",
    [(MASK, (HIDDEN, HIDDEN)), {"a": MASK, "b": DEPTH}, {"ids": TOKENS}, (), "text"],
    ids=["nested", "two", "integers", "nothing", "text"],
)
def test_a_single_loss_cannot_tell(raw):
    with refused("cannot tell which", *(repr(k) for k in named(raw))):
        taken(raw)


@pytest.mark.parametrize("form", FORMS)
def test_a_layout_joins_and_splits(form):
    raw = FORMS[form](MASK, DEPTH, HIDDEN)
    layout = OutputLayout.of(raw)
    assert layout == OutputLayout.of(FORMS[form](MASK[:2], DEPTH[:2], HIDDEN[:2]))  # whatever the number of samples
    assert hash(layout) == hash(OutputLayout.of(raw))
    z = layout.joined(raw)
    assert z.shape == (4, 6 + 1 + 2)
    found = layout.structure(z)
    assert isinstance(found, tuple if form in ("tuple", "list") else dict)
    parts = found if isinstance(found, tuple) else found.values()
    assert all(torch.equal(a, b) for a, b in zip(parts, (MASK, DEPTH, HIDDEN), strict=True))


def test_what_a_layout_leaves_out():
    raw = (OWN_LOSS, MASK, (HIDDEN,), DEPTH)
    layout = OutputLayout.of(raw)
    own, mask, states, depth = layout.structure(layout.joined(raw))
    assert own is None
    assert states is None
    assert torch.equal(mask, MASK)
    assert torch.equal(depth, DEPTH)
    assert torch.equal(OutputLayout.of(MASK).structure(MASK.flatten(1)), MASK)
    with refused("no floating-point tensor", "'ids'"):
        OutputLayout.of({"ids": TOKENS})


# Losses of several outputs: a function of all of them, a mean beside its variance.


@dataclass
class Found:
    mean: Tensor
    spread: Tensor
    steps: int = 3


RETURNED = {
    "tuple": lambda m, s: (m, s),
    "dict": lambda m, s: {"mean": m, "spread": s, "steps": 3},
    "dataclass": Found,
    "turned": lambda m, s: {"spread": s, "mean": m},
    "nested": lambda m, s: {"pose": (m, s), "other": m},
    "three": lambda m, s: (m, s, m),
}


class Two(nn.Module):
    def __init__(self, form: str = "tuple", shape: tuple[int, ...] = (2,)) -> None:
        super().__init__()
        self.form, self.shape = RETURNED[form], shape
        self.body, self.mean, self.spread = nn.Linear(3, 5), nn.Linear(5, 2), nn.Linear(5, 2)

    def forward(self, x: Tensor) -> Any:
        h = self.body(x).tanh()
        return self.form(self.mean(h).view(-1, *self.shape), F.softplus(self.spread(h)).view(-1, *self.shape))


def twins(form: str) -> tuple[Two, Two, Tensor, Tensor]:
    """The same weights: outputs in this form, and in a tuple"""
    model, plain = Two(form), Two()
    plain.load_state_dict(model.state_dict())
    return model, plain, torch.randn(7, 3), torch.randn(7, 2)


def agrees(lin: mq.Linearization, loss: Tensor, model: nn.Module) -> None:
    expected = torch.cat([g.flatten() for g in torch.autograd.grad(loss, list(model.parameters()))])
    assert lin.loss == pytest.approx(loss.item(), rel=1e-12)
    assert error(lin.gradient, expected) < 1e-12


def likelihood(outputs: Any, targets: Tensor) -> Tensor:
    mean, v = outputs if isinstance(outputs, tuple) else (outputs["mean"], outputs.spread)
    return (v.log() + (mean - targets).square() / v).flatten(1).sum(1)


@pytest.mark.parametrize("form", ["tuple", "dict", "dataclass", "turned"])
def test_a_function_is_given_what_the_model_returns(form):
    """By key and by attribute; what is no tensor with a row per sample is left out."""
    model, plain, x, y = twins(form)
    loss = likelihood(plain(x), y).mean()
    agrees(mq.linearize(model, likelihood, x, y), loss, plain)
    opt = mq.LM(model, likelihood)
    losses = [opt.step(x, y).new_loss for _ in range(5)]
    assert losses[-1] < losses[0] < loss.item()


def test_an_output_that_is_not_there_is_named():
    model, _, x, y = twins("dict")
    with pytest.raises(AttributeError, match="no output 'scale', only 'mean', 'spread'"):
        mq.LM(model, lambda outputs, targets: (outputs.scale - targets).square()).step(x, y)


NLL, BY_NAMES = nn.GaussianNLLLoss(), ("mean", "spread")


@pytest.mark.parametrize("shape", [(2,), (2, 1), (1, 2)], ids=str)
def test_a_mean_and_its_variance_as_two_outputs(shape):
    """With targets of the shape of the mean, whatever that is."""
    model, x, y = Two(shape=shape), torch.randn(7, 3), torch.randn(7, *shape)
    mean, v = model(x)
    lin = mq.linearize(model, NLL, x, y)
    agrees(lin, NLL(mean, y, v), model)
    assert lin.loss_curvature == "fisher"


@pytest.mark.parametrize(
    ("form", "loss", "target"),
    [
        *((form, {BY_NAMES: NLL}, lambda y: y) for form in ("dict", "dataclass", "turned")),
        ("dict", {BY_NAMES: NLL}, lambda y: {BY_NAMES: y}),
        ("nested", {"pose": NLL}, lambda y: {"pose": y}),
    ],
)
def test_two_outputs_by_their_names(form, loss, target):
    model, plain, x, y = twins(form)
    mean, v = plain(x)
    agrees(mq.linearize(model, loss, x, target(y)), NLL(mean, y, v), plain)
    assert lm(model, loss).step(x, target(y)).accepted


@pytest.mark.parametrize(
    ("form", "loss", "says"),
    [
        *((form, NLL, ["'spread' (7, 2)", "order that their names do not tell"]) for form in ("dict", "dataclass")),
        ("turned", "gaussian_nll", ["'spread' (7, 2)", "loss={('mean', 'spread'): loss}"]),
        ("three", NLL, ["takes 2 of them", "0 (7, 2)"]),
    ],
)
def test_names_have_no_order(form, loss, says):
    """A variance taken for a mean would train silently."""
    model, _, x, y = twins(form)
    opt = mq.LM(model, loss)
    before = world(model, opt)
    with refused(*says):
        opt.step(x, y)
    assert changes(before, world(model, opt)) == []


def test_targets_that_fit_neither_shape_are_refused():
    with refused("outputs have shape (7, 2), targets (7, 1)"):
        mq.LM(Two(), NLL).step(torch.randn(7, 3), torch.randn(7, 1))


def test_every_curvature_is_named():
    model, _, x, y = twins("dict")
    for spread, found in (("mse", "hessian"), ("huber", "mean: hessian, spread: majoriser")):
        loss = {"mean": "mse", "spread": spread}
        assert mq.linearize(model, loss, x, {"mean": y, "spread": y}).loss_curvature == found


# Ways to the rows, and trial points, call the model by themselves.


class Odd(Heads):
    """With a parameter that no rule knows, and random numbers if asked for."""

    def __init__(self, p: float = 0.0) -> None:
        super().__init__()
        self.scale, self.drop = nn.Parameter(torch.rand(4) + 1), nn.Dropout(p)

    def forward(self, x: Tensor) -> Any:
        return super().forward(self.drop(torch.atan2(x, self.scale)))


@pytest.mark.parametrize(
    "parts", [{}, {"line_search": mq.Grid(), "schedule": mq.Constant(1e-9)}], ids=["plain", "search"]
)
@pytest.mark.parametrize("p", [0.0, 0.4])
def test_other_ways_to_rows_and_losses(p, parts):
    """The same as the model whose outputs are one tensor, with the loss that this tensor has."""
    model = Odd(p)
    twin = Odd(p)
    twin.load_state_dict(model.state_dict())
    twin.form = lambda mask, depth, _: torch.cat([mask.flatten(1), depth.flatten(1)], 1)
    x, mask, depth = torch.randn(6, 4), torch.randn(6, 3, 2, 2), torch.randn(6, 2, 2)
    ours, theirs = lm(model, {"mask": ("mse", 12 / 16), "depth": ("mse", 4 / 16)}, **parts), lm(twin, "mse", **parts)
    for _ in range(4):
        state = torch.get_rng_state()
        one = ours.step(x, {"mask": mask, "depth": depth})
        torch.set_rng_state(state)
        other = theirs.step(x, torch.cat([mask.flatten(1), depth.flatten(1)], 1))
        assert (one.rule, one.lr) == (other.rule, other.lr)
        assert one.loss == pytest.approx(other.loss, rel=1e-9)
        assert one.new_loss == pytest.approx(other.new_loss, rel=1e-7)
