"""All kinds of models train."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from dataclasses import fields
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import torch_geometric
import transformers
from torch import Tensor, nn
from torch.func import grad, hessian
from torch.nn.utils.rnn import PackedSequence, pack_sequence, pad_packed_sequence
from torch.utils._pytree import tree_leaves

import marquardt as mq
from support import reference
from support.cases import Poisson1D, Recurrent, TwoTowers, default_dtype, mlp
from support.reference import error
from support.several import Flat
from support.steps import (
    CUDA,
    DENSE_AND_GRAM,
    EVERY_CURVATURE,
    PLAIN_TYPES,
    ByHand,
    lm,
    objective,
    state,
    theta,
    unharmed,
)  # fmt: skip
from support.unchanged import refused, same

pytestmark = pytest.mark.usefixtures("double")


def test_tuple_and_dict_inputs():
    model, y = TwoTowers(), torch.randn(6, 2)
    left, right = torch.randn(6, 2), torch.randn(6, 3)
    runs = []
    for inputs in ((left, right), [left, right], {"right": right, "left": left}):
        twin = copy.deepcopy(model)
        hand_twin = copy.deepcopy(model)
        opt, hand = lm(twin), ByHand(hand_twin, "mse")
        for _ in range(3):
            opt.step(inputs, y)
            hand.step(inputs, y)
        assert error(theta(twin), theta(hand_twin)) < 1e-9
        runs.append(theta(twin))
    assert same(runs[0], runs[1])
    assert error(runs[2], runs[0]) < 1e-12


@EVERY_CURVATURE
def test_dict_inputs_with_an_option(curvature):
    """Not every argument of a model is a tensor."""

    class Switch(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(2, 2)

        def forward(self, negate: bool, x: Tensor) -> Tensor:
            return -self.inner(x) if negate else self.inner(x)

    model, x, y = Switch(), torch.randn(5, 2), torch.randn(5, 2)
    twin = copy.deepcopy(model)
    assert lm(model, curvature=curvature).step({"negate": True, "x": x}, y).accepted
    ByHand(twin, "mse").step({"negate": True, "x": x}, y)
    assert error(theta(model), theta(twin)) < 1e-10


@DENSE_AND_GRAM
@pytest.mark.parametrize("loss", ["residual", mq.losses.Residual()], ids=["name", "object"])
def test_residuals_without_inputs_or_targets(curvature, loss):
    """A model that knows its own data takes no inputs and no targets."""

    class Fit(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.p = nn.Parameter(torch.tensor([1.0, 1.0]))

        def forward(self, scale: Tensor | float = 1.0) -> Tensor:
            t = torch.linspace(0, 1, 5)
            return scale * (self.p[0] * (self.p[1] * t).exp() - 2 * (0.5 * t).exp())

    for inputs in ((), torch.tensor(2.0).expand(5)):
        model = Fit()
        opt = lm(model, loss, curvature=curvature)
        for _ in range(8):
            step = opt.step(inputs)
        assert step.new_loss < 1e-20
        assert error(theta(model), torch.tensor([2.0, 0.5])) < 1e-8


def loss_after(opt: mq.LM, x: Any, y: Any, steps: int) -> tuple[float, float]:
    """f at the start and at the end."""
    done = [opt.step(x, y) for _ in range(steps)]
    assert all(math.isfinite(s.new_loss) for s in done)
    return done[0].loss, done[-1].new_loss


MAKERS = {"default": mq.LM, "explicit": lm, "paper": mq.presets.paper, "vanilla": mq.presets.vanilla}


@pytest.mark.parametrize("recipe", ["default", "explicit", "paper"])
def test_trains_a_physics_informed_network(recipe):
    model, x = Poisson1D(), torch.linspace(-math.pi, math.pi, 20)[:, None]
    first, last = loss_after(MAKERS[recipe](model, "residual"), x, None, 25)
    assert last < first / 10


@pytest.mark.parametrize("recipe", ["default", "explicit"])
def test_trains_an_lstm(recipe):
    model, x = Recurrent(nn.LSTM(1, 4, batch_first=True), 2), torch.randn(12, 5, 1)
    first, last = loss_after(MAKERS[recipe](model, "cross_entropy"), x, (x.sum((1, 2)) > 0).long(), 15)
    assert last < first / 5


@pytest.mark.parametrize("recipe", ["default", "explicit"])
@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_trains_a_transformer(recipe, dropout):
    torch.manual_seed(1)
    layer = nn.TransformerEncoderLayer(4, 2, 8, dropout, batch_first=True)
    model, x = nn.Sequential(layer, nn.Flatten(1), nn.Linear(12, 2)), torch.randn(10, 3, 4)
    y = (x[:, 0, 0] > 0).long()
    loss_after(MAKERS[recipe](model, "cross_entropy"), x, y, 12)
    assert objective(model.eval(), "cross_entropy", x, y) < 0.1


def sine(device: str = "cpu") -> tuple[nn.Module, Tensor, Tensor]:
    """The paper's network in float32, on fewer points."""
    with default_dtype(torch.float32):
        model, x = mlp(1, 10, 1), torch.linspace(-4, 4, 100)[:, None]
    return model.to(device), x.to(device), x.sin().to(device)


@pytest.mark.parametrize("recipe", ["default", "vanilla", "paper"])
def test_trains_in_float32(recipe):
    model, x, y = sine()
    opt = MAKERS[recipe](model, "mse")
    first, last = loss_after(opt, x, y, 40)
    assert last < first / 10
    left = state(opt)
    assert (left["previous"] is None) == (recipe == "vanilla")  # where nothing looks back, nothing is kept
    vectors = [t for t in tree_leaves([left["D"], left["previous"], left["mean"]]) if t is not None]
    assert all(p.dtype == torch.float32 for p in [*model.parameters(), *vectors])


@CUDA
def test_cuda_resumes_and_trains():
    model, x, y = sine("cuda")
    opt = mq.LM(model, "mse")
    first, last = loss_after(opt, x, y, 20)
    twin = copy.deepcopy(model)
    other = mq.LM(twin, "mse")
    other.load_state_dict(copy.deepcopy(opt.state_dict()))
    assert loss_after(opt, x, y, 3) == pytest.approx(loss_after(other, x, y, 3), rel=1e-4)
    assert last < first / 5
    assert all(type(getattr(opt.step(x, y), f.name)) is PLAIN_TYPES.get(f.name, float) for f in fields(mq.Step))


# ---- What people bring: models of transformers and PyTorch Geometric, packed sequences.


N, T, C = 5, 4, 3


def encoding(**more: Any) -> Any:
    """What a tokenizer returns: the second sentence is shorter."""
    mask = torch.ones(N, T, dtype=torch.long)
    mask[1, 2:] = 0
    return transformers.BatchEncoding({"input_ids": torch.randint(20, (N, T)), "attention_mask": mask, **more})


def bert(kind: str, **options: Any) -> nn.Module:
    config = transformers.BertConfig(
        vocab_size=20, hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=6,
        max_position_embeddings=8, num_labels=C, attn_implementation="eager", **options,
    )  # fmt: skip
    return getattr(transformers, f"BertFor{kind}")(config).double().eval()


def gpt() -> nn.Module:
    config = transformers.GPT2Config(
        vocab_size=C + 4, n_positions=8, n_embd=8, n_layer=1, n_head=2, bos_token_id=0, eos_token_id=0,
        attn_implementation="eager",
    )  # fmt: skip
    return transformers.GPT2LMHeadModel(config).double().eval()


def tags(classes: int = C) -> Tensor:
    y = torch.randint(classes, (N, T))
    y[1, 2:] = -100
    return y


def next_tokens(ids: Tensor) -> Tensor:
    return torch.cat([ids[:, 1:], torch.full((len(ids), 1), -100)], 1)


def agrees(model: nn.Module, loss: Any, x: Any, y: Tensor, chunk: int | None = None) -> None:
    """f, g and G of cross-entropy of the logits, with the classes last, against dense ones."""
    flat = Flat(model, ["logits"])
    J, z = reference.jacobian_by_rows(flat, reference.trainable(flat), (dict(x),))

    def f(z: Tensor) -> Tensor:
        logits = z.view(N, -1, z.shape[1] // (1 if y.ndim == 1 else T))
        return F.cross_entropy(logits.flatten(0, 1), y.flatten())

    H = hessian(f)(z).reshape(z.numel(), -1)
    lin = mq.linearize(model, loss, x, y, chunk=chunk)
    rows = lin.rows()
    assert lin.loss == pytest.approx(float(f(z)), rel=1e-12)
    assert error(lin.gradient, J.T @ grad(f)(z).flatten()) < 1e-10
    assert error(rows.T @ rows, J.T @ H @ J) < 1e-10


@pytest.mark.parametrize("chunk", [None, 2])
def test_sequence_classification(chunk):
    agrees(bert("SequenceClassification"), "cross_entropy", encoding(), torch.randint(C, (N,)), chunk)


@pytest.mark.parametrize("chunk", [None, 2])
def test_token_classification(chunk):
    agrees(bert("TokenClassification"), "cross_entropy", encoding(), tags(), chunk)


def test_language_model():
    ids = torch.randint(C + 4, (N, T))
    agrees(gpt(), mq.losses.CrossEntropy(class_dim=-1), {"input_ids": ids}, next_tokens(ids))


@pytest.mark.parametrize("more", [{}, {"return_dict": False}], ids=["by name", "tuple"])
def test_labels_within_the_inputs(more):
    """A model that returns a loss of its own first: the logits are found all the same."""
    y = torch.randint(C, (N,))
    model, x = bert("SequenceClassification"), encoding(labels=y, **more)
    expected = F.cross_entropy(model(**{**x, "return_dict": True}).logits, y)
    assert lm(model, "cross_entropy").step(x, y).loss == pytest.approx(float(expected), rel=1e-12)


def test_hidden_states_are_ignored():
    model, y = bert("SequenceClassification"), torch.randint(C, (N,))
    x = encoding(output_hidden_states=True, output_attentions=True)
    step = lm(model, {"logits": ("cross_entropy", 0.5)}).step(x, {"logits": y})
    assert step.accepted
    assert step.new_loss < step.loss


def test_heads_of_a_transformer_without_logits():
    """The error names what there is."""
    model = transformers.BertModel(bert("SequenceClassification").config).double().eval()
    opt, x, y = lm(model, "mse"), encoding(), torch.randn(N, T, 8)
    with unharmed(model, opt, "'last_hidden_state' (5, 4, 8)", "'pooler_output' (5, 8)", "loss={'last_hidden_state'"):
        opt.step(x, y)
    expected = F.mse_loss(model(**x).pooler_output, y[:, 0])
    assert lm(model, {"pooler_output": "mse"}).step(x, y[:, 0]).loss == pytest.approx(float(expected), rel=1e-12)


def test_as_many_tokens_as_classes():
    model, x, y = bert("TokenClassification"), encoding(), tags()
    x = {k: t[:, :C] for k, t in x.items()}
    opt = lm(model, "cross_entropy")
    with unharmed(model, opt, "class_dim=-1", "(5, 3, 3)"):
        opt.step(x, y[:, :C])
    expected = F.cross_entropy(model(**x).logits.flatten(0, 1), y[:, :C].flatten())
    step = lm(model, mq.losses.CrossEntropy(class_dim=-1)).step(x, y[:, :C])
    assert step.loss == pytest.approx(float(expected), rel=1e-12)


def damped_step(f: Callable[[Tensor], Tensor], J: Tensor, z: Tensor, lam: float = 0.5) -> Tensor:
    """−(G + λI)⁻¹g of f(z)"""
    G = J.T @ hessian(f)(z).reshape(z.numel(), -1) @ J
    return -torch.linalg.solve(G + lam * torch.eye(len(G)), J.T @ grad(f)(z).flatten())


def test_graphs():
    """Several graphs of PyTorch Geometric, two losses: of every graph, and of nothing else."""
    conv, pool = torch_geometric.nn.GCNConv(2, 4), torch_geometric.nn.global_add_pool

    class Network(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.kind, self.size = conv, nn.Linear(4, C), nn.Linear(4, 1)

        def forward(self, data: Any) -> dict[str, Tensor]:
            h = pool(self.conv(data.x, data.edge_index).tanh(), data.batch)
            return {"kind": self.kind(h), "size": self.size(h)[:, 0], "nodes": data.x}

    sizes = [2, 5, 3, 4]
    rings = [torch.stack([torch.arange(n), (torch.arange(n) + 1) % n]) for n in sizes]
    graphs = [
        torch_geometric.data.Data(x=torch.randn(n, 2), edge_index=ring) for n, ring in zip(sizes, rings, strict=True)
    ]
    batch, model = torch_geometric.data.Batch.from_data_list(graphs), Network()
    y = {"kind": torch.tensor([0, 2, 1, 1]), "size": torch.tensor(sizes).double()}
    opt, before = lm(model, {"kind": "cross_entropy", "size": ("mse", 0.1)}, schedule=mq.Constant(0.5)), theta(model)
    flat = Flat(model, ["kind", "size"])
    J, z = reference.jacobian_by_rows(flat, reference.trainable(flat), batch)

    def f(z: Tensor) -> Tensor:
        return F.cross_entropy(z[:, :C], y["kind"]) + 0.1 * F.mse_loss(z[:, C], y["size"])

    expected = damped_step(f, J, z)
    step = opt.step(batch, y)
    assert step.loss == pytest.approx(float(f(z)), rel=1e-12)
    assert error(theta(model) - before, expected) < 1e-9
    with refused("DataBatch", "cannot be cut"):
        lm(model, {"kind": "cross_entropy", "size": "mse"}, curvature=mq.Gram(chunk=2)).step(batch, y)


class OfSequences(nn.Module):
    """An LSTM on sequences of different lengths."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.head = nn.LSTM(2, 3, batch_first=True), nn.Linear(3, 2)

    def forward(self, x: PackedSequence) -> dict[str, Tensor]:
        out, (h, _) = self.inner(x)
        return {"kind": self.head(h[-1]), "path": pad_packed_sequence(out, batch_first=True)[0]}


@pytest.mark.parametrize("curvature", [mq.Dense(inertia=0.0), mq.Gram()], ids=str)
def test_packed_sequences(curvature):
    sequences = [torch.randn(n, 2) for n in (3, 5, 2, 4)]
    packed, model = pack_sequence(sequences, enforce_sorted=False), OfSequences()
    y = {"kind": torch.tensor([0, 1, 1, 0]), "path": torch.randn(4, 5, 3)}
    rows = []
    for i, one in enumerate(sequences):  # each by itself, padded with nothing
        out, (h, _) = model.inner(one[None])
        rows.append((model.head(h[-1]), F.pad(out, (0, 0, 0, 5 - len(one))), i))
    z = torch.cat([torch.cat([kind, path.flatten(1)], 1) for kind, path, _ in rows])
    theta_of = list(model.parameters())
    grads = [torch.autograd.grad(t, theta_of, retain_graph=True, materialize_grads=True) for t in z.flatten()]
    J = torch.stack([torch.cat([g.flatten() for g in row]) for row in grads])

    def f(z: Tensor) -> Tensor:
        return F.cross_entropy(z[:, :2], y["kind"]) + F.mse_loss(z[:, 2:].reshape(4, 5, 3), y["path"])

    before, expected = theta(model), damped_step(f, J, z.detach())
    opt = lm(model, {"kind": "cross_entropy", "path": "mse"}, curvature=curvature, schedule=mq.Constant(0.5))
    step = opt.step(packed, y)
    assert step.loss == pytest.approx(float(f(z)), rel=1e-12)
    assert error(theta(model) - before, expected) < 1e-9


def test_packed_sequences_are_not_cut():
    packed, model = pack_sequence([torch.randn(n, 2) for n in (3, 2)], enforce_sorted=False), OfSequences()
    opt = lm(model, {"kind": "cross_entropy"}, curvature=mq.Gram(chunk=1))
    with unharmed(model, opt, "PackedSequence", "leave chunk out"):
        opt.step(packed, torch.tensor([0, 1]))


def test_packed_sequences_changed_in_place():
    class Shifting(OfSequences):
        def forward(self, x: PackedSequence) -> dict[str, Tensor]:
            x.data.sub_(0.5)
            return super().forward(x)

    model = Shifting()
    with refused("changes its inputs in place"):
        lm(model, {"kind": "cross_entropy"}).step(pack_sequence([torch.randn(3, 2)]), torch.tensor([0]))
