"""Small LightningModules, their data, and Trainers without decoration."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning as L
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

import marquardt as mq
from marquardt.lightning import LMModule

# What Lightning has to say about loaders without workers, short epochs, and folders that are not empty; and one of its
# own warnings, about a function of torch that it still calls.
QUIET = [
    "ignore:.*does not have many workers",
    "ignore:.*smaller than the logging interval",
    "ignore:.*exists and is not empty",
    "ignore:.*have no `val_dataloader`",
    "ignore:.*callbacks used to create the checkpoint",
    "ignore:.*isinstance.treespec, LeafSpec",
]


def data(n: int = 96) -> TensorDataset:
    g = torch.Generator().manual_seed(3)
    x = torch.randn(n, 4, generator=g)
    return TensorDataset(x, (x[:, 0] * x[:, 1] > 0).long() + (x[:, 2] > 1).long())


def loader(shuffle: bool = True) -> DataLoader[Any]:
    return DataLoader(data(), 16, shuffle=shuffle)


class Resumable(DataLoader[Any]):
    """Shuffles by seeds of its own, and knows how far it is: Lightning saves its state."""

    at = 0  # batches so far

    def __iter__(self) -> Iterator[Any]:
        torch.rand(())  # iterators of torch draw a seed for their workers
        return self._batches()

    def _batches(self) -> Iterator[Any]:
        while True:
            epoch, batch = divmod(self.at, len(self))
            order = torch.randperm(len(self.dataset), generator=torch.Generator().manual_seed(epoch))
            self.at += 1
            yield self.dataset[order.split(self.batch_size)[batch]]
            if self.at % len(self) == 0:
                return

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.at = state_dict["at"]


class Net(LMModule):
    """Draws random numbers in every step."""

    def __init__(self, **parts: Any) -> None:
        super().__init__()
        self.parts = parts
        self.layers = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Dropout(0.2), nn.Linear(8, 3))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)

    def configure_optimizers(self) -> Any:
        return mq.LM(self, "cross_entropy", **self.parts)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        x, y = batch
        self.log("val_loss", cross_entropy(self(x), y))

    def test_step(self, batch: Any, batch_idx: int) -> None:
        x, y = batch
        self.log("test_loss", cross_entropy(self(x), y))

    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self(batch[0])


def trainer(folder: Path, **options: Any) -> L.Trainer:
    saves = any(isinstance(c, L.pytorch.callbacks.Checkpoint) for c in options.get("callbacks", []))
    usual = {
        "accelerator": "cpu",
        "default_root_dir": folder,
        "enable_model_summary": False,
        "enable_progress_bar": False,
        "logger": False,
        "enable_checkpointing": saves,
    }
    return L.Trainer(**{**usual, **options})


def made(kind: type[LMModule] = Net, seed: int = 1, **parts: Any) -> Any:
    torch.manual_seed(seed)
    return kind(**parts)
