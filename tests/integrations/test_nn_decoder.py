"""saccade.nn.Attention compared with torch's own function, with caches, contexts and a Llama layer's weights."""

from __future__ import annotations

import pytest
import torch

import saccade
from saccade import mask as masks
from saccade.models.blocks import Attention as LlamaAttention
from saccade.models.llama_config import LlamaConfig
from saccade.nn import Attention


def written_out(layer: Attention, x: torch.Tensor, seen: torch.Tensor) -> torch.Tensor:
    """The same by torch's own function; seen [T, T] of booleans."""
    parts = (layer.q_proj(x), layer.k_proj(x), layer.v_proj(x))
    q, k, v = (y.unflatten(-1, (-1, layer.head_dim)) for y in parts)
    q, k = layer.q_norm(q), layer.k_norm(k)
    if layer.rope is not None:
        q, k = (saccade.rope(y, torch.arange(x.shape[1]), **layer.rope) for y in (q, k))
    q, k, v = (y.transpose(1, 2) for y in (q, k, v))
    o = torch.nn.functional.scaled_dot_product_attention(q, k, v, seen, enable_gqa=True)
    return layer.o_proj(o.transpose(1, 2).flatten(-2))


LAYERS = {
    "plain": {},
    "grouped": {"kv_heads": 2, "head_dim": 6, "bias": True},
    "no rope": {"kv_heads": 1, "rope": None},
    "rope's options": {"rope": {"base": 500.0, "interleaved": True}},
    "an encoder's": {"causal": False},
}


@pytest.mark.parametrize("windowed", [False, True])
@pytest.mark.parametrize("name", LAYERS)
def test_decoder_attention(name, windowed, seed) -> None:
    torch.manual_seed(seed)
    layer = Attention(16, 4, **LAYERS[name]).double()
    layer.q_norm, layer.k_norm = (torch.nn.RMSNorm(layer.head_dim, dtype=torch.float64) for _ in range(2))
    x = torch.randn(2, 9, 16, dtype=torch.float64, requires_grad=True)
    distance = torch.arange(9)[:, None] - torch.arange(9)
    seen = (distance >= 0) | (not layer.causal)
    if windowed:
        seen &= distance <= 3
    o, want = layer(x, masks.window(3, None) if windowed else None), written_out(layer, x, seen)
    torch.testing.assert_close(o, want, rtol=1e-9, atol=1e-11)
    leaves = [x, *layer.parameters()]
    for got, expected in zip(*(torch.autograd.grad(y.square().sum(), leaves) for y in (o, want)), strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize("name", ["plain", "grouped", "no rope"])
@torch.no_grad()
def test_a_cache_continues(name) -> None:
    torch.manual_seed(0)
    layer = Attention(16, 4, **LAYERS[name])
    x, cache = torch.randn(2, 9, 16), layer.make_cache(2, 12)
    seen = masks.window(3, None)
    parts = [layer(part, seen, cache=cache) for part in x.split([4, 1, 3, 1], 1)]
    torch.testing.assert_close(torch.cat(parts, 1), layer(x, seen))
    assert cache.lengths.tolist() == [9, 9]


def test_cross_attention() -> None:
    torch.manual_seed(0)
    layer = Attention(16, 4, kv_heads=2)
    x, context = torch.randn(2, 5, 16), torch.randn(2, 7, 16)
    q, k, v = layer.q_proj(x), layer.k_proj(context), layer.v_proj(context)
    q, k, v = (y.unflatten(-1, (-1, 4)).transpose(1, 2) for y in (q, k, v))
    want = torch.nn.functional.scaled_dot_product_attention(q, k, v, enable_gqa=True)
    torch.testing.assert_close(layer(x, context=context), layer.o_proj(want.transpose(1, 2).flatten(-2)))
    part = layer(x, masks.keys(4), context=context)
    torch.testing.assert_close(part, layer(x, context=context[:, :4]))


def test_a_llama_layers_weights_load() -> None:
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 1}
    theirs = LlamaAttention(LlamaConfig(vocab_size=8, intermediate_size=8, head_dim=4, **sizes))
    layer = Attention(16, 4, kv_heads=2)
    layer.load_state_dict(theirs.state_dict())
    x = torch.randn(2, 6, 16)
    angles = torch.arange(6)[:, None] * 10000.0 ** (-torch.arange(0, 4, 2) / 4)
    turn = angles.cos()[:, None], angles.sin()[:, None]
    torch.testing.assert_close(layer(x), theirs(x, turn, masks.causal()))


def test_decoder_attention_compiles() -> None:
    torch._dynamo.reset()
    layer, x = Attention(16, 4, kv_heads=2), torch.randn(2, 9, 16)
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(x, masks.window(3, 0)), layer(x, masks.window(3, 0)))


@pytest.mark.parametrize(
    ("sizes", "words"),
    [
        ((16, 4, 3), "expected a kv_heads that divides heads"),
        ((16, 3), "expected heads that divide dim, or a head_dim"),
        ((12, 4), "expected an even head_dim, or rope=None"),
    ],
)
def test_sizes_that_do_not_fit(sizes, words) -> None:
    with pytest.raises(ValueError, match=words):
        Attention(*sizes)


def test_refused_by_decoder_attention() -> None:
    layer, x = Attention(16, 4), torch.randn(2, 3, 16)
    with pytest.raises(TypeError, match="rope has theta; expected options of rope: base"):
        Attention(16, 4, rope={"theta": 1e4})
    with pytest.raises(TypeError, match=r"mask is an array .*from_dense"):
        layer(x, torch.ones(3, 3, dtype=torch.bool).tril())
    with pytest.raises(ValueError, match=r"x has shape \[3, 16\]; expected \[B, T, dim\]"):
        layer(x[0])
    with pytest.raises(ValueError, match="x has 2 sequences and the cache 3"):
        layer(x, cache=layer.make_cache(3, 8))
    with pytest.raises(TypeError, match="cache is list; expected a saccade"):
        layer(x, cache=[])
    with pytest.raises(ValueError, match="context is given with a cache or positions"):
        layer(x, context=x, cache=layer.make_cache(2, 4))
    with pytest.raises(saccade.Unsupported, match="k requires grad"):
        layer(x, cache=layer.make_cache(2, 4))
