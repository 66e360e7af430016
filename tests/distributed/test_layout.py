"""Layouts, slices and the messages that carry them."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from world import world

from saccade.distributed import layout as lay
from saccade.distributed import shard, unshard

WORLDS = (1, 2, 3, 4, 8)
# uneven runs of different steps, one rank without any
ODD = [[(0, 2, 5)], [(1, 4, 3), (3, 4, 2)], [], [(10, 1, 3)]]


@pytest.mark.parametrize("size", WORLDS)
@pytest.mark.parametrize("length", [0, 1, 5, 16, 37])
@pytest.mark.parametrize("name", lay.NAMED)
def test_every_position_has_one_rank(name: str, length: int, size: int):
    runs = lay.runs_of(name, size, length)
    held = np.concatenate([lay.positions(rank) for rank in runs])
    assert np.array_equal(np.sort(held), np.arange(length))
    counts = [lay.count(rank) for rank in runs]
    assert max(counts) - min(counts) <= (2 if name == "zigzag" else 1)


def test_zigzag_balances_a_triangle():
    runs = lay.runs_of("zigzag", 4, 64)
    assert {int((lay.positions(rank) + 1).sum()) for rank in runs} == {64 * 65 // 8}


@pytest.mark.parametrize(
    ("layout", "message"),
    [
        ("diagonal", "expected one of contiguous, zigzag, striped"),
        (5, "for each rank a list"),
        ([[(0, 1, 4)], [(3, 1, 5)]], "position 3 2 times"),
        ([[(0, 1, 4)], [(5, 1, 3)]], "position 4 0 times"),
        ([[(0, 1, 8)]], "runs for 1 ranks; expected 2"),
        ([[(0, 1, 4)], [(4, 1, 5)]], "positions in"),
        ([[(i, 1, 1) for i in range(17)], []], "at most 16"),
    ],
)
def test_bad_layouts(layout: object, message: str):
    with pytest.raises(ValueError, match=message):
        lay.runs_of(layout, 2, 8)  # type: ignore[arg-type]


def there_and_back(layouts: list[object], length: int, dim: int) -> None:
    x = torch.arange(2.0 * length * 3).reshape(2, length, 3).movedim(1, dim)
    for layout in layouts:
        part = shard(x, layout=layout, dim=dim)  # type: ignore[arg-type]
        assert torch.equal(unshard(part, layout=layout, dim=dim), x)  # type: ignore[arg-type]


@pytest.mark.parametrize("size", WORLDS)
def test_there_and_back(size: int):
    layouts = [*lay.NAMED, ODD] if size == 4 else list(lay.NAMED)
    for length, dim in ((13, 1), (13, 0), (13, -1)) if size == 4 else ((0, 1), (5, 1), (16, 0), (37, 2)):
        world(size).run(there_and_back, layouts, length, dim)


def gradient_of_shard() -> None:
    x = torch.ones(1, 10, 2, requires_grad=True)
    shard(x, layout="zigzag").sum().backward()
    other = shard(torch.arange(10.0).reshape(1, 10, 1), layout="zigzag")
    assert x.grad is not None
    assert sorted(x.grad[0, :, 0].nonzero()[:, 0].tolist()) == sorted(other[0, :, 0].int().tolist())
    with pytest.raises(ValueError, match="has no gradient"):
        unshard(x, layout="zigzag")


def test_shard_is_differentiable():
    world(2).run(gradient_of_shard)


def wrong_slice() -> str:
    import torch.distributed as dist

    with pytest.raises(ValueError, match=r"rank 0 has a slice of 1 of 6 positions") as caught:
        unshard(torch.zeros(1, 1 if dist.get_rank() == 0 else 5, 2), layout="contiguous")
    return str(caught.value)


def test_a_slice_of_another_layout():
    messages = world(2).run(wrong_slice)
    assert "gives it 3" in messages[0]
