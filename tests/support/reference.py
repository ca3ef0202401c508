"""The plain computation everything is tested against: dense, float64, the whole batch at once.

J = ∂z/∂θ comes from one Jacobian of the batched output (nothing is assumed about samples), H = ∂²f/∂z² from
`torch.func.hessian` of torch's own losses; then G = JᵀHJ and g = Jᵀ∂f/∂z. Nothing here imports marquardt.
"""

from __future__ import annotations

import copy
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call, grad, hessian, jacrev

NAMED: dict[str, nn.Module] = {
    "mse": nn.MSELoss(),
    "squared_error": nn.MSELoss(),
    "cross_entropy": nn.CrossEntropyLoss(),
    "bce": nn.BCEWithLogitsLoss(),
    "bce_with_logits": nn.BCEWithLogitsLoss(),
    "huber": nn.HuberLoss(),
    "smooth_l1": nn.SmoothL1Loss(),
    "poisson": nn.PoissonNLLLoss(),
}


class Quadratic(NamedTuple):
    """The local model f + gᵀδ + ½δᵀGδ of one batch."""

    z: Tensor  # (N, …) outputs
    f: Tensor  # ()
    g: Tensor  # (n,)
    G: Tensor  # (n, n)
    J: Tensor  # (Z, n), Z = z.numel()

    def diagonal(self) -> Tensor:
        return self.G.diagonal()  # (n,)

    def damped(self, A: Tensor | float) -> Tensor:
        """H = G + diag A."""
        return self.G + torch.as_tensor(A, dtype=self.g.dtype).expand_as(self.g).diag()  # (n, n)

    def step(self, A: Tensor | float) -> Tensor:
        """δ = −(G + diag A)⁻¹g."""
        return -torch.linalg.solve(self.damped(A), self.g)  # (n,)


def quadratic(
    model: nn.Module, loss: Any, x: Any, y: Any, weight: Any = None, params: Any = None, rows: str = "exact",
    traced: bool = True,
) -> Quadratic:  # fmt: skip
    J, z = (jacobian if traced else jacobian_by_rows)(model, trainable(model, params), x)  # (Z, n)
    f = objective(loss, z, y, weight)
    g = J.T @ grad(lambda z: objective(loss, z, y, weight))(z).reshape(-1)  # (n,)
    G = J.T @ output_hessian(loss, z, y, weight) @ J if rows == "exact" else empirical(loss, z, y, weight, J)
    return Quadratic(z, f, g, G, J)


def error(found: Tensor, expected: Tensor) -> float:
    """‖found − expected‖ / ‖expected‖, in float64; NaN and a difference from 0 are infinitely wrong."""
    assert found.shape == expected.shape, f"{tuple(found.shape)} instead of {tuple(expected.shape)}"
    difference, size = (found.double() - expected.double()).norm().item(), expected.double().norm().item()
    if difference == 0:
        return 0.0
    return difference / size if size > 0 and difference == difference else float("inf")


# ---- the model


def trainable(model: nn.Module, params: Any = None) -> dict[str, Tensor]:
    """The parameters that train, in the model's order, shared ones once."""
    chosen = None if params is None else {id(p) for p in params}
    return {k: p for k, p in model.named_parameters() if p.requires_grad and (chosen is None or id(p) in chosen)}


def split(x: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if isinstance(x, dict):
        return (), x
    return (tuple(x) if isinstance(x, (tuple, list)) else (x,)), {}


def call(model: nn.Module, x: Any) -> Tensor:
    args, kwargs = split(x)
    return model(*args, **kwargs)


def jacobian(model: nn.Module, params: dict[str, Tensor], x: Any) -> tuple[Tensor, Tensor]:
    """J = ∂z/∂θ (Z, n) and z, both of one and the same forward (of the same random numbers)."""
    state = torch.get_rng_state()
    try:
        return jacobian_traced(model, params, x)
    except RuntimeError:  # torch.func cannot follow it: LSTM, a forward that differentiates, RReLU
        torch.set_rng_state(state)
        return jacobian_by_rows(model, params, x)


def jacobian_traced(model: nn.Module, params: dict[str, Tensor], x: Any) -> tuple[Tensor, Tensor]:
    twin = copy.deepcopy(model)  # functional_call leaves a module with two names in pieces

    def outputs(theta: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        z = functional_call(twin, theta, *split(x))
        return z, z

    J, z = jacrev(outputs, has_aux=True)({k: p.detach() for k, p in params.items()})
    return torch.cat([J[k].reshape(z.numel(), -1) for k in params], dim=1).detach(), z.detach()


def jacobian_by_rows(model: nn.Module, params: dict[str, Tensor], x: Any) -> tuple[Tensor, Tensor]:
    z = call(model, x)
    theta = list(params.values())
    rows = [torch.autograd.grad(zk, theta, retain_graph=True, materialize_grads=True) for zk in z.reshape(-1)]
    return torch.stack([torch.cat([r.reshape(-1) for r in row]) for row in rows]), z.detach()


# ---- the loss


def elements(loss: Any, z: Tensor, y: Any) -> tuple[Tensor, Tensor]:
    """Unreduced losses ℓ and what each of them counts in torch's mean, κ: torch's value is Σℓ/Σκ."""
    match NAMED.get(loss, loss) if isinstance(loss, str) else loss:
        case "residual":
            return z**2, torch.ones_like(z)
        case nn.MSELoss():
            return F.mse_loss(z, y, reduction="none"), torch.ones_like(z)
        case nn.BCEWithLogitsLoss(pos_weight=a):
            return F.binary_cross_entropy_with_logits(z, y, pos_weight=a, reduction="none"), torch.ones_like(z)
        case nn.HuberLoss(delta=delta):
            return F.huber_loss(z, y, delta=delta, reduction="none"), torch.ones_like(z)
        case nn.SmoothL1Loss(beta=beta):
            return F.smooth_l1_loss(z, y, beta=beta, reduction="none"), torch.ones_like(z)
        case nn.PoissonNLLLoss():
            return F.poisson_nll_loss(z, y, log_input=True, full=False, reduction="none"), torch.ones_like(z)
        case nn.CrossEntropyLoss(weight=c, ignore_index=ignore, label_smoothing=smooth):
            l = F.cross_entropy(z, y, weight=c, ignore_index=ignore, label_smoothing=smooth, reduction="none")
            if y.is_floating_point():
                return l, torch.ones_like(l)
            kept = y != ignore
            c = z.new_ones(z.shape[1]) if c is None else c
            return l, c[y.where(kept, 0)] * kept
    raise TypeError(f"no reference for the loss {loss!r}")


def per_sample(weight: Tensor | None, like: Tensor) -> Tensor:
    return like.new_ones(()) if weight is None else weight.reshape(-1, *[1] * (like.dim() - 1))


def normaliser(loss: Any, z: Tensor, y: Any, weight: Tensor | None) -> Tensor:
    """Σwκ for a mean, 1 for a sum."""
    l, kappa = elements(loss, z, y)
    return l.new_ones(()) if getattr(loss, "reduction", "mean") == "sum" else (per_sample(weight, kappa) * kappa).sum()


def objective(loss: Any, z: Tensor, y: Any, weight: Tensor | None) -> Tensor:
    """f = Σwℓ / Σwκ."""
    l, _ = elements(loss, z, y)
    return (per_sample(weight, l) * l).sum() / normaliser(loss, z, y, weight)


def output_hessian(loss: Any, z: Tensor, y: Any, weight: Tensor | None) -> Tensor:
    """∂²f/∂z² (Z, Z); for Huber the majoriser min(1, δ/|r|), which keeps curvature where the loss itself has none."""
    loss = NAMED.get(loss, loss) if isinstance(loss, str) else loss
    if isinstance(loss, (nn.HuberLoss, nn.SmoothL1Loss)):
        delta, unit = (loss.delta, 1.0) if isinstance(loss, nn.HuberLoss) else (loss.beta, loss.beta)
        h = (delta / (z - y).abs()).clamp(max=1) / unit
        return (per_sample(weight, h) * h).reshape(-1).diag() / normaliser(loss, z, y, weight)
    return hessian(lambda z: objective(loss, z, y, weight))(z).reshape(z.numel(), z.numel())


def empirical(loss: Any, z: Tensor, y: Any, weight: Tensor | None, J: Tensor) -> Tensor:
    """G = (1/N) Σ ∇fᵢ∇fᵢᵀ, with sample weights Σ wᵢ∇fᵢ∇fᵢᵀ / Σwᵢ."""
    N = z.shape[0]
    slopes = jacrev(lambda z: elements(loss, z, y)[0].reshape(N, -1).sum(1))(z).reshape(N, -1)  # (N, Z)
    grads = slopes @ J  # (N, n)
    w = z.new_ones(N) if weight is None else weight
    return grads.T @ (w[:, None] * grads) / normaliser(loss, z, y, weight)


# ---- the step


def adaptive_momentum(H: Tensor, g: Tensor, previous: Tensor, xi: float, dP: float) -> Tensor:
    """δP·(ξe₁ + √(1−ξ²)e₂), both of H-length 1: e₁ along −H⁻¹g, e₂ along the previous step made H-orthogonal to e₁."""

    def unit(d: Tensor) -> Tensor:
        return d / (d @ H @ d).sqrt()

    e1 = unit(-torch.linalg.solve(H, g))
    e2 = unit(previous - (e1 @ H @ previous) * e1)
    return dP * (xi * e1 + (1 - xi**2) ** 0.5 * e2)
