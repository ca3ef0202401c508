"""Random networks, losses and optimizers: every step of mq.LM against the same step by brute force.

    python tests/fuzz/networks.py --cases 5000 --seed 0
    python tests/fuzz/networks.py --minutes 60
    python tests/fuzz/networks.py --only 1234

θ of every step is compared with −(G + λD)⁻¹g, momentum, trial and search from J, G and g by brute force. What comes
from the library: the rules of λ, of doubt, of momentum, of acceptance and of the search (each fed with brute-force
numbers), the D of the step before, the samples that `Fraction` picks, the signs of `Sampled`, and for
FactoredMaxDiagonal D itself, of which only D ≥ diag G is checked. With Kronecker, whose H is another one, only f, f at
the next θ and the descent are checked.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1]))

from fuzz import attacks
from fuzz.compared import run
from fuzz.drawn import draw


def one(seed: int) -> str:
    count = run(draw(seed)).count
    return next((what for what in ("compared", "partly", "rejected", "refused", "invalid") if count[what]), "neither")


if __name__ == "__main__":
    attacks.main(__doc__, one)
