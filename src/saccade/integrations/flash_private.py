"""The private functions of flash-attn 2 on which implementations of ring attention are built (ring-flash-attention).

Names and order of the arguments, and the results, are those of flash-attn's main branch of August 2026. Differences:
the sums that a backward returns are not padded to 128 rows; rng_state contains Saccade's seed; a forward records no
graph.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..errors import Unsupported
from ..mask import Mask
from .flash_arguments import Forward, bias_of, check_numbers, mask_of, needs_gradient
from .flash_backward import Backward, write_gradients
from .flash_options import FlashOptions, attend_flash
from .flash_packed import Sequences, attend_pages, check_rows, check_sequences, packed, packed_mask

NO_GRAPH = "_flash_attn_forward records no graph: call flash_attn_func, or the backward function by hand"


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float,
    softmax_scale: float | None,
    causal: bool,
    window_size_left: int,
    window_size_right: int,
    softcap: float,
    alibi_slopes: Tensor | None,
    return_softmax: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(out [B, Sq, Hq, Dv], lse [B, Hq, Sq], S_dmask, rng_state int64 [2]) of q [B, Sq, Hq, D] and k, v [B, Sk, Hk, D].

    The options are those of `flash_attn_func`; S_dmask is empty without return_softmax or without dropout.
    """
    window = window_size_left, window_size_right
    options = FlashOptions(dropout_p, softmax_scale, causal, window, softcap, alibi_slopes, True, return_softmax)
    return _forward(q, k, v, mask_of(causal, window), options, None)


def varlen_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float,
    softmax_scale: float | None,
    causal: bool,
    window_size_left: int = -1,
    window_size_right: int = -1,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    return_softmax: bool = False,
    block_table: Tensor | None = None,
    leftpad_k: Tensor | None = None,
    seqused_k: Tensor | None = None,
    zero_tensors: bool = False,
    num_splits: int = 0,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(out [total, Hq, Dv], lse [Hq, total], S_dmask, rng_state int64 [2]) of packed q, k and v.

    seqused_k: int [B], the number of keys of each sequence that are in use. leftpad_k: int [B], the first key of each.
    The other options are those of `flash_attn_varlen_func`.
    """
    window = window_size_left, window_size_right
    options = FlashOptions(dropout_p, softmax_scale, causal, window, softcap, alibi_slopes, True, return_softmax)
    mask, at = mask_of(causal, window), Sequences(cu_seqlens_q, cu_seqlens_k, None, seqused_k, leftpad_k)
    check_rows(q, k, v, block_table is not None)
    check_sequences(cu_seqlens_q, cu_seqlens_k, len(q), None if block_table is not None else len(k))
    if block_table is None:
        _refuse_slopes(at, alibi_slopes, len(q) == len(k))
        return _forward(q, k, v, packed_mask(mask, at, len(q) == len(k)), options, (cu_seqlens_q, cu_seqlens_k))
    if dropout_p or alibi_slopes is not None or leftpad_k is not None:
        reason = "dropout, ALiBi and leftpad_k are not computed over pages: gather the keys first"
        raise Unsupported("flash_attn", [reason])
    lengths = cu_seqlens_k.diff() if seqused_k is None else seqused_k
    numbers: dict[str, Any] = {"scale": softmax_scale, "softcap": softcap or None}
    o, lse = attend_pages(q, k, v, cu_seqlens_q, lengths, ("block_table", block_table), mask=mask, **numbers)
    return o, lse.contiguous(), q.new_empty(0), _state(None, q)


def backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    softmax_lse: Tensor,
    dq: Tensor | None,
    dk: Tensor | None,
    dv: Tensor | None,
    dropout_p: float,
    softmax_scale: float | None,
    causal: bool,
    window_size_left: int,
    window_size_right: int,
    softcap: float,
    alibi_slopes: Tensor | None,
    deterministic: bool,
    rng_state: Tensor | None = None,
) -> Tensor:
    """Write the gradients into dq, dk and dv, and return the sums of dout · out, [B, Hq, Sq].

    out and softmax_lse may belong to more keys than k, as in a ring; dq is then the contribution of these keys.
    """
    window = window_size_left, window_size_right
    options = FlashOptions(dropout_p, softmax_scale, causal, window, softcap, alibi_slopes, deterministic, False)
    call = Backward(dout, q, k, v, out, softmax_lse, (dq, dk, dv))
    return _backward(call, Sequences(), options, rng_state)


def varlen_backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    softmax_lse: Tensor,
    dq: Tensor | None,
    dk: Tensor | None,
    dv: Tensor | None,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float,
    softmax_scale: float | None,
    causal: bool,
    window_size_left: int,
    window_size_right: int,
    softcap: float,
    alibi_slopes: Tensor | None,
    deterministic: bool,
    rng_state: Tensor | None = None,
    zero_tensors: bool = False,
) -> Tensor:
    """`backward` for packed sequences; the sums of dout · out are [Hq, total]."""
    window = window_size_left, window_size_right
    options = FlashOptions(dropout_p, softmax_scale, causal, window, softcap, alibi_slopes, deterministic, False)
    call, at = Backward(dout, q, k, v, out, softmax_lse, (dq, dk, dv)), Sequences(cu_seqlens_q, cu_seqlens_k)
    _refuse_slopes(at, alibi_slopes, len(q) == len(k))
    return _backward(call, at, options, rng_state)


def _forward(
    q: Tensor, k: Tensor, v: Tensor, mask: Mask | None, options: FlashOptions, cu: tuple[Tensor, Tensor] | None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    check_numbers(options.softmax_scale, options.softcap, options.dropout_p)

    def compute() -> Any:
        with torch.no_grad():
            o, lse, weights, seed = attend_flash(q, k, v, mask, options, cu, True)
        return o, lse.contiguous(), weights, _state(seed, q)

    inputs = [x for x in (q, k, v, options.alibi_slopes) if x is not None]
    return Forward.apply(compute, NO_GRAPH, *inputs) if needs_gradient(*inputs) else compute()


def _backward(call: Backward, at: Sequences, options: FlashOptions, rng_state: Tensor | None) -> Tensor:
    check_numbers(options.softmax_scale, options.softcap, options.dropout_p)
    if options.dropout_p and rng_state is None:
        raise ValueError(f"dropout_p is {options.dropout_p} without rng_state; expected that of the forward")
    scores: dict[str, Any] = {
        "scale": options.softmax_scale,
        "softcap": options.softcap or None,
        "bias": bias_of(options.alibi_slopes, 1 if packed(at) else len(call.q), call.q.shape[-2]),
        "dropout": options.dropout_p,
        "seed": int(rng_state[0]) if options.dropout_p and rng_state is not None else None,
        "deterministic": options.deterministic,
    }
    return write_gradients(call, at, mask_of(options.causal, options.window_size), **scores)


def _refuse_slopes(at: Sequences, slopes: Tensor | None, equal: bool) -> None:
    # in a packed row, ALiBi counts positions of the whole row
    plain = equal and at.cu_q is at.cu_k and at.used_k is at.first_k is None
    if slopes is not None and not (plain and slopes.dim() == 1):
        what = "alibi_slopes of packed sequences are [Hq], for q as long as k and cu_seqlens_q that is cu_seqlens_k"
        raise Unsupported("flash_attn", [f"{what}: call flash_attn_varlen_func"])


def _state(seed: int | None, q: Tensor) -> Tensor:
    return torch.tensor([seed or 0, 0], dtype=torch.int64, device=q.device)
