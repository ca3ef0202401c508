"""A convolution of small images on a CPU, whose backward pass to the input is a few matrix products."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

Options = tuple[Sequence[int], Sequence[int], Sequence[int], int]  # stride, padding, dilation, groups

# Entries of the matrix: with more of them its zeros cost more than the convolution saves.
LARGEST = 1 << 20

# Outputs that are multiplied at once, as whole lines: few inputs reach a few lines, and the rest of the matrix is zero.
BAND = 128


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
        ctx.bands = None

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (delta,) = grads
        if torch.is_grad_enabled():
            raise Refused("the model differentiates itself: the matrix would hide its weight from a second derivative")
        x, weight = ctx.saved_tensors
        if ctx.bands is None:  # the same for every row
            ctx.bands = list(_bands(delta, x, weight, ctx.options))
        if len(ctx.bands) == 1:
            return (delta.flatten(1) @ ctx.bands[0][2]).view_as(x), None, None, None
        found = torch.zeros_like(x, memory_format=torch.contiguous_format)
        for lines, seen, matrix in ctx.bands:
            place = found[:, :, seen]
            place += (delta[:, :, lines].flatten(1) @ matrix).view_as(place)
        return found, None, None, None


def _bands(delta: Tensor, x: Tensor, weight: Tensor, options: Options) -> Iterator[tuple[slice, slice, Tensor]]:
    """Some lines of the outputs, the lines of the inputs that these see, and the matrix between them."""
    size = delta[0].numel()
    unit = torch.eye(size, dtype=x.dtype).view(size, *delta.shape[1:])
    matrix = _backward(unit, x[:1].expand(size, -1, -1, -1), weight, options, 0)
    matrix = matrix.view(*delta.shape[1:], *x.shape[1:])  # (O, h, w, C, H, W)
    for lines, seen in _lines(delta.shape, x.shape[2], weight.shape[2], options):
        yield lines, seen, matrix[:, lines, :, :, seen].flatten(3).flatten(0, 2)


def _lines(shape: Sequence[int], height: int, kernel: int, options: Options) -> list[tuple[slice, slice]]:
    """Lines of the outputs that are multiplied at once, and what they see; all of them if most of it is seen anyway."""
    step, margin, spread = (option[0] for option in options[:3])
    size = -(-BAND // (shape[1] * shape[3]))
    found, entries = [], 0
    for first in range(0, shape[2], size):
        last = min(first + size, shape[2])
        start = max(0, first * step - margin)
        stop = max(start, min(height, (last - 1) * step - margin + spread * (kernel - 1) + 1))
        found.append((slice(first, last), slice(start, stop)))
        entries += (last - first) * (stop - start)
    return found if 4 * entries < 3 * shape[2] * height else [(slice(0, shape[2]), slice(0, height))]


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
    """conv2d with a backward pass to its input by a few products, where that pays: None elsewhere.

    torch's own takes several times as long with few channels, and there is one for every row of a sample.
    """
    if isinstance(padding, str) or input.ndim != 4 or not input.requires_grad or _watched(input):
        return None
    step, margin, spread = map(_pair, (stride, padding, dilation))
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


def _pair(value: int | Sequence[int]) -> list[int]:
    return [value, value] if isinstance(value, int) else [*value, *value][:2]
