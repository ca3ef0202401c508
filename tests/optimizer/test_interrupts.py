"""Ctrl-C and time limits at many moments: they arrive as what they are, and nothing has happened, or all.

A profile function sends the signal where Python may be interrupted: where a function begins, and where a call into C
has returned.
"""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from types import FrameType
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.overrides import _get_current_function_mode_stack
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

import marquardt as mq

MOMENTS = 30  # of every step


class Timeout(Exception):
    """As the handler of an alarm raises it"""


class Late(RuntimeError):
    """The same, of the kind that torch has for everything"""


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


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.head = nn.LSTM(2, 3, batch_first=True), nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.lstm(x)[0][:, -1])


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(3))

    def forward(self, x: Tensor) -> Tensor:
        return torch.atan2(x, self.scale)  # no rule knows it


Made = tuple[nn.Module, mq.LM, Tensor, Tensor]


def lm(model: nn.Module, *shape: int, **options: Any) -> Made:
    return model, mq.LM(model, "mse", **options), torch.randn(6, *shape), torch.randn(6, 3)


def mlp(*more: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Linear(2, 4), nn.Tanh(), *more, nn.Linear(4, 3))


SUBJECTS: dict[str, Callable[[], Made]] = {
    "dropout and batch norm": lambda: lm(mlp(nn.BatchNorm1d(4), nn.Dropout(0.3)), 2),
    "lstm": lambda: lm(Recurrent(), 3, 2),
    "no rule": lambda: lm(nn.Sequential(nn.Linear(2, 3), Scaled()), 2),
    "convolutions by products": lambda: lm(
        nn.Sequential(nn.Conv2d(1, 2, 2), nn.Tanh(), nn.Flatten(), nn.Linear(18, 3)), 1, 4, 4, curvature=mq.MatrixFree()
    ),
    "hessian": lambda: lm(mlp(), 2, curvature=mq.Hessian(), damping=mq.Identity()),
}


class Run:
    """A model with its optimizer, whose first step gets the signal at one of its moments, or at none"""

    def __init__(self, name: str) -> None:
        torch.manual_seed(0)
        self.model, self.opt, *self.data = SUBJECTS[name]()
        self.places: list[tuple[str, int]] = []  # of all moments

    def step(self, seed: int, at: int | None = None) -> None:
        def profile(frame: FrameType, event: str, arg: object) -> None:
            if event in ("call", "c_return") and frame.f_code.co_filename != __file__:
                self.places.append((frame.f_code.co_filename, frame.f_lineno))
                if len(self.places) - 1 == at:
                    signal.raise_signal(signal.SIGINT)

        torch.manual_seed(seed)
        sys.setprofile(profile)
        try:
            self.opt.step(*self.data)
        finally:
            sys.setprofile(None)

    def state(self) -> dict[str, Any]:
        stacks = len(_get_current_function_mode_stack()), len(_get_current_dispatch_mode_stack())
        settings = torch.is_grad_enabled(), torch.is_inference_mode_enabled(), *stacks
        modes = [module.training for module in self.model.modules()]
        tensors = {k: t.clone() for k, t in self.model.state_dict().items()}
        return {**tensors, "random": torch.get_rng_state(), "settings": torch.tensor([*settings, *modes])}


def drawn(places: list[tuple[str, int]]) -> list[int]:
    """Moments at equal distances, and the first of every line that enters or leaves a level of vmap"""
    first = {place: i for i, place in reversed(list(enumerate(places))) if "_vmap_internals" in place[0]}
    return sorted({*range(0, len(places), max(1, len(places) // MOMENTS)), *first.values()})


def same(a: dict[str, Any], b: dict[str, Any]) -> bool:
    return all(torch.equal(a[k], b[k]) for k in a)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("error", [KeyboardInterrupt, Timeout, Late], ids=lambda e: e.__name__)
@pytest.mark.parametrize("name", SUBJECTS)
def test_an_interrupt_is_raised_and_leaves_all_as_it_was_or_as_after_the_step(monkeypatch, name, error):
    x = torch.ones(3)
    unheard: list[Any] = []  # what Python can raise nowhere, as where an object is deleted
    monkeypatch.setattr(sys, "unraisablehook", lambda args: unheard.append(args.exc_type))
    Run(name).step(1)  # what torch imports on the way
    whole = Run(name)
    whole.step(1)
    after, moments = whole.state(), drawn(whole.places)
    whole.step(2)
    with handling(error):
        for at in moments:
            run = Run(name)
            torch.manual_seed(1)
            before = run.state()
            try:
                run.step(1, at)
                assert unheard, f"moment {at}: it was swallowed"
            except error:
                pass
            unheard.clear()
            found = run.state()
            done = not same(before, found)
            assert same(after if done else before, found), f"moment {at}"
            assert torch.equal(torch.func.vmap(torch.sin)(x), x.sin())
            J = torch.autograd.functional.jacobian(torch.sin, x, vectorize=True)
            assert torch.equal(J, x.cos().diag()), f"moment {at}"
            if not done:
                run.step(1)
                assert same(after, run.state()), f"moment {at}"
            run.step(2)
            assert same(whole.state(), run.state()), f"moment {at}"


class Stopping(nn.Module):
    """Gets Ctrl-C in its forward pass, and once more so many function calls later"""

    def __init__(self, later: int) -> None:
        super().__init__()
        self.later, self.armed = later, False

    def again(self, frame: FrameType, event: str, arg: object) -> None:
        self.later -= event == "call"
        if self.later < 0:
            sys.settrace(None)
            raise KeyboardInterrupt

    def forward(self, x: Tensor) -> Tensor:
        if self.armed:
            sys.settrace(self.again)
            raise KeyboardInterrupt
        return x


def averaged(model: nn.Module, opt: mq.LM, x: Tensor, y: Tensor) -> None:
    with opt.averaged():
        model(x)


def posterior(model: nn.Module, opt: mq.LM, x: Tensor, y: Tensor) -> mq.Posterior:
    return mq.posterior(model, "mse", (x, y), weight_decay=0.1)


@pytest.mark.parametrize("what", ["posterior", "prediction", "averaged weights"])
def test_a_second_interrupt_leaves_the_model_as_it_was(what):
    for later in range(25):
        torch.manual_seed(0)
        stopping = Stopping(later)
        model, opt, x, y = lm(mlp(nn.BatchNorm1d(4), stopping, nn.Dropout(0.3)), 2, curvature=mq.MatrixFree())
        for _ in range(3):
            opt.step(x, y)
        subject = model, opt, x, y
        act: Callable[[], Any] = partial(averaged if what == "averaged weights" else posterior, *subject)
        if what == "prediction":
            act = partial(act().predict, x)
        before, stopping.armed = {k: t.clone() for k, t in model.state_dict().items()}, True
        try:
            with pytest.raises(KeyboardInterrupt):
                act()
        finally:
            sys.settrace(None)
        assert torch.is_grad_enabled(), later
        assert all(module.training for module in model.modules()), later
        assert same(before, dict(model.state_dict())), later
