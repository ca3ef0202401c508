"""Steps against the clock: how long one will take, and what earlier ones say of this machine."""

from __future__ import annotations

import time
import warnings
from functools import cache

import torch

from .arguments import users
from .curvature.cost import USUAL, Plan, duration
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
        self._nominal = 0.0  # the same, at the usual speed
        self._announced: Plan | None = None

    def words(self, plan: Plan) -> str:
        return f"a step takes about {duration(plan.seconds * (self.speed or 1.0))}"

    def expect(self, plan: Plan | None, device: torch.device, proven: bool, announces: bool = True) -> None:
        """Before the work of a step begins. If nothing is proven yet, that comes on top. One of the ranks announces."""
        self.predicted = self._nominal = 0.0
        if plan is None or not plan.seconds:
            return
        self._nominal = plan.seconds + (0.0 if proven else plan.proof)
        if self.speed is None:
            # Measuring the speed of the machine takes some milliseconds: only where a long step may be announced.
            self.speed = probe() if device.type != "cuda" and SLOWEST * self._nominal > LONG else 1.0
        self.predicted = self.speed * self._nominal
        if announces and self.predicted > LONG and plan != self._announced:
            self._announced = plan
            words = f"a step will take about {duration(self.predicted)}: {plan}"
            warnings.warn(words + (f"; {plan.faster}" if plan.faster else ""), stacklevel=users())

    def timed(self, step: Step, seconds: float) -> Step:
        """The step with the seconds that it took, and in words if it was announced."""
        if not self._nominal or self.speed is None:
            return changed(step, seconds=seconds)
        # The geometric mean of the old and new estimate, since one step may try several points.
        self.speed = (self.speed * seconds / self._nominal) ** 0.5
        note = step.note
        if max(seconds, self.predicted) > LONG:
            words = f"took {duration(seconds)}, predicted {duration(self.predicted)}"
            note = f"{note}; {words}" if note else words
        return changed(step, note=note, seconds=seconds, predicted=self.predicted)


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
