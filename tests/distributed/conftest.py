"""Worlds end with the session."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent))


@pytest.fixture(scope="session", autouse=True)
def _worlds_end() -> Iterator[None]:
    yield
    from world import close_all

    close_all()
