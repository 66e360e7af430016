"""The private functions of flash-attn 2: their results, and rings and other projects that use them."""

from __future__ import annotations

import inspect
import re

import pytest
import torch

from saccade import Unsupported
from saccade.integrations import flash_attn as ours

from .flash_reference import HK, HQ, OPTIONS, SK, SQ, B, D, close, paged, plain, rand, sequences, signature, wanted

# flash-attn's main branch, August 2026
SIGNATURES = {
    "_flash_attn_forward": "q, k, v, dropout_p, softmax_scale, causal, window_size_left, window_size_right, softcap, "
    "alibi_slopes, return_softmax",
    "_flash_attn_varlen_forward": "q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p, "
    "softmax_scale, causal, window_size_left=-1, window_size_right=-1, softcap=0.0, alibi_slopes=None, "
    "return_softmax=False, block_table=None, leftpad_k=None, seqused_k=None, zero_tensors=False, num_splits=0",
    "_flash_attn_backward": "dout, q, k, v, out, softmax_lse, dq, dk, dv, dropout_p, softmax_scale, causal, "
    "window_size_left, window_size_right, softcap, alibi_slopes, deterministic, rng_state=None",
    "_flash_attn_varlen_backward": "dout, q, k, v, out, softmax_lse, dq, dk, dv, cu_seqlens_q, cu_seqlens_k, "
    "max_seqlen_q, max_seqlen_k, dropout_p, softmax_scale, causal, window_size_left, window_size_right, softcap, "
    "alibi_slopes, deterministic, rng_state=None, zero_tensors=False",
}


def ints(*numbers: int) -> torch.Tensor:
    return torch.tensor(numbers, dtype=torch.int32)


def defaults(function) -> dict:
    """As ring-flash-attention has them: names of a plain function, with None where there is no default."""
    assert inspect.isfunction(function)
    spec = inspect.getfullargspec(function)
    values = dict.fromkeys(spec.args) | dict(zip(spec.args[::-1], (spec.defaults or ())[::-1], strict=False))
    return values | {"softcap": 0.0}


@pytest.mark.parametrize("name", SIGNATURES)
def test_signatures(name) -> None:
    assert signature(getattr(ours, name)) == SIGNATURES[name]
    assert getattr(ours.flash_attn_interface, name) is getattr(ours, name)


def test_the_version_is_of_the_flash_attn_whose_signatures_these_are() -> None:
    number = tuple(int(n) for n in re.fullmatch(r"(\d+)\.(\d+)\.(\d+)", ours.__version__).groups())
    # what transformers, yunchang and Transformer Engine ask for
    assert (2, 7, 0) <= number < (3,)
    assert ours.__version__ > "2.6.3"


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("packed", [False, True])
def test_forward_and_backward(name, packed) -> None:
    options, cu_q, cu_k = dict(OPTIONS[name]), ints(0, 7, 14), ints(0, 11, 22)
    slopes = options.pop("alibi_slopes", None)
    if packed and slopes is not None:
        cu_k = cu_q
    sizes = int(cu_q[-1]), int(cu_k[-1])
    q, k, v = (
        rand(n, h, D, seed=s).requires_grad_()
        for s, (n, h) in enumerate(zip((sizes[0], sizes[1], sizes[1]), (HQ, HK, HK), strict=True))
    )
    left, right = (int(n) for n in options.pop("window_size", (-1, -1)))
    numbers = {
        "dropout_p": 0, "softmax_scale": options.get("softmax_scale"), "causal": options.get("causal", False),
        "window_size_left": left, "window_size_right": right, "softcap": options.get("softcap", 0.0),
        "alibi_slopes": slopes,
    }  # fmt: skip
    arrays = [x.detach() for x in (q, k, v)]
    if packed:
        lengths = cu_q, cu_k, 7, 11
        o, lse, weights, state = ours._flash_attn_varlen_forward(*arrays, *lengths, **numbers)
    else:
        lengths, arrays = (), [x.unflatten(0, (B, -1)) for x in arrays]
        o, lse, weights, state = ours._flash_attn_forward(*arrays, **numbers, return_softmax=True)
    assert (weights.numel(), state.dtype, state.tolist()) == (0, torch.int64, [0, 0])
    assert lse.is_contiguous()
    assert lse.shape == ((HQ, 14) if packed else (B, HQ, 7))
    want = sequences(q, k, v, cu_q, cu_k, **wanted(OPTIONS[name]))
    want_o, want_lse = torch.cat([x for x, _ in want]), torch.cat([x for _, x in want], 1)
    close(o.reshape(want_o.shape), want_o)
    close(lse if packed else lse.transpose(0, 1).flatten(1), want_lse)
    do, buffers = rand(*o.shape, seed=9), [torch.full_like(x, float("nan")) for x in arrays]
    backward = ours._flash_attn_varlen_backward if packed else ours._flash_attn_backward
    sums = backward(do, *arrays, o, lse, *buffers, *lengths, **numbers, deterministic=True)
    close(sums, (do * o).sum(-1).mT.double())
    expected = torch.autograd.grad(want_o, (q, k, v), do.reshape(want_o.shape).double())
    for a, b in zip(buffers, expected, strict=True):
        close(a.reshape(b.shape), b.double())


@pytest.mark.parametrize("packed", [False, True])
def test_dropout_is_repeated_by_its_state(packed) -> None:
    q, k, v = (rand(1, 12, h, D, seed=n) for n, h in enumerate((HQ, HK, HK)))
    q, k, v = (x[0] if packed else x for x in (q, k, v))
    numbers = {
        "dropout_p": 0.4, "softmax_scale": None, "causal": True, "window_size_left": -1, "window_size_right": -1,
        "softcap": 0.0, "alibi_slopes": None,
    }  # fmt: skip
    lengths = (ints(0, 12), ints(0, 12), 12, 12) if packed else ()
    forward = ours._flash_attn_varlen_forward if packed else ours._flash_attn_forward
    o, lse, weights, state = forward(q, k, v, *lengths, **numbers, return_softmax=True)
    assert int(state[0]) > 0
    # out and its gradients are made of the weights that were not dropped
    p = weights[0].double().clamp(min=0) / 0.6
    inputs = v.reshape(12, HK, D).double().requires_grad_()
    made = torch.einsum("hij,jhd->ihd", p, inputs.repeat_interleave(2, 1))
    close(o.reshape(12, HQ, D), made)
    do, dv = rand(*o.shape, seed=9), torch.empty_like(v)
    backward = ours._flash_attn_varlen_backward if packed else ours._flash_attn_backward
    call = (do, q, k, v, o, lse, None, None, dv, *lengths)
    backward(*call, **numbers, deterministic=False, rng_state=state)
    close(dv.reshape(12, HK, D), torch.autograd.grad(made, inputs, do.reshape(12, HQ, D).double())[0])
    with pytest.raises(ValueError, match=r"dropout_p is 0.4 without rng_state"):
        backward(*call, **numbers, deterministic=False)


def merged(out, lse, block_out, block_lse):
    """One step of a ring: out [B, S, H, D] and lse [B, S, H, 1] with those of another block, [B, H, S]."""
    block_lse = block_lse.mT[..., None]
    if out is None:
        return block_out, block_lse
    out = out - torch.sigmoid(block_lse - lse) * (out - block_out)
    return out, lse - torch.nn.functional.logsigmoid(lse - block_lse)


WORLD, T = 3, 4
# for each kind of ring the options of the whole, and those of a block that is so many blocks before the queries
RINGS = {
    "full": ({}, lambda back: {"causal": False, "window_size_left": -1, "window_size_right": -1}),
    "causal": (
        {"causal": True},
        lambda back: None if back < 0 else {"causal": back == 0, "window_size_left": -1, "window_size_right": -1},
    ),
    "window": (
        {"window": (4, 0)},
        lambda back: (
            None
            if back not in (0, 1)
            else {"causal": False, "window_size_left": 4 - back * T, "window_size_right": back * T}
        ),
    ),
}


@pytest.mark.parametrize("name", RINGS)
def test_a_ring_of_blocks_equals_the_whole(name) -> None:
    """Each rank's queries meet the blocks of keys that come by; gradients of a block take the lse of all."""
    whole, options = RINGS[name]
    q, k, v = (rand(B, WORLD * T, h, D, seed=n).requires_grad_() for n, h in enumerate((HQ, HK, HK)))
    want = torch.stack([plain(q[b], k[b], v[b], **whole)[0] for b in range(B)])
    do = rand(B, WORLD * T, HQ, D, seed=9)
    grads = [torch.zeros_like(x) for x in (q, k, v)]
    shards = [[x.contiguous() for x in x.detach().split(T, 1)] for x in (q, k, v, do)]
    numbers = {"dropout_p": 0, "softmax_scale": D**-0.5, "alibi_slopes": None}
    for rank in range(WORLD):
        blocks = [(r, options(rank - r)) for r in ((rank - step) % WORLD for step in range(WORLD))]
        blocks = [(r, own) for r, own in blocks if own is not None]
        out = lse = None
        for r, own in blocks:
            params = defaults(ours._flash_attn_forward) | numbers | own
            params |= {"q": shards[0][rank], "k": shards[1][r], "v": shards[2][r], "return_softmax": False}
            block_out, block_lse, _, _ = ours._flash_attn_forward(**params)
            out, lse = merged(out, lse, block_out, block_lse)
        close(out, want[:, rank * T : (rank + 1) * T])
        for r, own in blocks:
            arrays = {"q": shards[0][rank], "k": shards[1][r], "v": shards[2][r]}
            buffers = {f"d{n}": torch.empty_like(x) for n, x in arrays.items()}
            params = defaults(ours._flash_attn_backward) | numbers | own | arrays | buffers
            params |= {"dout": shards[3][rank], "out": out, "softmax_lse": lse.squeeze(-1).transpose(1, 2)}
            ours._flash_attn_backward(**(params | {"deterministic": False}))
            for total, part, at in zip(grads, buffers.values(), (rank, r, r), strict=True):
                total[:, at * T : (at + 1) * T] += part
    for a, b in zip(grads, torch.autograd.grad(want, (q, k, v), do.double()), strict=True):
        close(a, b.double())


def test_a_ring_of_packed_sequences_by_halves() -> None:
    """As a zigzag ring does: the second halves of the queries meet other keys, by positional and keyword arguments."""
    cu = ints(0, 4, 10)
    q, k, v = (rand(10, h, D, seed=n).requires_grad_() for n, h in enumerate((HQ, HK, HK)))
    other = [rand(10, HK, D, seed=n).requires_grad_() for n in (5, 6)]
    late = torch.tensor([2, 3, 7, 8, 9])
    params = defaults(ours._flash_attn_varlen_forward) | {
        "dropout_p": 0,
        "softmax_scale": D**-0.5,
        "return_softmax": False,
    }
    own = {"q": q.detach(), "k": k.detach(), "v": v.detach(), "cu_seqlens_q": cu, "cu_seqlens_k": cu}
    o, lse, _, _ = ours._flash_attn_varlen_forward(
        **(params | own | {"max_seqlen_q": 6, "max_seqlen_k": 6, "causal": True})
    )
    half = cu // 2
    block, block_lse, *_ = ours._flash_attn_varlen_forward(
        q.detach()[late], *(x.detach() for x in other), half, cu, 3, 6, 0.0, D**-0.5, False
    )
    lse = lse.mT[..., None].clone()
    o[late], lse[late] = merged(o[late], lse[late], block, block_lse)
    parts, joined = [], []
    for a, b in ((0, 4), (4, 10)):
        n = (b - a) // 2
        both = [torch.cat([x[a:b], y[a:b]]) for x, y in zip(other, (k, v), strict=True)]
        # the early half sees its own keys alone
        early = plain(q[a : a + n], k[a : a + n], v[a : a + n], causal=True)
        rest = plain(q[a + n : b], *both, causal=True)
        parts.append(torch.cat([early[0], rest[0]]))
        joined.append(torch.cat([early[1], rest[1]], 1))
    want = torch.cat(parts)
    close(o, want)
    close(lse.squeeze(-1).mT, torch.cat(joined, 1))
    do, softmax_lse = rand(10, HQ, D, seed=9), lse.squeeze(-1).mT
    dq, dk, dv, dq2, dk2, dv2 = (torch.empty_like(x) for x in (q, k, v, q[late], *other))
    rest = {
        "window_size_left": -1,
        "window_size_right": -1,
        "softcap": 0.0,
        "alibi_slopes": None,
        "deterministic": False,
    }
    call = (do, q.detach(), k.detach(), v.detach(), o, softmax_lse, dq, dk, dv, cu, cu, 6, 6, 0.0, D**-0.5, True)
    ours._flash_attn_varlen_backward(*call, **rest)
    second = (do[late], q.detach()[late], *(x.detach() for x in other), o[late], softmax_lse[:, late], dq2, dk2, dv2)
    ours._flash_attn_varlen_backward(*second, half, cu, 3, 6, 0.0, D**-0.5, False, **rest)
    dq[late] += dq2
    expected = torch.autograd.grad(want, (q, k, v, *other), do.double())
    for a, b in zip((dq, dk, dv, dk2, dv2), expected, strict=True):
        close(a, b.double())


def test_keys_in_use_and_pages() -> None:
    cu_q, cu_k = ints(0, 4, 10), ints(0, 9, 22)
    q, k, v = rand(10, HQ, D), rand(22, HK, D, seed=1), rand(22, HK, D, seed=2)
    call = q, k, v, cu_q, cu_k, 6, 13, 0.0, None, True
    o, lse, *_ = ours._flash_attn_varlen_forward(*call, seqused_k=ints(7, 10), leftpad_k=ints(1, 3))
    want = sequences(q, k, v, cu_q, cu_k, used_k=[7, 10], first=[1, 3], causal=True)
    close(o, torch.cat([x for x, _ in want]))
    close(lse, torch.cat([x for _, x in want], 1))
    (pages, table), (values, _) = paged(k, cu_k, 8), paged(v, cu_k, 8)
    o, lse, *_ = ours._flash_attn_varlen_forward(
        q, pages, values, *call[3:], block_table=table, seqused_k=ints(7, 10), num_splits=2
    )
    want = sequences(q, k, v, cu_q, cu_k, used_k=[7, 10], causal=True)
    close(o, torch.cat([x for x, _ in want]))
    close(lse, torch.cat([x for _, x in want], 1))


Q, K = rand(B, SQ, HQ, D), rand(B, SK, HK, D)
LSE = rand(B, HQ, SQ)
PACKED = (Q[0], K[0], K[0], ints(0, 7), ints(0, 11), 7, 11, 0.0, None, False)
BACKWARD = (Q, Q, K, K, Q, LSE)
REST = (0.0, None, False, -1, -1, 0.0, None, False)
WRONG = {
    "lse": (
        lambda: ours._flash_attn_backward(*BACKWARD[:5], LSE.mT, None, None, None, *REST), ValueError,
        "softmax_lse has shape",
    ),
    "buffer": (lambda: ours._flash_attn_backward(*BACKWARD, K, K, K, *REST), ValueError, "dq has shape .*, like q"),
    "array": (lambda: ours._flash_attn_backward(None, *BACKWARD[1:], Q, K, K, *REST), TypeError, "dout is NoneType"),
    "rows of a batch": (
        lambda: ours._flash_attn_varlen_forward(Q[:1], K[:1], K[:1], ints(0, 1), ints(0, 1), *PACKED[5:]), ValueError,
        r"q has shape .* expected \[total, heads, D\]",
    ),
    "slopes": (
        lambda: ours._flash_attn_varlen_forward(*PACKED, alibi_slopes=torch.rand(HQ)), Unsupported,
        "call flash_attn_varlen_func",
    ),
    "padding of pages": (
        lambda: ours._flash_attn_varlen_forward(*PACKED, block_table=ints(0)[:, None], leftpad_k=ints(1)), Unsupported,
        "leftpad_k are not computed over pages",
    ),
    "window": (
        lambda: ours._flash_attn_forward(Q, K, K, 0.0, None, False, "a", -1, 0.0, None, False), TypeError,
        "window_size",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_wrong_arguments(name) -> None:
    call, kind, words = WRONG[name]
    with pytest.raises(kind, match=words):
        call()


def test_a_gradient_through_a_private_forward_raises() -> None:
    q = Q.clone().requires_grad_()
    o, *_ = ours._flash_attn_forward(q, K, K, 0.0, None, True, -1, -1, 0.0, None, False)
    with pytest.raises(Unsupported, match="records no graph: call flash_attn_func"):
        o.sum().backward()
