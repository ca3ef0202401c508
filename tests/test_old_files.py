"""Files of an earlier commit go on as it did, or are refused by version: tests/fixtures/README.md."""

from __future__ import annotations

import csv
import io
import json
import pickle
import shutil
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

import marquardt as mq
from support import old_files as old
from support.command_line import invoked
from support.unchanged import same

FOLDER = old.FOLDER
EXPECTED = json.loads((FOLDER / "expected.json").read_text(encoding="utf-8"))

# Another CPU rounds otherwise, and the steps carry it on: from weights that differ by 1e-11 they come to losses that
# differ by 1e-8 at most.
CLOSE = {"rel": 1e-6, "abs": 1e-9}


def check(found: Any, expected: Any, where: str = "") -> None:
    """Numbers in lists and dicts are close; all else is the same"""
    if isinstance(expected, dict):
        assert found.keys() == expected.keys(), where
        for key, value in expected.items():
            check(found[key], value, f"{where}[{key!r}]")
    elif isinstance(expected, list):
        assert len(found) == len(expected), where
        for i, value in enumerate(expected):
            check(found[i], value, f"{where}[{i}]")
    else:
        close = pytest.approx(expected, **CLOSE) if isinstance(expected, float) else expected
        assert found == close, where


def copied(name: str, folder: Path) -> Path:
    """What is read may also be written: the fixtures stay"""
    path = FOLDER / name
    return Path((shutil.copytree if path.is_dir() else shutil.copy)(path, folder / name))


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


# --- optimizers ---


@pytest.mark.parametrize("name", old.OPTIONS)
def test_a_state_dict_goes_on(name: str) -> None:
    saved = torch.load(FOLDER / f"{name}.pt", weights_only=True)
    model = old.net()
    model.load_state_dict(saved["model"])
    opt = old.optimizer(name, model)
    opt.load_state_dict(saved["optimizer"])
    check(old.continued(opt, old.batches(name)), EXPECTED["optimizers"][name])


def test_the_states_have_what_these_tests_are_for() -> None:
    states = {
        name: torch.load(FOLDER / f"{name}.pt", weights_only=True)["optimizer"]["marquardt"] for name in old.OPTIONS
    }
    for name in ("default-changing", "inertia-changing"):
        assert isinstance(states[name]["D"][1], dict)  # the Kronecker metric
    for name in ("kronecker-changing", "ekfac-changing", "inertia-changing"):
        assert states[name]["past"]
    for name in ("default-same", "default-changing"):
        assert states[name]["plan"]["work"] is not None
    assert states["dense-same"]["towards"] is not None
    for state in states.values():
        assert state["steps"] == old.BEFORE
        assert state["previous"] is not None or state is states["matrix-free-same"]  # which has no momentum


@pytest.mark.parametrize("name", EXPECTED["pickled"])
def test_a_pickled_optimizer_goes_on(name: str) -> None:
    opt = pickle.loads((FOLDER / f"{name}.pickle").read_bytes())
    assert isinstance(opt, mq.LM)
    assert repr(opt)
    again = pickle.loads(pickle.dumps(opt))
    opt.load_state_dict(opt.state_dict())
    for one in (opt, again):  # the second one has a model of its own
        check(old.continued(one, old.batches(name)), EXPECTED["pickled"][name])


def test_a_checkpoint_goes_on_and_the_next_one_is_beside_it(tmp_path: Path) -> None:
    folder = copied("checkpoint", tmp_path)
    before = contents(folder)
    for _ in range(2):  # also from the one that is written by this version
        model = old.net()
        opt = old.optimizer("default-changing", model)
        more = mq.load_checkpoint(folder, model, opt)
        assert more["epoch"] == 3
        assert torch.equal(more["curve"], torch.arange(3.0))
        state = torch.get_rng_state()
        found = {**old.continued(opt, old.batches("default-changing")), "drawn": torch.rand(2, dtype=old.f64).tolist()}
        check(found, EXPECTED["checkpoint"])
        model = old.net()
        opt = old.optimizer("default-changing", model)
        mq.load_checkpoint(folder, model, opt)
        torch.set_rng_state(state)
        mq.save_checkpoint(folder, model, opt, **more)
        assert contents(folder).items() >= before.items()  # has no mark, and so is not removed


def test_a_checkpoint_of_two_ranks_goes_on(tmp_path: Path) -> None:
    """Each of them has written a part of the tensors, and half of one that was divided between them."""
    folder = shutil.copytree(FOLDER.parent / "2a4d86c", tmp_path / "two")
    model = old.net()
    opt = old.optimizer("default-changing", model)
    more = mq.load_checkpoint(folder / "checkpoint", model, opt)
    assert more.pop("epoch") == 3
    assert same(more, {"curve": torch.arange(3.0), "divided": torch.arange(12.0).reshape(6, 2)})
    found = {**old.continued(opt, old.batches("default-changing")), "drawn": torch.rand(2, dtype=old.f64).tolist()}
    check(found, json.loads((folder / "expected.json").read_text())[0])


# --- mq.fit ---


@pytest.mark.parametrize("name", old.FITS)
def test_a_fit_goes_on(name: str, tmp_path: Path) -> None:
    path = copied(f"fit-{name}.pt", tmp_path)
    steps: list[int] = []
    found = old.fitted(old.FITS[name](), path, callbacks=lambda running: steps.append(running.step.step))
    assert steps == list(range(old.STEPS // 2 + 1, old.STEPS + 1))
    check(found, EXPECTED["fits"][name])
    check(old.fitted(old.FITS[name](), path), found)  # by the file of this version


def test_a_fit_in_a_folder_goes_on(tmp_path: Path) -> None:
    check(old.fitted(old.whole(), copied("fit-folder", tmp_path)), EXPECTED["fits"]["whole"])


def test_a_fit_of_another_seed_is_refused_and_may_begin_anew(tmp_path: Path) -> None:
    path, (x, y) = copied("fit-whole.pt", tmp_path), old.wave()
    before, model = path.read_bytes(), old.net()
    weights = {name: t.clone() for name, t in model.state_dict().items()}
    options = {"validation": old.wave(12, shift=0.3), "patience": None, "steps": 2, "checkpoint": path, "seed": 4}
    with pytest.raises(ValueError, match=r"of other options: seed is 4 now, and was 3.*resume=False"):
        mq.fit(model, (x, y), "mse", **options, progress=False)
    assert path.read_bytes() == before
    assert same(model.state_dict(), weights)
    assert len(mq.fit(model, (x, y), "mse", **options, resume=False, progress=False).history) == 2


# --- tables ---


@pytest.mark.parametrize("kind", old.TABLES)
def test_a_table_model_predicts_and_says_that_it_has_no_checksum(kind: str, tmp_path: Path) -> None:
    model, rows = copied(f"table-{kind}", tmp_path), tmp_path / "new.csv"
    rows.write_text(old.table(8, shift=100))
    result = invoked("predict", model, rows)
    assert result.exit_code == 0, result.output
    assert "of an earlier version, without checksums" in result.stderr
    check(read(result.stdout), read(EXPECTED["tables"][kind]))


def read(text: str) -> list[list[Any]]:
    return [[number(cell) for cell in row] for row in csv.reader(io.StringIO(text))]


def number(cell: str) -> Any:
    try:
        return float(cell)
    except ValueError:
        return cell


@pytest.mark.parametrize("kind", old.TABLES)
@pytest.mark.parametrize("more", [(), ("--resume",)])
def test_a_run_of_a_table_is_refused_by_version(kind: str, more: tuple[str, ...], tmp_path: Path) -> None:
    out, data = copied(f"table-{kind}", tmp_path), tmp_path / "data.csv"
    data.write_text(old.table())
    before = contents(out)
    result = invoked("fit", data, *old.TABLES[kind], *old.QUICK, "--out", out, *more)
    assert result.exit_code == 1
    assert result.output.startswith("Error: ")
    assert "a run of an earlier version of marquardt" in result.output
    assert "choose another --out" in result.output
    after = contents(out)
    after.pop(".run.lock", None)
    assert after == before


# --- scikit-learn ---


@pytest.mark.parametrize("kind", ["regressor", "classifier"])
def test_a_pickled_estimator_predicts(kind: str) -> None:
    from sklearn.exceptions import InconsistentVersionWarning

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", InconsistentVersionWarning)  # of scikit-learn's own, which was another one
        model = pickle.loads((FOLDER / f"{kind}.pickle").read_bytes())
    check(old.answers(kind, model), EXPECTED["estimators"][kind])
    check(old.answers(kind, pickle.loads(pickle.dumps(model))), EXPECTED["estimators"][kind])
    assert repr(model)
    assert len(model.history_) == 2
    again = model.fit(*old.samples(kind))
    assert again is model
    assert old.answers(kind, model).keys() == EXPECTED["estimators"][kind].keys()
