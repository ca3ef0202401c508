"""How long steps take, against what was predicted: what will be slow says so before it begins."""

from __future__ import annotations

import time
import warnings
from functools import cache

import torch

from .arguments import users
from .curvature.cost import USUAL
from .curvature.plan import Plan, duration
from .step import Step, changed

# A step that is predicted to take more seconds than this is announced.
LONG = 3.0

# How much slower than usual, or faster, a machine is taken for.
SLOWEST = 10.0


class Pace:
    """Corrects predictions by what earlier steps took. It never enters a choice, and is not saved."""

    def __init__(self) -> None:
        self.speed: float | None = None  # seconds over those of a machine of the usual speed
        self.predicted = 0.0  # seconds of the step under way; 0 if there is no prediction
        self._nominal = 0.0
        self._began = 0.0
        self._announced: Plan | None = None

    def words(self, plan: Plan) -> str:
        return f"a step takes about {duration(plan.seconds * (self.speed or 1.0))}"

    def begin(self) -> None:
        self._began = time.perf_counter()
        self.predicted = self._nominal = 0.0

    def expect(self, plan: Plan | None, device: torch.device, proven: bool, tells: bool = True) -> None:
        """Before the work of a step begins. If nothing is proven yet, that comes on top. One of the ranks `tells`."""
        if plan is None or not plan.seconds:
            return
        self._nominal = plan.seconds + (0.0 if proven else plan.proof)
        if self.speed is None:
            # How fast the machine is takes some milliseconds to find out: where that can announce something.
            self.speed = probe() if device.type != "cuda" and SLOWEST * self._nominal > LONG else 1.0
        self.predicted = self.speed * self._nominal
        if tells and self.predicted > LONG and plan != self._announced:
            self._announced = plan
            words = f"a step will take about {duration(self.predicted)}: {plan}"
            warnings.warn(words + (f"; {plan.faster}" if plan.faster else ""), stacklevel=users())

    def end(self, step: Step) -> Step:
        """The step with the seconds that it took, and in words if it was announced."""
        took = time.perf_counter() - self._began
        if not self._nominal or self.speed is None:
            return changed(step, seconds=took)
        # Half of the way, as a ratio: one step that tries several points does not speak for all.
        self.speed = (self.speed * took / self._nominal) ** 0.5
        note = step.note
        if max(took, self.predicted) > LONG:
            words = f"took {duration(took)}, predicted {duration(self.predicted)}"
            note = f"{note}; {words}" if note else words
        return changed(step, note=note, seconds=took, predicted=self.predicted)


@cache
def probe() -> float:
    """How many times longer than usual this CPU takes for a product of matrices."""
    x = torch.ones(384, 384, device="cpu", dtype=torch.float32)
    times = []
    for _ in range(4):
        began = time.perf_counter()
        x @ x
        times.append(time.perf_counter() - began)
    usual = 2 * 384**3 / USUAL[False].products
    return min(max(min(times) / usual, 1 / SLOWEST), SLOWEST)
