"""The sequences in the slice of a rank, and which of them continue on other ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor


class Sequences(NamedTuple):
    """The sequences of a slice: its rows, or the parts of one row between borders, as numbers and as a tensor."""

    borders: tuple[int, ...] | None = None
    cu_seqlens: Tensor | None = None

    @classmethod
    def between(cls, borders: Sequence[int], device: Any) -> Sequences:
        """The sequences of one row with these borders."""
        return cls(tuple(borders), torch.tensor(borders, dtype=torch.int32, device=device))

    def only(
        self, like: Tensor, which: Sequence[int], last: int | None = None
    ) -> tuple[Callable[[Tensor], Tensor], Sequences]:
        """(a function that selects some of the sequences from arrays [B, T, ...] like this one, the new sequences).

        last: select only this many tokens at the end of each.
        """
        if self.borders is None:
            begin = 0 if last is None else max(0, like.shape[1] - last)
            return lambda x: x[list(which), begin:], self
        spans = [range(self.borders[n], self.borders[n + 1]) for n in which]
        if last is not None:
            spans = [span[max(0, len(span) - last) :] for span in spans]
        index = torch.tensor([t for span in spans for t in span], dtype=torch.int64, device=like.device)
        borders = [0, *accumulate(len(span) for span in spans)]
        return lambda x: x.index_select(1, index), Sequences.between(borders, index.device)

    def place(self, parts: Sequence[tuple[Sequence[int], Tensor]]) -> Tensor:
        """Put outputs of parts of the sequences back at their positions."""
        if self.borders is None:
            order = [n for which, _ in parts for n in which]
            return torch.cat([y for _, y in parts])[inverse(order)]
        borders = self.borders
        order = [t for which, _ in parts for n in which for t in range(borders[n], borders[n + 1])]
        return torch.cat([y for _, y in parts], 1)[:, inverse(order)]


class Slice(NamedTuple):
    """How the sequences of a rank's slice continue on other ranks. A lane is one row [T] of the whole.

    heads, tails: the first and the last sequence of each lane in this slice. entered: whether the first one started on
    an earlier rank.
    """

    sequences: Sequences
    heads: tuple[int, ...]
    tails: tuple[int, ...]
    entered: tuple[bool, ...]

    @classmethod
    def of_rows(cls, rows: int, entered: bool) -> Slice:
        """Each row is one sequence."""
        lanes = tuple(range(rows))
        return cls(Sequences(), lanes, lanes, (entered,) * rows)

    @classmethod
    def of_borders(cls, cu_seqlens: Tensor, start: int, tokens: int) -> Slice:
        """The slice of `tokens` tokens from `start` on of one row with these borders."""
        borders: list[int] = cu_seqlens.tolist()
        inside = sorted({b - start for b in borders if start < b < start + tokens})
        sequences = Sequences.between([0, *inside, tokens], cu_seqlens.device)
        return cls(sequences, (0,), (len(inside),), (start not in borders,))

    @classmethod
    def of_positions(cls, positions: Tensor) -> Slice:
        """The slice of concatenated rows [B, T] in which each position 0 starts a sequence."""
        B, T = positions.shape
        begins = positions == 0
        entered = tuple((~begins[:, :1]).all(1).tolist())
        begins[:, :1] = True
        borders: list[int] = begins.flatten().nonzero()[:, 0].tolist()
        counts = begins.sum(1).cumsum(0).tolist()
        heads = (0, *counts[:-1])
        return cls(Sequences.between([*borders, B * T], positions.device), heads, tuple(n - 1 for n in counts), entered)

    @property
    def passed(self) -> tuple[bool, ...]:
        """For each lane whether the entering state leaves again, because no sequence starts or ends in this slice."""
        return tuple(a == b and on for a, b, on in zip(self.heads, self.tails, self.entered, strict=True))

    @property
    def size(self) -> int:
        """The number of sequences."""
        borders = self.sequences.borders
        return len(self.heads) if borders is None else len(borders) - 1

    @property
    def fresh(self) -> list[bool]:
        """For each sequence whether it starts in this slice."""
        on = {head for head, entered in zip(self.heads, self.entered, strict=True) if entered}
        return [n not in on for n in range(self.size)]


def inverse(order: Sequence[int]) -> list[int]:
    """The inverse of a permutation of 0 to n - 1."""
    return sorted(range(len(order)), key=order.__getitem__)
