"""flash-attn's interface for packed sequences, dense and in pages, compared with plain attention in float64."""

from __future__ import annotations

import pytest
import torch

from saccade import Unsupported
from saccade.integrations import flash_attn as ours
from saccade.philox import dropout_kept

from .flash_reference import HK, HQ, OPTIONS, D, check_signed, close, drawn, paged, plain, rand, sequences, wanted


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("same", [True, False])
def test_packed_sequences(name, same) -> None:
    options = OPTIONS[name]
    cu_q = torch.tensor([0, 5, 5, 12, 20], dtype=torch.int32)
    cu_k = cu_q if same else torch.tensor([0, 9, 13, 14, 30], dtype=torch.int32)
    q, k, v = (rand(int(cu[-1]), h, D, seed=n) for n, (cu, h) in enumerate(((cu_q, HQ), (cu_k, HK), (cu_k, HK))))
    call = (q, k, v, cu_q, cu_k, 8, 16)
    o, lse, _ = ours.flash_attn_varlen_func(*call, **options, return_attn_probs=True)
    for r in range(4):
        a, b = slice(int(cu_q[r]), int(cu_q[r + 1])), slice(int(cu_k[r]), int(cu_k[r + 1]))
        want, want_lse = plain(q[a], k[b], v[b], **wanted(options))
        close(o[a], want, r)
        close(lse[:, a], want_lse, r)
    kv = torch.stack([k, v], 1)
    assert torch.equal(ours.flash_attn_varlen_kvpacked_func(q, kv, *call[3:], **options), o)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("slopes", [(HQ,), (4, HQ)])
@pytest.mark.parametrize("kind", ["same", "equal", "other"])
def test_alibi_of_packed_sequences(kind, slopes, causal) -> None:
    """Distances count from each sequence's own diagonal; gradients of q, k, v and the slopes."""
    cu_q = torch.tensor([0, 5, 5, 12, 20], dtype=torch.int32)
    cu_k = {"same": cu_q, "equal": cu_q.clone(), "other": torch.tensor([0, 9, 13, 14, 30], dtype=torch.int32)}[kind]
    shapes = ((21, HQ), (31, HK), (31, HK)) if kind == "other" else ((20, HQ), (20, HK), (20, HK))
    given = [rand(n, h, D, seed=s).requires_grad_() for s, (n, h) in enumerate(shapes)]
    given.append(rand(*slopes, seed=4).abs().requires_grad_())
    *call, own = given
    o, lse, _ = ours.flash_attn_varlen_func(
        *call, cu_q, cu_k, 8, 16, causal=causal, alibi_slopes=own, return_attn_probs=True
    )
    parts = []
    for r in range(4):
        a, b = slice(int(cu_q[r]), int(cu_q[r + 1])), slice(int(cu_k[r]), int(cu_k[r + 1]))
        of_row = own if own.dim() == 1 else own[r]
        parts.append(plain(call[0][a], call[1][b], call[2][b], causal=causal, slopes=of_row.double()))
    used = int(cu_q[-1])
    close(o[:used], torch.cat([x for x, _ in parts]))
    close(lse[:, :used], torch.cat([x for _, x in parts], 1))
    assert not o[used:].any()
    assert (lse[:, used:] == -torch.inf).all()
    do = rand(used, HQ, D, seed=9)
    want = torch.autograd.grad(torch.cat([x for x, _ in parts]), given, do.double())
    for a, b in zip(torch.autograd.grad(o[:used], given, do), want, strict=True):
        close(a, b.double())


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


def test_signed_weights_of_sequences_with_their_own_slopes() -> None:
    cu_q, cu_k = (torch.tensor(x, dtype=torch.int32) for x in ([0, 5, 5, 12], [0, 9, 13, 14]))
    q, k, v = (rand(int(cu[-1]), h, D, seed=n) for n, (cu, h) in enumerate(((cu_q, HQ), (cu_k, HK), (cu_k, HK))))
    slopes = torch.tensor([0.5, 0.25, 0.1, 0.0])
    o, _, weights = ours.flash_attn_varlen_func(
        q, k, v, cu_q, cu_k, 7, 9, 0.4, alibi_slopes=slopes, return_attn_probs=True
    )
    assert weights.shape == (3, HQ, 7, 9)
    for r in range(3):
        a, b = slice(int(cu_q[r]), int(cu_q[r + 1])), slice(int(cu_k[r]), int(cu_k[r + 1]))
        part = weights[r, :, : a.stop - a.start, : b.stop - b.start]
        check_signed(part, o[a], q[a], k[b], v[b], {"alibi_slopes": slopes}, (part > 0).numpy())
        assert torch.count_nonzero(weights[r]) == part.numel()


def unlike(sizes: tuple[int, int]) -> tuple[torch.Tensor, ...]:
    # q, k, v and the one array of bounds
    given = [rand(sizes[n > 0], h, D, seed=n).requires_grad_() for n, h in enumerate((HQ, HK, HK))]
    return *given, torch.tensor([0, 5, 5, 12], dtype=torch.int32)


@pytest.mark.parametrize("slopes", [None, torch.tensor([0.5, 0.25, 0.1, 0.0])], ids=["plain", "alibi"])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("sizes", [(12, 17), (19, 12)])
def test_one_array_of_bounds_for_q_not_as_long_as_k(sizes, causal, slopes) -> None:
    """Each sequence has its own diagonal; rows behind the last bound have no part in it."""
    q, k, v, cu = unlike(sizes)
    numbers = {"causal": causal, "alibi_slopes": slopes, "return_attn_probs": True}
    o, lse, _ = ours.flash_attn_varlen_func(q, k, v, cu, cu, 7, 7, **numbers)
    want = sequences(q, k, v, cu, cu, causal=causal, slopes=slopes)
    want_o, do = torch.cat([x for x, _ in want]), rand(12, HQ, D, seed=9)
    close(o[:12], want_o)
    close(lse[:, :12], torch.cat([x for _, x in want], 1))
    assert not o[12:].any()
    found, expected = torch.autograd.grad(o[:12], (q, k, v), do), torch.autograd.grad(want_o, (q, k, v), do.double())
    for a, b in zip(found, expected, strict=True):
        close(a, b.double())


@pytest.mark.parametrize("sizes", [(12, 17), (19, 12)])
def test_private_functions_with_one_array_of_bounds_for_q_not_as_long_as_k(sizes) -> None:
    """The forward and the backward have the diagonals of the sequences, and refuse ALiBi."""
    q, k, v, cu = unlike(sizes)
    arrays, numbers = [x.detach() for x in (q, k, v)], (0.0, None, True, -1, -1, 0.0)
    o, lse, *_ = ours._flash_attn_varlen_forward(*arrays, cu, cu, 7, 7, *numbers)
    want = sequences(q, k, v, cu, cu, causal=True)
    want_o = torch.cat([x for x, _ in want])
    close(o[:12], want_o)
    close(lse[:, :12], torch.cat([x for _, x in want], 1))
    do, buffers = rand(*o.shape, seed=9), [torch.zeros_like(x) for x in arrays]
    ours._flash_attn_varlen_backward(do, *arrays, o, lse, *buffers, cu, cu, 7, 7, *numbers, None, False)
    for a, b in zip(buffers, torch.autograd.grad(want_o, (q, k, v), do[:12].double()), strict=True):
        close(a, b.double())
    with pytest.raises(Unsupported, match="for q as long as k and cu_seqlens_q that is cu_seqlens_k"):
        ours._flash_attn_varlen_forward(*arrays, cu, cu, 7, 7, *numbers, alibi_slopes=torch.rand(HQ))


@pytest.mark.parametrize("page", [1, 4, 16])
def test_packed_sequences_over_pages(page) -> None:
    cu_q, cu_k = (torch.tensor(x, dtype=torch.int32) for x in ([0, 5, 6, 13], [0, 9, 13, 30]))
    q, k, v = (rand(int(cu[-1]), h, D, seed=n) for n, (cu, h) in enumerate(((cu_q, HQ), (cu_k, HK), (cu_k, HK))))
    want = ours.flash_attn_varlen_func(q, k, v, cu_q, cu_k, 7, 17, causal=True)
    (pages_k, table), (pages_v, _) = paged(k, cu_k, page), paged(v, cu_k, page)
    o = ours.flash_attn_varlen_func(q, pages_k, pages_v, cu_q, cu_k, 7, 17, causal=True, block_table=table)
    close(o, want.double())


@pytest.mark.parametrize("name", [name for name in OPTIONS if name != "alibi"])
def test_more_queries_than_keys_over_pages(name) -> None:
    """Rows above the first key see nothing under a causal mask; a sequence may hold no key at all."""
    cu_q, cu_k = (torch.tensor(x, dtype=torch.int32) for x in ([0, 4, 7, 9], [0, 2, 12, 12]))
    q, k, v = (rand(int(cu[-1]), h, D, seed=n) for n, (cu, h) in enumerate(((cu_q, HQ), (cu_k, HK), (cu_k, HK))))
    (pages_k, table), (pages_v, _) = paged(k, cu_k, 4), paged(v, cu_k, 4)
    o, lse, _ = ours.flash_attn_varlen_func(
        q, pages_k, pages_v, cu_q, cu_k, 4, 10, block_table=table, return_attn_probs=True, **OPTIONS[name]
    )
    for r in range(3):
        a, b = slice(int(cu_q[r]), int(cu_q[r + 1])), slice(int(cu_k[r]), int(cu_k[r + 1]))
        want, want_lse = plain(q[a], k[b], v[b], **wanted(OPTIONS[name]))
        close(o[a], want, r)
        close(lse[:, a], want_lse, r)


@pytest.mark.parametrize("which", [0, 1, 2])
def test_a_backward_over_pages_raises_and_no_gradient_vanishes(which) -> None:
    cu_q, cu_k = (torch.tensor(x, dtype=torch.int32) for x in ([0, 2, 5], [0, 20, 30]))
    q, (pages, table) = rand(5, HQ, D), paged(rand(30, HK, D), cu_k, 16)
    given = [q, pages, pages.clone()]
    call = cu_q, cu_k, 3, 20
    want = ours.flash_attn_varlen_func(*given, *call, causal=True, block_table=table)
    given[which].requires_grad_()
    o, lse, _ = ours.flash_attn_varlen_func(*given, *call, causal=True, block_table=table, return_attn_probs=True)
    assert torch.equal(o, want)
    for x in (o, lse):
        with pytest.raises(Unsupported, match=r"block_table have no gradient: call it under torch\.no_grad\(\)"):
            x.sum().backward()
    with torch.no_grad():
        o = ours.flash_attn_varlen_func(*given, *call, causal=True, block_table=table)
    assert not o.requires_grad
