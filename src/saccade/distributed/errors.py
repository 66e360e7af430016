"""The error for a rank that stopped, hangs, or makes another call."""

from __future__ import annotations


class PeerError(RuntimeError):
    """Another rank of the group died, hangs, or makes another call.

    Attributes:
        what, step: the call, and its step in which this rank noticed the error.
        rank: the rank at fault, for which this rank waited.
        here: this rank.
        why: what is wrong with the rank at fault.
        silent: the ranks without a report; if one hangs or died, it is the cause.
        reports: what other ranks reported, by rank.

    Examples:
        >>> from saccade.distributed import PeerError, ring_attention  # on every rank, after init_process_group
        >>> try:
        ...     o = ring_attention(*torch.randn(3, 1, 128, 8, 64))
        ... except PeerError as error:
        ...     print(error.rank, error.why)
    """

    def __init__(self, what: str, step: str, rank: int, why: str, here: int) -> None:
        super().__init__(what, step, rank, why, here)
        self.what, self.step, self.rank, self.why, self.here = what, step, rank, why, here
        self.silent: tuple[int, ...] = ()
        self.reports: dict[int, str] = {}

    def __str__(self) -> str:
        text = f"{self.what}, {self.step}, on rank {self.here}: rank {self.rank} failed: {self.why}"
        if self.reports and self.silent:
            text += f"; no word from rank {', '.join(map(str, self.silent))}, on which others wait"
        elif self.reports:
            text += "; " + "; ".join(f"rank {r} says: {s}" for r, s in sorted(self.reports.items()))
        return text
