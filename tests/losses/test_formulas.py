"""Every loss: its value is that of torch or of a density, its slope and its roots are the derivatives of its value."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, ClassVar, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.func import grad, hessian

from marquardt.losses import (
    AbsoluteError,
    BinaryCrossEntropy,
    BinaryProbabilities,
    CrossEntropy,
    Gamma,
    GaussianNLL,
    Hinge,
    Huber,
    KLDivergence,
    Loss,
    NegativeBinomial,
    NegativeLogLikelihood,
    Ordinal,
    Poisson,
    Quantile,
    Residual,
    SoftMargin,
    SquaredError,
    StudentT,
    resolve,
)
from support.losses import (
    CLASS_WEIGHT,
    IMAGE,
    MATRIX,
    VECTOR,
    blocks,
    close,
    conforms,
    f64,
    fraction,
    image,
    labels,
    majorises,
    normal,
    some_ignored,
)

# Outputs and targets.


def wide(shape):
    return 2 * normal(shape)


def inner(shape):
    return 0.1 + 0.8 * fraction(shape)


def logs(shape):
    return normal(shape).log_softmax(1)


def rising(shape):
    return (0.1 + normal(shape).abs()).cumsum(1) - 1.5


def with_variances(shape):
    mean, spread = normal(shape).chunk(2, 1)
    return torch.cat((mean, spread.exp()), 1)


def binary(shape):
    return torch.randint(2, shape).to(f64)


def signs(shape):
    return 2 * binary(shape) - 1


def counts(shape):
    return torch.randint(5, shape).to(f64)


def positive(shape):
    return 0.1 + 3 * fraction(shape)


def probabilities(shape):
    return fraction(shape).softmax(1)


def masses(shape):
    """Not normalised, with zeros, and nothing at all for one sample: torch takes these as they are."""
    q = fraction(shape) * torch.tensor([1.0, 0.0, 2.0], dtype=f64).reshape(-1, *[1] * (len(shape) - 2))
    q[2] = 0
    return q


def first_half(shape):
    return normal((shape[0], shape[1] // 2, *shape[2:]))


def grades(shape):
    return torch.arange(4) % (shape[1] + 1)


@dataclass(frozen=True, kw_only=True, eq=False)
class Doubled(CrossEntropy):
    """A root of its own: twice the curvature, in C columns instead of C − 1."""

    majorises: ClassVar[bool] = True

    def factors(self, z: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        S, u = super().factors(z, y)
        return torch.cat([S, torch.zeros_like(S[..., :1])], -1) * 2**0.5, torch.cat([u, u[..., :1]], -1) / 2**0.5


class Case(NamedTuple):
    loss: Loss
    module: nn.Module | None = None  # with the same value
    outputs: Callable[[tuple[int, ...]], Tensor] = wide
    targets: Callable[[tuple[int, ...]], Tensor] = normal
    shapes: tuple[tuple[int, ...], ...] = (VECTOR, MATRIX, IMAGE)


W, WIDE = CLASS_WEIGHT, CLASS_WEIGHT[:, None, None]
SMOOTH: dict[str, Any] = {"label_smoothing": 0.1}
CLASSES: dict[str, Any] = {"shapes": (MATRIX, IMAGE)}
HALVES: dict[str, Any] = {"targets": first_half, "shapes": ((4, 2), (4, 6), (4, 4, 3))}
CASES = {
    "mse": Case(SquaredError(), nn.MSELoss()),
    "residual": Case(Residual()),
    "l1": Case(AbsoluteError(), nn.L1Loss()),
    "smooth l1, 0": Case(AbsoluteError(), nn.SmoothL1Loss(beta=0.0)),
    "smooth l1": Case(Huber(delta=0.8, factor=1 / 0.8), nn.SmoothL1Loss(beta=0.8)),
    "huber": Case(Huber(delta=0.8), nn.HuberLoss(delta=0.8)),
    "huber, all squared": Case(Huber(delta=100.0), nn.HuberLoss(delta=100.0)),
    "quantile": Case(Quantile()),
    "quantile, 0.9": Case(Quantile(0.9, 0.2)),
    "quantiles": Case(Quantile([0.1, 0.5, 0.8], 0.2), shapes=(MATRIX,)),
    "student": Case(StudentT(1.5, sigma=0.3)),
    "poisson": Case(Poisson(), nn.PoissonNLLLoss(), targets=counts),
    "negative binomial": Case(NegativeBinomial(0.2), targets=counts),
    "gamma": Case(Gamma(3.5), targets=positive),
    "gaussian": Case(GaussianNLL(), None, normal, **HALVES),
    "gaussian, full": Case(GaussianNLL(full=True), None, normal, **HALVES),
    "variance": Case(GaussianNLL(variance=True), nn.GaussianNLLLoss(), with_variances, **HALVES),
    "variance, full": Case(
        GaussianNLL(variance=True, full=True, eps=1e-3), nn.GaussianNLLLoss(full=True, eps=1e-3), with_variances,
        **HALVES,
    ),
    "bce": Case(BinaryCrossEntropy(), nn.BCEWithLogitsLoss(), targets=binary),
    "bce, soft": Case(BinaryCrossEntropy(), nn.BCEWithLogitsLoss(), targets=fraction),
    "bce, pos_weight": Case(
        BinaryCrossEntropy(pos_weight=W[:1]), nn.BCEWithLogitsLoss(pos_weight=W[:1]), targets=fraction
    ),
    "bce, weights": Case(
        BinaryCrossEntropy(pos_weight=2 * W, output_weight=W), nn.BCEWithLogitsLoss(W, pos_weight=2 * W),
        targets=fraction, shapes=(MATRIX,),
    ),
    "bce, channels": Case(
        BinaryCrossEntropy(output_weight=WIDE), nn.BCEWithLogitsLoss(WIDE), targets=fraction, shapes=(IMAGE,)
    ),
    "labels": Case(
        BinaryCrossEntropy(output_weight=W), nn.MultiLabelSoftMarginLoss(W), targets=binary, shapes=(MATRIX,)
    ),
    "probabilities": Case(BinaryProbabilities(), nn.BCELoss(), inner, binary),
    "probabilities, weighted": Case(
        BinaryProbabilities(output_weight=W), nn.BCELoss(W), inner, fraction, shapes=(MATRIX,)
    ),
    "hinge": Case(Hinge(), targets=signs),
    "hinge, 0.3": Case(Hinge(0.3), targets=signs),
    "soft margin": Case(SoftMargin(), nn.SoftMarginLoss(), targets=signs),
    "ordinal": Case(Ordinal(), None, rising, grades, ((4, 1), (4, 2), (4, 3), (4, 5))),
    "nll": Case(NegativeLogLikelihood(), nn.NLLLoss(), logs, labels, **CLASSES),
    "nll, ignored": Case(NegativeLogLikelihood(class_weight=W), nn.NLLLoss(W), logs, some_ignored, **CLASSES),
    "nll, ignored class": Case(
        NegativeLogLikelihood(ignore_index=1), nn.NLLLoss(ignore_index=1), logs, labels, **CLASSES
    ),
    "kl": Case(KLDivergence(batchmean=False), nn.KLDivLoss(), logs, probabilities, **CLASSES),
    "kl, batchmean": Case(KLDivergence(), nn.KLDivLoss(reduction="batchmean"), logs, probabilities, **CLASSES),
    "kl, log": Case(
        KLDivergence(log_target=True, batchmean=False), nn.KLDivLoss(log_target=True), logs, logs, **CLASSES
    ),
    "kl, masses": Case(KLDivergence(), None, logs, positive, **CLASSES),
    "ce, another root": Case(Doubled(), targets=labels, **CLASSES),
    "ce, ignored class": Case(
        CrossEntropy(ignore_index=1, class_dim=1), nn.CrossEntropyLoss(ignore_index=1), targets=labels, **CLASSES
    ),
    **{
        f"ce, {targets.__name__}, {len(options)}": Case(
            CrossEntropy(class_weight=weight, class_dim=1, **options), nn.CrossEntropyLoss(weight, **options),
            targets=targets, **CLASSES,
        )
        for targets in (labels, some_ignored, probabilities, masses)
        for weight, options in ((None, {}), (W, SMOOTH))
    },
}  # fmt: skip
EVERY_CASE = pytest.mark.parametrize(
    ("name", "shape"), [(name, shape) for name, case in CASES.items() for shape in case.shapes]
)


@EVERY_CASE
def test_conforms(name, shape):
    case = CASES[name]
    conforms(case.loss, case.outputs(shape), case.targets(shape))


OF_TORCH = [(case, case.module, shape) for case in CASES.values() if case.module for shape in case.shapes]


@pytest.mark.parametrize(("case", "module", "shape"), OF_TORCH, ids=lambda v: "" if isinstance(v, Case) else str(v))
@pytest.mark.parametrize("reduction", ["as it is", "sum"])
@pytest.mark.filterwarnings("ignore:reduction")
def test_a_loss_of_torch_has_its_value(case, module, shape, reduction):
    loss, z, y = case.loss, case.outputs(shape), case.targets(shape)
    if reduction == "sum" and not isinstance(module, nn.MultiLabelSoftMarginLoss):
        module = copy.copy(module)
        module.reduction = "sum"
        loss = replace(loss, reduction="sum", **({"batchmean": False} if isinstance(loss, KLDivergence) else {}))
    assert resolve(module) == loss
    of_torch = module(z.chunk(2, 1)[0], y, z.chunk(2, 1)[1]) if isinstance(loss, GaussianNLL) else module(z, y)
    close(loss.scale(float(loss.normaliser(z, y))) * loss.value(z, y), of_torch, 1e-13)


# What torch.nn has no loss for, or a loss of another form.


def test_squared_hinge():
    """Of two classes, by torch's own with several of them."""
    z = torch.linspace(-3, 3, 12, dtype=f64)
    found = [nn.MultiMarginLoss(p=2, margin=0.7)(torch.stack((0 * t, t))[None], torch.tensor([1])) for t in z]
    close(Hinge(0.7).ell(z, torch.ones_like(z)), 2 * torch.stack(found))


@pytest.mark.parametrize("K", [2, 3, 4, 6])
def test_ordinal(K):
    """The probabilities of all classes add up to 1."""
    z, y = rising((4, K - 1)), grades((4, K - 1))
    ends = torch.zeros(4, 1, dtype=f64), torch.ones(4, 1, dtype=f64)
    each = torch.cat((ends[0], z.sigmoid(), ends[1]), 1).diff(dim=1)
    close(Ordinal().ell(z, y), each.gather(1, y[:, None])[:, 0].log().neg())


def test_densities():
    """Up to what does not depend on the mean."""
    z, zero, counted, y = normal(MATRIX), torch.zeros(MATRIX, dtype=f64), counts(MATRIX), positive(MATRIX)
    for a in (0.3, 2.0):
        densities = {
            NegativeBinomial(a): lambda z, a=a: torch.distributions.NegativeBinomial(1 / a, logits=z + math.log(a)),
            Gamma(a): lambda z, a=a: torch.distributions.Gamma(a, a * (-z).exp()),
            StudentT(a, 0.7): lambda z, a=a: torch.distributions.StudentT(a, z, 0.7),
        }
        for loss, density in densities.items():
            t = counted if isinstance(loss, NegativeBinomial) else y
            change = density(zero).log_prob(t) - density(z).log_prob(t)
            close(loss.ell(z, t) - loss.ell(zero, t), change, 1e-6)


@pytest.mark.parametrize("loss", [Poisson(), NegativeBinomial(), NegativeBinomial(0.2), Gamma(3.5)], ids=repr)
def test_the_bound_is_the_saturated_model(loss):
    y, w = positive(VECTOR) if isinstance(loss, Gamma) else torch.tensor([0.0, 1, 2, 7], dtype=f64), positive(VECTOR)
    close(loss.lower_bound(y, y, w), loss.value(y.log().clamp(min=-700), y, w), 1e-12)


def test_other_bounds_that_are_reached():
    z = torch.linspace(-2, 2, 40001, dtype=f64)[:, None]
    for q in (0.1, 0.5):
        loss = Quantile(q, 0.3)
        close(loss.ell(z, 0 * z).min(), loss.lower_bound(z[:1], z[:1]), 1e-8)
    q = positive(MATRIX)  # these do not add up to 1: the least value is at p = q/Q
    close(KLDivergence().value((q / q.sum(1, keepdim=True)).log(), q), KLDivergence().lower_bound(q, q))


# Curvature that is not the Hessian.

NEAR = [Huber(delta=0.7), Quantile(), Quantile(0.9, 0.2), Quantile(0.1, 1e-3), StudentT(), StudentT(1.5, sigma=0.3)]


@pytest.mark.parametrize(("loss", "ends"), [*((each, ()) for each in NEAR), (AbsoluteError(), (0.2, 5.0))], ids=str)
def test_a_quadratic_lies_above(loss, ends):
    """That of the absolute error outside ε, where it touches |e|."""
    majorises(loss, *ends)


def test_inside_its_corner_huber_has_the_hessian():
    z, y = wide(MATRIX), normal(MATRIX)
    inside = ((z - y).abs() < 0.8).flatten()
    assert 0 < inside.sum() < len(inside)
    close(Huber(delta=0.8).s(z, y).flatten()[inside], torch.ones(int(inside.sum()), dtype=f64))


@pytest.mark.parametrize("weight", [None, W], ids=["plain", "weighted"])
def test_probabilities_have_the_mean_hessian_of_predicted_targets(weight):
    z, loss = inner(MATRIX), BinaryProbabilities(output_weight=weight)
    no, yes = (blocks(loss, z, torch.full_like(z, y)) for y in (0.0, 1.0))
    S, p = loss.root(z, fraction(MATRIX)).S, loss.group(z)[..., None]
    close(S @ S.mT, p * yes + (1 - p) * no, 1e-10)
    z[0, 0], z[1, 1], y = 0.0, 1.0, binary(MATRIX)  # where torch cuts the logarithm off
    value = nn.BCELoss(weight, reduction="sum")
    close(loss.value(z, y), value(z, y))
    close(loss.slope(z, y), grad(lambda z: value(z, y))(z), 1e-10)


@pytest.mark.parametrize("variance", [False, True], ids=["log", "variance"])
def test_a_variance_has_the_mean_hessian_of_predicted_targets(variance):
    """By Gauss-Hermite quadrature, which is exact for the polynomials in y that the Hessian holds."""
    z, loss = with_variances((4, 2)) if variance else normal((4, 2)), GaussianNLL(variance=variance)
    nodes = torch.tensor([-math.sqrt(3), 0.0, math.sqrt(3)], dtype=f64)
    S = loss.root(z, z[:, :1]).S
    for row, SSt in zip(z, (S @ S.mT)[:, 0], strict=True):
        v = row[1] if variance else row[1].exp()
        at = [hessian(lambda t, y=y: loss.value(t[None], y.reshape(1, 1)))(row) for y in row[0] + v.sqrt() * nodes]
        close(SSt, sum(c * H for c, H in zip((1 / 6, 4 / 6, 1 / 6), at, strict=True)))


def test_a_variance_that_vanishes():
    """Below eps it counts as eps; a negative one is no trial point, and refused at the start."""
    loss, y = GaussianNLL(variance=True, eps=0.1), torch.zeros(1, 1)
    assert loss.ell(torch.tensor([[0.0, 0.0]]), y) == loss.ell(torch.tensor([[0.0, 0.1]]), y)
    assert loss.root(torch.tensor([[0.0, 0.0]]), y).S.isfinite().all()
    assert loss.ell(torch.tensor([[0.0, -0.1]]), y) == math.inf


def test_thresholds_that_cross_are_no_trial_point():
    y = torch.tensor([1])
    assert not Ordinal().ell(torch.tensor([[1.0, 0.0]]), y).isfinite().any()
    assert Ordinal().ell(torch.tensor([[0.0, 0.0]]), y) == math.inf


# Absolute errors and quantiles.


def test_small_residuals_do_not_hold_the_others():
    """s² is at most 100 over the mean |e|, in any units; a perfect fit has a finite one."""
    z = torch.tensor([[1e-9, 1.0, 2.0]], dtype=f64)
    for units in (1.0, 1e6):
        s = AbsoluteError().s(units * z, 0 * z)
        close(s.square() * units, torch.tensor([[100.0, 1.0, 0.5]], dtype=f64), 1e-8)
    assert AbsoluteError().s(z, z).isfinite().all()


@pytest.mark.parametrize("q", [0.1, 0.5, 0.75])
def test_the_least_loss_is_at_the_quantile(q):
    y, z = torch.linspace(0, 1, 1001, dtype=f64), torch.linspace(0, 1, 201, dtype=f64)
    f = Quantile(q, 0.001).ell(z[:, None].expand(-1, 1001), y.expand(201, -1)).sum(1)
    assert float(z[f.argmin()]) == pytest.approx(q, abs=0.006)


def test_several_levels_are_those_of_the_columns():
    z, y, levels = normal((6, 2, 3)), normal((6, 2, 3)), (0.1, 0.5, 0.9)
    for q in (list(levels), levels, torch.tensor(levels, dtype=f64), torch.tensor(levels, dtype=f64).numpy()):
        assert Quantile(q) == Quantile(levels) != Quantile(levels[::-1])
    loss, columns = Quantile(levels), [(Quantile(q), z[..., k], y[..., k]) for k, q in enumerate(levels)]
    for name in ("value", "normaliser", "lower_bound"):
        close(getattr(loss, name)(z, y), sum(getattr(one, name)(a, b) for one, a, b in columns))
    for name in ("ell", "slope", "s"):
        close(getattr(loss, name)(z, y), torch.stack([getattr(one, name)(a, b) for one, a, b in columns], -1))


# Where float32 underflows.

FAR = [-120.0, -30.0, 0.0, 30.0, 120.0]
EXTREME = {
    **{f"bce, {y}": (BinaryCrossEntropy(pos_weight=torch.tensor([2.5])), FAR, [y] * 5) for y in (0.0, 0.3, 1.0)},
    "poisson": (Poisson(), [-120.0, -120.0, -200.0, 3.0], [0.0, 3.0, 1e6, 2.0]),
    "negative binomial": (NegativeBinomial(0.5), [-60.0, -20.0, 0.0, 20.0, 60.0], [1.0, 3.0, 2.0, 1.0, 7.0]),
    "gamma": (Gamma(2.0), [-60.0, -20.0, 0.0, 20.0, 60.0], [1.0, 3.0, 2.0, 1.0, 7.0]),
    **{
        f"ordinal, {y}": (Ordinal(), [[-200.0, -150.0], [150.0, 200.0], [-100.0, 100.0], [-1e-3, 1e-3]], y)
        for y in ([0, 2, 1, 1], [1, 1, 0, 2])
    },
}


@pytest.mark.parametrize(("loss", "z", "y"), EXTREME.values(), ids=EXTREME)
def test_extreme_outputs_in_float32(loss, z, y):
    """The gradient stays exact where the curvature underflows."""
    z, y = torch.tensor(z), torch.tensor(y)
    root, there = loss.root(z, y), (z.double(), y.double() if y.is_floating_point() else y)
    exact, curvature = loss.group(loss.gradient(*there)), loss.root(*there).S
    assert root.S.isfinite().all()
    assert root.u.isfinite().all()
    for g in (loss.group(loss.gradient(z, y)), image(root)):
        assert ((g.double() - exact).abs() <= 1e-5 * exact.abs() + 1e-37).all()
    close((root.S @ root.S.mT).double(), curvature @ curvature.mT, 1e-5)
