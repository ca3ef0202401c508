"""Cells in processes of their own: one that dies, or does not come to an end, costs its cell and not the run."""

from __future__ import annotations

import math
import queue
import signal
import threading
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from . import cells
from .cells import Budget, Cell
from .tasks import Setup

Job = tuple[Cell, float | None]  # with the rate to run it at


def limit(budget: Budget) -> float:
    """Seconds that a cell may take in all, its data and its evaluations too."""
    return 600 + 10 * budget.seconds if math.isfinite(budget.seconds) else 3600


def work(connection: Connection, threads: int | None, setup: Setup) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # an interrupt is for the process that began this one, which ends it
    if threads:
        torch.set_num_threads(threads)
    while (job := connection.recv()) is not None:
        connection.send(cells.run(*job, setup))


class Worker:
    def __init__(self, threads: int | None, setup: Setup) -> None:
        self.arguments = threads, setup
        self.process: Any = None

    def start(self) -> None:
        context = torch.multiprocessing.get_context("spawn")
        self.connection, theirs = context.Pipe()
        self.process = context.Process(target=work, args=(theirs, *self.arguments), daemon=True)
        self.process.start()
        theirs.close()

    def run(self, job: Job) -> dict[str, Any] | None:
        """The record of the cell; None if somebody has ended the process, which says nothing about the cell."""
        cell, _ = job
        if self.process is None:
            self.start()
        try:
            self.connection.send(job)
            if self.connection.poll(limit(cell.budget)):
                return self.connection.recv()
            self.process.kill()
            error = f"ended after {limit(cell.budget):g} s"
        except (EOFError, OSError):
            self.process.join()
            if self.process.exitcode == -signal.SIGTERM:
                return None
            error = f"its process died (exit code {self.process.exitcode})"
        self.process = None
        return cells.failed(cell, error)

    def close(self) -> None:
        if self.process is not None and self.process.is_alive():
            self.connection.send(None)
            self.process.join()


def run(
    jobs: Sequence[Job], folder: Path, workers: int, threads: int | None, setup: Setup, machine: dict[str, Any],
    done: Callable[[Cell, dict[str, Any]], None],
) -> None:  # fmt: skip
    """All jobs, in their order as far as `workers` of them at a time allow; without workers in this process."""
    left: queue.SimpleQueue[Job] = queue.SimpleQueue()
    for job in jobs:
        left.put(job)

    def drain(run_one: Callable[[Job], dict[str, Any] | None]) -> None:
        while True:
            try:
                job = left.get_nowait()
            except queue.Empty:
                return
            if (record := run_one(job)) is None:
                return
            record["machine"] = machine | {"threads": threads, "cells at a time": max(1, workers)}
            cells.write(folder, job[0], record)
            done(job[0], record)

    def drain_by_worker() -> None:
        worker = Worker(threads, setup)
        drain(worker.run)
        worker.close()

    if workers == 0:
        drain(lambda job: cells.run(*job, setup))

    drains = [threading.Thread(target=drain_by_worker, daemon=True) for _ in range(min(workers, len(jobs)))]
    for thread in drains:
        thread.start()
    for thread in drains:
        thread.join()
