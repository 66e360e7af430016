"""The flash-attn look-alike: every function and option against plain attention in float64."""

from __future__ import annotations

import pytest
import torch

from saccade import Unsupported
from saccade.integrations import flash_attn as ours
from saccade.philox import dropout_kept

B, SQ, SK, HQ, HK, D = 2, 7, 11, 4, 2, 16


def rand(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def plain(q, k, v, *, scale=None, causal=False, window=(-1, -1), softcap=0.0, slopes=None, first=0):
    """(o [Sq, Hq, D], lse [Hq, Sq]) of one sequence, bottom-right; keys before `first` are not there."""
    q, k, v = (x.double() for x in (q, k, v))
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    s = torch.einsum("ihd,jhd->hij", q, k) * (q.shape[-1] ** -0.5 if scale is None else scale)
    s = softcap * torch.tanh(s / softcap) if softcap else s
    i, j = torch.arange(len(q))[:, None] + len(k) - len(q), torch.arange(len(k))
    if slopes is not None:
        s = s - slopes[:, None, None] * (i - j).abs()
    left, right = window[0], 0 if causal else window[1]
    seen = (j >= first) & ((left < 0) | (j >= i - left)) & ((right < 0) | (j <= i + right))
    s = s.masked_fill(~seen, float("-inf"))
    lse = s.logsumexp(-1)
    p = torch.exp(s - torch.where(lse == float("-inf"), 0.0, lse)[..., None])
    return torch.einsum("hij,jhd->ihd", p, v), lse


OPTIONS = {
    "plain": {},
    "causal": {"causal": True},
    "window": {"window_size": (3, 1)},
    "window of a tensor": {"window_size": torch.tensor([2, -1])},
    "causal window": {"window_size": (4, 4), "causal": True},
    "softcap": {"softcap": 2.0, "softmax_scale": 0.4, "causal": True},
    "alibi": {"alibi_slopes": torch.tensor([0.5, 0.25, 0.1, 0.0]), "causal": True},
}


def wanted(options):
    names = {"softmax_scale": "scale", "window_size": "window", "alibi_slopes": "slopes"}
    return {names.get(name, name): x for name, x in options.items()}


def close(found, want, name="") -> None:
    torch.testing.assert_close(found.double(), want, rtol=1e-4, atol=1e-5, msg=lambda text: f"{name} {text}")


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
@pytest.mark.parametrize("same", [True, False])
def test_packed_sequences(name, same) -> None:
    options = OPTIONS[name]
    cu_q = torch.tensor([0, 5, 5, 12, 20], dtype=torch.int32)
    cu_k = cu_q if same else torch.tensor([0, 9, 13, 14, 30], dtype=torch.int32)
    q, k, v = (rand(int(cu[-1]), h, D, seed=n) for n, (cu, h) in enumerate(((cu_q, HQ), (cu_k, HK), (cu_k, HK))))
    call = (q, k, v, cu_q, cu_k, 8, 16)
    if "alibi_slopes" in options and not same:
        with pytest.raises(Unsupported, match="one cu_seqlens"):
            ours.flash_attn_varlen_func(*call, **options)
        return
    o, lse, _ = ours.flash_attn_varlen_func(*call, **options, return_attn_probs=True)
    for r in range(4):
        a, b = slice(int(cu_q[r]), int(cu_q[r + 1])), slice(int(cu_k[r]), int(cu_k[r + 1]))
        want, want_lse = plain(q[a], k[b], v[b], **wanted(options))
        close(o[a], want, r)
        close(lse[:, a], want_lse, r)
    kv = torch.stack([k, v], 1)
    assert torch.equal(ours.flash_attn_varlen_kvpacked_func(q, kv, *call[3:], **options), o)


def check_signed(weights, o, q, k, v, options, kept) -> None:
    # the weights of one sequence [Hq, Sq, Sk]: what dropout took is negative, the rest make o
    one = torch.eye(len(k)).double()[:, None].expand(-1, HK, -1)
    p = plain(q, k, one, **wanted(options))[0].transpose(0, 1)
    close(weights, torch.where(torch.from_numpy(kept), p, -p))
    close(
        o, torch.einsum("hij,jhd->ihd", weights.double().clamp(min=0) / 0.6, v.double().repeat_interleave(HQ // HK, 1))
    )


def drawn(seed: int = 5) -> int:
    # what the call will draw
    torch.manual_seed(seed)
    found = int(torch.randint(0, (1 << 63) - 1, ()).item())
    torch.manual_seed(seed)
    return found


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
def test_signed_weights_of_packed_sequences(name) -> None:
    options, cu = OPTIONS[name], torch.tensor([0, 5, 5, 12, 20], dtype=torch.int32)
    q, k, v = (rand(20, h, D, seed=n) for n, h in enumerate((HQ, HK, HK)))
    kept = dropout_kept((1, HQ, 20, 20), 0.4, drawn())[0]
    o, _, weights = ours.flash_attn_varlen_func(q, k, v, cu, cu, 8, 8, 0.4, **options, return_attn_probs=True)
    assert weights.shape == (4, HQ, 8, 8)
    for r in range(4):
        a, n = slice(int(cu[r]), int(cu[r + 1])), int(cu[r + 1] - cu[r])
        check_signed(weights[r, :, :n, :n], o[a], q[a], k[a], v[a], options, kept[:, a, a])
        assert not weights[r, :, n:].any()
        assert not weights[r, :, :, n:].any()


def paged(x: torch.Tensor, cu: torch.Tensor, page: int) -> tuple[torch.Tensor, torch.Tensor]:
    counts = cu.diff().tolist()
    most = max(-(-n // page) for n in counts)
    table = torch.randperm(len(counts) * most, generator=torch.Generator().manual_seed(3)).reshape(-1, most).int()
    pages = torch.full((table.numel(), page, *x.shape[1:]), float("nan"))
    for r, n in enumerate(counts):
        for j in range(n):
            pages[table[r, j // page], j % page] = x[int(cu[r]) + j]
    return pages, table


@pytest.mark.parametrize("page", [1, 4, 16])
def test_packed_sequences_over_pages(page) -> None:
    cu_q, cu_k = (torch.tensor(x, dtype=torch.int32) for x in ([0, 5, 6, 13], [0, 9, 13, 30]))
    q, k, v = (rand(int(cu[-1]), h, D, seed=n) for n, (cu, h) in enumerate(((cu_q, HQ), (cu_k, HK), (cu_k, HK))))
    want = ours.flash_attn_varlen_func(q, k, v, cu_q, cu_k, 7, 17, causal=True)
    (pages_k, table), (pages_v, _) = paged(k, cu_k, page), paged(v, cu_k, page)
    o = ours.flash_attn_varlen_func(q, pages_k, pages_v, cu_q, cu_k, 7, 17, causal=True, block_table=table)
    close(o, want.double())


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("kind", ["rows", "chosen rows", "pages", "left padding"])
def test_cache(name, kind) -> None:
    """New keys land at the lengths, in place; what lies behind them is NaN and stays out."""
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


def test_refused() -> None:
    q = rand(1, 4, 2, D)
    cache = rand(1, 6, 2, D), rand(1, 6, 2, D)
    with pytest.raises(ValueError, match="would hold 8 tokens; expected at most 6"):
        ours.flash_attn_with_kvcache(q, *cache, q, q, cache_seqlens=4)
    with pytest.raises(ValueError, match="expected both or neither"):
        ours.flash_attn_with_kvcache(q, *cache, q, cache_seqlens=1)
    with pytest.raises(ValueError, match="block_table is given with"):
        ours.flash_attn_with_kvcache(q, *cache, cache_batch_idx=torch.tensor([0]), block_table=torch.zeros(1, 1).int())
