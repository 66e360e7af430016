"""The mask of `gates(log_f, prune=)`, which skips keys with negligible weights (Lin et al., 2025, adaptive pruning)."""

from __future__ import annotations

import math
import sys
from typing import Any

import numpy as np

from .arrays import is_torch
from .biases import Bias, running_sums
from .errors import Unsupported
from .mask import Mask, columns, per_head
from .mask.text import brief

# kinds of masks under which a query that sees any key sees the key at its own position, if no query sees later keys
_SEEING = {"full", "causal", "window", "documents", "packed", "keys"}


def pruned(mask: Mask | None, q: Any, k: Any, bias: Bias, scale: float | None, softcap: float | None) -> Mask:
    """The mask without pairs of so little weight that each row loses at most the share `bias.prune`.

    Let U bound the scores without the gates: scale times the largest |q| and |k|, or the softcap. If the gate sum
    c_i - c_j is below log(prune) - log(Tk) - 2 U, key j has less than prune / Tk of the weight of the query's own key.
    q: [B, Tq, Hq, D], k: [B, Tk, Hk, D], NumPy or torch. Raises ValueError for terms besides the gates, and for a mask
    under which a query might not see its own position.
    """
    if not isinstance(q, np.ndarray) and not is_torch(q):
        raise TypeError(f"prune is given for {type(q).__name__}; expected NumPy arrays or tensors: leave prune out")
    if any(x is not None for x in (bias.array, bias.slopes, bias.table)):
        raise ValueError("prune is given for a sum of terms; expected gates alone, whose sums bound the scores")
    if mask is None or not _sees_itself(mask):
        raise ValueError(
            f"prune is given with the mask {None if mask is None else brief(mask)}; expected causal, window, documents "
            f"and keys joined by &, under which a query sees the key at its own position"
        )
    if q.ndim == 3:
        q, k = q[None], k[None]
    B, Tq, Hq, D = q.shape
    Tk = k.shape[1]
    if not B * Tq * Tk:
        return mask
    bound = _longest(q) * _longest(k).repeat(Hq // k.shape[2], 1) * abs(D**-0.5 if scale is None else scale)
    bound = np.minimum(bound, softcap) if softcap else bound
    least = math.log(bias.prune or 1.0) - math.log(Tk) - 2 * bound
    # [B, Hq, Tk], negated sums, which rise with the position
    sums = -np.asarray(_host(running_sums(bias.log_f))).swapaxes(1, 2)
    offset = np.broadcast_to(np.reshape(mask.offset(B, Tq, Tk), -1), (B,))
    stops = np.empty((Hq, B, Tk), np.int32)
    for b, h in np.ndindex(B, Hq):
        position = np.searchsorted(sums[b, h], sums[b, h] - least[b, h], "right")
        stops[h, b] = np.maximum(np.where(position < Tk, position - offset[b], Tq), 0)
    return mask & per_head([columns(stop=stop) for stop in stops])


def _sees_itself(mask: Mask) -> bool:
    parts = mask.children if mask.kind == "and" else (mask,)
    for part in parts:
        shifted = part.kind in ("causal", "window") and part.args[-1] is not None
        other_queries = part.kind in ("documents", "packed") and part.args[1] is not None
        if part.kind not in _SEEING or shifted or other_queries or part.children:
            return False
    return True


def _longest(x: Any) -> Any:
    # [B, H], the largest norm; NaN prunes nothing
    x = _host(x if isinstance(x, np.ndarray) else x.detach().float())
    return np.sqrt(np.square(x, dtype=np.float64).sum(-1).max(1))


def _host(x: Any) -> Any:
    torch = None if isinstance(x, np.ndarray) else sys.modules["torch"]
    if torch is not None and torch.compiler.is_compiling():
        raise Unsupported("torch", ["prune of gates reads q, k and log_f: call it outside of torch.compile"])
    return x if isinstance(x, np.ndarray) else x.detach().cpu().numpy()
