"""Pictures of measured rows: ratios with their bars, rates of several providers, seconds over lengths."""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .canvas import BAR, LIGHT, MARKERS, OTHER, OURS, SERIES, drawing

if TYPE_CHECKING:
    from ..cli.bench.report import Verdict

NAMES = {"naive": "naive", "flex": "FlexAttention", "onnxruntime": "ONNX Runtime"}
OVER_LENGTH = {
    "naive": "tiled compared with naive",
    "sweep": "compared with torch SDPA, small shapes",
    "sweep-backward": "backward compared with torch SDPA, small shapes",
}


def ratios(verdicts: Sequence[Verdict], path: str | Path) -> None:
    """Draw verdicts of `saccade bench`: ratios with their bars, tiled over naive for each T, the sweep of small shapes.

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
    axis.barh(places, [v.figure for v in shown], color=OURS, height=0.6, label="saccade")
    for peer, marker in (("naive", "o"), ("flex", "D"), ("onnxruntime", "s")):
        points = [
            (v.peers[v.against].median / v.peers[peer].median, place)
            for place, v in enumerate(shown)
            if peer in v.peers and v.peers[peer].measured
        ]
        if points:
            axis.plot(*zip(*points, strict=True), marker, color=OTHER, mec="white", ms=6, label=NAMES[peer])
    for place, v in enumerate(shown):
        axis.plot([v.bar, v.bar], [place - 0.42, place + 0.42], color=BAR, lw=2, label=None if place else "the bar")
        share = "" if math.isnan(v.ours.fraction) else f", {v.ours.fraction:.0%} of ceiling"
        axis.annotate(f" {v.figure:.1f} ×{share}", (max(v.figure, v.bar), place), va="center", fontsize=8)
    axis.set_yticks(places, [v.case for v in shown], fontsize=8)
    axis.invert_yaxis()
    axis.set_xscale("log", base=2)
    axis.xaxis.set_major_formatter("{x:g}")
    axis.set_xlim(min(0.5, *(0.8 * v.figure for v in shown)), 3 * max(max(v.figure, v.bar) for v in shown))
    axis.axvline(1, color="black", lw=0.8)
    axis.figure.legend(*axis.get_legend_handles_labels(), loc="outside lower left", ncols=4)
    ours, peer = shown[0].ours, shown[0].against
    axis.set_xlabel(f"times as fast as {'torch SDPA' if peer == 'sdpa' else peer} in the same run")
    axis.set_title(f"{ours.device}\n{ours.driver}; commit {ours.commit}", fontsize=8, loc="right")


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
    axis.legend(fontsize=7, loc="upper left", bbox_to_anchor=(1, 1))


def rates(
    cases: Mapping[str, Mapping[str, float]], unit: str, path: str | Path, *, title: str = "", log: bool = False
) -> None:
    """Draw one line per case with a mark for each provider's figure; the first provider is Saccade.

    cases: for the name of each case, figures in `unit` by provider; log: use a logarithmic axis. Raises ValueError
    without cases, or for more providers than there are colours.
    """
    providers = list(dict.fromkeys(name for figures in cases.values() for name in figures))
    if not cases or len(providers) > len(SERIES):
        raise ValueError(f"{len(cases)} cases of {len(providers)} providers: nothing to draw; at most {len(SERIES)}")
    with _cases(cases, unit, path, title, log) as axis:
        for name, colour, marker in zip(providers, SERIES, MARKERS, strict=False):
            points = [(figures[name], place) for place, figures in enumerate(cases.values()) if name in figures]
            axis.plot(*zip(*points, strict=True), marker, color=colour, mec="white", ms=7, label=name)
        axis.figure.legend(loc="outside lower left", ncols=4)


def spread(
    cases: Mapping[str, Sequence[float]], unit: str, path: str | Path, *, best: Callable[[Sequence[float]], float] = min
) -> None:
    """Draw the figures of a search: a mark for every figure of a case, in `unit`, and the best in Saccade's colour."""
    with _cases(cases, unit, path, "", True) as axis:
        for place, figures in enumerate(cases.values()):
            axis.plot(figures, [place] * len(figures), "|", color=LIGHT, ms=8)
            axis.plot([best(figures)], [place], "o", color=OURS, mec="white", ms=7)


@contextmanager
def _cases(cases: Iterable[str], unit: str, path: str | Path, title: str, log: bool) -> Generator[Any]:
    names = list(cases)
    with drawing(path, 9.0, [1.3 + 0.24 * len(names)]) as (axis,):
        yield axis
        axis.set_yticks(range(len(names)), names, fontsize=8)
        axis.set_ylim(len(names) - 0.5, -0.5)
        axis.grid(axis="y", color="#d8d8d4", lw=0.8)
        axis.set_axisbelow(True)
        if log:
            axis.set_xscale("log")
        else:
            axis.set_xlim(left=0)
        axis.set_xlabel(unit)
        axis.set_title(title)


def over_tokens(lines: Mapping[str, Mapping[str, Sequence[tuple[int, float]]]], path: str | Path) -> None:
    """Draw seconds over tokens: for each provider and pass ("forward" dashed, "both" solid), (tokens, seconds)."""
    with drawing(path, 7.0, [4.0]) as (axis,):
        for (name, passes), colour in zip(lines.items(), SERIES, strict=False):
            for kind, points in passes.items():
                style, label = ("-", name) if kind == "both" else ("--", None)
                axis.loglog(*zip(*points, strict=True), style, marker="o", ms=3, color=colour, label=label)
        axis.set(xlabel="tokens", ylabel="seconds")
        axis.set_title("forward dashed, with backward solid")
        axis.legend()
