"""A graph network in plain torch learns the energy of small molecules of made-up atoms.

python examples/graph.py            # writes examples/pictures/graph.png
python examples/graph.py --quick --out /tmp
"""

import torch
import torch.nn.functional as F
from torch import nn

import marquardt as mq
from compare import arguments, compare, draw, panels, report, shuffled

ATOMS, KINDS = 9, 4


def molecules(count: int, seed: int):
    """Kinds of atoms as one-hot vectors (N, ATOMS, KINDS), bonds (N, ATOMS, ATOMS), and the energy (N, 1).

    A molecule has five to nine atoms, the rest of its rows are zero. A bond adds the product of the charges of its
    ends, an atom its own energy and one for every bond more than two, a ring of three atoms a strain.
    """
    generator = torch.Generator().manual_seed(seed)
    size = torch.randint(5, ATOMS + 1, (count, 1), generator=generator)
    there = (torch.arange(ATOMS) < size).float()  # (N, ATOMS)
    kinds = F.one_hot(torch.randint(KINDS, (count, ATOMS), generator=generator), KINDS) * there.unsqueeze(2)
    drawn = (torch.rand(count, ATOMS, ATOMS, generator=generator) < 0.35).float().triu(1)
    bonds = (drawn + drawn.mT) * there.unsqueeze(1) * there.unsqueeze(2)
    charge = kinds @ torch.tensor([-1.0, -0.3, 0.4, 1.0])  # (N, ATOMS)
    own = kinds @ torch.tensor([0.5, -0.2, 0.1, -0.6])
    pairs = torch.einsum("ni,nij,nj->n", charge, bonds, charge) / 2
    crowded = (bonds.sum(2) - 2).clamp(min=0).sum(1)
    rings = torch.einsum("nij,njk,nki->n", bonds, bonds, bonds) / 6
    return (kinds, bonds), (pairs + own.sum(1) + 0.2 * crowded + 0.5 * rings).unsqueeze(1) / 2


class GraphNetwork(nn.Module):
    """Three rounds of messages along the bonds, then the sum over the atoms."""

    def __init__(self, width=16, rounds=3):
        super().__init__()
        self.embed = nn.Linear(KINDS, width, bias=False)
        self.messages = nn.ModuleList(nn.Linear(width, width) for _ in range(rounds))
        self.updates = nn.ModuleList(nn.Linear(2 * width, width) for _ in range(rounds))
        self.energy = nn.Sequential(nn.Linear(width, width), nn.SiLU(), nn.Linear(width, 1))

    def forward(self, kinds, bonds):
        there = kinds.sum(2, keepdim=True)  # (N, ATOMS, 1)
        h = self.embed(kinds)  # (N, ATOMS, width)
        for message, update in zip(self.messages, self.updates, strict=True):
            received = bonds @ F.silu(message(h))
            h = h + F.silu(update(torch.cat([h, received], dim=2)))
        return (there * self.energy(h)).sum(1)  # (N, 1)


def build():
    torch.manual_seed(0)
    return GraphNetwork()


def main():
    picture, quick = arguments("graph", __doc__)
    (inputs, targets), valid, test = molecules(2000, 0), molecules(500, 1), molecules(1000, 2)

    def loss(model, x, y):
        return F.mse_loss(model(*x), y)

    def error(model, data):
        with torch.no_grad():
            return loss(model, *data).item()

    runs = compare(
        build,
        lambda model: mq.LM(model, "mse"),
        loss,
        lambda: shuffled(inputs, targets, len(targets), 200),
        lambda model: error(model, valid),
        steps=6 if quick else 150,
    )
    report(runs, ("test RMSE", lambda model: error(model, test) ** 0.5, min))

    figure, (left, *others) = panels(1.4, 1, 1)
    draw(left, runs)
    with torch.no_grad():
        found = [run.model(*test[0]) for run in runs]
    for axes, run, energies in zip(others, runs, found, strict=True):
        axes.plot([-4, 8], [-4, 8], color="0.7")
        axes.plot(test[1], energies, ".", markersize=2)
        axes.set(title=run.name, xlabel="energy", ylabel="found", xlim=(-4, 8), ylim=(-4, 8), aspect="equal")
    figure.savefig(picture)


if __name__ == "__main__":
    main()
