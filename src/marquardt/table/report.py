"""The report of a run: one HTML page with all it needs inside, light and dark."""

from __future__ import annotations

import math
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple

import jinja2

from .. import __version__
from ..values import on_page, shortened
from .charts import chart, ranking, thinned
from .columns import ClassTarget
from .findings import BINS, LEVEL, Findings, confusion, quantile, reliability
from .reading import counted

WORST = 10  # rows in the table of the worst
SHOWN = 6  # of their columns, the most important ones
RANKED = 20  # columns in the chart of importances
MOST_STEPS = 400  # drawn of a network
ALIKE = 12  # names of columns to which the same was done


class Picture(NamedTuple):
    title: str
    svg: str
    caption: str


def page(findings: Findings) -> str:
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent), autoescape=True, finalize=on_page,
        undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True,
    )  # fmt: skip
    prepared, networks = findings.prepared, len(findings.committee.history)
    took = f"A committee of {counted(networks, 'network')} was trained in {findings.seconds:.3g} s."
    classes = isinstance(prepared.target, ClassTarget)
    return environment.get_template("report.html.jinja").render(
        title=f"{', '.join(prepared.target.names)} from {findings.request.data.name}",
        judged="test" if len(prepared.test) else "training",
        tiles=_tiles(findings),
        sentences=[*findings.told, *prepared.says, *findings.chosen, took],
        columns=_columns(findings),
        learning=_learning(findings),
        pictures=_of_classes(findings) if classes else _of_numbers(findings),
        confusion=_confusion(findings) if classes else None,
        importance=_importance(findings),
        worst=_worst(findings),
        measured=_measures(findings),
        rows=len(prepared.judged),
        version=__version__,
        written=datetime.now().astimezone().isoformat(" ", timespec="minutes"),
    )


def _tiles(findings: Findings) -> list[tuple[str, str]]:
    found, prepared = findings.judged, findings.prepared
    first = next(iter(found.values()))
    size = (f"{len(prepared.judged):,}", f"{'test' if len(prepared.test) else 'training'} rows")
    if "accuracy" in first:
        shares = [(first["accuracy"], "accuracy"), (first["accuracy_of_the_largest_class"], "the largest class alone")]
        return [
            *((f"{100 * value:.1f} %", words) for value, words in shares),
            (f"{first['log_loss']:.3g}", "log loss"), (f"{first['calibration_error']:.3f}", "calibration error"), size,
        ]  # fmt: skip
    if len(found) > 1:
        return [*((_four(m["r2"]), f"R² of {name}") for name, m in found.items()), size]
    values = [("rmse", "RMSE"), ("rmse_of_the_mean", "RMSE of the mean alone"), ("r2", "R²")]
    inside = (f"{100 * first['coverage']:.1f} %", f"inside the {100 * LEVEL:.0f} % intervals")
    return [*((_four(first[key]), words) for key, words in values), inside, size]


def _columns(findings: Findings) -> list[tuple[str, str, str]]:
    """What was done to the columns; those to which the same was done share a line."""
    alike: dict[tuple[str, str], list[str]] = {}
    for name, read, done in findings.prepared.columns.told:
        alike.setdefault((read, done), []).append(name)
    return [
        (", ".join(names[:ALIKE]) + f" and {len(names) - ALIKE} more" * (len(names) > ALIKE), read, done)
        for (read, done), names in alike.items()
    ]


def _measures(findings: Findings) -> list[tuple[str, ...]]:
    """Rows of a table: set, target, measure by measure."""
    rows: list[tuple[str, ...]] = []
    for name, found in findings.measured.items():
        for target, values in found.items():
            if not rows:
                rows.append(("rows", "target", *(key.replace("_", " ") for key in values)))
            rows.append((name, target, *(_four(value) for value in values.values())))
    return rows


def _four(value: float) -> str:
    """Four digits of a number, a dash if there is none."""
    return f"{value:.4g}" if math.isfinite(value) else "–"


def _worst(findings: Findings) -> tuple[list[str], list[list[str]]]:
    """The worst predictions: the names of a table, and its rows with the values of the columns that matter most."""
    prepared, (mean, std) = findings.prepared, findings.predicted
    target, Y, rows = prepared.target, prepared.Y, prepared.judged
    if isinstance(target, ClassTarget):
        size = -mean[rows, Y[rows]]
        head = ["true", "its probability", "predicted", "its probability"]
    else:
        size = ((mean - Y)[rows] / Y[prepared.train].std(0)).abs().amax(1)
        head = [words for name in target.names for words in (f"true {name}", f"predicted {name}", "± (1 std)")]

    def cells(i: int) -> list[str]:
        if isinstance(target, ClassTarget):
            places = int(Y[i]), int(mean[i].argmax())
            return [text for k in places for text in (target.classes[k], f"{mean[i, k]:.3f}")]
        assert std is not None
        return [f"{value:.4g}" for triple in zip(Y[i], mean[i], std[i], strict=True) for value in triple]

    names = [importance.name for importance in findings.importances[:SHOWN]]
    numbers = {column.name for column in prepared.columns.columns if column.kind == "number"}
    body = []
    for i in rows[size.argsort(descending=True, stable=True)[:WORST]].tolist():
        values = [(prepared.frame[name].iloc[i], name in numbers) for name in names]
        shown = ["–" if v != v else _four(float(v)) if number else shortened(str(v)) for v, number in values]
        body.append([f"{prepared.frame.index[i] + 1:,}", *cells(i), *shown])
    return ["row", *head, *names], body


# --- pictures ---


def _learning(findings: Findings) -> Picture:
    histories = findings.committee.history
    curves = []
    for key, style, words in (("loss", "first thin", "training"), ("validation", "second thin", "rows left out")):
        lines = [[(e.step, y) for e in history if (y := getattr(e, key)) == y] for history in histories]
        curves += [
            (thinned(line, MOST_STEPS), style, words if k == 0 else "") for k, line in enumerate(filter(None, lines))
        ]
    points = [point for line, _, _ in curves for point in line]
    drawn = chart([x for x, _ in points], [y for _, y in points], "step", "loss", log=True)
    for curve in curves:
        drawn.line(*curve)
    caption = f"Every line is one of the {len(histories)} networks, in units of the standardised target."
    return Picture("Learning curve", drawn.svg("Loss by step"), caption)


def _of_numbers(findings: Findings) -> list[Picture]:
    """Predicted against true, and residuals, for each target."""
    prepared, rows = findings.prepared, findings.prepared.judged
    mean, std = findings.predicted.of(rows)
    assert std is not None
    half = quantile(LEVEL) * std
    pictures = []
    for k, name in enumerate(prepared.target.names):
        triples = list(zip(*(t[:, k].tolist() for t in (prepared.Y[rows], mean, half)), strict=True))
        pictures += _pair(name, thinned(triples), len(rows))
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
    rows = findings.prepared.judged
    bins = reliability(findings.prepared.Y[rows], findings.predicted.mean[rows])
    drawn = chart([0.0, 1.0], [0.0, 1.0], "probability of the predicted class", "part that is right")
    most, width = max(b.rows for b in bins), 1 / BINS
    boxes = [(k := min(int(b.confidence / width), BINS - 1) * width, k + width, 0.25 * b.rows / most) for b in bins]
    drawn.boxes(boxes, "faint")
    drawn.line([(0.0, 0.0), (1.0, 1.0)], "rule")
    drawn.line([(b.confidence, b.accuracy) for b in bins], "first")
    drawn.dots([(b.confidence, b.accuracy) for b in bins], "first large")
    caption = "On the dotted line probabilities are what they say. Boxes show how many rows have such a probability."
    return [Picture("Reliability", drawn.svg("Reliability diagram"), caption)]


def _confusion(findings: Findings) -> dict[str, Any]:
    prepared, rows = findings.prepared, findings.prepared.judged
    assert isinstance(prepared.target, ClassTarget)
    counts = confusion(prepared.Y[rows], findings.predicted.mean[rows])
    shares = [[count / max(sum(row), 1) for count in row] for row in counts]
    cells = [list(zip(row, share, strict=True)) for row, share in zip(counts, shares, strict=True)]
    return {"classes": prepared.target.classes, "rows": list(zip(prepared.target.classes, cells, strict=True))}


def _importance(findings: Findings) -> Picture:
    shown = findings.importances[:RANKED]
    what = "log loss" if isinstance(findings.prepared.target, ClassTarget) else "RMSE (in standard deviations)"
    svg = ranking([(i.name, i.rise, i.spread) for i in shown], f"rise of the {what}", "Importance of the columns")
    more = len(findings.importances) - len(shown)
    caption = "How much worse predictions get once a column's values are dealt to other rows, and its spread."
    if more:
        caption += f" {'One more column matters' if more == 1 else f'{more} more columns matter'} less."
    return Picture("Importance of the columns", svg, caption)
