"""`marquardt fit` and `marquardt predict`, on small tables."""

from __future__ import annotations

import csv
import io
import json
import math
import os
import re
import sys
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch

from marquardt import files as locks
from marquardt.cli import fit as command
from marquardt.table import reading, run
from support.command_line import invoked, program, refused
from support.tables import houses, write

QUICK = ("--hidden", "3", "--steps", "4")
WRITTEN = {"metrics.json", "model.pt", "predictions.csv", "preprocessing.json", "report.html", "run.json"}


@pytest.fixture
def data(tmp_path: Path) -> Path:
    return write(tmp_path / "data.csv", houses(), without=("rent", "sold"))


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model for the price of houses"""
    folder = tmp_path_factory.mktemp("trained")
    data = write(folder / "data.csv", houses(), without=("rent", "sold"))
    assert invoked("fit", data, "--target", "price", "--out", folder / "model", *QUICK).exit_code == 0
    return folder / "model"


@pytest.fixture(scope="module")
def sorted_out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model for whether they were sold"""
    folder = tmp_path_factory.mktemp("sorted")
    data = write(folder / "data.csv", houses(), without=("rent", "price"))
    assert invoked("fit", data, "--target", "sold", "--out", folder / "model", *QUICK).exit_code == 0
    return folder / "model"


def files(out: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in out.rglob("*") if path.is_file() and path.name != ".run.lock"}


# --- what is written ---


def test_everything_is_written_and_said(data: Path, tmp_path: Path) -> None:
    result = invoked("fit", data, "--target", "price", *QUICK)
    assert result.exit_code == 0, result.output
    out = tmp_path / "data-model"
    assert set(files(out)) == WRITTEN
    assert "64 rows to train on, 16 to test with; 4 columns as" in result.output
    assert (
        "Left out: 'name' (it has 64 different texts in 64 rows, too many for categories), 'country'" in result.output
    )
    assert "price: RMSE" in result.output
    assert f"Report: {out / 'report.html'}" in result.output
    metrics = json.loads((out / "metrics.json").read_text())
    table = pd.read_csv(out / "predictions.csv")
    assert list(table.columns) == ["row", "set", "true", "predicted", "std", "lower", "upper"]
    assert table["row"].tolist() == list(range(1, 81))
    assert table["true"].tolist() == [row["price"] for row in houses()]
    test = table[table["set"] == "test"]
    assert len(test) == metrics["rows"]["test"] == 16
    rmse = ((test["predicted"] - test["true"]) ** 2).mean() ** 0.5
    assert metrics["test"]["price"]["rmse"] == pytest.approx(rmse)
    inside = (test["lower"] <= test["true"]) & (test["true"] <= test["upper"])
    assert metrics["test"]["price"]["coverage"] == inside.mean()
    assert {found["name"] for found in metrics["importance"]} == {"area", "city", "rooms", "built"}
    assert set(torch.load(out / "model.pt", weights_only=True)) == {"format", "committee"}  # without code
    found = json.loads((out / "preprocessing.json").read_text())
    assert [column["name"] for column in found["columns"]] == ["area", "city", "rooms", "built"]
    assert "city = Bern" in found["inputs"]


def test_classes(sorted_out: Path) -> None:
    table = pd.read_csv(sorted_out / "predictions.csv")
    assert list(table.columns) == ["row", "set", "true", "predicted", "probability of no", "probability of yes"]
    assert (table["probability of no"] + table["probability of yes"]).round(6).eq(1).all()
    expected = (table["probability of yes"] > table["probability of no"]).map({True: "yes", False: "no"})
    assert table["predicted"].tolist() == expected.tolist()
    metrics = json.loads((sorted_out / "metrics.json").read_text())
    test = table[table["set"] == "test"]
    assert metrics["test"]["sold"]["accuracy"] == pytest.approx((test["true"] == test["predicted"]).mean())
    assert abs((test["true"] == "yes").mean() - (table["true"] == "yes").mean()) < 0.05  # the classes are split alike


def test_several_targets(tmp_path: Path) -> None:
    data = write(tmp_path / "data.csv", houses(), without=("sold",))
    result = invoked("fit", data, "--target", "price", "--target", "rent", *QUICK)
    assert result.exit_code == 0, result.output
    table = pd.read_csv(tmp_path / "data-model/predictions.csv")
    assert {"price true", "price predicted", "rent lower", "rent upper"} <= set(table.columns)
    assert set(json.loads((tmp_path / "data-model/metrics.json").read_text())["test"]) == {"price", "rent"}


def test_numbers_that_look_like_classes(tmp_path: Path) -> None:
    data = write(tmp_path / "data.csv", [{"x": i / 7, "y": i % 3} for i in range(60)])
    result = invoked("fit", data, "--target", "y", "--out", tmp_path / "a", *QUICK)
    assert (
        "'y' has only the values 0, 1, 2: they are taken for classes; with --regress they are numbers" in result.output
    )
    assert "12 to test with; 1 column as 1 input." in result.output
    assert json.loads((tmp_path / "a/metrics.json").read_text())["task"] == "classification"
    assert invoked("fit", data, "--target", "y", "--out", tmp_path / "b", "--regress", *QUICK).exit_code == 0
    assert json.loads((tmp_path / "b/metrics.json").read_text())["task"] == "regression"


def test_without_rows_to_test_with(data: Path, tmp_path: Path) -> None:
    result = invoked("fit", data, "--target", "price", "--test-fraction", "0", *QUICK)
    assert result.exit_code == 0, result.output
    assert "none to test with: the report is about rows it has seen" in result.output
    assert "test" not in json.loads((tmp_path / "data-model/metrics.json").read_text())
    assert "No rows were kept back" in (tmp_path / "data-model/report.html").read_text()


def test_rows_without_a_target_are_left_out_and_keep_their_numbers(tmp_path: Path) -> None:
    rows = houses(12)  # fewer than weights
    rows[0]["price"] = ""
    data = write(tmp_path / "data.csv", rows, without=("rent", "sold"))
    result = invoked("fit", data, "--target", "price", "--hidden", "20", "--steps", "4")
    assert "Left out, without a target: 1 row." in result.output
    table = pd.read_csv(tmp_path / "data-model/predictions.csv")
    assert table["row"].tolist() == list(range(2, 13))
    assert table["predicted"].notna().all()


def test_one_seed_is_one_model(data: Path, tmp_path: Path) -> None:
    for name, seed in (("a", "1"), ("b", "1"), ("c", "2")):
        assert (
            invoked("fit", data, "--target", "price", "--seed", seed, "--out", tmp_path / name, *QUICK).exit_code == 0
        )
    a, b, c = (files(tmp_path / name) for name in "abc")
    assert a["model.pt"] == b["model.pt"] != c["model.pt"]
    assert a["predictions.csv"] == b["predictions.csv"] != c["predictions.csv"]


def test_parquet(data: Path, tmp_path: Path, trained: Path) -> None:
    frame = pd.read_csv(data, parse_dates=["built"])
    frame.to_parquet(tmp_path / "data.parquet")
    result = invoked("fit", tmp_path / "data.parquet", "--target", "price", "--out", tmp_path / "p", *QUICK)
    assert result.exit_code == 0, result.output
    assert files(tmp_path / "p")["predictions.csv"] == files(trained)["predictions.csv"]


# --- decimal commas ---


def german(path: Path, dotted: list[str]) -> Path:
    """A file with semicolons, decimal commas in `area`, and `dotted` in `people`"""
    lines = [f"{20 + i},5;{people};{3 * i},25" for i, people in enumerate(dotted)]
    path.write_text("\n".join(["area;people;price", *lines]) + "\n")
    return path


def test_thousands_with_dots_are_whole_numbers(tmp_path: Path) -> None:
    people = [f"{2 + i // 10}.{600 + i}" if i % 3 else str(900 + i) for i in range(40)]
    data = german(tmp_path / "data.csv", people)
    result = invoked("fit", data, "--target", "price", *QUICK)
    assert result.exit_code == 0, result.output
    assert "A dot in its numbers separates thousands: 'people' (2.601)." in result.output
    found = {c["name"]: c for c in json.loads((tmp_path / "data-model/preprocessing.json").read_text())["columns"]}
    assert 900 < found["people"]["median"] < 6000
    (tmp_path / "new.csv").write_text("area;people\n20;2.601\n21;950\n")  # alone, that would be 2 and 6 tenths
    (tmp_path / "same.csv").write_text("area,people\n20,2601\n21,950\n")
    new, same = (invoked("predict", tmp_path / "data-model", tmp_path / name) for name in ("new.csv", "same.csv"))
    assert new.stdout == same.stdout
    assert "separates thousands" in new.stderr
    data = german(tmp_path / "only.csv", [f"1.{200 + i}" for i in range(40)])
    result = invoked("fit", data, "--target", "price", *QUICK)
    assert "A dot in its numbers separates thousands: 'people' (1.200)." in result.output
    columns = json.loads((tmp_path / "only-model/preprocessing.json").read_text())["columns"]
    assert 1200 <= columns[1]["median"] < 1240


def test_decimal_points_beside_decimal_commas(tmp_path: Path) -> None:
    data = german(tmp_path / "data.csv", ["2.611", "2.5"] * 20)
    words = ["the column 'people' has a dot that separates no thousands: '2.5' in row 2", "--ignore people"]
    refused(invoked("fit", data, "--target", "price", *QUICK), *words)
    assert invoked("fit", data, "--target", "price", "--ignore", "people", *QUICK).exit_code == 0
    data.write_text(data.read_text().replace("people", "rooms"))
    result = invoked("predict", tmp_path / "data-model", data)
    assert result.exit_code == 0, result.output  # the model does not need that column
    data.write_text(data.read_text().replace("area;rooms", "city;area"))
    result = invoked("predict", tmp_path / "data-model", data)
    refused(result, "the column 'area' has a dot that separates no thousands")
    assert "--" not in result.output


def test_errors_about_a_target_name_its_own_options(tmp_path: Path) -> None:
    data = german(tmp_path / "data.csv", ["2.611", "2.5"] * 20)
    result = invoked("fit", data, "--target", "people", *QUICK)
    refused(result, "'people' has a dot that separates no thousands", "--classify")
    assert "--ignore" not in result.output
    assert invoked("fit", data, "--target", "people", "--classify", *QUICK).exit_code == 0
    data.write_text("a,y\n" + "\n".join(f"{i},{i}.5" for i in range(30)) + "\n31,x\n")
    result = invoked("fit", data, "--target", "y", *QUICK, "--out", tmp_path / "b")
    refused(result, "'x' in row 31", "--missing", "--classify")
    assert "--ignore" not in result.output


# --- numbers in disguise ---


def disguised(path: Path, shown: str) -> Path:
    """`area` is shown with a unit or the like, quoted in the file"""
    lines = [f'{i},"{shown.format(1000 + 7 * i)}",{3 * i}.5' for i in range(40)]
    path.write_text("\n".join(["n,area,price", *lines]) + "\n", encoding="utf-8")
    return path


@pytest.mark.parametrize(
    ("shown", "marks"),
    [("{}.3 m2", "'m2'"), ("${:,}", "'$' and ','"), ("{}%", "'%'"), ("{:,}", "','"), ("{} €", "'€'")],
)
def test_columns_of_numbers_with_marks_are_told(tmp_path: Path, shown: str, marks: str) -> None:
    data = disguised(tmp_path / "data.csv", shown)
    result = invoked("fit", data, "--target", "price", *QUICK)
    assert result.exit_code == 0, result.output
    sentence = f"Column 'area' looks like numbers with {marks}: remove that to use it as numbers."
    assert result.output.count(sentence) == 1
    again = invoked("fit", data, "--target", "price", "--categorical", "area", "--out", tmp_path / "c", *QUICK)
    assert "looks like" not in again.output


@pytest.mark.parametrize("option", [(), ("--regress",), ("--classify",)])
def test_a_target_with_a_unit_is_refused_without_a_circle(tmp_path: Path, option: tuple[str, ...]) -> None:
    result = invoked("fit", disguised(tmp_path / "data.csv", "{}.3 m2"), "--target", "area", *option, *QUICK)
    words = "the target 'area' is text ('1000.3 m2'), but looks like numbers with 'm2': remove that to predict numbers"
    refused(result, words)
    assert "--" not in result.output


def test_columns_that_are_the_same_are_told(tmp_path: Path) -> None:
    rows = [{"a": i % 7, "b": i / 3, "c": f"{i % 7}.0", "d": i % 5, "price": i * 0.5} for i in range(40)]
    result = invoked("fit", write(tmp_path / "data.csv", rows), "--target", "price", *QUICK)
    assert result.output.count("are alike") == 1
    assert "Columns 'a', 'c' are alike in every row: --ignore leaves one out." in result.output


def test_dates_that_can_be_read_in_two_ways_are_told(tmp_path: Path) -> None:
    lines = [f"{1 + i % 12:02}/{1 + i % 11:02}/2020,{i}.5" for i in range(40)]
    data = tmp_path / "data.csv"
    data.write_text("\n".join(["day,price", *lines]) + "\n")
    result = invoked("fit", data, "--target", "price", *QUICK)
    assert result.exit_code == 0, result.output
    assert "'day': read as month/day/year" in result.output
    way = "day/month/year would be possible too: if it is that, write the dates as year-month-day."
    assert result.output.count(way) == 1
    data.write_text(data.read_text() + "13/01/2020,4.5\n")
    assert "possible too" not in invoked("fit", data, "--target", "price", "--out", tmp_path / "b", *QUICK).output


# --- bad input ---

ROWS = "\n".join(f"{i},{i % 7},{i * 0.3}" for i in range(30))
BAD = {
    "unreadable": (b"\x00\x01\x02", "y", ["not text"]),
    "empty": (b"", "y", ["is empty"]),
    "only names": (b"a,b,y\n", "y", ["no row below"]),
    "few rows": (b"a,y\n1,2\n2,3\n", "y", ["2 rows", "at least 10"]),
    "duplicate names": (f"a,a,y\n{ROWS}".encode(), "y", ["two columns of one name, 'a'", "columns 1, 2"]),
    "no such target": (f"a,b,y\n{ROWS}".encode(), "z", ["--target", "no column 'z'", "'a', 'b', 'y'"]),
    "no names": (ROWS.encode(), "y", ["the first line must have the names"]),
    "text among numbers": (
        f"a,b,y\n{ROWS}\n5,x,1\n".encode(),
        "y",
        ["'b'", "'x' in row 31", "--missing", "--ignore b"],
    ),
    "text among targets": (f"a,b,y\n{ROWS}\n5,1,x\n".encode(), "y", ["'y'", "'x' in row 31"]),
    "infinite": (f"a,b,y\n{ROWS}\n5,inf,1\n".encode(), "y", ["'b'", "not finite", "'inf' in row 31"]),
    "no target values": (b"a,y\n" + b"1,\n" * 30, "y", ["0 rows with a value of 'y'"]),
    "one class": (b"a,y\n" + b"".join(b"%d,yes\n" % i for i in range(30)), "y", ["one class only, 'yes'"]),
    "constant target": (b"a,y\n" + b"".join(b"%d,2.5\n" % i for i in range(30)), "y", ["every value", "2.5"]),
    "constant columns": (
        b"a,y\n" + b"".join(b"1,%d.5\n" % i for i in range(30)),
        "y",
        ["no column is left", "always 1"],
    ),
    "ragged": (f"a,b,y\n{ROWS}\n1,2,3,4\n".encode(), "y", ["is no table", "line 32"]),
    "only the target": (b"y\n" + b"".join(b"%d.5\n" % i for i in range(30)), "y", ["no column is left"]),
    "dates as target": (b"a,y\n" + b"1,2020-01-01\n" * 30, "y", ["is a date"]),
}


@pytest.mark.parametrize(("content", "target", "words"), BAD.values(), ids=BAD)
def test_bad_tables(tmp_path: Path, content: bytes, target: str, words: list[str]) -> None:
    data = tmp_path / "data.csv"
    data.write_bytes(content)
    refused(invoked("fit", data, "--target", target, *QUICK), *words)
    assert [path.name for path in tmp_path.iterdir()] == ["data.csv"]  # nothing was made


def test_what_is_refused_before_the_training(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fit = ("fit", data, "--target", "price")
    refused(invoked("fit", data.with_name("no.csv"), "--target", "y"), "no.csv cannot be read (No such file")
    refused(invoked(*fit, "--ignore", "price"), "'price' is the target")
    refused(invoked(*fit, "--ignore", "prize"), "--ignore", "no column 'prize'")
    monkeypatch.setattr(run, "EVERY_INPUT", 10**15)
    refused(invoked(*fit), "80 rows of", "GB of memory", "--rows N", "--ignore")
    monkeypatch.setattr(reading, "available_memory", lambda: 1000)
    refused(invoked(*fit), "GB of memory", "--rows N")


@pytest.mark.parametrize("error", [MemoryError(), RuntimeError("DefaultCPUAllocator: can't allocate memory")])
def test_memory_that_runs_out_in_training(data: Path, monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    def full(*_, **__):
        raise error

    monkeypatch.setattr(run.tabular, "train", full)
    result = invoked("fit", data, "--target", "price")
    assert result.exit_code == 1
    assert result.stderr == (
        "Error: memory ran out in the training with 64 rows: --rows N reads the first N rows, and fewer units in "
        "--hidden need less\n"
    )


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--hidden", "3,x"], ["--hidden", "'3,x'"]),
        (["--hidden", "0"], ["--hidden", "'0'"]),
        (["--test-fraction", "1"], ["--test-fraction"]),
        (["--steps", "0"], ["--steps"]),
        (["--seed", "-1"], ["--seed"]),
        (None, ["--target"]),
    ],
)
def test_bad_options(data: Path, tmp_path: Path, options: list[str] | None, words: list[str]) -> None:
    result = invoked("fit", data, *([] if options is None else ["--target", "price", *options]))
    assert result.exit_code == 2
    assert all(word in result.output for word in words), result.output
    assert [path.name for path in tmp_path.iterdir()] == ["data.csv"]


def test_an_error_of_torch_is_one_sentence_and_debug_shows_where(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_, **__):
        torch.zeros(2, 3) @ torch.zeros(2, 3)

    monkeypatch.setattr(run.tabular, "train", broken)
    result = invoked("fit", data, "--target", "price")
    assert result.exit_code == 1
    assert "Traceback" not in result.output
    assert "Error: " in result.output
    assert isinstance(invoked("fit", data, "--target", "price", "--resume", "--debug").exception, RuntimeError)


def test_a_missing_package_is_named_with_its_extra(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code = "import sys; sys.argv = ['marquardt', 'predict']; sys.modules['rich'] = None; import marquardt.cli"
    result = program("-c", code)
    assert result.returncode == 2
    assert result.stderr == "the command line needs rich: pip install 'marquardt[table]'\n"
    for name in [name for name in sys.modules if name.startswith("marquardt.table")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "pandas", None)
    result = invoked("fit", data, "--target", "price")
    assert result.exit_code == 2
    assert result.output == "Error: this needs pandas: pip install 'marquardt[table]'\n"


# --- folders ---


def test_another_run_is_not_overwritten(data: Path, tmp_path: Path) -> None:
    assert invoked("fit", data, "--target", "price", *QUICK).exit_code == 0
    before = files(tmp_path / "data-model")
    refused(invoked("fit", data, "--target", "price", *QUICK), "holds a run already", "--resume")
    refused(invoked("fit", data, "--target", "area", "--resume", *QUICK), "other options: targets")
    again = invoked("fit", data, "--target", "price", "--resume", *QUICK)
    assert again.exit_code == 0
    assert "finished: there is nothing to do" in again.output
    data.write_text(data.read_text().replace("Bern", "Biel"))
    refused(invoked("fit", data, "--target", "price", "--resume", *QUICK), "has changed since")
    assert files(tmp_path / "data-model") == before


def test_a_folder_of_something_else_is_left_alone(data: Path, tmp_path: Path) -> None:
    refused(invoked("fit", data, "--target", "price", "--out", tmp_path), "not empty")
    refused(invoked("fit", data, "--target", "price", "--out", data), "is a file")
    assert [path.name for path in tmp_path.iterdir()] == ["data.csv"]


def test_a_folder_is_for_one_process_at_a_time(data: Path, tmp_path: Path) -> None:
    out = tmp_path / "data-model"
    with locks.held(out, "run"):
        result = invoked("fit", data, "--target", "price", *QUICK)
        assert result.exit_code == 1
        assert f"{out} is in use, process {os.getpid()} on " in result.stderr
        assert [path.name for path in out.iterdir()] == [".run.lock"]
    assert invoked("fit", data, "--target", "price", *QUICK).exit_code == 0


def test_ctrl_c_says_how_to_go_on(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def stop(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(run.tabular, "train", stop)
    words = ["fit", str(data), "--target", "price"]
    monkeypatch.setattr(sys, "argv", ["marquardt", *words])
    result = invoked(*words)
    assert result.exit_code == 130
    assert f"Stopped. Go on: marquardt fit {data} --target price --resume" in result.output


def test_each_kind_of_network_is_told_once(capsys: pytest.CaptureFixture[str]) -> None:
    screen = command.FitScreen(command.Console())
    for member, step, loss in [(1, 1, math.inf), (1, 2, math.inf), (1, 1, 0.5), (2, 1, 0.25), (2, 2, 0.125)]:
        screen.see({"configuration": "3 silu", "member": member, "members": 2, "step": step, "steps": 2, "loss": loss})
    screen.end()
    screen.end()
    assert (
        capsys.readouterr().out
        == "1/2  3 silu: 1 step, loss 0.5\n2/2  3 silu, on all rows to train on: 2 steps, loss 0.125\n"
    )


def test_a_terminal_shows_a_bar(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    console = command.Console
    monkeypatch.setattr(command, "Console", lambda **o: console(force_terminal=True, width=80, height=24, **o))
    monkeypatch.setattr(command, "REFRESH", 0.0)
    result = invoked("fit", data, "--target", "price", *QUICK)
    assert result.exit_code == 0, result.output
    assert "step 4" in result.output
    assert "loss" in result.output


# --- predict ---


def test_predictions_are_those_of_the_training(trained: Path, tmp_path: Path) -> None:
    data = write(tmp_path / "new.csv", houses(), without=("rent", "sold", "price", "name"))
    result = invoked("predict", trained, data, "--out", tmp_path / "p.csv")
    assert result.exit_code == 0, result.output
    found, before = pd.read_csv(tmp_path / "p.csv"), pd.read_csv(trained / "predictions.csv")
    assert list(found.columns) == ["row", "predicted", "std", "lower", "upper"]
    for name in found.columns:
        assert found[name].tolist() == pytest.approx(before[name].tolist(), rel=1e-8)


def test_other_intervals(trained: Path, tmp_path: Path) -> None:
    data = write(tmp_path / "new.csv", houses(5), without=("price",))
    result = invoked("predict", trained, data, "--interval", "0.5")
    assert result.exit_code == 0, result.output
    (tmp_path / "p.csv").write_text(result.stdout)  # only the table is printed there
    found = pd.read_csv(tmp_path / "p.csv")
    half = 0.6744897501960817 * found["std"]
    assert (found["upper"] - found["predicted"]).tolist() == pytest.approx(half.tolist(), rel=1e-6)
    for wrong in ("0", "1", "95"):
        assert invoked("predict", trained, data, "--interval", wrong).exit_code == 2


def test_what_new_rows_have_is_told(trained: Path, tmp_path: Path) -> None:
    rows = houses(6, seed=5)
    rows[0]["city"], rows[1]["area"] = "Chur", ""
    result = invoked("predict", trained, write(tmp_path / "new.csv", rows))
    assert result.exit_code == 0, result.output
    assert "'city': 1 row has a level that was rare or not there in training ('Chur')" in result.stderr
    assert "'area': 1 value is missing, as none was in training; it is the median" in result.stderr
    assert "Against the 6 known values: price: RMSE" in result.stderr
    assert result.stdout.count("\n") == 7


def test_classes_of_new_rows(sorted_out: Path, tmp_path: Path) -> None:
    rows = houses(6, seed=5)
    rows[0]["sold"] = "perhaps"
    result = invoked("predict", sorted_out, write(tmp_path / "new.csv", rows))
    assert result.exit_code == 0, result.output
    assert result.stdout.startswith("row,predicted,probability of no,probability of yes\n")
    assert "Against the 5 known values: sold: accuracy" in result.stderr


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda text: text.replace("area", "size"), ["no column 'area'", "trained with"]),
        (lambda text: text.replace("Bern,", "Bern,many", 1), ["'rooms'", "in row"]),
        (lambda text: text.replace("Bern,", "Bern,1e15", 1), ["'rooms'", "too large"]),
        (lambda text: text.replace("2001-", "2001-13-", 1), ["'built' holds dates", "'2001-13-"]),
        (lambda text: text[: text.index("\n") + 1], ["no row below"]),
        (lambda text: "", ["is empty"]),
    ],
)
def test_bad_tables_to_predict(trained: Path, tmp_path: Path, change, words: list[str]) -> None:
    data = write(tmp_path / "new.csv", houses(20))
    data.write_text(change(data.read_text()))
    result = invoked("predict", trained, data)
    refused(result, *words)
    assert "--" not in result.output  # options that this command does not have


@pytest.mark.parametrize(
    ("value", "why"),
    [
        ("1e200", "numbers that are too large to compute with"),
        ("inf", "numbers that are not finite"),
        ("secret", "numbers, but also text"),
    ],
)
def test_a_target_that_cannot_be_judged_stands_in_no_way(trained: Path, tmp_path: Path, value: str, why: str) -> None:
    rows = houses(20)
    rows[3]["price"] = value
    result = invoked("predict", trained, write(tmp_path / "new.csv", rows))
    assert result.exit_code == 0, result.output
    assert f"not judged: the column 'price' holds {why}: '{value}' in row 4; correct them." in result.stderr
    assert "--" not in result.stderr  # options that this command does not have
    assert result.stdout.count("\n") == 21


def test_folders_without_a_model(trained: Path, tmp_path: Path) -> None:
    data = write(tmp_path / "new.csv", houses(20))
    refused(invoked("predict", tmp_path, data), "has no model.pt")
    for name, content in (("model.pt", b"x"), ("preprocessing.json", b"{}")):
        broken = tmp_path / name.replace(".", "-")
        broken.mkdir()
        for file, kept in files(trained).items():
            (broken / file).write_bytes(content if file == name else kept)
        refused(invoked("predict", broken, data), "is damaged", "train it again")


# --- what tables hold is shown so that neither a terminal nor a spreadsheet nor a browser obeys it ---

CONTROL = re.compile(r"[\x00-\x09\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")
NAMES = {"Bern": "=cmd|' /C calc'!A0", "Genf": "\x1b[31mred\x07\u202e", "Zürich": "-1"}


def odd_table(path: Path, *, without: tuple[str, ...] = (), **renamed: str) -> Path:
    rows = [{**row, "city": NAMES[row["city"]]} for row in houses(40)]
    names = [name for name in rows[0] if name not in {"name", "rent", "sold", "built", "country", *without}]
    with path.open("w", newline="", encoding="utf-8") as file:
        lines = csv.writer(file)
        lines.writerow([renamed.get(name, name) for name in names])
        lines.writerows([row[name] for name in names] for row in rows)
    return path


def check(result: Any, folder: Path) -> None:
    assert result.exit_code == 0, result.output
    assert not CONTROL.search(result.output), ascii(result.output)
    for path in folder.iterdir():
        if path.suffix in (".html", ".csv", ".json"):
            assert not CONTROL.search(path.read_text(encoding="utf-8")), path
    for line in csv.reader(io.StringIO((folder / "predictions.csv").read_text(encoding="utf-8"))):
        for found in line:
            assert re.fullmatch(r"-?[\d.]+(e[+-]?\d+)?", found) or found[:1] not in ("=", "+", "-", "@", "\t"), line


def test_classes_are_obeyed_by_nobody(tmp_path: Path) -> None:
    data, out = odd_table(tmp_path / "data.csv"), tmp_path / "out"
    check(invoked("fit", data, "--target", "city", "--out", out, *QUICK), out)
    found = pd.read_csv(out / "predictions.csv", dtype=str)
    cells = {"Bern": "'=cmd|' /C calc'!A0", "Genf": "\\x1b[31mred\\x07\\u202e", "Zürich": "-1"}  # the last is a number
    assert found["true"].tolist() == [cells[row["city"]] for row in houses(40)]
    printed = invoked("predict", out, data)
    assert not CONTROL.search(printed.output)
    assert invoked("predict", out, data, "--out", tmp_path / "p.csv").exit_code == 0
    assert (tmp_path / "p.csv").read_text(encoding="utf-8") == printed.stdout


def test_names_of_columns_and_targets(tmp_path: Path) -> None:
    names = {"price": "=price\x1b[2J", "area": "@area<img src=x>", "rooms": "rooms\x9b"}
    data, out = odd_table(tmp_path / "data.csv", **names), tmp_path / "out"
    targets = ("--target", "=price\x1b[2J", "--target", "rooms\x9b")
    check(invoked("fit", data, *targets, "--out", out, *QUICK), out)
    head = (out / "predictions.csv").read_text(encoding="utf-8").splitlines()[0]
    assert head.startswith("row,set,'=price\\x1b[2J true,'=price\\x1b[2J predicted")
    page = (out / "report.html").read_text(encoding="utf-8")
    assert "<img" not in page
    assert "@area&lt;img src=x&gt;" in page
    check(invoked("predict", out, data), out)


@pytest.mark.parametrize("values", [("1", "\x1b[31m"), ("1e400", "2")])
def test_values_in_errors(tmp_path: Path, values: tuple[str, str]) -> None:
    rows = "\n".join(f"{i},{values[i > 20]},{i}.5" for i in range(30))
    (tmp_path / "data.csv").write_text(f"a,b\x1b[1m,y\n{rows}\n")
    result = invoked("fit", tmp_path / "data.csv", "--target", "y", *QUICK)
    assert result.exit_code == 1
    assert "'b\\x1b[1m'" in result.output
    assert not CONTROL.search(result.output)


def test_values_as_long_as_a_book_are_cut(tmp_path: Path) -> None:
    rows = "\n".join(f"{i},{'word' * 20_000 if i > 20 else i},{i}.5" for i in range(30))
    (tmp_path / "data.csv").write_text(f"a,b,y\n{rows}\n")
    result = invoked("fit", tmp_path / "data.csv", "--target", "y", *QUICK)
    assert result.exit_code == 1
    assert "(80,000 characters) in row 22" in result.output
    assert len(result.output) < 5000


def test_a_terminal_gets_no_control_characters_but_those_of_the_program(tmp_path: Path, monkeypatch: Any) -> None:
    console = command.Console
    monkeypatch.setattr(command, "Console", lambda **o: console(force_terminal=True, width=80, height=24, **o))
    data = odd_table(tmp_path / "data\x1b[31m.csv")
    result = invoked("fit", data, "--target", "city", *QUICK)
    assert result.exit_code == 0, result.output
    ours = re.sub(r"\x1b\[[\d;?]*[A-Za-z]|\r", "", result.output)
    assert not CONTROL.search(ours), ascii(ours)
    assert "\x1b[31m.csv" not in result.output
    assert "data\\x1b[31m-model" in ours.replace("\n", "")
