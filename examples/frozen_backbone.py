"""A transformer encoder, trained before: a new head on its frozen backbone, and low-rank adapters (LoRA) in it.

The backbone has learnt to fill gaps in sentences of five languages; the new task, with few labels, is to tell which.

python examples/frozen_backbone.py            # writes examples/pictures/frozen_backbone.png
python examples/frozen_backbone.py --quick --out /tmp
"""

import copy

import torch
import torch.nn.functional as F
from torch import nn

import marquardt as mq
from compare import arguments, compare, draw, panels, report, shuffled

TOKENS, LENGTH, KINDS, WIDTH = 8, 16, 5, 32
GAP = TOKENS  # the token of a gap
FOLLOWS = torch.randn(KINDS, TOKENS, TOKENS, generator=torch.Generator().manual_seed(0)).softmax(2)


def sentences(count: int, seed: int):
    """Tokens (N, LENGTH), each drawn from those that follow the last one in its language, and the language."""
    generator = torch.Generator().manual_seed(seed)
    kind = torch.randint(KINDS, (count,), generator=generator)
    tokens = [torch.randint(TOKENS, (count,), generator=generator)]
    while len(tokens) < LENGTH:
        tokens.append(torch.multinomial(FOLLOWS[kind, tokens[-1]], 1, generator=generator)[:, 0])
    return torch.stack(tokens, dim=1), kind


class Block(nn.Module):
    def __init__(self, heads=4):
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.query, self.key, self.value, self.out = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.feed = nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH))

    def forward(self, h):  # (N, LENGTH, WIDTH)
        x = self.norm1(h)
        q, k, v = (f(x).unflatten(2, (self.heads, -1)).transpose(1, 2) for f in (self.query, self.key, self.value))
        h = h + self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        return h + self.feed(self.norm2(h))


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.token, self.place = nn.Embedding(TOKENS + 1, WIDTH), nn.Parameter(0.1 * torch.randn(LENGTH, WIDTH))
        self.blocks = nn.Sequential(Block(), Block(), nn.LayerNorm(WIDTH))

    def forward(self, tokens):
        return self.blocks(self.token(tokens) + self.place)  # (N, LENGTH, WIDTH)


def pretrained(steps: int) -> Encoder:
    """Trained by Adam to name the tokens behind the gaps, one place in five."""
    torch.manual_seed(0)
    encoder, head = Encoder(), nn.Linear(WIDTH, TOKENS)
    opt = torch.optim.Adam([*encoder.parameters(), *head.parameters()], lr=3e-3)
    for seed in range(steps):
        tokens, _ = sentences(128, 1000 + seed)
        gaps = torch.rand(tokens.shape) < 0.2
        loss = F.cross_entropy(head(encoder(tokens.masked_fill(gaps, GAP)))[gaps], tokens[gaps])
        opt.zero_grad()
        loss.backward()
        opt.step()
    return encoder


class LoRA(nn.Module):
    """A frozen linear layer W plus BA of low rank; B is 0 at first, so that nothing changes."""

    def __init__(self, linear: nn.Linear, rank=4):
        super().__init__()
        self.linear = linear
        self.A = nn.Linear(linear.in_features, rank, bias=False)
        self.B = nn.Linear(rank, linear.out_features, bias=False)
        nn.init.zeros_(self.B.weight)

    def forward(self, x):
        return self.linear(x) + self.B(self.A(x))


class Classifier(nn.Module):
    def __init__(self, backbone: Encoder, adapters: bool):
        super().__init__()
        self.backbone = copy.deepcopy(backbone).requires_grad_(False)
        self.head = nn.Sequential(nn.Linear(WIDTH, 16), nn.Tanh(), nn.Linear(16, KINDS))
        if adapters:
            for block in self.backbone.blocks[:2]:
                block.query, block.value = LoRA(block.query), LoRA(block.value)

    def forward(self, tokens):
        return self.head(self.backbone(tokens).mean(1))  # (N, KINDS)

    def trained(self):
        return [p for p in self.parameters() if p.requires_grad]


def main():
    picture, quick = arguments("frozen_backbone", __doc__)
    backbone = pretrained(20 if quick else 600)
    (tokens, kinds), valid, test = sentences(500, 0), sentences(500, 1), sentences(2000, 2)

    @torch.no_grad()
    def validate(model):
        return F.cross_entropy(model(valid[0]), valid[1]).item()

    @torch.no_grad()
    def accuracy(model):
        return 100 * (model(test[0]).argmax(1) == test[1]).float().mean().item()

    figure, columns = panels(1, 1)
    for name, adapters, axes in zip(("head alone", "head and adapters"), (False, True), columns, strict=True):

        def build(adapters=adapters):
            torch.manual_seed(0)
            return Classifier(backbone, adapters)

        runs = compare(
            build,
            lambda model: mq.LM(model, "cross_entropy", params=model.trained()),
            lambda model, x, y: F.cross_entropy(model(x), y),
            lambda: shuffled(tokens, kinds, len(kinds), 100),
            validate,
            steps=4 if quick else 50,
        )
        print(f"\n{name}: {sum(p.numel() for p in build().trained()):,} parameters")
        [(lm, adam)] = report(runs, ("test accuracy, %", accuracy, max))
        draw(axes, runs)
        axes.set_title(f"{name}: LM {lm:.1f} %, Adam {adam:.1f} % right", fontsize="medium")
    figure.savefig(picture)


if __name__ == "__main__":
    main()
