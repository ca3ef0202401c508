"""The paper's two problems: the sine, networks, batches and evaluation, the same for every method compared on them."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .data import MNIST_CLASSES, Device, Digits

SINE_POINTS = 1000
SINE_ENDS = -10, 10
SINE_NOISE = 0.2  # y = sin x + 0.2·U(0, 1), the paper's recipe
SINE_NOISE_FLOOR = SINE_NOISE**2 / 12  # variance of 0.2·U(0, 1): 0.0033, what no honest fit goes far below
BATCH = 600  # digits, the paper's
CHUNK = 500  # samples per forward when evaluating: the CNN's activations stay in the cache, the fastest on a CPU

# --- sine regression ------------------------------------------------------------------------------------------------


def sine(seed: int, dtype: torch.dtype = torch.float64, device: Device = "cpu") -> tuple[Tensor, Tensor]:
    """y = sin x + 0.2·U(0, 1) at 1000 points evenly on [−10, 10]: x, y, the same on every device."""
    generator = torch.Generator("cpu").manual_seed(seed)
    noise = torch.rand(SINE_POINTS, 1, generator=generator, dtype=torch.float64, device="cpu")
    x = torch.linspace(*SINE_ENDS, SINE_POINTS, dtype=torch.float64, device="cpu").unsqueeze(1)
    y = x.sin() + SINE_NOISE * noise
    return x.to(device, dtype), y.to(device, dtype)  # (1000, 1), (1000, 1)


# --- networks, with torch's default initialisation under a seed -----------------------------------------------------


def _seeded(build: Callable[[], nn.Sequential], seed: int, dtype: torch.dtype, device: Device) -> nn.Sequential:
    """The model that `build` makes under `seed`; drawn in float32 on the CPU, so equal everywhere up to rounding."""
    with torch.random.fork_rng(devices=[]), torch.device("cpu"):
        # The CPU's generator alone: torch.manual_seed would reseed the accelerators too, and nothing restores those.
        torch.default_generator.manual_seed(seed)
        model = build()
    return model.to(device=device, dtype=dtype)


def _linear(inputs: int, outputs: int) -> nn.Linear:
    return nn.Linear(inputs, outputs, dtype=torch.float32)


def sine_mlp(seed: int, dtype: torch.dtype = torch.float64, device: Device = "cpu") -> nn.Sequential:
    """MLP 1–10–1 with ELU: 31 parameters."""
    return _seeded(lambda: nn.Sequential(_linear(1, 10), nn.ELU(), _linear(10, 1)), seed, dtype, device)


def _cnn(kernels: tuple[int, int], features: int, *last: nn.Module) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(1, 4, kernels[0], dtype=torch.float32),  # (N, 4, 24, 24), or (N, 4, 6, 6) for the small images
        nn.RReLU(),
        nn.MaxPool2d(2),  # (N, 4, 12, 12), (N, 4, 3, 3)
        nn.Conv2d(4, 8, kernels[1], dtype=torch.float32),  # (N, 8, 8, 8), (N, 8, 2, 2)
        nn.RReLU(),
        *last,  # (N, 8, 4, 4)
        nn.Flatten(),
        _linear(features, MNIST_CLASSES),  # (N, 10)
    )


def mnist_cnn(seed: int, dtype: torch.dtype = torch.float32, device: Device = "cpu") -> nn.Sequential:
    """The paper's CNN on 1×28×28 images: 2,202 parameters."""
    return _seeded(lambda: _cnn((5, 5), 128, nn.MaxPool2d(2)), seed, dtype, device)


def digits_cnn(seed: int, dtype: torch.dtype = torch.float32, device: Device = "cpu") -> nn.Sequential:
    """A CNN like the paper's on 1×8×8 images: 506 parameters."""
    return _seeded(lambda: _cnn((3, 2), 32), seed, dtype, device)


class Build(Protocol):
    def __call__(self, seed: int, dtype: torch.dtype = ..., device: Device = ...) -> nn.Sequential: ...


CNNS: dict[int, Build] = {28: mnist_cnn, 8: digits_cnn}  # by the side of the images


def cnn_for(data: Digits) -> Build:
    """The network for images of this size: `cnn_for(data)(seed)`."""
    side = data.train_images.shape[-1]
    if side not in CNNS:
        raise ValueError(f"{data.name}: expected images of side {' or '.join(map(str, CNNS))}, found {side}")
    return CNNS[side]


# --- batches and evaluation -----------------------------------------------------------------------------------------


def batches(n: int, size: int, seed: int) -> Iterator[Tensor]:
    """Endless batches of indices into n samples: a new random order each pass, every index once per pass.

    The last batch of a pass is shorter where `size` does not divide n.
    """
    if not 1 <= size <= n:
        raise ValueError(f"batch size must lie between 1 and the number of samples {n}, got {size}")

    generator = torch.Generator("cpu").manual_seed(seed)
    orders = (torch.randperm(n, generator=generator, device="cpu") for _ in itertools.count())
    return itertools.chain.from_iterable(order.split(size) for order in orders)  # (size,) each


def predict(model: nn.Module, x: Tensor, chunk: int = CHUNK) -> Tensor:
    """model(x) in eval mode, without gradients, `chunk` samples at a time; every training flag is as before."""
    flags = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        with torch.no_grad():
            return torch.cat([model(part) for part in torch.split(x, chunk)])
    finally:
        for module, training in flags:  # one by one: model.train() would also wake what the user had frozen
            module.training = training


class Evaluation(NamedTuple):
    loss: float
    accuracy: float  # from 0 to 1


def evaluate(model: nn.Module, x: Tensor, y: Tensor, chunk: int = CHUNK) -> Evaluation:
    """Mean cross-entropy and share of right answers of a classifier in eval mode; y: int64 labels (N,)."""
    _check_lengths(x, y)
    logits = predict(model, x, chunk)  # (N, c)
    right = int((logits.argmax(1) == y).sum())
    return Evaluation(float(F.cross_entropy(logits, y)), right / len(y))


def accuracy(model: nn.Module, x: Tensor, y: Tensor, chunk: int = CHUNK) -> float:
    """Share of right answers of a classifier in eval mode, from 0 to 1."""
    return evaluate(model, x, y, chunk).accuracy


def mean_squared_error(model: nn.Module, x: Tensor, y: Tensor, chunk: int = CHUNK) -> float:
    """Mean of (model(x) − y)² in eval mode."""
    _check_lengths(x, y)
    return float(F.mse_loss(predict(model, x, chunk), y))


def _check_lengths(x: Tensor, y: Tensor) -> None:
    if len(x) != len(y) or len(x) == 0:
        raise ValueError(f"expected as many targets as samples, and at least one, got {len(y)} for {len(x)}")
