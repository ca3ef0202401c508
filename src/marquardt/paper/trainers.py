"""Every optimizer of the comparison as a trainer: how it steps, and which weights are evaluated.

Torch alone is imported here; SciPy, psgd-torch and torch-levenberg-marquardt by the trainers that need them.
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
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parameters_to_vector

from marquardt import EMA, LM

Hyper = Mapping[str, Any]  # plain values: they go into logs and files
Batches = Iterable[tuple[Tensor, Tensor]]
FUNCTIONS: dict[str, Callable[..., Tensor]] = {"mse": F.mse_loss, "cross_entropy": F.cross_entropy}


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
