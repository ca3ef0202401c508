"""Ctrl-C at random moments of a step, a fit or a posterior: nothing has happened then, or all of it.

    python tests/fuzz/interrupts.py --minutes 60

Python raises KeyboardInterrupt where a function begins and where a call into C has returned. A profile function raises
it there, at a moment drawn from the seed: half of the time at any, otherwise at a line drawn from all lines there are,
so that what is rare is met too. Some attacks interrupt a second time, some use a real signal, some raise an exception
of another kind, as a time limit does.
"""

from __future__ import annotations

import signal
import sys
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from types import FrameType
from typing import Any

sys.path.append(str(Path(__file__).parents[1]))

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations

import marquardt as mq
from fuzz import attacks
from fuzz.settings import collected, settings
from support.modules import Counting, Scaling, Slope, noisy
from support.unchanged import changes, everything, same, world


class Timeout(Exception):
    """As the handler of an alarm raises it."""


# ---- moments


@dataclass
class Moments:
    """Counts the moments at which Python may raise, and raises at one of them."""

    at: int | None = None
    error: type[BaseException] = KeyboardInterrupt
    again: int | None = None  # calls after the first one, at which it is raised once more
    places: list[tuple[str, int, str]] = field(default_factory=list)
    seen: int = 0
    fired: int = 0

    def __call__(self, frame: FrameType, event: str, arg: Any) -> None:
        if event not in ("call", "c_return") or frame.f_code.co_filename == __file__:
            return
        if self.at is None:
            self.places.append((frame.f_code.co_filename, frame.f_lineno, event))
        self.seen += 1
        if self.seen - 1 == self.at:
            self.fired = 1
            if self.again is not None:
                sys.settrace(self.second)  # the profile function is gone once it has raised
            self.strike()

    def strike(self) -> None:
        raise self.error

    def second(self, frame: FrameType, event: str, arg: Any) -> None:
        if event == "call" and self.again is not None and frame.f_code.co_filename != __file__:
            self.again -= 1
            if self.again < 0:
                self.again = None
                self.fired = 2
                raise self.error

    def watch(self, act: Callable[[], Any]) -> Any:
        sys.setprofile(self)
        try:
            return act()
        finally:
            sys.setprofile(None)
            sys.settrace(None)


def drawn(places: list[tuple[str, int, str]], random: torch.Generator) -> int:
    """A moment: any, or of any line"""
    if torch.rand((), generator=random) < 0.4:
        return int(torch.randint(len(places), (), generator=random))
    lines = sorted(set(places))
    line = lines[int(torch.randint(len(lines), (), generator=random))]
    found = [i for i, place in enumerate(places) if place == line]
    return found[int(torch.randint(len(found), (), generator=random))]


# ---- what is interrupted


@dataclass
class Subject:
    """A model with its optimizer, and what is done with it."""

    model: nn.Module
    opt: mq.LM
    act: Callable[[], Any]
    kind: str = "step"
    result: Any = None

    @property
    def atomic(self) -> bool:
        """Nothing has happened, or all of it."""
        return self.kind != "fit"

    def world(self) -> dict[str, Any]:
        found = {**world(self.model, self.opt), **everything(self.model), **settings()}
        plan = found["optimizer"]["marquardt"]["plan"]
        if plan is not None:
            del plan["budget"]  # the memory that was free
        return found


def data(outputs: int = 3, inputs: int = 2, N: int = 8) -> tuple[Tensor, Tensor]:
    return torch.randn(N, inputs), torch.randn(N, outputs)


def mlp(*more: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Linear(2, 4), nn.Tanh(), *more, nn.Linear(4, 3))


def stepping(model: nn.Module, batch: tuple[Any, Any], loss: Any = "mse", begun: int = 1, **options: Any) -> Subject:
    opt = mq.LM(model, loss, **options)
    for i in range(begun):
        opt.step(batch[0], batch[1] + 0.1 * i if batch[1].is_floating_point() else batch[1])
    return Subject(model, opt, lambda: opt.step(*batch))


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention, self.head = nn.MultiheadAttention(4, 2, batch_first=True), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.attention(x, x, x, need_weights=False)[0].mean(1))


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.head = nn.LSTM(2, 3, batch_first=True), nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.lstm(x)[0][:, -1])


def convolutional() -> nn.Module:
    return nn.Sequential(nn.Conv2d(1, 2, 2), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(2, 3))


def over(model: nn.Module, batch: tuple[Tensor, Tensor], **options: Any) -> Subject:
    found = stepping(model, batch, begun=1, **options)
    parts = [(batch[0][i::2], batch[1][i::2]) for i in range(2)]
    found.act = lambda: found.opt.step_over(parts)
    return found


def far(model: nn.Module, batch: tuple[Tensor, Tensor], begun: int, **options: Any) -> Subject:
    """A step that is far too long: it is rejected, or the line search saves it."""
    found = stepping(model, batch, begun=begun, **options)
    found.opt.param_groups[0]["lr"] = 1e3
    return found


def averaging() -> Subject:
    model, batch = nn.Sequential(nn.Linear(2, 4), nn.BatchNorm1d(4), nn.Linear(4, 3)), data()
    found = stepping(model, batch, begun=3, curvature=mq.MatrixFree())

    def act() -> Tensor:
        with found.opt.averaged():
            return model.eval()(batch[0]).detach() if not model.training else model(batch[0]).detach()

    model.eval()
    found.kind, found.act = "average", act
    return found


def fitting(**options: Any) -> Subject:
    model, batch = mlp(nn.Dropout(0.2)), data(N=20)
    found = stepping(model, batch, begun=0)
    found.kind = "fit"
    found.act = lambda: mq.fit(model, batch, "mse", steps=3, progress=False, **options)
    return found


def laplace() -> Subject:
    model, batch = mlp(nn.Dropout(0.2)), data(N=10)
    found = stepping(model, batch, begun=2)
    found.kind = "posterior"
    found.act = lambda: mq.posterior(model, "mse", batch, weight_decay=0.1).predict(batch[0][:2])
    return found


def of_a_function(call: Callable[[], Any]) -> Subject:
    model = mlp()
    found = stepping(model, data(), begun=0)
    found.kind, found.act = "function", call
    return found


def least_squares() -> Subject:
    t = torch.linspace(0, 1, 12, dtype=torch.float64)
    y = 2 * (-1.3 * t).exp()
    return of_a_function(lambda: mq.least_squares(lambda p: p[0] * (-p[1] * t).exp() - y, [1.0, 1.0]))


def curve_fit() -> Subject:
    t = torch.linspace(0, 1, 12, dtype=torch.float64)
    y = 2 * (-1.3 * t).exp() + 0.01 * torch.sin(40 * t)
    return of_a_function(lambda: mq.curve_fit(lambda x, a, b: a * torch.exp(-b * x), t, y, p0=[1.0, 1.0]))


def focal(z: Tensor, y: Tensor) -> Tensor:
    p = torch.log_softmax(z, -1).gather(-1, y[:, None])[:, 0]
    return -((1 - p.exp()) ** 2 * p).mean()


PLAIN = {"curvature": mq.Dense(), "damping": mq.MeanEigenvalue()}

SUBJECTS: dict[str, Callable[[], Subject]] = {
    "first step": lambda: stepping(mlp(), data(), begun=0),
    "default": lambda: stepping(mlp(), data(), begun=2),
    "same data": lambda: stepping(mlp(), data(), begun=1, line_search=mq.Grid()),
    "changing data": lambda: stepping(mlp(), data(), begun=4),
    "batch norm": lambda: stepping(
        nn.Sequential(nn.Linear(2, 4), nn.BatchNorm1d(4), nn.ReLU(), nn.Linear(4, 3)), data(), begun=1
    ),
    "dropout": lambda: stepping(mlp(nn.Dropout(0.3)), data(), begun=1),
    "dropout, first step": lambda: stepping(mlp(nn.Dropout(0.3)), data(), begun=0),
    "rrelu": lambda: stepping(noisy(), data(), begun=1),
    "rrelu, first step": lambda: stepping(noisy(), data(), begun=0),
    "over batches": lambda: over(mlp(), data()),
    "over batches with dropout": lambda: over(mlp(nn.Dropout(0.3)), data()),
    "chunks": lambda: stepping(mlp(nn.RReLU()), data(), curvature=mq.Gram(chunk=3)),
    "conjugate gradients": lambda: stepping(mlp(nn.Dropout(0.3)), data(), begun=1, curvature=mq.MatrixFree()),
    "conjugate gradients, first step": lambda: stepping(mlp(), data(), begun=0, curvature=mq.MatrixFree()),
    "forward mode": lambda: stepping(
        convolutional(), (torch.randn(6, 1, 4, 4), torch.randn(6, 3)), begun=0, curvature=mq.MatrixFree()
    ),
    "factors": lambda: stepping(mlp(), data(), begun=2, curvature=mq.Kronecker(), damping=mq.MeanEigenvalue()),
    "kept factors": lambda: stepping(
        mlp(), data(), begun=2, curvature=mq.Kronecker(every=3), damping=mq.MeanEigenvalue()
    ),
    "ekfac": lambda: stepping(mlp(), data(), begun=2, curvature=mq.EKFAC(), damping=mq.MeanEigenvalue()),
    "hessian": lambda: stepping(mlp(), data(), begun=1, curvature=mq.Hessian(), damping=mq.Identity()),
    "line search": lambda: far(mlp(), data(), 1, line_search=mq.Grid()),
    "line search, first step": lambda: far(noisy(), data(), 0, line_search=mq.Backtracking(), attempts=2),
    "rejected": lambda: far(noisy(), data(), 1, line_search=None, attempts=2, acceptance=mq.Decrease()),
    "momentum": lambda: stepping(mlp(), data(), begun=3, momentum=mq.QuadraticMomentum(), **PLAIN),
    "weight decay": lambda: stepping(mlp(), data(), begun=1, weight_decay=0.1),
    "averaging": averaging,
    "parametrised": lambda: stepping(
        nn.Sequential(parametrizations.weight_norm(nn.Linear(2, 4)), nn.Tanh(), nn.Linear(4, 3)), data(), begun=0
    ),
    "spectral norm": lambda: stepping(
        nn.Sequential(parametrizations.spectral_norm(nn.Linear(2, 4)), nn.Tanh(), nn.Linear(4, 3)).eval(), data()
    ),
    "own parameter": lambda: stepping(mlp(Scaling()), data(), begun=0),
    "own buffer": lambda: stepping(mlp(Counting()), data(), begun=1),
    "differentiates itself": lambda: stepping(Slope(), data(), begun=0),
    "attention": lambda: stepping(Attention(), (torch.randn(5, 3, 4), torch.randn(5, 3)), begun=0),
    "attention with products": lambda: stepping(
        Attention(), (torch.randn(5, 3, 4), torch.randn(5, 3)), begun=0, curvature=mq.MatrixFree()
    ),
    "lstm": lambda: stepping(Recurrent(), (torch.randn(5, 3, 2), torch.randn(5, 3)), begun=0),
    "convolutions": lambda: stepping(convolutional(), (torch.randn(6, 1, 4, 4), torch.randn(6, 3)), begun=1),
    "bfloat16": lambda: stepping(mlp().bfloat16(), tuple(t.bfloat16() for t in data()), begun=1),
    "a function as loss": lambda: stepping(mlp(), (torch.randn(8, 2), torch.randint(3, (8,))), focal, begun=0),
    "cross entropy, sampled": lambda: stepping(
        mlp(), (torch.randn(8, 2), torch.randint(3, (8,))), "cross_entropy", begun=1, rows=mq.Sampled(1)
    ),
    "a part of the samples": lambda: stepping(mlp(nn.RReLU()), data(), begun=1, rows=mq.Fraction(0.5)),
    "fit": fitting,
    "fit in batches": lambda: fitting(batch_size=5, validation=0.4),
    "fit by evidence": lambda: fitting(weight_decay=mq.Evidence()),
    "posterior": laplace,
    "least squares": least_squares,
    "curve fit": curve_fit,
}


FIRST, THEN = 1, 5  # the seeds of the act that is interrupted, and of the one after it


def made(name: str, seed: int) -> Subject:
    torch.manual_seed(seed)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        subject = SUBJECTS[name]()
    torch.manual_seed(FIRST)
    return subject


# ---- an attack


@cache
def places(name: str) -> list[tuple[str, int, str]]:
    """All moments of a subject"""
    made(name, 0).act()  # what is imported on the way
    moments = Moments()
    moments.watch(made(name, 0).act)
    return moments.places


@cache
def undisturbed(name: str, *starts: int) -> dict[str, Any]:
    """What a twin has become that nobody disturbs, after acts that begin with these random numbers"""
    twin = made(name, 0)
    for start in starts:
        torch.manual_seed(start)
        twin.act()
    return twin.world()


def one(seed: int) -> str:
    random = torch.Generator().manual_seed(seed)
    names = list(SUBJECTS)
    name = names[int(torch.randint(len(names), (), generator=random))]
    kind, second, part = torch.rand(3, generator=random).tolist()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        attack = Attack(name, drawn(places(name), random))
        if kind < 0.1:
            attack.moments.error = Timeout
        elif kind > 0.9:
            attack.alarm = 1e-4 + 0.02 * part
        elif second < 0.25:
            attack.moments.again = int(torch.randint(30, (), generator=random))
        return f"{attack.subject.kind} {attack.run()}"


class Attack:
    """One subject, interrupted at one moment."""

    def __init__(self, name: str, at: int) -> None:
        self.name, self.moments = name, Moments(at)
        self.alarm: float | None = None  # seconds after which a real signal comes instead
        self.subject = made(name, 0)
        self.before = self.subject.world()
        self.unheard: list[Any] = []  # what Python could raise nowhere, as where an object is deleted

    def run(self) -> str:
        ended, before = self._interrupted(), [THEN]
        collected()
        after = self.subject.world()
        if not self.subject.atomic:
            return self._of_a_fit(ended, after)
        if changes(self.before, after):
            before = [FIRST, THEN]
            self._compare("is not as before, nor as after the step", after, FIRST)
            ended = "done" if ended == "interrupted" else ended
        elif ended == "ended before" and self.moments.error is not KeyboardInterrupt:
            return "taken for a refusal"
        torch.manual_seed(THEN)
        self.subject.act()
        self._compare("takes another step afterwards", self.subject.world(), *before)
        return ended

    def _interrupted(self) -> str:
        """How it ended"""
        hook, sys.unraisablehook = sys.unraisablehook, lambda args: self.unheard.append(args.exc_type)
        error = self.moments.error
        try:
            if self.alarm is None:
                self.moments.watch(self.subject.act)
            else:
                alarmed(self.alarm, self.subject.act)
        except error:
            return "interrupted"
        except BaseException as other:
            raise self._fault(f"{type(other).__name__} in the place of {error.__name__}: {other}") from other
        finally:
            sys.unraisablehook = hook
        if self.moments.fired and error is KeyboardInterrupt and self.subject.atomic and not self.unheard:
            raise self._fault("the interrupt was swallowed")
        return "ended before"

    def _compare(self, words: str, found: dict[str, Any], *starts: int) -> None:
        own = ("identity", "grad", "hooks", *settings())  # what is always the same
        there = undisturbed(self.name, *starts) | {k: self.before[k] for k in own}
        wrong = changes(there, found)
        if wrong:
            shown = [(k, there[k], found[k]) for k in wrong if k not in ("optimizer", "generator")]
            raise self._fault(f"it {words}: {wrong} {shown}")

    def _of_a_fit(self, ended: str, after: dict[str, Any]) -> str:
        """It moves the weights, and nothing else."""
        kept = [*settings(), "training", "requires_grad", "identity", "hooks", "attributes", "grad"]
        wrong = [(k, self.before[k], after[k]) for k in kept if not same(self.before[k], after[k])]
        if wrong or not all(bool(p.isfinite().all()) for p in self.subject.model.parameters()):
            raise self._fault(f"{wrong} changed by a fit")
        return ended

    def _fault(self, words: str) -> attacks.Fault:
        where = "a real signal"
        if self.alarm is None and self.moments.at is not None:
            where = "{}:{} {}".format(*places(self.name)[self.moments.at])
        again = "" if self.moments.again is None and self.moments.fired < 2 else ", and again"
        return attacks.Fault(f"{self.name}, {where}{again}: {words}")


def alarmed(seconds: float, act: Callable[[], Any]) -> Any:
    """A signal of the system after so many seconds, which raises KeyboardInterrupt"""
    old = signal.signal(signal.SIGALRM, signal.default_int_handler)
    try:
        signal.setitimer(signal.ITIMER_REAL, seconds)
        return act()
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, old)


if __name__ == "__main__":
    attacks.main(__doc__, one)
