"""Small tables in files, made up."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

Rows = list[dict[str, Any]]


def houses(n: int = 80, seed: int = 0) -> Rows:
    """Numbers, categories, dates and missing values; `price` and `rent` are numbers, `sold` is a class."""
    draw = random.Random(seed)
    rows = []
    for i in range(n):
        area, city, month = draw.uniform(20, 200), draw.choice(["Bern", "Genf", "Zürich"]), draw.randint(1, 12)
        price = 3 * area + 100 * (city == "Zürich") + draw.gauss(0, 10)
        rooms = "" if i % 9 == 0 else round(area / 30)
        rows.append(
            {"name": f"house {i}", "area": round(area, 2), "city": city, "rooms": rooms, "built": f"2001-{month:02}-15",
             "country": "CH", "price": round(price, 2), "rent": round(price / 4 + draw.gauss(0, 5), 2),
             "sold": "yes" if price > 350 else "no"}
        )  # fmt: skip
    return rows


def write(path: Path, rows: Rows, *, without: tuple[str, ...] = ()) -> Path:
    names = [name for name in rows[0] if name not in without]
    lines = [",".join(names), *(",".join(str(row[name]) for name in names) for row in rows)]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


QUICK = {"hidden": (4,), "members": 2, "steps": 15}


def table(N: int = 60, outputs: int = 1, seed: int = 0) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(N, 3, generator=g, dtype=torch.float64)
    y = torch.stack([x[:, 0].tanh() + k * x[:, 1] for k in range(outputs)], 1)
    return x, y + 0.1 * torch.randn(N, outputs, generator=g, dtype=torch.float64)


def classes(N: int = 60, count: int = 3) -> tuple[Tensor, Tensor]:
    x, y = table(N)
    return x, torch.bucketize(y[:, 0], torch.linspace(-0.5, 0.5, count - 1, dtype=torch.float64))
