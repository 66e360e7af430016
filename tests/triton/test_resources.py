"""Every kernel and tile of the table compiles for sm_80 and sm_90a without a GPU, and takes no more than before."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest

pytest.importorskip("triton")

from offline import Taken, of_problem

TABLE = Path(__file__).parent / "resources.csv"
# bytes of shared memory that a program may have
SHARED = {"sm_80": 163 << 10, "sm_90": 227 << 10}


def table() -> dict[tuple[str, str, int], dict[str, Taken]]:
    found: dict[tuple[str, str, int], dict[str, Taken]] = {}
    with TABLE.open() as file:
        for row in csv.DictReader(file):
            key = row["chip"], row["dtype"], int(row["D"])
            found.setdefault(key, {})[row["kernel"]] = Taken(*(int(row[name]) for name in Taken._fields))
    return found


@pytest.mark.sample(2)
@pytest.mark.timeout(300)
@pytest.mark.parametrize("key", table(), ids=lambda key: "-".join(map(str, key)))
def test_what_kernels_take(key) -> None:
    chip, dtype, D = key
    now, before = of_problem(chip, dtype, D), table()[key]
    assert set(now) == set(before)
    for name, taken in now.items():
        assert taken.shared <= SHARED[chip], name
        for field, here, there in zip(Taken._fields, taken, before[name], strict=True):
            assert here <= there, f"{name} takes {here} of {field}, the table says {there}"
