"""JSON files that are read back: with a checksum, and with every entry of the type that a dataclass names."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import os
import re
import reprlib
import types
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from .files import Damaged, Unwritable, whole
from .texts import quoted

COMPACT = (",", ": ")  # a tenth less where there are no lines
# The last entry of the outermost object is the SHA-256 of all the bytes before it: what is written stays JSON.
SEAL = b', "sha256": "'
LARGEST = 2**28  # bytes; what is larger was not written here


def write(path: Path, content: Mapping[str, Any], indent: int | None = 1) -> None:
    with whole(path) as put:
        put(sealed(content, indent))


def sealed(content: Mapping[str, Any], indent: int | None = None) -> bytes:
    body = dumps(content, indent, COMPACT).removesuffix("}").rstrip().encode()
    return body + SEAL + hashlib.sha256(body).hexdigest().encode() + b'"}\n'


def read(path: Path) -> tuple[dict[str, Any], bool]:
    """What was written, and whether it is sealed: files of earlier versions are not, and one of this version that is
    not has lost its seal. `Damaged` if it is not what was sealed."""
    text = content_of(path)
    is_sealed = check_seal(path, text)
    try:
        found = loads(text)
    except ValueError as error:
        raise Damaged(f"{path} is damaged, or no file of marquardt ({error})") from None
    found.pop("sha256", None)
    return found, is_sealed


def check_seal(path: Path, text: bytes) -> bool:
    """Whether there is a seal; `Damaged` if the text is not what was sealed."""
    body, seal, found = text.rpartition(SEAL)
    if not seal:
        return False
    if found != hashlib.sha256(body).hexdigest().encode() + b'"}\n':
        raise Damaged(f"{path} is damaged or was edited: its checksum is another one than when it was written")
    return True


def content_of(path: Path) -> bytes:
    if path.exists() and not path.is_file():  # a pipe would never end
        raise Damaged(f"{path} is no file")
    with path.open("rb") as file:
        text = file.read(LARGEST + 1)
    if len(text) > LARGEST:
        raise Damaged(f"{path} has more than {LARGEST:,} bytes, and so was not written by marquardt")
    return text


def dumps(content: Any, indent: int | None = None, separators: tuple[str, str] | None = None) -> str:
    """Letters as they are, and what does not show itself as escapes: a terminal would obey it, and bytes of a file name
    that are no UTF-8 cannot be written otherwise."""
    text = json.dumps(content, indent=indent, separators=separators, ensure_ascii=False, allow_nan=False)
    lines = text.split("\n")
    return "\n".join(line if line.isprintable() else "".join(map(_shown, line)) for line in lines)


def _shown(c: str) -> str:
    return c if c.isprintable() else json.dumps(c)[1:-1]


def loads(text: bytes) -> dict[str, Any]:
    """An object; ValueError with a reason in a few words."""
    try:
        found = json.loads(text.decode("utf-8"), parse_constant=_refuse)
    except UnicodeDecodeError as error:
        raise ValueError(f"not UTF-8, at byte {error.start + 1}") from error
    except (ValueError, RecursionError) as error:
        raise ValueError("not JSON") from error
    if not isinstance(found, dict):
        raise ValueError("not a JSON object")
    return found


def _refuse(name: str) -> None:
    raise ValueError(f"{name} in JSON")


def digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


# --- files beside a document, whose checksums it holds ---


def own(paths: Mapping[Path, str | None], known: Collection[str], way: str) -> set[str]:
    """The checksums of those that are there. What was not written by marquardt is not replaced: a file whose checksum
    is not `known` is refused.

    `paths` have the checksums of what is going to be there, None if that is not known yet: a file that is the same
    already may stay.
    """
    found = set()
    for path, new in paths.items():
        if not os.path.lexists(path):
            continue
        if path.is_symlink() or not path.is_file():
            raise Foreign(f"{path} is there already, and no file that marquardt has written: {way}")
        there = digest_of(path)
        if there != new and there not in known:
            raise Foreign(f"{path} is there already, and is not as marquardt has written it: {way}")
        found.add(there)
    return found


def left_over(folder: Path, stems: str) -> list[Path]:
    """What a killed process has left half-written of files whose names without their ends match `stems`: such names
    are given by `files.whole`. Links and folders are none of them."""
    form = re.compile(rf"({stems})\.[0-9a-f]{{8}}\.part")
    found = folder.iterdir() if folder.is_dir() else ()
    return sorted(p for p in found if form.fullmatch(p.name) and p.is_file() and not p.is_symlink())


class Sealing:
    """Lines of JSON, the last of which holds the checksum of all that was written before it."""

    def __init__(self, put: Callable[[bytes], None]) -> None:
        self.put, self.sum = put, hashlib.sha256()

    def add(self, line: Mapping[str, Any], *, last: bool = False) -> None:
        text = dumps(line).encode()
        body = text.removesuffix(b"}") if last else text + b"\n"
        self.sum.update(body)
        self.put(body + SEAL + self.sum.hexdigest().encode() + b'"}\n' if last else body)


class Foreign(Unwritable):
    """A name is taken by what is not marquardt's."""


def digest_of(path: Path) -> str:
    """SHA-256 of a file's bytes."""
    found = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            found.update(block)
    return found.hexdigest()


# --- types ---


def typed(value: Any, wanted: Any, place: str = "") -> Any:
    """The value as `wanted`, a type of dataclasses, lists, tuples, dicts and plain values; a list becomes a tuple and
    an object a dataclass. What has another type, or is not finite, is a ValueError that names its place."""
    origin, inner = get_origin(wanted), get_args(wanted)
    if wanted is Any:
        return value
    if origin in (Union, types.UnionType):
        return _one_of(value, inner, place)
    if origin is Literal:
        return value if value in inner else _wrong(value, " or ".join(map(repr, inner)), place)
    if dataclasses.is_dataclass(wanted):
        return _dataclass(value, wanted, place)
    if origin in (list, tuple, Sequence):
        return _list(value, origin, inner, place)
    if origin in (dict, Mapping):
        _is(value, dict, "an object", place)
        return {typed(k, inner[0], place): typed(v, inner[1], f"{place}[{quoted(k)}]") for k, v in value.items()}
    return _plain(value, wanted, place)


def _plain(value: Any, wanted: Any, place: str) -> Any:
    if wanted is float:
        try:
            finite = type(value) in (int, float) and math.isfinite(value)
        except OverflowError:  # an integer of hundreds of digits
            finite = False
        return float(value) if finite else _wrong(value, "a finite number", place)
    if wanted is Path:
        return Path(_is(value, str, "text", place))
    names = {str: "text", int: "a whole number", bool: "true or false", type(None): "null"}
    return _is(value, wanted, names[wanted], place)


def _one_of(value: Any, kinds: Sequence[Any], place: str) -> Any:
    errors = []
    for kind in kinds:
        try:
            return typed(value, kind, place)
        except ValueError as error:
            errors.append(error)
    raise errors[0]


def _dataclass(value: Any, wanted: Any, place: str) -> Any:
    _is(value, dict, "an object", place)
    hints, fields = get_type_hints(wanted), {field.name: field for field in dataclasses.fields(wanted)}
    if unknown := [name for name in value if name not in fields]:
        raise ValueError(f"{place or 'it'} has an entry {quoted(unknown[0])}, which is not known here")
    missing = [
        name
        for name, field in fields.items()
        if name not in value and field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
    ]
    if missing:
        raise ValueError(f"{place or 'it'} has no {missing[0]!r}")
    before = f"{place}." if place else ""
    return wanted(**{name: typed(item, hints[name], f"{before}{name}") for name, item in value.items()})


def _list(value: Any, kind: Any, inner: tuple[Any, ...], place: str) -> Any:
    if not isinstance(value, (list, tuple)):
        _wrong(value, "a list", place)
    each = inner if kind is tuple and inner[-1] is not Ellipsis else (inner[0],) * len(value)
    if len(each) != len(value):
        _wrong(value, f"a list of {len(each)}", place)
    found = [typed(item, one, f"{place}[{i}]") for i, (item, one) in enumerate(zip(value, each, strict=True))]
    return found if kind is list else tuple(found)


def _is(value: Any, kind: type, words: str, place: str) -> Any:
    return value if type(value) is kind else _wrong(value, words, place)  # not isinstance: true is no number


def _wrong(value: Any, words: str, place: str) -> Any:
    raise ValueError(f"{place or 'it'} is {reprlib.repr(value)}, not {words}")
