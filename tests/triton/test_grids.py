"""Grids of launches: their second and third axes end at 65535, so batch entries are on the first one."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

pytest.importorskip("triton")

import torch

from saccade.backends import triton as backend
from saccade.backends.triton import fold, hopper, on_device
from saccade.backends.triton.hopper import schedule
from saccade.mask import causal
from saccade.problem import Problem

MANY = 70000


@pytest.fixture
def grids(monkeypatch) -> list[tuple[int, ...]]:
    """The grids of launches, none of which runs."""
    grids: list[tuple[int, ...]] = []
    noted = SimpleNamespace(run=lambda kernel, grid, *args, **options: grids.append(grid))
    for module in (fold, on_device, schedule):
        monkeypatch.setattr(module, "PLAIN", noted)
    return grids


def test_lists_of_many_batch_entries(grids) -> None:
    lo = torch.zeros((MANY, 3), dtype=torch.int32)
    part = on_device.Intervals(lo, lo, lo[:, :1].long(), 300, True, 1)
    schedule.schedule_of_intervals(part, 128, 64)
    leaves = SimpleNamespace(kind="documents", args=(lo, None))
    on_device._by_ids(Problem(MANY, 3, 3, 1, 1, 16, 16, device="cpu"), (leaves,))
    # pack has one program
    assert sorted(grids) == [(1,), (MANY,), (MANY,), (2 * MANY,), (3 * MANY,)]


def test_merging_many_batch_entries(grids) -> None:
    o, lse = torch.zeros(MANY, 1, 33, 1), torch.zeros(MANY, 1, 33)
    fold.fold(o, lse, o, lse)
    assert grids == [(2 * MANY,)]


@pytest.mark.parametrize(("B", "Hq"), [(MANY, 1), (1, MANY), (65535, 1)])
def test_hopper_refuses_more_than_its_grids_have(monkeypatch, B: int, Hq: int) -> None:
    monkeypatch.setattr(hopper.versions, "why_not", lambda: "")
    p = Problem(B, 8, 8, Hq, Hq, 64, 64, dtype="bfloat16", mask=causal(), device="cuda:sm_90")
    reasons = hopper.why_not(p, backend.plan(p), "sm_90")
    assert [x for x in reasons if "65535" in x] == reasons
    assert bool(reasons) == (max(B, Hq) > 65535)
