"""What the site adds to MkDocs: links that leave docs/, the help of the command line, and comments as documentation."""

from __future__ import annotations

import inspect
import posixpath
import re
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import griffe
from mkdocs.structure.files import File, Files, InclusionLevel

ROOT = Path(__file__).parents[1]
LINK = re.compile(r"\]\((\.\./[^)#\s]+)(#[^)\s]*)?\)")
HELP = "<!-- marquardt --help -->"


# Links from a page of docs/ to a program, a picture or a page elsewhere in the repository, as they work on GitHub.


def outside(page: str, link: str) -> str | None:
    """Where in the repository a link of docs/`page` leads; None if that is within docs/."""
    path = posixpath.normpath(posixpath.join("docs", posixpath.dirname(page), link))
    return None if path.startswith("docs/") else path


def place(path: str) -> str:
    """Where in docs/ the site has a file from elsewhere in the repository."""
    if path == "README.md":
        return "index.md"
    return f"repository/{path}.md" if path.endswith(".py") else f"repository/{path}"


def on_files(files: Files, config: Any) -> Files:
    for page in [file for file in files if file.is_documentation_page()]:
        for link, _ in LINK.findall(page.content_string):
            path = outside(page.src_uri, link)
            if path is None or files.get_file_from_path(place(path)):
                continue
            where: dict[str, Any] = {"abs_src_path": str(ROOT / path)}
            if path.endswith(".py"):
                text = (ROOT / path).read_text(encoding="utf-8")
                where = {"content": f"---\nsearch:\n  exclude: true\n---\n# {path}\n\n````python\n{text}````\n"}
            files.append(File.generated(config, place(path), **where, inclusion=InclusionLevel.NOT_IN_NAV))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    here = page.file.src_uri
    if here.startswith("repository/"):  # a page from elsewhere: its links are from where it stands
        return re.sub(r"\]\(docs/", f"]({posixpath.relpath('.', posixpath.dirname(here))}/", markdown)

    def within(match: re.Match[str]) -> str:
        path = outside(here, match[1])
        if path is None:
            return match[0]
        return f"]({posixpath.relpath(place(path), posixpath.dirname(here) or '.')}{match[2] or ''})"

    markdown = lists(LINK.sub(within, markdown))
    return markdown.replace(HELP, command_line()) if HELP in markdown else markdown


ITEM = re.compile(r"(?:[-*+]|\d+[.)]) +(?=\S)")


def lists(markdown: str) -> str:
    """Lists as GitHub takes them: without an empty line before, and with what belongs to an item as far in as its text.
    Python's Markdown wants four spaces."""
    width, loose, fence, out = 0, False, False, [""]
    for line in markdown.splitlines():
        item = None if fence or line.startswith("---") else ITEM.match(line)
        if item is not None:
            out += [""] if out[-1].strip() and (loose or not width) else []
            width, loose = len(item[0]), False
        elif width and line.startswith(" " * width):
            line, loose = " " * (4 - width) + line, loose or not out[-1].strip()
        elif line.strip() and not line.startswith(" ") and (fence or not width or not out[-1].strip()):
            width = 0
        fence ^= line.startswith("```")
        out.append(line)
    return "\n".join(out[1:])


def command_line() -> str:
    """What `marquardt --help` and that of each command say, as Markdown."""
    from typer.main import get_command

    from marquardt.cli import app

    return "\n".join(described(get_command(app), "marquardt"))


def described(command: Any, name: str) -> Iterator[str]:
    import click

    context = click.Context(command, info_name=name)
    yield f"## {name}\n\n{command.help}\n\n```console\n$ {command.get_usage(context).removeprefix('Usage: ')}\n```\n"
    records = [param.get_help_record(context) for param in command.get_params(context)]
    rows = [f"| `{names}` | {what.replace('|', chr(92) + '|')} |" for names, what in filter(None, records)]
    yield from ["| option | |", "| --- | --- |", *rows, ""]
    for word, each in getattr(command, "commands", {}).items():
        yield from described(each, f"{name} {word}")


# The reference.


class Comments(griffe.Extension):
    """Comments beside fields and arguments document them, and lines that begin with >>> are code."""

    def on_package(self, *, pkg: griffe.Module, **_: Any) -> None:
        unshadow(pkg)
        items = [item for item in everything(pkg) if item.docstring]
        said = {item.path: arguments(item) for item in items}  # all of them first: a class takes what its bases say
        for item in items:
            text, found = f"{item.docstring.value}\n", said[item.path]
            section = ARGUMENTS.search(text)
            if found:
                lines = "".join(f"    {name}: {words}\n" for name, words in found.items())
                head, tail = (text, "") if section is None else (text[: section.start()], text[section.end() :])
                text = f"{head}\nArgs:\n{lines}{tail}"
            item.docstring.value = fenced(text)


def unshadow(pkg: griffe.Module) -> None:
    """mq.fit is the function, though there is a module marquardt.training.fit too."""
    package = import_module(pkg.path)
    for name in package.__all__:
        item = getattr(package, name)
        if inspect.isfunction(item):
            pkg.members[name] = griffe.Alias(name, f"{item.__module__}.{name}", parent=pkg)


def everything(item: Any) -> Iterator[Any]:
    if not item.is_alias:
        yield item
        for each in item.members.values():
            yield from everything(each)


def arguments(item: Any) -> dict[str, str]:
    """What is said of the arguments, in Args: or in comments, by a class or else by its bases, in their order."""
    found: dict[str, str] = {}
    if isinstance(item, griffe.Function):
        found = ordered(item, {**in_signature(item), **described_arguments(item)})
    for each in [*reversed(item.mro()), item] if isinstance(item, griffe.Class) else []:
        init = each.members.get("__init__")
        if is_dataclass(each):
            found |= {**in_fields(each), **described_arguments(each)}
        elif isinstance(init, griffe.Function):
            found = ordered(init, {**in_signature(init), **described_arguments(each)})
        else:
            found |= described_arguments(each) if each is item else {}
    return {name: text for name, text in found.items() if not set_aside(item.members.get(name))}


def ordered(function: griffe.Function, found: dict[str, str]) -> dict[str, str]:
    names = [parameter.name for parameter in function.parameters]
    return {name: found[name] for name in sorted(found, key=lambda name: (*names, name).index(name))}


def is_dataclass(cls: griffe.Class) -> bool:
    return any(str(decorator.value).startswith("dataclass") for decorator in cls.decorators)


def set_aside(field: Any) -> bool:
    """Whether a field is no argument."""
    return field is not None and "init=False" in str(field.value)


# The section to its last line that is indented.
ARGUMENTS = re.compile(r"^Args:\n((?:    .*\n)+)", re.MULTILINE)


def described_arguments(item: Any) -> dict[str, str]:
    section = ARGUMENTS.search(f"{item.docstring.value}\n" if item.docstring else "")
    items = re.split(r"^    (?=\w)", section[1], flags=re.MULTILINE)[1:] if section else []
    return {name: " ".join(text.split()) for name, _, text in (each.partition(": ") for each in items)}


def in_signature(function: griffe.Function) -> dict[str, str]:
    """Comments at the ends of the lines of a signature."""
    lines = function.lines_collection[function.filepath][function.lineno - 1 : function.endlineno]
    found = {}
    for line in lines[1:]:
        if re.match(r"\s*\).*:$|\s*\"", line):
            break
        match = re.match(r"\s+(\w+)\b[^#]*,  # (?!type:|fmt:|noqa)(.+)$", line)
        found |= {match[1]: match[2]} if match else {}
    return {name: text for name, text in found.items() if name in function.parameters}


def in_fields(cls: griffe.Class) -> dict[str, str]:
    """Comments at the ends of the lines of fields."""
    found = {}
    for name, field in cls.attributes.items():
        if "instance-attribute" in field.labels and field.annotation is not None and not set_aside(field):
            lines = cls.lines_collection[cls.filepath][field.lineno - 1 : field.endlineno]
            found[name] = " ".join(line.partition("  # ")[2].strip() for line in lines).strip()
    return {name: text for name, text in found.items() if text}


def fenced(text: str) -> str:
    """Examples, from >>> to the next empty line, as code; those of a section Examples: are known to griffe."""
    lines, inside, out = text.splitlines(), False, []
    for line in lines:
        if line.startswith(">>> ") and not inside:
            inside = True
            out.append("```pycon")
        elif inside and not line.strip():
            inside = False
            out.append("```")
        out.append(line)
    return "\n".join([*out, "```"] if inside else out)
