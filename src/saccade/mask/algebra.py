"""The mask expression: a hashable structure and its leaves (integers, arrays).

A mask says which keys j a query at position i may see. `contents.py` explains how arrays are read and compared.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from . import structures
from .contents import equal, freeze, host, snapshot, version
from .structures import Leaf

# from `kinds.KINDS`: the kinds whose arrays are compared as booleans
BOOLEANS: set[str] = set()
# functions that methods of `Mask` call, from modules that import this one
_methods: dict[str, Callable[..., Any]] = {}


def register(arity: Mapping[str, int], booleans: Iterable[str], **methods: Callable[..., Any]) -> None:
    """Supply functions and tables from modules that import this one; `saccade.mask` calls it once, on import."""
    structures.ARITY.update({**arity, "and": 0, "or": 0, "not": 0})
    BOOLEANS.update(booleans)
    _methods.update(methods)


def is_array(leaf: Leaf) -> bool:
    """Whether a leaf is an array (NumPy or torch) rather than None or an integer."""
    return not isinstance(leaf, int) and hasattr(leaf, "shape")


class Mask:
    """An attention mask. Make one with the constructors of `saccade.mask`, and combine masks with `&`, `|` and `~`.

    Masks are immutable and hashable. They print as calls of their constructors, which `saccade.mask.parse` reads; they
    can be pickled, and they are equal if they are the same expression with equal arrays.

    Attributes:
        kind: name of the node, a key of `structures.ARITY`.
        args: leaves, each None, an integer or an array.
        children: sub-expressions.

    Examples:
        >>> print(mask.causal() & ~mask.window(1, 0))
        causal() & ~window(1, 0)
    """

    __slots__ = ("__weakref__", "_flat", "_key", "args", "children", "kind", "memo")

    def __init__(self, kind: str, args: tuple[Leaf, ...] = (), children: tuple[Mask, ...] = ()) -> None:
        self.kind = kind
        self.args = args
        self.children = children
        self._flat: tuple[str, list[Any], list[Any]] | None = None
        self._key: tuple[Any, ...] | None = None
        # results that callers store with this mask (lowered forms, device copies)
        self.memo: dict[Any, Any] | None = None

    def __and__(self, other: Mask) -> Mask:
        return _join("and", self, other)

    def __or__(self, other: Mask) -> Mask:
        return _join("or", self, other)

    def __invert__(self) -> Mask:
        _only_and(self, "~")
        return self.children[0] if self.kind == "not" else Mask("not", (), (self,))

    def __bool__(self) -> bool:
        raise TypeError(
            "the truth value of a mask is not defined; combine masks with & (both), | (either) and ~ (not) "
            "instead of and, or, not, and compare with `mask is None`"
        )

    def flatten(self) -> tuple[str, list[Any], list[Any]]:
        """(structure, ints, data): the structure as text, and the integer and array leaves in the order of the text."""
        if self._flat is None:
            ints: list[Any] = []
            data: list[Any] = []
            self._flat = (structures.text(self, ints, data), ints, data)
        structure, ints, data = self._flat
        return structure, list(ints), list(data)

    @staticmethod
    def unflatten(structure: str, ints: Sequence[Any], data: Sequence[Any]) -> Mask:
        """The inverse of `flatten`; arrays are used by reference."""
        return structures.build(Mask, structure, ints, data)

    @property
    def has_data(self) -> bool:
        """Whether any leaf is an array."""
        if self._flat is None:
            self.flatten()
        return bool(self._flat[2])  # type: ignore[index]

    @property
    def key(self) -> tuple[Any, ...]:
        """A hashable key of the structure, the integers, and the id and version of the contents of each array.

        A table that stores a key must also keep the mask alive; otherwise another array may get the same id.
        """
        if self._key is not None:
            return self._key
        structure, ints, data = self.flatten()
        key = (structure, tuple(ints), tuple((id(a), version(a)) for a in data))
        # the contents of a tensor may change, so its key is computed each time
        if all(isinstance(a, np.ndarray) for a in data):
            self._key = key
        return key

    def __eq__(self, other: object) -> bool:
        """Whether two masks are the same expression with equal arrays; a CUDA tensor equals only itself."""
        if self is other:
            return True
        if not isinstance(other, Mask):
            return NotImplemented
        return _equal(self, other)

    def __hash__(self) -> int:
        leaves = tuple(tuple(leaf.shape) if is_array(leaf) else leaf for leaf in self.args)
        return hash((self.kind, leaves, self.children))

    def map_arrays(self, function: Callable[[Any], Any]) -> Mask:
        """This mask with `function` applied to every array leaf."""
        structure, ints, data = self.flatten()
        return Mask.unflatten(structure, ints, [function(a) for a in data])

    def snapshot(self) -> Mask:
        """This mask with the present contents of its CPU tensors: later writes to them do not affect it."""
        return self if self._key is not None else self.map_arrays(snapshot)

    def to(self, device: Any) -> Mask:
        """This mask with its arrays as torch tensors on `device`, or as NumPy arrays for `"numpy"`."""
        if not self.has_data:
            return self
        if device == "numpy":
            return self.map_arrays(lambda a: freeze(host(a)))
        import torch

        return self.map_arrays(lambda a: torch.as_tensor(np.array(a) if isinstance(a, np.ndarray) else a).to(device))

    def __reduce__(self) -> tuple[Any, ...]:
        return (_rebuild, self.flatten())

    def evaluate(self, B: int, Hq: int, Tq: int, Tk: int) -> NDArray[np.bool_]:
        """The mask as a boolean NumPy array [B|1, Hq|1, Tq, Tk], True where a key is seen; O(Tq · Tk) memory.

        It is computed directly from the definitions of the constructors. Raises ValueError if arrays do not fit.
        """
        return _methods["evaluate"](self, B, Hq, Tq, Tk)

    def check(self, B: int, Tq: int, Tk: int, Hq: int | None = None) -> None:
        """Raise ValueError if arrays have wrong shapes or contents (decreasing ids, indices out of range).

        It reads arrays on devices, whose contents are otherwise trusted.
        """
        _methods["check"](self, B, Tq, Tk, Hq)

    def offset(self, B: int, Tq: int, Tk: int) -> Any:
        """The default i - t of this mask: Tk - Tq, or stop - Tq if it has keys(stop); an int or int64 [B]."""
        return _methods["offset"](self, Tq, Tk)

    def draw(
        self, Tq: int, Tk: int, path: Any = None, *, B: int = 1, batch: int = 0, head: int = 0, size: int = 64
    ) -> str:
        """A picture of the mask as text: █ all pairs of a cell are allowed, ▒ some, · none.

        Args:
            Tq, Tk: queries (downward) and keys (to the right).
            path: a file to write the picture to as well: .svg, .png or .txt.
            B: the batch size of the mask's arrays.
            batch, head: which batch entry and query head to draw.
            size: the largest number of cells per side.

        Raises:
            ValueError: the file has another suffix, the arrays have other sizes, or batch or head is out of range.

        Examples:
            >>> text = mask.causal().draw(64, 64, "causal.svg")
        """
        return _methods["draw"](self, (Tq, Tk), path, B=B, batch=batch, head=head, size=size)

    def _repr_svg_(self) -> str | None:
        """The picture that notebooks show, or None if the mask cannot be drawn; reads the arrays."""
        return _methods["notebook"](self)

    def __str__(self) -> str:
        return _methods["text"](self)

    __repr__ = __str__


def selected(mask: Mask | None) -> Mask | None:
    """The `select` node of a mask, itself or a member of its outermost `&` chain, or None."""
    if mask is None or mask.kind == "select":
        return mask
    return next((child for child in mask.children if child.kind == "select"), None) if mask.kind == "and" else None


def contains(mask: Mask, kind: str) -> bool:
    """Whether a node of this kind occurs in the expression."""
    return mask.kind == kind or any(contains(c, kind) for c in mask.children)


def _join(kind: str, left: Mask, right: Mask) -> Mask:
    # chains are flat: a & b & c is one node, in which keys() and select() are direct children
    if not isinstance(right, Mask):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise TypeError(
            f"a mask combines only with masks, got {type(right).__name__}; wrap a boolean array in saccade.mask.dense"
        )
    if kind == "or":
        for side in (left, right):
            _only_and(side, "|")
    elif selected(left) is not None and selected(right) is not None:
        raise ValueError("a mask has at most one select(...); give one with the blocks that are in both lists")
    a = left.children if left.kind == kind else (left,)
    b = right.children if right.kind == kind else (right,)
    return Mask(kind, (), a + b)


def _only_and(mask: Mask, sign: str) -> None:
    if selected(mask) is not None:
        raise ValueError(
            f"select(...) is combined with other masks by & only, not by {sign}: add the other keys to its lists"
        )


def _equal(a: Mask, b: Mask) -> bool:
    if a.kind != b.kind or len(a.children) != len(b.children):
        return False
    for x, y in zip(a.args, b.args, strict=True):
        if is_array(x) != is_array(y) or not (equal(x, y, a.kind in BOOLEANS) if is_array(x) else x == y):
            return False
    return all(_equal(x, y) for x, y in zip(a.children, b.children, strict=True))


def _rebuild(structure: str, ints: list[Any], data: list[Any]) -> Mask:
    return Mask.unflatten(structure, ints, [freeze(a) if isinstance(a, np.ndarray) else a for a in data])
