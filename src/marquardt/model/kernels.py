"""Kernels that can be differentiated twice, or that leave a graph, in the place of fused or compiled ones."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache
from typing import Any

import torch
from torch import nn

from ..surroundings import Leavable, surely
from .walk import Anatomy


class Shared:
    """A setting of the whole program: the first thread that enters makes it, the last one that leaves takes it back."""

    def __init__(self, get: Callable[[], Any], put: Callable[[Any], object], value: Any) -> None:
        self.get, self.put, self.value = get, put, value
        self.lock, self.held = threading.Lock(), set[object]()  # by those who are inside
        self.before: Any = None

    def __call__(self) -> Held:
        return Held(self)

    def enter(self, entry: object) -> None:
        with self.lock:
            first = not self.held
            if first:
                self.before = self.get()
            self.held.add(entry)
            if first:
                self.put(self.value)

    def leave(self, entry: object) -> None:
        """As often as one likes, also after an interrupt amid `enter` or amid this"""
        with self.lock:
            if self.held == {entry}:
                self.put(self.before)
            self.held.discard(entry)


class Held(Leavable):
    """A block within which such a setting is made"""

    def __init__(self, setting: Shared) -> None:
        self.setting = setting

    def leave(self) -> None:
        self.setting.leave(self)

    def __enter__(self) -> None:
        try:
            self.setting.enter(self)
        except BaseException:
            surely(self.leave)
            raise

    def __exit__(self, *error: object) -> None:
        try:
            self.leave()
        except BaseException:
            surely(self.leave)
            raise


def _enabled(backend: Any) -> Shared:
    return Shared(lambda: backend.enabled, lambda value: setattr(backend, "enabled", value), False)


def _attention() -> list[bool]:
    """Which kernels may be used"""
    of = torch.backends.cuda
    return [
        of.math_sdp_enabled(), of.flash_sdp_enabled(), of.mem_efficient_sdp_enabled(), of.cudnn_sdp_enabled()
    ]  # fmt: skip


def _set_attention(each: list[bool]) -> None:
    of = torch.backends.cuda
    kinds = of.enable_math_sdp, of.enable_flash_sdp, of.enable_mem_efficient_sdp, of.enable_cudnn_sdp
    for enable, value in zip(kinds, each, strict=True):
        enable(value)


def _stance() -> Any:
    return sys.modules[DYNAMO]._stance


def _set_stance(stance: Any) -> None:
    dynamo: Any = sys.modules[DYNAMO]
    dynamo._set_stance(_eager(dynamo) if stance is None else stance)


@cache
def _eager(dynamo: Any) -> Any:
    return dynamo.DynamoStance("force_eager")


DYNAMO = "torch._dynamo.eval_frame"
PLAIN_ATTENTION = Shared(_attention, _set_attention, [True, False, False, False])
PLAIN_RECURRENCE = _enabled(torch.backends.cudnn)
OPEN_CELLS = _enabled(torch.backends.mkldnn)
UNCOMPILED = Shared(_stance, _set_stance, None)


@contextmanager
def twice_differentiable(model: nn.Module) -> Iterator[None]:
    """Kernels that can be differentiated twice, where a fused one cannot: attention, and cuDNN's recurrent layers."""
    recurrent = any(isinstance(m, nn.RNNBase) for m in model.modules())
    with PLAIN_ATTENTION(), PLAIN_RECURRENCE() if recurrent else nullcontext():
        yield


def uncompiled() -> AbstractContextManager[object]:
    """The code of a model or of a part of it as it was before torch.compile. What is compiled hides its layers, can be
    differentiated once only, draws random numbers of its own, and would be compiled anew for every way to call it."""
    return UNCOMPILED() if DYNAMO in sys.modules else nullcontext()


def open_cells(model: nn.Module) -> AbstractContextManager[object]:
    """LSTMs on a CPU whose products are nodes of the graph: those of oneDNN are one node that says nothing."""
    return OPEN_CELLS() if Anatomy(model).has_lstm else nullcontext()
