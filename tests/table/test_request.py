"""The folder of a run says what it is of; no other run gets into it."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch

from marquardt import files
from marquardt.table import request
from marquardt.table.request import CHECKPOINT, RUN, BadFolder, Request, begin, check, end, finished


@pytest.fixture
def asked(tmp_path):
    (tmp_path / "data.csv").write_text("a,y\n1,2\n")
    return Request(tmp_path / "data.csv", ("y",), hidden=(4,))


@pytest.fixture
def out(tmp_path):
    (tmp_path / "model").mkdir()
    return tmp_path / "model"


def test_a_run_begins_goes_on_and_ends(asked, out):
    assert begin(out, asked, resume=False) == []
    assert not finished(out)
    (out / CHECKPOINT).mkdir()
    assert begin(out, asked, resume=True) == []
    end(out)
    assert finished(out)
    assert not (out / CHECKPOINT).exists()
    assert json.loads((out / RUN).read_text())["options"]["targets"] == ["y"]


def test_a_second_run_does_not_overwrite_the_first(asked, out):
    begin(out, asked, resume=False)
    before = (out / RUN).read_bytes()
    for act in (lambda: begin(out, asked, resume=False), lambda: check(out, asked, resume=False)):
        with pytest.raises(BadFolder, match=r"holds a run already \(data.csv\): --resume goes on with it"):
            act()
    assert (out / RUN).read_bytes() == before


def test_other_data_and_other_options_are_refused(asked, out):
    begin(out, asked, resume=False)
    with pytest.raises(BadFolder, match=r"other options: hidden was \[4\] and is \[5\]"):
        begin(out, replace(asked, hidden=(5,)), resume=True)
    with pytest.raises(BadFolder, match="other options: steps was not given and is 7"):
        begin(out, replace(asked, steps=7), resume=True)
    asked.data.write_text("a,y\n1,3\n")
    with pytest.raises(BadFolder, match=r"other data: .*data.csv has changed"):
        check(out, asked, resume=True)


def test_the_same_data_may_have_moved(asked, out, tmp_path):
    begin(out, asked, resume=False)
    moved = asked.data.rename(tmp_path / "moved.csv")
    assert begin(out, replace(asked, data=moved), resume=True) == []


def test_a_folder_of_something_else(asked, out):
    (out / "thesis.tex").write_text("…")
    for resume in (False, True):
        with pytest.raises(BadFolder, match="not empty"):
            check(out, asked, resume=resume)
    with pytest.raises(BadFolder, match="is a file"):
        check(asked.data, asked, resume=False)


def test_what_a_killed_process_left_is_no_obstacle(asked, out):
    (out / ".run.lock").touch()
    (out / "run.0123abcd.part").touch()
    [said] = begin(out, asked, resume=True)
    assert "has no run to go on with" in said
    assert {path.name for path in out.iterdir()} == {".run.lock", RUN}
    assert not finished(out)


@pytest.mark.parametrize("content", ["", "{", "[]", '{"data": {}}'])
def test_a_damaged_run_file(asked, out, content):
    (out / RUN).write_text(content)
    with pytest.raises(BadFolder, match=r"run.json is damaged"):
        begin(out, asked, resume=True)


def test_a_run_goes_on_with_its_threads_and_tells_other_versions(asked, out, monkeypatch):
    begin(out, asked, resume=False)
    threads = torch.get_num_threads()
    found, _ = files.read(out / RUN)
    found["versions"] |= {"threads": threads + 1, "torch": "1.0"}
    files.write(out / RUN, found)
    try:
        [said] = begin(out, asked, resume=True)
        assert torch.get_num_threads() == threads + 1
    finally:
        torch.set_num_threads(threads)
    assert "torch was 1.0 and is" in said


def test_every_option_is_kept(asked):
    kept = asked.options()
    assert set(kept) == set(Request.__dataclass_fields__) - {"data"}
    assert json.loads(json.dumps(kept)) == kept
    assert request.identity(asked).data.bytes == asked.data.stat().st_size
