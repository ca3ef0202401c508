"""LMRegressor and LMClassifier as scikit-learn's estimators: its own checks, and what these leave out."""

from __future__ import annotations

import pickle
import warnings

import numpy as np
import pytest
from sklearn.base import clone
from sklearn.datasets import load_breast_cancer, load_diabetes, load_iris, make_friedman1
from sklearn.model_selection import GridSearchCV, cross_val_score, train_test_split
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from sklearn.utils.estimator_checks import parametrize_with_checks

from marquardt.sklearn import LMClassifier, LMRegressor
from support.command_line import program

QUICK = {"members": 2, "max_steps": 15, "random_state": 0}


@parametrize_with_checks([LMRegressor(members=2, max_steps=15), LMClassifier(members=2, max_steps=15)])
def test_checks_of_scikit_learn(estimator, check):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        check(estimator)


def numbers(N: int = 120, noise: float = 1.0):
    return make_friedman1(N, noise=noise, random_state=0)


def test_defaults_are_good_on_clean_and_noisy_tables():
    X, y = make_friedman1(400, noise=1.0, random_state=1)
    clean = make_friedman1(1400, random_state=2)
    model = LMRegressor(random_state=0).fit(X, y)
    error = np.sqrt(np.mean((model.predict(clean[0]) - clean[1]) ** 2))
    assert error < 0.6  # a fifth of the spread of the targets is noise, boosted trees have 1.5
    assert sum(len(history) for history in model.history_) > 100


def test_intervals_hold_what_they_promise():
    X, y = make_friedman1(1300, noise=1.0, random_state=3)
    model = LMRegressor(random_state=0, max_steps=60).fit(X[:300], y[:300])
    mean, std = model.predict(X[300:], return_std=True)
    assert mean.shape == std.shape == (1000,)
    assert 0.90 < np.mean(np.abs(y[300:] - mean) < 1.96 * std) < 0.99
    np.testing.assert_allclose(mean, model.predict(X[300:]))


def test_classes_and_their_probabilities():
    X, y = load_breast_cancer(return_X_y=True)
    names = np.array(["bad", "good"])[y]
    X, X_new, names, true = train_test_split(X, names, random_state=0)
    model = LMClassifier(**QUICK).fit(X, names)
    assert model.score(X_new, true) > 0.93
    p = model.predict_proba(X_new)
    np.testing.assert_allclose(p.sum(1), 1)
    assert list(model.classes_) == ["bad", "good"]
    assert (model.predict(X_new) == model.classes_[p.argmax(1)]).all()


@pytest.mark.parametrize("kind", [LMRegressor, LMClassifier])
def test_two_fits_with_one_state_are_identical_and_others_are_not(kind):
    X, y = load_iris(return_X_y=True)
    first, second, other = (kind(**QUICK | {"random_state": s}).fit(X, y) for s in (0, 0, 1))
    predict = "predict_proba" if kind is LMClassifier else "predict"
    a, b, c = (getattr(model, predict)(X) for model in (first, second, other))
    assert (a == b).all()
    assert (a != c).any()
    assert clone(first).get_params() == first.get_params()


PROGRAM = """
import pickle, sys, numpy
model, X = pickle.load(open(sys.argv[1], "rb"))
numpy.save(sys.argv[2], numpy.stack(model.predict(X, return_std=True)))
"""


def test_a_pickle_predicts_the_same_in_another_process(tmp_path):
    X, y = numbers()
    model = LMRegressor(**QUICK).fit(X, y)
    (tmp_path / "model").write_bytes(pickle.dumps((model, X)))
    result = program("-c", PROGRAM, tmp_path / "model", tmp_path / "found.npy")
    assert result.returncode == 0, result.stderr
    np.testing.assert_allclose(np.load(tmp_path / "found.npy"), np.stack(model.predict(X, return_std=True)), rtol=1e-12)


def test_pipelines_grids_and_cross_validation():
    X, y = numbers()
    pipe = make_pipeline(StandardScaler(), LMRegressor(**QUICK))
    assert cross_val_score(pipe, X, y, cv=3).mean() > 0.5
    grid = GridSearchCV(pipe, {"lmregressor__hidden": [(2,), (8,)], "lmregressor__members": np.array([1, 2])}, cv=2)
    grid.fit(X, y)
    assert set(grid.best_params_) == {"lmregressor__hidden", "lmregressor__members"}


def test_several_targets_have_the_shape_that_was_given():
    X, y = numbers()
    Y = np.stack((y, -2 * y + 5, X[:, 0]), 1)
    model = LMRegressor(**QUICK).fit(X, Y)
    mean, std = model.predict(X[:7], return_std=True)
    assert mean.shape == std.shape == (7, 3)
    assert LMRegressor(**QUICK).fit(X, Y[:, :1]).predict(X[:7]).shape == (7, 1)
    assert model.score(X, Y) > 0.5


def test_units_and_an_outlier_do_not_matter():
    X, y = numbers(200)
    plain = LMRegressor(**QUICK).fit(X, y).predict(X)
    scaled = LMRegressor(**QUICK).fit(1024 * X, y / 4096).predict(1024 * X)
    np.testing.assert_allclose(4096 * scaled, plain, rtol=1e-6)
    y[0] += 1000
    found = LMRegressor(**QUICK).fit(X, y).predict(X)
    assert np.isfinite(found).all()
    assert np.abs(found[1:]).max() < 1000


def test_fewer_samples_than_parameters():
    X, y = load_diabetes(return_X_y=True)
    model = LMRegressor(random_state=0).fit(X[:30], y[:30])
    error = np.sqrt(np.mean((model.predict(X[30:]) - y[30:]) ** 2))
    assert error < 1.2 * y[30:].std()


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"hidden": "big"}, "hidden='big'"),
        ({"hidden": (0,)}, "hidden=0"),
        ({"activation": "sine"}, "activation='sine'"),
        ({"members": 0}, "members=0"),
        ({"max_steps": 0}, "steps=0"),
        ({"max_steps": 2.5}, "steps=2.5"),
        ({"patience": -1}, "patience=-1"),
        ({"patience": True}, "patience=True"),
    ],
)
def test_bad_parameters_are_named_when_they_are_used(given, words):
    model = LMRegressor(**given)
    with pytest.raises(ValueError, match=words):
        model.fit(*numbers(30))
    with pytest.raises(ValueError, match="weight"):
        LMRegressor(**QUICK).fit(*numbers(30), sample_weight=np.zeros(30))


def test_verbose_says_what_is_done(capsys):
    LMRegressor(verbose=True, **QUICK).fit(*numbers(60))
    printed = capsys.readouterr().out
    assert "silu" in printed
    assert "is not explained" in printed
