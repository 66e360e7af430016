"""How the keys and values of a call are stored: as arrays, in pages with a block table, or as codes with scales."""

from __future__ import annotations

import sys
from collections.abc import Set
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from ..backends import Extras
from ..mask import Mask, keys
from ..operands import PLAIN, Request, Side, Spec
from ..problem import Problem, describe
from ..quantised import Quantised


class Source(NamedTuple):
    """How k and v are stored.

    With a block table, int32 [B, n], they are pages [pages, page_size, Hk, D] of sequences of up to `tokens` keys. With
    quantised they are codes, and the scales are arrays like them. key: the parts of this on which a plan depends.
    """

    table: Any = None
    page_size: int = 0
    tokens: int = 0
    quantised: Quantised | None = None
    k_scale: Any = None
    v_scale: Any = None
    key: Any = None

    @property
    def kind(self) -> str:
        """The `source` of a Problem."""
        return "strided" if self.table is None else "paged"

    def describe(self, q: Spec, k: Spec, v: Spec, request: Request, grads: Set[str] | None) -> Problem:
        """`saccade.problem.describe` for keys and values in this form."""
        if self is not STRIDED:
            k, v = self.spec(k, q.dtype), self.spec(v, q.dtype)
        return describe(q, k, v, request, source=self.kind, quantised=self.quantised, grads=grads)

    def spec(self, x: Spec, dtype: str) -> Spec:
        """The spec of the logical keys or values [B, tokens, H, D]; dtype: of the numbers that codes encode."""
        B, tokens = x.shape[:2] if self.table is None else (len(self.table), self.tokens)
        if self.quantised is None:
            return Spec((B, tokens, *x.shape[2:]), x.dtype, x.device)
        return Spec((B, tokens, *x.shape[2:-1], self.quantised.numbers(x.shape[-1])), dtype, x.device)

    def behind(self, table: Any, page_size: int, tokens: int) -> Source:
        """This form with a block table."""
        key = len(table), tokens, self.quantised
        return Source(table, page_size, tokens, self.quantised, self.k_scale, self.v_scale, key)

    def first(self, n: int) -> Source:
        """This form for the first n tokens of every sequence, without a block table."""
        if self.quantised is None:
            return self
        return self._replace(k_scale=self.k_scale[:, :n], v_scale=self.v_scale[:, :n])

    def carried(self, extras: Extras) -> Extras:
        """extras with the block table and the scales."""
        if self is STRIDED:
            return extras
        pages = extras._replace(block_table=self.table, page_size=self.page_size)
        return pages if self.quantised is None else pages._replace(k_scale=self.k_scale, v_scale=self.v_scale)


STRIDED = Source()
# dtypes of scales
_SCALES = "bfloat16", "uint16"


def stored(cache: Any) -> Source:
    """How a cache stores keys and values, apart from pages.

    Raises ValueError for k and v, or codes and scales, that do not fit each other, TypeError for their dtypes.
    """
    how = getattr(cache, "quantised", None)
    k, v = (tuple(x.shape[:3]) for x in (cache.k, cache.v))
    if k != v:
        raise ValueError(f"k and v start with shapes {list(k)} and {list(v)}; expected the same slots and heads")
    if how is None:
        return STRIDED
    for name in ("k", "v"):
        codes, scale = getattr(cache, name), getattr(cache, f"{name}_scale")
        wanted = (*codes.shape[:-1], how.scales(how.numbers(codes.shape[-1])))
        if scale is None or tuple(scale.shape) != wanted:
            shape = None if scale is None else list(scale.shape)
            raise ValueError(f"{name}_scale is {shape}; expected an array {list(wanted)}, because {name} is {how.kind}")
        kinds = [str(x.dtype).rpartition(".")[2] for x in (codes, scale)]
        of_codes = "int8" if how.kind == "int8" else "uint8"
        if kinds[0] != of_codes or kinds[1] not in _SCALES:
            raise TypeError(
                f"{name} is {kinds[0]} and {name}_scale {kinds[1]}; expected {of_codes} and {' or '.join(_SCALES)}, "
                f"because {name} is {how.kind}"
            )
    return Source(quantised=how, k_scale=cache.k_scale, v_scale=cache.v_scale, key=how)


def host(x: Any) -> Any:
    """x as a NumPy array; this waits for a tensor on a device."""
    return np.asarray(x.cpu() if hasattr(x, "cpu") else x)


def integral(dtype: Any) -> bool:
    """Whether a NumPy or torch dtype is an integer dtype, not boolean."""
    kind = getattr(dtype, "kind", None)
    if kind is not None:
        return kind in "iu"
    return not (dtype.is_floating_point or dtype.is_complex or dtype is sys.modules["torch"].bool)


def check_lengths(lengths: Any, batch: int) -> None:
    """Raise ValueError unless the lengths of a cache are integers [batch]; their values are not read."""
    if getattr(lengths, "shape", None) != (batch,) or not integral(lengths.dtype):
        kind = f"{getattr(lengths, 'dtype', type(lengths).__name__)} {list(getattr(lengths, 'shape', []))}"
        raise ValueError(f"the cache has lengths {kind}; expected integers [B] = [{batch}]")


def check_table(table: Any, lengths: Any) -> None:
    """Raise ValueError unless a block table is int32 [R, n] and lengths are integers [R], on any device."""
    if len(table.shape) != 2 or str(table.dtype).rpartition(".")[2] != "int32":
        raise ValueError(f"block_table is {table.dtype} {list(table.shape)}; expected int32 [R, n]")
    check_lengths(lengths, int(table.shape[0]))


def check_pages(table: Any, lengths: Any, pages: int, page_size: int) -> Any:
    """Which entries of a NumPy block table are in use, bool [R, n]; raises ValueError if one is not a page."""
    used = np.arange(table.shape[1]) * page_size < lengths[:, None]
    astray = used & ((table < 0) | (table >= pages))
    if bool(astray.any()):
        r, at = (int(x) for x in np.argwhere(astray)[0])
        raise ValueError(f"block_table[{r}, {at}] is {table[r, at]}; expected 0 <= page < {pages}, the number of pages")
    return used


def in_use(lengths: Any, batch: int, capacity: int, mask: Mask | None, *, cut: bool = True) -> tuple[int, Mask | None]:
    """(longest, mask): queries see only the keys in use if `longest` keys of the cache are read with `mask`.

    lengths: integers [B] on the host. If all are equal and the mask has no arrays, the unused keys are cut off and the
    mask stays. Otherwise, or with cut=False, keys(lengths) is combined with the mask.
    """
    check_lengths(lengths, batch)
    stops: tuple[int, ...] = tuple(lengths.tolist())
    longest = max(stops, default=0)
    if longest > capacity or min(stops, default=0) < 0:
        raise ValueError(f"the cache has lengths {list(stops)}; expected 0 <= length <= its capacity, {capacity}")
    if cut and (mask is None or (type(mask) is Mask and not mask.has_data and "keys(" not in mask.flatten()[0])):
        if stops.count(longest) == batch:
            return longest, mask
        return longest, _under(mask, stops)
    if mask is not None and type(mask) is not Mask:
        return capacity, mask
    return capacity, _under(mask, stops)


def pages_in_use(cache: Any, request: Request = PLAIN) -> tuple[Source, Request]:
    """The source of a `PagedKeys`, and the request with a mask that shows only the keys in use.

    Raises ValueError for a table with pages out of range, or one that is too short for the lengths.
    """
    table, lengths = host(cache.block_table), host(cache.lengths)
    check_table(table, lengths)
    (n, page_size), (B, width) = cache.k.shape[:2], table.shape
    # kernels may read unused entries of the table, so these must be valid pages
    table = np.ascontiguousarray(np.where(check_pages(table, lengths, n, page_size), table, 0))
    source = stored(cache)
    capacity = width * page_size
    tokens, mask = in_use(lengths, B, capacity, request.mask)
    gates = getattr(cache, "gates", None)
    if gates is not None:
        of_pages = table if isinstance(gates, np.ndarray) else gates.new_tensor(table).long()
        gates = gates[of_pages].reshape(B, capacity, -1)[:, :tokens]
    request = request._replace(mask=mask, side=first_of_side(request.side, tokens, capacity))
    return source.behind(table, page_size, tokens), with_gates(request, gates)


def first_of_side(side: Side, longest: int, capacity: int) -> Side:
    """The side arrays of the first `longest` of the keys for which a cache has room."""
    if longest < capacity and side.bias is not None and getattr(side.bias, "shape", ())[-1:] == (capacity,):
        side = side._replace(bias=side.bias[..., :longest])
    if longest < capacity and side.log_f is not None and side.log_f.shape[1] == capacity:
        side = side._replace(log_f=side.log_f[:, :longest])
    return side


def with_gates(request: Request, sums: Any) -> Request:
    """The request with the running sums [B, Tk, Hq] of the gates in a cache; unchanged for None."""
    if sums is None:
        return request
    if request.side.log_f is not None:
        raise ValueError("bias has gates and so has the cache; expected those of the cache: leave them out of bias")
    side, options = request.side._replace(log_f=sums), request.options._replace(summed=True)
    return request._replace(side=side, options=options)


def _under(mask: Mask | None, stops: tuple[int, ...]) -> Mask:
    # cached, so that all layers of a step use one mask and share its plan; few with arrays, which stay alive
    return (_with_arrays if mask is not None and mask.has_data else _without_arrays)(mask, stops)


def _combined(mask: Mask | None, stops: tuple[int, ...]) -> Mask:
    used = keys(np.array(stops, np.int32))
    return used if mask is None else mask & used


_with_arrays, _without_arrays = lru_cache(maxsize=4)(_combined), lru_cache(maxsize=64)(_combined)
