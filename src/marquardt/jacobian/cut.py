"""Whether a batch may go through the model in parts: what comes out for a sample must not depend on the others that go
with it, nor on how many these are."""

from __future__ import annotations

import random
from collections.abc import Sequence

import torch
from torch import Tensor

from .. import tolerances
from ..layers.apart import keeps_apart
from ..model.anatomy import Draws, Moment, Slopes
from ..model.batch import Batch
from ..surroundings import unless_foreign
from .objective import Objective
from .passes import Coupled, Known, Pass, again

# Samples that are looked at in every step, and kinds of passes of which is known whether that will do.
FEW, KEPT = 8, 1024

# Where random numbers are drawn: how often a half of the samples stays while others take the places beside them.
ROUNDS = 4


class Made:
    """Outputs, and what repeats the pass that they came from, without its graph."""

    def __init__(self, piece: Pass) -> None:
        self.objective, self.inputs, self.slopes = piece.objective, piece.batch.inputs, piece.slopes
        self.before, self.z = piece.before, piece.z

    def outputs(self, buffers: Moment) -> Tensor:
        """With the same random numbers, and the buffers of some moment"""
        return outputs(self.objective, self.inputs, self.before, buffers, self.slopes)


class Cut:
    """A batch whose parts go through the model one after the other.

    Some of its samples are sent through the model once more, in other company: in every step a few of them, and all of
    them if the model does anything that it has not done before, or if numbers decide in it what a sample sees.
    """

    def __init__(self, batch: Batch, size: int, known: Known, seed: int) -> None:
        self.batch, self.size, self.known = batch, size, known
        # Other numbers of samples, two of them: whatever permutes samples is no permutation of one, and two that change
        # places twice are where they were.
        self.together = max(3, size + 1)
        self.others = size - 1 if size > 3 else self.together + 1
        self.chosen = random.Random(seed)
        self.z: list[Tensor] = []  # by part
        self.thorough = False

    def saw(self, piece: Pass) -> None:
        """The next part, while it has its graph."""
        if not self.z:
            self.objective, self.before, self.after = piece.objective, piece.before, piece.after
            self.slopes, self.chance, self.coarsest = piece.slopes, piece.chance, piece.coarsest
        self.z.append(piece.z)
        self.last = Made(piece)
        self.thorough = self.thorough or not familiar(piece, self.known, self.size)

    def check(self, what: str, way_out: str, thorough: bool = True) -> None:
        """A Coupled error if parts are another function than the batch: `what` asked for parts, and what would not."""
        self.what, self.way_out = what, way_out
        self.thorough = self.thorough and thorough
        N = sum(map(len, self.z))
        if N < 2 or self.batch.samples != N:
            return
        here = self._now()
        try:
            self._check_buffers(self.before if self.z[1:] else self.after)
            if self.chance.drawn or self._in_other_company(torch.cat(self.z), here):
                self._beside_others(N)
        finally:
            here.restore(gently=True)

    def check_picked(self, part: Pass, index: Tensor, what: str, way_out: str) -> None:
        self.what, self.way_out = what, way_out
        here = part.moment()
        try:
            self.last = Made(part)
            self._check_buffers(self.before)
            if self.chance.drawn:
                self._beside_others(len(self.z[0]))
            elif not self._alike(part.z, self.z[0][index]):
                again = outputs(part.objective, part.batch.inputs, part.before, part.before, ())
                if self._alike(part.z, again):
                    raise self._error(COUPLED)
        finally:
            here.restore(gently=True)

    def _in_other_company(self, z: Tensor, here: Moment) -> bool:
        """Compares outputs of samples of different parts that go together; True if that cannot tell, because the model
        takes no such batch, or draws random numbers in it."""
        N, size = len(z), min(len(z), self.together)
        groups = [self.chosen.sample(range(N), min(size, FEW))]
        if self.thorough:
            K = -(-N // size)
            order = [i for k in range(K) for i in range(k, N, K)]  # neighbours are far apart
            groups = _in_turn(order, size, min(N, self.others))
        for group in groups:
            try:
                found = self._outputs(group, self.before)
            except Exception as error:  # only of this number of samples, perhaps
                unless_foreign(error)
                return True
            if found.shape != z[group].shape or self._drew(here, group):
                return True
            if not self._alike(found, z[group]) and self._alike(found, self._outputs(group, self.before)):
                raise self._error(COUPLED)
        return False

    def _drew(self, here: Moment, group: Sequence[int]) -> bool:
        """Whether the model has drawn random numbers, and not another thread."""
        if not here.drew_since():
            return False
        with Draws() as draws:  # type: ignore[no-untyped-call]
            self._outputs(group, self.before)
        self.chance.drawn = bool(draws.drew)
        return self.chance.drawn

    def _beside_others(self, N: int) -> None:
        """With the same random numbers: the same samples in the same places, beside others."""
        if N < 2:
            return
        group = list(range(min(N, self.together if self.thorough else min(self.together, FEW))))
        try:
            self._outputs(group, self.before)
        except Exception as error:
            unless_foreign(error)
            if self.size == 1:  # a model of single samples has no other batch
                return
            group = list(range(min(N, self.size)))
        rank = dict(zip(self.chosen.sample(group, len(group)), group, strict=True))
        bits = (len(group) - 1).bit_length()  # with all of them any two are apart once
        numbers = self.before
        for k in range(ROUNDS if self.thorough else 1):
            bit = k % bits
            first = self._outputs(group, self.before, numbers)
            later = self._now()
            for side in (0, 1) if self.thorough else (0,):
                kept = [i for i in group if rank[i] >> bit & 1 == side]
                beside = [i if i in kept else (i + max(1, len(group) // 2)) % N for i in group]
                if not self._alike(self._outputs(beside, self.before, numbers)[kept], first[kept]):
                    raise self._error(COUPLED)
            numbers = later  # others for the next: a permutation may leave the samples where they are

    def _check_buffers(self, other: Moment) -> None:
        """The last part has met the buffers as all others have left them: with those of another moment its outputs must
        be the very same, for nothing but the buffers differs."""
        if self.last.before.same_buffers(other):
            return
        found = self.last.outputs(other)
        if distance(found, self.last.z) == 0:
            return
        here = self.last.outputs(self.last.before)  # as the model is called without a watch
        if distance(found, here) > 10 * distance(self.last.outputs(self.last.before), here):
            name = other.changed(self.last.before, self.objective.model)
            raise self._error(MOVING.format(name))

    def _alike(self, found: Tensor, z: Tensor) -> bool:
        return alike(found, z, self.coarsest)

    def _error(self, why: str) -> Coupled:
        return Coupled(f"{self.what}: {why}: {self.way_out}")

    def _now(self) -> Moment:
        return Moment(self.objective.model, self.objective.parameters.device, self.chance)

    def _outputs(self, group: Sequence[int], buffers: Moment, numbers: Moment | None = None) -> Tensor:
        """With the buffers of a moment, and the random numbers that came then or at another one"""
        n = len(self.z[0])
        slopes = [s.take(torch.arange(len(group)) % n, n) for s in self.slopes]
        inputs = self.batch.take(torch.tensor(group)).inputs
        return outputs(self.objective, inputs, numbers or self.before, buffers, slopes)


def _in_turn(order: list[int], first: int, second: int) -> list[list[int]]:
    """Groups of two sizes by turns; the last ones begin again at the first sample, so that they are whole."""
    groups: list[list[int]] = []
    start = 0
    while start < len(order) or len(groups) < 2:
        size = second if len(groups) % 2 else first
        groups.append([order[i % len(order)] for i in range(start, start + size)])
        start += size
    return groups


def check_picked(whole: Pass, part: Pass, index: Tensor, known: Known, seed: int, what: str) -> None:
    """The same of some samples that went through the model by themselves, after all of them."""
    ranks = whole.objective.parameters.ranks
    if ranks.several:  # they make the same passes, and these are enough unless the model draws random numbers
        if not ranks.all(whole.chance.drawn or alike(part.z, whole.z[index], whole.coarsest)):
            raise Coupled(f"{what}: {COUPLED}: {ALL_ROWS}")
        return
    cut = Cut(whole.batch, whole.N, known, seed)
    cut.saw(whole)
    cut.check_picked(part, index, what, ALL_ROWS)


ALL_ROWS = "take the rows of all samples, such as rows=mq.Sampled(1)"
COUPLED = (
    "the outputs of a sample depend on the other samples of its batch, so that a part of the batch is another loss"
)
MOVING = (
    "every forward pass changes buffers that the outputs depend on, such as {!r}, so that the next part of the batch "
    "sees another model, as under spectral_norm in train mode"
)


def outputs(objective: Objective, inputs: object, start: Moment, buffers: Moment, slopes: Sequence[Slopes]) -> Tensor:
    """z of these inputs, with the random numbers of one moment and the buffers of another"""
    start.restore(buffers=False)
    with torch.enable_grad():  # the model may differentiate itself
        return again(objective, inputs, buffers, slopes).detach()


def alike(found: Tensor, z: Tensor, dtype: torch.dtype) -> bool:
    """Whether these are the outputs of the same samples, up to rounding; what is not finite in both is the same."""
    found, z = (torch.nan_to_num(t.double(), 0.0, 0.0, 0.0).reshape(len(t), -1) for t in (found, z))
    return bool((found - z).norm(dim=1).max() <= tolerances.of_parts(dtype, z.is_cuda) * z.norm(dim=1).max())


def distance(found: Tensor, z: Tensor) -> float:
    """Between outputs; what is not finite in both is the same."""
    found, z = (torch.nan_to_num(t.double(), 0.0, 0.0, 0.0).flatten() for t in (found, z))
    return float((found - z).abs().max())


def familiar(forward: Pass, known: Known, size: int) -> bool:
    """Whether there was such a pass before, and the structure of its graph keeps samples apart."""
    key = forward.walk.structure, forward.seen
    if key in known.parts:
        return known.parts[key]
    if len(known.parts) >= KEPT:
        known.parts.clear()
    known.parts[key] = keeps_apart(forward.walk, forward.N) if forward.N > 1 else size > 1
    return False
