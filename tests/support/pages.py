"""README and the pages of docs/ as GitHub reads them; as a program, the links out of the repository."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path
from typing import Any

from markdown_it import MarkdownIt

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = sorted([*ROOT.glob("*.md"), *DOCS.rglob("*.md")])
HTML_LINK = re.compile(r"(?:href|src|srcset)=\"([^\"\s]+)")


def named(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


def tokens(page: Path) -> list[Any]:
    """All of them, those within a line too."""
    parsed = MarkdownIt("gfm-like", {"linkify": False}).parse(page.read_text(encoding="utf-8"))
    return [each for token in parsed for each in [token, *(token.children or [])]]


def code(page: Path) -> list[tuple[str, str]]:
    """The blocks of code: what follows the ```, and what is in them."""
    return [(token.info, token.content) for token in tokens(page) if token.type == "fence"]


def links(page: Path) -> list[str]:
    found = []
    for token in tokens(page):
        found += [str(token.attrs[name]) for name in ("href", "src") if name in token.attrs]
        found += HTML_LINK.findall(token.content) if token.type in ("html_block", "html_inline") else []
    return found


def anchors(page: Path) -> set[str]:
    """Of the headings, as GitHub makes them: letters, digits, _ and -; the second of the same ends with -1."""
    heads, found = tokens(page), []
    for i, token in enumerate(heads):
        if token.type == "heading_open":
            parts = heads[i + 1].children or []
            words = "".join(t.content for t in parts if t.type in ("text", "code_inline"))
            found.append(re.sub(r"[^\w\- ]", "", words.lower()).replace(" ", "-"))
    seen: Counter[str] = Counter()
    for slug in found:
        seen[slug] += 1
    return {slug if i == 0 else f"{slug}-{i}" for slug, count in seen.items() for i in range(count)}


def external() -> dict[str, list[str]]:
    """Links out of the repository, with the pages that have them."""
    found: dict[str, list[str]] = {}
    for page in PAGES:
        for link in links(page):
            if re.match(r"[a-z]+:", link):
                found.setdefault(link, []).append(named(page))
    return dict(sorted(found.items()))


if __name__ == "__main__":
    for link, pages in external().items():
        print(f"{link}  {', '.join(dict.fromkeys(pages))}")
