"""The mask algebra: constructors, `&`, `|`, `~`, text, lowering and drawing. Imports NumPy alone."""

from __future__ import annotations

from . import patterns
from .algebra import Mask
from .constructors import (
    causal,
    chunked,
    columns,
    dense,
    dilated,
    documents,
    full,
    global_tokens,
    keys,
    per_head,
    prefix,
    strided,
    tiles,
    window,
)
from .text import parse

__all__ = [
    "Mask",
    "causal",
    "chunked",
    "columns",
    "dense",
    "dilated",
    "documents",
    "full",
    "global_tokens",
    "keys",
    "parse",
    "patterns",
    "per_head",
    "prefix",
    "strided",
    "tiles",
    "window",
]
