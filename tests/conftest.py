import os
from pathlib import Path

# Small problems, and one process per core: more threads cost more than they bring. Also in processes that tests start.
os.environ["OMP_NUM_THREADS"] = "1"

import hypothesis
import pytest
import torch

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
