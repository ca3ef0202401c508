"""Other tensors in the place of parameters, also of a module under two names."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import marquardt as mq
from marquardt.jacobian.linearization import Trials
from support.reference import error

DOUBLE = {"dtype": torch.float64}


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
    assert Trials(lin).losses(-C.gradient, rates) == pytest.approx(
        [float(Trials(lin).loss(-C.gradient, r)) for r in rates]
    )
    lin.position.move()
    opt = mq.LM(model, "mse", curvature=curvature, line_search=mq.Grid(stop=2.0), acceptance=mq.Decrease())
    for _ in range(6):
        opt.step(x, y)
    assert all(p is own[name] for name, p in model.named_parameters(remove_duplicate=False))
    assert torch.isfinite(model(x)).all()


@pytest.mark.parametrize("fails", [False, True])
def test_substitution_is_taken_back(fails):
    from marquardt.model.anatomy import substituted

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
