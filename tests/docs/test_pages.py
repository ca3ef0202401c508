"""The code of every page of docs/ runs, from top to bottom."""

import re

import pytest
import torch

import marquardt as mq
from support import programs
from support.pages import DOCS, PAGES, code, named

# Pages that another test runs, since their code is files or commands.
ELSEWHERE = {"docs/command-line.md": "test_command_line.py", "docs/extending.md": "test_extending.py"}

# What is not run: commands of a shell, what is printed, and other languages.
NOT_RUN = ("", "bash", "console", "matlab", "text")

RUN = [page for page in PAGES if DOCS in page.parents and any(kind == "python" for kind, _ in code(page))]


@pytest.mark.parametrize("page", [page for page in RUN if named(page) not in ELSEWHERE], ids=named)
def test_a_page_runs_from_top_to_bottom(page, tmp_path):
    text = "\n".join(block for kind, block in code(page) if kind == "python")
    run = programs.run(text, tmp_path)
    assert run.returncode == 0, run.stderr
    stated = re.findall(r"^print\(step.converged\)  # (.*)$", text, re.MULTILINE)
    assert run.stdout.splitlines()[-len(stated) :] == stated or not stated


@pytest.mark.parametrize("page", ELSEWHERE)
def test_what_another_test_runs_is_there(page):
    assert page in map(named, RUN)
    assert page in (DOCS.parent / "tests" / "docs" / ELSEWHERE[page]).read_text(encoding="utf-8")


@pytest.mark.parametrize("page", PAGES, ids=named)
def test_no_other_block_is_python(page):
    for kind, block in code(page):
        assert kind == "python" or kind in NOT_RUN, f"{kind}: {block}"
        hidden = kind != "python" and re.search(r"^(>>> |import \w|from \w+ import )", block, re.MULTILINE)
        assert not hidden, f"Python in a block that is not run: {block}"


def test_pages_and_docstrings_agree_on_rows_and_tau():
    """What the default may take of a batch, what MeanEigenvalue divides by, and whose rows Empirical has"""
    recipe, curvature = ((DOCS / name).read_text(encoding="utf-8") for name in ("recipe.md", "curvature.md"))
    for text in (recipe, curvature, mq.MeanEigenvalue.__doc__):
        assert "tr G / min(n, m)" in text
        assert "rank G" not in text
    for page, part in ((recipe, "those of a part of the samples"), (curvature, "of a half, a quarter, ")):
        assert part in next(line for line in page.splitlines() if "1 of 9 rows of one sample in 2" in line)
    assert "at least one per sample" not in recipe
    (row,) = re.findall(r"^\| `Empirical\(\)` \|.*", curvature, re.MULTILINE)
    assert not row.endswith("the paper's for cross-entropy |")
    for text in (row, " ".join(mq.Empirical.__doc__.split())):
        assert re.search(r"`presets\.authors_code`.*`presets\.paper` takes `?exact`? rows", text, re.IGNORECASE)
    for preset, rows in ((mq.presets.paper, mq.Exact()), (mq.presets.authors_code, mq.Empirical())):
        assert repr(preset(torch.nn.Linear(2, 3), "cross_entropy").parts.rows) == repr(rows)
