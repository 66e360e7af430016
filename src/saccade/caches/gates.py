"""Forget gates in a cache: the running sums of their logarithms, stored with the keys, one per query head."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..biases import check_log_f, running_sums
from ..errors import Unsupported
from ..operands import DTYPES
from .sequences import Tokens
from .storage import Shape, Storage, at_least


def add_room(cache: Storage, heads: int) -> None:
    """Allocate room for the gates of `heads` query heads in a cache."""
    at_least("gate_heads", heads, 1)
    if heads % cache.kv_heads:
        raise ValueError(f"gate_heads is {heads}; expected a multiple of {cache.kv_heads}, the heads of the keys")
    if not cache.kind.indexed:
        raise Unsupported("webgpu", ["gates in a cache on the device: keep the cache in memory"])
    cache.gates = cache.kind.sums((*cache.k.shape[:2], heads))


def check(cache: Storage, log_f: Any, tokens: Shape) -> None:
    """Raise unless log_f is [*tokens, query heads] and the cache has gates."""
    if log_f is None:
        raise ValueError("log_f is missing; expected the gates of the new tokens, as the cache has gate_heads")
    if cache.gates is None:
        raise ValueError("log_f is given to a cache without gates; expected None, or a cache with gate_heads")
    if not cache.kind.holds(log_f) or str(log_f.dtype).rpartition(".")[2] not in DTYPES:
        kind = f"{type(log_f).__name__} of {getattr(log_f, 'dtype', 'no dtype')}"
        raise TypeError(f"log_f is {kind}; expected {cache.kind.name} of {', '.join(DTYPES)}: convert log_f")
    cache.kind.check_place("log_f", log_f)
    shape = *tokens, cache.gates.shape[-1]
    if tuple(log_f.shape) != shape:
        raise ValueError(f"log_f has shape {list(log_f.shape)}; expected {list(shape)}, one gate per query head")
    if getattr(log_f, "is_cpu", True):
        check_log_f(log_f)


def check_path(cache: Storage) -> None:
    """Raise ValueError if the cache has gates, whose sums would include those of tokens that a path leaves out."""
    if cache.gates is not None:
        raise ValueError("a path leaves out tokens before others in a cache with gates; expected the first tokens")


def sums_of_rows(cache: Storage, log_f: Any, lengths: Any) -> Any:
    """The running sums [B * T, query heads] of log_f [B, T, query heads], continued from lengths [B] of the cache."""
    last = cache.gates[cache.kind.steps(len(lengths)), (lengths - 1).clip(0)] * (lengths > 0)[:, None]
    return (last[:, None] + running_sums(log_f)).reshape(-1, log_f.shape[-1])


def sums_of_sequences(cache: Storage, log_f: Any, sequences: list[Tokens], bounds: NDArray[np.int64]) -> Any:
    """The running sums of log_f [n, query heads], continued; sequence r has the tokens from bounds[r] on."""
    at, counts = np.array([one.last_slot(int(cache.k.shape[1])) for one in sequences], np.int64), np.diff(bounds)
    starts, owners = (np.repeat(x, counts) for x in (bounds[:-1], np.arange(len(at))))
    at, some, starts, owners = map(cache.kind.indices, (at, (at >= 0)[:, None], starts, owners))
    # sums over all new tokens, minus those before a sequence's first one, plus the sum at its last token in the cache
    sums, before = running_sums(log_f, 0), cache.gates.reshape(-1, log_f.shape[-1])[at] * some
    return sums - (sums - log_f)[starts] + before[owners]


def write(cache: Storage, sums: Any, first: Any, second: Any) -> None:
    """Write sums [n, query heads] to slots (first[i], second[i]); a second below 0 writes nothing."""
    cache.kind.write([(sums[..., None], cache.gates[..., None], None, None)], first, second, None)
