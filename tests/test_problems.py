import gzip
import hashlib
import math
import random
import struct
from itertools import islice

import pytest
import torch
from torch import nn

from marquardt.paper import problems
from marquardt.paper.problems import (
    MNIST_MD5,
    SINE_NOISE_FLOOR,
    accuracy,
    batches,
    data_directory,
    evaluate,
    load_mnist,
    mean_squared_error,
    mnist_cnn,
    predict,
    read_idx,
    sine,
    sine_mlp,
)

MODELS = [sine_mlp, mnist_cnn]


def idx(shape, data=None, *, code=8, zeros=b"\0\0"):
    """An idx file of this shape, as bytes."""
    data = bytes(i % 10 for i in range(math.prod(shape))) if data is None else data
    return zeros + bytes([code, len(shape)]) + struct.pack(f">{len(shape)}I", *shape) + data


def write_mnist(directory, n=3, side=28, labels=None, pack=gzip.compress, end=".gz"):
    labels = bytes(range(n)) if labels is None else labels
    for name in MNIST_MD5:
        content = idx((n, side, side)) if "images" in name else idx((len(labels),), labels)
        (directory / (name + end)).write_bytes(pack(content))


def parameters(model):
    return sum(p.numel() for p in model.parameters())


# --- the sine ---


def test_sine_is_the_papers_recipe():
    x, y = sine(0)
    assert x.shape == y.shape == (1000, 1)
    assert x.dtype == y.dtype == torch.float64
    assert (x[0].item(), x[-1].item()) == (-10, 10)
    torch.testing.assert_close(x.diff(dim=0), torch.full((999, 1), 20 / 999, dtype=torch.float64))
    noise = y - x.sin()
    assert noise.min() >= 0
    assert noise.max() < 0.2
    assert noise.max() - noise.min() > 0.19
    assert noise.var().item() == pytest.approx(SINE_NOISE_FLOOR, rel=0.15)
    assert pytest.approx(0.2**2 / 12) == SINE_NOISE_FLOOR


def test_sine_follows_its_seed_and_nothing_else():
    before = torch.get_rng_state()
    x, y = sine(3)
    assert torch.equal(torch.get_rng_state(), before)
    torch.rand(7)
    assert torch.equal(sine(3)[1], y)
    assert not torch.equal(sine(4)[1], y)
    x32, y32 = sine(3, dtype=torch.float32)
    assert torch.equal(x32, x.float())
    assert torch.equal(y32, y.float())


# --- the networks ---


@pytest.mark.parametrize(
    ("build", "count", "shape", "out"), [(sine_mlp, 31, (5, 1), (5, 1)), (mnist_cnn, 2202, (5, 1, 28, 28), (5, 10))]
)
def test_networks_have_the_papers_size(build, count, shape, out):
    model = build(0, dtype=torch.float64)
    assert parameters(model) == count
    assert model.training
    assert model(torch.zeros(shape, dtype=torch.float64)).shape == out


def test_default_precisions():
    assert {p.dtype for p in sine_mlp(0).parameters()} == {torch.float64}
    assert {p.dtype for p in mnist_cnn(0).parameters()} == {torch.float32}


def test_cnn_layers():
    kinds = [type(layer).__name__ for layer in mnist_cnn(0)]
    assert kinds == ["Conv2d", "RReLU", "MaxPool2d", "Conv2d", "RReLU", "MaxPool2d", "Flatten", "Linear"]


@pytest.mark.parametrize("build", MODELS)
def test_networks_follow_their_seed_and_nothing_else(build):
    before = torch.get_rng_state()
    first = nn.utils.parameters_to_vector(build(1).parameters())
    assert torch.equal(torch.get_rng_state(), before)
    torch.rand(7)
    assert torch.equal(nn.utils.parameters_to_vector(build(1).parameters()), first)
    assert not torch.equal(nn.utils.parameters_to_vector(build(2).parameters()), first)


@pytest.mark.parametrize("build", MODELS)
def test_same_weights_in_every_precision(build):
    single = build(1, dtype=torch.float32)
    double = build(1, dtype=torch.float64)
    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        again = build(1, dtype=torch.float32)
    finally:
        torch.set_default_dtype(default)
    for a, b, c in zip(single.parameters(), double.parameters(), again.parameters(), strict=True):
        assert torch.equal(a.double(), b)
        assert torch.equal(a, c)


def test_initialisation_is_torchs_default():
    torch.manual_seed(5)
    expected = nn.Linear(1, 10)
    assert torch.equal(sine_mlp(5, dtype=torch.float32)[0].weight, expected.weight)


# --- idx files ---


@pytest.mark.parametrize("pack", [bytes, gzip.compress], ids=["plain", "gzip"])
@pytest.mark.parametrize("shape", [(7,), (2, 3, 4)])
def test_read_idx(tmp_path, pack, shape):
    path = tmp_path / "file"
    path.write_bytes(pack(idx(shape)))
    tensor = read_idx(path)
    assert tensor.dtype == torch.uint8
    assert tensor.shape == shape
    assert tensor.flatten().tolist() == [i % 10 for i in range(math.prod(shape))]
    tensor.zero_()  # the memory is the tensor's own
    assert read_idx(str(path), ndim=len(shape)).sum() > 0


BAD = {
    "empty": (b"", "truncated file of 0 bytes"),
    "truncated magic": (b"\0\0\x08", "truncated file of 3 bytes"),
    "truncated sizes": (idx((2, 3))[:9], r"expected 8 bytes of sizes in the header, found 5: truncated"),
    "truncated data": (idx((2, 3))[:-1], r"expected 6 bytes of data for shape \(2, 3\), found 5: truncated"),
    "no data": (idx((2, 3), b""), "found 0: truncated"),
    "oversized data": (idx((2, 3)) + b"\0", r"expected 6 bytes of data for shape \(2, 3\), found more: oversized"),
    "wrong magic": (idx((2, 3), zeros=b"\x89P"), "found magic 89 50 08 02"),
    "wrong type": (idx((2, 3), code=0x0D), "found data type 0x0d"),
    "no dimensions": (idx(()), "expected one or more dimensions, found 0"),
    "empty shape": (idx((0, 3)), r"found a header of shape \(0, 3\)"),
    "enormous shape": (idx((2**32 - 1,) * 3, b"abc"), r"found a header of shape \(4294967295, "),
}


@pytest.mark.parametrize("pack", [bytes, gzip.compress], ids=["plain", "gzip"])
@pytest.mark.parametrize(("content", "message"), BAD.values(), ids=BAD.keys())
def test_read_idx_refuses(tmp_path, content, message, pack):
    path = tmp_path / "some-idx-file"
    path.write_bytes(pack(content))
    with pytest.raises(ValueError, match="some-idx-file: .*" + message):
        read_idx(path)


def test_read_idx_refuses_the_wrong_number_of_dimensions(tmp_path):
    path = tmp_path / "some-idx-file"
    path.write_bytes(idx((2, 3)))
    with pytest.raises(ValueError, match="some-idx-file: expected 3 dimensions, found 2"):
        read_idx(path, ndim=3)


def flipped(content, at):
    return content[:at] + bytes([content[at] ^ 0xFF]) + content[at + 1 :]


PACKED = gzip.compress(idx((40, 28, 28), random.Random(0).randbytes(40 * 28 * 28)))
BAD_GZIP = {
    "cut in the data": PACKED[: len(PACKED) // 2],
    "cut in the checksum": PACKED[:-4],
    "cut in the header": PACKED[:5],
    "flipped data": flipped(PACKED, len(PACKED) // 2),
    "flipped checksum": flipped(PACKED, len(PACKED) - 6),
    "garbage after the end": PACKED + b"garbage",
    "unknown method": flipped(PACKED, 2),
}


@pytest.mark.parametrize("content", BAD_GZIP.values(), ids=BAD_GZIP.keys())
def test_read_idx_refuses_a_damaged_gzip(tmp_path, content):
    path = tmp_path / "some-idx-file.gz"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=r"some-idx-file.gz: expected"):
        read_idx(path)


def test_read_idx_stops_at_the_size_of_the_header(tmp_path, monkeypatch):
    """A small file that unpacks to gigabytes is refused for its first surplus byte."""
    read = []
    original = gzip.GzipFile.read
    monkeypatch.setattr(gzip.GzipFile, "read", lambda self, size=-1: read.append(size) or original(self, size))
    path = tmp_path / "bomb.gz"
    path.write_bytes(gzip.compress(idx((10,)) + bytes(10**6)))
    with pytest.raises(ValueError, match="oversized"):
        read_idx(path)
    assert read == [4, 4, 11]


def test_read_idx_respects_the_limit(tmp_path, monkeypatch):
    monkeypatch.setattr(problems, "MAX_IDX_BYTES", 5)
    path = tmp_path / "file"
    path.write_bytes(idx((6,)))
    with pytest.raises(ValueError, match="expected 1 to 5 bytes"):
        read_idx(path)


def test_read_idx_checksum(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(idx((6,)))
    md5 = hashlib.md5(idx((6,))).hexdigest()
    assert len(read_idx(path, md5=md5)) == 6
    with pytest.raises(ValueError, match=f"file: expected content with MD5 {'0' * 32}, found {md5}"):
        read_idx(path, md5="0" * 32)


def test_read_idx_missing(tmp_path):
    with pytest.raises(FileNotFoundError, match="absent"):
        read_idx(tmp_path / "absent")


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


# --- batches ---


def test_a_hundred_batches_of_600_are_one_pass():
    order = list(islice(batches(60000, 600, 0), 200))
    assert {len(batch) for batch in order} == {600}
    first, second = torch.cat(order[:100]), torch.cat(order[100:])
    assert torch.equal(first.sort().values, torch.arange(60000))
    assert torch.equal(second.sort().values, torch.arange(60000))
    assert not torch.equal(first, second)


@pytest.mark.parametrize(
    ("n", "size", "lengths"), [(10, 3, [3, 3, 3, 1]), (6, 3, [3, 3]), (4, 4, [4]), (3, 1, [1, 1, 1])]
)
def test_every_index_once_per_pass(n, size, lengths):
    endless = batches(n, size, 1)
    for _ in range(3):
        a_pass = list(islice(endless, len(lengths)))
        assert [len(batch) for batch in a_pass] == lengths
        assert torch.cat(a_pass).sort().values.tolist() == list(range(n))


def test_batches_follow_their_seed_and_nothing_else():
    before = torch.get_rng_state()
    first = torch.cat(list(islice(batches(50, 5, 1), 20)))
    assert torch.equal(torch.get_rng_state(), before)
    torch.rand(7)
    assert torch.equal(torch.cat(list(islice(batches(50, 5, 1), 20))), first)
    assert not torch.equal(torch.cat(list(islice(batches(50, 5, 2), 20))), first)


@pytest.mark.parametrize("size", [0, -1, 11])
def test_batches_refuse_an_impossible_size_at_the_call(size):
    with pytest.raises(ValueError, match=f"number of samples 10, got {size}"):
        batches(10, size, 0)


# --- evaluation ---


class Probe(nn.Module):
    """Answers class 1 everywhere, and notes the mode, the gradient mode and the chunk sizes it was called with."""

    def __init__(self):
        super().__init__()
        self.inner = nn.BatchNorm1d(2)
        self.calls = []

    def forward(self, x):
        self.calls.append((self.training, self.inner.training, torch.is_grad_enabled(), len(x)))
        return torch.tensor([0.0, 1.0]).expand(len(x), 2)


def test_evaluation_is_in_eval_mode_without_gradients_in_chunks():
    model = Probe()
    y = torch.tensor([1, 0, 1, 1, 0])
    result = evaluate(model, torch.zeros(5, 2), y, chunk=2)
    assert model.calls == [(False, False, False, 2), (False, False, False, 2), (False, False, False, 1)]
    assert result.accuracy == accuracy(model, torch.zeros(5, 2), y) == 3 / 5
    assert result.loss == pytest.approx((3 * math.log(1 + math.exp(-1)) + 2 * math.log(1 + math.e)) / 5, rel=1e-6)


@pytest.mark.parametrize(("outer", "inner"), [(True, True), (True, False), (False, True), (False, False)])
def test_evaluation_restores_every_training_flag(outer, inner):
    model = Probe()
    model.train(outer)
    model.inner.train(inner)
    predict(model, torch.zeros(3, 2))
    assert (model.training, model.inner.training) == (outer, inner)


def test_flags_are_restored_after_an_exception():
    model = mnist_cnn(0)
    with pytest.raises(RuntimeError):
        predict(model, torch.zeros(3, 1, 2, 2))
    assert all(module.training for module in model.modules())


def test_chunks_do_not_change_the_answer_and_rrelu_is_not_random():
    model = mnist_cnn(0, dtype=torch.float64)
    x = torch.randn(11, 1, 28, 28, dtype=torch.float64)
    before = torch.get_rng_state()
    torch.testing.assert_close(predict(model, x, chunk=4), predict(model, x))
    assert torch.equal(torch.get_rng_state(), before)


def test_mean_squared_error():
    x, y = sine(0)
    model = sine_mlp(0)
    expected = (model(x) - y).square().mean().item()
    assert mean_squared_error(model, x, y, chunk=300) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("score", [evaluate, accuracy, mean_squared_error])
@pytest.mark.parametrize(("n", "targets"), [(3, 2), (0, 0)])
def test_evaluation_needs_a_target_for_each_sample(score, n, targets):
    with pytest.raises(ValueError, match=f"got {targets} for {n}"):
        score(Probe(), torch.zeros(n, 2), torch.zeros(targets, dtype=torch.int64))
