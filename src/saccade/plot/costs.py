"""The cost model: a mask, the size of its score matrix, and a device's roofline."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from textwrap import shorten
from typing import Any

from saccade import cost
from saccade.mask import Mask
from saccade.mask.drawing import cell_states

from .canvas import OTHER, OURS, drawing
from .cells import ALL, NONE, SOME

# of the mask's picture, to a side
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
    """Draw the first sequence's mask if there is one, the score matrix's size, and each verdict under the roofline."""
    heights = [3.2, 3.6] if mask is None else [3.6, 3.2, 3.6]
    with drawing(path, 7.0, heights) as axes:
        if mask is not None:
            _mask(axes[0], mask, queries, keys, batch)
        _scores(axes[-2])
        _roofline(axes[-1], verdict, machine)


def _mask(axis: Any, mask: Mask, queries: int, keys: int, batch: int) -> None:
    from matplotlib.colors import ListedColormap

    states = cell_states(mask, queries, keys, B=batch, size=CELLS)
    axis.imshow(
        states, cmap=ListedColormap([NONE, SOME, ALL]), vmin=0, vmax=2, extent=(0, keys, queries, 0), aspect="equal"
    )
    axis.set(xlabel="key", ylabel="query")
    axis.set_title(f"{shorten(repr(mask), 60)}\ndark: every pair is allowed; light: some")


def _scores(axis: Any) -> None:
    lengths = [512 * 4**n for n in range(5)]
    axis.loglog(lengths, [cost.score_matrix_bytes(t) / 1024**3 for t in lengths], marker="o", color=OURS, base=2)
    for t in lengths:
        at = (t, cost.score_matrix_bytes(t) / 1024**3)
        axis.annotate(cost.size(cost.score_matrix_bytes(t)), at, (6, -8), textcoords="offset points", fontsize=7)
    axis.set(xlim=(256, 2**20), ylim=(2**-13, 2**8), xlabel="T", ylabel="GiB a head a layer")
    axis.set_title("size of the score matrix, which is never stored: two bytes a score")


def _roofline(axis: Any, verdict: Sequence[cost.Verdict], machine: cost.Device) -> None:
    dtype = verdict[0].work.dtype if verdict else "bfloat16"
    ridge, peak = machine.ridge(dtype), machine.peak(dtype)
    reach = [0.25, ridge, max(ridge * 64, *(2 * v.work.intensity for v in verdict))]
    axis.loglog(reach, [min(peak, x * machine.bandwidth) / 1e12 for x in reach], color="black", lw=1.2)
    axis.axvline(ridge, color=OTHER, lw=0.8, ls=":")
    for v, marker in zip(verdict, "osD^v", strict=False):
        label = f"{v.work.kind}: {v.bound}-bound, at least {cost.duration(v.seconds)}"
        axis.plot([v.work.intensity], [v.flops_per_second / 1e12], marker, color=OURS, ms=7, mec="white", label=label)
    axis.legend(loc="lower right")
    axis.set(xlabel=f"flop a byte (ridge {ridge:.1f})", ylabel="attainable TFLOP/s")
    axis.set_title(f"roofline of {machine.name}, {dtype}")
