"""Tables are read as they stand in the file; what is no table is refused in one sentence."""

from __future__ import annotations

import random
import subprocess
import sys
from pathlib import Path

import pandas as pd
import pytest

from marquardt.table import reading
from marquardt.table.reading import BadTable, read


def written(tmp_path: Path, content: str | bytes, name: str = "data.csv") -> Path:
    path = tmp_path / name
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


def test_cells_are_text_and_some_words_are_no_value(tmp_path):
    frame = read(written(tmp_path, "a, b\n007, x \nNA,?\n,nan\n")).frame
    assert list(frame.columns) == ["a", "b"]
    assert frame["a"].tolist()[0] == "007"
    assert frame["b"].tolist()[0] == "x"
    assert frame.isna().to_numpy().tolist() == [[False, False], [True, True], [True, True]]


def test_further_words_for_no_value(tmp_path):
    path = written(tmp_path, "a,b\n-999,1\n3,Unknown\n")
    assert not read(path).frame.isna().any(axis=None)
    assert read(path, missing=("-999", "unknown")).frame.isna().to_numpy().tolist() == [[True, False], [False, True]]


@pytest.mark.parametrize(("separator", "word"), [(";", "semicolons"), ("\t", "tabs"), ("|", "bars")])
def test_separators_are_found_and_said(tmp_path, separator, word):
    rows = [["a", "b", "c"], ["1,5", "2", "x, y"], ["2,5", "3", "z"]]
    sheet = read(written(tmp_path, "\n".join(separator.join(row) for row in rows)))
    assert sheet.frame["a"].tolist() == ["1.5", "2.5"]
    assert sheet.frame["c"].tolist() == ["x, y", "z"]
    assert word in sheet.says[0]
    assert "decimal commas (columns 'a')" in sheet.says[1]


def test_dots_beside_decimal_commas_separate_thousands(tmp_path):
    sheet = read(written(tmp_path, "a;b;day;c\n1,5;2.611;01.02.2024;1.234,5\n2;950;1.12.2024;-1.200\n0,25;;;1,5\n"))
    assert sheet.frame["a"].tolist() == ["1.5", "2", "0.25"]
    assert sheet.frame["b"].tolist()[:2] == ["2611", "950"]
    assert sheet.frame["c"].tolist() == ["1234.5", "-1200", "1.5"]
    assert sheet.frame["day"].tolist()[:2] == ["01.02.2024", "1.12.2024"]
    assert sheet.says[2] == "A dot in its numbers separates thousands: 'b' (2.611), 'c' (1.234,5)."
    assert sheet.mixed == {}
    assert sheet.commas
    text = read(written(tmp_path, "a;b\n1,5;2.611\n2;950\n0,25;n.a.\n"))
    assert text.frame["b"].tolist() == ["2611", "950", "n.a."]
    assert text.mixed == {}


@pytest.mark.parametrize("value", ["2.25", "0.125", "1000.250", ".5", "1.5e3"])
def test_other_dots_beside_decimal_commas_are_refused(tmp_path, value):
    sheet = read(written(tmp_path, f"a;b\n1,5;2.611\n2,5;{value}\n3,5;950\n"))
    assert sheet.frame["b"].tolist() == ["2.611", value, "950"]
    sheet.check(["a"])
    with pytest.raises(
        BadTable, match=f"decimal commas, but the column 'b' has a dot .*: {value!r} in row 2; .*--ignore b"
    ):
        sheet.check(["a", "b"])


@pytest.mark.parametrize(("commas", "found"), [(False, "2.611"), (True, "2611")])
def test_a_file_without_commas_is_read_as_was_asked_for(tmp_path, commas, found):
    path = written(tmp_path, "a;b\n1;2.611\n2;950\n")
    assert read(path, commas=commas).frame["b"].tolist() == [found, "950"]
    said = read(path, commas=commas).says[1]
    assert said.startswith(
        "A dot in its numbers " + ("separates thousands" if commas else "is read as a decimal point")
    )
    points = read(written(tmp_path, "a;b\n1.5;2.611\n2;950\n"), commas=commas)
    assert points.frame["b"].tolist() == ["2.611", "950"]
    assert not points.commas


def test_commas_between_thousands_stay_beside_decimal_points(tmp_path):
    sheet = read(written(tmp_path, "a\tb\n1,007\t1.5\n950\t2.25\n"))
    assert sheet.frame["a"].tolist() == ["1,007", "950"]
    assert sheet.frame["b"].tolist() == ["1.5", "2.25"]
    assert sheet.mixed == {}
    assert read(written(tmp_path, "a;b\n1,007,300;1\n1,950;2\n")).frame["a"].tolist()[1] == "1,950"


def test_a_number_among_texts_decides_nothing(tmp_path):
    sheet = read(written(tmp_path, "a;b\nx, y;1.5\n1,5;2.25\nz;3.125\n"))
    assert sheet.frame["b"].tolist() == ["1.5", "2.25", "3.125"]
    assert not sheet.commas


def test_more_names_than_are_looked_at_beforehand(tmp_path):
    names = [f"{i} " + 500 * "long" for i in range(40)]
    assert len(",".join(names)) > reading.HEAD
    frame = read(written(tmp_path, ",".join(names) + "\n" + ",".join(map(str, range(40))))).frame
    assert list(frame.columns) == names
    assert frame.iloc[0, -1] == "39"


def test_columns_without_names_are_called_by_their_places(tmp_path):
    assert list(read(written(tmp_path, ",b,\n1,2,3\n")).frame.columns) == ["column 1", "b", "column 3"]


def test_a_comma_stays_between_columns(tmp_path):
    sheet = read(written(tmp_path, 'a,b\n1,"x;y"\n2,"u;v"\n'))
    assert sheet.frame["b"].tolist() == ["x;y", "u;v"]
    assert sheet.says == []


@pytest.mark.parametrize(
    ("encoding", "said"), [("utf-8", []), ("utf-8-sig", []), ("utf-16", []), ("cp1252", ["not UTF-8"])]
)
def test_encodings(tmp_path, encoding, said):
    sheet = read(written(tmp_path, "Straße,b\nZürich,1\n".encode(encoding)))
    assert sheet.frame["Straße"].tolist() == ["Zürich"]
    assert [word in sentence for word, sentence in zip(said, sheet.says, strict=True)] == [True] * len(said)


def test_an_encoding_that_shows_late(tmp_path):
    text = "name,b\n" + "plain,1\n" * 20_000 + "Zürich,2\n"
    assert read(written(tmp_path, text.encode("cp1252"))).frame["name"].iloc[-1] == "Zürich"


def test_only_the_first_rows(tmp_path):
    path = written(tmp_path, "a\n" + "\n".join(map(str, range(50))))
    assert read(path, rows=3).frame["a"].tolist() == ["0", "1", "2"]


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
        (b"PK\x03\x04rest", ["Excel", "CSV"]),
        (b"PAR1broken", ["damaged Parquet"]),
    ],
)
def test_what_is_no_table(tmp_path, content, words):
    path = written(tmp_path, content)
    with pytest.raises(BadTable) as error:
        read(path)
    assert str(path) in str(error.value)
    assert all(word in str(error.value) for word in words), error.value
    assert "\n" not in str(error.value)


def test_no_file_at_all(tmp_path):
    with pytest.raises(BadTable, match=r"none.csv cannot be read \(No such file"):
        read(tmp_path / "none.csv")
    with pytest.raises(BadTable, match="is a folder"):
        read(tmp_path)


def test_a_table_larger_than_memory_is_refused_before_it_is_read(tmp_path, monkeypatch):
    path = written(tmp_path, "a,b\n" + "1,2\n" * 1000)
    monkeypatch.setattr(reading, "available_memory", lambda: 10_000)
    monkeypatch.setattr(pd, "read_csv", None)
    with pytest.raises(BadTable, match=r"needs about .* of memory.*--rows N reads the first N rows"):
        read(path)


def test_a_large_file_is_announced(tmp_path, monkeypatch):
    path = written(tmp_path, "a\n1\n")
    assert reading.announce(path) is None
    monkeypatch.setattr(reading, "LARGE", 3)
    assert "reading it takes a while" in reading.announce(path)


def test_free_memory_is_a_number_of_bytes():
    assert reading.available_memory() > 1e6


# --- files that are small and become large ---


@pytest.fixture
def little_memory(monkeypatch):
    """As if 100 MB were free; a table that is read in spite of it would still do no harm"""
    monkeypatch.setattr(reading, "available_memory", lambda: 10**8)


def test_short_rows_have_a_cell_for_every_name(tmp_path, little_memory):
    path = written(tmp_path, ",".join(f"c{i}" for i in range(500)) + "\n" + "1\n" * 40_000)
    assert path.stat().st_size < 90_000
    with pytest.raises(BadTable, match=r"needs about 0\.4 GB of memory, and 0\.1 GB are free: --rows N"):
        read(path)
    assert read(path, rows=3).frame.shape == (3, 500)
    with pytest.raises(BadTable, match="of memory"):
        read(path, rows=20_000)


def test_too_many_columns_are_counted_before_they_are_read(tmp_path, monkeypatch):
    path = written(tmp_path, "," * 30_000 + "\n1\n")
    monkeypatch.setattr(pd, "read_csv", None)
    with pytest.raises(BadTable, match="has 30,001 columns, more than the 20,000 that can be read"):
        read(path)


def test_a_first_line_without_an_end(tmp_path, monkeypatch):
    monkeypatch.setattr(reading, "NAMES", 1_000)
    with pytest.raises(BadTable, match=r"the first line of .* has more than 1,000 bytes: it must have the names"):
        read(written(tmp_path, "a" * 5_000))


def test_a_zero_behind_what_is_looked_at_first(tmp_path):
    path = written(tmp_path, b"a,b\n" + b"1,2\n" * 50_000 + b"3,\0\n")
    with pytest.raises(BadTable, match="is not text: it has a zero at byte 200,007"):
        read(path)


def test_what_is_named_as_if_it_were_packed_is_not_unpacked(tmp_path, monkeypatch):
    path = written(tmp_path, b"a,b\n1,2\n", "data.csv.gz")
    assert read(path).frame["b"].tolist() == ["2"]


def test_memory_of_a_container_counts(tmp_path):
    for name, text in {
        "memory.max": "1000",
        "memory.current": "700",
        "memory.stat": "anon 5\ninactive_file 50\n",
    }.items():
        (tmp_path / name).write_text(text)
    assert reading._free_in_group(tmp_path) == 350
    (tmp_path / "memory.max").write_text("max\n")
    assert reading._free_in_group(tmp_path) is None


def dictionary(path, rows, text):
    """One text in many rows, which Parquet writes down once"""
    import pyarrow
    import pyarrow.parquet

    texts = pyarrow.DictionaryArray.from_arrays(pyarrow.array([0] * rows, "int32"), pyarrow.array([text]))
    table = pyarrow.table({"text": texts, "y": pyarrow.array(range(rows))})
    pyarrow.parquet.write_table(table, path, compression="zstd", store_schema=False)
    return path


def test_a_text_that_is_written_down_once_counts_in_every_row(tmp_path, little_memory):
    path = dictionary(tmp_path / "data.parquet", 5_000, "a" * 100_000)
    assert path.stat().st_size < 100_000
    with pytest.raises(BadTable, match=r"needs about 2\.5 GB of memory, and 0\.1 GB are free: --rows N"):
        read(path)
    assert read(path, rows=2).frame["text"].str.len().tolist() == [100_000] * 2


def test_a_number_that_is_written_down_once_counts_in_every_row(tmp_path, little_memory):
    import pyarrow
    import pyarrow.parquet

    numbers = pyarrow.DictionaryArray.from_arrays(pyarrow.array([0] * 5_000_000, "int32"), pyarrow.array([1.5]))
    pyarrow.parquet.write_table(pyarrow.table({"a": numbers}), tmp_path / "data.parquet", store_schema=False)
    assert (tmp_path / "data.parquet").stat().st_size < 30_000
    with pytest.raises(BadTable, match=r"needs about 0\.12 GB"):
        read(tmp_path / "data.parquet")


def test_lists_and_objects_are_left_out(tmp_path):
    import pyarrow
    import pyarrow.parquet

    table = pyarrow.table({"a": [1, 2], "many": [["x" * 1000] * 50] * 2, "both": [{"a": 3}] * 2})
    pyarrow.parquet.write_table(table, tmp_path / "data.parquet")
    sheet = read(tmp_path / "data.parquet")
    assert list(sheet.frame.columns) == ["a"]
    assert sheet.says == ["Columns 'many', 'both' of data.parquet hold lists or objects: they are left out."]
    pyarrow.parquet.write_table(table.select(["many"]), tmp_path / "data.parquet")
    with pytest.raises(BadTable, match="no column of single values"):
        read(tmp_path / "data.parquet")


# --- Parquet ---


@pytest.fixture
def parquet(tmp_path):
    frame = pd.DataFrame(
        {
            "whole": [1, 2, 3],
            "part": [1.5, None, 2.5],
            "flag": [True, False, True],
            "word": ["x", None, "y"],
            "day": pd.to_datetime(["2020-01-01", "2020-01-02", None]),
            "kind": pd.Categorical(["u", "v", "u"]),
        }
    )
    frame.to_parquet(tmp_path / "data.parquet")
    return tmp_path / "data.parquet"


def test_parquet_keeps_numbers_and_dates(parquet):
    frame = read(parquet).frame
    assert frame["whole"].tolist() == [1.0, 2.0, 3.0]
    assert frame["part"].isna().tolist() == [False, True, False]
    assert frame["flag"].tolist() == ["True", "False", "True"]
    assert frame["word"].isna().tolist() == [False, True, False]
    assert str(frame["day"].iloc[1].date()) == "2020-01-02"
    assert frame["kind"].tolist() == ["u", "v", "u"]
    assert len(read(parquet, rows=2).frame) == 2
    assert len(read(parquet, rows=5).frame) == 3


def test_of_parquet_only_the_first_rows_are_read(tmp_path, monkeypatch):
    import pyarrow.parquet as arrow

    path = tmp_path / "data.parquet"
    pd.DataFrame({"a": range(100)}).to_parquet(path, row_group_size=10)
    monkeypatch.setattr(arrow.ParquetFile, "read", None)
    assert read(path, rows=25).frame["a"].tolist() == list(range(25))


def test_a_parquet_table_larger_than_memory(tmp_path, monkeypatch):
    path = tmp_path / "data.parquet"
    pd.DataFrame({"a": range(10_000)}).to_parquet(path)
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
