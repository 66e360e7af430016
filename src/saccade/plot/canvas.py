"""What the pictures share: colours, and figures that need no display."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from .cells import ALL, SOME

SUFFIXES = (".svg", ".png")
# ours first; told apart without red and green
OURS, OTHER, BAR, LIGHT = ALL, "#d98e04", "#b8432f", SOME
SERIES = (OURS, OTHER, "#0f9d78", "#8a5fa8", BAR, LIGHT, "#5b6770", "#c77cae")
MARKERS = "osD^vPX*"
STYLE: dict[Any, Any] = {
    "svg.hashsalt": "saccade",
    "svg.fonttype": "none",
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.titlesize": 9,
    "axes.titlelocation": "left",
    "legend.fontsize": 8,
    "legend.frameon": False,
}


def checked(path: str | Path) -> Path:
    """path, of a picture to be written; raises ValueError for a suffix other than .svg and .png."""
    path = Path(path)
    if path.suffix not in SUFFIXES:
        raise ValueError(f"a picture is written as {' or '.join(SUFFIXES)}, got {path.name!r}")
    return path


@contextmanager
def drawing(
    path: str | Path, width: float, heights: Sequence[float], *, across: int = 1, title: str = ""
) -> Generator[list[Any]]:
    """The axes of a figure, row by row, which is written to path when the block ends.

    width of the figure and heights of its rows of `across` panels, in inches. Raises ValueError as `checked`.
    """
    path = checked(path)
    import matplotlib as mpl
    from matplotlib.figure import Figure

    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(width, sum(heights)), layout="constrained")
        axes = figure.subplots(len(heights), across, height_ratios=heights, squeeze=False)
        if title:
            figure.suptitle(title, fontsize=10)
        yield list(axes.flat)
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, dpi=150, metadata={"Date": None} if path.suffix == ".svg" else None)
