"""The compiled core: see core/bind.cpp."""

from typing import Any

class Part:
    def __init__(self, source: object) -> None: ...

class Options:
    def __init__(
        self,
        B: int,
        Tq: int,
        Tk: int,
        Hq: int,
        Hk: int,
        D: int,
        Dv: int,
        scale: float,
        softcap: float,
        dropout: float,
        range: int,
    ) -> None: ...

class Extra:
    def __init__(
        self, bias: Any, slopes: Any, offset: Any, sinks: Any, block_table: Any, page_size: int, seed: int,
        k_scale: Any = None, v_scale: Any = None, code: int = 0, group: int = 0, distances: Any = None,
        gates: Any = None, selected: Any = None, block: int = 1, rows: int = 1,
    ) -> None: ...  # fmt: skip

class Direct:
    def __init__(self, exchange: object, parts: list[Part], options: Options, split_keys: int) -> None: ...
    def __call__(self, threads: int, q: Any, k: Any, v: Any, want_lse: bool) -> tuple[Any, Any] | None: ...
    def backward(
        self, threads: int, splits: int, do: Any, q: Any, k: Any, v: Any, o: Any, lse: Any, dlse: Any
    ) -> tuple[Any, Any, Any] | None: ...

def forward(
    parts: list[Part], options: Options, threads: int, split_keys: int, q: Any, k: Any, v: Any, o: Any, lse: Any,
    max: Any, entropy: Any, extra: Extra,
) -> None: ...  # fmt: skip
def backward(
    parts: list[Part], options: Options, threads: int, splits: int, do: Any, q: Any, k: Any, v: Any, o: Any,
    lse: Any, dlse: Any, entropy: Any, dentropy: Any, delta: Any, dq: Any, dk: Any, dv: Any, dbias: Any,
    ddistances: Any, dslopes: Any, dgates: Any, rows: Any, extra: Extra,
) -> None: ...  # fmt: skip
def tangent(
    parts: list[Part],
    options: Options,
    threads: int,
    q: Any,
    k: Any,
    v: Any,
    o: Any,
    lse: Any,
    dq: Any,
    dk: Any,
    dv: Any,
    do: Any,
    dlse: Any,
    extra: Extra,
    tangents: Extra,
) -> None: ...
def append(
    x: Any, target: Any, scale: Any, code: int, group: int, first: Any, second: Any, cos: Any, sin: Any,
    interleaved: bool, threads: int,
) -> None: ...  # fmt: skip

class Recurrence:
    def __init__(
        self, B: int, T: int, N: int, H: int, Hk: int, K: int, F: int, V: int, scale: float, chunk: int, feature: int,
        decay: int, delta: bool, normalize: bool, causal: bool, block: int,
    ) -> None: ...  # fmt: skip

def recurrent_forward(
    call: Recurrence, threads: int, q: Any, k: Any, v: Any, g: Any, beta: Any, borders: Any, initial: Any, o: Any,
    final_state: Any,
) -> None: ...  # fmt: skip
def recurrent_backward(
    call: Recurrence, threads: int, q: Any, k: Any, v: Any, g: Any, beta: Any, borders: Any, initial: Any, do: Any,
    dfinal: Any, dq: Any, dk: Any, dv: Any, dg: Any, dbeta: Any, dinitial: Any,
) -> None: ...  # fmt: skip
def selective_scan(arrays: dict[str, Any], chunk: int, softplus: bool, backward: bool, threads: int) -> None: ...
def rg_lru(arrays: dict[str, Any], chunk: int, backward: bool, threads: int) -> None: ...
def causal_conv1d(arrays: dict[str, Any], piece: int, silu: bool, backward: bool, threads: int) -> None: ...
def isas() -> list[str]: ...

WORDS_VERSION: int

def ffi_handlers() -> dict[str, Any]: ...
def set_ffi_threads(n: int) -> None: ...
def isa() -> str: ...
def set_isa(name: str) -> None: ...
def live_workers() -> int: ...
def join_team(gomp_parallel: int, pause: int) -> None: ...
def probe_flops(dtype: int, threads: int) -> float: ...
def probe_stream(a: Any, threads: int) -> float: ...
