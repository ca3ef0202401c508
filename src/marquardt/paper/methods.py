"""Every optimizer of the comparison: how it is built, its published hyper-parameters, and what may be tuned.

Torch alone is imported here; SciPy, psgd-torch and torch-levenberg-marquardt where a method needs them.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.machinery
import io
import sys
import types
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parameters_to_vector

from marquardt import presets
from marquardt.jacobian.rows import Empirical, Exact
from marquardt.optimizer import LM
from marquardt.parts.acceptance import Decrease, Uphill
from marquardt.parts.average import EMA
from marquardt.parts.damping import Identity, MaxDiagonal
from marquardt.parts.line_search import Grid
from marquardt.parts.momentum import AdaptiveMomentum
from marquardt.parts.schedule import GainRatio, PaperSchedule, TenFold

Hyper = Mapping[str, Any]  # plain values: they go into logs and files
Batches = Iterable[tuple[Tensor, Tensor]]


class Unavailable(RuntimeError):
    """A package that this method needs is not installed."""


# --- trainers: how to step, and which weights to evaluate ---


class Trainer(ABC):
    """Trains a model, batch by batch, and keeps an average of its weights where `average`."""

    def __init__(self, model: nn.Module, average: float | None = None) -> None:
        self.model = model
        self.average = None if average is None else EMA(average)
        self.mean: Tensor | None = None
        self.count = 0

    @abstractmethod
    def run(self, batches: Batches, after: Callable[[], bool]) -> None:
        """Steps, with a call of `after` behind each, until it says that this was the last."""

    @torch.no_grad()
    def update_average(self) -> None:
        if self.average is not None:
            theta = parameters_to_vector(self.model.parameters())
            self.mean = theta if self.mean is None else self.average.update(self.mean, theta, self.count)
            self.count += 1

    def evaluated(self) -> AbstractContextManager[None]:
        """The average in place of the weights, where there is one."""
        return nullcontext() if self.mean is None else self._averaged(self.mean)

    @contextmanager
    def _averaged(self, mean: Tensor) -> Iterator[None]:
        theta = parameters_to_vector(self.model.parameters()).detach().clone()
        place(self.model, mean)
        try:
            yield
        finally:
            place(self.model, theta)


class Stepwise(Trainer):
    """A step for every batch."""

    @abstractmethod
    def step(self, x: Tensor, y: Tensor) -> None: ...

    def run(self, batches: Batches, after: Callable[[], bool]) -> None:
        for x, y in batches:
            self.step(x, y)
            self.update_average()
            if after():
                return


@torch.no_grad()
def place(model: nn.Module, theta: Tensor) -> None:
    """θ into the parameters, in place: an optimizer may hold views of them."""
    parameters = list(model.parameters())
    for p, values in zip(parameters, theta.split([p.numel() for p in parameters]), strict=True):
        p.copy_(values.view_as(p))


class Ours(Stepwise):
    """LM and its relatives: they keep the average themselves."""

    def __init__(self, opt: LM) -> None:
        super().__init__(opt.model)
        self.opt = opt

    def step(self, x: Tensor, y: Tensor) -> None:
        self.opt.step(x, y)

    def evaluated(self) -> AbstractContextManager[None]:
        return self.opt.averaged() if self.opt.average is not None else nullcontext()


class Torch(Stepwise):
    """An optimizer of torch.optim, or one with its manners."""

    def __init__(self, model: nn.Module, loss: str, opt: torch.optim.Optimizer, average: float | None) -> None:
        super().__init__(model, average)
        self.loss, self.opt = FUNCTIONS[loss], opt

    def step(self, x: Tensor, y: Tensor) -> None:
        def closure() -> Any:  # a tensor, where torch.optim declares a float
            self.opt.zero_grad()
            value = self.loss(self.model(x), y)
            value.backward()
            return value

        self.opt.step(closure)


class PSGD(Stepwise):
    """psgd-torch: Kronecker-product preconditioners fitted to Hessian-vector products (Li 2018)."""

    def __init__(self, model: nn.Module, loss: str, hyper: Hyper) -> None:
        super().__init__(model, hyper["average"])
        psgd = needed("psgd_torch", "psgd-torch")
        self.loss = FUNCTIONS[loss]
        with contextlib.redirect_stdout(io.StringIO()):  # it prints advice on its defaults
            self.opt = psgd.Kron(
                list(model.parameters()),
                lr_params=hyper["lr"],
                lr_preconditioner=hyper["lr_preconditioner"],
                momentum=hyper["momentum"],
                grad_clip_max_norm=hyper["clip"],
            )

    def step(self, x: Tensor, y: Tensor) -> None:
        self.opt.step(lambda: self.loss(self.model(x), y))


class Peer(Stepwise):
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
        found = self.minimize(
            value_and_gradient, start.cpu().numpy(), jac=True, method="BFGS", callback=callback, options=options
        )
        place(self.model, torch.as_tensor(found.x))


FUNCTIONS: dict[str, Callable[..., Tensor]] = {"mse": F.mse_loss, "cross_entropy": F.cross_entropy}


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
    loop, which a step does not need: without those, only the modules of the step are imported."""
    package = "torch_levenberg_marquardt"
    if package not in sys.modules:
        spec = importlib.machinery.PathFinder.find_spec(package)
        if spec is None or spec.submodule_search_locations is None:
            raise Unavailable(
                "needs the package torch-levenberg-marquardt: pip install --no-deps torch-levenberg-marquardt"
            )
        try:
            return importlib.import_module(f"{package}.{name}")
        except ImportError:
            for loaded in [loaded for loaded in sys.modules if loaded.split(".")[0] == package]:
                del sys.modules[loaded]
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


class Choice(NamedTuple):
    """One of these."""

    values: tuple[Any, ...]


AVERAGE = Choice((None, 0.8, 0.9, 0.95, 0.98))  # offered to every optimizer
LAMBDA = Range(1e-3, 1e2)


# --- methods ---


@dataclass(frozen=True)
class Method:
    """`published` has the paper's values; where it has none, the defaults of the library or our own."""

    key: str
    label: str
    build: Callable[[nn.Module, str, Hyper], Trainer]  # model, loss, hyper-parameters
    published: Hyper
    space: Mapping[str, Range | Choice]
    on_mnist: Hyper | None = None  # where the paper gives other values there
    sine_only: bool = False

    def hyper(self, problem: str) -> dict[str, Any]:
        return {"average": None, **self.published, **((self.on_mnist or {}) if problem != "sine" else {})}

    def choices(self) -> dict[str, Range | Choice]:
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


METHODS = {
    method.key: method
    for method in [
        Method(
            "lm",
            "LM (ours)",
            _lm,
            {"lr": 1.0, "lam": 1.0, "floor": 3.0, "average": 0.95},  # the defaults of mq.LM
            {"lr": Range(0.3, 1.0), "lam": LAMBDA, "floor": Range(0.3, 30.0)},
        ),
        Method(
            "lm-paper",
            "LM (paper)",
            _paper,
            {"lr": 1.0, "lam": 1.0, "xi": 0.9, "dP": 0.6},
            {"lr": Range(0.1, 1.0), "lam": LAMBDA, "xi": Range(0.6, 0.99, log=False), "dP": Range(0.05, 5.0)},
        ),
        Method(
            "lm-vanilla",
            "vanilla LM",
            _vanilla,
            {"lr": 1.0, "lam": 1.0, "factor": 10.0},
            {"lr": Range(0.1, 1.0), "lam": LAMBDA, "factor": Range(1.5, 10.0)},
        ),
        Method("gauss-newton", "Gauss-Newton", _gauss_newton, {"lr": 1.0}, {"lr": Range(0.01, 1.0)}),
        Method(
            "newton",
            "Newton",
            _newton,
            {"lr": 1.0, "lam": 1.0},
            {"lr": Range(0.1, 1.0), "lam": LAMBDA},
            sine_only=True,
        ),
        Method(
            "bfgs",
            "BFGS",
            BFGS,
            {"c1": 1e-4, "c2": 0.9},  # SciPy's defaults
            {"c1": Range(1e-5, 1e-2), "c2": Range(0.1, 0.95, log=False)},
            sine_only=True,
        ),
        Method(
            "lbfgs",
            "L-BFGS",
            _lbfgs,
            {"lr": 0.005, "iterations": 1, "history": 100, "search": None},  # torch's defaults beside the paper's lr
            {
                "lr": Range(1e-3, 1.0),
                "history": Choice((5, 20, 100)),
                "search": Choice((None, "strong_wolfe")),
            },
            on_mnist={"iterations": 20},  # of torch's step, on one batch: its default
        ),
        Method(
            "hessian-free",
            "Hessian-free",
            _hessian_free,
            {"lr": 0.1, "lam": 1.0},
            {"lr": Range(0.05, 1.0), "lam": LAMBDA},
        ),
        Method(
            "kfac",
            "KFAC",
            _kfac,
            {"lr": 0.05, "lam": 1.0},
            {"lr": Range(0.01, 1.0), "lam": LAMBDA},
            on_mnist={"lr": 1.0},
        ),
        Method(
            "sgd",
            "SGD",
            _sgd,
            {"lr": 0.05, "momentum": 0.9, "weight_decay": 5e-4},
            {
                "lr": Range(1e-3, 1.0),
                "momentum": Range(0.5, 0.99, log=False),
                "weight_decay": Choice((0.0, 1e-5, 1e-4, 5e-4)),
            },
            on_mnist={"lr": 0.1},
        ),
        Method(
            "adam",
            "Adam",
            _adam,
            {"lr": 0.01, "beta1": 0.9, "beta2": 0.999},
            {"lr": Range(1e-3, 0.3), "beta1": Choice((0.8, 0.9, 0.95)), "beta2": Choice((0.9, 0.99, 0.999))},
            on_mnist={"lr": 0.05},
        ),
        Method(
            "psgd",
            "PSGD",
            PSGD,
            {"lr": 0.01, "lr_preconditioner": 0.1, "momentum": 0.0, "clip": None},  # psgd-torch's defaults
            {
                "lr": Range(1e-3, 1.0),
                "lr_preconditioner": Range(0.01, 1.0),
                "momentum": Choice((0.0, 0.5, 0.9)),
                "clip": Choice((None, 1.0, 10.0)),
            },
        ),
        Method(
            "tlm",
            "torch-levenberg-marquardt",
            Peer,
            {"lr": 1.0, "lam": 1e-3, "attempts": 10},  # its defaults
            {"lr": Range(0.05, 1.0), "lam": Range(1e-4, 1e2), "attempts": Choice((1, 3, 10))},
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


IMPROVEMENTS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {  # what the paper has; what is there without it
    "max-diagonal": ("max-diagonal damping", {"damping": MaxDiagonal()}, {"damping": Identity()}),
    "momentum": ("momentum", {"momentum": AdaptiveMomentum()}, {"momentum": None}),
    "search": ("line search", {"line_search": Grid()}, {"line_search": None}),
    "uphill": ("uphill acceptance", {"acceptance": Uphill()}, {"acceptance": Decrease()}),
}
ABLATION = {
    method.key: method
    for method in [
        Method("paper", "all four", _with(presets.paper, {}), {}, {}),
        *(
            Method(f"paper-{key}", f"without {name}", _with(presets.paper, without), {}, {})
            for key, (name, _, without) in IMPROVEMENTS.items()
        ),
        Method("vanilla", "vanilla", _with(presets.vanilla, {}), {}, {}),
        *(
            Method(f"vanilla+{key}", f"vanilla + {name}", _with(presets.vanilla, part), {}, {})
            for key, (name, part, _) in IMPROVEMENTS.items()
        ),
    ]
}
