"""The structure of a mask as text: all that is known of it without its leaves.

In the text `_` is None, `#` an integer and `@` an array, as in `and(causal(_),window(#,#,_))`. `%` is an array of
booleans as bits: an integer, the size of the last dimension, and an array of bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from typing import Any

from .bits import Bits

# a leaf is None (a default), an integer, an array (NumPy, or torch by reference), or Bits of an array
Leaf = Any
# kind, the signs of its leaves, its children
Node = tuple[str, str, tuple[Any, ...]]

# from `kinds.KINDS`: how many leaves each kind of node has
ARITY: dict[str, int] = {}


def text(mask: Any, ints: list[Any], data: list[Any]) -> str:
    """The structure of a mask; its integers and its arrays are appended to the lists in the order of the text."""
    parts: list[str] = []
    for leaf in mask.args:
        if leaf is None:
            parts.append("_")
        elif isinstance(leaf, Bits):
            parts.append("%")
            ints.append(leaf.n)
            data.append(leaf.packed)
        # in this order, because torch.compile does not trace hasattr of a symbolic integer
        elif isinstance(leaf, int) or not hasattr(leaf, "shape"):
            parts.append("#")
            ints.append(leaf)
        else:
            parts.append("@")
            data.append(leaf)
    for child in mask.children:
        parts.append(text(child, ints, data))
    return mask.kind + "(" + ",".join(parts) + ")"


# the next leaf of each sign from the iterators of integers and of arrays
_LEAVES: dict[str, Callable[[Iterator[Any], Iterator[Any]], Leaf]] = {
    "_": lambda ints, data: None,
    "#": lambda ints, data: next(ints),
    "@": lambda ints, data: next(data),
    "%": lambda ints, data: Bits(next(data), next(ints)),
}


def build(make: Callable[..., Any], structure: str, ints: Sequence[Any], data: Sequence[Any]) -> Any:
    """The inverse of `text`: `make(kind, leaves, children)` makes each node. Arrays are used by reference."""
    return _build(make, _parse(structure), iter(ints), iter(data))


def _build(make: Callable[..., Any], node: Node, ints: Iterator[Any], data: Iterator[Any]) -> Any:
    kind, signs, children = node
    leaves = tuple([_LEAVES[sign](ints, data) for sign in signs])
    return make(kind, leaves, tuple([_build(make, child, ints, data) for child in children]))


@lru_cache(maxsize=1024)
def _parse(structure: str) -> Node:
    node, rest = _read_node(structure, 0)
    if rest != len(structure):
        raise ValueError(f"a mask structure ends at {rest} of {structure!r}; expected one node such as 'causal(_)'")
    return node


def _read_node(structure: str, at: int) -> tuple[Node, int]:
    start = structure.find("(", at)
    kind = structure[at:start] if start >= 0 else structure[at:]
    if kind not in ARITY or start < 0:
        raise ValueError(f"unknown node {kind!r} in mask structure {structure!r}; known are {', '.join(ARITY)}")
    at = start + 1
    signs = ""
    children: list[Node] = []
    while at < len(structure) and structure[at] != ")":
        if structure[at] in _LEAVES:
            signs += structure[at]
            at += 1
        else:
            child, at = _read_node(structure, at)
            children.append(child)
        if at < len(structure) and structure[at] == ",":
            at += 1
    if at >= len(structure) or len(signs) != ARITY[kind]:
        raise ValueError(
            f"{kind} in mask structure {structure!r} has leaves {signs!r}; expected {ARITY[kind]} and a ')'"
        )
    return (kind, signs, tuple(children)), at + 1
