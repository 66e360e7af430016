"""The tolerance rule. It is derived, never tuned:

    err(kernel, oracle) <= 2 * err(plain attention in the same dtype, oracle) + band

err is the largest difference of an array. band is 4 * eps(dtype) * max|ref| for o and each gradient, and
8 * eps * max(1, |x|) for numbers x of lse, max and entropy, by the eps of their own dtype; fp64 has 64 in place of 4
and 8.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..quantised import Quantised

Array = NDArray[Any]

# results that have one number per row
ROWS = ("lse", "max", "entropy")


class Met(NamedTuple):
    """The error of an array and the allowed error, at the element with the least margin."""

    name: str
    error: float
    allowed: float
    note: str = ""

    @property
    def ok(self) -> bool:
        """Whether the error is within the rule."""
        return not self.note and self.error <= self.allowed

    def __str__(self) -> str:
        verdict = "ok" if self.ok else "FAILED"
        return (
            f"{self.name}: error {self.error:.3e}, allowed {self.allowed:.3e} {verdict}{self.note and ': '}{self.note}"
        )


def coded(x: Array, how: Quantised) -> Array:
    """The allowed differences between numbers x [..., n] and their codes, float64.

    Relative to the number of largest size in a group: half a code, a whole code opposite the -8 of int4, half the last
    of four bits of fp8. 2**-6 of this is added, because scales are rounded up.
    """
    share = {"int8": 0.5 / 127, "int4": 1 / 8, "fp8": 1 / 16}[how.kind] * (1 + 2**-6)
    top = np.abs(np.asarray(x, np.float64))
    groups = [top[..., a : a + how.group] for a in range(0, top.shape[-1], how.group)]
    return np.concatenate([np.broadcast_to(g.max(-1, keepdims=True), g.shape) for g in groups], -1) * share + 2.0**-126


def eps(dtype: Any) -> float:
    """The distance from 1 to the next number of a dtype, which may be bfloat16."""
    dtype = np.dtype(dtype)
    if dtype.kind != "f":
        import ml_dtypes

        return float(ml_dtypes.finfo(dtype).eps)
    return float(np.finfo(dtype).eps)


def measure(name: str, got: Array, ref: Array, plain: Array, dtype: Any) -> Met:
    """Compare one array with the oracle's `ref` and with `plain`, standard attention in `dtype` (one run or a stack).

    The names in ROWS have their own band. Where ref is not finite, got must be the same: NaN, or an infinity of that
    sign.
    """
    if got.shape != ref.shape:
        return Met(name, np.inf, 0.0, f"shape {list(got.shape)}, expected {list(ref.shape)}")
    if not ref.size:
        return Met(name, 0.0, 0.0)
    got, finite = np.asarray(got, np.float64), np.isfinite(ref)
    same = np.where(np.isnan(ref), np.isnan(got), got == ref)
    wrong = ~np.where(finite, np.isfinite(got), same)
    if wrong.any():
        at = tuple(int(n) for n in np.argwhere(wrong)[0])
        return Met(
            name, np.inf, 0.0, f"{int(wrong.sum())} elements, the first at {list(at)}: {got[at]}, expected {ref[at]}"
        )
    with np.errstate(invalid="ignore"):
        error = np.where(finite, abs(got - ref), 0)
        plain_error = np.where(finite & np.isfinite(plain), abs(np.asarray(plain, np.float64) - ref), 0).max()
    allowed = 2 * plain_error + band(name, np.where(finite, ref, 0), dtype)
    worst = np.unravel_index(np.argmax(error - allowed), ref.shape)
    return Met(name, float(error[worst]), float(allowed[worst]))


def band(name: str, ref: Array, dtype: Any) -> Array:
    """The term that the rule adds to twice the error of plain attention, for each element of a finite ref."""
    size, wide = abs(ref), np.dtype(dtype) == np.float64
    if name in ROWS:
        return (64 if wide else 8) * eps(np.float64 if wide else np.float32) * np.maximum(1, size)
    return np.full(ref.shape, (64 if wide else 4) * eps(dtype) * size.max())


def measure_all(
    got: Mapping[str, Array], ref: Mapping[str, Array], plain: Mapping[str, Array], dtype: Any
) -> list[Met]:
    """`measure` of every array of `got`, by name."""
    return [measure(name, got[name], ref[name], plain[name], dtype) for name in got]


def require(mets: list[Met], what: object = "") -> None:
    """Raise AssertionError with all measures if one of them violates the rule."""
    if not all(met.ok for met in mets):
        raise AssertionError("\n  ".join([f"outside the tolerance rule: {what}", *map(str, mets)]))
