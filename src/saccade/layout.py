"""Arrays whose heads come before their tokens, as views [B, T, H, D] and back."""

from __future__ import annotations

import inspect
import warnings
from typing import Any

DEFAULT = "bthd"
# models with fewer heads of keys than this are never taken for calls with tokens and heads exchanged
MANY_HEADS = 64


def check_layout(layout: Any) -> None:
    """ValueError for a layout that does not exist."""
    if layout not in (DEFAULT, "bhtd"):
        raise ValueError(f"layout is {layout!r}; expected 'bthd' for arrays [B, T, H, D], or 'bhtd' for [B, H, T, D]")


def exchanged(x: Any) -> Any:
    """A view of [B, T, H, D] or [T, H, D] with tokens and heads exchanged. TypeError for an array without views."""
    if not hasattr(x, "swapaxes"):
        raise TypeError(
            f"layout is 'bhtd' for an array that is {type(x).__name__}; expected one of torch, NumPy or MLX: others "
            f"are [B, T, H, D]"
        )
    return x.swapaxes(-3, -2)


def lse_exchanged(lse: Any) -> Any:
    """The same of lse, [B, T, H] or [T, H]; None stays."""
    return None if lse is None else lse.swapaxes(-2, -1)


_warned = False


def warn_if_exchanged(Tq: int, Tk: int, Hk: int) -> None:
    """Warn, once in a process, of a call whose tokens and heads look exchanged: it has far more heads than tokens."""
    global _warned
    if _warned or Hk < MANY_HEADS or Hk < 4 * max(Tq, Tk):
        return
    _warned = True
    level, frame = 1, inspect.currentframe()
    while frame is not None and frame.f_globals.get("__name__", "").startswith("saccade."):
        level, frame = level + 1, frame.f_back
    warnings.warn(
        f"k has {Tk} tokens and {Hk} heads, read as [B, T, H, D]. If your arrays are [B, H, T, D], pass "
        f"layout='bhtd': the result is wrong otherwise. If not, ignore this warning, which comes once in a process.",
        stacklevel=level,
    )
