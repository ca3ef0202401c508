"""Attacks on the files that the command line reads: models, runs, checkpoints, logs, reports, tables.

Each case changes one file: a few bytes, or, with a checksum that fits again, an entry of what it holds, or all of it.
Then a command reads it. Nothing of the file may run, nothing else may change before an error, errors are one sentence
without control characters, predictions are those of before unless a checksum was forged, and memory stays bounded.

    python tests/fuzz/tables.py --cases 3000
    python tests/fuzz/tables.py --minutes 60 --seed 100000
"""

from __future__ import annotations

import copy
import functools
import io
import json
import os
import pickle
import random
import re
import shutil
import sys
import tempfile
import unittest.mock
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parents[1]))

import pandas as pd
import torch
import typer
import typer.testing

from fuzz import attacks
from fuzz.attacks import Fault
from marquardt import files
from marquardt.paper import runs
from marquardt.table import request
from marquardt.tabular import building
from support.command_line import invoked
from support.made_runs import made
from support.tables import houses, write

MEMORY = 1.5e9  # bytes that a case may add to the most that was ever used
CONTROL = re.compile(r"[\x00-\x09\x0b-\x1f\x7f-\x9f]")
FIT = ("--target", "price", "--hidden", "2", "--steps", "2")


@dataclass(frozen=True)
class World:
    """Files as the commands leave them, in a folder of their own, and what was read from them before any attack."""

    folder: Path
    kept: dict[Path, bytes]
    predicted: str
    run: dict[str, bytes]  # the outputs of the run that goes on
    page: bytes

    @property
    def canary(self) -> Path:
        return self.folder / "canary"

    def there(self) -> dict[Path, bytes]:
        found = (path for path in self.folder.rglob("*") if path.is_file() and not path.name.endswith(".lock"))
        return {path: path.read_bytes() for path in found}

    def restore(self) -> None:
        there = self.there()
        for path in there.keys() - self.kept.keys():
            path.unlink()
        for path, content in self.kept.items():
            if there.get(path) != content:
                path.parent.mkdir(exist_ok=True)
                path.write_bytes(content)


@functools.cache
def world() -> World:
    typer.testing._get_command = functools.cache(typer.main.get_command)  # building it anew takes longest of all
    folder = Path(tempfile.mkdtemp(prefix="fuzz-tables-"))
    data = write(folder / "data.csv", houses(16), without=("name", "country", "rent", "sold", "built", "rooms"))
    pd.read_csv(data).to_parquet(folder / "data.parquet")
    small = write(folder / "small.csv", [{"area": row["area"], "price": row["price"]} for row in houses(12)])
    did("fit", data, *FIT, "--out", folder / "model")
    unfinished(folder, small)
    log = runs.execute(made("sgd", steps=2, seed=1000), folder / "paper")
    assert log.status == "finished"
    did("paper", "report", "--out", folder / "paper")
    (folder / "paper/tuned.json").write_text(json.dumps(json.loads(runs.WINNERS.read_text())))
    alone = folder / "alone"
    alone.mkdir()
    shutil.copy(folder / "paper/report.json", alone)
    predicted = did("predict", folder / "model", data).stdout
    started = World(folder, {}, predicted, {}, b"")
    before = started.there()
    did("fit", small, *FIT, "--out", folder / "going", "--resume")
    outputs = {name: (folder / "going" / name).read_bytes() for name in request.OUTPUTS if name != request.REPORT}
    did("paper", "report", "--out", alone)
    whole = World(folder, before, predicted, outputs, (alone / "report.html").read_bytes())
    whole.restore()
    return whole


def unfinished(folder: Path, data: Path) -> None:
    """A run that was stopped when one of its two networks was there"""
    save = building.save_part

    def stopped(*given: Any) -> None:
        save(*given)
        raise KeyboardInterrupt

    with unittest.mock.patch.object(building, "save_part", stopped):
        assert invoked("fit", data, *FIT, "--out", folder / "going").exit_code == 130


def did(*words: Any) -> Any:
    result = invoked(*words)
    assert result.exit_code == 0, result.output
    return result


# --- what is attacked, and by which command it is read ---


@dataclass(frozen=True)
class Kind:
    path: str
    command: Callable[[Path], tuple[Any, ...]]
    same: Callable[[World, Any], bool] | None  # whether the command has made what it made before, if that is known


def predicts(place: World, result: Any) -> bool:
    return bool(result.stdout == place.predicted)


def goes_on(place: World, result: Any) -> bool:
    return all((place.folder / "going" / name).read_bytes() == found for name, found in place.run.items())


def draws(place: World, result: Any) -> bool:
    out = place.folder / ("alone" if "alone" in result.output else "paper")
    return bool((out / "report.html").read_bytes() == place.page)


def going(folder: Path) -> tuple[Any, ...]:
    return ("fit", folder / "small.csv", *FIT, "--out", folder / "going", "--resume")


def predict(data: str) -> Callable[[Path], tuple[Any, ...]]:
    return lambda folder: ("predict", folder / "model", folder / data)


def report(out: str) -> Callable[[Path], tuple[Any, ...]]:
    return lambda folder: ("paper", "report", "--out", folder / out)


KINDS = {
    "model": Kind("model/model.pt", predict("data.csv"), predicts),
    "preprocessing": Kind("model/preprocessing.json", predict("data.csv"), predicts),
    "run": Kind("going/run.json", going, goes_on),
    "checkpoint": Kind("going/checkpoint/configuration-1.pt", going, goes_on),
    "log": Kind("paper/logs/sine/sgd.default.1000.jsonl", report("paper"), draws),
    "report": Kind("alone/report.json", report("alone"), draws),
    "csv": Kind("data.csv", predict("data.csv"), None),
    "parquet": Kind("data.parquet", predict("data.parquet"), None),
}


# --- attacks ---


# What becomes of some bytes
CHANGES: tuple[Callable[[random.Random, bytes], bytes], ...] = (
    lambda draw, part: bytes([part[0] ^ 1 << draw.randrange(8)]) + part[1:] if part else b"x",
    lambda draw, part: draw.randbytes(len(part)),
    lambda draw, part: b"",
    lambda draw, part: part * draw.choice((2, 4)),
    lambda draw, part: draw.choice(WORDS).encode("utf-8", "surrogateescape") + part,
    lambda draw, part: bytes(len(part)),
)


def bytes_changed(draw: random.Random, content: bytes) -> bytes:
    """One to three changes of a few bytes, anywhere, or an end that is too early"""
    for _ in range(draw.choice((1, 1, 2, 3))):
        a = draw.randrange(max(len(content), 1))
        b = a + draw.choice((1, 2, 8, 64, 1024))
        end = content[b:] if draw.random() < 0.9 else b""
        content = content[:a] + draw.choices(CHANGES, (3, 1, 1, 1, 1, 1))[0](draw, content[a:b]) + end
    return content


WORDS = (
    "\x1b[31m\x07", "\x9b2J", "=cmd|' /C calc'!A0", "'", '"', ",", ";", "\n", "\r", "\0", "\u202e", "1e999", "NaN",
    "99999999999999999999", "-1", '"' * 3, "[" * 3000, "\udcff", "../../x",
)  # fmt: skip


def forged(draw: random.Random, path: Path, content: bytes) -> bytes:
    """Another entry, and a checksum that fits"""
    if path.suffix == ".pt":
        state = torch.load(io.BytesIO(content), weights_only=True)
        scratch = path.with_name("forged.pt")
        try:
            files.save(scratch, tampered(draw, state))
            return scratch.read_bytes()
        except TypeError:  # what cannot be saved in this form
            return content
        finally:
            scratch.unlink(missing_ok=True)
    lines = content.split(b"\n") if path.suffix == ".jsonl" else [content]
    entries = [json.loads(line) for line in lines if line]
    entries[-1].pop("sha256")
    k = draw.randrange(len(entries))
    entries[k] = tampered(draw, entries[k])
    found = io.BytesIO()
    sealing = files.SealedLines(lambda part: found.write(part) and None)
    try:
        for i, entry in enumerate(entries):
            sealing.add(entry, last=i == len(entries) - 1)
    except ValueError:  # NaN
        return content
    return found.getvalue() if isinstance(entries[-1], dict) and entries[-1] else content


def tampered(draw: random.Random, state: Any) -> Any:
    """A copy in which one place, anywhere in the tree, holds something else or is missing"""
    state = copy.deepcopy(state)
    places = [*_places(state)]
    holder, key = places[draw.randrange(len(places))]
    if isinstance(holder, dict) and draw.random() < 0.1:
        del holder[key]
    elif isinstance(holder, dict) and draw.random() < 0.1:
        holder[draw.choice(WORDS)] = holder[key]
    else:
        holder[key] = _other(draw, holder[key])
    return state


def _places(state: Any) -> Any:
    items = state.items() if isinstance(state, dict) else enumerate(state)
    for key, value in list(items)[:60]:
        yield state, key
        if isinstance(value, (dict, list)) and value:
            yield from _places(value)


def _other(draw: random.Random, value: Any) -> Any:
    if isinstance(value, torch.Tensor) and draw.random() < 0.7:
        return draw.choice(
            (value.new_zeros(()), value.flatten(), value[:0], value.new_zeros(1).expand(10**5, 100), value.to_sparse(),
             value.float().mul(float("nan")), value.double().mul(1e308), value.long(), value.half(), -value.long())
        )  # fmt: skip
    if isinstance(value, list) and value and draw.random() < 0.5:
        return draw.choice((value[1:], value * 2, value[::-1]))
    if type(value) in (int, float) and draw.random() < 0.5:
        return draw.choice((-value, value + 1, value * 10**6, 10**30, 1e300, 0, -1))
    kinds = (None, True, 0, -1, 0.5, 2**40, 100_000, 10**400, "", [], {}, ["a"], {"a": 1}, *WORDS)
    return draw.choice(kinds)


class Canary:
    """What runs when it is unpickled"""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.path),)


def poisoned(draw: random.Random, path: Path, content: bytes, canary: Path) -> bytes:
    """A pickle in the place of the file, or of what an archive holds"""
    pickled = pickle.dumps({"format": 1, "committee": Canary(canary)}, protocol=draw.choice((0, 2, 4)))
    if path.suffix != ".pt" or draw.random() < 0.3:
        return pickled
    archive = io.BytesIO()
    torch.save({"format": 1, "mark": "", "part": Canary(canary), "committee": Canary(canary)}, archive)
    return archive.getvalue()


# --- one case ---


def one(seed: int, attacked: dict[str, Kind] | None = None) -> str:
    draw, place = random.Random(seed), world()
    names = [*(attacked or KINDS)]
    kind = KINDS[names[seed % len(names)]]
    path = place.folder / kind.path
    content = place.kept[path]
    how = draw.random()
    is_forged = how < 0.3 and kind.same is not None
    if is_forged:
        content = forged(draw, path, content)
    elif how < 0.35:
        content = poisoned(draw, path, content, place.canary)
    else:
        content = bytes_changed(draw, content)
    path.write_bytes(content)
    before, most = place.there(), peak()
    try:
        return judged(place, kind, invoked(*kind.command(place.folder)), before, is_forged)
    finally:
        place.restore()
        if peak() - most > MEMORY:
            raise Fault(f"{kind.path}: {(peak() - most) / 1e9:.1f} GB of memory")


def judged(place: World, kind: Kind, result: Any, before: dict[Path, bytes], is_forged: bool) -> str:
    name = kind.path
    if place.canary.exists():
        place.canary.rmdir()
        raise Fault(f"{name}: a file was run")
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise Fault(f"{name}: {type(result.exception).__name__}: {result.exception}")
    if found := CONTROL.search(result.output):
        raise Fault(f"{name}: {found[0]!r} is printed: {result.output!r}")
    if result.exit_code:
        last = result.output.splitlines()[-1:]
        if result.exit_code not in (1, 2) or "Traceback" in result.output or "--debug shows where" in result.output:
            raise Fault(f"{name}: exit code {result.exit_code}: {result.output}")
        if result.exit_code == 1 and not (last and last[0].startswith("Error: ")):
            raise Fault(f"{name}: no sentence: {result.output!r}")
        if place.there() != before:
            raise Fault(f"{name}: refused, but something has changed: {result.output}")
        return "refused"
    if kind.same is None:
        return "read"
    if kind.same(place, result):
        return "the same"
    if not is_forged:
        raise Fault(f"{name}: another result without a word: {result.output}")
    return "forged"


def peak() -> float:
    """Bytes of memory at most so far"""
    try:
        import resource
    except ImportError:  # Windows
        return 0.0
    return 1024.0 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


if __name__ == "__main__":
    attacks.main(__doc__, one)
