"""flash-attn's interface: every function and option compared with plain attention in float64."""

from __future__ import annotations

import pytest
import torch

from saccade.integrations import flash_attn as ours
from saccade.philox import dropout_kept

from .flash_reference import HK, HQ, OPTIONS, SK, SQ, B, D, check_signed, close, drawn, plain, rand, wanted


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("sizes", [(SQ, SK), (SK, SQ)])
def test_batches(name, sizes) -> None:
    shapes = (sizes[0], HQ), (sizes[1], HK), (sizes[1], HK)
    q, k, v = (rand(B, t, h, D, seed=n).requires_grad_() for n, (t, h) in enumerate(shapes))
    o, lse, weights = ours.flash_attn_func(q, k, v, **OPTIONS[name], return_attn_probs=True)
    assert weights.shape == (0,)
    want = [plain(q[b], k[b], v[b], **wanted(OPTIONS[name])) for b in range(B)]
    close(o, torch.stack([x for x, _ in want]))
    close(lse, torch.stack([x for _, x in want]))
    do = rand(*o.shape, seed=9)
    found = torch.autograd.grad(o, (q, k, v), do)
    for a, b in zip(found, torch.autograd.grad(torch.stack([x for x, _ in want]), (q, k, v), do.double()), strict=True):
        close(a, b.double())
    kv = torch.stack([k, v], 2)
    assert torch.equal(ours.flash_attn_kvpacked_func(q, kv, **OPTIONS[name]), o)


def test_packed_qkv() -> None:
    qkv = rand(B, SQ, 3, HQ, D)
    o = ours.flash_attn_qkvpacked_func(qkv, causal=True)
    assert torch.equal(o, ours.flash_attn_func(*qkv.unbind(2), causal=True))
    flat = qkv.flatten(0, 1)
    cu = torch.tensor([0, SQ, 2 * SQ], dtype=torch.int32)
    close(ours.flash_attn_varlen_qkvpacked_func(flat, cu, SQ, causal=True), o.flatten(0, 1).double())


@pytest.mark.parametrize("name", OPTIONS)
def test_signed_weights(name) -> None:
    q, k, v = (rand(B, t, h, D, seed=n).requires_grad_() for n, (t, h) in enumerate(((SQ, HQ), (SK, HK), (SK, HK))))
    kept = dropout_kept((B, HQ, SQ, SK), 0.4, drawn())
    o, lse, weights = ours.flash_attn_func(q, k, v, 0.4, **OPTIONS[name], return_attn_probs=True)
    assert lse.shape == (B, HQ, SQ)
    assert not weights.requires_grad
    for b in range(B):
        check_signed(weights[b], o[b], q[b], k[b], v[b], OPTIONS[name], kept[b])


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("kind", ["rows", "chosen rows", "pages", "left padding"])
def test_cache(name, kind) -> None:
    """New keys are written at the lengths, in place; NaN behind them has no effect."""
    options, lengths, new = OPTIONS[name], [6, 13], 3
    k_cache, v_cache = (torch.full((4, 32, HK, D), float("nan")) for _ in range(2))
    rows = torch.tensor([2, 0]) if kind == "chosen rows" else torch.arange(2)
    old = [(rand(n, HK, D, seed=n), rand(n, HK, D, seed=n + 1)) for n in lengths]
    fresh = rand(2, new, HK, D, seed=40), rand(2, new, HK, D, seed=41)
    table = None
    if kind == "pages":
        k_cache, v_cache = (x.reshape(16, 8, HK, D) for x in (k_cache, v_cache))
        table = torch.tensor([[5, 9, 1], [0, 14, 7]], dtype=torch.int32)
    for b, (x, y) in enumerate(old):
        for j in range(lengths[b]):
            at = (rows[b], j) if table is None else (table[b, j // 8], j % 8)
            k_cache[at], v_cache[at] = x[j], y[j]
    q = rand(2, new, HQ, D, seed=50)
    given = dict(options)
    if kind == "chosen rows":
        given["cache_batch_idx"] = rows
    if kind == "pages":
        given["block_table"] = table
    pad = [2, 4] if kind == "left padding" else [0, 0]
    if kind == "left padding":
        given["cache_leftpad"] = torch.tensor(pad, dtype=torch.int32)
    cache = (k_cache, v_cache) if kind != "rows" else (k_cache[:2], v_cache[:2])
    cache = cache if kind != "left padding" else (k_cache[:2], v_cache[:2])
    o, lse = ours.flash_attn_with_kvcache(
        q, *cache, *fresh, cache_seqlens=torch.tensor(lengths, dtype=torch.int32), return_softmax_lse=True, **given
    )
    for b, (x, y) in enumerate(old):
        k, v = torch.cat([x, fresh[0][b]]), torch.cat([y, fresh[1][b]])
        want, want_lse = plain(q[b], k, v, **wanted(options), first=pad[b])
        close(o[b], want, b)
        close(lse[b], want_lse, b)
        j = lengths[b] + new - 1
        at = (rows[b], j) if table is None else (table[b, j // 8], j % 8)
        assert torch.equal(k_cache[at], fresh[0][b, -1])


@pytest.mark.parametrize("interleaved", [True, False])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("pad", [None, [2, 0]])
def test_rotary_positions(causal, interleaved, pad) -> None:
    n, lengths, new = 8, [3, 9], 2
    angle = torch.arange(32)[:, None] * 100.0 ** -(torch.arange(n // 2) / (n // 2))
    cos, sin = angle.cos(), angle.sin()

    def turn(x, positions):
        a, b = (x[..., :n:2], x[..., 1:n:2]) if interleaved else (x[..., : n // 2], x[..., n // 2 : n])
        c, s = cos[positions][:, None], sin[positions][:, None]
        y = a * c - b * s, a * s + b * c
        whole = torch.stack(y, -1).flatten(-2) if interleaved else torch.cat(y, -1)
        return torch.cat([whole, x[..., n:]], -1)

    cache = [rand(2, 16, HK, D, seed=s) for s in (1, 2)]
    before = [x.clone() for x in cache]
    q, k, v = rand(2, new, HQ, D, seed=3), rand(2, new, HK, D, seed=4), rand(2, new, HK, D, seed=5)
    o = ours.flash_attn_with_kvcache(
        q, *cache, k, v, cos, sin, torch.tensor(lengths), causal=causal, rotary_interleaved=interleaved,
        cache_leftpad=None if pad is None else torch.tensor(pad, dtype=torch.int32),
    )  # fmt: skip
    for b, t in enumerate(lengths):
        # positions are those in the cache, padding counted
        first = 0 if pad is None else pad[b]
        at = torch.arange(t, t + new)
        turned = turn(q[b], at if causal else torch.full((new,), t))
        want, _ = plain(
            turned, torch.cat([before[0][b, first:t], turn(k[b], at)]), torch.cat([before[1][b, first:t], v[b]]),
            causal=causal,
        )  # fmt: skip
        close(o[b], want)


def test_half_precision_and_dropout() -> None:
    q, k, v = (rand(1, 64, 2, D, seed=n, dtype=torch.bfloat16) for n in range(3))
    o = ours.flash_attn_func(q, k, v, causal=True)
    assert o.dtype is torch.bfloat16
    torch.testing.assert_close(o[0].double(), plain(q[0], k[0], v[0], causal=True)[0], rtol=0.02, atol=0.02)
    torch.manual_seed(0)
    a, b = (ours.flash_attn_func(q, k, v, dropout_p=0.5) for _ in range(2))
    assert not torch.equal(a, b)


def test_signed_weights_under_autocast() -> None:
    """They are those of the rounded q and k, in the dtype of the result, as the forward computes them."""
    q, k, v = (rand(B, t, h, D, seed=n) for n, (t, h) in enumerate(((SQ, HQ), (SK, HK), (SK, HK))))
    kept = torch.from_numpy(dropout_kept((B, HQ, SQ, SK), 0.4, drawn()))
    with torch.autocast("cpu", torch.bfloat16):
        o, _, weights = ours.flash_attn_func(q, k, v, 0.4, return_attn_probs=True)
    assert (o.dtype, weights.dtype) == (torch.bfloat16, torch.bfloat16)
    for b in range(B):
        one = torch.eye(SK)[:, None].expand(-1, HK, -1)
        p = plain(q[b].bfloat16(), k[b].bfloat16(), one)[0].transpose(0, 1)
        torch.testing.assert_close(weights[b].double(), torch.where(kept[b], p, -p), rtol=2**-8, atol=1e-6)


def test_no_bound_of_a_window() -> None:
    q = rand(1, 9, 2, D)
    assert torch.equal(ours.flash_attn_func(q, q, q, window_size=(None, None)), ours.flash_attn_func(q, q, q))
    assert torch.equal(
        ours.flash_attn_func(q, q, q, window_size=(3, None)), ours.flash_attn_func(q, q, q, window_size=(3, -1))
    )


def test_graphs_break_where_the_host_is_needed() -> None:
    """Weights that dropout removed, and ALiBi over two cu_seqlens; with fullgraph=True they raise."""
    q, cu = rand(12, 2, D), torch.tensor([0, 5, 12], dtype=torch.int32)
    slopes = torch.rand(2)

    def weights(x):
        torch.manual_seed(3)
        return ours.flash_attn_func(x, x, x, 0.3, return_attn_probs=True)[2]

    def packed(x, a, b, s):
        return ours.flash_attn_varlen_func(x, x, x, a, b, 7, 7, alibi_slopes=s) + 1

    assert torch.equal(torch.compile(weights, backend="aot_eager")(q[None]), weights(q[None]))
    given = q, cu, cu.clone(), slopes
    torch.testing.assert_close(torch.compile(packed, backend="aot_eager")(*given), packed(*given))
    with pytest.raises(Exception, match="leave fullgraph out"):
        torch.compile(lambda *x: packed(*x) * 2, backend="aot_eager", fullgraph=True)(*given)


X = rand(1, 4, 2, D)
CU = torch.tensor([0, 3, 4], dtype=torch.int32)
REFUSED = {
    "window of one": (lambda: ours.flash_attn_func(X, X, X, window_size=3), ValueError, "window_size is 3; expected"),
    "fraction": (lambda: ours.flash_attn_func(X, X, X, window_size=(2.7, 0)), TypeError, "of window_size is 2.7"),
    "scale": (lambda: ours.flash_attn_func(X, X, X, softmax_scale="a"), TypeError, "softmax_scale is 'a'"),
    "cap": (lambda: ours.flash_attn_func(X, X, X, softcap=-1.0), ValueError, "softcap is -1.0"),
    "dropout": (lambda: ours.flash_attn_func(X, X, X, 1.0), ValueError, "dropout_p is 1.0; expected 0 <= drop"),
    "slopes of 3": (
        lambda: ours.flash_attn_func(X, X, X, alibi_slopes=torch.rand(3)), ValueError, r"alibi_slopes has shape \[3\]",
    ),
    "qkv of two": (lambda: ours.flash_attn_qkvpacked_func(rand(1, 5, 2, 2, D)), ValueError, r"qkv has shape \[1, 5, 2"),
    "qkv mixed up": (lambda: ours.flash_attn_qkvpacked_func(rand(1, 5, 2, 3, D)), ValueError, r"\[B, S, 3, heads, D\]"),
    "kv of three": (lambda: ours.flash_attn_kvpacked_func(X, rand(1, 5, 3, 2, D)), ValueError, r"kv has shape"),
    "packed qkv": (
        lambda: ours.flash_attn_varlen_qkvpacked_func(rand(4, 2, 2, D), CU, 3), ValueError, r"\[total, 3, heads, D\]",
    ),
    "packed kv": (
        lambda: ours.flash_attn_varlen_kvpacked_func(X[0], rand(4, 3, 2, D), CU, CU, 3, 3), ValueError, "kv has shape",
    ),
    "q in rows of a batch": (
        lambda: ours.flash_attn_varlen_func(X, X, X, CU[:2] // 3, CU[:2] // 3, 1, 1), ValueError,
        r"q has shape \[1, 4, 2, 16\]; expected \[total, heads, D\], packed",
    ),
    "v in rows of a batch": (
        lambda: ours.flash_attn_varlen_func(X[0], X[0], X[:1], CU, CU, 3, 3), ValueError, r"v has shape \[1, 4, 2",
    ),
    "float bounds": (lambda: packed_call(CU.float(), CU), ValueError, "cu_seqlens_q is torch.float32"),
    "2-D bounds": (lambda: packed_call(CU, CU[None]), ValueError, r"cu_seqlens_k is torch.int32 \[1, 3\]"),
    "bounds beyond": (lambda: packed_call(CU, CU + 1), ValueError, r"cu_seqlens_k is \[1, 4, 5\]; .* at most 4"),
    "bounds down": (lambda: packed_call(CU.flip(0), CU), ValueError, "cu_seqlens_q is .*; expected .* never decrease"),
    "other sequences": (lambda: packed_call(CU, CU[:2]), ValueError, "cu_seqlens_k describes 1 sequences; expected 2"),
    "slopes": (lambda: packed_call(CU, CU, alibi_slopes=torch.rand(3, 2)), ValueError, r"alibi_slopes .*\[2, Hq\]"),
    "list of slopes": (lambda: packed_call(CU, CU, alibi_slopes=[1, 2]), TypeError, "alibi_slopes is list"),
    "table": (lambda: packed_call(CU, CU, block_table=CU), ValueError, r"block_table is torch.int32 \[3\]; .*\[2, n\]"),
    "rows of no sequence": (
        lambda: packed_call(CU - 1, CU, block_table=CU[:2, None] * 0), ValueError, r"cu_seqlens_q is \[-1, 2, 3\]",
    ),
    "too few queries": (
        lambda: packed_call(CU // 2, CU, block_table=CU[:2, None] * 0), ValueError,
        r"cu_seqlens_q is \[0, 1, 2\]; expected numbers from 0 to 4",
    ),
    "page": (
        lambda: packed_call(CU, CU, block_table=torch.tensor([[0], [-1]], dtype=torch.int32)), ValueError,
        r"block_table\[1, 0\] is -1",
    ),
}  # fmt: skip


def packed_call(cu_q, cu_k, **options):
    k = X if "block_table" in options else X[0]
    return ours.flash_attn_varlen_func(X[0], k, k, cu_q, cu_k, 3, 3, **options)


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name) -> None:
    call, kind, words = REFUSED[name]
    with pytest.raises(kind, match=words):
        call()
