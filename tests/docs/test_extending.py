"""Parts added from outside the package: those of docs/extending.md as printed, and what is said of wrong ones."""

import importlib
import re
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch import nn

import marquardt as mq
from marquardt.layers import RULES, Operand
from support import programs

PAGE = Path(__file__).parents[2] / "docs" / "extending.md"

# By section: the name of a file, its text, and the code that uses it.
SECTIONS = re.findall(
    r"^## .*?```python\n(# (\w+)\.py\n.*?)```.*?```python\n(.*?)```",
    PAGE.read_text(encoding="utf-8"),
    re.DOTALL | re.MULTILINE,
)
FILES = {name: text for text, name, _ in SECTIONS}
DAMPINGS = [mq.Identity(), mq.MeanEigenvalue(), mq.LayerMeanEigenvalue(), mq.MaxDiagonal(), mq.FactoredMaxDiagonal()]


@pytest.fixture
def added(tmp_path, monkeypatch):
    """A file of the page, imported; its rule is gone after the test."""
    rules = dict(RULES)
    monkeypatch.syspath_prepend(tmp_path)

    def module(name):
        (tmp_path / f"{name}.py").write_text(FILES[name], encoding="utf-8")
        return importlib.import_module(name)

    yield module
    for name in FILES:
        sys.modules.pop(name, None)
    RULES.clear()
    RULES.update(rules)


def problem():
    model = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2)).double()
    x = torch.randn(24, 3, dtype=torch.float64)
    return model, x, torch.stack([x.sum(1).sin(), x.prod(1)], 1)


def flat(model):
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def put(model, theta):
    nn.utils.vector_to_parameters(theta.clone(), model.parameters())


def test_the_page_adds_one_of_each():
    assert list(FILES) == ["fading", "soft_margin", "gaussian", "projected", "banks", "diagonal"]
    assert PAGE.read_text(encoding="utf-8").count("```python") == 2 * len(FILES)


@pytest.mark.parametrize(("text", "name", "use"), SECTIONS, ids=list(FILES))
def test_a_section_runs_as_printed(text, name, use, tmp_path):
    (tmp_path / f"{name}.py").write_text(text, encoding="utf-8")
    run = programs.run(use, tmp_path)
    assert (run.returncode, run.stderr, run.stdout) == (0, "", "")


# The damping.


def test_a_damping_forgets(added):
    model, x, y = problem()
    fading, G = added("fading").Fading(decay=0.5), mq.Dense().represent(mq.linearize(model, "mse", x, y))
    sizes = G.parameters.sizes
    last = mq.Diagonal.of(3 * G.diagonal(), sizes)
    torch.testing.assert_close(fading.update(last, G).entries(sizes), 1.5 * G.diagonal())
    torch.testing.assert_close(fading.update(None, G).entries(sizes), G.diagonal())


@pytest.mark.parametrize("curvature", [mq.Dense(), mq.Gram(), mq.MatrixFree(), mq.Hessian()], ids=repr)
def test_a_damping_goes_with_every_curvature_and_is_saved(added, curvature):
    model, x, y = problem()
    parts = {"curvature": curvature, "damping": added("fading").Fading(), "attempts": 10}
    opts = [mq.LM(model, "mse", **parts) for _ in range(2)]
    assert opts[0].step(x, y).accepted
    opts[1].load_state_dict(opts[0].state_dict())
    theta = flat(model)
    first = opts[0].step(x, y)
    put(model, theta)
    assert opts[1].step(x, y) == first


# The losses.


def signs(outputs):
    return torch.where(torch.randn(24, outputs) > 0, 1.0, -1.0).double()


def test_targets_that_the_loss_excludes_are_refused(added):
    model, x, _ = problem()
    y = signs(2)
    assert mq.LM(model, added("soft_margin").SoftMargin()).step(x, y).accepted
    y[3, 1] = 0
    with pytest.raises(ValueError, match=r"targets\[3, 1\] is 0: SoftMargin needs −1 or 1"):
        mq.LM(model, added("soft_margin").SoftMargin()).step(x, y)


@pytest.mark.parametrize("rows", [mq.Exact(), mq.Empirical(), mq.Sampled(2), mq.Fraction(0.5)], ids=repr)
@pytest.mark.parametrize("curvature", [mq.Dense(chunk=10), mq.Gram(), mq.MatrixFree(), mq.Kronecker()], ids=repr)
def test_a_coupled_loss_goes_with_all_rows_and_curvatures(added, rows, curvature):
    model, x, y = problem()
    loss = added("gaussian").Gaussian(covariance=torch.tensor([[2.0, 0.9], [0.9, 0.5]]))
    opt = mq.LM(model, loss, rows=rows, curvature=curvature)
    steps = [opt.step(x, y, weight=torch.rand(24, dtype=torch.float64)) for _ in range(3)]
    assert all(step.accepted for step in steps)


# The rule.


def banked(banks):
    class Banks(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.randn(3, 5, 4))

        def forward(self, x):
            return banks(x, self.weight)

    model = nn.Sequential(Banks(), nn.Tanh(), nn.Flatten(), nn.Linear(15, 2)).double()
    return model, torch.randn(24, 3, 4, dtype=torch.float64), torch.randn(24, 2, dtype=torch.float64)


@pytest.mark.parametrize("curvature", [mq.Dense(), mq.Dense(chunk=7), mq.Gram(), mq.Gram(chunk=7)], ids=repr)
def test_steps_with_and_without_the_rule_are_the_same(added, curvature):
    banks = added("banks").banks
    model, x, y = banked(banks)
    theta, found = flat(model), []
    for path in ("rule", "graph"):
        assert mq.linearize(model, "mse", x, y).paths["0.weight"] == path
        # The graph knows nothing of the groups that the rule has: a D by layers would be another one.
        assert mq.LM(model, "mse", curvature=curvature, damping=mq.MeanEigenvalue()).step(x, y).accepted
        found.append(flat(model))
        put(model, theta)
        RULES.pop(banks, None)
    torch.testing.assert_close(*found)
    assert not torch.equal(found[0], theta)


@pytest.mark.parametrize(
    "a",
    [
        lambda x: x.flip(1)[:, None],
        lambda x: x[:, None, :, :2],
        lambda x: x.transpose(1, 2)[:, None],
        lambda x: x[:3, None],
        lambda x: x.sum(2),
    ],
    ids=["another order", "too few inputs", "other groups", "too few samples", "too few dimensions"],
)
def test_a_wrong_rule_is_not_used(added, a):
    banks = added("banks").banks
    model, x, y = banked(banks)
    right = mq.linearize(model, "mse", x, y).rows()
    RULES[banks] = lambda x, weight: Operand(weight, None, x, 1, lambda: a(x), lambda d: d[:, :, None])
    lin = mq.linearize(model, "mse", x, y)
    assert lin.paths["0.weight"] == "graph"
    torch.testing.assert_close(lin.rows(), right)


# The curvature.


@pytest.mark.parametrize("damping", DAMPINGS, ids=repr)
@pytest.mark.parametrize("chunk", [None, 7])
def test_a_curvature_goes_with_every_damping(added, damping, chunk):
    """Its first step is (diag G + λD)⁻¹g with the diagonal of Dense."""
    model, x, y = problem()
    theta, lin = flat(model), mq.linearize(model, "mse", x, y)
    opt = mq.LM(
        model, "mse", curvature=added("diagonal").DiagonalOnly(chunk=chunk), damping=damping,
        schedule=mq.Constant(2.0), momentum=None, line_search=None,
    )  # fmt: skip
    G = mq.Dense().represent(lin)
    D = damping.update(None, G).entries(G.parameters.sizes)
    expected = theta - G.gradient / (G.diagonal() + 2 * D)
    assert opt.step(x, y).accepted
    torch.testing.assert_close(flat(model), expected)


@pytest.mark.parametrize("rows", [mq.Exact(), mq.Empirical(), mq.Sampled(2), mq.Fraction(0.5)], ids=repr)
def test_a_curvature_goes_with_all_rows_and_over_batches(added, rows):
    model, x, y = problem()
    opt = mq.LM(model, "mse", curvature=added("diagonal").DiagonalOnly(), rows=rows)
    assert opt.step(x, y).accepted
    assert opt.step_over([(x[:10], y[:10]), (x[10:], y[10:])]).accepted
    assert opt.damping == mq.KroneckerMetric()  # which is one number for this curvature
    assert opt._state.D.parts is None


def test_what_newton_returns_stays_as_it_is():
    """A curvature may return a tensor that it keeps."""

    class Steepest(mq.Curvature):
        def __matmul__(self, v):
            return 0 * v

        def newton(self, damping):
            return self.gradient

    @dataclass(frozen=True)
    class Descent(mq.Representation):
        def form(self, lin):
            return Steepest(lin)

    model, x, y = problem()
    lin = mq.linearize(model, "mse", x, y)
    g = lin.gradient.clone()
    d = Descent().represent(lin).step(mq.Diagonal.of(torch.ones(lin.n, dtype=g.dtype), lin.parameters.sizes))
    assert torch.equal(d, -g)
    assert torch.equal(lin.gradient, g)


# What these parts may get wrong.


def wrong_damping(update):
    return lambda added: {"damping": type("Wrong", (), {"update": lambda self, D, G: update(D, G)})()}


def wrong_margin(method, wrong):
    def parts(added):
        return {"loss": type("Wrong", (added("soft_margin").SoftMargin,), {method: lambda self, z, y: wrong(z, y)})()}

    return parts


def wrong_gaussian(method, wrong):
    covariance = torch.tensor([[2.0, 0.9], [0.9, 0.5]])
    return lambda added: {"loss": type("Wrong", (added("gaussian").Gaussian,), {method: wrong})(covariance=covariance)}


def wrong_curvature(newton, keep=None):
    class Wrong(mq.Curvature):
        def __matmul__(self, v):
            return v

        def newton(self, damping):
            return newton(self.gradient)

        def keep(self):
            return keep or super().keep()

    @dataclass(frozen=True)
    class Of(mq.Representation):
        def form(self, lin):
            return newton and Wrong(lin)

    return lambda added: {"curvature": Of()}


def shrunk(S, u):
    return S.mT.expand(len(u), 1, 2, 2), u


WRONG = [
    (lambda added: {"curvature": mq.Kronecker(), "damping": added("fading").Fading()}, r"use damping=mq\.FactoredMax"),
    (wrong_damping(lambda D, G: G.diagonal()), "Wrong.update returned Tensor: a damping returns a metric"),
    (wrong_damping(lambda D, G: None), "Wrong.update returned NoneType"),
    (
        wrong_damping(lambda D, G: mq.Diagonal(G.trace(), [])),
        r"Wrong.update returned a D that does not fit .* \[15, 5, ",
    ),
    (wrong_damping(lambda D, G: mq.Diagonal.of(G.diagonal()[1:], G.parameters.sizes)), r"entries of the shape \(31,\)"),
    (wrong_margin("slope", lambda z, y: y * (-y * z).sigmoid()), r"Wrong\.slope: ∂ℓ/∂z"),
    (wrong_margin("s", lambda z, y: z.sigmoid() * (-z).sigmoid()), r"Wrong\.s: vᵀSSᵀv"),
    (wrong_margin("ell", lambda z, y: nn.functional.softplus(-y * z).mean()), r"Wrong\.ell: the value"),
    (
        wrong_margin("ell", lambda z, y: nn.functional.softplus(-y * z) - 5),
        "Wrong.lower_bound.*define lower_bound, or ",
    ),
    (wrong_gaussian("slope", lambda loss, z, y: z - y), r"Wrong\.slope: ∂ℓ/∂z"),
    (wrong_gaussian("factors", lambda loss, z, y: shrunk(loss.S(z), loss.group(z - y))), r"Wrong\.factors: Su"),
    (wrong_gaussian("factors", lambda loss, z, y: None), "Wrong.factors returned NoneType"),
    (
        wrong_gaussian("factors", lambda loss, z, y: (loss.S(z)[0, 0], z)),
        r"Wrong.factors: S has .* u \(24, 2\), expected \(24, P, C, r\)",
    ),
    (wrong_gaussian("ungroup", lambda loss, t, z: t.squeeze(-2).flip(-1)), r"Wrong\.ungroup"),
    (wrong_curvature(None), "Of.form returned NoneType: it returns an mq.Curvature"),
    (
        wrong_curvature(lambda g: g[:, None]),
        r"Wrong.newton returned the shape \(32, 1\): one number per parameter, \(32,",
    ),
    (wrong_curvature(lambda g: 1e-3 * g, {"count": 1}), "Wrong.keep returned int for 'count': tensors only"),
]


@pytest.mark.parametrize(("parts", "message"), WRONG)
def test_a_wrong_part_is_refused_by_name_and_nothing_moves(added, parts, message):
    model, x, y = problem()
    before, parts = flat(model), {"loss": "mse", **parts(added)}
    y = y.sign() if "margin" in str(type(parts["loss"]).__mro__) else y
    with pytest.raises((TypeError, ValueError), match=message):
        mq.LM(model, **parts).step(x, y)
    assert torch.equal(flat(model), before)


def test_a_curvature_derives_from_the_contract_and_defines_newton():
    class Alone:
        def represent(self, lin):
            raise AssertionError

    class Half(mq.Curvature):
        def __matmul__(self, v):
            return v

    model, x, y = problem()
    with pytest.raises(TypeError, match="is no curvature: pass for example"):
        mq.LM(model, "mse", curvature=Alone())
    with pytest.raises(TypeError, match="newton"):
        Half(mq.linearize(model, "mse", x, y))


@pytest.mark.parametrize(
    ("rule", "message"),
    [
        (lambda x, weight: 1 / 0, "the layer rule of banks raised ZeroDivisionError"),
        (lambda x: None, "the layer rule of banks raised TypeError"),
        (lambda x, weight: (weight, None), "the layer rule of banks returned tuple: it returns an Operand, or None"),
    ],
)
def test_a_rule_that_fails_is_told_by_name(added, rule, message):
    banks = added("banks").banks
    model, x, y = banked(banks)
    RULES[banks] = rule
    with pytest.raises((RuntimeError, TypeError), match=message):
        mq.linearize(model, "mse", x, y).rows()
