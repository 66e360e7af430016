"""What every floor shares: the seed, the sample of parametrised cases, blocked imports, the closing line."""

from __future__ import annotations

import random
import runpy
import sys
import zlib
from collections import defaultdict
from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).resolve().parent.parent

try:
    import hypothesis

    hypothesis.settings.register_profile("sample", max_examples=60, deadline=None, database=None)
    hypothesis.settings.register_profile("all", max_examples=1000, deadline=None, database=None)
except ImportError:
    hypothesis = None


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--seed", type=int, default=0, help="seed of random inputs and of the sample")
    parser.addoption("--all", action="store_true", help="every parametrised case instead of a seeded sample")
    parser.addoption("--block", default="", help="modules, comma separated, that imports must not find")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "sample(n): n of this test's parametrised cases, drawn by --seed, unless --all")
    for name in filter(None, config.getoption("--block").split(",")):
        sys.modules[name] = None  # type: ignore[assignment]
    if hypothesis is not None:
        hypothesis.settings.load_profile("all" if config.getoption("--all") else "sample")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Keep n cases of each test marked `sample(n)`: which ones follows from the seed and the test's name alone."""
    if config.getoption("--all"):
        return
    groups: dict[str, list[pytest.Item]] = defaultdict(list)
    for item in items:
        if item.get_closest_marker("sample") is not None:
            groups[item.nodeid.partition("[")[0]].append(item)
    left_out: set[pytest.Item] = set()
    for name, group in groups.items():
        marker = group[0].get_closest_marker("sample")
        assert marker is not None
        draw = random.Random(f"{config.getoption('--seed')} {name}")
        left_out |= set(group) - set(draw.sample(group, min(marker.args[0], len(group))))
    if left_out:
        config.hook.pytest_deselected(items=list(left_out))
        items[:] = [item for item in items if item not in left_out]


def pytest_report_header(config: pytest.Config) -> str:
    return f"seed {config.getoption('--seed')}, " + ("every case" if config.getoption("--all") else "a sample")


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    machine = runpy.run_path(str(ROOT / "scripts" / "machine.py"))
    terminalreporter.write_line(machine["lacks_line"]())


@pytest.fixture
def seed(request: pytest.FixtureRequest) -> int:
    """A number of its own for every test and every --seed."""
    return zlib.crc32(f"{request.config.getoption('--seed')} {request.node.nodeid}".encode())


@pytest.fixture
def rng(seed: int) -> np.random.Generator:
    return np.random.default_rng(seed)
