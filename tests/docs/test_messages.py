"""What texts in the sources send a reader to is there: names, options, pages, extras."""

import ast
import inspect
import re
from functools import cache
from importlib import import_module
from importlib.metadata import metadata

import lightning
import pytest
import torch
import transformers

import marquardt as mq
from marquardt.fitting import CurveFit
from marquardt.paper.runs import plan
from marquardt.tabular import Settings
from support.pages import ROOT

SOURCES = sorted((ROOT / "src").rglob("*.py"))
PICTURES = ("charts.py", "figures.py", "panels.py")  # whose texts are SVG

# Calls, beside the public names, whose arguments messages name: our own, and those of others.
OURS = (mq.LM.step, mq.Posterior.sample, mq.Posterior.calibrated, CurveFit, CurveFit.confidence_band, plan, Settings)
OTHERS = (
    torch.nn.Parameter,
    torch.nn.PoissonNLLLoss,
    torch.autograd.graph.register_multi_grad_hook,
    torch.nn.Module.to_empty,
    torch.utils.checkpoint.checkpoint,
    torch.utils.data.DataLoader,
    torch.utils.data.distributed.DistributedSampler,
    lightning.Trainer,
    transformers.TrainingArguments,
)


def texts(tree: ast.AST, filled: str = "…") -> list[str]:
    """All strings, f-strings with `filled` in the place of what they fill in."""
    inner = {id(part) for node in ast.walk(tree) if isinstance(node, ast.JoinedStr) for part in node.values}
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            found.append("".join(str(v.value) if isinstance(v, ast.Constant) else filled for v in node.values))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in inner:
            found.append(node.value)
    return found


def there(path: str) -> bool:
    """Whether mq.path is a module, an attribute or a field."""
    item: object = mq
    for part in path.split("."):
        if hasattr(item, part):
            item = getattr(item, part)
        elif inspect.ismodule(item):
            try:
                item = import_module(f"{item.__name__}.{part}")
            except ImportError:
                return False
        else:
            return part in getattr(item, "__dataclass_fields__", {})
    return True


@cache
def options() -> set[str]:
    public = [getattr(where, name) for where in (mq, mq.losses) for name in where.__all__]
    public += [import_module("marquardt.sklearn").LMRegressor, import_module("marquardt.huggingface").LMTrainer]
    errors = mq.FactorizationError, mq.RankError
    calls = [item for item in public if not inspect.ismodule(item) and item not in errors]
    return {name for call in [*calls, *OURS, *OTHERS] for name in inspect.signature(call).parameters} | {"perr"}


def messages(tree: ast.AST, filled: str = "…") -> list[str]:
    """Sentences, without the docstrings."""
    for node in ast.walk(tree):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef)) and ast.get_docstring(node) is not None:
            node.body = node.body[1:]
    return [text for text in texts(tree, filled) if " " in text]


def short(source):
    return source.relative_to(ROOT / "src" / "marquardt").as_posix()


@pytest.mark.parametrize("source", SOURCES, ids=short)
def test_names_pages_and_extras_are_there(source):
    wrong = []
    extras = set(metadata("marquardt").get_all("Provides-Extra"))
    for text in texts(ast.parse(source.read_text(encoding="utf-8"))):
        for path in re.findall(r"\b(?:mq|marquardt)\.([A-Za-z]\w*(?:\.[A-Za-z]\w*)*)", text):
            wrong += [] if there(path) else [f"mq.{path}"]
        for path in re.findall(r"\b(?:docs|benchmarks|examples)/[\w/-]+(?:\.[a-z]+)?", text):
            wrong += [] if (ROOT / path).exists() else [path]
        for extra in re.findall(r"marquardt\[([\w,]+)\]", text):
            wrong += [name for name in extra.split(",") if name not in extras]
    assert wrong == []


@pytest.mark.parametrize("source", [source for source in SOURCES if source.name not in PICTURES], ids=short)
def test_options_are_there(source):
    named = set()
    for text in messages(ast.parse(source.read_text(encoding="utf-8"))):
        named |= set(re.findall(r"(?<![\w.<-])([a-z_]\w*)=(?![=\s])", text))
    assert named - options() == set()


def elided(source: str) -> list[str]:
    """Calls in messages with … in the place of an argument"""
    found = [re.findall(r"[\w.]*\w\([^()]*…[^()]*\)?", text) for text in messages(ast.parse(source), filled="{}")]
    return [call for calls in found for call in calls]


@pytest.mark.parametrize("source", [source for source in SOURCES if source.name not in PICTURES], ids=short)
def test_calls_are_whole(source):
    """What a message advises can be typed: no argument is left to be guessed."""
    assert elided(source.read_text(encoding="utf-8")) == []


def test_a_wrong_name_would_be_found():
    assert not there("Levenberg")
    assert there("Auto.memory")
    assert there("sklearn.LMRegressor")
    assert texts(ast.parse('f"pass {x}, mq.Auto()"')) == ["pass …, mq.Auto()"]
    assert messages(ast.parse('def f():\n    """of damp="""\n    g("use damp=1")')) == ["use damp=1"]
    assert elided('f"pass mq.LM(…, radius={r}), of {n} outputs (N, …)"') == ["mq.LM(…, radius={})"]
