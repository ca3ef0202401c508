"""Models that change between the steps: flags, branches by the data, hooks, methods and layers that are replaced,
modes, weights, and chunks. Every step against the same step by brute force, on the model as it is then.

    python tests/fuzz/changing.py --cases 2000 --seed 0
    python tests/fuzz/changing.py --minutes 60
    python tests/fuzz/changing.py --only 1234

A step is that of brute force on the whole batch, or it is refused with a way out, and then nothing has changed. A
refusal needs a reason: samples that see each other where a part of them would be taken alone.
"""

from __future__ import annotations

import copy
import sys
import types
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random
from typing import Any

sys.path.append(str(Path(__file__).parents[1]))

import torch
from torch import Tensor, nn

import marquardt as mq
from fuzz import attacks, drawn
from fuzz.brute import Brute
from fuzz.compared import Run, run
from fuzz.observed import Failure, structure
from support.coupling import COUPLING, HARMLESS, KINDS, Replaced, everywhere, hooked, hooked_before
from support.steps import edit, state

STEPS = 6
MOST = 18  # outputs of a batch: the reference goes backward from every one, twice


# ---- what a place in the network may do with its samples


class Place(nn.Module):
    """A place in the network: what it does with the samples, and whether it does."""

    def __init__(self) -> None:
        super().__init__()
        self.kind, self.on, self.marked = "", False, False
        self.least = float("inf")  # a mean of |h| from which on it does, whatever the flag says

    def forward(self, h: Tensor) -> Tensor:
        if not self.kind:
            return h
        return KINDS[self.kind](h, self.on or float(h.detach().abs().mean()) > self.least)


class Turning(nn.Module):
    """Another weight after every pass."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros((), dtype=torch.float64))

    def forward(self, h: Tensor) -> Tensor:
        self.count += 1
        return h * (1 + 0.3 * self.count.sin())


# ---- what happens between two steps


@dataclass
class Change:
    """What it was, and whether samples see each other from here on; None: as the data have it."""

    what: str
    couples: bool | None = False
    turns: bool = False  # whether a buffer changes the outputs


class Changing(Run):
    """A case whose model changes."""

    def __init__(self, case: drawn.Case) -> None:
        super().__init__(case)
        self.batches = [few(batch) for batch in self.batches]
        self.part = False
        self.random = Random(f"{case.seed} changes")
        for module in list(self.model.modules()):
            for name, child in module._modules.items():
                if isinstance(child, nn.RReLU):  # the slopes that a sample draws depend on the others: another matter
                    module._modules[name] = nn.LeakyReLU(0.2)
        body: list[nn.Module] = []
        for module in self.model.body:
            body += [Place(), module]
        last = Place()  # which stays
        self.model.body = nn.Sequential(*body, last).train(self.model.training)
        if self.random.random() < 0.5:
            self.model.body[0] = nn.Identity()  # nothing happens to the inputs
        for place in self.places():
            if self.random.random() < 0.6:
                place.kind = self.random.choice([*COUPLING, *HARMLESS])
        self.active: list[Change] = []
        self.handles: list[Any] = []
        self.undo: list[Callable[[], None]] = []
        self.fresh = 0  # refusals with a reason

    def places(self) -> list[Place]:
        return [m for m in self.model.body if isinstance(m, Place)]

    def go(self) -> None:
        try:
            super().go()
        finally:
            for handle in self.handles:
                handle.remove()

    def step(self, k: int, batch: tuple[Any, Any, Any]) -> None:
        if k:
            for _ in range(self.random.choice([0, 1, 1, 1, 2])):
                self.change()
            self.looks = structure(self.model)
        N = len(batch[1])
        self.cut = (self.lm.curvature.needs.chunk or N) < N
        self.part = self.cut or isinstance(self.case.rows, mq.Fraction)
        self.whole = None
        if self.cut:
            rng = torch.get_rng_state()
            try:
                arguments = self.loss, self.case.rows, [batch], None, state(self.lm)["steps"], False
                self.whole = Brute(self.model, self.lm.params, *arguments)
            except Exception:
                self.whole = None  # then the step itself is compared with nothing either
            self.draws = not torch.equal(rng, torch.get_rng_state())
            torch.set_rng_state(rng)
            self.sees = self.draws and sees_others(self.model, batch[0])
        super().step(k, batch)

    def check(self, step: Any, b: Brute, before: Any) -> None:
        if self.whole is not None and not self.draws:
            size = abs(self.whole.f) + float(self.whole.g.norm())
            off = abs(self.whole.f - b.f) + float((self.whole.g - b.g).norm())
            if not off <= 1e-7 * size:
                raise Failure("parts of a batch are another loss", f"{off / size:.2g} apart, {self.now()}")
        elif self.whole is not None and self.sees:
            raise Failure("parts of a batch are another loss, at random", self.now())
        super().check(step, b, before)

    def refused(self, error: Exception, brute: Brute | None = None) -> None:
        reason = self.part and any(c.couples is not False or c.turns for c in self.active)
        text = str(error)
        if isinstance(error, ValueError) and reason and REASON in text and any(w in text for w in WAYS_OUT):
            self.fresh += 1
            return
        if isinstance(error, ValueError) and "does not require grad" in text and self.frozen():
            return
        super().refused(error, brute)

    def frozen(self) -> bool:
        return not all(p.requires_grad for p in self.lm.params)

    def now(self) -> str:
        kinds = [(p.kind, p.on, p.least) for p in self.places() if p.kind]
        return f"{self.lm.curvature}, {[c.what for c in self.active]}, {kinds}"

    # What may happen.

    def change(self) -> None:
        happenings = [self.flag, self.flag, self.flag, self.branch, self.hook, self.hook, self.global_hook, self.method,
                      self.layer, self.modes, self.weights, self.another_curvature, self.turning, self.take_back,
                      self.take_back, self.freeze]  # fmt: skip
        self.random.choice(happenings)()

    def happened(self, what: str, kind: str, undo: Callable[[], None], couples: bool | None = None) -> None:
        change = Change(f"{what}: {kind}", kind in COUPLING if couples is None else couples)
        self.active.append(change)
        self.undo.append(lambda: (undo(), self.active.remove(change)))

    def take_back(self) -> None:
        if self.undo:
            self.undo.pop(self.random.randrange(len(self.undo)))()

    def flag(self) -> None:
        off = [p for p in self.places() if p.kind and not p.on]
        if off:
            place = self.random.choice(off)
            place.on = True
            self.happened("flag", place.kind, lambda: setattr(place, "on", False))

    def branch(self) -> None:
        some = [p for p in self.places() if p.kind and p.least == float("inf")]
        if some:
            place = self.random.choice(some)
            place.least = 0.2 * self.random.random()
            self.happened("branch", place.kind, lambda: setattr(place, "least", float("inf")))
            self.active[-1].couples = None if place.kind in COUPLING else False

    def hook(self) -> None:
        if not self.places():  # another layer is in the place of the only one
            return
        module, kind = self.random.choice(self.places()), self.random.choice([*KINDS])
        before = self.random.random() < 0.3
        add = module.register_forward_pre_hook if before else module.register_forward_hook
        handle = add((hooked_before if before else hooked)(KINDS[kind]))
        self.handles.append(handle)
        self.happened("hook", kind, handle.remove)

    def global_hook(self) -> None:
        if not self.places():
            return
        kind = self.random.choice([*KINDS])
        place = self.random.choice(self.places())
        place.marked = True
        handle = nn.modules.module.register_module_forward_hook(everywhere(KINDS[kind]))
        self.handles.append(handle)
        self.happened("global hook", kind, handle.remove)

    def method(self) -> None:
        if not self.places():
            return
        module, kind = self.random.choice(self.places()), self.random.choice([*KINDS])
        if "forward" not in vars(module):
            module.forward = types.MethodType(Replaced(kind), module)
            self.happened("method", kind, lambda: delattr(module, "forward"))

    def layer(self) -> None:
        def make() -> Place:
            new = Place()
            new.kind, new.on = self.random.choice([*KINDS]), True
            return new

        if new := self.exchange(make, "layer"):
            self.active[-1].couples = new.kind in COUPLING

    def turning(self) -> None:
        if self.exchange(Turning, "turning"):
            self.active[-1].turns = True

    def exchange(self, make: Callable[[], Any], what: str) -> Any:
        """Another module in a place, if there is one"""
        if not (some := [i for i, m in enumerate(self.model.body[:-1]) if isinstance(m, Place)]):
            return None
        i = self.random.choice(some)
        old, new = self.model.body[i], make()
        self.model.body[i] = new.train(old.training)

        def back() -> None:
            if self.model.body[i] is new:
                self.model.body[i] = old

        self.happened(what, getattr(new, "kind", ""), back, False)
        return new

    def modes(self) -> None:
        module = self.random.choice([self.model, *self.model.body])
        norms = [m for m in module.modules() if isinstance(m, nn.modules.batchnorm._NormBase)]
        module.train(not module.training)
        for norm in norms:
            norm.eval()

    def weights(self) -> None:
        with torch.no_grad():
            p = self.random.choice(self.lm.params)
            p.mul_(1.2)

    def freeze(self) -> None:
        p = self.random.choice(self.lm.params)
        p.requires_grad_(False)
        self.undo.append(lambda: p.requires_grad_(True))

    def another_curvature(self) -> None:
        self.lm.curvature = curvature(self.random, norms(self.case))
        self.case = replace(self.case, curvature=self.lm.curvature)
        edit(self.lm, past=None)  # what another has kept may be of no use


def sees_others(model: nn.Module, x: Tensor) -> bool:
    """Whether an output of a sample is another one beside others, with the same random numbers."""
    rng = torch.get_rng_state()

    def outputs(x: Tensor) -> Tensor:
        torch.set_rng_state(rng)
        with torch.no_grad():
            return copy.deepcopy(model)(x).reshape(len(x), -1)

    z, found = outputs(x), False
    for i in range(len(x)):
        other = outputs(x.index_copy(0, torch.tensor([i]), x[[i - 1]]))
        rest = [k for k in range(len(x)) if k != i]
        found = found or float((other - z)[rest].abs().max()) > 1e-6
    torch.set_rng_state(rng)
    return found


REASON = "so that"
WAYS_OUT = ("leave chunk out", "rows=mq.Sampled(1)")


def norms(case: drawn.Case) -> bool:
    return any(name == "batch_norm" for name, _ in case.pieces[:3])


def curvature(rng: Random, couples: bool) -> Any:
    """One whose step is exact: of samples that BatchNorm couples, Auto ends its conjugate gradients early."""
    exact = {"iterations": 1000, "warm": 0.0, "tolerance": 0.0, "backtrack": False}
    chunk = rng.choice([None, None, 1, 2, 3])
    found = rng.choice([
        mq.Dense(chunk=chunk), mq.Dense(chunk=chunk), mq.Gram(chunk=chunk), mq.Auto(chunk=chunk),
        mq.MatrixFree(chunk=chunk, **exact), mq.Kronecker(chunk=chunk),
    ])  # fmt: skip
    return mq.MatrixFree(chunk=chunk, **exact) if couples and isinstance(found, mq.Auto) else found


def draw(seed: int) -> drawn.Case:
    rng = Random(f"{seed} case")
    case = drawn.draw(seed)
    sizes = tuple(rng.choice([4, 4, 5, 6]) for _ in range(STEPS))
    rows = rng.choice([mq.Exact(), mq.Exact(), mq.Exact(), mq.Sampled(2), mq.Empirical(), mq.Fraction(0.5)])
    return replace(
        case, pieces=case.pieces[:3], curvature=curvature(rng, norms(case)), rows=rows, damping=mq.Identity(),
        momentum=None, schedule=mq.Constant(rng.choice([0.3, 1.0, 3.0])), acceptance=mq.Decrease(),
        line_search=None, average=None, attempts=1, sizes=sizes, same=rng.random() < 0.3, over=False, inputs="tensor",
        training=False, weights="none", lr=1.0, frozen=0, chosen=False,
        loss=rng.choice(["mse", "mse", "huber", "cross_entropy"]),
    )  # fmt: skip


def few(batch: tuple[Any, Any, Any]) -> tuple[Any, Any, Any]:
    x, y, w = batch
    return x[:6], y[:6], w


def one(seed: int) -> str:
    found = run(draw(seed), Changing)
    if found.count["compared"] + found.count["partly"]:
        return "compared and refused" if found.fresh else "compared"
    return "refused" if found.fresh else "neither"


if __name__ == "__main__":
    attacks.main(__doc__, one)
