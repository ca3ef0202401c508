"""benchmarks/trainbr.py on one small network."""

import json

import pytest

import trainbr


def made(way, hidden, seed, error, gamma=5.0):
    return {"way": way, "hidden": hidden, "seed": seed, "error": error, "gamma": gamma, "parameters": 16, "steps": 50,
            "seconds": 0.5}  # fmt: skip


def test_it_runs(tmp_path, capsys, monkeypatch):
    file = tmp_path / "found.json"
    monkeypatch.setattr(
        "sys.argv", ["trainbr.py", "--sizes", "5", "--seeds", "1", "--ways", "one α", "--json", str(file)]
    )
    trainbr.main()
    found = json.loads(file.read_text("utf-8"))
    assert [(r["way"], r["hidden"], r["seed"], r["parameters"]) for r in found["runs"]] == [
        ("evidence", 5, 0, 16), ("one α", 5, 0, 16),
    ]  # fmt: skip
    assert all(0 < r["error"] < 0.2 and 3 < r["gamma"] < 16 for r in found["runs"])
    assert "holds: γ below the number of parameters" in capsys.readouterr().out


@pytest.mark.parametrize(("worst", "holds"), [(1.09, True), (1.11, False)])
def test_the_verdict_is_on_medians(worst, holds):
    runs = [made("evidence", h, seed, e) for h, e in ((5, 1.0), (50, worst)) for seed in range(3)]
    runs += [made("evidence", 5, 3, 99.0), made("evidence", 50, 3, 0.0), made("one α", 5, 0, 1e-9)]
    assert list(trainbr.verdicts(runs, [5, 50]).values()) == [holds, True]
    assert list(trainbr.verdicts([*runs, made("evidence", 5, 4, 1.0, 16.0)], [5, 50]).values())[1] is False
