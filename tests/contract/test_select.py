"""Selected keys: a list of blocks for each group of rows and each key head."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import pytest

import saccade
from saccade import KVCache, PagedKVCache
from saccade import mask as masks
from saccade.arrays import numpy_dtype
from saccade.quantised import decode as decoded
from saccade.quantised import encode
from saccade.testing.cases import Case
from saccade.testing.compare import measure_all, require
from saccade.testing.inputs import NEEDLES, make
from saccade.testing.run import computed, expected, plain

KINDS = ("random", *NEEDLES)


class Lists(NamedTuple):
    """How lists of a case are drawn: block and rows as in `select`, and n entries, some of them -1 or repeated."""

    block: int
    rows: int
    n: int
    shared: bool = False

    def mask(self, case: Case, seed: int = 0) -> masks.Mask:
        rng = np.random.default_rng(seed)
        shape = 1 if self.shared else case.B, case.Hk, -(-case.Tq // self.rows), self.n
        return masks.select(rng.integers(-1, -(-case.Tk // self.block), shape), self.block, self.rows)


def with_lists(case: Case, lists: Lists, seed: int = 0) -> Case:
    mask = lists.mask(case, seed)
    return replace(case, mask=str(masks.parse(case.mask) & mask if case.mask else mask))


# NSA's selected branch (16 heads share a list), MoBA's (rows of a block), DeepSeek's tokens with one key head; others
FORMS = {
    "nsa": (Case("nsa", 150, 150, 1, 16, 1, 48, 32, mask="causal()"), Lists(16, 1, 4)),
    "moba": (Case("moba", 150, 150, 2, 4, 2, 32, 32, mask="causal()"), Lists(32, 32, 3)),
    "tokens": (Case("tokens", 70, 200, 2, 8, 1, 64, 64, mask="causal()"), Lists(1, 1, 40)),
    "wide": (Case("wide", 130, 190, 1, 3, 3, 40, 40), Lists(64, 64, 2)),
    "many lanes": (Case("many lanes", 100, 130, 1, 6, 2, 32, 32, mask="causal()"), Lists(8, 50, 6)),
    "odd": (Case("odd", 77, 101, 2, 5, 1, 24, 40, mask="causal() & window(60, 0)"), Lists(7, 3, 9, True)),
    "short": (Case("short", 90, 300, 1, 4, 2, 32, 32, mask="causal()"), Lists(200, 4, 5)),
    "empty": (Case("empty", 20, 60, 1, 4, 2, 32, 32, mask="causal()"), Lists(8, 1, 0)),
    "documents": (Case("documents", 90, 90, 1, 4, 2, 32, 32, mask="causal() & documents(cu_seqlens=[0, 20, 21, 90])"),
                  Lists(8, 2, 6)),
    "padding": (Case("padding", 64, 64, 2, 4, 2, 32, 32, mask="causal() & keys([0, 0], [64, 33])"), Lists(4, 1, 12)),
    "strided": (Case("strided", 90, 90, 1, 4, 2, 32, 32, mask="causal() & strided(3)"), Lists(16, 8, 4)),
    "softcap": (Case("softcap", 90, 90, 1, 8, 2, 32, 32, mask="causal()", softcap=2.0, scale=0.4), Lists(8, 1, 6)),
    "sinks": (Case("sinks", 90, 90, 1, 8, 2, 32, 32, mask="causal()", sinks=True), Lists(8, 2, 6)),
}  # fmt: skip


VERBS = ("forward", "backward")


def verify(case: Case, backend: str, dtype: str, kind: str, verb: str) -> None:
    x, both = make(case, dtype, kind=kind), {"backward": verb == "backward"}
    mets = measure_all(computed(x, backend, **both), expected(x, **both), plain(x, **both), numpy_dtype(dtype))
    require(mets, f"{case.name} {dtype} {kind}")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "float64"])
@pytest.mark.parametrize("name", FORMS)
@pytest.mark.parametrize("verb", VERBS)
def test_forms(backend, verb, name, dtype, kinds) -> None:
    case, lists = FORMS[name]
    for kind in kinds:
        verify(with_lists(case, lists), backend, dtype, kind, verb)


@pytest.mark.parametrize("verb", VERBS)
def test_lists_are_sets(backend, verb) -> None:
    case, lists = FORMS["nsa"]
    x = make(with_lists(case, lists), "float32")
    select = x.mask.children[1]
    indices = select.args[0]
    rng = np.random.default_rng(1)
    other = np.concatenate(
        [rng.permuted(indices, axis=3), indices[..., :2], np.full_like(indices[..., :1], -1)], axis=3
    )
    again = masks.causal() & masks.select(other, select.args[1], select.args[2])
    for a, b in zip(*(outputs(x, mask, backend, verb) for mask in (x.mask, again)), strict=True):
        np.testing.assert_array_equal(a, b)


def outputs(x, mask, backend, verb):
    out = computed(replace(x, mask=mask), backend, backward=verb == "backward")
    return [np.nan_to_num(x) for x in out.values()]


@pytest.mark.parametrize("verb", VERBS)
def test_every_block_is_the_mask_alone(backend, verb) -> None:
    """A list of all blocks leaves the other masks; so do rows that share one list, or have one each."""
    case = Case("all", 100, 100, 1, 8, 2, 32, 32, mask="causal()")
    x = make(case, "float32")
    both = {"backward": verb == "backward"}
    wanted, standard = expected(x, **both), plain(x, **both)
    for block, rows in ((1, 1), (16, 1), (16, 64), (128, 200)):
        count = -(-case.Tk // block)
        shape = 1, case.Hk, -(-case.Tq // rows), count
        mask = masks.causal() & masks.select(np.broadcast_to(np.arange(count), shape), block, rows)
        got = computed(replace(x, mask=mask), backend, **both)
        require(measure_all(got, wanted, standard, np.dtype("float32")), f"{block} {rows}")


def decode_case(case: Case, lists: Lists, lengths: list[int], dtype: str, backend: str, page: int, codes: str | None):
    """A cache whose unused slots hold NaN, with new lists at each step."""
    x = make(replace(case, mask=case.mask or "full()"), dtype)
    options = {"dtype": dtype, "fill": np.nan, "quantised": codes}
    if page:
        cache = PagedKVCache(sum(-(-n // page) for n in lengths) + 1, page, case.Hk, case.D, **options)
        sequences = [cache.add() for _ in lengths]
        for s, n, k, v in zip(sequences, lengths, x.k, x.v, strict=True):
            cache.append([s], k[:n], v[:n])
        keys = cache.view(sequences)
    else:
        cache = keys = KVCache(case.B, case.Tk, case.Hk, case.D, **options)
        cache.append(x.k, x.v, np.array(lengths))
    causal = case.mask == "causal()"
    other = masks.keys(np.array(lengths)) & (masks.causal() if causal else masks.parse(case.mask or "full()"))
    if codes:
        k, v = (decoded(*encode(a, cache.quantised), cache.quantised) for a in (x.k, x.v))
        x = replace(x, k=k, v=v)
    for step in range(2):
        select = lists.mask(case, step)
        o, lse = saccade.decode(
            x.q, keys, mask=select if causal else other & select, causal=causal, return_lse=True, scale=case.scale,
            backend=backend,
        )  # fmt: skip
        y = replace(x, mask=other & select, stop=np.array(lengths))
        rounded = replace(y, k=y.k.astype(x.q.dtype), v=y.v.astype(x.q.dtype))
        mets = measure_all(
            {"o": o, "lse": lse}, expected(y, backward=False), plain(rounded, backward=False), numpy_dtype(dtype)
        )
        require(mets, f"{case.name} {lengths} {dtype} page {page} {codes}, step {step}")


@pytest.mark.parametrize("codes", [None, "int8", "fp8", "int4"], ids=str)
@pytest.mark.parametrize("page", [0, 16])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_decode(backend, dtype, page, codes) -> None:
    for Tq, lists in ((1, Lists(16, 1, 4)), (1, Lists(1, 1, 30)), (3, Lists(16, 1, 3)), (4, Lists(8, 4, 5))):
        decode_case(
            Case(f"decode-{Tq}", Tq, 131, 2, 8, 2, 32, 32, mask="causal()"),
            lists,
            [130, 77],
            dtype,
            backend,
            page,
            codes,
        )


def configuration(n: int) -> tuple[Case, str, str]:
    """A case, a dtype and a kind of inputs from a number."""
    draw = random.Random(n)
    Tk = draw.choice([1, 5, 33, 64, 65, 130, 200, 300])
    Tq = min(Tk, draw.choice([1, 2, 7, 40, 64, 100, 150]))
    Hk = draw.choice([1, 1, 2, 3])
    D, Dv = draw.choice([8, 16, 20, 32, 40, 64, 80, 128]), draw.choice([8, 16, 20, 32, 64, 128])
    mask = draw.choice(
        ["causal()", "causal()", "full()", "causal() & window(30, 0)", "causal() & strided(4)", f"keys({min(3, Tk)})"]
    )
    case = Case(
        f"select-{n}", Tq, Tk, draw.choice([1, 1, 2, 3]), Hk * draw.choice([1, 2, 3, 4, 8, 16]), Hk, D, Dv, mask=mask,
        scale=draw.choice([None, None, 0.1, 0.5]), softcap=draw.choice([None, None, None, 3.0]),
        sinks=draw.random() < 0.2,
    )  # fmt: skip
    lists = Lists(
        draw.choice([1, 1, 2, 7, 8, 16, 32, 64, 100]), draw.choice([1, 1, 2, 3, 8, 16, 64, 100]),
        draw.choice([0, 1, 2, 3, 5, 8, 20]), draw.random() < 0.2,
    )  # fmt: skip
    dtype = draw.choice(["float32", "float32", "bfloat16", "float16"])
    return with_lists(case, lists, n), dtype, draw.choice(KINDS)


@pytest.mark.sample(20)
@pytest.mark.parametrize("part", range(100))
@pytest.mark.parametrize("verb", VERBS)
def test_random_configurations(backend, verb, part, request) -> None:
    first = request.config.getoption("--seed") * 1_000_000 + part * 10
    for n in range(first, first + 10):
        case, dtype, kind = configuration(n)
        verify(case, backend, dtype, kind, verb)
