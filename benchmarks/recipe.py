"""The experiment behind the default recipe of mq.LM: each part exchanged, on both of the paper's problems.

    python benchmarks/recipe.py --held-out --data-dir ~/data --seeds 5 --device cuda

Takes the options of quality.py. The result and what follows from it stand in docs/recipe.md.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import marquardt as mq
import quality

SLOW = {"down": 0.7, "up": 1.5}  # on the same data as slowly as on changing batches

VARIANTS: dict[str, dict[str, Any]] = {
    "default": {},
    "damping: max-diagonal, D₀ = 0.01": {"damping": mq.MaxDiagonal()},
    "damping: identity": {"damping": mq.Identity()},
    "curvature: of the batch alone": {"curvature": mq.Auto()},
    "curvature: of the batch alone, λ ≥ 1": {"curvature": mq.Auto(), "schedule": mq.GainRatio(floor=1.0)},
    "curvature: inertia 0.9": {"curvature": mq.Auto(inertia=0.9)},
    "rows: one per sample": {"rows": mq.Sampled(1)},
    "rows: empirical": {"rows": mq.Empirical()},
    "schedule: 0.7 and 1.5 throughout": {"schedule": mq.GainRatio(**SLOW)},
    "schedule: constant": {"schedule": mq.Constant(1.0)},
    "momentum: none": {"momentum": None},
    "momentum: on changing batches too": {"momentum": mq.AdaptiveMomentum(dP=math.inf, cap=True)},
    "acceptance: decrease": {"acceptance": mq.Decrease()},
    "acceptance: uphill, b = 2": {"acceptance": mq.Uphill(b=2.0, of_late=True)},
    "acceptance: uphill, to any height": {"acceptance": mq.Uphill(b=1.0)},
    "line search: none": {"line_search": None},
    "line search: the paper's grid": {"line_search": mq.Grid()},
    "average: none": {"average": None},
}

if __name__ == "__main__":
    quality.MNIST_METHODS = {name: quality.lm(**parts) for name, parts in VARIANTS.items()}
    quality.SINE_METHODS = {name: partial(mq.LM, **parts) for name, parts in VARIANTS.items()}
    quality.main()
