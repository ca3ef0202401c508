"""The methods that are compared: how each one steps, its default hyper-parameters and what may be tuned, and the
variants of the ablation.

Of the packages that are compared torch alone is imported here; SciPy, psgd-torch and torch-levenberg-marquardt are
imported by the trainers that need them.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.machinery
import io
import math
import re
import sys
import types
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parameters_to_vector
from torch.optim import LBFGS, SGD, Adam

import marquardt as mq

from .vocabulary import ADDED, OPTIMIZERS, PARTS, REMOVED, RULE, compared

Hyper = Mapping[str, Any]  # plain values: they go into logs and files
Batches = Iterable[tuple[Tensor, Tensor]]
FUNCTIONS: dict[str, Callable[..., Tensor]] = {"mse": F.mse_loss, "cross_entropy": F.cross_entropy}


# --- trainers: how a method steps, and which weights are evaluated ---


class Trainer:
    """Trains a model, batch by batch, and keeps an average of its weights where `average`."""

    def __init__(self, model: nn.Module, average: float | None = None) -> None:
        self.model = model
        self.average = None if average is None else mq.EMA(average)
        self.mean: Tensor | None = None
        self.count = 0

    def step(self, x: Tensor, y: Tensor) -> None:
        raise NotImplementedError

    def run(self, batches: Batches, after: Callable[[], bool]) -> None:
        """Steps, with a call of `after` behind each, until it returns that this was the last."""
        for x, y in batches:
            self.step(x, y)
            self.update_average()
            if after():
                return

    @torch.no_grad()
    def update_average(self) -> None:
        if self.average is not None:
            theta = parameters_to_vector(self.model.parameters())
            self.mean = theta if self.mean is None else self.average.update(self.mean, theta, self.count)
            self.count += 1

    @contextmanager
    def evaluated(self) -> Iterator[None]:
        """The average in place of the weights, where there is one."""
        if self.mean is None:
            yield
            return
        theta = parameters_to_vector(self.model.parameters()).detach().clone()
        place(self.model, self.mean)
        try:
            yield
        finally:
            place(self.model, theta)


@torch.no_grad()
def place(model: nn.Module, theta: Tensor) -> None:
    """θ into the parameters, in place: an optimizer may hold views of them."""
    parameters = list(model.parameters())
    for p, values in zip(parameters, theta.split([p.numel() for p in parameters]), strict=True):
        p.copy_(values.view_as(p))


class Ours(Trainer):
    """LM and its relatives: they keep the average themselves."""

    def __init__(self, opt: mq.LM) -> None:
        super().__init__(opt.model)
        self.opt = opt

    def step(self, x: Tensor, y: Tensor) -> None:
        self.opt.step(x, y)

    @contextmanager
    def evaluated(self) -> Iterator[None]:
        with self.opt.averaged() if self.opt.average is not None else nullcontext():
            yield


class Torch(Trainer):
    """An optimizer of torch.optim, or one with its manners."""

    def __init__(self, model: nn.Module, loss: str, opt: Any, average: float | None) -> None:
        super().__init__(model, average)
        self.loss, self.opt = FUNCTIONS[loss], opt

    def step(self, x: Tensor, y: Tensor) -> None:
        def closure() -> Tensor:
            self.opt.zero_grad()
            value = self.loss(self.model(x), y)
            value.backward()
            return value

        self.opt.step(closure)


class PSGD(Torch):
    """psgd-torch: Kronecker-product preconditioners fitted to Hessian-vector products (Li 2018)."""

    def __init__(self, model: nn.Module, loss: str, hyper: Hyper) -> None:
        psgd = needed("psgd_torch", "psgd-torch")
        rates = {"lr_params": hyper["lr"], "lr_preconditioner": hyper["lr_preconditioner"]}
        with contextlib.redirect_stdout(io.StringIO()):  # it prints advice on its defaults
            opt = psgd.Kron(
                [*model.parameters()], **rates, momentum=hyper["momentum"], grad_clip_max_norm=hyper["clip"]
            )
        super().__init__(model, loss, opt, hyper["average"])

    def step(self, x: Tensor, y: Tensor) -> None:
        self.opt.step(lambda: self.loss(self.model(x), y))  # it differentiates by itself


class Peer(Trainer):
    """torch-levenberg-marquardt, with its fastest solver. Its vmap refuses RReLU: it gets the LeakyReLU of eval mode.

    On cross-entropy it takes the root of each sample's loss as residual, one row per sample.
    """

    def __init__(self, model: nn.Module, loss: str, hyper: Hyper) -> None:
        super().__init__(deterministic(model), hyper["average"])
        training, losses, damping = (peer(name) for name in ("training", "loss", "damping"))
        self.module = training.LevenbergMarquardtModule(
            self.model,
            {"mse": losses.MSELoss, "cross_entropy": losses.CrossEntropyLoss}[loss](),
            learning_rate=hyper["lr"],
            attempts_per_step=hyper["attempts"],
            damping_strategy=damping.StandardDampingStrategy(starting_value=hyper["lam"]),
            solve_method="cholesky",
        )

    def step(self, x: Tensor, y: Tensor) -> None:
        with contextlib.redirect_stdout(io.StringIO()):  # it prints every factorisation that fails
            self.module.training_step(x, y)


class BFGS(Trainer):
    """SciPy's BFGS on the full batch: one iteration of it is a step."""

    def __init__(self, model: nn.Module, loss: str, hyper: Hyper) -> None:
        super().__init__(model, hyper["average"])
        self.minimize = needed("scipy.optimize", "scipy").minimize
        self.loss, self.hyper = FUNCTIONS[loss], hyper

    def run(self, batches: Batches, after: Callable[[], bool]) -> None:
        x, y = next(iter(batches))
        parameters = list(self.model.parameters())
        start = parameters_to_vector(parameters).detach()

        def value_and_gradient(theta: Any) -> tuple[float, Any]:
            place(self.model, torch.as_tensor(theta))
            value = self.loss(self.model(x), y)
            gradient = torch.autograd.grad(value, parameters)
            return value.item(), parameters_to_vector(gradient).cpu().numpy()

        def callback(theta: Any) -> None:
            place(self.model, torch.as_tensor(theta))
            self.update_average()
            if after():
                raise StopIteration

        # It stops by itself only where the gradient is zero or the line search finds nothing lower.
        options = {"gtol": 0.0, "c1": self.hyper["c1"], "c2": self.hyper["c2"], "maxiter": sys.maxsize}
        result = self.minimize(
            value_and_gradient, start.cpu().numpy(), jac=True, method="BFGS", callback=callback, options=options
        )
        place(self.model, torch.as_tensor(result.x))


# --- what other libraries need ---


class Unavailable(RuntimeError):
    """A package that this method needs is not installed."""


def deterministic(model: nn.Module) -> nn.Module:
    """Every RReLU becomes the LeakyReLU that it is in eval mode."""
    for name, child in model.named_children():
        if isinstance(child, nn.RReLU):
            setattr(model, name, nn.LeakyReLU((child.lower + child.upper) / 2))
        else:
            deterministic(child)
    return model


def needed(module: str, package: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise Unavailable(f"needs the package {package}: pip install {package} ({error})") from error


def peer(name: str) -> types.ModuleType:
    """A module of torch-levenberg-marquardt. The package itself imports Lightning and torchmetrics for its training
    loop, which a step does not need: only the modules of the step are imported."""
    package = "torch_levenberg_marquardt"
    if package not in sys.modules:
        spec = importlib.machinery.PathFinder.find_spec(package)
        if spec is None or spec.submodule_search_locations is None:
            raise Unavailable(
                "needs the package torch-levenberg-marquardt: pip install --no-deps torch-levenberg-marquardt"
            )
        bare = types.ModuleType(package)
        bare.__path__ = list(spec.submodule_search_locations)
        sys.modules[package] = bare
    return importlib.import_module(f"{package}.{name}")


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
DECAY = OneOf((0.0, 1e-5, 1e-4, 5e-4))
UPHILL = OneOf((None, 1.0, 2.0))  # b; None: only a decrease is accepted


# --- methods ---


Build = Callable[[nn.Module, str, Hyper], Trainer]  # model, loss, hyper-parameters
Space = Mapping[str, Range | OneOf]


@dataclass(frozen=True)
class Method:
    """`default` has the paper's values; if it prints none, the defaults of the library or our own."""

    build: Build
    default: Hyper
    space: Space
    on_mnist: Hyper = field(default_factory=dict)  # if other values hold there
    mnist_space: Space = field(default_factory=dict)  # beside `space`
    sine_only: bool = False
    key: str = ""
    label: str = ""

    def hyper(self, problem: str) -> dict[str, Any]:
        return {"average": None, **self.default, **(self.on_mnist if problem != "sine" else {})}

    def choices(self, problem: str) -> dict[str, Range | OneOf]:
        return {**self.space, **(self.mnist_space if problem != "sine" else {}), "average": AVERAGE}


RULES = {"gain ratio": mq.GainRatio, "tenfold": mq.TenFold, "relative decrease": mq.RelativeDecrease}  # for λ
ROWS = {"auto": None, "exact": mq.Exact(), "empirical": mq.Empirical(), "sampled": mq.Sampled(1)}


def _ours(make: Callable[..., mq.LM], parts: Callable[[Hyper], dict[str, Any]] = lambda h: {}) -> Build:
    """LM or a preset with the parts that the hyper-parameters name."""

    def build(model: nn.Module, loss: str, h: Hyper) -> Trainer:
        average = None if h["average"] is None else mq.EMA(h["average"])
        return Ours(make(model, loss, **{"average": average, **({"lr": h["lr"]} if "lr" in h else {}), **parts(h)}))

    return build


def _of_torch(make: Callable[[Any, Hyper], torch.optim.Optimizer]) -> Build:
    return lambda model, loss, h: Torch(model, loss, make(model.parameters(), h), h["average"])


def _damped(rule: Callable[..., Any], *names: str) -> Callable[[Hyper], dict[str, Any]]:
    """A rule for λ that begins at `lam`, with these hyper-parameters for its options."""
    return lambda h: {"schedule": rule(initial=h["lam"], **{name: h[name] for name in names})}


def _uphill(h: Hyper, **options: bool) -> mq.Decrease | mq.Uphill:
    return mq.Decrease() if h["b"] is None else mq.Uphill(h["b"], **options)


def _lm(h: Hyper) -> dict[str, Any]:
    return {
        "rows": ROWS[h["rows"]],
        "schedule": mq.Balanced(initial=h["lam"], target=h["target"]),
        "momentum": mq.AdaptiveMomentum(xi=h["xi"], dP=math.inf, cap=True, same_data=True),
        "acceptance": _uphill(h, of_late=True),
    }


def _paper(h: Hyper) -> dict[str, Any]:
    return {
        "rows": ROWS[h["rows"]],
        "schedule": RULES[h["rule"]](initial=h["lam"]),
        "momentum": mq.AdaptiveMomentum(xi=h["xi"], dP=h["dP"], cap=True),
        "acceptance": _uphill(h),
    }


def _code(h: Hyper) -> dict[str, Any]:
    schedule, momentum = mq.RelativeDecrease(initial=h["lam"]), mq.AdaptiveMomentum(xi=h["xi"], dP=h["dP"])
    return {"schedule": schedule, "momentum": momentum, "acceptance": _uphill(h)}


METHODS = {
    key: replace(method, key=key, label=OPTIMIZERS[key])
    for key, method in {
        "lm": Method(
            _ours(mq.LM, _lm),
            # the defaults of mq.LM
            {"lr": 1.0, "lam": 3.0, "xi": 0.9, "b": 1.0, "rows": "auto", "target": 0.95, "average": 0.95},
            {"lr": Range(0.3, 1.0), "lam": LAMBDA, "xi": XI, "b": UPHILL},
            mnist_space={"rows": OneOf(("auto", "exact", "sampled")), "target": Range(0.8, 1.0, log=False)},
        ),
        "lm-paper": Method(
            _ours(mq.presets.paper, _paper),
            {"lr": 1.0, "lam": 1.0, "rule": "gain ratio", "xi": 0.9, "dP": 0.6, "b": None, "rows": "exact"},
            {"lr": Range(0.1, 1.0), "lam": LAMBDA, "rule": OneOf(tuple(RULES)), "xi": XI, "dP": DP, "b": UPHILL},
            on_mnist={"dP": 1.0, "b": 2.0},
            mnist_space={"rows": OneOf(("exact", "empirical"))},
        ),
        "lm-code": Method(
            _ours(mq.presets.authors_code, _code),
            {"lr": 1.0, "lam": 1.0, "xi": 0.9, "dP": 0.6, "b": 2.0},
            {"lr": Range(0.1, 1.0), "lam": LAMBDA, "xi": XI, "dP": DP, "b": OneOf((1.0, 2.0))},
        ),
        "lm-vanilla": Method(
            _ours(mq.presets.vanilla, _damped(mq.TenFold, "factor")),
            {"lr": 1.0, "lam": 1.0, "factor": 10.0},
            {"lr": Range(0.1, 1.0), "lam": LAMBDA, "factor": Range(1.5, 10.0)},
        ),
        "gauss-newton": Method(_ours(mq.presets.gauss_newton), {"lr": 1.0}, {"lr": Range(0.01, 1.0)}),
        "newton": Method(
            _ours(mq.presets.newton, _damped(mq.TenFold)),
            {"lr": 1.0, "lam": 1.0},
            {"lr": Range(0.1, 1.0), "lam": LAMBDA},
            sine_only=True,
        ),
        "bfgs": Method(
            BFGS,
            {"c1": 1e-4, "c2": 0.9},  # SciPy's defaults
            {"c1": Range(1e-5, 1e-2), "c2": Range(0.1, 0.95, log=False)},
            sine_only=True,
        ),
        "lbfgs": Method(
            _of_torch(
                lambda p, h: LBFGS(p, h["lr"], h["iterations"], history_size=h["history"], line_search_fn=h["search"])
            ),
            {"lr": 0.005, "iterations": 1, "history": 100, "search": None},  # torch's defaults beside the paper's lr
            {"lr": Range(1e-3, 1.0), "history": OneOf((5, 20, 100)), "search": OneOf((None, "strong_wolfe"))},
            on_mnist={"iterations": 20},  # of torch's step, on one batch: its default
        ),
        "hessian-free": Method(
            _ours(
                mq.presets.hessian_free,
                _damped(partial(mq.GainRatio, down=2 / 3, up=1.5, slow_down=2 / 3, slow_up=1.5, floor=1e-12)),
            ),
            {"lr": 0.1, "lam": 1.0},
            {"lr": Range(0.05, 1.0), "lam": LAMBDA},
        ),
        "kfac": Method(
            _ours(mq.presets.kfac, _damped(mq.GainRatio, "floor")),
            {"lr": 0.05, "lam": 1.0, "floor": 0.3},  # the preset's beside the paper's lr
            {"lr": Range(0.01, 1.0), "lam": LAMBDA},
            on_mnist={"lr": 1.0},
            mnist_space={"floor": Range(0.01, 3.0)},  # λ of the same data has none
        ),
        "sgd": Method(
            _of_torch(lambda p, h: SGD(p, h["lr"], h["momentum"], weight_decay=h["weight_decay"], fused=True)),
            {"lr": 0.05, "momentum": 0.9, "weight_decay": 5e-4},
            {"lr": Range(1e-3, 1.0), "momentum": Range(0.5, 0.99, log=False), "weight_decay": DECAY},
            on_mnist={"lr": 0.1},
        ),
        "adam": Method(
            _of_torch(lambda p, h: Adam(p, h["lr"], (h["beta1"], h["beta2"]), fused=True)),
            {"lr": 0.01, "beta1": 0.9, "beta2": 0.999},
            {"lr": Range(1e-3, 0.3), "beta1": OneOf((0.8, 0.9, 0.95)), "beta2": OneOf((0.9, 0.99, 0.999))},
            on_mnist={"lr": 0.05},
        ),
        "psgd": Method(
            PSGD,
            {"lr": 0.01, "lr_preconditioner": 0.1, "momentum": 0.0, "clip": None},  # psgd-torch's defaults
            {
                **{"lr": Range(1e-3, 1.0), "lr_preconditioner": Range(0.01, 1.0)},
                **{"momentum": OneOf((0.0, 0.5, 0.9)), "clip": OneOf((None, 1.0, 10.0))},
            },
        ),
        "tlm": Method(
            Peer,
            {"lr": 1.0, "lam": 1e-3, "attempts": 10},  # its defaults
            {"lr": Range(0.05, 1.0), "lam": Range(1e-4, 1e2), "attempts": OneOf((1, 3, 10))},
        ),
    }.items()
}


# --- ablation: one of the improvements less, or one more ---


def improvements(loss: str) -> dict[str, tuple[dict[str, Any], dict[str, Any]]]:
    """What the paper has, and what is there without it."""
    dP = METHODS["lm-paper"].hyper("sine" if loss == "mse" else "mnist")["dP"]
    return {
        "max-diagonal": ({"damping": mq.MaxDiagonal()}, {"damping": mq.Identity()}),
        "momentum": ({"momentum": mq.AdaptiveMomentum(dP=dP, cap=True)}, {"momentum": None}),
        "search": ({"line_search": mq.Grid()}, {"line_search": None}),
        "uphill": ({"acceptance": mq.Uphill()}, {"acceptance": mq.Decrease()}),
        RULE: ({"schedule": mq.GainRatio()}, {"schedule": mq.TenFold()}),
    }


def _variant(key: str, label: str) -> Method:
    """ "paper", "paper-search", "vanilla+search", …: a preset with one part added or taken away."""
    name, sign, part = re.fullmatch(r"(paper|vanilla)(?:([+-])(.+))?", key).groups()  # type: ignore[union-attr]
    preset = mq.presets.paper if name == "paper" else mq.presets.vanilla

    def build(model: nn.Module, loss: str, h: Hyper) -> Trainer:
        return _ours(preset, lambda h: improvements(loss)[part][sign == "-"] if part else {})(model, loss, h)

    return Method(build, {}, {}, key=key, label=label)


VARIANTS = {key: _variant(key, label) for key, label in {**REMOVED, **ADDED}.items()}


def ablation(problem: str) -> dict[str, Method]:
    """The variants that differ on this problem: the paper's method, one with or without each part, and vanilla LM."""
    paper = {name for part in (*PARTS, RULE) for name in compared(part, problem)}
    return {key: method for key, method in VARIANTS.items() if key in paper or key in ADDED}
