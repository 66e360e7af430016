"""What `bias=` accepts besides an array: ALiBi slopes, a table by distance, forget gates, and sums of them.

`operands.py` checks their shapes; the backends add them to the scores.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np

from .arrays import Array
from .operands import Options, Side, number


@dataclass(frozen=True, eq=False)
class Bias:
    """A sum of terms, None for each that is missing. `+` adds another Bias or an array, which comes second in MLX.

    array broadcasts to [B, Hq, Tq, Tk]. slopes: [Hq] or [B, Hq]. table: [Hq, R] or [B, Hq, R], with its origin.
    log_f: [B, Tk, Hq]. prune: the share of its weight that a row may lose, only if log_f is the only term.
    """

    array: Any = None
    slopes: Any = None
    table: Any = None
    log_f: Any = None
    origin: int = 0
    prune: float | None = None

    # makes `array + bias` call __radd__
    __array_ufunc__ = None

    def __add__(self, other: Any) -> Bias:
        if not isinstance(other, Bias):
            if not hasattr(other, "shape"):
                return NotImplemented
            other = Bias(array=other)
        if self.prune is not None or other.prune is not None:
            raise ValueError("gates(..., prune=) is part of a sum; expected gates alone, or gates without prune")
        first, second = self, other
        if first.table is not None and second.table is not None:
            first, second = _with_common_origin(first, second)
        sums = {name: _sum(getattr(first, name), getattr(second, name)) for name in _ARRAYS}
        return Bias(**sums, origin=second.origin if first.table is None else first.origin)

    __radd__ = __add__


_ARRAYS = [f.name for f in fields(Bias) if f.name not in ("origin", "prune")]


def alibi(slopes: Array) -> Bias:
    """The bias -slope · abs(i - j) between positions i and j, for `bias=` (Press et al., 2021).

    It takes O(Hq) memory, and the slopes have a gradient.

    Args:
        slopes: [Hq] or [B, Hq], floating.

    Returns:
        A value for `bias=`; `+` adds another bias to it. With MLX, write Saccade's term first: `alibi(slopes) + array`,
        because MLX's own `+` refuses other types.

    Raises:
        TypeError: slopes is not an array.

    Examples:
        >>> q = k = v = torch.randn(2, 1024, 8, 64)
        >>> slopes = 2.0 ** -torch.arange(1, 9)  # for Hq = 8
        >>> o = saccade.attention(q, k, v, saccade.mask.causal(), bias=saccade.alibi(slopes))
    """
    if not hasattr(slopes, "shape"):
        raise TypeError(f"slopes is {type(slopes).__name__}; expected an array [Hq] or [B, Hq]")
    return Bias(slopes=slopes)


def relative(table: Array, origin: int) -> Bias:
    """The bias table[h, clip(i - j + origin, 0, R - 1)] of positions i and j in head h, for `bias=`.

    It takes O(Tq + Tk) memory per head, and the table has a gradient. For T5's buckets (Raffel et al., 2020) the table
    is `weights[bucket(distance)]`.

    Args:
        table: [Hq, R] or [B, Hq, R], floating: one number per distance.
        origin: index in the table of distance 0, a key at the query's own position.

    Returns:
        A value for `bias=`; `+` adds another bias to it.

    Raises:
        TypeError: table is not an array, or origin is not an integer.
        ValueError: table has another shape.

    Examples:
        >>> q = k = v = torch.randn(2, 1024, 8, 64)
        >>> table = torch.zeros(8, 65, requires_grad=True)  # distances -32 to 32; larger ones use the ends
        >>> o = saccade.attention(q, k, v, bias=saccade.relative(table, 32))
    """
    if not hasattr(table, "shape"):
        raise TypeError(f"table is {type(table).__name__}; expected an array [Hq, R] or [B, Hq, R]")
    if len(table.shape) not in (2, 3) or table.shape[-1] < 1:
        raise ValueError(f"table has shape {list(table.shape)}; expected [Hq, R] or [B, Hq, R] with R of at least 1")
    if isinstance(origin, bool) or int(number("origin", origin, "an integer")) != origin:
        raise TypeError(f"origin is {origin!r}; expected an integer, the place in the table of distance 0")
    return Bias(table=table, origin=int(origin))


def gates(log_f: Array, *, prune: float | None = None) -> Bias:
    """The bias c_i - c_j of forget gates, for `bias=`, where c sums log_f over positions (Lin et al., 2025).

    Every position between a key and a query weakens the key by its gate, like an ALiBi that depends on the data. It
    takes O(Tk) memory per head, and the gates have a gradient. The mask must not let a query see later keys.

    Args:
        log_f: [B, Tk, Hq], floating, the logarithms of the gates: finite and at most 0.
        prune: skip keys that the gates have made negligible: a row loses at most this share of its weight,
            0 < prune < 1. None skips nothing. The norms of q and k bound the scores; they are read on the host.

    Returns:
        A value for `bias=`; `+` adds another bias to it, unless prune is given.

    Raises:
        TypeError: log_f is not an array, or prune is not a number.
        ValueError: log_f does not have three dimensions, or prune is not between 0 and 1.

    Examples:
        >>> q = k = v = torch.randn(2, 1024, 8, 64)
        >>> log_f = torch.nn.functional.logsigmoid(torch.randn(2, 1024, 8))  # [B, Tk, Hq]
        >>> o = saccade.attention(q, k, v, saccade.mask.causal(), bias=saccade.gates(log_f))
    """
    if not hasattr(log_f, "shape"):
        raise TypeError(f"log_f is {type(log_f).__name__}; expected an array [B, Tk, Hq]")
    if len(log_f.shape) != 3:
        raise ValueError(f"log_f has shape {list(log_f.shape)}; expected [B, Tk, Hq]")
    if prune is not None and not 0 < number("prune", prune, "a number, 0 < prune < 1") < 1:
        raise ValueError(f"prune is {prune!r}; expected 0 < prune < 1, the share of its weight that a row may lose")
    return Bias(log_f=log_f, prune=prune)


def side_of(bias: Any, sinks: Any) -> Side:
    """The side arrays of a call with these two arguments."""
    if not isinstance(bias, Bias):
        return Side(bias=bias, sinks=sinks)
    return Side(bias.array, bias.slopes, sinks, bias.table, bias.log_f)


def for_kernels(side: Side, options: Options, Tq: int, Tk: int) -> Side:
    """The side arrays in the form that kernels read, differentiable with respect to the caller's arrays.

    The table becomes [1 | B, Hq, Tq + 2 Tk - 1], the biases of the distances i - j from -(Tq + Tk - 1) to Tk - 1.
    log_f becomes its running sums over positions, in float64.
    """
    if side.table is not None:
        side = side._replace(table=_at_distances(side.table, options.origin, min(1 - Tq - Tk, Tk), Tk))
    if side.log_f is not None and not options.summed:
        side = side._replace(log_f=running_sums(side.log_f))
    return side


def gradients_for_callers(more: dict[str, Any], side: Side, origin: int, Tk: int) -> dict[str, Any]:
    """`more`, NumPy gradients by name, with kernels' gradients of table and log_f converted for the caller's arrays."""
    if "table" in more:
        more = {**more, "table": _table_gradient(more["table"], side.table.shape[-1], origin, Tk)}
    if "log_f" in more:
        more = {**more, "log_f": np.cumsum(more["log_f"][:, ::-1], 1)[:, ::-1].copy()}
    return more


def _table_gradient(distances: Any, R: int, origin: int, Tk: int) -> Any:
    n = distances.shape[-1]
    gradient = np.zeros((*distances.shape[:-1], R), distances.dtype)
    left, middle, right = _pieces(R, origin, Tk - n, Tk)
    gradient[..., middle] = distances[..., left : n - right]
    gradient[..., 0] += distances[..., :left].sum(-1)
    gradient[..., -1] += distances[..., n - right :].sum(-1)
    return gradient


def _at_distances(table: Any, origin: int, low: int, stop: int) -> Any:
    # table[..., clip(x + origin, 0, R - 1)] for x from low to stop. It uses slices, because a GPU sums the
    # gradient of indexing in no fixed order
    join, spread = _functions(table)
    table = table[None] if len(table.shape) == 2 else table
    left, middle, right = _pieces(table.shape[-1], origin, low, stop)
    ends = [spread(x, (*table.shape[:-1], n)) for x, n in ((table[..., :1], left), (table[..., -1:], right))]
    return join([ends[0], table[..., middle], ends[1]], -1)


def _pieces(R: int, origin: int, low: int, stop: int) -> tuple[int, slice, int]:
    # for the distances from low to stop: how many precede the table, the slice of it they cover, how many follow it
    n = stop - low
    left = min(max(-origin - low, 0), n)
    right = min(max(stop - (R - origin), 0), n)
    first = min(max(low + origin, 0), R)
    return left, slice(first, first + n - left - right), right


def running_sums(log_f: Any, axis: int = 1) -> Any:
    """The sums of log_f up to and including each position, float64."""
    if isinstance(log_f, np.ndarray):
        return np.cumsum(log_f, axis, dtype=np.float64)
    # Apple GPUs have no float64, and CUDA sums in parallel only along the last dimension
    x = log_f.cpu() if log_f.device.type == "mps" else log_f
    return x.transpose(axis, -1).double().contiguous().cumsum(-1).transpose(axis, -1)


def check_log_f(log_f: Any) -> None:
    """Raise ValueError unless log_f, an array on the host, holds finite numbers of at most 0."""
    low, high = (log_f.min(), log_f.max()) if 0 not in log_f.shape else (0, 0)
    # false for NaN as well
    if not (low > -np.inf and high <= 0):
        raise ValueError(
            f"log_f has numbers from {float(low)} to {float(high)}; expected finite ones, none above 0: the logarithms "
            f"of gates between 0 and 1, such as logsigmoid(x)"
        )


def _functions(x: Any) -> tuple[Callable[..., Any], Callable[..., Any]]:
    # concatenate and broadcast_to of x's framework
    if isinstance(x, np.ndarray):
        return np.concatenate, np.broadcast_to
    torch, jax, mlx = (sys.modules.get(name) for name in ("torch", "jax", "mlx.core"))
    if torch is not None and isinstance(x, torch.Tensor):
        return torch.cat, torch.broadcast_to
    if jax is not None and isinstance(x, jax.Array):
        return jax.numpy.concatenate, jax.numpy.broadcast_to
    if mlx is not None and isinstance(x, mlx.array):
        return mlx.concatenate, mlx.broadcast_to
    kind = type(x).__name__
    raise TypeError(f"the table of relative is {kind}; expected a NumPy, torch, JAX or MLX array: convert it first")


def _sum(x: Any, y: Any) -> Any:
    return y if x is None else x if y is None else x + y


def _with_common_origin(x: Bias, y: Bias) -> tuple[Bias, Bias]:
    # both tables, extended to all distances that either of them distinguishes
    low = min(-x.origin, -y.origin)
    stop = max(b.table.shape[-1] - b.origin for b in (x, y))
    first, second = (replace(b, table=_at_distances(b.table, b.origin, low, stop), origin=-low) for b in (x, y))
    return first, second
