"""WebGPU's tests and the contract suite on two drivers, each in a process of its own that cannot hang this one."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

pytest.importorskip("wgpu")

ROOT = Path(__file__).resolve().parent.parent.parent
SAMPLE_SECONDS, ALL_SECONDS = 2400, 3 * 3600


# vectors half as long compile three times as fast; a subgroup then has 4 lanes, as on SwiftShader, instead of 8
NARROW = {"LP_NATIVE_VECTOR_WIDTH": "128"}


@pytest.mark.timeout(0)
@pytest.mark.parametrize(
    "driver, folder, more",
    [
        ("llvmpipe", "webgpu", {}),
        ("llvmpipe", "contract", NARROW),
        ("swiftshader", "webgpu", {}),
        ("swiftshader", "contract", {}),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_on_driver(
    driver: str, folder: str, more: dict[str, str], drivers: dict[str, Path], pytestconfig: pytest.Config,
    tmp_path: Path, close_with: Callable[[str], None], emulated: bool,
):  # fmt: skip
    if not drivers[driver].exists():
        pytest.skip(f"no Vulkan driver {driver}: make system")
    options = [f"--webgpu={driver}", f"--seed={pytestconfig.getoption('--seed')}", "--color=no", "-q"]
    # llvmpipe compiles some kernels for a minute, on a busy machine for several
    options += ["--all", "--timeout", "3600"] if emulated else ["-m", "not slow", "--timeout", "600"]
    if driver == "llvmpipe" and not emulated:
        # it compiles their kernels for up to a minute each: SwiftShader draws their sample
        options += [f"--ignore={path}" for path in ROOT.glob("tests/*/test_recurrent*.py")]
    if not pytestconfig.getoption("--all"):
        options.append("--most=2")
        if driver == "llvmpipe":
            # SwiftShader, which compiles five to ten times as fast, runs a sample of every test
            options.append("--one-in=3")
            more = NARROW
    words = [sys.executable, "-m", "pytest", *options, f"tests/{folder}"]
    log, begin = tmp_path / "log.txt", time.perf_counter()
    limit = ALL_SECONDS if emulated else SAMPLE_SECONDS
    with log.open("w") as out:
        try:
            code = subprocess.run(
                words, cwd=ROOT, stdout=out, stderr=subprocess.STDOUT, timeout=limit, check=False,
                env={**os.environ, "XDG_RUNTIME_DIR": str(tmp_path), **more},
            ).returncode  # fmt: skip
        except subprocess.TimeoutExpired:
            code = f"ended after {limit} s"
    lines = log.read_text().splitlines()
    assert code == 0, f"tests/{folder} on {driver}: {code}\n" + "\n".join(lines[-100:])
    close_with(f"tests/{folder} on {driver}: {lines[-1]}, {time.perf_counter() - begin:.0f} s with its start")
