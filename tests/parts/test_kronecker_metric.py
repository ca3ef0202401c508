"""KroneckerMetric: D from the partial traces of G, step after step."""

from __future__ import annotations

import copy
import io
import math
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import marquardt as mq
from marquardt.curvature.contract import Damped
from marquardt.jacobian.linearization import Linearization, linearize
from marquardt.metric import Diagonal, Layered, LayerSides
from marquardt.metric.layered import EARLY
from marquardt.parts.direction import averaged
from support import reference
from support.cases import build, mlp
from support.metrics import ByHand, Form
from support.modules import routed
from support.reference import error
from support.steps import lm, theta

pytestmark = pytest.mark.usefixtures("double")


def batch(seed: int, N: int = 6) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(N, 2, generator=generator, dtype=torch.float64)
    return x, torch.randint(3, (N,), generator=generator)


def saved_and_loaded(opt: mq.LM) -> dict[str, Any]:
    file = io.BytesIO()
    torch.save(opt.state_dict(), file)
    file.seek(0)
    found: dict[str, Any] = torch.load(file, weights_only=True)
    return found


FORMS = [Form((0, 1), 1, 4, 3), Form((2, 3), 1, 3, 5)]  # of mlp(2, 4, 3)
CURVATURES = {
    "gram": mq.Gram(whole=0),
    "gram-chunked": mq.Gram(chunk=2),
    "dense": mq.Dense(),
    "dense-chunked": mq.Dense(chunk=2),
    "auto": mq.Auto(),
}


@pytest.mark.parametrize("curvature", CURVATURES.values(), ids=CURVATURES)
def test_steps_of_lm_are_those_of_the_reference(curvature):
    """Five batches of two sizes: the averages go from step to step, and with them the largest rank."""
    model = mlp(2, 4, 3)
    opt = lm(
        model, "cross_entropy", curvature=curvature, damping=mq.KroneckerMetric(0.7, every=1), schedule=mq.Constant(0.5)
    )
    hand = ByHand(FORMS, [p.numel() for p in model.parameters()], c=0.7)
    for i in range(5):
        x, y = batch(i, 6 if i % 2 else 4)
        exact = reference.quadratic(model, "cross_entropy", x, y)
        D = hand.after(exact.G, 2 * len(x))
        expected = theta(model) - torch.linalg.solve(exact.G + 0.5 * D, exact.g)
        step = opt.step(x, y)
        assert step.accepted
        assert error(theta(model), expected) < 1e-9
        assert step.slope == pytest.approx(math.sqrt(exact.g @ torch.linalg.solve(D, exact.g)), rel=1e-8)


def test_sampled_rows_have_the_rank_of_all_rows():
    """And D of the rows that were drawn."""
    model, (x, y) = mlp(2, 4, 3), batch(0)
    lin = linearize(model, "cross_entropy", x, y, rows=mq.Sampled(1))
    G = mq.Gram(whole=0).represent(lin)
    D = mq.KroneckerMetric(every=1).update(None, G)
    J = lin.rows()
    assert len(J) == 6
    by_hand = ByHand(FORMS, G.parameters.sizes).after(J.T @ J, 12)  # two rows for each of 6 samples, not one
    assert D.rank == 12
    assert error(D.times(torch.ones(27), G.parameters.sizes), by_hand.sum(1)) < 1e-12
    expected = -torch.linalg.solve(J.T @ J + 0.3 * by_hand, lin.gradient)
    assert error(G.step(0.3 * D), expected) < 1e-9


@pytest.mark.parametrize("every", [2, 3])
def test_stale_d_between_renewals(every):
    """Each of the first steps forms its own; then it is formed after one of so many, from all batches until then. What
    lies between solves exactly with the D that is there."""
    model = mlp(2, 4, 3)
    opt = lm(
        model, "cross_entropy", curvature=mq.Gram(whole=0), damping=mq.KroneckerMetric(every=every), lr=0.01,
        schedule=mq.Constant(1.0), acceptance=mq.Uphill(1.0),
    )  # fmt: skip
    hand, D, formed = ByHand(FORMS, [p.numel() for p in model.parameters()]), torch.empty(0), []
    for i in range(EARLY + 3 * every):
        x, y = batch(i)
        exact = reference.quadratic(model, "cross_entropy", x, y)
        latest = hand.after(exact.G, 12)
        D = latest if i < EARLY else D
        expected = theta(model) - 0.01 * torch.linalg.solve(exact.G + D, exact.g)
        before = None if opt._state.D is None else opt._state.D.roots
        assert opt.step(x, y).accepted
        assert error(theta(model), expected) < 1e-9
        formed.append(opt._state.D.roots is not before)
        if i + 1 >= EARLY and (i + 1) % every == 0:
            D = latest
    after = [(i + 1) % every == 0 for i in range(EARLY, EARLY + 3 * every)]
    assert formed == [True] * EARLY + after


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("every", [1, 2])
def test_a_run_goes_on_bit_for_bit(dtype, every):
    made = []
    for _ in range(2):
        torch.manual_seed(0)
        model = mlp(2, 4, 3).to(dtype)
        damping = mq.KroneckerMetric(every=every)
        made.append((model, mq.LM(model, "cross_entropy", curvature=mq.Gram(whole=0), damping=damping)))
    (model, opt), (twin, again) = made
    for i in range(26):
        x, y = batch(i)
        opt.step(x.to(dtype), y)
        if i in (0, 3, 22):
            twin.load_state_dict(model.state_dict())
            again.load_state_dict(saved_and_loaded(opt))
        else:
            again.step(x.to(dtype), y)
        assert torch.equal(theta(model), theta(twin))


def test_states_of_other_dampings_are_refused_by_name():
    model, other = mlp(2, 4, 3), mlp(2, 4, 3)
    opt = lm(model, "cross_entropy", damping=mq.KroneckerMetric(every=1), schedule=mq.Constant(10.0))
    assert opt.step(*batch(0)).accepted
    with pytest.raises(ValueError, match="damping=KroneckerMetric, this optimizer has MeanEigenvalue"):
        lm(other, "cross_entropy", damping=mq.MeanEigenvalue()).load_state_dict(opt.state_dict())
    state = opt.state_dict()
    del state["marquardt"]["damping"]  # as a version before had it: then the damping itself refuses
    stale = lm(other, "cross_entropy", damping=mq.MaxDiagonal())
    with pytest.raises(ValueError, match="the damping D in this state is none of MaxDiagonal"):
        stale.load_state_dict(state)
    assert stale.step(*batch(1)).accepted


def test_the_d_of_another_model_is_refused():
    opt = lm(mlp(2, 4, 3), "cross_entropy", damping=mq.KroneckerMetric(every=1), schedule=mq.Constant(10.0))
    assert opt.step(*batch(0)).accepted
    state = opt.state_dict()
    state["marquardt"]["D"][1]["layers"].pop()
    with pytest.raises(ValueError, match="D in this state is that of another model"):
        lm(mlp(2, 4, 3), "cross_entropy", damping=mq.KroneckerMetric(every=1)).load_state_dict(state)


@pytest.mark.parametrize("steady", [2.0, mq.MeanEigenvalue, "mean"], ids=str)
def test_wrong_steady(steady):
    with pytest.raises(TypeError, match=r"KroneckerMetric\(steady=.*mq\.MeanEigenvalue\(\), or None"):
        mq.KroneckerMetric(steady=steady)


class ByItsDiagonal(mq.Curvature):
    """diag G, from outside the package: it knows of D that it has entries."""

    def __matmul__(self, v: Tensor) -> Tensor:
        return self.diagonal() * v

    def newton(self, damping: mq.Metric | Tensor) -> Tensor:
        sizes = self.parameters.sizes
        return self.gradient / (self.diagonal() + mq.Diagonal.of(damping, sizes).entries(sizes))


@dataclass(frozen=True)
class OfOnesOwn(mq.Representation):
    def form(self, lin: Linearization) -> ByItsDiagonal:
        return ByItsDiagonal(lin)


WITHOUT = [mq.Kronecker(), mq.EKFAC(), mq.Hessian(), mq.MatrixFree(hessian=True), OfOnesOwn()]


@pytest.mark.parametrize("curvature", WITHOUT, ids=lambda c: type(c).__name__)
def test_curvatures_without_partial_traces_have_the_mean_eigenvalue(curvature):
    """On changing batches and on the same data, as the default of LM does."""
    model, parts = mlp(2, 4, 3), {"curvature": curvature, "schedule": mq.Constant(10.0)}
    twin, accepted = copy.deepcopy(model), 0
    assert mq.LM(model, "cross_entropy").damping == mq.KroneckerMetric()
    one = lm(model, "cross_entropy", damping=mq.KroneckerMetric(), **parts)
    other = lm(twin, "cross_entropy", damping=mq.MeanEigenvalue(), **parts)
    for i in (0, 1, 2, 3, 3, 3, 3, 4):
        accepted += one.step(*batch(i)).accepted
        other.step(*batch(i))
        assert torch.equal(theta(model), theta(twin))
    assert accepted > 2
    assert isinstance(one._state.D, Diagonal)


def test_the_model_of_a_quadratic_momentum_has_d():
    """vᵢᵀ(G + A)vⱼ with an A that is no diagonal matrix"""
    model, (x, y) = mlp(2, 4, 3), batch(0)
    G = mq.Gram().represent(linearize(model, "cross_entropy", x, y))
    A = 0.3 * mq.KroneckerMetric().update(None, G)
    exact = reference.quadratic(model, "cross_entropy", x, y)
    dense = 0.3 * ByHand(FORMS, G.parameters.sizes).after(exact.G, 12)
    V = torch.randn(3, 27)
    assert error(Damped(G, A).products(V), V @ (exact.G + dense) @ V.T) < 1e-10


@pytest.mark.parametrize("steady", [mq.MeanEigenvalue(), mq.MaxDiagonal()], ids=str)
def test_on_the_same_data_another_damping_takes_over(steady):
    """From the third step on the same batch, with no past; when the data change D begins anew, and so on."""
    model, damping = mlp(2, 4, 3), mq.KroneckerMetric(0.7, steady=steady)
    opt = lm(model, "cross_entropy", damping=damping, schedule=mq.Constant(5.0), acceptance=mq.Uphill(1.0))
    sizes, hand, D = [p.numel() for p in model.parameters()], None, None
    for i, handed in ((0, 0), (1, 0), (2, 0), (2, 0), (2, 1), (2, 1), (3, 0), (4, 0), (4, 0), (4, 1)):
        x, y = batch(i)
        exact = reference.quadratic(model, "cross_entropy", x, y)
        if handed:
            used = D = largest(steady, None if hand is not None else D, exact.G)
            hand = None
        else:
            hand = ByHand(FORMS, sizes, c=0.7) if hand is None else hand
            used = D = hand.after(exact.G, 12)  # at once, in the first steps
        expected = theta(model) - torch.linalg.solve(exact.G + 5 * used, exact.g)
        assert opt.step(x, y).accepted
        assert error(theta(model), expected) < 1e-8
        assert isinstance(opt._state.D, Diagonal if handed else Layered)


def largest(steady: mq.MeanEigenvalue | mq.MaxDiagonal, before: Tensor | None, G: Tensor) -> Tensor:
    """The D of these two, of all steps since the hand-over"""
    D = (G.trace() / 12).expand(len(G)) if isinstance(steady, mq.MeanEigenvalue) else G.diagonal().clamp(min=0.01)
    return (D if before is None else torch.maximum(before.diagonal(), D)).diag()


def test_nothing_takes_over_if_steady_is_none():
    model = mlp(2, 4, 3)
    opt = lm(model, "cross_entropy", damping=mq.KroneckerMetric(steady=None), schedule=mq.Constant(5.0))
    for _ in range(5):
        assert opt.step(*batch(0)).accepted
    assert isinstance(opt._state.D, Layered)
    assert opt._state.D.batches == 5


def test_coupled_samples_have_the_mean_eigenvalue():
    model = nn.Sequential(nn.Linear(2, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.Linear(4, 3))
    twin = copy.deepcopy(model)
    one = lm(model, "cross_entropy", curvature=mq.MatrixFree(), damping=mq.KroneckerMetric(every=1))
    other = lm(twin, "cross_entropy", curvature=mq.MatrixFree(), damping=mq.MeanEigenvalue())
    for i in range(3):
        one.step(*batch(i))
        other.step(*batch(i))
        assert torch.equal(theta(model), theta(twin))
    assert isinstance(one._state.D, Diagonal)
    model.eval()  # then there are rows
    one.step(*batch(3))
    assert isinstance(one._state.D, Layered)
    assert one._state.D.batches == 1


def test_matrix_free_has_them_from_one_row_per_sample():
    """Of one output that is the row itself, up to its sign."""
    p = build("mlp_flat_output")
    kind = mq.MatrixFree(backtrack=False, tolerance=0.0, warm=0.0, iterations=500)
    G = kind.represent(linearize(p.model, p.loss, p.x, p.y, needs=kind.needs))
    D = mq.KroneckerMetric(every=1).update(None, G)
    exact = reference.quadratic(p.model, p.loss, p.x, p.y)
    sizes = G.parameters.sizes
    by_hand = ByHand([Form((0, 1), 1, 4, 3), Form((2, 3), 1, 1, 5)], sizes).after(exact.G, 5)
    assert error(torch.stack([D.times(e, sizes) for e in torch.eye(len(by_hand))]), by_hand) < 1e-12
    assert error(G.step(0.1 * D), -torch.linalg.solve(exact.G + 0.1 * by_hand, exact.g)) < 1e-8


@pytest.mark.parametrize("name", ["conv2d_grouped", "embedding", "transformer_encoder_layer", "lstm", "tied_linears"])
@pytest.mark.parametrize("precondition", [0.75, None])
def test_matrix_free_solves_with_d(name, precondition):
    p = build(name)
    kind = mq.MatrixFree(backtrack=False, tolerance=0.0, warm=0.0, iterations=2000, precondition=precondition)
    G = kind.represent(linearize(p.model, p.loss, p.x, p.y, p.weight, params=p.params, needs=kind.needs))
    D = mq.KroneckerMetric(every=1).update(None, G)
    exact = reference.quadratic(p.model, p.loss, p.x, p.y, p.weight, p.params)
    dense = torch.stack([D.times(e, G.parameters.sizes) for e in torch.eye(len(exact.g))])
    assert error(dense, dense.T) < 1e-12
    assert error(G.step(0.3 * D), -torch.linalg.solve(exact.G + 0.3 * dense, exact.g)) < 1e-6


def test_units_of_the_loss_do_not_matter():
    """A, B, t and γ all have them."""
    model, x, y = mlp(2, 4, 3), torch.randn(6, 2), torch.randn(6, 3)
    found = []
    for reduction in ("mean", "sum"):
        G = mq.Gram(whole=0).represent(linearize(model, nn.MSELoss(reduction=reduction), x, y))
        found.append(G.step(0.3 * mq.KroneckerMetric(every=1).update(None, G)))
    assert error(found[1], found[0]) < 1e-9


def sides(members: tuple[int, ...], left: float, right: float | None = None) -> LayerSides:
    """Diagonals of one group: of two outputs, and of two inputs."""
    return LayerSides(members, torch.full((1, 2), left), None if right is None else torch.full((1, 2), right))


def test_running_averages_by_layers():
    """A layer that the batch does not reach, or only with zeros, keeps what it has; another form begins anew."""
    past = [sides((0,), 2.0, 2.0), sides((1,), 3.0, 3.0), sides((2, 3), 4.0, 4.0), sides((4,), 5.0)]
    present = [sides((0,), 1.0, 1.0), sides((1,), 0.0, 0.0), sides((2,), 7.0), sides((3,), 8.0)]
    found = {x.members: x for x in averaged(past, present, torch.tensor(0.75))}
    assert {key: float(x.left[0, 0]) for key, x in found.items()} == {(0,): 1.75, (1,): 3, (2,): 7, (3,): 8, (4,): 5}
    assert float(found[0,].right[0, 1]) == 1.75
    (again,) = averaged([sides((0,), 2.0)], [sides((0,), 1.0, 1.0)], torch.tensor(0.75))
    assert float(again.left[0, 0]) == 1.0


def test_an_outlier_is_forgotten():
    """The past has at most ten times the trace of the present."""
    (found,) = averaged([sides((0,), 1e6, 1e6)], [sides((0,), 1.0, 1.0)], torch.tensor(0.9))
    assert float(found.left[0, 0]) == pytest.approx(10.0, rel=1e-3)


def test_a_layer_that_no_batch_reaches_has_gamma_alone():
    """And the first one that reaches it finds it ready."""
    model = routed(4)
    parts = {"curvature": mq.Gram(whole=0), "damping": mq.KroneckerMetric(), "schedule": mq.Constant(1.0)}
    opt = lm(model, "mse", acceptance=mq.Uphill(1.0), **parts)
    x, y = torch.randn(6, 3), torch.randn(6, 2)
    assert opt.step(x, y).accepted
    D = opt._state.D
    diagonal = D.diagonal([p.numel() for p in model.parameters()]).split([p.numel() for p in model.parameters()])
    assert all(torch.equal(part, D.gamma.expand_as(part)) for part in diagonal[:2])
    x[:3, 0] += 200
    with torch.no_grad():  # so that its outputs are not saturated
        next(model.parameters())[:, 0] = 0
    assert opt.step(x, y).accepted
    assert all(bool((layer.trace > 0).all()) for layer in opt._state.D.layers)


def test_no_curvature_at_all():
    """D is the identity then: with weights of zero only the last bias has a gradient."""
    model = nn.Linear(2, 1)
    G = mq.Gram().represent(linearize(model, "mse", torch.zeros(3, 2), torch.ones(3, 1), torch.zeros(3) + 1e-300))
    D = mq.KroneckerMetric().update(None, G)
    assert D.gamma > 0
    assert all(bool(root.isfinite().all()) for pair in D.roots for root in pair)
