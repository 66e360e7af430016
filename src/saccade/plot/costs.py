"""Pictures of the cost model: a mask, the size of its score matrix, and a device's roofline."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from textwrap import shorten
from typing import Any

from .. import cost
from ..mask import Mask
from ..mask.drawing import cell_states
from .canvas import BAR, INK, OTHER, OURS, SOFT, drawing
from .cells import ALL, NONE, SOME

# cells per side of the mask's picture
CELLS = 128


def costs(
    verdict: Sequence[cost.Verdict],
    machine: cost.Device,
    path: str | Path,
    *,
    mask: Mask | None = None,
    queries: int = 0,
    keys: int = 0,
    batch: int = 1,
) -> None:
    """Draw the mask of the first sequence, if there is one, the score matrix's size, and a roofline, side by side.

    verdict: the points under the roofline of `machine`; queries, keys, batch: the sizes of the call that these are for.
    """
    panels = 2 if mask is None else 3
    with drawing(path, 4.6 * panels, [4.2], across=panels) as axes:
        if mask is not None:
            _mask(axes[0], mask, queries, keys, batch)
        _scores(axes[-2], queries, keys)
        _roofline(axes[-1], verdict, machine)


def _mask(axis: Any, mask: Mask, queries: int, keys: int, batch: int) -> None:
    from matplotlib.colors import ListedColormap
    from matplotlib.patches import Patch

    states = cell_states(mask, queries, keys, B=batch, size=CELLS)
    # with equal scales, a picture of few queries and many keys would be a line
    aspect = "equal" if max(queries, keys) <= 4 * min(queries, keys) else "auto"
    colours = NONE, SOME, ALL
    axis.imshow(states, cmap=ListedColormap(colours), vmin=0, vmax=2, extent=(0, keys, queries, 0), aspect=aspect)
    axis.set(xlabel="key", ylabel="query")
    axis.set_title(shorten(repr(mask), 48, placeholder="…"))
    texts = "nothing allowed", "a part of a cell", "all of it"
    handles = [Patch(facecolor=c, edgecolor=SOFT, lw=0.4, label=text) for c, text in zip(colours, texts, strict=True)]
    axis.legend(handles=handles, loc="upper center", bbox_to_anchor=(0.5, -0.13), ncols=3, handlelength=1)


def _scores(axis: Any, queries: int, keys: int) -> None:
    def gib(*lengths: int) -> float:
        return cost.score_matrix_bytes(*lengths) / 1024**3

    lengths = [512 * 4**n for n in range(5)]
    axis.loglog(lengths, [gib(t) for t in lengths], marker="o", color=OURS, base=2)
    for t in lengths:
        text = cost.size(cost.score_matrix_bytes(t))
        axis.annotate(text, (t, gib(t)), (6, -8), textcoords="offset points", fontsize=8)
    if queries and keys:
        label = f"{queries} × {keys}: {cost.size(cost.score_matrix_bytes(queries, keys))}"
        axis.plot([(queries * keys) ** 0.5], [gib(queries, keys)], "D", color=BAR, ms=7, mec="white", label=label)
        axis.legend(loc="upper left")
    axis.set(ylim=(2**-13, 2**9), xlabel="queries = keys", ylabel="GiB per head and layer")
    axis.set_xlim(min(256, axis.get_xlim()[0]), max(2**20, axis.get_xlim()[1]))
    axis.set_title("score matrix, 2 bytes per score (never stored)")


def _roofline(axis: Any, verdict: Sequence[cost.Verdict], machine: cost.Device) -> None:
    dtype = verdict[0].work.dtype if verdict else "bfloat16"
    ridge, peak = machine.ridge(dtype), machine.peak(dtype)
    reach = [0.25, ridge, max(ridge * 64, *(2 * v.work.intensity for v in verdict))]
    roof = [min(peak, x * machine.bandwidth) / 1e12 for x in reach]
    axis.loglog(reach, roof, color=INK, lw=1.2)
    axis.plot([ridge, ridge], [roof[0], peak / 1e12], color=OTHER, lw=1, ls=":", label=f"ridge: {ridge:.1f} flop/byte")
    for v, marker in zip(verdict, "osD^v", strict=False):
        label = f"{v.work.kind}: {v.bound}-bound, at least {cost.duration(v.seconds)}"
        axis.plot([v.work.intensity], [v.flops_per_second / 1e12], marker, color=OURS, ms=7, mec="white", label=label)
    # room above the roof for the legend, which then covers no line
    axis.set_ylim(min(roof[0], *(v.flops_per_second / 2e12 for v in verdict)), peak / 1e12 * 40)
    axis.legend(loc="upper left")
    axis.set(xlabel="flop per byte", ylabel="attainable TFLOP/s")
    axis.set_title(f"roofline of {machine.name}, {dtype}")
