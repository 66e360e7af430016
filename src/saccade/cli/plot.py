"""Pictures of measured rows and of the cost model, written as SVG or PNG. matplotlib is imported when first used."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from saccade import cost

from .bench.report import Row, Verdict, verdicts

OURS, OTHER, BAR = "#0b6e99", "#e08e0b", "#c0392b"
NAMES = {"naive": "naive", "flex": "FlexAttention", "onnxruntime": "ONNX Runtime"}


def _figure(panels: Sequence[tuple[Callable[[Any], None], float]], path: Path, *, width: float = 9.0) -> None:
    if path.suffix not in (".svg", ".png"):
        raise ValueError(f"a picture is written as .svg or .png, got {path.name!r}")
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    # the same rows give the same bytes
    mpl.rcParams.update({"svg.hashsalt": "saccade", "svg.fonttype": "none", "font.size": 9})
    heights = [height for _, height in panels]
    figure, axes = plt.subplots(
        len(panels), 1, figsize=(width, sum(heights)), height_ratios=heights, squeeze=False, layout="constrained"
    )
    for (draw, _), axis in zip(panels, axes[:, 0], strict=True):
        axis.spines[["top", "right"]].set_visible(False)
        draw(axis)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150, metadata={"Date": None} if path.suffix == ".svg" else None)
    plt.close(figure)


def bench_plot(rows: Sequence[Row], path: Path) -> None:
    """Draw rows of `saccade bench`: ratios beside their bars, tiled beside naive over T, the sweep over small shapes.

    Raises ValueError when no row has a figure to draw, or for a suffix other than .svg and .png.
    """
    told = [v for v in verdicts(rows) if v.ours.against and v.figure > 0]
    panels: list[tuple[Callable[[Any], None], float]] = []
    ratios = [v for v in told if v.group not in ("naive", "sweep", "sweep-backward")]
    if ratios:
        panels.append((lambda axis: _ratios(axis, ratios), 1.2 + 0.32 * len(ratios)))
    for group, title in (
        ("naive", "tiled beside naive"),
        ("sweep", "beside torch SDPA, small shapes"),
        ("sweep-backward", "backward beside torch SDPA, small shapes"),
    ):
        chosen = [v for v in told if v.group == group]
        if chosen:
            panels.append((lambda axis, c=chosen, t=title: _over_length(axis, c, t), 3.2))
    if not panels:
        raise ValueError("no row has both our figure and its peer's: nothing to draw")
    _figure(panels, path)


def _ratios(axis: Any, told: Sequence[Verdict]) -> None:
    places = range(len(told))
    axis.barh(places, [v.figure for v in told], color=OURS, height=0.6, label="saccade")
    for peer, marker in (("naive", "o"), ("flex", "D"), ("onnxruntime", "s")):
        points = [
            (v.peers[v.ours.against].median / v.peers[peer].median, place)
            for place, v in enumerate(told)
            if peer in v.peers and v.peers[peer].samples
        ]
        if points:
            axis.plot(*zip(*points, strict=True), marker, color=OTHER, mec="white", ms=6, label=NAMES[peer])
    for place, v in enumerate(told):
        axis.plot([v.bar, v.bar], [place - 0.42, place + 0.42], color=BAR, lw=2, label=None if place else "the bar")
        share = f", {v.ours.fraction:.0%} of ceiling" if v.ours.fraction else ""
        axis.annotate(f" {v.figure:.1f} ×{share}", (max(v.figure, v.bar), place), va="center", fontsize=8)
    axis.set_yticks(places, [v.case for v in told], fontsize=8)
    axis.invert_yaxis()
    axis.set_xscale("log", base=2)
    axis.xaxis.set_major_formatter("{x:g}")
    axis.set_xlim(min(0.5, *(0.8 * v.figure for v in told)), 3 * max(max(v.figure, v.bar) for v in told))
    axis.axvline(1, color="black", lw=0.8)
    axis.legend(fontsize=8, frameon=False, loc="lower right")
    ours = told[0].ours
    axis.set_xlabel("times as fast as torch SDPA in the same run")
    axis.set_title(f"{ours.device}\n{ours.driver}; commit {ours.commit}", fontsize=8, loc="right")


def _over_length(axis: Any, told: Sequence[Verdict], title: str) -> None:
    lines: dict[str, list[tuple[int, float]]] = {}
    for v in told:
        batch, length = v.ours.shape.split("x")[:2]
        label = f"{v.ours.dtype} {v.ours.mask or 'full'} B={batch}"
        lines.setdefault(label, []).append((int(length), v.figure))
    for label, points in lines.items():
        axis.plot(*zip(*sorted(points), strict=True), marker="o", ms=3, lw=1.2, label=label)
    axis.axhline(max(v.bar for v in told), color=BAR, lw=1)
    axis.set_xscale("log", base=2)
    axis.set_yscale("log", base=2)
    axis.yaxis.set_major_formatter("{x:g}")
    axis.set_xlabel("T")
    axis.set_ylabel("times as fast")
    axis.set_title(title, fontsize=9, loc="left")
    axis.legend(fontsize=7, ncols=2, frameon=False)


def cost_plot(verdict: Sequence[cost.Verdict], machine: cost.Device, path: Path) -> None:
    """Draw the score matrix in both units, and where each verdict stands under the device's roofline."""
    _figure([(_scores, 3.2), (lambda axis: _roofline(axis, verdict, machine), 3.6)], path, width=7.0)


def _scores(axis: Any) -> None:
    lengths = [512 * 4**n for n in range(5)]
    axis.plot(lengths, [cost.score_matrix_bytes(t) / 1024**3 for t in lengths], marker="o", color=OURS)
    for t in lengths:
        at = (t, cost.score_matrix_bytes(t) / 1024**3)
        axis.annotate(cost.size(cost.score_matrix_bytes(t)), at, (6, -8), textcoords="offset points", fontsize=7)
    axis.set_xscale("log", base=2)
    axis.set_yscale("log", base=2)
    axis.set_xlim(256, 2**20)
    axis.set_ylim(2**-13, 2**8)
    axis.set_xlabel("T")
    axis.set_ylabel("GiB a head a layer")
    other = axis.secondary_yaxis("right", functions=(lambda x: x * 1024**3 / 1e9, lambda x: x * 1e9 / 1024**3))
    other.set_ylabel("GB")
    axis.set_title("the score matrix nobody stores, two bytes a score", fontsize=9, loc="left")


def _roofline(axis: Any, verdict: Sequence[cost.Verdict], machine: cost.Device) -> None:
    dtype = verdict[0].work.dtype if verdict else "bfloat16"
    ridge, peak = machine.ridge(dtype), machine.peak(dtype)
    reach = [0.25, ridge, max(ridge * 64, *(2 * v.work.intensity for v in verdict))]
    axis.plot(reach, [min(peak, x * machine.bandwidth) / 1e12 for x in reach], color="black", lw=1.2)
    axis.axvline(ridge, color=OTHER, lw=0.8, ls=":")
    for v, marker in zip(verdict, "osD^v", strict=False):
        label = f"{v.work.kind}: {v.bound}-bound, at least {cost.duration(v.seconds)}"
        axis.plot([v.work.intensity], [v.flops_per_second / 1e12], marker, color=OURS, ms=7, mec="white", label=label)
    axis.legend(fontsize=8, frameon=False, loc="lower right")
    axis.set_xscale("log")
    axis.set_yscale("log")
    axis.set_xlabel(f"flop a byte (ridge {ridge:.1f})")
    axis.set_ylabel("attainable TFLOP/s")
    axis.set_title(f"roofline of {machine.name}, {dtype}", fontsize=9, loc="left")
