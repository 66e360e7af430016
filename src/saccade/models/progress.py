"""Where a run of training stands, and whether a checkpoint says so."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .checkpoint import REMEDY
from .fields import is_whole
from .settings import agreed


@dataclass
class Progress:
    """Where a run stands; what its checkpoint holds besides tensors."""

    settings: dict[str, Any]
    fingerprint: str
    bytes_per_token: float
    step: int = 0
    total: int | None = None
    seconds: float = 0.0
    validation: list[tuple[int, float]] = field(default_factory=list)


def read_progress(state: dict[str, Any], path: Path) -> Progress:
    """Where a run stands, from the state of its checkpoint at path. Raises ValueError where fields are not its own."""
    try:
        progress = Progress(**state)
        agreed(progress.settings, {})
        if not (is_whole(progress.step) and (progress.total is None or progress.total >= progress.step >= 0)):
            raise ValueError(f"step {progress.step!r} of {progress.total!r}")
        progress.validation = [(int(step), float(loss)) for step, loss in progress.validation]
        progress.bytes_per_token, progress.seconds = float(progress.bytes_per_token), float(progress.seconds)
    except (TypeError, ValueError, KeyError, AttributeError) as error:
        raise ValueError(f"{path} does not say where a run of this version stands ({error}); {REMEDY}") from None
    return progress
