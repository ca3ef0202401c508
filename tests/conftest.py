import os
import subprocess
from pathlib import Path
from types import ModuleType

# Small problems, and one process per core: more threads cost more than they bring. Also in processes that tests start.
os.environ["OMP_NUM_THREADS"] = "1"

import hypothesis
import pytest
import torch

from support import command_line, programs, ranks
from support.cases import default_dtype

torch.set_num_threads(1)  # torch may have been imported before


class TorchRandom:
    """torch's generator as Hypothesis wants it: reset before every example, so that a failure repeats."""

    seed = staticmethod(torch.manual_seed)
    getstate = staticmethod(torch.get_rng_state)
    setstate = staticmethod(torch.set_rng_state)


torch_random = TorchRandom()  # Hypothesis keeps a weak reference only
hypothesis.register_random(torch_random)
hypothesis.settings.register_profile("marquardt", deadline=None, max_examples=25, derandomize=True, database=None)
hypothesis.settings.load_profile("marquardt")


# A test file that has one of these starts processes.
STARTING = (subprocess, programs, command_line.program, ranks.run, ranks.outcomes)


def starts_processes(module: ModuleType | None) -> bool:
    return module is not None and any(value is start for value in vars(module).values() for start in STARTING)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests of files that start processes run last: these take a while, and what is wrong shows earlier elsewhere."""
    starting = {module: starts_processes(module) for module in {getattr(item, "module", None) for item in items}}
    for item in items:
        if starting[getattr(item, "module", None)]:
            item.add_marker(pytest.mark.processes)
    items.sort(key=lambda item: item.get_closest_marker("processes") is not None)


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


@pytest.fixture
def double():
    """New tensors are float64."""
    with default_dtype(torch.float64):
        yield


@pytest.fixture(scope="session")
def mnist_dir() -> Path:
    """The folder of MNIST's four gzipped idx files: `mnist/` under $MARQUARDT_DATA."""
    data = os.environ.get("MARQUARDT_DATA")
    if not data:
        pytest.skip("MARQUARDT_DATA is not set: no MNIST")
    mnist = Path(data) / "mnist"
    if not mnist.is_dir():
        pytest.skip(f"MARQUARDT_DATA={data} has no mnist/")
    return mnist
