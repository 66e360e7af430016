"""Native sparse attention against its formulas, query by query in float64; decode against the whole sequence."""

from __future__ import annotations

import pytest

import saccade

torch = pytest.importorskip("torch")
from saccade.models import native_sparse  # noqa: E402
from saccade.models.native_sparse import NativeSparseAttention, SparseSizes  # noqa: E402

WIDTH, HEADS, KV_HEADS, SIZE = 24, 6, 2, 8
SMALL = SparseSizes(length=8, stride=4, block=8, blocks=4, window=10)
FORMS = {
    "small": (45, SMALL),
    "longer blocks": (54, SparseSizes(length=6, stride=3, block=12, blocks=4, window=5)),
    "no overlap": (40, SparseSizes(length=4, stride=4, block=8, blocks=3, window=7)),
    "much overlap": (30, SparseSizes(length=8, stride=2, block=8, blocks=3, window=1)),
    "no first block": (40, SparseSizes(length=8, stride=4, block=8, blocks=3, first=0, local=1, window=8)),
    "more blocks than there are": (30, SparseSizes(length=8, stride=4, block=8, blocks=16, window=100)),
    "shorter than a block": (5, SMALL),
    "one token": (1, SMALL),
}


def layer_of(sizes: SparseSizes, rope=None):
    torch.manual_seed(0)
    return NativeSparseAttention(WIDTH, HEADS, KV_HEADS, SIZE, sizes, rope).double()


def turned(x, position: int, rope):
    # x [heads, size] at one position
    return x if rope is None else saccade.rope(x[None], torch.tensor([position]), **rope)[0]


def softmax_of(q, k, v):
    # q [Hq, D], k and v [n, Hk, D] -> the output [Hq, D] and the probabilities [Hq, n]
    k, v = (one.repeat_interleave(HEADS // KV_HEADS, 1) for one in (k, v))
    p = (torch.einsum("hd,nhd->hn", q, k) / SIZE**0.5).softmax(-1)
    return torch.einsum("hn,nhd->hd", p, v), p


def best_blocks(p, t: int, sizes: SparseSizes) -> list[set[int]]:
    """The paper's equations 9 and 10 for one query; p [Hq, n]."""
    each, wide, count = sizes.block // sizes.stride, sizes.length // sizes.stride, t // sizes.block + 1
    lists = []
    for heads in p.detach().unflatten(0, (KV_HEADS, -1)):
        score = dict.fromkeys(range(count), 0.0)
        for j in score:
            # the paper counts blocks from 1
            at = [each * (j + 1) - m - n - 1 for m in range(each) for n in range(wide)]
            score[j] = sum(float(heads[:, i].sum()) for i in at if 0 <= i < p.shape[1])
        always = {j for j in score if j < sizes.first or j > count - 1 - sizes.local}
        others = sorted(score.keys() - always, key=lambda j: -score[j])
        lists.append(always | set(others[: sizes.blocks - len(always)]))
    return lists


def by_hand(layer, x):
    """(outputs, chosen blocks of each query and key head) of one sequence x [T, width]."""
    s, outs, chosen = layer.sizes, [], []
    ks, vs = (one(x).unflatten(-1, (3, KV_HEADS, SIZE)) for one in (layer.k_proj, layer.v_proj))
    starts = range(0, len(x) - s.length + 1, s.stride)
    compressed = [
        [one.mlp((rows[i : i + s.length].permute(1, 2, 0) + one.positions).flatten(1)) for i in starts]
        for one, rows in ((layer.compress_k, ks[:, 0]), (layer.compress_v, vs[:, 0]))
    ]
    compressed[0] = [turned(row, i * s.stride, layer.rope) for i, row in enumerate(compressed[0])]
    rotated = torch.stack([turned(row.flatten(0, 1), t, layer.rope).view_as(row) for t, row in enumerate(ks)])
    for t in range(len(x)):
        q = turned(layer.q_proj(x[t]).view(HEADS, SIZE), t, layer.rope)
        n = len([i for i in range(0, t + 1, s.stride) if i + s.length <= t + 1])
        branches, p = [torch.zeros_like(q)], q.new_zeros(HEADS, 0)
        if n:
            branches[0], p = softmax_of(q, *(torch.stack(rows[:n]) for rows in compressed))
        lists = best_blocks(p, t, s)
        seen = [[j for j in range(t + 1) if j // s.block in one] for one in lists]
        grouped = q.view(KV_HEADS, -1, SIZE)
        branches.append(torch.cat([
            (grouped[h] @ rotated[keys, 1, h].T / SIZE**0.5).softmax(-1) @ vs[keys, 1, h] for h, keys in enumerate(seen)
        ]))  # fmt: skip
        near = slice(max(0, t - s.window + 1), t + 1)
        branches.append(softmax_of(q, rotated[near, 2], vs[near, 2])[0])
        gates = layer.g_proj(x[t]).sigmoid().view(3, HEADS, 1)
        outs.append(layer.o_proj((gates * torch.stack(branches)).sum(0).flatten()))
        chosen.append(lists)
    return torch.stack(outs), chosen


@pytest.fixture
def lists(monkeypatch):
    """The lists of blocks that a layer chooses."""
    chosen, choose = [], native_sparse.chosen_blocks
    monkeypatch.setattr(native_sparse, "chosen_blocks", lambda *args: chosen.append(choose(*args)) or chosen[-1])
    return chosen


@pytest.mark.parametrize("rope", [None, {"base": 100.0}], ids=["plain", "rope"])
@pytest.mark.parametrize("name", FORMS)
def test_formulas(name, rope, lists, monkeypatch) -> None:
    # several chunks of queries
    monkeypatch.setattr(native_sparse, "ROWS", 16)
    T, sizes = FORMS[name]
    layer, x = layer_of(sizes, rope), torch.randn(2, T, WIDTH, dtype=torch.float64, requires_grad=True)
    o = layer(x)
    rows = [by_hand(layer, one) for one in x]
    want = torch.stack([row for row, _ in rows])
    torch.testing.assert_close(o, want, rtol=1e-10, atol=1e-12)
    for blocks, (_, chosen) in zip(lists[0], rows, strict=True):
        assert [[set(one.tolist()) - {-1} for one in row] for row in blocks.transpose(0, 1)] == chosen
    weight, inputs = torch.randn_like(o), [x, *layer.parameters()]
    grads = [torch.autograd.grad((y * weight).sum(), inputs, allow_unused=True) for y in (o, want)]
    for got, expected in zip(*grads, strict=True):
        # a text without compressed blocks does not reach their parameters
        expected = torch.zeros_like(got) if expected is None else expected
        torch.testing.assert_close(got, expected, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("name", FORMS)
def test_decode_is_the_whole_pass(name) -> None:
    T, sizes = FORMS[name]
    layer, x = layer_of(sizes, {"base": 100.0}), torch.randn(2, T, WIDTH, dtype=torch.float64)
    with torch.no_grad():
        want = layer(x)
        for parts in (1, T, max(1, T // 2), 7):
            cache = layer.make_cache(2, T)
            o = torch.cat([layer(part, cache) for part in x.split(parts, 1)], 1)
            torch.testing.assert_close(o, want, rtol=1e-10, atol=1e-12)
        with pytest.raises(ValueError, match=f"the cache has {T} tokens and would take 1 more; expected at most {T}"):
            layer(x[:, :1], cache)
    # what later blocks and the window do not read is not kept
    assert cache.recent[0].shape[1] < sizes.length
    assert cache.recent[2].shape[1] < max(sizes.window, 2)


def test_no_tokens() -> None:
    assert layer_of(SMALL)(torch.zeros(2, 0, WIDTH, dtype=torch.float64)).shape == (2, 0, WIDTH)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_other_dtypes(dtype) -> None:
    """All blocks are chosen, so that the choice does not depend on rounding."""
    layer, x = layer_of(FORMS["more blocks than there are"][1]), torch.randn(1, 100, WIDTH, dtype=torch.float64)
    want, o = layer(x), layer.to(dtype)(x.to(dtype))
    assert o.dtype == dtype
    torch.testing.assert_close(o.double(), want, rtol=0, atol=8 * torch.finfo(dtype).eps)


REFUSED = {
    "length, which the stride": {"length": 10, "stride": 4},
    "length 80": {"length": 80},
    "block 40": {"block": 40},
    "blocks is 2; expected at least 3, the first and local": {"blocks": 2},
    "'local': 0": {"local": 0},
    "'window': 0": {"window": 0},
}


@pytest.mark.parametrize("words", REFUSED)
def test_refused_sizes(words) -> None:
    with pytest.raises(ValueError, match=words.partition(",")[0]):
        SparseSizes(**REFUSED[words])


def test_refused() -> None:
    with pytest.raises(ValueError, match="expected a kv_heads that divides heads"):
        NativeSparseAttention(24, 6, 4)
    layer = layer_of(SMALL)
    with pytest.raises(saccade.Unsupported, match="requires grad"):
        layer(torch.zeros(1, 9, WIDTH, dtype=torch.float64), layer.make_cache(1, 9))
