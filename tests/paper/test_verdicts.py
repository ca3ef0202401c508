"""Verdicts on made-up logs."""

import pytest

from marquardt.paper import logs, tables
from support import made_logs
from support.made_logs import digits, losses


def judged(found, column="default"):
    return {verdict.claim: verdict for verdict in tables.verdicts(found, column)}


@pytest.mark.parametrize(("lm", "adam", "outcome"), [(0.96, 0.95, "held"), (0.95, 0.95, "did not hold")])
def test_a_claim_follows_the_data(tmp_path, lm, adam, outcome):
    claim = "LM reaches the highest test accuracy."
    made_logs.write(tmp_path, made_logs.head("mnist", "adam", steps=2), digits([0.1, 0.5, adam]))
    assert judged(logs.read_all(tmp_path))[claim].outcome == "not measured"
    made_logs.write(tmp_path, made_logs.head("mnist", "lm-paper", steps=2), digits([0.1, 0.6, lm]))
    verdict = judged(logs.read_all(tmp_path))[claim]
    assert verdict.outcome == outcome
    assert f"LM (paper) {100 * lm:g} %, Adam {100 * adam:g} %" in verdict.evidence
    assert "Not run: KFAC, Hessian-free, L-BFGS, SGD." in verdict.evidence


def test_evidence_has_a_spread(tmp_path):
    for seed, accuracy in enumerate([0.9, 0.92, 0.94, 0.96, 0.98]):
        made_logs.write(tmp_path, made_logs.head("mnist", "lm-paper", seed=seed, steps=1), digits([0.1, accuracy]))
    made_logs.write(tmp_path, made_logs.head("mnist", "adam", steps=1), digits([0.1, 0.5]))
    evidence = judged(logs.read_all(tmp_path))["LM reaches the highest test accuracy."].evidence
    assert "LM (paper) 94 % (92 % to 96 %), Adam 50 %." in evidence


def test_claims_about_other_methods_are_told_apart(tmp_path):
    made_logs.everything(tmp_path, range(1))
    about = {claim: verdict.about for claim, verdict in judged(logs.read_all(tmp_path)).items()}
    others = {claim for claim, what in about.items() if what == tables.THE_OTHERS}
    assert {"L-BFGS ends with the lowest accuracy.", "Hessian-free does not converge."} < others
    assert not any(claim.startswith("LM ") for claim in others)
    assert set(about.values()) == {tables.LM_ITSELF, tables.THE_OTHERS}


def test_the_ratio_to_adam(tmp_path):
    claim = "LM takes about nine times as long as Adam to 90 %."
    made_logs.write(tmp_path, made_logs.head("mnist", "adam", steps=2), digits([0.1, 0.95, 0.95]))
    made_logs.write(tmp_path, made_logs.head("mnist", "lm-paper", steps=10), digits([*[0.1] * 9, 0.95, 0.95]))
    verdict = judged(logs.read_all(tmp_path))[claim]
    assert verdict.outcome == "held"
    assert "The ratio is 9." in verdict.evidence
    made_logs.write(tmp_path, made_logs.head("mnist", "adam", steps=2), digits([0.1, 0.8, 0.8]))
    assert judged(logs.read_all(tmp_path))[claim].outcome == "did not hold"  # Adam never gets there


def test_tuned_runs_are_judged_beside_default_ones(tmp_path):
    claim = "LM fits the sine better than all other methods."
    shape = {"steps": 2, "seconds": 1.0}
    made_logs.write(tmp_path, made_logs.head("sine", "lm-paper", **shape), losses([1, 0.5, 0.2]))
    made_logs.write(tmp_path, made_logs.head("sine", "adam", **shape), losses([1, 0.9, 0.8]))
    made_logs.write(tmp_path, made_logs.head("sine", "adam", "tuned", **shape), losses([1, 0.4, 0.1]))
    found = logs.read_all(tmp_path)
    assert judged(found)[claim].outcome == "held"
    assert judged(found, "tuned")[claim].outcome == "did not hold"
    assert not any("90 %" in tuned for tuned in judged(found, "tuned"))  # nothing was tuned there
