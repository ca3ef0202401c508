"""Tables are read as they stand in the file; what is no table is refused in one sentence."""

from __future__ import annotations

import random
import subprocess
import sys
from pathlib import Path

import pandas as pd
import pyarrow
import pyarrow.parquet
import pytest

from marquardt.table import reading
from marquardt.table.reading import BadTable, read


@pytest.fixture
def written(tmp_path):
    def write(content: str | bytes, name: str = "data.csv") -> Path:
        (tmp_path / name).write_bytes(content.encode() if isinstance(content, str) else content)
        return tmp_path / name

    return write


def test_cells_are_text_and_some_words_are_no_value(written):
    frame = read(written("a, b,\n007, x ,1\nNA,?,2\n,nan,3\n")).frame
    assert list(frame.columns) == ["a", "b", "column 3"]
    assert frame.iloc[0].tolist() == ["007", "x", "1"]
    assert frame.isna().to_numpy().tolist() == [[False, False, False], [True, True, False], [True, True, False]]
    path = written("a,b\n-999,1\n3,Unknown\n")
    assert not read(path).frame.isna().any(axis=None)
    assert read(path, missing=("-999", "unknown")).frame.isna().to_numpy().tolist() == [[True, False], [False, True]]
    assert read(path, rows=1).frame["a"].tolist() == ["-999"]


@pytest.mark.parametrize(("separator", "word"), [(";", "semicolons"), ("\t", "tabs"), ("|", "bars")])
def test_separators_are_found_and_said(written, separator, word):
    rows = [["a", "b", "c"], ["1,5", "2", "x, y"], ["2,5", "3", "z"]]
    sheet = read(written("\n".join(separator.join(row) for row in rows)))
    assert sheet.frame["a"].tolist() == ["1.5", "2.5"]
    assert sheet.frame["c"].tolist() == ["x, y", "z"]
    assert word in sheet.says[0]
    assert "decimal commas (columns 'a')" in sheet.says[1]


THOUSANDS, POINT = "A dot in its numbers separates thousands: ", "A dot in its numbers is read as a decimal point: "


@pytest.mark.parametrize(
    ("text", "asked", "columns", "commas", "said"),
    [
        ("a;b;day;c\n1,5;2.611;01.02.2024;1.234,5\n2;950;1.12.2024;-1.200\n0,25;7;2.12.2024;1,5\n", False,
         {"a": ["1.5", "2", "0.25"], "b": ["2611", "950", "7"], "c": ["1234.5", "-1200", "1.5"],
          "day": ["01.02.2024", "1.12.2024", "2.12.2024"]}, True, f"{THOUSANDS}'b' (2.611), 'c' (1.234,5)."),
        ("a;b\n1,5;2.611\n2;950\n0,25;n.a.\n", False, {"b": ["2611", "950", "n.a."]}, True, THOUSANDS),
        ("a;b\n1;2.611\n2;950\n", True, {"b": ["2611", "950"]}, True, THOUSANDS),  # nothing else tells
        ("a;b\n1;2.611\n2;950\n", False, {"b": ["2.611", "950"]}, False, f"{POINT}'b' (2.611); remove it"),
        ("a;b\n1.5;2.611\n2;950\n", True, {"b": ["2.611", "950"]}, False, None),
        ("a\tb\n1,007\t1.5\n950\t2.25\n", False, {"a": ["1,007", "950"], "b": ["1.5", "2.25"]}, False, None),
        ("a;b\n1,007,300;1\n1,950;2\n", False, {"a": ["1,007,300", "1,950"]}, False, None),
        ("a;b\nx, y;1.5\n1,5;2.25\nz;3.125\n", False, {"b": ["1.5", "2.25", "3.125"]}, False, None),  # one of texts
        ('a,b\n1,"x;y"\n2,"u;v"\n', False, {"b": ["x;y", "u;v"]}, False, None),
    ],
)  # fmt: skip
def test_commas_and_dots_in_numbers(written, text, asked, columns, commas, said):
    sheet = read(written(text), commas=asked)
    assert {name: sheet.frame[name].tolist() for name in columns} == columns
    assert sheet.commas == commas
    assert sheet.mixed == {}
    assert [said in sentence for sentence in sheet.says if "A dot" in sentence] == [True] * (said is not None)


@pytest.mark.parametrize("value", ["2.25", "0.125", "1000.250", ".5", "1.5e3"])
def test_other_dots_beside_decimal_commas_are_refused(written, value):
    sheet = read(written(f"a;b\n1,5;2.611\n2,5;{value}\n3,5;950\n"))
    assert sheet.frame["b"].tolist() == ["2.611", value, "950"]
    sheet.check(["a"])
    words = f"decimal commas, but the column 'b' has a dot .*: {value!r} in row 2; .*--ignore b"
    with pytest.raises(BadTable, match=words):
        sheet.check(["a", "b"])


def test_more_names_than_are_looked_at_beforehand(written):
    names = [f"{i} " + 500 * "long" for i in range(40)]
    assert len(",".join(names)) > reading.HEAD
    frame = read(written(",".join(names) + "\n" + ",".join(map(str, range(40))))).frame
    assert list(frame.columns) == names
    assert frame.iloc[0, -1] == "39"


@pytest.mark.parametrize(
    ("encoding", "said"), [("utf-8", []), ("utf-8-sig", []), ("utf-16", []), ("cp1252", ["not UTF-8"])]
)
def test_encodings(written, encoding, said):
    text = "Straße,b\n" + "plain,1\n" * 20_000 + "Zürich,1\n"  # the last shows late
    sheet = read(written(text.encode(encoding)))
    assert sheet.frame["Straße"].iloc[-1] == "Zürich"
    assert [word in sentence for word, sentence in zip(said, sheet.says, strict=True)] == [True] * len(said)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", ["is empty"]),
        (b"  \n\n ", ["is empty"]),
        (b"a,b\n", ["no row below"]),
        (b"a,b,a\n1,2,3\n", ["two columns of one name", "'a'", "columns 1, 3"]),
        (b"a,b\n1,2\n3,4,5\n", ["is no table", "line 3", "correct that line"]),
        (b"a,b\n1,2,3\n3,4,5\n", ["more cells than the 2 names"]),
        (b'a,b\n"1,2\n3,4\n', ["is no table"]),
        (b"\x89\x00\x01\x02\x03", ["not text"]),
        (b"a,b\n" + b"1,2\n" * 50_000 + b"3,\0\n", ["not text", "a zero at byte 200,007"]),
        (b"PK\x03\x04rest", ["Excel", "CSV"]),
        (b"PAR1broken", ["damaged Parquet"]),
        (None, ["cannot be read (No such file"]),
    ],
)
def test_what_is_no_table(written, tmp_path, content, words):
    path = tmp_path / "none.csv" if content is None else written(content)
    with pytest.raises(BadTable) as error:
        read(path)
    assert str(path) in str(error.value)
    assert all(word in str(error.value) for word in words), error.value
    assert "\n" not in str(error.value)
    with pytest.raises(BadTable, match="is a folder"):
        read(tmp_path)


# --- files that are large, or small and become large ---


@pytest.fixture
def little_memory(monkeypatch):
    """As if 100 MB were free; a table that is read in spite of it would still do no harm"""
    monkeypatch.setattr(reading, "available_memory", lambda: 10**8)


def test_a_large_file_is_announced(written, monkeypatch):
    path = written("a\n1\n")
    assert reading.announce(path) is None
    monkeypatch.setattr(reading, "LARGE", 3)
    assert "reading it takes a while" in reading.announce(path)


def test_free_memory_is_that_of_the_machine_and_of_a_container(tmp_path):
    assert reading.available_memory() > 1e6
    parts = {"memory.max": "1000", "memory.current": "700", "memory.stat": "anon 5\ninactive_file 50\n"}
    for name, text in parts.items():
        (tmp_path / name).write_text(text)
    assert reading._free_in_group(tmp_path) == 350
    (tmp_path / "memory.max").write_text("max\n")
    assert reading._free_in_group(tmp_path) is None


def test_a_file_larger_than_memory_and_too_many_columns_are_refused_before_they_are_read(written, monkeypatch):
    monkeypatch.setattr(pd, "read_csv", None)
    with pytest.raises(BadTable, match="has 30,001 columns, more than the 20,000 that can be read"):
        read(written("," * 30_000 + "\n1\n"))
    monkeypatch.setattr(reading, "NAMES", 1_000)
    with pytest.raises(BadTable, match=r"the first line of .* has more than 1,000 bytes: it must have the names"):
        read(written("a" * 5_000))
    monkeypatch.setattr(reading, "available_memory", lambda: 10_000)
    with pytest.raises(BadTable, match=r"needs about .* of memory.*--rows N reads the first N rows"):
        read(written("a,b\n" + "1,2\n" * 1000))


def test_short_rows_have_a_cell_for_every_name(written, little_memory):
    path = written(",".join(f"c{i}" for i in range(500)) + "\n" + "1\n" * 40_000)
    assert path.stat().st_size < 90_000
    with pytest.raises(BadTable, match=r"needs about 0\.4 GB of memory, and 0\.1 GB are free: --rows N"):
        read(path)
    assert read(path, rows=3).frame.shape == (3, 500)
    with pytest.raises(BadTable, match="of memory"):
        read(path, rows=20_000)


def test_what_is_named_as_if_it_were_packed_is_not_unpacked(written):
    assert read(written(b"a,b\n1,2\n", "data.csv.gz")).frame["b"].tolist() == ["2"]


@pytest.mark.parametrize(("value", "rows", "need"), [("a" * 100_000, 5_000, "2.5"), (1.5, 5_000_000, "0.12")])
def test_a_value_that_parquet_writes_down_once_counts_in_every_row(tmp_path, little_memory, value, rows, need):
    path, places = tmp_path / "data.parquet", pyarrow.array([0] * rows, "int32")
    values = pyarrow.DictionaryArray.from_arrays(places, pyarrow.array([value]))
    pyarrow.parquet.write_table(pyarrow.table({"a": values}), path, compression="zstd", store_schema=False)
    assert path.stat().st_size < 100_000
    with pytest.raises(BadTable, match=rf"needs about {need} GB of memory, and 0\.1 GB are free: --rows N"):
        read(path)
    assert read(path, rows=2).frame["a"].tolist() == [value] * 2


# --- Parquet ---


@pytest.fixture
def parquet(tmp_path):
    days = pd.to_datetime(["2020-01-01", "2020-01-02", None])
    frame = pd.DataFrame(
        {"whole": [1, 2, 3], "part": [1.5, None, 2.5], "flag": [True, False, True], "word": ["x", None, "y"],
         "day": days, "kind": pd.Categorical(["u", "v", "u"]), "zone": days.tz_localize("UTC").tz_convert("Asia/Tokyo")}
    )  # fmt: skip
    frame.to_parquet(tmp_path / "data.parquet")
    return tmp_path / "data.parquet"


def test_parquet_keeps_numbers_and_dates(parquet):
    frame = read(parquet).frame
    assert frame["whole"].tolist() == [1.0, 2.0, 3.0]
    assert frame["part"].isna().tolist() == [False, True, False]
    assert frame["flag"].tolist() == ["True", "False", "True"]
    assert frame["word"].isna().tolist() == [False, True, False]
    assert frame["day"].iloc[1] == frame["zone"].iloc[1] == pd.Timestamp("2020-01-02")
    assert frame["kind"].tolist() == ["u", "v", "u"]
    assert len(read(parquet, rows=2).frame) == 2
    assert len(read(parquet, rows=5).frame) == 3


def test_lists_and_objects_are_left_out(tmp_path):
    table = pyarrow.table({"a": [1, 2], "many": [["x" * 1000] * 50] * 2, "both": [{"a": 3}] * 2})
    pyarrow.parquet.write_table(table, tmp_path / "data.parquet")
    sheet = read(tmp_path / "data.parquet")
    assert list(sheet.frame.columns) == ["a"]
    assert sheet.says == ["Columns 'many', 'both' of data.parquet hold lists or objects: they are left out."]
    pyarrow.parquet.write_table(table.select(["many"]), tmp_path / "data.parquet")
    with pytest.raises(BadTable, match="no column of single values"):
        read(tmp_path / "data.parquet")


def test_of_parquet_only_the_first_rows_are_read(tmp_path, monkeypatch):
    path = tmp_path / "data.parquet"
    pd.DataFrame({"a": range(10_000)}).to_parquet(path, row_group_size=10)
    with monkeypatch.context() as patch:
        patch.setattr(pyarrow.parquet.ParquetFile, "read", None)
        assert read(path, rows=25).frame["a"].tolist() == list(range(25))
    monkeypatch.setattr(reading, "available_memory", lambda: 200_000)
    with pytest.raises(BadTable, match="--rows N"):
        read(path)
    assert len(read(path, rows=2).frame) == 2


@pytest.mark.parametrize("seed", range(40))
def test_a_damaged_parquet_file_is_named(parquet, seed):
    draw, whole = random.Random(seed), parquet.read_bytes()
    at = draw.randrange(4, len(whole))
    parquet.write_bytes(whole[:at] if seed % 4 == 0 else whole[:at] + draw.randbytes(20) + whole[at + 20 :])
    found = ""
    try:
        read(parquet)
    except BadTable as error:
        found = str(error)
    assert not found or found.startswith(f"{parquet} ")
    assert "\n" not in found


FOOTER = """
import sys
from pathlib import Path
from marquardt.table.reading import BadTable, read

path = Path(sys.argv[1])
whole = path.read_bytes()
length = int.from_bytes(whole[-8:-4], "little")
for at in range(len(whole) - 8 - length, len(whole)):
    path.write_bytes(whole[:at] + bytes([whole[at] ^ 2]) + whole[at + 1 :])
    try:
        read(path)
    except BadTable:
        pass
"""


def test_no_damaged_byte_of_a_footer_ends_the_process(tmp_path):
    """pyarrow does so where a column that may have no value is said to have one in every row."""
    path = tmp_path / "data.parquet"
    pd.DataFrame({"a": [1.5, None], "b": ["x", None]}).to_parquet(path)
    done = subprocess.run([sys.executable, "-c", FOOTER, str(path)], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
