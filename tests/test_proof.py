"""What counts as proof that the rows of a layer are right, and what is done where there is none."""

from __future__ import annotations

import threading

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import marquardt as mq
import reference
from marquardt.curvature.hessian import twice_differentiable
from marquardt.curvature.matrix_free import MatrixFreeCurvature
from marquardt.curvature.products import by_double_backward, by_forward_mode
from marquardt.jacobian import chunk as chunks
from marquardt.jacobian.chunk import Plan
from marquardt.jacobian.linearization import Linearization
from marquardt.losses import resolve
from marquardt.model.batch import Batch
from reference import error

DOUBLE = {"dtype": torch.float64}


def planned(model: nn.Module, plan: Plan, x: Tensor, y: Tensor, weight: Tensor | None = None) -> Linearization:
    """As an optimizer does it: what one step has found out is there for the next."""
    return Linearization(model, resolve("mse"), list(model.parameters()), [Batch(x, y, weight)], mq.Exact(), plan=plan)


# ---- a model that enters autocast


class Mixed(nn.Module):
    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.layers = nn.Sequential(*layers)

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return self.layers(x).float()


MIXED = {
    "mlp": lambda: Mixed(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1)),
    "cnn": lambda: Mixed(
        nn.Unflatten(1, (2, 2, 2)), nn.Conv2d(2, 4, 2, padding=1), nn.GroupNorm(2, 4), nn.Tanh(), nn.Conv2d(4, 3, 2),
        nn.Flatten(), nn.Linear(12, 1),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", MIXED)
@pytest.mark.parametrize("curvature", [mq.Dense(), mq.Gram(), mq.MatrixFree(iterations=15), mq.Kronecker()], ids=str)
def test_autocast_inside_forward(curvature, name):
    torch.manual_seed(0)
    model, x = MIXED[name](), torch.randn(64, 8)
    y = torch.sin(x.sum(1, keepdim=True))
    opt = mq.LM(model, "mse", curvature=curvature)
    steps = [opt.step(x, y) for _ in range(25)]
    assert steps[-1].new_loss < 0.3 * steps[0].loss
    assert sum(step.accepted for step in steps) > 5
    lin = mq.linearize(model, "mse", x, y)
    assert set(lin.paths.values()) == {"rule"}
    assert lin.rows().dtype == curvature.represent(mq.linearize(model, "mse", x, y)).gradient.dtype == torch.float32


@pytest.mark.parametrize("way", [by_double_backward, by_forward_mode])
def test_products_under_autocast(way):
    """In the dtype of the parameters, and near those of the same model without autocast."""
    torch.manual_seed(0)
    model, x, y = MIXED["mlp"](), torch.randn(32, 8), torch.randn(32, 1)
    v = torch.randn(sum(p.numel() for p in model.parameters()))
    products = []
    for m in (model, model.layers):
        C = mq.MatrixFree().represent(mq.linearize(m, "mse", x, y))
        C._ways, C._way, C._open = [way], None, None
        products.append(C @ v)
    assert products[0].dtype == torch.float32
    assert error(products[0], products[1]) < 0.1


# ---- a module under two names


def shared_linear() -> nn.Module:
    lin = nn.Linear(4, 4)
    return nn.Sequential(lin, nn.Tanh(), lin, nn.Linear(4, 1))


def shared_prelu() -> nn.Module:
    act = nn.PReLU()
    return nn.Sequential(nn.Linear(4, 4), act, nn.Linear(4, 4), act, nn.Linear(4, 1))


def shared_lstm() -> nn.Module:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = self.b = nn.LSTM(4, 4, batch_first=True)
            self.head = nn.Linear(4, 1)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.b(self.a(x[:, None])[0])[0][:, 0])

    return Twice()


@pytest.mark.parametrize("build", [shared_linear, shared_prelu, shared_lstm])
@pytest.mark.parametrize("curvature", [mq.Dense(), mq.MatrixFree()], ids=str)
def test_module_under_two_names(build, curvature):
    """Rows, products and trial losses, and every parameter is still there afterwards."""
    torch.manual_seed(0)
    model, x = build().double(), torch.randn(20, 4, **DOUBLE)
    y = torch.sin(x[:, :1])
    own = dict(model.named_parameters(remove_duplicate=False))
    z = model(x)[:, 0]  # by autograd alone: functional_call, which the reference is made of, damages such a model
    J = torch.stack(
        [torch.cat([g.flatten() for g in torch.autograd.grad(f, model.parameters(), retain_graph=True)]) for f in z]
    )
    lin = mq.linearize(model, "mse", x, y)
    C = curvature.represent(lin)
    v = torch.randn(J.shape[1], generator=torch.Generator().manual_seed(0), **DOUBLE)
    assert error(C @ v, 2 / 20 * J.T @ (J @ v)) < 1e-9
    rates = [0.01, 0.1, 0.5]
    assert lin.evaluate_along(-C.gradient, rates) == pytest.approx([float(lin.evaluate(-C.gradient, r)) for r in rates])
    lin.move()
    opt = mq.LM(model, "mse", curvature=curvature, line_search=mq.Grid(stop=2.0), acceptance=mq.Decrease())
    for _ in range(6):
        opt.step(x, y)
    assert all(p is own[name] for name, p in model.named_parameters(remove_duplicate=False))
    assert torch.isfinite(model(x)).all()


@pytest.mark.parametrize("fails", [False, True])
def test_substitution_is_taken_back(fails):
    from marquardt.model.substituted import substituted

    model = nn.Sequential(nn.LSTM(2, 3), nn.BatchNorm1d(3))
    before = [(vars(m), dict(m._parameters), dict(m._buffers)) for m in model.modules()]
    flat = model[0]._flat_weights
    others = {id(t): torch.zeros_like(t) for t in [*model.parameters(), *model.buffers()]}
    try:
        with substituted(model, others):
            assert not model[0](torch.ones(4, 2))[0].any()
            if fails:
                raise ZeroDivisionError
    except ZeroDivisionError:
        assert fails
    for m, (_, params, buffers) in zip(model.modules(), before, strict=True):
        assert all(m._parameters[k] is p for k, p in params.items())
        assert all(m._buffers[k] is b for k, b in buffers.items())
    assert model[0]._flat_weights is flat
    assert all(w is p for w, p in zip(flat, model[0].parameters(), strict=True))


# ---- what was proven is what is run


def test_convolution_behind_a_parameter_without_a_rule():
    """The graph with a backward pass of our own is not the one that was proven on first use."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(1, 2, 3), nn.PReLU(), nn.Conv2d(2, 2, 3), nn.Dropout(0.1), nn.Flatten(), nn.Linear(8, 3)
    )
    x, y = torch.randn(64, 1, 6, 6), torch.randint(0, 3, (64,))
    opt = mq.LM(model, "cross_entropy")
    losses = [opt.step(x, y).new_loss for _ in range(6)]
    assert losses[-1] < losses[0]
    assert opt._plan.proof.general == {2: "rows"}  # not the loop
    assert not opt._plan.unrolls


def test_one_sample_first():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.PReLU(), nn.Linear(4, 2)).double()
    x, y = torch.randn(8, 3, **DOUBLE), torch.randn(8, 2, **DOUBLE)
    plan = Plan()
    for some in (slice(0, 1), slice(None), slice(2, 3), slice(0, 2)):
        J = planned(model, plan, x[some], y[some]).rows()
        assert error(J.T @ J, reference.quadratic(model, "mse", x[some], y[some]).G) < 1e-10


@pytest.mark.parametrize("broken", ["rows_by_vmap", "rows_in_parts"])
def test_path_that_fails_later(broken, monkeypatch):
    """A proven path that fails on other data is no error: another one is proven."""

    class Scale(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.randn(4))

        def forward(self, x: Tensor) -> Tensor:
            return x * self.scale

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), Scale(), nn.Linear(4, 2)).double()
    x, y = torch.randn(8, 3, **DOUBLE), torch.randn(8, 2, **DOUBLE)
    plan = Plan()
    if broken == "rows_in_parts":
        monkeypatch.setattr(chunks, "rows_by_vmap", refuse)
    planned(model, plan, x, y).rows()
    first = dict(plan.proof.general)
    monkeypatch.setattr(chunks, broken, refuse)
    J = planned(model, plan, x, y).rows()
    assert plan.proof.general != first
    assert error(J.T @ J, reference.quadratic(model, "mse", x, y).G) < 1e-10


def refuse(*_: object) -> Tensor:
    raise RuntimeError("vmap: it looks like you are calling .item() on a Tensor")


def test_product_that_fails_later(monkeypatch):
    torch.manual_seed(0)
    model, x, y = nn.Linear(3, 2).double(), torch.randn(8, 3, **DOUBLE), torch.randn(8, 2, **DOUBLE)
    C = mq.MatrixFree().represent(mq.linearize(model, "mse", x, y))
    v, q = torch.randn(8, **DOUBLE), reference.quadratic(model, "mse", x, y)
    assert C._open is not None
    monkeypatch.setattr(C._open, "rows", refuse)
    assert error(C @ v, q.G @ v) < 1e-10
    assert C._way is by_forward_mode


def test_resumed_convolutions_take_the_same_way():
    """The first step of an optimizer goes the way of all others."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(1, 2, 3), nn.Tanh(), nn.Conv2d(2, 2, 2), nn.Flatten(), nn.Linear(8, 3))
    x, y = torch.randn(32, 1, 5, 5), torch.randint(0, 3, (32,))
    opt = mq.LM(model, "cross_entropy")
    opt.step(x, y)
    (only,) = opt._plan.proofs
    opt.step(x, y)
    assert list(opt._plan.proofs) == [only]


# ---- layouts


class Recurrent(nn.Module):
    """The same network on (N, T, E), with its layers fed in one of four layouts."""

    def __init__(self, layout: str) -> None:
        super().__init__()
        self.layout = layout
        self.inner, self.outer = nn.Linear(3, 4), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        N, T, _ = x.shape
        time = "time" in self.layout
        x = x.transpose(0, 1) if time else x
        x = x.flatten(0, 1) if "flat" in self.layout else x
        h = torch.tanh(self.inner(x))
        h = h.view(T, N, -1) if time else h.view(N, T, -1)
        return self.outer(h).mean(0 if time else 1)


@pytest.mark.parametrize("layout", ["first", "time", "flat", "flat-time"])
@pytest.mark.parametrize(
    "shapes",
    [
        [(1, 3), (2, 3), (5, 3), (1, 3), (5, 3)],
        [(1, 1), (4, 4), (4, 1), (4, 4), (1, 4), (4, 1), (2, 4)],
        [(5, 1), (5, 3), (3, 3), (3, 5), (6, 2), (2, 6), (1, 6), (6, 1)],
        [(2, 2), (4, 2), (2, 4), (4, 4), (3, 2)],
    ],
    ids=str,
)
def test_layouts(layout, shapes):
    """A proof on one shape never spoils the rows of another; in a batch of one sample all layouts are right."""
    torch.manual_seed(0)
    model, plan = Recurrent(layout).double(), Plan()
    for N, T in shapes * 2:
        x, y = torch.randn(N, T, 3, **DOUBLE), torch.randn(N, 2, **DOUBLE)
        J = planned(model, plan, x, y).rows()
        assert error(J.T @ J, reference.quadratic(model, "mse", x, y).G) < 1e-10, (N, T)
        assert set(planned(model, plan, x, y).paths.values()) == {"rule"}


def test_ragged_batches_are_proven_once(monkeypatch):
    torch.manual_seed(0)
    model, plan, proofs = Recurrent("time").double(), Plan(), []
    prove = chunks.Chunk._prove
    monkeypatch.setattr(chunks.Chunk, "_prove", lambda self, signature: (proofs.append(self.N), prove(self, signature)))
    for N in (4, 1, 3) * 3:
        planned(model, plan, torch.randn(N, 5, 3, **DOUBLE), torch.randn(N, 2, **DOUBLE)).rows()
    assert proofs == [4, 1]


# ---- a bias without influence


class Attention(nn.Module):
    def __init__(self, plain: bool = False) -> None:
        super().__init__()
        self.embed, self.plain = nn.Embedding(12, 8), plain
        self.q, self.k, self.v, self.head = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 3)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        k = x @ self.k.weight.T + self.k.bias if self.plain else self.k(x)  # no rule for a product
        return self.head((x + F.scaled_dot_product_attention(self.q(x), k, self.v(x))).mean(1))


class TorchAttention(nn.Module):
    """Its in_proj_bias holds those of queries, keys and values in one."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(12, 8), nn.Linear(8, 3)
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        return self.head(self.attention(x, x, x, need_weights=False)[0].mean(1))


def before_norm() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 3, 3), nn.InstanceNorm2d(3, affine=True), nn.Tanh(), nn.Flatten(), nn.Linear(48, 3)
    )


MUTE = {
    "norm": (before_norm, {"0.bias": "none"}),
    "attention": (Attention, {"k.bias": "none"}),
    "attention by products": (lambda: Attention(True), {"k.bias": "none", "k.weight": "vmap"}),
    "nn.MultiheadAttention": (TorchAttention, {}),
}


def mute_case(name: str, dtype: torch.dtype, N: int = 32) -> tuple[nn.Module, Tensor, Tensor]:
    torch.manual_seed(0)
    x = torch.randn(N, 1, 6, 6, dtype=dtype) if name == "norm" else torch.randint(0, 12, (N, 5))
    return MUTE[name][0]().to(dtype), x, torch.randint(0, 3, (N,))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("name", MUTE)
def test_paths_beside_a_bias_without_influence(name, dtype):
    model, x, y = mute_case(name, dtype)
    lin = mq.linearize(model, "cross_entropy", x, y)
    assert {k: path for k, path in lin.paths.items() if path != "rule"} == MUTE[name][1]
    q = reference.quadratic(model.double(), "cross_entropy", x if name != "norm" else x.double(), y)
    J = lin.rows().double()
    assert error(J.T @ J, q.G) < 1e-4
    for k, columns in zip(lin.names, J.split(lin.sizes, 1), strict=True):
        if MUTE[name][1].get(k) == "none":
            assert not columns.any()


@pytest.mark.parametrize("rows", [mq.Exact(), mq.Sampled(2)], ids=str)
@pytest.mark.parametrize("curvature", [mq.Dense(), mq.Gram(), mq.Gram(chunk=8), mq.MatrixFree()], ids=str)
@pytest.mark.parametrize("name", ["norm", "attention"])
def test_gradient_of_a_bias_without_influence(name, curvature, rows):
    """Exactly zero, once there are rows, and so is its part of the remainder and of the step."""
    model, x, y = mute_case(name, torch.float32)
    lin = mq.linearize(model, "cross_entropy", x, y, rows=rows, chunk=curvature.chunk)
    C = curvature.represent(lin)
    assert C.trace() > 0
    d = C.newton(torch.tensor(1e-6))
    start = lin.starts[lin.names.index(next(iter(MUTE[name][1])))]
    for v in (C.gradient, lin.gradient, d):
        assert not v[start : start + 3].any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("curvature", [mq.Dense(), mq.Gram(), mq.MatrixFree(iterations=30)], ids=str)
@pytest.mark.parametrize(
    "damping", [mq.MaxDiagonal(floor=0.0), mq.FactoredMaxDiagonal(), mq.MeanEigenvalue(), mq.LayerMeanEigenvalue()],
    ids=str,
)  # fmt: skip
def test_bias_without_influence_stays(damping, curvature, dtype):
    model, x, y = mute_case("norm", dtype, 16)
    opt = mq.LM(model, "cross_entropy", curvature=curvature, damping=damping)
    bias = model[0].bias.detach().clone()
    for _ in range(60 if isinstance(curvature, mq.Dense) else 20):
        opt.step(x, y)
    assert (model[0].bias - bias).norm() < 0.1


def test_bias_that_gains_influence():
    """A look at later data finds it."""

    class Bias(nn.Module):
        """Without influence while its mean over the sequence is taken off."""

        def __init__(self) -> None:
            super().__init__()
            self.inner, self.outer, self.centred = nn.Linear(3, 4), nn.Linear(4, 2), True

        def forward(self, x: Tensor) -> Tensor:
            h = self.inner(x)
            return self.outer(torch.tanh(h - h.mean(1, keepdim=True) if self.centred else h).square().mean(1))

    torch.manual_seed(0)
    model, plan = Bias().double(), Plan()
    x, y = torch.randn(6, 5, 3, **DOUBLE), torch.randn(6, 2, **DOUBLE)
    assert planned(model, plan, x, y).paths["inner.bias"] == "none"
    model.centred = False
    for _ in range(chunks.EVERY):
        lin = planned(model, plan, x, y)
        J = lin.rows()
    assert lin.paths["inner.bias"] == "rule"
    assert error(J.T @ J, reference.quadratic(model, "mse", x, y).G) < 1e-10


# ---- weights that are zero


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.randn(2, 2)), nn.Parameter(torch.zeros(2))

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(torch.tanh(F.linear(x, self.weight, self.bias)), self.weight.t())


@pytest.mark.parametrize("damping", [mq.Identity(), mq.FactoredMaxDiagonal()], ids=str)
@pytest.mark.parametrize("chunk", [1, 2, 4])
@pytest.mark.parametrize("zeros", [[0], [3], [0, 1], [2, 3], [4, 5]], ids=str)
def test_zero_weights_in_chunks(zeros, chunk, damping):
    """A chunk without any weight proves nothing, and does not spoil what the others have proven."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 2), Tied()).double()
    x, y, weight = torch.randn(6, 3, **DOUBLE), torch.randn(6, 2, **DOUBLE), torch.ones(6, **DOUBLE)
    weight[zeros] = 0
    q = reference.quadratic(model, "mse", x, y, weight)
    lin = mq.linearize(model, "mse", x, y, weight, chunk=chunk)
    C = mq.Gram(chunk).represent(lin)
    A = damping.update(None, C).positive()
    d = C.step(0.1 * A)
    assert error(d, q.step(0.1 * A.entries(lin.sizes))) < 1e-9


# ---- other threads


def together(*functions: object) -> None:
    errors = []

    def run(function: object) -> None:
        try:
            function()  # type: ignore[operator]
        except Exception as e:
            errors.append(e)

    threads = [threading.Thread(target=run, args=(f,)) for f in functions]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    if errors:
        raise errors[0]


@pytest.mark.parametrize(
    "parts",
    [
        {"curvature": mq.Dense()},
        {"curvature": mq.Gram()},
        {"curvature": mq.Dense(chunk=8)},
        {"curvature": mq.MatrixFree(iterations=5)},
        {"line_search": mq.Grid(stop=1.0), "acceptance": mq.Decrease()},
    ],
    ids=str,
)
def test_random_numbers_of_other_threads(parts):
    """A model that draws none leaves the generator alone: no number comes twice."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.PReLU(), nn.Linear(8, 1)).double()
    x = torch.randn(32, 4, **DOUBLE)
    opt = mq.LM(model, "mse", **parts)
    over, drawn = threading.Event(), []

    def draw() -> None:
        while not over.is_set():
            drawn.append(float(torch.rand((), dtype=torch.float64)))

    def step() -> None:
        try:
            for _ in range(10):
                opt.step(x, torch.sin(x[:, :1]))
        finally:
            over.set()

    together(draw, step)
    assert len(drawn) > 10
    assert len(set(drawn)) == len(drawn)


@pytest.mark.parametrize("layer", [nn.Dropout(0.4), nn.RReLU()], ids=["dropout", "rrelu"])
def test_random_model_is_rewound(layer):
    """Its trials see the numbers of its linearisation; without such layers the generator is left alone."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), layer, nn.Linear(8, 1)).double()
    x, y = torch.randn(32, 4, **DOUBLE), torch.randn(32, 1, **DOUBLE)
    lin = mq.linearize(model, "mse", x, y)
    assert lin.loss == pytest.approx(float(lin.evaluate(torch.zeros(lin.n, **DOUBLE), 1.0)), rel=1e-12)
    assert lin.chance.drawn
    model.eval()
    lin = mq.linearize(model, "mse", x, y)
    _ = lin.loss
    assert not lin.chance.drawn


def test_exception_of_a_random_model_rewinds():
    class Fragile(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            F.dropout(x, 0.5)
            raise ZeroDivisionError

    model = nn.Sequential(nn.Linear(3, 2), Fragile())
    opt = mq.LM(model, "mse")
    state = torch.get_rng_state()
    with pytest.raises(ZeroDivisionError):
        opt.step(torch.randn(4, 3, generator=torch.Generator().manual_seed(0)), torch.zeros(4, 2))
    assert torch.equal(torch.get_rng_state(), state)


def test_two_threads_with_products(monkeypatch):
    """The level of forward mode is one for the program: a second thread waits."""
    monkeypatch.setattr(MatrixFreeCurvature, "_best", lambda self, iterates: iterates[-1])

    def train() -> None:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Conv1d(1, 3, 2), nn.Tanh(), nn.Flatten(), nn.Linear(9, 1)).double()
        x = torch.linspace(-1, 1, 64, **DOUBLE).view(16, 1, 4)
        opt = mq.LM(model, "mse", curvature=mq.MatrixFree(iterations=10))
        for _ in range(5):
            opt.step(x, torch.sin(x.sum(2)))

    together(train, train, train)


def test_settings_of_the_program_are_restored():
    """Two threads that overlap: the one that leaves last restores what the first one found."""
    model = nn.LSTM(2, 2)
    flash, cudnn = torch.backends.cuda.flash_sdp_enabled(), torch.backends.cudnn.enabled
    first, second = twice_differentiable(model), twice_differentiable(model)
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert not torch.backends.cuda.flash_sdp_enabled()
    second.__exit__(None, None, None)
    assert (torch.backends.cuda.flash_sdp_enabled(), torch.backends.cudnn.enabled) == (flash, cudnn)
