"""Caches of latent attention: one row per token is key and value."""

from __future__ import annotations

import copy
import pickle

import numpy as np
import pytest

import saccade
from saccade import LatentKVCache, PagedLatentKVCache, rope

torch = pytest.importorskip("torch")

B, T, H = 2, 37, 6
LATENT, ROPE, HEAD = 64, 16, 24
SCALE = (HEAD + ROPE) ** -0.5
ROTATION = {"interleaved": True, "base": 500.0}
NUMPY, TORCH = "numpy", "torch"


def random(*shape: int) -> np.ndarray:
    return np.random.default_rng(list(shape)).standard_normal(shape, dtype=np.float32)


def of(framework: str, x):
    return torch.from_numpy(np.array(x)) if framework == TORCH else x


def parts(framework: str = NUMPY):
    """latent [B, T, LATENT], k_rope [B, T, ROPE] and absorbed queries [B, 3, H, LATENT + ROPE]."""
    return [of(framework, x) for x in (random(B, T, LATENT), random(B, T, ROPE), random(B, 3, H, LATENT + ROPE))]


def filled(framework: str, paged: bool, quantised: str | None = None, pieces: tuple[int, ...] = (20, 16, 1)):
    """(cache, keys for decode), filled in pieces."""
    latent, k_rope, _ = parts(framework)
    kind = {"dtype": torch.float32 if framework == TORCH else "float32", "quantised": quantised}
    if not paged:
        cache = LatentKVCache(B, 50, LATENT, ROPE, **kind)
    else:
        cache = PagedLatentKVCache(20, 8, LATENT, ROPE, **kind)
        sequences = [cache.add() for _ in range(B)]
    start = 0
    for n in pieces:
        new = latent[:, start : start + n], k_rope[:, start : start + n]
        if paged:
            cache.append(sequences, *(x.reshape(B * n, -1) for x in new), rotation=ROTATION)
        else:
            cache.append(*new, rotation=ROTATION)
        start += n
    return cache, cache.view(sequences) if paged else cache


def expected(latent, k_rope, q, scale: float = SCALE):
    """The same attention with a copy of the values, in a plain cache."""
    k = np.concatenate([latent[:, :, None], rope(k_rope[:, :, None], np.arange(latent.shape[1]), **ROTATION)], -1)
    cache = saccade.KVCache(B, 50, 1, LATENT + ROPE, v_dim=LATENT)
    cache.append(k, np.ascontiguousarray(k[..., :LATENT]))
    return saccade.decode(q, cache, scale=scale, return_lse=True)


@pytest.mark.parametrize("paged", [False, True])
@pytest.mark.parametrize("framework", [NUMPY, TORCH])
def test_decode_is_that_of_copies(framework: str, paged: bool) -> None:
    results = saccade.decode(parts(framework)[2], filled(framework, paged)[1], scale=SCALE, return_lse=True)
    for result, want in zip(results, expected(*parts()), strict=True):
        np.testing.assert_allclose(np.asarray(result), want, rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize("paged", [False, True])
@pytest.mark.parametrize("framework", [NUMPY, TORCH])
@pytest.mark.parametrize(("quantised", "error"), [("int8", 0.03), ("fp8", 0.15)])
def test_codes(framework: str, paged: bool, quantised: str, error: float) -> None:
    cache, keys = filled(framework, paged, quantised)
    assert cache.quantised is not None
    assert cache.quantised.group == 16
    o = saccade.decode(parts(framework)[2], keys, scale=SCALE)
    want = expected(*parts())[0]
    assert 0 < abs(np.asarray(o) - want).max() < error * abs(want).max()


@pytest.mark.parametrize("paged", [False, True])
@pytest.mark.parametrize("quantised", [None, "int8"])
def test_a_token_is_stored_once(paged: bool, quantised: str | None) -> None:
    cache, _ = filled(NUMPY, paged, quantised)
    assert np.shares_memory(cache.k, cache.v)
    assert cache.v.shape[-1] == LATENT
    assert [x.shape[-1] for x in cache.arrays] == ([80] if quantised is None else [80, 5])


def test_absorbed_attention_is_latent_attention() -> None:
    """Queries times the up-projection of keys, and the result times that of values, are attention of every head."""
    latent, k_rope, _ = parts()
    up_k, up_v = random(H, HEAD, LATENT), random(H, 20, LATENT)
    q, q_rope = random(B, 1, H, HEAD), random(B, 1, H, ROPE)
    q_rope = rope(q_rope, np.array([T - 1]), **ROTATION)
    shared = rope(k_rope[:, :, None], np.arange(T), **ROTATION).repeat(H, 2)
    k = np.concatenate([np.einsum("btl,hdl->bthd", latent, up_k), shared], -1)
    v = np.einsum("btl,hdl->bthd", latent, up_v)
    want = saccade.attention(np.concatenate([q, q_rope], -1), k, v, scale=SCALE)
    absorbed = np.concatenate([np.einsum("bthd,hdl->bthl", q, up_k), q_rope], -1)
    o = saccade.decode(absorbed, filled(NUMPY, False)[1], scale=SCALE)
    np.testing.assert_allclose(np.einsum("bthl,hdl->bthd", o, up_v), want, rtol=1e-4, atol=1e-4)


def test_sizes_of_deepseek() -> None:
    latent, k_rope, q = random(1, 300, 512), random(1, 300, 64), random(1, 1, 16, 576)
    cache = LatentKVCache(1, 300)
    cache.append(latent, k_rope)
    s = np.einsum("hd,td->ht", q[0, 0].astype(np.float64), np.concatenate([latent, k_rope], -1)[0]) * 192**-0.5
    weights = np.exp(s - s.max(-1, keepdims=True))
    want = weights / weights.sum(-1, keepdims=True) @ latent[0].astype(np.float64)
    np.testing.assert_allclose(saccade.decode(q, cache, scale=192**-0.5)[0, 0], want, rtol=1e-5, atol=1e-5)


def test_gradients_of_a_value_that_is_part_of_its_key_add_up() -> None:
    k, q = torch.from_numpy(random(1, 30, 1, 24)).requires_grad_(), torch.from_numpy(random(1, 30, 4, 24))
    o = saccade.attention(q, k, k[..., :16], saccade.mask.causal())
    (dk,) = torch.autograd.grad(o.square().sum(), k)
    apart = [x.detach().clone().requires_grad_() for x in (k, k[..., :16])]
    first, second = torch.autograd.grad(saccade.attention(q, *apart, saccade.mask.causal()).square().sum(), apart)
    first[..., :16] += second
    torch.testing.assert_close(dk, first)


def test_forks_share_pages_until_one_writes() -> None:
    cache, _ = filled(NUMPY, True)
    first, second = cache.sequences
    fork = cache.fork(first, 21)
    latent, k_rope, q = parts()
    cache.append([fork], latent[1, 21:], k_rope[1, 21:], rotation=ROTATION)
    mixed = [np.concatenate([x[:1, :21], x[1:, 21:]], 1).repeat(2, 0) for x in (latent, k_rope)]
    o = saccade.decode(np.concatenate([q[:1], q[:1]]), cache.view([fork, first]), scale=SCALE)
    np.testing.assert_allclose(o[0], expected(*mixed, q[:1].repeat(2, 0))[0][0], rtol=2e-6, atol=2e-6)
    np.testing.assert_allclose(o[1], expected(latent, k_rope, q[:1].repeat(2, 0))[0][0], rtol=2e-6, atol=2e-6)
    assert cache.length(second) == T


@pytest.mark.parametrize("paged", [False, True])
def test_eviction_rotates_the_shared_part_back(paged: bool) -> None:
    cache, _ = filled(NUMPY, paged)
    latent, k_rope, q = parts()
    if paged:
        for sequence in cache.sequences:
            cache.evict(sequence, 3, 10, rotation=ROTATION)
    else:
        cache.evict(3, 10, rotation=ROTATION)
    rest = [np.concatenate([x[:, :3], x[:, -10:]], 1) for x in (latent, k_rope)]
    keys = cache.view(cache.sequences) if paged else cache
    o = saccade.decode(q, keys, scale=SCALE)
    np.testing.assert_allclose(o, expected(*rest, q)[0], rtol=1e-5, atol=1e-5)


def test_lengths_and_reset() -> None:
    cache = LatentKVCache(B, 50, LATENT, ROPE)
    latent, k_rope, q = parts()
    cache.append(latent, k_rope, [T, 5])
    assert cache.lengths.tolist() == [T, 5]
    assert np.isfinite(saccade.decode(q, cache, scale=SCALE)).all()
    cache.reset()
    assert len(cache) == 0


@pytest.mark.parametrize("paged", [False, True])
def test_the_scale_must_be_given(paged: bool) -> None:
    keys = filled(NUMPY, paged)[1]
    with pytest.raises(ValueError, match=r"a latent row of 80 numbers is not a head of the model: give scale="):
        saccade.decode(parts()[2], keys)
    if paged:
        with pytest.raises(ValueError, match="scale is None"):
            saccade.paged_attention(parts()[2][:, 0], keys, [0, 1, 2])


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"quantised": "int4"}, "whose bytes hold numbers of keys and of values; expected int8 or fp8"),
        ({"quantised": "int8", "group": 24}, "group is 24; expected a divisor of latent_dim 64 and of rope_dim 16"),
        ({"rope_dim": 0}, "rope_dim is 0; expected at least 1"),
        ({"latent_dim": 0}, "latent_dim is 0; expected at least 1"),
        ({"group": 16}, "group is 16 and quantised None"),
    ],
)
@pytest.mark.parametrize("kind", [LatentKVCache, PagedLatentKVCache])
def test_wrong_arguments(kind, arguments, words) -> None:
    with pytest.raises(ValueError, match=words):
        kind(B, 50, **{"latent_dim": LATENT, "rope_dim": ROPE} | arguments)


def test_wrong_tokens() -> None:
    cache = LatentKVCache(B, 50, LATENT, ROPE)
    latent, k_rope, _ = parts()
    for new, words in (
        ((latent[..., :60], k_rope), r"latent has shape \[2, 37, 60\]; expected \[2, T, 64\]"),
        ((latent, k_rope[:1]), r"k_rope has shape \[1, 37, 16\]; expected \[2, T, 16\]"),
        ((latent, k_rope[:, :5]), "latent has 37 tokens and k_rope 5"),
    ):
        with pytest.raises(ValueError, match=words):
            cache.append(*new)
    with pytest.raises(TypeError, match="latent is ndarray of float64"):
        cache.append(latent.astype(np.float64), k_rope)
    with pytest.raises(TypeError, match="expected LatentKVCache"):
        LatentKVCache.like(latent)
    assert len(cache) == 0


@pytest.mark.parametrize("name", ["gate_heads", "v_dim", "head_dim"])
def test_other_options_are_refused(name: str) -> None:
    with pytest.raises(TypeError, match=f"{name} is not an argument of a latent cache"):
        LatentKVCache(B, 50, LATENT, ROPE, **{name: 4})


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))], ids=["copy", "pickle"])
@pytest.mark.parametrize("framework", [NUMPY, TORCH])
@pytest.mark.parametrize("paged", [False, True])
def test_the_values_of_a_copy_are_its_own_rows(paged: bool, framework: str, duplicate) -> None:
    """Tokens that are appended to a copy are among its values, and not in the original."""
    cache, _ = filled(framework, paged, pieces=(20,))
    before = cache.k + 0
    other = duplicate(cache)
    new = [x[:, 20:23] for x in parts(framework)[:2]]
    other.append([1, 2], *(x.reshape(B * 3, -1) for x in new)) if paged else other.append(*new)
    assert (other.v == other.k[..., :LATENT]).all()
    assert (other.k != before).any()
    assert (cache.k == before).all()
