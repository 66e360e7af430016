"""Trees of draft tokens: a thousand random ones, forward, backward and decode through caches."""

from __future__ import annotations

import random

import numpy as np
import pytest

import saccade
from saccade import KVCache, PagedKVCache
from saccade import mask as masks
from saccade.arrays import numpy_dtype
from saccade.testing.cases import Case
from saccade.testing.compare import measure_all, require
from saccade.testing.inputs import NEEDLES, CaseInputs, make
from saccade.testing.run import expected, plain, verify

PER_TEST = 10
KINDS = ("random", *NEEDLES)


def some_parents(r: random.Random, n: int) -> list[int]:
    """Any order of a tree, chains that branch now and then, or levels of a complete tree."""
    near, width = r.choice((0.0, 0.8, 1.0, None)), r.randint(1, 4)
    if near is None:
        return [-1 if t < width else t // width - 1 for t in range(n)]
    return [t - 1 if r.random() < near else r.randint(-1, t - 1) for t in range(n)]


def random_tree(seed: int) -> tuple[Case, list[int], int, str]:
    """(case, lengths of the prefixes, nodes, dtype); the case's mask has the tree, and keys(lengths + nodes)."""
    r = random.Random(seed)
    B, n = r.randint(1, 3), r.choice((1, 2, r.randint(1, 20), r.randint(1, 90)))
    lengths = [r.randint(0, 90) for _ in range(B)]
    parents = r.choice((some_parents(r, n), [some_parents(r, n) for _ in range(B)]))
    text = f"tree({parents}){r.choice(('', ' & causal()', f' & window({r.randint(0, 60)}, 0)'))}"
    text += f" & keys({[length + n for length in lengths]})"
    Hk, D = r.choice((1, 2)), r.choice((16, 24, 32, 64))
    Tk = max(lengths) + n + r.randint(0, 9)
    case = Case(f"tree-{seed}", n, Tk, B, Hk * r.choice((1, 3)), Hk, D, r.choice((D, 20)), mask=text)
    return case, lengths, n, r.choice(("float32", "float32", "bfloat16", "float16"))


def walked(parents: list[int], prefix: int, Tk: int) -> np.ndarray:
    """The pairs of one tree, from each node up to the prefix, bool [n, Tk]."""
    allowed = np.zeros((len(parents), Tk), bool)
    for t in range(len(parents)):
        allowed[t, :prefix] = True
        node = t
        while node >= 0:
            allowed[t, prefix + node] = True
            node = parents[node]
    return allowed


def decoded(x: CaseInputs, lengths: list[int], n: int, backend: str, paged: bool) -> dict[str, np.ndarray]:
    """o and lse of the nodes, which follow the prefixes in a cache whose unused slots are NaN."""
    case, mask = x.case, masks.parse(x.case.mask.rpartition(" & ")[0])
    options = {"v_dim": case.Dv, "dtype": x.k.dtype, "fill": np.nan}
    if paged:
        pages = PagedKVCache(case.B * -(-case.Tk // 8), 8, case.Hk, case.D, **options)
        sequences = [pages.add() for _ in lengths]
        for b, length in enumerate(lengths):
            pages.append([sequences[b]], x.k[b, :length], x.v[b, :length])
            pages.append([sequences[b]], x.k[b, length : length + n], x.v[b, length : length + n])
        cache = pages.view(sequences)
    else:
        cache = KVCache(case.B, case.Tk, case.Hk, case.D, **options)
        cache.append(x.k, x.v, np.array(lengths))
        nodes = np.array(lengths)[:, None] + np.arange(n)
        cache.append(*(np.take_along_axis(a, nodes[..., None, None], 1) for a in (x.k, x.v)))
    o, lse = saccade.decode(x.q, cache, mask=mask, return_lse=True, backend=backend)
    return {"o": o, "lse": lse}


def check(seed: int, backend: str) -> None:
    case, lengths, n, dtype = random_tree(seed)
    kind = KINDS[seed % len(KINDS)]
    x = make(case, dtype, kind=kind)
    if "window" not in case.mask:
        (tree,) = (child for child in x.mask.children if child.kind == "tree")
        trees = np.broadcast_to(np.atleast_2d(tree.args[0]), (case.B, n)).tolist()
        pairs = np.stack([walked(*entry, case.Tk) for entry in zip(trees, lengths, strict=True)])
        assert np.array_equal(np.broadcast_to(x.mask.evaluate(case.B, 1, n, case.Tk)[:, 0], pairs.shape), pairs)
    require(verify(x, backend), f"{case} {dtype} {kind}")
    o = decoded(x, lengths, n, backend, paged=seed % 2 == 1)
    # paged caches end at the last page of the longest sequence
    wanted, standard = expected(x, backward=False), plain(x, backward=False)
    require(measure_all(o, wanted, standard, numpy_dtype(dtype)), f"decode {case} {dtype} {kind}")


@pytest.mark.sample(8)
@pytest.mark.parametrize("part", range(1000 // PER_TEST))
def test_random_trees(backend, part, request) -> None:
    first = request.config.getoption("--seed") * 1_000_000 + part * PER_TEST
    # other backends are emulated, or compile their own kernels for each case
    every = 1 if backend == "cpu" or request.config.getoption("--all") else 5
    for seed in range(first, first + PER_TEST, every):
        check(seed, backend)


def test_a_chain_is_causal(backend) -> None:
    x = make(Case("chain", 40, 70, 1, 4, 2, 32, 32))
    chain = masks.tree(np.arange(40) - 1)
    o = saccade.attention(x.q, x.k, x.v, chain, backend=backend)
    np.testing.assert_allclose(o, saccade.attention(x.q, x.k, x.v, masks.causal(), backend=backend), atol=2e-6)


@pytest.mark.slow
@pytest.mark.parametrize("near", [0.0, 0.9, 1.0])
def test_a_thousand_nodes(backend, near) -> None:
    r = random.Random(0)
    parents = [t - 1 if r.random() < near else r.randint(-1, t - 1) for t in range(1024)]
    case = Case("thousand", 1024, 1500, 1, 1, 1, 16, 16, mask=f"tree({parents})")
    require(verify(make(case, kind="last"), backend, backward=False), case.name)
