"""Infinities in inputs of the CPU backend: results are infinite, NaN or finite where the oracle's are."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import saccade
from saccade import mask as masks
from saccade import reference

MASKS = {"full": None, "causal": masks.causal(), "window": masks.window(6, 0)}


def kinds(x: Any) -> np.ndarray[Any, Any]:
    """0 for a finite number, 1 for inf, 2 for -inf, 3 for NaN."""
    return np.select([np.isnan(x), x == np.inf, x == -np.inf], [3, 1, 2])


# few rows, few tokens, a split decode, several heads of a group, and whole tiles
@pytest.mark.parametrize("Tq, Tk, Hq", [(1, 1, 1), (4, 4, 1), (40, 40, 1), (1, 4000, 1), (1, 4000, 8), (200, 200, 2)])
@pytest.mark.parametrize("where", ["q", "k", "v"])
@pytest.mark.parametrize("name", MASKS)
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("D", [16, 24])
def test_infinities(
    rng: np.random.Generator, D: int, dtype: type, name: str, where: str, Tq: int, Tk: int, Hq: int
) -> None:
    x = {"q": rng.standard_normal((1, Tq, Hq, D)).astype(dtype)}
    x |= {name: rng.standard_normal((1, Tk, 1, D)).astype(dtype) for name in ("k", "v")}
    row = x[where].shape[1] // 2
    for at, sign in ((0, 1), (row, 1), (row - 1, -1)):
        x[where][0, at, 0, 3] = sign * np.inf
    with np.errstate(all="ignore"):
        found = saccade.attention(*x.values(), MASKS[name], return_lse=True, backend="cpu")
        wanted = reference.forward(*x.values(), MASKS[name])
    for of, a, b in zip(("o", "lse"), found, wanted, strict=True):
        np.testing.assert_array_equal(kinds(a), kinds(b), err_msg=of)
