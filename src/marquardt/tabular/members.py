"""Networks of one shape, several at once: the members of a committee, and the two ways in which they are trained.

θ is (k, n), a row for each of the k members, and outputs are (k, N, c): on small tables it is the calls that take time,
and one call does for all of the members.

`Descent` trains them together: Levenberg–Marquardt with a dense matrix for each, and evidence. Every member k minimises
βₖΣwℓ + ½Σαₖθ² over the samples that it is given, with a λ, α and β for each. `trained_wide` trains networks whose
matrices would be too large, one after the other by `mq.fit`, with Kronecker factors.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..curvature import Kronecker
from ..files import typed
from ..losses import BinaryCrossEntropy, CrossEntropy, Loss, SquaredError
from ..losses.base import spread
from ..training import fit

# The numbers in rows that are formed at a time: beyond the caches nothing is gained by more.
CHUNK = 4_000_000

# The first damping in units of the mean of the diagonal of H; and what a step that fails or succeeds makes of it.
LAMBDA, UP, DOWN, MOST = 1.0, 4.0, 0.25, 1e10

# The first α, with inputs and targets of variance 1, and its bounds.
ALPHA, LOW, HIGH = 0.1, 1e-6, 1e8

# At least this share of all targets is left for the noise, however many parameters fit them.
LEFT = 0.05

# Steps from one estimate of α and β to the next
EVERY = 3

# Steps that gain less than this share of the objective: after a few of them a member is at its end.
SMALL, FEW = 1e-5, 5

# A new least error is one that is lower by more than this share: others do not put off the end.
BETTER = 1e-3

# Wide networks: in float32 half the time, and such tables are not without noise. Their weight decay, in units of the
# mean loss, need not be exact: what is held out decides when to stop.
DTYPE, DECAY = torch.float32, 0.003

# Called with the step, the members at their best, and whether it was the last step
Seen = Callable[[int, "Members", bool], None]


class Activation(NamedTuple):
    value: Callable[[Tensor], Tensor]
    slope: Callable[[Tensor, Tensor], Tensor]  # f′(z), from z and f(z)
    module: type[nn.Module]


def silu_slope(z: Tensor, a: Tensor) -> Tensor:
    """σ + a(1 − σ)"""
    s = torch.sigmoid(z)
    return s.addcmul_(a, 1 - s)


ACTIVATIONS = {
    "tanh": Activation(torch.tanh, lambda z, a: 1 - a * a, nn.Tanh),
    "silu": Activation(F.silu, silu_slope, nn.SiLU),
    "relu": Activation(torch.relu, lambda z, a: (z > 0).to(z), nn.ReLU),
    "identity": Activation(lambda z: z, lambda z, a: torch.ones_like(z), nn.Identity),
}


@dataclass(frozen=True)
class Network:
    """z = Wₗ f(… f(W₁x + b₁) …) + bₗ, for inputs (k, N, d) or (N, d)."""

    sizes: tuple[int, ...]  # inputs, hidden layers, outputs
    activation: str

    @cached_property
    def places(self) -> list[tuple[int, int, int]]:
        """Where the weight of a layer begins in θ, where its bias begins, and where that ends"""
        found, at = [], 0
        for a, b in pairwise(self.sizes):
            found.append((at, at + a * b, at + a * b + b))
            at += a * b + b
        return found

    @property
    def n(self) -> int:
        return self.places[-1][2]

    def drawn(self, k: int, generator: torch.Generator) -> Tensor:
        """θ to begin with, as nn.Linear has it: uniform in ±1/√inputs, (k, n)"""
        parts = []
        for (begin, _, end), a in zip(self.places, self.sizes, strict=False):
            u = torch.rand(k, end - begin, generator=generator, dtype=torch.float64)
            parts.append((2 * u - 1) / math.sqrt(max(a, 1)))
        return torch.cat(parts, 1)

    def layer(self, theta: Tensor, i: int) -> tuple[Tensor, Tensor]:
        """W (k, outputs, inputs) and b (k, 1, outputs)"""
        begin, middle, end = self.places[i]
        W: Tensor = theta[:, begin:middle].unflatten(1, (self.sizes[i + 1], self.sizes[i]))
        return W, theta[:, None, middle:end]

    def outputs(self, theta: Tensor, x: Tensor) -> Tensor:
        """z: (k, N, c)"""
        f, a = ACTIVATIONS[self.activation].value, x.expand(len(theta), *x.shape[-2:])
        for i in range(len(self.places)):
            W, b = self.layer(theta, i)
            a = torch.baddbmm(b, f(a) if i else a, W.mT)
        return a

    def passed(self, theta: Tensor, x: Tensor) -> tuple[Tensor, list[Tensor], list[Tensor]]:
        """z (k, N, c), the input of every layer, and the derivative of every activation"""
        f, inputs, slopes = ACTIVATIONS[self.activation], [x.expand(len(theta), *x.shape[-2:])], []
        for i in range(len(self.places)):
            W, b = self.layer(theta, i)
            z = torch.baddbmm(b, inputs[i], W.mT)
            if i < len(self.places) - 1:
                inputs.append(f.value(z))
                slopes.append(f.slope(z, inputs[-1]))
        return z, inputs, slopes

    def gradient(self, theta: Tensor, inputs: list[Tensor], slopes: list[Tensor], back: Tensor) -> Tensor:
        """Σ Jᵀ·back over the samples, `back` (k, N, c): (k, n)"""
        parts: list[Tensor] = []
        for i in reversed(range(len(self.places))):
            parts[:0] = [(back.mT @ inputs[i]).flatten(1), back.sum(1)]
            if i:
                back = (back @ self.layer(theta, i)[0]) * slopes[i - 1]
        return torch.cat(parts, 1)

    def rows(self, theta: Tensor, inputs: list[Tensor], slopes: list[Tensor], back: Tensor) -> Tensor:
        """backᵀ·J of every sample, for R vectors each, `back` (k, N, R, c): (k, N·R, n)"""
        k, N, R, _ = back.shape
        found = back.new_empty(k, N, R, self.n)
        for i in reversed(range(len(self.places))):
            begin, middle, end = self.places[i]
            columns = found[..., begin:middle].unflatten(3, (self.sizes[i + 1], self.sizes[i]))
            torch.mul(back[..., None], inputs[i][:, :, None, None], out=columns)
            found[..., middle:end] = back
            if i:
                back = (back.flatten(1, 2) @ self.layer(theta, i)[0]).unflatten(1, (N, R)) * slopes[i - 1][:, :, None]
        return found.flatten(1, 2)

    def groups(self, kind: str) -> Tensor:
        """Which α every parameter has: one for "all"; or ("inputs") one for each input column of the first weight, and
        one for each other weight and bias. (n,)"""
        found, count = torch.zeros(self.n, dtype=torch.long), 0
        for i, (begin, middle, end) in enumerate(self.places if kind == "inputs" else ()):
            columns = 1 if i else self.sizes[0]
            found[begin:middle] = count + torch.arange(middle - begin) % columns
            found[middle:end] = count + columns
            count += columns + 1
        return found


# --- losses ---


@dataclass(frozen=True)
class Law:
    """A loss in the shapes of members: −log p(y|z) is β·factor·ℓ + a constant, and β = 1 for classes.

    z is (k, N, c), and so is y; or (k, N) for more than two classes.
    """

    loss: Loss
    outputs: int
    factor: float = 1.0

    @classmethod
    def of(cls, frequencies: Tensor | None, outputs: int) -> Law:
        """The loss of numbers, or of classes with these frequencies"""
        if frequencies is None:
            return cls(SquaredError(), outputs, 0.5)
        classes = len(frequencies)
        return cls(BinaryCrossEntropy(), 1) if classes == 2 else cls(CrossEntropy(), classes)

    def targets(self, y: Tensor) -> Tensor:
        """y as the loss takes it: one of two classes is a number"""
        return y[:, None].double() if isinstance(self.loss, BinaryCrossEntropy) else y

    def value(self, z: Tensor, y: Tensor) -> Tensor:
        """factor·ℓ of every sample: (k, N)"""
        ell: Tensor = self.loss.ell(z.flatten(0, 1), y.flatten(0, 1))
        return self.factor * ell.view(*z.shape[:2], -1).sum(-1)

    def slope(self, z: Tensor, y: Tensor) -> Tensor:
        """factor·∂ℓ/∂z: (k, N, c)"""
        return self.factor * self.loss.slope(z.flatten(0, 1), y.flatten(0, 1)).view_as(z)

    def root(self, z: Tensor, y: Tensor, generator: torch.Generator | None = None) -> Tensor:
        """Sᵀ with SSᵀ = factor·∂²ℓ/∂z²: (k, N, rows, c); with a generator its one row (Sε)ᵀ, E[εεᵀ] = 1, ε = ±1"""

        def signs(shape: tuple[int, ...]) -> Tensor:
            return torch.randint(0, 2, (1, *shape), generator=generator).to(z) * 2 - 1

        shape, z, y = z.shape[:2], z.flatten(0, 1), y.flatten(0, 1)
        if generator is None:
            rows = spread(self.loss, self.loss.root(z, y), z)[0]  # (rows, kN, c)
        else:
            rows = self.loss.ungroup(self.loss.mixed(z, y, None, signs), z)
        root: Tensor = math.sqrt(self.factor) * rows.transpose(0, 1).unflatten(0, shape)
        return root


Numbers = TwoClasses = Classes = Law  # by these names it is in pickled estimators of earlier versions


def probabilities(z: Tensor) -> Tensor:
    """The probabilities of the classes, from one logit or several: (…, classes)"""
    return torch.cat((torch.sigmoid(-z), torch.sigmoid(z)), -1) if z.shape[-1] == 1 else z.softmax(-1)


def softened(z: Tensor, variance: Tensor) -> Tensor:
    """Probabilities if every logit is normal around z, MacKay's approximation: p(z/√(1 + π/8·variance))"""
    return probabilities(z / (1 + math.pi / 8 * variance).sqrt())


# --- members ---


@dataclass(frozen=True)
class Given:
    """The samples of each member: inputs (k, N, d), targets as their law takes them, weights (k, N), 0 for none."""

    x: Tensor
    y: Tensor
    weight: Tensor

    def of(self, members: Tensor) -> Given:
        """Those of some members, which are in order"""
        if len(members) == len(self.x):
            return self
        return Given(self.x[members], self.y[members], self.weight[members])


@dataclass(frozen=True)
class Limits:
    """How far to train."""

    steps: int
    patience: int
    work: float = 0.0  # floating-point operations of a step of one member
    rows: int | None = None  # of the data in G, drawn anew for every step; None is all of them


@dataclass
class Members:
    """Where the members are, at their best on what was held out."""

    network: Network
    theta: Tensor  # (k, n)
    alpha: Tensor  # (k, groups)
    beta: Tensor  # (k,)
    groups: Tensor  # (n,)
    best_step: Tensor  # (k,)
    error: Tensor  # (k,) of what was held out; of the data if nothing was
    gamma: Tensor  # (k,)
    root: Tensor | None  # R with H⁻¹ = RᵀR: (k, n, n)
    steps: list[list[tuple[float, float, float, bool]]]  # loss, error of what is held out, λ, accepted; by member

    @classmethod
    def begun(cls, network: Network, theta: Tensor, alpha: Tensor, groups: Tensor) -> Members:
        k = len(theta)
        return cls(
            network, theta.clone(), alpha.clone(), theta.new_ones(k), groups, torch.zeros(k, dtype=torch.long),
            theta.new_full((k,), math.inf), theta.new_full((k,), float(network.n)), None, [[] for _ in range(k)],
        )  # fmt: skip

    def outputs(self, x: Tensor) -> Tensor:
        return self.network.outputs(self.theta, x)

    def among(self, chosen: Tensor) -> Members:
        """Some of them: chosen (k,) is true for those"""
        names = ("theta", "alpha", "beta", "best_step", "error", "gamma")
        steps = [s for s, one in zip(self.steps, chosen.tolist(), strict=True) if one]
        root = None if self.root is None else self.root[chosen]
        return replace(self, **{name: getattr(self, name)[chosen] for name in names}, root=root, steps=steps)

    def variance(self, x: Tensor) -> Tensor:
        """√β·diag JH⁻¹Jᵀ of the outputs, for x (N, d): (k, N, c)

        With β it would be in units of the noise, and without in those of the targets. Members that train longer, on
        more samples, have a larger β, by what they have learnt and by what they fit too closely: half of each.
        """
        network, c = self.network, self.network.sizes[-1]
        if self.root is None:
            return self.theta.new_zeros(len(self.theta), len(x), c)
        found = []
        for theta, R in zip(self.theta[:, None], self.root, strict=True):
            parts = []
            for part in x.split(max(1, CHUNK // (network.n * c))):
                _, inputs, slopes = network.passed(theta, part)
                J = network.rows(theta, inputs, slopes, torch.eye(c, dtype=x.dtype).expand(1, len(part), c, c))[0]
                parts.append((J @ R.double().T).square().sum(-1))
            found.append(torch.cat(parts))
        together: Tensor = torch.stack(found).unflatten(1, (-1, c))
        return self.beta[:, None, None].sqrt() * together


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
        self.error = self.theta.new_full((k,), math.nan)
        self.mark, self.since = self.theta.new_full((k,), math.inf), torch.zeros(k, dtype=torch.long)
        self.quiet = torch.zeros(k, dtype=torch.long)  # accepted steps that gained next to nothing
        self.best = Members.begun(network, self.theta, self.alpha, self.groups)

    def run(self, watch: Seen | None = None) -> Members:
        self.compare(torch.arange(len(self.theta)), 0)
        for step in range(1, self.plan.steps + 1):
            some = self.active.nonzero()[:, 0]
            if not len(some):
                break
            self.linearise(some[self.moved[some]])
            if step > 1 and (step - 1) % EVERY == 0:
                self.estimate(some)
            accepted = self.move(some)
            if bool(accepted.any()):
                self.compare(some[accepted], step)
            rows = torch.stack((self.loss / self.targets, self.error, self.lam), 1)[some].tolist()
            for i, row, was in zip(some.tolist(), rows, accepted.tolist(), strict=True):
                self.best.steps[i].append((*row, was))
            self.active &= (step - self.since <= self.plan.patience) & (self.quiet < FEW) & (self.lam < MOST)
            if watch is not None:
                watch(step, self.best, step == self.plan.steps or not bool(self.active.any()))
        self.finish()
        return self.best

    # --- one step ---

    def linearise(self, members: Tensor) -> None:
        """Σwℓ, its gradient, and G = Σw·JᵀSSᵀJ, of some members"""
        drawn, mixed = self.drawn_rows()
        scale = self.data.x.shape[1] / len(drawn)
        for part in members.split(max(1, CHUNK // (self.network.n * len(drawn)))) if len(members) else ():
            theta, data = self.theta[part], self.data.of(part)
            z, inputs, slopes = self.network.passed(theta, data.x)
            self.loss[part] = (data.weight * self.law.value(z, data.y)).sum(1)
            back = data.weight[..., None] * self.law.slope(z, data.y)
            self.g[part] = self.network.gradient(theta, inputs, slopes, back)
            weight, y = data.weight, data.y
            if len(drawn) < z.shape[1]:
                weight, y, z = weight[:, drawn], y[:, drawn], z[:, drawn]
                inputs, slopes = [a[:, drawn] for a in inputs], [s[:, drawn] for s in slopes]
            root = self.law.root(z, y, self.generator if mixed else None)
            J = self.network.rows(theta, inputs, slopes, weight.sqrt()[..., None, None] * root)
            self.G[part] = scale * (J.mT @ J)
        self.moved[members] = False

    def drawn_rows(self) -> tuple[Tensor, bool]:
        """The samples that are in G, and whether each has one row with random signs: those of more than two outputs if
        G does not have all of them"""
        N, outputs, wanted = self.data.x.shape[1], self.law.outputs, self.plan.rows
        if wanted is None or wanted >= N * outputs:
            return torch.arange(N), False
        count = outputs if outputs <= 2 else 1
        drawn = torch.randperm(N, generator=self.generator)[: max(1, wanted // count)].sort().values
        return drawn, count < outputs

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
        if self.law.loss.sum_of_squares:
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
        data = self.data.of(some)
        loss = (data.weight * self.law.value(self.network.outputs(new, data.x), data.y)).sum(1)
        before = beta * self.loss[some] + 0.5 * (alpha * theta.square()).sum(1)
        after = beta * loss + 0.5 * (alpha * new.square()).sum(1)
        accepted: Tensor = (info == 0) & (after < before)
        self.lam[some] = (self.lam[some] * torch.where(accepted, DOWN, UP)).clamp(1e-12, MOST)
        movers = some[accepted]
        self.theta[movers], self.moved[movers] = new[accepted], True
        self.loss[movers] = loss[accepted]
        small = before - after < SMALL * before.abs()
        self.quiet[some] = torch.where(accepted, torch.where(small, self.quiet[some] + 1, 0), self.quiet[some])
        return accepted

    # --- the best weights ---

    def compare(self, members: Tensor, step: int) -> None:
        """Members that are better than ever on what they hold out are kept"""
        if self.held is None:
            error = self.loss[members] / self.targets[members]
            better = torch.ones_like(members, dtype=torch.bool)
            self.since[members] = step
        else:
            held = self.held.of(members)
            errors = self.law.value(self.network.outputs(self.theta[members], held.x), held.y)
            error = (held.weight * errors).sum(1) / held.weight.sum(1)
            better = error < self.best.error[members]
            self.error[members] = error
            clearly = error < self.mark[members] * (1 - BETTER)
            self.mark[members[clearly]], self.since[members[clearly]] = error[clearly], step
        some, best = members[better], self.best
        best.error[some], best.best_step[some] = error[better], step
        for name in ("theta", "alpha", "beta", "gamma"):
            getattr(best, name)[some] = getattr(self, name)[some]

    def finish(self) -> None:
        """H at the best weights, and the root of its inverse"""
        best = self.best
        self.theta, self.alpha, self.beta = best.theta, best.alpha, best.beta
        everyone = torch.arange(len(self.theta))
        self.linearise(everyone)
        H = self.hessian(everyone)
        line = H.diagonal(dim1=1, dim2=2)
        line.add_(1e-10 * line.amax(1, keepdim=True))
        L, eye = torch.linalg.cholesky(H), torch.eye(self.network.n, dtype=H.dtype).expand_as(H)
        best.root = torch.linalg.solve_triangular(L, eye, upper=False).float()


# --- wide networks ---


def module_of(network: Network, theta: Tensor) -> nn.Sequential:
    """The same network as a module: θ (n,)"""
    layers: list[nn.Module] = []
    for i, (a, b) in enumerate(pairwise(network.sizes)):
        linear = nn.Linear(a, b, dtype=DTYPE)
        with torch.no_grad():
            for p, values in zip(linear.parameters(), network.layer(theta[None], i), strict=True):
                p.copy_(values.view_as(p))
        layers += [linear, ACTIVATIONS[network.activation].module()]
    return nn.Sequential(*layers[:-1])


def batch(given: Given, i: int) -> tuple[Tensor, ...]:
    """Inputs, targets and weights of one member, as mq.fit takes them"""
    real = given.weight[i] > 0
    parts = (t[i][real] for t in (given.x, given.y, given.weight))
    return tuple(t.to(DTYPE) if t.is_floating_point() else t for t in parts)


def trained_wide(
    network: Network, law: Law, data: Given, held: Given | None, limits: Limits, generator: torch.Generator,
    watch: Seen | None = None,
) -> Members:  # fmt: skip
    """The members, each with the weights that are best on what it holds out"""
    k = len(data.x)
    start = network.drawn(k, generator)
    found = Members.begun(network, start, start.new_full((k, 1), DECAY), network.groups("all"))
    for i in range(k):
        model = module_of(network, start[i])
        seen: Any = None if watch is None else lambda run: watch(int(run.step.step), found, False)
        with torch.enable_grad(), warnings.catch_warnings():
            warnings.filterwarnings("ignore", "mq.fit: ")  # a member that learns nothing counts for little
            result = fit(
                model, batch(data, i), law.loss, validation=None if held is None else batch(held, i),
                steps=limits.steps, patience=limits.patience, weight_decay=DECAY, curvature=Kronecker(), seed=i,
                batch_size=limits.rows or "all", progress=False, callbacks=() if seen is None else seen,
                group=False,  # every process that is asked for a committee trains one
            )  # fmt: skip
        found.theta[i] = nn.utils.parameters_to_vector(model.parameters()).detach().double()
        found.best_step[i] = result.best_step
        found.error[i] = result.loss if math.isfinite(result.loss) else math.nan
        found.steps[i] = [(e.loss, e.validation, e.lam, e.accepted) for e in result.history]
    if watch is not None:
        watch(max(len(steps) for steps in found.steps), found, True)
    return found


# --- members as tensors and plain values ---

# The types and shapes of tensors in a file, for k members of n parameters in g groups
TENSORS = {
    "theta": "float64 k n", "alpha": "float64 k g", "beta": "float64 k", "groups": "int64 n", "best_step": "int64 k",
    "error": "float64 k", "gamma": "float64 k", "root": "float32 k n n",
}  # fmt: skip


def part_state(part: Members) -> dict[str, Any]:
    state: dict[str, Any] = {name: getattr(part, name) for name in TENSORS}
    network = part.network
    return state | {"sizes": list(network.sizes), "activation": network.activation, "steps": part.steps}


def part_from(state: Any) -> Members:
    """What `part_state` has made. Anything else is a ValueError: a file may have been made by anybody."""
    check_entries(state, {*TENSORS, "sizes", "activation", "steps"}, "a network")
    sizes = typed(state["sizes"], tuple[int, ...], "sizes")
    if len(sizes) < 2 or min(sizes) < 1 or state["activation"] not in [*ACTIVATIONS]:
        raise ValueError(f"there is no network of the sizes {sizes} with {state['activation']!r}")
    network = Network(sizes, state["activation"])
    shape = {"n": network.n}
    check_tensors(state, {a: form for a, form in TENSORS.items() if a != "root" or state[a] is not None}, shape)
    if int(state["groups"].min()) < 0 or int(state["groups"].max()) >= shape["g"]:
        raise ValueError(f"a group of weights is none of {shape['g']}")
    steps = typed(state["steps"], list[list[tuple[Any, Any, Any, bool]]], "steps")
    if len(steps) != shape["k"] or not all(type(x) is float for some in steps for step in some for x in step[:3]):
        raise ValueError(f"there are no steps of {shape['k']} members")
    return Members(network, **{name: state[name] for name in TENSORS}, steps=steps)


def check_entries(state: Any, names: set[str], what: str) -> None:
    if not isinstance(state, dict) or set(state) != names:
        raise ValueError(f"the entries of {what} are not {', '.join(sorted(names))}")


def check_tensors(state: Mapping[str, Any], forms: Mapping[str, str], sizes: dict[str, int]) -> None:
    """Refuses other types and shapes, and numbers that are not finite: only an error may be. A letter is one length in
    all of the shapes, at least 1 unless `sizes` says it."""
    for name, form in forms.items():
        t, (dtype, *letters) = state[name], form.split()
        if type(t) is not Tensor or str(t.dtype) != f"torch.{dtype}" or t.layout != torch.strided or not t.is_cpu:
            raise ValueError(f"{name} is no tensor of {dtype}")
        if t.ndim != len(letters) or any(
            sizes.setdefault(a, b or -1) != b for a, b in zip(letters, t.shape, strict=True)
        ):
            raise ValueError(f"{name} has the shape {tuple(t.shape)}, not ({', '.join(letters)}) with {sizes}")
        if name != "error" and t.is_floating_point() and not bool(t.isfinite().all()):
            raise ValueError(f"{name} is not finite")
