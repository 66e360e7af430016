"""Tests of Metal kernels in the emulator: they need a C++ compiler and no Apple device."""

from __future__ import annotations

from collections.abc import Callable, Generator
from pathlib import Path

import pytest

from saccade.backends import metal
from saccade.testing.metal.runtime import Emulator

# a kernel compiles in a second, but in many seconds on a busy machine
SECONDS = 900


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.parent == Path(__file__).parent:
            item.add_marker(pytest.mark.timeout(SECONDS))


@pytest.fixture
def emulator() -> Generator[Callable[..., Emulator], None, None]:
    """Replaces the device by an emulator with the given options until the test ends."""
    before = metal.install(None)
    metal.install(before)

    def make(**options) -> Emulator:
        made = Emulator(**options)
        metal.install(made)
        return made

    yield make
    metal.install(before)
