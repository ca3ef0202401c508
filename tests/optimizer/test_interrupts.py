"""Ctrl-C and time limits at many moments: they arrive as what they are, and nothing has happened, or all.

Unlike the attacks of `fuzz.interrupts`, which raise the error themselves, a signal comes, and its handler raises.
"""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import marquardt as mq
from fuzz.interrupts import FIRST, THEN, Moments, Subject, Timeout, data, made, mlp, stepping
from fuzz.settings import settings
from support.unchanged import same

MOMENTS = 30  # of every step


class Late(RuntimeError):
    """A time limit, of the kind that torch has for everything"""


class Limit:
    """A handler that is no function"""

    def __init__(self, error: type[Exception]) -> None:
        self.error = error

    def __call__(self, number: int, frame: FrameType | None) -> None:
        raise self.error("the time is over")


@contextmanager
def handling(error: type[BaseException]) -> Iterator[None]:
    handler = signal.default_int_handler if error is KeyboardInterrupt else Limit(error)
    old = signal.signal(signal.SIGINT, handler)  # type: ignore[arg-type]
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, old)


class Signalled(Moments):
    def strike(self) -> None:
        signal.raise_signal(signal.SIGINT)


def act(subject: Subject, seed: int, at: int | None = None) -> Moments:
    torch.manual_seed(seed)
    moments = Signalled(at)
    moments.watch(subject.act)
    return moments


def drawn(places: list[tuple[str, int, str]]) -> list[int]:
    """Moments at equal distances, and the first of every line that enters or leaves a level of vmap"""
    first = {place: i for i, place in reversed(list(enumerate(places))) if "_vmap_internals" in place[0]}
    return sorted({*range(0, len(places), max(1, len(places) // MOMENTS)), *first.values()})


def state(subject: Subject) -> dict[str, Any]:
    tensors = {k: t.clone() for k, t in subject.model.state_dict().items()}
    training = [module.training for module in subject.model.modules()]
    return {**tensors, "random": torch.get_rng_state(), "training": training, **settings()}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("error", [KeyboardInterrupt, Timeout, Late], ids=lambda e: e.__name__)
@pytest.mark.parametrize(
    "name", ["dropout, first step", "batch norm", "lstm", "own parameter", "forward mode", "hessian"]
)
def test_an_interrupt_is_raised_and_leaves_all_as_it_was_or_as_after_the_step(monkeypatch, name, error):
    x = torch.ones(3)
    unheard: list[Any] = []  # what Python can raise nowhere, as where an object is deleted
    monkeypatch.setattr(sys, "unraisablehook", lambda args: unheard.append(args.exc_type))
    act(made(name, 0), FIRST)  # what torch imports on the way
    whole = made(name, 0)
    moments = drawn(act(whole, FIRST).places)
    after = state(whole)
    act(whole, THEN)
    end = state(whole)
    with handling(error):
        for at in moments:
            run = made(name, 0)
            before = state(run)
            try:
                struck = act(run, FIRST, at).fired  # a run may be some calls shorter than the first one
                assert unheard or not struck, f"moment {at}: it was swallowed"
            except error:
                pass
            unheard.clear()
            found = state(run)
            done = not same(before, found)
            assert same(after if done else before, found), f"moment {at}"
            assert torch.equal(torch.func.vmap(torch.sin)(x), x.sin())
            J = torch.autograd.functional.jacobian(torch.sin, x, vectorize=True)
            assert torch.equal(J, x.cos().diag()), f"moment {at}"
            if not done:
                act(run, FIRST)
                assert same(after, state(run)), f"moment {at}"
            act(run, THEN)
            assert same(end, state(run)), f"moment {at}"


class Stopping(nn.Module):
    """Gets Ctrl-C in its forward pass, and once more so many function calls later"""

    def __init__(self, later: int) -> None:
        super().__init__()
        self.moments, self.armed = Moments(error=KeyboardInterrupt, again=later), False

    def forward(self, x: Tensor) -> Tensor:
        if self.armed:
            sys.settrace(self.moments.second)
            raise KeyboardInterrupt
        return x


def posterior(opt: mq.LM, x: Tensor, y: Tensor) -> mq.Posterior:
    return mq.posterior(opt.model, "mse", (x, y), weight_decay=0.1)


def prediction(opt: mq.LM, x: Tensor, y: Tensor) -> Callable[[], Any]:
    found = posterior(opt, x, y)
    return lambda: found.predict(x)


def averaged(opt: mq.LM, x: Tensor) -> None:
    with opt.averaged():
        opt.model(x)


ACTS: dict[str, Callable[..., Callable[[], Any]]] = {
    "posterior": lambda *given: lambda: posterior(*given),
    "prediction": prediction,
    "averaged weights": lambda opt, x, y: lambda: averaged(opt, x),
}


@pytest.mark.parametrize("what", ACTS)
def test_a_second_interrupt_leaves_the_model_as_it_was(what):
    for later in range(25):
        torch.manual_seed(0)
        stopping, batch = Stopping(later), data(N=6)
        subject = stepping(mlp(nn.BatchNorm1d(4), stopping, nn.Dropout(0.3)), batch, begun=3, curvature=mq.MatrixFree())
        interrupted = ACTS[what](subject.opt, *batch)
        before = {k: t.clone() for k, t in subject.model.state_dict().items()}
        stopping.armed = True
        try:
            with pytest.raises(KeyboardInterrupt):
                interrupted()
        finally:
            sys.settrace(None)
        assert torch.is_grad_enabled(), later
        assert all(module.training for module in subject.model.modules()), later
        assert same(before, dict(subject.model.state_dict())), later
