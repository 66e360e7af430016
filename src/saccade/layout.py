"""Arrays whose heads come before their tokens, as views [B, T, H, D] and back."""

from __future__ import annotations

import inspect
import warnings
from typing import Any

from .arrays import is_torch

DEFAULT = "bthd"
# a call with fewer key heads than this is never suspected of having tokens and heads swapped
MANY_HEADS = 64


def tokens_first(layout: Any, *arrays: Any) -> list[Any]:
    """Views of arrays [B, H, T, D] or [H, T, D] with tokens before heads.

    Raises ValueError for an unknown layout, TypeError for an array without `swapaxes`.
    """
    if layout != "bhtd":
        raise ValueError(f"layout is {layout!r}; expected 'bthd' for arrays [B, T, H, D], or 'bhtd' for [B, H, T, D]")
    return [_exchanged(x) for x in arrays]


def lse_tokens_first(*arrays: Any) -> list[Any]:
    """Views of lse and its gradient, [B, H, T] or [H, T], with tokens before heads; None stays None."""
    return [None if x is None else x.swapaxes(-2, -1) for x in arrays]


def heads_first(o: Any, *rows: Any) -> tuple[Any, ...]:
    """Views of the results [B, T, H, D] and [B, T, H], or None, with heads before tokens."""
    return _exchanged(o), *lse_tokens_first(*rows)


def _exchanged(x: Any) -> Any:
    # Dynamo of torch 2.9 finds no `swapaxes` in a tensor
    if not (is_torch(x) or hasattr(x, "swapaxes")):
        raise TypeError(
            f"layout is 'bhtd' for an array of type {type(x).__name__}; expected torch, NumPy or MLX: pass others as "
            f"[B, T, H, D]"
        )
    return x.swapaxes(-3, -2)


_warned = False


def warn_if_exchanged(Tq: int, Tk: int, Hk: int) -> None:
    """Warn, once per process, of a call with far more heads than tokens, which are probably swapped."""
    global _warned
    if _warned or Hk < MANY_HEADS or Hk < 4 * max(Tq, Tk):
        return
    _warned = True
    level, frame = 1, inspect.currentframe()
    while frame is not None and frame.f_globals.get("__name__", "").startswith("saccade."):
        level, frame = level + 1, frame.f_back
    warnings.warn(
        f"k has {Tk} tokens and {Hk} heads, read as [B, T, H, D]. If your arrays are [B, H, T, D], pass "
        f"layout='bhtd': the result is wrong otherwise. If not, ignore this warning, which appears once per process.",
        stacklevel=level,
    )
