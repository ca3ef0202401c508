"""What torch would differentiate, or map, through a fit: refused, with a way out that works."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.func import functional_call, grad, hessian, jacfwd, jacrev, jvp, vmap

import marquardt as mq

X = torch.linspace(0, 4, 20, dtype=torch.float64)
Y = 2 * torch.exp(-X) + 0.3 + 0.01 * torch.sin(9 * X)
START = torch.ones(3, dtype=torch.float64)
Fit = Callable[[Tensor], Tensor]


def decay(x: Tensor, a: Any, b: Any, c: Any) -> Tensor:
    return a * torch.exp(-b * x) + c


def dual(fit: Fit) -> None:
    with forward_ad.dual_level():
        fit(forward_ad.make_dual(Y, torch.ones_like(Y)))


FITS: dict[str, Fit] = {
    "ydata": lambda y: mq.curve_fit(decay, X, y).popt,
    "xdata": lambda y: mq.curve_fit(decay, y - Y + X, Y).popt,
    "sigma": lambda y: mq.curve_fit(decay, X, Y, sigma=y - Y + 1).popt,
    "p0": lambda y: mq.curve_fit(decay, X, Y, START * y[0]).popt,
    "list": lambda y: torch.as_tensor(mq.curve_fit(decay, X, Y, [1.0, y[0], 1.0]).popt),
    "weights": lambda y: mq.curve_fit(decay, X, Y, weights=y).popt,
    "captured by f": lambda y: mq.curve_fit(lambda x, a, b: y[0] * a * torch.exp(-b * x), X, Y).popt,
    "args": lambda y: mq.least_squares(lambda p, y: decay(X, *p) - y, START, args=(y,)).x,
    "kwargs": lambda y: mq.least_squares(lambda p, y: decay(X, *p) - y, START, kwargs={"y": y}).x,
    "captured": lambda y: mq.least_squares(lambda p: decay(X, *p) - y, START).x,
    "captured beside arrays": lambda y: torch.as_tensor(mq.least_squares(lambda p: decay(X, *p) - y, [1, 1, 1]).x),
    "batched": lambda y: mq.curve_fit(decay, X, torch.stack([y, Y]), batched=True).popt,
    "captured, batched": lambda y: mq.least_squares(lambda p: decay(X, *p) - y, START.expand(2, 3), batched=True).x,
    "predict": lambda y: mq.curve_fit(decay, X, Y).predict(y),
    "band": lambda y: mq.curve_fit(decay, X, Y).confidence_band(y)[1],
}
TRANSFORMS: dict[str, Callable[[Fit], Any]] = {
    "jacrev": lambda fit: jacrev(fit)(Y),
    "jacfwd": lambda fit: jacfwd(fit)(Y),
    "grad": lambda fit: grad(lambda y: fit(y).sum())(Y),
    "hessian": lambda fit: hessian(lambda y: fit(y).sum())(Y),
    "jvp": lambda fit: jvp(fit, (Y,), (Y,)),
    "vmap of grad": lambda fit: vmap(grad(lambda y: fit(y).sum()))(torch.stack([Y, Y])),
    "functional": lambda fit: torch.autograd.functional.jacobian(fit, Y),
    "functional, forward": lambda fit: torch.autograd.functional.jacobian(
        fit, Y, vectorize=True, strategy="forward-mode"
    ),
    "dual numbers": dual,
    "a leaf": lambda fit: fit(Y.clone().requires_grad_()),
    "not a leaf": lambda fit: fit(1 * Y.clone().requires_grad_()),
}


@pytest.mark.parametrize("transform", TRANSFORMS)
@pytest.mark.parametrize("fit", FITS)
def test_a_derivative_through_a_fit_is_refused(fit: str, transform: str):
    with pytest.raises(ValueError, match=r"no derivative.*detach"):
        TRANSFORMS[transform](FITS[fit])


@pytest.mark.parametrize("transform", [name for name in TRANSFORMS if "vmap" not in name])
@pytest.mark.parametrize("fit", ["ydata", "captured", "captured, batched"])
def test_the_way_out_works(fit: str, transform: str):
    seen = []
    TRANSFORMS[transform](lambda y: seen.append(FITS[fit](y.detach())) or y)
    assert torch.allclose(seen[0].detach() + 0, FITS[fit](Y))
    with torch.no_grad():
        assert torch.equal(FITS[fit](Y.clone().requires_grad_()), FITS[fit](Y))


AS_ARRAY = X.numpy(), Y.numpy()


def numpy_residuals(p: Any, y: Any) -> Any:
    return p[0] * np.exp(-p[1] * AS_ARRAY[0]) + p[2] - np.asarray(y)


DONE = mq.curve_fit(decay, *AS_ARRAY)
# Arrays of what is differentiated, and results that would be arrays, of a function of tensors that are detached.
ARRAYS: dict[str, Fit] = {
    "captured": lambda y: mq.least_squares(lambda p: numpy_residuals(p, y), [1.0, 1, 1]).x,
    "captured, of tensors": lambda y: mq.least_squares(lambda p: numpy_residuals(p.numpy(), y), START).x,
    "captured, detached": lambda y: mq.least_squares(lambda p: numpy_residuals(p, y.detach()), [1.0, 1, 1]).x,
    "captured, curve_fit": lambda y: mq.curve_fit(lambda x, a: a * np.asarray(y), *AS_ARRAY).popt,
    "result": lambda y: mq.least_squares(lambda p: decay(X, *p) - y.detach(), [1.0, 1, 1]).x,
    "batched": lambda y: mq.least_squares(lambda p: decay(X, *p) - y.detach(), [[1.0, 1, 1]], batched=True).x,
    "args": lambda y: mq.least_squares(lambda p, y: decay(X, *p) - y, [1, 1, 1], args=(y.detach(),)).x,
    "weights": lambda y: mq.least_squares(lambda p: decay(X, *p) - Y, [1, 1, 1], weights=y.detach()).x,
    "predict": lambda y: DONE.predict(y.detach()),
    "band": lambda y: DONE.confidence_band(AS_ARRAY[0])[0],
}


@pytest.mark.parametrize("transform", ["jacrev", "jacfwd", "grad", "hessian", "jvp"])
@pytest.mark.parametrize("fit", ARRAYS)
def test_arrays_inside_a_transform(fit: str, transform: str):
    """Of tensors that torch.func wraps there are none, detached or not."""
    with pytest.raises(ValueError, match=r"inside a torch\.func transform.*no derivative.*outside.*x0"):
        TRANSFORMS[transform](lambda y: torch.as_tensor(ARRAYS[fit](y)))


@pytest.mark.parametrize("fit", FITS)
def test_vmap_is_refused_for_batched(fit: str):
    with pytest.raises(ValueError, match=r"vmap.*batched=True"):
        vmap(FITS[fit])(torch.stack([Y, Y]))


def network() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(1, 4), torch.nn.Tanh(), torch.nn.Linear(4, 1)).double()


def test_the_weights_of_a_network_inside_are_constants():
    net = network()
    scaled = lambda x, a, b: a * net(x[:, None])[:, 0] + b  # noqa: E731
    free, frozen = (
        [
            mq.curve_fit(scaled, X, Y).popt,
            mq.curve_fit(scaled, X, Y.expand(2, -1), batched=True).popt[0],
            torch.as_tensor(mq.least_squares(lambda p: scaled(X, *p) - Y, [1.0, 1.0]).x),
        ]
        for _ in (net, net.requires_grad_(False))
    )
    assert all(torch.equal(one, other) and not one.requires_grad for one, other in zip(free, frozen, strict=True))


def test_outputs_of_a_network_are_data():
    net = network()
    outputs = net(X[:, None])[:, 0]
    for f in (lambda p: p[0] * outputs + p[1] - Y, lambda p: p[0] * X - outputs):
        with pytest.raises(ValueError, match="a tensor that fun uses requires grad"):
            mq.least_squares(f, [1.0, 1.0])
    weights = dict(net.named_parameters())
    scaled = lambda w, p: p * functional_call(net, w, (X[:, None],))[:, 0]  # noqa: E731
    with pytest.raises(ValueError, match="no derivative"):
        grad(lambda w: mq.least_squares(lambda p: scaled(w, p) - Y, torch.ones(1)).x[0])(weights)


def test_a_function_that_writes_to_parameters_is_fitted():
    """It needs no_grad, under which it has always been called."""
    layer = torch.nn.Linear(1, 1).double()

    def residuals(p: Tensor) -> Tensor:
        layer.weight.copy_(p[0].view(1, 1))
        layer.bias.copy_(p[1:])
        return layer(X[:, None])[:, 0] - 2 * X - 1

    assert mq.least_squares(residuals, [0.5, 0.5]).x == pytest.approx([2, 1])
