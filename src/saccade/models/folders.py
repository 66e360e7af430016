"""The folder of a run: what fills it, what a new run removes, and which process trains in it."""

from __future__ import annotations

import os
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

from .checkpoint import remove_folders
from .files import temporary
from .losses import LOSSES
from .progress import CHECKPOINT, RANKS
from .tokens import FORMAT, TOKENIZER
from .weights import SHARDS, WEIGHTS, remove_shards

# `load_model` also reads end tokens from the second
CONFIG, ENDS = "config.json", "generation_config.json"
# a folder with any of these holds a run or a model, which only --overwrite replaces
FILES = (CHECKPOINT, RANKS, WEIGHTS, SHARDS, CONFIG, TOKENIZER, FORMAT, LOSSES, ENDS)


def contents(folder: Path) -> list[str]:
    """The names of what belongs to a run or a model."""
    files = [name for name in FILES if (folder / name).exists()]
    return files + sorted(path.name for path in folder.glob("checkpoint-*"))


def remove_run(folder: Path) -> None:
    """Remove a run or a model, except files that a new run replaces."""
    # the checkpoint first: without it, the other files are not a run that can be resumed
    for name in (CHECKPOINT, RANKS, WEIGHTS, FORMAT, ENDS):
        (folder / name).unlink(missing_ok=True)
    remove_shards(folder)
    remove_folders(folder)


def remove_temporaries(folder: Path) -> None:
    """Remove what a killed process had not renamed yet."""
    for name in FILES:
        temporary(folder / name).unlink(missing_ok=True)


@contextmanager
def claimed(folder: Path) -> Generator[None]:
    """Makes a folder and holds it until the end. Raises ValueError if it is held already, by this process or another.

    A killed process holds nothing. Where the system or its disk cannot lock folders, nothing is held.
    """
    folder.mkdir(parents=True, exist_ok=True)
    if os.name != "posix":
        yield
        return
    import fcntl

    handle = os.open(folder, os.O_RDONLY)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ValueError(f"a run is being trained in {folder}; wait until it ends, or stop it") from None
        except OSError:
            pass
        yield
    finally:
        os.close(handle)
