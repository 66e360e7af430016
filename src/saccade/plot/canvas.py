"""The colours and the style of all pictures, and figures that need no display."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from .cells import ALL, SOME

SUFFIXES = (".svg", ".png")
# as in lab/static/style.css: the page, text, secondary text, thin lines
PAGE, INK, SOFT, LINE = "#faf8f4", "#1b2430", "#55606d", "#dedad2"
# Saccade first; readers who cannot tell red from green can tell these colours apart
OURS, OTHER, BAR, LIGHT = ALL, "#d98e04", "#b4462c", SOME
SERIES = (OURS, OTHER, "#0f9d78", "#8a5fa8", BAR, LIGHT, "#5b6770", "#c77cae")
# the size of every title, in points
TITLE = 10
STYLE: dict[Any, Any] = {
    "svg.hashsalt": "saccade",
    "svg.fonttype": "none",
    "font.size": 9,
    "text.color": INK,
    "figure.facecolor": PAGE,
    "savefig.facecolor": PAGE,
    "axes.facecolor": PAGE,
    "axes.edgecolor": SOFT,
    "axes.labelcolor": INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.titlesize": TITLE,
    "axes.titlelocation": "left",
    "figure.titlesize": TITLE,
    "grid.color": LINE,
    "legend.fontsize": 9,
    "legend.frameon": False,
    "xtick.color": SOFT,
    "ytick.color": SOFT,
}


def checked(path: str | Path) -> Path:
    """The path of a picture to be written; raises ValueError for a suffix other than .svg and .png."""
    path = Path(path)
    if path.suffix not in SUFFIXES:
        raise ValueError(f"a picture is written as {' or '.join(SUFFIXES)}, got {path.name!r}")
    return path


@contextmanager
def drawing(
    path: str | Path, width: float, heights: Sequence[float], *, across: int = 1, title: str = ""
) -> Generator[list[Any]]:
    """The axes of a figure, row by row. The figure is written to path when the block ends.

    width: the figure's, in inches. heights: those of its rows of `across` panels. Raises ValueError as `checked` does.
    """
    path = checked(path)
    import matplotlib as mpl
    from matplotlib.figure import Figure

    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(width, sum(heights)), layout="constrained")
        axes = figure.subplots(len(heights), across, height_ratios=heights, squeeze=False)
        if title:
            figure.suptitle(title, x=0.01, horizontalalignment="left")
        yield list(axes.flat)
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, dpi=150, metadata={"Date": None} if path.suffix == ".svg" else None)
