"""What a and δ are for each kind of layer. A rule has the signature of the function it stands for in
torch.nn.functional, and says how the row-wise products of its weight and bias arise.

Layers are recognised by the functions they call, not by module hooks: `F.linear(x, embedding.weight)` counts like the
module, a module called twice counts twice, and nothing is ever attached to the model.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from types import FunctionType
from typing import Any, NamedTuple

import torch.nn.functional as F
from torch import Tensor


class Operand(NamedTuple):
    """How a call uses its weight: an input of shape (*lead, *rest), and what becomes of it and of δ.

    Attributes:
        weight: the parameter that multiplies, or None.
        bias: the parameter that is added, or None.
        x: the input, (*lead, *rest).
        lead: leading dimensions of the input that are samples or positions.
        a: what the weight multiplies, (*lead, P', G, I); of a table lookup the indices (*lead).
        delta: from gradients at the output (R, *lead, *rest) to (R, *lead, P', G, O).
        window: numbers of x that one position sees, if positions share them.
        some: a of some samples, if a is larger than x.

    >>> operand = mq.layers.RULES[nn.functional.linear](x, model[0].weight, model[0].bias)
    >>> operand.a().shape
    torch.Size([64, 1, 1, 2])
    """

    weight: Tensor | None
    bias: Tensor | None
    x: Tensor
    lead: int  # leading dimensions that are samples or positions
    a: Callable[[], Tensor]  # (*lead, P', G, I), or for a table lookup the indices (*lead)
    delta: Callable[[Tensor], Tensor]  # (R, *lead, *rest) → (R, *lead, P', G, O)
    window: int | None = None  # numbers of x that one position sees, if positions share them; None: a is as large as x
    # a of some samples, without a graph, if a is larger than x; then `delta` must take those of some samples too.
    some: Callable[[slice], Tensor] | None = None


def linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Operand:
    """y = xWᵀ + b: a = x"""
    return Operand(
        weight, bias, input, input.ndim - 1, lambda: input[..., None, None, :], lambda delta: delta[..., None, None, :]
    )


def convolution(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: int | Sequence[int] = 1,
    padding: str | int | Sequence[int] = 0,
    dilation: int | Sequence[int] = 1,
    groups: int = 1,
) -> Operand | None:
    """A convolution is a linear layer at every position: a = the patches that the kernel sees."""
    d = weight.ndim - 2
    if input.ndim != d + 2:  # no sample dimension
        return None
    kernel = weight.shape[2:]
    step, spread = _each(stride, d), _each(dilation, d)
    images = input.detach()

    def patches(some: slice = slice(None)) -> Tensor:
        x = F.pad(images[some], _margins(padding, kernel, spread))
        sizes = [(x.shape[2 + i] - spread[i] * (kernel[i] - 1) - 1) // step[i] + 1 for i in range(d)]
        over, down = x.stride()[:2], x.stride()[2:]
        view = x.as_strided(  # (N, C, *positions, *kernel): no copy
            (*x.shape[:2], *sizes, *kernel),
            (*over, *(down[i] * step[i] for i in range(d)), *(down[i] * spread[i] for i in range(d))),
        )
        view = view.unflatten(1, (groups, -1))  # (N, G, C/G, *positions, *kernel)
        places, offsets = range(3, 3 + d), range(3 + d, 3 + 2 * d)
        if x.device.type == "cpu":  # one copy, twice as fast where positions are innermost, which are many
            found: Tensor = view.permute(0, 1, 2, *offsets, *places).reshape(len(x), groups, -1, math.prod(sizes))
            return found.permute(0, 3, 1, 2)  # (N, P, G, I)
        a: Tensor = view.permute(0, *places, 1, 2, *offsets).reshape(len(x), math.prod(sizes), groups, -1)
        return a

    def at_output(delta: Tensor) -> Tensor:
        moved: Tensor = delta.flatten(3).unflatten(2, (groups, -1)).permute(0, 1, 4, 2, 3)  # (R, N, P, G, O)
        return moved

    return Operand(weight, bias, input, 1, patches, at_output, input.shape[1] * math.prod(kernel), patches)


def embedding(
    input: Tensor,
    weight: Tensor,
    padding_idx: int | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> Operand | None:
    """y = W[x]: rows of a table"""
    if max_norm is not None or scale_grad_by_freq:  # changes the table, or the gradient
        return None

    def at_output(delta: Tensor) -> Tensor:
        if padding_idx is None:
            return delta
        return delta * (input != padding_idx % len(weight))[..., None]  # the padding row never learns

    return Operand(weight, None, input, input.ndim, lambda: input, at_output)


def layer_norm(
    input: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
) -> Operand:
    """y = x̂∘γ + β: a = x̂, every feature a group of its own"""
    lead = input.ndim - len(normalized_shape)
    return Operand(
        weight,
        bias,
        input,
        lead,
        lambda: F.layer_norm(input, normalized_shape, None, None, eps).flatten(lead)[..., None, :, None],
        lambda delta: delta.flatten(1 + lead)[..., None, :, None],
    )


def group_norm(
    input: Tensor, num_groups: int, weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-5
) -> Operand:
    return _channels(weight, bias, input, lambda: F.group_norm(input, num_groups, None, None, eps))


def batch_norm(
    input: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Operand | None:
    if training or running_mean is None or running_var is None:  # couples the samples
        return None
    return _channels(
        weight, bias, input, lambda: F.batch_norm(input, running_mean, running_var, None, None, False, momentum, eps)
    )


def instance_norm(
    input: Tensor,
    running_mean: Tensor | None = None,
    running_var: Tensor | None = None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    use_input_stats: bool = True,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Operand | None:
    if not use_input_stats:
        return None
    return _channels(weight, bias, input, lambda: F.instance_norm(input, eps=eps))


RULES: dict[Callable[..., Any], Callable[..., Operand | None]] = {
    F.linear: linear,
    F.conv1d: convolution,
    F.conv2d: convolution,
    F.conv3d: convolution,
    F.embedding: embedding,
    F.layer_norm: layer_norm,
    F.group_norm: group_norm,
    F.batch_norm: batch_norm,
    F.instance_norm: instance_norm,
}


def _channels(weight: Tensor | None, bias: Tensor | None, x: Tensor, normalised: Callable[[], Tensor]) -> Operand:
    """y = x̂∘γ + β with channels second: (N, C, *positions)"""
    return Operand(
        weight,
        bias,
        x,
        1,
        lambda: normalised().reshape(*x.shape[:2], -1).transpose(1, 2)[..., None],  # (N, P, C, 1)
        lambda delta: delta.reshape(*delta.shape[:3], -1).transpose(2, 3)[..., None],
    )


def _each(value: int | Sequence[int], d: int) -> list[int]:
    values = [value] if isinstance(value, int) else list(value)
    return values * d if len(values) == 1 else values


def _margins(padding: str | int | Sequence[int], kernel: Sequence[int], dilation: Sequence[int]) -> list[int]:
    """Padding before and after each dimension, last dimension first, as F.pad takes it."""
    margins = []
    for i in reversed(range(len(kernel))):
        if padding == "same":
            total = dilation[i] * (kernel[i] - 1)
            margins += [total // 2, math.ceil(total / 2)]
        else:
            margins += [0, 0] if padding == "valid" else [_each(padding, len(kernel))[i]] * 2  # type: ignore[arg-type]
    return margins


def opened_attention() -> Callable[..., Any]:
    """F.multi_head_attention_forward, entered: as a whole it hides its linear layers from a function mode.

    It asks has_torch_function and hands itself over as one call; a copy of it whose globals say no does not.
    """
    whole = F.multi_head_attention_forward
    copy = FunctionType(
        whole.__code__,
        {**vars(F), "has_torch_function": lambda _: False},
        whole.__name__,
        whole.__defaults__,
    )
    copy.__kwdefaults__ = whole.__kwdefaults__
    return copy
