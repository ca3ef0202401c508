"""What was asked for, and the folder of a run: `run.json` says of which data and options it is, and holds the checksums
of what the run has written: nothing else in the folder is replaced or removed."""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from .. import __version__, files
from ..files import typed
from ..tabular.building import KEPT
from ..values import quoted

RUN, CHECKPOINT = "run.json", "checkpoint"
MODEL, PREPROCESSING, PREDICTIONS, METRICS, REPORT = (
    "model.pt", "preprocessing.json", "predictions.csv", "metrics.json", "report.html",
)  # fmt: skip
OUTPUTS = (MODEL, PREPROCESSING, PREDICTIONS, METRICS, REPORT)
FORMAT = 2  # of run.json; the first had no number and no checksum
THREADS = 1024  # more of them than any machine has cores are no help, and may end the process


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


@dataclass(frozen=True)
class Data:
    path: str
    bytes: int
    sha256: str


@dataclass(frozen=True)
class Versions:
    marquardt: str
    torch: str
    threads: int


@dataclass(frozen=True)
class Run:
    """The content of run.json."""

    format: int
    data: Data
    options: dict[str, Any]  # of a Request
    versions: Versions
    finished: bool = False
    written: tuple[str, ...] = ()  # checksums

    def __post_init__(self) -> None:
        typed({**self.options, "data": self.data.path}, Request, "options")
        sums = [self.data.sha256, *self.written]
        if self.data.bytes < 0 or not all(re.fullmatch("[0-9a-f]{64}", found) for found in sums):
            raise ValueError("it has a size or a checksum that is none")
        if not 1 <= self.versions.threads <= THREADS:
            raise ValueError(f"versions.threads is {self.versions.threads}, not 1 to {THREADS}")


def identity(request: Request) -> Run:
    """What decides the model, bit for bit."""
    path = request.data
    data = Data(str(path.absolute()), path.stat().st_size, files.digest_of(path))
    versions = Versions(__version__, str(torch.__version__), torch.get_num_threads())
    return Run(FORMAT, data, request.options(), versions)


def finished(out: Path) -> bool:
    return _read(out).finished


def check(out: Path, request: Request, *, resume: bool) -> None:
    """Refuses a folder that holds something else, before it is touched."""
    if out.exists() and not out.is_dir():
        raise BadFolder(f"{out} is a file: choose another --out")
    if not os.path.lexists(out / RUN):
        # Locks and what a killed process left half-written do not count.
        left = files.left_over(out, Path(RUN).stem)
        there_already = out.iterdir() if out.is_dir() else ()
        if others := sorted(p.name for p in there_already if not p.name.startswith(".") and p not in left):
            raise BadFolder(f"{out} is no folder of a run, and not empty ({others[0]}, …): choose another --out")
        return
    there = _read(out)
    if not resume:
        name = Path(there.data.path).name
        raise BadFolder(f"{out} holds a run already ({name}): --resume goes on with it, or choose another --out")
    _check_same(out, there, identity(request))
    if there.finished:
        if gone := [name for name in OUTPUTS if not (out / name).is_file()]:
            raise BadFolder(f"{out} holds this run, finished, but without {gone[0]}: choose another --out")
    else:
        own(out, dict.fromkeys(OUTPUTS), there.written)
        folder = out / CHECKPOINT
        if os.path.lexists(folder) and (folder.is_symlink() or not folder.is_dir()):
            raise BadFolder(f"{folder} is no folder that marquardt has made: move it away, and --resume")


def own(out: Path, new: Mapping[str, str | None], known: Collection[str]) -> set[str]:
    way = "move it away, and --resume goes on; or choose another --out"
    return files.own({out / name: found for name, found in new.items()}, known, way)


def begin(out: Path, request: Request, *, resume: bool) -> list[str]:
    """Makes `out` the folder of this run, or goes on with it if it is; sentences on what is unusual."""
    check(out, request, resume=resume)
    here = identity(request)
    stems = "|".join(re.escape(Path(name).stem) for name in (RUN, *OUTPUTS))
    for left in files.left_over(out, stems):  # by a process that was killed: nobody else writes here now
        left.unlink()
    if not (out / RUN).exists():
        write_run(out, here)
        return [f"{out} has no run to go on with: this one starts."] if resume else []
    before, now = _read(out).versions, vars(here.versions)
    torch.set_num_threads(before.threads)  # since sums are rounded by them
    packages = ((name, was, now[name]) for name, was in vars(before).items() if name != "threads")
    changed = [f"{name} was {was} and is {is_now}" for name, was, is_now in packages if was != is_now]
    differs = "the model may differ in its last digits from that of an undisturbed run."
    return [f"{'; '.join(changed)}: {differs}"] if changed else []


def put(out: Path, contents: Mapping[str, bytes]) -> None:
    """The outputs of the run. run.json has their checksums before they are there: also if the process is killed in
    between, what it has written is known for its own."""
    new = {name: files.digest(content) for name, content in contents.items()}
    there = _read(out)
    before = own(out, new, there.written)  # by an earlier attempt, which was killed here
    write_run(out, replace(there, written=tuple(sorted(before | {*new.values()}))))
    for name, content in contents.items():
        with files.whole(out / name) as write:
            write(content)


def end(out: Path) -> None:
    """Only now is the run whole."""
    write_run(out, replace(_read(out), finished=True))
    clear(out)


def clear(out: Path) -> None:
    """What was kept for going on is not needed by a run that is whole."""
    folder = out / CHECKPOINT
    if folder.is_symlink() or not folder.is_dir():
        return
    for path in files.left_over(folder, rf"{KEPT}|{Path(MODEL).stem}"):
        path.unlink()
    for path in sorted(folder.iterdir()):
        with suppress(files.Damaged):
            ours = re.fullmatch(rf"({KEPT}|{Path(MODEL).stem})\.pt", path.name) and not path.is_symlink()
            if ours and path.is_file() and files.check_seal(path):
                path.unlink()
    with suppress(OSError):  # there is something else in it, which stays
        folder.rmdir()


def _check_same(out: Path, there: Run, here: Run) -> None:
    if there.data.sha256 != here.data.sha256:
        raise BadFolder(
            f"{out} is a run on other data: {here.data.path} has changed since, or is another file than "
            f"{there.data.path}; choose another --out"
        )
    for name, now in here.options.items():
        if now != there.options.get(name):
            was, is_now = (
                "not given" if value is None else files.dumps(value) for value in (there.options.get(name), now)
            )
            raise BadFolder(
                f"{out} is a run with other options: {name} was {was} and is {is_now}; give the same, or choose "
                "another --out"
            )


def _read(out: Path) -> Run:
    path = out / RUN
    way = "choose another --out"
    try:
        if path.is_symlink():
            raise files.Damaged(f"{path} is a link, which marquardt has not made")
        found, is_sealed = files.read(path)
        if "format" not in found and {"data", "options", "versions"} <= set(found):
            raise BadFolder(
                f"{out} holds a run of an earlier version of marquardt, whose files have no checksums: {way}; "
                "`marquardt predict` uses its model still, if the run has ended"
            )
        if not is_sealed:
            raise files.Damaged(f"{path} is damaged, or no file of marquardt: it has no checksum")
        if found.get("format") != FORMAT:
            raise BadFolder(f"{path} has the format {quoted(found.get('format'))}, this version reads {FORMAT}: {way}")
        run: Run = typed(found, Run)
        return run
    except files.Damaged as error:
        raise BadFolder(f"{error}: {way}") from None
    except BadFolder:
        raise
    except (OSError, ValueError) as error:
        raise BadFolder(f"{path} is damaged ({error}): {way}") from None


def write_run(out: Path, run: Run) -> None:
    files.write(out / RUN, asdict(run))
