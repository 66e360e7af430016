"""The lengths of a cache's rows, and a bound of them, so that an append need not wait for a device."""

from __future__ import annotations

from typing import Any

from ..arrays import cast, namespace
from ..frameworks.source import check_lengths

# a bound that no capacity reaches
UNKNOWN = 1 << 62
LARGEST = (1 << 31) - 1


class Bounded:
    """A cache whose `lengths` [B] have an upper bound that the host knows. Lengths that the user changed have none."""

    _lengths: Any
    _followed: Any = None
    _bound = 0

    @property
    def lengths(self) -> Any:
        """int32 [batch]: the tokens of each sequence.

        If lengths were assigned, or changed in place, the next append reads them. Other integers are converted to
        int32. Raises TypeError for another kind of array, and ValueError for others than integers [batch].
        """
        return self._lengths

    @lengths.setter
    def lengths(self, lengths: Any) -> None:
        if hasattr(lengths, "is_cpu") != hasattr(self._lengths, "is_cpu") or not hasattr(lengths, "dtype"):
            expected = type(self._lengths).__name__
            raise TypeError(f"lengths is a {type(lengths).__name__}; expected a {expected}, as the cache has")
        check_lengths(lengths, len(self._lengths))
        dtype = self._lengths.dtype
        if lengths.dtype != dtype:
            # sums of a smaller type could wrap around; a number that int32 lacks stays too large
            lengths = cast(cast(lengths, namespace(lengths).int64).clip(-1, LARGEST), dtype)
        self._lengths, self._bound = lengths, UNKNOWN
        self._assigned()

    def _assigned(self) -> None:
        """Called after lengths were assigned."""

    def follow(self, lengths: Any) -> None:
        """Use this array of the same numbers, without reading it: a captured graph needs lengths at one address."""
        self._lengths = self._followed = lengths

    def grow(self, after: Any, most: int, capacity: int) -> None:
        """Before tokens are written: raise ValueError if one of the lengths `after` [B] exceeds the capacity.

        most: an upper bound of each sequence's new tokens. Lengths of torch are read only if the bound exceeds the
        capacity, or if they were changed in place.
        """
        kept = self._lengths is self._followed or unchanged(self._lengths)
        bound = self._bound + most if kept else UNKNOWN
        if bound > capacity:
            bound = _longest(self._lengths, after, capacity)
        self._bound = bound


def unchanged(lengths: Any) -> bool:
    """Whether an array is known to have the numbers with which it was made."""
    # torch counts changes in place, except those in inference mode; other arrays are in memory, and are read at once
    if not hasattr(lengths, "is_cpu"):
        return False
    return not lengths.is_cpu if lengths.is_inference() else lengths._version == 0


def _longest(lengths: Any, after: Any, capacity: int) -> int:
    if not len(lengths):
        return 0
    if int(lengths.min()) < 0:
        raise ValueError(f"the cache has lengths {lengths.tolist()}; expected 0 <= length <= its capacity, {capacity}")
    # a sum that int32 lacks has become negative
    full = int((lengths if int(lengths.max()) > capacity else after).argmax())
    now, longest = int(lengths[full]), max(int(lengths[full]), int(after[full]))
    if longest > capacity:
        raise ValueError(
            f"sequence {full} holds {now} tokens and would take {(int(after[full]) - now) % (1 << 32)} more; "
            f"expected at most {capacity}, the capacity: make a larger cache or append fewer"
        )
    return longest
