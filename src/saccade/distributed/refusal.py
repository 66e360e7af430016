"""A rank that raises in a call reports it to the others, which would otherwise wait for it until their limit."""

from __future__ import annotations

import re
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any, Protocol

from .errors import PeerError

# the start of the note of a rank that raised
_RAISED = "raised "


class Group(Protocol):
    """The part of `comm.Peers` that is used here: this rank, the number of its calls, and the common store."""

    rank: int
    calls: int
    store: Any

    def has(self, name: str) -> bool:
        """Whether the store has an entry of this name."""
        ...


@contextmanager
def taking_part(*groups: Group) -> Generator[None]:
    """The context of a call that all ranks of these groups make; errors of this rank are reported to the others."""
    calls = [peers.calls for peers in groups]
    try:
        yield
    except PeerError:
        raise
    except BaseException as error:
        for peers, before in zip(groups, calls, strict=True):
            _tell(peers, error, before)
        raise


def _tell(peers: Group, error: BaseException, calls: int) -> None:
    # report that this rank raised in the call after `calls` others
    told_to: set[int] = error.__dict__.setdefault("_told_to", set[int]())
    if id(peers) in told_to:
        return
    told_to.add(id(peers))
    # the other ranks count this call
    peers.calls = max(peers.calls, calls + 1)
    text = f"{_RAISED}{type(error).__name__}: {error}".encode()
    try:
        # in place of this rank's signature, and of its report about errors of other ranks
        for kind in ("call", "failed"):
            peers.store.set(f"saccade/{kind}/{peers.calls}/{peers.rank}", text)
        peers.store.set(_name(peers.calls), f"{peers.rank} ".encode() + text)
    except RuntimeError:
        # the store ends with the process that hosts it
        pass


def refusal(peers: Group, call: int, signature: str) -> tuple[int, str] | None:
    """(rank, reason) of a rank that raised in the call of this number and signature, or None."""
    if not peers.has(_name(call)):
        return None
    rank, _, text = peers.store.get(_name(call)).decode().partition(" ")
    return int(rank), disagreement(text, signature)


def _name(number: int) -> str:
    return f"saccade/refused/{number}"


def disagreement(theirs: str, mine: str) -> str:
    """Why a rank whose note is `theirs` does not make the call with the signature `mine`."""
    if theirs.startswith(_RAISED):
        return f"it {theirs}"
    text = f"it makes another call: {_difference(theirs, mine)}"
    lengths = [match[1] for note in (theirs, mine) if (match := re.search(r"; T (\d+);", note))]
    if len(set(lengths)) > 1:
        text += ": give length=, that of the whole sequence, if slices differ"
    return text


def _difference(theirs: str, mine: str) -> str:
    # the fields, separated by "; ", in which two signatures differ
    pairs = zip(theirs.split("; "), mine.split("; "), strict=False)
    parts = [f"{a} there and {b} here" for a, b in pairs if a != b]
    return ", ".join(parts) or f"{theirs[:200]} there and {mine[:200]} here"


def first_line(error: Exception) -> str:
    """The first line of an error message, at most 200 characters."""
    return str(error).strip().partition("\n")[0][:200]
