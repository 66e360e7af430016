"""The plans of the kernels for Hopper: the problems they take, the order of tiles, the schedule of a backward."""

from __future__ import annotations

from dataclasses import replace
from importlib import import_module

import numpy as np
import pytest
import torch

pytest.importorskip("triton")

from saccade.backends.plan_encoding import longest_first
from saccade.backends.triton import hopper
from saccade.backends.triton.hopper.backward import IN_BLOCKS, TILES, section_of, tile_of
from saccade.backends.triton.hopper.schedule import schedule_of_ranges
from saccade.backends.triton.hopper.tiles import known_tiles
from saccade.backends.triton.support import explain
from saccade.mask import causal, parse, ranges
from saccade.mask.tiling import FULL
from saccade.plan import Limits, make_plan
from saccade.problem import OPTIONS, Problem, Scores

SCHEDULE = import_module("saccade.backends.triton.hopper.schedule")
LIMITS = Limits("triton", 128, 128, quantum=128)
# the diagonal and random others of 13 × 13 blocks of 64
BLOCKS = f"tiles({(np.random.default_rng(0).random((13, 13)) < np.eye(13) + 0.3).astype(int).tolist()}, 64)"
TAKEN = (
    "", "causal()", "window(100, 0)", "window(9, 40)", "global_tokens(4) | window(100, 0)", "prefix(70) | causal()",
    "documents(cu_seqlens=[0, 1, 300, 777]) & causal()", "chunked(64) & causal()", BLOCKS, f"{BLOCKS} & causal()",
    f"{BLOCKS} | window(20, 9)", f"({BLOCKS} | window(20, 9)) & documents(cu_seqlens=[0, 200, 777])",
    "tiles([[1, 0, 0, 1], [1, 1, 0, 0], [0, 0, 1, 0], [0, 0, 0, 1]], 256) | keys(0, 3)",
)  # fmt: skip


def planned(mask: str, T: int = 777, **more):
    scores = Scores(**{"scale": 0.1, **{name: more.pop(name) for name in more.keys() & {"scale", *OPTIONS}}})
    sizes = {"B": 2, "Tq": T, "Tk": T, "Hq": 4, "Hk": 2, "D": 128, "Dv": 128, "dtype": "bfloat16"} | more
    p = Problem(**sizes, scores=scores, mask=parse(mask) if mask else None)
    return p, make_plan(p, LIMITS)


@pytest.mark.parametrize("mask", TAKEN)
def test_taken(mask) -> None:
    assert hopper.why_not(*planned(mask), "sm_90") == []


@pytest.mark.parametrize(
    ("reason", "mask", "more"),
    [
        ("dtype is float32", "causal()", {"dtype": "float32"}),
        ("D = 72", "causal()", {"D": 72}),
        ("Dv = 64", "causal()", {"Dv": 64}),
        ("scale is -0.1", "causal()", {"scale": -0.1}),
        ("no call with a bias", "causal()", {"bias": (1, 1, 777, 777)}),
        ("ALiBi slopes", "causal()", {"alibi": (1, 4)}),
        ("dropout", "causal()", {"dropout": 0.1}),
        ("strides", "strided(3)", {}),
        ("masks of their own", "per_head([causal(), full(), window(1, 1), causal()])", {}),
        ("blocks of 400 × 400", "tiles([[1, 0], [1, 1]], 400)", {}),
        ("multiples of 128 × 64", BLOCKS, {"D": 256, "Dv": 256}),
        ("multiples of 128 × 64", BLOCKS, {"dtype": hopper.EIGHT_BITS}),
        ("no query", "tiles([[1, 0, 0, 0], [1, 0, 1, 0], [0, 1, 0, 0], [1, 0, 0, 0]], 256)", {}),
        ("sees no key", "tiles([[1, 0, 0, 1], [0, 1, 1, 1], [1, 0, 0, 0], [0, 0, 0, 0]], 256)", {}),
        ("sees no key", "tiles([[0, 1, 0, 1], [1, 1, 1, 1], [1, 0, 0, 0], [1, 0, 0, 0]], 256) & causal()", {}),
        ("no query", "keys(700) & causal()", {}),
        ("sees no key", "causal()", {"Tk": 700}),
        ("no query", "documents(cu_seqlens=[0, 300, 700]) & causal()", {}),
    ],
)
def test_declined(reason, mask, more) -> None:
    reasons = hopper.why_not(*planned(mask, **more), "sm_90")
    assert any(reason in one for one in reasons), reasons


def test_intervals_that_go_back_are_declined() -> None:
    t = np.arange(777)
    p, _ = planned("")
    for start, expected in (
        (t // 100, []),
        (300 - t // 100, ["the ends of the mask's row intervals decrease somewhere"]),
    ):
        one = replace(p, mask=ranges(start, np.full(777, 777)))
        assert hopper.why_not(one, make_plan(one, LIMITS), "sm_90") == expected


def test_other_chips_and_several_reasons() -> None:
    reasons = hopper.why_not(*planned("causal()", dtype="float32"), "sm_80")
    assert len(reasons) == 2
    assert "the chip is sm_80" in reasons[0]


def test_longest_first() -> None:
    p, plan = planned("causal() & window(300, 0)")
    part = plan.parts[0]
    ranges = part.tiled(128, 128, 128)
    order = longest_first(ranges.keys().reshape(1, 7))[0]
    keys = [sum(e - b for b, e, _ in ranges.seg[ranges.ptr[n] : ranges.ptr[n + 1]]) for n in order]
    assert sorted(order.tolist()) == list(range(7))
    assert keys == sorted(keys, reverse=True)
    assert hopper.forward_schedule(p, plan, torch.device("cpu")).long == 0


def test_long_tiles() -> None:
    """Tiles of rows that see all keys, and of keys that all rows see, start first."""
    p, plan = planned("window(9, 9) | global_tokens([3, 5000])", 8000)
    forward, backward = (of(p, plan, torch.device("cpu")) for of in (hopper.forward_schedule, hopper.backward_schedule))
    assert (forward.long, sorted(forward.lists.order[:2].tolist())) == (2, [0, 5000 // 128])
    order = backward.order
    assert sorted(order[order >= SCHEDULE.LONG_BIT] - SCHEDULE.LONG_BIT) == [0, 5000 // 128]


@pytest.mark.parametrize("long", [SCHEDULE.LONG, 1.2])
@pytest.mark.parametrize("tile", [(64, 128), (64, 64), (128, 32)])
@pytest.mark.parametrize("mask", [*TAKEN, "documents(cu_seqlens=[[0, 300, 777], [0, 20, 777]])"])
def test_backward_schedule(mask, tile, long, monkeypatch) -> None:
    """Every allowed pair is visited once, FULL tiles are allowed whole, and ranks count the visitors of a row tile."""
    monkeypatch.setattr(SCHEDULE, "LONG", long)
    BM, BN = tile
    p, plan = planned(mask)
    part = plan.parts[0]
    schedule = schedule_of_ranges(part.transposed(BN, BM), part.Bm, p.Tq, BM)
    M, N = -(-p.Tq // BM), -(-p.Tk // BN)
    order = np.tile(np.arange(N), part.Bm) if schedule.order is None else schedule.order % SCHEDULE.LONG_BIT
    long = np.zeros(part.Bm * N, bool) if schedule.order is None else schedule.order >= SCHEDULE.LONG_BIT
    kinds = 1 if schedule.order is None else 2
    dense = np.ones((1, 1, p.Tq, p.Tk), bool) if p.mask is None else p.mask.evaluate(p.B, p.Hq, p.Tq, p.Tk)
    for b in range(part.Bm):
        allowed = dense[min(b, len(dense) - 1), 0]
        visits = np.zeros((M, N), int)
        places = np.zeros((M, N), int)
        for place in range(N):
            n = order[b * N + place]
            for begin, end, kind in schedule.seg[schedule.ptr[b * N + place] : schedule.ptr[b * N + place + 1]]:
                visits[begin:end, n] += 1
                places[begin:end, place] += 1
                rows = allowed[begin * BM : end * BM, n * BN : (n + 1) * BN]
                assert kind != FULL or rows.all()
        some = np.add.reduceat(np.add.reduceat(allowed, range(0, p.Tq, BM), 0), range(0, p.Tk, BN), 1) > 0
        assert visits.max() <= 1
        assert not (some & (visits == 0)).any()
        for kind, m in np.ndindex(kinds, M):
            at = (b * kinds + kind) * M + m
            runs = schedule.ranks[schedule.rank_ptr[at] : schedule.rank_ptr[at + 1]]
            mine = np.flatnonzero(places[m] * (long[b * N : b * N + N] == kind))
            ranks = [n + offset for n in mine for start, offset in [[r for r in runs if r[0] <= n][-1]]]
            assert ranks == list(range(len(ranks)))


@pytest.mark.parametrize("long", [SCHEDULE.LONG, 1.2])
# blocks of 64 are too small for the tiles of D = 256
@pytest.mark.parametrize(("mask", "D"), [(x, D) for x in TAKEN for D in (64, 128, 256) if D < 256 or BLOCKS not in x])
def test_the_bands_of_a_tile(mask, D, long, monkeypatch) -> None:
    """Testing only the bands of a tile's set gives the mask, in the forward and in the backward."""
    monkeypatch.setattr(SCHEDULE, "LONG", long)
    p, plan = planned(mask, D=D, Dv=D)
    assert hopper.why_not(p, plan, "sm_90") == []
    at = hopper.forward_schedule(p, plan, torch.device("cpu"))
    low, BM, BN = plan.parts[0].masks[0], at.tiles.BM, at.tiles.BN
    t, j = np.arange(p.Tq)[:, None], np.arange(p.Tk)[None]
    seen = np.broadcast_to(low.test(t, j), (p.Tq, p.Tk))
    bands = np.array([(j >= lo.T) & (j < hi.T) for n in range(low.nb) for lo, hi in [low.keys_of(n, t[:, 0])]])

    def tested(rows: slice, keys: slice, kind: int, half: int = 0) -> np.ndarray:
        chosen = bands[:, rows, keys]
        if kind & 3 == FULL:
            return np.ones_like(chosen[0])
        if low.nb > 1 or (low.grids and half):
            chosen = chosen[[n for n in range(low.nb) if kind >> 2 + 4 * (half // 2) >> n & 1]]
        return chosen.any(0)

    covered = np.zeros_like(seen)
    for n in range(at.n_tiles):
        rows = slice(n * BM, n * BM + BM)
        for begin, end, kind in at.lists.seg[at.lists.ptr[n] : at.lists.ptr[n + 1]].tolist():
            for first in range(begin, end, BN):
                keys = slice(first, first + BN)
                covered[rows, keys] = tested(rows, keys, kind)
    assert (covered == seen).all()
    schedule, tile = hopper.backward_schedule(p, plan, torch.device("cpu")), tile_of(D, bool(low.grids))
    N = -(-p.Tk // tile.BN)
    assert (schedule.key_lo is None) == (not low.rows)
    for rows in low.rows:
        inside = (t >= schedule.key_lo.numpy()) & (t < schedule.key_hi.numpy())
        assert (inside == (j >= rows.lo.T) & (j < rows.hi.T)).all()
    covered = np.zeros_like(seen)
    for place in range(N):
        n = place if schedule.order is None else int(schedule.order[place]) % SCHEDULE.LONG_BIT
        for begin, end, kind in schedule.seg[schedule.ptr[place] : schedule.ptr[place + 1]].tolist():
            rows = slice(begin * tile.BM, end * tile.BM)
            for half in range(tile.BN // 64):
                keys = slice(n * tile.BN + 64 * half, n * tile.BN + 64 * half + 64)
                covered[rows, keys] = tested(rows, keys, kind, 1 + 2 * half)
    assert (covered == seen).all()


@pytest.mark.parametrize("D", TILES)
def test_rows_of_a_backward_tile_are_in_one_block(D) -> None:
    """Blocks are multiples of the forward's smallest tiles, and of the backward's in masks of blocks."""
    smallest = known_tiles(torch.bfloat16, D)[-1]
    assert smallest.BM % IN_BLOCKS[D].BM == 0
    assert smallest.BN % 64 == 0
    assert tile_of(D, True) == IN_BLOCKS[D]
    assert tile_of(D, False) == TILES[D]


@pytest.mark.parametrize(
    ("B", "H", "key_tiles", "ordered", "by_keys", "expected"),
    [
        (1, 16, 128, True, True, 16),
        (1, 16, 128, True, False, 8),
        (1, 16, 128, False, True, 4),
        (4, 16, 32, True, False, 16),
        (4, 16, 32, False, True, 16),
        (1, 2, 8, True, True, 2),
    ],
)
def test_sections_of_the_backward(B, H, key_tiles, ordered, by_keys, expected) -> None:
    """Long sequences share the cache with few heads; short ones start many, and never more than there are."""
    p = Problem(B, 128 * key_tiles, 128 * key_tiles, H, H, 64, 64, mask=causal(), deterministic=ordered)
    assert section_of(p, key_tiles, by_keys) == expected


def test_dtypes_of_one_plan_have_their_own_tiles() -> None:
    """Plans are cached by shape and mask: 8-bit floats must not reuse the lists of bfloat16."""
    problems = [planned("causal()", D=64, Dv=64, dtype=x) for x in hopper.DTYPES]
    lists = [hopper.forward_schedule(*x, torch.device("cpu")) for x in problems]
    assert [x.tiles.BM for x in lists] == [192, 192, 128]
    assert [x.n_tiles for x in lists] == [-(-777 // x.tiles.BM) for x in lists]


@pytest.mark.parametrize(
    ("mask", "dtype", "said"),
    [
        ("causal()", "bfloat16", "192 queries × 128 keys, 3 warpgroups that compute and"),
        ("causal()", hopper.EIGHT_BITS, "128 queries × 128 keys, 2 warpgroups that compute and"),
        (BLOCKS, "bfloat16", "64 queries × 64 keys, 1 warpgroup that computes and"),
    ],
)
def test_explain_prints_what_runs(mask, dtype, said) -> None:
    p, plan = planned(mask, D=64, Dv=64, dtype=dtype, device="cuda:sm_90")
    visited, kernels = explain(p, plan)
    assert kernels["forward"].startswith(said)
    assert said.startswith(f"{visited.tile_q} queries × {visited.tile_k} keys")
