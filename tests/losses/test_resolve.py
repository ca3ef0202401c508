"""A loss from its name or from a function; test_formulas.py has the losses of torch.nn."""

from __future__ import annotations

from functools import partial

import pytest
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
    SoftMargin,
    SquaredError,
)
from marquardt.losses.resolve import NAMES
from support.losses import CLASS_WEIGHT
from support.unchanged import refused


def test_every_name_is_a_loss_with_its_defaults():
    for name, loss in NAMES.items():
        assert losses.resolve(name) == type(loss)()
        assert type(loss).__name__ in losses.__all__
    kinds = {"mse": SquaredError, "bce": BinaryCrossEntropy, "nll": NegativeLogLikelihood, "smooth_l1": Huber}
    assert {name: type(losses.resolve(name)) for name in kinds} == kinds
    assert losses.resolve(Huber(delta=3.0)) == Huber(delta=3.0)


class MyLoss(nn.MSELoss):
    def forward(self, z, y):
        return 2 * super().forward(z, y)


@pytest.mark.parametrize(
    ("fn", "loss"),
    [
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
        *((fn, Function(fn)) for fn in (MyLoss(), lambda z, y: z - y, partial(F.mse_loss, reduction="none"))),
        *((fn, Function(fn)) for fn in (partial(F.mse_loss, weight=CLASS_WEIGHT),)),
    ],
    ids=lambda v: getattr(v, "__name__", type(v).__name__),
)
def test_functions(fn, loss):
    assert losses.resolve(fn) == loss


@pytest.mark.parametrize(
    ("loss", "says"),
    [
        ("crossentropy", "unknown loss 'crossentropy'. Did you mean 'cross_entropy'? The names are mse, squared_error"),
        ("MSE", "Did you mean 'mse'"),
        ("MAE", "Did you mean 'l1'"),
        ("zzzzz", "unknown loss 'zzzzz'. The names are mse, "),
        (nn.MSELoss(reduction="none"), "got 'none'"),
        (nn.SmoothL1Loss(beta=-1.0), "beta must not be negative"),
        (nn.MultiLabelSoftMarginLoss(reduction="sum"), "the number C of classes: use losses.Binary"),
        (nn.PoissonNLLLoss(log_input=False), "log_input=False) is not supported"),
        (nn.PoissonNLLLoss(full=True), "full=True) is not supported"),
        (nn.CTCLoss(), "CTCLoss is not a supported loss: torch differentiates it only once"),
        (F.ctc_loss, "ctc_loss is not a supported loss: torch differentiates it only once"),
        (nn.TripletMarginLoss(), "TripletMarginLoss is not a supported loss: it takes several outputs: return them as"),
        (nn.MultiMarginLoss(), "MultiMarginLoss is not a supported loss: torch differentiates it only once"),
        (nn.AdaptiveLogSoftmaxWithLoss(4, 9, [3]), "it has parameters that would not train; put it into the model"),
        (partial(F.margin_ranking_loss, margin=1.0), "margin_ranking_loss is not a supported loss: it takes several"),
        (nn.MSELoss, "got the class MSELoss: write MSELoss()"),
        (Huber, "write Huber()"),
        (None, "NoneType is not a supported loss: pass a name (mse, "),
    ],
    ids=lambda v: getattr(v, "__name__", v if isinstance(v, str) else type(v).__name__),
)
def test_resolve_refuses(loss, says):
    with refused(says):
        losses.resolve(loss)
