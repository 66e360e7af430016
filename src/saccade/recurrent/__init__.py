"""Recurrences in place of softmax: linear attention, gated and delta rules, state-space scans, in O(T) work.

Matrix states (`linear_attention`, `scalar_decay`, `gated_linear`, `gated_delta_rule`, `ssd`), S [B, H, K, V]:

    S_t = decay_t S_{t-1} + k_t v_tᵀ        o_t = scale S_tᵀ q_t

Arrays are [B, T, H, ·], states float32 (float64 for float64 inputs) whatever the inputs. Packed documents are one batch
entry with `cu_seqlens` [N + 1]: states are reset at its borders, and initial and final ones are [N, ...]. Decoding is
the same call with T = 1, `initial_state` and `return_state`: it takes the recurrent form, with no chunk around it.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .ops import gated_delta_rule, gated_linear, linear_attention, scalar_decay
    from .ssd import ssd

__all__ = ["gated_delta_rule", "gated_linear", "linear_attention", "scalar_decay", "ssd"]

_HOMES = {
    "gated_delta_rule": "ops",
    "gated_linear": "ops",
    "linear_attention": "ops",
    "scalar_decay": "ops",
    "ssd": "ssd",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}; its names are {', '.join(__all__)}")
    value = getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
