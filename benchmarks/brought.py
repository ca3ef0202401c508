"""Models of the kinds that people bring, each with a small task that it can learn: what benchmarks/models.py trains."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Batch = tuple[Any, Any]  # inputs as the model takes them, and targets


@dataclass(frozen=True)
class Case:
    build: Callable[[], nn.Module]
    loss: Any  # as LM takes it
    value: Callable[[Any, Any], Tensor]  # the same of outputs and targets, as Adam is given it
    draw: Callable[[], Batch]  # a new batch
    package: str = ""  # that it needs beside torch


# --- BERT: which of two kinds of words are more ---

SENTENCES, LENGTH, MARKS = 16, 32, 20


def bert(vocabulary: int, width: int = 128, dropout: float = 0.1) -> nn.Module:
    """BertForSequenceClassification, tiny, with random weights"""
    from transformers import BertConfig, BertForSequenceClassification

    config = BertConfig(
        vocab_size=vocabulary, hidden_size=width, num_hidden_layers=2, num_attention_heads=2,
        intermediate_size=4 * width, max_position_embeddings=2 * LENGTH, num_labels=2,
        hidden_dropout_prob=dropout, attention_probs_dropout_prob=dropout,
    )  # fmt: skip
    found: nn.Module = BertForSequenceClassification(config)
    return found


def of_logits(found: Any, y: Tensor) -> Tensor:
    return F.cross_entropy(found.logits, y)


def sentences(vocabulary: int, length: int = LENGTH) -> Callable[[], Batch]:
    """Frequent words are many. The class is whether more of them are among the words 1 to 20 or 21 to 40."""

    def draw() -> Batch:
        words = (vocabulary * torch.rand(SENTENCES, length) ** 3).long().clamp(min=2 * MARKS + 1)
        classes = torch.randint(0, 2, (SENTENCES,))
        favoured = torch.rand(SENTENCES, length // 4) < 0.8
        kind = torch.where(favoured, classes[:, None], 1 - classes[:, None])
        words[:, : length // 4] = 1 + kind * MARKS + torch.randint(0, MARKS, kind.shape)
        lengths = torch.randint(length // 2, length + 1, (SENTENCES, 1))
        mask = (torch.arange(length) < lengths).long()
        return {"input_ids": words * mask, "attention_mask": mask}, classes

    return draw


# --- graphs: what a node's neighbours have in common ---

GRAPHS, NODES, FEATURES = 32, 20, 8


class GraphNet(nn.Module):
    """Three layers of one kind; graphs are pooled, (N, outputs), or every node has outputs, (nodes, outputs)."""

    def __init__(self, kind: str, outputs: int, width: int = 32, pooled: bool = True) -> None:
        from torch_geometric.nn import GCNConv, GINConv, SAGEConv

        def layer(inputs: int) -> nn.Module:
            if kind == "gin":
                return GINConv(nn.Sequential(nn.Linear(inputs, width), nn.ReLU(), nn.Linear(width, width)))
            return (GCNConv if kind == "gcn" else SAGEConv)(inputs, width)

        super().__init__()
        self.layers = nn.ModuleList([layer(FEATURES), layer(width), layer(width)])
        self.head, self.pooled = nn.Linear(width, outputs), pooled

    def forward(self, data: Any) -> Tensor:
        from torch_geometric.nn import global_mean_pool

        h = data.x
        for layer in self.layers:
            h = layer(h, data.edge_index).relu()
        found: Tensor = self.head(global_mean_pool(h, data.batch) if self.pooled else h)
        return found


def graphs(kind: str, number: int = GRAPHS) -> Callable[[], Batch]:
    """Random graphs, each with neighbours that point the same way more or less: that is the target, or its third."""

    def draw() -> Batch:
        from torch_geometric.data import Batch as Graphs
        from torch_geometric.data import Data

        made, targets = [], []
        for _ in range(number):
            ends = torch.randint(0, NODES, (2, 2 * NODES))
            edges = torch.cat([ends, ends.flip(0)], 1)
            x = torch.randn(NODES, FEATURES) + 0.5 * torch.randn(FEATURES)
            near = torch.zeros_like(x).index_add(0, edges[1], x[edges[0]]) / 4
            at_node = near[:, 0].tanh() + near[:, 1] * near[:, 2]  # (NODES,)
            made.append(Data(x=x, edge_index=edges))
            targets.append(at_node)
        y = torch.stack(targets)  # (graphs, NODES)
        if kind == "nodes":
            return Graphs.from_data_list(made), (y > 0).long().flatten()
        mean = y.mean(1, keepdim=True)
        return Graphs.from_data_list(made), mean if kind == "values" else ((mean > -0.4).long() + (mean > 0.4))[:, 0]

    return draw


# --- U-Net: discs and squares on a noisy ground, and how high they are ---

IMAGES, SIDE = 4, 32


class UNet(nn.Module):
    """Two levels down and up again with GroupNorm: logits (N, 3, H, W); for two tasks the height (N, H, W) beside it"""

    def __init__(self, tasks: int = 2, width: int = 16) -> None:
        super().__init__()
        self.tasks = tasks

        def double(inputs: int, channels: int) -> nn.Sequential:
            parts: list[nn.Module] = []
            for i in (inputs, channels):
                parts += [nn.Conv2d(i, channels, 3, padding=1), nn.GroupNorm(4, channels), nn.ReLU()]
            return nn.Sequential(*parts)

        w = width
        self.first, self.second, self.third = double(1, w), double(w, 2 * w), double(2 * w, 4 * w)
        self.down = nn.MaxPool2d(2)
        self.ups = nn.ModuleList([nn.ConvTranspose2d(4 * w, 2 * w, 2, 2), nn.ConvTranspose2d(2 * w, w, 2, 2)])
        self.joined = nn.ModuleList([double(4 * w, 2 * w), double(2 * w, w)])
        self.head = nn.Conv2d(w, 2 + tasks, 1)

    def forward(self, x: Tensor) -> Any:
        one = self.first(x)
        two = self.second(self.down(one))
        h = self.third(self.down(two))
        for up, join, skipped in zip(self.ups, self.joined, (two, one), strict=True):
            h = join(torch.cat([up(h), skipped], 1))
        found: Tensor = self.head(h)
        return found if self.tasks == 1 else {"mask": found[:, :3], "height": found[:, 3]}


def scenes(tasks: int, side: int = SIDE) -> Callable[[], Batch]:
    """Masks (N, H, W) of three classes; for two tasks also a height (N, H, W) that falls off."""

    def draw() -> Batch:
        axis = torch.arange(side) / side
        x, mask, height = torch.randn(IMAGES, side, side) / 4, *torch.zeros(2, IMAGES, side, side)
        for n in range(IMAGES):
            for kind in (1, 2):
                across, down = 0.2 + 0.6 * torch.rand(2)
                apart = (axis - across)[None, :], (axis - down)[:, None]
                away = torch.hypot(*apart) if kind == 1 else torch.maximum(*(t.abs().expand(side, side) for t in apart))
                inside = away < 0.18
                mask[n] = torch.where(inside, kind, mask[n])
                height[n] = torch.where(inside, 1 - away / 0.18, height[n])
                x[n] = x[n] + inside * (0.5 + kind / 2)
        return x[:, None], mask.long() if tasks == 1 else {"mask": mask.long(), "height": height}

    return draw


BOTH = {"mask": ("cross_entropy", 1.0), "height": ("mse", 0.5)}


def both(z: dict[str, Tensor], y: dict[str, Tensor]) -> Tensor:
    return F.cross_entropy(z["mask"], y["mask"]) + 0.5 * F.mse_loss(z["height"], y["height"])


# --- tokens: each has four that may follow ---

SEQUENCES, TOKENS, VOCABULARY = 32, 16, 60


class Tied(nn.Module):
    """A causal transformer whose embedding is its output too: logits (N, T, C)"""

    def __init__(self, width: int = 32, layers: int = 2, dropout: float = 0.1) -> None:
        super().__init__()
        self.embedding, self.positions = nn.Embedding(VOCABULARY, width), nn.Embedding(TOKENS, width)
        layer = nn.TransformerEncoderLayer(width, 4, 4 * width, dropout, batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.norm, self.decoder = nn.LayerNorm(width), nn.Linear(width, VOCABULARY, bias=False)
        nn.init.normal_(self.embedding.weight, std=width**-0.5)
        self.decoder.weight = self.embedding.weight

    def forward(self, x: Tensor) -> Tensor:
        T = x.shape[1]
        h = self.embedding(x) * math.sqrt(self.embedding.embedding_dim) + self.positions(
            torch.arange(T, device=x.device)
        )
        mask = nn.Transformer.generate_square_subsequent_mask(T, device=x.device)
        logits: Tensor = self.decoder(self.norm(self.layers(h, mask=mask, is_causal=True)))
        return logits


def sequences(number: int = SEQUENCES) -> Callable[[], Batch]:
    """Of a token's four successors one comes three times in four."""
    followers = torch.randint(0, VOCABULARY, (VOCABULARY, 4), generator=torch.Generator().manual_seed(0))

    def draw() -> Batch:
        tokens = [torch.randint(0, VOCABULARY, (number,))]
        for _ in range(TOKENS):
            which = (4 * torch.rand(number) - 3).ceil().clamp(min=0).long() * torch.randint(1, 4, (number,))
            tokens.append(followers[tokens[-1], which])
        found = torch.stack(tokens, 1)  # (N, T + 1)
        return found[:, :-1], found[:, 1:]

    return draw


def of_tokens(z: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(z.flatten(0, 1), y.flatten())


CASES: dict[str, Case] = {
    "bert": Case(lambda: bert(30_522), "cross_entropy", of_logits, sentences(30_522), "transformers"),
    "bert, 500 words": Case(lambda: bert(500), "cross_entropy", of_logits, sentences(500), "transformers"),
    "gcn, classes": Case(
        lambda: GraphNet("gcn", 3), "cross_entropy", F.cross_entropy, graphs("classes"), "torch_geometric"
    ),
    "gin, classes": Case(
        lambda: GraphNet("gin", 3), "cross_entropy", F.cross_entropy, graphs("classes"), "torch_geometric"
    ),
    "sage, values": Case(lambda: GraphNet("sage", 1), "mse", F.mse_loss, graphs("values"), "torch_geometric"),
    "gcn, nodes": Case(
        lambda: GraphNet("gcn", 2, pooled=False), "cross_entropy", F.cross_entropy, graphs("nodes"), "torch_geometric"
    ),
    "u-net": Case(lambda: UNet(1), "cross_entropy", F.cross_entropy, scenes(1)),
    "u-net, two tasks": Case(UNet, BOTH, both, scenes(2)),
    "tied tokens": Case(Tied, "cross_entropy", of_tokens, sequences()),
}
