"""What was asked for, and the folder of a run: `run.json` says of which data and options it is."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from .. import __version__, files
from .reading import digest

RUN, CHECKPOINT = "run.json", "checkpoint"
MODEL, PREPROCESSING, PREDICTIONS, METRICS, REPORT = (
    "model.pt", "preprocessing.json", "predictions.csv", "metrics.json", "report.html",
)  # fmt: skip


class BadFolder(ValueError):
    """A folder that cannot be used, said in one sentence with the way out."""


@dataclass(frozen=True)
class Request:
    """The options of `marquardt fit` that a model depends on, beside its data."""

    data: Path
    targets: tuple[str, ...]
    classify: bool | None = None
    hidden: tuple[int, ...] | None = None  # None: chosen
    test_fraction: float = 0.2
    seed: int = 0
    steps: int | None = None
    rows: int | None = None
    ignore: tuple[str, ...] = ()
    categorical: tuple[str, ...] = ()
    missing: tuple[str, ...] = ()

    def options(self) -> dict[str, Any]:
        options = {key: value for key, value in asdict(self).items() if key != "data"}
        return {key: list(value) if isinstance(value, tuple) else value for key, value in options.items()}


def identity(request: Request) -> dict[str, Any]:
    """What decides the model, bit for bit."""
    data = {"path": str(request.data.absolute()), "bytes": request.data.stat().st_size, "sha256": digest(request.data)}
    versions = {"marquardt": __version__, "torch": torch.__version__, "threads": torch.get_num_threads()}
    return {"data": data, "options": request.options(), "versions": versions}


def finished(out: Path) -> bool:
    return bool(_read(out).get("finished"))


def check(out: Path, request: Request, *, resume: bool) -> None:
    """Refuses a folder that holds something else, before it is touched and before the table is read."""
    if (out / RUN).exists():
        there = _read(out)
        if not resume:
            name = Path(there["data"]["path"]).name
            raise BadFolder(f"{out} holds a run already ({name}): --resume goes on with it, or choose another --out")
        if request.data.is_file():
            _check_same(out, there, identity(request))
    elif out.exists():
        _check_empty(out)


def begin(out: Path, request: Request, *, resume: bool) -> list[str]:
    """Makes `out` the folder of this run, or goes on with it if it is; sentences on what is unusual."""
    check(out, request, resume=resume)
    here = identity(request)
    for left in out.glob("*.part"):  # by a process that was killed: nobody else writes here now
        left.unlink()
    if not (out / RUN).exists():
        write_json(out / RUN, {**here, "finished": False})
        return [f"{out} has no run to go on with: this one starts."] if resume else []
    return _go_on(_read(out)["versions"], here["versions"])


def end(out: Path) -> None:
    """Only now is the run whole; what was kept for going on is not needed any more."""
    write_json(out / RUN, {**_read(out), "finished": True})
    shutil.rmtree(out / CHECKPOINT, ignore_errors=True)


def _check_empty(out: Path) -> None:
    """Locks and what a killed process left half-written do not count."""
    if not out.is_dir():
        raise BadFolder(f"{out} is a file: choose another --out")
    others = sorted(p.name for p in out.iterdir() if not p.name.startswith(".") and p.suffix != ".part")
    if others:
        raise BadFolder(f"{out} is no folder of a run, and not empty ({others[0]}, …): choose another --out")


def _check_same(out: Path, there: Mapping[str, Any], here: Mapping[str, Any]) -> None:
    if there["data"]["sha256"] != here["data"]["sha256"]:
        raise BadFolder(
            f"{out} is a run on other data: {here['data']['path']} has changed since, or is another file than "
            f"{there['data']['path']}; choose another --out"
        )
    for name, before in there["options"].items():
        now = here["options"].get(name)
        if now != before:
            raise BadFolder(
                f"{out} is a run with other options: {name} was {_word(before)} and is {_word(now)}; give the same, or "
                "choose another --out"
            )


def _go_on(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """The threads of before, since sums are rounded by them; other versions are told."""
    torch.set_num_threads(before["threads"])
    names = [name for name in ("marquardt", "torch") if before[name] != now[name]]
    changed = "; ".join(f"{name} was {before[name]} and is {now[name]}" for name in names)
    return [f"{changed}: the model may differ in its last digits from that of an undisturbed run."] if names else []


def _word(value: Any) -> str:
    return "not given" if value is None else json.dumps(value, ensure_ascii=False)


def _read(out: Path) -> dict[str, Any]:
    path = out / RUN
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        found["data"]["sha256"], found["options"], found["versions"]["threads"]
    except (OSError, ValueError, KeyError, TypeError):
        raise BadFolder(f"{path} is damaged: choose another --out") from None
    return dict(found)


def write_json(path: Path, content: Any) -> None:
    with files.whole(path) as write:
        write(json.dumps(content, indent=1, ensure_ascii=False) + "\n")
