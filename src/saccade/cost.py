"""What attention costs: flops, bytes, the roofline's verdict and cache sizes.

This module does only arithmetic and touches no device. Sizes are in bytes, rates per second, times in seconds.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TypeVar

Pairs = TypeVar("Pairs", int, float)

DTYPE_BYTES: Mapping[str, int] = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}

# one pass is one read or one write of the whole score matrix
NAIVE_PASSES = (
    "write s",
    "read scale",
    "write scale",
    "read mask",
    "write mask",
    "read softmax",
    "write softmax",
    "read for PV",
)


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


_MIB = 1024 * 1024

# fp32, 16-bit and fp64 TFLOP/s; TB/s; GB; KiB of tile memory; MB and TB/s of SRAM
_KNOWN = (
    ("h100", (67, 1000, 67), 3.35, 80, 227, 50, 20, "SXM5, dense, rounded"),
    ("h200", (67, 1000, 67), 4.8, 141, 227, 50, 20, "as h100, with HBM3e"),
    ("a100", (19.5, 312, 19.5), 2.039, 80, 163, 40, 0, "SXM4 80 GB, dense"),
    ("m3", (3.5, 3.5, 3.5), 0.1, 24, 32, 0, 0, "10-core GPU, unified memory"),
    ("m3-max", (14.1, 14.1, 14.1), 0.4, 128, 32, 0, 0, "40-core GPU, unified memory"),
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


def item_bytes(dtype: str) -> int:
    """Bytes of one element; raises ValueError for a dtype that attention does not accept."""
    if dtype not in DTYPE_BYTES:
        raise ValueError(f"unknown dtype {dtype!r}: expected one of {', '.join(DTYPE_BYTES)}")
    return DTYPE_BYTES[dtype]


def score_matrix_bytes(
    tq: int, tk: int | None = None, *, dtype: str = "bfloat16", heads: int = 1, layers: int = 1
) -> int:
    """Bytes of the materialised [tq, tk] scores of `heads` heads in `layers` layers."""
    return tq * (tq if tk is None else tk) * item_bytes(dtype) * heads * layers


def naive_traffic(tq: int, tk: int | None = None, *, dtype: str = "bfloat16", heads: int = 1) -> int:
    """Bytes that unfused attention moves for the score matrix: one matrix per entry of NAIVE_PASSES."""
    return len(NAIVE_PASSES) * score_matrix_bytes(tq, tk, dtype=dtype, heads=heads)


def scratch_bytes(seq_len: int, heads: int) -> int:
    """Bytes of P_scratch and dS_scratch, fp32 [T, Hq, T] each, of the documented short WGSL backward."""
    return 2 * seq_len * seq_len * heads * 4


def scratch_max_heads(seq_len: int, binding: int = 128 * _MIB) -> int:
    """Query heads whose P_scratch fits one storage binding of `binding` bytes."""
    return binding // (seq_len * seq_len * 4)


@dataclass(frozen=True)
class Work:
    """Flops and bytes of main-memory traffic of one call, and its number of allowed pairs."""

    kind: str
    dtype: str
    pairs: int
    flops: int
    bytes: int

    @property
    def intensity(self) -> float:
        """Flop per byte; 0 if no byte is moved."""
        return self.flops / self.bytes if self.bytes else 0.0


@dataclass(frozen=True)
class Verdict:
    """A Work on a Device's roofline: `bound` is "compute" or "bandwidth", `seconds` the least time possible."""

    device: str
    work: Work
    ridge: float
    bound: str
    seconds: float

    @property
    def flops_per_second(self) -> float:
        """Attainable flop/s under the roof."""
        return self.work.flops / self.seconds if self.seconds else 0.0


def roofline(work: Work, machine: Device) -> Verdict:
    """Compare flops at the device's peak with bytes at its bandwidth (Williams et al., Roofline, 2009)."""
    compute, memory = work.flops / machine.peak(work.dtype), work.bytes / machine.bandwidth
    bound = "compute" if compute >= memory else "bandwidth"
    return Verdict(machine.name, work, machine.ridge(work.dtype), bound, max(compute, memory))


def forward_flops(pairs: Pairs, d: int, dv: int | None = None) -> Pairs:
    """2·(D + Dv) per pair, for the score and for the weighted sum. `pairs` counts every query head."""
    return 2 * pairs * (d + (d if dv is None else dv))


def backward_flops(pairs: Pairs, d: int, dv: int | None = None) -> Pairs:
    """2·(3D + 2Dv) per pair, for S (again), dP, dV, dK and dQ: 2.5 × the forward if D = Dv."""
    return 2 * pairs * (3 * d + 2 * (d if dv is None else dv))


@dataclass(frozen=True)
class Shape:
    """Dimensions of one call, named as in problem.py.

    `pairs` counts the allowed (query head, query, key) triples, `keys` the keys that some query sees; both are totals
    over the batch, and include all by default.
    """

    B: int
    Tq: int
    Tk: int
    Hq: int
    Hk: int
    D: int
    Dv: int
    dtype: str = "bfloat16"
    pairs: int = -1
    keys: int = -1

    def __post_init__(self) -> None:
        if self.Hk <= 0 or self.Hq % self.Hk:
            raise ValueError(f"query heads must be a multiple of kv heads, got {self.Hq} and {self.Hk}")
        item_bytes(self.dtype)
        for name, everything in (("pairs", self.B * self.Hq * self.Tq * self.Tk), ("keys", self.B * self.Tk)):
            if getattr(self, name) < 0:
                object.__setattr__(self, name, everything)

    @property
    def q_bytes(self) -> int:
        return self.B * self.Tq * self.Hq * self.D * item_bytes(self.dtype)

    @property
    def o_bytes(self) -> int:
        return self.B * self.Tq * self.Hq * self.Dv * item_bytes(self.dtype)

    @property
    def kv_bytes(self) -> int:
        return self.keys * self.Hk * (self.D + self.Dv) * item_bytes(self.dtype)

    @property
    def lse_bytes(self) -> int:
        return self.B * self.Tq * self.Hq * (8 if self.dtype == "float64" else 4)


def prefill(shape: Shape, *, reads: float = 1.0) -> Work:
    """Forward work: q is read once, k and v `reads` times (1 if they stay in cache), o and lse are written once."""
    moved = shape.q_bytes + round(shape.kv_bytes * reads) + shape.o_bytes + shape.lse_bytes
    return Work("prefill", shape.dtype, shape.pairs, forward_flops(shape.pairs, shape.D, shape.Dv), moved)


def decode(shape: Shape) -> Work:
    """Decode work: a forward with few queries, in which k and v are read once per group of query heads."""
    return replace(prefill(shape), kind="decode")


def backward(shape: Shape, *, reads: float = 1.0) -> Work:
    """Backward work with recomputation from lse: reads q, k, v, o, do, lse; writes dq, dk, dv."""
    written = replace(shape, keys=-1).kv_bytes
    moved = 2 * shape.q_bytes + 2 * shape.o_bytes + shape.lse_bytes + round(shape.kv_bytes * reads) + written
    return Work("backward", shape.dtype, shape.pairs, backward_flops(shape.pairs, shape.D, shape.Dv), moved)


def naive(shape: Shape) -> Work:
    """Forward work of unfused attention: tiled traffic plus eight passes over the score matrix of every head."""
    extra = shape.B * naive_traffic(shape.Tq, shape.Tk, dtype=shape.dtype, heads=shape.Hq)
    flops = forward_flops(shape.B * shape.Hq * shape.Tq * shape.Tk, shape.D, shape.Dv)
    return Work("naive", shape.dtype, shape.pairs, flops, prefill(shape).bytes - shape.lse_bytes + extra)


@dataclass(frozen=True)
class Model:
    """The dimensions of a decoder that determine its cache size. `head_dim` is the size of keys and of values."""

    name: str
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    width: int
    dtype: str = "bfloat16"

    def cache_bytes(self, tokens: int = 1, batch: int = 1, *, kv_heads: int | None = None) -> int:
        """KV-cache bytes, 2·layers·Hk·D·bytes per token; `kv_heads` replaces the model's number of key heads."""
        return kv_cache_bytes(
            self.layers, self.kv_heads if kv_heads is None else kv_heads, self.head_dim, tokens, batch, self.dtype
        )

    def saving(self) -> float:
        """How many times smaller the cache is than with one key head per query head."""
        return self.heads / self.kv_heads

    def projections(self) -> dict[str, tuple[int, int]]:
        """Shapes [in, out] of the four projections."""
        q, kv = self.heads * self.head_dim, self.kv_heads * self.head_dim
        return {"q": (self.width, q), "k": (self.width, kv), "v": (self.width, kv), "o": (q, self.width)}


MODELS: Mapping[str, Model] = {
    m.name: m
    for m in (
        Model("llama-2-70b", 80, 64, 8, 128, 8192),
        Model("mistral-7b", 32, 32, 8, 128, 4096),
        Model("96-head", 96, 96, 96, 128, 12288),
        Model("gpt-2", 12, 12, 12, 64, 768),
    )
}


def kv_cache_bytes(
    layers: int, kv_heads: int, head_dim: int, tokens: int = 1, batch: int = 1, dtype: str = "bfloat16"
) -> int:
    """Bytes of keys and values of `batch` sequences of `tokens` tokens: 2·layers·Hk·D·bytes per token."""
    return 2 * layers * kv_heads * head_dim * item_bytes(dtype) * tokens * batch


def size(n: float) -> str:
    """A number of bytes in the binary unit in which it is between 1 and 1024, e.g. "1.25 GiB"."""
    for power, unit in ((4, "TiB"), (3, "GiB"), (2, "MiB"), (1, "KiB")):
        if n >= 1024**power:
            return f"{n / 1024**power:.4g} {unit}"
    return f"{n:g} B"


def duration(seconds: float) -> str:
    """A time in the unit in which it is between 1 and 1000, e.g. "2.5 ms"."""
    for scale, unit in ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs")):
        if seconds >= scale:
            return f"{seconds / scale:.3g} {unit}"
    return f"{seconds / 1e-9:.3g} ns"
