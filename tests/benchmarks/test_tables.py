"""benchmarks/tables.py in small: its rows, the choice between settings, what is run again, and its verdicts."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

import learners
import rows
import tables
from learners import METHODS, Method
from rows import Split

# --- rows ---


@pytest.mark.parametrize("name", rows.embedded())
def test_splits(name):
    """The number draws the rows; classes have equal shares; a test row is no training row."""
    table = rows.embedded()[name]
    first, second, other = table.split(0), table.split(0), table.split(1)
    for part in ("train", "test"):
        for a, b in zip(getattr(first, part), getattr(second, part), strict=True):
            np.testing.assert_array_equal(a, b)
    assert not np.array_equal(first.train[0], other.train[0])
    (x, y), (x_test, y_test) = first.train, first.test
    assert np.isfinite(x).all()
    assert np.isfinite(y).all()
    if table.classes:
        shares = np.bincount(y) / len(y) - np.bincount(y_test) / len(y_test)
        assert np.abs(shares).max() < 1.5 / len(y_test)
    if "friedman" in name:
        assert (len(x), len(x_test)) == (200, 1000)
    else:
        assert len(x_test) == math.ceil((len(x) + len(x_test)) / 4)
        np.testing.assert_array_equal(sorted_rows(first), sorted_rows(other))  # the same rows, cut in another way


def sorted_rows(split):
    pairs = np.concatenate([np.c_[split.train], np.c_[split.test]])
    return pairs[np.lexsort(pairs.T)]


def test_clean_targets_have_no_noise():
    found = rows.embedded()
    x, y = found["friedman1, clean"].split(0).train
    expected = 10 * np.sin(np.pi * x[:, 0] * x[:, 1]) + 20 * (x[:, 2] - 0.5) ** 2 + 10 * x[:, 3] + 5 * x[:, 4]
    np.testing.assert_allclose(y, expected)
    x, noisy = found["friedman1"].split(0).train
    assert 0.8 < np.std(noisy - y) < 1.2


def test_training_rows_are_standardised():
    draw = np.random.default_rng(0)
    x, y = draw.normal(5, 3, (12, 3)), draw.normal(-2, 7, 12)
    x[:, 1] = 0.1  # constant
    split = Split((x[:9], y[:9]), (x[9:], y[9:]))
    scaled, spread = split.standardised(classes=False)
    np.testing.assert_allclose(scaled.train[0].mean(0), 0, atol=1e-12)
    np.testing.assert_allclose(scaled.train[0].std(0), [1, 0, 1], atol=1e-12)
    np.testing.assert_allclose(scaled.train[1] * spread + y[:9].mean(), y[:9])
    np.testing.assert_allclose(scaled.test[1] * spread + y[:9].mean(), y[9:])
    np.testing.assert_allclose(scaled.test[0][:, 0], (x[9:, 0] - x[:9, 0].mean()) / x[:9, 0].std())
    labels = np.arange(12) % 3
    scaled, _ = Split((x[:9], labels[:9]), (x[9:], labels[9:])).standardised(classes=True)
    np.testing.assert_array_equal(scaled.train[1], labels[:9])


def write_uci(folder: Path) -> np.ndarray:
    at = folder / "small" / "data"
    at.mkdir(parents=True)
    data = np.arange(24.0).reshape(8, 3) ** 2
    held = {
        "data": data, "index_features": [0, 2], "index_target": [1], "n_splits": [2],
        "index_train_0": [0, 1, 2, 3, 4, 5], "index_test_0": [7, 6],
        "index_train_1": [7, 6, 5, 4, 3], "index_test_1": [0, 1, 2],
    }  # fmt: skip
    for name, values in held.items():
        np.savetxt(at / f"{name}.txt", values)
    return data


def test_published_splits(tmp_path):
    data = write_uci(tmp_path)
    table = rows.published(tmp_path)["small"]
    assert table.splits == 2
    (x, y), (x_test, y_test) = table.split(0).train, table.split(0).test
    np.testing.assert_allclose(x, data[:6][:, [0, 2]])
    np.testing.assert_allclose(y, data[:6, 1])
    np.testing.assert_allclose(x_test, data[[7, 6]][:, [0, 2]])
    np.testing.assert_allclose(y_test, data[[7, 6], 1])
    assert len(table.split(1).train[1]) == 5


# --- settings ---


class Constant:
    """Predicts the mean and `off`; raises or is not finite if told to."""

    fits: list[tuple[float, int]] = []  # noqa: RUF012

    def __init__(self, off: float = 0.0, bad: str = "") -> None:
        self.off, self.bad = off, bad

    def fit(self, x, y):
        Constant.fits.append((self.off, len(y)))
        if self.bad == "raises":
            raise ValueError("Solver produced non-finite parameter weights")
        self.mean = float(np.mean(y))
        return self

    def predict(self, x):
        return np.full(len(x), math.nan if self.bad == "nan" else self.mean + self.off)


class Spread(Constant):
    """With a standard deviation that rises with the first column"""

    def predict(self, x, return_std=False):
        mean = super().predict(x)
        return (mean, 0.5 + x[:, 0] ** 2) if return_std else mean


def method(*settings, kind=Constant):
    return Method(lambda classes, seed, **setting: kind(**setting), settings or ({},))


@pytest.fixture
def split():
    draw = np.random.default_rng(0)
    return Split(
        (draw.normal(3, 2, (31, 2)), draw.normal(5, 4, 31)), (draw.normal(3, 2, (20, 2)), draw.normal(5, 4, 20))
    )


def test_the_best_setting_of_the_folds_is_fitted_to_all_rows(split):
    Constant.fits.clear()
    tried = method({"off": 2.0}, {"bad": "raises"}, {"off": 0.1}, {"bad": "nan"}, {"off": -1.0})
    found = learners.measured(tried, split, False, 0)
    assert found["setting"] == {"off": 0.1}
    assert Constant.fits[-1] == (0.1, 31)
    by_folds = [n for off, n in Constant.fits if off == 2.0]
    assert sorted(by_folds) == [20, 21, 21]  # two of three folds
    y, y_test = split.train[1], split.test[1]
    expected = np.sqrt(np.mean((y.mean() + 0.1 * y.std() - y_test) ** 2))
    assert found["rmse"] == pytest.approx(expected)
    assert "log likelihood" not in found


def test_likelihood_in_the_units_of_the_table(split):
    found = learners.measured(method(kind=Spread), split, False, 0)
    (x, y), (x_test, y_test) = split.train, split.test
    std = y.std() * (0.5 + ((x_test[:, 0] - x[:, 0].mean()) / x[:, 0].std()) ** 2)
    assert found["rmse"] == pytest.approx(np.sqrt(np.mean((y.mean() - y_test) ** 2)))
    normal = torch.distributions.Normal(torch.full((20,), y.mean()), torch.tensor(std))
    assert found["log likelihood"] == pytest.approx(normal.log_prob(torch.tensor(y_test)).mean().item())
    assert found["coverage"] == np.mean(np.abs(y_test - y.mean()) <= 1.96 * std)


def test_ties_of_accuracy_are_broken_by_the_log_loss():
    class Sure:
        classes_ = np.array([0, 1])

        def __init__(self, p):
            self.p = p

        def fit(self, x, y):
            return self

        def predict(self, x):
            return (x[:, 0] > 0).astype(int)

        def predict_proba(self, x):
            p = np.where(x[:, 0] > 0, self.p, 1 - self.p)
            return np.c_[1 - p, p]

    x = np.random.default_rng(0).normal(size=(40, 1))
    y = (x[:, 0] > 0).astype(int)
    tried = Method(lambda classes, seed, p: Sure(p), ({"p": 0.6}, {"p": 0.9}, {"p": 0.7}))
    found = learners.measured(tried, Split((x, y), (x, y)), True, 0)
    assert found["setting"] == {"p": 0.9}


# --- what is run ---


@pytest.fixture
def run(tmp_path, monkeypatch, capsys):
    """main() with fakes for two methods; the text, and the figures of --json."""
    monkeypatch.setitem(METHODS, "LM", method(kind=Spread))
    monkeypatch.setitem(METHODS, "lbfgs", method({"off": 1.0}))
    folder = tmp_path / "uci"
    write_uci(folder)

    def call(*given: str) -> tuple[str, dict]:
        out = tmp_path / "out.json"
        argv = ["tables.py", "--device", "cpu", "--commit", "abc", "--json", str(out), *given]
        monkeypatch.setattr(sys, "argv", argv)
        Constant.fits.clear()
        tables.main()
        return capsys.readouterr().out, json.loads(out.read_text())

    return call


SMALL = ("--tables", "iris, width", "wine, alcohol", "--splits", "2")


def test_runs_are_taken_up_again(run, tmp_path):
    path = tmp_path / "runs.jsonl"
    given = (*SMALL, "--runs", str(path), "--methods")
    run(*given, "LM")
    assert len(Constant.fits) == 4
    _, found = run(*given, "LM", "lbfgs")
    assert len(Constant.fits) == 4
    assert {(r["table"], r["split"], r["method"]) for r in found["results"]} == {
        (t, k, m) for t in ("iris, width", "wine, alcohol") for k in (0, 1) for m in ("LM", "lbfgs")
    }
    whole = path.read_text()
    path.write_text(whole[:-20])  # killed while it wrote
    _, again = run(*given, "LM", "lbfgs")
    assert len(Constant.fits) == 1

    def figures(told):
        return [{k: v for k, v in r.items() if k not in ("seconds", "searching")} for r in told["results"]]

    assert figures(again) == figures(found)
    run(*given, "LM", "lbfgs")
    assert Constant.fits == []
    run(*given, "LM", "lbfgs", "--again")
    assert len(Constant.fits) == 8
    assert run(*given, "LM", "lbfgs")[1]["results"] is not None
    assert Constant.fits == []


def test_the_report(run):
    told, found = run(*SMALL, "--methods", "LM", "lbfgs")
    values = {(r["table"], r["method"], r["split"]): r["rmse"] for r in found["results"]}
    ratios = []
    for table in ("iris, width", "wine, alcohol"):
        means = {m: (values[table, m, 0] + values[table, m, 1]) / 2 for m in ("LM", "lbfgs")}
        ratios.append(means["LM"] / means["lbfgs"])
    verdicts = {v["what"]: v for v in found["verdicts"]}
    for table, ratio in zip(("iris, width", "wine, alcohol"), ratios, strict=True):
        assert verdicts[f"{table}: RMSE ÷ the best network's"]["value"] == pytest.approx(ratio)
        assert verdicts[f"{table}: the longest fit, s"]["verdict"] == "holds"
    together = verdicts["geometric mean of these"]
    assert together["value"] == pytest.approx(math.sqrt(ratios[0] * ratios[1]))
    assert together["verdict"] == "holds"
    assert "| geometric mean" in told
    assert "iris, width, log likelihood" in told


def test_a_failure_is_told_and_nothing_is_concluded(run, monkeypatch):
    monkeypatch.setitem(METHODS, "LM", method({"bad": "raises"}, kind=Spread))
    told, found = run(*SMALL, "--methods", "LM", "lbfgs")
    assert "Failed: iris, width, split 0, LM: ValueError: Solver produced" in told
    verdicts = {v["what"]: v for v in found["verdicts"]}
    assert verdicts["iris, width: RMSE ÷ the best network's"]["verdict"] is None
    assert verdicts["geometric mean of these"]["verdict"] is None


def test_published_results_stand_beside(run, tmp_path, monkeypatch):
    monkeypatch.setitem(rows.PUBLISHED["PBP"], "small", (1.25, -2.5))
    told, found = run("--uci", str(tmp_path / "uci"), "--methods", "LM", "lbfgs")
    assert [r["split"] for r in found["results"]] == [0, 1, 0, 1]
    names = ("rmse", "log likelihood")
    rmse, likelihood = (next(line for line in told.splitlines() if f"small, {name}" in line) for name in names)
    assert [cell.strip() for cell in rmse.split("|")[4:8]] == ["1.25", "–", "–", "–"]
    assert [cell.strip() for cell in likelihood.split("|")[3:5]] == ["–", "-2.5"]
    assert "Hernández-Lobato" in told


@pytest.mark.parametrize(
    ("ours", "value", "word"), [(0.91, math.sqrt(3) / 2, "holds"), (0.88, 2 * math.sqrt(3), "misses")]
)
def test_accuracy_within_a_standard_error(ours, value, word):
    """Of 0.90, 0.92, 0.94: the best of 20's, whose standard error is 0.02/√3; the plain network's does not count."""

    def cell(*accuracies):
        return tables.Cell([{"accuracy": a} for a in accuracies])

    by = {
        "LM": cell(ours, ours, ours), "adam, best of 20": cell(0.7, 0.8, 0.9),
        "lbfgs, best of 20": cell(0.90, 0.92, 0.94), "lbfgs": cell(1.0, 1.0, 1.0),
    }  # fmt: skip
    verdict = tables.accurate("digits", by)
    assert verdict.value == pytest.approx(value)
    assert verdict.word == word
    assert "lbfgs, best of 20" in verdict.what
