"""With `deterministic="batch"`, the launch of a row follows from its sequence alone; nothing is compiled."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("triton")

from saccade.backends import triton
from saccade.backends.triton import encoding, hopper, tiles
from saccade.backends.triton.chip import chip_of
from saccade.backends.triton.encoding import NUMBERS
from saccade.mask import Mask, causal, documents, padding, window
from saccade.plan import Plan
from saccade.problem import Problem, Scores

SIZES = [(64, 64), (128, 128), (192, 128), (96, 40), (256, 256)]


def problem(B: int, Tq: int, Tk: int, mask: Mask | None, **more: Any) -> Problem:
    sizes = {"Hq": 8, "Hk": 2, "D": 64, "Dv": 64, "dtype": "bfloat16", "device": "cuda:sm_90", **more}
    return Problem(B, Tq, Tk, **sizes, mask=mask, scores=Scores(scale=0.1), deterministic="batch")


def launch_of(p: Problem, plan: Plan) -> tuple[Any, ...]:
    """Everything but the lists of keys that the bits of a row can depend on: kernels, tiles, splits, products."""
    kernels = tuple(tiles.of_plan(name, chip_of(p.device), p, plan) for name in ("forward", "dq"))
    of_keys = tiles.of_plan("dkdv", chip_of(p.device), p, plan, plan.parts[0])
    kinds = triton.replayable(p, plan), bool(hopper.why_not(p, plan, chip_of(p.device))), p.few_pairs
    return *kernels, of_keys, plan.split_keys, plan.order, len(plan.parts), plan.parts[0].step, *kinds


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("D, Dv", SIZES)
@pytest.mark.parametrize("chip", ["sm_80", "sm_90", "gfx942"])
def test_one_launch_for_every_batch_and_chunk(chip: str, D: int, Dv: int, dtype: str) -> None:
    rng = np.random.default_rng([D, Dv, len(dtype)])
    seen = set()
    for _ in range(40):
        B, Tk = int(rng.integers(1, 65)), int(rng.integers(1, 5000))
        Tq, source = int(rng.integers(1, Tk + 1)) if rng.random() < 0.6 else 1, str(rng.choice(["strided", "paged"]))
        more = {"D": D, "Dv": Dv, "dtype": dtype, "device": f"cuda:{chip}", "source": source}
        p = problem(B, Tq, Tk, causal() if rng.random() < 0.5 else causal() & window(200, 0), **more)
        seen.add(launch_of(p, triton.plan(p)))
    assert len(seen) == 1
    ((*_, split_keys, order, parts, step, replayed, refused, few),) = seen
    assert (split_keys, order, parts, step, replayed, refused, few) == (0, None, 1, 1, False, True, False)


def rows_of(plan: Plan, tile: int) -> dict[int, tuple[int, ...]]:
    """The borders of the key tiles that each row reads, from the first key of its sequence."""
    part, rows = plan.parts[0], {}
    for c in range(len(part.nq)):
        for t in range(part.nq[c]):
            at = c * part.n_tiles + t // plan.tile_q
            segments = part.ranges.seg[part.ranges.ptr[at] : part.ranges.ptr[at + 1]]
            assert (segments[:, 2] == 1).all(), "a FULL segment, whose pairs are not tested"
            starts = [k for begin, end, _ in segments for k in range(begin, end, tile)]
            assert all(k % tile == 0 for k in starts)
            rows[int(part.q_start[c]) + t] = tuple(starts)
    return rows


def test_key_tiles_of_a_row_are_those_of_its_sequence_alone() -> None:
    """They may be more, of which the row sees no key; their borders are the same."""
    mask, cu = causal() & window(150, 0), [0, 300, 301, 1000]
    p = problem(1, 1000, 1000, mask & documents(cu_seqlens=cu))
    tile = triton.plan(p).tile_k
    packed = rows_of(triton.plan(p), tile)
    for start, stop in pairwise(cu):
        T = stop - start
        whole = rows_of(triton.plan(problem(1, T, T, mask)), tile)
        assert whole == {t: packed[start + t] for t in range(T)}
        for first, last in [(0, 1), (T // 3, T), (T - 1, T)]:
            chunk = rows_of(triton.plan(problem(1, last - first, last, mask)), tile)
            for t, starts in chunk.items():
                seen = {k // tile * tile for k in range(max(0, first + t - 150), first + t + 1)}
                assert seen <= set(starts)


def test_key_tiles_read_whole_tiles_of_rows() -> None:
    """From the first row of their sequence, so that padding after it changes no sum."""
    p = problem(1, 700, 700, causal() & window(90, 0) & documents(cu_seqlens=[0, 333, 700]))
    part = triton.plan(p).parts[0]
    tile = tiles.of_plan("dkdv", chip_of(p.device), p, triton.plan(p), part)
    lists = encoding.of_part(part, triton.plan(p), torch.device("cpu"), tile.BN, rows=tile.BM)
    first = int(lists.words[NUMBERS.index("o_seg")])
    begin, end, kind = lists.words[first : first + 3 * lists.n_tiles * lists.n_classes].reshape(-1, 3).T
    assert (kind == 1).all()
    assert (begin % tile.BM == 0).all()
    assert ((end % tile.BM == 0) | (end == 333) | (end == 367)).all()


def test_other_starts_in_each_entry_are_refused() -> None:
    tokens = np.array([[0, 1, 1], [1, 1, 1]])
    assert any("different keys" in why for why in triton.unsupported(problem(2, 3, 3, causal() & padding(tokens))))
    right = causal() & padding(tokens[:, ::-1])
    assert not any("different keys" in why for why in triton.unsupported(problem(2, 3, 3, right)))
