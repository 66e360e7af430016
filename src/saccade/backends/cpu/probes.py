"""The instruction set in use, and the limits of the machine that figures are compared with."""

from __future__ import annotations

import numpy as np

from ._core import isa as _isa
from ._core import probe_flops as _probe_flops
from ._core import probe_stream as _probe_stream
from .threads import get_num_threads


def isa() -> str:
    """The instruction set in use: "amx", "avx512bf16", "avx512", "v3", "base", "neonbf16" or "neon"."""
    return _isa()


def probe_flops(dtype: str = "float32", n: int | None = None) -> float:
    """Flop/s of the kernels' inner product on tiles in the L1 cache: the upper limit of all prefill figures."""
    code = {"float32": 0, "bfloat16": 1, "float16": 0, "float64": 3}[dtype]
    return _probe_flops(code, n or get_num_threads())


def probe_stream(n: int | None = None, megabytes: int = 512) -> float:
    """Bytes/s of one read of a large array: the upper limit of all decode figures."""
    return _probe_stream(np.ones(megabytes << 17), n or get_num_threads())
