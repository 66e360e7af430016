"""The recurrences over matrix states as public calls: what each computes, in which layouts, from which paper."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np

from .family import Family
from .problem import MATRIX, Options


def scalar_decay(
    q: Any,
    k: Any,
    v: Any,
    g: Any,
    *,
    scale: float | None = None,
    initial_state: Any = None,
    return_state: bool = False,
    cu_seqlens: Any = None,
    chunk: int | None = None,
    backend: str | None = None,
) -> Any:
    """One decay a head and token: S_t = exp(g_t) S_{t-1} + k_t v_tᵀ, o_t = scale S_tᵀ q_t (row S31).

    RetNet (Sun et al., 2023) where g is constant in time, the simple form of GLA and Mamba-2's SSD elsewhere.

    Args:
        q, k: [B, T, Hk, K], torch tensors or NumPy arrays of float32, bfloat16, float16 or float64; Hk divides H, and
            head h reads head h // (H / Hk).
        v: [B, T, H, V].
        g: [B, T, H], logarithm of the decay, at most 0; -inf resets the state. In the dtype of q or float32.
        scale: factor of o, 1/sqrt(K) if None.
        initial_state: [B, H, K, V] float32 (float64 for float64 inputs), zeros if None; with cu_seqlens [N, H, K, V].
        return_state: return (o, S_T), to go on from with the next tokens.
        cu_seqlens: [N + 1] integers from 0 to T, the borders of packed sequences; B must be 1.
        chunk: tokens computed at a time, 1 to 128; 1 is the recurrence itself. None: the plan's choice.
        backend: "cpu", or None to choose by where the arrays live.

    Returns:
        o [B, T, H, V] in the dtype of q; with `return_state` also the final state, shaped as the initial one.

    Raises:
        TypeError, ValueError: an argument is wrong; the message names it.
        Unsupported: the backend cannot compute this.
    """
    arrays = {"q": q, "k": k, "v": v, "g": g, "initial_state": initial_state, "cu_seqlens": cu_seqlens}
    if g is None:
        raise TypeError("g is None; expected an array [B, T, H]: linear_attention has no decay")
    o, state = compute(MATRIX, arrays, Options(scale=scale, chunk=chunk, backend=backend))
    return (o, state) if return_state else o


def compute(family: Family, arrays: dict[str, Any], options: Any) -> tuple[Any, ...]:
    """The outputs of a family's operator, in the framework of its first array; arrays left out are None."""
    given = {name: arrays.get(name) for name in family.names}
    first = family.names[0]
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(given[first], torch.Tensor):
        from ..frameworks import torch_recurrent as framework
    elif isinstance(given[first], np.ndarray):
        from ..frameworks import numpy_recurrent as framework
    else:
        kind = type(given[first]).__name__
        raise TypeError(f"{first} is {kind}; expected a torch tensor or a NumPy array")
    return framework.compute(family, given, options)
