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


def ended(model: nn.Module, x: Tensor, y: Tensor, loss: object = "mse", steps: int = 300, **parts: object) -> mq.Step:
    """The first step that says that the run has converged"""
    opt = mq.LM(model, loss, **parts)
    for _ in range(steps):
        step = opt.step(x, y)
        if step.converged:
            return step
    raise AssertionError(f"{steps} steps without an end: {step}")


@pytest.mark.parametrize(
    ("x", "size"), [(1e6 * X, "6.1e+05"), (1990 + 30 * X, "2e+03"), (torch.cat([X, 1e6 * (1 + X)], 1), "1.6e+06")]
)
@pytest.mark.parametrize(("activation", "name"), [(nn.Tanh, "tanh"), (nn.Sigmoid, "sigmoid")])
def test_inputs_that_saturate_the_first_layer(x, size, activation, name):
    note = ended(network(activation, x.shape[1]), x.double(), Y.double()).note
    assert note.startswith("converged: ")
    assert (
        f"a constant has the same loss, {float(Y.double().var(correction=0)):.4g}: the inputs are of the size {size}"
        in note
    )
    assert re.search(rf"\d+% of the outputs of {name} are saturated; standardise the inputs, x = ", note)


def test_targets_far_from_zero():
    """The first step goes so far that the hidden units saturate."""
    note = ended(network(), 3 * (X - 0.5).double(), 1e5 + Y.double()).note
    assert re.search(r"the targets are of the size 1e\+05, \d+% .* saturated; standardise the targets, y = ", note)


def test_units_that_bend_nowhere():
    note = ended(network(nn.ReLU), 1e6 * X.double(), Y.double(), acceptance=mq.Decrease(), momentum=None).note
    assert "the inputs are of the size 6.1e+05, 100% of the units of relu bend nowhere within the data" in note


def test_classes_have_no_size():
    labels = (X[:, 0] > 0.5).long() + (X[:, 0] > 0.7).long()
    note = ended(network(outputs=3), 1e6 * X.double(), labels, "cross_entropy").note
    assert re.search(r"a constant has the same loss, .*: the inputs are of .*; standardise the inputs, x", note)


def test_inputs_that_say_nothing_of_the_targets():
    """The best weights are 0, and the data are not to blame."""
    x, y = torch.tensor([[1.0], [1.0], [-1.0], [-1.0]]).double(), torch.tensor([[1.0], [-1.0], [1.0], [-1.0]]).double()
    note = ended(nn.Linear(1, 1).double(), x, y).note
    assert "a constant has the same loss, 1: the data are of the usual size" in note
    assert "standardise" not in note


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


def test_over_batches():
    """Sorted by their targets, so that each batch alone has nearly a constant."""
    x, y = 1e6 * X.double(), Y.double()
    opt = mq.LM(network(), "mse")
    for _ in range(300):
        step = opt.step_over([(x[:50], y[:50]), (x[50:], y[50:])])
        if step.converged:
            break
    assert f"a constant has the same loss, {float(y.var(correction=0)):.4g}" in step.note


def test_outputs_that_are_too_many_to_keep(monkeypatch):
    """Then they are not compared with a constant; what the first batch shows is said all the same."""
    monkeypatch.setattr("marquardt.diagnosis.ROOM", 60)
    x, opt = 1e6 * X.double(), mq.LM(network(), "mse")
    for _ in range(300):
        step = opt.step_over([(x[:50], Y[:50].double()), (x[50:], Y[50:].double())])
        if step.converged:
            break
    assert "constant" not in step.note
    assert "100% of the outputs of tanh are saturated" in step.note


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
