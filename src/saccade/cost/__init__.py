"""What attention costs: flops, bytes, the roofline's verdict and cache sizes.

This package does only arithmetic and touches no device. Sizes are in bytes, rates per second, times in seconds.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TypeVar

from .devices import DEVICES as DEVICES
from .devices import Device as Device
from .devices import device as device
from .models import MODELS as MODELS
from .models import Model as Model
from .models import kv_cache_bytes as kv_cache_bytes
from .units import DTYPE_BYTES as DTYPE_BYTES
from .units import duration as duration
from .units import item_bytes as item_bytes
from .units import size as size

Pairs = TypeVar("Pairs", int, float)
_MIB = 1024 * 1024

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
