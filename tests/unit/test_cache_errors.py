"""An append that raises has changed nothing, and a cache stores only plain numbers of its own kind."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import saccade
from saccade.caches.paged import PagedKVCache

SHAPE = 5, 2, 8


def paged(**options: Any) -> PagedKVCache:
    return saccade.PagedKVCache(8, 4, *SHAPE[1:], **options)


def frozen(cache: PagedKVCache) -> None:
    cache.k.setflags(write=False)


def late(cache: PagedKVCache) -> None:
    # k is written, and then v raises
    cache.v.setflags(write=False)


@pytest.mark.parametrize("freeze", [frozen, late])
@pytest.mark.parametrize("shared", [False, True])
def test_a_write_that_raises_takes_no_tokens(
    freeze: Callable[[PagedKVCache], None], shared: bool, rng: np.random.Generator
) -> None:
    cache, (k, v) = paged(), rng.standard_normal((2, *SHAPE), np.float32)
    one, other = cache.add(), cache.add()
    cache.append([one], k, v)
    forks = [cache.fork(one, 3)] if shared else []
    q = rng.standard_normal((1, 1, 2, 8), np.float32)
    before = saccade.decode(q, cache.view([one]))
    free = cache.free_pages
    freeze(cache)
    with pytest.raises(ValueError, match="read-only"):
        cache.append([other, one, *forks], *(np.tile(x[:2], (2 + shared, 1, 1)) for x in (k, v)))
    assert [cache.length(s) for s in (one, other, *forks)] == [5, 0, 3][: 2 + shared]
    np.testing.assert_array_equal(saccade.decode(q, cache.view([one])), before)
    # nothing is lost: the pages are free again, and the sequences can grow
    for array in (cache.k, cache.v):
        array.setflags(write=True)
    cache.append([other, one, *forks], *(np.tile(x[:2], (2 + shared, 1, 1)) for x in (k, v)))
    for sequence in cache.sequences:
        cache.remove(sequence)
    assert cache.free_pages == 8 >= free


def test_an_eviction_that_raises_keeps_the_sequence(rng: np.random.Generator) -> None:
    cache, (k, v) = paged(), rng.standard_normal((2, *SHAPE), np.float32)
    one = cache.add()
    cache.append([one], k, v)
    before = saccade.decode(k[None, :1], cache.view([one]))
    frozen(cache)
    with pytest.raises(ValueError, match="read-only"):
        cache.evict(one, 1, 2)
    assert (cache.length(one), cache.sequences, cache.free_pages) == (5, (one,), 6)
    np.testing.assert_array_equal(saccade.decode(k[None, :1], cache.view([one])), before)


@pytest.mark.parametrize("kind", ["contiguous", "paged"])
@pytest.mark.parametrize("quantised", [None, "int8"])
def test_arrays_of_other_kinds_are_refused(kind: str, quantised: str | None) -> None:
    ones = np.ones(SHAPE, np.float32)
    others: list[Any] = [np.ma.masked_array(ones, ones > 0)]
    try:
        import jax.numpy

        others.append(jax.numpy.asarray(ones))
    except ModuleNotFoundError:
        pass
    for x in others:
        if kind == "paged":
            cache = paged(quantised=quantised)
            sequence = cache.add()
            with pytest.raises(TypeError, match=rf"k is {type(x).__name__} of float32; expected ndarray"):
                cache.append([sequence], x, ones)
            assert cache.length(sequence) == 0
        else:
            one = saccade.KVCache(1, 8, 2, 8, quantised=quantised)
            with pytest.raises(TypeError, match=rf"k is {type(x).__name__} of float32; expected ndarray"):
                one.append(x[None], ones[None])
            assert not one.lengths.any()


@pytest.mark.parametrize("dtype", [ml_dtypes.bfloat16, np.float16, np.float64])
def test_gates_of_every_dtype(dtype: Any, rng: np.random.Generator) -> None:
    k, v = rng.standard_normal((2, 1, *SHAPE), np.float32)
    # bfloat16 has these numbers exactly
    log_f = -rng.integers(0, 9, (1, 5, 2)).astype(np.float32) / 4
    results: list[Any] = []
    for of in (log_f, log_f.astype(dtype)):
        cache = saccade.KVCache(1, 8, 2, 8, gate_heads=2)
        cache.append(k, v, log_f=of)
        results.append(saccade.decode(k[:, -1:], cache))
    np.testing.assert_array_equal(*results)


@pytest.mark.parametrize("name", ["float128", "int32"])
def test_gates_of_other_dtypes_are_refused(name: str) -> None:
    if not hasattr(np, name):
        pytest.skip(f"NumPy has no {name} here")
    cache, ones = paged(gate_heads=2), np.ones(SHAPE, np.float32)
    sequence = cache.add()
    with pytest.raises(TypeError, match=rf"log_f is ndarray of {name}; expected ndarray of float32, bfloat16, float16"):
        cache.append([sequence], ones, ones, log_f=np.zeros((5, 2), name))
    assert cache.length(sequence) == 0


@pytest.mark.parametrize("way", ["dual", "jvp", "vmap", "fake"])
@pytest.mark.parametrize("quantised", [None, "int8"])
@pytest.mark.parametrize("kind", ["contiguous", "ragged", "paged"])
def test_tensors_that_are_more_than_their_memory_are_refused(kind: str, quantised: str | None, way: str) -> None:
    torch, fake = pytest.importorskip("torch"), pytest.importorskip("torch._subclasses.fake_tensor")
    options: Any = {"dtype": torch.float32, "quantised": quantised}
    v = torch.ones(1, *SHAPE)
    cache: Any = paged(**options) if kind == "paged" else saccade.KVCache(1, 8, 2, 8, **options)
    sequence = cache.add() if kind == "paged" else None

    def append(k: Any) -> Any:
        if kind == "paged":
            cache.append([sequence], k[0], v[0])
        else:
            cache.append(k, v, [3] if kind == "ragged" else None)
        return k

    def more_than_memory() -> None:
        if way == "dual":
            with torch.autograd.forward_ad.dual_level():
                append(torch.autograd.forward_ad.make_dual(v, v))
        elif way == "jvp":
            torch.func.jvp(append, (v,), (v,))
        elif way == "vmap":
            torch.func.vmap(append)(v[None])
        else:
            with fake.FakeTensorMode(allow_non_fake_inputs=True) as mode:
                append(mode.from_tensor(v))

    words = {"dual": "a tensor with a tangent", "jvp": "a tensor of torch.func", "vmap": "a tensor of torch.func"}
    with pytest.raises(saccade.Unsupported, match=f"k is {words.get(way, 'a FakeTensor')}, and a cache stores plain"):
        more_than_memory()
    assert (cache.length(sequence) if kind == "paged" else int(cache.lengths.max())) == 0


@pytest.mark.parametrize("kind", ["numpy", "torch"])
def test_lengths_that_were_assigned_are_read(kind: str) -> None:
    torch = pytest.importorskip("torch")
    put, dtype = (np.array, "float32") if kind == "numpy" else (torch.tensor, torch.float32)
    cache = saccade.KVCache(2, 6, 1, 2, dtype=dtype)
    for bad in ([4, 3], np.array([4, 3]) if kind == "torch" else torch.tensor([4, 3])):
        with pytest.raises(TypeError, match=r"lengths is a .*; expected a (ndarray|Tensor), as the cache has"):
            cache.lengths = bad
    tokens = put(np.ones((2, 2, 1, 2), np.float32))
    cache.lengths = put(np.array([5, 3], np.int32))
    with pytest.raises(ValueError, match="sequence 0 holds 5 tokens and would take 2 more; expected at most 6"):
        cache.append(tokens, tokens)
    cache.lengths = put(np.array([-1, 3], np.int32))
    with pytest.raises(ValueError, match=r"the cache has lengths \[-1, 3\]; expected 0 <= length"):
        cache.append(tokens, tokens)
    cache.lengths = put(np.array([4, 3], np.int32))
    cache.append(tokens, tokens)
    assert np.asarray(cache.lengths).tolist() == [6, 5]
    with pytest.raises(ValueError, match="expected at most 6, the capacity"):
        cache.append(tokens, tokens)


@pytest.mark.parametrize("kind", ["numpy", "torch"])
def test_lengths_that_were_changed_in_place_are_read(kind: str) -> None:
    torch = pytest.importorskip("torch")
    put, dtype = (np.array, "float32") if kind == "numpy" else (torch.tensor, torch.float32)
    cache, tokens = saccade.KVCache(2, 6, 1, 2, dtype=dtype), put(np.ones((2, 2, 1, 2), np.float32))
    for length, words in (
        (5, "sequence 0 holds 5 tokens and would take 2 more"),
        (-1, r"the cache has lengths \[-1, 0\]"),
    ):
        cache.lengths[0] = length
        with pytest.raises(ValueError, match=words):
            cache.append(tokens, tokens)
    cache.lengths[0] = 4
    cache.append(tokens, tokens)
    assert np.asarray(cache.lengths).tolist() == [6, 2]


@pytest.mark.parametrize("kind", ["numpy", "torch"])
@pytest.mark.parametrize("dtype", ["uint8", "int16", "int64"])
def test_lengths_of_another_dtype_are_converted(kind: str, dtype: str) -> None:
    """Sums of uint8 would wrap around."""
    torch = pytest.importorskip("torch")
    put = np.array if kind == "numpy" else torch.tensor
    cache = saccade.KVCache(1, 300, 1, 2, dtype="float32" if kind == "numpy" else torch.float32)
    tokens = put(np.ones((1, 20, 1, 2), np.float32))
    start = 250 if dtype != "int16" else 280
    cache.lengths = put(np.array([start], dtype))
    assert (int(cache.lengths[0]), str(cache.lengths.dtype).rpartition(".")[2]) == (start, "int32")
    cache.append(tokens, tokens)
    assert int(cache.lengths[0]) == start + 20
    if dtype == "int64":
        cache.lengths = put(np.array([2**32 + 3]))
        with pytest.raises(ValueError, match="expected at most 300, the capacity"):
            cache.append(tokens, tokens)


@pytest.mark.parametrize("device", [None, "cpu", "cuda"])
@pytest.mark.parametrize("dtype", [None, "words", 3, "int64"])
def test_dtypes_that_no_cache_has(dtype, device) -> None:
    name = dtype if dtype == "int64" else repr(dtype)
    with pytest.raises(TypeError, match=f"dtype is {name}; expected one of float"):
        saccade.KVCache(1, 4, 1, 2, dtype=dtype, device=device)


@pytest.mark.parametrize("make", [saccade.KVCache, saccade.PagedKVCache, saccade.LatentKVCache])
def test_devices_that_do_not_exist(make) -> None:
    pytest.importorskip("torch")
    sizes = (2, 4) if make is saccade.LatentKVCache else (2, 4, 1, 2)
    with pytest.raises(ValueError, match="device is 'gpu0'; expected None, one of torch, such as 'cpu'"):
        make(*sizes, device="gpu0")


@pytest.mark.parametrize("group", [2.5, True, "2"])
def test_groups_of_codes_are_integers(group) -> None:
    with pytest.raises(TypeError, match=f"group is {group!r}; expected an integer"):
        saccade.KVCache(1, 4, 1, 2, quantised="int8", group=group)


def test_one_sequence_of_pages_is_in_a_list() -> None:
    pool, latent = saccade.PagedKVCache(2, 4, 1, 2), saccade.PagedLatentKVCache(2, 4)
    tokens, one = np.ones((3, 1, 2), np.float32), pool.add()
    for use in (
        lambda: pool.append(one, tokens, tokens),
        lambda: pool.view(one),
        lambda: latent.append(one, tokens, tokens),
    ):
        with pytest.raises(TypeError, match=r"sequences is 1; expected several numbers, such as \[1\]"):
            use()


def test_lengths_on_a_device_are_bounded_without_waiting() -> None:
    torch = pytest.importorskip("torch")
    cache = saccade.KVCache(3, 8, 1, 2, dtype=torch.float32, device="meta")
    tokens = torch.ones(3, 4, 1, 2, device="meta")
    # a look at a number there would raise
    new, most = cache.counts(torch.tensor([9, -1, 2], device="meta"), 4)
    assert (new.shape, new.dtype, most) == ((3,), torch.int32, 4)
    cache.append(tokens, tokens, torch.zeros(3, dtype=torch.int64, device="meta"))
    with pytest.raises(ValueError, match="expected integers"):
        cache.append(tokens, tokens, torch.zeros(3, device="meta"))
