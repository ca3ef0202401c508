"""A loss from its name or from a module of torch.nn."""

from __future__ import annotations

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from marquardt import losses
from marquardt.losses import (
    AbsoluteError,
    BinaryCrossEntropy,
    BinaryProbabilities,
    CrossEntropy,
    Function,
    GaussianNLL,
    Huber,
    KLDivergence,
    NegativeLogLikelihood,
    Poisson,
    Residual,
    SoftMargin,
    SquaredError,
)
from marquardt.losses.resolve import NAMES
from support.losses import CLASS_WEIGHT, MATRIX, close, fraction, labels, normal


@pytest.mark.parametrize(
    ("name", "loss"),
    [
        ("mse", SquaredError()),
        ("squared_error", SquaredError()),
        ("cross_entropy", CrossEntropy()),
        ("bce", BinaryCrossEntropy()),
        ("bce_with_logits", BinaryCrossEntropy()),
        ("huber", Huber()),
        ("smooth_l1", Huber()),
        ("poisson", Poisson()),
        ("residual", Residual()),
        (nn.MSELoss(), SquaredError()),
        (nn.MSELoss(reduction="sum"), SquaredError(reduction="sum")),
        (nn.CrossEntropyLoss(), CrossEntropy(class_dim=1)),
        (
            nn.CrossEntropyLoss(CLASS_WEIGHT, label_smoothing=0.2, ignore_index=7, reduction="sum"),
            CrossEntropy(class_weight=CLASS_WEIGHT, label_smoothing=0.2, ignore_index=7, reduction="sum", class_dim=1),
        ),
        (nn.BCEWithLogitsLoss(pos_weight=CLASS_WEIGHT), BinaryCrossEntropy(pos_weight=CLASS_WEIGHT)),
        (nn.BCEWithLogitsLoss(reduction="sum"), BinaryCrossEntropy(reduction="sum")),
        (nn.HuberLoss(delta=0.5), Huber(delta=0.5)),
        (nn.SmoothL1Loss(beta=0.5), Huber(delta=0.5, factor=2.0)),
        (nn.SmoothL1Loss(reduction="sum", beta=4.0), Huber(delta=4.0, factor=0.25, reduction="sum")),
        (nn.PoissonNLLLoss(), Poisson()),
        (nn.L1Loss(reduction="sum"), AbsoluteError(reduction="sum")),
        (nn.SmoothL1Loss(beta=0.0), AbsoluteError()),
        (nn.MultiLabelSoftMarginLoss(CLASS_WEIGHT), BinaryCrossEntropy(output_weight=CLASS_WEIGHT)),
        (
            nn.BCEWithLogitsLoss(CLASS_WEIGHT, pos_weight=2 * CLASS_WEIGHT, reduction="sum"),
            BinaryCrossEntropy(output_weight=CLASS_WEIGHT, pos_weight=2 * CLASS_WEIGHT, reduction="sum"),
        ),
        (Huber(delta=3.0), Huber(delta=3.0)),
    ],
    ids=str,
)
def test_resolve(name, loss):
    found = losses.resolve(name)
    assert found == loss
    if isinstance(name, nn.Module):
        torch.manual_seed(0)
        z = 2 * normal(MATRIX)
        y = labels(MATRIX) if isinstance(found, CrossEntropy) else fraction(MATRIX)
        close(found.scale(found.normaliser(z, y)) * found.value(z, y), name(z, y), 1e-14)


def test_every_name_is_a_loss_with_its_defaults():
    for name, loss in NAMES.items():
        assert losses.resolve(name) == type(loss)()
        assert type(loss).__name__ in losses.__all__


class MyLoss(nn.MSELoss):
    def forward(self, z, y):
        return 2 * super().forward(z, y)


@pytest.mark.parametrize(
    ("module", "loss"),
    [
        (nn.NLLLoss(CLASS_WEIGHT, ignore_index=1), NegativeLogLikelihood(class_weight=CLASS_WEIGHT, ignore_index=1)),
        (nn.KLDivLoss(reduction="batchmean"), KLDivergence()),
        (nn.KLDivLoss(log_target=True), KLDivergence(log_target=True, batchmean=False)),
        (nn.KLDivLoss(reduction="sum"), KLDivergence(reduction="sum", batchmean=False)),
        (nn.BCELoss(CLASS_WEIGHT), BinaryProbabilities(output_weight=CLASS_WEIGHT)),
        (nn.GaussianNLLLoss(full=True, eps=0.1), GaussianNLL(variance=True, full=True, eps=0.1)),
        (nn.SoftMarginLoss(), SoftMargin()),
        (F.mse_loss, SquaredError()),
        (F.cross_entropy, CrossEntropy(class_dim=1)),
        (F.binary_cross_entropy, BinaryProbabilities()),
        (F.binary_cross_entropy_with_logits, BinaryCrossEntropy()),
        (F.nll_loss, NegativeLogLikelihood()),
        (F.kl_div, KLDivergence(batchmean=False)),
        (F.huber_loss, Huber()),
        (F.smooth_l1_loss, Huber()),
        (F.l1_loss, AbsoluteError()),
        (F.poisson_nll_loss, Poisson()),
        (F.gaussian_nll_loss, GaussianNLL(variance=True)),
        (F.multilabel_soft_margin_loss, BinaryCrossEntropy()),
        (F.soft_margin_loss, SoftMargin()),
        (partial(F.huber_loss, delta=2.0, reduction="sum"), Huber(delta=2.0, reduction="sum")),
        (partial(F.cross_entropy, label_smoothing=0.1), CrossEntropy(label_smoothing=0.1, class_dim=1)),
    ],
    ids=lambda v: getattr(v, "__name__", type(v).__name__),
)
def test_modules_and_functions_of_torch(module, loss):
    """Their values are compared beside each loss."""
    assert losses.resolve(module) == loss


@pytest.mark.parametrize(
    "fn",
    [MyLoss(), lambda z, y: z - y, partial(F.mse_loss, reduction="none"), partial(F.mse_loss, weight=CLASS_WEIGHT)],
)
def test_any_other_function(fn):
    assert losses.resolve(fn) == Function(fn)


@pytest.mark.parametrize(
    ("loss", "error", "message"),
    [
        ("crossentropy", ValueError, "unknown loss 'crossentropy'. Did you mean 'cross_entropy'.*mse, squared_error"),
        ("MSE", ValueError, "Did you mean 'mse'"),
        ("MAE", ValueError, "Did you mean 'l1'"),
        ("zzzzz", ValueError, "unknown loss 'zzzzz'. The names are mse, .*residual"),
        (nn.MSELoss(reduction="none"), ValueError, "got 'none'"),
        (nn.MultiLabelSoftMarginLoss(reduction="sum"), ValueError, "the number C of classes: use losses.Binary"),
        (nn.PoissonNLLLoss(log_input=False), ValueError, "log_input=False. is not supported"),
        (nn.PoissonNLLLoss(full=True), ValueError, "full=True. is not supported"),
        (nn.CTCLoss(), TypeError, "CTCLoss is not a supported loss: torch differentiates it only once"),
        (F.ctc_loss, TypeError, "ctc_loss is not a supported loss: torch differentiates it only once"),
        (nn.TripletMarginLoss(), TypeError, "TripletMarginLoss .* several outputs: return them as a tuple"),
        (nn.MultiMarginLoss(), TypeError, "MultiMarginLoss .* differentiates it only once"),
        (
            partial(F.margin_ranking_loss, margin=1.0),
            TypeError,
            "margin_ranking_loss is not .*: it takes several outputs",
        ),
        (nn.MSELoss, TypeError, r"got the class MSELoss: write MSELoss\(\)"),
        (Huber, TypeError, r"write Huber\(\)"),
        (None, TypeError, "NoneType is not a supported loss: pass a name .*, or a function"),
    ],
    ids=lambda v: getattr(v, "__name__", v if isinstance(v, str) else type(v).__name__),
)
def test_resolve_refuses(loss, error, message):
    with pytest.raises(error, match=message):
        losses.resolve(loss)
