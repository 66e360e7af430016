"""Every architecture of transformers behaves as docs/transformers.md says."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

pytest.importorskip("transformers")
import torch

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"
MATRIX = runpy.run_path(str(SCRIPTS / "transformers_matrix.py"))
ROWS = MATRIX["rows"]()
TRIED = [name for name, row in ROWS.items() if row.outcome != "not built"]


@pytest.mark.sample(12)
@pytest.mark.parametrize("name", TRIED)
def test_a_model_is_as_its_row_says(name) -> None:
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        assert tuple(MATRIX["examine"](name)) == tuple(ROWS[name])
    finally:
        torch.set_num_threads(threads)


def test_the_page_is_made_from_the_table() -> None:
    assert MATRIX["PAGE"].read_text(encoding="utf-8") == MATRIX["page"](ROWS)
    assert set(ROWS) == set(MATRIX["tiny"].model_types())
    assert {row.outcome for row in ROWS.values()} <= set(MATRIX["KINDS"])
