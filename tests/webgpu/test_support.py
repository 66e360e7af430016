"""The output of the command line about the adapter and the chosen kernels."""

from __future__ import annotations

import json
from typing import Any

import pytest

from saccade.backends.webgpu.device import Gpu

pytest.importorskip("typer")
pytest.importorskip("rich")

SHAPE = ["--q", "1x64x4x64", "--kv-heads", 2, "--device", "webgpu"]


def call(*args: object) -> str:
    from typer.testing import CliRunner

    from saccade.cli.main import app

    done = CliRunner().invoke(app, [*map(str, args)])
    assert done.exit_code == 0, (done.stderr, done.exception)
    return done.stdout


def explained(*args: object) -> dict[str, Any]:
    return json.loads(call("explain", *SHAPE, *args, "--json"))["kernels"]


def test_devices(gpu: Gpu):
    found = next(b for b in json.loads(call("devices", "--json"))["backends"] if b["name"] == "webgpu")
    assert found["ready"]
    assert found["adapter"]["name"] == gpu.name
    assert found["adapter"]["software"] == gpu.software
    assert found["adapter"]["limits"].items() <= dict(gpu.limits).items()
    assert gpu.name in call("devices")


def test_explain_names_the_tile_and_the_variants(gpu: Gpu):
    half = explained("--dtype", "float16")["arrays"]
    assert ("shader-f16" in gpu.features) == half.startswith("float16 by shader-f16")
    causal = explained("--dtype", "float32", "--mask", "causal")
    assert causal["arrays"] == "float32"
    assert causal["mask"] == "one band, tested without lists"
    assert causal["tile"].startswith("64 queries")
    text = call("explain", *SHAPE, "--dtype", "bfloat16")
    assert "widened on the way up" in text
    assert "storage buffers" in text


def test_explain_says_what_is_lacking():
    lacks = "float64 is not computed on WebGPU: cast to float32, float16 or bfloat16"
    assert explained("--dtype", "float64") == {"not computed": lacks}


@pytest.mark.parametrize("backend", ["", "webgpu"])
def test_verify_takes_a_software_adapter_by_name_alone(backend: str, gpu: Gpu):
    words = ["--only", "decode", "--dtype", "float64", "--json"]
    chosen = ["--backend", backend] if backend else []
    from typer.testing import CliRunner

    from saccade.cli.main import app

    # WebGPU does not compute float64, so there are no results if nothing else is checked
    found = json.loads(CliRunner().invoke(app, ["verify", *words, *chosen]).stdout)
    absent = {b["name"]: b["reasons"] for b in found["absent"]}
    assert ("webgpu" in absent) == (gpu.software and not backend)
    assert {r["backend"] for r in found["results"]} == (set() if backend else {"cpu"})
