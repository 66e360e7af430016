"""New tokens written to the arrays of a cache by a backend: slots, rotation and codes."""

from __future__ import annotations

from unittest import mock

import numpy as np
import pytest

from saccade.backends import load
from saccade.caches import storage
from saccade.quantised import decode, encode, quantised
from saccade.rope import rope, turning
from saccade.testing.compare import coded

WAYS = {
    "numbers": (None, None), "int8": ("int8", None), "int8-groups": ("int8", 16), "fp8": ("fp8", None),
    "fp8-groups": ("fp8", 8), "int4": ("int4", None), "int4-groups": ("int4", 8),
}  # fmt: skip


def written(backend: str, x, held, scale, first, second, turn, how):
    """held and scale once rows of x are written to them; None where the backend leaves it to the formula."""
    given = [x, held, scale, first, second, *((None, None) if turn is None else turn[:2])]
    interleaved = turn is not None and turn.interleaved
    if backend != "triton":
        append = getattr(load(backend), "append", None)
        if append is not None:
            assert append(*given, interleaved, how)
        else:
            # no kernel: the formula
            with mock.patch.object(storage, "append_of", return_value=None):
                storage.NumpyArrays.write([(x, held, scale, turn)], first, second, how)
        return held, scale
    from saccade.testing.tensors import get, put

    given = [None if a is None else put(a) for a in given]
    if scale is not None:
        import torch

        given[2] = given[2].view(torch.bfloat16)
    if not load(backend).append(*given, interleaved, how):
        return None
    return get(given[1]), scale if scale is None else get(given[2]).view(np.uint16)


def test_rows_whose_numbers_lie_apart() -> None:
    """Kernels write to numbers side by side; a cache with other strides takes the formula."""
    x = np.arange(24, dtype=np.float32).reshape(3, 2, 4)
    first, second = np.array([3, 0, 1]), np.array([4, -1, 0])
    for held in (np.zeros((4, 5, 4, 2), np.float32).swapaxes(2, 3), np.zeros((4, 5, 2, 8), np.float32)[..., ::2]):
        storage.NumpyArrays.write([(x, held, None, None)], first, second, None)
        assert np.array_equal(held[3, 4], x[0])
        assert np.array_equal(held[1, 0], x[2])
        assert np.count_nonzero(held) == np.count_nonzero(x[[0, 2]])


@pytest.mark.parametrize("D", [2, 16, 64, 80])
@pytest.mark.parametrize("way", WAYS)
def test_rows(backend, way, D, rng) -> None:
    """Rows of magnitudes far apart, one of zeros, one with a NaN; one that has no place."""
    kind, group = WAYS[way]
    how = None if kind is None else quantised(kind, group, D)
    x = (rng.standard_normal((5, 3, D)) * np.exp(rng.uniform(-20, 20, (5, 3, 1)))).astype(np.float32)
    x[0, 0], x[1, 2, D // 2], x[2, 1] = 0, np.nan, 1e-40
    first, second = np.array([1, 0, 1, 0, 1]), np.array([2, 0, -1, 3, 1])
    for turn in (None, *(turning(x, np.arange(5) * 9, interleaved=i) for i in (False, True))):
        if turn is not None:
            turn = turn._replace(cos=turn.cos.reshape(5, -1), sin=turn.sin.reshape(5, -1))
        width, scales = (D, 1) if how is None else (how.width(D), how.scales(D))
        held = np.zeros((2, 4, 3, width), np.float32 if how is None else np.int8 if kind == "int8" else np.uint8)
        scale = None if how is None else np.zeros((2, 4, 3, scales), np.uint16)
        if backend == "triton" and D == 80 and how and how.group < D:
            # groups that are no powers of two of a row are left to the formula
            assert written(backend, x, held, scale, first, second, turn, how) is None
            continue
        got, factors = written(backend, x, held.copy(), scale, first, second, turn, how)
        want = x if turn is None else rope(x, np.arange(5) * 9, interleaved=turn.interleaved)
        kept = np.flatnonzero(second >= 0)
        at = first[kept], second[kept]
        untouched = np.ones((2, 4), bool)
        untouched[at] = False
        assert not got[untouched].any()
        if how is None:
            np.testing.assert_allclose(got[at], want[kept], rtol=3e-7, atol=3e-7 * np.nanmax(np.abs(want)))
        elif turn is None:
            codes, bits = encode(want[kept], how)
            # any NaN will do
            np.testing.assert_array_equal(*((x.astype(np.uint32) << 16).view(np.float32) for x in (factors[at], bits)))
            np.testing.assert_array_equal(got[at], codes)
        else:
            number, apart = decode(got[at], factors[at], how), np.abs(decode(got[at], factors[at], how) - want[kept])
            np.testing.assert_array_equal(np.isnan(number), np.isnan(decode(*encode(want[kept], how), how)))
            assert (np.nan_to_num(apart) <= np.nan_to_num(coded(want[kept], how))).all()
