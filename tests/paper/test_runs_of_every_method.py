"""A few steps of every method: the same weights and batches, runs that repeat, losses that fall."""

import math
from dataclasses import replace

import pytest
import torch
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from marquardt.paper import problems, runs
from marquardt.paper.methods import METHODS
from support.made_runs import EVERY, LABELS, ON_DIGITS, Still, digits, made, train


def test_same_weights_and_batches_within_a_seed(tmp_path, monkeypatch):
    monkeypatch.setattr(problems, "BATCH", 20)  # of 60 digits: three in a pass
    data = digits()
    found = {}

    def spied(key, build):
        def spy(model, loss, hyper):
            weights = parameters_to_vector(model.parameters()).detach().clone()
            trainer, batches = build(model, loss, hyper), []
            found[key, seed, experiment] = weights, batches

            def record(source):
                for x, y in source:
                    batches.append((x.clone(), y.clone()))
                    yield x, y

            run = trainer.run
            trainer.run = lambda source, after: run(record(source), after)
            return trainer

        return spy

    for key, spec in METHODS.items():
        monkeypatch.setitem(METHODS, key, replace(spec, build=spied(key, spec.build)))
    for experiment, key in [pair for pair in EVERY if "ablation" not in pair[0]]:
        for seed in (0, 1):
            runs.execute(made(key, experiment, steps=4 if experiment == "mnist" else 1, seed=seed), tmp_path, data)

    for experiment, methods in [("sine", LABELS), ("mnist", ON_DIGITS)]:
        base = [found["sgd", seed, experiment] for seed in (0, 1)]
        for key in methods:
            for seed in (0, 1):
                weights, batches = found.get((key, seed, experiment), base[seed])  # unless its package is missing
                assert torch.equal(weights, base[seed][0])
                for got, wanted in zip(batches, base[seed][1], strict=True):
                    assert torch.equal(got[0], wanted[0])
                    assert torch.equal(got[1], wanted[1])
        assert not torch.equal(base[0][0], base[1][0])
        assert not torch.equal(base[0][1][0][1], base[1][1][0][1])


@pytest.mark.parametrize("experiment", ["sine", "mnist"])
def test_warming_up_leaves_no_trace(tmp_path, trainers, monkeypatch, experiment):
    monkeypatch.setattr(problems, "BATCH", 20)
    steps = train(made("fake", experiment, seed=3), tmp_path, digits())
    first, second = trainers
    assert (len(first.batches), len(second.batches), len(steps)) == (1, 3, 4)
    assert first.model is not second.model
    assert torch.equal(first.start, second.start)
    for warm, real in zip(first.batches[0], second.batches[0], strict=True):
        assert torch.equal(warm, real)


@pytest.mark.parametrize(("experiment", "key"), EVERY)
def test_runs_repeat(tmp_path, experiment, key):
    run, data = made(key, experiment, steps=3 if experiment.endswith("sine") else 2), digits()
    first = train(run, tmp_path / "first", data)
    torch.rand(7)
    again = train(run, tmp_path / "again", data)
    assert [{**line, "seconds": 0} for line in first] == [{**line, "seconds": 0} for line in again]
    assert len(first) > 1
    other = train(replace(run, seed=1), tmp_path / "other", data)
    assert first[0]["train_loss"] != other[0]["train_loss"]


@pytest.mark.parametrize("key", ["lm", "kfac", "psgd", "sgd"])
def test_evaluation_does_not_disturb_the_training(tmp_path, key):
    few, many = (train(made(key, "mnist", steps=3, train_sample=n), tmp_path / str(n), digits()) for n in (5, 60))
    assert [line["test_loss"] for line in few] == [line["test_loss"] for line in many]


@pytest.mark.parametrize("column", ["default", "tuned"])
@pytest.mark.parametrize("key", LABELS)
def test_every_method_lowers_the_loss_of_the_sine(tmp_path, key, column):
    hyper = runs.winners(runs.WINNERS)["sine"][key] if column == "tuned" else {}
    losses = [line["train_loss"] for line in train(made(key, steps=15, hyper=hyper), tmp_path)]
    assert losses[-1] < losses[0]
    assert math.isfinite(losses[-1])


def test_weights_that_are_evaluated_are_those_of_the_trainer(tmp_path, method):
    class Zero(Still):
        def evaluated(self):
            vector_to_parameters(torch.zeros(31, dtype=torch.float64), self.model.parameters())
            return super().evaluated()

    method(Zero)
    _, y = problems.sine(0)
    losses = [line["train_loss"] for line in train(made("fake", steps=1), tmp_path)]
    assert losses == pytest.approx([y.square().mean().item()] * 2)
