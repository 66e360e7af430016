"""Devices by name: peak rates, bandwidth and sizes of memory."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Device:
    """Peak rates of a machine: `flops` by dtype in flop/s, `bandwidth` in bytes/s, sizes in bytes.

    `tile_memory` is the fast memory of one workgroup (shared or threadgroup memory, or a core's L2): the planner's
    budget.
    """

    name: str
    flops: Mapping[str, float]
    bandwidth: float
    memory: float = 0.0
    tile_memory: int = 0
    sram: float = 0.0
    sram_bandwidth: float = 0.0
    source: str = ""

    def peak(self, dtype: str = "bfloat16") -> float:
        """Peak flop/s for `dtype`; the float32 rate for a dtype that is not in `flops`."""
        return self.flops.get(dtype, self.flops["float32"])

    def ridge(self, dtype: str = "bfloat16") -> float:
        """Flop per byte at which the device changes from bandwidth-bound to compute-bound."""
        return self.peak(dtype) / self.bandwidth


# fp32, 16-bit and fp64 TFLOP/s; TB/s; GB; KiB of tile memory; MB and TB/s of SRAM
_KNOWN = (
    ("h100", (67, 1000, 67), 3.35, 80, 227, 50, 20, "SXM5, dense, rounded"),
    ("h200", (67, 1000, 67), 4.8, 141, 227, 50, 20, "as h100, with HBM3e"),
    ("b200", (75, 2250, 37), 7.7, 180, 227, 126, 0, "Blackwell brief 2.1: HGX, dense; L2 and GB: tuning guide"),
    ("a100", (19.5, 312, 19.5), 2.039, 80, 163, 40, 0, "SXM4 80 GB, dense"),
    ("rtx-5090", (104.8, 209.5, 1.64), 1.792, 32, 99, 96, 0, "RTX Blackwell whitepaper: dense, sums in fp32"),
    ("rtx-4090", (82.6, 165.2, 1.29), 1.008, 24, 99, 72, 0, "Ada whitepaper, appendix A: dense, sums in fp32"),
    ("m3", (3.5, 3.5, 3.5), 0.1, 24, 32, 0, 0, "10-core GPU, unified memory"),
    ("m3-max", (14.1, 14.1, 14.1), 0.4, 128, 32, 0, 0, "40-core GPU, unified memory"),
    ("m4", (4.26, 4.26, 4.26), 0.12, 32, 32, 0, 0, "10-core GPU; peak as in arXiv:2502.05317, not from Apple"),
    ("webgpu", (67, 67, 67), 4.3, 141, 16, 0, 0, "h200 without matrix units, default workgroup memory"),
    ("zen5", (0.529, 1.068, 0.264), 0.048, 24, 1024, 32, 0, "2 cores, AVX-512-bf16, measured"),
)


def _device(row: tuple[str, tuple[float, ...], float, int, int, int, int, str]) -> Device:
    name, rates, tbs, gb, kib, mb, sram, source = row
    fp32, half, fp64 = (rate * 1e12 for rate in rates)
    flops = {"float32": fp32, "bfloat16": half, "float16": half, "float64": fp64}
    return Device(name, flops, tbs * 1e12, gb * 1e9, kib * 1024, mb * 1e6, sram * 1e12, source)


DEVICES: Mapping[str, Device] = {row[0]: _device(row) for row in _KNOWN}


def device(name: str) -> Device:
    """The device with this name; raises ValueError, which lists the known names, if there is none."""
    if name not in DEVICES:
        raise ValueError(f"unknown device {name!r}: expected one of {', '.join(sorted(DEVICES))}")
    return DEVICES[name]
