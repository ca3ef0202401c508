import fcntl
import functools
import os
import threading
import time
import warnings
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from support.ranks import Failure, outcomes, run, shard


def total(each):
    mine = each[dist.get_rank()]
    dist.all_reduce(mine)
    return mine


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_ranks_form_a_group_of_their_own(ranks):
    each = torch.arange(8.0).reshape(4, 2)
    values = run(total, ranks, each)
    assert len(values) == ranks
    for value in values:
        torch.testing.assert_close(value, torch.arange(8.0).reshape(4, 2)[:ranks].sum(0))
    assert torch.equal(each, torch.arange(8.0).reshape(4, 2))  # the ranks added in copies


def found():
    return dist.get_rank(), dist.get_world_size(), torch.get_num_threads(), torch.zeros(()).dtype


def test_rank_threads_and_default_dtype(double):
    assert run(found, 2) == [(0, 2, 1, torch.float64), (1, 2, 1, torch.float64)]


def test_seeds_are_the_same_in_every_rank_and_call():
    draws = run(torch.rand, 2, 3) + run(functools.partial(torch.rand, size=(3,)), 1)
    for draw in draws:
        assert torch.equal(draw, torch.rand(3, generator=torch.Generator().manual_seed(0)))


def warn():
    warnings.warn("so it is", RuntimeWarning, stacklevel=1)


def test_warnings_are_filtered_as_in_the_test():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert run(warn, 1) == [None]
        warnings.simplefilter("error")
        with pytest.raises(RuntimeWarning, match="so it is"):
            run(warn, 1)


def greet():
    print(f"I am {dist.get_rank()}")


def test_what_ranks_print_is_printed(capsys):
    run(greet, 2)
    assert capsys.readouterr().out == "rank 0:\nI am 0\n\nrank 1:\nI am 1\n\n"


def wait_for_one_that_fails(fail):
    if dist.get_rank() == 1:
        fail()
    dist.all_reduce(torch.ones(2))


def refuse():
    raise ValueError("no data")


class TwoArgumentError(Exception):
    def __init__(self, what, why):
        super().__init__(f"{what}: {why}")


def refuse_unpicklable():
    raise TwoArgumentError("no data", "too late")


def test_an_exception_is_raised_with_the_traceback_of_the_rank():
    with pytest.raises(ValueError, match=r"^no data$") as caught:
        run(wait_for_one_that_fails, 2, refuse)
    assert "in refuse" in str(caught.value.__cause__)


def test_an_exception_that_cannot_be_sent_is_told():
    with pytest.raises(RuntimeError, match="rank 1: TwoArgumentError: no data: too late"):
        run(wait_for_one_that_fails, 2, refuse_unpicklable)


def test_a_result_that_cannot_be_sent_is_told():
    with pytest.raises(TypeError, match="pickle"):
        run(threading.Lock, 1)


def test_outcomes_tell_of_every_rank():
    waiting, failed = outcomes(wait_for_one_that_fails, 2, refuse)
    assert failed == Failure("ValueError", "no data")
    assert "in refuse" in failed.traceback
    assert waiting.kind != "died"
    assert "all_reduce" in waiting.traceback
    assert outcomes(dist.get_rank, 2) == [0, 1]


def die():
    os._exit(7)


def test_a_rank_that_dies():
    waiting, died = outcomes(wait_for_one_that_fails, 2, die)
    assert died == Failure("died", "exit code 7")
    assert "all_reduce" in waiting.traceback
    with pytest.raises(RuntimeError, match="rank 1: died: exit code 7"):
        run(wait_for_one_that_fails, 2, die)


def finish_early():
    if dist.get_rank() == 0:
        dist.all_reduce(torch.ones(2))


def test_a_hang_is_killed_and_shows_where_the_ranks_stood():
    with pytest.raises(TimeoutError, match=r"ranks \[0\] had no answer after 2 s(?s:.*)in finish_early"):
        run(finish_early, 2, timeout=2)


def test_the_time_out_of_the_group():
    waiting, done = outcomes(finish_early, 2, group_timeout=2)
    assert done is None
    assert "all_reduce" in waiting.traceback


def hang(folder):
    file = folder / str(dist.get_rank())
    lock = (folder / f"{file.name}.new").open("w")
    fcntl.flock(lock, fcntl.LOCK_EX)
    Path(lock.name).rename(file)
    wait_for_one_that_fails(functools.partial(time.sleep, 600))


def die_with_ranks(folder):
    threading.Thread(target=run, args=(hang, 2, folder), daemon=True).start()
    os._exit(7 if until(lambda: {file.name for file in folder.iterdir()} == {"0", "1"}) else 8)


def unlocked(file):
    with file.open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
    return True


def test_ranks_end_if_their_caller_is_killed(tmp_path):
    assert outcomes(die_with_ranks, 1, tmp_path) == [Failure("died", "exit code 7")]
    assert until(lambda: all(unlocked(file) for file in tmp_path.iterdir()))


def until(condition, seconds=30):
    """Whether the condition comes true within that time."""
    end = time.monotonic() + seconds
    while not (true := condition()) and time.monotonic() < end:
        time.sleep(0.02)
    return true


@pytest.mark.parametrize("sizes", [None, (7, 13, 9, 11), (0, 1, 38, 1)])
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_shards_make_up_the_batch(ranks, sizes):
    t = torch.arange(80).reshape(40, 2)
    assert torch.equal(torch.cat([shard(t, rank, ranks, sizes) for rank in range(ranks)]), t)


def test_sizes_of_shards():
    t = torch.arange(41)
    assert [len(shard(t, rank, 4)) for rank in range(4)] == [11, 10, 10, 10]
    assert [len(shard(t[:40], rank, 2, (7, 13, 9, 11))) for rank in range(2)] == [20, 20]
    with pytest.raises(ValueError, match=r"sizes=\(20, 20\) do not divide 41 samples among 2 ranks"):
        shard(t, 0, 2, (20, 20))
    with pytest.raises(ValueError, match=r"sizes=\(20, 21\) do not divide 41 samples among 4 ranks"):
        shard(t, 0, 4, (20, 21))
