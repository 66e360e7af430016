"""The lengths of a cache's rows, and a bound of them, so that an append need not wait for a device."""

from __future__ import annotations

from typing import Any

from ..frameworks.source import check_lengths

# a bound that no capacity reaches
UNKNOWN = 1 << 62


class Bounded:
    """A cache whose `lengths` [B] have an upper bound that the host knows. Lengths that the user changed have none."""

    _lengths: Any
    _followed: Any = None
    _bound = 0

    @property
    def lengths(self) -> Any:
        """int32 [batch]: the tokens of each sequence.

        If lengths were assigned, or changed in place, the next append reads them. Raises TypeError for another kind of
        array, and ValueError for others than integers [batch].
        """
        return self._lengths

    @lengths.setter
    def lengths(self, lengths: Any) -> None:
        if hasattr(lengths, "is_cpu") != hasattr(self._lengths, "is_cpu") or not hasattr(lengths, "dtype"):
            expected = type(self._lengths).__name__
            raise TypeError(f"lengths is a {type(lengths).__name__}; expected a {expected}, as the cache has")
        check_lengths(lengths, len(self._lengths))
        self._lengths, self._bound = lengths, UNKNOWN

    def follow(self, lengths: Any) -> None:
        """Use this array of the same numbers, without reading it: a captured graph needs lengths at one address."""
        self._lengths = self._followed = lengths

    def grow(self, after: Any, most: int, capacity: int) -> None:
        """Before tokens are written: raise ValueError if one of the lengths `after` [B] exceeds the capacity.

        most: an upper bound of each sequence's new tokens. Lengths of torch are read only if the bound exceeds the
        capacity, or if they were changed in place.
        """
        kept = self._lengths is self._followed or _unchanged(self._lengths)
        bound = self._bound + most if kept else UNKNOWN
        if bound > capacity:
            bound = _longest(self._lengths, after, capacity)
        self._bound = bound


def _unchanged(lengths: Any) -> bool:
    # torch counts changes in place, except those in inference mode; other arrays are in memory, and are read at once
    if not hasattr(lengths, "is_cpu"):
        return False
    return not lengths.is_cpu if lengths.is_inference() else lengths._version == 0


def _longest(lengths: Any, after: Any, capacity: int) -> int:
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
