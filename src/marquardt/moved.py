"""Where modules went whose classes are named in pickles of earlier versions, and which users may have imported."""

from __future__ import annotations

import sys
from importlib import import_module

MOVED = {
    "archives": "files",
    "chunks": "checkpoints",
    "curvature.conjugate_gradients": "curvature.matrix_free",
    "curvature.dense": "curvature.direct",
    "curvature.ekfac": "curvature.kronecker",
    "curvature.factors": "curvature.kronecker",
    "curvature.gram": "curvature.direct",
    "curvature.plan": "curvature.cost",
    "curvature.products": "curvature.matrix_free",
    "curvature.solve": "curvature.direct",
    "documents": "files",
    "fitting.curve": "fitting.curve_fit",
    "fitting.fit": "fitting.curve_fit",
    "fitting.result": "fitting.least_squares",
    "groups": "protocol",
    "jacobian.known": "jacobian.passes",
    "jacobian.rows": "jacobian.objective",
    "layers.bilinear": "layers.blocks",
    "layers.block": "layers.blocks",
    "layers.lookup": "layers.blocks",
    "layers.places": "layers.capture",
    "layers.rules": "layers.capture",
    "layers.watch": "layers.capture",
    "losses.cross_entropy": "losses.classes",
    "losses.elementwise": "losses.base",
    "losses.gaussian": "losses.regression",
    "losses.margins": "losses.classes",
    "losses.ordinal": "losses.classes",
    "losses.output_hessian": "losses.function",
    "losses.outputs": "losses.base",
    "losses.positive": "losses.regression",
    "losses.probabilities": "losses.classes",
    "losses.robust": "losses.regression",
    "losses.separability": "losses.function",
    "memory": "surroundings",
    "metric.diagonal": "metric.base",
    "metric.summed": "metric.layered",
    "parts.acceptance": "parts.judging",
    "parts.average": "parts.judging",
    "parts.damping": "parts.direction",
    "parts.line_search": "parts.judging",
    "parts.momentum": "parts.direction",
    "parts.schedule": "parts.judging",
    "plain": "values",
    "report": "step",
    "saving": "protocol",
    "state": "step",
    "texts": "values",
    "uncertainty.likelihood": "uncertainty.expansion",
}


def alias() -> None:
    """The old names lead to the modules that are there."""
    for old, new in MOVED.items():
        sys.modules[f"{__package__}.{old}"] = import_module(f".{new}", __package__)
