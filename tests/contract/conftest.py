"""One suite for every backend: the available ones, what they lack, and arrays that start as NaN."""

from __future__ import annotations

import fnmatch
from collections.abc import Generator
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import saccade
from saccade import Unsupported
from saccade.testing.inputs import NEEDLES
from saccade.testing.tensors import converted

LACKS = Path(__file__).parent / "lacks"

# WebGPU's drivers of software
DRIVERS = ("llvmpipe", "swiftshader")
# backends whose runtime has a process of its own, and the option that starts it
APART = ("webgpu", "triton", "metal")


def present(config: pytest.Config) -> tuple[str, ...]:
    """The backends of this process."""
    apart = tuple(name for name in APART if config.getoption(f"--{name}"))
    return apart or ("cpu",)


@cache
def lacks(backend: str, sign: str = "") -> tuple[str, ...]:
    """Patterns of test ids in a backend's list; the text behind " # " is the reason.

    A plain line names tests that the backend must refuse, one that begins with "~" tests whose failure the
    specification leaves open.
    """
    path = LACKS / f"{backend}.txt"
    lines = [line.partition(" # ")[0].strip() for line in path.read_text().splitlines()] if path.exists() else []
    found = [line for line in lines if line and not line.startswith("#")]
    return tuple(line.lstrip("~ ") for line in found if line.startswith("~") == (sign == "~"))


def listed(item: pytest.Item, sign: str = "") -> bool:
    """Whether the backend's list names this test, as `test_file.py::test_name[parameters]`, * standing for anything."""
    backend = getattr(item, "callspec", None) and item.callspec.params.get("backend")
    name = f"{item.path.name}::{item.name}"
    return any(fnmatch.fnmatchcase(name, line.replace("[", "[[]")) for line in lacks(backend or "", sign))


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "backend" in metafunc.fixturenames:
        metafunc.parametrize("backend", present(metafunc.config))


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """In the process of one backend, tests of no backend have run elsewhere."""
    (name, *_) = present(config)
    if name in APART:
        items[:] = [item for item in items if item.path.parent != LACKS.parent or f"[{name}" in item.name]


@pytest.fixture
def kinds(request: pytest.FixtureRequest, emulated: bool, seed: int) -> tuple[str, ...]:
    """The kinds of inputs: all of them, or of a device of software random numbers and one needle, drawn by the seed."""
    config = request.config
    software = config.getoption("--webgpu") in DRIVERS or (config.getoption("--metal") and metal_is_emulated())
    software = software or (config.getoption("--triton") and triton_is_interpreted())
    return ("random", NEEDLES[seed % len(NEEDLES)]) if software and not emulated else ("random", *NEEDLES)


def metal_is_emulated() -> bool:
    """Whether Metal kernels of this process run in the emulator."""
    from saccade.backends import metal
    from saccade.testing.metal.runtime import Emulator

    before = metal.install(None)
    metal.install(before)
    return isinstance(before, Emulator)


def triton_is_interpreted() -> bool:
    """Whether Triton kernels of this process are interpreted."""
    from saccade.backends.triton.chip import interpreted

    return interpreted()


@pytest.fixture(autouse=True, scope="session")
def metal_device(request: pytest.FixtureRequest) -> None:
    """Metal kernels run in the emulator where MLX finds no Apple GPU."""
    if request.config.getoption("--metal"):
        from saccade.backends import metal

        if metal.missing():
            from saccade.testing.metal.runtime import Emulator

            metal.install(Emulator())


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Generator[None, Any, Any]:
    """A listed test must lack what it tests; a skip must be listed."""
    report = yield
    if listed(item):
        if call.excinfo is not None and call.excinfo.errisinstance(Unsupported):
            report.outcome = "skipped"
            report.longrepr = (str(item.path), 0, f"lacks: {call.excinfo.value}")
        elif report.when == "call" and report.passed:
            report.outcome, report.longrepr = "failed", "passes, but is in the list of what this backend lacks"
    elif listed(item, "~"):
        if report.when == "call" and report.failed:
            report.outcome, report.longrepr = "skipped", (str(item.path), 0, "left open by the specification")
    elif report.skipped:
        report.outcome, report.longrepr = "failed", f"a skip that no list in {LACKS} names: {report.longrepr}"
    return report


@pytest.fixture
def near_misses(backend: str) -> tuple[str, ...]:
    """The random configurations that a backend's list names as just outside the tolerance rule."""
    return lacks(backend)


@pytest.fixture(autouse=True)
def nan_filled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Outputs start as NaN: an element that a kernel leaves out shows."""
    empty, empty_like = np.empty, np.empty_like

    def fill(x: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        if x.dtype.kind == "f":
            x.fill(np.nan)
        elif x.dtype == np.uint16:
            # NaN of a bfloat16 in its carrier
            x.fill(0x7FC0)
        return x

    monkeypatch.setattr(np, "empty", lambda *a, **k: fill(empty(*a, **k)))
    monkeypatch.setattr(np, "empty_like", lambda *a, **k: fill(empty_like(*a, **k)))


@pytest.fixture(autouse=True)
def as_tensors(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton computes torch tensors alone: the public calls convert what the tests give them as NumPy arrays."""
    if "backend" not in request.fixturenames or request.getfixturevalue("backend") != "triton":
        return
    import torch

    # uninitialised tensors hold NaN
    torch.use_deterministic_algorithms(True, warn_only=True)
    for name in ("attention", "attention_backward", "decode", "paged_attention"):
        monkeypatch.setattr(saccade, name, converted(getattr(saccade, name), "triton"))
