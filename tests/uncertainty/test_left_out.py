"""Samples as the others predict them, against training without each."""

import copy
import warnings

import pytest
import torch

import marquardt as mq
from marquardt.uncertainty import expansion
from marquardt.uncertainty.posterior import Temper, predicted, without
from support.laplaced import classification, fitted, network, quiet, regression


def test_a_sample_that_is_left_out():
    """H without the rows of one sample, written out."""
    J, S = torch.randn(6, 2, 5, dtype=torch.float64), torch.randn(6, 2, 2, dtype=torch.float64)
    rows = S.mT @ J
    H = torch.einsum("nri,nrj->ij", rows, rows) + 0.3 * torch.eye(5)
    g = torch.randn(6, 2, dtype=torch.float64)
    shift, V = without((J @ torch.linalg.inv(H) @ J.mT)[:, None], S[:, None], g[:, None])
    for n in range(6):
        expected = J[n] @ torch.linalg.inv(H - rows[n].T @ rows[n]) @ J[n].T
        torch.testing.assert_close(V[n, 0], expected)
        torch.testing.assert_close(shift[n, 0], expected @ g[n])


def test_it_is_nearly_training_without_the_sample():
    model, x, y = classification(N=25, hidden=2, weight_decay=0.1)
    p = mq.posterior(model, "cross_entropy", (x, y), weight_decay=0.1)
    (found,) = predicted(p.at, p.precision, [Temper(1e-9)])
    total = here = 0.0
    for n in range(25):
        others = torch.arange(25) != n
        # the same weight decay in sums over samples
        other = fitted(copy.deepcopy(model), "cross_entropy", x[others], y[others], 0.1 * 25 / 24, steps=15)
        total -= float(other(x[n]).log_softmax(0)[y[n]].detach())
        here -= float(model(x[n]).log_softmax(0)[y[n]].detach())
    assert abs(found - total) < 0.1 * (total - here)


@pytest.mark.parametrize("loss", ["cross_entropy", "bce"])
def test_the_best_temperature_predicts_best(loss):
    model, x, y = classification(weight_decay=0.005)
    if loss == "bce":
        model = fitted(model, loss, x, torch.nn.functional.one_hot(y, 3).double(), 0.005)
        y = torch.nn.functional.one_hot(y, 3).double()
    p = mq.posterior(model, loss, (x, y), weight_decay=0.005)
    best = p.calibrated()
    here = best.temperature, best.sharpness
    others = [(here[0] * t, here[1] * s) for t, s in ((4.0, 1.0), (1.0, 1.3), (1.0, 1 / 1.3))]
    one, *rest = predicted(p.at, p.precision, [Temper(*x) for x in (here, *others)])
    assert one < min(rest)
    assert here[0] < 1
    assert f"temperature {best.temperature:.3g}" in repr(best)
    assert best.gamma == p.gamma
    assert best.log_evidence == p.log_evidence


def test_batches_and_weights_add_up():
    model, x, y = classification()
    weight = torch.randint(1, 3, (len(x),)).double()
    fitted(model, "cross_entropy", x, y, 0.02, weight)
    one = mq.posterior(model, "cross_entropy", (x, y, weight), weight_decay=0.02)
    parts = [(x[:20], y[:20], weight[:20]), (x[20:], y[20:], weight[20:])]
    other = mq.posterior(model, "cross_entropy", parts, weight_decay=0.02)
    torch.testing.assert_close(
        torch.tensor(predicted(one.at, one.precision, [Temper(0.1), Temper(1.0, 2.0)])),
        torch.tensor(predicted(other.at, other.precision, [Temper(0.1), Temper(1.0, 2.0)])),
    )


def test_a_temperature_scales_the_covariance():
    model, x, y = classification()
    p = mq.posterior(model, "cross_entropy", (x, y), weight_decay=0.02)
    cold = p.tempered(0.25)
    torch.testing.assert_close(cold.covariance(), 0.25 * p.covariance())
    draws = [q.sample(3, torch.Generator().manual_seed(0)) - p.at.theta for q in (p, cold)]
    torch.testing.assert_close(draws[1], 0.5 * draws[0])
    plain = model(x).softmax(1).detach()
    gaps = [float((q.probabilities(x) - plain).norm()) for q in (p, cold, p.tempered(1e-8))]
    assert gaps[0] > gaps[1] > gaps[2]
    assert gaps[2] < 1e-6
    for options, message in (((0,), "temperature=0: a finite"), ((1.0, -1.0), "sharpness=-1.0: a finite")):
        with pytest.raises(ValueError, match=message):
            p.tempered(*options)
    sharp = p.tempered(1e-8, 3.0)
    torch.testing.assert_close(sharp.probabilities(x), (3 * model(x)).softmax(1).detach())


def test_numbers_have_no_temperature():
    model, x, y = regression()
    with pytest.raises(ValueError, match="SquaredError has no classes"):
        mq.posterior(model, "mse", (x, y), weight_decay=1e-2).calibrated()


def digits(N=150):
    import sklearn.datasets as datasets

    x, y = (torch.tensor(t) for t in datasets.load_digits(return_X_y=True))
    order = torch.randperm(len(x))
    x, y = x[order] / 16, y[order]
    return (x[:N], y[:N]), (x[N : N + 500], y[N : N + 500])


def log_loss(p, data):
    x, y = data
    return float(-p.probabilities(x).log()[torch.arange(len(y)), y].mean())


def test_kronecker_factors_are_calibrated_by_the_exact_curvature():
    """Under their H some samples determine their own outputs by more than 1."""
    data, new = digits()
    model = fitted(network(64, 6, 10), "cross_entropy", *data, 1e-3, steps=25)
    p = mq.posterior(model, "cross_entropy", data, weight_decay=1e-3, curvature=mq.Kronecker())
    z, _, rows = p.at.functional(data[0])
    half = p.precision.half(rows.flatten(0, 2)).unflatten(0, rows.shape[:3])
    S = p.at.likelihood.loss.root(z, data[1], None).S
    assert torch.linalg.eigvalsh(S.mT @ half @ half.mT @ S).max() > 2
    best = p.calibrated()
    exact = mq.posterior(model, "cross_entropy", data, weight_decay=1e-3, curvature=mq.Dense())
    tempers = [Temper(best.temperature, best.sharpness), Temper(), Temper(1e-4)]
    one, *rest = predicted(p.at, p.precision, tempers, exact.precision)
    assert one <= min(rest)
    assert log_loss(best, new) < 0.5 * log_loss(p, new)


def test_what_is_too_large_for_that_is_refused(monkeypatch):
    model, x, y = classification()
    p = mq.posterior(model, "cross_entropy", (x, y), weight_decay=0.02, curvature=mq.Kronecker())
    monkeypatch.setattr(expansion, "LONG", 0.0)
    with pytest.raises(ValueError, match=r"exact H of 27 parameters is too large: pass calibrated\(data\)"):
        p.calibrated()
    assert p.calibrated((x, y)).temperature < 1


@pytest.mark.parametrize("options", [{"curvature": mq.Kronecker()}, {"params": "last"}, {}], ids=str)
def test_samples_of_their_own_calibrate(options):
    model, x, y = classification(weight_decay=1e-3)
    with quiet():  # of fewer data
        p = mq.posterior(model, "cross_entropy", (x[:40], y[:40]), weight_decay=1e-3, **options)
    weight = torch.randint(1, 3, (20,)).double()
    best = p.calibrated((x[40:], y[40:], weight))
    here = best.temperature, best.sharpness
    loss = {}
    for T, s in (here, (1.0, 1.0), (1e-4, 1.0), (here[0], 0.5 * here[1])):
        told = p.tempered(T, s).probabilities(x[40:])[torch.arange(20), y[40:]].log()
        loss[T, s] = -float(weight @ told)
    assert min(loss, key=loss.get) == here
    loader = [(x[40:50], y[40:50], weight[:10]), (x[50:], y[50:], weight[10:])]
    assert p.calibrated(loader).temperature == best.temperature


def test_layers_that_are_taken_as_known_are_told():
    model, x, y = classification()
    p = mq.posterior(model, "cross_entropy", (x, y), weight_decay=0.02, params="last")
    with pytest.warns(UserWarning, match=r"12 other parameters are taken as known.*calibrated\(data\)") as told:
        p.calibrated()
    assert told[0].filename == __file__
    for t in model[0].parameters():
        t.requires_grad_(False)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        p.calibrated()


def test_a_temperature_at_the_end_is_told():
    model, x, y = classification(weight_decay=1e-4)
    p = mq.posterior(model, "cross_entropy", (x, y), weight_decay=1e-4)
    with pytest.warns(UserWarning, match="temperature 10 is the highest that was tried"):
        p.calibrated((x, (y + 1) % 3))
