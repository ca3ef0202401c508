"""The site that `make docs` builds: whole, the same as on GitHub, and nothing from elsewhere."""

import re
from collections import Counter
from urllib.parse import unquote, urlsplit

import pytest

from support.html_pages import parsed
from support.pages import DOCS, PAGES, tokens


@pytest.fixture(scope="module")
def pages(site):
    """All but the one for addresses that are not there, which knows only a root."""
    return [path for path in sorted(site.rglob("*.html")) if path.name != "404.html"]


def test_nothing_is_loaded_from_a_network(site, pages):
    assert len(pages) > 30
    elsewhere = re.compile(r"(?:url\(|@import)\s*[\"']?(?:https?:)?//")
    found = {}
    for path in pages:
        page = parsed(path)
        bad = [load for load in page.loads if urlsplit(load).scheme not in ("", "data") or load.startswith("//")]
        bad += [style for style in page.styles if elsewhere.search(style)]
        bad += ["mermaid, whose script comes from a network"] * ('class="mermaid"' in path.read_text(encoding="utf-8"))
        found |= {path.name: bad} if bad else {}
    sheets = [path.name for path in site.rglob("*.css") if elsewhere.search(path.read_text(encoding="utf-8"))]
    assert (found, sheets) == ({}, [])


def test_no_link_and_no_picture_is_dead(site, pages):
    dead = []
    for path in pages:
        page = parsed(path)
        for link in {*page.links, *page.loads}:
            parts = urlsplit(link)
            if parts.scheme or parts.netloc:
                continue
            target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            target = target / "index.html" if target.is_dir() else target
            anchor = unquote(parts.fragment)
            known = not anchor or target.suffix != ".html" or (target.exists() and anchor in parsed(target).ids)
            if not (target.is_relative_to(site.resolve()) and target.is_file() and known):
                dead.append(f"{path.relative_to(site)}: {link}")
    assert dead == []


WRITTEN = [p for p in PAGES if DOCS in p.parents and p.parent.name != "reference"]


@pytest.mark.parametrize("page", WRITTEN, ids=lambda page: page.relative_to(DOCS).as_posix())
def test_a_page_has_the_same_lists_and_tables_as_on_github(page, site):
    """Two dialects of Markdown: a list needs an empty line before it in one of them, and four spaces within."""
    path = page.relative_to(DOCS).with_suffix(".html")
    path = path.with_name("index.html") if path.stem == "README" else path
    here = parsed(site / path).elements
    there = Counter(token.tag for token in tokens(page) if token.nesting == 1)
    there["pre"] = sum(token.type in ("fence", "code_block") for token in tokens(page))
    for tag in ("li", "table", "tr", "pre", "h1", "h2", "h3", "blockquote"):
        assert (tag, here[tag]) == (tag, there[tag])


def test_search_finds_pages_without_a_server(site):
    """Its index is a script too, and what stands in for a worker is a file of the site."""
    index = (site / "search" / "search_index.js").read_text(encoding="utf-8")
    assert index.startswith("var __index = ")
    assert "marquardt.LM" in index
    assert any(load.endswith("assets/iframe-worker.js") for load in parsed(site / "index.html").loads)
