"""From a table to a committee: order, weights, folders, tables from which nothing can be learnt, the work that shapes
plan, and how much each configuration counts."""

from __future__ import annotations

import pytest
import torch

from marquardt.tabular import Settings, building, train
from marquardt.tabular.building import calibrated, distinct, folds, mixed, stacked
from marquardt.tabular.members import Descent, Given, Law, Limits, Network
from marquardt.tabular.settings import Configuration, Division, cost
from support.committees import QUICK, classes, drawn, generator, table


def same(a, b, x) -> bool:
    return all(torch.equal(p, q) for p, q in zip(a.predict(x), b.predict(x), strict=True))


@pytest.mark.parametrize("N", [20, 60])  # without folds, and with
def test_whole_weights_count_as_equal_rows_in_any_order(N):
    x, y = table(N)
    weight, order = torch.arange(N) % 3, torch.randperm(N, generator=generator(1))
    repeated = (t.repeat_interleave(weight, 0) for t in (x, y))
    found = train(x, y, Settings(**QUICK), weight=weight.double())
    assert same(found, train(*repeated, Settings(**QUICK)), x)
    assert same(found, train(x[order], y[order], Settings(**QUICK), weight=weight[order].double()), x)
    assert not same(found, train(x, y, Settings(**QUICK)), x)


def test_weights_that_are_not_whole_are_relative():
    x, y = table()
    weight = torch.rand(60, generator=generator(0)).double() + 0.5
    first, second = (train(x, y, Settings(**QUICK), weight=c * weight) for c in (1.0, 1024.0))
    assert same(first, second, x)


def test_a_folder_goes_on_to_the_same_committee_and_is_no_others(tmp_path, monkeypatch):
    x, y = table()
    settings = Settings(members=2, steps=15)
    whole, save, kept = train(x, y, settings), building.save_part, []

    def killed(*given):
        save(*given)
        kept.append(given)
        if len(kept) == 2:
            raise KeyboardInterrupt

    monkeypatch.setattr(building, "save_part", killed)
    with pytest.raises(KeyboardInterrupt):
        train(x, y, settings, checkpoint=tmp_path)
    assert len(list(tmp_path.iterdir())) == 2
    trained = []
    monkeypatch.setattr(building, "save_part", lambda *given: trained.append(given))
    assert same(whole, train(x, y, settings, checkpoint=tmp_path), x)
    assert 0 < len(trained) <= 2  # of four, the first two were there
    with pytest.raises(ValueError, match="other samples or settings"):
        train(x, y + 1e-3 * x[:, :1], settings, checkpoint=tmp_path)


def test_steps_are_watched_on_one_thread():
    events, before = [], torch.get_num_threads()

    def watch(event):
        events.append(event | {"threads": torch.get_num_threads()})
        if event["member"] == 2 and event["step"] == event["steps"]:
            raise RuntimeError("broken")

    with pytest.raises(RuntimeError, match="broken"):
        train(*table(), Settings(**QUICK), watch=watch)
    assert {(event["members"], event["threads"]) for event in events} == {(2, 1)}  # the choice, and all samples
    assert torch.get_num_threads() == before
    for member in (1, 2):
        own = [event for event in events if event["member"] == member]
        assert [event["step"] for event in own] == list(range(1, len(own) + 1))
        assert own[-1]["step"] == own[-1]["steps"]
        assert own[-1]["loss"] < own[0]["loss"]


@pytest.mark.parametrize(
    ("x", "y", "said"),
    [
        (drawn(60, 3), torch.full((60, 1), 3.7).double(), "all targets are the same"),
        (torch.ones(60, 3).double(), drawn(60, 1), "no input column has two different values"),
        (drawn(1, 3), torch.full((1, 1), -2.5).double(), "all targets are the same"),
    ],
)
def test_nothing_to_learn(x, y, said):
    found = train(x, y, Settings(**QUICK))
    for t, value in zip(found.predict(x + 1), (y.mean(), y.std(unbiased=False)), strict=True):
        torch.testing.assert_close(t, value.expand_as(t))
    assert found.says == [said]


def test_a_constant_target_beside_another_and_classes_that_are_not_there():
    x, y = table()
    mean, std = train(x, torch.cat((y, torch.full_like(y, -2.0)), 1), Settings(**QUICK)).predict(x)
    assert bool((mean[:, 1] == -2).all())
    assert bool((std[:, 1] == 0).all())
    assert float((mean[:, 0] - y[:, 0]).square().mean()) < 0.1
    x, y = classes(count=2)
    assert train(x, torch.zeros_like(y), Settings("classification")).probabilities(x).tolist() == [[1.0]] * 60
    p = train(x, y, Settings("classification", **QUICK), classes=4).probabilities(x)
    assert p.shape == (60, 4)
    assert float(p[:, 2:].mean()) < 0.1


def trained_part(steps: int, held: bool):
    x, y = table()
    given = Given(x.expand(3, -1, -1), y.expand(3, -1, -1), torch.ones(3, 60, dtype=torch.float64))
    network, law, held = Network((3, 4, 1), "tanh"), Law.of(None, 1), given if held else None
    return Descent(network, law, "all", given, held, Limits(steps, steps), generator()).run(), given


def test_members_that_are_lost_or_were_cut_short_are_left_out():
    chosen, data = trained_part(10, True)
    final, _ = trained_part(30, False)
    assert len(building.not_lost(final, chosen, data).theta) == 3
    final.error[1] = 10.0  # it fits what it has seen worse than others predict what they have not seen
    kept = building.not_lost(final, chosen, data)
    assert torch.equal(kept.theta, final.theta[[0, 2]])
    assert torch.equal(kept.root, final.root[[0, 2]])
    assert len(kept.steps) == 2
    final.error[:] = 10.0
    assert torch.equal(building.not_lost(final, chosen, data).theta, chosen.theta)
    short, _ = trained_part(5, False)
    short.error[:] = 0.0
    assert torch.equal(building.not_lost(short, trained_part(30, True)[0], data).theta, trained_part(30, True)[0].theta)
    assert len(building.agreeing(chosen).theta) == 3
    chosen.error[0] = 100 * chosen.error[1]  # far above the others
    assert torch.equal(building.agreeing(chosen).theta, chosen.theta[1:])


# --- equal rows and folds ---


def test_rows_with_equal_inputs_and_other_targets_stay_apart():
    x, y, weight = torch.ones(4, 1).double(), torch.tensor([0, 1, 0, 2]), torch.tensor([1.0, 2, 3, 0]).double()
    for given in (y, y[:, None].double()):
        assert [t.flatten().tolist() for t in distinct(x, given, weight)] == [[1, 1], [0, 1], [4, 2]]


def test_classes_and_targets_are_spread_over_the_folds():
    y = torch.tensor([0] * 50 + [1] * 10 + [2] * 5)
    fold = folds(y, 5, generator())
    for k in range(5):
        assert torch.bincount(y[fold == k], minlength=3).tolist() == [10, 2, 1]
    y = drawn(100, 1)
    fold = folds(y, 5, generator())
    assert torch.bincount(fold).tolist() == [20] * 5
    low = y[:, 0] <= y[:, 0].sort().values[49]
    assert torch.bincount(fold[low]).tolist() == [10] * 5


# --- what is trained ---


@pytest.mark.parametrize(
    ("samples", "settings", "division"),
    [
        (10, Settings(), Division(0, 0, 5)),
        (100, Settings(), Division(5, 5, 5)),
        (400, Settings(), Division(3, 5, 5)),
        (400, Settings("classification"), Division(5, 5, 0)),
        (8000, Settings(), Division(3, 10, 0)),
        (40_000, Settings(), Division(2, 10, 0)),
        (400, Settings(held_out=False), Division(0, 0, 5)),
    ],
)
def test_division(samples, settings, division):
    assert settings.arranged(samples, 8, 1)[1] == division


def test_given_sizes_are_one_configuration():
    (one,), _ = Settings(hidden=(7, 3), activation="relu").arranged(400, 8, 1)
    assert one == Configuration((7, 3), "relu", "inputs")
    several, _ = Settings(activation="relu").arranged(400, 8, 1)
    assert {one.activation for one in several} == {"relu"}


@pytest.mark.parametrize(("samples", "inputs", "outputs"), [(1500, 60, 10), (100_000, 100, 1)])
def test_large_matrices_leave_kronecker_factors(samples, inputs, outputs):
    found, division = Settings().arranged(samples, inputs, outputs)
    assert {one.groups for one in found} == {"decay"}
    assert division.final == 0
    (one,), _ = Settings(hidden=(500, 500)).arranged(400, 8, 1)
    assert (one.hidden, one.groups) == ((500, 500), "decay")


@pytest.mark.parametrize(("samples", "rows"), [(100, None), (1000, None), (10_000, 2000), (100_000, 2000)])
def test_the_work_bounds_the_steps_and_the_rows(samples, rows):
    settings, one = Settings(), Configuration((10, 10), "silu", "inputs")
    network = one.network(8, 1)
    limits = settings.plan(one, network, 3, samples, 1e11)
    assert limits.work == cost(network, 3, samples) / 3
    assert limits.rows == rows
    assert limits.steps == 250 or 0.9e11 < 3 * limits.steps * limits.work <= 1e11
    assert settings.plan(one, network, 3, samples, 1e11, 17).steps <= 17


# --- weights of configurations and widths of intervals, against plain searches ---


def simplex(steps: int) -> torch.Tensor:
    corners = [(i, j, steps - i - j) for i in range(steps + 1) for j in range(steps + 1 - i)]
    return torch.tensor(corners).double() / steps


@pytest.mark.parametrize("seed", range(5))
def test_no_other_weights_have_a_smaller_error(seed):
    y, weight = drawn(60, 2, seed=seed), torch.rand(60, generator=generator(seed)).double() + 0.1
    scales = torch.tensor([0.2, 0.3, 1.0], dtype=torch.float64)[:, None, None]
    p = y + scales * drawn(3, 60, 2, seed=seed + 10)

    def error(w):
        return float((weight[:, None] * (y - torch.einsum("c,cno->no", w, p)).square()).sum())

    w = stacked(p, y, weight)
    assert float(w.sum()) == pytest.approx(1)
    assert bool((w >= 0).all())
    assert all(error(w) <= error(other) * (1 + 1e-8) for other in simplex(40))
    equal = stacked(p[:1].expand(3, -1, -1), y, weight)
    assert float(equal.sum()) == pytest.approx(1)
    assert bool(equal.isfinite().all())


def test_a_mixture_has_the_largest_likelihood():
    p = torch.rand(3, 80, generator=generator(3)).double().clamp(min=0.01)
    w = mixed(p, torch.ones(80, dtype=torch.float64), rounds=2000)
    best = max(float((other @ p).log().sum()) for other in simplex(40))
    assert float((w @ p).log().sum()) >= best - 1e-3


@pytest.mark.parametrize(("floor", "factor"), [(0.5, 0.0), (0.01, 2.0), (0.3, 1.0)])
def test_floor_and_factor_are_found(floor, factor):
    variance = torch.rand(6_000, generator=generator(1)).double() ** 2
    squares = (floor + factor * variance) * drawn(6_000).square()
    s2, c = calibrated(squares, variance, torch.ones(6_000, dtype=torch.float64))
    expected, found = floor + factor * variance, s2 + c * variance
    assert float((found / expected).log().abs().mean()) < 0.15


def test_no_residuals_and_no_variance():
    zero, one = torch.zeros(5, dtype=torch.float64), torch.ones(5, dtype=torch.float64)
    assert calibrated(zero, one, one) == (0.0, 0.0)
    assert calibrated(2 * one, zero, one) == (2.0, 0.0)
