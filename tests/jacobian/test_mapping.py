"""Where the samples are in a graph, from gradients that tell them apart; and rows that no rule covers, by hand."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

import marquardt as mq
from marquardt.jacobian import piece as proof
from marquardt.jacobian.linearization import Linearization
from marquardt.jacobian.mapping import Signs, cuts, found_in, guessed
from marquardt.jacobian.objective import Objective
from marquardt.jacobian.passes import Facts
from marquardt.layers.capture import ALL, Place
from marquardt.layers.graph import stacked
from marquardt.losses import resolve
from marquardt.model.batch import Batch
from support import reference
from support.graph_models import GRAPH_CASES, Attentive, Equations, Parts
from support.reference import error
from support.steps import ByHand, lm, theta

pytestmark = pytest.mark.usefixtures("double")

N = 6


def signs(samples: Tensor) -> Signs:
    """Of a gradient to which these samples have contributed, (d, …), each element one of them: −1 for none"""
    even, labels = torch.randn(samples.shape) * (samples >= 0), torch.randn(N)
    return Signs(even, even * (samples + 1), even * labels[samples], labels)


PLACES = {
    "first": (torch.arange(N)[:, None].expand(N, 3), Place(0, 0, ALL)),
    "second, as many in the first": (torch.arange(N).expand(N, N), Place(1, 0, ALL)),
    "side by side": (torch.arange(N).repeat_interleave(2)[:, None].expand(-1, 3), Place(0, 0, ALL)),
    "apart": (torch.arange(N).repeat(2)[:, None].expand(-1, 3), Place(0, 0, ALL, apart=True)),
    "a part": (torch.arange(2, 5)[:, None].expand(3, 2), Place(0, 2, 3)),
    "a part, side by side": (torch.arange(2, 4).repeat_interleave(2)[:, None].expand(-1, 5), Place(0, 2, 2)),
    "a part, apart": (torch.arange(2, 4).repeat(2)[:, None].expand(-1, 5), Place(0, 2, 2, apart=True)),
    "one": (torch.full((5, 7), 4), Place(0, 4, 1)),
    "without the first": (torch.tensor([-1, 1, 2, -1, 4, 5])[:, None].expand(N, 3), Place(0, 0, ALL)),
    "a part without its first": (torch.tensor([-1, 3, 4])[:, None].expand(3, 2), Place(0, 2, 3)),
}


@pytest.mark.parametrize("name", PLACES)
def test_places(name):
    samples, expected = PLACES[name]
    place = found_in(signs(samples), range(2), 1, 1e-6)
    assert place == expected
    moved = place.of(N)(samples, 0)  # (M, T, …)
    for m, sample in enumerate(range(N)[place.of(N).samples]):
        assert set(moved[m].unique().tolist()) <= {sample, -1}


def test_in_turns():
    assert found_in(signs(torch.arange(1, N, 2)[:, None].expand(3, 2)), range(2), 2, 1e-6) == Place(0, 1, 3, 2)


def test_all_of_a_tensor():
    """Where no dimension may hold them, one sample may be all there is."""
    assert found_in(signs(torch.full((3, 2), 4)), [], 1, 1e-6) == Place(None, 4, 1)
    assert found_in(signs(torch.arange(N)[:, None].expand(N, 3)), [1], 1, 1e-6) is None


def test_samples_that_mix():
    """The mean of their numbers is a number too: the labels tell."""
    labels, even = torch.randn(N), torch.ones(3, 2)
    mixed = Signs(even, even * 3, even * labels.mean(), labels)
    assert found_in(mixed, range(2), 1, 1e-2) is None


def test_order_that_is_not_regular():
    assert found_in(signs(torch.tensor([3, 0, 1, 5, 2, 4])[:, None].expand(N, 3)), range(2), 1, 1e-6) is None


def test_guess():
    assert guessed((4, N), range(2), N) == Place(1, 0, ALL)
    assert guessed((4, N), [0], N) is None


def test_uses_by_different_samples_share_positions():
    parts = [(Place(0, 0, 4), 3), (Place(0, 4, 2), 1), (Place(0, 0, 4), 2), (Place(0, 4, 2), 1), (Place(0, 3, 2), 1)]
    offsets, P = stacked(parts)
    assert offsets[:4] == [0, 0, 3, 1]
    assert offsets[4] == 5  # beside both
    assert P == 6


# ---- where the samples are in a graph, against brute force: rows of models that no rule of a layer covers


DOUBLE = {"dtype": torch.float64}


def linearized(model: nn.Module, x: object, y: Tensor | None, known: Facts, loss: str = "") -> Linearization:
    kind = loss or ("residual" if y is None else "mse")
    objective = Objective(model, resolve(kind), list(model.parameters()))
    return Linearization(objective, [Batch(x, y, None)], known=known)


def wrong(model: nn.Module, lin: Linearization, x: object, y: Tensor | None, loss: str = "") -> float:
    """By how much J̃ᵀJ̃ differs from brute force with the same random numbers"""
    state = torch.get_rng_state()
    J = lin.rows()
    torch.set_rng_state(state)
    J_z, z = reference.jacobian_by_rows(model, reference.trainable(model), x)
    kind = loss or ("residual" if y is None else "mse")
    return error(J.T @ J, J_z.T @ reference.output_hessian(kind, z, y, None) @ J_z)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("name", GRAPH_CASES)
def test_rows_from_the_graph(name, dtype):
    """Every parameter by a rule or by the graph, and right; so in the next step, which trusts the proof."""
    torch.manual_seed(0)
    case, known = GRAPH_CASES[name], Facts()
    model = case.make().to(dtype)
    for _ in range(2):
        x, y = case.data(dtype)
        lin = linearized(model, x, y, known)
        assert wrong(model, lin, x, y) < (1e-10 if dtype == torch.float64 else 1e-3)
        assert set(lin.paths.values()) <= {"rule", "graph", "none"}
        assert "graph" in lin.paths.values()
        assert len(known.proof.map.colours) == case.colours
    assert len(known.proofs) == 1


@pytest.mark.parametrize("loss", ["mse", "cross_entropy"])
def test_dropout_keeps_its_masks(loss):
    torch.manual_seed(0)
    model, known = Attentive(0.4).double(), Facts()
    for N in (6, 6, 4):
        x = torch.randn(N, 3, 3, **DOUBLE)
        y = torch.randn(N, 3, **DOUBLE) if loss == "mse" else torch.randint(0, 3, (N,))
        lin = linearized(model, (x,), y, known, loss)
        assert wrong(model, lin, (x,), y, loss) < 1e-10
        assert {lin.paths[name] for name in ("token", "positions", "scale")} == {"graph"}
        assert lin.paths["head.weight"] == "rule"


def test_parts_of_other_sizes():
    """Other sizes of the parts are other places, even if the sum is the same."""
    torch.manual_seed(0)
    model, known = Parts().double(), Facts()
    for inner, edge in [(7, 4), (4, 7), (7, 4), (1, 4), (5, 1), (5, 6)] * 2:
        x = (torch.randn(inner, 2, **DOUBLE), torch.randn(edge, 2, **DOUBLE))
        lin = linearized(model, x, None, known)
        assert wrong(model, lin, x, None) < 1e-10, (inner, edge)
        assert set(lin.paths.values()) == {"graph"}
    assert len(known.proofs) == 5


def test_structure_that_changes_between_steps():
    class Changing(Parts):
        def forward(self, inner: Tensor, edge: Tensor) -> Tensor:
            found = super().forward(inner, edge)
            return found + self.net(torch.cat([inner, edge]))[:, 0] ** 2 if self.more else found

    torch.manual_seed(0)
    model, known = Changing().double(), Facts()
    x = (torch.randn(5, 2, **DOUBLE), torch.randn(3, 2, **DOUBLE))
    for model.edge_first in (False, True, False):
        for model.more in (False, True, False):
            assert wrong(model, linearized(model, x, None, known), x, None) < 1e-10


class Filtered(nn.Module):
    """Its complex numbers hold all samples of the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(2, 4), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        spectrum = torch.fft.fft(self.first(x), dim=0)
        low = spectrum * torch.linspace(1, 0.1, len(x), dtype=x.dtype)[:, None]
        return self.last(torch.fft.ifft(low, dim=0).real.tanh())


@pytest.mark.parametrize("curvature", [mq.Auto(), mq.Gram(), mq.MatrixFree(tolerance=0.0, warm=0.0, backtrack=False)])
def test_a_fourier_transform_over_the_samples(curvature):
    torch.manual_seed(0)
    model, x, y = Filtered().double(), torch.randn(6, 2, **DOUBLE), torch.randn(6, 3, **DOUBLE)
    twin = copy.deepcopy(model)
    opt, hand = lm(model, curvature=curvature), ByHand(twin, "mse")
    for _ in range(3):
        assert opt.step(x, y).accepted == hand.step(x, y)[2]
        assert error(theta(model), theta(twin)) < 1e-6


def test_what_is_proven_is_not_proven_again(monkeypatch):
    torch.manual_seed(0)
    model, known, proofs = Parts().double(), Facts(), []
    prove = proof._prove
    monkeypatch.setattr(proof, "_prove", lambda J, base: (proofs.append(J.N), prove(J, base)))
    for _ in range(3):
        x = (torch.randn(7, 2, **DOUBLE), torch.randn(4, 2, **DOUBLE))
        linearized(model, x, None, known).rows()
    assert proofs == [11]


def test_use_without_a_gradient_at_first():
    """A layer behind one that starts at zero is read as its neighbours are, or found later."""
    torch.manual_seed(0)
    model, known = Parts().double(), Facts()
    with torch.no_grad():
        model.net[4].weight.zero_()
    x = (torch.randn(7, 2, **DOUBLE), torch.randn(4, 2, **DOUBLE))
    assert wrong(model, linearized(model, x, None, known), x, None) < 1e-10
    with torch.no_grad():
        model.net[4].weight.normal_()
    assert wrong(model, linearized(model, x, None, known), x, None) < 1e-10


def test_one_parameter_without_a_rule_leaves_the_others():
    class Odd(Parts):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.tensor(0.7))

        def forward(self, inner: Tensor, edge: Tensor) -> Tensor:
            return torch.atan2(super().forward(inner, edge), self.scale)

    torch.manual_seed(0)
    model, known = Odd().double(), Facts()
    x = (torch.randn(7, 2, **DOUBLE), torch.randn(4, 2, **DOUBLE))
    lin = linearized(model, x, None, known)
    assert wrong(model, lin, x, None) < 1e-10
    assert {name for name, path in lin.paths.items() if path != "graph"} == {"scale"}


@pytest.mark.parametrize("rows", [mq.Exact(), mq.Sampled(2), mq.Fraction(0.5)], ids=str)
@pytest.mark.parametrize("curvature", [mq.Dense(), mq.Gram(), mq.Dense(chunk=3), mq.Gram(chunk=3)], ids=str)
def test_steps_on_rows_from_the_graph(curvature, rows):
    torch.manual_seed(0)
    model, x = Equations().double(), torch.randn(8, 2, **DOUBLE)
    opt = mq.LM(model, "residual", curvature=curvature, rows=rows)
    steps = [opt.step((x,)) for _ in range(8)]
    assert steps[-1].new_loss < steps[0].loss
    assert set(opt._known.proof.general.values()) <= {"graph", "none"}


# ---- where the outputs were put together


LAYER = torch.nn.Linear(2, 2)
A, B = LAYER(torch.randn(4, 2))[:, 0], LAYER(torch.randn(4, 2))[:, 1]
JOINED = {
    "not joined": (A.tanh(), [slice(0, 4)]),
    "two": (torch.cat([A, B[:3]]) * 2, [slice(0, 4), slice(4, 7)]),
    "within each other": (
        torch.cat([A, torch.cat([B, A[:1]]).exp()], -1), [slice(0, 4), slice(4, 8), slice(8, 9)],
    ),
    "with a constant": (torch.cat([A, torch.zeros(3), B]), [slice(0, 4), slice(4, 7), slice(7, 11)]),
    "with constants": (torch.cat([torch.zeros(1), A, torch.zeros(3)]), [slice(0, 8)]),
    "in another dimension": (torch.cat([A[:, None], B[:, None]], 1), [slice(0, 4)]),
    "stacked": (torch.stack([A, B]).flatten(), [slice(0, 4), slice(4, 8)]),
    "in turns": (torch.stack([A, B], 1).flatten(), [slice(0, 8, 2), slice(1, 8, 2)]),
    "turned": (torch.stack([A, B], 1).T.flatten().tanh(), [slice(0, 4), slice(4, 8)]),
}  # fmt: skip


@pytest.mark.parametrize("name", JOINED)
def test_cuts(name):
    z, expected = JOINED[name]
    assert cuts(z.grad_fn, 0, len(z)) == expected
