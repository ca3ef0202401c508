"""From a table to a committee: order, weights, seeds, folders, and tables from which nothing can be learnt."""

from __future__ import annotations

import pytest
import torch

from marquardt.tabular import Settings, building, train
from marquardt.tabular.law import Numbers
from marquardt.tabular.members import Descent, Given, Limits
from marquardt.tabular.network import Network
from support.tables import QUICK, classes, table


def same(a, b, x) -> bool:
    return all(torch.equal(p, q) for p, q in zip(a.predict(x), b.predict(x), strict=True))


def test_one_seed_is_one_committee_and_another_another():
    x, y = table()
    first = train(x, y, Settings(**QUICK))
    assert same(first, train(x, y, Settings(**QUICK)), x)
    assert not same(first, train(x, y, Settings(seed=1, **QUICK)), x)


def test_the_order_of_the_rows_does_not_matter():
    x, y = table()
    order = torch.randperm(60, generator=torch.Generator().manual_seed(1))
    assert same(train(x, y, Settings(**QUICK)), train(x[order], y[order], Settings(**QUICK)), x)


@pytest.mark.parametrize("N", [20, 60])  # without folds, and with
def test_whole_weights_count_as_equal_rows(N):
    x, y = table(N)
    weight = torch.arange(N) % 3
    repeated = (t.repeat_interleave(weight, 0) for t in (x, y))
    found = train(x, y, Settings(**QUICK), weight=weight.double())
    assert same(found, train(*repeated, Settings(**QUICK)), x)
    assert not same(found, train(x, y, Settings(**QUICK)), x)


def test_weights_that_are_not_whole_are_relative():
    x, y = table()
    weight = torch.rand(60, generator=torch.Generator().manual_seed(0)).double() + 0.5
    first, second = (train(x, y, Settings(**QUICK), weight=c * weight) for c in (1.0, 1024.0))
    assert same(first, second, x)


def test_a_folder_goes_on_to_the_same_committee(tmp_path, monkeypatch):
    x, y = table()
    whole = train(x, y, Settings(members=2, steps=15))
    kept, save = [], building.save_part

    def killed(*given):
        save(*given)
        kept.append(given)
        if len(kept) == 2:
            raise KeyboardInterrupt

    monkeypatch.setattr(building, "save_part", killed)
    with pytest.raises(KeyboardInterrupt):
        train(x, y, Settings(members=2, steps=15), checkpoint=tmp_path)
    assert len(list(tmp_path.iterdir())) == 2
    monkeypatch.undo()
    trained = []
    monkeypatch.setattr(building, "save_part", lambda *given: trained.append(given))
    again = train(x, y, Settings(members=2, steps=15), checkpoint=tmp_path)
    assert 0 < len(trained) <= 2  # of four, the first two were there
    assert same(whole, again, x)


def test_a_folder_of_other_data_is_refused(tmp_path):
    x, y = table()
    train(x, y, Settings(**QUICK), checkpoint=tmp_path)
    with pytest.raises(ValueError, match="other samples or settings"):
        train(x, y + 1e-3 * x[:, :1], Settings(**QUICK), checkpoint=tmp_path)


def test_steps_are_watched():
    events = []
    train(*table(), Settings(**QUICK), watch=events.append)
    assert {event["members"] for event in events} == {2}  # the choice, and all samples
    for member in (1, 2):
        own = [event for event in events if event["member"] == member]
        assert [event["step"] for event in own] == list(range(1, len(own) + 1))
        assert own[-1]["step"] == own[-1]["steps"]
        assert own[-1]["loss"] < own[0]["loss"]


def test_constant_targets_and_columns():
    x, y = table()
    found = train(x, torch.full_like(y, 3.7), Settings(**QUICK))
    mean, std = found.predict(x)
    assert bool((mean == 3.7).all())
    assert bool((std == 0).all())
    assert found.says == ["all targets are the same"]
    found = train(torch.ones_like(x), y, Settings(**QUICK))
    mean, std = found.predict(x)
    torch.testing.assert_close(mean, y.mean(0).expand_as(mean))
    torch.testing.assert_close(std, y.std(0, unbiased=False).expand_as(std))


def test_a_constant_target_beside_another():
    x, y = table()
    mean, std = train(x, torch.cat((y, torch.full_like(y, -2.0)), 1), Settings(**QUICK)).predict(x)
    assert bool((mean[:, 1] == -2).all())
    assert bool((std[:, 1] == 0).all())
    assert float((mean[:, 0] - y[:, 0]).square().mean()) < 0.1


def test_one_sample_and_one_class():
    x, y = table(1)
    assert torch.equal(train(x, y, Settings()).mean(x + 1), y)
    x, y = classes()
    assert train(x, torch.zeros_like(y), Settings("classification")).probabilities(x).tolist() == [[1.0]] * 60


def test_classes_that_are_not_there_are_unlikely():
    x, y = classes(count=2)
    p = train(x, y, Settings("classification", **QUICK), classes=4).probabilities(x)
    assert p.shape == (60, 4)
    assert float(p[:, 2:].mean()) < 0.1


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"x": torch.zeros(60)}, r"x has the shape \(60,\)"),
        ({"x": torch.zeros(60, 0)}, r"x has the shape \(60, 0\)"),
        ({"y": torch.zeros(60)}, r"y has the shape \(60,\)"),
        ({"y": torch.zeros(59, 1)}, "beside 60 samples"),
        ({"x": torch.full((60, 3), float("nan"))}, "x has NaN"),
        ({"y": torch.full((60, 1), float("inf"))}, "y has NaN or infinite"),
        ({"weight": torch.zeros(60)}, "weight: a finite number"),
        ({"weight": -torch.ones(60)}, "weight: a finite number"),
        ({"weight": torch.ones(59)}, "weight: a finite number"),
    ],
)
def test_bad_tables_are_refused(change, words):
    x, y = table()
    given = {"x": x, "y": y, "weight": None} | change
    with pytest.raises(ValueError, match=words):
        train(given["x"], given["y"], Settings(**QUICK), weight=given["weight"])


def test_threads_are_as_they_were():
    before = torch.get_num_threads()
    seen = []
    train(*table(), Settings(**QUICK), watch=lambda event: seen.append(torch.get_num_threads()))
    assert set(seen) == {1}
    assert torch.get_num_threads() == before
    with pytest.raises(RuntimeError, match="broken"):
        train(*table(), Settings(**QUICK), watch=broken)
    assert torch.get_num_threads() == before


def broken(event):
    raise RuntimeError("broken")


def trained_part(steps: int, held: bool):
    x, y = table()
    given = Given(x.expand(3, -1, -1), y.expand(3, -1, -1), torch.ones(3, 60, dtype=torch.float64))
    run = Descent(
        Network((3, 4, 1), "tanh"), Numbers(1), "all", given, given if held else None, Limits(steps, steps),
        torch.Generator().manual_seed(0),
    )  # fmt: skip
    return run.run(), given


def test_members_that_are_lost_are_left_out():
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


def test_members_that_were_cut_short_are_not_taken():
    chosen, data = trained_part(30, True)
    final, _ = trained_part(5, False)
    final.error[:] = 0.0
    assert torch.equal(building.not_lost(final, chosen, data).theta, chosen.theta)


def test_a_member_far_above_the_others_is_left_out():
    chosen, _ = trained_part(10, True)
    assert len(building.agreeing(chosen).theta) == 3
    chosen.error[0] = 100 * chosen.error[1]
    assert torch.equal(building.agreeing(chosen).theta, chosen.theta[1:])
