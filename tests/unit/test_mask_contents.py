"""Masks over arrays that change: a call uses the present contents of a CPU tensor, written in any way."""

from __future__ import annotations

import gc
import multiprocessing
import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import saccade
from saccade import mask as masks
from saccade.integrations.flash_attn import flash_attn_varlen_func
from saccade.mask import Mask, contents

T = 64


def new_ids(step: int) -> np.ndarray[Any, Any]:
    return np.sort(np.random.default_rng(step).integers(0, 5, T))


def qkv(grad: bool = False) -> list[torch.Tensor]:
    torch.manual_seed(0)
    return [torch.randn(1, T, 2, 16, requires_grad=grad) for _ in range(3)]


def of_numpy(ids: torch.Tensor, new: Any) -> None:
    ids.numpy()[:] = new


def of_data(ids: torch.Tensor, new: Any) -> None:
    ids.data.copy_(torch.from_numpy(new))


def of_copy(ids: torch.Tensor, new: Any) -> None:
    ids.copy_(torch.from_numpy(new))


def of_detached(ids: torch.Tensor, new: Any) -> None:
    ids.detach().numpy()[:] = new


WRITES: list[Callable[[torch.Tensor, Any], None]] = [of_numpy, of_data, of_copy, of_detached]


@pytest.mark.parametrize("write", WRITES)
@pytest.mark.parametrize("kept", [False, True], ids=["a new mask", "one mask"])
def test_a_mask_uses_the_contents_that_its_tensor_has_now(write, kept) -> None:
    q, k, v = qkv()
    ids = torch.zeros(T, dtype=torch.int64)
    one = masks.causal() & masks.documents(ids)
    for step in range(4):
        write(ids, new_ids(step))
        mask = one if kept else masks.causal() & masks.documents(ids)
        want = saccade.attention(q, k, v, masks.causal() & masks.documents(new_ids(step)))
        assert torch.equal(saccade.attention(q, k, v, mask), want)


def test_a_tensor_over_a_numpy_buffer_is_read_anew() -> None:
    q, k, v = qkv()
    buffer = np.zeros(T, np.int32)
    mask = masks.documents(torch.from_numpy(buffer)) & masks.causal()
    for step in range(3):
        buffer[:] = new_ids(step)
        want = saccade.attention(q, k, v, masks.documents(new_ids(step)) & masks.causal())
        assert torch.equal(saccade.attention(q, k, v, mask), want)


def _fill(ids: torch.Tensor) -> None:
    ids.numpy()[:] = new_ids(1)


def test_memory_that_another_process_writes_is_read_anew() -> None:
    q, k, v = qkv()
    ids = torch.from_numpy(new_ids(0)).share_memory_()
    mask = masks.causal() & masks.documents(ids)
    saccade.attention(q, k, v, mask)
    other = multiprocessing.get_context("spawn").Process(target=_fill, args=(ids,))
    other.start()
    other.join()
    assert other.exitcode == 0
    want = saccade.attention(q, k, v, masks.causal() & masks.documents(new_ids(1)))
    assert torch.equal(saccade.attention(q, k, v, mask), want)


def test_gradients_follow_the_contents_of_the_forward() -> None:
    ids = torch.from_numpy(new_ids(0))
    for step in range(1, 4):
        of_numpy(ids, new_ids(step))
        ours, theirs = qkv(grad=True), qkv(grad=True)
        o = saccade.attention(*ours, masks.causal() & masks.documents(ids))
        # what is written after the forward reaches neither result nor gradient
        of_numpy(ids, np.zeros(T, np.int64))
        o.square().sum().backward()
        saccade.attention(*theirs, masks.causal() & masks.documents(new_ids(step))).square().sum().backward()
        for a, b in zip(ours, theirs, strict=True):
            assert torch.equal(a.grad, b.grad)


def test_compiled_calls_use_the_contents_of_now() -> None:
    q, k, v = qkv()
    ids = torch.zeros(T, dtype=torch.int64)
    mask = masks.causal() & masks.documents(ids)
    compiled = torch.compile(lambda q: saccade.attention(q, k, v, mask), backend="aot_eager", fullgraph=True)
    for step in range(3):
        of_numpy(ids, new_ids(step))
        assert torch.equal(compiled(q), saccade.attention(q, k, v, masks.causal() & masks.documents(new_ids(step))))


def test_flash_attn_reads_cu_seqlens_anew() -> None:
    q, k, v = (x[0] for x in qkv())
    cu = torch.tensor([0, 10, T], dtype=torch.int32)
    for cut in (10, 30, 50):
        cu.numpy()[1] = cut
        fresh = torch.tensor([0, cut, T], dtype=torch.int32)
        ours, theirs = (flash_attn_varlen_func(q, k, v, c, c, T, T, causal=True) for c in (cu, fresh))
        assert torch.equal(ours, theirs)


def test_lengths_are_read_anew() -> None:
    q, k, v = qkv()
    length = torch.tensor(20)
    mask = masks.keys(length)
    for n in (20, 7, 64):
        length.numpy()[...] = n
        assert torch.equal(saccade.attention(q, k, v, mask), saccade.attention(q, k, v, masks.keys(n)))


def test_the_version_changes_with_the_contents_alone() -> None:
    ids = torch.arange(5)
    first = contents.version(ids)
    ids.add_(0)
    assert contents.version(ids) == first
    ids.numpy()[2] = 9
    second = contents.version(ids)
    assert second not in (first, 0, -1)
    ids.numpy()[2] = 2
    # never a number again: a result kept under it may be of other contents
    assert contents.version(ids) not in (first, second)


def test_snapshots_are_kept_while_contents_last_and_die_with_their_tensor() -> None:
    gc.collect()
    before = len(contents._snapshots)
    ids = torch.arange(5)
    one = contents.snapshot(ids)
    assert contents.snapshot(ids) is one
    ids.numpy()[0] = -1
    assert contents.snapshot(ids) is not one
    assert one.tolist() == [0, 1, 2, 3, 4]
    assert contents.version(one) == 0
    del ids, one
    gc.collect()
    assert len(contents._snapshots) == before


def test_a_refilled_dense_mask_leaves_one_plan_behind() -> None:
    q, k, v = qkv()
    allowed = torch.ones(T, T, dtype=torch.bool)
    mask = masks.dense(allowed)
    for _ in range(5):
        allowed.numpy()[:] = np.random.default_rng().random((T, T)) < 0.5
        saccade.attention(q, k, v, mask)
    assert mask.memo is not None
    assert len(mask.memo["calls"][1]) == 1


SAME: dict[str, Callable[[Callable[[Any], Any]], Mask]] = {
    "documents": lambda of: masks.documents(of([0, 0, 1])),
    "documents of a batch": lambda of: masks.documents(of([[0, 0, 1], [0, 1, 2]])),
    "bounds": lambda of: masks.documents(cu_seqlens=of([0, 2, 3]), each=masks.causal()),
    "keys": lambda of: masks.keys(of([2, 3])) & masks.causal(),
    "padding": lambda of: masks.padding(of([[0, 1, 1], [1, 1, 0]])),
    "padding as booleans": lambda of: masks.padding(of([[0, 1, 1], [1, 1, 0]]) != 0),
    "positions": lambda of: masks.documents(position_ids=of([0, 1, 0, 1, 2])),
    "ranges": lambda of: masks.ranges(of([0, 1]), of([[2, 2], [1, 3]])),
    "global tokens": lambda of: masks.global_tokens(of([1, 2])),
    "columns": lambda of: masks.columns(of([0, 1, 1]), of([2, 2, 3])),
    "tiles": lambda of: masks.tiles(of([[1, 0], [2, 1]]) != 0, 2),
    "numbers as booleans": lambda of: masks.dense(of([[1, 0], [2, 1]])),
    "trees": lambda of: masks.tree(of([[-1, 0, 0], [-1, -1, 1]])),
    "no ids": lambda of: masks.documents(of(np.zeros(0, np.int64))),
    "no rows": lambda of: masks.dense(of(np.zeros((0, 5), np.int64)) != 0),
    "no keys": lambda of: masks.dense(of(np.zeros((2, 0), np.int64)) != 0),
    "no queries of a batch": lambda of: masks.tiles(of(np.zeros((2, 0, 3), np.int64)) != 0, 4),
}
ARRAYS = {"numpy": np.array, "torch": torch.tensor, "int32": lambda x: torch.tensor(x).int()}


@pytest.mark.parametrize("of", ARRAYS.values(), ids=ARRAYS)
@pytest.mark.parametrize("name", SAME)
def test_pickle_text_equality_and_hash_agree(name, of) -> None:
    mask = SAME[name](of)
    twins = [make(of_any) for of_any in ARRAYS.values() for make in (SAME[name],)]
    for twin in (pickle.loads(pickle.dumps(mask)), masks.parse(str(mask)), *twins):
        assert twin == mask
        assert hash(twin) == hash(mask)
    assert repr(mask) == str(mask)


def test_tokens_are_checked_by_each_call() -> None:
    q, k, v = qkv()
    tokens = torch.ones(1, T, dtype=torch.int64)
    mask = masks.padding(tokens) & masks.causal()
    for write, message in ((0, "has no token"), (2, "expected booleans"), (1, "")):
        tokens[:] = write
        if message:
            with pytest.raises(ValueError, match=message):
                saccade.attention(q, k, v, mask)
    tokens[0, 50:] = 0
    o = saccade.attention(q, k, v, mask)
    assert torch.equal(o, saccade.attention(q, k, v, masks.causal() & masks.prefix(50)))
    tokens[0, 7] = 0
    with pytest.raises(ValueError, match="between the tokens of sequence 0"):
        saccade.attention(q, k, v, mask)


def test_queries_that_are_padding_give_finite_results() -> None:
    q, k, v = qkv(grad=True)
    tokens = torch.arange(T) >= 9
    o = saccade.attention(q, k, v, masks.padding(tokens[None]) & masks.causal())
    # no key is seen by the first ones
    assert not o[:, :9].any()
    assert torch.isfinite(saccade.attention(q, k, v, masks.padding(tokens))).all()
    o.sum().backward()
    assert all(torch.isfinite(x.grad).all() for x in (q, k, v))
    assert not k.grad[:, :9].any()


def test_positions_are_not_read_on_a_device_or_while_torch_traces() -> None:
    positions = torch.zeros(1, T, dtype=torch.int64, device="meta")
    assert masks.documents(position_ids=positions).flatten()[2][0].is_meta
    q, k, v = qkv()
    given = torch.arange(T)[None] % 20

    def of_positions(q: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        return saccade.attention(q, k, v, masks.causal() & masks.documents(position_ids=positions))

    compiled = torch.compile(of_positions, backend="aot_eager", fullgraph=True)
    assert torch.equal(compiled(q, given), of_positions(q, given))


def test_masks_of_other_contents_or_shapes_differ() -> None:
    ids = torch.tensor([0, 0, 1])
    assert masks.documents(ids) != masks.documents(torch.tensor([0, 1, 1]))
    assert masks.documents(ids) != masks.documents(ids[None])
    assert masks.dense(np.zeros((0, 5), bool)) != masks.dense(np.zeros((0, 4), bool))
    # eight booleans are one byte
    some = np.array([[True, False, False]])
    for make in (np.array, torch.tensor):
        assert masks.dense(make(some)) == masks.dense(make(some)) != masks.dense(make(~some))
    mask, twin = masks.documents(ids), masks.documents(ids.clone())
    assert mask == twin
    ids.numpy()[:] = 3
    assert mask != twin


def test_arrays_that_cannot_be_read_equal_themselves_alone() -> None:
    ids = torch.zeros(3, dtype=torch.int64, device="meta")
    assert masks.documents(ids) == masks.documents(ids)
    assert masks.documents(ids) != masks.documents(ids.clone())
    assert str(masks.documents(ids)) == "documents(<torch.int64[3]>)"


BAD: dict[str, tuple[Callable[[], Any], type[Exception], str]] = {
    "a mask as offset": (lambda: masks.causal(masks.full()), TypeError, r"offset is an integer, got full\(\)"),
    "an object as length": (lambda: masks.keys(object()), TypeError, "keys: stop is an integer"),
    "a list as stride": (lambda: masks.strided([2]), TypeError, r"strided: s is an integer, got \[2\]"),
    "a complex offset": (lambda: masks.causal(1 + 2j), TypeError, r"causal: offset is an integer, got \(1\+2j\)"),
    "a float as size": (lambda: masks.chunked(2.0), TypeError, "chunked: size is an integer, got 2.0"),
    "a float of no dimensions": (
        lambda: masks.keys(np.array(2.5)),
        TypeError,
        "stop has dtype float64, expected an int",
    ),
    "booleans as lengths": (lambda: masks.keys(torch.tensor([True])), TypeError, "expected an integer array"),
    "a tensor as side": (lambda: masks.window(torch.tensor(3)), TypeError, "left is an integer, got an array"),
    "a tensor as count": (lambda: masks.global_tokens(torch.tensor(3)), TypeError, r"use int\(n\)"),
    "rows of two lengths": (lambda: masks.documents([[1], [2, 3]]), ValueError, "rows of different lengths"),
    "text": (lambda: masks.parse("causal(causal)"), ValueError, "offset is an integer"),
    "a negative NumPy integer": (lambda: masks.prefix(np.int64(-1)), ValueError, "-1 given, expected an integer >= 0"),
    "a masked array": (lambda: masks.padding(np.ma.ones((1, 4), int)), TypeError, "is a masked array"),
    "a list of floats": (lambda: masks.keys([0.5]), TypeError, "stop has dtype float64, expected an int"),
}


@pytest.mark.parametrize("name", BAD)
def test_constructors_check_their_numbers(name) -> None:
    make, kind, message = BAD[name]
    with pytest.raises(kind, match=message):
        make()
