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

PIECES: dict[str, tuple[str, float, Piece]] = {}  # name → (kinds of shapes, weight in the draw, the piece)


def piece(kinds: str, weight: float = 1.0) -> Callable[[Piece], Piece]:
    def register(f: Piece) -> Piece:
        PIECES[f.__name__] = (kinds, weight, f)
        return f

    return register


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


@piece("vsci", 3)
def activation(rng: Random, shape: Shape) -> Any:
    makers = [nn.Tanh, nn.Tanh, nn.GELU, nn.Softplus, nn.SiLU, nn.ReLU, nn.ELU, lambda: nn.ReLU(inplace=True)]
    return rng.choice(makers)(), shape


@piece("vsci")
def prelu(rng: Random, shape: Shape) -> Any:
    return nn.PReLU(shape[1] if shape[0] in "vci" and rng.random() < 0.5 else 1), shape


@piece("vsci")
def rrelu(rng: Random, shape: Shape) -> Any:
    return nn.RReLU(inplace=rng.random() < 0.2), shape


@piece("vsci")
def dropout(rng: Random, shape: Shape) -> Any:
    return nn.Dropout(rng.choice([0.1, 0.4])), shape


@piece("vsci")
def layer_norm(rng: Random, shape: Shape) -> Any:
    over = shape[-1:] if rng.random() < 0.6 else shape[1:]
    return (nn.LayerNorm(over), shape) if math.prod(over) > 1 else None


@piece("vsci", 0.5)
def scaled(rng: Random, shape: Shape) -> Any:
    """No layer at all: x·s with a parameter s."""
    return Fn(lambda x, s: x * s, "x·s", s=numbers(*(shape[-1:] if rng.random() < 0.5 else (1,)))), shape


@piece("vsci", 0.3)
def unused(rng: Random, shape: Shape) -> Any:
    """A parameter that nothing depends on."""
    return Fn(lambda x, s: x, "x", s=numbers(2)), shape


@piece("vsci", 0.3)
def shifted(rng: Random, shape: Shape) -> Any:
    """A parameter of the shape of a sample: a learned position."""
    return Fn(lambda x, s: x + s, "x + s", s=numbers(*shape[1:])), shape


@piece("vsci", 1.5)
def residual(rng: Random, shape: Shape) -> Any:
    found = inner(rng, shape)
    return None if found is None else (Fn(lambda x, f: x + f(x), "x + f(x)", f=found), shape)


@piece("vsci")
def twice(rng: Random, shape: Shape) -> Any:
    found = inner(rng, shape)
    return None if found is None else (Fn(lambda x, f: f(f(x).tanh()), "f(tanh f(x))", f=found), shape)


@piece("vsci")
def two_names(rng: Random, shape: Shape) -> Any:
    """One module under two names."""
    found = inner(rng, shape)
    return (
        None if found is None else (Fn(lambda x, f, g: f(x) + g(x.tanh()), "f(x) + g(tanh x)", f=found, g=found), shape)
    )


@piece("vsci", 0.7)
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


@piece("vs", 3)
def linear(rng: Random, shape: Shape) -> Any:
    O = out_width(rng)
    return nn.Linear(shape[-1], O, bias=rng.random() < 0.8), (*shape[:-1], O)


@piece("vs")
def weight_normed(rng: Random, shape: Shape) -> Any:
    O = out_width(rng)
    return parametrizations.weight_norm(nn.Linear(shape[-1], O)), (*shape[:-1], O)


@piece("vs")
def bare(rng: Random, shape: Shape) -> Any:
    """Parameters without a module: F.linear(x, W, b), or x @ W, which has no rule."""
    I, O = shape[-1], out_width(rng)
    if rng.random() < 0.5:
        return Fn(F.linear, "F.linear(x, W, b)", W=numbers(O, I), b=numbers(O)), (*shape[:-1], O)
    return Fn(lambda x, W: x @ W, "x @ W", W=numbers(I, O)), (*shape[:-1], O)


@piece("v", 0.4)
def bilinear(rng: Random, shape: Shape) -> Any:
    O = width(rng)
    return Fn(lambda x, f: f(x, x.tanh()), "f(x, tanh x)", f=nn.Bilinear(shape[1], shape[1], O)), ("v", O)


@piece("v", 0.3)
def by_sample(rng: Random, shape: Shape) -> Any:
    O = width(rng)
    f = nn.Linear(shape[1], O)
    return Fn(lambda x, f: torch.stack([f(row) for row in x]), "stack(f(row) for row in x)", f=f), ("v", O)


@piece("v", 0.6)
def ordered(rng: Random, shape: Shape) -> Any:
    """The layer sees the samples in an order that depends on the data."""
    O = width(rng)

    def f(x: Tensor, f: nn.Module) -> Tensor:
        order = x.detach()[:, 0].argsort()
        return f(x[order])[order.argsort()]

    return Fn(f, "f(x[order])[back]", f=nn.Linear(shape[1], O)), ("v", O)


@piece("v", 0.3)
def routed(rng: Random, shape: Shape) -> Any:
    """Every sample goes to one of two layers."""
    O = width(rng)

    def f(x: Tensor, f: nn.Module, g: nn.Module) -> Tensor:
        first = x.detach()[:, 0] > 0
        out = x.new_zeros(len(x), O)
        out[first] = f(x[first])
        out[~first] = g(x[~first])
        return out

    return Fn(f, "f or g", f=nn.Linear(shape[1], O), g=nn.Linear(shape[1], O)), ("v", O)


@piece("s", 1.5)
def time_major(rng: Random, shape: Shape) -> Any:
    O = out_width(rng)
    layer = nn.Linear(shape[2], O, bias=rng.random() < 0.8)
    f = nn.Sequential(layer, rng.choice([nn.Tanh, nn.Tanh, nn.RReLU])()) if rng.random() < 0.5 else layer
    return Fn(lambda x, f: f(x.transpose(0, 1)).transpose(0, 1), "(T, N, E)", f=f), ("s", shape[1], O)


@piece("s", 0.7)
def time_major_norm(rng: Random, shape: Shape) -> Any:
    if shape[2] == 1:
        return None
    return Fn(lambda x, f: f(x.transpose(0, 1)).transpose(0, 1), "(T, N, E)", f=nn.LayerNorm(shape[2])), shape


@piece("s")
def flat(rng: Random, shape: Shape) -> Any:
    O = out_width(rng)
    f = nn.Linear(shape[2], O)
    return Fn(lambda x, f: f(x.flatten(0, 1)).unflatten(0, x.shape[:2]), "(N·T, E)", f=f), ("s", shape[1], O)


@piece("s")
def flat_time(rng: Random, shape: Shape) -> Any:
    O = out_width(rng)

    def f(x: Tensor, f: nn.Module) -> Tensor:
        N, T = x.shape[:2]
        return f(x.transpose(0, 1).reshape(T * N, -1)).unflatten(0, (T, N)).transpose(0, 1)

    return Fn(f, "(T·N, E)", f=nn.Linear(shape[2], O)), ("s", shape[1], O)


# ---- sequences


@piece("s", 1.5)
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


@piece("s")
def scaled_dot_product(rng: Random, shape: Shape) -> Any:
    E, causal = shape[2], rng.random() < 0.5

    def f(x: Tensor, qkv: nn.Module) -> Tensor:
        q, k, v = qkv(x).chunk(3, -1)
        return F.scaled_dot_product_attention(q, k, v, is_causal=causal)

    return Fn(f, f"sdpa(causal={causal})", qkv=nn.Linear(E, 3 * E)), shape


@piece("s", 0.4)
def encoder(rng: Random, shape: Shape) -> Any:
    E = shape[2]
    if E < 2 or E > 3:
        return None
    return nn.TransformerEncoderLayer(E, 1, 3, dropout=rng.choice([0, 0.1]), batch_first=True), shape


@piece("s")
def recurrent(rng: Random, shape: Shape) -> Any:
    H, first, both = rng.choice([1, 2, 3]), rng.random() < 0.6, rng.random() < 0.2
    f = rng.choice([nn.LSTM, nn.GRU])(shape[2], H, batch_first=first, bidirectional=both)
    out = ("s", shape[1], 2 * H if both else H)
    if first:
        return Fn(lambda x, f: f(x)[0], "f(x)[0]", f=f), out
    return Fn(lambda x, f: f(x.transpose(0, 1))[0].transpose(0, 1), "f(x)[0] (T, N, E)", f=f), out


@piece("s", 0.7)
def as_image(rng: Random, shape: Shape) -> Any:
    return Fn(lambda x: x.transpose(1, 2), "x.transpose(1, 2)"), ("c", shape[2], shape[1])


@piece("s", 0.5)
def mean_over_time(rng: Random, shape: Shape) -> Any:
    return Fn(lambda x: x.mean(1), "x.mean(1)"), ("v", shape[2])


@piece("s", 0.3)
def last_of_time(rng: Random, shape: Shape) -> Any:
    return Fn(lambda x: x[:, -1], "x[:, −1]"), ("v", shape[2])


# ---- images


@piece("ci", 4)
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
    make = nn.Conv1d if shape[0] == "c" else nn.Conv2d
    mode = rng.choice(["zeros", "zeros", "zeros", "reflect", "circular"])
    if mode != "zeros" and any(p >= s for p, s in zip(padding, size, strict=True)):
        mode = "zeros"
    f = make(C, O, kernel, stride, padding, dilation, groups, bias=rng.random() < 0.8, padding_mode=mode)
    return f, (shape[0], O, *out)


@piece("ci")
def conv_same(rng: Random, shape: Shape) -> Any:
    make = nn.Conv1d if shape[0] == "c" else nn.Conv2d
    C = shape[1]
    return make(C, C, rng.choice([1, 3]), padding="same", groups=rng.choice([1, 1, C])), shape


@piece("ci", 0.4)
def conv_transposed(rng: Random, shape: Shape) -> Any:
    if max(shape[2:]) > 4:
        return None
    make = nn.ConvTranspose1d if shape[0] == "c" else nn.ConvTranspose2d
    O = rng.choice([1, 2])
    return make(shape[1], O, 2), (shape[0], O, *(s + 1 for s in shape[2:]))


@piece("ci", 0.7)
def channels_last(rng: Random, shape: Shape) -> Any:
    O = out_width(rng)
    f = nn.Linear(shape[1], O)
    return Fn(lambda x, f: f(x.movedim(1, -1)).movedim(-1, 1), "channels last", f=f), (shape[0], O, *shape[2:])


@piece("vci")
def group_norm(rng: Random, shape: Shape) -> Any:
    C = shape[1]
    groups = rng.choice([g for g in (1, 1, 2) if C % g == 0])
    return (nn.GroupNorm(groups, C), shape) if C // groups * math.prod(shape[2:]) > 1 else None


@piece("ci")
def instance_norm(rng: Random, shape: Shape) -> Any:
    if math.prod(shape[2:]) == 1:
        return None
    make = nn.InstanceNorm1d if shape[0] == "c" else nn.InstanceNorm2d
    return make(shape[1], affine=True, track_running_stats=rng.random() < 0.3), shape


@piece("vci")
def batch_norm(rng: Random, shape: Shape) -> Any:
    f = {"v": nn.BatchNorm1d, "c": nn.BatchNorm1d, "i": nn.BatchNorm2d}[shape[0]](shape[1])
    f.running_mean.normal_()
    f.running_var.uniform_(0.5, 2)
    return f.eval(), shape


@piece("ci", 0.7)
def pool(rng: Random, shape: Shape) -> Any:
    if min(shape[2:]) < 2:
        return None
    make = {"c": [nn.AvgPool1d, nn.MaxPool1d], "i": [nn.AvgPool2d, nn.MaxPool2d]}[shape[0]]
    return rng.choice(make)(2), (*shape[:2], *(s // 2 for s in shape[2:]))


@piece("c", 0.5)
def as_sequence(rng: Random, shape: Shape) -> Any:
    return Fn(lambda x: x.transpose(1, 2), "x.transpose(1, 2)"), ("s", shape[2], shape[1])


@piece("sci", 0.4)
def flatten(rng: Random, shape: Shape) -> Any:
    return nn.Flatten(), ("v", math.prod(shape[1:]))
