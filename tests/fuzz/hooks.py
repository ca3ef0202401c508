"""Backward hooks and functions in random networks: a step is refused by name, or it is that of brute force.

    python tests/fuzz/hooks.py --cases 3000 --seed 0
    python tests/fuzz/hooks.py --only 1234

A hook changes gradients linearly (twice, masked, reversed), not linearly (clipped, signs, noise), by rounding alone, or
it only looks. It is set on a parameter, a module, a tensor or a node that a forward pass makes, or on all modules; or
it is the backward pass of a function; before the first step, or between two. Rows of J by brute force are backward
passes of plain autograd with these hooks: where they are linear, the step must be theirs; where they are not, it must
be refused by the name of who carries them, and nothing may have changed.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

sys.path.append(str(Path(__file__).parents[1]))

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_full_backward_hook
from torch.utils.checkpoint import checkpoint

import marquardt as mq
from fuzz import attacks
from fuzz.attacks import Fault
from fuzz.drawn import START, Net, build, draw
from support import reference
from support.modules import Hiding

Change = Callable[[Tensor], "Tensor | None"]
LEFT_OUT = ("dropout", "rrelu", "encoder", "attention", "unused")  # random numbers, and parameters without a use

LINEAR: dict[str, Change] = {
    "twice": lambda g: 2 * g,
    "a thousandth": lambda g: 1e-3 * g,
    "reversed": lambda g: -g,
    "masked": lambda g: g * (torch.arange(g.shape[-1]) % 3 > 0),
    "nothing": lambda g: 0 * g,
    "in place": lambda g: g.clone().mul_(0.5),
}
LOOKING: dict[str, Change] = {
    "looks": lambda g: None,
    "returns it": lambda g: g,
    "measures": lambda g: None if g.norm() >= 0 else g,
}
ROUNDING: dict[str, Change] = {
    "to bfloat16": lambda g: g.bfloat16().to(g.dtype),
    "without NaN": torch.nan_to_num,
}
BENT: dict[str, Change] = {
    **{f"clamped at {t}": lambda g, t=t: g.clamp(-t, t) for t in (1e-3, 1.0, 1e3)},
    **{f"at most {t} long": lambda g, t=t: g * (t / (g.norm() + 1e-12)).clamp(max=1.0) for t in (1e-3, 1.0, 1e3)},
    **{f"nothing below {t}": lambda g, t=t: g * (g.abs() > t) for t in (1e-3, 1.0)},
    "of length 1": lambda g: g / (g.norm() + 1e-8),
    "signs": torch.sign,
    "positive part": torch.relu,
    "absolute": torch.abs,
    "tanh": torch.tanh,
    "shifted": lambda g: g + 0.1,
    "noise": lambda g: g + 0.1 * torch.randn_like(g),
    "dropped": lambda g: nn.functional.dropout(g, 0.5),
    "the largest half": lambda g: g * (g.abs() >= g.abs().median()),
    "to float8": lambda g: g.to(torch.float8_e4m3fn).to(g.dtype),
}
KINDS = {"linear": LINEAR, "looking": LOOKING, "rounding": ROUNDING, "bent": BENT}


class Changed(torch.autograd.Function):
    """x, and something else on the way back"""

    @staticmethod
    def forward(ctx: Any, x: Tensor, change: Change) -> Tensor:
        ctx.change = change
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        found = ctx.change(g)
        return g if found is None else found, None


class Within(nn.Module):
    """A module that is called by something else"""

    def __init__(self, module: nn.Module, how: str) -> None:
        super().__init__()
        self.module, self.how = module, how

    def forward(self, x: Tensor) -> Tensor:
        if self.how == "hiding":
            return Hiding.apply(x, self.module)
        return checkpoint(self.module, x, use_reentrant=True)


# ---- where


def all_of(change: Change) -> Callable[[Any], Any]:
    """The same for every one of several gradients"""

    def changed(gradients: Any) -> Any:
        found = tuple(None if g is None else change(g) for g in gradients)
        return None if all(f is None for f in found) else found

    return changed


def on_parameter(rng: Random, model: Net, change: Change) -> tuple[Any, list[str]]:
    name, p = rng.choice([(k, p) for k, p in model.named_parameters() if p.requires_grad])
    return p.register_hook(change), [repr(name)]


def on_module(rng: Random, model: Net, change: Change) -> tuple[Any, list[str]]:
    name, module = rng.choice(places(model))
    each = all_of(change)
    if rng.random() < 0.5:
        return module.register_full_backward_pre_hook(lambda m, out: each(out)), [repr(name)]
    # torch wants None of the first module, whose inputs need no gradient.
    return module.register_full_backward_hook(
        lambda m, given, out: each(given) if any(g is not None for g in given) else None
    ), [repr(name)]  # fmt: skip


def on_all_modules(rng: Random, model: Net, change: Change) -> tuple[Any, list[str]]:
    each = all_of(change)
    handle = register_module_full_backward_hook(
        lambda m, given, out: each(given) if any(g is not None for g in given) else None
    )
    return handle, ["for all modules"]


def on_tensor(rng: Random, model: Net, change: Change) -> tuple[Any, list[str]]:
    """Every forward pass sets it."""
    way = rng.choice(["tensor", "node", "before node"])
    each = all_of(change)

    def set_hook(module: nn.Module, inputs: Any, z: Tensor) -> None:
        if z.grad_fn is not None:
            if way == "tensor":
                z.register_hook(change)
            elif way == "node":
                z.grad_fn.register_hook(lambda given, out: each(given))
            else:
                z.grad_fn.register_prehook(each)

    return rng.choice(places(model))[1].register_forward_hook(set_hook), ["the forward pass sets a hook between"]


def by_function(rng: Random, model: Net, change: Change) -> tuple[Any, list[str]]:
    _, module = rng.choice(places(model))
    return module.register_forward_hook(lambda m, inputs, z: Changed.apply(z, change)), ["Changed"]


WHERE = [on_parameter, on_parameter, on_module, on_module, on_tensor, on_tensor, by_function, on_all_modules]


def places(model: Net) -> list[tuple[str, nn.Module]]:
    """Modules that take a tensor and return one"""
    return [*((f"body.{k}", m) for k, m in enumerate(model.body)), ("head", model.head)]


# ---- one case


def one(seed: int) -> str:
    rng = Random(seed)
    model, x, y = drawn(rng)
    if rng.random() < 0.15:
        return hidden(rng, model, x, y)
    kind = rng.choice(["linear", "linear", "looking", "rounding", "bent", "bent", "bent"])
    what = rng.choice(list(KINDS[kind]))
    where, late = rng.choice(WHERE), rng.random() < 0.4
    label = f"{kind}, {what}, {where.__name__}{', between two steps' if late else ''}"
    lam = rng.choice([0.1, 1.0])
    curvature = draw_curvature(rng)
    opt = plain(model, curvature, lam)
    for _ in range(2 * late):
        step_and_compare(model, opt, x, y, lam, f"{label}: before the hook")
    handle, names = where(rng, model, KINDS[kind][what])
    try:
        for _ in range(2):
            try:
                step_and_compare(model, opt, x, y, lam, f"{label}, {curvature}", kind == "rounding")
            except ValueError as error:
                if kind != "bent" and what != "to bfloat16":  # which may be more than rounding, of a small gradient
                    raise Fault(f"{label}: refused, {error}") from error
                if not all(name in str(error) for name in names):
                    raise Fault(f"{label}: the name {names} is not in: {error}") from error
                return "refused"
    finally:
        handle.remove()
    step_and_compare(model, opt, x, y, lam, f"{label}: after the hook")
    return f"{kind} and right" if kind != "bent" else "bent without effect"


def hidden(rng: Random, model: Net, x: Any, y: Tensor) -> str:
    how = rng.choice(["reentrant", "reentrant", "hiding"])
    k = rng.randrange(len(model.body)) if len(model.body) else -1
    if x.is_floating_point() and rng.random() < 0.7:
        x.requires_grad_()
    opt = plain(model, draw_curvature(rng), 1.0)
    for _ in range(2 * (rng.random() < 0.4)):
        step_and_compare(model, opt, x, y, 1.0, f"{how}: before")
    if k < 0:
        model.head = Within(model.head, how)
    else:
        model.body[k] = Within(model.body[k], how)
    try:
        step_and_compare(model, opt, x, y, 1.0, f"{how} at {k}")
    except ValueError as error:
        words = ["use_reentrant=True" if how == "reentrant" else "Hiding"]
        if not x.requires_grad and not any(p.requires_grad for p in before(model, k)):
            words.append("do not depend on the trainable parameters")  # there is no graph at all
        if not any(word in str(error) for word in words):
            raise Fault(f"{how} at {k}: {words[0]} is not in: {error}") from error
        return "hidden and refused"
    inside = list((model.head if k < 0 else model.body[k]).parameters())
    reached = x.requires_grad or any(p.requires_grad for p in before(model, k))
    if reached and any(p.requires_grad for p in inside):
        raise Fault(f"{how} at {k}: accepted, and its parameters get no gradient")
    return "hidden, as in torch"


def before(model: Net, k: int) -> Iterator[nn.Parameter]:
    if model.table is not None:
        yield from model.table.parameters()
    for module in model.body[: k if k >= 0 else None]:
        yield from module.parameters()


def drawn(rng: Random) -> tuple[Net, Tensor, Tensor]:
    """A network without random numbers, inputs and targets"""
    case = draw(rng.randrange(10**6))
    names = tuple((name, own) for name, own in case.pieces if name not in LEFT_OUT)
    case = replace(case, pieces=names, loss="mse", head="vector", frozen=0, training=False, chosen=False)
    model = build(case)
    for module in model.modules():
        if getattr(module, "inplace", False):
            module.inplace = False  # torch takes no module hooks beside it
    shape = START[case.kind](Random(f"{case.seed} shape"))
    N = rng.choice([1, 2, 4, 6])
    x = torch.randint(shape[2], (N, shape[1])) if case.kind == "t" else torch.randn(N, *shape[1:], dtype=torch.float64)
    with torch.no_grad():
        z = model.eval()(x)
    return model, x, z + torch.randn_like(z)


def draw_curvature(rng: Random) -> Any:
    exact = mq.MatrixFree(iterations=1000, tolerance=0.0, backtrack=False, warm=0.0)
    return rng.choice([mq.Auto(), mq.Dense(), mq.Dense(), mq.Gram(), mq.Gram(whole=0), mq.Dense(chunk=2), exact])


def plain(model: nn.Module, curvature: Any, lam: float) -> mq.LM:
    return mq.LM(
        model, "mse", curvature=curvature, rows=mq.Exact(), damping=mq.Identity(), schedule=mq.Constant(lam),
        momentum=None, acceptance=mq.Decrease(), line_search=None, average=None,
    )  # fmt: skip


def step_and_compare(
    model: nn.Module, opt: mq.LM, x: Any, y: Tensor, lam: float, label: str, rounds: bool = False
) -> None:
    """The step, and the same by brute force; after an error everything is as it was."""
    params = list(opt.params)
    theta = flat(params)
    try:
        step = opt.step(x, y)
    except ValueError:
        if not torch.equal(flat(params), theta) or any(p.grad is not None for p in model.parameters()):
            raise Fault(f"{label}: refused, and the parameters have changed") from None
        raise
    if any(p.grad is not None for p in model.parameters()):
        raise Fault(f"{label}: .grad is set")
    d = flat(params) - theta
    J, r = linearised(model, params, x, y, theta)
    G, g = 2 / len(r) * J.T @ J, 2 / len(r) * J.T @ r
    wanted = -torch.linalg.solve(G + lam * torch.eye(len(g), dtype=G.dtype), g)
    if not step.accepted:
        right = not bool(d.any())
    elif rounds:  # as much of J and g as is left then: g may be a difference of large numbers
        size = 2 / len(r) * J.norm() * r.norm() + (G.norm() + lam) * d.norm()
        right = bool((G @ d + lam * d + g).norm() <= 3e-2 * size)
    else:
        right = bool((d - wanted).norm() <= 1e-4 * (wanted.norm() + 1e-9))
    if not right:
        raise Fault(f"{label}: the step is {float((d - wanted).norm() / wanted.norm()):.2g} off, {step}")


def linearised(model: nn.Module, params: list[Tensor], x: Any, y: Tensor, theta: Tensor) -> tuple[Tensor, Tensor]:
    """J at θ by one backward pass for every output, and z − y"""
    now = flat(params)
    assign(params, theta)
    J, z = reference.jacobian_by_rows(model, dict(enumerate(params)), x)
    assign(params, now)
    return J, (z - y).flatten()


def flat(params: list[Tensor]) -> Tensor:
    return torch.cat([p.detach().flatten() for p in params])


def assign(params: list[Tensor], theta: Tensor) -> None:
    with torch.no_grad():
        for p, t in zip(params, theta.split([p.numel() for p in params]), strict=True):
            p.copy_(t.view_as(p))


if __name__ == "__main__":
    attacks.main(__doc__, one)
