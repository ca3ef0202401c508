"""J̃ = SᵀJ of one forward pass: products with it, and the ways to its rows."""

from __future__ import annotations

import warnings
from collections.abc import Hashable, Mapping, Sequence
from typing import TypeVar

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

from ..layers import rows_by_loop, rows_by_vmap, rows_in_batches, rows_in_parts
from ..memory import out_of_memory
from .passes import Pass, gradients

# Ways to the rows of parameters that the graph does not show, fastest first; the first that is proven right is taken.
PATHS = ("vmap", "parts", "rows", "loop")

Key = TypeVar("Key", bound=Hashable)


class Jacobian:
    """J̃ in Σ-units, without the normaliser: R rows for each of the N samples of a pass, m = R·N."""

    def __init__(self, forward: Pass, S: Tensor) -> None:
        self.forward, self.S = forward, S  # (R, N, *out)
        self.R, self.N = S.shape[:2]
        self.m = self.R * self.N
        self.parameters = forward.objective.parameters.whole
        self.ranks = forward.objective.parameters.ranks  # that make the same passes, for they share the weights

    def seen(self, Jv: Tensor | None) -> Tensor:
        """Sᵀ(Jv): (N, *out) → (R, N)"""
        S = self.S
        return S.new_zeros(S.shape[:2]) if Jv is None else (S * Jv).reshape(*S.shape[:2], -1).sum(2)

    def cotangent(self, w: Tensor) -> Tensor:
        """Sw: (R, N) → (N, *out)"""
        return torch.einsum("rn,rn...->n...", w, self.S)

    def adjoint(self, w: Tensor) -> Tensor:
        """Jᵀ(Sw) by a backward pass: (R, N) → (n,)"""
        return self.forward.vjp(self.cotangent(w))

    def random(self, seed: int = 0) -> Tensor:
        """One number for every row, the same every time: (R, N)"""
        generator = torch.Generator("cpu").manual_seed(seed)
        return torch.randn(self.S.shape[:2], generator=generator, dtype=torch.float64, device="cpu").to(self.S)

    def shorten(self) -> None:
        """Fewer numbers in δ, to be asked for before δ is. A GPU has all rows in one pass and gains nothing; for one
        row it costs as much as it saves."""
        if self.R > 1 and self.S.device.type == "cpu" and not self.ranks.several:
            self.forward.watch.shorten(self.forward.graph)

    def gradients(self, edges: Sequence[GradientEdge], w: Tensor) -> tuple[Tensor | None, ...]:
        """Of z·w at these edges, None if z does not depend on one: (N, *out)"""
        if self.ranks.several:
            self.ranks.same("a backward pass")
        # Where a pass ends, torch takes the gradient after the tensor's hook, and where it goes on before it: with the
        # parameters it goes on behind all edges, whichever they are.
        if self.forward.watch.hooks:
            return gradients(self.forward.graph, [*edges, *self.parameters.tensors], w)[: len(edges)]
        return gradients(self.forward.graph, edges, w)

    def at(self, edges: Sequence[GradientEdge]) -> Sequence[Tensor | None]:
        """δ: gradients of the R rows of every sample at each of these edges, (R, *output)."""
        if self.R == 1 and edges:
            return [None if d is None else d[None] for d in self.gradients(edges, self.S[0])]
        return self._deltas({("call", i): edge for i, edge in enumerate(edges)}, self.S) if edges else []

    def deltas(self, edges: Mapping[Key, GradientEdge], samples: Sequence[slice] = ()) -> dict[Key, Tensor | None]:
        """δ: gradients of the R rows of every sample at each of these edges, (R, *output), or of some samples only."""
        if not edges:
            return {}
        S = self.S
        if samples:
            S = torch.zeros_like(self.S)
            for some in samples:
                S[:, some] = self.S[:, some]
        return dict(zip(edges, self._deltas(edges, S), strict=True))

    def _deltas(self, edges: Mapping[Key, GradientEdge], S: Tensor) -> Sequence[Tensor | None]:
        graph, known, wanted = self.forward.graph, self.forward.known, list(edges.values())
        if S.shape[0] == 1:
            return [None if d is None else d[None] for d in self.gradients(wanted, S[0])]
        # On a CPU one backward pass after the other is faster, and weights are gathered in ordinary ones alone.
        if known.batched_rows and S.is_cuda and not self.ranks.several and not self.forward.watch.hooks:
            try:
                unused = known.proof.unused
                if not unused.keys() >= edges.keys():
                    unused |= {key: d is None for key, d in zip(edges, self.gradients(wanted, S[0]), strict=True)}
                used = [edge for key, edge in edges.items() if not unused[key]]
                with warnings.catch_warnings():
                    warnings.filterwarnings("ignore", "There is a performance drop")
                    found = iter(torch.func.vmap(lambda s: torch.autograd.grad(graph, used, s, retain_graph=True))(S))
                return [None if unused[key] else next(found) for key in edges]
            except RuntimeError as error:
                if out_of_memory(error):
                    raise
                known.batched_rows = False  # an operation whose backward vmap refuses
        # In memory the rows of a sample stand together: that is how they are used. Each goes to its place at once, so
        # that the next one finds its memory warm.
        places: list[Tensor | None] = []
        for r, s in enumerate(S):
            row = self.gradients(wanted, s)
            places = places or [None if d is None else d.new_empty(len(d), len(S), *d.shape[1:]) for d in row]
            for place, d in zip(places, row, strict=True):
                if place is not None and d is not None:
                    place[:, r] = d
        return [None if place is None else place.transpose(0, 1) for place in places]

    def explicit(self, path: str, indices: Sequence[int]) -> Tensor:
        """The rows of some parameters, written out: (m, their columns)"""
        return self._explicit(path, indices).to(self.parameters.dtype)

    def _explicit(self, path: str, indices: Sequence[int]) -> Tensor:
        params = [self.parameters.tensors[i] for i in indices]
        objective, inputs = self.forward.objective, self.forward.batch.inputs
        if path == "vmap":
            return rows_by_vmap(objective.model, params, objective.of, inputs, self.S)
        if path == "parts":
            if self.forward.chance.drawn:
                raise ValueError("a random model draws other numbers in parts")
            return rows_in_parts(objective.model, params, objective.of, inputs, self.S)
        return (rows_in_batches if path == "rows" else rows_by_loop)(self.forward.graph, params, self.S)
