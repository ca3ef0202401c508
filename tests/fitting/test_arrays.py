"""Arrays of every layout, integers and plain numbers, with NumPy and without."""

import math
import subprocess
import sys
import warnings
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from marquardt import least_squares
from support.decay.data import BEST, T, Y, decay, decay_numpy, near

# NumPy's layouts and numbers


LAYOUTS = {
    "reversed": lambda a: np.ascontiguousarray(a[::-1])[::-1],
    "big-endian": lambda a: a.astype(">f8"),
    "read-only": lambda a: np.lib.stride_tricks.as_strided(a, writeable=False),
}


@pytest.mark.parametrize("f", [decay, decay_numpy])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_arrays_of_every_layout_are_taken(layout: str, f: Any):
    lay = LAYOUTS[layout]
    data = lay(T.numpy()), lay(Y.numpy())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fits = [
            least_squares(f, lay(np.ones(3)), args=data, weights=lay(np.ones(40)), bounds=(lay(np.zeros(3)), np.inf)),
            least_squares(f, lay(np.ones(3)), kwargs={"t": data[0], "y": data[1]}),
            least_squares(lambda p: lay(decay_numpy(p, T.numpy(), Y.numpy())), np.ones(3)),
        ]
    assert all(near(fit.x, BEST) for fit in fits)


def test_numbers_may_be_numpys():
    fit = least_squares(
        lambda p: decay(p, T, Y), np.ones(3), ftol=np.float32(1e-12), xtol=np.float64(1e-10), gtol=np.float32(0),
        loss="huber", f_scale=np.float32(10), max_nfev=np.int64(500),
    )  # fmt: skip
    assert near(fit.x, BEST)


@pytest.mark.parametrize("x0", [[1, 2], np.array([1, 2]), torch.tensor([1, 2]), np.array([1, 2], dtype=np.uint8)])
def test_integer_starts_are_real_numbers(x0: Any):
    fit = least_squares(lambda p: torch.exp(p) - 1.5, x0)
    assert fit.x.dtype == (torch.float64 if isinstance(x0, Tensor) else np.float64)
    assert near(fit.x, math.log(1.5))


@pytest.mark.parametrize("x0", [1, np.int64(1), torch.tensor(1)])
def test_an_integer_is_one_parameter(x0: Any):
    assert near(least_squares(lambda p: torch.exp(p) - 1.5, x0).x, math.log(1.5))


# Without NumPy


WITHOUT = """
import sys
class Missing:
    def find_spec(self, name, *_):
        if name.partition(".")[0] == "numpy":
            raise ModuleNotFoundError(name)
sys.meta_path.insert(0, Missing())
import torch
import marquardt as mq

fit = mq.least_squares(lambda p: torch.stack([p[0] - 1, 10 * (p[1] - p[0] ** 2)]), [-1, 2], bounds=([-2, -2], [2, 2]))
assert torch.allclose(fit.x, torch.ones(2, dtype=torch.float64)), fit
f = lambda x, a, b: a * torch.exp(-b * x)
x, y = [0, 1, 2, 3, 4], [5.0, 3.1, 1.9, 1.2, 0.7]
popt, pcov = one = mq.curve_fit(f, x, y)
many = mq.curve_fit(f, [x, x], [y, y], [1, 1], batched=True, loss="huber")
assert torch.allclose(many.popt, popt.expand(2, 2), rtol=1e-6), (popt, many.popt)
assert one.predict([1.0, 2.0]).shape == (2,) and many.confidence_band(x)[0].shape == (2, 5)
try:
    mq.least_squares(lambda p: [float(p[0])], [1.0])
except TypeError as error:
    assert "must return a tensor" in str(error), error
else:
    raise AssertionError("a function of plain numbers")
assert "numpy" not in sys.modules
"""


def test_plain_numbers_are_fitted_without_numpy():
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", WITHOUT], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
