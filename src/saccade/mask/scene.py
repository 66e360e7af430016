"""The inputs of the dense predicate of a node: sizes, row and key numbers, and positions of the queries."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .algebra import Mask
from .contents import FAR, host

Bools = NDArray[np.bool_]


@dataclass(frozen=True)
class Scene:
    """The sizes with which a node is evaluated, and the end `stop` of the keys in its `&` chain, int or [B, 1, 1, 1].

    predicate: (mask, scene) -> the pairs that the mask allows; nodes call it for their children.
    """

    predicate: Callable[[Mask, Scene], Bools]
    B: int
    Hq: int
    Tq: int
    Tk: int
    stop: Any = None

    def with_stops(self, chain: Mask) -> Scene:
        """The scene of the members of an `&` chain, whose keys(stop) set the position of the last query."""
        stop = self.stop
        for child in chain.children:
            if child.kind == "keys":
                own = np.clip(per_batch(child.args[1]), 0, self.Tk)
                stop = own if stop is None else np.minimum(stop, own)
        return replace(self, stop=stop)

    def offset(self, explicit: Any = None) -> Any:
        """i - t: `explicit` if given, else bottom-right in the keys of the enclosing keys(stop), else in all keys."""
        if explicit is not None:
            return per_batch(explicit)
        return (self.Tk if self.stop is None else self.stop) - self.Tq

    @property
    def t(self) -> NDArray[np.int64]:
        """Row numbers, [1, 1, Tq, 1]."""
        return np.arange(self.Tq).reshape(1, 1, -1, 1)

    @property
    def j(self) -> NDArray[np.int64]:
        """Key numbers, [1, 1, 1, Tk]."""
        return np.arange(self.Tk).reshape(1, 1, 1, -1)

    def i(self, explicit: Any = None) -> Any:
        """Positions of the queries, [1|B, 1, Tq, 1]."""
        return self.t + self.offset(explicit)


def per_batch(value: Any) -> Any:
    """An integer within ±`FAR`, an array [B] as [B, 1, 1, 1]."""
    if isinstance(value, int):
        return max(-FAR, min(FAR, value))
    return host(value).astype(np.int64).reshape(-1, 1, 1, 1)


def table(array: Any) -> NDArray[np.int64]:
    """An array [n] or [B, n] as int64 [1|B, n]."""
    return np.atleast_2d(host(array)).astype(np.int64)


def plane(array: Any) -> Bools:
    """An array [m, n] or [B, m, n] as booleans [1|B, 1, m, n]."""
    array = host(array).astype(np.bool_)
    return (array[None] if array.ndim == 2 else array)[:, None]
