"""Shapes, dtype, mask and options of one attention call, checked once.

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
from collections.abc import Set
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from .mask import Mask
from .mask.algebra import contains, selected
from .mask.contents import host
from .mask.selection import others
from .operands import (
    DTYPES,
    FP8,
    PLAIN,
    Request,
    Spec,
    bias_shape,
    check_descale,
    check_gates,
    check_sinks,
    dropout_of,
    in_use,
    scale_of,
    slopes_shape,
    softcap_of,
    table_shape,
)
from .quantised import Quantised

LONGEST = 1 << 30
# the same number as `few` in the CPU core
FEW_PAIRS = 64 * 64

# the options that a backend may not support, and how a refusal names them
OPTIONS = {
    "softcap": "a softcap",
    "sinks": "sinks",
    "bias": "a bias",
    "alibi": "ALiBi slopes",
    "relative": "a bias by distance",
    "gates": "gates",
    "dropout": "dropout",
    "source": "keys in pages",
    "quantised": "keys and values as codes",
    "select": "selected keys",
    "batch": 'deterministic="batch"',
    "return_max": "return_max",
    "return_entropy": "return_entropy",
}


@dataclass(frozen=True)
class Scores:
    """The options that turn the products q · k into weights.

    softcap: 0.0 for none. bias: the shape of the bias, extended to four dimensions. alibi: the shape [1 | B, Hq] of the
    slopes. relative: the first dimensions [1 | B, Hq] of the table by distance. gates: whether there are forget gates.
    """

    scale: float = 1.0
    softcap: float = 0.0
    sinks: bool = False
    bias: tuple[int, int, int, int] | None = None
    alibi: tuple[int, int] | None = None
    relative: tuple[int, int] | None = None
    gates: bool = False
    dropout: float = 0.0

    @cached_property
    def uses(self) -> frozenset[str]:
        """The options in use: the names of all fields that differ from their defaults, except scale."""
        return in_use(self, {"scale"})


class Selection(NamedTuple):
    """Selected keys, as in `mask.select`. indices: integers [1 | B, Hk, groups, n]."""

    indices: Any
    block: int
    rows: int

    def lists(self) -> NDArray[np.int32]:
        """The indices as a contiguous NumPy array; this waits for a tensor on a device."""
        return np.ascontiguousarray(host(self.indices), np.int32)


@dataclass(frozen=True)
class Problem:
    """One attention call without its arrays. Frozen and hashable, because plans are cached by it.

    mask: None allows every pair. source: how keys are stored, "strided" or "paged". quantised: how k and v encode
    numbers of dtype, None if they do not. return_max, return_entropy: results after o and lse. A backward with a
    gradient of the entropy has return_entropy.
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
    scores: Scores = Scores()
    source: str = "strided"
    quantised: Quantised | None = None
    device: str = "cpu"
    needs_grad: bool = False
    deterministic: bool | str = True
    return_max: bool = False
    return_entropy: bool = False

    @cached_property
    def uses(self) -> frozenset[str]:
        """The options in use, including those of the scores: a backend must support all of them."""
        more = {"select": self.selection is not None, "batch": self.batch_invariant}
        return self.scores.uses | in_use(self, _NO_OPTIONS) | {name for name, used in more.items() if used}

    @property
    def batch_invariant(self) -> bool:
        """Whether no bit of a row may depend on the batch around it, on chunks, on pages, or on the verb."""
        return self.deterministic == "batch"

    @cached_property
    def selection(self) -> Selection | None:
        """The lists of selected keys in the mask, None if it has none."""
        node = selected(self.mask)
        return None if node is None else Selection(*node.args)

    @cached_property
    def others(self) -> Mask | None:
        """The mask without selected keys: kernels test pairs by it."""
        return others(self.mask)

    @property
    def G(self) -> int:
        """Query heads that share one key head."""
        return self.Hq // self.Hk

    @property
    def few_pairs(self) -> bool:
        """Whether a backward refines lse and delta per row, by two more products: errors are visible in short rows."""
        return not self.batch_invariant and self.Tq * self.Tk <= FEW_PAIRS

    @cached_property
    def accumulator(self) -> str:
        """The dtype of scores, sums and lse: float64 for float64 inputs, else float32."""
        return "float64" if self.dtype == "float64" else "float32"


# fields of a problem that every backend supports
_SIZES = {"B", "Tq", "Tk", "Hq", "Hk", "D", "Dv"}
_NO_OPTIONS = _SIZES | {"dtype", "mask", "scores", "device", "needs_grad", "deterministic"}


def describe(
    q: Spec,
    k: Spec,
    v: Spec,
    request: Request = PLAIN,
    *,
    source: str = "strided",
    quantised: Quantised | None = None,
    grads: Set[str] | None = None,
) -> Problem:
    """Check a call and describe it.

    q, k, v: 4-D specs. For source "paged", where k and v are pages [n, page_size, Hk, D] with a block table, they are
    specs of the logical shapes. request: contains specs in place of the side arrays and of the three factors of 8-bit
    q, k and v. grads: the side arrays that need a gradient, None if no array needs one. Raises ValueError or TypeError;
    the message says what the argument is, what was expected, and what to do.
    """
    mask, side, options, _ = request
    B, Tq, Hq, D = _shape("q", q, "[B, Tq, Hq, D]")
    Bk, Tk, Hk, Dk = _shape("k", k, "[B, Tk, Hk, D]")
    Bv, Tv, Hv, Dv = _shape("v", v, "[B, Tk, Hk, Dv]")
    _same("batch", "q", q, B, "k", k, Bk)
    _same("batch", "k", k, Bk, "v", v, Bv)
    _same("length", "k", k, Tk, "v", v, Tv)
    _same("number of heads", "k", k, Hk, "v", v, Hv)
    _same("head size", "q", q, D, "k", k, Dk)
    if Hk < 1 or Hq % Hk or Hq < 1:
        raise ValueError(
            f"q has {Hq} heads and k has {Hk}; expected at least one of each, and q's to be a multiple of k's"
        )
    if D < 1 or Dv < 1:
        raise ValueError(f"head sizes are D = {D} and Dv = {Dv}; expected at least 1")
    # symbolic lengths of torch.export are checked by the call itself: a bound here would restrict them
    if any(type(n) is int and n >= LONGEST for n in (Tq, Tk)):
        raise ValueError(f"lengths are Tq = {Tq} and Tk = {Tk}; expected less than 2**30: split the call and merge")
    dtype = _dtype(q, k, v, options.descale)
    if dtype in FP8:
        check_descale(options.descale, dtype, B, (Hq, Hk, Hk), q.device)
    check_kind(mask)
    check_selection(mask, Hk)
    bias_grad = grads is not None and "bias" in grads
    scores = Scores(
        scale=1.0 / math.sqrt(D) if options.scale is None else scale_of(options.scale, dtype),
        softcap=softcap_of(options.softcap, dtype),
        sinks=side.sinks is not None and check_sinks(side.sinks, Hq, q.device),
        bias=None if side.bias is None else bias_shape(side.bias, (B, Hq, Tq, Tk), q.device, bias_grad),
        alibi=None if side.slopes is None else slopes_shape(side.slopes, B, Hq, q.device),
        relative=None if side.table is None else table_shape(side.table, B, Hq, q.device),
        gates=side.log_f is not None and check_gates(side.log_f, B, Tk, Hq, q.device),
        dropout=dropout_of(options.dropout),
    )
    sizes, needs_grad = (B, Tq, Tk, Hq, Hk, D, Dv), grads is not None
    more = options.deterministic, bool(options.return_max), bool(options.return_entropy)
    return Problem(*sizes, dtype, mask, scores, source, quantised, q.device, needs_grad, *more)


def check_selection(mask: Mask | None, Hk: int) -> None:
    """Raise ValueError for selected keys with lists for another number of key heads, or with per_head."""
    node = selected(mask)
    if mask is None or node is None:
        return
    if node.args[0].shape[1] != Hk:
        raise ValueError(f"select has lists for {node.args[0].shape[1]} key heads; expected Hk = {Hk}, the heads of k")
    if contains(mask, "per_head"):
        raise ValueError("select with per_head is not defined; give select the lists of each key head")


def check_gradients(problem: Problem, rows: dict[str, Spec]) -> None:
    """Check the arrays that a backward call adds, do, o, lse, dlse and others like lse: shapes, dtypes and devices."""
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


def check_kind(mask: object) -> None:
    """Raise TypeError unless a mask is None or an expression of `saccade.mask`."""
    if mask is None or type(mask) is Mask:
        return
    kind = type(mask).__name__
    expected = "expected None or an expression of saccade.mask, such as causal()"
    if isinstance(mask, str):
        raise TypeError(f"mask is the text {mask!r}; {expected}: saccade.mask.parse(text) makes one")
    shape = getattr(mask, "shape", None)
    if shape is not None:
        raise TypeError(
            f"mask is an array ({kind} {list(shape)}); {expected}: saccade.mask.from_dense(array) for "
            f"booleans [Tq, Tk] or [B, Tq, Tk] that are True where a query may look, saccade.mask.padding(array) for "
            f"booleans [B, Tk] that are True for tokens, and bias=array for numbers that are added to the scores"
        )
    raise TypeError(f"mask is {kind}; {expected}")
