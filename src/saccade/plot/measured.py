"""Pictures of measured rows: ratios with their targets, and ratios over lengths."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .canvas import BAR, INK, OURS, SERIES, drawing
from .labels import shared, words
from .providers import provider

if TYPE_CHECKING:
    from ..cli.bench.report import Verdict

# the smallest text, in points: 12 pixels
TEXT = 9
OVER_LENGTH = {
    "naive": "tiled compared with naive",
    "sweep": "compared with torch SDPA, small shapes",
    "sweep-backward": "backward compared with torch SDPA, small shapes",
}


def ratios(verdicts: Sequence[Verdict], path: str | Path) -> None:
    """Draw verdicts of `saccade bench`: ratios with their targets, tiled over naive for each T, the sweep of shapes.

    Raises ValueError if none has a figure to draw, or for a suffix other than .svg and .png.
    """
    shown = [v for v in verdicts if v.against and v.figure > 0]
    panels: list[tuple[Callable[[Any], None], float]] = []
    alone = [v for v in shown if v.group not in OVER_LENGTH]
    if alone:
        panels.append((lambda axis: _ratios(axis, alone), 1.2 + 0.32 * len(alone)))
    for group, title in OVER_LENGTH.items():
        chosen = [v for v in shown if v.group == group]
        if chosen:
            panels.append((lambda axis, c=chosen, t=title: _over_length(axis, c, t), 3.2))
    if not panels:
        raise ValueError("no row has both Saccade's figure and its peer's: nothing to draw")
    with drawing(path, 9.0, [height for _, height in panels]) as axes:
        for (draw, _), axis in zip(panels, axes, strict=True):
            draw(axis)


def _ratios(axis: Any, shown: Sequence[Verdict]) -> None:
    places = range(len(shown))
    axis.barh(places, [v.figure - 1 for v in shown], left=1, color=OURS, height=0.5, label=provider("saccade").name)
    figures = [1.0, *(v.figure for v in shown), *(v.bar for v in shown if v.bar)]
    for name in dict.fromkeys(name for v in shown for name in v.peers if name != v.against):
        points = [
            (v.peers[v.against].median / v.peers[name].median, place)
            for place, v in enumerate(shown)
            if name in v.peers and v.peers[name].measured
        ]
        if points:
            figures += [figure for figure, _ in points]
            peer = provider(name)
            style = {"color": peer.colours.light, "mec": "white", "ms": 7, "label": peer.name}
            axis.plot(*zip(*points, strict=True), peer.mark, **style)
    same, labels = shared([words(v.ours) for v in shown])
    for place, v in enumerate(shown):
        axis.plot([v.bar, v.bar], [place - 0.4, place + 0.4], color=BAR, lw=1.5, label=None if place else "the target")
        share = "" if math.isnan(v.ours.fraction) else f", {v.ours.fraction:.0%} of ceiling"
        # figures are a column of their own, which no bar reaches
        at = axis.get_yaxis_transform()
        axis.text(1.02, place, f"{v.figure:.1f} ×{share}", transform=at, va="center", fontsize=TEXT)
    axis.set_yticks(places, [", ".join(label) for label in labels], fontsize=TEXT)
    axis.invert_yaxis()
    axis.set_xscale("log", base=2)
    axis.xaxis.set_major_formatter("{x:g}")
    axis.set_xlim(0.9 * min(figures), 1.1 * max(figures))
    axis.axvline(1, color=INK, lw=0.8)
    axis.tick_params(axis="y", length=0)
    axis.figure.legend(*axis.get_legend_handles_labels(), loc="outside lower left", ncols=4)
    ours, peer = shown[0].ours, provider(shown[0].against).name
    common = f"; {', '.join(same)}" if same else ""
    axis.set_xlabel(f"times as fast as {peer} in the same run{common}")
    axis.set_title(f"{ours.device}\n{ours.driver}; commit {ours.commit}", fontsize=TEXT)


def _over_length(axis: Any, shown: Sequence[Verdict], title: str) -> None:
    lines: dict[tuple[str, str], list[tuple[int, float]]] = {}
    for v in shown:
        batch, length = v.ours.shape.split("x")[:2]
        key = f"{v.ours.dtype}, B = {batch}", v.ours.mask or "full"
        lines.setdefault(key, []).append((int(length), v.figure))
    colours = dict(zip(dict.fromkeys(kind for kind, _ in lines), SERIES, strict=False))
    for (kind, mask), points in lines.items():
        style = "--" if mask == "full" else "-"
        at = zip(*sorted(points), strict=True)
        axis.loglog(*at, style, marker="o", ms=3, lw=1.2, label=f"{kind}, {mask}", color=colours[kind], base=2)
    axis.axhline(max(v.bar for v in shown), color=BAR, lw=1)
    axis.xaxis.set_major_formatter("{x:g}")
    axis.yaxis.set_major_formatter("{x:g}")
    axis.set(xlabel="T", ylabel="times as fast")
    axis.set_title(title)
    axis.legend(loc="upper left", bbox_to_anchor=(1, 1))
