"""Caches keep the accepted path of a tree of tokens: the same contents as if nothing else had been appended."""

from __future__ import annotations

import numpy as np
import pytest

from saccade import KVCache, LatentKVCache, PagedKVCache, PagedLatentKVCache, Unsupported

PATHS = ([0, 2, 5], [], [0, 1], [4])
LENGTHS, NODES = [3, 9, 0, 12], 6
CODES = ({}, {"quantised": "int8"}, {"quantised": "int4", "group": 8}, {"quantised": "fp8"})


def drawn(rng: np.random.Generator, dtype: str, *shape: int):
    x = rng.standard_normal(shape, dtype=np.float32)
    if dtype == "float32":
        return x
    torch = pytest.importorskip("torch")
    return torch.from_numpy(x).to(torch.bfloat16)


def same(a, b) -> None:
    a, b = (np.asarray(x.view(x.dtype) if isinstance(x, np.ndarray) else x.float()) for x in (a, b))
    np.testing.assert_array_equal(a.view(f"V{a.itemsize}"), b.view(f"V{b.itemsize}"))


def tokens_of(cache: KVCache, b: int) -> list:
    return [x[b, : int(cache.lengths[b])] for x in cache.arrays]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    "latent, codes", [*((False, codes) for codes in CODES), *((True, codes) for codes in CODES if "group" not in codes)]
)
def test_a_contiguous_cache_keeps_a_path(rng, dtype, latent, codes) -> None:
    options = {**codes, "dtype": dtype}
    if dtype != "float32":
        options["dtype"] = pytest.importorskip("torch").bfloat16
    if latent:
        cache, alone = (LatentKVCache(4, 24, 16, 8, **options) for _ in range(2))
        x, y = (drawn(rng, dtype, 4, 20, size) for size in (16, 8))
    else:
        cache, alone = (KVCache(4, 24, 2, 16, v_dim=8, **options) for _ in range(2))
        x, y = (drawn(rng, dtype, 4, 20, 2, size) for size in (16, 8))
    cache.append(x, y, np.array(LENGTHS))
    at = np.arange(4)[:, None], np.array(LENGTHS)[:, None] + np.arange(NODES)
    nodes = x[at], y[at]
    cache.append(*nodes)
    cache.accept(NODES, PATHS)
    alone.append(x, y, np.array(LENGTHS))
    padded = np.array([[*path, 0, 0, 0][:3] for path in PATHS])
    alone.append(*(part[np.arange(4)[:, None], padded] for part in nodes), np.array([len(path) for path in PATHS]))
    assert cache.lengths.tolist() == alone.lengths.tolist() == [6, 9, 2, 13]
    for b in range(4):
        for one, other in zip(tokens_of(cache, b), tokens_of(alone, b), strict=True):
            same(one, other)
    # the bound of the lengths has shrunk too
    cache.append(x[:, :11], y[:, :11])


@pytest.mark.parametrize("codes", CODES, ids=str)
@pytest.mark.parametrize("page_size", [1, 4, 16])
@pytest.mark.parametrize("forked", [False, True])
def test_pages_keep_a_path(rng, codes, page_size, forked) -> None:
    cache = PagedKVCache(80, page_size, 2, 16, **codes)
    x, y = (drawn(rng, "float32", 40, 2, 16) for _ in range(2))
    for length, path in zip(LENGTHS, PATHS, strict=True):
        one, alone = cache.add(), cache.add()
        cache.append([one], x[: length + NODES], y[: length + NODES])
        twin = cache.fork(one) if forked else None
        whole = [a.copy() for a in read(cache, one)]
        cache.accept(one, NODES, path)
        at = [*range(length), *(length + node for node in path)]
        cache.append([alone], x[at], y[at])
        for a, b in zip(read(cache, one), read(cache, alone), strict=True):
            same(a, b)
        if twin is not None:
            for a, b in zip(read(cache, twin), whole, strict=True):
                same(a, b)
            cache.remove(twin)
        cache.append([one, alone], np.concatenate([x[:3]] * 2), np.concatenate([y[:3]] * 2))
        cache.remove(one)
        cache.remove(alone)
    assert cache.free_pages == 80


def read(cache: PagedKVCache, sequence: int) -> list[np.ndarray]:
    """The tokens of a sequence in every array."""
    (table,), (length,) = cache.view([sequence]).block_table, cache.view([sequence]).lengths
    at = np.arange(length)
    return [a[table[at // cache.page_size], at % cache.page_size] for a in cache.arrays]


def test_latent_pages_keep_a_path(rng) -> None:
    cache = PagedLatentKVCache(9, 4, 16, 8)
    latent, turned = (drawn(rng, "float32", 10, size) for size in (16, 8))
    cache.append([one := cache.add()], latent, turned)
    cache.accept(one, 5, [0, 3, 4])
    at = [0, 1, 2, 3, 4, 5, 8, 9]
    np.testing.assert_array_equal(read(cache, one)[0][:, 0], np.concatenate([latent[at], turned[at]], 1))


def test_positions_after_eviction() -> None:
    cache = PagedKVCache(9, 4, 1, 8)
    x = np.arange(160, dtype=np.float32).reshape(20, 1, 8)
    cache.append([one := cache.add()], x[:12], x[:12])
    cache.evict(one, 2, 4)
    cache.append([one], x[12:17], x[12:17])
    cache.accept(one, 5, [0, 2, 4])
    assert (cache.length(one), cache.position(one)) == (9, 15)
    np.testing.assert_array_equal(read(cache, one)[0], x[[0, 1, 8, 9, 10, 11, 12, 14, 16]])


def test_without_room_nothing_changes(rng) -> None:
    cache = PagedKVCache(3, 4, 1, 8)
    x = drawn(rng, "float32", 11, 1, 8)
    cache.append([one := cache.add()], x, x)
    twin = cache.fork(one)
    before = read(cache, one)[0]
    with pytest.raises(ValueError, match="pages"):
        cache.accept(one, 5, [0, 3, 4])
    np.testing.assert_array_equal(read(cache, one)[0], before)
    cache.remove(twin)
    cache.accept(one, 5, [0, 3, 4])
    assert cache.length(one) == 9


@pytest.mark.parametrize(
    "tokens, paths, message",
    [
        (3, [[0]], "2, one per sequence"),
        (3, [[0, 3], []], r"\[0, 3\]; expected ascending numbers from 0 to 2"),
        (3, [[1, 0], []], "ascending"),
        (3, [[0, 0], []], "ascending"),
        (3, [[-1], []], "ascending"),
        (3, [[0.0], []], "float64"),
        (6, [[0], [0]], "at most 5"),
        (-1, [[], []], "at least 0"),
    ],
)
def test_wrong_paths(tokens, paths, message) -> None:
    cache = KVCache(2, 8, 1, 4)
    x = np.zeros((2, 5, 1, 4), np.float32)
    cache.append(x, x)
    with pytest.raises(ValueError, match=message):
        cache.accept(tokens, paths)
    assert cache.lengths.tolist() == [5, 5]
    pages = PagedKVCache(2, 4, 1, 4)
    pages.append([one := pages.add()], x[0], x[0])
    if len(paths) == 2:
        with pytest.raises(ValueError, match=message):
            pages.accept(one, tokens, paths[0])


def test_gates_keep_only_first_tokens() -> None:
    # the sums of gates run over all tokens of a tree
    cache = KVCache(1, 9, 1, 4, gate_heads=1)
    x = np.zeros((1, 3, 1, 4), np.float32)
    cache.append(x, x, log_f=-np.ones((1, 3, 1)))
    with pytest.raises(ValueError, match="gates"):
        cache.accept(3, [[0, 2]])
    cache.accept(3, [[0, 1]])
    assert cache.lengths.tolist() == [2]


def test_a_cache_on_a_webgpu_device_refuses() -> None:
    cache = KVCache(1, 9, 1, 4)
    cache._arrays.indexed = False
    with pytest.raises(Unsupported, match="accept"):
        cache.accept(0, [[]])
