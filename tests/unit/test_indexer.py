"""The indexer of DeepSeek sparse attention, its choice and its loss against their formulas in float64."""

from __future__ import annotations

from dataclasses import replace

import pytest

import saccade
from saccade import mask as masks

torch = pytest.importorskip("torch")
from saccade.caches.latent import IndexedLatentKVCache, LatentKVCache  # noqa: E402
from saccade.models import indexer as module  # noqa: E402
from saccade.models.deepseek import LatentAttention  # noqa: E402
from saccade.models.deepseek_config import DeepSeekConfig  # noqa: E402
from saccade.models.indexer import Index, LightningIndexer, best_keys, indexer_loss  # noqa: E402
from saccade.rope import angles  # noqa: E402

B, WIDTH, HEADS, KV_HEADS, D = 2, 20, 4, 2, 8


@pytest.fixture(autouse=True)
def chunks(monkeypatch):
    """Several chunks of queries."""
    monkeypatch.setattr(module, "ROWS", 7)


def inputs(T: int, q_width: int | None = None):
    torch.manual_seed(0)
    # with few heads, the scores of several keys would be 0
    layer = LightningIndexer(WIDTH, q_width, heads=16, size=6).double()
    torch.nn.init.normal_(layer.k_norm.bias)
    x = torch.randn(B, T, WIDTH, dtype=torch.float64, requires_grad=True)
    q = torch.randn(B, T, HEADS, D, dtype=torch.float64, requires_grad=True)
    k, v = torch.randn(2, B, T, KV_HEADS, D, dtype=torch.float64, requires_grad=True)
    return layer, x, q, k, v


def scores_of(layer, x, source, turn=None):
    """I [T, T] of one sequence: formula 1 of the paper, with the scales and rotations of the published code."""

    def rotated(one):
        if turn is None:
            return one
        (cos, sin), half = (part[:, 0] for part in turn), turn[0].shape[-1]
        a, b, rest = one[:, :half], one[:, half : 2 * half], one[:, 2 * half :]
        return torch.cat([a * cos - b * sin, a * sin + b * cos, rest], 1)

    raw = x @ layer.wk.weight.T
    centred = raw - raw.mean(-1, keepdim=True)
    norm = centred / (raw.var(-1, keepdim=True, correction=0) + 1e-6).sqrt()
    k = rotated(norm * layer.k_norm.weight + layer.k_norm.bias)
    w = x @ layer.weights_proj.weight.T / layer.heads**0.5 / layer.size**0.5
    total = 0
    for j, weight in enumerate(layer.wq_b.weight.split(layer.size)):
        total = total + w[:, j, None] * (rotated(source @ weight.T) @ k.T).relu()
    return total


def best_of(scores, count: int):
    """bool [T, T]: the best keys of each query."""
    chosen = torch.zeros_like(scores, dtype=torch.bool)
    for t, row in enumerate(scores):
        chosen[t, row[: t + 1].topk(min(count, t + 1)).indices] = True
    return chosen


def loss_of(scores, q, k, seen, scale):
    """The loss [T] of one sequence over the pairs `seen` [T, T]."""
    k = k.repeat_interleave(HEADS // k.shape[1], 1)
    s = torch.einsum("thd,shd->hts", q, k) * scale
    p = s.masked_fill(~seen, -torch.inf).softmax(-1).sum(0)
    p = (p / p.sum(-1, keepdim=True)).detach()
    log = scores.masked_fill(~seen, -torch.inf).log_softmax(-1)
    return torch.stack([(p[t, one] * (p[t, one].log() - log[t, one])).sum() for t, one in enumerate(seen)])


@pytest.mark.parametrize("T", [1, 5, 30])
@pytest.mark.parametrize("q_width", [None, 10])
def test_formulas(T, q_width) -> None:
    layer, x, q, k, _ = inputs(T, q_width)
    source = None if q_width is None else torch.randn(B, T, q_width, dtype=torch.float64, requires_grad=True)
    turn = angles(x, torch.arange(T), 4)
    index = layer(x, source, turn)
    pairs = zip(x, x if source is None else source, strict=True)
    scores = [scores_of(layer, *pair, turn) for pair in pairs]
    everything = torch.ones(T, T, dtype=torch.bool).tril()
    for count in (None, 1, 4, 100):
        selected = None if count is None else best_keys(index, count)
        seen = [everything if count is None else best_of(one, count) for one in scores]
        if count is not None:
            assert selected.shape == (B, 1, T, min(count, T))
            pairs = masks.select(selected).evaluate(B, 1, T, T)[:, 0]
            assert (torch.from_numpy(pairs.copy()) == torch.stack(seen)).all()
        for scale in (None, 0.9):
            loss = indexer_loss(index, q, k, selected, scale)
            parts = zip(scores, q, k, seen, strict=True)
            want = torch.stack([loss_of(*one, D**-0.5 if scale is None else scale) for one in parts])
            torch.testing.assert_close(loss, want, rtol=1e-10, atol=1e-12)
            weight, parameters = torch.randn_like(loss), list(layer.parameters())
            for a, b in zip(*(torch.autograd.grad((y * weight).sum(), parameters, retain_graph=True)
                              for y in (loss, want)), strict=True):  # fmt: skip
                torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-11)
            # the loss trains nothing but the indexer
            others = [one for one in (x, source, q, k) if one is not None]
            reached = torch.autograd.grad(loss.sum(), others, retain_graph=True, allow_unused=True)
            assert reached == (None,) * len(others)


def test_attention_of_the_best_keys() -> None:
    layer, x, q, k, v = inputs(40)
    selected = best_keys(layer(x), 6)
    # the key heads share the lists
    mask = masks.causal() & masks.select(selected.expand(-1, KV_HEADS, -1, -1))
    o = saccade.attention(q, k, v, mask)
    seen = torch.stack([best_of(scores_of(layer, one, one), 6) for one in x])[:, None]
    by_torch = torch.nn.functional.scaled_dot_product_attention(
        *(one.transpose(1, 2) for one in (q, k, v)), attn_mask=seen, enable_gqa=True
    ).transpose(1, 2)
    torch.testing.assert_close(o, by_torch, rtol=1e-10, atol=1e-12)
    weight = torch.randn_like(o)
    for a, b in zip(*(torch.autograd.grad((y * weight).sum(), (q, k, v)) for y in (o, by_torch)), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-11)


def test_the_last_queries_of_sequences_of_different_lengths() -> None:
    layer, x, *_ = inputs(30)
    whole, lengths = layer(x), torch.tensor([30, 17])
    for T in (1, 9):
        last = torch.stack([torch.arange(n - T, n) for n in lengths.tolist()])
        q, w = (torch.stack([one[at] for one, at in zip(part, last, strict=True)]) for part in (whole.q, whole.w))
        # what is beyond a sequence's end does not matter
        k = torch.where(torch.arange(30)[:, None] < lengths[:, None, None], whole.k, torch.nan)
        some = best_keys(Index(q, k, w), 5, lengths)
        every = best_keys(whole, 5)
        for b, at in enumerate(last):
            assert torch.equal(some[b, 0].sort().values, every[b, 0, at].sort().values)


@pytest.mark.parametrize("count", [None, 9])
def test_the_backward_keeps_no_scores(count) -> None:
    layer, x, q, k, _ = inputs(200)
    index, kept = layer(x), {}
    best = None if count is None else best_keys(index, count)
    with torch.autograd.graph.saved_tensors_hooks(lambda one: kept.setdefault(one.data_ptr(), one), lambda one: one):
        indexer_loss(index, q, k, best).sum()
    # the parts of the index, q, k and the lists, per query
    sizes = layer.heads * (layer.size + 1) + layer.size + HEADS * D + KV_HEADS * D + (count or 0)
    assert B * 200 <= sum(one.numel() for one in kept.values()) <= B * 200 * (sizes + 10)


def test_low_precision() -> None:
    layer, x, q, k, _ = inputs(30)
    want = indexer_loss(layer(x), q, k)
    loss = indexer_loss(layer.bfloat16()(x.bfloat16()), q.bfloat16(), k.bfloat16())
    assert loss.dtype == torch.float32
    torch.testing.assert_close(loss.double(), want, rtol=0, atol=0.05)


def test_refused() -> None:
    layer, x, q, k, _ = inputs(9)
    index = layer(x)
    with pytest.raises(ValueError, match="count is 0; expected at least 1"):
        best_keys(index, 0)
    with pytest.raises(ValueError, match=r"q \[2, 8, 4, 8\], .*expected \[2, 9, Hq, D\]"):
        indexer_loss(index, q[:, 1:], k)
    with pytest.raises(ValueError, match=r"selected \[2, 2, 9, 3\]; expected .* \[2, 1, 9, n\]"):
        indexer_loss(index, q, k, torch.zeros(2, 2, 9, 3, dtype=torch.int64))


def latent_layer(count: int = 5):
    torch.manual_seed(0)
    config = DeepSeekConfig(
        vocab_size=8, hidden_size=WIDTH, num_attention_heads=HEADS, model_type="deepseek_v32", q_lora_rank=12,
        kv_lora_rank=10, qk_nope_head_dim=6, qk_rope_head_dim=4, v_head_dim=5, index_topk=count, index_n_heads=16,
        index_head_dim=6,
    )  # fmt: skip
    return LatentAttention(config).double()


@pytest.mark.parametrize("absorbed", [True, False, None])
@pytest.mark.parametrize("T", [4, 30])
def test_latent_attention(T, absorbed) -> None:
    """The layer and its loss against latent attention with a dense mask of the chosen keys."""
    layer, x = latent_layer(), torch.randn(B, T, WIDTH, dtype=torch.float64, requires_grad=True)
    layer.absorbed, turn = absorbed, angles(x, torch.arange(T), 4)
    o = layer(x, turn, masks.causal())
    q, k, v = layer.project(x, turn)
    source = layer.q_a_layernorm(layer.q_a_proj(x))
    scores = [scores_of(layer.indexer, *pair, turn) for pair in zip(x, source, strict=True)]
    seen = torch.stack([best_of(one, 5) for one in scores])
    s = torch.einsum("bthd,bshd->bhts", q, k).div(10**0.5).masked_fill(~seen[:, None], -torch.inf)
    want = layer.o_proj(torch.einsum("bhts,bshd->bthd", s.softmax(-1), v).flatten(2))
    torch.testing.assert_close(o, want, rtol=1e-10, atol=1e-12)
    weight = torch.randn_like(o)
    inputs = [x, *(one for name, one in layer.named_parameters() if not name.startswith("indexer"))]
    for a, b in zip(*(torch.autograd.grad((y * weight).sum(), inputs) for y in (o, want)), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-11)
    for dense in (True, False):
        loss = layer.index_loss(x, turn, dense)
        pairs = torch.ones_like(seen).tril() if dense else seen
        want = torch.stack([loss_of(*one, 10**-0.5) for one in zip(scores, q, k, pairs, strict=True)])
        torch.testing.assert_close(loss, want, rtol=1e-10, atol=1e-12)
        trained = torch.autograd.grad(loss.sum(), [x, *layer.parameters()], allow_unused=True)
        names = ["x", *(name for name, _ in layer.named_parameters())]
        assert [name for name, one in zip(names, trained, strict=True) if one is not None] == [
            name for name in names if name.startswith("indexer")
        ]


def test_latent_caches_of_different_lengths() -> None:
    layer, x = latent_layer(), torch.randn(B, 30, WIDTH, dtype=torch.float64)
    turn = angles(x, torch.arange(30), 4)
    with torch.no_grad():
        whole = layer(x, turn, masks.causal())
        cache = IndexedLatentKVCache(B, 30, 10, 4, 6, dtype=torch.float64, fill=float("nan"))
        layer(x[:, :20], tuple(one[:20] for one in turn), masks.causal(), cache)
        # the second sequence continues at token 12
        cache.lengths = torch.tensor([20, 12], dtype=torch.int32)
        for step in range(8):
            at = torch.tensor([20, 12]) + step
            one = torch.stack([row[n] for row, n in zip(x, at, strict=True)])[:, None]
            o = layer(one, tuple(part[at][:, None] for part in turn), masks.causal(), cache)[:, 0]
            want = torch.stack([row[n] for row, n in zip(whole, at, strict=True)])
            torch.testing.assert_close(o, want, rtol=1e-10, atol=1e-12)
        cache.evict(2, 9)
        assert cache.index.shape == (B, 30, 1, 6)
        with pytest.raises(ValueError, match="the indexer's keys would not be rotated"):
            cache.evict(2, 4, rotation={})
        with pytest.raises(TypeError, match="expected append_indexed"):
            cache.append(*cache.k[:, :1, 0].split([10, 4], -1))
        with pytest.raises(ValueError, match="LatentKVCache with an indexer; expected one rank, and caches of"):
            layer(x, turn, masks.causal(), LatentKVCache(B, 30, 10, 4, dtype=torch.float64))
        with pytest.raises(ValueError, match=r"mask is full\(\); expected causal\(\)"):
            layer(x, turn, masks.full())


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"model_type": "deepseek_v3"}, "index_topk=5 in a model of type deepseek_v3"),
        ({"index_topk": 0}, "index_topk=0 in a model of type deepseek_v32"),
        ({"q_lora_rank": 0}, "expected a rank"),
        ({"index_head_dim": 2}, "at least qk_rope_head_dim=4"),
    ],
)
def test_refused_configs(changes, words) -> None:
    with pytest.raises(ValueError, match=words):
        replace(latent_layer().config, **changes)
