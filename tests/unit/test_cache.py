"""The contiguous cache: appends, ragged and whole, and its refusals."""

from __future__ import annotations

import copy
import pickle

import numpy as np
import pytest

import saccade
from saccade import KVCache, PagedKeys, PagedKVCache, Unsupported
from saccade.caches.prefixes import PrefixCache


def made(kind: str, *sizes: int, **options):
    if kind == "torch":
        torch = pytest.importorskip("torch")
        return KVCache(*sizes, dtype=torch.float32, **options), lambda x: torch.tensor(x)
    return KVCache(*sizes, dtype=np.float32, **options), lambda x: x


@pytest.mark.parametrize("kind", ["numpy", "torch"])
def test_appends_follow_one_another(kind: str, rng: np.random.Generator) -> None:
    cache, put = made(kind, 2, 9, 3, 4, v_dim=5, fill=np.nan)
    k, v = rng.standard_normal((2, 8, 3, 4), np.float32), rng.standard_normal((2, 8, 3, 5), np.float32)
    for a, b in ((0, 5), (5, 5), (5, 6), (6, 8)):
        cache.append(put(k[:, a:b]), put(v[:, a:b]))
    assert np.asarray(cache.lengths).tolist() == [8, 8]
    assert str(cache.lengths.dtype).endswith("int32")
    np.testing.assert_array_equal(cache.k[:, :8], k)
    np.testing.assert_array_equal(cache.v[:, :8], v)
    assert np.isnan(np.asarray(cache.k[:, 8:])).all()
    assert np.isnan(np.asarray(cache.v[:, 8:])).all()
    assert cache.capacity == 9


@pytest.mark.parametrize("kind", ["numpy", "torch"])
def test_ragged_appends(kind: str, rng: np.random.Generator) -> None:
    cache, put = made(kind, 3, 6, 2, 4, fill=np.nan)
    want: list[list[np.ndarray]] = [[], [], []]
    for taken in ([3, 0, 1], [0, 2, 2], [3, 1, 0]):
        k = rng.standard_normal((3, 3, 2, 4), np.float32)
        cache.append(put(k), put(k + 1), put(np.array(taken)))
        for b, n in enumerate(taken):
            want[b] += list(k[b, :n])
    assert np.asarray(cache.lengths).tolist() == [6, 3, 3]
    for b, tokens in enumerate(want):
        np.testing.assert_array_equal(cache.k[b, : len(tokens)], np.array(tokens))
        np.testing.assert_array_equal(cache.v[b, : len(tokens)], np.array(tokens) + 1)
        assert np.isnan(np.asarray(cache.k[b, len(tokens) :])).all()
    with pytest.raises(ValueError, match="sequence 0 holds 6 tokens and would take 1 more; expected at most 6"):
        cache.append(put(k[:, :1]), put(k[:, :1]))
    cache.append(put(k), put(k), [0, 3, 3])
    assert np.asarray(cache.lengths).tolist() == [6, 6, 6]


@pytest.mark.parametrize("kind", ["numpy", "torch"])
def test_overflow_writes_nothing(kind: str) -> None:
    cache, put = made(kind, 1, 4, 1, 2)
    ones = np.ones((1, 3, 1, 2), np.float32)
    cache.append(put(ones), put(ones))
    with pytest.raises(ValueError, match="capacity"):
        cache.append(put(ones * 2), put(ones * 2))
    assert np.asarray(cache.k)[0, :, 0, 0].tolist() == [1, 1, 1, 0]
    assert int(cache.lengths[0]) == 3
    cache.append(put(ones[:, :1]), put(ones[:, :1]))
    cache.reset()
    cache.append(put(ones), put(ones))
    assert int(cache.lengths[0]) == 3


@pytest.mark.parametrize("kind", ["numpy", "torch", "paged"])
@pytest.mark.parametrize("in_cache", [False, True])
def test_sinks_and_window(kind: str, in_cache: bool, rng: np.random.Generator) -> None:
    # 23 steps in a cache of 9: the first 2 tokens and the last 4 stay at every eviction
    T, sinks, window, turn = 23, 2, 4, {"base": 100.0, "interleaved": True}
    q, k, v = (rng.standard_normal((2, T, 1, 8), np.float32) for _ in range(3))
    options = {"rotation": turn}
    if kind == "paged":
        pages, put = PagedKVCache(12, 2, 1, 8, fill=np.nan), np.asarray
        rows = [pages.add(), pages.add()]
    else:
        cache, put = made(kind, 2, 9, 1, 8, fill=np.nan)
    held: list[int] = []
    for t in range(T):
        if len(held) == 9:
            moved = {**(options if in_cache else {})}
            if kind == "paged":
                for row in rows:
                    pages.evict(row, sinks, window, **moved)
            else:
                cache.evict(sinks, window, **moved)
            held = held[:sinks] + held[-window:]
        held.append(t)
        new = put(k[:, t : t + 1]), put(v[:, t : t + 1])
        if kind == "paged":
            pages.append(rows, *(x.reshape(2, 1, 8) for x in new), **options)
            view, positions = pages.view(rows), np.array([pages.position(row) for row in rows])
        else:
            cache.append(*new, **options)
            view, positions = cache, np.asarray(cache.positions)
        places = np.arange(len(held)) if in_cache else np.array(held)
        assert positions.tolist() == [places[-1] + 1] * 2
        assert np.asarray(view.lengths).tolist() == [len(held)] * 2
        one = saccade.rope(q[:, t : t + 1], places[-1:], **turn)
        want = saccade.attention(one, saccade.rope(k[:, held], places, **turn), v[:, held])
        np.testing.assert_allclose(saccade.decode(put(one), view), want, rtol=1e-5, atol=1e-5)


def test_eviction_of_ragged_sequences() -> None:
    cache = KVCache(3, 8, 1, 2, fill=np.nan)
    numbers = np.broadcast_to(np.arange(8, dtype=np.float32)[:, None, None], (3, 8, 1, 2))
    cache.append(numbers, -numbers, [8, 5, 2])
    cache.evict(1, 3)
    assert cache.lengths.tolist() == [4, 4, 2]
    assert cache.positions.tolist() == [8, 5, 2]
    assert cache.k[0, :4, 0, 0].tolist() == [0, 5, 6, 7]
    assert cache.k[1, :4, 0, 0].tolist() == [0, 2, 3, 4]
    assert cache.v[2, :2, 0, 0].tolist() == [0, -1]
    cache.append(numbers[:, :4], numbers[:, :4])
    assert cache.lengths.tolist() == [8, 8, 6]
    cache.evict(50, 1)
    assert cache.lengths.tolist() == [8, 8, 6]
    with pytest.raises(ValueError, match="window is 0; expected at least 1"):
        cache.evict(1, 0)
    cache.reset()
    assert cache.positions.tolist() == [0, 0, 0]


def test_bad_arguments() -> None:
    with pytest.raises(ValueError, match="head_dim is 0"):
        KVCache(1, 4, 1, 0)
    with pytest.raises(ValueError, match="capacity is -1"):
        KVCache(1, -1, 1, 2)
    cache = KVCache(2, 4, 1, 2)
    good = np.ones((2, 1, 1, 2), np.float32)
    with pytest.raises(TypeError, match="float64"):
        cache.append(good.astype(np.float64), good)
    with pytest.raises(ValueError, match=r"expected \[2, T, 1, 2\]"):
        cache.append(good[:1], good)
    with pytest.raises(ValueError, match="expected the same number"):
        cache.append(good, good[:, :0])
    with pytest.raises(ValueError, match="from 0 to 1"):
        cache.append(good, good, [2, 0])
    with pytest.raises(ValueError, match="from 0 to 1"):
        cache.append(good, good, [-1, 0])


def test_dtypes_and_devices() -> None:
    ml_dtypes = pytest.importorskip("ml_dtypes")
    assert KVCache(1, 2, 1, 4, dtype="bfloat16").k.dtype == ml_dtypes.bfloat16
    assert isinstance(KVCache(0, 2, 1, 4, device="cpu").k, np.ndarray)
    torch = pytest.importorskip("torch")
    assert KVCache(1, 2, 1, 4, dtype=torch.bfloat16).k.dtype == torch.bfloat16
    assert KVCache(1, 2, 1, 4, dtype="float16", device=torch.device("cpu")).v.dtype == torch.float16
    cache = KVCache(1, 2, 1, 4, dtype=torch.float32)
    with pytest.raises(TypeError, match=r"k is ndarray of float32; expected Tensor of torch.float32.*dtype='float32'"):
        cache.append(np.ones((1, 1, 1, 4), np.float32), torch.ones(1, 1, 1, 4))
    with pytest.raises(ValueError, match=r"v is torch.strided on meta; expected torch.strided on cpu"):
        cache.append(torch.ones(1, 1, 1, 4), torch.ones(1, 1, 1, 4, device="meta"))
    with pytest.raises(ValueError, match=r"v is torch.sparse_coo"):
        cache.append(torch.ones(1, 1, 1, 4), torch.ones(1, 1, 1, 4).to_sparse())
    assert not cache.k.any()


@pytest.mark.parametrize("which", [0, 1])
@pytest.mark.parametrize("kind", ["contiguous", "paged"])
def test_a_gradient_that_would_vanish_in_a_cache_raises(kind: str, which: int) -> None:
    torch = pytest.importorskip("torch")
    cache = KVCache(1, 4, 1, 4, dtype=torch.float32)
    pages = PagedKVCache(2, 4, 1, 4, dtype=torch.float32)
    s = pages.add()
    given = [torch.ones(1, 1, 4), torch.ones(1, 1, 4)]
    given[which].requires_grad_()

    def append(k, v):
        return cache.append(k[None], v[None]) if kind == "contiguous" else pages.append([s], k, v)

    name = "kv"[which]
    with pytest.raises(Unsupported, match=rf"{name} requires grad.*append {name}\.detach\(\).*torch\.no_grad\(\)"):
        append(*given)
    assert int(cache.lengths[0]) == pages.length(s) == 0
    assert not cache.k.any()
    assert not pages.k.any()
    append(*(x.detach() for x in given))
    with torch.no_grad():
        append(*given)
    assert int(cache.lengths[0]) + pages.length(s) == 2
    assert not any(x.requires_grad for x in (cache.k, cache.v, pages.k, pages.v))


BAD_LENGTHS = {
    "2-D": [[1], [2]], "one 2-D": [[1, 2]], "float": [1.5, 2.0], "whole floats": [1.0, 2.0], "bool": [True, False],
    "one number": 2, "too many": [1, 1, 1], "too few": [1],
}  # fmt: skip


@pytest.mark.parametrize("form", ["list", "array", "tensor"])
@pytest.mark.parametrize("kind", ["numpy", "torch"])
@pytest.mark.parametrize("name", BAD_LENGTHS)
def test_lengths_that_are_no_integers_of_the_batch_are_refused(name: str, kind: str, form: str) -> None:
    torch = pytest.importorskip("torch") if "t" in (kind[0], form[0]) else None
    cache, put = made(kind, 2, 6, 1, 2, fill=np.nan)
    lengths = {"list": lambda x: x, "array": np.array, "tensor": lambda x: torch.tensor(x)}[form](BAD_LENGTHS[name])
    tokens = put(np.ones((2, 3, 1, 2), np.float32))
    with pytest.raises(ValueError, match=r"lengths is .*; expected integers \[2\], one per sequence"):
        cache.append(tokens, tokens, lengths)
    assert np.asarray(cache.lengths).tolist() == [0, 0]
    assert np.isnan(np.asarray(cache.k)).all()


@pytest.mark.parametrize("bad", [[1.0, 2.0], [True, True], [[1], [2]], [1]])
@pytest.mark.parametrize("kind", ["numpy", "torch"])
def test_a_cache_with_such_lengths_is_not_read(kind: str, bad: list) -> None:
    cache, put = made(kind, 2, 6, 1, 2)
    q = put(np.ones((2, 1, 1, 2), np.float32))
    with pytest.raises(ValueError, match=r"the cache has lengths .*; expected integers \[B\] = \[2\]"):
        cache.lengths = put(np.array(bad))
    cache.follow(put(np.array(bad)))
    with pytest.raises(ValueError, match=r"the cache has lengths .*; expected integers \[B\] = \[2\]"):
        saccade.decode(q, cache)
    pages = PagedKeys(cache.k, cache.v, put(np.array([[0], [1]], np.int32)), cache.lengths)
    for call in (lambda: saccade.decode(q, pages), lambda: saccade.paged_attention(q[:, 0], pages)):
        with pytest.raises(ValueError, match=r"lengths .*; expected integers"):
            call()


@pytest.mark.parametrize("kind", ["numpy", "torch"])
def test_no_tokens_may_be_rotated_too(kind: str) -> None:
    cache, put = made(kind, 2, 4, 1, 4)
    none = put(np.ones((2, 0, 1, 4), np.float32))
    cache.append(none, none, rotation={})
    pages = PagedKVCache(2, 4, 1, 4, dtype=none.dtype)
    pages.append([pages.add()], none[0], none[0], rotation={})
    assert np.asarray(cache.lengths).tolist() == [0, 0]
    assert pages.free_pages == 2


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))], ids=["copy", "pickle"])
@pytest.mark.parametrize("kind", ["numpy", "torch"])
def test_a_copy_is_a_cache_of_its_own(kind: str, duplicate) -> None:
    cache, put = made(kind, 1, 4, 1, 2, quantised="int8")
    tokens = put(np.ones((1, 2, 1, 2), np.float32))
    cache.append(tokens, tokens)
    other = duplicate(cache)
    other.append(tokens, tokens)
    assert [int(x.lengths[0]) for x in (cache, other)] == [2, 4]
    assert repr(other) == repr(cache).replace("[2]", "[4]")
    assert not np.asarray(cache.k[:, 2:]).any()
    assert np.asarray(other.k).all()


def test_a_cache_shows_what_it_is() -> None:
    cache = KVCache(2, 64, 2, 32)
    assert repr(cache) == (
        "KVCache(batch=2, capacity=64, lengths=[0, 0], kv_heads=2, head_dim=32, v_dim=32, dtype='float32')"
    )
    pages = PagedKVCache(4, 8, 2, 32, v_dim=16, quantised="int8")
    pages.add()
    assert repr(pages) == (
        "PagedKVCache(pages=4, page_size=8, free_pages=4, sequences=1, kv_heads=2, head_dim=32, v_dim=16, "
        "dtype='float32', quantised='int8', group=32)"
    )
    assert repr(PrefixCache([pages])) == "PrefixCache(pools=1, page_size=8, sequences=0)"
    torch = pytest.importorskip("torch")
    assert "dtype=torch.float32, device='cpu')" in repr(KVCache(2, 64, 2, 32, dtype=torch.float32))
    with pytest.raises(TypeError, match=r"k is Tensor of torch.float32; expected ndarray.*with dtype=torch\.float32"):
        cache.append(torch.ones(2, 1, 2, 32), torch.ones(2, 1, 2, 32))
    with pytest.raises(TypeError, match="k is list of no dtype; expected ndarray of float32"):
        cache.append([1.0], [1.0])


@pytest.mark.parametrize("bad", [1.5, True, "3", None])
def test_sizes_are_integers(bad) -> None:
    cache, pages = KVCache(1, 4, 1, 2), PagedKVCache(2, 4, 1, 2)
    s = pages.add()
    for name, call in {
        "batch": lambda: KVCache(bad, 4, 1, 2), "capacity": lambda: KVCache(1, bad, 1, 2),
        "kv_heads": lambda: KVCache(1, 4, bad, 2), "pages": lambda: PagedKVCache(bad, 4, 1, 2),
        "page_size": lambda: PagedKVCache(2, bad, 1, 2), "sinks": lambda: cache.evict(bad, 1),
        "window": lambda: pages.evict(s, 0, bad),
    }.items():  # fmt: skip
        with pytest.raises(TypeError, match=f"{name} is {bad!r}; expected an integer"):
            call()
    if bad is not None:
        for call in (pages.crop, pages.fork):
            with pytest.raises(TypeError, match=f"length is {bad!r}; expected an integer"):
                call(s, bad)
