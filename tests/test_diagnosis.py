"""Why a run that has converged may have learnt nothing, in the words of its steps."""

from __future__ import annotations

import re

import pytest
import torch
from torch import Tensor, nn

import marquardt as mq

X = torch.linspace(0.1, 1, 100)[:, None]
Y = torch.sin(6 * X)


def network(activation: type[nn.Module] = nn.Tanh, inputs: int = 1, outputs: int = 1) -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(inputs, 10), activation(), nn.Linear(10, outputs)).double()


def ended(model: nn.Module, x: Tensor, y: Tensor, loss: object = "mse", batches: int = 1, **parts: object) -> mq.Step:
    """The first step that says that the run has converged"""
    opt = mq.LM(model, loss, **parts)
    data = list(zip(x.chunk(batches), y.chunk(batches), strict=True))
    for _ in range(300):
        step = opt.step(x, y) if batches == 1 else opt.step_over(data)
        if step.converged:
            return step
    raise AssertionError(f"300 steps without an end: {step}")


@pytest.mark.parametrize(
    ("x", "size"), [(1e6 * X, "6.1e+05"), (1990 + 30 * X, "2e+03"), (torch.cat([X, 1e6 * (1 + X)], 1), "1.6e+06")]
)
@pytest.mark.parametrize(("activation", "name"), [(nn.Tanh, "tanh"), (nn.Sigmoid, "sigmoid")])
@pytest.mark.parametrize("batches", [1, 2])
def test_inputs_that_saturate_the_first_layer(x, size, activation, name, batches):
    """Also in batches, each of which alone has nearly a constant, and the first of which shows the size"""
    note = ended(network(activation, x.shape[1]), x.double(), Y.double(), batches=batches).note
    constant = f"{float(Y.double().var(correction=0)):.4g}"
    assert note.startswith("converged: ")
    assert (
        f"a constant has the same loss, {constant}: the inputs are of the size {size if batches == 1 else ''}" in note
    )
    assert re.search(rf"\d+% of the outputs of {name} are saturated; standardise the inputs, x = ", note)


BENDS = {"acceptance": mq.Decrease(), "momentum": None}


@pytest.mark.parametrize(
    ("model", "x", "y", "options", "words"),
    [
        # The first step goes so far that the hidden units saturate.
        (network(), 3 * (X - 0.5), 1e5 + Y, {}, r"targets are of the size 1e\+05, \d+% .* saturated; standardise the"),
        (network(nn.ReLU), 1e6 * X, Y, BENDS, r"size 6.1e\+05, 100% of the units of relu bend nowhere within the data"),
        # Classes have no size.
        (network(outputs=3), 1e6 * X, (X[:, 0] > 0.5).long() + (X[:, 0] > 0.7).long(), {"loss": "cross_entropy"},
         r"a constant has the same loss, .*: the inputs are of .*; standardise the inputs, x"),
        # The best weights are 0, and the data are not to blame.
        (nn.Linear(1, 1).double(), torch.tensor([[1.0], [1.0], [-1.0], [-1.0]]), torch.tensor([[1.0], [-1.0]] * 2), {},
         r"a constant has the same loss, 1: the data are of the usual size[^;]*$"),
    ],
    ids=["targets", "bends", "classes", "no relation"],
)  # fmt: skip
def test_what_a_run_has_not_learnt(model, x, y, options, words):
    note = ended(model, x.double(), y.double() if y.is_floating_point() else y, **options).note
    assert re.search(words, note), note


@pytest.mark.parametrize("scale", [1.0, 1e6])
def test_a_good_fit_has_nothing_to_explain(scale):
    """Of inputs of any size."""
    x = scale * torch.randn(50, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    step = ended(nn.Linear(2, 1).double(), x, x @ torch.tensor([[2.0], [-1.0]]).double() / scale + 1)
    assert step.note == "converged: no decrease is left that could be told from the rounding of the loss"


def test_residuals_are_no_outputs():
    """A constant 0 in their place would be as good, and says nothing."""

    class Residuals(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.ones(1, dtype=torch.float64))

        def forward(self, x: Tensor) -> Tensor:
            return self.w * x - torch.tensor([[1.0], [3.0], [-2.0]])

    x = torch.tensor([[1.0], [-1.0], [1.0]]).double()
    assert "constant" not in ended(Residuals(), x, x + torch.arange(3)[:, None], "residual").note


def test_nothing_changes_by_it_and_it_is_said_once_only():
    """Buffers and random numbers are as before; one forward pass more, in the step that converges first."""

    class Counted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.calls = nn.Linear(1, 1).double(), 0
            self.register_buffer("seen", torch.zeros(()))

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            self.seen += 1
            return self.inner(x)

    model = Counted()
    opt, calls, seen, state = mq.LM(model, "mse"), [], [], torch.get_rng_state()
    x = torch.tensor([[1.0], [1.0], [-1.0], [-1.0]]).double()
    y = torch.tensor([[1.0], [-1.0], [1.0], [-1.0]]).double()
    while len(calls) < 3:
        before, counted = model.calls, float(model.seen)
        step = opt.step(x, y)
        if step.converged:
            calls.append(model.calls - before)
            seen.append(float(model.seen) - counted)
            assert "a constant has the same loss" in step.note
        assert opt._state.steps < 100
    assert calls[0] == calls[1] + 1 == calls[2] + 1
    assert set(seen) <= {0.0, 1.0}
    assert torch.equal(torch.get_rng_state(), state)


def test_outputs_that_are_too_many_to_keep(monkeypatch):
    """Then they are not compared with a constant; what the first batch shows is said all the same."""
    monkeypatch.setattr("marquardt.diagnosis.ROOM", 60)
    note = ended(network(), 1e6 * X.double(), Y.double(), batches=2).note
    assert "constant" not in note
    assert "100% of the outputs of tanh are saturated" in note


def test_a_model_that_differentiates_itself():
    """It needs a graph of its own, also to be asked."""

    class Slope(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = network()

        def forward(self, x: Tensor) -> Tensor:
            x = x.detach().requires_grad_()
            (slope,) = torch.autograd.grad(self.inner(x).sum(), x, create_graph=True)
            return slope

    note = ended(Slope(), 1e6 * X.double(), Y.double(), acceptance=mq.Decrease()).note
    assert "the inputs are of the size 6.1e+05" in note
    assert "of the outputs of tanh are saturated" in note
