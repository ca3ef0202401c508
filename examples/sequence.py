"""A GRU learns the next value of the Lorenz system from twenty with noise, and then runs on its own forecasts.

python examples/sequence.py            # writes examples/pictures/sequence.png
python examples/sequence.py --quick --out /tmp
"""

from itertools import repeat

import torch
import torch.nn.functional as F

import marquardt as mq
from compare import arguments, compare, draw, panels, report

WINDOW, EVERY, NOISE = 20, 0.04, 0.02  # values seen, time between two of them, their error


def lorenz(samples: int) -> torch.Tensor:
    """x of the Lorenz system, every EVERY units of time, by Runge–Kutta of fourth order; of deviation about 1."""

    def slope(s):
        x, y, z = s
        return torch.stack([10 * (y - x), x * (28 - z) - y, x * y - 8 / 3 * z])

    state, h, series = torch.tensor([1.0, 1.0, 20.0], dtype=torch.float64), EVERY / 4, []
    for _ in range(4 * (samples + 100)):
        a = slope(state)
        b = slope(state + h / 2 * a)
        c = slope(state + h / 2 * b)
        d = slope(state + h * c)
        state = state + h / 6 * (a + 2 * b + 2 * c + d)
        series.append(state[0] / 8)
    return torch.stack(series[400::4]).float()  # the first 100 lead to the attractor


class Forecast(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.gru = torch.nn.GRU(1, 16, batch_first=True)
        self.out = torch.nn.Linear(16, 1)

    def forward(self, x):  # (N, WINDOW)
        hidden, _ = self.gru(x.unsqueeze(-1))
        return self.out(hidden[:, -1])  # (N, 1)


def build():
    torch.manual_seed(0)
    return Forecast()


@torch.no_grad()
def run_on(model, series, count: int):
    """`count` forecasts, each made from the ones before it."""
    values = series[:WINDOW].tolist()
    for _ in range(count):
        values.append(model(torch.tensor([values[-WINDOW:]])).item())
    return values[WINDOW:]


def main():
    picture, quick = arguments("sequence", __doc__)
    truth = lorenz(2000)
    torch.manual_seed(1)
    series = truth + NOISE * torch.randn(len(truth))
    windows = series.unfold(0, WINDOW + 1, 1)  # (windows, WINDOW + 1)
    inputs, targets = windows[:, :-1], windows[:, -1:]
    train, valid, test = slice(0, 1000), slice(1050, 1300), slice(1400, None)

    def error(model, part, targets):
        with torch.no_grad():
            return F.mse_loss(model(inputs[part]), targets[part]).item()

    runs = compare(
        build,
        lambda model: mq.LM(model, "mse"),
        lambda model, x, y: F.mse_loss(model(x), y),
        lambda: repeat((inputs[train], targets[train])),  # all of them in every step
        lambda model: error(model, valid, targets),
        steps=6 if quick else 50,
    )
    report(runs, ("test RMSE", lambda model: error(model, test, truth[WINDOW:, None]) ** 0.5, min))  # without noise

    figure, (left, right) = panels(1, 1.6)
    draw(left, runs)
    count, start = 120, 1400
    times = [EVERY * n for n in range(count)]
    right.plot(times, truth[start + WINDOW :][:count], "k", label="Lorenz, x / 8")
    for run in runs:
        right.plot(times, run_on(run.model, series[start:], count), "--", label=run.name)
    right.set(xlabel="time since the last value seen", ylabel="its own forecasts")
    right.legend(loc="upper right", ncols=3, fontsize="small")
    right.set_ylim(-2.6, 3.2)
    figure.savefig(picture)


if __name__ == "__main__":
    main()
