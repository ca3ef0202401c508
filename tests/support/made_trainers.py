"""Trainers of every method on small problems, and the weights that they go through."""

import itertools

import pytest
import torch
from torch.nn.utils import parameters_to_vector

from marquardt.paper import problems
from marquardt.paper.methods import METHODS, Unavailable

PROBLEMS = {"sine": "mse", "mnist": "cross_entropy"}
EVERY = [
    (problem, key) for problem in PROBLEMS for key, spec in METHODS.items() if problem == "sine" or not spec.sine_only
]


def model_for(problem):
    return problems.sine_mlp(0) if problem == "sine" else problems.digits_cnn(0)


def batches_for(problem, count=None):
    if problem == "sine":
        source = itertools.repeat(problems.sine(0))
    else:
        generator = torch.Generator().manual_seed(0)
        x = torch.randn(4, 40, 1, 8, 8, generator=generator)
        source = itertools.cycle(zip(x, torch.randint(10, (4, 40), generator=generator), strict=True))
    return itertools.islice(source, count)


def build(key, problem, model=None, table=METHODS, **changes):
    model = model_for(problem) if model is None else model
    try:
        return table[key].build(model, PROBLEMS[problem], {**table[key].hyper(problem), **changes})
    except Unavailable as error:
        pytest.skip(str(error))


def weights(model):
    return parameters_to_vector(model.parameters()).detach().clone()


def evaluated(trainer):
    with trainer.evaluated():
        return weights(trainer.model)


def trained(trainer, problem, steps, look=weights):
    """What `look` sees of the model or trainer after each step."""
    found = []

    def after():
        found.append(look(trainer if look is evaluated else trainer.model))
        return len(found) == steps

    trainer.run(batches_for(problem), after)
    return torch.stack(found)
