"""Small pieces that random networks are put together from. Nothing here imports marquardt.

A piece is a function of a `random.Random` and of the shape of one sample; it returns a module and the shape that comes
out, or None if it does not fit. Shapes: ("v", F), ("s", T, E) sequences, ("c", C, L) and ("i", C, H, W) images.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from random import Random
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations

Shape = tuple[Any, ...]
Piece = Callable[[Random, Shape], "tuple[nn.Module, Shape] | None"]


class Fn(nn.Module):
    """A function of the input, of modules and of parameters, by name."""

    def __init__(self, function: Callable[..., Tensor], text: str, /, **parts: Any) -> None:
        super().__init__()
        self.function, self.text, self.keys = function, text, list(parts)
        for name, part in parts.items():
            setattr(self, name, part)

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x, *(getattr(self, name) for name in self.keys))

    def extra_repr(self) -> str:
        return self.text


def numbers(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.randn(shape) / math.sqrt(shape[-1]))


def width(rng: Random) -> int:
    return rng.choice([1, 2, 2, 3, 3, 4])


# ---- for every shape


ACTIVATIONS = [nn.Tanh, nn.Tanh, nn.GELU, nn.Softplus, nn.SiLU, nn.ReLU, nn.ELU, lambda: nn.ReLU(inplace=True)]


def prelu(rng: Random, shape: Shape) -> Any:
    return nn.PReLU(shape[1] if shape[0] in "vci" and rng.random() < 0.5 else 1), shape


def layer_norm(rng: Random, shape: Shape) -> Any:
    over = shape[-1:] if rng.random() < 0.6 else shape[1:]
    return (nn.LayerNorm(over), shape) if math.prod(over) > 1 else None


def scaled(rng: Random, shape: Shape) -> Any:
    """No layer at all: x·s with a parameter s."""
    return Fn(lambda x, s: x * s, "x·s", s=numbers(*(shape[-1:] if rng.random() < 0.5 else (1,)))), shape


def with_inner(text: str, function: Callable[..., Tensor], names: str = "f") -> Piece:
    """A function of x and of a piece that keeps the shape, under one name or two"""

    def make(rng: Random, shape: Shape) -> Any:
        found = inner(rng, shape)
        return None if found is None else (Fn(function, text, **dict.fromkeys(names, found)), shape)

    return make


def one_weight(rng: Random, shape: Shape) -> Any:
    """Two layers that share a weight, and have a bias each."""
    if shape[0] not in "vs":
        return None
    a, b = nn.Linear(shape[-1], shape[-1]), nn.Linear(shape[-1], shape[-1], bias=rng.random() < 0.5)
    b.weight = a.weight
    return Fn(lambda x, f, g: g(f(x).tanh()), "g(tanh f(x))", f=a, g=b), shape


def inner(rng: Random, shape: Shape) -> nn.Module | None:
    """A piece that keeps the shape."""
    names = {"v": ["linear", "bare", "weight_normed"], "s": ["linear", "time_major", "flat_time", "bare", "layer_norm"]}
    name = rng.choice(names.get(shape[0], ["conv_same", "conv_same", "channels_last"]))
    made = PIECES[name][2](Keeping(rng, shape), shape)
    return made[0] if made is not None and made[1] == shape else None


class Keeping(Random):
    """Widths stay as they are."""

    def __init__(self, rng: Random, shape: Shape) -> None:
        super().__init__(rng.random())
        self.kept = shape[-1] if shape[0] in "vs" else shape[1]


def out_width(rng: Random) -> int:
    return rng.kept if isinstance(rng, Keeping) else width(rng)


# ---- linear layers, also in layouts that put the samples elsewhere


def linear(rng: Random, shape: Shape) -> Any:
    O = out_width(rng)
    return nn.Linear(shape[-1], O, bias=rng.random() < 0.8), (*shape[:-1], O)


def weight_normed(rng: Random, shape: Shape) -> Any:
    O = out_width(rng)
    return parametrizations.weight_norm(nn.Linear(shape[-1], O)), (*shape[:-1], O)


def bare(rng: Random, shape: Shape) -> Any:
    """Parameters without a module: F.linear(x, W, b), or x @ W, which has no rule."""
    I, O = shape[-1], out_width(rng)
    if rng.random() < 0.5:
        return Fn(F.linear, "F.linear(x, W, b)", W=numbers(O, I), b=numbers(O)), (*shape[:-1], O)
    return Fn(lambda x, W: x @ W, "x @ W", W=numbers(I, O)), (*shape[:-1], O)


def of_width(
    text: str, function: Callable[..., Tensor], width: Callable[[Random], int] = out_width, names: str = "f"
) -> Piece:
    """A function of x and of linear layers"""

    def make(rng: Random, shape: Shape) -> Any:
        O = width(rng)
        return Fn(function, text, **{name: nn.Linear(shape[-1], O) for name in names}), (*shape[:-1], O)

    return make


def bilinear(rng: Random, shape: Shape) -> Any:
    O = width(rng)
    return Fn(lambda x, f: f(x, x.tanh()), "f(x, tanh x)", f=nn.Bilinear(shape[1], shape[1], O)), ("v", O)


def ordered(x: Tensor, f: nn.Module) -> Tensor:
    """The layer sees the samples in an order that depends on the data."""
    order = x.detach()[:, 0].argsort()
    return f(x[order])[order.argsort()]


def routed(x: Tensor, f: nn.Linear, g: nn.Linear) -> Tensor:
    """Every sample goes to one of two layers."""
    first = x.detach()[:, 0] > 0
    out = x.new_zeros(len(x), f.out_features)
    out[first] = f(x[first])
    out[~first] = g(x[~first])
    return out


def swapped(x: Tensor, f: nn.Module) -> Tensor:
    return f(x.transpose(0, 1)).transpose(0, 1)


def time_major(rng: Random, shape: Shape) -> Any:
    O = out_width(rng)
    layer = nn.Linear(shape[2], O, bias=rng.random() < 0.8)
    f = nn.Sequential(layer, rng.choice([nn.Tanh, nn.Tanh, nn.RReLU])()) if rng.random() < 0.5 else layer
    return Fn(swapped, "(T, N, E)", f=f), ("s", shape[1], O)


def time_major_norm(rng: Random, shape: Shape) -> Any:
    return None if shape[2] == 1 else (Fn(swapped, "(T, N, E)", f=nn.LayerNorm(shape[2])), shape)


def flat_time(x: Tensor, f: nn.Module) -> Tensor:
    N, T = x.shape[:2]
    return f(x.transpose(0, 1).reshape(T * N, -1)).unflatten(0, (T, N)).transpose(0, 1)


# ---- sequences


def attention(rng: Random, shape: Shape) -> Any:
    E = shape[2]
    if E < 2:
        return None
    first = rng.random() < 0.5
    heads = rng.choice([h for h in (1, 2) if E % h == 0])
    f = nn.MultiheadAttention(E, heads, dropout=rng.choice([0, 0, 0.2]), batch_first=first, bias=rng.random() < 0.8)
    if first:
        return Fn(lambda x, f: f(x, x, x, need_weights=False)[0], "attention", f=f), shape

    def g(x: Tensor, f: nn.Module) -> Tensor:
        x = x.transpose(0, 1)
        return f(x, x, x)[0].transpose(0, 1)

    return Fn(g, "attention (T, N, E)", f=f), shape


def scaled_dot_product(rng: Random, shape: Shape) -> Any:
    E, causal = shape[2], rng.random() < 0.5

    def f(x: Tensor, qkv: nn.Module) -> Tensor:
        q, k, v = qkv(x).chunk(3, -1)
        return F.scaled_dot_product_attention(q, k, v, is_causal=causal)

    return Fn(f, f"sdpa(causal={causal})", qkv=nn.Linear(E, 3 * E)), shape


def encoder(rng: Random, shape: Shape) -> Any:
    E = shape[2]
    if E < 2 or E > 3:
        return None
    return nn.TransformerEncoderLayer(E, 1, 3, dropout=rng.choice([0, 0.1]), batch_first=True), shape


def recurrent(rng: Random, shape: Shape) -> Any:
    H, first, both = rng.choice([1, 2, 3]), rng.random() < 0.6, rng.random() < 0.2
    f = rng.choice([nn.LSTM, nn.GRU])(shape[2], H, batch_first=first, bidirectional=both)
    out = ("s", shape[1], 2 * H if both else H)
    if first:
        return Fn(lambda x, f: f(x)[0], "f(x)[0]", f=f), out
    return Fn(lambda x, f: f(x.transpose(0, 1))[0].transpose(0, 1), "f(x)[0] (T, N, E)", f=f), out


# ---- images


def conv(rng: Random, shape: Shape) -> Any:
    C, size = shape[1], shape[2:]
    groups = rng.choice([g for g in (1, 1, 2, C) if C % g == 0])
    O = groups * rng.choice([1, 2] if groups > 1 else [1, 2, 3])
    kernel = [rng.choice([1, 2, 3]) for _ in size]
    stride, dilation = ([rng.choice([1, 1, 2]) for _ in size] for _ in range(2))
    padding = [rng.choice([0, 1]) for _ in size]
    out = [
        (s + 2 * p - d * (k - 1) - 1) // t + 1
        for s, p, d, k, t in zip(size, padding, dilation, kernel, stride, strict=True)
    ]
    if min(out) < 1 or O > 6:
        return None
    mode = rng.choice(["zeros", "zeros", "zeros", "reflect", "circular"])
    if mode != "zeros" and any(p >= s for p, s in zip(padding, size, strict=True)):
        mode = "zeros"
    options = {"bias": rng.random() < 0.8, "padding_mode": mode}
    return CONV[shape[0]](C, O, kernel, stride, padding, dilation, groups, **options), (shape[0], O, *out)


CONV = {"c": nn.Conv1d, "i": nn.Conv2d}
TRANSPOSED = {"c": nn.ConvTranspose1d, "i": nn.ConvTranspose2d}
INSTANCE = {"c": nn.InstanceNorm1d, "i": nn.InstanceNorm2d}
BATCH = {"v": nn.BatchNorm1d, "c": nn.BatchNorm1d, "i": nn.BatchNorm2d}
POOLS = {"c": [nn.AvgPool1d, nn.MaxPool1d], "i": [nn.AvgPool2d, nn.MaxPool2d]}


def conv_same(rng: Random, shape: Shape) -> Any:
    C = shape[1]
    return CONV[shape[0]](C, C, rng.choice([1, 3]), padding="same", groups=rng.choice([1, 1, C])), shape


def conv_transposed(rng: Random, shape: Shape) -> Any:
    if max(shape[2:]) > 4:
        return None
    O = rng.choice([1, 2])
    return TRANSPOSED[shape[0]](shape[1], O, 2), (shape[0], O, *(s + 1 for s in shape[2:]))


def channels_last(rng: Random, shape: Shape) -> Any:
    O = out_width(rng)
    f = nn.Linear(shape[1], O)
    return Fn(lambda x, f: f(x.movedim(1, -1)).movedim(-1, 1), "channels last", f=f), (shape[0], O, *shape[2:])


def group_norm(rng: Random, shape: Shape) -> Any:
    C = shape[1]
    groups = rng.choice([g for g in (1, 1, 2) if C % g == 0])
    return (nn.GroupNorm(groups, C), shape) if C // groups * math.prod(shape[2:]) > 1 else None


def instance_norm(rng: Random, shape: Shape) -> Any:
    if math.prod(shape[2:]) == 1:
        return None
    return INSTANCE[shape[0]](shape[1], affine=True, track_running_stats=rng.random() < 0.3), shape


def batch_norm(rng: Random, shape: Shape) -> Any:
    f = BATCH[shape[0]](shape[1])
    f.running_mean.normal_()
    f.running_var.uniform_(0.5, 2)
    return f.eval(), shape


def pool(rng: Random, shape: Shape) -> Any:
    if min(shape[2:]) < 2:
        return None
    return rng.choice(POOLS[shape[0]])(2), (*shape[:2], *(s // 2 for s in shape[2:]))


def turned(rng: Random, shape: Shape) -> Any:
    """A sequence as an image, and the other way round"""
    return Fn(lambda x: x.transpose(1, 2), "x.transpose(1, 2)"), ("c" if shape[0] == "s" else "s", shape[2], shape[1])


PIECES: dict[str, tuple[str, float, Piece]] = {  # name → (kinds of shapes, weight in the draw, the piece)
    "activation": ("vsci", 3, lambda rng, shape: (rng.choice(ACTIVATIONS)(), shape)),
    "prelu": ("vsci", 1, prelu),
    "rrelu": ("vsci", 1, lambda rng, shape: (nn.RReLU(inplace=rng.random() < 0.2), shape)),
    "dropout": ("vsci", 1, lambda rng, shape: (nn.Dropout(rng.choice([0.1, 0.4])), shape)),
    "layer_norm": ("vsci", 1, layer_norm),
    "scaled": ("vsci", 0.5, scaled),
    # A parameter that nothing depends on, and one of the shape of a sample: a learned position.
    "unused": ("vsci", 0.3, lambda rng, shape: (Fn(lambda x, s: x, "x", s=numbers(2)), shape)),
    "shifted": ("vsci", 0.3, lambda rng, shape: (Fn(lambda x, s: x + s, "x + s", s=numbers(*shape[1:])), shape)),
    "residual": ("vsci", 1.5, with_inner("x + f(x)", lambda x, f: x + f(x))),
    "twice": ("vsci", 1, with_inner("f(tanh f(x))", lambda x, f: f(f(x).tanh()))),
    "two_names": ("vsci", 1, with_inner("f(x) + g(tanh x)", lambda x, f, g: f(x) + g(x.tanh()), "fg")),
    "one_weight": ("vsci", 0.7, one_weight),
    "linear": ("vs", 3, linear),
    "weight_normed": ("vs", 1, weight_normed),
    "bare": ("vs", 1, bare),
    "bilinear": ("v", 0.4, bilinear),
    "by_sample": ("v", 0.3, of_width("stack(f(row) for row in x)", lambda x, f: torch.stack([f(r) for r in x]), width)),
    "ordered": ("v", 0.6, of_width("f(x[order])[back]", ordered, width)),
    "routed": ("v", 0.3, of_width("f or g", routed, width, "fg")),
    "time_major": ("s", 1.5, time_major),
    "time_major_norm": ("s", 0.7, time_major_norm),
    "flat": ("s", 1, of_width("(N·T, E)", lambda x, f: f(x.flatten(0, 1)).unflatten(0, x.shape[:2]))),
    "flat_time": ("s", 1, of_width("(T·N, E)", flat_time)),
    "attention": ("s", 1.5, attention),
    "scaled_dot_product": ("s", 1, scaled_dot_product),
    "encoder": ("s", 0.4, encoder),
    "recurrent": ("s", 1, recurrent),
    "as_image": ("s", 0.7, turned),
    "mean_over_time": ("s", 0.5, lambda rng, shape: (Fn(lambda x: x.mean(1), "x.mean(1)"), ("v", shape[2]))),
    "last_of_time": ("s", 0.3, lambda rng, shape: (Fn(lambda x: x[:, -1], "x[:, −1]"), ("v", shape[2]))),
    "conv": ("ci", 4, conv),
    "conv_same": ("ci", 1, conv_same),
    "conv_transposed": ("ci", 0.4, conv_transposed),
    "channels_last": ("ci", 0.7, channels_last),
    "group_norm": ("vci", 1, group_norm),
    "instance_norm": ("ci", 1, instance_norm),
    "batch_norm": ("vci", 1, batch_norm),
    "pool": ("ci", 0.7, pool),
    "as_sequence": ("c", 0.5, turned),
    "flatten": ("sci", 0.4, lambda rng, shape: (nn.Flatten(), ("v", math.prod(shape[1:])))),
}
