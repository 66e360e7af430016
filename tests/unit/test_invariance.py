"""`deterministic="batch"`: what is refused, where sequences start, and plans that do not depend on the batch."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

import saccade
from saccade import Unsupported, backends
from saccade import mask as masks
from saccade.arrays import numpy_dtype
from saccade.combinations import not_invariant
from saccade.mask import Mask, causal, documents, padding, window
from saccade.mask.sequences import sequences
from saccade.plan import Limits, Plan, make_plan
from saccade.plan_parts import Part
from saccade.problem import Problem, Scores

PLAIN = Problem(1, 256, 256, 4, 4, 64, 64, scores=Scores(scale=0.1), deterministic="batch")
RIGHT, LEFT = np.array([[1, 1, 1, 0], [1, 1, 0, 0]]), np.array([[0, 1, 1, 1], [1, 1, 1, 1]])


@pytest.mark.parametrize("value", ["rows", "True", "", None, 1, 0, b"batch", ["batch"]])
@pytest.mark.parametrize("name", ["attention", "attention_backward", "decode", "paged_attention"])
def test_another_value_is_refused(name: str, value: Any) -> None:
    x = np.zeros((1, 4, 2, 8), np.float32)
    cache = saccade.KVCache(1, 4, 2, 8)
    cache.append(x, x)
    pages = saccade.PagedKVCache(2, 4, 2, 8)
    pages.append([of := pages.add()], x[0], x[0])
    calls: dict[str, Any] = {
        "attention": lambda: saccade.attention(x, x, x, deterministic=value),
        "attention_backward": lambda: saccade.attention_backward(x, x, x, x, x, x[..., 0], deterministic=value),
        "decode": lambda: saccade.decode(x, cache, deterministic=value),
        "paged_attention": lambda: saccade.paged_attention(x[0], pages.view([of]), deterministic=value),
    }
    with pytest.raises((TypeError, ValueError), match='expected True, False or "batch"'):
        calls[name]()


@pytest.mark.parametrize("backend", ["webgpu", "metal"])
def test_other_backends_refuse(backend: str) -> None:
    pytest.importorskip("wgpu" if backend == "webgpu" else "mlx")
    problem = replace(PLAIN, device="webgpu" if backend == "webgpu" else "mlx")
    reasons = backends.lacking(backends.load(backend), problem)
    assert any('deterministic="batch" is not computed here' in reason for reason in reasons)


@pytest.mark.parametrize(
    "more, reason",
    [
        ({"scores": Scores(dropout=0.5)}, "with dropout: its pattern"),
        ({"scores": Scores(gates=True)}, "with gates: they are sums"),
        ({"return_max": True}, "with return_max: results of ranges"),
        ({"return_entropy": True}, "with return_entropy: results of ranges"),
        ({"mask": causal() & masks.strided(4)}, "with strided: the plan"),
        ({"mask": masks.dilated(3, 2)}, "with dilated: the plan"),
        ({"mask": causal() | documents(cu_seqlens=[0, 9, 256])}, r"with documents inside \|"),
        ({"mask": ~documents(np.arange(256) // 9)}, r"with documents inside \|"),
        ({"mask": causal() | padding(np.ones(256, bool))}, r"with padding inside \|"),
    ],
)
def test_what_depends_on_the_batch_is_refused(more: dict[str, Any], reason: str) -> None:
    problem = replace(PLAIN, **more)
    with pytest.raises(Unsupported, match=reason):
        backends.choose(problem)
    assert not_invariant(replace(problem, deterministic=True)) == []


def test_selected_keys_are_refused() -> None:
    problem = replace(PLAIN, mask=masks.select(np.zeros((1, 4, 1, 1), np.int64), 64, 256))
    with pytest.raises(Unsupported, match='selected keys with deterministic="batch"'):
        backends.choose(problem)


@pytest.mark.parametrize(
    "mask, sizes, expected",
    [
        (None, (2, 5, 7), (None, [0], [0], [5], [7])),
        (causal(), (2, 5, 7), (None, [0], [0], [5], [7])),
        (documents(cu_seqlens=[0, 3, 7]), (1, 7, 7), (None, [0, 3], [0, 3], [3, 4], [3, 4])),
        # the last five rows of seven
        (documents(cu_seqlens=[0, 3, 7]) & causal(), (1, 5, 7), (None, [0, 1], [0, 3], [1, 4], [3, 4])),
        (documents(cu_seqlens=[0, 3, 7], each=causal()), (2, 7, 7), (None, [0, 3], [0, 3], [3, 4], [3, 4])),
        (documents(cu_q=[0, 2, 3], cu_k=[0, 4, 9]), (1, 4, 9), (None, [0, 2, 3], [0, 4, 0], [2, 1, 1], [4, 5, 0])),
        (documents([[0, 0, 1], [0, 1, 1]]), (2, 3, 3),
         ([0, 0, 1, 1], [0, 2, 0, 1], [0, 2, 0, 1], [2, 1, 1, 2], [2, 1, 1, 2])),
        # lengths and padding to the right move no start
        (padding(RIGHT), (2, 4, 4), (None, [0], [0], [4], [4])),
        (masks.keys([3, 5]) & causal(), (2, 2, 5), (None, [0], [0], [2], [5])),
        (padding(LEFT), (2, 4, 4), ([0, 0, 1], [0, 1, 0], [1, 1, 0], [1, 3, 4], [3, 3, 4])),
        (causal(), (1, 0, 3), (None, [0], [0], [0], [3])),
    ],
)  # fmt: skip
def test_where_sequences_start(mask: Mask | None, sizes: tuple[int, int, int], expected: tuple[Any, ...]) -> None:
    assert tuple(x if x is None else x.tolist() for x in sequences(mask, *sizes)) == expected


def plan_of(B: int, Tq: int, Tk: int, mask: Mask | None, limits: Limits, Hk: int = 2) -> Plan:
    problem = Problem(B, Tq, Tk, 4, Hk, 64, 64, mask=mask, scores=Scores(scale=0.1), deterministic="batch")
    return make_plan(problem, limits)


@pytest.mark.parametrize("B, Tq, Tk", [(1, 1, 1), (1, 1, 9000), (64, 1, 9000), (3, 8, 500), (1, 700, 700)])
def test_ranges_and_owners_are_fixed(B: int, Tq: int, Tk: int) -> None:
    limits = Limits("test")
    plan = plan_of(B, Tq, Tk, None, limits)
    assert plan.split_keys in (0, limits.split_least)
    assert (plan.split_keys > 0) == (Tq <= limits.few_queries and (Tq == 1 or Tk >= limits.split_from))
    # owners beyond the first tiles would add zeros
    assert plan.owners == min(8, plan.parts[0].n_tiles)


def rows_of(part: Part, tile: int) -> dict[int, tuple[int, list[list[int]]]]:
    """For each row, the first key of its sequence, and the segments of its tile relative to it."""
    rows: dict[int, tuple[int, list[list[int]]]] = {}
    for c, (start, count) in enumerate(zip(part.q_start, part.nq, strict=True)):
        for t in range(count):
            at = c * part.n_tiles + t // tile
            first, last = part.ranges.ptr[at : at + 2]
            rows[int(start) + t] = int(part.k_start[c]), part.ranges.seg[first:last].tolist()
    return rows


def test_a_document_has_the_plan_that_it_has_alone() -> None:
    limits, cu = Limits("test"), [0, 70, 71, 400, 530]
    packed = rows_of(plan_of(1, 530, 530, causal() & window(99, 0) & documents(cu_seqlens=cu), limits).parts[0], 64)
    for start, stop in pairwise(cu):
        alone = rows_of(plan_of(1, stop - start, stop - start, causal() & window(99, 0), limits).parts[0], 64)
        for t, (first, segments) in alone.items():
            assert first == 0
            assert packed[start + t] == (start, segments)


def values_that_are_not_finite(rng: np.random.Generator, dtype: str) -> dict[str, tuple[np.ndarray, ...]]:
    """q, k and v of 300 tokens by what is special about them."""
    cases: dict[str, tuple[np.ndarray, ...]] = {}
    for what in ("NaN value", "infinite value", "NaN key", "infinite key", "NaN query", "overflow", "zero"):
        q, k, v = (rng.standard_normal((1, 300, 4, 24)).astype(numpy_dtype(dtype)) for _ in range(3))
        special: Any = np.nan if what.startswith("NaN") else np.inf
        if what.endswith("value"):
            v[0, [3, 70, 290], :, 5] = special
        elif what.endswith("key"):
            k[0, [70, 280], :, 5] = special
        elif what.endswith("query"):
            q[0, [0, 299], 1, 5] = special
        elif what == "overflow":
            q[:], v[:] = 0, np.asarray(3e38 if dtype != "float64" else 1.7e308).astype(v.dtype)
        else:
            v[:] = -0.0
        cases[what] = q, k, v
    return cases


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float64"])
def test_numbers_that_are_not_finite(dtype: str, rng: np.random.Generator) -> None:
    """Decode gives the rows of the forward, NaN where it has NaN; sums that overflow are computed again in both."""
    for what, (q, k, v) in values_that_are_not_finite(rng, dtype).items():
        call: dict[str, Any] = {"deterministic": "batch", "return_lse": True}
        o, lse = (x.astype(np.float64) for x in saccade.attention(q, k, v, causal() & window(200, 0), **call))
        default = saccade.attention(q, k, v, causal() & window(200, 0))
        np.testing.assert_array_equal(np.isnan(o), np.isnan(default), what)
        assert what != "overflow" or np.isfinite(o).all()
        assert what != "zero" or not np.signbit(o).any()
        for stop in (4, 71, 150, 291, 300):
            for n in (1, 3):
                cache = saccade.KVCache(1, 320, 4, 24, dtype=dtype, fill=np.nan)
                cache.append(k[:, :stop], v[:, :stop])
                got, of_rows = saccade.decode(q[:, stop - n : stop], cache, mask=window(200, 0), **call)
                np.testing.assert_array_equal(got.astype(np.float64), o[:, stop - n : stop], f"{what} {stop} {n}")
                np.testing.assert_array_equal(of_rows, lse[:, stop - n : stop], f"{what} {stop} {n}")


def test_biases_tables_and_masks_of_heads(rng: np.random.Generator) -> None:
    """A chunk and a batch have the rows of the whole call, with any number of threads."""
    T, H = 230, 4
    q, k, v = (rng.standard_normal((2, T, H, 32)).astype(np.float32) for _ in range(3))
    bias = rng.standard_normal((1, H, T, T)).astype(np.float32)
    bias[..., rng.random((T, T)) < 0.1] = -np.inf
    table = rng.standard_normal((H, 50)).astype(np.float32)
    dense = rng.random((T, T)) < 0.5
    by_head = masks.per_head([causal(), causal() & window(40, 0)] * 2)
    cases: dict[str, tuple[Mask, Any, Any]] = {
        "bias": (causal(), bias, lambda rows, stop: bias[:, :, rows, :stop]),
        "table": (causal(), saccade.relative(table, 49), lambda rows, stop: saccade.relative(table, 49)),
        "heads": (by_head, None, lambda rows, stop: None),
    }
    before = saccade.get_num_threads()
    try:
        for name, (mask, whole, part) in cases.items():
            want = saccade.attention(q, k, v, mask, bias=whole, deterministic="batch")
            for n in (1, 3):
                saccade.set_num_threads(n)
                for rows, stop in ((slice(0, 70), 70), (slice(100, 101), 101), (slice(60, 230), 230)):
                    got = saccade.attention(
                        q[1:, rows], k[1:, :stop], v[1:, :stop], mask, bias=part(rows, stop), deterministic="batch"
                    )
                    np.testing.assert_array_equal(got, want[1:, rows], f"{name} {rows}")
        want = saccade.attention(q, k, v, masks.dense(dense), deterministic="batch")
        rows = slice(33, 41)
        got = saccade.attention(q[:1, rows], k[:1], v[:1], masks.dense(dense[rows]), deterministic="batch")
        np.testing.assert_array_equal(got, want[:1, rows])
    finally:
        saccade.set_num_threads(before)


def test_gradients_of_many_entries_in_turns(rng: np.random.Generator) -> None:
    """The sums of key gradients of all entries would take more memory than the backward uses at once."""
    B, Tq, Tk = 6, 512, 16384
    do, q = (rng.standard_normal((B, Tq, 1, 64)).astype(np.float32) for _ in range(2))
    k, v = (rng.standard_normal((B, Tk, 1, 64)).astype(np.float32) for _ in range(2))
    call: dict[str, Any] = {"mask": window(3000, 0), "deterministic": "batch"}
    o, lse = saccade.attention(q, k, v, return_lse=True, **call)
    whole = saccade.attention_backward(do, q, k, v, o, lse, **call)[:3]
    for b in (slice(0, 1), slice(5, 6)):
        alone = saccade.attention_backward(*(x[b] for x in (do, q, k, v, o, lse)), **call)[:3]
        for got, want in zip(alone, whole, strict=True):
            np.testing.assert_array_equal(got, want[b])


def test_through_torch(rng: np.random.Generator) -> None:
    """Autograd, torch.compile and vmap pass the option on; a second derivative and forward mode are refused."""
    torch = pytest.importorskip("torch")
    q, k, v, do = (torch.tensor(rng.standard_normal((3, 90, 2, 16)), dtype=torch.float32) for _ in range(4))

    def attend(q: Any, k: Any, v: Any) -> Any:
        return saccade.attention(q, k, v, causal(), deterministic="batch")

    want = attend(q, k, v)
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    grads = torch.autograd.grad(attend(*leaves), leaves, do)
    alone = [x[1:2].clone().requires_grad_() for x in (q, k, v)]
    for got, expected in zip(torch.autograd.grad(attend(*alone), alone, do[1:2]), grads, strict=True):
        assert torch.equal(got, expected[1:2])
    assert torch.equal(torch.compile(attend, backend="aot_eager")(q, k, v), want)
    mapped = torch.func.vmap(attend, in_dims=1, out_dims=1)(*(x[:, None].expand(3, 2, -1, -1, -1) for x in (q, k, v)))
    assert torch.equal(mapped[:, 0], want)
    assert torch.equal(mapped[:, 1], want)
    first = torch.autograd.grad(attend(*leaves).sum(), leaves, create_graph=True)
    with pytest.raises(Unsupported, match='second derivatives with deterministic="batch"'):
        torch.autograd.grad(first[0].sum(), leaves)
    with pytest.raises(Unsupported, match='forward-mode derivatives with deterministic="batch"'):
        torch.func.jvp(attend, (q, k, v), (q, k, v))
