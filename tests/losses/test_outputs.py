"""What of a model's outputs a loss is taken of."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn

import marquardt as mq
from marquardt.losses import Loss, OutputLayout
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


# A loss of several outputs.


@dataclass(frozen=True, kw_only=True, eq=False)
class Gaussian(Loss):
    """ℓ = ½(m − y)² + ½s² of a mean and another number for each target."""

    outputs_taken: ClassVar[int] = 2

    def ell(self, z: Tensor, y: Tensor) -> Tensor:
        m, s = z.chunk(2, 1)
        return (((m - y) ** 2 + s**2) / 2).sum(1, True)

    def slope(self, z: Tensor, y: Tensor) -> Tensor:
        m, s = z.chunk(2, 1)
        return torch.cat([m - y, s], 1)

    def factors(self, z: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        return torch.eye(z.shape[1]).expand(len(z), 1, -1, -1), self.slope(z, y)[:, None]

    def faults(self, z: Tensor, y: Any) -> list[mq.losses.Fault]:
        return []


class Two(nn.Module):
    def __init__(self, form: Any = lambda *t: t) -> None:
        super().__init__()
        self.mean, self.spread, self.form = nn.Linear(3, 2), nn.Linear(3, 2), form

    def forward(self, x: Tensor) -> Any:
        return self.form(self.mean(x), self.spread(x))


@pytest.mark.parametrize(
    ("form", "loss", "target"),
    [
        (lambda *t: t, Gaussian(), lambda y: y),
        (lambda m, s: {"mean": m, "spread": s}, {("mean", "spread"): Gaussian()}, lambda y: y),
        (lambda m, s: {"pose": (m, s), "other": m}, {"pose": Gaussian()}, lambda y: {"pose": y}),
        (
            lambda m, s: {"mean": m, "spread": s, "other": m},
            {("mean", "spread"): Gaussian()},
            lambda y: {("mean", "spread"): y},
        ),
    ],
    ids=["tuple", "dict", "nested", "by names"],
)
def test_a_loss_of_two_outputs(form, loss, target):
    model, x, y = Two(form), torch.randn(5, 3), torch.randn(5, 2)
    lin = mq.linearize(model, loss, x, target(y))
    m, s = model.mean(x), model.spread(x)
    f = ((m - y).square().sum() + s.square().sum()) / 10
    assert lin.loss == pytest.approx(float(f), rel=1e-12)
    g = torch.autograd.grad(f, list(model.parameters()))
    assert error(lin.gradient, torch.cat([t.flatten() for t in g])) < 1e-12
    assert lm(model, loss).step(x, target(y)).accepted


def test_a_loss_of_two_outputs_of_a_model_with_three():
    model, x, y = Two(lambda m, s: (m, s, m)), torch.randn(5, 3), torch.randn(5, 2)
    opt = lm(model, Gaussian())
    before = world(model, opt)
    with refused("takes 2 of them", "0 (5, 2)"):
        opt.step(x, y)
    assert changes(before, world(model, opt)) == []


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
