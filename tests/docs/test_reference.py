"""Every public name is in the reference, with its arguments and an example that runs."""

import doctest
import inspect
import re
from dataclasses import dataclass
from html import unescape
from importlib import import_module

import numpy as np
import pytest

import marquardt as mq
from support.pages import DOCS, code

EXTRAS = {
    "marquardt.sklearn": ("LMRegressor", "LMClassifier"),
    "marquardt.lightning": ("LMModule",),
    "marquardt.huggingface": ("LMTrainer",),
}


def public() -> dict[str, object]:
    """By the names under which users know them."""
    found = {f"marquardt.{name}": getattr(mq, name) for name in mq.__all__}
    found |= {f"marquardt.losses.{name}": getattr(mq.losses, name) for name in mq.losses.__all__}
    found |= {f"marquardt.presets.{name}": preset for name, preset in own(mq.presets)}
    found |= {f"{mod}.{name}": getattr(import_module(mod), name) for mod, names in EXTRAS.items() for name in names}
    return {name: item for name, item in found.items() if not inspect.ismodule(item)}


def own(module):
    """What a module defines, and does not hide."""
    items = [(name, item) for name, item in vars(module).items() if not name.startswith("_") and callable(item)]
    return [(name, item) for name, item in items if getattr(item, "__module__", "") == module.__name__]


NAMES = public()


# Examples.


@pytest.fixture
def setting(tmp_path, monkeypatch):
    """What the reference says its examples come after, and what the examples of the extras need."""
    monkeypatch.chdir(tmp_path)  # some write files
    ((_, text),) = code(DOCS / "reference" / "index.md")
    names: dict[str, object] = {"dataclass": dataclass}
    exec(text, names)
    names |= {name.rpartition(".")[2]: item for name, item in NAMES.items() if name.startswith(tuple(EXTRAS))}
    return names | {"X": names["x"].numpy(), "t": np.ravel(names["y"].numpy())}


DOCUMENTED = {
    f"{name}.{method}" if method else name: each
    for name, item in NAMES.items()
    for method, each in [("", item), *(vars(item).items() if inspect.isclass(item) else [])]
    if ">>> " in (getattr(each, "__doc__", None) or "") and (not method or inspect.isfunction(each))
}


@pytest.mark.parametrize("name", DOCUMENTED)
def test_an_example_runs(name, setting):
    setting["opt"] = mq.LM(setting["model"], "mse")
    test = doctest.DocTestParser().get_doctest(DOCUMENTED[name].__doc__, setting, name, None, None)
    said: list[str] = []
    doctest.DocTestRunner(verbose=False).run(test, out=said.append)
    assert not said, "".join(said)


def test_every_name_has_an_example():
    assert sorted(set(NAMES) - set(DOCUMENTED)) == []


# The site.


@pytest.fixture(scope="module")
def entries(site):
    """The HTML of every entry: from its heading to the next one."""
    text = "".join(page.read_text(encoding="utf-8") for page in sorted((site / "reference").glob("*.html")))
    parts = re.split(r'<h\d id="(marquardt\.[\w.]+)" class="doc doc-heading">', text)
    found = dict(zip(parts[1::2], parts[2::2], strict=True))
    return found | {"marquardt.losses.resolve": found["marquardt.losses.resolve.resolve"]}  # the module has this name


ROW = re.compile(
    r'<tr class="doc-section-item">\s*<td>\s*<code>(?:<span[^>]*>)?\*{0,2}(\w+)(?:</span>)?</code>.*?</tr>', re.DOTALL
)

# Not made by users: functions return them.
RETURNED = {"marquardt.Posterior", "marquardt.Linearization"}


def test_every_name_has_an_entry(entries):
    assert sorted(set(NAMES) - set(entries)) == []


@pytest.mark.parametrize("name", NAMES)
def test_an_entry_has_every_argument_in_words(name, entries):
    item, entry = NAMES[name], entries[name]
    rows = {row[1]: row[0] for row in ROW.finditer(entry)}
    wordless = [k for k, row in rows.items() if not re.search(r"<p>\s*\S", row.partition("doc-md-description")[2])]
    assert wordless == []
    if not (inspect.isabstract(item) or item in (mq.FactorizationError, mq.RankError) or name in RETURNED):
        assert sorted(set(inspect.signature(item).parameters) - set(rows)) == []


RETURNING = [
    name
    for name, item in NAMES.items()
    if inspect.isfunction(item) and inspect.signature(item).return_annotation != "None"
]


@pytest.mark.parametrize("name", RETURNING)
def test_an_entry_of_a_function_says_what_it_returns(name, entries):
    assert "Returns:" in unescape(entries[name])
