"""What a committee predicts, and its state."""

from __future__ import annotations

import io

import pytest
import torch

from marquardt.tabular import Committee, Settings, train
from support.tables import QUICK, classes, table


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
    assert (again.settings.task, again.says, again.sizes) == ("regression", found.says, found.sizes)


@pytest.mark.parametrize("count", [2, 3])
def test_classes_after_storing(count):
    x, y = classes(count=count)
    found = train(x, y, Settings("classification", **QUICK))
    p = found.probabilities(x)
    assert p.shape == (60, count)
    torch.testing.assert_close(p.sum(1), torch.ones(60, dtype=torch.float64))
    assert float((p.argmax(1) == y).double().mean()) > 0.7
    assert torch.equal(p, stored(found).probabilities(x))


def test_each_kind_names_the_other():
    x, y = table()
    with pytest.raises(ValueError, match="has predict"):
        train(x, y, Settings(**QUICK)).probabilities(x)
    for predict in ("predict", "mean"):
        with pytest.raises(ValueError, match="has probabilities"):
            getattr(train(*classes(), Settings("classification", **QUICK)), predict)(x)


def test_the_variance_grows_away_from_the_data():
    x, y = table(N=200)
    found = train(x, y, Settings(held_out=False, **QUICK))
    _, near = found.predict(x[:20])
    _, far = found.predict(x[:20] + 4)
    assert float(far.mean()) > 1.5 * float(near.mean())


def test_history_is_that_of_every_member():
    found = train(*table(), Settings(**QUICK))
    assert len(found.history) == sum(len(part.theta) for part in found.parts) > 0
    for history in found.history:
        assert history["step"] == list(range(1, len(history) + 1))
        assert history[-1].loss < history[0].loss


def test_no_standard_deviation_is_beyond_what_the_targets_say():
    """Directions that the data do not determine, as a level that was never seen, leave the spread of the targets."""
    x, y = table()
    found = train(x, y, Settings(**QUICK))
    found.factor[:] = 1e9
    mean, std = found.predict(x)
    centred = (mean - found.targets.centre) / found.targets.spread
    limit = (found.floor + 1 + centred.square()).sqrt() * found.targets.spread
    assert torch.allclose(std, limit)
