"""What the pictures of the site share: colours that are legible on white and on dark grey, and no background."""

from pathlib import Path

import matplotlib
from matplotlib.figure import Figure

ASSETS = Path(__file__).parents[1] / "assets"
GREY, BLUE, ORANGE, GREEN, RED = "#808891", "#3b82f6", "#e8740c", "#1fa06a", "#e0445a"

matplotlib.rcParams.update(
    {
        "axes.edgecolor": GREY,
        "axes.labelcolor": GREY,
        "axes.titlecolor": GREY,
        "axes.facecolor": "none",
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.titlesize": "medium",
        "figure.facecolor": "none",
        "font.size": 10,
        "legend.frameon": False,
        "legend.labelcolor": GREY,
        "svg.hashsalt": "marquardt",  # the same file every time
        "text.color": GREY,
        "xtick.color": GREY,
        "ytick.color": GREY,
    }
)


def figure(width: float, height: float) -> Figure:
    return Figure(figsize=(width, height), layout="constrained")


def save(picture: Figure, name: str) -> None:
    picture.savefig(ASSETS / name, metadata={"Date": None} if name.endswith("svg") else None, dpi=150)
