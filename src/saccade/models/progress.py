"""The progress of a training run, and how it is read from a checkpoint."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .checkpoint import REMEDY, read_state
from .fields import is_whole
from .files import read_object
from .settings import agreed

# the files with a run's progress: of one process, and of ranks
CHECKPOINT, RANKS = "checkpoint.safetensors", "checkpoint.json"


@dataclass
class Progress:
    """The progress of a run: what its checkpoint stores besides tensors.

    total: the number of steps, None while it is not known; seconds: of training so far; validation: (step, loss).
    """

    settings: dict[str, Any]
    fingerprint: str
    bytes_per_token: float
    step: int = 0
    total: int | None = None
    seconds: float = 0.0
    validation: list[tuple[int, float]] = field(default_factory=list)

    @property
    def finished(self) -> bool:
        """Whether the run has done all of its steps."""
        return self.total is not None and self.step >= self.total


def read_progress(state: dict[str, Any], path: Path) -> Progress:
    """The progress of a run, from the state of its checkpoint at path. Raises ValueError for fields that do not fit."""
    try:
        progress = Progress(**state)
        agreed(progress.settings, {})
        if not (is_whole(progress.step) and (progress.total is None or progress.total >= progress.step >= 0)):
            raise ValueError(f"step {progress.step!r} of {progress.total!r}")
        progress.validation = [(int(step), float(loss)) for step, loss in progress.validation]
        progress.bytes_per_token, progress.seconds = float(progress.bytes_per_token), float(progress.seconds)
    except (TypeError, ValueError, KeyError, AttributeError) as error:
        raise ValueError(f"{path} has no progress that this version reads ({error}); {REMEDY}") from None
    return progress


def read_run(out: Path) -> Progress | None:
    """The progress of the run in a folder, None without a checkpoint. Raises ValueError for a damaged one."""
    one, ranks = out / CHECKPOINT, out / RANKS
    if one.exists():
        return read_progress(read_state(one), one)
    if not ranks.exists():
        return None
    state = read_object(ranks).get("progress")
    return read_progress(state if isinstance(state, dict) else {}, ranks)
