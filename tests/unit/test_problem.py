"""describe: what a call becomes, and the table of calls that are checked once."""

from __future__ import annotations

import gc
import math
import pickle
import re
import weakref
from pathlib import Path

import numpy as np
import pytest

import saccade
from saccade import mask as masks
from saccade.backends import cpu
from saccade.errors import Unsupported
from saccade.frameworks import call, source
from saccade.operands import Options, Request, Side, Spec
from saccade.problem import FEW_PAIRS, Problem, Scores, describe


def spec(*shape: int, dtype: str = "float32", device: str = "cpu") -> Spec:
    return Spec(shape, dtype, device)


def problem(mask: masks.Mask | None = None, **options: object) -> Problem:
    side = Side(**{name: options.pop(name) for name in Side._fields if name in options})
    request = Request(mask, side, Options(**options))  # type: ignore[arg-type]
    return describe(spec(2, 5, 6, 8), spec(2, 7, 3, 8), spec(2, 7, 3, 4), request)


def test_sizes_and_defaults() -> None:
    p = problem()
    assert (p.B, p.Tq, p.Tk, p.Hq, p.Hk, p.D, p.Dv, p.G) == (2, 5, 7, 6, 3, 8, 4, 2)
    assert p.scores.scale == 1 / math.sqrt(8)
    assert p.scores == Scores(scale=p.scores.scale)
    assert p.mask is None
    assert not p.uses
    assert (p.dtype, p.accumulator, p.source, p.device) == ("float32", "float32", "strided", "cpu")


def test_scale_zero_is_a_scale() -> None:
    assert problem(scale=0).scores.scale == 0.0


@pytest.mark.parametrize("shape", [(2, 6, 5, 7), (1, 1, 1, 7), (5, 7), (7,), (1, 5, 1), ()])
def test_bias_is_lifted_to_four_dimensions(shape: tuple[int, ...]) -> None:
    assert problem(bias=spec(*shape)).scores.bias == (1,) * (4 - len(shape)) + shape


@pytest.mark.parametrize("shape, lifted", [((6,), (1, 6)), ((1, 6), (1, 6)), ((2, 6), (2, 6))])
def test_slopes_are_lifted(shape: tuple[int, ...], lifted: tuple[int, ...]) -> None:
    assert problem(slopes=spec(*shape)).scores.alibi == lifted


def test_only_float64_accumulates_wider() -> None:
    for dtype in ("float32", "bfloat16", "float16", "float64"):
        x = spec(1, 1, 1, 1, dtype=dtype)
        assert describe(x, x, x).accumulator == ("float64" if dtype == "float64" else "float32")


def test_a_problem_is_a_key() -> None:
    a, b = problem(mask=masks.causal(), softcap=3.0), problem(mask=masks.causal(), softcap=3.0)
    assert a == b
    assert hash(a) == hash(b)
    assert a != problem(mask=masks.causal())
    with pytest.raises(AttributeError):
        a.B = 3  # type: ignore[misc]


@pytest.mark.parametrize("q", [(0, 5, 6, 8), (2, 0, 6, 8)])
def test_empty_sizes_are_problems(q: tuple[int, ...]) -> None:
    assert describe(spec(*q), spec(q[0], 0, 3, 8), spec(q[0], 0, 3, 4)).Tk == 0


def test_the_same_kind_of_call_is_planned_once(monkeypatch: pytest.MonkeyPatch) -> None:
    x = np.ones((1, 11, 2, 8), np.float32)
    planned: list[Problem] = []
    plan = cpu.plan
    monkeypatch.setattr(cpu, "plan", lambda p: planned.append(p) or plan(p))
    ids = np.arange(11)
    kept = masks.documents(ids)
    for _ in range(3):
        saccade.attention(x, x, x, masks.causal() & masks.window(5, 0), scale=0.123)
        saccade.attention(x, x, x, kept)
    assert len(planned) == 2
    saccade.attention(x, x, x, masks.causal() & masks.window(6, 0), scale=0.123)
    assert len(planned) == 3


def test_the_table_keeps_no_array_alive() -> None:
    x = np.ones((1, 9, 1, 8), np.float32)
    mask = masks.dense(np.ones((9, 9), bool)) & masks.causal()
    saccade.attention(x, x, x, mask)
    alive = weakref.ref(mask)
    gc.disable()
    try:
        del mask
        assert alive() is None
    finally:
        gc.enable()


def test_the_table_stays_small() -> None:
    x = np.ones((1, 3, 1, 4), np.float32)
    for n in range(call.MOST_CALLS + 20):
        saccade.attention(x, x, x, masks.window(n))
    assert len(call._calls) <= call.MOST_CALLS


@pytest.mark.parametrize(
    "lengths, expected",
    [([5, 5], (5, None)), ([5, 3], (5, masks.keys(np.array([5, 3], np.int32)))), ([0, 0], (0, None))],
)
def test_keys_in_use(lengths: list[int], expected: tuple[int, object]) -> None:
    assert source.in_use(np.array(lengths, np.int32), 2, 8, None) == expected


def test_a_mask_of_the_capacity_keeps_the_capacity() -> None:
    ids = masks.documents(np.arange(8))
    longest, mask = source.in_use(np.array([5, 5], np.int32), 2, 8, ids)
    assert longest == 8
    assert mask == ids & masks.keys(np.array([5, 5], np.int32))


def test_unsupported_lists_every_reason_and_pickles() -> None:
    error = Unsupported("triton", ["first: do this", "second: do that"])
    again = pickle.loads(pickle.dumps(error))
    assert (again.backend, again.reasons) == ("triton", ["first: do this", "second: do that"])
    assert str(again) == "the triton backend cannot compute this:\n  - first: do this\n  - second: do that"
    assert str(Unsupported("torch", ["a: b"])) == "torch: this call is refused:\n  - a: b"


def test_the_core_refines_rows_of_as_few_pairs_as_the_others() -> None:
    text = (Path(saccade.__file__).parent / "backends" / "cpu" / "core" / "types.hpp").read_text(encoding="utf-8")
    (rows, keys) = re.findall(r"Tq \* Tk <= (\d+) \* (\d+);", text)[0]
    assert int(rows) * int(keys) == FEW_PAIRS


def test_decode_keeps_few_masks_with_arrays_alive() -> None:
    """Masks that are combined with the lengths of a cache hold their arrays: at most four are kept."""
    x, alive = np.ones((2, 1, 1, 8), np.float32), []
    cache = saccade.KVCache(2, 9, 1, 8)
    cache.append(x, x, np.array([1, 0]))
    for n in range(12):
        mask = masks.documents(np.zeros(1, np.int64), np.full(9, n))
        alive.append(weakref.ref(mask))
        saccade.decode(x, cache, mask=mask)
    del mask
    gc.collect()
    assert sum(one() is not None for one in alive) <= 4


def test_decode_reads_the_boolean_mask_that_it_is_given() -> None:
    """Of sequences with as many cached keys as before, and a mask that differs in single bits."""
    x, v = np.ones((2, 1, 1, 8), np.float32), np.arange(64, dtype=np.float32).reshape(1, 8, 1, 8).repeat(2, 0)
    cache = saccade.KVCache(2, 8, 1, 8)
    cache.append(x.repeat(8, 1), v, np.array([8, 7]))
    for n in range(7):
        o = saccade.decode(x, cache, mask=masks.dense(np.arange(8)[None] == n))
        assert np.array_equal(o[:, 0, 0], v[:, n, 0])
