"""Arrays for a case: random numbers, or needles, which reveal every wrong edge of a mask."""

from __future__ import annotations

import zlib
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..arrays import numpy_dtype
from ..biases import Bias
from ..mask import Mask
from .cases import Case

Array = NDArray[Any]

# the length of a table by distance, and the index of distance 0, chosen so that both ends are used
ENTRIES, ORIGIN = 33, 12
NEEDLES = ("first", "last", "before", "after")
LAYOUTS = ("plain", "heads-first", "packed", "reversed", "gaps", "shifted", "columns")


@dataclass(frozen=True)
class CaseInputs:
    """The arrays of one call of `saccade.attention_backward`; stop: [B], the end of the keys, for alibi."""

    case: Case
    q: Array
    k: Array
    v: Array
    do: Array
    dlse: Array
    mask: Mask | None
    stop: Array
    sinks: Array | None = None
    bias: Array | None = None
    slopes: Array | None = None
    table: Array | None = None
    log_f: Array | None = None

    @property
    def added(self) -> dict[str, Array]:
        """The arrays by name that are added to the scores."""
        arrays = {"bias": self.bias, "slopes": self.slopes, "table": self.table, "log_f": self.log_f}
        return {name: x for name, x in arrays.items() if x is not None}

    @property
    def bias_argument(self) -> Any:
        """These arrays as a value for `bias=`."""
        if set(self.added) <= {"bias"}:
            return self.bias
        return Bias(self.bias, self.slopes, self.table, self.log_f, ORIGIN if self.table is not None else 0)

    @property
    def scores(self) -> dict[str, Any]:
        """The options that change scores and weights, under names that `saccade.attention` and the oracle share."""
        case = self.case
        return {"scale": case.scale, "softcap": case.softcap, "dropout": case.dropout, "seed": case.seed}


def make(case: Case, dtype: Any = "float32", *, seed: int = 0, kind: str = "random", poison: bool = True) -> CaseInputs:
    """The inputs of a case; the same arguments give the same inputs.

    kind "random" draws normal numbers. Needles make q · k peak at one key of each row, and v encodes the number of the
    key in binary digits: "first" and "last" choose an end of one of the row's intervals of allowed keys, "before" and
    "after" the excluded key next to it. poison puts NaN and Inf where nothing may be read: in keys and values that no
    query of their batch entry and kv head sees, and in queries that see no key, their do and (without sinks) dlse.
    """
    rng = np.random.default_rng([zlib.crc32(case.name.encode()), seed])
    B, Tq, Tk, Hq, Hk, D, Dv = case.B, case.Tq, case.Tk, case.Hq, case.Hk, case.D, case.Dv
    wide = np.float64 if np.dtype(numpy_dtype(dtype)) == np.float64 else np.float32
    mask = case.make_mask()
    stop = stops(mask, B, Tk)
    q, k, v, do = (rng.standard_normal(s) for s in ((B, Tq, Hq, D), (B, Tk, Hk, D), (B, Tk, Hk, Dv), (B, Tq, Hq, Dv)))
    dlse = rng.standard_normal((B, Tq, Hq))
    sinks = rng.standard_normal(Hq).astype(wide) if case.sinks else None
    slopes = None
    if case.alibi:
        slopes = rng.uniform(0.02, 0.5, (B, Hq) if case.alibi == "bh" else (Hq,)).astype(wide)
    axes = {"b": B, "h": Hq, "q": Tq, "k": Tk, "1": 1}
    bias = None
    if case.bias:
        bias = rng.standard_normal([axes[c] for c in case.bias]).astype(wide)
        bias[rng.random(bias.shape) < 0.05] = -np.inf
    allowed = np.ones((B, Hq, Tq, Tk), bool) if mask is None else mask.evaluate(B, Hq, Tq, Tk)
    allowed = np.broadcast_to(allowed, (B, Hq, Tq, Tk))
    if bias is not None:
        allowed = allowed & (bias != -np.inf)
    if kind != "random" and B and Tq and Tk:
        # keys of equal length, so that each key is nearest to itself
        k = k * D**0.5 / np.linalg.norm(k, axis=-1, keepdims=True)
        k = k.astype(numpy_dtype(dtype)).astype(np.float64)
        q, v = _needle(case, k, allowed, kind)
    if poison:
        _poison(q, k, v, do, None if case.sinks else dlse, allowed)
    q, k, v, do = (x.astype(numpy_dtype(dtype)) for x in (q, k, v, do))
    table, log_f = _by_position(case, seed, wide)
    return CaseInputs(case, q, k, v, do, dlse.astype(wide), mask, stop, sinks, bias, slopes, table, log_f)


def _by_position(case: Case, seed: int, wide: Any) -> tuple[Array | None, Array | None]:
    rng = np.random.default_rng([zlib.crc32(case.name.encode()), seed, 1])
    table = log_f = None
    if case.relative:
        shape = (case.B, case.Hq, ENTRIES) if case.relative == "bh" else (case.Hq, ENTRIES)
        table = rng.standard_normal(shape).astype(wide)
    if case.gates:
        log_f = -rng.exponential(0.2, (case.B, case.Tk, case.Hq)).astype(wide)
    return table, log_f


def stops(mask: Mask | None, B: int, Tk: int) -> Array:
    """The end of the keys, [B]: the smallest stop of the `keys` in the outermost `&` chain, else Tk."""
    stop = np.full(B, Tk)
    chain = () if mask is None else mask.children if mask.kind == "and" else (mask,)
    for part in chain:
        if part.kind == "keys":
            stop = np.minimum(stop, np.asarray(part.args[1]))
    return stop


def lay(x: Array, layout: str) -> Array:
    """An array equal to x [B, T, H, D] in another memory layout, with NaN in the gaps."""
    if layout == "heads-first":
        return np.ascontiguousarray(x.swapaxes(1, 2)).swapaxes(1, 2)
    if layout == "packed":
        whole = np.full((*x.shape[:2], 3 * x.shape[2], x.shape[3]), np.nan, x.dtype)
        whole[:, :, x.shape[2] : 2 * x.shape[2]] = x
        return whole[:, :, x.shape[2] : 2 * x.shape[2]]
    if layout == "reversed":
        return np.ascontiguousarray(x[:, ::-1, ::-1])[:, ::-1, ::-1]
    if layout == "gaps":
        whole = np.full([2 * n for n in x.shape[:3]] + [x.shape[3] + 3], np.nan, x.dtype)
        whole[::2, 1::2, ::2, 1:-2] = x
        return whole[::2, 1::2, ::2, 1:-2]
    if layout == "shifted":
        whole = np.full(x.size + 1, np.nan, x.dtype)
        whole[1:] = x.reshape(-1)
        return whole[1:].reshape(x.shape)
    if layout == "columns":
        return np.asfortranarray(x)
    return np.ascontiguousarray(x)


def targets(allowed: Array, kind: str) -> Array:
    """The key at which the needle of each row peaks, int [B, Hq, Tq]; rows cycle through their intervals."""
    B, Hq, Tq, Tk = allowed.shape
    edge = np.zeros((B, Hq, Tq, Tk + 2), np.int8)
    edge[..., 1:-1] = allowed
    step = np.diff(edge, axis=-1)
    out = np.zeros((B, Hq, Tq), np.int64)
    for at in np.ndindex(B, Hq, Tq):
        first, end = np.flatnonzero(step[at] == 1), np.flatnonzero(step[at] == -1)
        if not len(first):
            out[at] = at[2] % Tk
            continue
        n = (at[1] + at[2]) % len(first)
        out[at] = {"first": first[n], "last": end[n] - 1, "before": first[n] - 1, "after": end[n]}[kind]
        if not 0 <= out[at] < Tk:
            out[at] = first[n] if kind == "before" else end[n] - 1
    return out


def _needle(case: Case, k: Array, allowed: Array, kind: str) -> tuple[Array, Array]:
    B, Hq, _, Tk = allowed.shape
    target, scale = targets(allowed, kind), (case.D**-0.5 if case.scale is None else case.scale) or 1.0
    heads = k.swapaxes(1, 2).repeat(Hq // case.Hk, 1)
    peak = np.take_along_axis(heads, target[..., None], 2)
    s = peak @ heads.swapaxes(-1, -2) * scale
    own = np.take_along_axis(s, target[..., None], 3)
    np.put_along_axis(s, target[..., None], -np.inf, 3)
    # 3 above the nearest other key and 2 above all together if moderate scores allow it: enough to identify a key.
    # A weight of almost 1 would make standard attention exact, and so no measure of its dtype
    gap, own = np.maximum(np.sign(own) * (own - s.max(-1, keepdims=True)), 1e-3), np.where(own == 0, 1e-3, own)
    # avoid round numbers for a single key, whose score standard attention would compute exactly by luck
    least = (2 + np.log(max(Tk, 1.5))) / abs(own)
    q = peak * np.sign(own) * np.clip(3 / gap, least, least + 4 / abs(own))
    number = np.arange(Tk)[:, None] * case.Hk + np.arange(case.Hk) + 1
    v = np.broadcast_to(number[..., None] >> np.arange(case.Dv) % 20 & 1, (B, Tk, case.Hk, case.Dv))
    return q.swapaxes(1, 2), v.astype(np.float64)


def _poison(q: Array, k: Array, v: Array, do: Array, dlse: Array | None, allowed: Array) -> None:
    (B, Hq, _, Tk), Hk = allowed.shape, k.shape[2]
    unseen = ~allowed.any(2).reshape(B, Hk, Hq // Hk, Tk).any(2).swapaxes(1, 2)
    blind = ~allowed.any(3).swapaxes(1, 2)
    for n, x in enumerate((k, v)):
        x[unseen] = (np.nan, np.inf)[n]
        x[unseen & (np.arange(Tk) % 3 == 1)[:, None]] = (-np.inf, np.nan)[n]
    q[blind] = do[blind] = np.nan
    if dlse is not None:
        dlse[blind] = np.nan
