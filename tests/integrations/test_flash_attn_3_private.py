"""FlashAttention-3's private functions, as Megatron and Transformer Engine call them."""

from __future__ import annotations

import inspect

import pytest
import torch

from saccade import Unsupported
from saccade.integrations import flash_attn_3 as ours

from .flash_reference import HK, HQ, SK, SQ, B, D, close, paged, plain, rand, sequences, signature

# flash-attn's main branch, August 2026
SIGNATURES = {
    "_flash_attn_forward": "q, k, v, k_new=None, v_new=None, qv=None, out_=None, cu_seqlens_q=None, cu_seqlens_k=None, "
    "cu_seqlens_k_new=None, seqused_q=None, seqused_k=None, max_seqlen_q=None, max_seqlen_k=None, page_table=None, "
    "kv_batch_idx=None, leftpad_k=None, rotary_cos=None, rotary_sin=None, seqlens_rotary=None, q_descale=None, "
    "k_descale=None, v_descale=None, softmax_scale=None, causal=False, window_size_left=-1, window_size_right=-1, "
    "attention_chunk=0, softcap=0.0, rotary_interleaved=True, scheduler_metadata=None, num_splits=1, pack_gqa=None, "
    "sm_margin=0",
    "_flash_attn_backward": "dout, q, k, v, out, softmax_lse, cu_seqlens_q=None, cu_seqlens_k=None, sequed_q=None, "
    "sequed_k=None, max_seqlen_q=None, max_seqlen_k=None, dq=None, dk=None, dv=None, softmax_scale=None, "
    "is_causal=False, window_size_left=-1, window_size_right=-1, softcap=0.0, deterministic=False, sm_margin=0",
}


def ints(*numbers: int) -> torch.Tensor:
    return torch.tensor(numbers, dtype=torch.int32)


@pytest.mark.parametrize("name", SIGNATURES)
def test_signatures(name) -> None:
    assert signature(getattr(ours, name)) == SIGNATURES[name]


def test_megatron_calls_the_forward_by_the_names_it_has() -> None:
    """As in Megatron's wrapper, which knows the names of several versions and passes those in the signature."""
    cu_q, lengths = ints(0, 5, 6), [9, 13]
    q, k, v = rand(6, HQ, D), *(rand(sum(lengths), HK, D, seed=s) for s in (1, 2))
    cu_k = ints(0, 9, 22)
    (pages, table), (values, _) = paged(k, cu_k, 8), paged(v, cu_k, 8)
    known = {
        "q": q, "k": pages, "v": values, "out": None, "cu_seqlens_q": cu_q, "seqused_k": ints(*lengths),
        "max_seqlen_q": 5, "max_seqlen_k": 16, "page_table": table, "softmax_scale": 0.3, "causal": True,
        "attention_chunk": 0, "window_size": (6, 0), "window_size_left": 6, "window_size_right": 0, "num_splits": 0,
        "pack_gqa": None, "sm_margin": 0, "scheduler_metadata": None, "rotary_interleaved": True, "softcap": 0.0,
    }  # fmt: skip
    assert inspect.isfunction(ours._flash_attn_forward)
    names = inspect.signature(ours._flash_attn_forward).parameters
    o, lse, *_ = ours._flash_attn_forward(**{name: x for name, x in known.items() if name in names})
    want = sequences(q, k, v, cu_q, cu_k, scale=0.3, causal=True, window=(6, 0))
    close(o, torch.cat([x for x, _ in want]))
    close(lse, torch.cat([x for _, x in want], 1))
    # decoding: one query of each sequence
    decoded = ours.flash_attn_with_kvcache(
        q=q[:2, None], k_cache=pages, v_cache=values, cache_seqlens=ints(*lengths), softmax_scale=0.3, causal=True,
        window_size=(6, 0), page_table=table, num_splits=0,
    )  # fmt: skip
    for b, part in enumerate(sequences(q[:2], k, v, ints(0, 1, 2), cu_k, scale=0.3, causal=True, window=(6, 0))):
        close(decoded[b], part[0])


@pytest.mark.parametrize("used", [False, True])
def test_transformer_engine_calls_by_position(used) -> None:
    """Twelve arguments and nine None by position, the rest by name; a part of the keys at a time, with gradients."""
    cu_q, cu_k = ints(0, 4, 10), ints(0, 6, 14)
    q, k, v = (rand(int(cu[-1]), h, D, seed=n) for n, (cu, h) in enumerate(((cu_q, HQ), (cu_k, HK), (cu_k, HK))))
    n, m = ([3, 6], [5, 8]) if used else ([4, 6], [6, 8])
    lengths = [ints(*n), ints(*m)] if used else [None, None]
    options = {"softmax_scale": 0.3, "window_size_left": -1, "window_size_right": 0}
    o, lse, *_ = ours._flash_attn_forward(
        q, k, v, *[None] * 4, cu_q, cu_k, None, *lengths, 6, 8, *[None] * 9, causal=True, **options
    )
    inputs = [x.requires_grad_() for x in (q, k, v)]
    want = sequences(*inputs, cu_q, cu_k, used_q=n, used_k=m, scale=0.3, causal=True)
    rows = torch.cat([torch.arange(int(cu_q[r]), int(cu_q[r]) + n[r]) for r in range(2)])
    close(o[rows], torch.cat([x for x, _ in want]))
    do = torch.zeros_like(o)
    do[rows] = rand(len(rows), HQ, D, seed=9)
    buffers = [torch.full_like(x, float("nan")) for x in inputs]
    sums = ours._flash_attn_backward(
        do, *(x.detach() for x in inputs), o, lse, cu_q, cu_k, *lengths, 6, 8, *buffers, is_causal=True, **options
    )
    close(sums, (do * o).sum(-1).mT.double())
    expected = torch.autograd.grad(torch.cat([x for x, _ in want]), inputs, do[rows].double())
    for a, b in zip(buffers, expected, strict=True):
        close(a, b.double())


def test_the_forward_of_rows_writes_its_result_and_records_gradients() -> None:
    q, k, v = (
        rand(B, *shape, seed=n).requires_grad_() for n, shape in enumerate(((SQ, HQ, D), (SK, HK, D), (SK, HK, D)))
    )
    o, lse, *_ = ours._flash_attn_forward(q, k, v, seqused_k=ints(4, 11), causal=True, leftpad_k=ints(1, 2))
    want = [plain(q[b], k[b, :n], v[b, :n], causal=True, first=b + 1) for b, n in enumerate((4, 11))]
    close(lse, torch.stack([x for _, x in want]))
    do = rand(*o.shape, seed=9)
    expected = torch.autograd.grad(torch.stack([x for x, _ in want]), (q, k, v), do.double())
    for a, b in zip(torch.autograd.grad(o, (q, k, v), do), expected, strict=True):
        close(a, b.double())
    out = torch.empty_like(o)
    with torch.no_grad():
        assert ours._flash_attn_forward(q, k, v, out_=out)[0] is out
        assert torch.equal(out, ours.flash_attn_func(q, k, v))
    x, cache = q.detach(), k.detach()
    chosen, *_ = ours._flash_attn_forward(x, cache, cache, kv_batch_idx=ints(1, 0), seqused_k=ints(4, 9), causal=True)
    for b, n in enumerate((4, 9)):
        close(chosen[b], plain(x[b], cache[1 - b, :n], cache[1 - b, :n], causal=True)[0])
    with pytest.raises(Unsupported, match="give cu_seqlens_q of the queries in use"):
        ours._flash_attn_forward(x, cache, cache, kv_batch_idx=ints(0, 1), seqused_q=ints(1, 1))
