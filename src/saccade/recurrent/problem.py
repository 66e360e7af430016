"""Shapes, dtypes and options of one call of a recurrence over matrix states, checked once.

    S_t = decay_t S_{t-1} + k_t u_tᵀ,    o_t = scale S_tᵀ q_t

Dimension key:

    B   batch                            T         tokens
    N   sequences: B, or by cu_seqlens   H         heads of v, g, beta, o and the state
    K   width of q and k                 Hk        heads of q and k: head h reads head h // (H / Hk)
    V   width of v                       F         features of a key: K except in the Taylor map

Layouts: q, k [B, T, Hk, K], v, o [B, T, H, V], g [B, T, H] or [B, T, H, K], beta [B, T, H], states [N, H, F, V]. A
normaliser is one more column of the state, whose value is 1.
"""

from __future__ import annotations

import math
from collections.abc import Set
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar, NamedTuple

from ..operands import Spec, scale_of
from ..problem import LONGEST
from .family import Family, Specs, Uses, accumulator, check_array, check_floating, check_packed, chunk_of

# dtypes in which states may be stored, next to that of sums
NARROW = ("bfloat16", "float16")
MAPS = ("elu+1", "relu", "exp", "taylor")
LONGEST_CHUNK = 128


class MatrixOptions(NamedTuple):
    """rule: "add", or "delta", which first removes the state's value for the key. out_dtype: "" for the inputs'.

    return_state: whether the final state is used; if not, a backend may compute it with less precision. state_dtype:
    the dtype to which it is rounded, "" for that of sums.
    """

    rule: str = "add"
    feature_map: str = ""
    normalize: bool = False
    causal: bool = True
    scale: float | None = None
    chunk: int | None = None
    out_dtype: str = ""
    return_state: bool = True
    state_dtype: str = ""
    backend: str | None = None


def kept(return_state: object) -> tuple[bool, str]:
    """(return_state, state_dtype) of a caller's return_state; raises ValueError for another value."""
    if return_state in (True, False):
        return bool(return_state), ""
    if return_state not in NARROW:
        raise ValueError(f"return_state is {return_state!r}; expected True, False, {' or '.join(map(repr, NARROW))}")
    return True, str(return_state)


@dataclass(frozen=True)
class Matrix(Uses):
    """One call without its arrays. decay: "" for none, "head" for g [B, T, H], "channel" for g [B, T, H, K].

    present: the names of the optional arrays that it has. initial_dtype, state_dtype: those of the first and the last
    state if they are narrower than sums, else "".
    """

    backend_module: ClassVar[str] = "recurrent"
    known: ClassVar[Set[str]] = {
        *("B", "T", "N", "H", "Hk", "K", "V"),
        *("dtype", "scale", "chunk", "out_dtype", "device", "present", "decay", "return_state"),
    }

    B: int
    T: int
    N: int
    H: int
    Hk: int
    K: int
    V: int
    dtype: str
    scale: float
    chunk: int
    out_dtype: str
    device: str
    present: frozenset[str] = frozenset()
    decay: str = ""
    rule: str = "add"
    feature_map: str = ""
    normalize: bool = False
    causal: bool = True
    return_state: bool = True
    initial_dtype: str = ""
    state_dtype: str = ""

    @property
    def beta(self) -> bool:
        """Whether keys are written with weights beta."""
        return "beta" in self.present

    @property
    def F(self) -> int:
        """Features of a key, the rows of a state; in the Taylor map 1, x and all products of two numbers."""
        return features(self.K, self.feature_map)

    @property
    def columns(self) -> int:
        """Columns of a state: V, and one for the normaliser."""
        return self.V + int(self.normalize)

    @property
    def accumulator(self) -> str:
        """The dtype of states and sums."""
        return accumulator(self.dtype)

    @cached_property
    def outputs(self) -> tuple[Spec, ...]:
        """o [B, T, H, V] and the final state [N, H, F, columns]."""
        state = (self.N, self.H, self.F, self.columns)
        return (
            Spec((self.B, self.T, self.H, self.V), self.out_dtype, self.device),
            Spec(state, self.state_dtype or self.accumulator, self.device),
        )


def features(K: int, feature_map: str) -> int:
    """The number of features of a key of width K."""
    return 1 + K + K * (K + 1) // 2 if feature_map == "taylor" else K


def describe(specs: Specs, options: MatrixOptions) -> Matrix:
    """Check a call and describe it; specs by the names of `MATRIX`.

    Raises ValueError or TypeError; the message says what was passed, what was expected and what to do.
    """
    q, k, v, g, beta = (specs[name] for name in ("q", "k", "v", "g", "beta"))
    if q is None or k is None or v is None:
        missing = next(name for name in ("q", "k", "v") if specs[name] is None)
        raise TypeError(f"{missing} is None; expected an array")
    check_floating("q", q, 4, "[B, T, H, K]")
    check_floating("v", v, 4, "[B, T, H, V]")
    (B, T, Hk, K), (H, V) = q.shape, v.shape[2:]
    check_array("k", k, (B, T, Hk, K), "that of q, [B, T, H, K]", (q.dtype,), q)
    check_array("v", v, (B, T, H, V), "[B, T, H, V] with the B and T of q", (q.dtype,), q)
    if H % Hk:
        raise ValueError(f"q and k have {Hk} heads and v has {H}; expected theirs to divide v's")
    if T >= LONGEST:
        raise ValueError(f"T is {T}; expected less than 2**30: split the call and carry the state")
    wide = accumulator(q.dtype)
    decay = ""
    if g is not None:
        decay = "channel" if len(g.shape) == 4 else "head"
        shape, layout = ((B, T, H, K), "[B, T, H, K]") if decay == "channel" else ((B, T, H), "[B, T, H]")
        check_array("g", g, shape, layout, (q.dtype, wide), q)
    if beta is not None:
        check_array("beta", beta, (B, T, H), "[B, T, H]", (q.dtype, wide), q)
    N = check_packed(specs["cu_seqlens"], B, T)
    initial = specs["initial_state"]
    if initial is not None:
        shape = (N, H, features(K, options.feature_map), V + int(options.normalize))
        check_array("initial_state", initial, shape, "[N, H, K, V]", (wide, *NARROW), q)
    return Matrix(
        B=B,
        T=T,
        N=N,
        H=H,
        Hk=Hk,
        K=K,
        V=V,
        dtype=q.dtype,
        decay=decay,
        rule=options.rule,
        feature_map=options.feature_map,
        normalize=options.normalize,
        causal=options.causal,
        scale=1 / math.sqrt(K) if options.scale is None else scale_of(options.scale, q.dtype),
        chunk=min(_chunk(options.chunk, decay, options.rule, K), max(T, 1)),
        out_dtype=options.out_dtype or q.dtype,
        return_state=options.return_state,
        initial_dtype="" if initial is None or initial.dtype == wide else initial.dtype,
        state_dtype=options.state_dtype,
        device=q.device,
        present=MATRIX.present(specs),
    )


def _chunk(chunk: int | None, decay: str, rule: str, K: int) -> int:
    size = chunk_of(chunk, 16 if decay == "channel" or rule == "delta" else 32, LONGEST_CHUNK)
    # if a chunk has more keys than dimensions, they overwrite one another and their values cancel in its sums
    return min(size, K) if rule == "delta" else size


MATRIX = Family(
    name="matrix_state",
    inputs=("q", "k", "v", "g?", "beta?", "initial_state?", "cu_seqlens?"),
    integers=frozenset({"cu_seqlens"}),
    schema="str rule, str feature_map, bool normalize, bool causal, float? scale, int? chunk, str out_dtype, "
    "bool return_state, str state_dtype, str? backend",
    outputs=("o", "final_state"),
    Options=MatrixOptions,
    describe=describe,
)
