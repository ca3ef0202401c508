"""The tasks of benchmarks/arena.py: what their data are."""

import pytest
import torch

from contest import functions, series, tasks, tokens

OFFLINE = [name for name in tasks.TASKS if not name.startswith("mnist")]


@pytest.mark.parametrize("name", OFFLINE)
def test_a_seed_gives_the_same_model_and_data(name):
    if name in tasks.TABLES:
        pytest.importorskip("sklearn")
    first, second, other = (tasks.TASKS[name].problem(s, tasks.Setup(), torch.device("cpu")) for s in (0, 0, 1))

    def flat(problem: tasks.Problem) -> torch.Tensor:
        x = problem.train.x if isinstance(problem.train.x, tuple) else (problem.train.x,)
        return torch.cat([t.detach().double().flatten() for t in (*x, *problem.model.parameters())])

    assert torch.equal(flat(first), flat(second))
    assert not torch.equal(flat(first), flat(other))
    scores = first.scores(first.model)
    assert scores == second.scores(second.model)
    assert 0.3 < scores.test < 2  # nothing has been learnt


def test_digits_are_missed_with_a_word(tmp_path):
    with pytest.raises(tasks.Unavailable, match="train-images"):
        tasks.TASKS["mnist-cnn"].problem(0, tasks.Setup(mnist=tmp_path), torch.device("cpu"))


def test_the_oscillator_obeys_its_equation():
    omega, damping, force = (torch.full((9,), v, dtype=torch.float64) for v in (1.7, 0.2, 0.8))
    t = torch.linspace(0.1, 5, 9, dtype=torch.float64, requires_grad=True)
    place, speed, energy = functions.oscillator(omega, damping, force, t).unbind(1)
    (by_time,) = torch.autograd.grad(place.sum(), t, create_graph=True)
    (change,) = torch.autograd.grad(by_time.sum(), t)
    torch.testing.assert_close(by_time, speed)
    torch.testing.assert_close(change + 2 * damping * omega * speed + omega**2 * place, force)
    torch.testing.assert_close(energy, (speed**2 + omega**2 * place**2) / 2)


def test_mackey_glass_is_a_solution():
    """The slope over two units of time, against the equation halfway: the error of the difference is small."""
    x = series.mackey_glass(0)
    slope = (x[19:] - x[17:-2]) / 2
    by_equation = 0.2 * x[1:-18] / (1 + x[1:-18] ** 10) - 0.1 * x[18:-1]
    assert (slope - by_equation).abs().max() < 0.01 < by_equation.abs().max() / 5


def test_windows_have_the_oldest_value_first():
    x, y = series.embedded(torch.arange(100.0, dtype=torch.float64), 4, 6, 6)
    spacing = (x[0, 1] - x[0, 0]).item()
    assert torch.allclose(y[:, 0] - x[:, 3], torch.full((len(y),), spacing, dtype=torch.float64))
    assert (x.shape, y.shape) == ((100 - 24, 4), (100 - 24, 1))


def test_sums_are_right():
    x, y = tokens.sums()
    first, second = 10 * x[:, 0] + x[:, 1], 10 * x[:, 3] + x[:, 4]
    assert torch.equal(first + second, y[:, 0] + 10 * y[:, 1] + 100 * y[:, 2])
    assert torch.equal(x[:, 6:], y[:, :2])  # what comes before is shown, the last digit never


def test_the_token_model_does_not_look_ahead():
    x, _ = tokens.sums()
    model = tokens.Mixer(8)
    changed = x[:50].clone()
    changed[:, -1] = (changed[:, -1] + 1) % 10
    before, after = model(x[:50]), model(changed)
    assert torch.equal(before[..., :2], after[..., :2])
    assert not torch.equal(before[..., 2], after[..., 2])
