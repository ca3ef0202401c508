"""A convolution of small images on a CPU, whose backward pass to the input is one matrix product."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

Options = tuple[Sequence[int], Sequence[int], Sequence[int], int]  # stride, padding, dilation, groups

# Entries of the matrix: with more of them its zeros cost more than the convolution saves.
LARGEST = 1 << 20


class Refused(RuntimeError):
    """This convolution must be torch's own."""


class ToInput(torch.autograd.Function):
    """y = conv2d(x, W) + b as a function of x."""

    @staticmethod
    def forward(x: Tensor, weight: Tensor, bias: Tensor | None, options: Options) -> Tensor:
        return F.conv2d(x, weight, bias, *options)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        x, weight, _, ctx.options = inputs
        ctx.save_for_backward(x, weight)
        ctx.matrix = None

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (delta,) = grads
        if torch.is_grad_enabled():
            raise Refused("the model differentiates itself: the matrix would hide its weight from a second derivative")
        x, weight = ctx.saved_tensors
        if ctx.matrix is None:  # the same for every row
            size = delta[0].numel()
            unit = torch.eye(size, dtype=x.dtype).view(size, *delta.shape[1:])
            ctx.matrix = _backward(unit, x[:1].expand(size, -1, -1, -1), weight, ctx.options, 0).flatten(1)
        return (delta.flatten(1) @ ctx.matrix).view_as(x), None, None, None


class ToWeight(torch.autograd.Function):
    """Zero, with the gradients of y with respect to W and b: apart, because rows ask for those of x alone."""

    @staticmethod
    def forward(weight: Tensor, bias: Tensor | None, x: Tensor, y: Tensor, options: Options) -> Tensor:
        return weight.new_zeros(()).expand(y.shape)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        weight, ctx.bias, x, _, ctx.options = inputs
        ctx.save_for_backward(weight, x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (delta,) = grads
        weight, x = ctx.saved_tensors
        to_bias = None if ctx.bias is None else delta.sum((0, 2, 3))
        return _backward(delta, x, weight, ctx.options, 1), to_bias, None, None, None


def _backward(delta: Tensor, x: Tensor, weight: Tensor, options: Options, which: int) -> Tensor:
    stride, padding, dilation, groups = options
    mask = [which == 0, which == 1, False]
    found: Sequence[Tensor] = torch.ops.aten.convolution_backward(
        delta, x, weight, None, stride, padding, dilation, False, [0, 0], groups, mask
    )
    return found[which]


def _watched(input: Tensor) -> bool:
    """Where torch itself looks at the operations: under torch.func, in a checkpoint, under autocast; and where there is
    no gain."""
    transformed = torch._C._functorch.peek_interpreter_stack() is not None
    hooked = torch._C._autograd._top_saved_tensors_default_hooks(True) is not None
    mixed = torch.is_autocast_enabled(input.device.type)
    return transformed or hooked or mixed or input.is_complex() or input.device.type != "cpu"


def unrolled(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: int | Sequence[int] = 1,
    padding: str | int | Sequence[int] = 0,
    dilation: int | Sequence[int] = 1,
    groups: int = 1,
) -> Tensor | None:
    """conv2d with a backward pass to its input by one product, where that pays: None elsewhere.

    torch's own takes several times as long with few channels, and there is one for every row of a sample.
    """
    if isinstance(padding, str) or input.ndim != 4 or not input.requires_grad or _watched(input):
        return None
    step, margin, spread = ([v, v] if isinstance(v, int) else [*v, *v][:2] for v in (stride, padding, dilation))
    outputs = len(weight)
    for i in range(2):
        outputs *= (input.shape[2 + i] + 2 * margin[i] - spread[i] * (weight.shape[2 + i] - 1) - 1) // step[i] + 1
    # To build the matrix is a backward pass of as many samples as there are outputs.
    if not 0 < outputs <= len(input) or outputs * input[0].numel() > LARGEST:
        return None
    options = (step, margin, spread, groups)
    fixed = None if bias is None else bias.detach()
    y: Tensor = ToInput.apply(input, weight.detach(), fixed, options)  # type: ignore[no-untyped-call]
    if weight.requires_grad or (bias is not None and bias.requires_grad):
        y = y + ToWeight.apply(weight, bias, input.detach(), y.detach(), options)  # type: ignore[no-untyped-call]
    return y
