"""Code in README runs as printed."""

import math
import re
import subprocess
import sys
from pathlib import Path

import pytest

README = Path(__file__).parents[2] / "README.md"
PACKAGES = ("matplotlib", "numpy", "optuna", "rich", "scipy", "sklearn", "typer")

# Lines as somebody pastes them: what an expression is worth is not shown, an error goes to stderr.
PASTE = f"""
import code, sys
sys.modules.update(dict.fromkeys({PACKAGES}))  # importing them is an error
sys.displayhook = lambda value: None
console = code.InteractiveConsole()
for line in sys.stdin.read().splitlines():
    console.push(line)
console.push("")
"""


def blocks(page):
    return re.findall(r"```python\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL)


def pasted(text, folder):
    """What was printed, line by line; in a process and folder of its own, since the code must bring all it needs."""
    busy = "ignore:a step will take about"  # the machine may be, with other tests
    command = [sys.executable, "-W", "ignore:Failed to initialize NumPy", "-W", busy, "-c", PASTE]
    run = subprocess.run(command, input=text, cwd=folder, capture_output=True, text=True, timeout=120)
    assert (run.returncode, run.stderr) == (0, "")
    return run.stdout.splitlines()


NUMBER = re.compile(r"\d[\d,]*\.?\d*")


def says(comment, printed):
    """Whether a comment states, or begins with, what was printed; numbers may differ by 2 %."""
    words = [NUMBER.sub("0", text) for text in (comment, printed)]
    numbers = [[float(number.replace(",", "")) for number in NUMBER.findall(text)] for text in (comment, printed)]
    close = [math.isclose(a, b, rel_tol=0.02) for a, b in zip(*numbers, strict=False)]
    return words[0].startswith(words[1]) and all(close)


@pytest.mark.parametrize(
    ("comment", "printed", "same"),
    [
        ("loss 0.0085 (the noise)", "loss 0.0086", True),
        ("loss 0.0085 (the noise)", "loss 0.0095", False),
        ("loss 0.0085", "cost 0.0085", False),
        ("loss 0.0085", "loss 0.0085 nan", False),
        ("1,590,010 rows", "1,590,010 rows", True),
        ("1,590,010 rows", "159,001 rows", False),
        ("tensor([2.5017, 1.3009])", "tensor([2.5016, 1.3010])", True),
        ("tensor([2.5017, 1.3009])", "tensor([2.5016, 1.9000])", False),
    ],
)
def test_outputs_are_compared(comment, printed, same):
    assert says(comment, printed) == same


def test_the_readme_pasted_from_top_to_bottom(tmp_path):
    text = "\n".join(block for block in blocks(README) if "sklearn" not in block)
    printed = iter(pasted(text, tmp_path))
    stated = re.findall(r"^print\(.*\)  # (.*)$", text, re.MULTILINE)
    assert len(stated) == 4
    for comment in stated:
        assert any(says(comment, line) for line in printed), comment  # in the order of the page


def test_what_needs_scikit_learn_in_the_readme(tmp_path):
    (text,) = (block for block in blocks(README) if "sklearn" in block)
    run = subprocess.run([sys.executable, "-c", text], cwd=tmp_path, capture_output=True, text=True, timeout=240)
    assert (run.returncode, run.stderr) == (0, "")
