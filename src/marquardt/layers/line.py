"""Many trial points on one line at once."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

CONVOLUTIONS: tuple[Callable[..., Any], ...] = (torch.conv1d, torch.conv2d, torch.conv3d)


class Line(TorchFunctionMode):
    """Convolutions with weights W + lr·d, under vmap over lr: W∗x + lr·(d∗x).

    That is one convolution of the samples of all trial points with weights [W; d], which are the same for all of them.
    Weights of its own for each point would make it one with a group for each point, and cuDNN launches group by group.
    """

    def __init__(
        self, origin: Mapping[int, Tensor], direction: Mapping[int, Tensor], at: Mapping[int, Tensor], lr: Tensor
    ) -> None:
        super().__init__()
        self.ends = {id(p): (origin[key], direction[key]) for key, p in at.items()}
        self.lr = lr

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in CONVOLUTIONS and len(args) == 7 and args[6] == 1:  # as nn.ConvNd calls it, one group
            x, weight, bias, *rest = args
            if id(weight) in self.ends and (bias is None or id(bias) in self.ends):
                weights = torch.cat(self.ends[id(weight)])
                biases = None if bias is None else torch.cat(self.ends[id(bias)])
                origin, direction = func(x, weights, biases, *rest).chunk(2, 1 - weight.ndim)
                return torch.addcmul(origin, direction, self.lr)
        if args and func.__name__.endswith("_") and not func.__name__.endswith("__"):
            self.ends.pop(id(args[0]), None)  # changed in place: no longer on the line
        return func(*args, **kwargs)
