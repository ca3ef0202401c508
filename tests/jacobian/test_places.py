"""Where the samples are, from gradients that tell them apart."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from marquardt.jacobian.mapping import Signs, found_in, guessed
from marquardt.layers.capture import ALL, Place
from marquardt.layers.graph import stacked

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
