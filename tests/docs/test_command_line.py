"""The commands of docs/command-line.md run as printed, in the order of the page."""

import re
import shlex
from pathlib import Path

import pytest

from support.command_line import invoked

RESULT = r"price: RMSE ([\d.]+) \(the mean alone: ([\d.]+)\)"
PAGE = Path(__file__).parents[2] / "docs/command-line.md"


def test_the_page_from_top_to_bottom(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    page = PAGE.read_text(encoding="utf-8")
    said = ""
    for kind, text in re.findall(r"```(python|bash)\n(.*?)```", page, re.DOTALL):
        if kind == "python":
            exec(text, {})
            continue
        for line in text.splitlines():
            program, *words = shlex.split(line)
            assert program == "marquardt"
            result = invoked(*words)
            assert result.exit_code == 0, (line, result.output)
            said += result.output
    stated = re.search(r"^    (\d+ rows to train on.*)$", page, re.MULTILINE)[1]
    assert stated in said
    (rmse, mean), (printed, printed_mean) = (re.search(RESULT, text).groups() for text in (page, said))
    assert float(printed) == pytest.approx(float(rmse), rel=0.2)  # what 40 rows say of it
    assert printed_mean == mean
    assert "Report: houses-model/report.html" in said
    assert "there is nothing to do" in said  # the run that --resume found was finished
    for name in re.findall(r"^\| `([a-z.]+)` \|", page, re.MULTILINE):
        assert (tmp_path / "houses-model" / name).is_file(), name
    assert (tmp_path / "predictions.csv").read_text().startswith("row,predicted,std,lower,upper\n")
