"""Models that torch.compile has compiled, whole or in part: a step runs their own code, and compiles nothing."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator

import pytest
import torch
import torch._dynamo as _dynamo
from torch import Tensor, nn

import marquardt as mq
from marquardt.recordings import RECORDERS
from support.recorder import Repeated
from support.steps import theta


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.drop = nn.Linear(8, 16), nn.Dropout(0.2)

    def forward(self, x: Tensor) -> Tensor:
        return self.drop(self.inner(x).tanh())


class Network(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.block, self.head = Block(), nn.Linear(16, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.block(x))


def whole(model: nn.Module, backend: str) -> nn.Module:
    return torch.compile(model, backend=backend)


def in_place(model: nn.Module, backend: str) -> nn.Module:
    model.compile(backend=backend)
    return model


def a_block(model: nn.Module, backend: str) -> nn.Module:
    model.block = torch.compile(model.block, backend=backend)
    return model


def a_block_in_place(model: nn.Module, backend: str) -> nn.Module:
    model.block.compile(backend=backend)
    return model


EVERY_WAY = pytest.mark.parametrize("compiled", [whole, in_place, a_block, a_block_in_place])


@pytest.fixture
def graphs() -> Iterator[Callable[[], int]]:
    """How many graphs were compiled so far."""
    _dynamo.reset()
    _dynamo.utils.counters.clear()
    yield lambda: _dynamo.utils.counters["stats"]["unique_graphs"]
    _dynamo.reset()


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@EVERY_WAY
def test_a_compiled_model_takes_the_steps_of_the_plain_one(compiled, backend, graphs):
    """With the same random numbers. What is compiled for an evaluation between them stays as it was."""
    plain, x = Network(), torch.randn(64, 8)
    y = x.sum(1, keepdim=True).sin()
    model = compiled(copy.deepcopy(plain), backend)
    opt, other = mq.LM(model, "mse"), mq.LM(plain, "mse")
    found = []
    for i in range(6):
        torch.manual_seed(i)
        there = other.step(x, y)
        torch.manual_seed(i)
        assert opt.step(x, y) == there
        with torch.no_grad():
            torch.manual_seed(i)
            z = model(x)
            torch.manual_seed(i)
            assert torch.allclose(z, plain(x))
        found.append(graphs())
    assert found[0] > 0
    assert len(set(found)) == 1  # not one more
    assert torch.equal(theta(model), theta(plain))


@EVERY_WAY
def test_rules_and_names_are_those_of_the_plain_model(compiled, graphs):
    plain, x = Network(), torch.randn(16, 8)
    model = compiled(copy.deepcopy(plain), "eager")
    paths = mq.linearize(model, "mse", x, x[:, :1]).paths
    assert paths == mq.linearize(plain, "mse", x, x[:, :1]).paths
    assert set(paths.values()) == {"rule"}
    opt = mq.LM(model, "mse")
    with torch.no_grad():
        model.get_submodule("block").inner.weight[0, 0] = torch.nan
    with pytest.raises(ValueError, match=r"parameter 'block\.inner\.weight' holds NaN"):
        opt.step(x, x[:, :1])
    assert graphs() == 0


def test_a_compiled_model_is_recorded(monkeypatch, graphs):
    """Whatever the compiler keeps in it does not make it another model in every step."""
    inner = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))
    model = torch.compile(inner, backend="eager")
    recorder = Repeated(inner)
    monkeypatch.setitem(RECORDERS, "cpu", recorder)
    opt = mq.LM(model, "mse", capture=True)
    for i in range(8):
        x = torch.randn(64, 8, generator=torch.Generator().manual_seed(i))
        opt.step(x, x.sum(1, keepdim=True).sin())
        with torch.no_grad():
            model(x)
    assert recorder.recordings == 1
    assert recorder.replays >= 4
    assert graphs() == 1
