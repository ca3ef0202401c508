"""A random case from one integer: a network, a loss, batches, and the parts of an optimizer."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from random import Random
from typing import Any

import torch
from torch import Tensor, nn

import marquardt as mq
from fuzz import pieces

START: dict[str, Any] = {
    "v": lambda r: ("v", r.choice([1, 2, 3, 4])),
    "s": lambda r: ("s", r.choice([1, 2, 3, 4]), r.choice([1, 2, 3, 4])),
    "c": lambda r: ("c", r.choice([1, 2, 3]), r.choice([3, 4, 5])),
    "i": lambda r: ("i", r.choice([1, 2]), r.choice([2, 3, 4]), r.choice([2, 3, 4])),
    "t": lambda r: ("t", r.choice([1, 2, 3, 4]), r.choice([3, 4, 5])),  # tokens: T of V
}
MOST = 400  # parameters


@dataclass(frozen=True)
class Case:
    """Everything that was drawn; a field can be replaced by a simpler one, which is how a failure is made smaller."""

    seed: int
    kind: str
    pieces: tuple[tuple[str, int], ...]  # names, and the seed of each
    head: str  # "vector" | "scalar" | "positions" | "tied"
    loss: str
    options: int  # seed of the options of the loss
    curvature: Any
    rows: Any
    damping: Any
    schedule: Any
    momentum: Any
    acceptance: Any
    line_search: Any
    average: Any
    attempts: int
    lr: float
    sizes: tuple[int, ...]
    same: bool  # the same data in every step
    weights: str  # "none" | "some" | "zeros" here and there | "halves": none for the first or the last samples
    over: bool  # several batches in one step
    frozen: float  # share of the parameters that do not train
    chosen: bool  # these are the params= of the optimizer, not frozen ones
    inputs: str  # "tensor" | "tuple" | "dict"
    training: bool  # BatchNorm too is in train mode

    def __str__(self) -> str:
        names = [name for name, _ in self.pieces]
        steps = f"{list(self.sizes)}{' same data' if self.same else ''}{' step_over' if self.over else ''}"
        parts = [self.curvature, self.rows, self.damping, self.schedule, self.momentum, self.acceptance]
        rest = [self.line_search, self.average, f"attempts={self.attempts}", f"lr={self.lr}"]
        flags = [f"weights={self.weights}"] if self.weights != "none" else []
        flags += [f"frozen={self.frozen}{' params=' if self.chosen else ''}"] if self.frozen else []
        flags += [self.inputs] if self.inputs != "tensor" else []
        flags += ["BatchNorm trains"] if self.training else []
        text = ", ".join(map(str, [*parts, *rest, *flags]))
        return f"{self.kind}:{'→'.join(names)}→{self.head} | {self.loss} | N={steps} | {text}"


def draw(seed: int) -> Case:
    for attempt in range(100):  # a network may be too large
        case = sketch(seed, Random(f"{seed}.{attempt}"))
        model = build(case)
        if sum(p.numel() for p in model.parameters() if p.requires_grad) <= limit(case):
            return case
    raise AssertionError(f"no case for seed {seed}")


def limit(case: Case) -> int:
    return 60 if isinstance(case.curvature, (mq.Hessian, mq.MatrixFree)) else MOST


def sketch(seed: int, rng: Random) -> Case:
    kind = rng.choice("vvvsssccitt")
    shape = {"t": "s"}.get(kind, kind)
    names = []
    for _ in range(rng.choice([1, 2, 2, 3, 3, 4, 5])):
        fitting = [n for n, (kinds, _, _) in pieces.PIECES.items() if shape in kinds]
        name = rng.choices(fitting, [pieces.PIECES[n][1] for n in fitting])[0]
        shape = {"as_image": "c", "as_sequence": "s", "flatten": "v"}.get(name, shape)
        shape = "v" if name in ("mean_over_time", "last_of_time") else shape
        names.append((name, rng.randrange(10**6)))
    loss = rng.choice(["mse", "mse", "mse", "cross_entropy", "cross_entropy", "cross_entropy", "bce", "huber",
                       "smooth_l1", "poisson", "residual"])  # fmt: skip
    curvature = draw_curvature(rng)
    over = rng.random() < 0.08 and not isinstance(curvature, mq.Gram)
    same = rng.random() < 0.35
    case = Case(
        seed=seed, kind=kind, pieces=tuple(names), head=rng.choice(["vector", "vector", "scalar", "positions", "tied"]),
        loss=loss, options=rng.randrange(10**6), curvature=curvature, rows=draw_rows(rng), damping=draw_damping(rng),
        schedule=draw_schedule(rng), momentum=draw_momentum(rng),
        acceptance=rng.choice([mq.Decrease(), mq.Decrease(), mq.Uphill(), mq.Uphill(b=1.0, against_best=True)]),
        line_search=rng.choice([None, mq.Backtracking(), mq.Grid(stop=2.0), mq.Bracket(), mq.Grid(stop=1.0, step=0.3),
                                mq.Grid(stop=1.5, along_step=True), mq.Backtracking(along_step=True)]),
        average=rng.choice([None, None, mq.EMA(), mq.Polyak()]), attempts=rng.choice([1, 1, 3]),
        lr=rng.choice([1.0, 1.0, 1.0, 0.5]),
        sizes=draw_sizes(rng, same), same=same, over=over,
        weights=rng.choice(["none", "none", "none", "some", "some", "zeros", "halves"]),
        frozen=rng.choice([0, 0, 0, 0, 0.3, 0.6]), chosen=rng.random() < 0.3,
        inputs=rng.choice(["tensor"] * 6 + ["tuple", "dict"]),
        training=isinstance(curvature, (mq.Hessian, mq.MatrixFree)) and rng.random() < 0.3,
    )  # fmt: skip
    if isinstance(curvature, mq.Hessian):
        case = replace(case, rows=mq.Exact())
    return case


def draw_curvature(rng: Random) -> Any:
    exact = {"tolerance": 0.0, "backtrack": False}
    return rng.choice([
        mq.Dense(), mq.Dense(), mq.Dense(small=0), mq.Dense(chunk=rng.choice([1, 2, 5])), mq.Dense(inertia=0.6),
        mq.Dense(chunk=3, small=0), mq.Gram(), mq.Gram(), mq.Gram(whole=0), mq.Gram(whole=0),
        mq.Gram(chunk=rng.choice([1, 2, 3])), mq.Gram(chunk=2, whole=0),
        mq.Auto(), mq.Auto(inertia=0.8), mq.Auto(chunk=4),
        mq.MatrixFree(iterations=1000, warm=0.0, **exact), mq.MatrixFree(iterations=1000, precondition=None, **exact),
        mq.MatrixFree(chunk=2, iterations=1000, **exact), mq.Hessian(), mq.Kronecker(), mq.Kronecker(every=2, chunk=3),
    ])  # fmt: skip


def draw_rows(rng: Random) -> Any:
    exact, one, two = mq.Exact(), mq.Sampled(1), mq.Sampled(2, seed=3)
    part = mq.Fraction(rng.choice([0.3, 0.5, 1.0]), rng.choice([exact, mq.Empirical(), one]))
    return rng.choice([exact, exact, exact, exact, mq.Empirical(), mq.Empirical(), one, two, part])


def draw_damping(rng: Random) -> Any:
    return rng.choice([mq.Identity(), mq.Identity(), mq.MeanEigenvalue(), mq.MeanEigenvalue(), mq.LayerMeanEigenvalue(),
                       mq.MaxDiagonal(), mq.MaxDiagonal(floor=0.0), mq.FactoredMaxDiagonal()])  # fmt: skip


def draw_schedule(rng: Random) -> Any:
    first = rng.choice([1e-2, 0.1, 1.0, 1.0, 10.0])
    return rng.choice([mq.Constant(first), mq.Constant(first), mq.TenFold(first), mq.RelativeDecrease(first),
                       mq.GainRatio(first), mq.GainRatio(first, floor=1e-12)])  # fmt: skip


def draw_momentum(rng: Random) -> Any:
    capped = mq.AdaptiveMomentum(dP=math.inf, cap=True)
    return rng.choice([None, None, capped, replace(capped, same_data=True), mq.AdaptiveMomentum()])


def draw_sizes(rng: Random, same: bool) -> tuple[int, ...]:
    if same:
        return (rng.choice([1, 2, 3, 5, 8]),) * 4
    few = rng.choice([(1, 7, 3), (1, 5, 5), (4, 4, 4), (6, 1, 6), (2, 1, 8), (12, 5, 1), (3, 4, 2)])
    return tuple(rng.randint(1, 9) for _ in range(3)) if rng.random() < 0.4 else few


# ---- the network


class Net(nn.Module):
    def __init__(self, body: list[nn.Module], head: nn.Module, table: nn.Embedding | None) -> None:
        super().__init__()
        self.table, self.body, self.head = table, nn.Sequential(*body), head

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x if self.table is None else self.table(x)))


class Tied(nn.Module):
    """F.linear with the table of the embedding."""

    def __init__(self, table: nn.Embedding, classes: bool) -> None:
        super().__init__()
        self.table, self.classes = table, classes

    def forward(self, h: Tensor) -> Tensor:
        z = nn.functional.linear(h, self.table.weight)
        return z.movedim(-1, 1) if self.classes else z


def build(case: Case) -> Net:
    """The model, in float64, the same at every call; the global generator is left as it was."""
    with torch.random.fork_rng(devices=[]):
        before = torch.get_default_dtype()
        torch.set_default_dtype(torch.float64)
        try:
            return assembled(case)
        finally:
            torch.set_default_dtype(before)


def assembled(case: Case) -> Net:
    rng = Random(f"{case.seed} shape")
    shape = START[case.kind](rng)
    torch.manual_seed(case.seed)
    table = None
    if case.kind == "t":
        E = rng.choice([2, 3])
        table = nn.Embedding(shape[2], E, padding_idx=rng.choice([None, 0, 1]))
        shape = ("s", shape[1], E)
    body: list[nn.Module] = []
    for name, own in case.pieces:
        kinds, _, make = pieces.PIECES[name]
        torch.manual_seed(own)
        made = make(Random(own), shape) if shape[0] in kinds else None
        if made is not None and math.prod(made[1][1:]) <= 60:
            body.append(made[0])
            shape = made[1]
    model = Net(body, make_head(case, shape, table), table)
    with torch.no_grad():  # norms start at weight 1, bias 0: a point where mistakes cancel
        for p in model.parameters():
            p.add_(0.1 * torch.randn_like(p))
    if case.training:
        model.train()
    free = Random(f"{case.seed} frozen")
    for p in list(model.parameters()) if not case.chosen else []:
        if free.random() < case.frozen:
            p.requires_grad_(False)
    if not any(p.requires_grad for p in model.parameters()):
        next(model.parameters()).requires_grad_(True)
    return model


def make_head(case: Case, shape: pieces.Shape, table: nn.Embedding | None) -> nn.Module:
    rng = Random(f"{case.seed} head")
    classes = case.loss == "cross_entropy"
    O = rng.choice([2, 3, 4]) if classes else rng.choice([1, 1, 2, 3])
    if case.head == "tied" and table is not None and shape[0] == "s" and shape[2] == table.embedding_dim:
        return Tied(table, classes)
    if case.head == "positions" and shape[0] != "v" and math.prod(shape[2:]) * O <= 16:
        if shape[0] == "s":
            f = nn.Linear(shape[2], O)
            return nn.Sequential(f, pieces.Fn(lambda z: z.movedim(-1, 1), "classes second")) if classes else f
        make = nn.Conv1d if shape[0] == "c" else nn.Conv2d
        return make(shape[1], O, 1)
    flat = [nn.Flatten()] if shape[0] != "v" else []
    F = math.prod(shape[1:])
    if case.head == "scalar" and not classes:
        return nn.Sequential(*flat, nn.Linear(F, 1), nn.Flatten(0))
    return nn.Sequential(*flat, nn.Linear(F, O, bias=rng.random() < 0.8))


def chosen_params(case: Case, model: Net) -> list[nn.Parameter] | None:
    if not case.chosen or not case.frozen:
        return None
    free = Random(f"{case.seed} frozen")
    some = [p for p in model.parameters() if free.random() >= case.frozen]
    return some or list(model.parameters())[:1]


# ---- the loss and the data


def make_loss(case: Case) -> Any:
    """What both the optimizer and the reference take: a name or a module of torch.nn."""
    rng = Random(case.options)
    reduction = rng.choice(["mean", "mean", "sum"])
    plain = rng.random() < 0.3
    match case.loss:
        case "residual":
            return "residual"
        case "cross_entropy" if plain and case.head in ("positions", "tied"):
            return nn.CrossEntropyLoss()  # there may be as many positions as classes, and the name would ask
        case _ if plain and case.loss != "smooth_l1":
            return case.loss
        case "mse":
            return nn.MSELoss(reduction=reduction)
        case "huber":
            return nn.HuberLoss(reduction=reduction, delta=rng.choice([0.3, 1.0]))
        case "smooth_l1":
            return nn.SmoothL1Loss(reduction=reduction, beta=rng.choice([0.4, 1.0]))
        case "poisson":
            return nn.PoissonNLLLoss(reduction=reduction)
        case "bce":
            a = rng.choice([None, torch.tensor([1.7], dtype=torch.float64)])
            return nn.BCEWithLogitsLoss(pos_weight=a, reduction=reduction)
    C = classes_of(case)
    weight = rng.choice([None, torch.linspace(0.5, 2, C, dtype=torch.float64)])
    smooth = rng.choice([0.0, 0.0, 0.1])
    ignore = rng.choice([-100, -100, 0]) if not soft(case) else -100
    return nn.CrossEntropyLoss(weight=weight, label_smoothing=smooth, ignore_index=ignore, reduction=reduction)


def soft(case: Case) -> bool:
    return Random(case.options + 1).random() < 0.25


def classes_of(case: Case) -> int:
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        return int(build(case).eval()(make_inputs(case, 1)).shape[1])


def make_inputs(case: Case, N: int) -> Tensor:
    shape = START[case.kind](Random(f"{case.seed} shape"))
    if case.kind == "t":
        return torch.randint(shape[2], (N, shape[1]))
    return torch.randn(N, *shape[1:], dtype=torch.float64)


def make_batches(case: Case) -> list[tuple[Any, Any, Tensor | None]]:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(case.seed + 17)
        out = build(case).eval()(make_inputs(case, 2)).shape[1:]
        most = max(1, 72 // max(1, math.prod(out)))  # outputs: the reference goes backward from every one
        made = [make_batch(case, min(N, most), out) for N in (case.sizes[:1] if case.same else case.sizes)]
        return made * len(case.sizes) if case.same else made


def make_batch(case: Case, N: int, out: torch.Size) -> tuple[Any, Any, Tensor | None]:
    x = make_inputs(case, N)
    y: Any
    match case.loss:
        case "residual":
            y = None
        case "cross_entropy" if soft(case):
            y = torch.randn(N, *out, dtype=torch.float64).softmax(1)
        case "cross_entropy":
            y = torch.randint(out[0], (N, *out[1:]))
            y = y.where(torch.rand(y.shape) > 0.15, -100) if Random(case.options + 2).random() < 0.3 else y
            if make_loss(case) != "cross_entropy" and make_loss(case).ignore_index != -100:
                y = y.where(y != -100, make_loss(case).ignore_index)
        case "bce":
            y = torch.rand(N, *out, dtype=torch.float64)
            y = y.round() if Random(case.options + 2).random() < 0.5 else y
        case "poisson":
            y = torch.randint(4, (N, *out)).double()
        case _:
            y = torch.randn(N, *out, dtype=torch.float64)
    w = None if case.weights == "none" else torch.rand(N, dtype=torch.float64) + 0.3
    if case.weights == "zeros" and w is not None:
        w = w * (torch.rand(N) > 0.4)
    if case.weights == "halves" and w is not None:
        first = bool(torch.rand(()) < 0.7)
        w = torch.where((torch.arange(N) < N // 2) == first, 0.0, w)
    return {"tensor": x, "tuple": (x,), "dict": {"x": x}}[case.inputs], y, w
