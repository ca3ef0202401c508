"""What is trained, on what, and how long: from the shape of a table alone."""

from __future__ import annotations

import pytest

from marquardt.tabular.network import Network
from marquardt.tabular.settings import Division, Settings, rows_of


@pytest.mark.parametrize(
    ("samples", "task", "division"),
    [
        (10, "regression", Division(0, 0, 5)),
        (100, "regression", Division(5, 5, 5)),
        (400, "regression", Division(3, 5, 5)),
        (400, "classification", Division(5, 5, 0)),
        (8000, "regression", Division(3, 10, 0)),
        (40_000, "regression", Division(2, 10, 0)),
    ],
)
def test_division(samples, task, division):
    assert Settings(task).arranged(samples, 8, 1, 1)[1] == division


def test_without_early_stopping_everything_trains():
    assert Settings(held_out=False).arranged(400, 8, 1, 1)[1] == Division(0, 0, 5)


def test_given_sizes_are_one_configuration():
    (one,), _ = Settings(hidden=(7, 3), activation="relu").arranged(400, 8, 1, 1)
    assert (one.hidden, one.activation, one.groups) == ((7, 3), "relu", "inputs")
    several, _ = Settings(activation="relu").arranged(400, 8, 1, 1)
    assert {one.activation for one in several} == {"relu"}


@pytest.mark.parametrize(("samples", "inputs", "outputs"), [(1500, 60, 10), (100_000, 100, 1)])
def test_large_matrices_leave_kronecker_factors(samples, inputs, outputs):
    found, division = Settings().arranged(samples, inputs, outputs, outputs)
    assert {one.groups for one in found} == {"decay"}
    assert division.final == 0
    (one,), _ = Settings(hidden=(500, 500)).arranged(400, 8, 1, 1)
    assert (one.hidden, one.groups) == ((500, 500), "decay")


@pytest.mark.parametrize("samples", [100, 1000, 10_000, 100_000])
def test_the_work_bounds_the_steps(samples):
    settings, network = Settings(work=1e11), Network((8, 10, 10, 1), "silu")
    limits = settings.plan(network, 3, samples, 1, 1e11)
    work = limits.steps * settings.cost(network, 3, samples, 1)
    assert limits.steps == 250 or 0.9e11 < work <= 1e11
    assert settings.plan(network, 3, samples, 1, 1e11, 17).steps <= 17


def test_a_matrix_has_all_rows_unless_there_are_many():
    network = Network((8, 10, 10, 1), "silu")
    assert rows_of(network, 2000, 1) is None
    assert rows_of(network, 50_000, 1) == 2000


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"task": "ranking"}, "task='ranking'"),
        ({"hidden": "large"}, "hidden='large'"),
        ({"hidden": (4, 0)}, "hidden=0"),
        ({"activation": "cubic"}, "activation='cubic'"),
        ({"members": 0}, "members=0"),
        ({"steps": 2.5}, "steps=2.5"),
        ({"patience": True}, "patience=True"),
        ({"seed": -1}, "seed=-1"),
        ({"work": 0}, "work=0"),
    ],
)
def test_bad_settings_are_named(given, words):
    with pytest.raises(ValueError, match=words):
        Settings(**given)
