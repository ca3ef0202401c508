"""Attacks on what mq.save_checkpoint and mq.fit write and read back: python checkpoints.py --cases 3000 --seed 0

Files of a checkpoint folder, of one of the first version, and of a fit are changed: bits, lengths, other files in their
place, links, pickles that would run, entries of another type under a checksum that is right again. Then

- nothing in them has run, and no more memory was taken than the files could ask for;
- there was an error that names the file, and model, optimizer and random numbers are as they were;
- or the result is that of the file as it was written. Under a right checksum it may be another one, which is used.

Users' files lie in the folder before a checkpoint is saved: they are the same afterwards. A process is killed while it
saves: the last checkpoint or the new one is there, and the next one leaves nothing behind.
"""

from __future__ import annotations

import functools
import io
import os
import pickle
import random
import resource
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed.checkpoint
from torch.utils._pytree import tree_leaves

sys.path.append(str(Path(__file__).parents[1]))

import marquardt as mq
from fuzz import attacks
from fuzz.attacks import Fault
from marquardt import checkpoints, files, generators
from support.fits import net, noisy_sine

PARTS: dict[str, Any] = {"curvature": mq.Dense(), "damping": mq.MaxDiagonal(), "momentum": mq.AdaptiveMomentum()}
KINDS = ("contents.pt", "tensors-0.pt", "fit.pt", "first version", "folder", "user", "killed")
X, Y = noisy_sine(12)

# What an attack may take of memory, in KiB: no file has a thousandth of it.
MEMORY = 2**18


def made() -> tuple[torch.nn.Module, mq.LM]:
    model = net(hidden=2)
    return model, mq.LM(model, "mse", **PARTS)


def fitted(model: torch.nn.Module, file: Path, steps: int) -> mq.training.Fit:
    return mq.fit(model, (X, Y), "mse", steps=steps, batch_size=5, validation=(X, Y), checkpoint=file, **PARTS)


Content = dict[str, bytes]


@functools.cache
def written() -> dict[str, Content]:
    """The files of each kind, as they are when nobody has touched them; two of each, of the same model."""
    found: dict[str, Content] = {}
    with tempfile.TemporaryDirectory() as place:
        for name, steps in (("one", 3), ("other", 5)):
            folder, (model, opt) = Path(place, name), made()
            for _ in range(steps):
                opt.step(X, Y)
            mq.save_checkpoint(folder, model, opt, n=steps, curve=torch.arange(3.0))
            found[name] = content(folder / "1")
            old = Path(place, f"old {name}", "1")
            first_version(old, model, opt, n=steps, curve=torch.arange(3.0))
            found[f"old {name}"] = content(old)
            fitted(net(hidden=2), Path(place, name, "fit.pt"), steps)
            found[f"fit {name}"] = {"fit.pt": (folder / "fit.pt").read_bytes()}
    return found


def content(folder: Path) -> Content:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def first_version(part: Path, model: torch.nn.Module, opt: mq.LM, **more: Any) -> None:
    """As torch.distributed.checkpoint wrote it"""
    content = {"model": model.state_dict(), "optimizer": opt.state_dict(), "more": more}
    tensors, plain = checkpoints.taken_apart(content)
    torch.distributed.checkpoint.save(tensors, checkpoint_id=part, no_dist=True)
    torch.save({"marquardt": 1, "content": plain, "ranks": [generators.states()]}, part / "contents.pt")


# Changes of the bytes of a file.


class Canary:
    """A pickle of it makes a folder."""

    def __init__(self, place: Path) -> None:
        self.place = str(place)

    def __reduce__(self) -> Any:
        return os.mkdir, (self.place,)


def flipped(rng: random.Random, data: bytes) -> bytes:
    out = bytearray(data)
    for _ in range(rng.choice([1, 1, 1, 2, 5])):
        out[rng.randrange(len(out))] ^= 1 << rng.randrange(8)
    return bytes(out)


def cut(rng: random.Random, data: bytes) -> bytes:
    return data[: rng.choice([0, 1, rng.randrange(len(data)), len(data) - 1])]


def longer(rng: random.Random, data: bytes) -> bytes:
    k, more = rng.randrange(len(data)), rng.randbytes(rng.choice([1, 2, 100]))
    return rng.choice([data + more, more + data, data[:k] + more + data[k:], data + data])


def blanked(rng: random.Random, data: bytes) -> bytes:
    k, n = rng.randrange(len(data)), rng.choice([1, 16, 512])
    return data[:k] + bytes(len(data[k : k + n])) + data[k + n :]


def moved(rng: random.Random, data: bytes) -> bytes:
    i, j = sorted(rng.randrange(len(data)) for _ in range(2))
    n = rng.choice([1, 8, 64])
    return data[:i] + data[j : j + n] + data[i + n :]


BYTES = (flipped, flipped, flipped, cut, longer, blanked, moved)


BOMBS = {
    "a number of bytes": b"\x80\x02c__builtin__\nbytearray\nJ\xff\xff\xff\x7f\x85R.",
    "a number of numbers": b"\x80\x02ctorch\nTensor\nJ\xff\xff\xff\x7f\x85R.",
    "a storage": b"\x80\x02ctorch.storage\nUntypedStorage\nJ\xff\xff\xff\x7f\x85R.",
    "bytes that are not there": b"\x80\x05\x96\xff\xff\xff\xff\x0f\x00\x00\x00.",  # BYTEARRAY8
    "a place in the memo": b"\x80\x02r\xff\xff\xff\x3f.",
    "a program": b"\x80\x02cos\nsystem\nX\x04\x00\x00\x00true\x85R.",
}


def pickles(rng: random.Random, canary: Path) -> bytes:
    """That run when they are loaded, and some that ask for memory instead"""
    made = pickle.dumps(rng.choice([Canary(canary), {"marquardt": Canary(canary)}]), rng.choice([0, 2, 4]))
    return made if rng.random() < 0.6 else rng.choice(list(BOMBS.values()))


# Archives under a checksum that is right again.


def sealed(archive: bytes) -> bytes:
    return files.sealed_archive(archive[:-2] + bytes(2))


def body(data: bytes) -> bytes:
    return data[: len(data) - files.SEALED] if data[-files.SEALED :].startswith(files.SEAL) else data


def repacked(data: bytes, change: Callable[[str, bytes], bytes], compression: int = zipfile.ZIP_STORED) -> bytes:
    out = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(body(data))) as old, zipfile.ZipFile(out, "w", compression) as new:
        for name in old.namelist():
            new.writestr(name, change(name, old.read(name)))
    return sealed(out.getvalue())


WRONG = [
    None, True, -1, 0, 10**13, 2**70, 1.5, float("nan"), "", "x", "../x", b"x", [], {}, [[]], [1, 2], {"x": 1}, (1, 2),
    torch.zeros(0), torch.zeros(3, 2, dtype=torch.int8), torch.zeros(1).expand(10**9), 1j, torch.float16,
]  # fmt: skip


def retyped(rng: random.Random, data: bytes) -> bytes:
    """An entry somewhere is another thing, missing or twice there. The state of the optimizer, which other programs
    attack, stays."""
    found = torch.load(io.BytesIO(data), weights_only=True)
    holder, key = found, rng.choice(list(found))
    while True:
        inner = holder[key]
        keys = list(inner) if isinstance(inner, dict) else list(range(len(inner))) if isinstance(inner, list) else []
        keys = [k for k in keys if k != "optimizer"]
        if not keys or rng.random() < 0.2 or key == "optimizer":
            break
        holder, key = inner, rng.choice(keys)
    if key == "optimizer":
        return data
    how = rng.random()
    if how < 0.7:
        holder[key] = rng.choice(WRONG)
    elif how < 0.9:
        del holder[key]
    elif isinstance(holder, list):
        holder.append(holder[key])
    else:
        holder[f"{key}x"] = holder[key]
    out = io.BytesIO()
    torch.save(found, out)
    return sealed(out.getvalue())


def resealed(rng: random.Random, data: bytes, canary: Path) -> bytes:
    """Another archive, with a checksum that says it is the one that was written"""
    if rng.random() < 0.6:
        return retyped(rng, data)
    if rng.random() < 0.3:
        with suppress(Exception):
            return sealed(rng.choice(BYTES)(rng, body(data)))
    bomb = pickles(rng, canary)
    if rng.random() < 0.5:
        return repacked(data, lambda name, item: bomb if name.endswith("data.pkl") else item)
    if rng.random() < 0.5:
        return repacked(data, lambda _, item: item, zipfile.ZIP_DEFLATED)
    return repacked(data, lambda name, item: flipped(rng, item) if name.endswith("data.pkl") else item)


def changed(rng: random.Random, data: bytes, canary: Path) -> tuple[bytes, bool]:
    """The bytes, and whether they have a right checksum"""
    how = rng.random()
    if how < 0.5:
        return rng.choice(BYTES)(rng, data), False
    if how < 0.6:
        return pickles(rng, canary), False
    return resealed(rng, data, canary), True


# What may have changed.


def leaves(item: Any) -> list[Any]:
    return [t.tolist() if isinstance(t, torch.Tensor) else t for t in tree_leaves(item)]


def state(model: torch.nn.Module, opt: mq.LM | None = None) -> str:
    """All that loading may change"""
    found = generators.states()
    rest = [found["torch"].tolist(), found["python"], found["numpy"]]
    return repr([leaves([dict(model.state_dict()), None if opt is None else opt.state_dict()]), rest])


@contextmanager
def watched(canary: Path) -> Iterator[None]:
    """Nothing runs, and nothing takes much memory."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    yield
    if canary.exists():
        raise Fault("a file was executed")
    if (took := resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) > MEMORY:
        raise Fault(f"{took >> 10} MiB were taken")


def refused(error: Exception, place: Path) -> None:
    if not isinstance(error, (ValueError, TypeError, OSError)) or str(place) not in str(error):
        raise Fault(f"an error that does not name the file: {type(error).__name__}: {error}") from error


def attempted(call: Callable[[], str], place: Path, model: torch.nn.Module, opt: mq.LM | None, want: str | None) -> str:
    """What is read is refused with nothing changed, or gives what it would unharmed, which None leaves open."""
    torch.manual_seed(1)
    before = state(model, opt)
    try:
        found = call()
    except Exception as error:
        refused(error, place)
        if state(model, opt) != before:
            raise Fault(f"something has changed before {error}") from error
        return "refused"
    if want is not None and found != want:
        raise Fault("another result, silently")
    torch.rand(2), random.gauss(0, 1), random.random(), np.random.rand(700)  # noqa: NPY002  # which go on
    return "loaded"


def loaded(folder: Path, want: str | None) -> str:
    model, opt = made()
    return attempted(
        lambda: repr(leaves(mq.load_checkpoint(folder, model, opt))) + state(model, opt), folder, model, opt, want
    )


@functools.cache
def intact(name: str) -> str:
    with tempfile.TemporaryDirectory() as place:
        lay(Path(place), written()[name])
        model, opt = made()
        return repr(leaves(mq.load_checkpoint(place, model, opt))) + state(model, opt)


def lay(folder: Path, content: Content) -> Path:
    part = folder / "1"
    part.mkdir(parents=True, exist_ok=True)
    for name, data in content.items():
        (part / name).write_bytes(data)
    return part


# The attacks.


def on_checkpoint(rng: random.Random, place: Path, name: str) -> str:
    part = lay(place / "run", written()["one"])
    data, is_sealed = changed(rng, (part / name).read_bytes(), place / "canary")
    (part / name).write_bytes(data)
    return loaded(place / "run", None if is_sealed else intact("one"))


def on_first_version(rng: random.Random, place: Path) -> str:
    """Its files have no checksum, so that a changed number is not noticed."""
    part, canary = lay(place / "run", written()["old one"]), place / "canary"
    name = rng.choice(["contents.pt", "__0_0.distcp", ".metadata"])
    data = (part / name).read_bytes()
    if name == ".metadata":
        data = metadata(rng, data, canary)
    elif name == "contents.pt":
        data = body(changed(rng, data, canary)[0])
    else:
        data = pickles(rng, canary) if rng.random() < 0.2 else rng.choice(BYTES)(rng, data)
    (part / name).write_bytes(data)
    return loaded(place / "run", None)


def metadata(rng: random.Random, data: bytes, canary: Path) -> bytes:
    """The pickle of torch.distributed.checkpoint"""
    how = rng.random()
    if how < 0.3:
        return rng.choice(BYTES)(rng, data)
    if how < 0.5:
        return pickles(rng, canary)
    found = pickle.loads(data)
    place = rng.choice(list(found.storage_data.values()))
    if how < 0.7:
        place.relative_path = rng.choice(["../1/__0_0.distcp", "/etc/passwd", "", "..", ".metadata", 5, Canary(canary)])
    elif how < 0.8:
        setattr(place, rng.choice(["offset", "length"]), rng.choice([-1, 10**15, "x", None, 1.5, Canary(canary)]))
    else:
        tensor = rng.choice(list(found.state_dict_metadata.values()))
        setattr(*rng.choice([
            (tensor, "size", torch.Size([10**7, 10**6])), (tensor, "chunks", []), (tensor, "chunks", tensor.chunks * 2),
            (tensor.chunks[0], "sizes", torch.Size([10**13])), (tensor.chunks[0], "offsets", torch.Size([-1])),
            (found, "storage_data", {}), (found, "state_dict_metadata", {}), (found, "planner_data", Canary(canary)),
        ]))  # fmt: skip
    return pickle.dumps(found)


def on_folder(rng: random.Random, place: Path) -> str:
    """Files that are exchanged, missing or too many, and links"""
    folder, mine, others = place / "run", written()["one"], written()["other"]
    part, name = lay(folder, mine), rng.choice([name for name in mine if name != ".marquardt"])
    how, outside = rng.randrange(6), place / "outside"
    lay(outside, mine)
    if how == 0:
        (part / name).write_bytes(others[name])
    elif how == 1:
        (part / name).unlink()
    elif how == 2:
        (part / rng.choice([".metadata", "__0.metadata", "x", "tensors-1.pt", "2"])).write_bytes(
            pickles(rng, place / "canary")
        )
    elif how == 3:
        (part / name).unlink()
        (part / name).symlink_to(outside / "1" / name)
    elif how == 4:
        (folder / rng.choice(["2", "١", "01"])).symlink_to(outside / "1")
    else:
        (part / name).unlink()
        (part / name).mkdir()
    return loaded(folder, intact("one"))


def on_fit(rng: random.Random, place: Path) -> str:
    """The fit goes on to its end, so that all it has read is used."""
    file, model = place / "fit.pt", net(hidden=2)
    data, is_sealed = changed(rng, written()["fit one"]["fit.pt"], place / "canary")
    file.write_bytes(data)
    outcome = attempted(lambda: ended(model, file), file, model, None, None if is_sealed else fit_intact())
    if outcome == "refused" and file.read_bytes() != data:
        raise Fault("the file has changed")
    return outcome


def ended(model: torch.nn.Module, file: Path) -> str:
    found = fitted(model, file, 4)
    return repr(leaves(dict(model.state_dict()))) + repr(found.history["loss"])


@functools.cache
def fit_intact() -> str:
    with tempfile.TemporaryDirectory() as place:
        file = Path(place, "fit.pt")
        file.write_bytes(written()["fit one"]["fit.pt"])
        return ended(net(hidden=2), file)


# Users' files, and a process that is killed.


NAMES = [
    "1", "2", "3", "9", "2024", "007", "²", "٣", "-1", "1e3", "9" * 30, "x.part", "1.part", "2.part", "best", "run.pt",
    "run.pt.tmp", "contents.pt", ".marquardt", "tensors-0.pt", ".metadata", "épreuve", "a b",
]  # fmt: skip


def furnish(rng: random.Random, folder: Path, outside: Path) -> None:
    folder.mkdir(exist_ok=True)
    for name in rng.sample(NAMES, rng.randrange(1, 9)):
        path = folder / name
        if path.exists():
            continue
        how = rng.random()
        if how < 0.2:
            path.write_text(f"a file {name}")
        elif how < 0.35:
            path.symlink_to(rng.choice([outside, outside / "nowhere", outside / "thesis.txt"]))
        else:
            path.mkdir()
            for inner in rng.sample(["thesis.txt", "contents.pt", "tensors-0.pt", ".marquardt", "1", "x.part"], 2):
                how = rng.random()
                if how < 0.7:
                    (path / inner).write_text(f"Checkpoint {inner} of marquardt")
                elif how < 0.85:
                    (path / inner).symlink_to(outside / "thesis.txt")
                else:
                    (path / inner).mkdir()


def there(*folders: Path) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for path in (path for folder in folders for path in folder.rglob("*")):
        link = os.readlink(path) if path.is_symlink() else None
        found[str(path)] = link or (path.read_bytes() if path.is_file() else None)
    return found


def on_user(rng: random.Random, place: Path) -> str:
    folder, outside = place / "run", place / "outside"
    lay(outside, written()["other"])
    (outside / "thesis.txt").write_text("mine")
    if rng.random() < 0.5:
        lay(folder, written()["one"])
    ours = set(there(folder)) if folder.exists() else set()
    furnish(rng, folder, outside)
    theirs = {name: data for name, data in there(folder, outside).items() if name not in ours}
    (model, opt), outcome = made(), "saved"
    for n in range(2):
        before = there(folder, outside)
        try:
            if rng.random() < 0.2:
                fitted(net(hidden=2), folder, 2)
            else:
                mq.save_checkpoint(folder, model, opt, n=n)
                try:
                    assert mq.load_checkpoint(folder, model, opt) == {"n": n}
                except ValueError as error:
                    refused(error, folder)
                    outcome = "refused"
        except (ValueError, OSError) as error:
            refused(error, folder)
            outcome = "refused"
            if there(folder, outside) != before:
                raise Fault(f"something has changed before {error}") from error
    after = there(folder, outside)
    lost = [name for name, data in theirs.items() if after.get(name, b"gone") != data]
    if lost:
        raise Fault(f"{lost} are not what they were")
    return outcome


CALLS = ("open", "write", "fsync", "replace", "mkdir", "unlink", "rmdir", "listdir", "close")


def on_killed(rng: random.Random, place: Path) -> str:
    folder, (model, opt) = place / "run", made()
    mq.save_checkpoint(folder, model, opt, n=0)
    left = rng.randrange(1, 45)
    if (child := os.fork()) == 0:
        with suppress(BaseException):
            die_after(left)
            mq.save_checkpoint(folder, model, opt, n=1)
        os._exit(0)
    killed = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 9
    found = mq.load_checkpoint(folder, model, opt)["n"]
    if found != 1 and not killed:
        raise Fault("a checkpoint that was saved is not there")
    mq.save_checkpoint(folder, model, opt, n=2)
    if mq.load_checkpoint(folder, model, opt) != {"n": 2}:
        raise Fault("an earlier checkpoint is loaded")
    rest = [path for path in folder.iterdir() if any(path.iterdir())]
    if len(rest) > 1:
        nearly = [path for path in rest if not checkpoints.complete(path) and not checkpoints.ours(path)]
        if len(rest) - len(nearly) > 1 or any((path / ".marquardt").read_bytes() for path in nearly):
            raise Fault(f"what was left stays: {sorted(there(folder))}")
    return "killed" if killed else "saved"


def die_after(calls: int) -> None:
    """Of this process no more than so many calls of the system"""
    count = [calls]

    def counted(call: Callable[..., Any]) -> Callable[..., Any]:
        def counting(*args: Any, **kwargs: Any) -> Any:
            count[0] -= 1
            if not count[0]:
                os._exit(9)
            return call(*args, **kwargs)

        return counting

    for name in CALLS:
        setattr(os, name, counted(getattr(os, name)))


def one(seed: int, kind: str | None = None) -> str:
    rng = random.Random(seed)
    kind = KINDS[seed % len(KINDS)] if kind is None else kind
    written(), intact("one"), fit_intact()
    with tempfile.TemporaryDirectory(dir="/dev/shm" if os.path.isdir("/dev/shm") else None) as name:
        place = Path(name)
        with watched(place / "canary"):
            if kind in ATTACKS:
                return f"{kind} {ATTACKS[kind](rng, place)}"
            return f"{kind} {on_checkpoint(rng, place, kind)}"


ATTACKS: dict[str, Callable[[random.Random, Path], str]] = {
    "fit.pt": on_fit, "first version": on_first_version, "folder": on_folder, "user": on_user, "killed": on_killed,
}  # fmt: skip


if __name__ == "__main__":
    attacks.main(__doc__, one)
