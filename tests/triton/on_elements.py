"""The portable kernels' element test compared with the mask's own predicate, pair by pair.

Run in Triton's interpreter by tests/system, and on a GPU by `make test-gpu`.
"""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
import triton.language as tl

import triton
from saccade import mask as sm
from saccade.backends import triton as backend
from saccade.backends.plan_encoding import division
from saccade.backends.triton import encoding
from saccade.backends.triton.chip import interpreted
from saccade.backends.triton.kernels.masks import GENERAL, UNION, allowed, class_of, list_of, place_of
from saccade.backends.triton.tiles import of_plan
from saccade.mask.size import TooManyBands
from saccade.plan import make_plan
from saccade.problem import Problem
from saccade.testing.masks import LEAVES, Draw, expression

DEVICE = "cpu" if interpreted() else "cuda:0"
SIZE = 64


@triton.jit
def seen_pairs(words, out, beyond, h, BM: tl.constexpr, BN: tl.constexpr, MASK: tl.constexpr, TALL: tl.constexpr):
    """Set out [B, Tq, Tk] to 1 where head h's mask lets a row see a key, and beyond [1] if it does so elsewhere."""
    place = place_of(words)
    cls, b = tl.program_id(2) % place.n_classes, tl.program_id(2) // place.n_classes
    q_start, k_start, nq, nk = class_of(place, cls)
    a, c = tl.program_id(0) * BM + tl.arange(0, BM), tl.program_id(1) * BN + tl.arange(0, BN)
    t, j = q_start + place.step * a, k_start + place.step * c
    _, _, record = list_of(place, cls, b, h, 0)
    if TALL:
        t, j, inside = t[:, None], j[None, :], (a < nq)[:, None] & (c < nk)[None, :]
    else:
        t, j, inside = t[None, :], j[:, None], (a < nq)[None, :] & (c < nk)[:, None]
    seen = allowed(place, record, b, t, j, MASK)
    tl.store(out + (b * place.Tq + t) * place.Tk + j, 1, mask=seen & inside)
    there = (t < place.Tq) & (j < place.Tk)
    tl.store(beyond + 0 * (t + j), 1, mask=seen & ~there)


def check(mask, B: int, Tq: int, Tk: int, Hq: int = 1) -> set[int]:
    """Raises AssertionError unless every pair agrees; returns the kinds of element test that were used."""
    expected = np.broadcast_to(mask.evaluate(B, Hq, Tq, Tk), (B, Hq, Tq, Tk))
    problem = Problem(B, Tq, Tk, Hq, 1, 16, 16, mask=mask, device=DEVICE)
    plan = make_plan(problem, backend.limits(problem))
    kinds: set[int] = set()
    for tall in (True, False):
        out = torch.zeros((Hq, B, Tq, Tk), dtype=torch.int8, device=DEVICE)
        beyond = torch.zeros(1, dtype=torch.int8, device=DEVICE)
        for part in plan.parts:
            at = encoding.of_part(part, plan, torch.device(DEVICE))
            kinds.add(at.mask)
            grid = -(-int(part.nq.max()) // SIZE), -(-int(part.nk.max()) // SIZE), at.n_classes * B
            for h in range(Hq) if min(grid) else ():
                seen_pairs[grid](at.words, out[h], beyond, h, BM=SIZE, BN=SIZE, MASK=at.mask, TALL=tall)
        assert not beyond.item(), "a row or a key beyond the last"
        np.testing.assert_array_equal(out.cpu().numpy().transpose(1, 0, 2, 3) != 0, expected)
    return kinds


def blocks(r: random.Random, Tq: int, Tk: int, B: int):
    bq, bk = r.choice([8, 9, 16, 24]), r.choice([8, 11, 16, 32])
    layout = np.random.default_rng(r.randrange(1 << 20)).random((B, -(-Tq // bq), -(-Tk // bk))) < 0.5
    return sm.tiles(layout, (bq, bk))


def test_any_expression(seed) -> None:
    r = random.Random(seed)
    kinds: set[int] = set()
    for _ in range(24):
        B, Tq, Tk = r.randint(1, 2), r.randint(1, 40), r.randint(1, 70)
        try:
            kinds |= check(sm.parse(expression(Draw(r, B, Tq, Tk, tuple(LEAVES), small=True), 3)), B, Tq, Tk)
        except TooManyBands:
            continue
    assert len(kinds) > 2


@pytest.mark.parametrize("name", ["alone", "causal", "window", "documents", "columns", "heads"])
def test_blocks(name, seed) -> None:
    r = random.Random(seed)
    for _ in range(2):
        B, Tq, Tk = r.randint(1, 2), r.randint(1, 70), r.randint(1, 250)
        columns = sm.columns(stop=[3 * j % 7 * 9 for j in range(Tk)])
        mask = blocks(r, Tq, Tk, B)
        mask = {
            "alone": lambda m: m,
            "causal": lambda m: m & sm.causal(),
            "window": lambda m: m | sm.window(5, 3) | sm.global_tokens(2),
            "documents": lambda m: m & sm.chunked(20) | sm.window(2, 2),
            "columns": lambda m, columns=columns: m & columns & sm.causal(),
            "heads": lambda m: sm.per_head([m, sm.causal(), sm.window(3, 3) | sm.global_tokens(1), sm.keys(0)]),
        }[name](mask)
        kinds = check(mask, B, Tq, Tk, 4 if name == "heads" else 1)
        assert all(kind >= UNION for kind in kinds)


def test_small_blocks_and_what_is_outside() -> None:
    narrow = sm.tiles(np.eye(20, 50, dtype=bool), (2, 3))
    for mask in (narrow, ~blocks(random.Random(0), 40, 150, 1), sm.causal() & ~sm.chunked(9)):
        assert check(mask, 1, 40, 150) == {GENERAL.value}


@pytest.mark.parametrize("n", [1, 2, 3, 7, 64, 96, 1000, 1 << 20, (1 << 29) + 1])
def test_division_by_a_factor(n) -> None:
    factor, shift = division(n)
    for x in (0, 1, n - 1, n, n + 1, 5 * n - 1, 5 * n, (1 << 30) - 1):
        assert x >= 1 << 30 or (x * (factor + (1 << 32))) >> (31 + shift) == x // n
    assert -(1 << 31) <= factor < 0


@pytest.mark.parametrize(("block", "expected"), [(16, 128), (64, 64), (96, 64), (128, 128)])
def test_tiles_that_fit_blocks(block, expected) -> None:
    mask = sm.tiles(np.eye(-(-500 // block), dtype=bool), block)
    p = Problem(1, 500, 500, 1, 1, 128, 128, mask=mask, dtype="bfloat16", device=DEVICE)
    plan = make_plan(p, backend.limits(p))
    forward, dq = (of_plan(name, "sm_90", p, plan) for name in ("forward", "dq"))
    dkdv = of_plan("dkdv", "sm_90", p, plan, plan.parts[0])
    assert [plan.tile_q, forward.BM, dq.BM, dkdv.BN] == 4 * [expected]
    # warps divide products along the rows
    assert [16 * x.num_warps for x in (forward, dq)] == 2 * [expected]
