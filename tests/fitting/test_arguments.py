"""What least_squares is given besides fun: starts, options, and bounds, which are met exactly."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from marquardt import least_squares
from support.decay.residuals import decay

calls = {"n": 0}


def changing(p: Tensor) -> Tensor:
    calls["n"] += 1
    return decay(p)[: 40 if calls["n"] < 12 else 39]


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        ({"x0": [1.0, math.nan, 1.0]}, ValueError, r"x0 is not finite at \(1,\)"),
        ({"x0": torch.ones(3, dtype=torch.complex128)}, TypeError, "complex"),
        ({"x0": "abc"}, TypeError, "vector of real numbers"),
        ({"fun": lambda p: None}, TypeError, "returned None"),
        ({"fun": lambda p: decay(p) * 1j}, TypeError, "complex"),
        ({"fun": lambda p: decay(p) / 0}, ValueError, "not finite"),
        ({"fun": changing}, ValueError, "39 residuals"),
        ({"jac": lambda p: torch.ones(3, 40)}, ValueError, r"\(40, 3\)"),
        ({"jac": lambda p: None}, TypeError, "returned None"),
        ({"jac": "cs"}, ValueError, "'cs'"),
        ({"bounds": (2, 3)}, ValueError, "infeasible"),
        ({"bounds": (3, 2)}, ValueError, "above the upper"),
        ({"bounds": ([0, 0], 3)}, ValueError, "lower bound"),
        ({"bounds": (math.nan, 3)}, ValueError, "NaN"),
        ({"bounds": [(0, 2), (0, 2)], "x0": [0.5, 0.5]}, ValueError, r"bounds are \(lower, upper\)"),
        ({"method": "dogbox"}, ValueError, "dogbox"),
        ({"loss": "l1"}, ValueError, "'l1'"),
        ({"loss": "huber", "f_scale": 0}, ValueError, "f_scale=0"),
        ({"loss": lambda z: z}, ValueError, "ρ"),
        ({"x_scale": -1.0}, ValueError, "positive"),
        ({"x_scale": "jack"}, ValueError, "'jack'"),
        ({"xtol": -1.0}, ValueError, "xtol=-1.0"),
        ({"max_nfev": 0}, ValueError, "max_nfev=0"),
        ({"verbose": 3}, ValueError, "verbose=3"),
        ({"weights": torch.ones(39)}, ValueError, r"\(39,\)"),
        ({"weights": -torch.ones(40)}, ValueError, "at least 0"),
        ({"x0": torch.ones(2, 3), "batched": True, "args": (torch.ones(3),)}, ValueError, "kwargs"),
        ({"fun": [1.0], "x0": decay}, TypeError, r"fun is a list.*least_squares\(fun, x0\)"),
        ({"x0": decay}, TypeError, "a function: the start must be a vector"),
        ({"args": torch.ones(40)}, TypeError, r"not a Tensor.*args=\(data,\)"),
        ({"kwargs": [1]}, TypeError, "kwargs must be a dict"),
        ({"dtype": torch.float16}, ValueError, "torch.float16.*torch.float64 or torch.float32"),
        ({"weights": "many"}, TypeError, "weights must hold real numbers, not 'many'"),
        ({"bounds": "ab"}, TypeError, "the lower bound must hold real numbers, not 'a'"),
        ({"fun": lambda p: "s"}, TypeError, "what fun returns must hold real numbers, not 's'|fun returned str"),
        ({"fun": lambda p: decay(p)[:, None]}, ValueError, r"\(40, 1\).*reshape\(-1\)"),
        ({"fun": lambda p: decay(p)[:, None] - decay(p)}, ValueError, r"\(40, 40\).*column \(40, 1\) less a vector"),
    ],
)  # fmt: skip
def test_bad_input_is_refused(change: dict[str, Any], error: type[Exception], words: str):
    calls["n"] = 0
    x0 = torch.ones(3)
    with pytest.raises(error, match=words):
        least_squares(**{"fun": decay, "x0": x0, **change})
    assert torch.equal(x0, torch.ones(3))


def test_a_start_on_a_bound_may_be_rounded():
    """0.1 in float32 lies above 0.1, and is where the user wants to start."""
    fit = least_squares(lambda x: x - 1, torch.tensor([0.1]), bounds=(-1.0, 0.1))
    assert fit.success
    assert fit.x.item() == 0.1


@pytest.mark.parametrize(
    ("x0", "dtype", "upper"),
    [(0.1001, torch.float32, 0.1), (0.1 + 1e-8, torch.float64, 0.1), (1.01, torch.bfloat16, 1.0)],
)
def test_a_start_beyond_a_bound_is_refused(x0: float, dtype: torch.dtype, upper: float):
    with pytest.raises(ValueError, match="infeasible"):
        least_squares(lambda x: x - 1, torch.tensor([x0], dtype=dtype), bounds=(-1.0, upper))


def test_a_bound_that_holds_is_met_exactly():
    fit = least_squares(decay, [1.0, 1.0, 1.0], bounds=([0, 0, 0.6], [3, 1.0, 9]))
    assert fit.active_mask.tolist() == [0, 1, 1] or fit.x[1] == 1.0
    assert fit.optimality < 1e-10
    many = least_squares(
        lambda p: p - 1, [[3, 3], [3, 3], [0, 3]], bounds=([[0, 0], [0, 2], [-9, 0]], [9, 9]), batched=True
    )
    assert many.x.tolist() == [[1, 1], [1, 2], [1, 1]]
    assert many.active_mask.tolist() == [[0, 0], [0, -1], [0, 0]]


def test_starts_on_a_bound_and_fixed_parameters():
    fit = least_squares(decay, [0.0, 0.0, 0.5], bounds=([0, 0, 0.5], [9, 9, 0.5]))
    assert fit.success
    assert fit.x[2] == 0.5
    free = least_squares(lambda p: decay([p[0], p[1], 0.5]), [1.0, 1.0])
    assert fit.x[:2] == pytest.approx(free.x, rel=1e-8)


def test_a_parameter_at_its_bound_is_not_measured_by_another_ones_column():
    """Columns 1e8 and 1e-8 long: their products with parameters of 1e-8 and 1e8 are those of an ordinary problem."""

    def residuals(p):
        return torch.stack([1e8 * p[0] + 1e-8 * p[1] - 3, 1e8 * p[0] - 1e-8 * p[1] - 1])

    result = least_squares(
        residuals, torch.tensor([1e-9, 5e7], dtype=torch.float64), bounds=(0, torch.tensor([1.0, 5e7]))
    )
    assert result.success
    torch.testing.assert_close(result.x, torch.tensor([2e-8, 5e7], dtype=torch.float64), rtol=1e-9, atol=0)
