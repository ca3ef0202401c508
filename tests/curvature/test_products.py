"""Products with G by every way there is, against the dense reference."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.autograd.function import once_differentiable

import marquardt as mq
from marquardt.curvature.matrix_free import by_double_backward, by_forward_mode, by_rows
from marquardt.jacobian.linearization import Trials
from support import reference
from support.cases import Problem, build, mlp
from support.linearized import coupled, expected, linearize, represent, scalar
from support.reference import error

f64 = torch.float64


def vectors(count: int, q: reference.Quadratic) -> torch.Tensor:
    return torch.randn(count, len(q.g), dtype=f64)


# ---- products


@pytest.mark.parametrize("name", ["mlp_elu", "batch_norm_2d", "transformer_encoder_layer", "pinn", "lstm", "embedding"])
def test_products_after_a_trial(name):
    """The graph of a chunk is made again where the weights have been somewhere else in between."""
    C, q = represent(build(name)), expected(name)
    v = vectors(1, q)[0]
    C @ v
    Trials(C.lin).loss(v, 0.1)
    assert error(C @ v, q.G @ v) < 1e-9
    C.lin.position.move()
    assert error(C @ v, q.G @ v) < 1e-9


# ---- models


def test_batch_norm_in_train_mode():
    p = coupled()
    q = reference.quadratic(*p)
    assert (q.J.view(6, 3, -1)[0] - reference.quadratic(*p._replace(x=p.x[:2], y=p.y[:2])).J.view(2, 3, -1)[0]).any()
    C = represent(p)
    for v in vectors(3, q):
        assert error(C @ v, q.G @ v) < 1e-9
    assert error(-C.newton(scalar(1e-2)), q.step(1e-2)) < 1e-6


def test_batch_norm_buffers_advance_once_per_accepted_step():
    p = coupled()
    once = copy.deepcopy(p.model)
    once(p.x)
    opt = mq.presets.hessian_free(p.model, p.loss)
    step = opt.step(p.x, p.y)
    assert step.accepted
    assert error(p.model[1].running_var, once[1].running_var) < 1e-12
    assert p.model[1].num_batches_tracked == 1
    losses = [opt.step(p.x, p.y).new_loss for _ in range(20)]
    assert losses[-1] < 0.5 * step.loss


@pytest.mark.parametrize("layer", [nn.Dropout(0.5), nn.RReLU()], ids=["masks", "slopes"])
def test_random_layers_draw_the_same_numbers(layer):
    model = nn.Sequential(nn.Linear(3, 8), layer, nn.Tanh(), nn.Linear(8, 2)).double()
    p = Problem(model, "mse", torch.randn(5, 3, dtype=f64), torch.randn(5, 2, dtype=f64))
    state = torch.get_rng_state()
    dense = mq.Dense().represent(linearize(p)).G
    torch.set_rng_state(state)
    C = represent(p)
    v = torch.randn(len(dense), dtype=f64)
    assert error(C @ v, dense @ v) < 1e-9
    Trials(C.lin).loss(v, 0.1)
    assert error(C @ v, dense @ v) < 1e-9


class OnceOnly(torch.autograd.Function):
    """x³, differentiable once; with a rule for forward mode."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        ctx.save_for_forward(x)
        return x**3

    @staticmethod
    @once_differentiable
    def backward(ctx, g):
        return 3 * ctx.saved_tensors[0] ** 2 * g

    @staticmethod
    def jvp(ctx, t):
        return 3 * ctx.saved_tensors[0] ** 2 * t


class Detached(torch.autograd.Function):
    """x³ with a backward pass that autograd takes for a constant, and no rule for forward mode."""

    @staticmethod
    def forward(ctx, x):
        ctx.slope = 3 * x.detach() ** 2
        return x**3

    @staticmethod
    def backward(ctx, g):
        return (ctx.slope * g.detach()).detach()


class Cubed(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.first, self.head, self.function = nn.Linear(3, 4).double(), nn.Linear(4, 2).double(), function

    def forward(self, x):
        return self.head(self.function.apply(self.first(x)) if self.function else self.first(x) ** 3)


@pytest.mark.parametrize(("function", "way"), [(OnceOnly, by_forward_mode), (Detached, by_rows)])
@pytest.mark.parametrize("chunk", [None, 2])
def test_operations_that_are_differentiable_once(function, way, chunk):
    model = Cubed(function)
    x, y = torch.randn(5, 3, dtype=f64), torch.randn(5, 2, dtype=f64)
    C = represent(Problem(model, "mse", x, y), chunk=chunk)
    model.function = None
    q = reference.quadratic(model, "mse", x, y)
    model.function = function
    v = vectors(1, q)[0]
    assert error(C @ v, q.G @ v) < 1e-9
    assert C._way is way
    assert error(-C.newton(scalar(0.1)), q.step(0.1)) < 1e-6
    opt = mq.presets.hessian_free(model, "mse")
    assert opt.step(x, y).accepted


@pytest.mark.parametrize(
    "name", ["mlp_elu", "batch_norm_1d", "conv2d", "embedding", "pinn", "custom_scale", "tied_linears"]
)
def test_every_way_gives_the_same(name):
    p, q = build(name), expected(name)
    v = vectors(1, q)[0]
    for way in (by_double_backward, by_forward_mode, by_rows):
        C = represent(p)
        C._way, C._open = way, None
        C.lin.chunk = len(q.z)  # so that it is linearised again
        assert error(C @ v, q.G @ v) < 1e-9, way.__name__


def test_a_coupled_operation_that_is_differentiable_once_is_refused():
    model = nn.Sequential(Cubed(Detached), nn.BatchNorm1d(2).double())
    with pytest.raises(ValueError, match=r"no product Gv.*by forward mode:.*by rows: .*couples the samples"):
        represent(Problem(model, "mse", torch.randn(5, 3, dtype=f64), torch.randn(5, 2, dtype=f64)))


class NeedsGrad(nn.Module):
    """A residual u' that is computed without asking for gradients to be on."""

    def __init__(self):
        super().__init__()
        self.u = mlp(1, 6, 1).double()

    def forward(self, x):
        x = x.detach().requires_grad_(True)
        (slope,) = torch.autograd.grad(self.u(x).sum(), x, create_graph=True)
        return slope - x.detach().cos()


@pytest.mark.parametrize("precondition", [0.75, None])
def test_trials_of_a_model_that_differentiates_itself(precondition):
    opt = mq.presets.hessian_free(NeedsGrad(), "residual", curvature=mq.MatrixFree(precondition=precondition))
    x = torch.linspace(-2, 2, 20, dtype=f64)[:, None]
    steps = [opt.step(x) for _ in range(30)]
    assert steps[-1].new_loss < 0.2 * steps[0].loss
