"""Tables that a script of docs/figures prints stand on their pages as printed."""

import subprocess
import sys
from pathlib import Path

DOCS = Path(__file__).parents[2] / "docs"


def test_the_costs_on_the_page_are_those_that_are_predicted():
    command = [sys.executable, str(DOCS / "figures" / "costs.py")]
    printed = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120).stdout
    assert printed.count("\n") > 5
    assert printed in (DOCS / "choose.md").read_text(encoding="utf-8")
