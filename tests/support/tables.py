"""Small tables in files, made up."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

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
