"""Recurrences in place of softmax: linear attention, gated and delta rules, state-space scans, in O(T) work.

Matrix states (`linear_attention`, `scalar_decay`, `gated_linear`, `gated_delta_rule`, `ssd`), S [B, H, K, V]:

    S_t = decay_t S_{t-1} + k_t v_tᵀ        o_t = scale S_tᵀ q_t

Diagonal states (`selective_scan`, `rg_lru`), one number h a channel or N of them, and the convolution before them
(`causal_conv1d`), whose state is its last inputs. Their arrays are [B, T, D], states [B, D, N], [B, D], [B, D, K − 1]:

    h_t = a_t ⊙ h_{t-1} + b_t

Arrays of heads are [B, T, H, ·], states float32 (float64 for float64 inputs) whatever the inputs. Packed documents are
one batch entry with `cu_seqlens` [N + 1]: states are reset at its borders, and initial and final ones are [N, ...].
Decoding is the same call with T = 1, `initial_state` and `return_state`: it takes the recurrent form, with no chunk
around it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from saccade.lazily import names

if TYPE_CHECKING:
    from .diagonal_ops import causal_conv1d, rg_lru, selective_scan
    from .ops import gated_delta_rule, gated_linear, linear_attention, scalar_decay
    from .ssd import ssd

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
    "ssd": "ssd",
}


__getattr__ = names(globals(), _HOMES)


def __dir__() -> list[str]:
    return sorted(__all__)
