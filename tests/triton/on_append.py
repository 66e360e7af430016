"""The kernel that appends tokens to rows, compared with the formula of arrays.

Run in Triton's interpreter by tests/system, and on a GPU by `make test-gpu`.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch

from saccade.backends.triton import append_rows
from saccade.backends.triton.chip import interpreted

DEVICE = "cpu" if interpreted() else "cuda:0"


@pytest.mark.parametrize("sizes", [(64, 64), (24, 80), (1, 1), (7, 1), (576, 0)], ids=str)
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_rows_from_each_length_on(dtype: str, sizes: tuple[int, int], rng: np.random.Generator) -> None:
    """Tokens of one call go to all rows; those that have no slot are written nowhere. 0: values are a part of keys."""
    kind, starts = getattr(torch, dtype), torch.tensor([2, -1, 5], dtype=torch.int32, device=DEVICE)
    given = [torch.from_numpy(rng.standard_normal((3, 2, 4, D))).to(DEVICE, kind)[:, :, ::2] for D in sizes if D]
    held = [torch.full((3, 6, 2, D), torch.nan, dtype=kind, device=DEVICE) for D in sizes if D]
    want = [x.clone() for x in held]
    for x, array in zip(given, want, strict=True):
        array[0, 2:4], array[1, 0], array[2, 5] = x[0], x[1, 1], x[2, 0]
    k, v = (*given, None)[:2]
    assert append_rows(k, v, held, starts)
    for x, array in zip(held, want, strict=True):
        assert torch.equal(x.nan_to_num(99.0), array.nan_to_num(99.0))
    # numbers that lie apart are left to the formula
    apart = [x.transpose(-1, -2).contiguous().transpose(-1, -2) for x in held]
    assert append_rows(k, v, apart, starts) is (sizes == (1, 1))
