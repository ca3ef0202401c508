"""The report of the paper's experiments: one HTML page with verdicts, tables and figures, from logs alone."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote

import jinja2

from .. import files
from . import figures, logs, styles, tables
from .logs import Log, horizon, select
from .tables import Table
from .verdicts import HELD, LM_ITSELF, THE_OTHERS, UNKNOWN, Verdict, verdicts
from .vocabulary import COLUMNS, LOGS, TITLES

MNIST_SIZE = 70_000
TABLES = {"sine": ("sine",), "mnist": ("table1", "table1-variance")}  # of a section; elsewhere the one of its name


@dataclass(frozen=True)
class Section:
    name: str
    title: str
    figures: list[figures.Drawn]
    tables: list[Table]


def write(out: Path) -> Path:
    """Everything that can be made from the logs under `out`: results.csv, figures, tables and report.html."""
    out = Path(out)
    found = logs.read_all(out)
    if not found:
        raise ValueError(f"{out / LOGS} has no log of a run that has ended: run `marquardt paper` first")
    page = out / "report.html"
    with files.held(out, "report"):
        logs.write_csv(found, out / "results.csv")
        made = tables.tables(found)
        for table in made:
            with files.whole(out / "tables" / f"{table.name}.md") as write:
                write(table.markdown())
        drawn = figures.draw(found, out / "figures")
        with files.whole(page) as write:
            write(_page(found, made, drawn, logs.unfinished(out)))
    return page


def _page(found: Sequence[Log], made: Sequence[Table], drawn: Sequence[figures.Drawn], parts: Sequence[Path]) -> str:
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    by_column = {column: verdicts(found, column) for column in COLUMNS if any(r.column == column for r in found)}
    return environment.get_template("report.html.jinja").render(
        summary=_summary(found, by_column),
        verdicts=by_column,
        sections=(sections := _sections(made, drawn)),
        others=[table for table in made if not any(table in section.tables for section in sections)],
        experiments=_experiments(found),
        machines=_machines(found),
        statuses=Counter(log.status for log in found),
        runs=len(found),
        hours=sum(seconds for log in found if math.isfinite(seconds := log.final("seconds"))) / 3600,
        started=sorted(log.head["started"] for log in found),
        unfinished=sorted({f"{path.parent.name}/{logs.run_of(path)}" for path in parts}),
        image=_data_uri,
        styles=styles,
    )


def _sections(made: Sequence[Table], drawn: Sequence[figures.Drawn]) -> list[Section]:
    sections = []
    for name, title in TITLES.items():
        mine = [table for table in made if table.name in TABLES.get(name, (name,))]
        if mine:
            sections.append(Section(name, title, [figure for figure in drawn if figure.experiment == name], mine))
    return sections


def _summary(found: Sequence[Log], by_column: dict[str, list[Verdict]]) -> str:
    sentences = []
    for column, judged in by_column.items():
        counts = []
        for about in (LM_ITSELF, THE_OTHERS):
            count = Counter(verdict.outcome for verdict in judged if verdict.about == about)
            missing = f" ({count[UNKNOWN]} not measured)" if count[UNKNOWN] else ""
            counts.append(f"{count[HELD]} of {count.total()} about {about}{missing}")
        sentences.append(f"With {column} hyper-parameters these claims of the paper held: {' and '.join(counts)}.")
    digits = [log.head["data"] for log in found if log.head["problem"] != "sine"]
    others = sorted({data["name"] for data in digits if data["train"] + data["test"] != MNIST_SIZE})
    if others:
        sentences.append(f"Classification ran on {', '.join(others)}: the paper's figures for MNIST are no yardstick.")
    return " ".join(sentences)


def _experiments(found: Sequence[Log]) -> list[tuple[str, ...]]:
    """Data, size, length and seeds of each experiment."""
    rows: list[tuple[str, ...]] = []
    for name, title in TITLES.items():
        runs = select(found, name)
        if runs:
            head, data = runs[0].head, runs[0].head["data"]
            sizes = ", ".join(f"{data[key]:,} {key}" for key in ("train", "test") if data.get(key))
            if 0 < head.get("train_sample", 0) < data["train"]:
                sizes += f" (training loss and accuracy of {head['train_sample']:,})"
            length = f"{horizon(runs)} steps" + (f", {head['seconds']:g} s" if head["seconds"] else "")
            seeds = len({log.seed for log in runs})
            rows.append((title, data["name"], sizes, data["source"], length, str(seeds), str(len(runs))))
    return rows


def _machines(found: Sequence[Log]) -> list[tuple[str, ...]]:
    """Machine, versions and number of runs, wherever they differ."""
    count: Counter[tuple[str, str]] = Counter()
    for log in found:
        machine = {**log.head["machine"], "device": log.head["device"]}
        texts = (
            ", ".join(f"{key} {value}" for key, value in values.items() if value is not None)
            for values in (machine, log.head["versions"])
        )
        count[next(texts), next(texts)] += 1
    return [(*texts, str(runs)) for texts, runs in count.items()]


THEME = f"""<style>
:root {{ --ink: {styles.INK}; --paper: {styles.PAPER}; }}
@media (prefers-color-scheme: dark) {{ :root {{ --ink: {styles.DARK_INK}; --paper: {styles.DARK_PAPER}; }} }}
</style>"""


def _data_uri(figure: figures.Drawn) -> str:
    """The SVG as a data URI, its ink and paper those of the page, light or dark."""
    svg = figure.path.read_text(encoding="utf-8")
    svg = svg.replace(styles.INK, "var(--ink)").replace(styles.PAPER, "var(--paper)")
    start = svg.index(">", svg.index("<svg")) + 1
    return "data:image/svg+xml," + quote(svg[:start] + THEME + svg[start:], safe=" :/=;,.-")
