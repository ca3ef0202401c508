"""Code in README and docs runs as printed."""

import re
import subprocess
import sys
from pathlib import Path

README = Path(__file__).parents[1] / "README.md"


def test_the_first_example_fits_the_sine(tmp_path):
    code = re.search(r"```python\n(.*?)```", README.read_text(encoding="utf-8"), re.DOTALL).group(1)
    # a process and folder of its own: the example must bring all it needs
    run = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert run.returncode == 0, run.stderr
    loss = float(run.stdout.split()[-1])
    assert 0.005 < loss < 0.012  # the noise has variance 0.01; far below it the example would be over-fitting


def test_the_page_on_least_squares_runs_from_top_to_bottom(tmp_path):
    page = README.parent / "docs" / "least_squares.md"
    code = "\n".join(re.findall(r"```python\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL))
    run = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert run.returncode == 0, run.stderr
