"""Masks that select keys or queries by index: ranges of keys, prefixes, padding and global tokens."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from ..arrays import ArrayOrList
from . import arguments
from .algebra import Mask
from .contents import host, is_tensor
from .context import Context, label, number
from .forms import INF
from .rows import flat, listed, run_of
from .scene import Bools, Scene, per_batch, table
from .terms import Terms, term

__all__ = ["global_tokens", "keys", "padding", "prefix"]

# a list of global tokens with at most this many runs is lowered to bands
_RUNS = 2


def keys(start: int | ArrayOrList, stop: int | ArrayOrList | None = None) -> Mask:
    """Keys j < stop as `keys(stop)`, or start <= j < stop as `keys(start, stop)`.

    As a direct member of an `&` chain, both forms also move the queries: the last query is then at position
    stop[b] - 1, as in a cache with sequences of different lengths.

    Args:
        start, stop: ints or int arrays [B].

    Raises:
        TypeError, ValueError: a bound is not an integer or [B], or is negative.

    Examples:
        >>> ragged = mask.causal() & mask.keys([700, 1024])  # two sequences of 700 and 1024 keys
    """
    if stop is None:
        return Mask("keys", (None, arguments.count(start, "keys", "stop")))
    return Mask("keys", (arguments.count(start, "keys", "start"), arguments.count(stop, "keys", "stop")))


def keys_contents(mask: Mask, Tq: int, Tk: int) -> None:
    for name, leaf in zip(("start", "stop"), mask.args, strict=True):
        if leaf is not None:
            arguments.within("keys", name, leaf, 0, Tk)


def keys_text(mask: Mask, write: Callable[[Any], str]) -> list[str]:
    return [write(leaf) for leaf in mask.args if leaf is not None]


def keys_pairs(mask: Mask, scene: Scene) -> Bools:
    start, stop = mask.args
    allowed = scene.j < per_batch(stop)
    return allowed if start is None else allowed & (scene.j >= per_batch(start))


def keys_terms(mask: Mask, context: Context) -> Terms:
    start, stop = mask.args
    return [term(k_hi=number(stop))] if start is None else [term(k_lo=number(start), k_hi=number(stop))]


def prefix(n: int | ArrayOrList) -> Mask:
    """Keys j < n, for every query; positions do not change. `causal() | prefix(n)` is a prefix language model.

    Args:
        n: an int or an int array [B].

    Raises:
        TypeError, ValueError: n is not an integer or [B], or is negative.

    Examples:
        >>> print((mask.causal() | mask.prefix(2)).draw(4, 4))
        ██··
        ██··
        ███·
        ████
    """
    return Mask("prefix", (arguments.count(n, "prefix", "n"),))


def prefix_contents(mask: Mask, Tq: int, Tk: int) -> None:
    # an integer is part of the pattern and may exceed a short sequence
    if not isinstance(mask.args[0], int):
        arguments.within("prefix", "n", mask.args[0], 0, Tk)


def prefix_pairs(mask: Mask, scene: Scene) -> Bools:
    return scene.j < per_batch(mask.args[0])


def prefix_terms(mask: Mask, context: Context) -> Terms:
    return [term(k_hi=number(mask.args[0]))]


# the end of error messages about `padding`
_TRUE = "True marks a token; torch's key_padding_mask is True for padding: mask.padding(~key_padding_mask)"


def padding(tokens: ArrayOrList) -> Mask:
    """Keys that are tokens rather than padding; padding may be at either end of a sequence, or at both.

    Positions do not change, unlike with `keys(stop)`. Queries that are padding see the tokens that the rest of
    the mask allows; their results are finite but have no meaning (0 for a query that sees no token).

    Args:
        tokens: bool [B, Tk] or [Tk], True for a token and False for padding, or integers 1 and 0. This is the
            `attention_mask` of transformers. torch's `key_padding_mask` is True for padding:
            `padding(~key_padding_mask)`. NumPy arrays are checked here and CPU tensors by each call; arrays on a
            device are trusted until `Mask.check`.

    Raises:
        TypeError: tokens is an array of floats.
        ValueError: tokens has integers other than 0 and 1; or padding between tokens (use `columns`); or a sequence
            has no token (use `prefix(lengths)`).

    Examples:
        >>> attention_mask = torch.tensor([[0, 0, 1, 1], [1, 1, 1, 1]])  # of a tokenizer
        >>> padded = mask.causal() & mask.padding(attention_mask)
    """
    try:
        leaf = arguments.flags(tokens, "padding", "tokens", (1, 2))
    except TypeError as error:
        raise TypeError(f"{error}; {_TRUE}") from None
    mask = Mask("padding", (leaf,))
    if isinstance(leaf, np.ndarray):
        padding_contents(mask)
    return mask


def padding_shapes(mask: Mask, B: int, Tq: int, Tk: int, Hq: int | None) -> None:
    arguments.fits("padding", "tokens", mask.args[0], B, Tk)


def padding_contents(mask: Mask, *_: int) -> None:
    arguments.zeros_and_ones("padding", "tokens", mask.args[0])
    if not mask.args[0].shape[0]:
        return
    tokens = flat(host(mask.args[0])) != 0
    start, stop = run_of(tokens)
    holes = np.flatnonzero(stop - start != tokens.sum(1))
    if len(holes):
        raise ValueError(
            f"padding: tokens has padding between the tokens of sequence {holes[0]}, expected it at the ends; "
            "if that is intended, give columns(stop=where(tokens, Tq, 0)), of Tq queries"
        )
    none = np.flatnonzero(start == stop)
    if len(none) and tokens.shape[1]:
        raise ValueError(
            f"padding: sequence {none[0]} has no token; {_TRUE}. If a sequence is empty, give prefix(lengths)"
        )


def padding_pairs(mask: Mask, scene: Scene) -> Bools:
    return table(mask.args[0])[:, None, None, :] != 0


def padding_terms(mask: Mask, context: Context) -> Terms:
    start, stop = run_of(flat(host(mask.args[0])) != 0)
    return [term(k_lo=number(start), k_hi=number(stop))]


def padding_sizes(mask: Mask) -> arguments.Sizes:
    return arguments.sizes_of(mask.args, 1, Tk=int(mask.args[0].shape[-1]))


def global_tokens(n: int | ArrayOrList) -> Mask:
    """Global tokens: a query at a global position sees every key, and every query sees the keys at global positions.

    Args:
        n: positions below this integer; or a list of positions, int [m] or [B, m], which may repeat.

    Raises:
        TypeError, ValueError: n is not an integer or a list of integers.

    Examples:
        >>> longformer = mask.window(128, 128) | mask.global_tokens([0, 1])  # Beltagy et al., 2020
    """
    if isinstance(n, (list, tuple)) or getattr(n, "ndim", 0) > 0:
        return Mask("global_tokens", (arguments.array(n, "global_tokens", "indices", (1, 2)),))
    if is_tensor(n):
        raise TypeError("global_tokens: n is a tensor of no dimensions, expected an integer or indices [m]; use int(n)")
    return Mask("global_tokens", (arguments.count(n, "global_tokens", "n"),))


def global_tokens_shapes(mask: Mask, B: int, *_: Any) -> None:
    chosen = mask.args[0]
    if hasattr(chosen, "shape"):
        size = int(chosen.shape[-1]) if len(chosen.shape) else 1
        arguments.fits("global_tokens", "indices", chosen, B, size)


def global_tokens_contents(mask: Mask, Tq: int, Tk: int) -> None:
    chosen = mask.args[0]
    if not isinstance(chosen, int):
        arguments.within("global_tokens", "positions", chosen, 0, Tk - 1 if len(chosen.shape) else Tk)


def global_tokens_pairs(mask: Mask, scene: Scene) -> Bools:
    chosen, i, j = mask.args[0], scene.i(), scene.j
    if getattr(chosen, "ndim", 0) == 0:
        return ((i >= 0) & (i < per_batch(chosen))) | (j < per_batch(chosen))
    positions = table(chosen)[:, None, None, None, :]
    return (i[..., None] == positions).any(-1) | (j[..., None] == positions).any(-1)


def global_tokens_terms(mask: Mask, context: Context) -> Terms:
    chosen, offset, Tq, Tk = mask.args[0], context.offset(), context.size.Tq, context.size.Tk
    if getattr(chosen, "ndim", 0) == 0:
        n = number(chosen)
        return [term(k_lo=0, k_hi=n), term(q_lo=-offset, q_hi=n - offset)]
    positions = flat(host(chosen)).astype(np.int64)
    runs = _runs(positions, Tk)
    if runs is not None:
        bands = ((term(k_lo=a, k_hi=b), term(q_lo=a - offset, q_hi=b - offset)) for a, b in runs)
        return [band for pair in bands for band in pair]
    positions = np.where((positions >= 0) & (positions < Tk), positions, -INF)
    key = (mask.key, label(offset))
    return [
        context.part((key, "k"), lambda: listed(positions, Tk, Tq, "k")),
        context.part((key, "q"), lambda: listed(positions, Tq, Tk, "q", offset)),
    ]


def global_tokens_sizes(mask: Mask) -> arguments.Sizes:
    return arguments.sizes_of(mask.args, 1)


def _runs(positions: Any, Tk: int) -> list[tuple[Any, Any]] | None:
    # runs of consecutive positions, the same number in every batch entry (empty ones added)
    by_entry: list[list[tuple[int, int]]] = []
    for row in positions:
        row = np.unique(row[(row >= 0) & (row < Tk)])
        breaks = np.flatnonzero(np.diff(row) != 1) + 1
        if len(breaks) >= _RUNS:
            return None
        by_entry.append([(int(p[0]), int(p[-1]) + 1) for p in np.split(row, breaks) if len(p)])
    count = max(len(runs) for runs in by_entry)
    padded = [runs + [(0, 0)] * (count - len(runs)) for runs in by_entry]
    if len(padded) == 1:
        return list(padded[0])
    ends = np.array(padded, np.int64).reshape(len(padded), count, 2)
    return [(ends[:, n, 0], ends[:, n, 1]) for n in range(count)]
