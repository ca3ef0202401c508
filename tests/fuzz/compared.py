"""A case, step by step beside brute force."""

from __future__ import annotations

import collections
import math
import re
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

import marquardt as mq
from fuzz.brute import Brute, Dampings
from fuzz.drawn import Case, build, chosen_params, make_batches, make_loss
from fuzz.observed import (
    EPS,
    Failure,
    Snapshot,
    cosine,
    difference,
    flat,
    halves,
    near,
    noise_of,
    structure,
)  # fmt: skip
from marquardt.metric import Diagonal, trusted
from marquardt.parts.judging import Trial
from support.reference import call
from support.steps import Spy, state

SOURCES = str(Path(mq.__file__).parent)
ENOUGH = 1e-7  # of the length of the step

# Refusals that a drawn case may meet, each for a reason.
EXPECTED = [
    r"the total weight of the batch is 0",  # weights="zeros", or all targets ignored
    r"has no Kronecker factors",  # layers without a rule
    r"Kronecker cannot damp every entry",
    r"the second derivatives of the model are not symmetric",  # weight_norm
    r"the model cannot be differentiated twice",
    r"couples the samples of a batch in train mode",  # also "diag G needs rows that belong to one sample each, but …"
    r"the outputs do not depend on the trainable parameters",  # what is left after freezing
    r"ignore_index=\d+ needs class indices",
    r"the model changes its inputs in place",  # an activation that does is its first layer
]


def run(case: Case, of: type[Run] | None = None) -> Run:
    """The whole case; a failure names it."""
    with warnings.catch_warnings(), torch.random.fork_rng(devices=[]):
        warnings.simplefilter("ignore")
        warnings.filterwarnings("error", module="marquardt")
        warnings.filterwarnings("ignore", "There is a performance drop")
        warnings.filterwarnings("ignore", "Using padding='same' with even kernel")
        found = (of or Run)(case)
        try:
            found.go()
        except Failure as failure:
            raise Failure(str(failure), f"\n    {case}") from failure
    return found


class Tried(NamedTuple):
    """One λ, and what came of it"""

    lam: float  # in doubt of the batch, before it was multiplied
    rule: str
    new_loss: float | None  # None if nothing could be factored
    judged: bool
    gain: float
    after: float  # the next λ


class Run:
    def __init__(self, case: Case) -> None:
        self.case = case
        # Steps by what became of them: compared, rejected, refused, or invalid as plain autograd fails too; ill if the
        # residual alone was, close if rounding could turn a decision, partly for descent and losses alone, unsure for D
        self.count: collections.Counter[str] = collections.Counter()
        self.model, self.loss, self.batches = build(case), make_loss(case), make_batches(case)
        torch.manual_seed(case.seed)

    def go(self) -> None:
        case = self.case
        self.damping, self.schedule, self.acceptance = (
            Spy(case.damping),
            Spy(case.schedule),
            Spy(case.acceptance, "judge"),
        )
        self.schedule.calls = self.acceptance.calls = self.asked = []  # in the order in which they were asked
        params = chosen_params(case, self.model)
        try:
            self.lm = mq.LM(
                self.model, self.loss, params=params, lr=case.lr, curvature=case.curvature, rows=case.rows,
                damping=self.damping, schedule=self.schedule, momentum=case.momentum, acceptance=self.acceptance,
                line_search=case.line_search, average=case.average, attempts=case.attempts,
            )  # fmt: skip
        except Exception as error:
            self.refused(error)
            return
        self.tried: list[Tried] = []
        self.looks = structure(self.model)
        for k, batch in enumerate(self.batches):
            try:
                self.step(k, batch)
            except Failure as failure:
                what = failure.what
                raise Failure(what, f"step {k}, {str(failure).removeprefix(what + ': ')}") from None

    def read(self, step: Any, lam: float) -> None:
        """Every λ that was tried, from what acceptance and schedule were asked. In doubt of the batch the schedule is
        not, and one λ is like the other."""
        self.tried, trial = [], None
        for one, *others in self.asked:
            if not others[1:]:
                trial = one
                continue
            outcome, after = others
            loss = None if trial is None else trial.new_loss
            self.tried.append(Tried(one, outcome.rule, loss, outcome.unjudged == 0, outcome.gain, after))
            trial = None
        if not self.tried:
            loss = None if trial is None else trial.new_loss
            self.tried.append(Tried(lam, step.rule, loss, not math.isnan(step.gain), step.gain, lam))

    def step(self, k: int, batch: tuple[Any, Any, Any]) -> None:
        """One step, and everything that has to hold after it."""
        lm, case = self.lm, self.case
        batches = halves(batch) if case.over else [batch]
        before = Snapshot(self.model, lm)
        second = isinstance(case.curvature, mq.Hessian)
        arguments = self.loss, case.rows, batches, case.curvature.needs.chunk, before.state.steps, case.over, second
        try:
            brute = Brute(self.model, lm.params, *arguments)
        except Exception as error:
            brute = None
            problem = error
        before.restore_rng()
        self.damping.calls.clear()
        self.asked.clear()
        try:
            step = lm.step_over(batches) if case.over else lm.step(*batch)
        except Exception as error:
            self.intact()
            if brute is None:  # nor does autograd know what to do with this model
                self.count["invalid"] += 1
            else:
                self.refused(error, brute)
            before.refused(self.model, lm)
            return
        if brute is None:
            raise Failure("the model alone fails, the step does not", f"{type(problem).__name__}: {problem}"[:200])
        self.read(step, before.state.lam)
        self.healthy(batch, brute, step, before)
        try:
            self.check(step, brute, before)
        except Failure as failure:
            before.restore_rng()
            nudged = lambda: Brute(*before.model(self.model), *arguments, 8 * EPS)  # noqa: E731
            self.excused(step, failure, brute, before.state, nudged)
        torch.set_rng_state(brute.end)

    def refused(self, error: Exception, brute: Brute | None = None) -> None:
        """A refusal has to be ours, and to be expected."""
        frames = traceback.extract_tb(error.__traceback__)
        ours = frames[-1].filename.startswith(SOURCES)
        text = str(error).split("\n")[0]
        if not ours or not isinstance(error, (ValueError, TypeError)):
            where = next((f for f in reversed(frames) if f.filename.startswith(SOURCES)), frames[-1])
            raise Failure(f"crash {type(error).__name__} in {where.name} ({text[:50]})", text[:200])
        self.count["refused"] += 1
        if not any(re.search(pattern, text) for pattern in EXPECTED):
            raise Failure("unexpected refusal", text[:300])
        if "total weight" in text and brute is not None and brute.possible:
            raise Failure("false refusal", text)

    def intact(self) -> None:
        if structure(self.model) != self.looks:
            raise Failure("the model was changed", difference(structure(self.model), self.looks))

    def healthy(self, batch: tuple[Any, Any, Any], brute: Brute, step: Any, before: Snapshot) -> None:
        self.intact()
        if not torch.equal(torch.get_rng_state(), brute.end):
            raise Failure("the generator is not where one forward pass leaves it")
        wanted = brute.end_buffers if step.accepted else before.buffers
        for b, e in zip(self.model.buffers(), wanted, strict=True):
            if not torch.allclose(b, e, rtol=1e-9, atol=1e-12):
                raise Failure("buffers", f"off by {float((b - e).abs().max()):.2g}, accepted={step.accepted}")
        if not all(bool(p.isfinite().all()) for p in self.model.parameters()):
            raise Failure("parameters are not finite")
        for p, q in before.frozen(self.model, self.lm.params):
            if not torch.equal(p, q):
                raise Failure("a parameter that does not train was changed")
        kept = [b.clone() for b in self.model.buffers()]
        try:
            with torch.no_grad():
                call(self.model, batch[0])
        except Exception as error:
            raise Failure(f"the model no longer runs: {type(error).__name__}", str(error)[:150]) from None
        with torch.no_grad():
            for b, e in zip(self.model.buffers(), kept, strict=True):
                b.copy_(e)

    # The comparison.

    def check(self, step: Any, b: Brute, before: Snapshot) -> None:
        old, lm, case = before.state, self.lm, self.case
        if not b.possible:
            raise Failure("a batch without any weight was taken")
        same, doubt = state(lm)["repeats"] > 1, step.lam / self.tried[-1].lam
        usual = same or old.doubted or old.steps < 10 or not old.height > 0
        near("doubt", doubt, 1.0 if usual else max(1.0, (b.f - b.low) / (10 * old.height)), 1e-8, doubt)
        self.count["doubted"] += doubt > 1
        near("f", step.loss, b.f, 1e-10, abs(b.f))
        G_lib = self.damping.calls[-1][1]
        kind = type(G_lib).__name__
        G = self.mixed(b, G_lib, old, same) if kind == "DenseCurvature" else b.G
        if step.accepted:
            near("f at the new θ", step.new_loss, b.at(flat(lm.params)), 1e-9, abs(step.new_loss) + abs(b.f))
        elif not torch.equal(flat(lm.params), before.theta):
            raise Failure("θ moved though the step was rejected")
        if kind == "KroneckerCurvature":
            self.count["partly"] += 1
            if "could not be factored" in step.note:
                raise Failure("Kronecker: the damped factors could not be factored", step.note)
            if step.rule == "decrease" and not step.new_loss < step.loss:
                raise Failure("no decrease")
            if case.momentum is None and step.accepted and not float(b.g @ (flat(lm.params) - before.theta)) < 0:
                raise Failure("no descent", f"gᵀd = {float(b.g @ (flat(lm.params) - before.theta)):.3g}")
            return
        A = self.damped(G, b, G_lib, old)
        lam = old.lam
        for tried in self.tried:
            if tried.lam != lam:
                raise Failure("λ", f"{tried.lam} instead of {lam}")
            last, lam = tried is self.tried[-1], tried.after
            if not last and (tried.rule != "rejected" or not tried.judged):
                raise Failure("another attempt after a step that was accepted, or that rounding hides")
            moved = flat(lm.params) - before.theta if last and step.accepted else None
            self.attempt(step, b, G, doubt * tried.lam * A, tried, old, same, doubt, moved)
        if lm.lam != lam or step.rule != tried.rule:
            raise Failure("the step and its λ", f"{step} against {tried}")

    def refined(self, H: Tensor, g: Tensor, old: Any, same: bool) -> tuple[Tensor, Tensor]:
        """−H⁻¹g, and with momentum"""
        s = H.diagonal().clamp(min=1e-300).rsqrt()  # the units of the parameters are gone
        plain = -s * torch.linalg.solve(H * s * s[:, None], s * g)
        if self.case.momentum is None:
            return plain, plain
        given = SimpleNamespace(gradient=g, quadratic=lambda v: v @ H @ v, dot=torch.dot)
        return plain, self.case.momentum.refine(plain, old.previous, given, same)

    def excused(self, step: Any, failure: Failure, b: Brute, old: Any, nudged: Callable[[], Brute]) -> None:
        """Raises the failure, unless this step is that sensitive: θ off by a rounding error gives such another one."""
        if failure.what not in ("θ", "f of the trial", "f at the new θ", "gain", "decision", "rate", "D"):
            raise failure
        same = state(self.lm)["repeats"] > 1
        A = step.lam * self.damping.calls[-1][2].positive().entries(b.sizes)
        pairs = zip(*(self.refined(at.G + A.diag(), at.g, old, same) for at in (b, nudged())), strict=True)
        shift, apart = 0.0, self.apart(b)
        for d, other in pairs:
            off = (d - other).abs()
            shift = max(shift, float(off.norm() / d.norm()))
            # Where curvature is small but known, steps may be of any length; those of rounding are to be no longer.
            known = float(d[off <= 1e-3 * d.abs()].norm() + b.theta.norm()) + 1
            if float(off[~apart].norm()) > 1e6 * known:
                raise Failure("a step of rounding alone", f"length {float(off.norm()):.2g}, {failure}")
        if not (failure.size or 1e-6) <= 1e3 * shift:
            raise failure
        self.count["ill"] += 1

    def apart(self, b: Brute) -> Tensor:
        """Parameters all of whose curvature is below the rounding of that of others: (n,). With floor=0 MaxDiagonal
        is invariant to rescaling a parameter as a whole, and so may be the length of its step."""
        if self.case.damping != mq.MaxDiagonal(floor=0.0):
            return torch.zeros(b.n, dtype=torch.bool)
        D = self.damping.calls[-1][2].entries(b.sizes)
        return torch.cat([(part.max() < EPS * D.max()).expand(len(part)) for part in D.split(b.sizes)])

    def mixed(self, b: Brute, G_lib: Any, old: Any, same: bool) -> Tensor:
        """Dense with inertia: the running average."""
        past, beta = old.past, G_lib.beta
        if beta == 0 or same or past is None or "G" not in past:
            return b.G
        k = float(past["batches"])
        return torch.lerp(b.G, past["G"], min(k / (k + 2), beta) * trusted(past["G"].diagonal(), b.G.diagonal()))

    def damped(self, G: Tensor, b: Brute, G_lib: Any, old: Any) -> Tensor:
        """The entries of D that the step solves with: (n,)"""
        D_old, _, D = self.damping.calls[-1]
        found = D.entries(b.sizes)
        second = isinstance(self.case.curvature, mq.Hessian)
        most = max(old.most_rows, b.m)
        if isinstance(self.case.damping, mq.FactoredMaxDiagonal) and not second:
            least = b.n / min(b.n, most) * b.G.diagonal()
            below = ((least - found - 1e-14 * least.max()) / least).where(least > 0, 0).max()
            if float(below) > 1e-9:
                raise Failure("D", f"of FactoredMaxDiagonal is {float(below):.2g} below diag G", float(below))
            return D.positive().entries(b.sizes)
        coupled = any(isinstance(m, nn.modules.batchnorm._BatchNorm) and m.training for m in self.model.modules())
        by_layer = isinstance(self.case.damping, mq.LayerMeanEigenvalue) and not second
        allowed = max(1e-8, 4 * noise_of(b))
        layers = self.layers(D) if by_layer else [[i] for i in range(len(b.sizes))]
        # Dense with inertia: traces of layers are those of this batch alone
        diagonal = (b.G if by_layer else G).diagonal()
        rule = Dampings(diagonal.abs(), b.params, math.inf) if second else Dampings(diagonal, b.params, most)
        wanted = rule.update(self.case.damping, None if D_old is None else D_old.entries(b.sizes), layers)
        off = float((found - wanted).abs().max() / wanted.abs().max().clamp(min=1e-300))
        if by_layer and off > allowed and len(b.parts) > 1:
            self.count["unsure"] += 1  # batches that go different ways through the model are joined to larger layers
        elif off > allowed and (second or not coupled):  # if samples are coupled, traces are estimates
            raise Failure("D", f"off by {off:.2g}; max {float(wanted.max()):.3g}")
        return D.positive().entries(b.sizes)

    def layers(self, D: Diagonal) -> list[list[int]]:
        """Which parameters count as one layer: those with the same number."""
        same: dict[float, list[int]] = collections.defaultdict(list)
        for i, part in enumerate(D.parts or ()):
            same[float(part.entries)].append(i)
        return list(same.values())

    def attempt(
        self, step: Any, b: Brute, G: Tensor, A: Tensor, tried: Any, old: Any, same: bool, doubt: float,
        moved: Tensor | None,
    ) -> None:  # fmt: skip
        """One λ: the step, its loss, its gain, the decision, and θ."""
        case, count = self.case, self.count
        H = G + A.diag()
        s = H.diagonal().clamp(min=1e-300).rsqrt()
        spectrum = torch.linalg.eigvalsh(H * s * s[:, None])
        lowest, highest = float(spectrum[0]), float(spectrum[-1])
        if tried.new_loss is None:
            if lowest > 1e-9:
                raise Failure("could not be factored", f"eigenvalues from {lowest:.2g} to {highest:.2g}, {step.note}")
            count["rejected"] += 1
            return
        if lowest <= 0 and isinstance(case.curvature, mq.Hessian):
            if lowest < -1e-9:
                raise Failure("an indefinite Hessian was solved with", f"eigenvalue {lowest:.2g}")
            count["ill"] += 1
            return
        condition = highest / max(lowest, 1e-300)
        cg = isinstance(case.curvature, mq.MatrixFree)
        if cg:  # its preconditioner is not the whole diagonal
            condition = max(condition, float(torch.linalg.cond(H)))
        allowed = max(1e-6, 1e3 * EPS * condition) if cg else max(ENOUGH, 30 * EPS * condition)
        noise = noise_of(b)  # which momentum of a given length blows up
        allowed = max(allowed, noise)
        ill = condition > 1e8 or noise > ENOUGH
        plain, d = self.refined(H, b.g, old, same)
        if type(self.damping.calls[-1][1]).__name__ == "GramCurvature":
            # With more rows than parameters J̃ᵀw is small and w is not: |w| ≤ |u| ≈ √(2f).
            largest = float(torch.linalg.eigvalsh(G * A.rsqrt() * A.rsqrt()[:, None])[-1])
            lost = 100 * EPS * math.sqrt(max(largest, 0) * 2 * abs(b.f) / float(A.min()))
            allowed = max(allowed, lost / max(float(d.norm()), 1e-300))
        if doubt > 1:
            d = d * min(1.0, old.stride / doubt**0.5 / float(d.norm()))
        lr = self.lm.lr
        f_new = b.at(b.theta + lr * d)
        predicted = float(-lr * (b.g @ d) - 0.5 * lr**2 * (d @ G @ d))
        sees = self.judged(b, f_new, predicted, lr * float(d.norm()), tried.judged, ill)
        if not sees and not math.isnan(tried.gain):
            raise Failure("gain", f"{tried.gain} of a step that rounding hides")
        if not ill:
            self.losses(tried, b, f_new, predicted, allowed)
        sure = sees and doubt == 1
        back = cosine(plain, old.previous) if old.previous is not None and sure else None

        def judged(f: float) -> str | None:
            return case.acceptance.judge(Trial(b.f, f, b.low, min(old.best, b.f), back))

        margin = 1e-9 * (abs(b.f) + abs(f_new))
        rule, rate, line = judged(f_new), lr, d
        if len({judged(f_new + e) for e in (-margin, 0.0, margin)}) > 1 or (ill and rule != tried.rule):
            count["close"] += 1
            rule = tried.rule if tried.rule in ("decrease", "uphill") else None
        if rule is None and case.line_search is not None and lr > 0 and sure:
            line = d if case.line_search.along_step else plain
            along = lambda rates: [b.at(b.theta + r * line) for r in rates]  # noqa: E731
            found = case.line_search.search(along, b.f, lr, (lr, f_new) if line is d else None)
            rule, rate = ("search", found[0]) if found is not None else (None, lr)
            rule, rate = self.settled(b, line, rule, rate, tried, step, found, ill)
        if (rule or "rejected") != tried.rule:
            raise Failure("decision", f"{tried.rule} instead of {rule}; f {b.f:.17g}, f_new {f_new:.17g}, {tried}")
        if moved is None:
            count["rejected"] += 1
            return
        if step.lr != rate:
            raise Failure("rate", f"{step.lr} instead of {rate}")
        exact = line is plain and noise <= ENOUGH
        self.compare(moved, rate * line, b, H, rate, exact, allowed, ill, condition)

    def judged(self, b: Brute, f_new: float, predicted: float, length: float, theirs: bool, ill: bool) -> bool:
        """Whether the decrease can be told from rounding; the library's answer if rounding decides that too."""
        least, still = 4 * b.rounding, EPS**0.5 * float(b.theta.norm())

        def hidden(slack: float) -> bool:
            found = abs(b.f - f_new) <= least + (slack - 1) * 8 * b.rounding or length <= slack * still
            return abs(predicted) <= slack * least and found

        ours = {not hidden(slack) for slack in (1 / 3, 1.0, 3.0)}
        if len(ours) > 1 or ill:
            self.count["close"] += theirs not in ours or len(ours) > 1
            return theirs
        if theirs not in ours:
            raise Failure("decision", f"judged: {theirs}; f {b.f:.17g}, f_new {f_new:.17g}, predicted {predicted:.3g}")
        return theirs

    def settled(
        self, b: Brute, line: Tensor, rule: str | None, rate: float, tried: Any, step: Any, found: Any, ill: bool
    ) -> tuple[str | None, float]:
        """The library's rate in the place of ours where rounding decides between the two."""
        theirs = tried.rule if tried.rule == "search" else None
        if rule == theirs and (rule is None or step.lr == rate):
            return rule, rate
        f_ours = b.f if rule is None else found[1]
        f_theirs = b.f if theirs is None else b.at(b.theta + step.lr * line)
        if ill or abs(f_ours - f_theirs) <= 1e-8 * (abs(b.f) + abs(f_ours)):  # ill: the line is another one
            self.count["close"] += 1
            return theirs, step.lr if theirs else rate
        return rule, rate

    def losses(self, tried: Any, b: Brute, f_new: float, predicted: float, allowed: float) -> None:
        if not math.isfinite(f_new) or abs(f_new) > 1e6 * (abs(b.f) + 1):
            return  # there the loss is too steep to compare
        size = abs(b.f) + abs(f_new)
        near("f of the trial", tried.new_loss, f_new, 10 * allowed + 1e-9, size)
        if predicted > 1e-7 * abs(b.f) and tried.judged:
            gain = (b.f - f_new) / predicted
            near("gain", tried.gain, gain, 1e-6 + 20 * allowed * size / predicted, 1 + abs(gain))

    def compare(
        self, moved: Tensor, wanted: Tensor, b: Brute, H: Tensor, rate: float, exact: bool, allowed: float, ill: bool,
        condition: float,
    ) -> None:  # fmt: skip
        """θ against ours; if the system is ill-conditioned, the residual of what was moved, if it should be 0."""
        count = self.count
        length = float(wanted.norm())
        # The gradient of one entry may be no more than the rounding of those of the others of its parameter: its step
        # is anything then, but not far longer than θ and those of the others.
        unknown = rate * 100 * EPS * b.terms / H.diagonal()
        known = float(wanted[unknown <= 1e-3 * wanted.abs()].norm() + b.theta.norm()) + 1
        unknown = unknown.clamp(max=1e4 * known)
        error = float(((moved - wanted).abs() - unknown).clamp(min=0).norm())
        rounding = 4 * EPS * float(b.theta.norm())  # θ + d − θ
        if ill:
            count["ill"] += 1
            if exact and rate > 0:
                d = moved / rate
                residual = float((H @ d + b.g).norm())
                size = float(H.norm() * d.norm() + b.g.norm()) + rounding * float(H.norm()) / EPS
                # Conjugate gradients end when the model no longer decreases: x is then right to √eps.
                if not residual <= (1e-6 if isinstance(self.case.curvature, mq.MatrixFree) else 1e-7) * size:
                    raise Failure("θ", f"residual {residual / size:.2g}, condition {condition:.2g}")
            return
        count["compared"] += 1
        count["ill"] += allowed > ENOUGH and not isinstance(self.case.curvature, mq.MatrixFree)
        if not error <= allowed * length + rounding:
            size = error / max(length, 1e-300)
            raise Failure("θ", f"relative error {size:.2g} of the step, condition {condition:.2g}", size)
