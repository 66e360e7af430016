"""The tiles of portable kernels by chip, and what is known about chips and versions of Triton; nothing is compiled."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")

from saccade.backends import tested, triton
from saccade.backends.triton import chip as chips
from saccade.backends.triton import tiles, versions
from saccade.mask import causal
from saccade.problem import Problem, Scores

VARIANTS = ("decode from codes", "decode from pages", "decode from long pages")
KERNELS = ("forward", "dq", "dkdv", "dbias", "decode", *VARIANTS)
TABLE = json.loads((Path(tiles.__file__).parent / "tiles.json").read_text())
ENTRIES = [(dtype, block) for dtype in ("bfloat16", "float32") for block in (64, 128, 256)]

ALIKE = {"sm_89": "sm_86", "sm_120": "sm_86", "sm_121": "sm_86", "gfx950": "gfx942", "sm_100": "sm_80"}


def problem(chip: str, **more) -> Problem:
    sizes = {"B": 1, "Tq": 300, "Tk": 300, "Hq": 4, "Hk": 2, "D": 64, "Dv": 64, "dtype": "bfloat16", **more}
    return Problem(**sizes, device=f"cuda:{chip}", mask=causal(), scores=Scores(scale=0.1))


@pytest.mark.parametrize("chip", [*tested.CHIPS, "sm_75", "sm_103", "sm_121", "gfx950"])
@pytest.mark.parametrize("kernel", KERNELS)
def test_every_chip_has_tiles(chip, kernel) -> None:
    for dtype, block in ENTRIES:
        tile = tiles.tile(kernel, chip, dtype, block)
        assert all(n & (n - 1) == 0 and n >= 16 for n in tile[:2]), tile
        assert tile.num_warps in (4, 8)
        assert 1 <= tile.num_stages <= 5


@pytest.mark.parametrize("chip", TABLE)
def test_entries_of_a_chip_are_used(chip) -> None:
    for kernel, sizes in TABLE[chip].items():
        for entry, tile in sizes.items():
            dtype = "float32" if entry.startswith("4") else "bfloat16"
            assert tiles.tile(kernel, chip, dtype, int(entry.rpartition(" ")[2])) == tuple(tile)


@pytest.mark.parametrize(("chip", "same"), ALIKE.items())
def test_chips_alike_have_the_same_tiles(chip, same) -> None:
    for kernel in KERNELS:
        for dtype, block in ENTRIES:
            assert tiles.tile(kernel, chip, dtype, block) == tiles.tile(kernel, same, dtype, block)


def test_a_chip_takes_the_tiles_of_sm_80_that_it_does_not_list() -> None:
    assert tiles.tile("dkdv", "sm_86", "bfloat16", 256) == (32, 32, 8, 1)
    assert tiles.tile("dkdv", "sm_86", "bfloat16", 128) == tiles.tile("dkdv", "sm_80", "bfloat16", 128)
    assert tiles.tile("forward", "sm_86", "bfloat16", 256) == tiles.tile("forward", "sm_80", "bfloat16", 256)


def test_a_variant_takes_the_tile_of_its_kernel() -> None:
    for chip in tested.CHIPS:
        for block in (64, 128, 256):
            plain = tiles.tile("decode", chip, "bfloat16", block)
            for variant in VARIANTS:
                same = tiles.tile(variant, chip, "bfloat16", block) == plain
                assert same == (chip != "sm_90" or block == 256)


@pytest.mark.parametrize("chip", tested.CHIPS)
def test_plans_have_the_tiles_of_their_chip(chip) -> None:
    p = problem(chip)
    wanted, forward = triton.limits(p), tiles.tile_of("forward", chip, p)
    assert chips.chip_of(p.device) == chip
    assert (wanted.name, wanted.lanes) == (f"triton {chip}", 2 * tested.CHIPS[chip][1])
    plan = triton.plan(p)
    assert plan.tile_q == tiles.of_plan("dq", chip, p, plan).BM == forward.BM


@pytest.mark.parametrize(("chip", "refused"), [("sm_80", True), ("sm_86", True), ("sm_89", False), ("gfx942", True)])
def test_codes_of_8_bit_floats_by_chip(chip, refused) -> None:
    from saccade.quantised import quantised

    reasons = triton.unsupported(problem(chip, quantised=quantised("fp8", None, 64)))
    assert any("only NVIDIA chips from sm_89 on read 8-bit floats" in reason for reason in reasons) == refused


def test_what_has_run_is_compiled() -> None:
    assert set(tested.TRITON_RUN) <= set(tested.TRITON_COMPILED)
    assert set(tested.CHIPS_RUN) <= set(tested.CHIPS)


def test_statuses() -> None:
    for version in ("3.6.0", "3.9.0"):
        assert tested.triton_status(version) == version
    assert tested.triton_status("3.8.0").startswith("3.8.0: compiled, never run on a GPU; to report a run, see docs/")
    assert tested.triton_status("4.0.1").startswith("4.0.1: not known to compile the kernels;")
    assert tested.chip_status("sm_90") == "sm_90"
    assert tested.chip_status("gfx942").startswith("gfx942: compiled, not run;")
    assert tested.chip_status("sm_75").startswith("sm_75: never compiled for it;")


def test_amds_gpus_use_neither_hopper_kernels_nor_replay(monkeypatch) -> None:
    monkeypatch.setattr(torch.version, "hip", "7.0")
    assert "AMD" in versions.why_not()
