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


def fitted(data: Path, *words: Any) -> Any:
    result = invoked("fit", data, *words, *QUICK)
    assert result.exit_code == 0, result.output
    return result


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model for the price of houses"""
    folder = tmp_path_factory.mktemp("trained")
    data = write(folder / "data.csv", houses(), without=("rent", "sold"))
    fitted(data, "--target", "price", "--out", folder / "model")
    return folder / "model"


@pytest.fixture(scope="module")
def sorted_out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model for whether they were sold"""
    folder = tmp_path_factory.mktemp("sorted")
    data = write(folder / "data.csv", houses(), without=("rent", "price"))
    fitted(data, "--target", "sold", "--out", folder / "model")
    return folder / "model"


def files(out: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in out.rglob("*") if path.is_file() and path.name != ".run.lock"}


# --- what is written ---


def test_everything_is_written_and_said(data: Path, tmp_path: Path) -> None:
    result = fitted(data, "--target", "price")
    out = tmp_path / "data-model"
    assert set(files(out)) == WRITTEN
    assert "64 rows to train on, 16 to test with; 4 columns as" in result.output
    why = "it has 64 different texts in 64 rows, too many for categories"
    assert f"Left out: 'name' ({why}), 'country'" in result.output
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
    fitted(data, "--target", "price", "--target", "rent")
    table = pd.read_csv(tmp_path / "data-model/predictions.csv")
    assert {"price true", "price predicted", "rent lower", "rent upper"} <= set(table.columns)
    assert set(json.loads((tmp_path / "data-model/metrics.json").read_text())["test"]) == {"price", "rent"}


def test_numbers_that_look_like_classes(tmp_path: Path) -> None:
    data = write(tmp_path / "data.csv", [{"x": i / 7, "y": i % 3} for i in range(60)])
    output = fitted(data, "--target", "y", "--out", tmp_path / "a").output
    assert "'y' has only the values 0, 1, 2: they are taken for classes; with --regress they are numbers" in output
    assert "12 to test with; 1 column as 1 input." in output
    fitted(data, "--target", "y", "--out", tmp_path / "b", "--regress")
    tasks = [json.loads((tmp_path / name / "metrics.json").read_text())["task"] for name in "ab"]
    assert tasks == ["classification", "regression"]


def test_without_rows_to_test_with(data: Path, tmp_path: Path) -> None:
    result = fitted(data, "--target", "price", "--test-fraction", "0")
    assert "none to test with: the report is about rows it has seen" in result.output
    assert "test" not in json.loads((tmp_path / "data-model/metrics.json").read_text())
    assert "No rows were kept back" in (tmp_path / "data-model/report.html").read_text()


def test_rows_without_a_target_are_left_out_and_keep_their_numbers(tmp_path: Path) -> None:
    rows = houses(12)  # fewer than weights
    rows[0]["price"] = ""
    data = write(tmp_path / "data.csv", rows, without=("rent", "sold"))
    assert "Left out, without a target: 1 row." in fitted(data, "--target", "price").output
    table = pd.read_csv(tmp_path / "data-model/predictions.csv")
    assert table["row"].tolist() == list(range(2, 13))
    assert table["predicted"].notna().all()


def test_one_seed_is_one_model_also_from_parquet(data: Path, tmp_path: Path, trained: Path) -> None:
    pd.read_csv(data, parse_dates=["built"]).to_parquet(tmp_path / "data.parquet")
    fitted(tmp_path / "data.parquet", "--target", "price", "--out", tmp_path / "a")
    fitted(data, "--target", "price", "--seed", "2", "--out", tmp_path / "b")
    first, same, other = (files(folder) for folder in (trained, tmp_path / "a", tmp_path / "b"))
    for name in ("model.pt", "predictions.csv"):
        assert first[name] == same[name] != other[name]


# --- decimal commas ---


def german(path: Path, dotted: list[str]) -> Path:
    """A file with semicolons, decimal commas in `area`, and `dotted` in `people`"""
    lines = [f"{20 + i},5;{people};{3 * i},25" for i, people in enumerate(dotted)]
    path.write_text("\n".join(["area;people;price", *lines]) + "\n")
    return path


def test_thousands_with_dots_are_whole_numbers(tmp_path: Path) -> None:
    people = [f"{2 + i // 10}.{600 + i}" if i % 3 else str(900 + i) for i in range(40)]
    result = fitted(german(tmp_path / "data.csv", people), "--target", "price")
    assert "A dot in its numbers separates thousands: 'people' (2.601)." in result.output
    found = {c["name"]: c for c in json.loads((tmp_path / "data-model/preprocessing.json").read_text())["columns"]}
    assert 900 < found["people"]["median"] < 6000
    (tmp_path / "new.csv").write_text("area;people\n20;2.601\n21;950\n")  # alone, that would be 2 and 6 tenths
    (tmp_path / "same.csv").write_text("area,people\n20,2601\n21,950\n")
    new, same = (invoked("predict", tmp_path / "data-model", tmp_path / name) for name in ("new.csv", "same.csv"))
    assert new.stdout == same.stdout
    assert "separates thousands" in new.stderr


def test_decimal_points_beside_decimal_commas(tmp_path: Path) -> None:
    data = german(tmp_path / "data.csv", ["2.611", "2.5"] * 20)
    words = ["the column 'people' has a dot that separates no thousands: '2.5' in row 2", "--ignore people"]
    refused(invoked("fit", data, "--target", "price", *QUICK), *words)
    result = invoked("fit", data, "--target", "people", *QUICK)
    refused(result, "'people' has a dot that separates no thousands", "--missing", "--classify")
    assert "--ignore" not in result.output  # errors about a target name its own options
    fitted(data, "--target", "people", "--classify", "--out", tmp_path / "classes")
    fitted(data, "--target", "price", "--ignore", "people")
    data.write_text(data.read_text().replace("people", "rooms"))
    result = invoked("predict", tmp_path / "data-model", data)
    assert result.exit_code == 0, result.output  # the model does not need that column
    data.write_text(data.read_text().replace("area;rooms", "city;area"))
    result = invoked("predict", tmp_path / "data-model", data)
    refused(result, "the column 'area' has a dot that separates no thousands")
    assert "--" not in result.output


# --- what may not be as it was meant ---


def test_what_may_not_be_as_it_was_meant_is_told_once(tmp_path: Path) -> None:
    rows = [
        {"a": i % 7, "b": i / 3, "c": f"{i % 7}.0", "d": i % 5, "area": f"${1000 + 7 * i}", "price": i * 0.5,
         "day": f"{1 + i % 12:02}/{1 + i % 11:02}/2020"}
        for i in range(40)
    ]  # fmt: skip
    sentences = (
        "Column 'area' looks like numbers with '$': remove that to use it as numbers.",
        "Columns 'a', 'c' are alike in every row: --ignore leaves one out.",
        "day/month/year would be possible too: if it is that, write the dates as year-month-day.",
    )
    data = write(tmp_path / "data.csv", rows)
    output = fitted(data, "--target", "price").output
    assert [output.count(sentence) for sentence in sentences] == [1] * 3
    assert "'day': read as month/day/year" in output
    rows[0]["day"] = "13/01/2020"
    write(data, rows)
    options = ("--categorical", "area", "--ignore", "c", "--out", tmp_path / "b")
    output = fitted(data, "--target", "price", *options).output
    assert not [sentence for sentence in sentences if sentence in output]
    for option in ((), ("--regress",), ("--classify",)):  # without a circle
        result = invoked("fit", data, "--target", "area", *option, *QUICK, "--out", tmp_path / "c")
        shown = "the target 'area' is text ('$1000'), but looks like numbers with '$'"
        refused(result, f"{shown}: remove that to predict numbers")
        assert "--" not in result.output


# --- bad input ---

ROWS = "\n".join(f"{i},{i % 7},{i * 0.3}" for i in range(30))
BAD = {
    "unreadable": (b"\x00\x01\x02", "y", ["not text"]),
    "few rows": (b"a,y\n1,2\n2,3\n", "y", ["2 rows", "at least 10"]),
    "no such target": (f"a,b,y\n{ROWS}".encode(), "z", ["--target", "no column 'z'", "'a', 'b', 'y'"]),
    "no names": (ROWS.encode(), "y", ["the first line must have the names"]),
    "text among numbers": (f"a,b,y\n{ROWS}\n5,x,1\n".encode(), "y", ["'b'", "'x' in row 31", "--ignore b"]),
    "text among targets": (f"a,b,y\n{ROWS}\n5,1,x\n".encode(), "y", ["'y'", "'x' in row 31"]),
    "no target values": (b"a,y\n" + b"1,\n" * 30, "y", ["0 rows with a value of 'y'"]),
    "only the target": (b"y\n" + b"".join(b"%d.5\n" % i for i in range(30)), "y", ["no column is left"]),
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


def raising(error: BaseException) -> Any:
    def raised(*_: Any, **__: Any) -> None:
        raise error

    return raised


FULL = "memory ran out in the training with 64 rows: --rows N reads the first N rows, and fewer units in --hidden"


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (MemoryError(), f"{FULL} need less"),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory"), f"{FULL} need less"),
        (RuntimeError("a slip"), "a slip"),
        (IndexError("a slip"), "IndexError: a slip (--debug shows where)"),
    ],
)
def test_an_error_in_training_is_one_sentence_and_debug_shows_where(
    data: Path, monkeypatch: pytest.MonkeyPatch, error: Exception, words: str
) -> None:
    monkeypatch.setattr(run.tabular, "train", raising(error))
    result = invoked("fit", data, "--target", "price")
    assert (result.exit_code, result.stderr) == (1, f"Error: {words}\n")
    debugged = invoked("fit", data, "--target", "price", "--resume", "--debug")
    assert error in (debugged.exception, debugged.exception.__cause__)


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
    fitted(data, "--target", "price")
    before = files(tmp_path / "data-model")
    refused(invoked("fit", data, "--target", "price", *QUICK), "holds a run already", "--resume")
    for more, words in (
        ("--hidden=5,4", "hidden was [3] and is [5, 4]"),
        ("--rows=9999", "rows was not given and is 9999"),
    ):
        refused(invoked("fit", data, "--target", "price", *QUICK, "--resume", more), f"other options: {words}")
    assert "finished: there is nothing to do" in fitted(data, "--target", "price", "--resume").output
    data.write_text(data.read_text().replace("Bern", "Biel"))
    refused(invoked("fit", data, "--target", "price", "--resume", *QUICK), "other data", "has changed since")
    refused(invoked("fit", data, "--target", "price", "--out", data), "is a file")
    assert files(tmp_path / "data-model") == before


def test_a_folder_is_for_one_process_at_a_time(data: Path, tmp_path: Path) -> None:
    out = tmp_path / "data-model"
    with locks.held(out, "run"):
        result = invoked("fit", data, "--target", "price", *QUICK)
        assert result.exit_code == 1
        assert f"{out} is in use, process {os.getpid()} on " in result.stderr
        assert [path.name for path in out.iterdir()] == [".run.lock"]
    fitted(data, "--target", "price")


def test_ctrl_c_says_how_to_go_on(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run.tabular, "train", raising(KeyboardInterrupt()))
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
    lines = ["1/2  3 silu: 1 step, loss 0.5", "2/2  3 silu, on all rows to train on: 2 steps, loss 0.125"]
    assert capsys.readouterr().out.splitlines() == lines


def test_a_terminal_shows_a_bar(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    console = command.Console
    monkeypatch.setattr(command, "Console", lambda **o: console(force_terminal=True, width=80, height=24, **o))
    monkeypatch.setattr(command, "REFRESH", 0.0)
    output = fitted(data, "--target", "price").output
    assert "step 4" in output
    assert "loss" in output


# --- predict ---


def test_predictions_are_those_of_the_training_in_other_intervals(trained: Path, tmp_path: Path) -> None:
    data = write(tmp_path / "new.csv", houses(), without=("rent", "sold", "price", "name"))
    for name, interval in (("p.csv", "0.95"), ("half.csv", "0.5")):
        result = invoked("predict", trained, data, "--interval", interval, "--out", tmp_path / name)
        assert result.exit_code == 0, result.output
    found, before, half = map(pd.read_csv, (tmp_path / "p.csv", trained / "predictions.csv", tmp_path / "half.csv"))
    assert list(found.columns) == ["row", "predicted", "std", "lower", "upper"]
    for name in found.columns:
        assert found[name].tolist() == pytest.approx(before[name].tolist(), rel=1e-8)
    width = 0.6744897501960817 * found["std"]
    assert (half["upper"] - found["predicted"]).tolist() == pytest.approx(width.tolist(), rel=1e-6)
    for wrong in ("0", "1", "95"):
        assert invoked("predict", trained, data, "--interval", wrong).exit_code == 2


def test_what_new_rows_have_is_told(trained: Path, sorted_out: Path, tmp_path: Path) -> None:
    rows = houses(6, seed=5)
    rows[0]["city"], rows[1]["area"], rows[0]["sold"] = "Chur", "", "perhaps"
    result = invoked("predict", trained, write(tmp_path / "new.csv", rows))
    assert result.exit_code == 0, result.output
    assert "'city': 1 row with a level that was rare or not there in training ('Chur')" in result.stderr
    assert "'area': 1 missing value, and none in training: read as the median" in result.stderr
    assert "Against the 6 known values: price: RMSE" in result.stderr
    assert result.stdout.count("\n") == 7  # only the table is printed there
    result = invoked("predict", sorted_out, tmp_path / "new.csv")
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


def test_a_target_that_cannot_be_judged_stands_in_no_way(trained: Path, tmp_path: Path) -> None:
    rows = houses(20)
    rows[3]["price"] = "secret"
    result = invoked("predict", trained, write(tmp_path / "new.csv", rows))
    assert result.exit_code == 0, result.output
    assert "not judged: the column 'price' holds numbers, but also text: 'secret' in row 4; correct" in result.stderr
    assert "--" not in result.stderr  # options that this command does not have
    assert result.stdout.count("\n") == 21


def test_a_folder_without_a_model(tmp_path: Path) -> None:
    refused(invoked("predict", tmp_path, write(tmp_path / "new.csv", houses(20))), "has no model.pt")


# --- what tables hold is shown so that neither a terminal nor a spreadsheet nor a browser obeys it ---

CONTROL = re.compile(r"[\x00-\x09\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")
NAMES = {"Bern": "=cmd|' /C calc'!A0", "Genf": "\x1b[31mred\x07\u202e", "Zürich": "-1"}


def odd_table(path: Path, **renamed: str) -> Path:
    rows = [{**row, "city": NAMES[row["city"]]} for row in houses(40)]
    names = ["area", "city", "rooms", "price"]
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


def test_classes_and_names_are_obeyed_by_nobody(tmp_path: Path) -> None:
    names = {"city": "=city\x1b[2J", "area": "@area<img src=x>", "rooms": "rooms\x9b"}
    data, out = odd_table(tmp_path / "data.csv", **names), tmp_path / "out"
    check(invoked("fit", data, "--target", names["city"], "--out", out, *QUICK), out)
    found = pd.read_csv(out / "predictions.csv", dtype=str)
    cells = {"Bern": "'=cmd|' /C calc'!A0", "Genf": "\\x1b[31mred\\x07\\u202e", "Zürich": "-1"}  # the last is a number
    assert found["true"].tolist() == [cells[row["city"]] for row in houses(40)]
    page = (out / "report.html").read_text(encoding="utf-8")
    assert "<img" not in page
    assert "@area&lt;img src=x&gt;" in page
    printed = invoked("predict", out, data)
    check(printed, out)
    assert invoked("predict", out, data, "--out", tmp_path / "p.csv").exit_code == 0
    assert (tmp_path / "p.csv").read_text(encoding="utf-8") == printed.stdout
    several = ("--target", "price", "--target", "rooms\x9b")
    check(invoked("fit", data, *several, "--out", tmp_path / "b", *QUICK), tmp_path / "b")
    head = (tmp_path / "b/predictions.csv").read_text(encoding="utf-8").splitlines()[0]
    assert head.startswith("row,set,price true,price predicted,")
    assert "rooms\\x9b predicted" in head


@pytest.mark.parametrize(
    ("values", "words"),
    [(("1", "\x1b[31m"), "'b\\x1b[1m'"), (("1e400", "2"), "not finite"),
     (("1", "word" * 20_000), "(80,000 characters) in row 22")],
)  # fmt: skip
def test_values_in_errors_are_short_and_obeyed_by_nobody(tmp_path: Path, values: tuple[str, str], words: str) -> None:
    rows = "\n".join(f"{i},{values[i > 20]},{i}.5" for i in range(30))
    (tmp_path / "data.csv").write_text(f"a,b\x1b[1m,y\n{rows}\n")
    result = invoked("fit", tmp_path / "data.csv", "--target", "y", *QUICK)
    refused(result, "'b\\x1b[1m'", words)
    assert not CONTROL.search(result.output)
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
