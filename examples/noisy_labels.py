"""Regression with wrong labels: a robust loss against the squared error, each by LM and by Adam.

python examples/noisy_labels.py            # writes examples/pictures/noisy_labels.png
python examples/noisy_labels.py --quick --out /tmp
"""

from itertools import repeat

import torch
import torch.nn.functional as F

import marquardt as mq
from compare import arguments, compare, draw, panels, report

LOSSES = {  # for LM, and as a function for Adam
    "squared error": ("mse", F.mse_loss),
    "Huber": (mq.losses.Huber(0.1), lambda z, y: F.huber_loss(z, y, delta=0.1)),
}


def truth(x):
    return torch.sin(2 * x) + 0.3 * x


def labels(x):
    """Noise of 0.05 everywhere, and one label in seven is wrong by 3 on average, always upwards."""
    wrong = torch.rand_like(x) < 1 / 7
    return truth(x) + 0.05 * torch.randn_like(x) + wrong * torch.empty_like(x).exponential_(1 / 3)


def build():
    torch.manual_seed(0)
    tanh = torch.nn.Tanh
    return torch.nn.Sequential(torch.nn.Linear(1, 16), tanh(), torch.nn.Linear(16, 16), tanh(), torch.nn.Linear(16, 1))


def main():
    picture, quick = arguments("noisy_labels", __doc__)
    torch.manual_seed(1)
    x, held_out = 6 * torch.rand(300, 1) - 3, 6 * torch.rand(150, 1) - 3
    y, held_out_y = labels(x), labels(held_out)  # validation data are no cleaner
    fine = torch.linspace(-3, 3, 400).unsqueeze(1)

    def error(model):
        with torch.no_grad():
            return F.mse_loss(model(fine), truth(fine)).sqrt().item()

    figure, columns = panels(1, 1, 1)
    for (name, (loss, function)), axes in zip(LOSSES.items(), columns[1:], strict=True):

        def validate(model, function=function):
            with torch.no_grad():
                return function(model(held_out), held_out_y).item()

        runs = compare(
            build,
            lambda model, loss=loss: mq.LM(model, loss),
            lambda model, x, y, function=function: function(model(x), y),
            lambda: repeat((x, y)),  # all of them in every step
            validate,
            steps=15 if quick else 150,
        )
        print(f"\n{name}")
        report(runs, ("RMSE from the truth", error, min))
        if name == "Huber":
            draw(columns[0], runs, "validation loss (Huber)")
        axes.plot(x, y, ".", color="0.7", label="labels")
        axes.plot(fine, truth(fine), "k", label="truth")
        with torch.no_grad():
            for run in runs:
                axes.plot(fine, run.model(fine), "--", label=run.name)
        axes.set(title=name, xlabel="x", ylim=(-2, 9))
        axes.legend(fontsize="small", loc="upper left", ncols=2)
    figure.savefig(picture)


if __name__ == "__main__":
    main()
