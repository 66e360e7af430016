"""Merging partial results in Triton's interpreter, compared with `saccade.merge`."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

pytest.importorskip("triton")

from offline import recorded

from saccade.backends.triton.fold import fold

CODE = """
import torch, saccade
from saccade.backends.triton.fold import fold
torch.manual_seed(0)
whole, rows = torch.randn(2, 9, 3, 20), torch.randn(2, 9, 3)
rows[0, 4], rows[1, 5, 0] = -torch.inf, -torch.inf
part, part_rows = torch.randn(2, 4, 3, 20), torch.randn(2, 4, 3)
part_rows[0, 1], part_rows[1, 2] = -torch.inf, -torch.inf
# o of rows without keys is not read
whole[0, 4], part[0, 1] = torch.nan, torch.nan
expected = saccade.merge([(whole[:, 3:7], rows[:, 3:7]), (part, part_rows)])
before = whole.clone()
fold(whole[:, 3:7], rows[:, 3:7], part, part_rows)
torch.testing.assert_close(whole[:, 3:7], expected[0])
torch.testing.assert_close(rows[:, 3:7], expected[1])
assert torch.equal(whole[:, :3], before[:, :3]) and torch.equal(whole[:, 7:], before[:, 7:])
"""


def test_fold_is_merge():
    env = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run([sys.executable, "-c", CODE], env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("chip", ["sm_90", "gfx942"])
@pytest.mark.parametrize("Dv", [40, 64, 128, 256])
def test_lse_is_written_after_every_warp_has_read_it(Dv, chip):
    o, more = (torch.empty(2, 512, 8, Dv) for _ in range(2))
    lse, more_lse = (torch.empty(2, 512, 8) for _ in range(2))
    # raises for a warp that may write what another has to read
    with recorded(chip) as found:
        fold(o, lse, more, more_lse)
    assert list(found) == ["fold"]
