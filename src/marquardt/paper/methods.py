"""The methods: optimizers with their default hyper-parameters and what may be tuned, and the ablation's variants."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import nn

from marquardt import (
    EMA,
    LM,
    AdaptiveMomentum,
    Balanced,
    Decrease,
    Empirical,
    Exact,
    GainRatio,
    Grid,
    Identity,
    MaxDiagonal,
    RelativeDecrease,
    Sampled,
    TenFold,
    Uphill,
    presets,
)

from .trainers import BFGS, PSGD, Hyper, Ours, Peer, Torch, Trainer
from .vocabulary import ADDED, OPTIMIZERS, PARTS, REMOVED, RULE, compared

# --- what may be tuned ---


class Range(NamedTuple):
    """A number between low and high, drawn evenly on the scale of its logarithm where `log`."""

    low: float
    high: float
    log: bool = True


class OneOf(NamedTuple):
    """A value out of these."""

    values: tuple[Any, ...]


AVERAGE = OneOf((None, 0.8, 0.9, 0.95, 0.98))  # offered to every optimizer
LAMBDA = Range(1e-3, 1e2)
XI, DP = Range(0.6, 0.99, log=False), Range(0.05, 5.0)
UPHILL = OneOf((None, 1.0, 2.0))  # b; None: only a decrease is accepted


# --- methods ---


@dataclass(frozen=True)
class Method:
    """`default` has the paper's values; if it prints none, the defaults of the library or our own."""

    key: str
    label: str
    build: Callable[[nn.Module, str, Hyper], Trainer]  # model, loss, hyper-parameters
    default: Hyper
    space: Mapping[str, Range | OneOf]
    on_mnist: Hyper = field(default_factory=dict)  # if other values hold there
    mnist_space: Mapping[str, Range | OneOf] = field(default_factory=dict)  # beside `space`
    sine_only: bool = False

    def hyper(self, problem: str) -> dict[str, Any]:
        return {"average": None, **self.default, **(self.on_mnist if problem != "sine" else {})}

    def choices(self, problem: str) -> dict[str, Range | OneOf]:
        return {**self.space, **(self.mnist_space if problem != "sine" else {}), "average": AVERAGE}


def _average(hyper: Hyper) -> EMA | None:
    return None if hyper["average"] is None else EMA(hyper["average"])


def _acceptance(hyper: Hyper, of_late: bool = False) -> Decrease | Uphill:
    return Decrease() if hyper["b"] is None else Uphill(hyper["b"], of_late=of_late)


RULES = {"gain ratio": GainRatio, "tenfold": TenFold, "relative decrease": RelativeDecrease}  # for λ
ROWS = {"auto": None, "exact": Exact(), "empirical": Empirical(), "sampled": Sampled(1)}


def _lm(model: nn.Module, loss: str, h: Hyper) -> Trainer:
    opt = LM(
        model,
        loss,
        lr=h["lr"],
        rows=ROWS[h["rows"]],
        schedule=Balanced(initial=h["lam"], target=h["target"]),
        momentum=AdaptiveMomentum(xi=h["xi"], dP=math.inf, cap=True, same_data=True),
        acceptance=_acceptance(h, of_late=True),
        average=_average(h),
    )
    return Ours(opt)


def _paper(model: nn.Module, loss: str, h: Hyper) -> Trainer:
    opt = presets.paper(
        model,
        loss,
        lr=h["lr"],
        rows=ROWS[h["rows"]],
        schedule=RULES[h["rule"]](initial=h["lam"]),
        momentum=AdaptiveMomentum(xi=h["xi"], dP=h["dP"], cap=True),
        acceptance=_acceptance(h),
        average=_average(h),
    )
    return Ours(opt)


def _code(model: nn.Module, loss: str, h: Hyper) -> Trainer:
    opt = presets.authors_code(
        model,
        loss,
        lr=h["lr"],
        schedule=RelativeDecrease(initial=h["lam"]),
        momentum=AdaptiveMomentum(xi=h["xi"], dP=h["dP"]),
        acceptance=Uphill(h["b"]),
        average=_average(h),
    )
    return Ours(opt)


def _vanilla(model: nn.Module, loss: str, h: Hyper) -> Trainer:
    schedule = TenFold(initial=h["lam"], factor=h["factor"])
    return Ours(presets.vanilla(model, loss, lr=h["lr"], schedule=schedule, average=_average(h)))


def _gauss_newton(model: nn.Module, loss: str, h: Hyper) -> Trainer:
    return Ours(presets.gauss_newton(model, loss, lr=h["lr"], average=_average(h)))


def _newton(model: nn.Module, loss: str, h: Hyper) -> Trainer:
    return Ours(presets.newton(model, loss, lr=h["lr"], schedule=TenFold(initial=h["lam"]), average=_average(h)))


def _hessian_free(model: nn.Module, loss: str, h: Hyper) -> Trainer:
    schedule = GainRatio(
        initial=h["lam"], down=2 / 3, up=1.5, slow_down=2 / 3, slow_up=1.5, floor=1e-12
    )  # as in the preset
    return Ours(presets.hessian_free(model, loss, lr=h["lr"], schedule=schedule, average=_average(h)))


def _kfac(model: nn.Module, loss: str, h: Hyper) -> Trainer:
    schedule = GainRatio(initial=h["lam"], floor=h["floor"])
    return Ours(presets.kfac(model, loss, lr=h["lr"], schedule=schedule, average=_average(h)))


def _sgd(model: nn.Module, loss: str, h: Hyper) -> Trainer:
    options = {name: h[name] for name in ("lr", "momentum", "weight_decay")}
    return Torch(model, loss, torch.optim.SGD(model.parameters(), fused=True, **options), h["average"])


def _adam(model: nn.Module, loss: str, h: Hyper) -> Trainer:
    opt = torch.optim.Adam(model.parameters(), lr=h["lr"], betas=(h["beta1"], h["beta2"]), fused=True)
    return Torch(model, loss, opt, h["average"])


def _lbfgs(model: nn.Module, loss: str, h: Hyper) -> Trainer:
    opt = torch.optim.LBFGS(
        model.parameters(), h["lr"], max_iter=h["iterations"], history_size=h["history"], line_search_fn=h["search"]
    )
    return Torch(model, loss, opt, h["average"])


def _optimizer(
    key: str,
    build: Callable[[nn.Module, str, Hyper], Trainer],
    default: Hyper,
    space: Mapping[str, Range | OneOf],
    **options: Any,
) -> Method:
    return Method(key, OPTIMIZERS[key], build, default, space, **options)


METHODS = {
    method.key: method
    for method in [
        _optimizer(
            "lm",
            _lm,
            # the defaults of mq.LM
            {"lr": 1.0, "lam": 3.0, "xi": 0.9, "b": 1.0, "rows": "auto", "target": 0.95, "average": 0.95},
            {"lr": Range(0.3, 1.0), "lam": LAMBDA, "xi": XI, "b": UPHILL},
            mnist_space={"rows": OneOf(("auto", "exact", "sampled")), "target": Range(0.8, 1.0, log=False)},
        ),
        _optimizer(
            "lm-paper",
            _paper,
            {"lr": 1.0, "lam": 1.0, "rule": "gain ratio", "xi": 0.9, "dP": 0.6, "b": None, "rows": "exact"},
            {"lr": Range(0.1, 1.0), "lam": LAMBDA, "rule": OneOf(tuple(RULES)), "xi": XI, "dP": DP, "b": UPHILL},
            on_mnist={"dP": 1.0, "b": 2.0},
            mnist_space={"rows": OneOf(("exact", "empirical"))},
        ),
        _optimizer(
            "lm-code",
            _code,
            {"lr": 1.0, "lam": 1.0, "xi": 0.9, "dP": 0.6, "b": 2.0},
            {"lr": Range(0.1, 1.0), "lam": LAMBDA, "xi": XI, "dP": DP, "b": OneOf((1.0, 2.0))},
        ),
        _optimizer(
            "lm-vanilla",
            _vanilla,
            {"lr": 1.0, "lam": 1.0, "factor": 10.0},
            {"lr": Range(0.1, 1.0), "lam": LAMBDA, "factor": Range(1.5, 10.0)},
        ),
        _optimizer("gauss-newton", _gauss_newton, {"lr": 1.0}, {"lr": Range(0.01, 1.0)}),
        _optimizer(
            "newton",
            _newton,
            {"lr": 1.0, "lam": 1.0},
            {"lr": Range(0.1, 1.0), "lam": LAMBDA},
            sine_only=True,
        ),
        _optimizer(
            "bfgs",
            BFGS,
            {"c1": 1e-4, "c2": 0.9},  # SciPy's defaults
            {"c1": Range(1e-5, 1e-2), "c2": Range(0.1, 0.95, log=False)},
            sine_only=True,
        ),
        _optimizer(
            "lbfgs",
            _lbfgs,
            {"lr": 0.005, "iterations": 1, "history": 100, "search": None},  # torch's defaults beside the paper's lr
            {
                "lr": Range(1e-3, 1.0),
                "history": OneOf((5, 20, 100)),
                "search": OneOf((None, "strong_wolfe")),
            },
            on_mnist={"iterations": 20},  # of torch's step, on one batch: its default
        ),
        _optimizer(
            "hessian-free",
            _hessian_free,
            {"lr": 0.1, "lam": 1.0},
            {"lr": Range(0.05, 1.0), "lam": LAMBDA},
        ),
        _optimizer(
            "kfac",
            _kfac,
            {"lr": 0.05, "lam": 1.0, "floor": 0.3},  # the preset's beside the paper's lr
            {"lr": Range(0.01, 1.0), "lam": LAMBDA},
            on_mnist={"lr": 1.0},
            mnist_space={"floor": Range(0.01, 3.0)},  # λ of the same data has none
        ),
        _optimizer(
            "sgd",
            _sgd,
            {"lr": 0.05, "momentum": 0.9, "weight_decay": 5e-4},
            {
                "lr": Range(1e-3, 1.0),
                "momentum": Range(0.5, 0.99, log=False),
                "weight_decay": OneOf((0.0, 1e-5, 1e-4, 5e-4)),
            },
            on_mnist={"lr": 0.1},
        ),
        _optimizer(
            "adam",
            _adam,
            {"lr": 0.01, "beta1": 0.9, "beta2": 0.999},
            {"lr": Range(1e-3, 0.3), "beta1": OneOf((0.8, 0.9, 0.95)), "beta2": OneOf((0.9, 0.99, 0.999))},
            on_mnist={"lr": 0.05},
        ),
        _optimizer(
            "psgd",
            PSGD,
            {"lr": 0.01, "lr_preconditioner": 0.1, "momentum": 0.0, "clip": None},  # psgd-torch's defaults
            {
                "lr": Range(1e-3, 1.0),
                "lr_preconditioner": Range(0.01, 1.0),
                "momentum": OneOf((0.0, 0.5, 0.9)),
                "clip": OneOf((None, 1.0, 10.0)),
            },
        ),
        _optimizer(
            "tlm",
            Peer,
            {"lr": 1.0, "lam": 1e-3, "attempts": 10},  # its defaults
            {"lr": Range(0.05, 1.0), "lam": Range(1e-4, 1e2), "attempts": OneOf((1, 3, 10))},
        ),
    ]
}


# --- ablation: one of the improvements less, or one more ---


def improvements(loss: str) -> dict[str, tuple[dict[str, Any], dict[str, Any]]]:
    """What the paper has, and what is there without it."""
    dP = METHODS["lm-paper"].hyper("sine" if loss == "mse" else "mnist")["dP"]
    return {
        "max-diagonal": ({"damping": MaxDiagonal()}, {"damping": Identity()}),
        "momentum": ({"momentum": AdaptiveMomentum(dP=dP, cap=True)}, {"momentum": None}),
        "search": ({"line_search": Grid()}, {"line_search": None}),
        "uphill": ({"acceptance": Uphill()}, {"acceptance": Decrease()}),
        RULE: ({"schedule": GainRatio()}, {"schedule": TenFold()}),
    }


def _variant(key: str, label: str) -> Method:
    """ "paper", "paper-search", "vanilla+search", …: a preset with one part added or taken away."""
    name, sign, part = re.fullmatch(r"(paper|vanilla)(?:([+-])(.+))?", key).groups()  # type: ignore[union-attr]
    preset = {"paper": presets.paper, "vanilla": presets.vanilla}[name]

    def build(model: nn.Module, loss: str, h: Hyper) -> Trainer:
        parts = improvements(loss)[part][sign == "-"] if part else {}
        return Ours(preset(model, loss, average=_average(h), **parts))

    return Method(key, label, build, {}, {})


VARIANTS = {key: _variant(key, label) for key, label in {**REMOVED, **ADDED}.items()}


def ablation(problem: str) -> dict[str, Method]:
    """The variants that differ on this problem: the paper's method, one with or without each part, and vanilla LM."""
    paper = {name for part in (*PARTS, RULE) for name in compared(part, problem)}
    return {key: method for key, method in VARIANTS.items() if key in paper or key in ADDED}
