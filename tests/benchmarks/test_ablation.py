"""benchmarks/ablation.py: what is switched off comes back, and the table compares what belongs together."""

from __future__ import annotations

import json
import math

import pytest
import torch

import ablation
from ablation import DEFAULT, LAST, POLICIES, TASKS, Compared, Job, Solved
from marquardt.policies.outliers import Outliers


@pytest.mark.parametrize("name", ablation.PATCHES)
def test_a_patch_changes_what_is_there_and_takes_it_back(name):
    changes = ablation.PATCHES[name]
    before = [vars(owner)[attribute] for owner, attribute, _ in changes]
    with ablation.patched(changes):
        assert all(vars(owner)[attribute] is new for owner, attribute, new in changes)
    assert [vars(owner)[attribute] for owner, attribute, _ in changes] == before


def test_a_patch_is_taken_back_whatever_is_raised():
    excess = Outliers.excess
    with pytest.raises(ZeroDivisionError), ablation.patched(ablation.PATCHES["no doubt"]):
        1 // (Outliers.excess is excess)
    assert Outliers.excess is excess


@pytest.mark.parametrize("name", POLICIES)
def test_runs_without_a_policy_go_through_and_repeat(name):
    task = "sine" if ablation.SAME in POLICIES[name].kinds else "circuit by batches"
    first, second = (ablation.run(Job(task, name, 5), None, 0.04) for _ in range(2))
    assert first["averaged"] == second["averaged"]
    assert all(math.isfinite(v["error"]) for v in first["last"].values())


def courses(task: str, *names: str) -> list[dict[int, dict[str, float]]]:
    return [ablation.run(Job(task, name, 5), None, 0.1)["last"] for name in names]


def test_runs_differ_where_a_policy_acts():
    default, *others = courses("sine", DEFAULT, "detection of the same data", "momentum", "detection, not knowledge")
    assert all(other != default for other in others)
    default, *others = courses(
        "circuit by batches", DEFAULT, "KroneckerMetric", "early renewals", "no momentum on batches"
    )
    assert all(other != default for other in others)


def test_one_corrupt_target_is_doubted():
    x, y = torch.randn(20, 2), torch.randn(20, 1)
    assert ablation.one_reading(x, y)[1].abs().max() == 1000
    assert y.abs().max() < 10
    careful = {name: ablation.run(Job("one target", name, 5), None)["careful"] for name in (DEFAULT, "doubt")}
    assert careful == {DEFAULT: 1, "doubt": 0}


def test_the_interval_is_that_of_the_sign_test():
    assert [ablation.order(n) for n in (1, 5, 6, 8, 9, 12, 16)] == [0, 0, 1, 1, 2, 3, 4]
    worse = Compared([(float(i + 2), 1.0) for i in range(6)])
    assert worse.interval == (2.0, 7.0)
    assert worse.verdict == 1
    assert worse.cell() == "**4.50 [2.00, 7.00]**"
    assert Compared([(b, a) for a, b in worse.pairs]).verdict == -1
    assert Compared(worse.pairs[:5]).verdict == 0
    assert Compared([(1.0, 1.0)] * 6).cell() == "="
    assert Compared([(1.0001, 1.0)] * 6).verdict == 0  # less than what is printed
    assert Compared([(math.inf, 1.0)] * 6).cell() == "**∞ [∞, ∞]**"


def test_runs_that_get_there_are_counted():
    lost = Solved([(1.0, 0.0)] * 6 + [(0.0, 0.0)] * 2)
    assert lost.verdict == 1
    assert lost.cell() == "**2 for 8 of 8**"
    assert Solved([(1.0, 0.0)] * 3 + [(0.0, 1.0)] * 3).verdict == 0


def test_a_run_goes_on_where_it_was_stopped(tmp_path):
    out = tmp_path / "runs.jsonl"
    record = {"task": "sine", "policy": DEFAULT, "seed": 1, "last": {}, "averaged": {}}
    out.write_text(json.dumps({"machine": {}}) + "\n" + json.dumps(record) + "\n" + json.dumps(record)[:20])
    assert list(ablation.read(out)) == [Job("sine", DEFAULT, 1)]


def test_a_table_has_every_policy_of_its_kind():
    looks = {str(k): {"error": 0.5, "nll": 0.5} for k in range(501)}
    records = {
        job: {**job._asdict(), "last": looks, "averaged": looks, "rules": {"decrease": 3}, "careful": 0}
        for job in ablation.jobs(list(TASKS), list(POLICIES), 1, 0)
    }
    records[Job("sine", "momentum", 0)] = {**Job("sine", "momentum", 0)._asdict(), "failed": "RuntimeError: no"}
    text = ablation.tables(records, details=False)
    for name in POLICIES.keys() - {DEFAULT} | {LAST}:
        assert f"| {name} " in text
    assert "sine, momentum: RuntimeError: no" in text
    assert "decrease 3" in text
