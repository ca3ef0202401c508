"""What a page of HTML has: anchors, links, what it loads, its text, and elements of its article."""

from __future__ import annotations

from collections import Counter
from functools import cache
from html.parser import HTMLParser
from pathlib import Path

VOID = {"area", "base", "br", "col", "embed", "hr", "img", "input", "link", "meta", "source", "track", "wbr"}
LOADED = {"script": "src", "img": "src", "iframe": "src", "source": "srcset", "video": "src", "object": "data"}
LINKED = {"stylesheet", "icon", "preload", "prefetch", "preconnect", "dns-prefetch", "modulepreload", "manifest"}


class Page(HTMLParser):
    def __init__(self, text: str) -> None:
        super().__init__()
        self.ids: list[str] = []
        self.links: list[str] = []
        self.loads: list[str] = []
        self.styles: list[str] = []
        self.text: list[str] = []
        self.elements: Counter[str] = Counter()
        self.open: list[str] = []
        self.crossed: list[str] = []  # tags that end while another is open
        self.feed(text)
        self.close()

    def handle_starttag(self, tag, attrs):
        found = {name: value or "" for name, value in attrs}
        self.open += [tag] if tag not in VOID else []
        self.ids += {found[name] for name in ("id", "name") if name in found}
        self.elements[tag] += "article" in self.open
        if tag == "a" and "href" in found:
            self.links.append(found["href"])
        if tag in LOADED and LOADED[tag] in found:
            self.loads.append(found[LOADED[tag]].split()[0])
        if tag == "link" and set(found.get("rel", "").split()) & LINKED:
            self.loads.append(found["href"])
        self.styles.append(found.get("style", ""))

    def handle_startendtag(self, tag, attrs):
        self.handle_starttag(tag, attrs)
        if tag not in VOID:
            self.open.pop()

    def handle_endtag(self, tag):
        if tag in self.open:
            self.crossed += [] if self.open[-1] == tag else [tag]
            del self.open[len(self.open) - 1 - self.open[::-1].index(tag) :]
        elif tag not in VOID:
            self.crossed.append(tag)

    def handle_data(self, data):
        (self.styles if self.open[-1:] == ["style"] else self.text).append(data)


@cache
def parsed(path: Path) -> Page:
    return Page(path.read_text(encoding="utf-8"))
