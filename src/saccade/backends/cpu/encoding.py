"""A plan as one array of int32 words, for calls that bring their plan along: core/ffi.hpp reads it."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from ...mask.forms import Lowered
from ...plan import Part, Plan
from . import _core


def encode(plan: Plan) -> NDArray[np.int32]:
    """The words of a plan, which determine every tile that the kernels visit and every pair that they test."""
    words = [_words(_core.WORDS_VERSION, len(plan.parts)), *(x for part in plan.parts for x in _of_part(part))]
    return np.concatenate(words)


def _words(*numbers: int) -> NDArray[np.int32]:
    return np.array(numbers, np.int32)


def _of_part(p: Part) -> list[NDArray[np.int32]]:
    # entries of classes occur only with deterministic="batch", which the calls that bring their plan along refuse
    assert p.entry is None
    stages = np.empty((0, 3), np.int32) if p.stages is None else p.stages
    sizes = _words(p.step, len(p.nq), p.n_tiles, len(p.masks), p.Bm, len(stages), len(p.head))
    arrays = p.q_start, p.k_start, p.nq, p.nk, p.head, p.ranges.ptr, p.ranges.seg, stages
    return [sizes, *(x.reshape(-1) for x in arrays), *(x for mask in p.masks for x in _of_mask(mask))]


def _of_mask(m: Lowered) -> list[NDArray[np.int32]]:
    words = [_words(len(m.bands), m.nb, len(m.rows), len(m.grids)), m.bands.reshape(-1), m.uses.reshape(-1)]
    for rows in m.rows:
        words += [_words(*rows.lo.shape, rows.axis == "k"), rows.lo.reshape(-1), rows.hi.reshape(-1)]
    for grid in m.grids:
        bits = np.zeros(-(-grid.bits.size // 4) * 4, np.uint8)
        bits[: grid.bits.size] = grid.bits.reshape(-1)
        words += [_words(*grid.bits.shape, grid.block_q, grid.block_k), bits.view(np.int32)]
    return words
