"""What all losses have in common: options, equality, units, empirical rows, and what their check refuses."""

from __future__ import annotations

import copy
import math
import pickle

import pytest
import torch
from torch import Tensor
from torch.func import jacrev

from marquardt import losses
from marquardt.losses import (
    BinaryCrossEntropy,
    BinaryProbabilities,
    CrossEntropy,
    Function,
    Gamma,
    GaussianNLL,
    Hinge,
    Huber,
    KLDivergence,
    NegativeBinomial,
    NegativeLogLikelihood,
    Ordinal,
    Poisson,
    Quantile,
    Residual,
    SoftMargin,
    SquaredError,
    StudentT,
)
from support.losses import CLASS_WEIGHT, MATRIX, close, f64, fraction, image, labels, normal
from support.unchanged import refused


def test_factor_and_scale():
    n = torch.tensor(8.0)
    assert SquaredError(factor=3.0).scale(n) == 3 / 8
    assert SquaredError(factor=3.0, reduction="sum").scale(n) == 3


def test_residual_takes_no_targets():
    z = normal(MATRIX)
    Residual().check(z, None)
    close(Residual().value(z, None), z.square().sum())
    close(image(Residual().root(z, None)), 2 * z[..., None])
    Residual().check(z, {"ignored": 1})


def test_losses_compare_by_their_options():
    a, b = CrossEntropy(class_weight=CLASS_WEIGHT), CrossEntropy(class_weight=CLASS_WEIGHT.clone())
    assert a == b
    assert hash(a) == hash(b)
    assert a != CrossEntropy()
    assert CrossEntropy() != a
    assert Huber(delta=2.0) == Huber(2.0) != Huber()
    assert SquaredError() != Residual()
    assert pickle.loads(pickle.dumps(a)) == a == copy.deepcopy(a)


# Empirical rows.

WEIGHT = torch.tensor([1.0, 2.0, 0.5, 3.0], dtype=f64)


@pytest.mark.parametrize("loss", [SquaredError(), Huber(), Poisson(), BinaryCrossEntropy()], ids=repr)
def test_empirical_elementwise(loss):
    z, y = normal((4, 3)), fraction((4, 3)).round()
    root = loss.empirical(z, y, WEIGHT)
    close(root.S, (loss.gradient(z, y) * WEIGHT.sqrt()[:, None])[..., None, None])
    close(root.u, WEIGHT.sqrt()[:, None, None].expand(4, 3, 1))


@pytest.mark.parametrize("class_weight", [None, CLASS_WEIGHT])
def test_empirical_hard_labels(class_weight):
    """SSᵀ = ∇ℓ∇ℓᵀ w/w̃: one row per position."""
    z, y, loss = normal(MATRIX), labels(MATRIX), CrossEntropy(class_weight=class_weight)
    g, factor = loss.gradient(z, y), WEIGHT / (1 if class_weight is None else class_weight[y])
    root = loss.empirical(z, y, WEIGHT)
    assert root.S.shape == (4, 1, 3, 1)
    close((root.S @ root.S.mT)[:, 0], factor[:, None, None] * g[:, :, None] * g[:, None, :])
    close(root.u[:, 0, 0], (WEIGHT * WEIGHT / factor).sqrt())


def test_empirical_soft_targets():
    """SSᵀ = Σₖ q̃ₖ ∇log pₖ ∇log pₖᵀ."""
    z, q = normal(MATRIX), fraction(MATRIX).softmax(1)
    root = CrossEntropy(class_weight=CLASS_WEIGHT).empirical(z, q)
    for i in range(4):
        J = jacrev(lambda z: z.log_softmax(0))(z[i])  # (C, C): row k is ∇log pₖ
        close((root.S @ root.S.mT)[i, 0], J.T @ torch.diag(CLASS_WEIGHT * q[i]) @ J)


# Options.


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: SquaredError(reduction="none"), "reduction must be"),
        (lambda: SquaredError(factor=0.0), "factor must be positive and finite, got 0.0"),
        (lambda: SquaredError(factor=math.inf), "factor must be positive and finite, got inf"),
        (lambda: SquaredError(factor="a"), "factor must be a number, got 'a'"),
        (lambda: Huber(delta=0.0), "delta must be positive and finite, got 0.0"),
        (lambda: Huber(delta=math.nan), "delta must be positive and finite, got nan"),
        (lambda: Huber("a"), "delta must be a number, got 'a'"),
        (lambda: Hinge(0.0), "margin must be positive and finite, got 0.0"),
        (lambda: Gamma(torch.ones(2)), "shape must be a number, got tensor"),
        (lambda: Gamma(-1.0), "shape must be positive and finite"),
        (lambda: NegativeBinomial(0.0), "dispersion must be positive and finite"),
        (lambda: GaussianNLL(eps=None), "eps must be a number, got None"),
        (lambda: StudentT(0.0), "dof must be positive"),
        (lambda: StudentT(1.0, math.inf), "sigma must be positive and finite, got inf"),
        (lambda: Quantile("a"), "q must be a number, got 'a'"),
        (lambda: Quantile([0.5, None]), "q must be a number, got None"),
        (lambda: Quantile(0.5, 0.0), "smoothing must be positive and finite, got 0.0"),
        (lambda: Quantile(0.0), "q must lie between 0 and 1, got 0.0"),
        (lambda: Quantile(math.nan), "q must lie between 0 and 1, got nan"),
        (lambda: Quantile([0.5, 1.0]), "q must lie between 0 and 1, got (0.5, 1.0)"),
        (lambda: Quantile([]), "q must lie between 0 and 1"),
        (lambda: CrossEntropy(label_smoothing=1.5), "label_smoothing must lie in [0, 1], got 1.5"),
        (lambda: CrossEntropy(label_smoothing="a"), "label_smoothing must be a number, got 'a'"),
        (lambda: CrossEntropy(class_dim=2), "class_dim must be 1, -1 or None, got 2"),
        (lambda: CrossEntropy(class_weight=[1.0, 2.0]), "class_weight must be a floating-point tensor"),
        (lambda: CrossEntropy(class_weight=torch.ones(2, 2)), "shape (C,), got (2, 2)"),
        (lambda: CrossEntropy(class_weight=torch.tensor([1.0, -1.0])), "class_weight must be finite, not neg"),
        (lambda: CrossEntropy(class_weight=torch.zeros(2)), "not all zero"),
        (lambda: BinaryCrossEntropy(pos_weight=torch.tensor([math.nan])), "pos_weight must be finite"),
        (lambda: BinaryCrossEntropy(pos_weight=2.0), "pos_weight must be a floating-point tensor, got 2.0"),
        (lambda: BinaryProbabilities(output_weight=-torch.ones(2)), "output_weight must be finite, not neg"),
        (lambda: KLDivergence(label_smoothing=0.1), "no label_smoothing"),
        (lambda: Function(3), "got 3"),
        (lambda: Function(torch.mul, low=None), "low must be a number, got None"),
        (lambda: Function(torch.mul, low=math.nan), "low=nan"),
    ],
)
def test_invalid_options(make, says):
    with refused(says):
        make()


def test_a_loss_without_its_formulas():
    with pytest.raises(TypeError, match="abstract"):
        losses.Loss()


# What `check` refuses.

z43, z41, z4 = torch.zeros(4, 3), torch.zeros(4, 1), torch.zeros(4)
y4, log_p = torch.tensor([0, 1, 2, 0]), torch.zeros(4, 3).log_softmax(1)
inf, nan = math.inf, math.nan
LEVELS = Quantile([0.1, 0.5, 0.9])


def at(t: Tensor, index: tuple[int, ...], value: float) -> Tensor:
    t = t.clone()
    t[index] = value
    return t


REFUSED = {
    "outputs": [
        ("mse", (z43,), z43, "the model must return one tensor, got tuple"),
        ("mse", z43.half(), z43.half(), "outputs are torch.float16"),
        ("mse", torch.tensor(1.0), torch.tensor(1.0), "outputs have shape ()"),
        ("mse", z43[:0], z43[:0], "the batch is empty: outputs have shape (0, 3)"),
        ("cross_entropy", z43[:0], y4[:0], "the batch is empty"),
        ("binary_probabilities", z43 + 1.5, z43, "outputs[0, 0] is 1.5", "sigmoid"),
        ("nll", z43, y4, "the logarithm of Σ exp(outputs)[0]", "log_softmax", "CrossEntropyLoss"),
        ("ordinal", -torch.arange(2.0)[None], y4[:1], "a step of outputs[0, 0] is -1", "must increase"),
        ("gaussian_nll", z43, z41, "outputs have shape (4, 3)", "k means and then logarithms of variances"),
        (GaussianNLL(variance=True), at(z43[:, :2], (0, 1), -0.1), z41, "variance[0, 0] is -0.1", "F.softplus"),
        (LEVELS, z43[:, :2], z43[:, :2], "outputs have shape (4, 2)", "needs one for each, (N, …, 3)"),
        (LEVELS, z4, z4, "outputs have shape (4,)", "needs one for each, (N, …, 3)"),
    ],
    "targets": [
        ("mse", z41, z4, "(4, 1), targets (4,):", "targets.unsqueeze(-1), or outputs.squeeze(-1) in"),
        ("huber", z4, z41, "(4,), targets (4, 1):", "targets.squeeze(-1)"),
        ("mse", z4, z4[None], "(4,), targets (1, 4):", "targets.reshape((4,))"),
        ("poisson", z43, z41, "give the targets the shape of the outputs"),
        ("mse", z43, None, "needs targets, got None: opt.step(inputs, targets), or", "residual"),
        ("mse", z4, [0.0] * 4, "targets must be a tensor, got list:", "as_tensor(targets, dtype=torch.float32)"),
        ("mse", z4, y4, "targets are torch.int64:", "targets.to(torch.float32)", "cross_entropy"),
        ("bce", z4, y4 > 0, "targets are torch.bool"),
        ("mse", z4, z4.double(), "dtype torch.float64, but", "use targets.to(torch.float32)"),
        ("mse", z4, z4.to("meta"), "targets on meta, but the outputs are on cpu: use targets.to('cpu')"),
        ("mse", z43, at(z43, (2, 1), nan), "targets[2, 1] is nan: the targets are non-finite"),
        ("huber", z4, at(z4, (3,), inf), "targets[3] is inf: the targets are non-finite"),
        ("bce", z4, at(z4, (1,), 1.5), "targets[1] is 1.5: BinaryCrossEntropy needs targets in [0, 1]"),
        ("bce", z4, at(z4, (1,), nan), "the targets are non-finite"),
        ("bce", z4, None, "BinaryCrossEntropy needs targets"),
        (BinaryCrossEntropy(pos_weight=torch.ones(2)), z43, z43, "pos_weight of shape (2,)"),
        (BinaryCrossEntropy(pos_weight=torch.ones(4)), z4, z4, "pos_weight", "one sample"),
        (BinaryProbabilities(output_weight=torch.ones(4, 3)), z43, z43, "output_weight of shape (4, 3) does not broad"),
        ("binary_probabilities", z43, z43 - 1, "targets[0, 0] is -1: BinaryProbabilities needs targets in [0, 1]"),
        ("poisson", z4, at(z4, (2,), -1.0), "targets[2] is -1: Poisson needs targets that are not negative"),
        (
            "negative_binomial",
            z4,
            at(z4, (2,), -1.0),
            "targets[2] is -1: NegativeBinomial needs targets that are not n",
        ),
        ("gamma", z41, z41, "targets[0, 0] is 0: Gamma needs positive targets"),
        ("hinge", z43, z43, "targets[0, 0] is 0: Hinge needs targets −1 and 1: 2y − 1 of 0 and 1"),
        (SoftMargin(), z43, z43, "targets[0, 0] is 0: SoftMargin needs targets −1 and 1"),
        ("gaussian_nll", z43[:, :2], z43[:, :2], "outputs have shape (4, 1), targets (4, 2)"),
        (LEVELS, z43, z4, "targets (4,)", "targets.reshape(4, 1).expand(4, 3)"),
        (LEVELS, z43, z41, "targets (4, 1)", "targets.reshape(4, 1).expand(4, 3)"),
        (LEVELS, z43, z43[:, :2], "targets (4, 2)", "shape of the outputs"),
        ("kl_div", log_p, y4, "KLDivergence needs a tensor of probabilities", "torch.int64"),
        ("kl_div", log_p, log_p, "targets[0, 0] is -1.09861: probabilities must not be negative"),
        ("ordinal", torch.arange(2.0)[None], y4[2:3] + 1, "targets[0] is 3", "2 outputs tell 3 classes apart"),
        ("ordinal", torch.arange(2.0)[None], torch.zeros(1), "got torch.float32", "targets.long()"),
        (Ordinal(), torch.arange(2.0)[None], y4[None, :2], "outputs have shape (1, 2), targets (1, 2)"),
    ],
    "classes": [
        ("cross_entropy", z43, at(y4, (2,), 3), "targets[2] is 3: the logits have 3 classes"),
        ("cross_entropy", z43, at(y4, (1,), -1), "targets[1] is -1:", "ignore_index is -100"),
        ("cross_entropy", z43, y4.float(), "class indices are torch.float32:", "targets.long()"),
        ("cross_entropy", z43, z43.long(), "are torch.int64: use targets.to(torch.float32)", "argmax"),
        ("cross_entropy", z43, y4 > 0, "got torch.bool"),
        ("cross_entropy", z43, None, "got NoneType"),
        ("cross_entropy", z43, y4.to("meta"), "targets on meta"),
        ("cross_entropy", z43, z43.double(), "targets: dtype torch.float64"),
        ("cross_entropy", z43, y4[:, None], "shape (4,)", "got targets of shape (4, 1); use targets.squeeze(-1)"),
        ("cross_entropy", z43, y4[:2], "(4, 3) need class indices of shape (4,)", "got targets of shape (2,)"),
        ("cross_entropy", torch.zeros(4, 5, 3), y4[:, None].expand(4, 5), "z.movedim(-1, 1)"),
        ("cross_entropy", z4, y4, "logits have shape (4,)"),
        ("cross_entropy", z41, y4, "at least 2 classes", "BinaryCrossEntropy"),
        ("cross_entropy", z43, at(z43, (0, 1), -0.5), "targets[0, 1] is -0.5: probabilities"),
        ("cross_entropy", z43, at(z43, (3, 2), nan), "targets[3, 2] is nan: the targets are non-finite"),
        ("cross_entropy", z43, y4 * 0 - 100, "total weight of the batch is 0:", "ignored"),
        (CrossEntropy(ignore_index=0), z43, y4 * 0, "total weight of the batch is 0"),
        (CrossEntropy(ignore_index=0), z43, z43, "ignore_index=0 needs class indices"),
        (CrossEntropy(class_weight=torch.ones(2)), z43, y4, "has 2 entries, the logits have 3 classes"),
        (NegativeLogLikelihood(class_weight=torch.tensor([0.0, 1, 1])), log_p, y4 * 0, "weight of the batch is 0"),
    ],
}


@pytest.mark.parametrize(("loss", "z", "y", "says"), [(*row[:3], row[3:]) for rows in REFUSED.values() for row in rows])
def test_check_refuses(loss, z, y, says):
    with refused(*says):
        losses.resolve(loss).check(z, y)


@pytest.mark.parametrize(
    ("loss", "z", "y", "weight", "says"),
    [
        ("mse", z4, z4, z41, "weight has shape (4, 1): one weight per sample is needed, (4,); use weight.flatten()"),
        ("mse", z4, z4, [1.0] * 4, "weight must be a tensor, got list"),
        ("mse", z4, z4, y4, "dtype torch.int64, but the outputs are torch.float32: use weight.to(torch.float32)"),
        ("mse", z4, z4, z4.to("meta"), "weight on meta"),
        ("mse", z4, z4, at(z4 + 1, (1,), -2.0), "weight[1] is -2: sample weights must be finite and not negative"),
        ("residual", z4, None, at(z4 + 1, (3,), nan), "weight[3] is nan"),
        ("cross_entropy", z43, y4, at(z4 + 1, (3,), inf), "weight[3] is inf"),
        ("mse", z4, z4, z4, "total weight of the batch is 0: every target has weight 0"),
    ],
)
def test_check_refuses_weights(loss, z, y, weight, says):
    with refused(says):
        losses.resolve(loss).check(z, y, weight)
