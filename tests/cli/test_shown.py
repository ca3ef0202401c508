"""What tables hold is shown and written so that neither a terminal nor a spreadsheet nor a browser obeys it."""

from __future__ import annotations

import csv
import io
import re
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from support.command_line import invoked
from support.tables import houses

QUICK = ("--hidden", "3", "--steps", "3")
CONTROL = re.compile(r"[\x00-\x09\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")
NAMES = {"Bern": "=cmd|' /C calc'!A0", "Genf": "\x1b[31mred\x07\u202e", "Zürich": "-1"}


def table(path: Path, *, without: tuple[str, ...] = (), **renamed: str) -> Path:
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


def test_classes(tmp_path: Path) -> None:
    data, out = table(tmp_path / "data.csv"), tmp_path / "out"
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
    data, out = table(tmp_path / "data.csv", **names), tmp_path / "out"
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
    from marquardt.cli import fit as command

    console = command.Console
    monkeypatch.setattr(command, "Console", lambda **o: console(force_terminal=True, width=80, height=24, **o))
    data = table(tmp_path / "data\x1b[31m.csv")
    result = invoked("fit", data, "--target", "city", *QUICK)
    assert result.exit_code == 0, result.output
    ours = re.sub(r"\x1b\[[\d;?]*[A-Za-z]|\r", "", result.output)
    assert not CONTROL.search(ours), ascii(ours)
    assert "\x1b[31m.csv" not in result.output
    assert "data\\x1b[31m-model" in ours.replace("\n", "")
