"""The sizes of a mask that is lowered, and how much work that may take: one whose bands explode is refused at once."""

from __future__ import annotations

from typing import Any

# a union of more terms on the way is given up
MOST = 256
# and one of more before terms are joined, which is not even built
MOST_EXPANDED = 8 * MOST
# and a mask whose lowering compares more pairs of terms, which takes some 20 ms
MOST_COMPARED = 6_000


class TooManyBands(ValueError):
    """A mask does not fit the bands, rows or grids of the lowered form."""


class Size:
    """Tq and Tk of a mask that is lowered, and how many pairs of its terms may still be compared.

    Inside documents the sizes are arrays over these, and the outer size counts the pairs.
    """

    def __init__(self, Tq: Any, Tk: Any, outer: Size | None = None) -> None:
        self.Tq, self.Tk = Tq, Tk
        self._outer, self._left = outer, MOST_COMPARED

    def compare(self, pairs: int) -> None:
        """Counts pairs that are about to be compared; raises TooManyBands where they are too many."""
        if self._outer is not None:
            self._outer.compare(pairs)
            return
        self._left -= pairs
        if self._left < 0:
            raise TooManyBands(
                f"the mask takes more than {MOST_COMPARED} comparisons of bands to simplify; "
                "split it into fewer parts, or give it as blocks with saccade.mask.tiles(layout, block)"
            )
