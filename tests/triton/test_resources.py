"""Every kernel and tile of the table compiles for every chip without a GPU, within the recorded resources."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("triton")

from offline import CHIPS, Taken
from resource_rows import BRANCHES, OF_HOPPER, ROWS, chips_of, read

from saccade.backends.tested import CHIPS_RUN
from saccade.backends.triton import versions

COMPILED = [row for row in ROWS if row[0] in chips_of(versions.CURRENT)]
# the chips with the least shared memory, one of each vendor; 8-bit floats are refused on gfx942
SMALL = [
    (chip, branch)
    for chip in ("sm_120", "gfx942")
    for branch in BRANCHES
    if chip != "gfx942" or branch != "floats of 8 bits"
]


def table() -> dict[tuple[str, str, int, str], dict[str, Taken]]:
    # the rows of this version of Triton
    found: dict[tuple[str, str, int, str], dict[str, Taken]] = {}
    for version, chip, dtype, D, mask, kernel, *numbers in read():
        if version == versions.CURRENT:
            found.setdefault((chip, dtype, int(D), mask), {})[kernel] = Taken(*map(int, numbers))
    return found


def by_row(rows: list[tuple[str, str, int, str]]) -> Any:
    return pytest.mark.parametrize("row", rows, ids=lambda row: "-".join(map(str, row)))


def test_the_table_is_complete() -> None:
    assert set(table()) == set(COMPILED)


@pytest.mark.sample(2)
@by_row([row for row in COMPILED if row[0] in CHIPS_RUN])
def test_resources_of_kernels(row) -> None:
    check(row)


@pytest.mark.sample(1)
@by_row([row for row in COMPILED if row[0] not in CHIPS_RUN])
def test_resources_of_kernels_that_have_not_run(row) -> None:
    check(row)


def check(row: tuple[str, str, int, str]) -> None:
    now, before = ROWS[row](), table()[row]
    assert set(now) == set(before)
    for name, taken in now.items():
        assert taken.shared <= CHIPS[row[0]].shared, name
        for field, here, there in zip(Taken._fields, taken, before[name], strict=True):
            assert here <= there, f"{name} uses {here} of {field}; the table says {there}"


@pytest.mark.sample(2)
@pytest.mark.parametrize("branch", [*BRANCHES, *OF_HOPPER])
def test_every_branch_compiles(branch) -> None:
    fits("sm_90", OF_HOPPER[branch]() if branch in OF_HOPPER else BRANCHES[branch]())


@pytest.mark.sample(1)
@pytest.mark.parametrize(("chip", "branch"), SMALL)
def test_every_branch_compiles_for_small_chips(chip, branch) -> None:
    fits(chip, BRANCHES[branch](chip=chip))


def fits(chip: str, found: dict[str, Taken]) -> None:
    assert found
    assert all(taken.shared <= CHIPS[chip].shared for taken in found.values()), found
