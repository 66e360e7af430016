"""The sizes for which a mask is lowered, and limits of the work: a mask with too many bands is refused early."""

from __future__ import annotations

from typing import Any

# the largest union during lowering
MOST = 256
# the largest union before terms are joined; a larger one is not built
MOST_EXPANDED = 8 * MOST
# the most pairs of terms that are compared, which takes about 20 ms
MOST_COMPARED = 6_000
SIMPLER = "split it into fewer parts, or give it as blocks with saccade.mask.tiles(layout, block)"


class TooManyBands(ValueError):
    """A mask does not fit in the bands, rows or grids of the lowered form."""


class Size:
    """Tq and Tk for which a mask is lowered, and how many pairs of its terms may still be compared.

    Inside documents the sizes are arrays over documents, and `outer` counts the pairs.
    """

    def __init__(self, Tq: Any, Tk: Any, outer: Size | None = None) -> None:
        self.Tq, self.Tk = Tq, Tk
        self._outer, self._left = outer, MOST_COMPARED

    def compare(self, pairs: int) -> None:
        """Count pairs before they are compared; raises TooManyBands if they are too many."""
        if self._outer is not None:
            self._outer.compare(pairs)
            return
        self._left -= pairs
        if self._left < 0:
            raise TooManyBands(f"the mask takes more than {MOST_COMPARED} comparisons to simplify; {SIMPLER}")
