"""A loss from its name or from a module of torch.nn."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from marquardt import losses
from marquardt.losses import BinaryCrossEntropy, CrossEntropy, Huber, Poisson, Residual, SquaredError
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


class MyLoss(nn.MSELoss):
    def forward(self, z, y):
        return 2 * super().forward(z, y)


@pytest.mark.parametrize(
    ("loss", "error", "message"),
    [
        ("crossentropy", ValueError, "unknown loss 'crossentropy'. Did you mean 'cross_entropy'.*mse, squared_error"),
        ("MSE", ValueError, "Did you mean 'mse'"),
        ("zzzzz", ValueError, "unknown loss 'zzzzz'. The names are mse, .*residual"),
        (nn.MSELoss(reduction="none"), ValueError, "got 'none'"),
        (nn.BCEWithLogitsLoss(weight=torch.ones(3)), ValueError, "weight=…. is not supported: use pos_weight"),
        (nn.SmoothL1Loss(beta=0.0), ValueError, "beta=0.0. has no curvature"),
        (nn.PoissonNLLLoss(log_input=False), ValueError, "log_input=False. is not supported"),
        (nn.PoissonNLLLoss(full=True), ValueError, "full=True. is not supported"),
        (nn.L1Loss(), TypeError, "L1Loss is not a supported loss.*HuberLoss"),
        (nn.BCELoss(), TypeError, "return logits and use nn.BCEWithLogitsLoss"),
        (nn.NLLLoss(), TypeError, "return logits and use nn.CrossEntropyLoss"),
        (nn.KLDivLoss(), TypeError, "KLDivLoss is not a supported loss: pass a name"),
        (MyLoss(), TypeError, "MyLoss is not a supported loss"),
        (nn.MSELoss, TypeError, r"got the class MSELoss: write MSELoss\(\)"),
        (Huber, TypeError, r"write Huber\(\)"),
        (F.cross_entropy, TypeError, "cross_entropy is not a supported loss"),
        (None, TypeError, "NoneType is not a supported loss"),
    ],
    ids=lambda v: getattr(v, "__name__", str(v)),
)
def test_resolve_refuses(loss, error, message):
    with pytest.raises(error, match=message):
        losses.resolve(loss)
