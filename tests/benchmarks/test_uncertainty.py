"""benchmarks/uncertainty.py in small: its data sets, and its measures against what they are by hand."""

import pytest
import torch

import uncertainty


def test_the_data_sets_are_as_announced():
    assert len(uncertainty.SETS) == len({name for name, *_ in uncertainty.SETS}) == 20
    for _, function, inputs, samples, noise in uncertainty.SETS:
        assert 1 <= inputs <= 8
        assert 50 <= samples <= 1000
        assert noise > 0
        y = function(2 * torch.rand(500, inputs, dtype=torch.float64) - 1)
        assert y.shape == (500,)
        assert bool(y.isfinite().all())
        assert float(y.std()) > 0.05
    assert uncertainty.NEW >= 1000


def test_the_calibration_error():
    p = torch.tensor([[0.9, 0.1], [0.9, 0.1], [0.6, 0.4], [0.4, 0.6]], dtype=torch.float64)
    y = torch.tensor([0, 1, 0, 1])
    # one of two at 0.9, two of two at 0.6
    assert uncertainty.calibration_error(p, y) == pytest.approx(0.5 * 0.4 + 0.5 * 0.4)
    found = uncertainty.scores(p, y)
    assert found["accuracy"] == 0.75
    assert found["nll"] == pytest.approx(-float(torch.tensor([0.9, 0.1, 0.6, 0.6]).log().mean()))


def test_verdicts(capsys):
    run = dict.fromkeys(("samples", "inputs", "parameters"), 1) | dict.fromkeys(
        ("sigma", "noise", "gamma", "seconds"), 1.0
    )
    run |= {"name": "one", "covered by noise alone": 0.9}
    for covered, holds in ((0.95, True), (0.92, False), (0.98, False)):
        assert list(uncertainty.report_intervals([run | {"covered": covered}]).values()) == [holds]
    good, bad = {"nll": 0.1, "ece": 0.01, "accuracy": 1.0}, {"nll": 0.2, "ece": 0.005, "accuracy": 1.0}
    split = {"plain": bad, "map": good, "laplace": good, "laplace, T = 1": good}
    assert list(uncertainty.report_digits([split]).values()) == [True, False, False, False]
    assert "mean 0.9500" in capsys.readouterr().out
