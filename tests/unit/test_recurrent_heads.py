"""The CPU core computes neighbouring heads in turn: each has the bits that it has alone, for any number of threads."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

import saccade
from saccade import recurrent

T, H, K, V = 70, 7, 16, 24


@pytest.fixture(params=[1, 2, 3])
def threads(request: pytest.FixtureRequest) -> Iterator[None]:
    before = saccade.get_num_threads()
    saccade.set_num_threads(request.param)
    yield
    saccade.set_num_threads(before)


@pytest.mark.parametrize("packed", [False, True], ids=["plain", "packed"])
@pytest.mark.parametrize(
    "op, names",
    [
        (recurrent.linear_attention, "qkv"),
        (recurrent.scalar_decay, "qkvg"),
        (recurrent.gated_linear, "qkvG"),
        (recurrent.gated_delta_rule, "qkvgb"),
    ],
    ids=lambda x: getattr(x, "__name__", ""),
)
def test_a_head_has_the_bits_that_it_has_alone(threads: None, op, names: str, packed: bool) -> None:
    rng = np.random.default_rng(0)
    shapes = {"q": (K,), "k": (K,), "v": (V,), "g": (), "G": (K,), "b": ()}
    draw = {**dict.fromkeys("qkv", rng.standard_normal), "g": lambda shape: -rng.random(shape), "b": rng.random}
    draw["G"] = draw["g"]
    arrays = [(draw[name]((1, T, H, *shapes[name])) / 4).astype(np.float32) for name in names]
    options = {"cu_seqlens": np.array([0, 40, 41, T], np.int32)} if packed else {}
    o, *states = outputs(op, arrays, options)
    for h in range(H):
        alone, *own = outputs(op, [x[:, :, h : h + 1] for x in arrays], options)
        np.testing.assert_array_equal(o[:, :, h : h + 1], alone)
        for state, last in zip(states, own, strict=True):
            np.testing.assert_array_equal(state[:, h : h + 1], last)


def outputs(op, arrays: list[np.ndarray], options: dict[str, np.ndarray]) -> list[np.ndarray]:
    o, state = op(*arrays, return_state=True, **options)
    return [o, *(state if isinstance(state, tuple) else [state])]
