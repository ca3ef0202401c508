"""Kernels that can be differentiated twice, or that leave a graph, in the place of fused or compiled ones."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import nn

from ..surroundings import back_afterwards


class Shared:
    """A setting of the whole program: the first thread that enters makes it, the last one that leaves takes it back."""

    def __init__(self, get: Callable[[], Any], put: Callable[[Any], object], value: Any) -> None:
        self.get, self.put, self.value = get, put, value
        self.lock, self.held = threading.Lock(), set[object]()  # by those who are inside
        self.before: Any = None

    @contextmanager
    def __call__(self) -> Iterator[None]:
        entry = object()
        with back_afterwards(partial(self.leave, entry)):
            self.enter(entry)
            yield

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
    from torch._dynamo import eval_frame

    return eval_frame._stance


def _set_stance(stance: Any) -> None:
    from torch._dynamo import eval_frame

    eval_frame._set_stance(eval_frame.DynamoStance(stance) if isinstance(stance, str) else stance)


PLAIN_ATTENTION = Shared(_attention, _set_attention, [True, False, False, False])
PLAIN_RECURRENCE = _enabled(torch.backends.cudnn)
OPEN_CELLS = _enabled(torch.backends.mkldnn)
UNCOMPILED = Shared(_stance, _set_stance, "force_eager")


@contextmanager
def twice_differentiable(model: nn.Module) -> Iterator[None]:
    """Kernels that can be differentiated twice, where a fused one cannot: attention, and cuDNN's recurrent layers."""
    recurrent = any(isinstance(m, nn.RNNBase) for m in model.modules())
    with PLAIN_ATTENTION(), PLAIN_RECURRENCE() if recurrent else nullcontext():
        yield


def uncompiled() -> AbstractContextManager[object]:
    """The code of a model or of a part of it as it was before torch.compile. What is compiled hides its layers, can be
    differentiated once only, draws random numbers of its own, and would be compiled anew for every way to call it."""
    return UNCOMPILED() if "torch._dynamo" in sys.modules else nullcontext()


@contextmanager
def open_cells(model: nn.Module) -> Iterator[None]:
    """LSTMs on a CPU whose products are nodes of the graph: those of oneDNN are one node that says nothing."""
    with OPEN_CELLS() if any(isinstance(m, nn.LSTM) for m in model.modules()) else nullcontext():
        yield
