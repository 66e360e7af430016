"""The mask algebra: constructors, `&`, `|`, `~`, text, lowering and drawing. Imports NumPy alone."""

from __future__ import annotations

from typing import Any

from . import checks, heads, layouts, lengths, lowering, packing, patterns, positions, predicate, text
from .algebra import Mask, register
from .heads import *
from .kinds import KINDS
from .layouts import *
from .lengths import *
from .packing import *
from .positions import *
from .recognition import from_dense
from .text import parse

__all__ = ["Mask", "from_dense", "parse", "patterns"]
__all__ += heads.__all__
__all__ += layouts.__all__
__all__ += lengths.__all__
__all__ += packing.__all__
__all__ += positions.__all__


def _draw(*args: Any, **options: Any) -> str:
    # pictures are imported when one is drawn
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
