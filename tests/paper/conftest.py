"""Fixtures that several files of the paper's tests share."""

import hashlib
import sys

import pytest
import torch
from torch.nn.utils import parameters_to_vector

from marquardt.paper import data as paper_data
from marquardt.paper.data import MNIST_MD5
from marquardt.paper.methods import METHODS, Method
from support.made_runs import Still
from support.mnist_mirror import FILES, Web


@pytest.fixture
def method(monkeypatch):
    """Adds a method "fake" that is built so."""

    def add(build):
        monkeypatch.setitem(METHODS, "fake", Method("fake", "Fake", build, {}, {}))

    return add


@pytest.fixture
def trainers(method):
    """Every trainer that the method "fake" was built as, with its batches: one to warm up, one for the run."""
    found = []

    class See(Still):
        def __init__(self, model, loss, hyper):
            super().__init__(model, loss, hyper)
            self.start = parameters_to_vector(model.parameters()).detach().clone()
            self.batches = []
            found.append(self)

        def step(self, x, y):
            self.batches.append((x, y))
            torch.nn.init.zeros_(self.model[-1].bias)
            torch.rand(1)

    method(See)
    return found


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
