"""The dense predicate of every constructor against its definition, pair by pair."""

from __future__ import annotations

import numpy as np
import pytest

from saccade import mask as sm
from saccade.mask.trees import depths

SIZES = [(5, 5), (3, 7), (6, 4), (1, 6), (0, 3), (4, 0), (1, 1)]


def table(rule, Tq: int, Tk: int, offset: int | None = None) -> np.ndarray:
    """rule(i, j) for every pair, i counted from the bottom right or by `offset`."""
    offset = Tk - Tq if offset is None else offset
    return np.array([[bool(rule(t + offset, j)) for j in range(Tk)] for t in range(Tq)], bool).reshape(Tq, Tk)


RULES = {
    "full": (sm.full(), lambda i, j: True),
    "causal": (sm.causal(), lambda i, j: j <= i),
    "window": (sm.window(2, 1), lambda i, j: i - 2 <= j <= i + 1),
    "left": (sm.window(1), lambda i, j: j >= i - 1),
    "right": (sm.window(None, 0), lambda i, j: j <= i),
    "prefix": (sm.prefix(2), lambda i, j: j < 2),
    "global": (sm.global_tokens(2), lambda i, j: j < 2 or 0 <= i < 2),
    "listed": (sm.global_tokens([0, 3]), lambda i, j: j in (0, 3) or i in (0, 3)),
    "strided": (sm.strided(3, 1), lambda i, j: (i - j) % 3 == 1),
    "dilated": (sm.dilated(2, 2), lambda i, j: i - j in (-4, -2, 0, 2, 4)),
    "chunked": (sm.chunked(2), lambda i, j: i // 2 == j // 2),
    "keys": (sm.keys(3), lambda i, j: j < 3),
    "between": (sm.keys(1, 3), lambda i, j: 1 <= j < 3),
    "not": (~(sm.causal() | sm.prefix(1)), lambda i, j: j > i and j >= 1),
    "and": (sm.strided(2) & sm.window(2, 2) & ~sm.prefix(1), lambda i, j: (i - j) % 2 == 0 and abs(i - j) < 3 and j),
}


@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("name", RULES)
def test_integer_masks(name, size) -> None:
    mask, rule = RULES[name]
    assert np.array_equal(mask.evaluate(2, 3, *size)[0, 0], table(rule, *size))


def test_an_offset_replaces_bottom_right() -> None:
    assert np.array_equal(sm.causal(1).evaluate(1, 1, 3, 5)[0, 0], table(lambda i, j: j <= i, 3, 5, 1))
    assert np.array_equal(
        sm.window(1, 0, offset=-1).evaluate(1, 1, 3, 5)[0, 0], table(lambda i, j: i - 1 <= j <= i, 3, 5, -1)
    )
    each = sm.causal([0, 2]).evaluate(2, 1, 3, 5)
    assert np.array_equal(each[1, 0], table(lambda i, j: j <= i, 3, 5, 2))


def test_keys_move_bottom_right_inside_their_chain() -> None:
    allowed = (sm.keys([2, 4]) & sm.causal()).evaluate(2, 1, 2, 6)
    for b, stop in enumerate((2, 4)):
        assert np.array_equal(allowed[b, 0], table(lambda i, j: j <= i, 2, 6, stop - 2))
    # the smallest of several, also within a deeper expression
    deep = (sm.keys(5) & sm.keys(1, 4) & (sm.window(1, 0) | ~sm.causal())).evaluate(1, 1, 2, 6)[0, 0]
    assert np.array_equal(deep, table(lambda i, j: 1 <= j < 4 and (i - 1 <= j <= i or j > i), 2, 6, 2))
    # not in a union, nor negated
    union = (sm.keys(3) | sm.causal()).evaluate(1, 1, 4, 6)[0, 0]
    assert np.array_equal(union, table(lambda i, j: j < 3 or j <= i, 4, 6))
    rest = (~sm.keys(3) & sm.causal()).evaluate(1, 1, 4, 6)[0, 0]
    assert np.array_equal(rest, table(lambda i, j: 3 <= j <= i, 4, 6))


def test_documents_by_ids() -> None:
    ids = [3, 3, 5, 5, 5, 9]
    assert np.array_equal(sm.documents(ids).evaluate(1, 1, 6, 6)[0, 0], table(lambda i, j: ids[i] == ids[j], 6, 6))
    # fewer queries than positions: the last ones
    assert np.array_equal(sm.documents(ids).evaluate(1, 1, 2, 6)[0, 0], table(lambda i, j: ids[i] == ids[j], 2, 6))
    # a query before the first position has no document
    assert not sm.documents([0, 0]).evaluate(1, 1, 4, 2)[0, 0, :2].any()
    # with keys in the chain the position counts, not the row
    ragged = (sm.keys([3, 6]) & sm.documents(ids)).evaluate(2, 1, 1, 6)
    assert ragged[:, 0, 0].astype(int).tolist() == [[0, 0, 1, 0, 0, 0], [0, 0, 0, 0, 0, 1]]
    two = sm.documents([0, 2], [0, 1, 2, 2]).evaluate(1, 1, 2, 4)[0, 0]
    assert two.astype(int).tolist() == [[1, 0, 0, 0], [0, 0, 1, 1]]


def test_documents_by_bounds() -> None:
    owner = [0, 0, 1, 1, 1, None]
    expected = table(lambda i, j: owner[i] is not None and owner[i] == owner[j], 6, 6)
    assert np.array_equal(sm.documents(cu_seqlens=[0, 2, 5]).evaluate(1, 1, 6, 6)[0, 0], expected)
    assert np.array_equal(sm.documents(cu_seqlens=[0, 2, 5]).evaluate(1, 1, 3, 6)[0, 0], expected[3:])
    both = sm.documents(cu_q=[0, 1, 3], cu_k=[0, 2, 4]).evaluate(1, 1, 4, 5)[0, 0]
    assert both.astype(int).tolist() == [[1, 1, 0, 0, 0], [0, 0, 1, 1, 0], [0, 0, 1, 1, 0], [0] * 5]


def test_each_counts_inside_its_document() -> None:
    cu_q, cu_k = [0, 2, 3], [0, 4, 6]
    allowed = sm.documents(cu_q=cu_q, cu_k=cu_k, each=sm.causal()).evaluate(1, 1, 3, 6)[0, 0]
    expected = np.zeros((3, 6), bool)
    for d in range(2):
        nq, nk = cu_q[d + 1] - cu_q[d], cu_k[d + 1] - cu_k[d]
        expected[cu_q[d] : cu_q[d + 1], cu_k[d] : cu_k[d + 1]] = table(lambda i, j: j <= i, nq, nk)
    assert np.array_equal(allowed, expected)


def test_rows_of_columns() -> None:
    start, stop = [0, 2, 1, -4], [[2, 2, 3, 9], [0, 5, 2, 1]]
    allowed = sm.columns(start, stop).evaluate(2, 1, 3, 4)
    expected = [[[start[j] <= t < stop[b][j] for j in range(4)] for t in range(3)] for b in range(2)]
    assert np.array_equal(allowed[:, 0], expected)
    # rows are not positions: keys(stop) in the same chain does not move them
    beside = (sm.columns(start) & sm.keys([2, 3])).evaluate(2, 1, 3, 4)
    assert np.array_equal(beside[1, 0], [[start[j] <= t and j < 3 for j in range(4)] for t in range(3)])
    assert np.array_equal(sm.columns(None, start).evaluate(1, 1, 3, 4)[0, 0], np.arange(3)[:, None] < start)


def test_ranges_of_rows() -> None:
    start, stop = [0, 2, -4], [[2, 3, 9], [0, 5, 1]]
    allowed = sm.ranges(start, stop).evaluate(2, 1, 3, 4)
    expected = [[[start[t] <= j < stop[b][t] for j in range(4)] for t in range(3)] for b in range(2)]
    assert np.array_equal(allowed[:, 0], expected)
    assert np.array_equal(sm.ranges(start).evaluate(1, 1, 3, 4)[0, 0], np.arange(4) >= np.array(start)[:, None])


def test_tokens_beside_padding() -> None:
    tokens = [[0, 1, 1, 1], [1, 1, 0, 0]]
    allowed = sm.padding(tokens).evaluate(2, 1, 3, 4)
    assert np.array_equal(allowed[:, 0], [[row] * 3 for row in tokens])
    # positions stay where they are, unlike with keys(stop)
    beside = (sm.padding(tokens) & sm.causal()).evaluate(2, 1, 3, 4)
    assert np.array_equal(
        beside[:, 0], [[[tokens[b][j] and j <= t + 1 for j in range(4)] for t in range(3)] for b in (0, 1)]
    )


def test_documents_by_positions() -> None:
    positions = [[0, 1, 2, 0, 1, 0], [4, 5, 0, 0, 1, 2]]
    ids = [[0, 0, 0, 1, 1, 2], [0, 0, 1, 2, 2, 2]]
    allowed = sm.documents(position_ids=positions).evaluate(2, 1, 6, 6)
    assert np.array_equal(allowed, sm.documents(ids).evaluate(2, 1, 6, 6))


def test_blocks_and_arrays() -> None:
    layout = np.array([[1, 0, 0], [0, 1, 1]], bool)
    allowed = sm.tiles(layout, (2, 3)).evaluate(1, 1, 3, 8)[0, 0]
    assert np.array_equal(allowed, [[layout[t // 2, j // 3] for j in range(8)] for t in range(3)])
    dense = np.arange(24).reshape(2, 3, 4) % 5 == 0
    assert np.array_equal(sm.dense(dense).evaluate(2, 1, 3, 4)[:, 0], dense)


def test_trees() -> None:
    parents = [-1, 0, 0, 1, -1]
    above = [{0}, {0, 1}, {0, 2}, {0, 1, 3}, {4}]
    for Tq, Tk, stop in ((5, 9, 9), (3, 9, 9), (7, 9, 9), (5, 9, 7), (5, 9, 3), (9, 5, 5)):
        # the nodes of queries and keys, negative in the prefix
        pairs = np.array(list(np.ndindex(Tq, Tk))) - (Tq - 5, stop - 5)
        expected = [key < 0 or (node >= 0 and key in above[node]) for node, key in pairs.tolist()]
        allowed = (sm.tree(parents) & sm.keys(stop)).evaluate(1, 1, Tq, Tk)[0, 0]
        assert np.array_equal(allowed, np.reshape(expected, (Tq, Tk)))
    assert np.array_equal(sm.tree(parents).evaluate(1, 1, 5, 9), (sm.tree(parents) & sm.keys(9)).evaluate(1, 1, 5, 9))
    assert depths([parents, [-1, -1, -1, 2, 3]]).tolist() == [[0, 1, 1, 2, 0], [0, 0, 0, 1, 2]]
    assert depths(parents).tolist() == [0, 1, 1, 2, 0]


def test_heads() -> None:
    mask = sm.per_head([sm.causal(), None, sm.prefix(1)]) & sm.window(1)
    allowed = mask.evaluate(1, 3, 3, 3)
    for h, first in enumerate((sm.causal(), sm.full(), sm.prefix(1))):
        assert np.array_equal(allowed[0, h], (first & sm.window(1)).evaluate(1, 1, 3, 3)[0, 0])


def test_an_empty_batch() -> None:
    from saccade.mask.lowering import lower

    empty = np.zeros((0, 4), np.int64)
    masks = [
        sm.keys(empty[:, 0]) & sm.causal(),
        sm.documents(empty),
        sm.documents(cu_seqlens=empty, each=sm.causal()),
        sm.dense(np.zeros((0, 3, 4), bool)),
        sm.global_tokens(empty),
        sm.columns(empty, empty),
        sm.padding(empty != 0) & sm.causal(),
    ]
    for mask in masks:
        assert mask.evaluate(0, 1, 3, 4).size in (0, 12)
        assert lower(mask, 0, 1, 3, 4).masks[0].batch == 1
