"""The same bits in every run, with any number of threads, and next to other callers."""

from __future__ import annotations

import threading
from dataclasses import replace

import numpy as np
import pytest

import saccade
from saccade import KVCache
from saccade import mask as masks
from saccade.testing.cases import Case, by_name
from saccade.testing.inputs import make
from saccade.testing.run import computed

DTYPES = ("float32", "bfloat16", "float16", "float64")
LARGE = Case("large", 700, 900, 1, 4, 1, 32, 32, mask="causal()")
CASES = [
    by_name("heads-gqa"),
    by_name("heads-mqa"),
    by_name("mask-strided-window"),
    by_name("mask-global-list"),
    by_name("mask-per-head"),
    by_name("all"),
    by_name("all-alibi"),
    LARGE,
    replace(LARGE, name="large-documents", mask="documents(cu_seqlens=[0, 100, 333, 900]) & causal()"),
    replace(LARGE, name="large-bias", mask="", bias="1h1k", sinks=True),
    replace(LARGE, name="large-decode", Tq=1, Tk=9000, mask=""),
]


@pytest.fixture(autouse=True)
def set_threads(backend):
    """Set the number of threads of the CPU backend; no effect on others."""
    if backend != "cpu":
        yield lambda n: None
        return
    before = saccade.get_num_threads()
    yield saccade.set_num_threads
    saccade.set_num_threads(before)


def bits(x, backend) -> dict[str, bytes]:
    return {name: a.tobytes() for name, a in computed(x, backend).items()}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
def test_same_bits_over_runs_and_thread_counts(backend, case, dtype, set_threads) -> None:
    x = make(case, dtype, poison=False)
    want = bits(x, backend)
    for n in (1, 2, 3, 7, 2):
        set_threads(n)
        assert bits(x, backend) == want, f"{n} threads"


@pytest.mark.parametrize("dtype", DTYPES)
def test_decode_has_the_same_bits_over_thread_counts(backend, dtype, set_threads) -> None:
    x = make(Case("decode", 1, 9000, 2, 8, 2, 64, 64), dtype)
    cache = KVCache(2, 10000, 2, 64, dtype=dtype, fill=np.nan)
    cache.append(x.k, x.v, np.array([9000, 3001]))
    want = saccade.decode(x.q, cache, backend=backend).tobytes()
    for n in (1, 2, 5, 16):
        set_threads(n)
        assert saccade.decode(x.q, cache, backend=backend).tobytes() == want, f"{n} threads"


def test_same_bits_wherever_the_arrays_lie(backend) -> None:
    x = make(Case("place", 130, 130, 1, 4, 2, 40, 40))
    want = saccade.attention(x.q, x.k, x.v, masks.causal(), backend=backend)
    for shift in (1, 3, 8, 16):
        moved = []
        for a in (x.q, x.k, x.v):
            whole = np.zeros(a.size + 32, a.dtype)
            whole[shift : shift + a.size] = a.reshape(-1)
            moved.append(whole[shift : shift + a.size].reshape(a.shape))
        np.testing.assert_array_equal(saccade.attention(*moved, masks.causal(), backend=backend), want)


def test_several_python_threads_at_once(backend) -> None:
    inputs = [make(replace(LARGE, name=f"t{n}", Tq=300 + n, Tk=300 + n), poison=False) for n in range(4)]
    want = [bits(x, backend) for x in inputs]
    wrong: list[int] = []

    def work(n: int) -> None:
        for _ in range(5):
            if bits(inputs[n], backend) != want[n]:
                wrong.append(n)

    workers = [threading.Thread(target=work, args=(n,)) for n in range(len(inputs))]
    for w in workers:
        w.start()
    for w in workers:
        w.join()
    assert not wrong


def test_dropout_is_one_pattern_for_any_tiling(backend) -> None:
    """Dropout removes the same pairs with any mask or cut, in forward and in backward."""
    case = Case("dropout", 100, 100, 1, 2, 2, 16, 16, dropout=0.4, seed=77)
    x = make(case)
    eye = np.eye(100, dtype=np.float32)[None, :, None].repeat(2, 2)
    o = saccade.attention(x.q, x.k, eye, dropout=0.4, seed=77, backend=backend)
    cut = saccade.attention(x.q[:, :40], x.k[:, :33], eye[:, :33, :, :33], dropout=0.4, seed=77, backend=backend)
    banded = saccade.attention(x.q, x.k, eye, masks.window(9, 4), dropout=0.4, seed=77, backend=backend)
    np.testing.assert_array_equal(cut != 0, o[:, :40, :, :33] != 0)
    inside = masks.window(9, 4).evaluate(1, 2, 100, 100)[:, 0][:, :, None]
    np.testing.assert_array_equal(banded != 0, (o != 0) & inside)
    assert abs((o != 0).mean() - 0.6) < 0.02
    other = saccade.attention(x.q, x.k, eye, dropout=0.4, seed=78, backend=backend)
    assert ((other != 0) != (o != 0)).mean() > 0.3
