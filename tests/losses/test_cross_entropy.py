"""Cross-entropy: ignored positions, extreme logits, many classes, and where the classes are."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F

from marquardt.losses import CrossEntropy
from support.losses import CLASS_WEIGHT, IMAGE, close, f64, image, normal, patterns, some_ignored


def test_ignored_positions_are_zero_rows():
    z, y = normal(IMAGE), some_ignored(IMAGE)
    loss = CrossEntropy(label_smoothing=0.1, class_weight=CLASS_WEIGHT)
    none, ignored = CrossEntropy(class_weight=torch.tensor([0.0, 1.0, 1.0], dtype=f64)), (y == -100).reshape(4, 4)
    for one, zero in ((loss, ignored), (none, ignored | (y == 0).reshape(4, 4))):
        for root in (one.root(z, y), one.empirical(z, y)):
            assert (root.S[zero] == 0).all()
            assert (root.u[zero] == 0).all()
            assert (root.S[~zero] != 0).any((-1, -2)).all()
        assert (one.group(one.gradient(z, y))[zero] == 0).all()


def test_many_classes_are_counted_without_their_root():
    """It would have 7·50,000² numbers."""
    z, y = torch.zeros(1, 50_000, 7), torch.zeros(1, 7, dtype=torch.long)
    assert CrossEntropy().count(z, y) == 7 * 49_999


@pytest.mark.parametrize("dtype", [torch.float32, f64])
def test_random_rows_of_extreme_logits(dtype):
    z = torch.tensor([[120.0, -120.0, 0.0], [-1e4, 1e4, 0.0]], dtype=dtype)
    found = CrossEntropy().mixed(z, torch.tensor([1, 0]), None, lambda shape: patterns(shape).to(dtype))
    assert found.isfinite().all()
    assert (found.sum(-1).abs() <= 1e-6).all()  # S is orthogonal to 1


def extreme_logits():
    """All signs of ±120 for four classes, every label; then random ones to ±120."""
    corners = 120 * (2.0 * torch.cartesian_prod(*[torch.arange(2)] * 4) - 1)
    z = torch.cat([corners.repeat_interleave(4, 0), 240 * torch.rand(200, 4) - 120])
    return z, torch.arange(len(z)) % 4


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("kind", ["labels", "one-hot", "probabilities"])
def test_extreme_logits_in_float32(kind, smoothing):
    torch.manual_seed(0)
    z, y = extreme_logits()
    if kind == "one-hot":
        y = F.one_hot(y, 4).float()
    elif kind == "probabilities":
        y = torch.rand(len(z), 4) * F.one_hot(y, 4).logical_not()
        y = y / y.sum(1, keepdim=True)
    loss = CrossEntropy(label_smoothing=smoothing)
    zz, yy = z.double(), y.double() if y.is_floating_point() else y
    exact, H = loss.gradient(zz, yy), loss.root(zz, yy).S
    H, root = (H @ H.mT)[:, 0], loss.root(z, y)
    assert root.S.isfinite().all()
    assert root.u.abs().max() <= 1.01 / torch.finfo(torch.float32).eps  # the floor under s: u² must not overflow
    corners = 16 * 4
    for g in (loss.gradient(z, y), image(root)[:, 0]):
        error = (g.double() - exact).norm(dim=1)
        assert (error[:corners] <= 1e-6 * exact[:corners].norm(dim=1) + 1e-37).all()
        assert (error <= 1e-6).all()
    close((root.S @ root.S.mT)[:, 0].double(), H, 1e-6)
    rows = loss.empirical(z, y)
    assert rows.S.isfinite().all()
    close(image(rows)[:, 0].double(), exact, 1e-6)


def test_masked_logits():
    """−inf takes a class out, as in torch."""
    z = torch.tensor([[1.0, -math.inf, 0.5]], dtype=f64)
    y = torch.tensor([2])
    loss = CrossEntropy()
    reduced = z[:, [0, 2]]
    close(loss.value(z, y), loss.value(reduced, torch.tensor([1])))
    root = loss.root(z, y)
    close(image(root)[0, 0, [0, 2]], loss.gradient(reduced, torch.tensor([1]))[0])
    assert image(root)[0, 0, 1] == 0


def test_confident_logits_keep_their_digits():
    """p − e_y where p rounds to e_y: torch's own gradient has a zero in place of −4e-9."""
    z, y = torch.tensor([[20.0, 0.0, 0.0]]), torch.tensor([0])
    loss = CrossEntropy()
    exact = loss.gradient(z.double(), y)
    for g in (loss.gradient(z, y), image(loss.root(z, y))[:, 0], image(loss.empirical(z, y))[:, 0]):
        assert (g.double() - exact).abs().max() <= 1e-6 * exact.abs().max()
    S = loss.root(z, y).S.double()[0, 0]
    H = loss.root(z.double(), y).S[0, 0]
    assert (S @ S.T - H @ H.T).abs().max() <= 1e-6 * (H @ H.T).abs().max()


def test_small_integer_labels():
    """Also where the type cannot hold ignore_index: −100 is 156 in uint8."""
    z, y = normal((4, 200)), torch.tensor([0, 156, 7, 100])
    loss = CrossEntropy()
    for dtype in (torch.int32, torch.uint8):
        small = y.to(dtype)
        loss.check(z, small)
        for take in (loss.value, loss.normaliser, loss.gradient):
            close(take(z, small), take(z, y))


# Classes second or last.


@pytest.mark.parametrize("kind", ["labels", "probabilities"])
@pytest.mark.parametrize("shape", [(4, 5, 3), (4, 2, 2, 3)])
def test_classes_last(shape, kind):
    """The same as for classes second, in another order."""
    z = normal(shape)
    y = some_ignored((4, 3, *shape[1:-1])) if kind == "labels" else torch.rand(shape, dtype=f64)
    moved = z.movedim(-1, 1), y if kind == "labels" else y.movedim(-1, 1)
    options = {"label_smoothing": 0.1, "class_weight": CLASS_WEIGHT}
    last, second = CrossEntropy(class_dim=-1, **options), CrossEntropy(**options)
    last.check(z, y)
    weight = torch.rand(4, dtype=f64)
    close(last.value(z, y, weight), second.value(*moved, weight))
    close(last.normaliser(z, y, weight), second.normaliser(*moved, weight))
    close(last.gradient(z, y, weight), second.gradient(*moved, weight).movedim(1, -1))
    for a, b in ((last.root(z, y), second.root(*moved)), (last.empirical(z, y), second.empirical(*moved))):
        close(a.S, b.S)
        close(a.u, b.u)
    assert last.count(z[:1], y[:1]) == second.count(moved[0][:1], moved[1][:1]) == 2 * z[0].numel() // 3
    close(last.ungroup(last.group(z), z), z)


@pytest.mark.parametrize(
    ("shape", "labels", "found"),
    [((4, 5, 3), (4, 5), -1), ((4, 3, 5), (4, 5), None), ((4, 2, 2, 3), (4, 2, 2), -1), ((4, 3), (4,), None)],
)
def test_which_dimension_has_the_classes(shape, labels, found):
    z, y = normal(shape), torch.zeros(labels, dtype=torch.long)
    loss = CrossEntropy(label_smoothing=0.1)
    bound = loss.bound(z, y)
    assert bound == CrossEntropy(label_smoothing=0.1, class_dim=found)
    assert (bound is loss) == (found is None)
    bound.check(z, y)
    assert CrossEntropy(class_dim=1).bound(z, y).class_dim == 1


def test_which_dimension_has_the_classes_is_asked():
    """A batch of sentences that are as long as there are classes."""
    z, y = normal((4, 3, 3)), torch.zeros(4, 3, dtype=torch.long)
    with pytest.raises(ValueError, match=r"\(4, 3, 3\).*\(4, 3\).*class_dim=1.*class_dim=-1"):
        CrossEntropy().bound(z, y)
    for dim in (1, -1):
        assert CrossEntropy(class_dim=dim).bound(z, y).class_dim == dim
