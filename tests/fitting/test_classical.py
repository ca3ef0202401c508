"""least_squares on the classical problems, and the problems themselves."""

import math
from functools import cache

import pytest
import torch

from marquardt import least_squares
from support.certify import derivatives, newton_step, sum_of_squares
from support.classical import PROBLEMS, Minimum, Problem

TOLERANCE = 1e-15  # MINPACK's best: nothing below the machine's precision means anything to it
EVALUATIONS = 1000  # the most that anyone gets

every_problem = pytest.mark.parametrize("problem", PROBLEMS, ids=lambda problem: problem.name)
every_minimum = pytest.mark.parametrize(
    ("problem", "minimum"), [pytest.param(p, m, id=f"{p.name}: {m.value}") for p in PROBLEMS for m in p.minima]
)


# --- the problems ---


@every_minimum
def test_the_minimisers_are_certified(problem: Problem, minimum: Minimum):
    """Newton's method in 80 digits does not move them, nor does the curvature fall below zero."""
    step = torch.tensor([float(d) for d in newton_step(problem.residuals, minimum.x)], dtype=torch.float64)
    assert minimum.errors(torch.tensor(minimum.x, dtype=torch.float64) + step).max() < 1e-10


@every_minimum
def test_the_minima_are_the_published_ones(problem: Problem, minimum: Minimum):
    """To the last digit printed, which may be cut rather than rounded."""
    mantissa, _, exponent = minimum.value.partition("e")
    last_digit = 10.0 ** (int(exponent or 0) - len(mantissa.partition(".")[2]))
    exact = float(sum_of_squares(problem.residuals, minimum.x))
    if minimum.value == "0":
        assert exact < 1e-25
    else:
        assert abs(exact - float(minimum.value)) < last_digit


def test_only_singular_problems_are_excused():
    excused = [(problem, minimum) for problem in PROBLEMS for minimum in problem.minima if minimum.digits < 8]
    assert len(excused) == 6
    for problem, minimum in excused:
        sigma = torch.linalg.svdvals(problem.jacobian(torch.tensor(minimum.x, dtype=torch.float64)))
        assert sigma[-1] < 1e-14 * sigma[0], problem.name


@every_problem
def test_the_jacobian_is_that_of_differences(problem: Problem):
    x = problem.x0(1.25) + 0.125  # off the start, where zeros hide mistakes
    J, known = problem.jacobian(x), derivatives(problem.residuals, x.tolist())
    assert (J - known).norm() < 1e-12 * known.norm()


# --- from the standard start ---


@every_problem
@pytest.mark.parametrize("tolerances", [{}, dict.fromkeys(("ftol", "xtol", "gtol"), TOLERANCE)], ids=["", "tight"])
def test_from_the_standard_start(problem: Problem, tolerances: dict[str, float]):
    result = least_squares(problem.residuals, problem.x0(), **tolerances)
    assert result.success, result.message
    minimum = problem.solved(result.x)
    assert minimum is not None, f"Σf² = {problem.sum_of_squares(result.x)!r} is no known minimum"
    assert float(result.cost) == pytest.approx(problem.sum_of_squares(result.x) / 2, rel=1e-12)
    if minimum.digits and not tolerances:
        assert problem.digits(result.x) >= minimum.digits


# --- from afar ---


def minpack(problem: Problem, factor: float):
    """SciPy's least_squares as MINPACK's authors have it: scaled by the Jacobian, which is exact."""
    optimize = pytest.importorskip("scipy.optimize")
    return optimize.least_squares(
        lambda x: problem.residuals(torch.from_numpy(x)).numpy(),
        problem.x0(factor).numpy(),
        jac=lambda x: problem.jacobian(torch.from_numpy(x)).numpy(),
        method="lm",
        x_scale="jac",
        ftol=TOLERANCE,
        xtol=TOLERANCE,
        gtol=TOLERANCE,
        max_nfev=EVALUATIONS,
    )


@cache
def ours(problem: Problem, factor: float):
    return least_squares(problem.residuals, problem.x0(factor), jac=problem.jacobian, max_nfev=EVALUATIONS)


def results(solver, factor: float):
    """Problems and results; None where it refuses a start because f is not finite there."""
    for problem in (p for p in PROBLEMS if p.far):
        try:
            yield problem, solver(problem, factor)
        except ValueError:
            yield problem, None


def misses(solver, factor: float) -> list[str]:
    return [p.name for p, result in results(solver, factor) if result is None or p.solved(result.x) is None]


# From the standard start all are solved, see above; the last factor takes a minute.
FACTORS = [10.0, pytest.param(100.0, marks=pytest.mark.benchmark)]


@pytest.mark.parametrize("factor", FACTORS)
@pytest.mark.filterwarnings("ignore:.*encountered:RuntimeWarning")
def test_as_many_solved_as_by_minpack(factor: float):
    mine, theirs = misses(ours, factor), misses(minpack, factor)
    assert len(mine) <= len(theirs), f"from {factor:g} × the start, missed: {mine}; by MINPACK: {theirs}"


@pytest.mark.parametrize("factor", FACTORS)
def test_what_is_called_a_success_is_stationary(factor: float):
    """Where it is no known minimum, f stands at right angles to every column of J that float64 can tell from zero."""
    for problem, result in results(ours, factor):
        if result is not None and result.success and problem.solved(result.x) is None:
            columns, size = result.jac.norm(dim=0), math.sqrt(2 * float(result.cost))
            matter = columns * result.x.abs() > 1e-14 * size
            assert (result.grad.abs() / columns / size)[matter].lt(1e-6).all(), problem.name
