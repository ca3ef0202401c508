"""The weights of weight decay as a diagonal matrix."""

from __future__ import annotations

import pytest
import torch

from marquardt.weights import Weights

pytestmark = pytest.mark.usefixtures("double")

SIZES = [2, 6]


def mixed() -> Weights:
    return Weights([0.3, 2.0], {1: torch.tensor([0.0, 0.1, 0.2, 0.3, 0.0, 0.1])}, gaps=True)


def test_what_can_be_told_of_them():
    assert not Weights().any
    assert not Weights([0.0, 0.0]).any
    assert Weights([0.0, 0.1]).any
    assert not Weights([0.0, 0.1]).everywhere
    assert Weights([0.2, 0.1]).everywhere
    assert not mixed().everywhere
    assert Weights([0.3, 2.0], mixed().elements).everywhere
    assert Weights([0.1, 0.1]).number == 0.1
    assert Weights([0.1, 0.2]).number is None
    assert Weights([1.0], {0: torch.arange(2.0)}).number is None


def test_all_of_them():
    expected = torch.tensor([0.3, 0.3, 0.0, 0.2, 0.4, 0.6, 0.0, 0.2])
    torch.testing.assert_close(mixed().flat(SIZES, expected), expected)
    assert mixed().flat(SIZES, expected.float()).dtype == torch.float32
    x = torch.randn(8)
    found = x.clone()
    mixed().multiply(found.split(SIZES))
    torch.testing.assert_close(found, expected * x)
    torch.testing.assert_close(mixed().squares([x[:2], x[2:].view(2, 3)]), (expected * x**2).sum())
    torch.testing.assert_close(mixed().scaled(3.0).flat(SIZES, x), 3 * expected)
    torch.testing.assert_close(mixed().of([1]).flat([6], x), expected[2:])
    torch.testing.assert_close(mixed().of([1, 0]).flat([6, 2], x), torch.cat([expected[2:], expected[:2]]))


def test_columns():
    """In two rows the elements are [0, .1, .2] and [.3, 0, .1], times 2."""
    w = mixed()
    torch.testing.assert_close(w.most, torch.tensor(0.6))
    bias, weight = w.shares(1, 2)
    torch.testing.assert_close(bias, torch.tensor(0.5))
    torch.testing.assert_close(weight, torch.tensor([[[0.6, 0.2, 0.4]]]) / 0.6)
    torch.testing.assert_close(w.by_columns([0, 1], 1, 2)[1], torch.tensor([0.6, 0.2, 0.4, 0.6, 0.2, 0.4]))
    assert w.by_columns([0], 1, 2)[1].tolist() == w[1].tolist()
    by_group = w.by_columns([1], 2, 3)[1]  # a column of three in each of two groups
    torch.testing.assert_close(by_group, torch.tensor([0.4, 0.4, 0.4, 0.6, 0.6, 0.6]))
    torch.testing.assert_close(Weights([3.0, 2.0], w.elements).most, torch.tensor(3.0))


def test_numbers_have_shares_that_are_numbers():
    assert Weights([0.1, 0.4]).most == 0.4
    assert Weights([0.1, 0.4]).shares(1, 2) == [0.25, 1.0]
    assert Weights([0.0, 0.0]).shares(1, 2) == [0.0, 0.0]


def test_words_are_few():
    assert str(Weights([0.0, 0.1, 0.0])) == "0.0, 0.1"
    assert str(mixed()) == "0.3, 0 to 0.6 by element"
