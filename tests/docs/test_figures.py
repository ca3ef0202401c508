"""Tables that a script of docs/figures prints stand on their pages as printed."""

import subprocess
import sys
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[2] / "docs"


@pytest.mark.parametrize(("script", "page"), [("costs.py", "choose.md"), ("ranks.py", "distributed.md")])
def test_the_figures_on_the_page_are_those_that_are_predicted(script, page):
    command = [sys.executable, str(DOCS / "figures" / script)]
    printed = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120).stdout
    assert printed.count("\n") > 5
    for part in printed.strip().split("\n\n"):
        assert part in (DOCS / page).read_text(encoding="utf-8")
