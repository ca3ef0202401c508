"""Linearisation: f, g and the rows J̃ against the reference; how they were found; and nothing left behind."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

import marquardt as mq
import reference
from cases import CASES, CONVOLUTIONS, Problem, build
from reference import error

EVERY_CASE = pytest.mark.parametrize("name", CASES)
REPRESENTATIONS = pytest.mark.parametrize(
    "curvature", [mq.Dense(), mq.Gram(), mq.Dense(chunk=2), mq.Gram(chunk=2)], ids=str
)


def linearize(p: Problem, **options):
    return mq.linearize(p.model, p.loss, p.x, p.y, p.weight, params=p.params, **options)


# ---- against the reference


@EVERY_CASE
@pytest.mark.parametrize("chunk", [None, 2])
def test_exact(name, chunk):
    """f, and J̃ᵀJ̃ = G."""
    lin, q = linearize(build(name), chunk=chunk), reference.quadratic(*build(name))
    assert isinstance(lin.loss, float)
    assert lin.loss == pytest.approx(q.f.item(), rel=1e-12)
    J = lin.rows()
    assert J.shape[1] == len(q.g)
    assert error(J.T @ J, q.G) < 1e-10


@pytest.mark.parametrize("name", ["mlp_elu", "conv2d", "embedding", "layer_norm", "called_twice", "lstm", "pinn"])
def test_rows_carry_no_graph(name):
    """They are numbers: a graph behind them would keep every activation of the pass alive."""
    assert not linearize(build(name)).rows().requires_grad


@pytest.mark.parametrize("name", ["ce", "ce_weighted", "ce_masked", "ce_sum", "conv_batchnorm_classifier", "lstm"])
@pytest.mark.parametrize("chunk", [None, 2])
def test_empirical(name, chunk):
    """One row per sample, G = (1/N) Σ ∇fᵢ∇fᵢᵀ for hard labels."""
    lin = linearize(build(name), rows=mq.Empirical(), chunk=chunk)
    q = reference.quadratic(*build(name), rows="empirical")
    J = lin.rows()
    assert J.shape[0] == q.z.shape[0]
    assert error(J.T @ J, q.G) < 1e-10


@pytest.mark.parametrize("name", ["ce", "mse_weighted"])
def test_sampled_is_unbiased(name):
    """The mean of J̃ᵀJ̃ over seeds tends to G; the gradient does not depend on the seed."""
    p, q, draws = build(name), reference.quadratic(*build(name)), 300
    Gs = []
    for seed in range(draws):
        lin = linearize(p, rows=mq.Sampled(2, seed=seed))
        J = lin.rows()
        assert J.shape[0] == 2 * q.z.shape[0]
        Gs.append(J.T @ J)
        if seed < 3:
            assert error(mq.Dense().represent(lin).gradient, q.g) < 1e-12
    G = torch.stack(Gs)  # (draws, n, n)
    standard_error = (G.var(0).sum() / draws).sqrt()  # of the mean, as ‖·‖²
    assert standard_error < 0.1 * q.G.norm()  # else the next line says nothing
    assert (G.mean(0) - q.G).norm() < 3 * standard_error
    each = (G.mean(0) - q.G).abs() / (G.std(0) / draws**0.5 + 1e-12)
    assert each.max() < 5


def test_sampled_repeats():
    """The same seed draws the same rows; another seed, others."""
    p = build("ce")
    first, again, other = (linearize(p, rows=mq.Sampled(1, seed=s)).rows() for s in (0, 0, 1))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


# ---- the way each parameter's rows were found

ALL_BY_RULE = [
    *[
        "mlp_elu",
        "mlp_flat_output",
        "linear_leading_dims",
        "linear_no_bias",
        "ce",
        "frozen_parameters",
        "chosen_parameters",
    ],
    *[name for name in CONVOLUTIONS if "transpose" not in name],
    *["residual_block_in_place", "conv_batchnorm_classifier", "embedding", "embedding_padding"],
    *["layer_norm", "layer_norm_leading_dims", "layer_norm_many_dims", "group_norm", "batch_norm_1d", "batch_norm_2d"],
]
NOT_BY_RULE = {  # the parameters that no rule may claim
    "custom_scale": ["scale", "gain"],
    "custom_polynomial": ["coefficients"],
    "weight_used_transposed": ["encoder.weight"],
    "bilinear_and_prelu": ["pair.weight", "act.weight"],
    "conv_transpose2d": ["0.weight"],
    "weight_norm": ["0.parametrizations.weight.original0", "0.parametrizations.weight.original1"],
    "spectral_norm": ["0.parametrizations.weight.original"],
    "orthogonal": ["0.parametrizations.weight.original"],
    "pinn": ["u.0.weight", "u.0.bias", "u.2.weight"],
    "pinn_two_inputs": ["u.0.weight", "u.0.bias", "u.2.weight", "u.2.bias", "u.4.weight", "kappa"],
    "lstm": ["cell.weight_ih_l0", "cell.weight_hh_l0", "cell.bias_ih_l0", "cell.bias_hh_l0"],
    "gru_time_major": ["cell.weight_ih_l0", "cell.weight_hh_l0", "cell.bias_ih_l0", "cell.bias_hh_l0"],
}


def paths(name: str) -> dict[str, str]:
    p = build(name)
    lin = linearize(p)
    mq.Dense().represent(lin)
    assert list(lin.paths) == list(reference.trainable(p.model, p.params))
    assert set(lin.paths.values()) <= {"rule", "none", "vmap", "parts", "rows", "loop"}
    return lin.paths


@pytest.mark.parametrize("name", ALL_BY_RULE)
def test_fast_rule(name):
    assert set(paths(name).values()) == {"rule"}


@pytest.mark.parametrize("name", NOT_BY_RULE)
def test_general_path(name):
    found = paths(name)
    assert [k for k in NOT_BY_RULE[name] if found[k] == "rule"] == []


def test_paths_of_a_transformer():
    found = paths("transformer_encoder_layer")
    for layer in ("linear1", "linear2", "norm1", "norm2"):
        assert found[f"{layer}.weight"] == found[f"{layer}.bias"] == "rule"


@pytest.mark.parametrize("name", ["lstm", "gru_time_major"])
def test_paths_of_recurrence(name):
    """vmap cannot follow a recurrent layer; its head keeps its rule."""
    found = paths(name)
    assert {path for k, path in found.items() if k.startswith("cell.")} <= {"parts", "rows", "loop"}
    assert found["head.weight"] == found["head.bias"] == "rule"


# ---- random layers: the linearisation sees the numbers that one forward would


def random_model(layer: nn.Module) -> Problem:
    model = nn.Sequential(nn.Linear(3, 5), layer, nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 2)).double()
    return Problem(model, "mse", torch.randn(6, 3).double(), torch.randn(6, 2).double(), torch.rand(6).double())


RANDOM_LAYERS = pytest.mark.parametrize("layer", [nn.Dropout(0.4), nn.RReLU()], ids=["dropout", "rrelu"])


@RANDOM_LAYERS
@pytest.mark.parametrize("curvature", [mq.Dense(), mq.Gram()], ids=str)
def test_same_random_numbers(layer, curvature):
    p = random_model(layer)
    torch.manual_seed(7)
    q = reference.quadratic(*p)
    torch.manual_seed(7)
    lin = linearize(p)
    C = curvature.represent(lin)
    v, A = (
        torch.randn(len(q.g), dtype=torch.float64, generator=torch.Generator().manual_seed(0)),
        torch.tensor(0.1).double(),
    )
    assert lin.loss == pytest.approx(q.f.item(), rel=1e-12)
    assert error(C.gradient, q.g) < 1e-10
    assert error(C @ v, q.G @ v) < 1e-10
    assert error(-C.newton(A), q.step(A)) < 1e-10


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


@RANDOM_LAYERS
@pytest.mark.parametrize("curvature", [mq.Dense(), mq.Gram()], ids=str)
def test_global_generator_advances_as_one_forward(layer, curvature):
    p = random_model(layer)
    torch.manual_seed(7)
    p.model(p.x)
    after_forward = torch.get_rng_state()
    torch.manual_seed(7)
    C = curvature.represent(linearize(p, chunk=curvature.chunk))
    assert torch.equal(torch.get_rng_state(), after_forward)
    C.newton(torch.tensor(0.1).double())
    assert torch.equal(torch.get_rng_state(), after_forward)


@pytest.mark.parametrize("rows", [mq.Exact(), mq.Sampled(2), mq.Empirical()], ids=str)
def test_global_generator_without_random_layers(rows):
    """Neither the proof of the rules nor sampled rows draw from it."""
    before = torch.get_rng_state()
    mq.Dense().represent(linearize(build("ce"), rows=rows)).newton(torch.tensor(0.1).double())
    assert torch.equal(torch.get_rng_state(), before)


# ---- nothing left behind

LEFT_ALONE = [
    *["mlp_elu", "conv_batchnorm_classifier", "frozen_parameters", "chosen_parameters", "weight_norm", "spectral_norm"],
    *["tied_linears", "transformer_encoder_layer", "lstm", "pinn", "custom_scale", "embedding_padding"],
]
HOOKS = ["_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks"]


def hooks(model: nn.Module) -> list[list[object]]:
    on_modules = [list(getattr(m, kind).values()) for m in model.modules() for kind in HOOKS]
    on_tensors = [list((p._backward_hooks or {}).values()) for p in model.parameters()]
    return on_modules + on_tensors


def everything(model: nn.Module) -> dict[str, object]:
    """What belongs to the user."""
    return {
        "hooks": hooks(model),
        "requires_grad": [p.requires_grad for p in model.parameters()],
        "identity": [id(p) for p in model.parameters()],
        "training": [m.training for m in model.modules()],
        "attributes": [sorted(vars(m)) for m in model.modules()],
        "grad": [id(p.grad) for p in model.parameters()],
    }


def values(model: nn.Module) -> dict[str, Tensor]:
    grads = {f"{k}.grad": p.grad for k, p in model.named_parameters() if p.grad is not None}
    return copy.deepcopy({**model.state_dict(), **grads})


@pytest.mark.parametrize("name", LEFT_ALONE)
@REPRESENTATIONS
def test_model_is_left_alone(name, curvature):
    p = build(name)
    for i, parameter in enumerate(p.model.parameters()):  # some have a gradient, some do not
        if i % 2 == 0:
            parameter.grad = torch.randn_like(parameter)
    p.model.register_forward_hook(lambda *_: None)
    before, numbers = everything(p.model), values(p.model)
    C = curvature.represent(linearize(p, chunk=curvature.chunk))
    C.diagonal()
    C.newton(torch.tensor(0.1).double())
    assert everything(p.model) == before
    for k, v in values(p.model).items():
        assert torch.equal(v, numbers[k]), k


@REPRESENTATIONS
def test_exception_in_forward(curvature):
    """It reaches the user as it is, and nothing stays on the model."""

    class Fragile(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            raise ZeroDivisionError("in the middle of forward")

    model = nn.Sequential(nn.Linear(3, 4), nn.Dropout(0.5), Fragile(), nn.Linear(4, 2)).double()
    x, y = torch.randn(4, 3).double(), torch.randn(4, 2).double()
    before, numbers = everything(model), values(model)
    with pytest.raises(ZeroDivisionError, match="in the middle of forward"):
        curvature.represent(mq.linearize(model, "mse", x, y, params=model[0].parameters(), chunk=curvature.chunk))
    assert everything(model) == before
    for k, v in values(model).items():
        assert torch.equal(v, numbers[k]), k
    model[2] = nn.ReLU()  # and the model works
    assert torch.isfinite(curvature.represent(mq.linearize(model, "mse", x, y)).gradient).all()


def test_user_hooks_keep_working():
    """A forward hook that changes the output is part of the model."""
    p = build("mlp_elu")
    handle = p.model[0].register_forward_hook(lambda module, inputs, output: 2 * output)
    q = reference.quadratic(*p)
    J = linearize(p).rows()
    assert error(J.T @ J, q.G) < 1e-10
    handle.remove()


def test_parameters_are_read_when_linearised():
    """Two linearisations of one model, before and after a change, are two."""
    p = build("mlp_elu")
    first = mq.Dense().represent(linearize(p))
    g = first.gradient.clone()
    with torch.no_grad():
        for parameter in p.model.parameters():
            parameter.mul_(1.5)
    second = mq.Dense().represent(linearize(p))
    assert torch.equal(first.gradient, g)
    assert error(second.gradient, reference.quadratic(*p).g) < 1e-10


# ---- refused


@pytest.mark.parametrize(
    "norm", [nn.BatchNorm1d(4), nn.BatchNorm1d(4, affine=False), nn.SyncBatchNorm(4)], ids=["affine", "plain", "sync"]
)
def test_batch_norm_in_train_mode_is_refused(norm):
    model = nn.Sequential()
    model.add_module("inner", nn.Linear(3, 4))
    model.add_module("normaliser", norm)
    before = everything(model)
    with pytest.raises((ValueError, RuntimeError), match="normaliser") as refusal:
        mq.Dense().represent(mq.linearize(model, "mse", torch.randn(5, 3), torch.randn(5, 4)))
    assert "eval()" in str(refusal.value)
    assert everything(model) == before


def test_batch_norm_without_running_statistics_is_refused():
    """eval() does not help there: the batch's own statistics are used in either mode."""
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4, track_running_stats=False)).eval()
    with pytest.raises((ValueError, RuntimeError), match="BatchNorm1d"):
        mq.Dense().represent(mq.linearize(model, "mse", torch.randn(5, 3), torch.randn(5, 4)))


def test_nothing_to_train_is_refused():
    model = nn.Linear(3, 2).requires_grad_(False)
    with pytest.raises(ValueError, match="requires_grad"):
        mq.Dense().represent(mq.linearize(model, "mse", torch.randn(5, 3), torch.randn(5, 2)))


# ---- rows of a part of the batch


@pytest.mark.parametrize("name", ["ce", "mse_weighted", "conv_batchnorm_classifier", "transformer_encoder_layer"])
def test_fraction_is_unbiased(name):
    """Every draw has the whole gradient; the mean of G over the draws is G."""
    p, q, draws = build(name), reference.quadratic(*build(name)), 400
    total = torch.zeros_like(q.G)
    for seed in range(draws):
        lin = linearize(p, rows=mq.Fraction(0.5, seed=seed))
        C = mq.Dense().represent(lin)
        assert lin.m < len(reference.output_hessian(p.loss, q.z, p.y, p.weight))
        assert error(C.gradient, q.g) < 1e-10
        total += C.G / draws
    assert error(total, q.G) < 0.15


@pytest.mark.parametrize(
    "representation", [mq.Dense(), mq.Gram(), mq.Gram(whole=0), mq.MatrixFree(tolerance=1e-12)], ids=str
)
def test_fraction_solves_with_the_whole_gradient(representation):
    p = build("ce")
    rows = mq.Fraction(0.4, mq.Exact(), seed=3)
    J = linearize(p, rows=rows).rows()  # of some samples
    C, g = representation.represent(linearize(p, rows=rows)), reference.quadratic(*p).g
    expected = torch.linalg.solve(J.T @ J + 0.1 * torch.eye(len(g)), g)
    assert error(C.newton(torch.tensor(0.1).double()), expected) < 1e-6


def test_fraction_replays_the_slopes_of_its_samples():
    """RReLU draws once for the batch: the rows of the part belong to the same network as the losses."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 8), nn.RReLU(), nn.Linear(8, 2)).double()
    x, y = torch.randn(10, 3).double(), torch.randn(10, 2).double()
    state = torch.get_rng_state()
    whole = mq.linearize(model, "mse", x, y).rows().view(2, 10, -1)
    torch.set_rng_state(state)
    part = mq.linearize(model, "mse", x, y, rows=mq.Fraction(0.3)).rows().view(2, 3, -1) / (10 / 3) ** 0.5
    index = mq.Fraction(0.3).pick(10, 0)
    assert error(part, whole[:, index]) < 1e-12


@pytest.mark.parametrize("bad", [0, 1.5, -1])
def test_fraction_refuses(bad):
    with pytest.raises(ValueError, match=repr(bad)):
        mq.Fraction(bad)
    with pytest.raises(TypeError, match=r"mq\.Exact\(\)"):
        mq.Fraction(0.5, mq.Exact)


@pytest.mark.parametrize(("lower", "upper"), [(1 / 8, 1 / 3), (0.5, 1.5)])
def test_a_trial_at_the_same_weights_has_the_same_loss(lower, upper):
    """RReLU keeps its slopes, also those above 1."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 50), nn.RReLU(lower, upper), nn.Linear(50, 2)).double()
    x, y = torch.randn(10, 3).double(), torch.randn(10, 2).double()
    lin = mq.linearize(model, "mse", x, y)
    f = lin.loss
    d = torch.zeros_like(lin.theta)
    assert float(lin.evaluate(d, 1.0)) == pytest.approx(f, rel=1e-12)
    assert lin.evaluate_along(d, [0.5, 1.0]) == pytest.approx([f, f], rel=1e-12)
