"""What a stack stores its keys in, and how its attention uses it.

Attention goes through `saccade.attention` (whole sequences), `saccade.decode` (new tokens against a cache) or
`saccade.paged_attention` (new tokens of many sequences against pages).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import wraps
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from .. import api
from ..caches.contiguous import KVCache
from ..caches.paged import PagedKVCache
from ..caches.ragged import paged_attention
from ..caches.sequences import new_positions
from ..distributed.context import ContextParallel, Where
from ..distributed.sharded_cache import ShardedKVCache
from ..distributed.sharded_cache import decode as decode_over_ranks
from .states import StackCache

if TYPE_CHECKING:
    from ..mask import Mask


class PagedTokens(NamedTuple):
    """A layer's pages, and the sequences of a batch of one row: tokens cu[r] to cu[r + 1] are of sequences[r].

    Tokens from cu[-1] on are padding. deterministic: as in `paged_attention`.
    """

    pages: PagedKVCache
    sequences: list[int]
    cu: np.ndarray
    deterministic: bool | str = True

    def positions(self, T: int) -> Tensor:
        """int64 [1, T]: the positions of the tokens, 0 for padding."""
        positions = torch.from_numpy(new_positions([self.pages.known(s) for s in self.sequences], self.cu))
        return functional.pad(positions, (0, T - len(positions)))[None]

    def append(self, k: Tensor, v: Tensor) -> None:
        """Store keys and values [1, T, ...], without padding."""
        n = int(self.cu[-1])
        self.pages.append(self.sequences, k[0, :n], v[0, :n], self.cu)

    def attend(self, q: Tensor, **options: Any) -> Tensor:
        """q [1, T, Hq, D] -> [1, T, Hq, Dv], zero for padding; options: of `paged_attention`."""
        n, view = int(self.cu[-1]), self.pages.view(self.sequences)
        o = paged_attention(q[0, :n], view, self.cu, deterministic=self.deterministic, **options)
        return functional.pad(o, (0, 0, 0, 0, 0, q.shape[1] - n))[None]


class PagedStep(NamedTuple):
    """A layer's pages, and one new token of each of B sequences, whose places only the device knows.

    table: int32 [B, n] and lengths: int32 [B], without the new token, as in `PagedKeys`. Tokens beyond the table
    overwrite each other in its last column.
    """

    pages: PagedKVCache
    table: Tensor
    lengths: Tensor

    def positions(self, T: int) -> Tensor:
        """int64 [B, 1]: the positions of the tokens."""
        return self.lengths[:, None].long()

    def append(self, k: Tensor, v: Tensor) -> None:
        """Store keys and values [B, 1, ...]."""
        size = self.pages.page_size
        column = (self.lengths // size).clamp(max=self.table.shape[1] - 1).long()
        page = self.table.gather(1, column[:, None])[:, 0].long()
        self.pages.kind.write_slots(self.pages, k[:, 0], v[:, 0], page, self.lengths.long() % size, None)

    def attend(self, q: Tensor, **options: Any) -> Tensor:
        """q [B, 1, Hq, D] -> [B, 1, Hq, Dv]; options: of `decode`."""
        lengths = (self.lengths + 1).clamp(max=self.table.shape[1] * self.pages.page_size)
        keys = self.pages.view(())._replace(block_table=self.table, lengths=lengths)
        return api.decode(q, keys, **options)


# the caches that a layer of attention can use
Cached = KVCache | PagedTokens | PagedStep | ShardedKVCache


def lengths_of(caches: Sequence[Cached] | StackCache | None) -> Tensor | None:
    """The tokens [B] of the sequences in a model's caches, whose layers have the same; None for pages and no caches."""
    first = caches if isinstance(caches, StackCache) else next(iter(caches or ()), None)
    return first.lengths if isinstance(first, StackCache | KVCache | ShardedKVCache) else None


def undoing(caches: Sequence[Cached] | StackCache) -> Callable[[], None]:
    """A function that removes what is appended to caches from now on. What is beyond a length is never read."""
    if isinstance(caches, StackCache):
        return caches.undoing()
    undone: list[tuple[Any, Tensor]] = []
    pages: list[tuple[PagedKVCache, int, int]] = []
    for cache in caches:
        if isinstance(cache, PagedTokens):
            pages += [(cache.pages, one, cache.pages.length(one)) for one in cache.sequences]
        elif not isinstance(cache, PagedStep):
            undone.append((cache, cache.lengths))

    def undo() -> None:
        for store, lengths in undone:
            store.lengths = lengths
        for store, sequence, length in pages:
            store.crop(sequence, length)

    return undo


def unless_failed(hidden: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """A model's `hidden`, after an error of which its caches are as before the call: no layer has read the tokens."""

    @wraps(hidden)
    def call(
        model: Any,
        tokens: Tensor,
        positions: Tensor | None = None,
        mask: Mask | None = None,
        caches: Any = None,
        backend: Where = None,
    ) -> Tensor:
        if not isinstance(tokens, Tensor):
            raise TypeError(f"tokens is a {type(tokens).__name__}; expected a tensor [B, T], a row for each text")
        if tokens.ndim != 2:
            raise ValueError(f"tokens has shape {list(tokens.shape)}; expected [B, T], a row for each text")
        if positions is not None:
            check_positions(positions, tokens)
        if caches is not None and len(caches) != len(model.blocks):
            raise ValueError(
                f"caches has {len(caches)} caches and the model {len(model.blocks)} layers; expected one per layer, as "
                "make_caches returns"
            )
        lengths = lengths_of(caches)
        if lengths is not None and lengths.shape[0] != tokens.shape[0]:
            raise ValueError(
                f"tokens has {len(tokens)} sequences and the caches {len(lengths)}; expected the same number"
            )
        undo = undoing(() if caches is None else caches)
        try:
            return hidden(model, tokens, positions, mask, caches, backend)
        except BaseException as error:
            undo()
            if isinstance(error, IndexError):
                check_tokens("tokens", tokens, model.config.vocab_size)
            raise

    return call


def check_tokens(name: str, tokens: Tensor, vocabulary: int) -> None:
    """Raise ValueError if a token is outside the vocabulary; waits for a GPU."""
    ends = tokens.long().unique()[[0, -1]].tolist() if tokens.numel() else []
    outside = [token for token in ends if not 0 <= token < vocabulary]
    if outside:
        raise ValueError(
            f"{name} has token {outside[0]}; expected numbers from 0 to {vocabulary - 1}, those of the model: use its "
            "own tokenizer"
        )


def check_positions(positions: Tensor, tokens: Tensor) -> None:
    """Raise ValueError unless positions are [T], [1, T] or [B, T] for tokens [B, T]."""
    B, T = tokens.shape
    if tuple(positions.shape) not in ((T,), (1, T), (B, T)):
        raise ValueError(
            f"positions has shape {list(positions.shape)}; expected [T] = [{T}] or [B, T] = [{B}, {T}], as the tokens"
        )


def positions_of(tokens: Tensor, caches: Sequence[Cached] | None, backend: Where = None) -> Tensor:
    """Positions [T] or [B, T] of new tokens [B, T], counted from 0 or from the cached length."""
    if isinstance(backend, ContextParallel):
        return backend.positions.to(tokens.device)
    steps = torch.arange(tokens.shape[1], device=tokens.device)
    if not caches:
        return steps
    first = caches[0]
    if isinstance(first, PagedTokens | PagedStep):
        return first.positions(tokens.shape[1]).to(tokens.device)
    return first.positions[:, None] + steps


def attend(q: Tensor, k: Tensor, v: Tensor, mask: Mask | None, cache: Cached | None, backend: Where) -> Tensor:
    """q [B, T, Hq, D], k, v [B, T, Hk, D] -> [B, T, Hq, D]; with a cache, k and v are first appended to it."""
    if isinstance(backend, ContextParallel):
        if cache is not None:
            # this rank's slice of the tokens, as its layout cuts them
            if not isinstance(cache, KVCache):
                raise ValueError(
                    f"cache is {type(cache).__name__}; expected a KVCache for this rank's slice of the rows"
                )
            cache.append(k, v)
        return backend.attention(q, k, v, mask)
    if isinstance(cache, ShardedKVCache):
        cache.append(k, v)
        return decode_over_ranks(q, cache, mask=mask, backend=backend)
    if cache is None:
        return api.attention(q, k, v, mask, backend=backend)
    if isinstance(cache, PagedTokens | PagedStep):
        cache.append(k, v)
        return cache.attend(q, mask=mask, backend=backend)
    cache.append(k, v)
    return api.decode(q, cache, mask=mask, backend=backend)
