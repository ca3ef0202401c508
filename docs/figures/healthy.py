"""Draw the picture of docs/troubleshooting.md: losses, λ and gains of a healthy run and of two that are stuck.

python docs/figures/healthy.py    # writes docs/assets/healthy.svg
"""

import torch
from style import BLUE, GREEN, GREY, ORANGE, RED, figure, save
from torch import nn

import marquardt as mq

STEPS = 50
RULES = {"decrease": BLUE, "search": GREEN, "uphill": ORANGE, "rejected": RED}


class Network(nn.Module):
    def __init__(self, sign: float = 1.0):
        super().__init__()
        self.sign = sign
        self.layers = nn.Sequential(nn.Linear(1, 15), nn.Tanh(), nn.Linear(15, 1))

    def forward(self, x):
        z = self.layers(x)
        return z.detach() + self.sign * (z - z.detach())  # the value is z, the derivative has this sign


def run(units: float = 1.0, sign: float = 1.0) -> list[mq.Step]:
    torch.manual_seed(0)
    x = torch.linspace(-3, 3, 200, dtype=torch.float64).unsqueeze(1)
    y = torch.sin(2 * x)
    opt = mq.LM(Network(sign).double(), "mse")
    return [opt.step(x if units == 1 else units * (x + 5), y) for _ in range(STEPS)]


def draw(column, title: str, steps: list[mq.Step]) -> None:
    losses, lams = column
    at = range(1, STEPS + 1)
    losses.plot(at, [s.new_loss for s in steps], color=GREY, linewidth=1)
    for rule, colour in RULES.items():
        points = [(k, s.new_loss) for k, s in zip(at, steps, strict=True) if s.rule == rule]
        if points:
            losses.scatter(*zip(*points, strict=True), color=colour, s=12, label=rule, zorder=3)
    losses.set(title=title, yscale="log", ylim=(1e-9, 10))
    losses.legend(fontsize="small", loc="lower left")
    lams.plot(at, [s.lam for s in steps], color=BLUE)
    lams.set(yscale="log", ylim=(1e-8, 1e13), xlabel="step")


def main() -> None:
    picture = figure(9.5, 4.4)
    axes = picture.subplots(2, 3, sharex=True, sharey="row", height_ratios=(3, 2))
    draw(axes[:, 0], "healthy", run())
    draw(axes[:, 1], "nothing moves: inputs in the thousands", run(units=1000.0))
    draw(axes[:, 2], "λ runs away: a wrong derivative", run(sign=-1.0))
    axes[0, 0].set_ylabel("loss after the step")
    axes[1, 0].set_ylabel("λ")
    save(picture, "healthy.svg")


if __name__ == "__main__":
    main()
