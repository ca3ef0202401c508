"""G as a matrix: every way to add it up, its running average, and what it refuses."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import marquardt as mq
from marquardt.curvature import direct as dense
from marquardt.curvature.direct import DenseCurvature
from support import reference
from support.reference import error

pytestmark = pytest.mark.usefixtures("double")


class Mixed(nn.Module):
    """A parameter without a rule between two layers, one with several positions, and one that is not used."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.unused = nn.Linear(2, 3), nn.Parameter(torch.ones(2))
        self.gain, self.head, self.last = nn.Parameter(torch.rand(3)), nn.Linear(3, 4), nn.Linear(4, 2, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.head((self.tokens(x).tanh() * self.gain**2).mean(1)).tanh())


def made(small: int, chunk: int | None = None, rows: mq.Rows = mq.Exact(), **options):
    torch.manual_seed(0)
    model, x, y = Mixed(), torch.randn(7, 5, 2), torch.randn(7, 2)
    lin = mq.linearize(model, "mse", x, y, chunk=chunk, rows=rows)
    return mq.Dense(small=small, **options).represent(lin), reference.quadratic(model, "mse", x, y)


@pytest.mark.parametrize("small", [0, 256], ids=["by pairs of layers", "in one product"])
@pytest.mark.parametrize("chunk", [None, 3])
def test_every_way_to_add_it_up(small, chunk):
    G, expected = made(small, chunk)
    assert error(G.G, expected.G) < 1e-12
    assert error(G.gradient, expected.g) < 1e-12
    A = torch.rand(len(expected.g)) + 0.1
    assert error(G.newton(A), -expected.step(A)) < 1e-10
    assert error(G.step(mq.Diagonal.of(A, G.parameters.sizes)), expected.step(A)) < 1e-10
    v = torch.randn(len(expected.g))
    assert error(G @ v, expected.G @ v) < 1e-12


@pytest.mark.parametrize("small", [0, 256], ids=["by pairs of layers", "in one product"])
def test_a_gradient_outside_the_range_of_the_rows(small):
    G, expected = made(small, rows=mq.Sampled(2))
    assert error(G.gradient, expected.g) < 1e-12
    assert error(G.G, G.lin.rows().T @ G.lin.rows()) < 1e-12


def test_running_average():
    """Ḡ ← w·Ḡ + (1−w)·G with w = min(β, k/(k + 2)): a short memory at first."""
    G, expected = made(256, inertia=0.8)
    assert not G.averaged
    for k, w in ((1, 1 / 3), (2, 1 / 2), (100, 0.8)):
        G, expected = made(256, inertia=0.8)
        past = {"G": 2 * expected.G, "batches": torch.tensor(float(k))}
        G.recall(past, False)
        assert G.averaged
        assert error(G.G, (1 + w) * expected.G) < 1e-12
        kept = G.keep()
        assert kept["G"] is G.G
        assert kept["batches"] == k + 1
        assert error(past["G"], 2 * expected.G) == 0


def test_an_average_far_above_the_present_has_less_weight():
    """Its share of tr Ḡ is at most ten times the present: w·1000·10/1000"""
    G, expected = made(256, inertia=0.8)
    G.recall({"G": 1000 * expected.G, "batches": torch.tensor(100.0)}, False)
    w = 0.8 * 10 / 1000
    assert error(G.G, (1000 * w + 1 - w) * expected.G) < 1e-12


@pytest.mark.parametrize(("inertia", "same_data"), [(0.0, False), (0.8, True)])
def test_no_average(inertia, same_data):
    G, expected = made(256, inertia=inertia)
    G.recall({"G": 2 * expected.G, "batches": torch.tensor(5.0)}, same_data)
    assert not G.averaged
    assert error(G.G, expected.G) < 1e-12
    assert G.keep() is None


# In float32 as long as that does: J̃ᵀJ̃ of a model in float64, and the steps of one in float32.


def regression(units: float = 1.0) -> tuple[nn.Module, Tensor, Tensor]:
    """Of 41 parameters; the function is the same in all units of the third input."""
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1)), torch.randn(60, 3)
    y = (2 * x[:, :1]).sin() + x[:, 1:2] * x[:, 2:]
    with torch.no_grad():
        model[0].weight[:, 2] /= units
    return model, x * torch.tensor([1.0, 1.0, units]), y


@pytest.fixture
def formed(monkeypatch) -> list[torch.dtype]:
    """The precisions in which G is formed, in their order; any number of parameters is a large one."""
    found: list[torch.dtype] = []
    form = DenseCurvature._form

    def noted(self: DenseCurvature, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        found.append(dtype)
        return form(self, dtype)

    monkeypatch.setattr(DenseCurvature, "_form", noted)
    monkeypatch.setattr(dense, "REFINED", 0)
    return found


def distance(x: Tensor, expected: Tensor, H: Tensor) -> float:
    """In the metric of H, relative to the length of what is expected."""
    e = x - expected
    return float((e @ (H @ e) / (expected @ (H @ expected))).sqrt())


@pytest.mark.parametrize("units", [1.0, 1e-6, 1e6, 1e-24], ids=lambda c: f"units{c:g}")
@pytest.mark.parametrize("lam", [1e4, 1.0, 1e-2, 1e-3, 1e-5, 1e-8, 1e-12], ids=lambda lam: f"λ{lam:g}")
@pytest.mark.parametrize("by_entry", [False, True], ids=["one number", "by parameter"])
def test_the_step_is_that_of_float64(formed, lam, units, by_entry):
    model, x, y = regression(units)
    expected = reference.quadratic(model, "mse", x, y)
    D = expected.G.diagonal().clone() if by_entry else expected.G.diagonal().mean().expand(41)
    G = mq.Dense(small=0).represent(mq.linearize(model, "mse", x, y))
    found, H = G.newton(lam * D), expected.damped(lam * D)
    s = H.diagonal().rsqrt()  # the reference in units of its own: at small λ rounding is left in it all the same
    exact = s * torch.linalg.solve(s[:, None] * H * s, s * expected.g)
    assert distance(found, exact, H) < max(1e-10, 1e-13 / lam)
    assert G.notes == []
    large = torch.finfo(torch.float32).eps * float((expected.diagonal() / (lam * D)).sum()) <= dense.ROUGH
    in_range = units != 1e-24 or not by_entry
    assert formed == [torch.float32 if large and in_range else torch.float64]


def test_another_damping_has_another_factor_of_the_same_matrix(formed):
    model, x, y = regression()
    expected = reference.quadratic(model, "mse", x, y)
    G = mq.Dense(small=0).represent(mq.linearize(model, "mse", x, y))
    for lam in (1.0, 0.1, 1e-12, 1.0):
        assert error(G.newton(torch.tensor(lam)), -expected.step(lam)) < 1e-5 * (lam < 1e-6) + 1e-9
    assert formed == [torch.float32, torch.float64]
    assert G.notes == []


def test_no_second_attempt_in_float32(formed, monkeypatch):
    """If the products do not suffice although the bound allows it."""
    monkeypatch.setattr(dense, "PRODUCTS", 1)
    model, x, y = regression()
    expected = reference.quadratic(model, "mse", x, y)
    G = mq.Dense(small=0).represent(mq.linearize(model, "mse", x, y))
    for lam in (1e-2, 2e-2):
        assert error(G.newton(torch.tensor(lam)), -expected.step(lam)) < 1e-10
    assert formed == [torch.float32, torch.float64]
    assert G.notes == ["curvature formed again in float64"]


@pytest.mark.parametrize("rows", [mq.Exact(), mq.Sampled(2)], ids=lambda r: type(r).__name__)
def test_products_without_a_matrix(formed, rows):
    model, x, y = regression()
    lin = mq.linearize(model, "mse", x, y, rows=rows)
    J, g, v = lin.rows(), reference.quadratic(model, "mse", x, y).g, torch.randn(41)
    G = mq.Dense(small=0).represent(lin)
    assert error(G.gradient, g) < 1e-12
    assert error(G @ v, J.T @ (J @ v)) < 1e-12
    assert error(G.diagonal(), J.square().sum(0)) < 1e-12
    assert error(torch.stack(G.model(v)), torch.stack([g @ v, (J @ v).square().sum()])) < 1e-12
    assert error(G.newton(torch.tensor(1.0)), torch.linalg.solve(J.T @ J + torch.eye(41), g)) < 1e-9
    assert formed == [torch.float32]
    assert error(G.G, J.T @ J) < 1e-12
    assert formed == [torch.float32, torch.float64]


def test_chunks_and_averages_are_in_the_precision_of_the_model(formed):
    model, x, y = regression()
    cut = mq.Dense(chunk=20, small=0).represent(mq.linearize(model, "mse", x, y, chunk=20))
    cut.newton(torch.tensor(1.0))
    G = mq.Dense(inertia=0.8, small=0).represent(mq.linearize(model, "mse", x, y))
    G.recall({"G": torch.eye(41), "batches": torch.tensor(1.0)}, False)
    expected = cut.G * 2 / 3 + torch.eye(41) / 3
    assert error(G.newton(torch.tensor(1.0)), torch.linalg.solve(expected + torch.eye(41), G.gradient)) < 1e-10
    assert error(G.keep()["G"], expected) < 1e-12
    assert formed == [torch.float64, torch.float64]


@pytest.mark.parametrize(("inputs", "units", "N", "seed"), [(1, 3, 60, 0), (1, 3, 60, 1), (2, 4, 100, 1)])
def test_a_run_ends_where_float64_ends(formed, monkeypatch, inputs, units, N, seed):
    """From near the network that made the data."""
    ends = []
    for refined in (0, 1000):
        monkeypatch.setattr(dense, "REFINED", refined)
        torch.manual_seed(seed)
        x, model = torch.randn(N, inputs), nn.Sequential(nn.Linear(inputs, units), nn.Tanh(), nn.Linear(units, 1))
        with torch.no_grad():
            for p in model.parameters():
                p *= 2
            y = model(x) + 0.1 * torch.randn(N, 1)
            for p in model.parameters():
                p += 0.2 * torch.randn_like(p)
        lm = mq.LM(model, "mse", curvature=mq.Dense(small=0), damping=mq.MeanEigenvalue(), schedule=mq.GainRatio())
        steps = [lm.step(x, y)]
        while not steps[-1].converged:
            assert len(steps) < 500
            steps.append(lm.step(x, y))
        ends.append(steps[-1].new_loss)
        assert (torch.float32 in formed) == (refined == 0)
        formed.clear()
    assert abs(ends[0] - ends[1]) <= 1e-10 * ends[1]


def test_a_step_in_float32_is_refined_before_g_is_formed_again(formed):
    model, x, y = regression(1e-3)
    exact = reference.quadratic(model, "mse", x, y)
    size = torch.linalg.matrix_norm(exact.G, 2)
    G = mq.Dense(small=0).represent(mq.linearize(model.float(), "mse", x.float(), y.float()))
    for bound, notes in ((1e-4, []), (1e-1, []), (1e2, ["curvature formed again in float64"])):
        lam = float(torch.finfo(torch.float32).eps * size / bound)
        d = G.newton(torch.tensor(lam, dtype=torch.float32))
        assert d.dtype == torch.float32
        assert distance(d.double(), -exact.step(lam), exact.damped(lam)) < 1e-4
        assert G.notes == notes
    assert formed == [torch.float32, torch.float64]


def test_what_an_earlier_step_kept_of_other_parameters():
    kept = {"G": torch.zeros(3, 3), "batches": torch.ones(())}
    mq.Dense().check(kept, {"weight": 2, "bias": 1})
    mq.Dense().check({}, {"weight": 3})
    with pytest.raises(ValueError, match=r"'past' 'G' has the shape \(3, 3\), and \(4, 4\) is needed"):
        mq.Dense().check(kept, {"weight": 4})
    with pytest.raises(ValueError, match="'G' goes with 'batches'"):
        mq.Dense().check({"G": torch.zeros(4, 4)}, {"weight": 4})
