"""States of optimizers that were tampered with: refused with nothing changed, or loaded, and then steps go on.

    python tests/fuzz/states.py --minutes 60

One or two entries anywhere in a state_dict get another type, shape, dtype or value, are taken out, are exchanged with
others or with those of another optimizer, or get company.
"""

from __future__ import annotations

import copy
import math
import sys
import warnings
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parents[1]))

import torch
from torch import Tensor, nn

import marquardt as mq
from fuzz import attacks
from fuzz.settings import settings
from support.unchanged import changes, world

Way = tuple[Any, ...]


def mlp(*sizes: int) -> nn.Module:
    a, b, c = sizes or (2, 4, 3)
    return nn.Sequential(nn.Linear(a, b), nn.Tanh(), nn.Linear(b, c))


def tokens() -> nn.Module:
    return nn.Sequential(nn.Embedding(5, 2), nn.Flatten(), nn.Linear(4, 3))


def convolutional() -> nn.Module:
    return nn.Sequential(nn.Conv2d(2, 4, 2, groups=2), nn.Tanh(), nn.Flatten(), nn.Linear(4, 3))


def towards() -> mq.LM:
    model = mlp()
    return mq.LM(model, "mse", weight_decay=mq.WeightDecay(0.1, towards="start"))


def grouped() -> mq.LM:
    model = mlp()
    first, second = ([p for name, p in model.named_parameters() if name[0] == k] for k in "02")
    groups = [{"params": first, "weight_decay": torch.full((1,), 0.1)}, {"params": second, "weight_decay": 0.01}]
    return mq.LM(model, "mse", params=groups)


MEAN = mq.MeanEigenvalue()
OPTIMIZERS: dict[str, Callable[[], mq.LM]] = {
    "default": lambda: mq.LM(mlp(), "mse"),
    "metric of every step": lambda: mq.LM(mlp(), "mse", damping=mq.KroneckerMetric(every=1, steady=None)),
    "double": lambda: mq.LM(mlp().double(), "mse"),
    "coarse": lambda: mq.LM(mlp().bfloat16(), "mse"),
    "running average": lambda: mq.LM(mlp(), "mse", curvature=mq.Dense(inertia=0.9), damping=mq.MaxDiagonal()),
    "chosen average": lambda: mq.LM(mlp(), "mse", curvature=mq.Auto(inertia=0.5), damping=mq.FactoredMaxDiagonal()),
    "gram": lambda: mq.LM(mlp(), "mse", curvature=mq.Gram(chunk=3), damping=mq.LayerMeanEigenvalue()),
    "conjugate gradients": lambda: mq.LM(mlp(), "mse", curvature=mq.MatrixFree(), damping=MEAN),
    "factors": lambda: mq.LM(mlp(), "mse", curvature=mq.Kronecker(), damping=mq.FactoredMaxDiagonal()),
    "kept factors": lambda: mq.LM(mlp(), "mse", curvature=mq.Kronecker(every=3), damping=MEAN),
    "ekfac": lambda: mq.LM(mlp(), "mse", curvature=mq.EKFAC(), damping=MEAN),
    "hessian": lambda: mq.LM(mlp(), "mse", curvature=mq.Hessian(), damping=mq.Identity()),
    "tokens": lambda: mq.LM(tokens(), "mse", damping=mq.FactoredMaxDiagonal(), average=mq.Polyak()),
    "tokens by factors": lambda: mq.LM(tokens(), "mse", curvature=mq.Kronecker(), damping=MEAN),
    "convolution": lambda: mq.LM(convolutional(), "mse"),
    "convolution, factored": lambda: mq.LM(convolutional(), "mse", damping=mq.FactoredMaxDiagonal()),
    "quadratic momentum": lambda: mq.LM(mlp(), "mse", momentum=mq.QuadraticMomentum(), schedule=mq.TenFold()),
    "towards the start": towards,
    "groups": grouped,
    "as many numbers": lambda: mq.LM(mlp(3, 4, 2), "mse"),
}


def batch(opt: mq.LM, i: int, N: int = 8) -> tuple[Tensor, Tensor]:
    random = torch.Generator().manual_seed(i)
    first = next(iter(opt.model.children()))
    p = opt.params[0]
    if isinstance(first, nn.Embedding):
        x: Tensor = torch.randint(5, (N, 2), generator=random)
    else:
        shape = (2, 2, 2) if isinstance(first, nn.Conv2d) else (p.shape[1],)
        x = torch.randn(N, *shape, generator=random).to(p.dtype)
    return x, torch.randn(N, opt.params[-1].numel(), generator=random).to(p.dtype)


def begun(name: str, same: bool) -> mq.LM:
    """After a few steps, on the same data or on others"""
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        opt = OPTIMIZERS[name]()
        for i in range(4):
            opt.step(*batch(opt, 0 if same else i))
    return opt


@cache
def saved(name: str, same: bool) -> dict[str, Any]:
    return begun(name, same).state_dict()


# ---- what is done to a state


class Tampering:
    """Drawn from a generator"""

    def __init__(self, state: dict[str, Any], other: dict[str, Any], random: torch.Generator) -> None:
        self.state, self.other, self.random = state, other, random
        self.told: list[str] = []

    def below(self, n: int) -> int:
        return int(torch.randint(n, (), generator=self.random))

    def pick(self, some: Any) -> Any:
        return list(some)[self.below(len(some))]

    def once(self) -> None:
        # By depth first, or the many numbers of a plan would be all there is.
        found = places(self.state)
        tops = sorted({str(path[:2]) for path in found})
        rich = [top for top in tops if any(f"'{name}'" in top for name in ("D", "past", "plan", "mean", "previous"))]
        if (real := precisions(self.state)) and not self.below(10):
            (*way, key), dtype = self.pick(real)
            at(self.state, way)[key] = at(self.state, (*way, key)).to(dtype)
            self.told.append(f"{dtype} at {'/'.join(map(str, (*way, key)))}")
            return
        top = self.pick(rich if rich and self.below(5) < 2 else tops)
        path = self.pick([path for path in found if str(path[:2]) == top])
        *way, key = path
        holder = at(self.state, way)
        what = self.pick(("value", "value", "value", "value", "remove", "exchange", "foreign", "add"))
        self.told.append(f"{what} at {'/'.join(map(str, path))}")
        if what == "value":
            holder[key] = self.changed(holder[key])
            self.told[-1] += f": {str(holder[key])[:80]}"
        elif what == "remove":
            del holder[key]
        elif what == "exchange":
            keys = list(holder) if isinstance(holder, dict) else list(range(len(holder)))
            other = self.pick(keys)
            holder[key], holder[other] = holder[other], holder[key]
            self.told[-1] += f" with {other}"
        elif what == "foreign":
            elsewhere = self.pick(places(self.other))
            holder[key] = copy.deepcopy(at(self.other, elsewhere))
            self.told[-1] += f" from {'/'.join(map(str, elsewhere))}"
        elif isinstance(holder, dict):
            holder[self.pick(("G", "x", "batches", "count", "left", "size", 3, "lam", "plan"))] = self.value()
        else:
            holder.append(self.value())

    def value(self) -> Any:
        return copy.deepcopy(self.pick(VALUES))

    def changed(self, value: Any) -> Any:
        if isinstance(value, Tensor) and self.below(5):
            return self.tensor(value)
        if type(value) in (int, float) and self.below(2):
            return self.pick((-value, value + 1, 0, value * 1e6, type(value)(value // 2) if value < math.inf else 0))
        return self.value()

    def tensor(self, t: Tensor) -> Tensor:
        real = t.is_floating_point()
        kinds: list[Callable[[], Tensor]] = [
            lambda: t.to(self.pick((torch.float64, torch.float32, torch.float16, torch.int64, torch.bool))),
            lambda: t.to(self.pick((torch.complex64, torch.bfloat16, torch.uint8))),
            t.flatten,
            lambda: t[None],
            lambda: t[..., None],
            lambda: t.reshape(-1)[1:],
            lambda: t.mT if t.ndim > 1 else -t,
            lambda: torch.cat([t.reshape(-1)] * 2),
            lambda: t.reshape(-1)[:1].squeeze(),
            lambda: t.expand(3, *t.shape),
            lambda: t.new_zeros(0),
            lambda: -t,
            lambda: torch.zeros_like(t),
            lambda: torch.ones_like(t),
            lambda: 1e30 * t,
            lambda: 1e300 * t.double(),
            lambda: torch.randn(t.shape, generator=self.random).to(t.dtype),
            lambda: t.clone().requires_grad_() if real else t,
            lambda: nn.Parameter(t) if real else t,
            lambda: t.to_sparse() if t.ndim else t,
            lambda: t.to("meta"),
            *(partial(self.spoilt, t, value) for value in (math.nan, math.inf, -1e3, 1e20, 0)),
        ]
        return self.pick(kinds)() if t.layout == torch.strided and not (t.is_meta or t.is_complex()) else t

    def spoilt(self, t: Tensor, value: float) -> Tensor:
        t = t.clone()
        if t.numel() and (t.is_floating_point() or math.isfinite(value)):
            t.view(-1)[self.below(t.numel())] = value if t.is_floating_point() else int(value)
        return t


VALUES: tuple[Any, ...] = (
    None, True, False, 0, 1, -1, 3, 10**30, 2**53, 10**400, 0.5, -0.5, 1e30, math.nan, math.inf, -math.inf, "", "1",
    "Gram", "MatrixFree", "Kronecker", [], [1], [[1, 2], [3]], (), {}, {"a": {"b": [1]}}, [None], 1 + 2j, b"1",
    torch.tensor(0.5), torch.tensor(math.nan), torch.zeros(0), torch.zeros(3), torch.ones(2, 2), torch.tensor(True),
    torch.tensor([1, 2]), [torch.ones(1), None], [torch.tensor(1.0), [[torch.ones(3)]]], {1: 2}, set(), object, print,
)  # fmt: skip


def places(item: Any, way: Way = ()) -> list[Way]:
    """The ways to all entries"""
    pairs = item.items() if isinstance(item, dict) else enumerate(item) if isinstance(item, list) else ()
    return [place for key, value in pairs for place in [(*way, key), *places(value, (*way, key))]]


def at(item: Any, way: Any) -> Any:
    for key in way:
        item = item[key]
    return item


def precisions(state: Any) -> list[tuple[Way, torch.dtype]]:
    """Where real numbers are, and the precisions that they could have"""
    real = [(path, t) for path in places(state) if isinstance(t := at(state, path), Tensor) and t.is_floating_point()]
    others = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
    return [(path, dtype) for path, t in real for dtype in others if dtype != t.dtype and not t.is_meta]


# ---- an attack


def one(seed: int) -> str:
    random = torch.Generator().manual_seed(seed)
    names = list(OPTIMIZERS)
    name, foreign = (names[int(torch.randint(len(names), (), generator=random))] for _ in range(2))
    same, twice, goes_on = (torch.rand(3, generator=random) < torch.tensor([0.5, 0.3, 0.5])).tolist()
    state = copy.deepcopy(saved(name, same))
    tampering = Tampering(state, saved(foreign, same), random)
    for _ in range(1 + twice):
        tampering.once()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return loaded(name, same, state, f"{name}, {'; '.join(tampering.told)}", begun(name, goes_on))


def loaded(name: str, same: bool, state: dict[str, Any], words: str, opt: mq.LM) -> str:
    before = {**world(opt.model, opt), **settings(), "groups": copy.deepcopy(opt.param_groups)}
    try:
        opt.load_state_dict(state)
    except (ValueError, TypeError) as error:
        wrong = changes(before, {**world(opt.model, opt), **settings(), "groups": opt.param_groups})
        if wrong:
            raise attacks.Fault(f"{words}: refused, and {wrong} changed") from error
        where = error.__traceback__
        while where is not None and where.tb_next is not None:
            where = where.tb_next
        if where is not None and "marquardt" not in where.tb_frame.f_globals.get("__name__", ""):
            raise attacks.Fault(f"{words}: {type(error).__name__} raised outside: {error}") from error
        return "refused"
    except Exception as error:
        raise attacks.Fault(f"{words}: {type(error).__name__} while loading: {error}") from error
    try:
        for i in range(2):
            step = opt.step(*batch(opt, 0 if same else 7 + i))
            if not math.isfinite(step.loss) or not math.isfinite(step.new_loss):
                raise attacks.Fault(f"{words}: loaded, and the loss is {step.new_loss} after a step")
        with opt.averaged():
            finite = [bool(p.isfinite().all()) for p in opt.params]
        copy.deepcopy(opt).state_dict(), opt.state_dict(), repr(opt)
    except attacks.Fault:
        raise
    except Exception as error:
        raise attacks.Fault(f"{words}: loaded, and then {type(error).__name__}: {error}") from error
    if not all(finite) or not all(bool(p.isfinite().all()) for p in opt.params):
        raise attacks.Fault(f"{words}: loaded, and the weights are not finite")
    return "loaded"


if __name__ == "__main__":
    attacks.main(__doc__, one)
