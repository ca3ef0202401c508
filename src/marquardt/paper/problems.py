"""The paper's two problems: data, networks, batches and evaluation, the same for every method compared on them."""

from __future__ import annotations

import gzip
import hashlib
import io
import math
import os
import struct
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

SINE_POINTS = 1000
SINE_NOISE = 0.2  # y = sin x + 0.2·U(0, 1), the paper's recipe
SINE_NOISE_FLOOR = SINE_NOISE**2 / 12  # variance of 0.2·U(0, 1): 0.0033, what no honest fit goes far below

MNIST_MEAN, MNIST_STD = 0.1307, 0.3081  # of the training pixels scaled to [0, 1]; the paper's normalisation
MNIST_SIDE, MNIST_CLASSES = 28, 10
MNIST_MD5 = {  # of the uncompressed files
    "train-images-idx3-ubyte": "6bbc9ace898e44ae57da46a324031adb",
    "train-labels-idx1-ubyte": "a25bea736e30d166cdddb491f175f624",
    "t10k-images-idx3-ubyte": "2646ac647ad5339dbf082846283269ea",
    "t10k-labels-idx1-ubyte": "27ae3e4e09519cfbb04c329615203637",
}
MNIST_FOLDERS = (".", "mnist", "MNIST/raw")  # the last is where torchvision puts them

MAX_IDX_BYTES = 2**30  # twenty times MNIST: a header that asks for more is damaged, or a decompression bomb
UNSIGNED_BYTE = 0x08  # the idx format's code for uint8
GZIP_MAGIC = b"\x1f\x8b"  # RFC 1952

CHUNK = 500  # samples per forward when evaluating: the CNN's activations stay in the cache, the fastest on a CPU

Device = torch.device | str


# --- sine regression ------------------------------------------------------------------------------------------------


def sine(seed: int, dtype: torch.dtype = torch.float64, device: Device = "cpu") -> tuple[Tensor, Tensor]:
    """y = sin x + 0.2·U(0, 1) at 1000 points evenly on [−10, 10]: x, y, the same on every device."""
    generator = torch.Generator("cpu").manual_seed(seed)
    noise = torch.rand(SINE_POINTS, 1, generator=generator, dtype=torch.float64, device="cpu")
    x = torch.linspace(-10, 10, SINE_POINTS, dtype=torch.float64, device="cpu").unsqueeze(1)
    y = x.sin() + SINE_NOISE * noise
    return x.to(device, dtype), y.to(device, dtype)  # (1000, 1), (1000, 1)


def sine_mlp(seed: int, dtype: torch.dtype = torch.float64, device: Device = "cpu") -> nn.Sequential:
    """MLP 1–10–1 with ELU: 31 parameters, torch's default initialisation under `seed`."""

    def build() -> nn.Sequential:
        return nn.Sequential(nn.Linear(1, 10, dtype=torch.float32), nn.ELU(), nn.Linear(10, 1, dtype=torch.float32))

    return _seeded(build, seed, dtype, device)


# --- MNIST ----------------------------------------------------------------------------------------------------------


def mnist_cnn(seed: int, dtype: torch.dtype = torch.float32, device: Device = "cpu") -> nn.Sequential:
    """The paper's CNN on 1×28×28 images: 2,202 parameters, torch's default initialisation under `seed`."""

    def build() -> nn.Sequential:
        return nn.Sequential(
            nn.Conv2d(1, 4, 5, dtype=torch.float32),  # (N, 4, 24, 24)
            nn.RReLU(),
            nn.MaxPool2d(2),  # (N, 4, 12, 12)
            nn.Conv2d(4, 8, 5, dtype=torch.float32),  # (N, 8, 8, 8)
            nn.RReLU(),
            nn.MaxPool2d(2),  # (N, 8, 4, 4)
            nn.Flatten(),
            nn.Linear(128, MNIST_CLASSES, dtype=torch.float32),  # (N, 10)
        )

    return _seeded(build, seed, dtype, device)


@dataclass(frozen=True, eq=False)  # eq would compare tensors, which have no single truth value
class MNIST:
    """Normalised images (N, 1, 28, 28) and int64 labels (N,) of both sets."""

    train_images: Tensor
    train_labels: Tensor
    test_images: Tensor
    test_labels: Tensor

    def to(self, device: Device, dtype: torch.dtype = torch.float32) -> MNIST:
        """The same data on `device`, the images in `dtype`."""
        return MNIST(
            self.train_images.to(device, dtype),
            self.train_labels.to(device),
            self.test_images.to(device, dtype),
            self.test_labels.to(device),
        )


def data_directory() -> Path | None:
    """The folder that the environment variable MARQUARDT_DATA names, None where it is unset or empty."""
    value = os.environ.get("MARQUARDT_DATA", "")
    return Path(value).expanduser() if value else None


def load_mnist(directory: str | Path | None = None, *, verify: bool = True) -> MNIST:
    """MNIST from its four idx files, plain or .gz, in `directory`, its `mnist/` or its `MNIST/raw/`.

    `directory` defaults to MARQUARDT_DATA. `verify` compares the MD5 of each file's uncompressed content with MNIST's;
    `verify=False` reads other data of the same form (28×28 bytes, labels 0 to 9).
    """
    files = _find_mnist(data_directory() if directory is None else Path(directory).expanduser())
    tensors = []
    for images_name, labels_name in (list(MNIST_MD5)[:2], list(MNIST_MD5)[2:]):
        images_path, labels_path = files[images_name], files[labels_name]
        images = read_idx(images_path, ndim=3, md5=MNIST_MD5[images_name] if verify else None)
        labels = read_idx(labels_path, ndim=1, md5=MNIST_MD5[labels_name] if verify else None)
        if images.shape[1:] != (MNIST_SIDE, MNIST_SIDE):
            raise ValueError(f"{images_path}: expected 28×28 images, found {images.shape[1]}×{images.shape[2]}")
        if len(labels) != len(images):
            raise ValueError(f"{labels_path}: expected a label for each of {len(images)} images, found {len(labels)}")
        if (largest := int(labels.max())) >= MNIST_CLASSES:
            raise ValueError(f"{labels_path}: expected labels from 0 to 9, found {largest}")
        pixels = images.unsqueeze(1).to(torch.float32)  # (N, 1, 28, 28)
        tensors += [pixels.div_(255).sub_(MNIST_MEAN).div_(MNIST_STD), labels.long()]
    return MNIST(*tensors)


def _find_mnist(directory: Path | None) -> dict[str, Path]:
    """Name of each of the four files → where it lies; a plain file goes before its .gz."""
    advice = (
        f"MNIST is four files, plain or .gz: {', '.join(MNIST_MD5)}. Pass the directory that holds them, or name it in "
        "the environment variable MARQUARDT_DATA."
    )
    if directory is None:
        raise FileNotFoundError(f"no data directory given and MARQUARDT_DATA is not set. {advice}")
    found = {}
    for name in MNIST_MD5:
        candidates = (directory / folder / (name + end) for folder in MNIST_FOLDERS for end in ("", ".gz"))
        if path := next(filter(Path.is_file, candidates), None):
            found[name] = path
    if missing := [name for name in MNIST_MD5 if name not in found]:
        raise FileNotFoundError(f"not found in {directory}: {', '.join(missing)}. {advice}")
    return found


def read_idx(path: str | Path, *, ndim: int | None = None, md5: str | None = None) -> Tensor:
    """The uint8 tensor of an idx file, plain or gzipped: bytes 0, 0, 8, ndim; ndim big-endian uint32 sizes; the data.

    `ndim` is the number of dimensions expected and `md5` the checksum of the uncompressed content, None for any. What
    does not fit, or holds more or fewer bytes than its header says, is a ValueError.
    """
    path = Path(path)
    with path.open("rb") as raw:
        zipped = raw.read(2) == GZIP_MAGIC  # by content: an idx file begins with two zeros
        raw.seek(0)
        stream = gzip.GzipFile(fileobj=raw) if zipped else raw
        try:
            header, shape, data = _parse_idx(stream, path, ndim)
        except (gzip.BadGzipFile, EOFError, zlib.error) as error:
            raise ValueError(f"{path}: expected a whole gzip file, found it corrupt or truncated ({error})") from error
    if md5 is not None:
        digest = hashlib.md5(header, usedforsecurity=False)
        digest.update(data)
        if digest.hexdigest() != md5:
            raise ValueError(f"{path}: expected content with MD5 {md5}, found {digest.hexdigest()}")
    return torch.frombuffer(bytearray(data), dtype=torch.uint8).reshape(shape)  # writable: frombuffer shares the memory


def _parse_idx(stream: io.BufferedIOBase, path: Path, ndim: int | None) -> tuple[bytes, tuple[int, ...], bytes]:
    """Header, shape and data; never reads more than the header announces, and one byte to see that it ends there."""
    magic = stream.read(4)
    if len(magic) < 4:
        raise ValueError(f"{path}: expected an idx header, found a truncated file of {len(magic)} bytes")
    if magic[:2] != b"\0\0":
        raise ValueError(f"{path}: expected an idx file, which begins with 00 00, found magic {magic.hex(' ')}")
    if magic[2] != UNSIGNED_BYTE:
        raise ValueError(f"{path}: expected unsigned bytes (idx data type 0x08), found data type 0x{magic[2]:02x}")
    if magic[3] == 0 or ndim not in (None, magic[3]):
        raise ValueError(f"{path}: expected {ndim or 'one or more'} dimensions, found {magic[3]}")
    sizes = stream.read(4 * magic[3])
    if len(sizes) < 4 * magic[3]:
        raise ValueError(f"{path}: expected {4 * magic[3]} bytes of sizes in the header, found {len(sizes)}: truncated")
    shape = struct.unpack(f">{magic[3]}I", sizes)
    count = math.prod(shape)  # Python integers: a damaged header cannot overflow
    if not 0 < count <= MAX_IDX_BYTES:
        raise ValueError(f"{path}: expected 1 to {MAX_IDX_BYTES} bytes of data, found a header of shape {shape}")
    data = stream.read(count + 1)
    if len(data) < count:
        raise ValueError(f"{path}: expected {count} bytes of data for shape {shape}, found {len(data)}: truncated")
    if len(data) > count:
        raise ValueError(f"{path}: expected {count} bytes of data for shape {shape}, found more: oversized")
    return magic + sizes, shape, data


# --- both -----------------------------------------------------------------------------------------------------------


def batches(n: int, size: int, seed: int) -> Iterator[Tensor]:
    """Endless batches of indices into n samples: a new random order each pass, every index once per pass.

    The last batch of a pass is shorter where `size` does not divide n.
    """
    if not 1 <= size <= n:
        raise ValueError(f"batch size must lie between 1 and the number of samples {n}, got {size}")

    def forever() -> Iterator[Tensor]:
        generator = torch.Generator("cpu").manual_seed(seed)
        while True:
            yield from torch.split(torch.randperm(n, generator=generator, device="cpu"), size)  # (size,) each

    return forever()  # a generator of its own, so that the check above happens at the call


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


def _seeded(build: Callable[[], nn.Sequential], seed: int, dtype: torch.dtype, device: Device) -> nn.Sequential:
    """The model that `build` makes under `seed`; drawn in float32 on the CPU, so equal everywhere up to rounding."""
    with torch.random.fork_rng(devices=[]), torch.device("cpu"):
        # The CPU's generator alone: torch.manual_seed would reseed the accelerators too, and nothing restores those.
        torch.default_generator.manual_seed(seed)
        model = build()
    return model.to(device=device, dtype=dtype)
