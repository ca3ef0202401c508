"""Outputs that are probabilities or their logarithms: the same steps as from logits."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.func import grad

from marquardt.losses import BinaryProbabilities, KLDivergence, NegativeLogLikelihood, resolve
from support.cases import mlp
from support.losses import (
    CLASS_WEIGHT,
    IMAGE,
    MATRIX,
    blocks,
    close,
    conforms,
    f64,
    fraction,
    is_torchs,
    labels,
    normal,
)
from support.losses import some_ignored as ignored
from support.steps import lm, theta
from support.unchanged import refused


def logs(shape):
    return normal(shape).log_softmax(1)


@pytest.mark.parametrize("shape", [MATRIX, IMAGE], ids=str)
@pytest.mark.parametrize("targets", [labels, ignored], ids=lambda f: f.__name__)
@pytest.mark.parametrize("weight", [None, CLASS_WEIGHT], ids=["plain", "weighted"])
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_nll_is_torchs(shape, targets, weight, reduction):
    module = nn.NLLLoss(weight, reduction=reduction)
    is_torchs(module, resolve(module), logs(shape), targets(shape))


@pytest.mark.parametrize("shape", [MATRIX, IMAGE], ids=str)
@pytest.mark.parametrize("log_target", [False, True])
@pytest.mark.parametrize("reduction", ["mean", "sum", "batchmean"])
def test_kl_is_torchs(shape, log_target, reduction):
    module = nn.KLDivLoss(reduction=reduction, log_target=log_target)
    q = logs(shape)
    is_torchs(module, resolve(module), logs(shape), q if log_target else q.exp())


def test_kl_of_masses():
    """Targets that do not add up to 1 have another least value: at p = q/Q."""
    z, q = logs(MATRIX), 3 * fraction(MATRIX)
    conforms(KLDivergence(), z, q)
    close(KLDivergence().value((q / q.sum(1, keepdim=True)).log(), q), KLDivergence().lower_bound(z, q))


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("weight", [None, CLASS_WEIGHT], ids=["plain", "weighted"])
def test_bce_is_torchs(reduction, weight):
    z, y = fraction(MATRIX), torch.randint(2, MATRIX).to(f64)
    z[0, 0], z[1, 1] = 0.0, 1.0  # where torch cuts the logarithm off
    module = nn.BCELoss(weight, reduction=reduction)
    is_torchs(module, resolve(module), z, y)
    close(resolve(module).slope(z, y), grad(lambda z: nn.BCELoss(weight, reduction="sum")(z, y))(z), 1e-10)


def test_conforms():
    torch.manual_seed(0)
    conforms(BinaryProbabilities(output_weight=CLASS_WEIGHT), 0.1 + 0.4 * fraction(MATRIX), fraction(MATRIX))
    conforms(NegativeLogLikelihood(class_weight=CLASS_WEIGHT), logs(MATRIX), labels(MATRIX))


def test_the_curvature_is_the_mean_hessian_of_predicted_targets():
    z = 0.1 + 0.8 * fraction(MATRIX)
    loss = BinaryProbabilities(output_weight=CLASS_WEIGHT)
    no, yes = (blocks(loss, z, torch.full_like(z, y)) for y in (0.0, 1.0))
    S = loss.root(z, fraction(MATRIX)).S
    close(S @ S.mT, loss.group(z)[..., None] * yes + (1 - loss.group(z)[..., None]) * no, 1e-10)


@pytest.mark.usefixtures("double")
@pytest.mark.parametrize(
    ("end", "of_probabilities", "of_logits", "targets"),
    [
        (nn.LogSoftmax(1), nn.NLLLoss(), "cross_entropy", labels),
        (nn.LogSoftmax(1), nn.KLDivLoss(reduction="batchmean"), "cross_entropy", lambda s: normal(s).softmax(1)),
        (nn.Sigmoid(), nn.BCELoss(), "bce", lambda s: torch.randint(2, s).to(f64)),
    ],
    ids=["nll", "kl", "bce"],
)
def test_the_steps_are_those_of_logits(end, of_probabilities, of_logits, targets):
    model = mlp(2, 4, 3)
    ended = nn.Sequential(copy.deepcopy(model), end)
    x, y = torch.randn(4, 2), targets(MATRIX)
    one, two = lm(ended, of_probabilities), lm(model, of_logits)
    for _ in range(4):
        one.step(x, y)
        two.step(x, y)
    close(theta(ended), theta(model), 1e-7)


def test_what_is_refused():
    z, y = normal(MATRIX), labels(MATRIX)
    with refused("the logarithm of Σ exp(outputs)[0]", "log_softmax", "CrossEntropyLoss"):
        NegativeLogLikelihood().check(z, y)
    with refused("KLDivergence needs a tensor of probabilities", "torch.int64"):
        KLDivergence().check(z.log_softmax(1), y)
    with refused("targets[0, 0] is -1", "must not be negative"):
        KLDivergence().check(z.log_softmax(1), -torch.ones_like(z))
    with refused("no label_smoothing"):
        KLDivergence(label_smoothing=0.1)
    p = fraction(MATRIX)
    with refused("outputs[0, 0] is 1.5", "sigmoid"):
        BinaryProbabilities().check(p - p + 1.5, p)
    with refused("output_weight of shape (4, 3) does not broadcast"):
        BinaryProbabilities(output_weight=torch.ones(4, 3)).check(p, p)
