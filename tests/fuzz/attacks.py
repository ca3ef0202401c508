"""A budget of attacks, each drawn from one integer: what every program of this folder that attacks has in common.

    if __name__ == "__main__":
        attacks.main(__doc__, one)

gives a program with `--cases 300 --seed 0`, `--minutes 60` and `--only 1234`.
"""

from __future__ import annotations

import argparse
import collections
import itertools
import sys
import time
import traceback
from collections.abc import Callable, Iterable

import torch

One = Callable[[int], str]  # of a seed: what became of the attack in a word or two, such as "refused" or "unharmed"


class Fault(Exception):
    """What an attack has found."""


def run(one: One, seeds: Iterable[int], minutes: float = float("inf")) -> tuple[collections.Counter[str], list[str]]:
    """How often each outcome came, and the faults: what raised, with its seed."""
    count: collections.Counter[str] = collections.Counter()
    faults: list[str] = []
    until = time.monotonic() + 60 * minutes
    for seed in itertools.takewhile(lambda _: time.monotonic() < until, seeds):
        torch.manual_seed(seed)
        try:
            count[one(seed)] += 1
        except Fault as fault:
            faults.append(f"seed {seed}: {fault}")
        except Exception as error:
            faults.append(f"seed {seed}: {''.join(traceback.format_exception(error)[-3:])}")
    return count, faults


def main(doc: str | None, one: One) -> None:
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=300)
    parser.add_argument("--seed", type=int, default=0, help="of the first case")
    parser.add_argument("--minutes", type=float, help="go on for as long, whatever --cases says")
    parser.add_argument("--only", type=int, help="the one case of this seed, with its traceback")
    given = parser.parse_args()
    torch.set_num_threads(1)
    if given.only is not None:
        torch.manual_seed(given.only)
        print(one(given.only))
        return
    seeds = itertools.count(given.seed) if given.minutes else range(given.seed, given.seed + given.cases)
    count, faults = run(one, seeds, given.minutes or float("inf"))
    print(*faults, sep="\n")
    print(", ".join(f"{n} {what}" for what, n in count.most_common()), f"; {len(faults)} faults", sep="")
    sys.exit(bool(faults))
