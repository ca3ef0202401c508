"""An iteration as one CUDA graph: several hundred short kernels, which the host launches at once."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch

from ..deferred import Tape, capturing, recorded
from .bounds import Box
from .options import Options
from .problems import Problems
from .progress import Progress
from .robust import RobustLoss

_ready: set[torch.device] = set()  # libraries set up at their first calls in a process what cannot be recorded


class RecordedIteration:
    """iterate(problems, progress, loss, box, options), recorded once and then replayed.

    What is asked on the way is assumed to be answered by yes (..deferred). The problems of which that was not true take
    their step once more, without the recording, from where they were: `old`, which the graph itself takes over from
    `new`. All calls are for the same problems, each with the progress that the last one returned.
    """

    def __init__(self, iterate: Callable[..., Progress]) -> None:
        self.iterate = iterate
        self.refused = False
        self.graph: torch.cuda.CUDAGraph | None = None

    def __call__(
        self, problems: Problems, s: Progress, loss: RobustLoss, box: Box | None, options: Options
    ) -> Progress:
        if self.graph is None and not self.refused and s.x.device in _ready:
            self._record(problems, s, loss, box, options)
        if self.graph is None:
            _ready.add(s.x.device)
            return self.iterate(problems, s, loss, box, options)
        self.graph.replay()
        index = self.wrong.nonzero().squeeze(-1)
        if len(index):
            old = self.old.renewed()[index]
            again = self.iterate(problems[index], old, loss, None if box is None else box[index], options)
            for t, part in zip(self.new.tensors(), again.tensors(), strict=True):
                t.index_copy_(0, index, part)
            if 2 * len(index) > int(self.old.running.sum()):  # it knows too little of these problems
                self.graph, self.refused = None, True
        return self.new.renewed()

    def _record(self, problems: Problems, s: Progress, *more: Any) -> None:
        self.old, self.new = s.copy(), s.copy()
        try:
            with capturing(s.x.device):
                tape, graph, stream = Tape([]), torch.cuda.CUDAGraph(), torch.cuda.Stream()
                stream.wait_stream(torch.cuda.current_stream())
                with torch.cuda.stream(stream), recorded(tape):
                    graph.capture_begin()
                    try:
                        torch._foreach_copy_(self.old.tensors(), self.new.tensors())
                        new = self.iterate(problems, self.old.renewed(), *more)
                        torch._foreach_copy_(self.new.tensors(), new.tensors())
                        self.wrong = ~torch.stack(tape.asked).all(0) & self.old.running
                    finally:
                        graph.capture_end()
                torch.cuda.current_stream().wait_stream(stream)
            self.graph = graph
        except Exception as error:  # CUDA refuses in many ways
            self.refused = True
            reason = str(error).partition("\n")[0]
            warnings.warn(f"capture=True: this fit cannot be recorded, it goes on without: {reason}", stacklevel=2)
