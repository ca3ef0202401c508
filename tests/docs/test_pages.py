"""The code of every page of docs/ runs, from top to bottom."""

import re

import pytest

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
