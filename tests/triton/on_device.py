"""Masks lowered on their arrays' device, compared with the expression's predicate, and their lists with every pair.

Run in Triton's interpreter by tests/system, and on a GPU by `make test-gpu`.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch

from saccade.backends import triton as backend
from saccade.backends.triton import hopper, on_device, selected
from saccade.backends.triton.chip import interpreted
from saccade.backends.triton.hopper.schedule import schedule_of_intervals
from saccade.mask import Mask, causal, documents, keys, padding, prefix, select, window
from saccade.mask.tiling import FULL
from saccade.problem import Problem

DEVICE = "cpu" if interpreted() else "cuda:0"
MASKS = {
    "ids": lambda r, T: documents(np.sort(r.integers(0, 5, T[1]))),
    "ids of a batch": lambda r, T: documents(np.sort(r.integers(0, 5, (2, T[1])), 1)) & causal(),
    "two ids": lambda r, T: documents(np.sort(r.integers(0, 4, T[0])), np.sort(r.integers(1, 5, T[1]))),
    "ids in a window": lambda r, T: documents(np.sort(r.integers(0, 3, T[1]))) & window(5, 2),
    "bounds": lambda r, T: documents(cu_seqlens=bounds(r, T[1])) & causal(),
    "bounds of a batch": lambda r, T: documents(cu_seqlens=np.stack([bounds(r, T[1]) for _ in range(2)])),
    "two bounds": lambda r, T: documents(cu_q=bounds(r, T[0]), cu_k=bounds(r, T[1])),
    "each": lambda r, T: documents(cu_q=bounds(r, T[0]), cu_k=bounds(r, T[1]), each=causal() & window(4, 1)),
    "each with offset": lambda r, T: documents(cu_seqlens=bounds(r, T[1]), each=causal(2)),
    "lengths": lambda r, T: keys(r.integers(0, T[1] + 1, 2)) & causal(),
    "ranges": lambda r, T: keys(r.integers(0, 5, 2), r.integers(0, T[1] + 1, 2)) & window(6, None),
    "tokens": lambda r, T: padding(tokens(r, T[1])) & window(9, None),
    "tokens of a batch": lambda r, T: padding(np.stack([tokens(r, T[1]) for _ in range(2)])) & causal(),
    "prefixes": lambda r, T: prefix(r.integers(0, T[1] + 1, 2)) & causal(1),
    "offsets": lambda r, T: causal(r.integers(-4, 5, 2)),
}


def bounds(r, T: int, n: int = 4):
    return np.sort(r.integers(0, T + 1, n))


def tokens(r, T: int):
    begin, end = np.sort(r.integers(0, T, 2))
    return (np.arange(T) >= begin) & (np.arange(T) <= end)


def on_torch(mask: Mask) -> Mask:
    return mask.map_arrays(lambda a: torch.tensor(np.asarray(a), device=DEVICE))


def part_of(mask: Mask, Tq: int, Tk: int, tile: int = 8) -> on_device.Intervals:
    part = on_device.part_of(Problem(2, Tq, Tk, 2, 1, 16, 16, mask=on_torch(mask), device=DEVICE), tile)
    assert part is not None
    return part


@pytest.mark.parametrize("name", MASKS)
def test_intervals(name, rng) -> None:
    for _ in range(40):
        Tq, Tk = (int(n) for n in rng.integers(1, 30, 2))
        Tq = Tk if rng.integers(2) else Tq
        mask = MASKS[name](rng, (Tq, Tk))
        part = part_of(mask, Tq, Tk)
        lo, hi = part.lo.cpu().numpy(), part.hi.cpu().numpy()
        seen = (lo[:, :, None] <= np.arange(Tk)) & (np.arange(Tk) < hi[:, :, None])
        expected = mask.evaluate(2, 1, Tq, Tk)[:, 0]
        np.testing.assert_array_equal(*np.broadcast_arrays(seen, expected), err_msg=f"{mask} {Tq} {Tk}")
        assert (np.diff(lo) >= 0).all()
        assert (np.diff(hi) >= 0).all()
        if part.whole:
            assert expected.any(1).all()
            assert expected.any(2).all()


@pytest.mark.parametrize("from_first", [False, True])
@pytest.mark.parametrize("quantum", [1, 4])
@pytest.mark.parametrize("name", MASKS)
def test_segments(name, quantum, from_first, rng) -> None:
    for _ in range(15):
        Tq, Tk, tile = (int(n) for n in rng.integers(1, 30, 3))
        mask = MASKS[name](rng, (Tq, Tk))
        part = part_of(mask, Tq, Tk)
        allowed = np.broadcast_to(mask.evaluate(2, 1, Tq, Tk)[:, 0], (2, Tq, Tk))
        ptr, seg, extent = (x.cpu().numpy() for x in on_device.segments(part, tile, quantum, from_first=from_first))
        n_tiles = -(-Tq // tile)
        for b in range(2):
            for n in range(n_tiles):
                cell = min(b, part.Bm - 1) * n_tiles + n
                rows = allowed[b, n * tile : (n + 1) * tile]
                covered, before = np.zeros(Tk, np.bool_), 0
                own = seg[ptr[cell] : ptr[cell + 1]]
                start = int(own[0, 0]) if from_first and len(own) else 0
                assert not len(own) or not from_first or (rows[:, start].any() and rows[:, own[-1, 1] - 1].any())
                for begin, end, kind in own:
                    assert before <= begin < end <= Tk
                    assert (begin - start) % quantum == 0
                    covered[begin:end] = True
                    before = end
                    assert kind != FULL or rows[:, begin:end].all()
                assert not rows[:, ~covered].any()
                assert extent[cell // n_tiles, n_tiles - 1 - n] == covered.sum()


def test_backward_schedule_of_hopper(rng) -> None:
    for _ in range(60):
        T, tile_k, tile_q = (int(n) for n in rng.integers(1, 40, 3))
        mask = MASKS["ids of a batch"](rng, (T, T))
        part = part_of(mask, T, T)
        allowed = mask.evaluate(2, 1, T, T)[:, 0]
        ptr, seg, rank_ptr, ranks = (x.cpu().numpy() for x in schedule_of_intervals(part, tile_k, tile_q)[:4])
        N, M = -(-T // tile_k), -(-T // tile_q)
        for b in range(2):
            visits: dict[int, list[int]] = {m: [] for m in range(M)}
            for n in range(N):
                keys_of = allowed[b, :, n * tile_k : (n + 1) * tile_k]
                for low, high, kind in seg[ptr[b * N + n] : ptr[b * N + n + 1]]:
                    for m in range(low, high):
                        visits[m].append(n)
                        assert kind != FULL or keys_of[m * tile_q : (m + 1) * tile_q].all()
                walked = {m for m in range(M) if n in visits[m]}
                assert {int(t) // tile_q for t in np.flatnonzero(keys_of.any(1))} <= walked
            for m, tiles in visits.items():
                ((first, offset),) = ranks[rank_ptr[b * M + m] : rank_ptr[b * M + m + 1]]
                assert [n + offset for n in tiles] == list(range(len(tiles)))
                assert not tiles or tiles[0] == first


@pytest.mark.parametrize(
    "mask",
    [~documents(np.zeros(9, int)), documents(np.zeros(9, int)) | causal(), keys(4) & causal()],
    ids=["not", "or", "numbers alone"],
)
def test_the_host_lowers_other_masks(mask) -> None:
    assert on_device.part_of(Problem(2, 9, 9, 2, 1, 16, 16, mask=on_torch(mask), device=DEVICE), 8) is None


@pytest.mark.parametrize(
    "mask, declined", [(documents(np.zeros(99, int)) & causal(), False), (documents(cu_seqlens=[0, 9, 99]), True)]
)
def test_hopper_takes_masks_that_leave_out_no_key(mask, declined, monkeypatch) -> None:
    monkeypatch.setattr(hopper.versions, "why_not", lambda: "")
    p = Problem(1, 99, 99, 2, 1, 64, 64, dtype="bfloat16", mask=on_torch(mask), device=DEVICE)
    reasons = hopper.why_not(p, backend.plan(p), "sm_90")
    assert bool(reasons) == declined
    assert not declined or "left out" in reasons[0]


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int16, torch.int32, torch.int64])
def test_blocks_out_of_range_are_none(dtype) -> None:
    wrong = [200, torch.iinfo(dtype).min or 255, torch.iinfo(dtype).max, (1 << 32) + 2 if dtype is torch.int64 else 9]
    lists = torch.tensor([3, 0, *wrong, 3, 1], device=DEVICE).to(dtype).reshape(1, 1, 1, -1)
    found = selected.lists_of(Problem(1, 5, 64, 1, 1, 16, 16, mask=select(lists, 8, 5), device=DEVICE), lists.device)
    assert found.counts.item() == 3
    assert found.p[0, 0, 0, :3].tolist() == [0, 1, 3]
