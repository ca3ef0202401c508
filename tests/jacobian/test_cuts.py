"""Where the outputs were put together."""

from __future__ import annotations

import pytest
import torch

from marquardt.jacobian.mapping import cuts

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
