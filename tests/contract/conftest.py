"""One suite for every backend: which are here, what they lack, and arrays that start as NaN."""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Generator
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from saccade import Unsupported, backends

LACKS = Path(__file__).parent / "lacks"

# how each backend gets its arrays: put and get of `saccade.testing.run.computed`
CONVERT: dict[str, dict[str, Callable[[Any], Any]]] = {"cpu": {}, "webgpu": {}}


@cache
def present(webgpu: bool) -> tuple[str, ...]:
    """The backends whose runtime is on this machine; WebGPU's driver has a process of its own."""
    if webgpu:
        return ("webgpu",)
    found = []
    for name in CONVERT:
        if name == "webgpu":
            continue
        try:
            backends.load(name)
        except Unsupported:
            continue
        found.append(name)
    return tuple(found)


@cache
def lacks(backend: str) -> tuple[str, ...]:
    """Patterns of test ids that a backend may skip, from its list; what follows " # " is the reason."""
    listed = LACKS / f"{backend}.txt"
    lines = listed.read_text().splitlines() if listed.exists() else []
    stripped = (line.partition(" # ")[0].strip() for line in lines)
    return tuple(line for line in stripped if line and not line.startswith("#"))


def listed(item: pytest.Item) -> bool:
    """Whether the backend's list names this test, as `test_file.py::test_name[parameters]`, * standing for anything."""
    backend = getattr(item, "callspec", None) and item.callspec.params.get("backend")
    name = f"{item.path.name}::{item.name}"
    return any(fnmatch.fnmatchcase(name, line.replace("[", "[[]")) for line in lacks(backend or ""))


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "backend" in metafunc.fixturenames:
        metafunc.parametrize("backend", present(bool(metafunc.config.getoption("--webgpu"))))


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """In a driver's process, tests of no backend have run elsewhere."""
    if config.getoption("--webgpu"):
        items[:] = [item for item in items if item.path.parent != LACKS.parent or "[webgpu" in item.name]


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Generator[None, Any, Any]:
    """A listed test must lack what it tests; a skip must be listed."""
    report = yield
    if listed(item):
        if call.excinfo is not None and call.excinfo.errisinstance(Unsupported):
            report.outcome = "skipped"
            report.longrepr = (str(item.path), 0, f"lacks: {call.excinfo.value}")
        elif report.when == "call" and report.passed:
            report.outcome, report.longrepr = "failed", "passes, yet stands in the list of what this backend lacks"
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


@pytest.fixture
def convert(backend: str) -> dict[str, Callable[[Any], Any]]:
    """How arrays of this test's backend are made and read."""
    return CONVERT[backend]
