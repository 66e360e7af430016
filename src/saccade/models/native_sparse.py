"""Native sparse attention (Yuan et al., 2025): compressed blocks, selected blocks and a window in one torch module."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from .. import api
from .. import mask as masks
from ..caches.contiguous import KVCache
from ..mask import Mask
from ..rope import rope as rotate

# queries whose scores of compressed blocks are in memory at a time
ROWS = 128


@dataclass(frozen=True)
class SparseSizes:
    """The sizes of native sparse attention, by default those of the paper.

    length, stride: tokens of a compressed block, and between the starts of two of them. block, blocks: tokens of a
    selected block, and how many of these a query sees, including the `first` ones of the text and the `local` ones that
    end with its own. window: tokens of the sliding window, including the query's own.

    Raises ValueError for sizes that do not divide, and if `blocks` has no room for the blocks that are always chosen.

    Examples:
        >>> from saccade.models.native_sparse import SparseSizes
        >>> SparseSizes(length=8, stride=4, block=16, blocks=4, window=32)
        SparseSizes(length=8, stride=4, block=16, blocks=4, first=1, local=2, window=32)
    """

    length: int = 32
    stride: int = 16
    block: int = 64
    blocks: int = 16
    first: int = 1
    local: int = 2
    window: int = 512

    def __post_init__(self) -> None:
        if min(self.stride, self.window, self.local, self.first + 1) < 1:
            raise ValueError(f"{asdict(self)}; expected first to be at least 0 and all others at least 1")
        if self.length % self.stride or self.block % self.stride or not self.stride <= self.length <= self.block:
            raise ValueError(
                f"length {self.length}, stride {self.stride}, block {self.block}; expected a stride that divides both, "
                "and a length of at most a block"
            )
        if self.blocks < self.first + self.local:
            raise ValueError(
                f"blocks is {self.blocks}; expected at least {self.first + self.local}, the first and local blocks"
            )

    def ended(self, tokens: Any) -> Any:
        """How many compressed blocks have ended within this many tokens, an int or a tensor of them."""
        return (tokens - self.length + self.stride) // self.stride * (tokens >= self.length)


class Compression(nn.Module):
    """One row for each block of `length` tokens, one of which starts every `stride` tokens.

    The MLP reads the block's rows with learned positions added to them, [heads, size, length]; all heads share it.
    x [B, T, heads, size] -> [B, n, heads, size], where n is the number of blocks that end within T tokens.
    """

    def __init__(self, heads: int, size: int, sizes: SparseSizes) -> None:
        super().__init__()
        self.length, self.stride = sizes.length, sizes.stride
        self.positions = nn.Parameter(0.02 * torch.randn(heads, size, sizes.length))
        self.mlp = nn.Sequential(nn.Linear(size * sizes.length, 4 * size), nn.GELU(), nn.Linear(4 * size, size))

    def forward(self, x: Tensor) -> Tensor:
        short = x.shape[1] < self.length
        blocks = x.new_zeros(len(x), 0, *self.positions.shape) if short else x.unfold(1, self.length, self.stride)
        return self.mlp((blocks + self.positions).flatten(-2))


class NativeSparseCache:
    """What `NativeSparseAttention` keeps of the tokens of `batch` sequences, which all have the same length.

    compressed, selected: a `KVCache` of these branches; of compressed blocks, it has one row per `stride` tokens.
    recent: k and v of the compressed branch from the first block that has not ended, and those of the sliding window.
    """

    def __init__(self, layer: NativeSparseAttention, batch: int, capacity: int) -> None:
        weight, shape = layer.q_proj.weight, (layer.kv_heads, layer.head_dim)
        options: dict[str, Any] = {"dtype": weight.dtype, "device": weight.device}
        self.compressed = KVCache(batch, layer.sizes.ended(capacity), *shape, **options)
        self.selected = KVCache(batch, capacity, *shape, **options)
        self.recent = [weight.new_zeros(batch, 0, *shape) for _ in range(4)]
        self.tokens = 0

    def start(self, n: int) -> int:
        """The position of the first of n new tokens; raises ValueError if they exceed the capacity."""
        if self.tokens + n > self.selected.capacity:
            raise ValueError(
                f"the cache has {self.tokens} tokens and would take {n} more; expected at most "
                f"{self.selected.capacity}: make a larger cache or give fewer tokens"
            )
        return self.tokens


class NativeSparseAttention(nn.Module):
    """Causal attention in three branches with keys and values of their own, x [B, T, width] -> [B, T, width].

    The query heads of a key head share the blocks that they select. The outputs of the branches are summed, each times
    a gate per head, the sigmoid of a linear map of x. A query that sees no compressed block has 0 from that branch.
    The choice of blocks has no gradient; the scores behind it take memory for [B, heads, 128, T / stride] numbers.

    Args:
        width: the size of x.
        heads: query heads.
        kv_heads: heads of keys and values in each branch, a divisor of heads (Ainslie et al., 2023).
        head_dim: the size of a head; None for width / heads.
        sizes: of blocks and of the window.
        rope: options of `saccade.rope` by which queries and keys are rotated; None for no rotation. A compressed key is
            rotated to the first position of its block after it was computed from keys that are not rotated.

    Raises:
        ValueError: heads that do not divide.

    Examples:
        >>> from saccade.models.native_sparse import NativeSparseAttention
        >>> layer = NativeSparseAttention(64, heads=4, kv_heads=2)
        >>> y = layer(torch.randn(1, 100, 64))
    """

    def __init__(
        self,
        width: int,
        heads: int,
        kv_heads: int,
        head_dim: int | None = None,
        sizes: SparseSizes | None = None,
        rope: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__()
        if min(heads, kv_heads) < 1 or heads % kv_heads or (head_dim is None and width % heads):
            raise ValueError(
                f"width {width}, heads {heads}, kv_heads {kv_heads}, head_dim {head_dim}; expected a kv_heads that "
                "divides heads, and heads that divide width or a head_dim"
            )
        self.heads, self.kv_heads, self.head_dim = heads, kv_heads, head_dim or width // heads
        self.sizes, self.rope = sizes or SparseSizes(), rope
        self.q_proj = nn.Linear(width, heads * self.head_dim, bias=False)
        # of the compressed, selected and window branches
        self.k_proj = nn.Linear(width, 3 * kv_heads * self.head_dim, bias=False)
        self.v_proj = nn.Linear(width, 3 * kv_heads * self.head_dim, bias=False)
        self.g_proj = nn.Linear(width, 3 * heads)
        self.o_proj = nn.Linear(heads * self.head_dim, width, bias=False)
        self.compress_k = Compression(kv_heads, self.head_dim, self.sizes)
        self.compress_v = Compression(kv_heads, self.head_dim, self.sizes)

    def make_cache(self, batch: int, capacity: int) -> NativeSparseCache:
        """An empty cache for `batch` sequences of up to `capacity` tokens."""
        return NativeSparseCache(self, batch, capacity)

    def forward(self, x: Tensor, cache: NativeSparseCache | None = None, backend: str | None = None) -> Tensor:
        """x [B, T, width] -> [B, T, width].

        Args:
            x: [B, T, width]; with a cache, the next T tokens, which are added to it and see all tokens before them. A
                cache has no gradient, so call under `torch.no_grad()`.
            cache: as `make_cache` returns.
            backend: as in `saccade.attention`.

        Raises:
            ValueError: the tokens exceed the capacity of the cache; and as in `saccade.attention` and `KVCache.append`.
            Unsupported: as in `saccade.attention`.
        """
        if cache is None:
            return self._attend(x, None, backend)
        before = cache.compressed.lengths, cache.selected.lengths, list(cache.recent), cache.tokens
        try:
            return self._attend(x, cache, backend)
        except BaseException:
            # no branch keeps tokens that the others have not read
            cache.compressed.lengths, cache.selected.lengths, cache.recent, cache.tokens = before
            raise

    def _attend(self, x: Tensor, cache: NativeSparseCache | None, backend: str | None) -> Tensor:
        start = 0 if cache is None else cache.start(x.shape[1])
        q = self._turned(self.q_proj(x).unflatten(-1, (self.heads, -1)), start)
        ks, vs = (one(x).unflatten(-1, (3, self.kv_heads, -1)).unbind(2) for one in (self.k_proj, self.v_proj))
        compressed, blocks = self._compressed(q, ks[0], vs[0], cache, backend)
        mask, k = masks.select(blocks, self.sizes.block), self._turned(ks[1], start)
        selected, _ = attend(q, k, vs[1], mask, True, cache and cache.selected, backend)
        window = self._window(q, self._turned(ks[2], start), vs[2], cache, backend)
        if cache is not None:
            cache.tokens += x.shape[1]
        gates = self.g_proj(x).sigmoid().unflatten(-1, (3, self.heads, 1))
        o = (gates * torch.stack([compressed, selected, window], 2)).sum(2)
        return self.o_proj(o.flatten(-2))

    def _compressed(
        self, q: Tensor, k: Tensor, v: Tensor, cache: NativeSparseCache | None, backend: str | None
    ) -> tuple[Tensor, Tensor]:
        # the branch's output and the selected blocks
        start = 0 if cache is None else cache.tokens
        before = self.sizes.ended(start)
        if cache is not None:
            k, v = (torch.cat([old, new], 1) for old, new in zip(cache.recent[:2], (k, v), strict=True))
        ck, cv = self.compress_k(k), self.compress_v(v)
        ck = self._turned(ck, before * self.sizes.stride, self.sizes.stride)
        mask = masks.ranges(None, self.sizes.ended(torch.arange(start, start + q.shape[1], device=q.device) + 1))
        o, lse = attend(q, ck, cv, mask, False, cache and cache.compressed, backend)
        if cache is not None:
            cache.recent[:2] = (one[:, ck.shape[1] * self.sizes.stride :] for one in (k, v))
            ck = cache.compressed.k[:, : before + ck.shape[1]]
        return o, chosen_blocks(q, ck, lse, start, self.sizes)

    def _window(self, q: Tensor, k: Tensor, v: Tensor, cache: NativeSparseCache | None, backend: str | None) -> Tensor:
        if cache is not None:
            k, v = (torch.cat([old, new], 1) for old, new in zip(cache.recent[2:], (k, v), strict=True))
            cache.recent[2:] = (one[:, max(0, one.shape[1] - self.sizes.window + 1) :] for one in (k, v))
        mask = masks.causal() & masks.window(self.sizes.window - 1, 0)
        return api.attention(q, k, v, mask, backend=backend)

    def _turned(self, x: Tensor, start: int, step: int = 1) -> Tensor:
        # positions start, start + step, ...
        if self.rope is None:
            return x
        return rotate(x, start + step * torch.arange(x.shape[1], device=x.device), **self.rope)


def attend(
    q: Tensor, k: Tensor, v: Tensor, mask: Mask, causal: bool, cache: KVCache | None, backend: str | None
) -> tuple[Tensor, Tensor]:
    """(o, lse) of q [B, T, Hq, D]; with a cache, k and v [B, n, Hk, D] are first appended to it."""
    if cache is None:
        return api.attention(q, k, v, api.CAUSAL & mask if causal else mask, return_lse=True, backend=backend)
    cache.append(k, v)
    return api.decode(q, cache, mask=mask, causal=causal, return_lse=True, backend=backend)


@torch.no_grad()
def chosen_blocks(q: Tensor, k: Tensor, lse: Tensor, start: int, sizes: SparseSizes) -> Tensor:
    """The blocks of keys that each query sees, int64 [B, Hk, T, n]; -1 for none.

    The importance of a block is the sum of the compressed branch's probabilities over the query heads of a key head and
    over the compressed blocks, each times the number of strides that it has in common with the block.

    q: [B, T, Hq, D], from position `start` on. k: [B, n, Hk, D], compressed. lse: [B, T, Hq] of q on k.
    """
    work = torch.promote_types(q.dtype, torch.float32)
    k, wide, each = k.to(work), sizes.length // sizes.stride, sizes.block // sizes.stride
    n, count = k.shape[1], max(1, -(-(start + q.shape[1]) // sizes.block))
    positions, lists = torch.arange(start, start + q.shape[1], device=q.device), list[Tensor]()
    for rows, lse_rows, at in zip(q.split(ROWS, 1), lse.split(ROWS, 1), positions.split(ROWS), strict=True):
        grouped = rows.to(work).unflatten(2, (k.shape[2], -1))
        scores = torch.einsum("bthgd,bnhd->bhgtn", grouped, k) * q.shape[-1] ** -0.5
        scores = scores - lse_rows.unflatten(2, grouped.shape[2:4]).permute(0, 2, 3, 1)[..., None]
        ended = torch.arange(n, device=k.device) < sizes.ended(at + 1)[:, None]
        p = torch.where(ended, scores.exp(), 0).sum(2)
        # of each stride, from the `wide` compressed blocks that it is part of: [B, Hk, rows, strides]
        strides = functional.pad(p, (wide - 1, count * each - n)).unfold(-1, wide, 1).sum(-1)
        importance = strides.unflatten(-1, (count, each)).sum(-1)
        block, own = torch.arange(count, device=k.device), at[:, None] // sizes.block
        always = (block < sizes.first) | (block > own - sizes.local)
        importance = importance.masked_fill(always, torch.inf).masked_fill(block > own, -torch.inf)
        best = importance.topk(min(sizes.blocks, count))
        lists.append(best.indices.masked_fill(best.values == -torch.inf, -1))
    return torch.cat(lists, 2)
