"""The mask algebra: constructors of masks, combined with `&`, `|` and `~`. It imports only NumPy.

i is the position of a query and j that of a key. The last query is aligned with the last key: row t of queries is at
position i = t + Tk - Tq, and under `& keys(stop)` or `& keys(start, stop)` at i = t + stop[b] - Tq, unless a mask has
an `offset`.

Examples:
    >>> from saccade import mask
    >>> packed = mask.causal() & mask.documents(cu_seqlens=[0, 1000, 1024])
    >>> packed &= mask.window(255, 0) | mask.global_tokens(4)
    >>> q = k = v = torch.randn(1, 1024, 8, 64)
    >>> o = saccade.attention(q, k, v, packed)
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from . import checks, heads, layouts, lengths, lowering, packing, patterns, positions, predicate, selection, text, trees
from .algebra import Mask, register
from .heads import *
from .kinds import KINDS
from .layouts import *
from .lengths import *
from .packing import *
from .positions import *
from .recognition import from_dense
from .selection import *
from .text import parse
from .trees import *

# in the order of the API's page
__all__ = ["patterns"]
__all__ += positions.__all__
__all__ += lengths.__all__
__all__ += packing.__all__
__all__ += layouts.__all__
__all__ += heads.__all__
__all__ += selection.__all__
__all__ += trees.__all__
__all__ += ["Mask", "from_dense", "parse"]


if not TYPE_CHECKING:
    # type checkers would allow every name

    def __getattr__(name: str) -> Any:
        hint = "" if name.startswith("_") else f": {text.instead(name)}"
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}{hint}")


def _draw(*args: Any, **options: Any) -> str:
    # the module is imported when a picture is drawn
    from .drawing import draw

    return draw(*args, **options)


def _notebook(mask: Mask) -> str | None:
    from .drawing import notebook

    return notebook(mask)


register(
    {kind.name: len(kind.leaves) for kind in KINDS.values()},
    [kind.name for kind in KINDS.values() if kind.booleans],
    evaluate=predicate.evaluate,
    check=checks.check,
    offset=lowering.offset_of,
    draw=_draw,
    notebook=_notebook,
    text=text.to_text,
)
