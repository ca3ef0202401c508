"""A fit in a file, or of several ranks in a folder: written whole or not at all, and gone on with only by the same
model, data and options. The number of ranks may be another one."""

from __future__ import annotations

import math
import os
import re
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from .. import checkpoints, files
from ..arguments import brief
from ..generators import of_rank
from ..model.parameters import named_parameters
from ..ranks import ALONE, RankError, Ranks
from ..sources import Arrays, Indexed, Source, Stream
from .batching import sharded
from .run import Training

# Files of version 4 carry no checksum, and are otherwise the same.
VERSIONS, VERSION = (4, 5), 5

# Seconds between two checkpoints at least, and how many times longer than writing one: a step may be much shorter.
SECONDS, SHARE = 1.0, 20.0

ANEW = "Begin anew with resume=False, or name another file"


@dataclass
class Saver:
    """Writes a file now and then; several ranks a folder, unless there is a file to go on with."""

    path: Path
    identity: dict[str, dict[str, Any]]  # of what is saved there
    ranks: Ranks = ALONE
    last: float = field(default_factory=lambda: time.monotonic())
    took: float = 0.0

    @property
    def due(self) -> bool:
        return time.monotonic() - self.last >= max(SECONDS, SHARE * self.took)

    @property
    def there(self) -> bool:
        """Whether there is a fit to go on with."""
        return self.ranks.agreed(self.path.is_file() or checkpoints.latest(self.path) is not None)

    def save(self, run: Training) -> None:
        """What all ranks have in common, and the random numbers of each."""
        began = time.monotonic()
        content = {"marquardt.fit": VERSION, "identity": self.identity, **run.state()}
        if self.ranks.agreed(self.path.is_dir() or (self.ranks.several and not self.path.is_file())):
            checkpoints.write(self.path, content, run.random(), self.ranks)
        else:
            content["ranks"] = self.ranks.every(run.random())
            if self.ranks.rank == 0:
                files.save(Path(os.path.realpath(self.path)), content)  # a link stays where it leads
        self.last = time.monotonic()
        self.took = self.last - began

    def resume(self, run: Training) -> None:
        """All ranks, or an error that names the file, and nothing has changed."""
        found, random = self.load()
        with run.unchanged_by_errors():
            try:
                other = difference(found["identity"], self.identity)
                if not other:
                    own = {k: of_rank([one[k] for one in random], self.ranks.rank) for k in random[0]}
                    run.resume({**found, **own})
            except (RankError, MemoryError):
                raise
            except Exception as error:  # of many kinds
                known = isinstance(error, ValueError)
                words = str(error) if known else f"it is damaged ({type(error).__name__}: {error})"
                raise ValueError(f"the checkpoint {self.path} cannot be gone on with: {words}. {ANEW}") from error
            if other:
                raise ValueError(f"the checkpoint {self.path} is of {other}. {ANEW}")
            self.ranks.same(f"a fit goes on from {self.path}")

    def load(self) -> tuple[dict[str, Any], list[Any]]:
        """What all ranks have in common, and the random numbers of each. No code of a file is run."""
        path, random, is_sealed = self.path, None, True
        if self.ranks.agreed(path.is_dir()):
            _, found, random = checkpoints.read(path, self.ranks)
        else:
            try:
                found, is_sealed = files.load(path)
            except files.Damaged as error:
                words = f"{error}; no checkpoint to go on with: move it away, or name another file"
                raise files.Damaged(words) from error
        version = found.get("marquardt.fit") if isinstance(found, dict) else None
        if type(version) is not int or version not in VERSIONS:
            raise ValueError(
                f"{path} is no checkpoint of mq.fit of this version: begin anew with resume=False, or name another file"
            )
        if version == VERSION and not is_sealed:
            raise files.Damaged(f"{path} is damaged: it has lost its checksum. Move it away, or name another file")
        return found, found.pop("ranks", []) if random is None else random

    def check_replaceable(self) -> None:
        """What is there when a fit begins anew: a folder that marquardt writes its own folders in, or a file that it
        has written. Others would be lost."""
        path = self.path
        if path.is_dir() or not path.exists() or (path.is_file() and path.stat().st_size == 0):
            return
        try:
            found = files.load(path)[0] if path.is_file() else None
        except files.Damaged:
            found = None
        if not (isinstance(found, dict) and "marquardt.fit" in found):
            raise ValueError(
                f"{path} is no checkpoint of mq.fit, or a damaged one, and would be replaced: name another file, or "
                "move this one away"
            )


# What a checkpoint belongs to.


def identity(run: Training, seed: int) -> dict[str, dict[str, Any]]:
    """Of the model, the data and the options, by name: plain values that must be the same again."""
    opt, found, params = run.opt, run.regularisation, dict(named_parameters(run.model))
    model = {
        "class": type(opt.model).__name__,
        "parameters": {name: list(p.shape) for name, p in params.items()},
        "precision": {name: str(p.dtype) for name, p in params.items()},
        "layers": layers(opt.model),
        "loss": brief(opt.loss),
    }
    options = {
        **{name: brief(part) for name, part in vars(opt.parts).items()},
        "lr": opt.lr,
        "attempts": opt.attempts,
        "weight_decay": [str(w) for w in opt.weight_decays],
        "evidence": None if found is None else brief(found.evidence),
        "seed": seed,
        "batches": [run.plan.kind, run.plan.size],
    }
    data = {"samples": described(run.data), "validation": described(run.validation)}
    return {"model": model, "data": data, "options": options}


def layers(model: nn.Module) -> dict[str, str]:
    """Classes by name, with the options that torch's own have; those of others may print numbers that train."""
    found = {}
    for name, m in model.named_modules():
        options = m.extra_repr() if type(m).__module__.startswith("torch.nn.") else ""
        options = re.sub(r" at 0x[0-9a-f]+", "", options)  # of functions: another one in every process
        found[name] = f"{type(m).__name__}({options})"
    return found


def described(data: Source | None) -> list[Any] | None:
    """How many samples, and two sums over their numbers; a loader is not gone through for it."""
    if isinstance(data, Indexed):
        some = data.whole if isinstance(data, Arrays) else data.take(torch.arange(1)) if data.steady else None
        return [data.samples, *([] if some is None else checksums(vars(some)))]
    if isinstance(data, Stream) and sharded(data):
        return [len(data.data.dataset)]  # also on another number of ranks
    return None if data is None else [data.samples]


def check_same_data(data: Source | None, ranks: Ranks) -> None:
    """Every rank has all data, in the same order."""
    found = ranks.every(described(data) or [])
    for rank, there in enumerate(found):
        if not same(there, found[0]):
            raise ValueError(
                f"the data are not the same on all ranks: rank 0 has {found[0][0]} samples and rank {rank} has "
                f"{there[0]}, with other numbers in them. mq.fit shares every batch among the ranks, so pass all data "
                "on every rank, made with the same seed; if each rank has data of its own, take the steps of mq.LM in "
                "a loop, or pass group=False for independent runs"
            )


def checksums(item: Any) -> list[float]:
    """Σt and Σt·cos(place), of which the second depends on the order"""
    found = [0.0, 0.0]
    for t in tree_leaves(item):
        if isinstance(t, Tensor):
            values = t.detach().double().flatten()
            found[0] += float(values.sum())
            found[1] += float(values @ torch.arange(len(values), dtype=torch.float64, device=values.device).cos())
    return found


OTHER = {"model": "another model", "data": "other data", "options": "other options"}


def difference(there: dict[str, dict[str, Any]], here: dict[str, dict[str, Any]]) -> str:
    """In which a checkpoint is of another fit; nothing if it is of this one"""
    for what, values in here.items():
        for name, value in values.items():
            before = there.get(what, {}).get(name)
            if not same(before, value):
                now, then = differing(value, before), differing(before, value)
                return f"{OTHER[what]}: {name} is {now} now, and was {then}"
    return ""


def same(a: Any, b: Any) -> bool:
    """Sums may be of another machine"""
    if isinstance(a, float) and isinstance(b, float):
        return a == b or math.isclose(a, b, rel_tol=1e-6, abs_tol=1e-9)
    if isinstance(a, (list, tuple)) and isinstance(b, (list, tuple)):
        return len(a) == len(b) and all(map(same, a, b))
    return bool(a == b)


def differing(a: Any, b: Any) -> str:
    """Of two dicts the entries of the first one that the other has not."""
    if isinstance(a, dict) and isinstance(b, dict):
        a = {k: v for k, v in a.items() if k not in b or not same(v, b[k])}
    words = repr(a)
    return words if len(words) <= 100 else words[:97] + "…"
