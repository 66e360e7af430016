"""The encoding of plans for GPUs: decoding the words as kernels do gives the plan."""

from __future__ import annotations

import random
import re

import numpy as np
import pytest

from saccade import mask as sm
from saccade.backends import Extras
from saccade.backends import plan_encoding as enc
from saccade.mask.size import TooManyBands
from saccade.plan import Limits, make_plan
from saccade.problem import Problem, Scores
from saccade.testing.masks import LEAVES, Draw, expression

LIMITS = Limits("test", 32, 32)


def in_interval(words, at: int, t, j, b: int):
    lo, hi, stride, of_keys = words[at : at + 4].tolist()
    row, x = (j, t) if of_keys else (t, j)
    return (words[lo + b * stride + row] <= x) & (x < words[hi + b * stride + row])


def in_grid(words, at: int, t, j, b: int):
    start, *division, row, stride, block_q, block_k = words[at : at + 9].tolist()
    assert tuple(division) == (*enc.division(block_q), *enc.division(block_k))
    states = words[start:].view(np.uint8)
    return states[b * stride + j // block_k * row + t // block_q] != 0


def allowed(words, record: int, t, j, b: int):
    """The element test of a mask by its record."""
    n_bands, batched, n_rows, n_grids, bands, uses = words[record : record + 6].tolist()
    seen = np.zeros(np.broadcast_shapes(t.shape, j.shape), bool)
    for n in range(n_bands):
        lo, hi, k_lo, k_hi, q_lo, q_hi, stride, phase = words[bands + 8 * (b * batched * n_bands + n) :][:8].tolist()
        ok = (t - j >= lo) & (t - j <= hi) & (j >= k_lo) & (j < k_hi) & (t >= q_lo) & (t < q_hi)
        ok = ok & (((t - j - phase) % abs(stride) == 0) == (stride > 0))
        use = words[uses + 4 * n :][:4].tolist()
        for r in range(n_rows):
            here = in_interval(words, record + 6 + 4 * r, t, j, b)
            ok = ok & (here | (use[0] >> r & 1 == 0)) & (~here | (use[1] >> r & 1 == 0))
        for g in range(n_grids):
            here = in_grid(words, record + 6 + 4 * n_rows + 9 * g, t, j, b)
            ok = ok & (here | (use[2] >> g & 1 == 0)) & (~here | (use[3] >> g & 1 == 0))
        seen |= ok
    return seen


def planned(r: random.Random):
    while True:
        B, Tq, Tk, Hq = r.randint(1, 2), r.randint(1, 70), r.randint(1, 90), r.choice([1, 2])
        mask = sm.parse(expression(Draw(r, B, Tq, Tk, tuple(LEAVES)), r.randint(1, 3)))
        try:
            p = Problem(B, Tq, Tk, Hq, 1, 16, 16, mask=mask, scores=Scores(alibi=(1, Hq), sinks=True))
            return p, make_plan(p, LIMITS)
        except TooManyBands:
            continue


@pytest.mark.parametrize("n", range(12))
def test_words_say_what_the_plan_says(n, seed) -> None:
    r = random.Random(seed + n)
    p, plan = planned(r)
    slopes = np.arange(1, p.Hq + 1, dtype=np.float32)[None]
    table = np.array([[7, 9]] * p.B, np.int32)
    extras = Extras(sinks=np.full(p.Hq, 0.5, np.float32), slopes=slopes, block_table=table, page_size=64)
    t, j = np.arange(p.Tq)[:, None], np.arange(p.Tk)[None]
    for part in plan.parts:
        found = enc.with_call(enc.of_part(part, 64, True), p, extras)
        words, at = found.words, found.numbers
        classes = words[at["o_classes"] :][: 4 * at["n_classes"]].reshape(-1, 4)
        np.testing.assert_array_equal(classes.T, [part.q_start, part.k_start, part.nq, part.nk])
        np.testing.assert_array_equal(words[at["o_heads"] :][: p.Hq], part.head)
        for ranges, names in ((part.ranges, ("o_ptr", "o_seg")), (part.transposed(64), ("o_tptr", "o_tseg"))):
            for table, name in zip((ranges.ptr, ranges.seg), names, strict=True):
                np.testing.assert_array_equal(words[at[name] :][: table.size], table.reshape(-1))
        for mask, form in zip(part.masks, found.forms, strict=True):
            for b in range(part.Bm):
                np.testing.assert_array_equal(allowed(words, form.record, t, j, b), mask.test(t, j, b))
        assert words[at["o_sinks"] :][: p.Hq].view(np.float32).tolist() == [0.5] * p.Hq
        assert words[at["o_slopes"] :][: p.Hq].view(np.float32).tolist() == slopes[0].tolist()
        assert words[at["o_table"] :][:2].tolist() == [7, 9]
        assert (at["n_tiles"], at["t_tiles"]) == (part.n_tiles, -(-int(part.nk.max()) // 64))


def test_dims_hold_their_numbers_by_name() -> None:
    p = Problem(
        2, 5, 7, 4, 2, 16, 16, mask=sm.causal(), scores=Scores(softcap=2.0, scale=0.25, dropout=0.5, bias=(1, 4, 5, 7))
    )
    found = enc.of_part(make_plan(p, LIMITS).parts[0], 64, False)
    words = enc.dims(p, found.numbers, Extras(seed=(3 << 32) + (1 << 31)), first_tile=9)
    values = dict(zip(enc.INTEGERS, words.view(np.uint32).tolist(), strict=False))
    floats = words[len(enc.INTEGERS) :].view(np.float32).tolist()
    assert len(words) == len(enc.INTEGERS) + len(enc.FLOATS) == len(set(enc.INTEGERS + enc.FLOATS))
    assert [values[n] for n in ("B", "Tq", "Tk", "Hq", "Hk", "G", "rows", "first_tile")] == [2, 5, 7, 4, 2, 2, 10, 9]
    assert [values[n] for n in ("drop_below", "seed_low", "seed_high")] == [1 << 31, 1 << 31, 3]
    assert [values[f"bias_{n}"] for n in "bhtj"] == [0, 35, 7, 1]
    assert floats == [0.25, 2.0, 2.0, -np.inf]


@pytest.mark.parametrize("language", ["wgsl", "metal"])
def test_structs_have_every_field_once(language) -> None:
    text = re.sub("//.*", "", enc.struct(language))
    names = re.findall(r"(\w+): [uf]32," if language == "wgsl" else r"(\w+)(?=[,;])", text)
    assert names == enc.INTEGERS + enc.FLOATS


def test_longest_first() -> None:
    keys = np.array([[3, 9, 3, 0], [1, 1, 1, 1]])
    assert enc.longest_first(keys).tolist() == [[1, 2, 0, 3], [3, 2, 1, 0]]
    assert enc.longest_first(keys, last=False).tolist() == [[1, 0, 2, 3], [0, 1, 2, 3]]
