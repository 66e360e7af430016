"""Named sparse patterns against their definitions, in whole passes, backward, and for the last queries of a cache."""

from __future__ import annotations

import numpy as np
import pytest

import saccade
from saccade import mask as masks
from saccade.mask import patterns

T = 45
I, J = np.arange(T)[:, None], np.arange(T)
GLOBAL = np.isin(np.arange(T), [0, 7, 30])
PATTERNS = {
    "strided": (patterns.strided_factors(6), (J <= I) & ((I - J < 6) | ((I - J) % 6 == 0))),
    "fixed": (patterns.fixed_factors(6, 2, T), (J <= I) & ((I // 6 == J // 6) | (J % 6 >= 4))),
    "fixed, whole chunks": (patterns.fixed_factors(6, 6, T), J <= I),
    "chunked local": (masks.chunked(7) & masks.causal(), (J <= I) & (I // 7 == J // 7)),
    "longformer": (
        masks.window(2, 2) | masks.global_tokens([0, 7, 30]), (abs(I - J) <= 2) | GLOBAL[:, None] | GLOBAL,
    ),
    "one factor": (masks.causal() & masks.strided(5), (J <= I) & ((I - J) % 5 == 0)),
}  # fmt: skip


def kept(mask: masks.Mask, Tq: int = T, Tk: int = T, B: int = 1) -> np.ndarray:
    """bool [B, Tq, Tk]: where equal scores leave a weight, with v the identity."""
    q, k = np.zeros((B, Tq, 1, 4)), np.zeros((B, Tk, 1, 4))
    v = np.broadcast_to(np.eye(Tk)[None, :, None], (B, Tk, 1, Tk))
    return np.asarray(saccade.attention(q, k, np.ascontiguousarray(v), mask))[:, :, 0] > 0


@pytest.mark.parametrize("name", PATTERNS)
def test_definition(name) -> None:
    mask, want = PATTERNS[name]
    np.testing.assert_array_equal(kept(mask)[0], want)
    # the last queries of a cache meet its last keys
    for last in (1, 4):
        np.testing.assert_array_equal(kept(mask, last)[0], want[-last:])
    assert masks.parse(str(mask)) == mask


@pytest.mark.parametrize("name", [*PATTERNS, "big bird"])
def test_backward(name) -> None:
    mask, want = PATTERNS.get(name) or (
        patterns.big_bird(T, 5),
        np.kron(layout_of(patterns.big_bird(T, 5)), np.ones((5, 5))) > 0,
    )
    r = np.random.default_rng(0)
    q, k, v, do = (r.standard_normal((1, T, 1, 8)) for _ in range(4))
    s = np.where(want, q[0, :, 0] @ k[0, :, 0].T / 8**0.5, -np.inf)
    p = np.exp(s - s.max(-1, keepdims=True))
    p /= p.sum(-1, keepdims=True)
    o, lse = saccade.attention(q, k, v, mask, return_lse=True)
    np.testing.assert_allclose(o[0, :, 0], p @ v[0, :, 0], atol=1e-12)
    dp = do[0, :, 0] @ v[0, :, 0].T
    ds = p * (dp - (p * dp).sum(-1, keepdims=True)) / 8**0.5
    dq, dk, dv = saccade.attention_backward(do, q, k, v, o, lse, mask)[:3]
    np.testing.assert_allclose(dq[0, :, 0], ds @ k[0, :, 0], atol=1e-12)
    np.testing.assert_allclose(dk[0, :, 0], ds.T @ q[0, :, 0], atol=1e-12)
    np.testing.assert_allclose(dv[0, :, 0], p.T @ do[0, :, 0], atol=1e-12)


def layout_of(mask: masks.Mask) -> np.ndarray:
    return np.asarray(mask.args[0])


@pytest.mark.parametrize("length", [45, 43, 5, 3])
def test_big_bird_is_window_ends_and_draws(length) -> None:
    block, drawn = 5, 2
    count = -(-length // block)
    mask = patterns.big_bird(length, block, random=drawn, seed=7)
    found = kept(mask, length, length)[0]
    # blocks are whole: what one pair of a block sees, all of its pairs see
    layout = found[::block, ::block]
    np.testing.assert_array_equal(found, np.kron(layout, np.ones((block, block), bool))[:length, :length])
    b = np.arange(count)
    always = (abs(b[:, None] - b) <= 1) | (b == 0) | (b == count - 1) | ((b == 0) | (b == count - 1))[:, None]
    assert layout[always].all()
    beyond = np.minimum(drawn, (~always).sum(1))
    np.testing.assert_array_equal((layout & ~always).sum(1), beyond)
    np.testing.assert_array_equal(
        layout, kept(patterns.big_bird(length, block, random=drawn, seed=7), length, length)[0][::block, ::block]
    )


def test_big_bird_draws_by_its_seed() -> None:
    drawn = {str(patterns.big_bird(200, 5, seed=seed)) for seed in range(4)}
    assert len(drawn) == 4
    alone = patterns.big_bird(40, 5, near=0, ends=0, random=0)
    np.testing.assert_array_equal(kept(alone, 40, 40)[0], np.kron(np.eye(8), np.ones((5, 5))) > 0)


def chosen(q: np.ndarray, k: np.ndarray, bq: int, bk: int, n: int, past: bool) -> np.ndarray:
    """bool [B, Tq, Tk] of `top_blocks`, by its definition."""
    B, Tq, Hq, _ = q.shape
    Tk, Hk = k.shape[1:3]
    out = np.zeros((B, Tq, Tk), bool)
    for b in range(B):
        for first in range(0, Tq, bq):
            mean = q[b, first : first + bq].mean(0)
            starts = list(range(0, Tk, bk))
            scores = [sum(mean[h] @ k[b, at : at + bk].mean(0)[h // (Hq // Hk)] for h in range(Hq)) for at in starts]
            end = min(first + bq, Tq) - 1 + Tk - Tq
            if past:
                scores = [
                    -np.inf if at > end else np.inf if at <= end < at + bk else x
                    for at, x in zip(starts, scores, strict=True)
                ]
            for number in np.argsort(scores)[::-1][:n]:
                if scores[number] > -np.inf:
                    out[b, first : first + bq, starts[number] : starts[number] + bk] = True
    return out


@pytest.mark.parametrize(("Tq", "Tk"), [(45, 45), (16, 45), (1, 45), (3, 3)])
@pytest.mark.parametrize("past", [False, True])
def test_top_blocks(Tq, Tk, past) -> None:
    r = np.random.default_rng(0)
    q, k = r.standard_normal((2, Tq, 4, 8)), r.standard_normal((2, Tk, 2, 8))
    for bq, bk, n in ((5, 5, 2), (4, 7, 3), (8, 8, 99)):
        mask = patterns.top_blocks(q, k, (bq, bk), n, of_the_past=past)
        np.testing.assert_array_equal(kept(mask, Tq, Tk, 2), chosen(q, k, bq, bk, n, past))


def test_top_blocks_of_tensors() -> None:
    torch = pytest.importorskip("torch")
    r = np.random.default_rng(0)
    q, k = r.standard_normal((2, 20, 4, 8)), r.standard_normal((2, 20, 2, 8))
    for past in (False, True):
        want = patterns.top_blocks(q, k, 4, 2, of_the_past=past)
        given = torch.from_numpy(q).requires_grad_(), torch.from_numpy(k)
        mask = patterns.top_blocks(*given, 4, 2, of_the_past=past)
        np.testing.assert_array_equal(layout_of(mask), layout_of(want))
        o = saccade.attention(*given, torch.ones(2, 20, 2, 8, dtype=torch.float64), mask & masks.causal())
        o.sum().backward()
        assert bool(given[0].grad.isfinite().all())


WRONG = {
    "expected 1 <= c <= s": lambda: patterns.fixed_factors(4, 5, 9),
    "expected T and block of at least 1": lambda: patterns.big_bird(9, 0),
    "at least 1 key block": lambda: patterns.top_blocks(np.ones((1, 2, 1, 4)), np.ones((1, 2, 1, 4)), 2, 0),
    "expected an integer >= 1": lambda: patterns.strided_factors(0),
    "top_blocks: q": lambda: patterns.top_blocks(np.ones((1, 2, 3, 4)), np.ones((1, 2, 2, 4)), 2, 1),
}


@pytest.mark.parametrize("words", WRONG)
def test_bad_input(words) -> None:
    with pytest.raises(ValueError, match=words):
        WRONG[words]()


def by_hand(layer, x, chosen: list[list[int]]):
    """Longformer's formulas with the T×T matrix."""
    import torch

    def split(name: str) -> torch.Tensor:
        return layer.get_submodule(name)(x).unflatten(-1, (layer.heads, -1)).transpose(1, 2)

    T, which = x.shape[1], torch.zeros(x.shape[:2], dtype=torch.bool)
    for row, ids in enumerate(chosen):
        which[row, ids] = True
    i = torch.arange(T)
    seen = ((i[:, None] - i).abs() <= layer.reach) | which[:, None] | which[..., None]
    outs = []
    for end, mask in (("", seen), ("_global" if layer.separate else "", torch.ones_like(seen))):
        q, k, v = (split(name + end) for name in ("query", "key", "value"))
        s = (q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5).masked_fill(~mask[:, None], -torch.inf)
        outs.append((s.softmax(-1) @ v).transpose(1, 2).flatten(-2))
    return torch.where(which[..., None], outs[1], outs[0])


@pytest.mark.parametrize("separate", [True, False])
def test_longformer_is_its_formula(separate) -> None:
    torch = pytest.importorskip("torch")
    from saccade.models.sparse_blocks import LongformerAttention

    torch.manual_seed(0)
    layer, x = LongformerAttention(24, 3, 6, separate).double(), torch.randn(2, 30, 24, dtype=torch.float64)
    for ids in ([[0, 12], [5, 29]], [[0, 0], [3, 4]]):
        found, want = layer(x, torch.tensor(ids)), by_hand(layer, x, ids)
        torch.testing.assert_close(found, want, rtol=1e-10, atol=1e-12)
        parameters = [one for name, one in layer.named_parameters() if not name.endswith("key.bias")]
        weight = torch.randn(want.shape, dtype=torch.float64)
        pairs = (torch.autograd.grad((o * weight).sum(), parameters) for o in (found, want))
        for one, two in zip(*pairs, strict=True):
            torch.testing.assert_close(one, two, rtol=1e-9, atol=1e-11)
    torch.testing.assert_close(layer(x, torch.tensor([2])), by_hand(layer, x, [[2], [2]]), rtol=1e-10, atol=1e-12)
    nothing = torch.zeros(2, 0, dtype=torch.int64)
    torch.testing.assert_close(layer(x, nothing), by_hand(layer, x, [[], []]), rtol=1e-10, atol=1e-12)
    with pytest.raises(ValueError, match="even window"):
        LongformerAttention(24, 3, 5)
