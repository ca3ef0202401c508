"""The methods of benchmarks/tables.py: estimators with scikit-learn's interface, some chosen from 20 settings."""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from inspect import signature
from typing import Any

import numpy as np
from sklearn.ensemble import HistGradientBoostingClassifier, HistGradientBoostingRegressor
from sklearn.exceptions import ConvergenceWarning
from sklearn.metrics import log_loss
from sklearn.model_selection import KFold, StratifiedKFold
from sklearn.neural_network import MLPClassifier, MLPRegressor

from rows import Array, Pair, Split

SETTINGS = 20
FOLDS = 3  # of the training rows, in a search
ENOUGH = {"adam": 2000, "lbfgs": 5000}  # iterations
FUNCTIONS = 50_000  # calls that lbfgs may take, so that iterations are what ends it
Setting = dict[str, Any]


@dataclass(frozen=True)
class Method:
    """`build(classes, seed, **setting)` is the estimator; if there are several settings, folds choose between them."""

    build: Callable[..., Any]
    settings: tuple[Setting, ...] = ({},)


# --- what is searched ---


def searched(solver: str) -> tuple[Setting, ...]:
    """The default with enough iterations, and 19 settings of a fixed seed.

    MLP's alpha is a weight decay of alpha/N on a mean loss, so that 100 is much to some hundred rows, little to many.
    The number of iterations of lbfgs is a choice too, as early stopping; adam has its own.
    """
    draw = np.random.default_rng({"adam": 1, "lbfgs": 2}[solver])

    def one(*choices: Any) -> Any:
        return choices[draw.integers(len(choices))]

    def between(low: float, high: float) -> float:
        return float(f"{10 ** draw.uniform(math.log10(low), math.log10(high)):.3g}")

    def drawn() -> Setting:
        common = {
            "hidden_layer_sizes": one((5,), (10,), (20,), (50,), (100,), (200,), (20, 20), (50, 50), (100, 100)),
            "activation": one("relu", "tanh"), "alpha": between(1e-4, 100), "tol": one(1e-4, 1e-6),
        }  # fmt: skip
        if solver == "lbfgs":
            return common | {"max_iter": one(50, 200, 1000, ENOUGH[solver])}
        return common | {
            "learning_rate_init": between(5e-4, 2e-2), "batch_size": one(32, "auto"),
            "early_stopping": one(False, True), "max_iter": ENOUGH[solver],
        }  # fmt: skip

    return {"max_iter": ENOUGH[solver]}, *(drawn() for _ in range(SETTINGS - 1))


# --- the methods ---


def mlp(solver: str) -> Callable[..., Any]:
    def build(classes: bool, seed: int, **setting: Any) -> Any:
        kind = MLPClassifier if classes else MLPRegressor
        most = {"max_fun": FUNCTIONS} if "max_iter" in setting else {}
        return kind(solver=solver, random_state=seed, **most, **setting)

    return build


def trees(classes: bool, seed: int) -> Any:
    return (HistGradientBoostingClassifier if classes else HistGradientBoostingRegressor)(random_state=seed)


def lm(classes: bool, seed: int) -> Any:
    from marquardt.sklearn import LMClassifier, LMRegressor

    return (LMClassifier if classes else LMRegressor)(random_state=seed)


METHODS = {
    "LM": Method(lm),
    "adam": Method(mlp("adam")),
    "adam, long": Method(mlp("adam"), ({"max_iter": ENOUGH["adam"]},)),
    "adam, best of 20": Method(mlp("adam"), searched("adam")),
    "lbfgs": Method(mlp("lbfgs")),
    "lbfgs, long": Method(mlp("lbfgs"), ({"max_iter": ENOUGH["lbfgs"]},)),
    "lbfgs, best of 20": Method(mlp("lbfgs"), searched("lbfgs")),
    "trees": Method(trees),
}
NETWORKS = [name for name in METHODS if name.startswith(("adam", "lbfgs"))]
SEARCHED = [name for name in METHODS if name.endswith("best of 20")]


# --- one fit, and a search ---


def fitted(estimator: Any, rows: Pair) -> tuple[Any, bool]:
    """And whether it says that it converged."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        estimator.fit(*rows)
    return estimator, not any(issubclass(w.category, ConvergenceWarning) for w in caught)


def error(estimator: Any, rows: Pair, classes: bool) -> tuple[float, float]:
    """Squared error; of classes the share that is wrong, and the log loss for ties."""
    x, y = rows
    if not classes:
        return float(np.mean((estimator.predict(x) - y) ** 2)), 0.0
    return float(np.mean(estimator.predict(x) != y)), crossed(estimator, rows)


def crossed(estimator: Any, rows: Pair) -> float:
    return float(log_loss(rows[1], estimator.predict_proba(rows[0]), labels=estimator.classes_))


def folds(rows: Pair, classes: bool, seed: int, count: int) -> list[Pair]:
    kind = StratifiedKFold if classes else KFold
    return list(kind(count, shuffle=True, random_state=seed).split(*rows))


def tried(method: Method, setting: Setting, rows: Pair, classes: bool, seed: int, count: int) -> tuple[float, float]:
    """Means over the folds; ∞ if a fit is not finite."""
    x, y = rows
    found = []
    for inner, held_out in folds(rows, classes, seed, count):
        try:
            estimator, _ = fitted(method.build(classes, seed, **setting), (x[inner], y[inner]))
            found.append(error(estimator, (x[held_out], y[held_out]), classes))
        except ValueError:  # "Solver produced non-finite parameter weights", or predictions that are not finite
            return math.inf, math.inf
    first, second = np.mean(found, 0)
    return (float(first), float(second)) if math.isfinite(first + second) else (math.inf, math.inf)


def measured(method: Method, split: Split, classes: bool, seed: int, count: int = FOLDS) -> dict[str, Any]:
    """The method with the setting that is best in the training rows, fitted to all of these, on the test rows."""
    scaled, spread = split.standardised(classes)
    began = time.perf_counter()
    chosen = method.settings[0]
    if len(method.settings) > 1:
        chosen = min(method.settings, key=lambda s: tried(method, s, scaled.train, classes, seed, count))
    searching = time.perf_counter() - began

    began = time.perf_counter()
    estimator, converged = fitted(method.build(classes, seed, **chosen), scaled.train)
    seconds = time.perf_counter() - began
    told = {"seconds": seconds, "searching": searching, "converged": converged, "setting": chosen,
            "iterations": getattr(estimator, "n_iter_", None)}  # fmt: skip
    return told | (labelled(estimator, scaled.test) if classes else predicted(estimator, scaled.test, spread))


def labelled(estimator: Any, test: Pair) -> dict[str, float]:
    return {"accuracy": 1 - error(estimator, test, True)[0], "log loss": crossed(estimator, test)}


def predicted(estimator: Any, test: Pair, spread: float) -> dict[str, float]:
    """In the units of the table; likelihood and coverage if the estimator gives a standard deviation."""
    x, y = test
    if "return_std" not in signature(estimator.predict).parameters:
        return {"rmse": spread * rms(estimator.predict(x) - y)}
    mean, std = estimator.predict(x, return_std=True)
    z = (y - mean) / std
    likelihood = -0.5 * z**2 - np.log(spread * std) - 0.5 * math.log(2 * math.pi)
    return {"rmse": spread * rms(mean - y), "log likelihood": float(likelihood.mean()),
            "coverage": float(np.mean(np.abs(z) <= 1.96))}  # fmt: skip


def rms(residuals: Array) -> float:
    return float(np.sqrt(np.mean(residuals**2)))
