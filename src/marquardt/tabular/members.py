"""Members of a committee, trained together: Levenberg–Marquardt with a dense matrix for each, and evidence.

Every member k minimises βₖΣwℓ + ½Σαₖθ² over the samples that it is given, each with λ, α and β of its own. All of them
go through the same operations in one call, for on small tables it is the calls that take time.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from .law import Law
from .network import Network

# Numbers of rows that are formed at a time: beyond the caches nothing is gained by more.
CHUNK = 4_000_000

# Damping in units of the mean of the diagonal of H, to begin with; and what a step that fails or succeeds makes of it.
LAMBDA, UP, DOWN, MOST = 1.0, 4.0, 0.25, 1e10

# α to begin with, with inputs and targets of variance 1, and its bounds.
ALPHA, LOW, HIGH = 0.1, 1e-6, 1e8

# Of all targets at least this share is left for the noise, however many parameters fit them.
LEFT = 0.05

# Steps that gain less than this share of the objective: after a few of them a member is at its end.
SMALL, FEW = 1e-5, 5

# A new least error is one that is lower by more than this share: others do not put off the end.
BETTER = 1e-3


@dataclass(frozen=True)
class Given:
    """Of each member: inputs (k, N, d), targets (k, N, c) or classes (k, N), weights (k, N), 0 for none."""

    x: Tensor
    y: Tensor
    weight: Tensor

    def of(self, members: Tensor) -> Given:
        return Given(self.x[members], self.y[members], self.weight[members])

    def some(self, chosen: Tensor) -> Given:
        return Given(self.x[:, chosen], self.y[:, chosen], self.weight[:, chosen])


@dataclass(frozen=True)
class Limits:
    """How far to train."""

    steps: int
    patience: int
    every: int = 3  # steps from one estimate of α and β to the next
    rows: int | None = None  # of the data in G, drawn anew for every step; None is all of them


@dataclass
class Members:
    """Where the members are, at their best on what was held out."""

    network: Network
    law: Law
    theta: Tensor  # (k, n)
    alpha: Tensor  # (k, groups)
    beta: Tensor  # (k,)
    groups: Tensor  # (n,)
    best_step: Tensor  # (k,)
    error: Tensor  # (k,) of what was held out; of the data if nothing was
    gamma: Tensor  # (k,)
    root: Tensor | None = None  # R with H⁻¹ = RᵀR: (k, n, n)
    steps: list[list[tuple[float, float, float, bool]]] = field(default_factory=list)  # by member: see Descent.write

    def outputs(self, x: Tensor) -> Tensor:
        return self.network.outputs(self.theta, x)

    def only(self, i: int) -> Members:
        """One of them, to predict"""
        root = None if self.root is None else self.root[i : i + 1]
        return replace(self, theta=self.theta[i : i + 1], beta=self.beta[i : i + 1], root=root)

    def among(self, kept: Tensor) -> Members:
        """Some of them: kept (k,) is true for those"""
        names = ("theta", "alpha", "beta", "best_step", "error", "gamma")
        steps = [s for s, one in zip(self.steps, kept.tolist(), strict=True) if one]
        root = None if self.root is None else self.root[kept]
        return replace(self, **{name: getattr(self, name)[kept] for name in names}, root=root, steps=steps)

    def variance(self, x: Tensor) -> Tensor:
        """√β·diag JH⁻¹Jᵀ of the outputs: (k, N, c)

        With β it would be in units of the noise, and without in those of the targets. Members that train longer, on
        more samples, have a larger β, by what they have learnt and by what they fit too closely: half of each.
        """
        c = self.network.sizes[-1]
        if self.root is None:
            return self.theta.new_zeros(len(self.theta), x.shape[-2], c)
        found = []
        for i in range(len(self.theta)):
            theta, R = self.theta[i : i + 1], self.root[i].double()
            size = max(1, CHUNK // (self.network.n * c))
            parts = [jacobian(self.network, theta, part) @ R.T for part in own(x, i).split(size)]
            found.append(torch.cat([p.square().sum(-1) for p in parts]))
        together: Tensor = torch.stack(found).unflatten(1, (-1, c))
        return self.beta[:, None, None].sqrt() * together


def own(x: Tensor, member: int) -> Tensor:
    """The inputs of one member: all have the same, or each its own"""
    return x if x.ndim == 2 else x[member]


def jacobian(network: Network, theta: Tensor, x: Tensor) -> Tensor:
    """Of one member: (N·c, n)"""
    z, inputs, slopes = network.passed(theta, x)
    c = z.shape[-1]
    return network.rows(theta, inputs, slopes, torch.eye(c, dtype=z.dtype).expand(1, len(x), c, c))[0]


class Descent:
    """The loop over steps. `theta` is replaced for each member by what is better on its objective."""

    def __init__(
        self, network: Network, law: Law, groups: str, data: Given, held: Given | None, plan: Limits,
        generator: torch.Generator,
    ) -> None:  # fmt: skip
        self.network, self.law, self.data, self.held, self.plan = network, law, data, held, plan
        self.generator = generator
        k, n = len(data.x), network.n
        self.groups = network.groups(groups)
        self.member_of = torch.nn.functional.one_hot(self.groups).double()  # (n, groups)
        self.counts = self.member_of.sum(0)
        self.theta = network.drawn(k, generator)
        self.alpha = self.theta.new_full((k, len(self.counts)), ALPHA)
        self.beta, self.lam = self.theta.new_ones(k), self.theta.new_full((k,), LAMBDA)
        self.targets = data.weight.sum(1) * (data.y.shape[2] if data.y.ndim == 3 else 1)
        self.G, self.g = self.theta.new_zeros(k, n, n), self.theta.new_zeros(k, n)
        self.loss, self.gamma = self.theta.new_zeros(k), self.theta.new_full((k,), float(n))
        self.moved = torch.ones(k, dtype=torch.bool)  # G and g are of another θ
        self.active = torch.ones(k, dtype=torch.bool)
        self.least = self.theta.new_full((k,), math.inf)
        self.error = self.theta.new_full((k,), math.nan)
        self.mark, self.since = self.least.clone(), torch.zeros(k, dtype=torch.long)
        self.quiet = torch.zeros(k, dtype=torch.long)  # accepted steps that gained next to nothing
        self.best = Members(
            network, law, self.theta.clone(), self.alpha.clone(), self.beta.clone(), self.groups,
            torch.zeros(k, dtype=torch.long), self.least.clone(), self.gamma.clone(), None, [[] for _ in range(k)],
        )  # fmt: skip

    def run(self, watch: Callable[[int, Members, bool], None] | None = None) -> Members:
        self.compare(torch.arange(len(self.theta)), 0)
        for step in range(1, self.plan.steps + 1):
            some = self.active.nonzero()[:, 0]
            if not len(some):
                break
            self.linearise(some[self.moved[some]])
            if step > 1 and (step - 1) % self.plan.every == 0:
                self.estimate(some)
            accepted = self.move(some)
            self.compare(some[accepted], step)
            self.write(some, accepted)
            self.active &= (step - self.since <= self.plan.patience) & (self.quiet < FEW) & (self.lam < MOST)
            if watch is not None:
                watch(step, self.best, step == self.plan.steps or not bool(self.active.any()))
        self.finish()
        return self.best

    # One step.

    def linearise(self, members: Tensor) -> None:
        """Σwℓ, its gradient, and G = Σw·JᵀSSᵀJ, of some members"""
        drawn, scale = self.drawn_rows()
        per = max(1, CHUNK // (self.network.n * len(drawn)))
        for part in members.split(per):
            theta, data = self.theta[part], self.data.of(part)
            z, inputs, slopes = self.network.passed(theta, data.x)
            self.loss[part] = (data.weight * self.law.value(z, data.y)).sum(1)
            back = data.weight[..., None] * self.law.slope(z, data.y)
            self.g[part] = self.network.gradient(theta, inputs, slopes, back)
            self.G[part] = scale * self.curvature(theta, data, z, inputs, slopes, drawn)
        self.moved[members] = False

    def drawn_rows(self) -> tuple[Tensor, float]:
        """Which samples and which rows of their roots are in G, as numbers below N·rank, and by what they count"""
        N, rank = self.data.x.shape[1], self.law.rank
        wanted = self.plan.rows
        if wanted is None or wanted >= N * rank:
            return torch.arange(N), 1.0
        chosen = torch.randperm(N, generator=self.generator)[: max(1, wanted // self.probes)]
        return chosen.sort().values, N / len(chosen)

    @property
    def probes(self) -> int:
        """Rows of one sample: all of its root, or one that is drawn if G does not have all samples"""
        N, rank = self.data.x.shape[1], self.law.rank
        return rank if self.plan.rows is None or self.plan.rows >= N * rank or rank <= 2 else 1

    def curvature(
        self, theta: Tensor, data: Given, z: Tensor, inputs: list[Tensor], slopes: list[Tensor], drawn: Tensor
    ) -> Tensor:
        if len(drawn) < z.shape[1]:
            z, data = z[:, drawn], data.some(drawn)
            inputs, slopes = [a[:, drawn] for a in inputs], [s[:, drawn] for s in slopes]
        back = self.law.root(z)  # (k, N, rank, c)
        if self.probes < self.law.rank:  # E[εεᵀ] = 1
            signs = torch.randint(0, 2, back.shape[:3], generator=self.generator).to(z) * 2 - 1
            back = (signs[..., None] * back).sum(2, keepdim=True)
        J = self.network.rows(theta, inputs, slopes, data.weight.sqrt()[..., None, None] * back)
        return J.mT @ J

    def estimate(self, some: Tensor) -> None:
        """γ = n − α tr H⁻¹ by group, α = γ/‖θ‖², β = (N − γ)/Σwr² (MacKay, 1992)"""
        alpha, theta = self.alpha[some], self.theta[some]
        L, info = torch.linalg.cholesky_ex(self.hessian(some))
        variances = torch.cholesky_inverse(L).diagonal(dim1=1, dim2=2)
        gamma = (self.counts - alpha * (variances @ self.member_of)).clamp(min=1e-6).minimum(self.counts)
        good = (info == 0) & gamma.isfinite().all(1)
        some, gamma, theta = some[good], gamma[good], theta[good]
        self.gamma[some] = gamma.sum(1)
        self.alpha[some] = (gamma / (theta.square() @ self.member_of + 1e-12)).clamp(LOW, HIGH)
        if self.law.noisy:
            N = self.targets[some]
            left = (N - self.gamma[some]).maximum(LEFT * N)
            self.beta[some] = (left / (2 * self.loss[some]).maximum(1e-12 * N)).clamp(max=1e12)

    def hessian(self, some: Tensor) -> Tensor:
        """βG + diag α: (k, n, n)"""
        H = self.beta[some, None, None] * self.G[some]
        H.diagonal(dim1=1, dim2=2).add_(self.alpha[some][:, self.groups])
        return H

    def move(self, some: Tensor) -> Tensor:
        """Which members accepted a step (k,)"""
        alpha, beta, theta = self.alpha[some][:, self.groups], self.beta[some], self.theta[some]
        H = self.hessian(some)
        line = H.diagonal(dim1=1, dim2=2)
        line.add_((self.lam[some] * line.mean(1))[:, None])
        L, info = torch.linalg.cholesky_ex(H)
        g = beta[:, None] * self.g[some] + alpha * theta
        new = theta - torch.cholesky_solve(g[..., None], L)[..., 0]
        data = self.data.of(some) if len(some) < len(self.theta) else self.data
        loss = (data.weight * self.law.value(self.network.outputs(new, data.x), data.y)).sum(1)
        before = beta * self.loss[some] + 0.5 * (alpha * theta.square()).sum(1)
        after = beta * loss + 0.5 * (alpha * new.square()).sum(1)
        accepted: Tensor = (info == 0) & (after < before)
        self.lam[some] = (self.lam[some] * torch.where(accepted, DOWN, UP)).clamp(1e-12, MOST)
        taken = some[accepted]
        self.theta[taken], self.moved[taken] = new[accepted], True
        self.loss[taken] = loss[accepted]
        small = before - after < SMALL * before.abs()
        self.quiet[some] = torch.where(accepted, torch.where(small, self.quiet[some] + 1, 0), self.quiet[some])
        return accepted

    # The best weights.

    def compare(self, members: Tensor, step: int) -> None:
        """Members that are better than ever on what they hold out are kept"""
        if not len(members):
            return
        if self.held is None:
            error = self.loss[members] / self.targets[members]
            better = torch.ones_like(members, dtype=torch.bool)
            self.since[members] = step
        else:
            held = self.held.of(members) if len(members) < len(self.theta) else self.held
            errors = self.law.error(self.network.outputs(self.theta[members], held.x), held.y)
            error = (held.weight * errors).sum(1) / held.weight.sum(1)
            better = error < self.least[members]
            self.error[members] = error
            clearly = error < self.mark[members] * (1 - BETTER)
            self.mark[members[clearly]], self.since[members[clearly]] = error[clearly], step
        kept, best = members[better], self.best
        self.least[kept] = error[better]
        best.error[kept], best.best_step[kept] = error[better], step
        best.theta[kept], best.alpha[kept], best.beta[kept] = self.theta[kept], self.alpha[kept], self.beta[kept]
        best.gamma[kept] = self.gamma[kept]

    def write(self, some: Tensor, accepted: Tensor) -> None:
        """Loss, error of what is held out, λ and whether the step was accepted"""
        rows = torch.stack((self.loss / self.targets, self.error, self.lam), 1)[some].tolist()
        for i, row, was in zip(some.tolist(), rows, accepted.tolist(), strict=True):
            self.best.steps[i].append((*row, was))

    def finish(self) -> None:
        """H at the best weights, and the root of its inverse"""
        best = self.best
        self.theta, self.alpha, self.beta = best.theta, best.alpha, best.beta
        everyone = torch.arange(len(self.theta))
        self.linearise(everyone)
        H = self.hessian(everyone)
        line = H.diagonal(dim1=1, dim2=2)
        line.add_(1e-10 * line.amax(1, keepdim=True))
        L = torch.linalg.cholesky(H)
        eye = torch.eye(self.network.n, dtype=L.dtype).expand_as(L)
        best.root = torch.linalg.solve_triangular(L, eye, upper=False).float()
