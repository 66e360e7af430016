"""The output of `explain` for Apple GPUs, and the self-test for owners of a Mac."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

import saccade
from saccade.backends import metal
from saccade.backends.metal import selftest, support
from saccade.mask import causal
from saccade.operands import Spec
from saccade.problem import Problem, Scores
from saccade.recurrent.problem import MATRIX, MatrixOptions


def explained(*words: str) -> dict:
    run = subprocess.run(
        [sys.executable, "-m", "saccade.cli.main", "explain", "--device", "m3", "--json", *words],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    return json.loads(run.stdout)


def test_explain_prints_the_tiles_for_32_kib() -> None:
    found = explained("--q", "1x2048x8x128", "--kv-heads", "2", "--dtype", "float16", "--mask", "causal()")
    assert (found["tile_q"], found["tile_k"]) == (32, 32)
    assert found["kernels"]["forward"].startswith("tiles of 32 × 32, 4 SIMD-groups of 8 rows, 14672 bytes")
    assert "fit 32768 at once" in found["kernels"]["forward"]
    assert "emulated, not yet run on a Mac" in found["kernels"]["kernels"]
    assert "MLX's own kernel" in found["kernels"]["alternative"]
    lone = explained("--q", "1x1x8x256", "--kv-heads", "2", "--keys", "4096", "--dtype", "float32")
    assert lone["kernels"]["decode"].startswith("4 rows of a group in tiles of 8, ")
    assert explained("--q", "1x8x8x320", "--dtype", "float16")["kernels"]["not computed"].endswith("at most 256")


def test_estimates_follow_the_visited_pairs() -> None:
    few, many = (
        support.estimates(Problem(1, n, n, 4, 2, 64, 64, dtype="float16", mask=causal(), device="mlx"))
        for n in (512, 1024)
    )
    assert [e.name for e in few] == ["forward", "delta", "dq", "dk and dv"]
    for a, b in zip(few, many, strict=True):
        assert 3.5 < b.flops / a.flops < 4 or (a.name == "delta" and b.flops == 2 * a.flops)
        assert b.threadgroup_bytes == a.threadgroup_bytes <= 32768


def test_the_page_has_these_estimates() -> None:
    """docs/metal.md has a row for every launch, with the numbers of `estimates`."""
    p = Problem(1, 4096, 4096, 32, 8, 128, 128, dtype="float16", mask=causal(), device="mlx")
    one = Problem(1, 1, 4096, 32, 8, 128, 128, dtype="float16", device="mlx")
    short = Problem(
        1, 64, 64, 32, 8, 128, 128, dtype="float16", mask=causal(), scores=Scores(bias=(1, 32, 64, 64)), device="mlx"
    )
    shapes = {"q": (1, 4096, 8, 128), "k": (1, 4096, 8, 128), "v": (1, 4096, 32, 128)}
    specs = {n: Spec(shapes[n], "float16", "mlx") if n in shapes else None for n in MATRIX.names}
    linear = support.estimates_of_linear(MATRIX.describe(specs, MatrixOptions("add", "elu+1", True)))
    lines = [
        *support.estimates(p), *support.estimates(one)[:2],
        *(e for e in support.estimates(short) if e.name in ("restate", "bias gradient")),
        support.estimate_of_single_head(4096, 4096, 128, "float16"), *linear,
    ]  # fmt: skip
    page = (Path(__file__).parent.parent.parent / "docs" / "metal.md").read_text()
    for e in lines:
        memory = f"{e.threadgroup_bytes:,}".replace(",", " ")
        assert f"| {e.flops:.2e} | {e.bytes:.2e} | {memory} | {e.registers} |" in page, e


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"dtype": "float64"}, "float64 is not computed on Metal"),
        ({"D": 257}, "at most 256"),
        ({"Dv": 300}, "at most 256"),
    ],
)
def test_what_no_apple_gpu_computes(given, message) -> None:
    p = Problem(**{**{"B": 1, "Tq": 2, "Tk": 2, "Hq": 1, "Hk": 1, "D": 8, "Dv": 8, "dtype": "float32"}, **given})
    assert message in "; ".join(metal.unsupported(p))


def test_bad_input_names_every_reason(emulator) -> None:
    import numpy as np

    emulator()
    x = np.zeros((1, 2, 1, 300))
    with pytest.raises(saccade.Unsupported) as caught:
        saccade.attention(x, x, x, backend="metal")
    assert len(caught.value.reasons) == 2


def test_selftest(emulator, monkeypatch, capsys) -> None:
    emulator()
    monkeypatch.setattr(selftest, "SIZES", ((40, 24),))
    # kernels of linear attention that other tests compile too
    monkeypatch.setattr(selftest, "DTYPES", ("float32",))
    monkeypatch.setattr(selftest, "MASKS", {"window": selftest.MASKS["window"]})
    monkeypatch.setattr(selftest, "ORDERS", {"causal": True})
    assert selftest.main() == 0
    assert "all within the tolerance rule" in capsys.readouterr().out


def test_selftest_without_a_device(emulator, capsys) -> None:
    emulator()
    metal.install(None)
    if metal.missing():
        assert selftest.main() == 2
        assert "no Metal kernel can run here" in capsys.readouterr().out
