"""Recurrences instead of softmax, in O(T) work: linear attention, gated and delta rules, state-space scans.

Matrix states (`linear_attention`, `scalar_decay`, `gated_linear`, `gated_delta_rule`, `ssd`), S [B, H, K, V]:

    S_t = decay_t S_{t-1} + k_t v_tᵀ        o_t = scale S_tᵀ q_t

Diagonal states (`selective_scan`, `rg_lru`), one or N numbers h per channel, and the convolution before them
(`causal_conv1d`), whose state is its last inputs. Their arrays are [B, T, D], states [B, D, N], [B, D], [B, D, K − 1]:

    h_t = a_t ⊙ h_{t-1} + b_t

Arrays of heads are [B, T, H, ·]. States are float32 (float64 for float64 inputs). Packed documents are one batch entry
with `cu_seqlens` [N + 1]: states are reset at its borders, and initial and final states are [N, ...]. Decoding is the
same call with T = 1, `initial_state` and `return_state`, which computes one step of the recurrence without chunks.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from saccade.lazily import names

if TYPE_CHECKING:
    from .diagonal_ops import causal_conv1d, rg_lru, selective_scan
    from .mamba2 import ssd
    from .ops import gated_delta_rule, gated_linear, linear_attention, scalar_decay

__all__ = [
    "causal_conv1d",
    "gated_delta_rule",
    "gated_linear",
    "linear_attention",
    "rg_lru",
    "scalar_decay",
    "selective_scan",
    "ssd",
]

_HOMES = {
    "causal_conv1d": "diagonal_ops",
    "gated_delta_rule": "ops",
    "gated_linear": "ops",
    "linear_attention": "ops",
    "rg_lru": "diagonal_ops",
    "scalar_decay": "ops",
    "selective_scan": "diagonal_ops",
    "ssd": "mamba2",
}


__getattr__ = names(globals(), _HOMES)


def __dir__() -> list[str]:
    return sorted(__all__)
