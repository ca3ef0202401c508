"""benchmarks/precision.py in small: that it runs, and that its contestants compute in the precision that they name."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch

import precision


def test_the_quick_run_measures_both_precisions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "precision.json"
    monkeypatch.setattr(sys, "argv", ["precision.py", "--quick", "--device", "cpu", "--json", str(out)])
    precision.main()
    found = json.loads(out.read_text())
    assert found["benchmark"] == "precision"
    assert list(found["results"]["transformer"]) == list(precision.PRECISIONS)
    for results in found["results"]["transformer"].values():
        assert [r["name"].partition(",")[0] for r in results] == ["Adam", "LM"]
        assert all(r["timing"]["median"] > 0 and not r["failure"] for r in results)
    runs = found["results"]["cnn"]
    assert [run["precision"] for run in runs] == list(precision.PRECISIONS)
    assert runs[0]["loss"] != runs[1]["loss"]
    assert runs[0]["loss"] == pytest.approx(runs[1]["loss"], rel=0.05)
    table = capsys.readouterr().out
    assert all(name in table for name in precision.PRECISIONS)
    assert {v["verdict"] for v in found["verdicts"]} == {None}  # too small for a judgement


@pytest.mark.parametrize("enabled", [False, True])
def test_contestants_compute_in_the_precision_that_they_name(enabled: bool) -> None:
    shape, device = precision.Shape(1, 8, 8, 2, 3, 4), torch.device("cpu")
    (x, y), *_ = precision.scale.batches((4, 3, 8), 1, device, 0, 1)
    for contestant in precision.contestants(shape, device, 0):
        model, step = precision.under(contestant, enabled, device).build()
        seen = []
        model.head.register_forward_hook(lambda _, inputs, z, seen=seen: seen.append(z.dtype))
        step(x, y)
        assert set(seen) == {torch.bfloat16 if enabled else torch.float32}
        assert all(p.dtype == torch.float32 for p in model.parameters())
        assert not torch.is_autocast_enabled("cpu")
