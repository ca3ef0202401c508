"""LMRegressor and LMClassifier: committees of networks trained by Levenberg–Marquardt, as scikit-learn's estimators."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

try:
    import numpy as np
    from sklearn.base import BaseEstimator, ClassifierMixin, RegressorMixin  # type: ignore[import-untyped]
    from sklearn.utils import check_random_state  # type: ignore[import-untyped]
    from sklearn.utils.multiclass import check_classification_targets  # type: ignore[import-untyped]
    from sklearn.utils.validation import (  # type: ignore[import-untyped]
        _check_sample_weight,
        check_is_fitted,
        validate_data,
    )
except ImportError as missing:
    raise ImportError(
        f"marquardt.sklearn needs scikit-learn 1.6 or later ({missing}): pip install 'marquardt[sklearn]'"
    ) from None

from . import tabular
from .training import History


class _LM(BaseEstimator):  # type: ignore[misc]
    """What both estimators have."""

    _task: str

    def __init__(
        self, hidden: str | Sequence[int] = "auto", *, activation: str = "auto", members: int | str = "auto",
        early_stopping: bool = True, patience: int | None = 20, max_steps: int | None = None,
        random_state: Any = None, verbose: bool = False,
    ) -> None:  # fmt: skip
        self.hidden = hidden
        self.activation = activation
        self.members = members
        self.early_stopping = early_stopping
        self.patience = patience
        self.max_steps = max_steps
        self.random_state = random_state
        self.verbose = verbose

    @property
    def history_(self) -> list[History]:
        """The steps of every member"""
        check_is_fitted(self)
        return self.committee_.history

    def _settings(self) -> tabular.Settings:
        hidden = self.hidden if isinstance(self.hidden, str) else tuple(map(_plain, np.atleast_1d(self.hidden)))
        seed = int(check_random_state(self.random_state).randint(np.iinfo(np.int32).max))
        return tabular.Settings(
            task=self._task, hidden=hidden, activation=self.activation, members=_plain(self.members),
            steps=_plain(self.max_steps), patience=_plain(self.patience), held_out=bool(self.early_stopping), seed=seed,
        )  # fmt: skip

    def _train(self, X: Any, y: Any, sample_weight: Any, classes: int | None = None) -> None:
        weight = None
        if sample_weight is not None:
            weight = _check_sample_weight(sample_weight, X, dtype=np.float64, ensure_non_negative=True)
            if not weight.sum() > 0:
                raise ValueError("sample_weight is 0 for every sample: there is nothing to train on")
        self.committee_ = tabular.train(
            _tensor(X), torch.from_numpy(np.array(y)), self._settings(), classes=classes,
            weight=None if weight is None else _tensor(weight), watch=_say if self.verbose else None,
        )  # fmt: skip
        if self.verbose:
            print("\n".join(self.committee_.says))

    def _checked(self, X: Any) -> torch.Tensor:
        check_is_fitted(self)
        return _tensor(validate_data(self, X, dtype=np.float64, reset=False))


class LMRegressor(RegressorMixin, _LM):  # type: ignore[misc]
    """A committee of networks for one target or several.

    >>> regressor = LMRegressor(hidden=(8,), members=2, max_steps=20, random_state=0).fit(X, t)
    >>> mean, std = regressor.predict(X, return_std=True)

    Inputs and targets are standardised inside. With hidden="auto" three kinds of networks are trained, each several
    times on another part of the samples, regularised by evidence and stopped by the part that was left out; how much
    each kind counts, and how wide the intervals are, comes from these parts too. A table of some hundred rows takes
    seconds, and the work is bounded for large ones.

    A `sample_weight` that is a whole number counts as that many equal samples; weights that are not whole are relative.
    `committee_` is what was trained, `committee_.says` what it is made of, `history_` the steps of each member.

    Args:
        hidden: "auto", or the sizes of the hidden layers.
        activation: "auto", "tanh", "silu", "relu" or "identity".
        members: networks of a kind; "auto" is 5, or 3 on large tables.
        early_stopping: whether members leave out a part of the samples. Otherwise all of them train on everything until
            `max_steps`, regularised by evidence alone.
        patience: steps without a lower error on what is left out; None goes on to the end.
        max_steps: of each member; None is 250, or fewer on large tables.
        random_state: a seed, or a generator of NumPy.
        verbose: whether the training says how it goes.
    """

    _task = "regression"

    def fit(self, X: Any, y: Any, sample_weight: Any = None) -> LMRegressor:
        X, y = validate_data(self, X, y, dtype=np.float64, multi_output=True, y_numeric=True)
        y = np.asarray(y, dtype=np.float64)
        self._train(X, y[:, None] if y.ndim == 1 else y, sample_weight)
        self._flat = y.ndim == 1
        return self

    def predict(self, X: Any, return_std: bool = False) -> Any:
        """Targets, and with `return_std` the standard deviation of a new one: noise and want of data together."""
        x = self._checked(X)
        if not return_std:
            return self._shaped(self.committee_.mean(x))
        mean, std = self.committee_.predict(x)
        return self._shaped(mean), self._shaped(std)

    def _shaped(self, t: torch.Tensor) -> Any:
        return t[:, 0].numpy() if self._flat else t.numpy()

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.target_tags.multi_output = True
        return tags


class LMClassifier(ClassifierMixin, _LM):  # type: ignore[misc]
    """A committee of networks for two classes or more.

    >>> classifier = LMClassifier(hidden=(8,), members=2, max_steps=20, random_state=0).fit(X, t > 0)
    >>> classes, probabilities = classifier.predict(X), classifier.predict_proba(X)

    Probabilities are softened by how uncertain the networks are, by as much as
    makes the samples that were left out most likely.

    Args:
        hidden: "auto", or the sizes of the hidden layers.
        activation: "auto", "tanh", "silu", "relu" or "identity".
        members: networks of a kind; "auto" is 5, or 3 on large tables.
        early_stopping: whether members leave out a part of the samples.
        patience: steps without a lower error on what is left out; None goes on to the end.
        max_steps: of each member; None is 250, or fewer on large tables.
        random_state: a seed, or a generator of NumPy.
        verbose: whether the training says how it goes.
    """

    _task = "classification"

    def fit(self, X: Any, y: Any, sample_weight: Any = None) -> LMClassifier:
        X, y = validate_data(self, X, y, dtype=np.float64)
        check_classification_targets(y)
        self.classes_, index = np.unique(y, return_inverse=True)
        self._train(X, index, sample_weight, len(self.classes_))
        return self

    def predict_proba(self, X: Any) -> Any:
        x = self._checked(X)
        return self.committee_.probabilities(x).numpy()

    def predict(self, X: Any) -> Any:
        best = self.predict_proba(X).argmax(1)
        return self.classes_[best]


def _tensor(values: Any) -> torch.Tensor:
    return torch.from_numpy(np.array(values, dtype=np.float64))


def _plain(value: Any) -> Any:
    """Integers of numpy, as a grid of parameters has them"""
    return value.item() if isinstance(value, np.generic) else value


def _say(event: dict[str, Any]) -> None:
    if event["step"] % 10 == 0 or event["step"] == event["steps"]:
        print(f"{event['configuration']}: step {event['step']}, error of what is left out {event['loss']:.4g}")
