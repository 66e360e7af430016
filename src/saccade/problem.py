"""What is to be computed: shapes, dtype, mask and options of one attention call, checked once.

Dimension key, used everywhere:

    B   batch                       T         length when Tq == Tk
    Tq  queries                     Tk        keys
    Hq  query heads                 Hk        key and value heads
    D   query and key head size     Dv        value head size
    G   Hq / Hk, the query heads that share one key head: query head h reads key head h // G

Layouts: q [B, Tq, Hq, D], k [B, Tk, Hk, D], v [B, Tk, Hk, Dv], o [B, Tq, Hq, Dv], lse [B, Tq, Hq].
Row t is the index of a query in its array, j the index of a key; the position of a query is i = t + offset.
"""

from __future__ import annotations

import math
import numbers
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from .mask import Mask
from .quantised import Quantised

DTYPES = ("float32", "bfloat16", "float16", "float64")
FP8 = ("float8_e4m3fn", "float8_e5m2")
LONGEST = 1 << 30


class Spec(NamedTuple):
    """Shape, dtype name and device name of an array, whatever framework holds it."""

    shape: tuple[int, ...]
    dtype: str
    device: str


@dataclass(frozen=True)
class Problem:
    """One attention call without its arrays. Frozen and hashable: plans are cached by it.

    mask None allows every pair. softcap 0.0 means none. bias is its shape broadcast to four dimensions, alibi the
    shape [1 | B, Hq] of its slopes. source tells where keys lie, "strided" or "paged"; quantised, how k and v are
    codes of numbers in dtype.
    """

    B: int
    Tq: int
    Tk: int
    Hq: int
    Hk: int
    D: int
    Dv: int
    dtype: str = "float32"
    mask: Mask | None = None
    scale: float = 1.0
    softcap: float = 0.0
    sinks: bool = False
    bias: tuple[int, int, int, int] | None = None
    alibi: tuple[int, int] | None = None
    dropout: float = 0.0
    source: str = "strided"
    quantised: Quantised | None = None
    device: str = "cpu"
    needs_grad: bool = False
    deterministic: bool = True

    @property
    def G(self) -> int:
        """Query heads that share one key head."""
        return self.Hq // self.Hk

    @cached_property
    def accumulator(self) -> str:
        """The dtype of scores, sums and lse: float64 for float64 inputs, float32 for all others."""
        return "float64" if self.dtype == "float64" else "float32"


def number(name: str, value: object, expected: str) -> float:
    """value as a finite float; TypeError when it is no real number, ValueError when it is not finite."""
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise TypeError(f"{name} is {value!r} ({type(value).__name__}); expected {expected}")
    if not math.isfinite(value):
        raise ValueError(f"{name} is {value!r}; expected {expected}")
    return float(value)


def describe(
    q: Spec,
    k: Spec,
    v: Spec,
    *,
    mask: Mask | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    sinks: Spec | None = None,
    bias: Spec | None = None,
    alibi: Spec | None = None,
    dropout: float = 0.0,
    descale: object = None,
    source: str = "strided",
    quantised: Quantised | None = None,
    needs_grad: bool = False,
    bias_grad: bool = False,
    deterministic: bool = True,
) -> Problem:
    """Check a call and describe it.

    q, k, v are 4-D specs; for source "paged" k and v are pages [n, page_size, Hk, D] behind a table, and the caller
    gives their logical shape. descale: three specs of the factors that 8-bit q, k and v need. Raises ValueError or
    TypeError that says what was given, what was expected, what to do.
    """
    B, Tq, Hq, D = _shape("q", q, "[B, Tq, Hq, D]")
    Bk, Tk, Hk, Dk = _shape("k", k, "[B, Tk, Hk, D]")
    Bv, Tv, Hv, Dv = _shape("v", v, "[B, Tk, Hk, Dv]")
    _same("batch", "q", q, B, "k", k, Bk)
    _same("batch", "k", k, Bk, "v", v, Bv)
    _same("length", "k", k, Tk, "v", v, Tv)
    _same("number of heads", "k", k, Hk, "v", v, Hv)
    _same("head size", "q", q, D, "k", k, Dk)
    if Hk < 1 or Hq % Hk or Hq < 1:
        raise ValueError(f"q has {Hq} heads and k has {Hk}; expected at least one of each and k's to divide q's")
    if D < 1 or Dv < 1:
        raise ValueError(f"head sizes are D = {D} and Dv = {Dv}; expected at least 1")
    if max(Tq, Tk) >= LONGEST:
        raise ValueError(f"lengths are Tq = {Tq} and Tk = {Tk}; expected less than 2**30: split the call and merge")
    dtype = _dtype(q, k, v, descale)
    if dtype in FP8:
        _descale(descale, dtype, B, (Hq, Hk, Hk), q.device)
    if mask is not None and not isinstance(mask, Mask):
        raise TypeError(_mask_hint(mask))
    return Problem(
        B=B, Tq=Tq, Tk=Tk, Hq=Hq, Hk=Hk, D=D, Dv=Dv, dtype=dtype, mask=mask,
        scale=1.0 / math.sqrt(D) if scale is None else _scale(scale, dtype),
        softcap=_softcap(softcap, dtype),
        sinks=sinks is not None and _sinks(sinks, Hq, q.device),
        bias=None if bias is None else _bias(bias, (B, Hq, Tq, Tk), q.device, bias_grad),
        alibi=None if alibi is None else _alibi(alibi, B, Hq, q.device),
        dropout=_dropout(dropout),
        source=source, quantised=quantised, device=q.device, needs_grad=needs_grad, deterministic=bool(deterministic),
    )  # fmt: skip


def check_gradients(problem: Problem, rows: dict[str, Spec]) -> None:
    """Check the arrays do, o, lse and dlse that a backward call adds: shapes, dtypes and devices."""
    for name, spec in rows.items():
        shape: tuple[int, ...] = (problem.B, problem.Tq, problem.Hq)
        dtype = problem.accumulator
        if name in ("do", "o"):
            shape, dtype = (*shape, problem.Dv), problem.dtype
        if tuple(spec.shape) != shape:
            raise ValueError(f"{name} has shape {list(spec.shape)}; expected {list(shape)}")
        if spec.dtype != dtype:
            raise TypeError(f"{name} has dtype {spec.dtype}; expected {dtype}")
        if spec.device != problem.device:
            raise ValueError(f"{name} lives on {spec.device} and q on {problem.device}; move them together")


def _shape(name: str, spec: Spec, expected: str) -> tuple[int, ...]:
    if len(spec.shape) != 4:
        raise ValueError(f"{name} has shape {list(spec.shape)}; expected {expected}, or without B in q, k and v alike")
    return spec.shape


def _same(what: str, name: str, spec: Spec, value: int, other: str, spec2: Spec, value2: int) -> None:
    if value != value2:
        raise ValueError(
            f"{name} {list(spec.shape)} and {other} {list(spec2.shape)} differ in {what}, {value} and {value2}; "
            f"expected the same"
        )


def _dtype(q: Spec, k: Spec, v: Spec, descale: object) -> str:
    if not q.dtype == k.dtype == v.dtype:
        raise TypeError(f"q, k, v have dtypes {q.dtype}, {k.dtype}, {v.dtype}; expected one dtype: cast them first")
    if not q.device == k.device == v.device:
        raise ValueError(f"q, k, v live on {q.device}, {k.device}, {v.device}; expected one device: move them together")
    if q.dtype not in DTYPES and q.dtype not in FP8:
        raise TypeError(f"q, k, v have dtype {q.dtype}; expected one of {', '.join(DTYPES)}: cast them first")
    if descale is not None and q.dtype not in FP8:
        raise ValueError(f"descale is given for {q.dtype} arrays; it belongs to 8-bit floats: leave it out")
    return q.dtype


def _descale(descale: object, dtype: str, B: int, heads: tuple[int, int, int], device: str) -> None:
    if not isinstance(descale, (tuple, list)) or len(descale) != 3:  # pyright: ignore[reportUnknownArgumentType]
        raise ValueError(
            f"descale is {type(descale).__name__} for {dtype} arrays; expected three float32 arrays, the factors of q, "
            f"k and v: [B, H] or [H]"
        )
    given: list[Any] = list(descale)  # pyright: ignore[reportUnknownArgumentType]
    for name, x, H in zip("qkv", given, heads, strict=True):
        if not isinstance(x, Spec):
            raise TypeError(f"descale of {name} is {type(x).__name__}; expected an array as q is, [{H}] or [{B}, {H}]")
        if tuple(x.shape) not in ((H,), (B, H)):
            raise ValueError(f"descale of {name} has shape {list(x.shape)}; expected [{H}] or [{B}, {H}]")
        if x.dtype != "float32" or x.device != device:
            raise ValueError(f"descale of {name} is {x.dtype} on {x.device}; expected float32 on {device}, as q")


def _mask_hint(mask: object) -> str:
    kind = type(mask).__name__
    expected = "expected None or an expression of saccade.mask, such as causal()"
    if isinstance(mask, str):
        return f"mask is the text {mask!r}; {expected}: saccade.mask.parse(text) makes one"
    if hasattr(mask, "shape"):
        return f"mask is an array ({kind}); {expected}: wrap booleans, True for allowed, in saccade.mask.dense(array)"
    return f"mask is {kind}; {expected}"


def _range(dtype: str) -> tuple[str, float, float]:
    # the dtype that scores are computed in, its smallest normal number and its largest
    wide = np.finfo(np.float64 if dtype == "float64" else np.float32)
    return wide.dtype.name, float(wide.tiny), float(wide.max)


def _scale(scale: float, dtype: str) -> float:
    value = number("scale", scale, "a finite number")
    wide, _, largest = _range(dtype)
    if abs(value) > largest:
        raise ValueError(f"scale is {scale!r}; expected at most {largest:.4g} in size, the range of {wide} scores")
    return value


def _softcap(softcap: float | None, dtype: str) -> float:
    if softcap is None:
        return 0.0
    value = number("softcap", softcap, "a positive number, or None")
    if value <= 0:
        raise ValueError(f"softcap is {softcap!r}; expected a positive number, or None for no cap")
    wide, smallest, largest = _range(dtype)
    if not smallest <= value <= largest:
        raise ValueError(
            f"softcap is {softcap!r}; expected {smallest:.4g} to {largest:.4g}, the range of {wide} scores, or None "
            f"for no cap"
        )
    return value


def _dropout(dropout: float) -> float:
    value = number("dropout", dropout, "a probability, 0 <= dropout < 1")
    if not 0.0 <= value < 1.0:
        raise ValueError(f"dropout is {dropout!r}; expected 0 <= dropout < 1")
    return value


def _floating(name: str, spec: Spec, device: str) -> None:
    if spec.dtype not in DTYPES:
        hint = "booleans go to mask=saccade.mask.dense(array)" if spec.dtype == "bool" else "cast it first"
        raise TypeError(f"{name} has dtype {spec.dtype}; expected one of {', '.join(DTYPES)}: {hint}")
    if spec.device != device:
        raise ValueError(f"{name} lives on {spec.device} and q on {device}; move them together")


def _sinks(sinks: Spec, Hq: int, device: str) -> bool:
    _floating("sinks", sinks, device)
    if tuple(sinks.shape) != (Hq,):
        raise ValueError(f"sinks has shape {list(sinks.shape)}; expected [Hq] = [{Hq}], one logit per query head")
    return True


def _alibi(slopes: Spec, B: int, Hq: int, device: str) -> tuple[int, int]:
    _floating("the slopes of alibi", slopes, device)
    shape = (1, *slopes.shape) if len(slopes.shape) == 1 else tuple(slopes.shape)
    if shape not in ((1, Hq), (B, Hq)):
        raise ValueError(f"alibi has slopes of shape {list(slopes.shape)}; expected [Hq] = [{Hq}] or [B, Hq]")
    return shape[0], shape[1]


def _bias(bias: Spec, full: tuple[int, int, int, int], device: str, grad: bool) -> tuple[int, int, int, int]:
    _floating("bias", bias, device)
    shape = (1,) * (4 - len(bias.shape)) + tuple(bias.shape)
    if len(shape) != 4 or any(n not in (1, m) for n, m in zip(shape, full, strict=True)):
        raise ValueError(f"bias has shape {list(bias.shape)}; expected one that broadcasts to [B, Hq, Tq, Tk] = {full}")
    if grad and shape[3] != full[3]:
        raise ValueError(
            f"bias of shape {list(bias.shape)} needs a gradient; only [1|B, 1|Hq, Tq, Tk] and [1|B, 1|Hq, 1, Tk] "
            f"have one: expand it to [..., {full[3]}] first, or detach it"
        )
    return shape[0], shape[1], shape[2], shape[3]
