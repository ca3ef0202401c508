"""Figures of the paper's experiments: which there are, with their titles and captions."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

from . import panels
from .curves import Chart, Fit, Group, accuracy_over_seconds, fits, groups, loss_over_seconds, over_steps
from .logs import Log, equal_seconds

FITTED = ("lm", "lm-paper", "kfac", "adam")  # whose fits of the sine are shown
FIRST, MORE = ("test_accuracy", "train_loss"), ("train_accuracy", "test_loss")  # of the paper's four measures


@dataclass(frozen=True)
class Figure:
    name: str
    experiment: str
    title: str
    caption: str
    charts: list[Chart] = field(default_factory=list)
    fits: list[Fit] = field(default_factory=list)
    folded: bool = False  # on the page

    def panels(self) -> list[str]:
        """As SVG."""
        return [*(panel for chart in self.charts for panel in panels.panels(chart)), *map(panels.fit_panel, self.fits)]


def figures(logs: Sequence[Log]) -> list[Figure]:
    """Every figure that the logs have something for."""
    tuned = [
        replace(
            made,
            name=f"{made.name}-tuned",
            title=f"{made.title}, tuned values",
            caption=f"{made.caption} A dagger marks a method that was not tuned: it has its default values.".strip(),
            folded=True,
        )
        for made in _compared(logs, "tuned")
    ]
    ablation = [
        *_sine_ablation(groups(logs, "ablation-sine", "default")),
        *_mnist(groups(logs, "ablation-mnist", "default"), "ablation-mnist", "the parts one by one"),
    ]
    return [*_compared(logs, "default"), *tuned, *ablation]


def _compared(logs: Sequence[Log], column: str) -> Iterator[Figure]:
    yield from _sine(groups(logs, "sine", column))
    digits = groups(logs, "mnist", column)
    yield from _mnist(digits, "mnist", "test accuracy and training loss over steps")
    if digits:
        yield Figure(
            "mnist-seconds",
            "mnist",
            f"{_data_name(digits)}: test accuracy over seconds",
            "Each line ends with the fastest run of its method.",
            [accuracy_over_seconds(digits)],
        )
    yield from _mnist(groups(logs, "swapped", column), "swapped", "train and test sets swapped, one pass")


def _sine(groups: Sequence[Group]) -> Iterator[Figure]:
    if not groups:
        return
    yield Figure(
        "fig1-iterations",
        "sine",
        "Figure 1: the error on the sine over iterations",
        "The first panel is the paper’s Figure 1a, all of them together its Figure 1b.",
        [over_steps(groups, "train_loss")],
    )
    if equal_seconds(run for group in groups for run in group.runs) > 0:
        title = "Figure 1b again: the error on the sine over seconds"
        yield Figure("fig1-seconds", "sine", title, "The same runs.", [loss_over_seconds(groups)])
    fitted = fits(groups, FITTED)
    if fitted:
        yield Figure(
            "sine-fits",
            "sine",
            "What the network has learned of the sine",
            "The samples lie in the grey band, the line is the network of the first seed.",
            fits=fitted,
        )


def _mnist(groups: Sequence[Group], experiment: str, what: str) -> Iterator[Figure]:
    if groups:
        title = f"{_data_name(groups)}: {what}"
        yield Figure(experiment, experiment, title, "", [over_steps(groups, key) for key in FIRST])
        more = f"{title.removesuffix('test accuracy and training loss over steps')}".rstrip(" ,:")
        yield Figure(
            f"{experiment}-more",
            experiment,
            f"{more}: training accuracy and test loss",
            "",
            [over_steps(groups, key) for key in MORE],
            folded=True,
        )


def _sine_ablation(groups: Sequence[Group]) -> Iterator[Figure]:
    if groups:
        charts = [over_steps(groups, "train_loss")]
        yield Figure("ablation-sine", "ablation-sine", "The sine: the parts one by one", "", charts)


def _data_name(groups: Sequence[Group]) -> str:
    return str(groups[0].runs[0].head["data"]["name"])
