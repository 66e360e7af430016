"""FlashAttention-3's interface compared with plain attention in float64, and as other projects call it."""

from __future__ import annotations

import inspect
from unittest import mock

import pytest
import torch

from saccade import Unsupported
from saccade.integrations import flash_attn as two
from saccade.integrations import flash_attn_3 as ours
from saccade.integrations import flash_packed
from saccade.integrations.flash_arguments import HINTS

from .flash_reference import HK, HQ, SK, SQ, B, D, close, plain, rand, sequences, signature, wanted

DV = 8
# flash-attn's main branch, August 2026
SIGNATURES = {
    "flash_attn_func": "q, k, v, softmax_scale=None, causal=False, qv=None, q_descale=None, k_descale=None, "
    "v_descale=None, window_size=(-1, -1), attention_chunk=0, softcap=0.0, num_splits=1, pack_gqa=None, "
    "deterministic=False, sm_margin=0, return_attn_probs=False",
    "flash_attn_qkvpacked_func": "qkv, softmax_scale=None, causal=False, q_descale=None, k_descale=None, "
    "v_descale=None, window_size=(-1, -1), attention_chunk=0, softcap=0.0, deterministic=False, num_heads_q=None, "
    "sm_margin=0, return_attn_probs=False",
    "flash_attn_varlen_func": "q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, seqused_q=None, "
    "seqused_k=None, softmax_scale=None, causal=False, qv=None, q_descale=None, k_descale=None, v_descale=None, "
    "window_size=(-1, -1), attention_chunk=0, softcap=0.0, num_splits=1, pack_gqa=None, deterministic=False, "
    "sm_margin=0, return_attn_probs=False",
    "flash_attn_with_kvcache": "q, k_cache, v_cache, k=None, v=None, qv=None, rotary_cos=None, rotary_sin=None, "
    "cache_seqlens=None, cache_batch_idx=None, cache_leftpad=None, page_table=None, cu_seqlens_q=None, "
    "cu_seqlens_k_new=None, max_seqlen_q=None, rotary_seqlens=None, q_descale=None, k_descale=None, v_descale=None, "
    "softmax_scale=None, causal=False, window_size=(-1, -1), attention_chunk=0, softcap=0.0, rotary_interleaved=True, "
    "scheduler_metadata=None, num_splits=0, pack_gqa=None, sm_margin=0, return_softmax_lse=False",
    "flash_attn_combine": "out_partial, lse_partial, out=None, out_dtype=None",
    "get_scheduler_metadata": "batch_size, max_seqlen_q, max_seqlen_k, num_heads_q, num_heads_kv, headdim, "
    "cache_seqlens, qkv_dtype=torch.bfloat16, headdim_v=None, cu_seqlens_q=None, cu_seqlens_k_new=None, "
    "cache_leftpad=None, page_size=None, max_seqlen_k_new=0, causal=False, window_size=(-1, -1), attention_chunk=0, "
    "has_softcap=False, num_splits=0, pack_gqa=None, sm_margin=0",
}
OPTIONS = {
    "plain": {},
    "causal": {"causal": True},
    "window": {"window_size": (3, 1)},
    "open window": {"window_size": (None, None)},
    "one side": {"window_size": (None, 2)},
    "chunks": {"attention_chunk": 4},
    "causal chunks": {"attention_chunk": 4, "causal": True},
    "chunks and a window": {"attention_chunk": 5, "window_size": (2, 0)},
    "softcap and scale": {"softcap": 2.0, "softmax_scale": 0.4, "causal": True},
    "qv": {"qv": True, "causal": True},
}


def ints(*numbers: int) -> torch.Tensor:
    return torch.tensor(numbers, dtype=torch.int32)


def arrays(*shapes: tuple[int, ...]) -> list[torch.Tensor]:
    return [rand(*shape, seed=n).requires_grad_() for n, shape in enumerate(shapes)]


def same_gradients(o, want, inputs) -> None:
    do = rand(*o.shape, seed=9)
    pairs = zip(torch.autograd.grad(o, inputs, do), torch.autograd.grad(want, inputs, do.double()), strict=True)
    for a, b in pairs:
        close(a, b.double())


@pytest.mark.parametrize("name", SIGNATURES)
def test_signatures(name) -> None:
    assert signature(getattr(ours, name)) == SIGNATURES[name]


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("sizes", [(SQ, SK), (SK, SQ)])
def test_batches(name, sizes) -> None:
    q, k, v, qv = arrays((B, sizes[0], HQ, D), (B, sizes[1], HK, D), (B, sizes[1], HK, DV), (B, sizes[0], HQ, DV))
    options = dict(OPTIONS[name])
    extra = options.pop("qv", False)
    o, lse = ours.flash_attn_func(q, k, v, **options, qv=qv if extra else None, return_attn_probs=True)
    want = [plain(q[b], k[b], v[b], **wanted(options), qv=qv[b] if extra else None) for b in range(B)]
    close(o, torch.stack([x for x, _ in want]))
    close(lse, torch.stack([x for _, x in want]))
    same_gradients(o, torch.stack([x for x, _ in want]), (q, k, v, qv) if extra else (q, k, v))


def test_the_scale_follows_v() -> None:
    q, k, v = (rand(B, SQ, h, D, seed=n) for n, h in enumerate((HQ, HK, HK)))
    assert torch.equal(ours.flash_attn_func(q, k, v, 0.3, True), two.flash_attn_func(q, k, v, 0.0, 0.3, True))
    cu = ints(0, 3, 7)
    packed = [x[0] for x in (q, k, v)]
    theirs = two.flash_attn_varlen_func(*packed, cu, cu, 4, 4, 0.0, 0.3, True)
    assert torch.equal(ours.flash_attn_varlen_func(*packed, cu, cu, 4, 4, None, None, 0.3, True), theirs)


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("same", [True, False])
@pytest.mark.parametrize("used", [False, True])
def test_packed_sequences(name, same, used) -> None:
    """Rows and keys beyond seqused are NaN, and have no effect."""
    cu_q = ints(0, 5, 5, 12, 20)
    cu_k = cu_q if same else ints(0, 9, 13, 14, 30)
    q, k, v, qv = (
        rand(int(cu[-1]), *shape, seed=n)
        for n, (cu, *shape) in enumerate(((cu_q, HQ, D), (cu_k, HK, D), (cu_k, HK, DV), (cu_q, HQ, DV)))
    )
    n, m = ([4, 0, 7, 2], [5, 0, 1, 6]) if used else (cu_q.diff().tolist(), cu_k.diff().tolist())
    for cu, lengths, tensors in ((cu_q, n, (q, qv)), (cu_k, m, (k, v))):
        for r, length in enumerate(lengths):
            for x in tensors:
                x[int(cu[r]) + length : int(cu[r + 1])] = float("nan")
    options = dict(OPTIONS[name])
    qv = qv.requires_grad_() if options.pop("qv", False) else None
    inputs = [x.requires_grad_() for x in (q, k, v)] + ([] if qv is None else [qv])
    lengths = {"seqused_q": ints(*n), "seqused_k": ints(*m)} if used else {}
    o, lse = ours.flash_attn_varlen_func(
        q, k, v, cu_q, cu_k, 8, 16, **lengths, **options, qv=qv, return_attn_probs=True
    )
    want = sequences(q, k, v, cu_q, cu_k, used_q=n, used_k=m, qv=qv, **wanted(options))
    rows = torch.cat([torch.arange(int(cu_q[r]), int(cu_q[r]) + n[r]) for r in range(4)])
    close(o[rows], torch.cat([x for x, _ in want]))
    close(lse[:, rows], torch.cat([x for _, x in want], 1))
    rest = torch.ones(len(q), dtype=torch.bool)
    rest[rows] = False
    assert not o[rest].any()
    assert (lse[:, rest] == -torch.inf).all()
    same_gradients(o[rows], torch.cat([x for x, _ in want]), inputs)


@pytest.mark.parametrize("sizes", [(12, 17), (19, 12)])
def test_one_array_of_bounds_for_q_not_as_long_as_k(sizes) -> None:
    """Each sequence has its own diagonal; rows behind the last bound have no part in it."""
    cu, inputs = ints(0, 5, 5, 12), arrays((sizes[0], HQ, D), (sizes[1], HK, D), (sizes[1], HK, DV))
    o, lse = ours.flash_attn_varlen_func(*inputs, cu, cu, 7, 7, causal=True, return_attn_probs=True)
    want = sequences(*inputs, cu, cu, causal=True)
    close(o[:12], torch.cat([x for x, _ in want]))
    close(lse[:, :12], torch.cat([x for _, x in want], 1))
    same_gradients(o[:12], torch.cat([x for x, _ in want]), inputs)


@pytest.mark.parametrize("packed", [3, None])
def test_qkv_in_one_tensor(packed) -> None:
    options = {"softmax_scale": 0.3, "causal": True, "window_size": (3, 0), "attention_chunk": 4}
    if packed:
        (qkv,) = arrays((B, SQ, 3, HQ, D))
        parts, o = qkv.unbind(2), ours.flash_attn_qkvpacked_func(qkv, **options)
    else:
        (qkv,) = arrays((B, SQ, HQ + 2 * HK, D))
        parts = qkv.split([HQ, HK, HK], 2)
        o = ours.flash_attn_qkvpacked_func(qkv, **options, num_heads_q=HQ)
    assert torch.equal(o, ours.flash_attn_func(*parts, **options))
    same_gradients(o, torch.stack([plain(*(x[b] for x in parts), **wanted(options))[0] for b in range(B)]), [qkv])


X = rand(B, SQ, HQ, D)
HINTED = {
    "num_splits": 3, "pack_gqa": True, "sm_margin": 8, "scheduler_metadata": torch.zeros(3, dtype=torch.int32),
    "max_seqlen_q": 999, "max_seqlen_k": 999,
}  # fmt: skip


def test_hints_change_no_bit() -> None:
    cache, packed = rand(B, SK, HK, D), X[0]
    calls = [
        (ours.flash_attn_func, (X, cache, cache), {"causal": True}),
        (ours.flash_attn_qkvpacked_func, (torch.stack([X, X, X], 2),), {}),
        (ours.flash_attn_varlen_func, (packed, packed, packed, ints(0, 3, 7), ints(0, 3, 7), 4, 4), {}),
        (ours.flash_attn_with_kvcache, (X, cache, cache), {"cache_seqlens": ints(3, 9)}),
        (ours._flash_attn_forward, (X, cache, cache), {}),
    ]
    for function, arguments, options in calls:
        names = list(inspect.signature(function).parameters)
        hints = {name: HINTED[name] for name in HINTS if name in names[len(arguments) :]}
        assert hints
        # on the CPU all bits are the same ones in any case
        hints |= {"deterministic": True} if "deterministic" in names else {}
        a, b = function(*arguments, **options), function(*arguments, **options, **hints)
        assert torch.equal(*(x[0] if isinstance(x, tuple) else x for x in (a, b)))
    metadata = ours.get_scheduler_metadata(B, SQ, SK, HQ, HK, D, ints(3, 9))
    assert metadata is None
    a, b = ({"scheduler_metadata": metadata}, {"cu_seqlens_k_new": ints(0, 1, 2)})
    # bounds of new keys say nothing where none are given
    a, b = (ours.flash_attn_with_kvcache(X, cache, cache, cache_seqlens=5, **x) for x in (a, b))
    assert torch.equal(a, b)


def test_factors_of_8_bit_floats_reach_attention_for_every_head() -> None:
    q, k, v = (rand(B, SQ, h, D).to(torch.float8_e4m3fn) for h in (HQ, HK, HK))
    factors = rand(B, HK, seed=4).abs(), None, rand(B, HK, seed=5).abs()
    with mock.patch.object(flash_packed, "attention", return_value=(X, X[..., 0])) as attention:
        ours.flash_attn_func(q, k, v, q_descale=factors[0], v_descale=factors[2])
        of_q, of_k, of_v = attention.call_args.kwargs["descale"]
        assert torch.equal(of_q, factors[0].repeat_interleave(HQ // HK, 1))
        assert torch.equal(of_k, torch.ones(HK))
        assert of_v is factors[2]
        ours.flash_attn_func(X, X, X)
        assert attention.call_args.kwargs["descale"] is None
    with pytest.raises(Unsupported):
        ours.flash_attn_func(q, k, v)


E8 = X.to(torch.float8_e4m3fn)
REFUSED = {
    "descale": (lambda: ours.flash_attn_func(X, X, X, k_descale=rand(B, HQ)), ValueError, "k_descale is given"),
    "size of descale": (lambda: ours.flash_attn_func(E8, E8, E8, k_descale=rand(HQ)), ValueError, r"expected \[2, 4\]"),
    "qv of 8 bits": (lambda: ours.flash_attn_func(E8, E8, E8, qv=E8), Unsupported, "qv of 8-bit floats"),
    "packed descale": (
        lambda: ours.flash_attn_varlen_func(E8[0], E8[0], E8[0], ints(0, 7), ints(0, 7), 7, 7, v_descale=rand(1, HQ)),
        Unsupported, "v_descale of packed sequences is not computed: call it for each sequence",
    ),
    "qv": (lambda: ours.flash_attn_func(X, X, X, qv=X[:, 1:]), ValueError, r"qv is .*; expected .* \[2, 7, 4, 16\]"),
    "chunk": (lambda: ours.flash_attn_func(X, X, X, attention_chunk=-1), ValueError, "attention_chunk is -1"),
    "half a chunk": (lambda: ours.flash_attn_func(X, X, X, attention_chunk=2.5), TypeError, "attention_chunk is 2.5"),
    "window": (lambda: ours.flash_attn_func(X, X, X, window_size=3), ValueError, r"expected \(left, right\)"),
    "heads": (lambda: ours.flash_attn_qkvpacked_func(X), ValueError, r"and no num_heads_q; expected \[B, S, 3, H, D\]"),
    "odd heads": (lambda: ours.flash_attn_qkvpacked_func(X, num_heads_q=1), ValueError, "num_heads_q is 1 of 4 heads"),
    "used": (
        lambda: ours.flash_attn_varlen_func(X[0], X[0], X[0], ints(0, 7), ints(0, 7), 7, 7, ints(8)), ValueError,
        r"seqused_q is \[8\]; expected 0 to \[7\]",
    ),
    "used keys": (
        lambda: ours.flash_attn_varlen_func(X[0], X[0], X[0], ints(0, 7), ints(0, 7), 7, 7, None, ints(1, 1)),
        ValueError, r"seqused_k is torch.int32 \[2\]; expected integers \[1\]",
    ),
    "rows": (
        lambda: ours.flash_attn_varlen_func(X, X, X, ints(0, 7), ints(0, 7), 7, 7), ValueError,
        r"q has shape \[2, 7, 4, 16\]; expected \[total, heads, D\]",
    ),
    "dropout": (lambda: ours.flash_attn_func(X, X, X, dropout_p=0.1), TypeError, "dropout_p"),
    "combine": (
        lambda: ours.flash_attn_combine(rand(3, 2, 5, 4, 8), rand(3, 2, 4, 5)), ValueError, "lse_partial have shapes",
    ),
    "out": (
        lambda: ours.flash_attn_combine(rand(3, 5, 4, 8), rand(3, 5, 4), rand(4, 4, 8)), ValueError,
        r"out is torch.float32 \[4, 4, 8\]; expected torch.float32 \[5, 4, 8\]",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name) -> None:
    call, kind, words = REFUSED[name]
    with pytest.raises(kind, match=words):
        call()


@pytest.mark.parametrize("packed", [False, True])
def test_combine(packed) -> None:
    q, k, v = (rand(B, t, h, D, seed=n) for n, (t, h) in enumerate(((SQ, HQ), (SK, HK), (SK, HK))))
    parts = [ours.flash_attn_func(q, k[:, s], v[:, s], return_attn_probs=True) for s in (slice(4), slice(4, None))]
    partial = torch.stack([o for o, _ in parts]), torch.stack([lse.mT for _, lse in parts])
    if packed:
        partial = tuple(x.flatten(1, 2) for x in partial)
    o, lse = ours.flash_attn_combine(*partial)
    want, want_lse = ours.flash_attn_func(q, k, v, return_attn_probs=True)
    torch.testing.assert_close(o.reshape(want.shape), want)
    torch.testing.assert_close(lse.reshape(B, SQ, HQ), want_lse.mT)
    out = torch.empty_like(o, dtype=torch.bfloat16)
    assert ours.flash_attn_combine(*partial, out, torch.bfloat16)[0] is out
    assert torch.equal(out, o.bfloat16())


def test_what_compiles_in_one_graph_and_what_breaks_it() -> None:
    pages, table = rand(4, 4, HK, D), torch.tensor([[0, 1], [2, 3]], dtype=torch.int32)
    q, k, cu, used = rand(B, 6, HQ, D), rand(B, 6, HK, D), ints(0, 6, 12), ints(3, 6)
    packed = [x.flatten(0, 1) for x in (q, k, k)]
    calls = [
        (True, lambda q: ours.flash_attn_func(q, k, k, causal=True, attention_chunk=4)),
        (
            True,
            lambda q: ours.flash_attn_varlen_func(q.flatten(0, 1), *packed[1:], cu, cu, 6, 6, used, used, causal=True),
        ),
        (True, lambda q: ours.flash_attn_with_kvcache(q, k, k, cache_seqlens=used, attention_chunk=4)),
        (False, lambda q: ours.flash_attn_with_kvcache(q * 2, pages, pages, cache_seqlens=used, page_table=table) + 1),
    ]
    # Dynamo of torch 2.9 cannot break a graph where tuples are made
    for whole, call in calls if torch.__version__ >= "2.10" else calls[:-1]:
        compiled = torch.compile(call, backend="aot_eager", fullgraph=whole)
        torch.testing.assert_close(compiled(q), call(q))
