"""Pairs that a table by distance excludes: their keys may contain NaN."""

from __future__ import annotations

import numpy as np

import saccade
from saccade import reference


def test_a_key_that_a_table_excludes_may_be_nan(emulator, rng) -> None:
    emulator()
    q, k, v, do = (rng.standard_normal((1, T, 2, 8), np.float32) for T in (8, 40, 40, 8))
    # distances from 16 on are excluded, so no row sees keys 5 and 6
    table = np.zeros((2, 17), np.float32)
    table[:, 16] = -np.inf
    v[0, 5] = k[0, 6] = np.nan
    bias = saccade.relative(table, 0)
    o, lse = saccade.attention(q, k, v, bias=bias, return_lse=True, backend="metal")
    grads = saccade.attention_backward(do, q, k, v, o, lse, bias=bias, backend="metal")[:3]
    wanted, more = reference.both(do, q, k, v, table=table, origin=0)
    for found, x in zip((o, lse, *grads), (*wanted, *more[:3]), strict=True):
        np.testing.assert_allclose(found, x, atol=1e-5)
