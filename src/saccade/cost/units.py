"""Bytes per element, and sizes and times as text."""

from __future__ import annotations

from collections.abc import Mapping

DTYPE_BYTES: Mapping[str, int] = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}


def item_bytes(dtype: str) -> int:
    """Bytes of one element; raises ValueError for a dtype that attention does not accept."""
    if dtype not in DTYPE_BYTES:
        raise ValueError(f"unknown dtype {dtype!r}: expected one of {', '.join(DTYPE_BYTES)}")
    return DTYPE_BYTES[dtype]


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
