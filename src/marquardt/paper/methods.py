"""The methods: optimizers with their published hyper-parameters and what may be tuned, and the ablation's variants."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import nn

from marquardt import (
    EMA,
    LM,
    AdaptiveMomentum,
    Decrease,
    Empirical,
    Exact,
    GainRatio,
    Grid,
    Identity,
    MaxDiagonal,
    PaperSchedule,
    TenFold,
    Uphill,
    presets,
)

from .trainers import BFGS, PSGD, Hyper, Ours, Peer, Torch, Trainer
from .vocabulary import ADDED, OPTIMIZERS, PARTS, REMOVED

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


# --- methods ---


@dataclass(frozen=True)
class Method:
    """`published` has the paper's values; where it has none, the defaults of the library or our own."""

    key: str
    label: str
    build: Callable[[nn.Module, str, Hyper], Trainer]  # model, loss, hyper-parameters
    published: Hyper
    space: Mapping[str, Range | OneOf]
    on_mnist: Hyper | None = None  # where the paper gives other values there
    sine_only: bool = False

    def hyper(self, problem: str) -> dict[str, Any]:
        return {"average": None, **self.published, **((self.on_mnist or {}) if problem != "sine" else {})}

    def choices(self) -> dict[str, Range | OneOf]:
        return {**self.space, "average": AVERAGE}


def _average(hyper: Hyper) -> EMA | None:
    return None if hyper["average"] is None else EMA(hyper["average"])


def _lm(model: nn.Module, loss: str, h: Hyper) -> Trainer:
    schedule = GainRatio(initial=h["lam"], floor=h["floor"])
    return Ours(LM(model, loss, lr=h["lr"], schedule=schedule, average=_average(h)))


def _paper(model: nn.Module, loss: str, h: Hyper) -> Trainer:
    momentum = AdaptiveMomentum(xi=h["xi"], dP=h["dP"])
    schedule = PaperSchedule(initial=h["lam"])
    return Ours(presets.paper(model, loss, lr=h["lr"], momentum=momentum, schedule=schedule, average=_average(h)))


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
    schedule = GainRatio(initial=h["lam"], floor=1e-12)  # as in the preset
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
    published: Hyper,
    space: Mapping[str, Range | OneOf],
    **options: Any,
) -> Method:
    return Method(key, OPTIMIZERS[key], build, published, space, **options)


METHODS = {
    method.key: method
    for method in [
        _optimizer(
            "lm",
            _lm,
            {"lr": 1.0, "lam": 1.0, "floor": 3.0, "average": 0.95},  # the defaults of mq.LM
            {"lr": Range(0.3, 1.0), "lam": LAMBDA, "floor": Range(0.3, 30.0)},
        ),
        _optimizer(
            "lm-paper",
            _paper,
            {"lr": 1.0, "lam": 1.0, "xi": 0.9, "dP": 0.6},
            {"lr": Range(0.1, 1.0), "lam": LAMBDA, "xi": Range(0.6, 0.99, log=False), "dP": Range(0.05, 5.0)},
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
            {"lr": 0.05, "lam": 1.0},
            {"lr": Range(0.01, 1.0), "lam": LAMBDA},
            on_mnist={"lr": 1.0},
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


# --- ablation: one of the four improvements less, or one more ---


def _with(preset: Callable[..., LM], parts: Mapping[str, Any]) -> Callable[[nn.Module, str, Hyper], Trainer]:
    def build(model: nn.Module, loss: str, h: Hyper) -> Trainer:
        # The paper's rows for both ends, so that nothing but the parts differs.
        rows = Empirical() if loss == "cross_entropy" else Exact()
        return Ours(preset(model, loss, rows=rows, average=_average(h), **parts))

    return build


IMPROVEMENTS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {  # what the paper has; what is there without it
    "max-diagonal": ({"damping": MaxDiagonal()}, {"damping": Identity()}),
    "momentum": ({"momentum": AdaptiveMomentum()}, {"momentum": None}),
    "search": ({"line_search": Grid()}, {"line_search": None}),
    "uphill": ({"acceptance": Uphill()}, {"acceptance": Decrease()}),
}
_VARIANTS: dict[str, tuple[Callable[..., LM], dict[str, Any]]] = {
    "paper": (presets.paper, {}),
    **{f"paper-{part}": (presets.paper, IMPROVEMENTS[part][1]) for part in PARTS},
    "vanilla": (presets.vanilla, {}),
    **{f"vanilla+{part}": (presets.vanilla, IMPROVEMENTS[part][0]) for part in PARTS},
}
ABLATION = {key: Method(key, label, _with(*_VARIANTS[key]), {}, {}) for key, label in {**REMOVED, **ADDED}.items()}
