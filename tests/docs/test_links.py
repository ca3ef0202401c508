"""No link of README and docs leads nowhere, as GitHub reads them."""

import re
from urllib.parse import unquote

import pytest

from support.pages import PAGES, ROOT, anchors, external, links, named


@pytest.mark.parametrize("page", PAGES, ids=named)
def test_links_within_the_repository(page):
    dead = []
    for link in links(page):
        if re.match(r"[a-z]+:", link):
            continue
        path, _, anchor = unquote(link).partition("#")
        target = (page.parent / path).resolve() if path else page
        inside = target.is_relative_to(ROOT) and target.exists()
        if not inside or (anchor and target.suffix == ".md" and anchor not in anchors(target)):
            dead.append(link)
    assert dead == []


def test_links_that_leave_it_are_addresses_of_the_web():
    """`make links` lists them; none is fetched."""
    assert all(re.match(r"https://[\w.-]+\.\w+(/|$)|mailto:", link) for link in external()), list(external())
