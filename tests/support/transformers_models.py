"""Tiny models of transformers with random weights, data for them, and Trainers that write nothing but checkpoints."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import Dataset
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    BertForTokenClassification,
    GPT2Config,
    GPT2LMHeadModel,
    TrainingArguments,
)

from marquardt.huggingface import LMTrainer

WORDS, LENGTH = 12, 5


def bert(kind: Any = BertForSequenceClassification, dropout: float = 0.1, seed: int = 1, **options: Any) -> Any:
    torch.manual_seed(seed)
    config = BertConfig(
        vocab_size=WORDS, hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=8,
        max_position_embeddings=LENGTH, hidden_dropout_prob=dropout, attention_probs_dropout_prob=dropout,
        **{"num_labels": 3, **options},
    )  # fmt: skip
    return kind(config)


def tokens_bert(**options: Any) -> Any:
    return bert(BertForTokenClassification, **options)


def gpt(dropout: float = 0.0, seed: int = 1) -> Any:
    torch.manual_seed(seed)
    drop = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), dropout)
    return GPT2LMHeadModel(
        GPT2Config(vocab_size=WORDS, n_positions=LENGTH, n_embd=8, n_layer=1, n_head=2, bos_token_id=0, eos_token_id=0,
                   **drop)
    )  # fmt: skip


class Rows(Dataset[dict[str, Any]]):
    """Sentences of random words, the label a function of the first two."""

    def __init__(self, n: int = 48, kind: str = "sentence") -> None:
        g = torch.Generator().manual_seed(3)
        self.words = torch.randint(WORDS, (n, LENGTH), generator=g)
        ignored = torch.where(torch.rand(n, LENGTH, generator=g) < 0.2, -100, self.words % 3)
        self.labels = {
            "sentence": (self.words[:, 0] + self.words[:, 1]) % 3,
            "tokens": ignored,
            "causal": torch.where(torch.rand(n, LENGTH, generator=g) < 0.2, -100, self.words),
            "regression": self.words.float().mean(1) - WORDS / 2,
            "multi": (self.words[:, :3] % 2).float(),
        }[kind]

    def __len__(self) -> int:
        return len(self.words)

    def __getitem__(self, i: int) -> dict[str, Any]:
        return {"input_ids": self.words[i], "attention_mask": torch.ones_like(self.words[i]), "labels": self.labels[i]}


def arguments(folder: Path, **options: Any) -> TrainingArguments:
    usual = {
        "output_dir": str(folder),
        "per_device_train_batch_size": 8,
        "per_device_eval_batch_size": 24,
        "num_train_epochs": 3,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "use_cpu": True,
    }
    return TrainingArguments(**{**usual, **options})


def trainer(
    folder: Path, model: nn.Module | None, lm: dict[str, Any] | None = None, kind: str = "sentence", **options: Any
) -> LMTrainer:
    """`lm` are arguments of LMTrainer, `options` those of TrainingArguments."""
    own = {"loss": "cross_entropy", "train_dataset": Rows(kind=kind), "eval_dataset": Rows(kind=kind), **(lm or {})}
    return LMTrainer(model, arguments(folder, **options), **own)
