"""FlashAttention-4's interface compared with plain attention in float64, and as Megatron calls it."""

from __future__ import annotations

import inspect

import pytest
import torch

from saccade import Unsupported
from saccade.integrations import flash_attn_3 as three
from saccade.integrations import flash_attn_4 as ours
from saccade.integrations.flash_arguments import HINTS, REFUSED

from .flash_reference import HK, HQ, SK, SQ, B, D, close, paged, plain, rand, sequences, signature, wanted

DV = 8
SINKS = torch.tensor([0.5, -1.0, 2.0, 0.0])
# flash-attn's main branch, August 2026
SIGNATURES = {
    "flash_attn_func": "q, k, v, qv=None, gather_kv_indices=None, softmax_scale=None, causal=False, "
    "window_size=(None, None), learnable_sink=None, softcap=0.0, num_splits=1, pack_gqa=None, deterministic=False, "
    "score_mod=None, score_mod_bwd=None, mask_mod=None, aux_tensors=None, aux_scalars=None, block_sparse_tensors=None, "
    "block_sparse_tensors_bwd=None, return_lse=False",
    "flash_attn_varlen_func": "q, k, v, qv=None, cu_seqlens_q=None, cu_seqlens_k=None, max_seqlen_q=None, "
    "max_seqlen_k=None, min_seqlen_k=None, seqused_q=None, seqused_k=None, gather_kv_indices=None, page_table=None, "
    "softmax_scale=None, causal=False, window_size=(None, None), learnable_sink=None, softcap=0.0, num_splits=1, "
    "pack_gqa=None, deterministic=False, score_mod=None, score_mod_bwd=None, mask_mod=None, block_sparse_tensors=None, "
    "aux_tensors=None, aux_scalars=None, return_lse=False, scheduler_metadata=None, seqlen_k_per_split=None, "
    "disable_scheduler_metadata=False",
    "flash_attn_combine": "out_partial, lse_partial, out=None, out_dtype=None, cu_seqlens=None, seqused=None, "
    "virtual_batch_idx=None, return_lse=True",
    "get_scheduler_metadata": "max_seqlen_q, max_seqlen_k, nheads, nheads_kv, headdim, num_splits, headdim_v=None, "
    "pack_gqa=None, causal=False, window_size_left=None, window_size_right=None, seqlen_k_new=0, cu_seqlens_q=None, "
    "cu_seqlens_k=None, cu_seqlens_k_new=None, seqused_q=None, seqused_k=None, leftpad_k=None, "
    "seqlen_k_per_split=None, _arch=None",
}
OPTIONS = {
    "plain": {},
    "causal": {"causal": True},
    "window": {"window_size": (3, 1)},
    "left side": {"window_size": (3, None)},
    "right side": {"window_size": (None, 0)},
    "no bounds": {"window_size": (-1, -1)},
    "causal, no left bound": {"window_size": (-1, 0), "causal": True},
    "causal, any right bound": {"window_size": (3, -7), "causal": True},
    "softcap and scale": {"softcap": 2.0, "softmax_scale": 0.4, "causal": True},
    "sinks": {"learnable_sink": SINKS, "window_size": (4, 0)},
    "qv": {"qv": True, "causal": True},
}


def ints(*numbers: int) -> torch.Tensor:
    return torch.tensor(numbers, dtype=torch.int32)


@pytest.mark.parametrize("name", SIGNATURES)
def test_signatures(name) -> None:
    assert signature(getattr(ours, name)) == SIGNATURES[name]


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("layout", ["rows", "packed", "packed queries", "packed keys"])
@pytest.mark.parametrize("used", [False, True])
def test_every_layout(name, layout, used) -> None:
    """cu_seqlens for only one side; tokens beyond seqused are NaN; gradients of out, lse and the sinks."""
    options, lengths = dict(OPTIONS[name]), [(7, 11), (5, 9)]
    q, k, v, qv = (
        rand(B, *shape, seed=n) for n, shape in enumerate(((7, HQ, D), (11, HK, D), (11, HK, DV), (7, HQ, DV)))
    )
    if used:
        lengths = [(6, 8), (3, 5)]
    n, m = ([pair[i] for pair in lengths] for i in (0, 1))
    call, cu_q, cu_k = {}, ints(0, 7, 14), ints(0, 11, 22)
    if used:
        call |= {"seqused_q": ints(*n), "seqused_k": ints(*m)}
        for b in range(B):
            for x, count in ((q, n[b]), (qv, n[b]), (k, m[b]), (v, m[b])):
                x[b, count:] = float("nan")
    else:
        n, m = [7, 7], [11, 11]
    q, k, v, qv = (x.flatten(0, 1) for x in (q, k, v, qv))
    extra = qv.requires_grad_() if options.pop("qv", False) else None
    sinks = options["learnable_sink"].clone().requires_grad_() if "learnable_sink" in options else None
    inputs = [x.requires_grad_() for x in (q, k, v)] + [x for x in (extra, sinks) if x is not None]
    options |= {} if sinks is None else {"learnable_sink": sinks}
    of_q, of_k = layout in ("packed", "packed queries"), layout in ("packed", "packed keys")
    call |= {"cu_seqlens_q": cu_q} if of_q else {}
    call |= {"cu_seqlens_k": cu_k} if of_k else {}
    given = [
        x if x is None or packed else x.unflatten(0, (B, -1))
        for x, packed in zip((q, k, v, extra), (of_q, of_k, of_k, of_q), strict=True)
    ]
    o, lse = ours.flash_attn_varlen_func(*given, **call, **options, return_lse=True)
    if not call:
        again = ours.flash_attn_func(*given, **options, return_lse=True)
        assert torch.equal(again[0], o)
        assert torch.equal(again[1], lse)
    want = sequences(q, k, v, cu_q, cu_k, used_q=n, used_k=m, qv=extra, **wanted(options))
    rows = torch.cat([torch.arange(b * 7, b * 7 + n[b]) for b in range(B)])
    o = o if of_q else o.flatten(0, 1)
    # with qv the heads come last
    lse = lse if extra is None else lse.mT
    assert lse.shape == ((HQ, 14) if of_q else (B, HQ, 7))
    lse = lse if of_q else lse.transpose(0, 1).flatten(1)
    want_o, want_lse = torch.cat([x for x, _ in want]), torch.cat([x for _, x in want], 1)
    close(o[rows], want_o)
    close(lse[:, rows], want_lse)
    do, dlse = rand(len(rows), HQ, DV, seed=9), rand(HQ, len(rows), seed=8)
    dlse = torch.where(want_lse == -torch.inf, 0.0, dlse)
    found = torch.autograd.grad((o[rows], lse[:, rows]), inputs, (do, dlse))
    for a, b in zip(found, torch.autograd.grad((want_o, want_lse), inputs, (do.double(), dlse.double())), strict=True):
        close(a, b.double())


X = rand(B, SQ, HQ, D)
Y = rand(B, SK, HK, D, seed=1)


def test_lse_is_none_a_constant_or_differentiable() -> None:
    assert ours.flash_attn_func(X, Y, Y)[1] is None
    q = X.clone().requires_grad_()
    o, lse = ours.flash_attn_func(q, Y, Y)
    assert o.requires_grad
    assert not lse.requires_grad
    again = ours.flash_attn_func(q, Y, Y, return_lse=True)[1]
    assert torch.equal(lse, again)
    assert again.requires_grad


def test_sinks_may_have_16_bits() -> None:
    q, k = X.bfloat16(), Y.bfloat16()
    o, _ = ours.flash_attn_func(q, k, k, learnable_sink=SINKS.bfloat16())
    assert torch.equal(o, ours.flash_attn_func(q, k, k, learnable_sink=SINKS)[0])


def test_keys_that_are_the_values() -> None:
    """At 512 columns lse has the heads last, as in flash-attn, which reads q as qv there."""
    q, kv = rand(1, 3, 2, 512), rand(1, 5, 1, 512)
    o, lse = ours.flash_attn_func(q, kv, kv, return_lse=True)
    want, want_lse = plain(q[0], kv[0], kv[0])
    close(o[0], want)
    close(lse[0].mT, want_lse)
    for function, given in ((ours.flash_attn_func, {}), (ours.flash_attn_varlen_func, {"seqused_k": ints(4)})):
        with pytest.raises(Unsupported, match="FlashAttention-4 drops q: give qv as q"):
            function(q, kv, kv, q, **given)
        assert function(q, kv, kv.clone(), q, **given)[0].shape == q.shape


@pytest.mark.parametrize("name", [name for name in OPTIONS if name != "qv"])
@pytest.mark.parametrize("packed", [False, True])
def test_pages(name, packed) -> None:
    options, m = OPTIONS[name], [9, 13]
    cu_q, cu_k = ints(0, 5, 6) if packed else ints(0, 3, 6), ints(0, 9, 22)
    q, k, v = rand(6, HQ, D), rand(22, HK, D, seed=1), rand(22, HK, DV, seed=2)
    (pages, table), (values, _) = paged(k, cu_k, 8), paged(v, cu_k, 8)
    call = {"cu_seqlens_q": cu_q, "max_seqlen_q": 5} if packed else {}
    o, lse = ours.flash_attn_varlen_func(
        q if packed else q.unflatten(0, (2, 3)), pages, values, **call, seqused_k=ints(*m), page_table=table,
        max_seqlen_k=13, num_splits=0, return_lse=True, **options,
    )  # fmt: skip
    want = sequences(q, k, v, cu_q, cu_k, **wanted(options))
    close(o.reshape(6, HQ, DV), torch.cat([x for x, _ in want]))
    close(lse if packed else lse.transpose(0, 1).flatten(1), torch.cat([x for _, x in want], 1))


def test_pages_have_no_gradient() -> None:
    (pages, table), q = paged(Y[0], ints(0, SK), 4), X[:1].clone().requires_grad_()
    o, _ = ours.flash_attn_varlen_func(q, pages, pages, page_table=table, seqused_k=ints(SK))
    with pytest.raises(Unsupported, match="keys in pages of page_table have no gradient"):
        o.sum().backward()


def test_hints_change_no_bit() -> None:
    hints = {name: 3 for name in HINTS if name in inspect.signature(ours.flash_attn_varlen_func).parameters}
    assert len(hints) == 8
    want = ours.flash_attn_varlen_func(X, Y, Y, causal=True)[0]
    assert torch.equal(ours.flash_attn_varlen_func(X, Y, Y, causal=True, **hints)[0], want)
    assert torch.equal(ours.flash_attn_func(X, Y, Y, causal=True, num_splits=4, pack_gqa=False)[0], want)
    metadata = ours.get_scheduler_metadata(SQ, SK, HQ, HK, D, 4, seqused_k=ints(3, 4))
    assert metadata is None
    assert torch.equal(ours.flash_attn_varlen_func(X, Y, Y, causal=True, scheduler_metadata=metadata)[0], want)
    assert ours.flash_attn_func(X, Y, Y, aux_tensors=[], aux_scalars=())[0].shape == X.shape


def test_combine() -> None:
    partial = rand(3, 10, HQ, D), rand(3, 10, HQ)
    o, lse = ours.flash_attn_combine(*partial, cu_seqlens=ints(0, 4, 10), virtual_batch_idx=ints(1, 0))
    want = three.flash_attn_combine(*partial)
    assert torch.equal(o, want[0])
    assert torch.equal(lse, want[1])
    assert ours.flash_attn_combine(*partial, return_lse=False)[1] is None


@pytest.mark.parametrize("name", [name for name in REFUSED if name != "seqused"])
@pytest.mark.parametrize("function", [ours.flash_attn_func, ours.flash_attn_varlen_func])
def test_what_is_written_for_its_kernels_is_refused_with_a_way_out(name, function) -> None:
    if name not in inspect.signature(function).parameters:
        return
    with pytest.raises(Unsupported, match=f"{name} is not computed: .*(saccade|mask)"):
        function(X, Y, Y, **{name: [X] if name.startswith("aux") else X})


def test_lengths_compile_in_one_graph_and_pages_break_it() -> None:
    (pages, table), used = paged(Y[0], ints(0, SK), 4), ints(3, 11)
    calls = [
        (True, lambda q: ours.flash_attn_varlen_func(q, Y, Y, seqused_k=used, causal=True)[0]),
        (True, lambda q: ours.flash_attn_varlen_func(q, Y, Y, seqused_q=ints(2, 7), causal=True)[0]),
        (True, lambda q: ours.flash_attn_func(q, Y, Y, learnable_sink=SINKS, window_size=(3, 0))[0]),
        (
            False,
            lambda q: ours.flash_attn_varlen_func(q[:1] * 2, pages, pages, page_table=table, seqused_k=used[1:])[0],
        ),
    ]
    for whole, call in calls:
        compiled = torch.compile(call, backend="aot_eager", fullgraph=whole)
        torch.testing.assert_close(compiled(X), call(X))


WRONG = {
    "left bound alone": ({"window_size": (-1, 0)}, ValueError, r"window_size is \(-1, 0\); expected"),
    "right bound": ({"window_size": (5, -2)}, ValueError, "or None for no bound"),
    "right bound alone": ({"window_size": (None, -2)}, ValueError, "or None for no bound"),
    "window": ({"window_size": 3}, ValueError, r"expected \(left, right\)"),
    "sinks": ({"learnable_sink": rand(3)}, ValueError, r"learnable_sink has shape \[3\]; expected \[4\]"),
    "pages without lengths": ({"page_table": ints(0, 1)[:, None]}, ValueError, "page_table needs seqused_k"),
    "pages and used queries": (
        {"page_table": ints(0, 1)[:, None], "seqused_k": ints(3, 3), "seqused_q": ints(1, 1)}, Unsupported,
        "seqused_q with page_table is not computed: give the queries in use",
    ),
    "pages and qv": (
        {"page_table": ints(0, 1)[:, None], "seqused_k": ints(3, 3), "qv": X}, Unsupported,
        r"torch.cat\(\[q, qv\], -1\)",
    ),
    "a page table of another batch": (
        {"page_table": ints(0, 1, 1)[:, None], "seqused_k": ints(3, 3)}, ValueError, r"page_table is .*\[2, n\]",
    ),
    "lengths of another batch": (
        {"page_table": ints(0, 1)[:, None], "seqused_k": ints(3)}, ValueError, "seqused_k has 1 entries; expected 2",
    ),
    "negative lengths": (
        {"page_table": ints(0, 1)[:, None], "seqused_k": ints(3, -1)}, ValueError, r"lengths of keys are \[3, -1\]",
    ),
    "too many": ({"seqused_k": ints(3, 12)}, ValueError, r"seqused_k is \[3, 12\]; expected 0 to \[11, 11\]"),
    "used as floats": ({"seqused_k": rand(2)}, ValueError, "seqused_k is torch.float32"),
    "dropout": ({"dropout_p": 0.1}, TypeError, "dropout_p"),
    "FA3's name": ({"return_attn_probs": True}, TypeError, "return_attn_probs"),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_wrong_arguments(name) -> None:
    options, kind, words = WRONG[name]
    with pytest.raises(kind, match=words):
        ours.flash_attn_varlen_func(X, Y, Y, **options)


def test_wrong_partial_results() -> None:
    with pytest.raises(Unsupported, match="seqused is not computed: leave it out"):
        ours.flash_attn_combine(rand(3, 10, HQ, D), rand(3, 10, HQ), seqused=ints(3))
    with pytest.raises(ValueError, match=r"cu_seqlens is torch.float32"):
        ours.flash_attn_combine(rand(3, 10, HQ, D), rand(3, 10, HQ), cu_seqlens=rand(3))
    with pytest.raises(ValueError, match="q_descale is given"):
        three.flash_attn_func(X, X, X, q_descale=rand(B, HQ))
