"""Settings of the whole program."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from marquardt.model.batch import Shared, open_cells, twice_differentiable


class Attending(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.scaled_dot_product_attention(x, x, x)


def settings() -> tuple[bool, bool, bool, bool]:
    backends = torch.backends.cuda
    fused = backends.flash_sdp_enabled(), backends.mem_efficient_sdp_enabled()
    return *fused, backends.math_sdp_enabled(), torch.backends.cudnn.enabled


@pytest.mark.parametrize(
    ("model", "recurrent", "lstm"),
    [(nn.Linear(2, 1), False, False), (nn.Sequential(nn.GRU(2, 2)), True, False), (nn.LSTM(2, 2), True, True)],
)
def test_kernels_that_are_off_within(model, recurrent, lstm):
    """The fused ones, and cuDNN for models with a recurrent layer, however deep it is; that of an LSTM's cells."""
    before, cells = settings(), torch.backends.mkldnn.enabled
    with twice_differentiable(model):
        assert settings() == (False, False, True, before[3] and not recurrent)
    with open_cells(model):
        assert torch.backends.mkldnn.enabled == (cells and not lstm)
    assert (settings(), torch.backends.mkldnn.enabled) == (before, cells)


def test_settings_are_taken_back():
    """After an exception, and by the last of two threads that overlap."""
    before, model = settings(), nn.LSTM(2, 2)
    with pytest.raises(KeyError), twice_differentiable(model):
        raise KeyError
    assert settings() == before
    first, second = twice_differentiable(model), twice_differentiable(model)
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert not settings()[0]
    second.__exit__(None, None, None)
    assert settings() == before


def test_attention_can_be_differentiated_twice():
    x = torch.randn(1, 1, 3, 4, dtype=torch.float64, requires_grad=True)
    with twice_differentiable(Attending()):
        z = Attending()(x)
    (slope,) = torch.autograd.grad(z.square().sum(), x, create_graph=True)
    (second,) = torch.autograd.grad(slope.sum(), x)
    assert second.isfinite().all()
    assert second.any()


def test_a_shared_setting_is_made_once():
    """By the first who enters; the last who leaves takes it back, and the next one makes it again."""
    told: list[str] = []
    shared = Shared(lambda: "taken back", told.append, "made")
    with shared():
        with shared():
            assert told == ["made"]
        assert told == ["made"]
    assert told == ["made", "taken back"]
    with shared():
        assert told == ["made", "taken back", "made"]
