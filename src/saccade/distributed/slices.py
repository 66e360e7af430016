"""How sequences lie in the slice of a rank, and which of them go on in another one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor


class Sequences(NamedTuple):
    """The sequences of a slice: its rows, or what lies between the borders of one row, as numbers and as a tensor."""

    borders: tuple[int, ...] | None = None
    cu_seqlens: Tensor | None = None

    @classmethod
    def between(cls, borders: Sequence[int], device: Any) -> Sequences:
        """Those of one row."""
        return cls(tuple(borders), torch.tensor(borders, dtype=torch.int32, device=device))

    def only(
        self, like: Tensor, which: Sequence[int], last: int | None = None
    ) -> tuple[Callable[[Tensor], Tensor], Sequences]:
        """What takes some of the sequences out of arrays [B, T, ..] like this one, and how they lie there.

        With `last` it takes only so many tokens at the end of each.
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
        """Outputs of some of the sequences each, put where they lie."""
        if self.borders is None:
            order = [n for which, _ in parts for n in which]
            return torch.cat([y for _, y in parts])[inverse(order)]
        borders = self.borders
        order = [t for which, _ in parts for n in which for t in range(borders[n], borders[n + 1])]
        return torch.cat([y for _, y in parts], 1)[:, inverse(order)]


class Slice(NamedTuple):
    """How the sequences of a rank's slice go on in others. A lane is one row [T] of the whole; it has a slice here.

    heads, tails: of each lane the first and the last of the sequences; entered: whether its first began before.
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
        """Of one row whose whole has these borders, the tokens from start on."""
        borders: list[int] = cu_seqlens.tolist()
        inside = sorted({b - start for b in borders if start < b < start + tokens})
        sequences = Sequences.between([0, *inside, tokens], cu_seqlens.device)
        return cls(sequences, (0,), (len(inside),), (start not in borders,))

    @classmethod
    def of_positions(cls, positions: Tensor) -> Slice:
        """Of rows [B, T] laid one behind the other, where each position 0 begins a sequence."""
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
        """Of each lane whether what enters also leaves: no sequence begins or ends here."""
        return tuple(a == b and on for a, b, on in zip(self.heads, self.tails, self.entered, strict=True))

    @property
    def size(self) -> int:
        """How many sequences there are."""
        borders = self.sequences.borders
        return len(self.heads) if borders is None else len(borders) - 1

    @property
    def fresh(self) -> list[bool]:
        """Of each sequence whether it begins here."""
        on = {head for head, entered in zip(self.heads, self.entered, strict=True) if entered}
        return [n not in on for n in range(self.size)]


def inverse(order: Sequence[int]) -> list[int]:
    """Where each of 0 .. n - 1 stands in a permutation of them."""
    return sorted(range(len(order)), key=order.__getitem__)
