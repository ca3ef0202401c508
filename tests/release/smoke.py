"""What an installed marquardt must do, by extra: run by environments.py with the interpreter of an environment that has
nothing but the wheel, torch and that extra."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn

import marquardt as mq

CHECKS: dict[str, Callable[[], None]] = {}


def check(run: Callable[[], None]) -> Callable[[], None]:
    CHECKS[run.__name__] = run
    return run


def command(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "marquardt", *arguments], capture_output=True, text=True)


def succeeds(*arguments: str) -> str:
    done = command(*arguments)
    assert done.returncode == 0, done.stderr
    return done.stdout


@check
def torch_alone() -> None:
    assert importlib.util.find_spec("numpy") is None, "this environment has more than torch"
    x = torch.linspace(-3, 3, 100).unsqueeze(1)
    y = torch.sin(x)
    model = nn.Sequential(nn.Linear(1, 10), nn.Tanh(), nn.Linear(10, 1))
    opt = mq.LM(model, "mse")
    first = opt.step(x, y).loss
    assert mq.fit(model, (x, y), "mse", steps=50).loss < first / 100
    popt, _ = mq.curve_fit(lambda t, a, b: a * torch.exp(-b * t), x[:, 0], 2 * torch.exp(-0.5 * x[:, 0]))
    assert torch.allclose(popt, torch.tensor([2.0, 0.5]).to(popt), atol=1e-4)
    asked = command("--help")
    assert asked.returncode == 2
    assert "pip install 'marquardt[paper]'" in asked.stderr, asked.stderr
    assert "pip install 'marquardt[table]'" in command("fit", "--help").stderr


@check
def paper() -> None:
    for name in ("figures", "report", "runs", "tables", "tune"):
        importlib.import_module(f"marquardt.paper.{name}")
    assert "--full" in succeeds("paper", "--help")


@check
def table() -> None:
    rows = [f"{a},{b},{a + 2 * b}" for a in range(8) for b in range(8)]
    Path("rows.csv").write_text("\n".join(["a,b,c", *rows]) + "\n")
    succeeds("fit", "rows.csv", "--target", "c", "--out", "model")
    succeeds("predict", "model", "rows.csv")


@check
def lightning() -> None:
    import lightning as L
    from torch.utils.data import DataLoader, TensorDataset

    from marquardt.lightning import LMModule

    class Net(LMModule):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(2, 1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.layer(x)

        def configure_optimizers(self) -> mq.LM:
            return mq.LM(self, "mse")

    x, net = torch.randn(40, 2), Net()
    trainer = L.Trainer(
        max_epochs=20, accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False
    )
    trainer.fit(net, DataLoader(TensorDataset(x, x[:, :1]), 40))
    assert (net(x) - x[:, :1]).square().mean() < 1e-2


@check
def sklearn() -> None:
    from marquardt.sklearn import LMRegressor

    x = torch.rand(60, 2).numpy()
    assert LMRegressor(hidden=[4], members=1, max_steps=50, random_state=0).fit(x, x.sum(1)).score(x, x.sum(1)) > 0.9


@check
def transformers() -> None:
    from transformers import BertConfig, BertForSequenceClassification, TrainingArguments

    from marquardt.huggingface import LMTrainer

    words = torch.randint(20, (16, 4))
    sentences = [{"input_ids": row, "labels": row[0] % 2} for row in words]
    small = BertConfig(vocab_size=20, hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=8)
    args = TrainingArguments(
        "run", max_steps=2, per_device_train_batch_size=8, report_to="none", disable_tqdm=True, use_cpu=True
    )
    model = BertForSequenceClassification(small)
    trainer = LMTrainer(model, args, train_dataset=sentences, loss="cross_entropy")
    assert trainer.train().global_step == 2


if __name__ == "__main__":
    torch.manual_seed(0)
    assert importlib.util.find_spec("marquardt").origin.startswith(sys.prefix), mq.__file__
    CHECKS[sys.argv[1]]()
