"""The lengths of a cache's rows, and a bound of them, so that an append need not wait for a device."""

from __future__ import annotations

from typing import Any

from ..frameworks.source import check_lengths

# a bound that no capacity reaches
UNKNOWN = 1 << 62


class Bounded:
    """A cache whose `lengths` [B] have an upper bound that the host knows. Lengths that are assigned have none."""

    _lengths: Any
    _bound = 0

    @property
    def lengths(self) -> Any:
        """int32 [batch]: the tokens of each sequence.

        If lengths were assigned, the next append reads them. Raises TypeError for another kind of array, and ValueError
        for others than integers [batch].
        """
        return self._lengths

    @lengths.setter
    def lengths(self, lengths: Any) -> None:
        if hasattr(lengths, "is_cpu") != hasattr(self._lengths, "is_cpu") or not hasattr(lengths, "dtype"):
            kinds = type(lengths).__name__, type(self._lengths).__name__
            raise TypeError("lengths is a {}; expected a {}, as the cache has".format(*kinds))
        check_lengths(lengths, len(self._lengths))
        self._lengths, self._bound = lengths, UNKNOWN

    def follow(self, lengths: Any) -> None:
        """Use this array of the same numbers, without reading it: a captured graph needs lengths at one address."""
        self._lengths = lengths


def bound_of(lengths: Any, after: Any, bound: int, capacity: int) -> int:
    """An upper bound of the lengths `after` [B]; raises ValueError if one exceeds the capacity.

    lengths: [B], those before. bound: an upper bound that the host knows; the lengths are read only if it exceeds the
    capacity.
    """
    if bound <= capacity:
        return bound
    longest = int(after.max()) if len(after) else 0
    if len(after) and int(lengths.min()) < 0:
        raise ValueError(f"the cache has lengths {lengths.tolist()}; expected 0 <= length <= its capacity, {capacity}")
    if longest > capacity:
        full = int(after.argmax())
        raise ValueError(
            f"sequence {full} holds {int(lengths[full])} tokens and would take {int(after[full] - lengths[full])} "
            f"more; expected at most {capacity}, the capacity: make a larger cache or append fewer"
        )
    return longest
