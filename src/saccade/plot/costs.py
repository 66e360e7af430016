"""The cost model: the score matrix that nobody stores, and a device's roofline."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from saccade import cost

from .canvas import OTHER, OURS, drawing


def costs(verdict: Sequence[cost.Verdict], machine: cost.Device, path: str | Path) -> None:
    """Draw the score matrix in both units, and where each verdict stands under the device's roofline."""
    with drawing(path, 7.0, [3.2, 3.6]) as (scores, roofline):
        _scores(scores)
        _roofline(roofline, verdict, machine)


def _scores(axis: Any) -> None:
    lengths = [512 * 4**n for n in range(5)]
    axis.loglog(lengths, [cost.score_matrix_bytes(t) / 1024**3 for t in lengths], marker="o", color=OURS, base=2)
    for t in lengths:
        at = (t, cost.score_matrix_bytes(t) / 1024**3)
        axis.annotate(cost.size(cost.score_matrix_bytes(t)), at, (6, -8), textcoords="offset points", fontsize=7)
    axis.set(xlim=(256, 2**20), ylim=(2**-13, 2**8), xlabel="T", ylabel="GiB a head a layer")
    other = axis.secondary_yaxis("right", functions=(lambda x: x * 1024**3 / 1e9, lambda x: x * 1e9 / 1024**3))
    other.set_ylabel("GB")
    axis.set_title("the score matrix nobody stores, two bytes a score")


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
