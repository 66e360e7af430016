"""Every mask constructor with many sizes: needles at each edge and next to it, forward and backward."""

from __future__ import annotations

import itertools
import pickle
import random
from dataclasses import replace

import numpy as np
import pytest

import saccade
from saccade import mask as masks
from saccade.testing.cases import Case
from saccade.testing.compare import require
from saccade.testing.inputs import NEEDLES, make
from saccade.testing.run import verify
from saccade.testing.tensors import put

# around one, two and several tiles, square and not
SIZES = [(1, 1), (1, 70), (3, 8), (16, 16), (17, 64), (64, 65), (65, 64), (70, 1), (128, 128), (130, 257), (200, 90)]


def everything(B: int, tq: int, tk: int) -> dict[str, str]:
    """A mask of each constructor, and of what unions and complements make of them, that fits these sizes."""
    cuts_q, cuts_k = ([0, n // 3, n // 3, n - n // 4, n] for n in (tq, tk))
    ids = np.repeat(np.arange(4), np.diff(cuts_k)).tolist()
    ids_q = np.repeat(np.arange(4), np.diff(cuts_q)).tolist()
    half, most = tk // 2, max(tk - 3, 0)
    tokens = [[int(n % 2 * (tk // 3) <= j <= half + n % 2 * (half // 2)) for j in range(tk)] for n in range(B)]
    firsts, ends = [3 * t % (half + 1) for t in range(tq)], [tk - t % (tk - half) for t in range(tq)]
    starts, stops = [5 * j % (tq // 2 + 1) for j in range(tk)], [tq - j % (tq - tq // 2) for j in range(tk)]
    checks = [[(a + b) % 2 for b in range(-(-tk // 16))] for a in range(-(-tq // 16))]
    return {
        "full": "full()",
        "causal": "causal()",
        "causal-offset": f"causal({half})",
        "causal-batch": f"causal({[n - 1 for n in range(B)]})",
        "window": "window(5, 3)",
        "window-open": "window(None, 0)",
        "window-zero": "window(0, 0)",
        "window-offset": "window(9, 0, -2)",
        "documents": f"documents({ids})",
        "documents-batch": f"documents({[ids] * B})",
        "documents-two": f"documents({ids_q}, {ids})",
        "cu_seqlens": f"documents(cu_seqlens={cuts_k}) & causal()",
        "cu-two": f"documents(cu_q={cuts_q}, cu_k={cuts_k})",
        "cu-each": f"documents(cu_q={cuts_q}, cu_k={cuts_k}, each=causal() & window(7, 0))",
        "cu-each-strided": f"documents(cu_q={cuts_q}, cu_k={cuts_k}, each=strided(3))",
        "keys": f"keys({half}) & causal()",
        "keys-batch": f"keys({[half, *[most] * (B - 1)]})",
        "keys-between": f"keys({half // 2}, {most})",
        "prefix": f"prefix({half}) | causal()",
        "prefix-batch": f"prefix({[1, *[most] * (B - 1)]})",
        "global": f"global_tokens({min(2, tk)}) | window(4, 0)",
        "global-list": f"(global_tokens({sorted({0, half, tk - 1})}) | window(3, 3)) & causal()",
        "columns": f"columns({starts}, {stops})",
        "ranges": f"ranges({firsts}, {ends})",
        "padding": f"padding({tokens})",
        "padding-causal": f"padding({tokens}) & causal()",
        "strided": "strided(4) & causal()",
        "strided-phase": "strided(6, 5)",
        "dilated": "dilated(3, 5)",
        "chunked": "chunked(16)",
        "tiles": f"tiles({checks}, 16)",
        "tiles-causal": f"tiles({checks}, (16, 16)) & causal()",
        "dense": f"dense({[[int((7 * t + 3 * j) % 11 < 6) for j in range(tk)] for t in range(tq)]})",
        "tree": f"tree({[j - 1 if j % 3 else j // 2 - 1 for j in range(min(tq, tk))]})",
        "tree-batch": f"tree({[[(n + 1) * j // 4 - 1 for j in range(tk // 2)] for n in range(B)]}) & causal()",
        "per-head": "per_head([causal(), strided(3), window(2, 2), keys(0)])",
        "and": f"causal() & window(40, 0) & documents({ids}) & strided(2)",
        "or": f"window(2, 0) | strided(8) | keys({half}, {min(half + 2, tk)})",
        "not": f"~(window(3, 3) | keys({half}))",
        "not-documents": f"causal() & ~documents({ids})",
        "xor": f"(causal() & ~keys({half})) | (~causal() & keys({half}))",
    }


NAMES = list(everything(1, 1, 1))


@pytest.mark.parametrize("name", NAMES)
def test_constructor(backend, name, seed, pytestconfig) -> None:
    """Each size with needles of every kind, in a sample with one kind for each size."""
    for n, (tq, tk) in enumerate(SIZES):
        case = Case(name, tq, tk, 2, 4, 2, 24, 20, mask=everything(2, tq, tk)[name])
        drawn = random.Random(f"{seed} {name} {n}").choice(NEEDLES)
        for kind in NEEDLES if pytestconfig.getoption("--all") else (drawn,):
            require(verify(make(case, kind=kind), backend), f"{case} {kind}")


@pytest.mark.parametrize("name", [name for name in NAMES if masks.parse(everything(1, 1, 1)[name]).has_data])
def test_arrays_where_the_others_live(backend, name) -> None:
    """A mask's arrays may lie on the device, in the kind that the backend computes with."""
    for tq, tk in ((65, 64), (3, 70), (70, 130)):
        case = Case(name, tq, tk, 2, 4, 2, 24, 20, mask=everything(2, tq, tk)[name])
        x = make(case, kind="last")
        if backend == "triton":
            x = replace(x, mask=x.mask.map_arrays(lambda a: put(np.array(a))))
        require(verify(x, backend), case)


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_constructor_at_every_small_size(backend, name) -> None:
    for tq, tk in np.ndindex(24, 24):
        case = Case(name, tq + 1, tk + 1, 2, 4, 2, 16, 16, mask=everything(2, tq + 1, tk + 1)[name])
        for kind in ("last", "before"):
            require(verify(make(case, kind=kind), backend), f"{case} {kind}")


@pytest.mark.parametrize("name", NAMES)
def test_text_and_pickle_give_the_same_bits(backend, name) -> None:
    mask = masks.parse(everything(2, 65, 64)[name])
    x = make(Case(name, 65, 64, 2, 4, 2, 16, 16))
    want = saccade.attention(x.q, x.k, x.v, mask, backend=backend)
    for other in (masks.parse(str(mask)), pickle.loads(pickle.dumps(mask)), mask & masks.full()):
        np.testing.assert_array_equal(saccade.attention(x.q, x.k, x.v, other, backend=backend), want)


def test_no_mask_is_full(backend) -> None:
    x = make(Case("none", 65, 64, 2, 4, 2, 16, 16))
    want = saccade.attention(x.q, x.k, x.v, backend=backend)
    for mask in (masks.full(), masks.keys(64), masks.window(), masks.strided(1)):
        np.testing.assert_array_equal(saccade.attention(x.q, x.k, x.v, mask, backend=backend), want)


def test_causal_is_bottom_right_unless_it_says_otherwise(backend) -> None:
    """Of 3 queries over 5 keys the last sees all five; with offset 0 the first sees only key 0."""
    q, k = np.zeros((1, 3, 1, 4), np.float32), np.zeros((1, 5, 1, 4), np.float32)
    v = np.eye(5, dtype=np.float32)[None, :, None]
    counts = [5 - (saccade.attention(q, k, v, m, backend=backend)[0, :, 0] == 0).sum(-1) for m in (
        masks.causal(), masks.causal(0), masks.causal() & masks.keys(4),
    )]  # fmt: skip
    assert [c.tolist() for c in counts] == [[3, 4, 5], [1, 2, 3], [2, 3, 4]]


def test_documents_are_problems_of_their_own(backend) -> None:
    """A packed sequence has the same results as its documents separately."""
    cu = [0, 10, 45, 46, 120]
    x = make(Case("packed", 120, 120, 1, 4, 2, 32, 32))
    packed = saccade.attention(x.q, x.k, x.v, masks.documents(cu_seqlens=cu) & masks.causal(), backend=backend)
    for a, b in itertools.pairwise(cu):
        alone = saccade.attention(x.q[:, a:b], x.k[:, a:b], x.v[:, a:b], masks.causal(), backend=backend)
        np.testing.assert_allclose(packed[:, a:b], alone, atol=2e-6)
