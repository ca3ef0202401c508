"""Linearisation: f, g and the rows J̃ against the reference, and nothing left behind."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

import marquardt as mq
from support import reference
from support.cases import build
from support.linearized import EVERY_CASE, REPRESENTATIONS, linearize
from support.reference import error
from support.steps import lm, problem
from support.unchanged import everything


@pytest.mark.usefixtures("double")
def test_a_step_lets_go_of_its_rows():
    """At once, not when Python's collector comes round: on a GPU that is too late."""
    import gc
    import weakref

    from marquardt.jacobian.linearization import Linearization

    model, x, y = problem()
    opt, seen = lm(model, curvature=mq.Gram()), []
    original = Linearization.close

    def close(self: Linearization) -> None:
        seen.extend(weakref.ref(part) for part in (self.whole(), *self.whole().blocks))
        original(self)

    gc.disable()
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Linearization, "close", close)
            opt.step(x, y)
        assert seen
        assert all(ref() is None for ref in seen)
    finally:
        gc.enable()


@EVERY_CASE
@pytest.mark.parametrize("chunk", [None, 2])
def test_exact(name, chunk):
    """f, and J̃ᵀJ̃ = G."""
    lin, q = linearize(build(name), chunk=chunk), reference.quadratic(*build(name))
    assert isinstance(lin.loss, float)
    assert lin.loss == pytest.approx(q.f.item(), rel=1e-12)
    J = lin.rows()
    assert J.shape[1] == len(q.g)
    assert not J.requires_grad  # a graph behind them would keep every activation of the pass alive
    assert error(J.T @ J, q.G) < 1e-10


LEFT_ALONE = [
    *["mlp_elu", "conv_batchnorm_classifier", "frozen_parameters", "chosen_parameters", "weight_norm", "spectral_norm"],
    *["tied_linears", "transformer_encoder_layer", "lstm", "pinn", "custom_scale", "embedding_padding"],
]


def values(model: nn.Module) -> dict[str, Tensor]:
    grads = {f"{k}.grad": p.grad for k, p in model.named_parameters() if p.grad is not None}
    return copy.deepcopy({**model.state_dict(), **grads})


@pytest.mark.parametrize("name", LEFT_ALONE)
@REPRESENTATIONS
def test_model_is_left_alone(name, curvature):
    p = build(name)
    for i, parameter in enumerate(p.model.parameters()):  # some have a gradient, some do not
        if i % 2 == 0:
            parameter.grad = torch.randn_like(parameter)
    p.model.register_forward_hook(lambda *_: None)
    before, numbers = everything(p.model), values(p.model)
    C = curvature.represent(linearize(p, chunk=curvature.chunk))
    C.diagonal()
    C.newton(torch.tensor(0.1).double())
    assert everything(p.model) == before
    for k, v in values(p.model).items():
        assert torch.equal(v, numbers[k]), k


@REPRESENTATIONS
def test_exception_in_forward(curvature):
    """It reaches the user as it is, and nothing stays on the model."""

    class Fragile(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            raise ZeroDivisionError("in the middle of forward")

    model = nn.Sequential(nn.Linear(3, 4), nn.Dropout(0.5), Fragile(), nn.Linear(4, 2)).double()
    x, y = torch.randn(4, 3).double(), torch.randn(4, 2).double()
    before, numbers = everything(model), values(model)
    with pytest.raises(ZeroDivisionError, match="in the middle of forward"):
        curvature.represent(mq.linearize(model, "mse", x, y, params=model[0].parameters(), chunk=curvature.chunk))
    assert everything(model) == before
    for k, v in values(model).items():
        assert torch.equal(v, numbers[k]), k
    model[2] = nn.ReLU()  # and the model works
    assert torch.isfinite(curvature.represent(mq.linearize(model, "mse", x, y)).gradient).all()


def test_user_hooks_keep_working():
    """A forward hook that changes the output is part of the model."""
    p = build("mlp_elu")
    handle = p.model[0].register_forward_hook(lambda module, inputs, output: 2 * output)
    q = reference.quadratic(*p)
    J = linearize(p).rows()
    assert error(J.T @ J, q.G) < 1e-10
    handle.remove()


def test_parameters_are_read_when_linearised():
    """Two linearisations of one model, before and after a change, are two."""
    p = build("mlp_elu")
    first = mq.Dense().represent(linearize(p))
    g = first.gradient.clone()
    with torch.no_grad():
        for parameter in p.model.parameters():
            parameter.mul_(1.5)
    second = mq.Dense().represent(linearize(p))
    assert torch.equal(first.gradient, g)
    assert error(second.gradient, reference.quadratic(*p).g) < 1e-10
