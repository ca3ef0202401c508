"""Functions that run on several processes at once, each a rank of torch.distributed (gloo, on this machine).

    values = run(function, 4, *args)       # [what rank 0 returned, …]; an exception of a rank is raised here
    results = outcomes(function, 4, *args) # the same, with a Failure instead of the value of a rank that failed
    x = shard(whole, rank, ranks)          # rank's part of a batch; sizes=(7, 13, 9, 11) for parts of unlike lengths

A rank calls `function(*args)`, a function on module level (of a test file too), in a default process group of just
that many ranks; `dist.get_rank()` says which it is. Arguments and results go by value. The default dtype and the
filters of warnings are the caller's, torch's seed is 0, and torch has one thread. What ranks print, the caller prints.

Every call has processes of its own, forked from one that has imported torch and marquardt, so that no call can
disturb the next. The fork costs less than a new process group would in processes that stay up.
"""

from __future__ import annotations

import faulthandler
import functools
import importlib.util
import io
import multiprocessing
import os
import pickle
import random
import signal
import socket
import sys
import tempfile
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from multiprocessing import connection
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor

TESTS = f"{Path(__file__).parents[1]}{os.sep}"
START = multiprocessing.get_context("forkserver")
IMPORTED = [
    "marquardt", "torch.distributed.checkpoint", "torch.distributed.fsdp", "torch.distributed.tensor",
    "torch._dynamo", "hypothesis", "pytest",  # torch.optim imports _dynamo at the first step
]  # once, before the forks  # fmt: skip


@dataclass(frozen=True)
class Failure:
    """A rank that raised (the name of the exception's class and its text) or died ("died", "exit code 1")."""

    kind: str
    message: str
    traceback: str = field(default="", compare=False, repr=False)
    error: BaseException | None = field(default=None, compare=False, repr=False)  # None if it cannot be pickled


class RankTraceback(Exception):
    """The cause of an exception that `run` raises: where in the rank it came from."""

    def __str__(self) -> str:
        return f"\n{self.args[0]}"


def run(function: Callable[..., Any], ranks: int, *args: Any, timeout: float = 60, group_timeout: float = 60) -> list:
    """What `function(*args)` returned on each rank. The first failure of a rank ends all and is raised; rather that of
    one that died.

    After `timeout` seconds the ranks are killed, and the TimeoutError shows where each of them stood;
    `group_timeout` is that of the process group.
    """
    with _started(function, ranks, args, group_timeout) as processes:
        return processes.answers(timeout, refuse=True)


def outcomes(
    function: Callable[..., Any], ranks: int, *args: Any, timeout: float = 60, group_timeout: float = 60
) -> list:
    """`run`, with a Failure in place of what a rank that failed would have returned; waits for all ranks.

    A rank that raised ends two seconds later: its connections close, as under torchrun, but not before the others have
    received what it sent them.
    """
    with _started(function, ranks, args, group_timeout) as processes:
        return processes.answers(timeout, refuse=False)


def shard(t: Tensor, rank: int, ranks: int, sizes: Sequence[int] | None = None) -> Tensor:
    """The part of t's samples that belongs to a rank: consecutive ones, as many for each as possible, or `sizes`.

    `sizes` may be finer than the ranks: (7, 13, 9, 11) are those of four ranks, 20 and 20 of two, 40 of one.
    """
    if sizes is None:
        return t.tensor_split(ranks)[rank]
    if sum(sizes) != len(t) or len(sizes) % ranks:
        raise ValueError(f"sizes={tuple(sizes)} do not divide {len(t)} samples among {ranks} ranks")
    each = len(sizes) // ranks
    first = sum(sizes[: rank * each])
    return t[first : first + sum(sizes[rank * each : (rank + 1) * each])]


# The caller's side


@contextmanager
def _started(
    function: Callable[..., Any], ranks: int, args: tuple[Any, ...], group_timeout: float
) -> Iterator[_Processes]:
    with tempfile.TemporaryDirectory() as folder:
        processes = _Processes(ranks, Path(folder), _packed(function, args), group_timeout)
        try:
            yield processes
        finally:
            processes.end()


def _packed(function: Callable[..., Any], args: tuple[Any, ...]) -> bytes:
    """The call as plain bytes: multiprocessing's own pickles would share the tensors' memory."""
    modules = {name: getattr(module, "__file__", None) for name, module in list(sys.modules.items())}
    files = {name: file for name, file in modules.items() if file and file.startswith(TESTS)}
    return pickle.dumps((files, pickle.dumps((torch.get_default_dtype(), warnings.filters, function, args))))


class _Processes:
    def __init__(self, ranks: int, folder: Path, call: bytes, group_timeout: float) -> None:
        START.set_forkserver_preload(IMPORTED)
        self.logs = [folder / f"rank {rank}" for rank in range(ranks)]
        self.pipes, self.processes = [], []
        for rank, log in enumerate(self.logs):
            log.touch()
            ours, theirs = START.Pipe(duplex=False)
            group = (folder / "store", rank, ranks, group_timeout)
            process = START.Process(target=_rank, args=(theirs, log, group, call))
            process.start()
            theirs.close()  # so that the death of the rank is the end of the pipe
            self.pipes.append(ours)
            self.processes.append(process)

    def answers(self, timeout: float, refuse: bool) -> list[Any]:
        """What the ranks send, by rank; with `refuse` the first Failure is raised."""
        deadline = time.monotonic() + timeout
        answers: dict[int, Any] = {}
        while missing := [rank for rank in range(len(self.pipes)) if rank not in answers]:
            ready = connection.wait([self.pipes[rank] for rank in missing], max(0, deadline - time.monotonic()))
            if not ready:
                raise TimeoutError(f"ranks {missing} had no answer after {timeout} s\n{self.whereabouts(missing)}")
            for rank in missing:
                if self.pipes[rank] in ready:
                    answers[rank] = self.answer(rank)
            if refuse and any(isinstance(answer, Failure) for answer in answers.values()):
                self.refuse(answers)
        return [answers[rank] for rank in range(len(self.pipes))]

    def answer(self, rank: int) -> Any:
        try:
            return pickle.loads(self.pipes[rank].recv_bytes())
        except EOFError:
            self.processes[rank].join()
            return Failure("died", f"exit code {self.processes[rank].exitcode}", self.printed(rank))

    def refuse(self, answers: dict[int, Any]) -> NoReturn:
        """Raises a failure; if a rank died, then that: one that waited for it may have been quicker to say so."""
        missing = {self.pipes[rank]: rank for rank in range(len(self.pipes)) if rank not in answers}
        for pipe in connection.wait(list(missing), 0.1) if missing else []:
            answers[missing[pipe]] = self.answer(missing[pipe])
        failures = {rank: answer for rank, answer in answers.items() if isinstance(answer, Failure)}
        _raise(*min(failures.items(), key=lambda item: item[1].kind != "died"))

    def whereabouts(self, ranks: list[int]) -> str:
        """The Python stacks of ranks that do not answer."""
        for rank in ranks:
            with suppress(ProcessLookupError):
                os.kill(self.processes[rank].pid, signal.SIGUSR1)
        time.sleep(0.5)  # for faulthandler to write
        return "\n".join(f"rank {rank}:\n{self.printed(rank)}" for rank in ranks)

    def printed(self, rank: int) -> str:
        lines = self.logs[rank].read_text(errors="replace").splitlines(keepends=True)
        return "".join(line for line in lines if not line.startswith("[Gloo] Rank"))

    def end(self) -> None:
        for process in self.processes:
            process.kill()
        for rank, process in enumerate(self.processes):
            process.join()
            process.close()
            self.pipes[rank].close()
            if printed := self.printed(rank):
                print(f"rank {rank}:\n{printed}")


def _raise(rank: int, failure: Failure) -> NoReturn:
    said = f"rank {rank}: {failure.kind}: {failure.message}"
    raise failure.error or RuntimeError(said) from RankTraceback(f"rank {rank}:\n{failure.traceback}")


# The ranks' side


def _rank(pipe: connection.Connection, log: Path, group: tuple[Path, int, int, float], call: bytes) -> None:
    threading.Thread(target=_end_with_parent, daemon=True).start()
    _print_to(log)
    failed = False
    try:
        answer = pickle.dumps(_called(group, call))
    except BaseException as error:
        failed = True
        answer = pickle.dumps(_failure(error))
    pipe.send_bytes(answer)
    # One that is done keeps its connections until the caller ends it, one that failed closes them: see `outcomes`.
    time.sleep(2 if failed else 3600)
    os._exit(1)


def _end_with_parent() -> None:
    multiprocessing.parent_process().join()
    os._exit(1)


def _print_to(log: Path) -> None:
    file = os.open(log, os.O_WRONLY | os.O_APPEND)
    os.dup2(file, 1)
    os.dup2(file, 2)
    sys.stdout.reconfigure(line_buffering=True)
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1)


def _called(group: tuple[Path, int, int, float], call: bytes) -> Any:
    store, rank, ranks, group_timeout = group
    files, call = pickle.loads(call)
    dtype, filters, function, args = _Unpickler(call, files).load()
    random.seed(0)
    torch.manual_seed(0)
    torch.set_num_threads(1)
    torch.set_default_dtype(dtype)
    warnings.resetwarnings()
    warnings.filters.extend(filters)
    os.environ["GLOO_SOCKET_IFNAME"] = min(socket.if_nameindex())[1]  # loopback: needs neither network nor names
    dist.init_process_group(
        "gloo", init_method=store.as_uri(), rank=rank, world_size=ranks, timeout=timedelta(seconds=group_timeout)
    )
    return function(*args)


class _Unpickler(pickle.Unpickler):
    """Finds test files, too, which pytest imports from their path under names that `import` does not know."""

    def __init__(self, call: bytes, files: dict[str, str]) -> None:
        super().__init__(io.BytesIO(call))
        self.files = files

    def find_class(self, module: str, name: str) -> Any:
        if module not in sys.modules and module in self.files:
            spec = importlib.util.spec_from_file_location(module, self.files[module])
            sys.modules[module] = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(sys.modules[module])
        if module in self.files:  # not by `import`, which would ask for the package of tests
            return functools.reduce(getattr, name.split("."), sys.modules[module])
        return super().find_class(module, name)


def _failure(error: BaseException) -> Failure:
    text = "".join(traceback.format_exception(error))
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return Failure(type(error).__name__, str(error), text)
    return Failure(type(error).__name__, str(error), text, error)
