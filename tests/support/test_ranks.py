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
    print(f"I am {dist.get_rank()}")
    return mine, dist.get_world_size(), torch.get_num_threads(), torch.zeros(()).dtype, torch.rand(3).tolist()


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_ranks_form_a_group_of_their_own(double, ranks, capsys):
    """Which adds in copies, with one thread, the default dtype of the caller and the same seed in every rank."""
    each = torch.arange(8.0).reshape(4, 2)
    drawn = torch.rand(3, generator=torch.Generator().manual_seed(0)).tolist()
    for mine, *rest in run(total, ranks, each):
        assert torch.equal(mine, torch.arange(8.0).reshape(4, 2)[:ranks].sum(0))
        assert rest == [ranks, 1, torch.float64, drawn]
    assert torch.equal(each, torch.arange(8.0).reshape(4, 2))
    assert capsys.readouterr().out == "".join(f"rank {rank}:\nI am {rank}\n\n" for rank in range(ranks))


def warn():
    warnings.warn("so it is", RuntimeWarning, stacklevel=1)


def test_warnings_are_filtered_as_in_the_test():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert run(warn, 1) == [None]
        warnings.simplefilter("error")
        with pytest.raises(RuntimeWarning, match="so it is"):
            run(warn, 1)


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


def die():
    os._exit(7)


FAILURES = {
    "raises": (refuse, Failure("ValueError", "no data"), ValueError, r"^no data$"),
    "cannot be sent": (
        refuse_unpicklable, Failure("TwoArgumentError", "no data: too late"), RuntimeError,
        "rank 1: TwoArgumentError: no data: too late",
    ),
    "dies": (die, Failure("died", "exit code 7"), RuntimeError, "rank 1: died: exit code 7"),
}  # fmt: skip


@pytest.mark.parametrize("name", FAILURES)
def test_a_rank_that_fails(name):
    fail, failure, kind, words = FAILURES[name]
    waiting, failed = outcomes(wait_for_one_that_fails, 2, fail)
    assert failed == failure
    assert waiting.kind != "died"
    assert "all_reduce" in waiting.traceback
    with pytest.raises(kind, match=words) as caught:
        run(wait_for_one_that_fails, 2, fail)
    if name == "raises":
        assert "in refuse" in str(caught.value.__cause__)


def test_a_result_that_cannot_be_sent_is_told():
    with pytest.raises(TypeError, match="pickle"):
        run(threading.Lock, 1)


def finish_early():
    if dist.get_rank() == 0:
        dist.all_reduce(torch.ones(2))


def test_a_hang_is_killed_and_shows_where_the_ranks_stood():
    with pytest.raises(TimeoutError, match=r"ranks \[0\] had no answer after 2 s(?s:.*)in finish_early"):
        run(finish_early, 2, timeout=2)
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


def until(condition, seconds=30):
    """Whether the condition comes true within that time."""
    end = time.monotonic() + seconds
    while not (true := condition()) and time.monotonic() < end:
        time.sleep(0.02)
    return true


def test_ranks_end_if_their_caller_is_killed(tmp_path):
    assert outcomes(die_with_ranks, 1, tmp_path) == [Failure("died", "exit code 7")]
    assert until(lambda: all(unlocked(file) for file in tmp_path.iterdir()))


@pytest.mark.parametrize("sizes", [None, (7, 13, 9, 11), (0, 1, 38, 1)])
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_shards_make_up_the_batch(ranks, sizes):
    t = torch.arange(80).reshape(40, 2)
    parts = [shard(t, rank, ranks, sizes) for rank in range(ranks)]
    assert torch.equal(torch.cat(parts), t)
    if ranks == 4:
        assert tuple(map(len, parts)) == (sizes or (10, 10, 10, 10))
    with pytest.raises(ValueError, match=r"sizes=\(20, 20\) do not divide 41 samples among 4 ranks"):
        shard(torch.arange(41), 0, 4, (20, 20))
