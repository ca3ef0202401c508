"""A rank that dies, has bad data or does something else: the others say so, and nobody's model has changed."""

import os
import signal
import time
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from torch import nn

import marquardt as mq
from marquardt.ranks import OtherRank, RankError
from support.fits import noisy_sine, weights
from support.ranks import outcomes, run, shard

PARTS = {"curvature": mq.Dense(), "damping": mq.MaxDiagonal()}


def made(**options):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(1, 6), nn.Dropout(0.1), nn.Tanh(), nn.BatchNorm1d(6), nn.Linear(6, 1)).double()
    model[3].eval()
    return model, mq.LM(model, "mse", **{**PARTS, **options})


def own():
    return tuple(shard(t, dist.get_rank(), dist.get_world_size()) for t in noisy_sine(41))


def everything(model, opt):
    """What a step that fails leaves alone"""
    return [*(t.clone() for t in model.state_dict().values()), torch.get_rng_state(), torch.tensor(opt.lam),
            torch.tensor(opt._state.steps)]  # fmt: skip


def unchanged(before, after):
    return len(before) == len(after) and all(map(torch.equal, before, after))


# Ranks that are gone.


def lose_one(go):
    """What the others say and whether their model is as before the step; the rank goes amid its forward pass."""
    model, opt = made()
    x, y = own()
    opt.step(x, y)
    before = weights(model)
    if dist.get_rank() == 1:
        model[0].register_forward_pre_hook(lambda *_: go())
    with pytest.raises(RankError) as caught:
        opt.step(x, y)
    return str(caught.value), torch.equal(weights(model), before), opt._state.steps


def leave():
    os._exit(7)


def be_killed():
    os.kill(os.getpid(), signal.SIGKILL)


def hang():
    time.sleep(8)
    os._exit(7)


@pytest.mark.parametrize(("go", "ranks", "within"), [(leave, 3, 30), (be_killed, 2, 30), (hang, 2, 2)])
def test_a_rank_that_is_gone(go, ranks, within):
    """One that hangs is given up after the time-out of the group, which gloo says."""
    for rank, found in enumerate(outcomes(lose_one, ranks, go, group_timeout=within)):
        if rank == 1:
            assert found.kind == "died"
            continue
        said, as_before, steps = found
        assert f"rank {rank} of {ranks} has lost another rank" in said
        assert f"not answered within 0:00:{within:02}" in said
        assert "start all ranks again from the last checkpoint" in said
        assert ("Timed out" in said) == (go is hang)
        assert as_before
        assert steps == 1


# Bad data.


def columns(x, y):
    return x.expand(-1, 2).contiguous(), y


BAD = {
    "NaN": lambda x, y: (torch.where(x == x[3], torch.nan, x), y),
    "infinite target": lambda x, y: (x, torch.where(y == y[3], torch.inf, y)),
    "columns": columns,
    "targets": lambda x, y: (x, y[1:]),
    "no samples": lambda x, y: (x[:0], y[:0]),
    "precision": lambda x, y: (x.float(), y),
    "no tensor": lambda x, y: ("x", y),
    "no targets": lambda x, y: (x, None),
    "weight": lambda x, y: (x, y, torch.full_like(y[:, 0], -1.0)),
}


def refusals():
    """What each rank says to bad data of rank 1, what has changed, and the weights after good steps in between."""
    model, opt = made()
    model[1].eval()  # its random numbers belong to the process
    x, y = own()
    found = {}
    for name, spoilt in BAD.items():
        opt.step(x, y)
        before = everything(model, opt)
        try:
            opt.step(*(spoilt(x, y) if dist.get_rank() == 1 else (x, y)))
        except (ValueError, TypeError, RuntimeError) as error:
            kind = next(k.__name__ for k in (ValueError, TypeError, RuntimeError) if isinstance(error, k))
            found[name] = kind, isinstance(error, OtherRank), str(error), unchanged(before, everything(model, opt))
    over = []
    for batches in ([(x, y)], [] if dist.get_rank() == 1 else [(x, y)]):
        try:
            opt.step_over(batches)
        except ValueError as error:
            over.append(str(error))
    opt.step(x, y)
    return found, over, weights(model), opt._state.steps


def test_bad_data_of_one_rank_are_refused_by_all():
    (first, over, theta, steps), (second, over_there, theta_there, _) = run(refusals, 2)
    assert set(first) == set(second) == set(BAD)
    for name, (kind, other, said, as_before) in first.items():
        assert other, name
        assert "rank 1 failed, so that all ranks stop here." in said
        assert second[name][2] in said
        assert (kind, as_before) == (second[name][0], second[name][3]), name
        assert as_before, name
        assert not second[name][1]
    assert "rank 1 failed, so that all ranks stop here. ValueError: no batches" in over[0]
    assert "no batches" in over_there[0]
    assert torch.equal(theta, theta_there)
    assert steps == len(BAD) + 2
    model, opt = made()
    model[1].eval()
    x, y = noisy_sine(41)
    for _ in range(len(BAD)):
        opt.step(x, y)
    opt.step_over([(x, y)])
    opt.step(x, y)
    torch.testing.assert_close(weights(model), theta, rtol=1e-9, atol=1e-9)


# Ranks that do not agree.


def disagreements():
    """What each rank says if rank 1 has, or does, something else."""
    one, (x, y) = dist.get_rank() == 1, own()

    def tried(words, do):
        model, opt = made()
        model[1].eval()
        opt.step(x, y)
        before = everything(model, opt)
        with pytest.raises((RankError, ValueError)) as refused:
            do(model, opt)
        assert type(refused.value).__name__ in ("RankError", "OtherRank"), words
        assert words in str(refused.value)
        if words not in ("λ = ", "parameter '4.weight' is not the same on all ranks"):
            assert unchanged(before, everything(model, opt)), words

    def other_lam(model, opt):
        opt._state = replace(opt._state, lam=opt.lam * (1 + one))
        opt.step(x, y)

    def options(**other):
        return lambda model, opt: mq.LM(model, "mse", **{**PARTS, **(other if one else {})}).step(x, y)

    def other_parameter(model, opt):
        with torch.no_grad():
            model[4].weight[0, 2] += 1e-12 * one
        for _ in range(10):
            opt.step(x, y)

    tried("λ = ", other_lam)
    tried("(rank 0: MaxDiagonal(); rank 1: MeanEigenvalue())", options(damping=mq.MeanEigenvalue()))
    tried("(rank 0: lr = 1.0; rank 1: lr = 0.5)", options(lr=0.5))
    tried("rank 1: weight decay = 0.5)", options(weight_decay=0.5))
    tried("rank 1: λ = 1e-09, TenFold(initial=1e-09))", options(schedule=mq.TenFold(initial=1e-9)))
    tried("(rank 0: attempts = 1; rank 1: attempts = 3)", options(attempts=3))
    tried("parameter '4.weight' is not the same on all ranks", other_parameter)
    tried("", lambda model, opt: opt.step_over([(x, y)]) if one else opt.step(x, y))
    tried("/nowhere", lambda model, opt: mq.save_checkpoint("/nowhere", model, opt) if one else opt.step(x, y))


def test_ranks_that_do_not_agree_are_found_out():
    run(disagreements, 2)
