"""Code in README runs as printed."""

import csv
import math
import re
import statistics
import subprocess
import sys
from pathlib import Path

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


def test_the_readme_pasted_from_top_to_bottom(tmp_path):
    text = "\n".join(blocks(README))
    printed = iter(pasted(text, tmp_path))
    stated = re.findall(r"^print\(.*\)  # (.*)$", text, re.MULTILINE)
    assert len(stated) == text.count("print(") == 4
    for comment in stated:
        assert any(says(comment, line) for line in printed), comment  # in the order of the page


def test_the_readme_is_short():
    assert len(README.read_text("utf-8").splitlines()) <= 120


def test_the_readme_shows_pictures_that_are_there():
    shown = re.findall(r'(?:src|srcset)="([^"]+)"', README.read_text("utf-8"))
    assert len(shown) == 2
    assert all((README.parent / name).is_file() for name in shown)


MEASURED = {  # how the README calls what stands under these names in the runs alone on a GPU
    "LM": ("LM (ours)", "default"),
    "LM as in the paper": ("LM (paper)", "tuned"),
    "torch-levenberg-marquardt": ("torch-levenberg-marquardt", "tuned"),
    "KFAC": ("KFAC", "tuned"),
    "L-BFGS": ("L-BFGS", "tuned"),
    "Adam": ("Adam", "tuned"),
}
LINES = {
    "steps to 90 %": "steps_to_90",
    "seconds to 90 %": "seconds_to_90",
    "accuracy after 100 steps": "test_accuracy",
}


def test_the_table_of_the_readme_has_the_means_of_the_runs():
    with open(README.parent / "docs" / "paper" / "alone.csv", encoding="utf-8", newline="") as file:
        runs = [run for run in csv.DictReader(file) if run["experiment"] == "mnist"]
    table = [line.strip("|").split("|") for line in README.read_text("utf-8").splitlines() if line.startswith("| ")]
    names = next([cell.strip() for cell in row] for row in table if len(row) == 1 + len(MEASURED))
    assert names[1:] == list(MEASURED)
    rows = {row[0].strip(): row[1:] for row in table}
    for line, column in LINES.items():
        for name, cell in zip(names[1:], rows[line], strict=True):
            own = [run for run in runs if (run["label"], run["column"]) == MEASURED[name]]
            ended = [run for run in own if run["status"] == "finished" or column != "test_accuracy"]
            mean, shown = statistics.fmean(float(run[column]) for run in ended), cell.strip().removesuffix(" %")
            decimals = len(shown.partition(".")[2])
            assert f"{mean * (100 if cell.strip().endswith('%') else 1):.{decimals}f}" == shown, (name, line)
