"""The report of a run: one HTML page with all it needs inside, light and dark."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import jinja2
from torch import Tensor

from .. import __version__
from ..training import History
from ..values import on_page, shortened
from . import metrics
from .charts import Points, chart, ranking, thinned
from .findings import LEVEL, Findings
from .reading import counted
from .targets import ClassTarget, NumberTarget

WORST = 10  # rows in the table of the worst
SHOWN = 6  # of their columns, the most important ones
RANKED = 20  # columns in the chart of importances
MOST_STEPS = 400  # drawn of a network
ALIKE = 12  # names of columns to which the same was done


@dataclass(frozen=True)
class Picture:
    title: str
    svg: str
    caption: str


def page(findings: Findings) -> str:
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        finalize=on_page,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    prepared = findings.prepared
    judged, rows = prepared.judged
    classes = isinstance(prepared.target, ClassTarget)
    return environment.get_template("report.html.jinja").render(
        title=f"{', '.join(prepared.target.names)} from {findings.request.data.name}",
        judged=judged,
        tiles=_tiles(findings),
        sentences=[*findings.told, *prepared.says, *findings.chosen, _took(findings)],
        columns=_columns(findings),
        learning=_learning(findings),
        pictures=_of_classes(findings) if classes else _of_numbers(findings),
        confusion=_confusion(findings) if classes else None,
        importance=_importance(findings),
        worst=_worst_class(findings) if classes else _worst_numbers(findings),
        measured=_measures(findings),
        rows=len(rows),
        version=__version__,
        written=datetime.now().astimezone().isoformat(" ", timespec="minutes"),
    )


def _took(findings: Findings) -> str:
    members = len(findings.committee.history)
    return f"A committee of {counted(members, 'network')} was trained in {findings.seconds:.3g} s."


def _tiles(findings: Findings) -> list[tuple[str, str]]:
    name, rows = findings.prepared.judged
    found = findings.judged
    first = next(iter(found.values()))
    size = [(f"{len(rows):,}", f"{name} rows")]
    if "accuracy" in first:
        shares = [(first["accuracy"], "accuracy"), (first["accuracy_of_the_largest_class"], "the largest class alone")]
        return [(f"{100 * value:.1f} %", words) for value, words in shares] + [
            (f"{first['log_loss']:.3g}", "log loss"), (f"{first['calibration_error']:.3f}", "calibration error"), *size,
        ]  # fmt: skip
    if len(found) > 1:
        return [(_number(m["r2"]), f"R² of {name}") for name, m in found.items()] + size
    values = [("rmse", "RMSE"), ("rmse_of_the_mean", "RMSE of the mean alone"), ("r2", "R²")]
    tiles = [(_number(first[key]), words) for key, words in values]
    return [*tiles, (f"{100 * first['coverage']:.1f} %", f"inside the {100 * LEVEL:.0f} % intervals"), *size]


def _columns(findings: Findings) -> list[tuple[str, str, str]]:
    """What was done to the columns; those to which the same was done share a line."""
    alike: dict[tuple[str, str], list[str]] = {}
    for name, read, done in findings.prepared.columns.told:
        alike.setdefault((read, done), []).append(name)
    most = [
        ", ".join(names[:ALIKE]) + (f" and {len(names) - ALIKE} more" * (len(names) > ALIKE))
        for names in alike.values()
    ]
    return [(names, read, done) for names, (read, done) in zip(most, alike, strict=True)]


def _measures(findings: Findings) -> list[tuple[str, ...]]:
    """Rows of a table: set, target, measure by measure."""
    rows: list[tuple[str, ...]] = []
    for name, found in findings.measured.items():
        for target, values in found.items():
            if not rows:
                rows.append(("rows", "target", *(key.replace("_", " ") for key in values)))
            rows.append((name, target, *(_number(value) for value in values.values())))
    return rows


def _number(value: float) -> str:
    return f"{value:.4g}" if math.isfinite(value) else "–"


# --- pictures ---


def _learning(findings: Findings) -> Picture:
    histories = findings.committee.history
    lines = {key: [_line(history, key) for history in histories] for key in ("loss", "validation")}
    everything = [point for found in lines.values() for line in found for point in line]
    drawn = chart([x for x, _ in everything], [y for _, y in everything], "step", "loss", log=True)
    for key, style, words in (("loss", "first thin", "training"), ("validation", "second thin", "rows left out")):
        for k, line in enumerate(filter(None, lines[key])):
            drawn.line(line, style, words if k == 0 else "")
    caption = f"Every line is one of the {len(histories)} networks, in units of the standardised target."
    return Picture("Learning curve", drawn.svg("Loss by step"), caption)


def _line(history: History, key: str) -> Points:
    return thinned([(entry.step, value) for entry in history if (value := getattr(entry, key)) == value], MOST_STEPS)


def _of_numbers(findings: Findings) -> list[Picture]:
    """Predicted against true, and residuals, for each target."""
    prepared = findings.prepared
    assert isinstance(prepared.target, NumberTarget)
    _, rows = prepared.judged
    z = metrics.quantile(LEVEL)
    found = findings.predicted.of(rows)
    assert found.std is not None
    pictures = []
    for k, name in enumerate(prepared.target.names):
        true, mean, half = (values.tolist() for values in (prepared.Y[rows, k], found.mean[:, k], z * found.std[:, k]))
        pictures += _pair(name, thinned(list(zip(true, mean, half, strict=True))), len(rows))
    return pictures


def _pair(name: str, triples: Sequence[tuple[float, float, float]], rows: int) -> list[Picture]:
    true, mean, _ = (list(values) for values in zip(*triples, strict=True))
    few = "" if len(triples) == rows else f" {len(triples):,} of {rows:,} rows are drawn."
    against = chart(true, mean, f"true {name}", f"predicted {name}", same=True)
    against.corner = "left"  # far from the line, nothing is there
    against.line([(low := min(true + mean), low), (high := max(true + mean), high)], "rule")
    spans = [(t, max(m - h, against.y.low), min(m + h, against.y.high)) for t, m, h in triples]
    against.bars(spans, "second", f"{100 * LEVEL:.0f} % interval")
    against.dots(list(zip(true, mean, strict=True)), "first")
    residuals = [m - t for t, m, _ in triples]
    left = chart(mean, [*residuals, 0.0], f"predicted {name}", "predicted − true")
    left.line([(min(mean), 0.0), (max(mean), 0.0)], "rule")
    left.dots(list(zip(mean, residuals, strict=True)), "first")
    return [
        Picture(f"{name}: predicted against true", against.svg(f"{name}, predicted against true"),
                f"On the line a prediction is right. Upright lines are {100 * LEVEL:.0f} % intervals.{few}"),
        Picture(f"{name}: residuals", left.svg(f"{name}, residuals"),
                "A shape or a funnel in here is something that the network has not learnt."),
    ]  # fmt: skip


def _of_classes(findings: Findings) -> list[Picture]:
    prepared = findings.prepared
    _, rows = prepared.judged
    bins = metrics.reliability(prepared.Y[rows], findings.predicted.of(rows).mean)
    drawn = chart([0.0, 1.0], [0.0, 1.0], "probability of the predicted class", "part that is right")
    most = max(b.rows for b in bins)
    width = 1 / metrics.BINS
    boxes = [
        (k := min(int(b.confidence / width), metrics.BINS - 1) * width, k + width, 0.25 * b.rows / most) for b in bins
    ]
    drawn.boxes(boxes, "faint")
    drawn.line([(0.0, 0.0), (1.0, 1.0)], "rule")
    drawn.line([(b.confidence, b.accuracy) for b in bins], "first")
    drawn.dots([(b.confidence, b.accuracy) for b in bins], "first large")
    caption = "On the dotted line probabilities are what they say. Boxes show how many rows have such a probability."
    return [Picture("Reliability", drawn.svg("Reliability diagram"), caption)]


def _confusion(findings: Findings) -> dict[str, Any]:
    prepared = findings.prepared
    assert isinstance(prepared.target, ClassTarget)
    _, rows = prepared.judged
    counts = metrics.confusion(prepared.Y[rows], findings.predicted.of(rows).mean)
    shares = [[count / max(sum(row), 1) for count in row] for row in counts]
    cells = [list(zip(row, share, strict=True)) for row, share in zip(counts, shares, strict=True)]
    return {"classes": prepared.target.classes, "rows": list(zip(prepared.target.classes, cells, strict=True))}


def _importance(findings: Findings) -> Picture:
    shown = findings.importances[:RANKED]
    what = "log loss" if isinstance(findings.prepared.target, ClassTarget) else "RMSE (in standard deviations)"
    svg = ranking([(i.name, i.rise, i.spread) for i in shown], f"rise of the {what}", "Importance of the columns")
    more = len(findings.importances) - len(shown)
    caption = "How much worse predictions get once a column's values are dealt to other rows, and its spread."
    return Picture(
        "Importance of the columns",
        svg,
        caption
        + (f" {'One more column matters' if more == 1 else f'{more} more columns matter'} less." if more else ""),
    )


# --- the worst rows ---


def _worst_numbers(findings: Findings) -> tuple[list[str], list[list[str]]]:
    prepared, found = findings.prepared, findings.predicted
    _, rows = prepared.judged
    assert found.std is not None
    scale = prepared.Y[prepared.train].std(0)
    size = ((found.mean - prepared.Y)[rows] / scale).abs().amax(1)
    names = prepared.target.names
    head = [words for name in names for words in (f"true {name}", f"predicted {name}", "± (1 std)")]

    def cells(i: int) -> list[str]:
        triples = zip(prepared.Y[i].tolist(), found.mean[i].tolist(), found.std[i].tolist(), strict=True)  # type: ignore[index]
        return [f"{value:.4g}" for triple in triples for value in triple]

    return _worst(findings, rows[size.argsort(descending=True, stable=True)[:WORST]], head, cells)


def _worst_class(findings: Findings) -> tuple[list[str], list[list[str]]]:
    prepared, p = findings.prepared, findings.predicted.mean
    assert isinstance(prepared.target, ClassTarget)
    classes = prepared.target.classes
    _, rows = prepared.judged
    right = p[rows, prepared.Y[rows]]

    def cells(i: int) -> list[str]:
        k, true = int(p[i].argmax()), int(prepared.Y[i])
        return [classes[true], f"{p[i, true]:.3f}", classes[k], f"{p[i, k]:.3f}"]

    head = ["true", "its probability", "predicted", "its probability"]
    return _worst(findings, rows[right.argsort(stable=True)[:WORST]], head, cells)


def _worst(
    findings: Findings, places: Tensor, head: list[str], cells: Callable[[int], list[str]]
) -> tuple[list[str], list[list[str]]]:
    """The table's names and rows: row, what was predicted, and the values of the columns that matter most."""
    frame = findings.prepared.frame
    names = [importance.name for importance in findings.importances[:SHOWN]]
    numbers = {column.name for column in findings.prepared.columns.columns if column.kind == "number"}
    body = []
    for i in places.tolist():
        values = [(frame[name].iloc[i], name in numbers) for name in names]
        shown = [
            "–" if value != value else _number(float(value)) if number else shortened(str(value))
            for value, number in values
        ]
        body.append([f"{frame.index[i] + 1:,}", *cells(i), *shown])
    return ["row", *head, *names], body
