"""What is raised where another rank does not do its part."""

from __future__ import annotations


class PeerError(RuntimeError):
    """A rank died, hangs, or makes another call.

    Attributes:
        what, step: the call and the step of it in which this rank noticed.
        rank: the rank of the group that this one waited for; `here` is its own.
        why: what is wrong with it.
        told: the reports of other ranks, by rank; silent: the ranks without one, the cause if one hangs or died.
    """

    def __init__(self, what: str, step: str, rank: int, why: str, here: int) -> None:
        super().__init__(what, step, rank, why, here)
        self.what, self.step, self.rank, self.why, self.here = what, step, rank, why, here
        self.silent: tuple[int, ...] = ()
        self.told: dict[int, str] = {}

    def __str__(self) -> str:
        text = f"{self.what}, {self.step}, on rank {self.here}: rank {self.rank} failed: {self.why}"
        if self.told and self.silent:
            text += f"; no word from rank {', '.join(map(str, self.silent))}, on which others wait"
        elif self.told:
            text += "; " + "; ".join(f"rank {r} says: {s}" for r, s in sorted(self.told.items()))
        return text
