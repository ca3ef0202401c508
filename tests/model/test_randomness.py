"""Random layers: every pass sees the numbers that one forward would, and other threads keep theirs."""

from __future__ import annotations

import threading

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import marquardt as mq
from marquardt.curvature.matrix_free import MatrixFreeCurvature
from marquardt.jacobian.linearization import Trials
from support import reference
from support.cases import Problem, build
from support.linearized import REPRESENTATIONS, linearize
from support.modules import SWAPPED, Fn
from support.reference import error

DOUBLE = {"dtype": torch.float64}


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
    assert lin.loss == pytest.approx(float(Trials(lin).loss(torch.zeros(lin.n, **DOUBLE), 1.0)), rel=1e-12)
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


# ---- random layers: the linearisation sees the numbers that one forward would


def random_model(layer: nn.Module) -> Problem:
    model = nn.Sequential(nn.Linear(3, 5), layer, nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 2)).double()
    return Problem(model, "mse", torch.randn(6, 3).double(), torch.randn(6, 2).double(), torch.rand(6).double())


RANDOM_LAYERS = pytest.mark.parametrize("layer", [nn.Dropout(0.4), nn.RReLU()], ids=["dropout", "rrelu"])


@RANDOM_LAYERS
@pytest.mark.parametrize("curvature", [mq.Dense(), mq.Gram()], ids=str)
def test_same_random_numbers(layer, curvature):
    """And the generator of the program advances as by one forward, whatever follows."""
    p = random_model(layer)
    torch.manual_seed(7)
    q = reference.quadratic(*p)
    torch.manual_seed(7)
    p.model(p.x)
    after = torch.get_rng_state()
    torch.manual_seed(7)
    lin = linearize(p)
    C, v, A = curvature.represent(lin), torch.linspace(-1, 1, len(q.g)).double(), torch.tensor(0.1).double()
    assert torch.equal(torch.get_rng_state(), after)
    assert lin.loss == pytest.approx(q.f.item(), rel=1e-12)
    assert error(C.gradient, q.g) < 1e-10
    assert error(C @ v, q.G @ v) < 1e-10
    assert error(-C.newton(A), q.step(A)) < 1e-10
    assert torch.equal(torch.get_rng_state(), after)


@RANDOM_LAYERS
@REPRESENTATIONS
def test_random_numbers_are_replayed(layer, curvature):
    """(G + A)·newton(A) = g, whatever was drawn: every pass over a chunk draws the same again."""
    p = random_model(layer)
    C = curvature.represent(linearize(p, chunk=curvature.chunk))
    A = torch.tensor(1e-3).double()
    d = C.newton(A)
    assert error(C @ d + A * d, C.gradient) < 1e-10
    assert error(C.newton(A), d) == 0


@pytest.mark.parametrize("rows", [mq.Exact(), mq.Sampled(2), mq.Empirical()], ids=str)
def test_global_generator_without_random_layers(rows):
    """Neither the proof of the rules nor sampled rows draw from it."""
    before = torch.get_rng_state()
    mq.Dense().represent(linearize(build("ce"), rows=rows)).newton(torch.tensor(0.1).double())
    assert torch.equal(torch.get_rng_state(), before)


# ---- RReLU on inputs that are not contiguous

LAST = Fn(lambda x: x.to(memory_format=torch.channels_last))
STRIDED = {
    "time major": lambda: nn.Sequential(SWAPPED, nn.Linear(2, 3), SWAPPED, nn.RReLU(), nn.Flatten(), nn.Linear(12, 1)),
    "channels last": lambda: nn.Sequential(
        nn.Unflatten(1, (1, 4)), LAST, nn.Conv2d(1, 3, 1), nn.RReLU(), nn.Flatten(), nn.Linear(24, 1)
    ),
    "dropout after it": lambda: nn.Sequential(
        SWAPPED, nn.Linear(2, 3), SWAPPED, nn.RReLU(), nn.Dropout(), nn.Flatten(), nn.Linear(12, 1)
    ),
}


@pytest.mark.usefixtures("double")
@pytest.mark.parametrize("name", STRIDED)
def test_the_slopes_of_rrelu_are_those_of_the_model(name):
    model, x, y = STRIDED[name](), torch.randn(6, 4, 2), torch.randn(6, 1)
    torch.manual_seed(1)
    f = F.mse_loss(model(x), y).detach()
    torch.manual_seed(1)
    lin = mq.linearize(model, "mse", x, y)
    assert lin.loss == pytest.approx(float(f), rel=1e-12)
    rows, d = lin.rows(), torch.zeros_like(lin.theta)
    assert float(Trials(lin).loss(d, 1.0)) == pytest.approx(float(f), rel=1e-12)  # trials have the same
    torch.manual_seed(1)
    g = torch.autograd.grad(F.mse_loss(model(x), y), list(model.parameters()))
    assert error(lin.gradient, torch.cat([part.flatten() for part in g])) < 1e-12
    torch.manual_seed(1)
    residuals = (model(x).detach() - y).flatten() * (2 / 6) ** 0.5
    assert error(rows.T @ residuals, lin.gradient) < 1e-12


def test_rrelu_that_draws_at_a_trial_point_only():
    """At θ no input is negative, so that nothing is drawn there; over several batches the generator still ends where
    a forward pass leaves it."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(1, 4), nn.RReLU(), nn.Linear(4, 1)).double()
    with torch.no_grad():
        model[0].weight.fill_(0.1)
        model[0].bias.fill_(0.05)
    x, y = torch.rand(8, 1, **DOUBLE), -5 * torch.ones(8, 1, **DOUBLE)
    opt = mq.LM(model, "mse", curvature=mq.Dense())
    before = torch.get_rng_state()
    opt.step_over([(x[:4], y[:4]), (x[4:], y[4:])])
    assert torch.equal(torch.get_rng_state(), before)
