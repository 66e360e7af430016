"""Recurrences: every row of the catalogue against the oracle, in every chunk, and what a state carries."""

from __future__ import annotations

import pytest

from saccade.testing import recurrent as run
from saccade.testing.compare import require
from saccade.testing.recurrent import Sizes

pytest.importorskip("torch")

DTYPES = ("float32", "bfloat16", "float16", "float64")
OPS = [pytest.param(op, id=op.name) for op in run.OPS]
LENGTHS = (1, 7, 64, 65, 200)


@pytest.mark.sample(40)
@pytest.mark.parametrize("chunk", [None, 1, 16, 64])
@pytest.mark.parametrize("T", LENGTHS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("op", OPS)
def test_lengths_and_chunks(backend, op, dtype, T, chunk, seed) -> None:
    require(
        run.verify(op, Sizes(T=T), dtype, backend, seed, backward=False, chunk=chunk),
        f"{op} {dtype} T {T} chunk {chunk}",
    )
