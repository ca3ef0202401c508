"""Kernels that can be differentiated twice, or that leave a graph, in the place of fused or compiled ones."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel


class Shared:
    """A setting of the whole program: the first thread that enters makes it, the last one that leaves takes it back."""

    def __init__(self, setting: Callable[[], AbstractContextManager[object]]) -> None:
        self.setting = setting
        self.lock, self.inside = threading.Lock(), 0

    @contextmanager
    def __call__(self) -> Iterator[None]:
        with self.lock:
            if not self.inside:
                self.made = self.setting()
                self.made.__enter__()
            self.inside += 1
        try:
            yield
        finally:
            with self.lock:
                self.inside -= 1
                if not self.inside:
                    self.made.__exit__(None, None, None)


@contextmanager
def _without(backend: Any) -> Iterator[None]:
    enabled = backend.enabled
    backend.enabled = False
    try:
        yield
    finally:
        backend.enabled = enabled


PLAIN_ATTENTION = Shared(lambda: sdpa_kernel(SDPBackend.MATH))
PLAIN_RECURRENCE = Shared(lambda: _without(torch.backends.cudnn))
OPEN_CELLS = Shared(lambda: _without(torch.backends.mkldnn))
UNCOMPILED = Shared(lambda: torch.compiler.set_stance("force_eager"))


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
