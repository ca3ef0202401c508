"""What a committee predicts, its state, and its inputs in units of their spread."""

from __future__ import annotations

import io

import pytest
import torch

from marquardt.tabular import Committee, Settings, train
from marquardt.tabular.committee import Inputs, Scale
from support.committees import QUICK, classes, drawn, table


def stored(found: Committee) -> Committee:
    file = io.BytesIO()
    torch.save(found.state(), file)
    file.seek(0)
    return Committee.from_state(torch.load(file, weights_only=True))


@pytest.mark.parametrize("outputs", [1, 2])
@pytest.mark.parametrize("hidden", [(4,), "auto"])
def test_numbers_after_storing(outputs, hidden):
    x, y = table(outputs=outputs)
    found = train(x, y, Settings(**QUICK | {"hidden": hidden}))
    again = stored(found)
    for a, b in zip(found.predict(x), again.predict(x), strict=True):
        assert a.shape == (60, outputs)
        assert torch.equal(a, b)
    torch.testing.assert_close(found.mean(x), found.predict(x)[0])
    assert again.history == found.history
    assert (again.settings.task, again.says) == ("regression", found.says)
    assert len(found.history) == sum(len(part.theta) for part in found.parts) > 0
    for history in found.history:
        assert history["step"] == list(range(1, len(history) + 1))
        assert history[-1].loss < history[0].loss


@pytest.mark.parametrize("count", [2, 3])
def test_classes_after_storing(count):
    x, y = classes(count=count)
    found = train(x, y, Settings("classification", **QUICK))
    p = found.probabilities(x)
    assert p.shape == (60, count)
    torch.testing.assert_close(p.sum(1), torch.ones(60, dtype=torch.float64))
    assert float((p.argmax(1) == y).double().mean()) > 0.7
    assert torch.equal(p, stored(found).probabilities(x))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"parts": {}}, "parts"),
        ({"floor": torch.ones(2).double()}, r"the shape \(1,\)"),
        ({"floor": torch.ones(1)}, "floor is no tensor of float64"),
        ({"floor": torch.full((1,), torch.nan).double()}, "floor is not finite"),
        ({"weights": -torch.ones(1).double()}, "not positive"),
        ({"targets": [torch.ones(1).double(), -torch.ones(1).double()]}, "a spread is negative"),
        ({"frequencies": torch.ones(2).double()}, "not those of regression"),
        ({"theta": torch.ones(2, 3).double()}, "theta has the shape"),
        ({"groups": torch.full((21,), 9)}, "a group of weights"),
        ({"sizes": [3, 0, 1]}, "no network of the sizes"),
        ({"activation": "sine"}, "no network of the sizes"),
        ({"steps": [[(1.0, 1.0, 1, True)]]}, "no steps of 2 members"),
        ({"root": "x"}, "root is no tensor of float32"),
    ],
)
def test_another_state_is_refused(changes, words):
    state = train(*table(), Settings(**QUICK)).state()
    part = state["parts"][0]
    (part if set(changes) <= set(part) else state).update(changes)
    with pytest.raises(ValueError, match=words):
        Committee.from_state(state)


def test_the_variance_grows_away_from_the_data():
    x, y = table(200)
    found = train(x, y, Settings(held_out=False, **QUICK))
    (_, near), (_, far) = found.predict(x[:20]), found.predict(x[:20] + 4)
    assert float(far.mean()) > 1.5 * float(near.mean())


def test_no_standard_deviation_is_beyond_what_the_targets_say():
    """Directions that the data do not determine, as a level that was never seen, leave the spread of the targets."""
    x, y = table()
    found = train(x, y, Settings(**QUICK))
    found.factor[:] = 1e9
    mean, std = found.predict(x)
    centred = (mean - found.targets.centre) / found.targets.spread
    limit = (found.floor + 1 + centred.square()).sqrt() * found.targets.spread
    assert torch.allclose(std, limit)


# --- inputs and targets in units of their spread ---


@pytest.mark.parametrize("size", [1e-200, 1.0, 1e200])
def test_weights_count_as_equal_rows(size):
    x, weight = size * drawn(6, 2), torch.tensor([1.0, 0, 2, 3, 1, 1], dtype=torch.float64)
    repeated, scale = x.repeat_interleave(weight.long(), 0), Scale.of(x, weight)
    torch.testing.assert_close(scale.centre / size, (repeated / size).mean(0))
    torch.testing.assert_close(scale.spread / size, (repeated / size).std(0, unbiased=False))
    torch.testing.assert_close(scale.undo(scale.apply(x)) / size, x / size)


def test_constant_columns_are_not_used_and_inputs_end_half_a_range_beyond_those_that_were_seen():
    x = torch.stack((torch.linspace(0, 1, 11), torch.full((11,), 0.1)), 1).double()
    inputs = Inputs.of(x, torch.ones(11, dtype=torch.float64), 10)
    assert inputs.columns.tolist() == [True, False]
    near, edge, far = (float(inputs.apply(torch.tensor([[v, 7.0]]).double())) for v in (1.4, 1.5, 100.0))
    assert near < edge == pytest.approx(far)


def test_many_columns_leave_their_main_directions():
    x = drawn(50, 3) @ drawn(3, 20, seed=1) + 1e-6 * drawn(50, 20, seed=2)
    inputs = Inputs.of(x, torch.ones(50, dtype=torch.float64), 3)
    u = inputs.apply(x)
    assert u.shape == (50, 3)
    back = torch.linalg.lstsq(u, inputs.scale.apply(x)).residuals
    assert float(back.sum()) < 1e-8
