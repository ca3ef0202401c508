"""The diagonal metric D."""

from __future__ import annotations

import torch

import marquardt as mq
from marquardt.metric import Part


def test_what_a_weight_and_its_bias_share_stays_shared():
    """In another precision, and with its zeros filled: to ask for identity is free, equality waits for a GPU."""
    u, v = torch.rand(1, 3, 1), torch.zeros(1, 1, 4)
    D = mq.Diagonal(torch.ones(()), [Part(u=u, v=v), Part(u=u)])
    for moved in (D.to(torch.zeros((), dtype=torch.float64)), D.positive()):
        weight, bias = moved.parts
        assert weight.u is bias.u
