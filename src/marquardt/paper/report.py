"""The report of the paper's experiments: one HTML page with pictures, verdicts and tables, from logs alone.

What the page shows is written beside it as report.json, from which it can be drawn again without the logs.
"""

from __future__ import annotations

import math
import os
import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import jinja2
from markupsafe import Markup

from .. import files
from ..files import typed
from ..values import on_page, quoted
from . import logs
from .figures import CSS, FAMILIES, SHORT, Figure, alone, figures, sample
from .logs import Log, horizon, select
from .problems import SINE_NOISE_FLOOR
from .tables import HELD, LM_ITSELF, THE_OTHERS, UNKNOWN, Table, Verdict, tables, verdicts
from .vocabulary import COLUMNS, CONTENT, LOGS, OPTIMIZERS, TARGET_LABEL, TITLES, WHAT_THEY_ARE

FORMAT = 2  # of report.json; the first had no checksum
PAGE = "report.html"
MNIST_SIZE = 70_000
TABLES = {"sine": ("sine",), "mnist": ("table1", "table1-variance")}  # of an experiment; else the one of its name
FOLDED = ("table1-variance", "hyperparameters", "endings")  # tables to look something up in
OTHER_METHODS = "What the paper says about other methods"


@dataclass(frozen=True)
class Content:
    """All that the page shows."""

    runs: int
    statuses: dict[str, int]
    unfinished: list[str]
    hours: float
    started: list[str]  # the first and the last
    summary: str
    experiments: list[list[str]]
    machines: list[list[str]]
    verdicts: dict[str, list[Verdict]]  # by column
    tables: list[Table]
    figures: list[Figure]
    note: str = ""  # where the numbers come from, if not from logs

    def __post_init__(self) -> None:
        """They are names of files too, and a report.json may have been made by anybody."""
        for name in (*(t.name for t in self.tables), *(f.name for f in self.figures)):
            if not re.fullmatch(r"[a-z0-9-]+", name):
                raise ValueError(f"{quoted(name)} is no name of a table or a figure")


@dataclass(frozen=True)
class Report:
    """report.json: the content of the page, and the checksums of the files that were drawn from it."""

    content: Content
    written: list[str]

    @staticmethod
    def read(path: Path) -> Report:
        try:
            if path.is_symlink():
                raise files.Damaged(f"{path} is a link, which marquardt has not made")
            entries, is_sealed = files.read(path)
            version = entries.pop("format", None)
            if version != FORMAT:
                raise files.Damaged(f"{path} has the format {version!r}, this version reads {FORMAT}")
            if not is_sealed:
                raise files.Damaged(f"{path} is damaged: it has lost its checksum")
            report: Report = typed(entries, Report)
            return report
        except ValueError as error:
            reason = error if isinstance(error, files.Damaged) else f"{path} is damaged ({error})"
            raise files.Damaged(
                f"{reason}: move it away, and `marquardt paper report` writes it again from logs"
            ) from None


def write(out: Path) -> Path:
    """Everything that can be made from the logs under `out`: results.csv, figures, tables, report.json, report.html.

    If there are no logs but a report.json, the page and the figures are drawn again from that. What is there under one
    of these names and was not written here is refused by name.
    """
    out = Path(out)
    runs = logs.read_all(out)
    before = Report.read(out / CONTENT) if os.path.lexists(out / CONTENT) else None
    if not runs and before is None:
        raise ValueError(f"{out / LOGS} has no log of a run that has ended: run `marquardt paper` first")
    with files.held(out, "report"):
        made: dict[str, str] = {}
        if runs:
            content = _gathered(runs, logs.unfinished(out))
            made["results.csv"] = logs.as_csv(runs)
            made |= {f"tables/{table.name}.md": table.markdown() for table in content.tables}
        elif before is not None:
            content = before.content
        try:
            drawn = {figure.name: figure.panels() for figure in content.figures}
            made |= {f"figures/{name}.svg": alone(svgs) for name, svgs in drawn.items()}
            made[PAGE] = _page(content, drawn)
        except (ValueError, LookupError, ArithmeticError, StopIteration, jinja2.TemplateError) as error:
            reason = f"{type(error).__name__}: {error}"
            raise ValueError(f"{out / CONTENT} holds what cannot be drawn ({reason}): move it away") from error
        # report.json comes first: also if the process is killed in between, what it has written is known for its own.
        texts = {out / name: text.encode() for name, text in made.items()}
        new = {path: files.digest(text) for path, text in texts.items()}
        way = "move it away, or choose another --out"
        there = files.own(dict(new), before.written if before else (), way)
        report = Report(content, sorted(there | {*new.values()}))
        texts = {out / CONTENT: files.sealed({"format": FORMAT, **asdict(report)}), **texts}
        for path, text in texts.items():
            with files.whole(path) as put:
                put(text)
    return out / PAGE


def _gathered(runs: Sequence[Log], parts: Sequence[Path]) -> Content:
    by_column = {column: verdicts(runs, column) for column in COLUMNS if any(r.column == column for r in runs)}
    started = sorted(log.head["started"] for log in runs)
    return Content(
        runs=len(runs),
        statuses=dict(Counter(log.status for log in runs)),
        unfinished=sorted({f"{path.parent.name}/{path.name.rsplit('.', 2)[0]}" for path in parts}),
        hours=sum(seconds for log in runs if math.isfinite(seconds := log.final("seconds"))) / 3600,
        started=[started[0], started[-1]],
        summary=_summary(runs, by_column),
        experiments=_experiments(runs),
        machines=_machines(runs),
        verdicts=by_column,
        tables=tables(runs),
        figures=figures(runs),
    )


def _page(content: Content, drawn: dict[str, list[str]]) -> str:
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        finalize=on_page,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    tables_of = {name: TABLES.get(name, (name,)) for name in TITLES}
    methods = {line.method for figure in content.figures for chart in figure.charts for line in chart.lines}
    return environment.get_template("report.html.jinja").render(
        content=content,
        legend=_legend(methods),
        pictures=_by_title(lambda name: [figure for figure in content.figures if figure.experiment == name]),
        panels={name: [*map(Markup, svgs)] for name, svgs in drawn.items()},
        topics=_topics(content.verdicts),
        tables=_by_title(lambda name: [table for table in content.tables if table.name in tables_of[name]]),
        others=[table for table in content.tables if table.name not in chain(*tables_of.values())],
        folded=FOLDED,
        titles=TITLES,
        noise=f"{SINE_NOISE_FLOOR:.4f}",
        target=TARGET_LABEL,
        css=Markup(CSS),
    )


def _by_title(of: Callable[[str], list[Any]]) -> dict[str, tuple[str, list[Any]]]:
    return {name: (title, some) for name, title in TITLES.items() if (some := of(name))}


def _legend(methods: set[str]) -> dict[str, list[tuple[Markup, str, str, str]]]:
    """By family: a piece of the line, the name beside it, the full name if that is another, and what it is."""
    lines = {
        family: [
            (Markup(sample(method)), SHORT[method], OPTIMIZERS[method], WHAT_THEY_ARE[method])
            for method in members
            if method in OPTIMIZERS and method in methods
        ]
        for family, members in FAMILIES.items()
    }
    return {family: some for family, some in lines.items() if some}


def _topics(by_column: dict[str, list[Verdict]]) -> dict[str, list[dict[str, Verdict]]]:
    """{title: [{column: verdict}, …]}, a claim each; the columns are its judgements with default and tuned values."""
    judged: dict[str, dict[str, dict[str, Verdict]]] = {title: {} for title in (*TITLES.values(), OTHER_METHODS)}
    for column, some in by_column.items():
        for verdict in some:
            title = OTHER_METHODS if verdict.about == THE_OTHERS else TITLES[verdict.experiment]
            judged[title].setdefault(verdict.claim, {})[column] = verdict
    return {title: [*claims.values()] for title, claims in judged.items() if claims}


def _summary(runs: Sequence[Log], by_column: dict[str, list[Verdict]]) -> str:
    sentences = []
    for column, judged in by_column.items():
        counts = []
        for about in (LM_ITSELF, THE_OTHERS):
            count = Counter(verdict.outcome for verdict in judged if verdict.about == about)
            missing = f" ({count[UNKNOWN]} not measured)" if count[UNKNOWN] else ""
            counts.append(f"{count[HELD]} of {count.total()} about {about}{missing}")
        sentences.append(f"With {column} values these claims of the paper held: {' and '.join(counts)}.")
    digits = [log.head["data"] for log in runs if log.head["problem"] != "sine"]
    if others := sorted({data["name"] for data in digits if data["train"] + data["test"] != MNIST_SIZE}):
        sentences.append(
            f"Classification ran on {', '.join(others)}: the numbers that the paper gives for MNIST cannot be compared."
        )
    return " ".join(sentences)


def _experiments(runs: Sequence[Log]) -> list[list[str]]:
    """Data, size, length and seeds of each experiment."""
    rows = []
    for name, title in TITLES.items():
        if of_it := select(runs, name):
            head, data = of_it[0].head, of_it[0].head["data"]
            sizes = ", ".join(f"{data[key]:,} {key}" for key in ("train", "test") if data[key])
            if 0 < head.get("train_sample", 0) < data["train"]:
                sizes += f" (training loss and accuracy of {head['train_sample']:,})"
            length = f"{horizon(of_it)} steps" + (f", {head['seconds']:g} s" if head["seconds"] else "")
            seeds = len({log.seed for log in of_it})
            rows.append([title, data["name"], sizes, data["source"], length, str(seeds), str(len(of_it))])
    return rows


def _machines(runs: Sequence[Log]) -> list[list[str]]:
    """Machine, versions and number of runs, one row for each that differs."""

    def words(values: dict[str, Any]) -> str:
        return ", ".join(f"{key} {value}" for key, value in values.items() if value is not None)

    count = Counter(
        (words({**log.head["machine"], "device": log.head["device"]}), words(log.head["versions"])) for log in runs
    )
    return [[*texts, str(number)] for texts, number in count.items()]
