"""Backward passes that are not linear, or that hide parameters, are refused by name, and what is linear is followed."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_full_backward_hook
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

import marquardt as mq
from support.cases import mlp
from support.modules import Hiding
from support.parts import Always
from support.steps import compared, lm, theta, unharmed
from support.unchanged import refused

pytestmark = [
    pytest.mark.usefixtures("double"),
    pytest.mark.filterwarnings("ignore:Full backward hook is firing"),  # of all modules, in the first
]

CURVATURES = {
    "auto": mq.Auto(), "dense": mq.Dense(), "chunks": mq.Dense(chunk=3), "gram": mq.Gram(),
    "products": mq.MatrixFree(tolerance=0.0, warm=0.0, backtrack=False), "hessian": mq.Hessian(),
}  # fmt: skip
EVERY_CURVATURE = pytest.mark.parametrize("curvature", CURVATURES.values(), ids=CURVATURES)


class Clipped(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        return g.clamp(-1, 1)


class Reversed(Clipped):
    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        return -g


class Network(nn.Module):
    """Two layers, and something that is done to what is between them."""

    def __init__(self, between: Callable[[Tensor], Any] = lambda h: None) -> None:
        super().__init__()
        self.first, self.act, self.last, self.between = nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, 3), between

    def forward(self, x: Tensor) -> Tensor:
        h = self.act(self.first(x))
        found = self.between(h) if h.requires_grad else None
        return self.last(found if isinstance(found, Tensor) else h)


def clipped(g: Tensor) -> Tensor:
    return g.clamp(-1, 1)


def each(gradients: Any) -> Any:
    return tuple(None if g is None else g.clamp(-1, 1) for g in gradients)


def on_all(model: Network) -> Any:
    return register_module_full_backward_hook(lambda m, given, out: each(given) if given[0] is not None else None)


def between(function: Callable[[Tensor], Any]) -> Callable[[Network], None]:
    return lambda model: setattr(model, "between", function)


CLIPPING: dict[str, tuple[Callable[[Network], Any], list[str]]] = {
    "parameter": (lambda m: m.first.weight.register_hook(clipped), ["parameter 'first.weight'", "hook", "radius="]),
    "far above": (lambda m: m.last.bias.register_hook(lambda g: g.clamp(-1e3, 1e3)), ["parameter 'last.bias'"]),
    "module": (
        lambda m: m.last.register_full_backward_hook(lambda m, given, out: each(given)), ["'last' (Linear)", "radius="],
    ),
    "before a module": (lambda m: m.act.register_full_backward_pre_hook(lambda m, out: each(out)), ["'act' (Tanh)"]),
    "old style": (lambda m: m.act.register_backward_hook(lambda m, given, out: each(given)), ["'act' (Tanh)"]),
    "all modules": (on_all, ["for all modules"]),
    "tensor": (between(lambda h: h.register_hook(clipped)), ["TanhBackward0", "forward pass sets a hook"]),
    "node": (
        between(lambda h: h.grad_fn.register_hook(lambda given, out: each(given))),
        ["TanhBackward0", "forward pass sets a hook"],
    ),
    "function": (between(Clipped.apply), ["autograd.Function 'Clipped'", "radius="]),
    "normalised": (lambda m: m.first.bias.register_hook(lambda g: g / g.norm()), ["'first.bias'"]),
    "signs kept apart": (lambda m: m.first.bias.register_hook(torch.relu), ["'first.bias'"]),
    "noise": (lambda m: m.first.bias.register_hook(lambda g: g + torch.randn_like(g)), ["'first.bias'"]),
    "no plain gradient": (lambda m: m.first.weight.register_hook(lambda g: g.sign()), ["'first.weight'"]),
}  # fmt: skip


def batch() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(6, 2, generator=generator), torch.randn(6, 3, generator=generator)


def remove(handle: Any) -> None:
    if hasattr(handle, "remove"):
        handle.remove()


def network(between: Callable[[Tensor], Any] = lambda h: None) -> Network:
    torch.manual_seed(0)
    return Network(between)


EVERY_WAY = [(case, curvature) for case in ("parameter", "module", "tensor", "function") for curvature in CURVATURES]


@pytest.mark.parametrize("late", [False, True], ids=["from the first step on", "between two steps"])
@pytest.mark.parametrize(("case", "curvature"), dict.fromkeys([*EVERY_WAY, *((case, "auto") for case in CLIPPING)]))
def test_what_is_not_linear_is_refused_by_name(case, curvature, late):
    set_hook, says = CLIPPING[case]
    model, (x, y) = network(), batch()
    opt = lm(model, curvature=CURVATURES[curvature])
    for _ in range(2 * late):
        opt.step(x, y)
    plain, twin = copy.deepcopy((model, opt))
    handle = set_hook(model)
    try:
        with unharmed(model, opt, *says):
            opt.step(x, y)
    finally:
        remove(handle)
    if hasattr(handle, "remove"):
        assert opt.step(x, y) == twin.step(x, y)
        assert torch.equal(theta(model), theta(plain))


OF_FEW = {
    "the largest": lambda g: g * (g.abs() >= g.abs().max()),
    "above the median": lambda g: torch.where(g.abs() > g.abs().median(), g, 0.0),
    "as large as the largest": lambda g: g.sign() * g.abs().max(),
}


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("N", [1, 2])
@pytest.mark.parametrize("case", OF_FEW)
def test_a_small_batch_shows_it_too(case, N, seed):
    """What goes with the size of gradients is not linear in their sum alone, and that may agree by chance."""
    torch.manual_seed(seed)
    model = Network()
    model.last.register_full_backward_hook(lambda m, given, out: (OF_FEW[case](given[0]),))
    with refused("'last' (Linear)", "hook"):
        lm(model).step(torch.randn(N, 2), torch.randn(N, 3))


@pytest.mark.parametrize("curvature", [mq.Auto(), mq.MatrixFree()])
def test_a_hook_that_clips_in_large_batches(curvature):
    """A batch of two is linear, and the next one is not."""
    model, (x, y) = network(), batch()
    model.last.register_full_backward_hook(lambda m, given, out: each(given) if len(given[0]) > 2 else None)
    opt = lm(model, curvature=curvature)
    opt.step(x[:2], y[:2])
    with refused("'last' (Linear)", "hook", "radius="):
        opt.step(x, y)


def test_a_hook_that_changes_its_mind():
    """The hook is the same one; what it does is not."""
    model, (x, y), clips = network(), batch(), []
    model.first.weight.register_hook(lambda g: g.clamp(-1e-3, 1e-3) if clips else None)
    opt = lm(model)
    for _ in range(3):
        opt.step(x, y)
    clips.append(True)
    with refused("parameter 'first.weight'"):
        opt.step(x, y)


@pytest.mark.parametrize("ask", [lambda *of: mq.fit(*of, "mse", steps=3), lambda m, data: mq.posterior(m, "mse", data)])
def test_a_fit_and_a_posterior_say_why(ask):
    model = network()
    model.first.weight.register_hook(clipped)
    with refused("parameter 'first.weight'", "hook", "radius="):
        ask(model, batch())


@EVERY_CURVATURE
def test_hooks_that_only_look(curvature):
    (x, y), seen = batch(), []
    model, plain = network(lambda h: h.register_hook(lambda g: seen.append("tensor"))), network()
    model.first.weight.register_hook(lambda g: seen.append("parameter"))
    model.last.register_full_backward_hook(lambda *_: seen.append("module"))
    opt, other = lm(model, curvature=curvature), lm(plain, curvature=curvature)
    for _ in range(3):
        opt.step(x, y), other.step(x, y)
    assert set(seen) == {"tensor", "parameter", "module"}
    torch.testing.assert_close(theta(model), theta(plain))


LINEAR = {
    "twice": lambda m: m.first.weight.register_hook(lambda g: 2 * g),
    "masked": lambda m: m.last.weight.register_hook(lambda g: g * (torch.arange(4) % 2)),
    "a module's": lambda m: m.last.register_full_backward_hook(lambda m, given, out: (0.5 * given[0],)),
    "before a module": lambda m: m.act.register_full_backward_pre_hook(lambda m, out: (-out[0],)),
    "reversed": between(Reversed.apply),
    "of the outputs": lambda m: m.register_forward_hook(
        lambda m, x, z: None if not z.requires_grad else (z.register_hook(lambda g: 3 * g), z)[1]
    ),
}


@pytest.mark.parametrize("curvature", [c for name, c in CURVATURES.items() if name != "hessian"])
@pytest.mark.parametrize("late", [False, True], ids=["from the first step on", "between two steps"])
@pytest.mark.parametrize("case", LINEAR)
def test_linear_hooks_are_in_the_gradient_and_in_j(case, late, curvature):
    """Both of the same function: −(G + λI)⁻¹g, all from plain autograd."""
    model, (x, y) = network(), batch()
    opt = lm(model, curvature=curvature, schedule=mq.Constant(1.0), acceptance=Always())
    for _ in range(2 * late):
        opt.step(x, y)
    LINEAR[case](model)
    compared(opt, x, y, within=1e-3)


@pytest.mark.parametrize("layer", ["first", "last"])
@pytest.mark.parametrize("damping", [mq.KroneckerMetric(), mq.KroneckerMetric(steady=None), mq.FactoredMaxDiagonal()])
def test_what_a_hook_masks_stays_where_it_is(damping, layer):
    """D must not couple it with the rest."""
    model = network()
    weight = getattr(model, layer).weight
    mask = torch.rand_like(weight) > 0.5
    weight.register_hook(lambda g: g * mask)
    before, opt = weight.detach().clone(), mq.LM(model, "mse", damping=damping)
    for seed in range(4):
        torch.manual_seed(seed)
        opt.step(torch.randn(6, 2), torch.randn(6, 3))
    assert torch.equal(weight[~mask], before[~mask])
    assert bool((weight[mask] != before[mask]).all())


def test_rounding_by_a_hook():
    """To bfloat16, in float32: as much as TF32."""
    x, y = (t.float() for t in batch())
    model = network().float()
    model.last.weight.register_hook(lambda g: g.bfloat16().float())
    assert lm(model).step(x, y).accepted


def test_hooks_that_no_step_calls():
    """.grad is left alone."""
    model, called = network(), []
    model.first.weight.register_post_accumulate_grad_hook(called.append)
    lm(model).step(*batch())
    assert called == []


@EVERY_CURVATURE
def test_hooks_of_several_parameters(curvature):
    """torch refuses those that wait for all of them, with words of its own."""
    model, (x, y) = network(), batch()
    opt, seen = lm(model, curvature=curvature), []
    first = torch.autograd.graph.register_multi_grad_hook(list(model.parameters()), seen.append, mode="any")
    opt.step(x, y)
    assert seen
    last = torch.autograd.graph.register_multi_grad_hook(list(model.parameters()), seen.append)
    with unharmed(model, opt, "register_multi_grad_hook", 'mode="any"'):
        opt.step(x, y)
    first.remove(), last.remove()
    opt.step(x, y)


# ---- parameters that are hidden


class By(nn.Module):
    """A chain, one of whose layers is called in another way."""

    def __init__(self, way: Callable[[nn.Module, Tensor], Tensor], place: int) -> None:
        super().__init__()
        self.layers, self.way, self.place = mlp(2, 4, 3), way, place

    def forward(self, x: Tensor) -> Tensor:
        for k, layer in enumerate(self.layers):
            x = self.way(layer, x) if k == self.place else layer(x)
        return x


def reentrant(layer: nn.Module, x: Tensor) -> Tensor:
    return checkpoint(layer, x, use_reentrant=True)


def in_parts(layer: nn.Module, x: Tensor) -> Tensor:
    return checkpoint_sequential(nn.Sequential(layer, nn.Identity()), 2, x, use_reentrant=True)


HIDDEN = {
    "reentrant": (reentrant, ["use_reentrant=False"]),
    "in parts": (in_parts, ["use_reentrant=False"]),
    "a function": (lambda layer, x: Hiding.apply(x, layer), ["'Hiding'", ".backward()"]),
}


PLACES = [(case, place, True) for case in HIDDEN for place in (0, 2)]


@EVERY_CURVATURE
@pytest.mark.parametrize(("case", "place", "tracked"), [*PLACES, ("reentrant", 0, False)])
def test_hidden_parameters_are_refused(case, curvature, place, tracked):
    """Also in the first layer, where an input that requires a gradient makes the pass go through; without one the graph
    does not hold the layer at all, and nothing else would tell that it never moves."""
    way, says = HIDDEN[case]
    model, (x, y) = By(way, place), batch()
    x.requires_grad_(tracked)
    opt = lm(model, curvature=curvature)
    kept = [torch.ones_like(p) for p in model.parameters()]
    for p, grad in zip(model.parameters(), kept, strict=True):
        p.grad = grad
    with unharmed(model, opt, *says):
        opt.step(x, y)
    assert all(p.grad is grad for p, grad in zip(model.parameters(), kept, strict=True))


def test_no_parameter_is_reached():
    """The outputs require a gradient, but not one of a parameter."""
    model, (x, y) = network(), batch()
    model.forward = lambda x: torch.cat([x, x[:, :1]], 1)
    for curvature in (mq.Auto(), mq.MatrixFree()):
        with refused("do not depend on the trainable parameters"):
            lm(model, curvature=curvature).step(x.requires_grad_(), y)
