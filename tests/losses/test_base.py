"""Every loss against torch: its value and its derivatives in float64; its options; what its check refuses."""

from __future__ import annotations

import copy
import math
import pickle
from collections.abc import Callable
from dataclasses import dataclass, replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.func import grad, jacrev, vmap

from marquardt import losses
from marquardt.losses import BinaryCrossEntropy, CrossEntropy, Huber, Poisson, Residual, SquaredError
from support.losses import (
    CLASS_WEIGHT,
    IMAGE,
    MATRIX,
    VECTOR,
    close,
    f64,
    fraction,
    image,
    labels,
    normal,
    some_ignored,
)


@dataclass(frozen=True)
class Case:
    name: str
    loss: losses.Loss
    torch_loss: Callable[..., Tensor]  # (z, y, reduction=…)
    shape: tuple[int, ...]
    targets: Callable[[tuple[int, ...]], Tensor]

    def data(self) -> tuple[Tensor, Tensor]:
        torch.manual_seed(0)
        return 2 * torch.randn(self.shape, dtype=f64), self.targets(self.shape)


def binary(shape):
    return torch.randint(2, shape).to(f64)


def counts(shape):
    return torch.randint(4, shape).to(f64)


def probabilities(shape):
    return torch.rand(shape, dtype=f64).softmax(1)


def masses(shape):
    """Not normalised, with zeros, and nothing at all for one sample: torch takes these as they are."""
    q = torch.rand(shape, dtype=f64) * torch.tensor([1.0, 0.0, 2.0], dtype=f64).reshape(-1, *[1] * (len(shape) - 2))
    q[2] = 0
    return q


def cases():
    for shape in (VECTOR, MATRIX, IMAGE):
        yield Case("mse", SquaredError(), F.mse_loss, shape, normal)
        yield Case("residual", Residual(), lambda z, y, **kw: F.mse_loss(z, 0 * z, **kw), shape, normal)
        for delta in (0.8, 100.0):
            torch_loss = lambda z, y, d=delta, **kw: F.huber_loss(z, y, delta=d, **kw)  # noqa: E731
            yield Case(f"huber-{delta}", Huber(delta=delta), torch_loss, shape, normal)
        yield Case("bce", BinaryCrossEntropy(), F.binary_cross_entropy_with_logits, shape, binary)
        yield Case("bce-soft", BinaryCrossEntropy(), F.binary_cross_entropy_with_logits, shape, fraction)
        a = torch.tensor([3.0], dtype=f64) if shape == VECTOR else CLASS_WEIGHT.reshape(-1, *[1] * (len(shape) - 2))
        torch_loss = lambda z, y, a=a, **kw: F.binary_cross_entropy_with_logits(z, y, pos_weight=a, **kw)  # noqa: E731
        yield Case("bce-pos-weight", BinaryCrossEntropy(pos_weight=a), torch_loss, shape, fraction)
        torch_loss = lambda z, y, b=a, **kw: F.binary_cross_entropy_with_logits(z, y, b, **kw)  # noqa: E731
        yield Case("bce-output-weight", BinaryCrossEntropy(output_weight=a), torch_loss, shape, fraction)
        yield Case("poisson", Poisson(), F.poisson_nll_loss, shape, counts)
    for shape in (MATRIX, IMAGE):
        for name, targets in {
            "labels": labels,
            "ignored": some_ignored,
            "probabilities": probabilities,
            "masses": masses,
        }.items():
            for smoothing in (0.0, 0.1):
                for weight in (None, CLASS_WEIGHT):
                    options = f"smooth{smoothing}-{'plain' if weight is None else 'weighted'}"
                    torch_loss = lambda z, y, w=weight, e=smoothing, **kw: F.cross_entropy(  # noqa: E731
                        z, y, weight=w, label_smoothing=e, **kw
                    )
                    loss = CrossEntropy(label_smoothing=smoothing, class_weight=weight)
                    yield Case(f"ce-{name}-{options}", loss, torch_loss, shape, targets)
        torch_loss = lambda z, y, **kw: F.cross_entropy(z, y, ignore_index=1, **kw)  # noqa: E731
        yield Case("ce-ignore-class-1", CrossEntropy(ignore_index=1), torch_loss, shape, labels)


CASES = list(cases())
WEIGHTS = {"unweighted": None, "weighted": torch.tensor([0.5, 2.0, 0.0, 1.7], dtype=f64)}
every_case = pytest.mark.parametrize("case", CASES, ids=lambda c: f"{c.name}-{len(c.shape)}d")
every_weight = pytest.mark.parametrize("weight", WEIGHTS.values(), ids=WEIGHTS.keys())


def dense(loss, blocks, z):
    """Blocks (N, P, C, C) as one matrix over the entries of z: (n, n)."""
    index = loss.group(torch.arange(z.numel()).reshape(z.shape))  # (N, P, C)
    H = z.new_zeros(z.numel(), z.numel())
    H[index[..., :, None], index[..., None, :]] = blocks
    return H


def hessian(case, z, y, weight):
    n = z.numel()
    return jacrev(grad(lambda z: case.loss.value(z, y, weight)))(z).reshape(n, n)


# value and normaliser


@every_case
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_value_is_torchs(case, reduction):
    z, y = case.data()
    loss = replace(case.loss, reduction=reduction)
    f = loss.scale(loss.normaliser(z, y)) * loss.value(z, y)
    close(f, case.torch_loss(z, y, reduction=reduction), 1e-14)


@every_case
def test_integer_weights_repeat_samples(case):
    z, y = case.data()
    times = torch.tensor([2, 1, 0, 3])
    zz, yy = (t.repeat_interleave(times, 0) for t in (z, y))
    for method in ("value", "normaliser", "lower_bound"):
        take = getattr(case.loss, method)
        close(take(z, y, times.to(f64)), take(zz, yy), 1e-14)


@every_case
@every_weight
def test_sums_add_up_over_batches(case, weight):
    z, y = case.data()
    parts = [slice(0, 1), slice(1, 4)]
    for method in ("value", "normaliser", "lower_bound"):
        take = getattr(case.loss, method)
        total = sum(take(z[s], y[s], None if weight is None else weight[s]) for s in parts)
        close(total, take(z, y, weight), 1e-14)
        assert total.shape == ()
        assert total.dtype == z.dtype
    assert case.loss.lower_bound(z, y, weight) <= case.loss.value(z, y, weight)
    case.loss.check(z, y, weight)


def test_factor_and_scale():
    n = torch.tensor(8.0)
    assert SquaredError(factor=3.0).scale(n) == 3 / 8
    assert SquaredError(factor=3.0, reduction="sum").scale(n) == 3


def test_poisson_lower_bound_is_the_saturated_model():
    y = torch.tensor([0.0, 1.0, 2.0, 7.0], dtype=f64)
    w = torch.tensor([1.0, 2.0, 3.0, 4.0], dtype=f64)
    close(Poisson().lower_bound(y, y, w), Poisson().value(y.log().clamp(min=-700), y, w), 1e-14)
    assert Poisson().lower_bound(y, y) < 0


# gradient and root


@every_case
@every_weight
def test_gradient(case, weight):
    z, y = case.data()
    close(case.loss.gradient(z, y, weight), grad(lambda z: case.loss.value(z, y, weight))(z))


@every_case
@every_weight
def test_root(case, weight):
    """SSᵀ is the Hessian (Huber: at least it), Su + v the gradient."""
    z, y = case.data()
    root, loss = case.loss.root(z, y, weight), case.loss
    N, P, C = loss.group(z).shape
    r = C - 1 if isinstance(loss, CrossEntropy) else 1
    assert root.S.shape == (N, P, C, r)
    assert root.u.shape == (N, P, r)
    close(image(root), loss.group(loss.gradient(z, y, weight)))
    SSt, H = dense(loss, root.S @ root.S.mT, z), hessian(case, z, y, weight)
    if isinstance(loss, Huber):
        inside = ((z - y).abs() < loss.delta).flatten()
        assert inside.any()
        close(SSt.diagonal()[inside], H.diagonal()[inside])
        assert (SSt.diagonal() >= H.diagonal() - 1e-12).all()
    else:
        close(SSt, H)


def test_huber_root_majorises():
    """ℓ(e) + ℓ′d + ½s²d² ≥ ℓ(e + d) for all d."""
    e, d = torch.linspace(-5, 5, 41, dtype=f64)[:, None], torch.linspace(-9, 9, 181, dtype=f64)
    loss, zero = Huber(delta=0.7), torch.zeros(41, 1, dtype=f64)
    model = loss.ell(e, zero) + loss.slope(e, zero) * d + loss.s(e, zero).square() * d.square() / 2
    assert (model >= loss.ell(e + d, torch.zeros_like(e + d)) - 1e-12).all()


@every_case
@every_weight
def test_empirical_is_the_gradient_too(case, weight):
    z, y = case.data()
    root, loss = case.loss.empirical(z, y, weight), case.loss
    close(image(root), loss.group(loss.gradient(z, y, weight)))
    assert torch.isfinite(root.S).all()


@pytest.mark.parametrize("loss", [SquaredError(), Huber(), Poisson(), BinaryCrossEntropy()], ids=repr)
def test_empirical_elementwise(loss):
    z, y, w = normal((4, 3)), binary((4, 3)), torch.tensor([1.0, 2.0, 0.5, 3.0], dtype=f64)
    root = loss.empirical(z, y, w)
    close(root.S, (loss.gradient(z, y) * w.sqrt()[:, None])[..., None, None])
    close(root.u, w.sqrt()[:, None, None].expand(4, 3, 1))


@pytest.mark.parametrize("class_weight", [None, CLASS_WEIGHT])
def test_empirical_hard_labels(class_weight):
    """SSᵀ = ∇ℓ∇ℓᵀ w/w̃: one row per position."""
    z, w = normal(MATRIX), torch.tensor([1.0, 2.0, 0.5, 3.0], dtype=f64)
    y = labels(MATRIX)
    loss = CrossEntropy(class_weight=class_weight)
    g = loss.gradient(z, y)
    factor = w / (torch.ones(4, dtype=f64) if class_weight is None else class_weight[y])
    root = loss.empirical(z, y, w)
    assert root.S.shape == (4, 1, 3, 1)
    close((root.S @ root.S.mT)[:, 0], factor[:, None, None] * g[:, :, None] * g[:, None, :])
    close(root.u[:, 0, 0], (w * w / factor).sqrt())


def test_empirical_soft_targets():
    """SSᵀ = Σₖ q̃ₖ ∇log pₖ ∇log pₖᵀ."""
    z, q = normal(MATRIX), probabilities(MATRIX)
    loss = CrossEntropy(class_weight=CLASS_WEIGHT)
    root = loss.empirical(z, q)
    for i in range(4):
        J = jacrev(lambda z: z.log_softmax(0))(z[i])  # (C, C): row k is ∇log pₖ
        close((root.S @ root.S.mT)[i, 0], J.T @ torch.diag(CLASS_WEIGHT * q[i]) @ J)


@every_case
def test_vmap(case):
    z, y = case.data()
    w, many = WEIGHTS["weighted"], torch.stack([z, -z, z / 3])
    for take in (case.loss.value, case.loss.gradient):
        close(vmap(lambda z, take=take: take(z, y, w))(many), torch.stack([take(z, y, w) for z in many]), 1e-14)


@every_case
def test_group_and_back(case):
    z, _ = case.data()
    loss, outputs = case.loss, z[0].numel()
    t = loss.group(z)
    C = 3 if isinstance(loss, CrossEntropy) else 1
    assert t.shape == (4, outputs // C, C)
    assert torch.equal(loss.ungroup(t, z), z)
    many = torch.stack([z, 2 * z]).reshape(1, 2, *z.shape)
    tt = loss.group(many, z)
    assert tt.shape == (1, 2, *t.shape)
    assert torch.equal(tt[0, 1], 2 * t)
    assert torch.equal(loss.ungroup(tt, z), many)


# construction


def test_losses_compare_by_their_options():
    a, b = CrossEntropy(class_weight=CLASS_WEIGHT), CrossEntropy(class_weight=CLASS_WEIGHT.clone())
    assert a == b
    assert hash(a) == hash(b)
    assert a != CrossEntropy()
    assert CrossEntropy() != a
    assert Huber(delta=2.0) == Huber(2.0) != Huber()
    assert SquaredError() != Residual()
    assert pickle.loads(pickle.dumps(a)) == a == copy.deepcopy(a)


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: SquaredError(reduction="none"), ValueError, "reduction must be .* got 'none'"),
        (lambda: SquaredError(factor=0.0), ValueError, "factor must be positive and finite, got 0.0"),
        (lambda: SquaredError(factor=math.inf), ValueError, "factor must be positive and finite, got inf"),
        (lambda: Huber(delta=0.0), ValueError, "delta must be positive and finite, got 0.0"),
        (lambda: Huber(delta=math.nan), ValueError, "delta .* got nan"),
        (lambda: CrossEntropy(label_smoothing=1.5), ValueError, r"label_smoothing must lie in \[0, 1\], got 1.5"),
        (lambda: CrossEntropy(class_weight=[1.0, 2.0]), TypeError, "class_weight must be a floating-point tensor"),
        (lambda: CrossEntropy(class_weight=torch.ones(2, 2)), ValueError, r"shape \(C,\), got \(2, 2\)"),
        (
            lambda: CrossEntropy(class_weight=torch.tensor([1.0, -1.0])),
            ValueError,
            "class_weight must be finite, not neg",
        ),
        (lambda: CrossEntropy(class_weight=torch.zeros(2)), ValueError, "not all zero"),
        (lambda: BinaryCrossEntropy(pos_weight=torch.tensor([math.nan])), ValueError, "pos_weight must be finite"),
        (lambda: BinaryCrossEntropy(pos_weight=2.0), TypeError, "pos_weight must be a floating-point tensor, got 2.0"),
        (lambda: losses.Loss(), TypeError, "abstract"),
    ],
)
def test_invalid_options(make, error, message):
    with pytest.raises(error, match=message):
        make()


# check

z43, z41, z4 = torch.zeros(4, 3), torch.zeros(4, 1), torch.zeros(4)
y4 = torch.tensor([0, 1, 2, 0])
inf, nan = math.inf, math.nan


def at(t: Tensor, index: tuple[int, ...], value: float) -> Tensor:
    t = t.clone()
    t[index] = value
    return t


@pytest.mark.parametrize(
    ("loss", "z", "y", "weight", "error", "message"),
    [
        # outputs
        ("mse", (z43,), z43, None, TypeError, "the model must return one tensor, got tuple"),
        ("mse", z43.half(), z43.half(), None, TypeError, "outputs are torch.float16"),
        ("mse", torch.tensor(1.0), torch.tensor(1.0), None, ValueError, r"outputs have shape \(\)"),
        ("mse", z43[:0], z43[:0], None, ValueError, r"the batch is empty: outputs have shape \(0, 3\)"),
        ("cross_entropy", z43[:0], y4[:0], None, ValueError, "the batch is empty"),
        # regression targets
        (
            "mse",
            z41,
            z4,
            None,
            ValueError,
            r"\(4, 1\), targets \(4,\): .*targets.unsqueeze\(-1\), or outputs.squeeze\(-1\) in",
        ),
        ("huber", z4, z41, None, ValueError, r"\(4,\), targets \(4, 1\): .*targets.squeeze\(-1\)"),
        ("mse", z4, z4[None], None, ValueError, r"\(4,\), targets \(1, 4\): .*targets.reshape\(\(4,\)\)"),
        ("poisson", z43, z41, None, ValueError, "give the targets the shape of the outputs"),
        ("mse", z43, None, None, TypeError, r"needs targets, got None: opt.step\(inputs, targets\), or .*residual"),
        (
            "mse",
            z4,
            [0.0] * 4,
            None,
            TypeError,
            r"targets must be a tensor, got list: .*as_tensor\(targets, dtype=torch.float32\)",
        ),
        ("mse", z4, y4, None, TypeError, r"targets are torch.int64: .*targets.to\(torch.float32\).*cross_entropy"),
        ("bce", z4, y4 > 0, None, TypeError, "targets are torch.bool"),
        ("mse", z4, z4.double(), None, TypeError, r"dtype torch.float64, but .*use targets.to\(torch.float32\)"),
        (
            "mse",
            z4,
            z4.to("meta"),
            None,
            ValueError,
            r"targets on meta, but the outputs are on cpu: use targets.to\('cpu'\)",
        ),
        ("mse", z43, at(z43, (2, 1), nan), None, ValueError, r"targets\[2, 1\] is nan: the targets are non-finite"),
        ("huber", z4, at(z4, (3,), inf), None, ValueError, r"targets\[3\] is inf: the targets are non-finite"),
        ("bce", z4, at(z4, (1,), 1.5), None, ValueError, r"targets\[1\] is 1.5: .* targets in \[0, 1\]"),
        ("bce", z4, at(z4, (1,), nan), None, ValueError, "the targets are non-finite"),
        ("bce", z4, None, None, TypeError, "BinaryCrossEntropy needs targets"),
        ("poisson", z4, at(z4, (2,), -1.0), None, ValueError, r"targets\[2\] is -1: .*not negative"),
        (BinaryCrossEntropy(pos_weight=torch.ones(2)), z43, z43, None, ValueError, r"pos_weight of shape \(2,\)"),
        (BinaryCrossEntropy(pos_weight=torch.ones(4)), z4, z4, None, ValueError, "pos_weight .* one sample"),
        # classes
        ("cross_entropy", z43, at(y4, (2,), 3), None, ValueError, r"targets\[2\] is 3: the logits have 3 classes"),
        ("cross_entropy", z43, at(y4, (1,), -1), None, ValueError, r"targets\[1\] is -1: .*ignore_index is -100"),
        ("cross_entropy", z43, y4.float(), None, TypeError, r"class indices are torch.float32: .*targets.long\(\)"),
        (
            "cross_entropy",
            z43,
            z43.long(),
            None,
            TypeError,
            r"are torch.int64: use targets.to\(torch.float32\).*argmax",
        ),
        ("cross_entropy", z43, y4 > 0, None, TypeError, "got torch.bool"),
        ("cross_entropy", z43, None, None, TypeError, "got NoneType"),
        ("cross_entropy", z43, y4.to("meta"), None, ValueError, "targets on meta"),
        ("cross_entropy", z43, z43.double(), None, TypeError, "targets: dtype torch.float64"),
        (
            "cross_entropy",
            z43,
            y4[:, None],
            None,
            ValueError,
            r"shape \(4,\) .*got .*\(4, 1\); use targets.squeeze\(-1\)",
        ),
        (
            "cross_entropy",
            z43,
            y4[:2],
            None,
            ValueError,
            r"\(4, 3\) need class indices of shape \(4,\) .*got .*\(2,\)$",
        ),
        ("cross_entropy", torch.zeros(4, 5, 3), y4[:, None].expand(4, 5), None, ValueError, r"z.movedim\(-1, 1\)"),
        ("cross_entropy", z4, y4, None, ValueError, r"logits have shape \(4,\)"),
        ("cross_entropy", z41, y4, None, ValueError, "at least 2 classes .*BinaryCrossEntropy"),
        ("cross_entropy", z43, at(z43, (0, 1), -0.5), None, ValueError, r"targets\[0, 1\] is -0.5: probabilities"),
        ("cross_entropy", z43, at(z43, (3, 2), nan), None, ValueError, r"targets\[3, 2\] is nan: .*non-finite"),
        ("cross_entropy", z43, y4 * 0 - 100, None, ValueError, "total weight of the batch is 0: .*ignored"),
        (CrossEntropy(ignore_index=0), z43, y4 * 0, None, ValueError, "total weight of the batch is 0"),
        (CrossEntropy(ignore_index=0), z43, z43, None, ValueError, "ignore_index=0 needs class indices"),
        (
            CrossEntropy(class_weight=torch.ones(2)),
            z43,
            y4,
            None,
            ValueError,
            "has 2 entries, the logits have 3 classes",
        ),
        (
            CrossEntropy(class_weight=torch.tensor([0.0, 1.0, 1.0])),
            z43,
            y4 * 0,
            None,
            ValueError,
            "total weight of the batch is 0",
        ),
        # weights
        (
            "mse",
            z4,
            z4,
            z41,
            ValueError,
            r"weight has shape \(4, 1\): one weight per sample is needed, \(4,\); use weight.flatten\(\)$",
        ),
        ("mse", z4, z4, [1.0] * 4, TypeError, "weight must be a tensor, got list"),
        ("mse", z4, z4, y4, TypeError, r"dtype torch.int64.*use weight.to\(torch.float32\)"),
        ("mse", z4, z4, z4.to("meta"), ValueError, "weight on meta"),
        ("mse", z4, z4, at(z4 + 1, (1,), -2.0), ValueError, r"weight\[1\] is -2: .*not negative"),
        ("residual", z4, None, at(z4 + 1, (3,), nan), ValueError, r"weight\[3\] is nan"),
        ("cross_entropy", z43, y4, at(z4 + 1, (3,), inf), ValueError, r"weight\[3\] is inf"),
        ("mse", z4, z4, z4, ValueError, "total weight of the batch is 0: every target has weight 0"),
    ],
)
def test_check_refuses(loss, z, y, weight, error, message):
    with pytest.raises(error, match=message):
        losses.resolve(loss).check(z, y, weight)


def test_residual_takes_no_targets():
    z = normal(MATRIX)
    Residual().check(z, None)
    close(Residual().value(z, None), z.square().sum())
    close(image(Residual().root(z, None)), 2 * z[..., None])
    Residual().check(z, {"ignored": 1})
