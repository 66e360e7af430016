"""Every kernel and tile of the table compiles for sm_80 and sm_90a without a GPU, within the recorded resources."""

from __future__ import annotations

import csv
from functools import partial
from pathlib import Path

import pytest

pytest.importorskip("triton")

from offline import Taken, of_branch, of_hopper
from resource_rows import BRANCHES, ROWS

from saccade.testing import forms

TABLE = Path(__file__).parent / "resources.csv"
# bytes of shared memory that a program may use
SHARED = {"sm_80": 163 << 10, "sm_90": 227 << 10}


def table() -> dict[tuple[str, str, int, str], dict[str, Taken]]:
    found: dict[tuple[str, str, int, str], dict[str, Taken]] = {}
    with TABLE.open() as file:
        for row in csv.DictReader(file):
            key = row["chip"], row["dtype"], int(row["D"]), row["mask"]
            found.setdefault(key, {})[row["kernel"]] = Taken(*(int(row[name]) for name in Taken._fields))
    return found


def test_the_table_is_complete() -> None:
    assert set(table()) == set(ROWS)


@pytest.mark.sample(3)
@pytest.mark.timeout(300)
@pytest.mark.parametrize("row", ROWS, ids=lambda row: "-".join(map(str, row)))
def test_resources_of_kernels(row) -> None:
    now, before = ROWS[row](), table()[row]
    assert set(now) == set(before)
    for name, taken in now.items():
        assert taken.shared <= SHARED[row[0]], name
        for field, here, there in zip(Taken._fields, taken, before[name], strict=True):
            assert here <= there, f"{name} uses {here} of {field}; the table says {there}"


@pytest.mark.sample(2)
@pytest.mark.timeout(300)
@pytest.mark.parametrize("branch", BRANCHES)
def test_every_branch_compiles(branch) -> None:
    found = BRANCHES[branch]()
    assert found
    assert all(taken.shared <= SHARED["sm_90"] for taken in found.values())


@pytest.mark.parametrize("name", [name for name in forms.FORMS if forms.FORMS[name].kinds])
def test_forms_compile_and_leave_the_default_alone(name) -> None:
    calls = {"decode": partial(of_branch, "causal()", 2), "backward": partial(of_hopper, "causal()", 64)}
    kinds = [kind for kind in calls if kind in forms.FORMS[name].kinds]
    before = {kind: calls[kind]() for kind in kinds}
    with forms.using([name]):
        assert all(taken.shared <= SHARED["sm_90"] for kind in kinds for taken in calls[kind]().values())
    assert {kind: calls[kind]() for kind in kinds} == before
