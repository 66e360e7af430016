"""What every floor shares: the seed, the sample of parametrised cases, blocked imports, the closing line."""

from __future__ import annotations

import os
import random
import re
import runpy
import shutil
import subprocess
import sys
import zlib
from collections import defaultdict
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

ROOT = Path(__file__).resolve().parent.parent
MACHINE = runpy.run_path(str(ROOT / "scripts" / "machine.py"))
DRIVERS: dict[str, Path] = MACHINE["DRIVERS"]["DRIVERS"]
# cases of a contract test on drivers of software, which compile for seconds what they run in milliseconds, under
# Triton's interpreter and in the Metal emulator
FEW = {"llvmpipe": 1, "swiftshader": 1, "triton": 1, "metal": 1}
CLOSING = "closing line"

try:
    import hypothesis

    hypothesis.settings.register_profile("sample", max_examples=60, deadline=None, database=None)
    hypothesis.settings.register_profile("all", max_examples=1000, deadline=None, database=None)
except ImportError:
    hypothesis = None


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--seed", type=int, default=0, help="seed of random inputs and of the sample")
    parser.addoption("--all", action="store_true", help="every parametrised case instead of a seeded sample")
    parser.addoption("--most", type=int, default=1 << 30, help="at most so many cases of a test, drawn by --seed")
    parser.addoption("--one-in", type=int, default=1, help="of so many tests one, drawn by --seed, unless --all")
    parser.addoption(
        "--every", type=int, default=1, help="of the tests that draw random configurations every n-th, also with --all"
    )
    parser.addoption(
        "--emulated", action="store_true",
        help="with --all, every case also on drivers of software and in Triton's interpreter: hours each",
    )  # fmt: skip
    parser.addoption("--webgpu", default="", help="only tests on the WebGPU adapter of this name, in this process")
    parser.addoption(
        "--triton", action="store_true", help="the contract suite on Triton's kernels: interpreted, without a GPU"
    )
    parser.addoption(
        "--metal",
        action="store_true",
        help="the contract suite on Metal kernels: emulated where MLX finds no Apple GPU",
    )
    parser.addoption("--part", default="1/1", help="a slice of the tests: 2/3 is the second of three")
    parser.addoption(
        "--passed", default="", help="a file of tests that passed, which are left out; those of this run are added"
    )
    parser.addoption(
        "--forms", default="", help="new forms of kernels to switch on, comma separated (saccade.testing.forms)"
    )
    parser.addoption("--block", default="", help="modules, comma separated, that imports must not find")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "sample(n): n of this test's parametrised cases, drawn by --seed, unless --all")
    if adapter := config.getoption("--webgpu"):
        os.environ["SACCADE_WEBGPU_ADAPTER"] = adapter
        # the loader reads it when the first adapter is looked for
        if driver := DRIVERS.get(adapter):
            os.environ["VK_DRIVER_FILES"] = str(driver)
    if config.getoption("--triton"):
        _share_gpus()
    for name in filter(None, config.getoption("--block").split(",")):
        sys.modules[name] = None  # type: ignore[assignment]
    if (path := config.getoption("--passed")) and "PYTEST_XDIST_WORKER" not in os.environ:
        config.pluginmanager.register(Passed(path))
    if names := config.getoption("--forms"):
        from saccade.testing import forms

        switched = forms.using(names.split(","))
        switched.__enter__()
        config.add_cleanup(lambda: switched.__exit__(None, None, None))
    if hypothesis is not None:
        hypothesis.settings.load_profile("all" if config.getoption("--all") else "sample")


def _share_gpus() -> None:
    # both are read when triton and torch begin; on AMD's GPUs all processes use the first
    if shutil.which("rocm-smi"):
        return
    if not shutil.which("nvidia-smi"):
        os.environ["TRITON_INTERPRET"] = "1"
    elif worker := os.environ.get("PYTEST_XDIST_WORKER", "")[2:]:
        gpus = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, check=True).stdout.count("GPU ")
        os.environ.setdefault("CUDA_VISIBLE_DEVICES", str(int(worker) % gpus))


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Keep n cases of each test marked `sample(n)`: which ones follows from the seed and the test's name alone.

    On WebGPU's drivers of software a few of every contract test, others on each.
    """
    if (every := config.getoption("--every")) > 1:
        left = [item for item in items if (_drawn(item) or 0) % every]
        config.hook.pytest_deselected(items=left)
        items[:] = [item for item in items if not (_drawn(item) or 0) % every]
    items.sort(key=lambda item: not _long(item))
    _slice(config, items)
    _leave_out(config, items)
    if config.getoption("--all"):
        _spread(items)
        return
    apart = config.getoption("--webgpu") or next((n for n in ("triton", "metal") if config.getoption(f"--{n}")), "")
    groups: dict[str, list[pytest.Item]] = defaultdict(list)
    for item in items:
        groups[item.nodeid.partition("[")[0]].append(item)
    left_out: set[pytest.Item] = set()
    for name, group in groups.items():
        marker = group[0].get_closest_marker("sample")
        kept = len(group) if marker is None else marker.args[0]
        if group[0].path.parent.name == "contract":
            kept = min(kept, FEW.get(apart, kept))
        kept = min(kept, config.getoption("--most"))
        if random.Random(f"{config.getoption('--seed')} {name} test").randrange(config.getoption("--one-in")):
            kept = 0
        if kept < len(group):
            draw = random.Random(f"{config.getoption('--seed')} {name}{apart}")
            left_out |= set(group) - set(draw.sample(group, kept))
    if left_out:
        config.hook.pytest_deselected(items=list(left_out))
        items[:] = [item for item in items if item not in left_out]
    _spread(items)


def _drawn(item: pytest.Item) -> int | None:
    """The number of a test that draws random configurations: its parameter `part`."""
    part = item.callspec.params.get("part") if hasattr(item, "callspec") else None
    return part if isinstance(part, int) else None


def _long(item: pytest.Item) -> bool:
    """Whether a test may run for minutes, as random configurations do where each compiles kernels of its own."""
    marker = item.get_closest_marker("timeout")
    return _drawn(item) is not None or (marker is not None and not 0 < marker.args[0] < 600)


def _spread(items: list[pytest.Item]) -> None:
    """Order tests so that every process begins with its share of those that run for minutes.

    Otherwise one process would run them all, after the others have ended. pytest-xdist gives each process an equal run
    of the list.
    """
    long = [item for item in items if _long(item)]
    rest = [item for item in items if not _long(item)]
    spread, workers = list[pytest.Item](), int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    for n in range(workers):
        size = (len(items) - len(spread)) // (workers - n)
        spread += (long[n::workers] + rest)[:size]
        del rest[: max(0, size - len(long[n::workers]))]
    items[:] = spread


def _slice(config: pytest.Config, items: list[pytest.Item]) -> None:
    part, of = map(int, config.getoption("--part").split("/"))
    if not 1 <= part <= of:
        raise pytest.UsageError(f"--part is {part}/{of}; expected one of 1/{of} to {of}/{of}")
    if of > 1:
        config.hook.pytest_deselected(items=[item for n, item in enumerate(items, 1) if n % of != part % of])
        items[:] = items[part - 1 :: of]


def _leave_out(config: pytest.Config, items: list[pytest.Item]) -> None:
    file = Path(config.getoption("--passed"))
    passed = set(file.read_text(encoding="utf-8").splitlines()) if file.is_file() else set()
    config.hook.pytest_deselected(items=[item for item in items if item.nodeid in passed])
    items[:] = [item for item in items if item.nodeid not in passed]


class Passed:
    """Adds tests that passed or were skipped to a file as they come, and failures to another next to it.

    So a run that is interrupted before its summary has named what failed.
    """

    def __init__(self, path: str) -> None:
        self.path = Path(path)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if (report.when == "call" and report.passed) or report.skipped:
            with self.path.open("a", encoding="utf-8") as file:
                file.write(f"{report.nodeid}\n")
        elif report.failed:
            with self.path.with_suffix(".failed").open("a", encoding="utf-8") as file:
                file.write(f"{report.nodeid} {report.when}\n{report.longreprtext}\n")


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    """A slice may have no chosen test, and all of a run's may have passed earlier."""
    config = session.config
    if exitstatus == pytest.ExitCode.NO_TESTS_COLLECTED and (config.option.passed or config.option.part != "1/1"):
        session.exitstatus = 0


def pytest_report_header(config: pytest.Config) -> str:
    drawn, part = "every case" if config.getoption("--all") else "a sample", config.getoption("--part")
    words = f"seed {config.getoption('--seed')}, {drawn}" + (f", part {part}" if part != "1/1" else "")
    return words + (f", with {config.getoption('--forms')}" if config.getoption("--forms") else "")


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    reports = (r for found in terminalreporter.stats.values() for r in found)
    told = (value for r in reports for name, value in getattr(r, "user_properties", ()) if name == CLOSING)
    for line in (*dict.fromkeys(told), MACHINE["lacks_line"]()):
        terminalreporter.write_line(line)


@pytest.fixture
def emulated(request: pytest.FixtureRequest) -> bool:
    """Whether devices of software are to run every case."""
    return bool(request.config.getoption("--all") and request.config.getoption("--emulated"))


@pytest.fixture
def drivers() -> dict[str, Path]:
    """Files for VK_DRIVER_FILES by the adapter's name; some may be missing."""
    return DRIVERS


@pytest.fixture
def close_with(record_property: Callable[[str, object], None]) -> Callable[[str], None]:
    """What a test gives to it is printed at the end of the run."""
    return partial(record_property, CLOSING)


@pytest.fixture
def seed(request: pytest.FixtureRequest) -> int:
    """A number of its own for every test and every --seed, the same on every backend."""
    name = re.sub(r"\[(webgpu|triton|metal)\b", "[cpu", request.node.nodeid)
    return zlib.crc32(f"{request.config.getoption('--seed')} {name}".encode())


@pytest.fixture
def rng(seed: int) -> np.random.Generator:
    return np.random.default_rng(seed)


@pytest.fixture(scope="session")
def browser() -> Iterator[Any]:
    """Chromium with WebGPU, whose adapter is one of software where there is no other."""
    playwright = pytest.importorskip("playwright.sync_api")
    program = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if program is None:
        pytest.skip("no browser: make system")
    with playwright.sync_playwright() as driver:
        found = driver.chromium.launch(executable_path=program, args=["--no-sandbox", "--enable-unsafe-webgpu"])
        yield found
        found.close()
