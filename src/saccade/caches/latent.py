"""Latent attention's caches: one row per token is both its key and, without the last numbers, its value.

DeepSeek-V2 (2024) compresses the keys and values of all heads of a token into one latent row, and adds one rotated part
that all heads share. If the up-projections of keys and values are multiplied into q and o ("absorbed"), attention has
one key head: k is the latent row and the rotated part, and v is the latent row.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import gcd
from typing import Any

from ..arrays import Array, ArrayOrList, namespace
from ..errors import Unsupported
from ..rope import rope
from .contiguous import KVCache, Rotation
from .paged import PagedKVCache
from .sequences import alone, bounds_of, new_positions
from .storage import at_least


def _options(latent_dim: int, rope_dim: int, quantised: str | None, group: int | None, more: dict[str, Any]) -> Any:
    # arguments of the plain cache; keys and values share scales, so no group contains numbers of both parts
    at_least("latent_dim", latent_dim, 1)
    at_least("rope_dim", rope_dim, 1)
    if wrong := more.keys() - {"dtype", "device", "fill"}:
        raise TypeError(f"{min(wrong)} is not an argument of a latent cache; expected dtype, device or fill")
    if quantised == "int4":
        raise ValueError("quantised is int4, whose bytes hold numbers of keys and of values; expected int8 or fp8")
    if quantised is not None:
        group = gcd(latent_dim, rope_dim) if group is None else group
        if isinstance(group, int) and group > 0 and (latent_dim % group or rope_dim % group):
            sizes = f"latent_dim {latent_dim} and of rope_dim {rope_dim}"
            raise ValueError(f"group is {group}; expected a divisor of {sizes}")
    return {**more, "v_dim": latent_dim, "quantised": quantised, "group": group}


class _Latent:
    # what both caches share
    aliased = True
    sizes: tuple[int, int]
    _arrays: Any
    k: Any
    k_scale: Any
    v: Any
    v_scale: Any

    def _values(self, shape: tuple[int, ...], fill: float) -> tuple[Any, Any]:
        if not self._arrays.indexed:
            raise Unsupported("webgpu", ["values that are a view of latent rows: use a cache in memory"])
        v, scale = (
            x if x is None else x[..., : x.shape[-1] * self.sizes[1] // self.sizes[0]] for x in (self.k, self.k_scale)
        )
        return v, scale

    # a copy that stored the values would lose what makes them a view of the rows
    def __getstate__(self) -> dict[str, Any]:
        return {name: x for name, x in vars(self).items() if name not in ("v", "v_scale")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self.v, self.v_scale = self._values((), 0.0)

    def _check_parts(self, latent: Any, k_rope: Any, rows: str, lead: tuple[int, ...]) -> None:
        widths = self.sizes[1], self.sizes[0] - self.sizes[1]
        for name, x, width in zip(("latent", "k_rope"), (latent, k_rope), widths, strict=True):
            self._arrays.check(name, x)
            shape = tuple(x.shape)
            if len(shape) != len(lead) + 2 or shape[: len(lead)] != lead or shape[-1] != width:
                raise ValueError(f"{name} has shape {list(shape)}; expected [{rows}, {width}]")
        n, m = (int(x.shape[len(lead)]) for x in (latent, k_rope))
        if n != m:
            raise ValueError(f"latent has {n} tokens and k_rope {m}; expected the same number")


def _joined(latent: Any, k_rope: Any, positions: Any, rotation: Rotation | None) -> Any:
    # [..., 1, latent_dim + rope_dim]
    latent, k_rope = latent[..., None, :], k_rope[..., None, :]
    if rotation is not None:
        k_rope = rope(k_rope, positions, **rotation)
    return namespace(latent).concatenate([latent, k_rope], -1)


class LatentKVCache(_Latent, KVCache):
    """A `KVCache` of latent attention (DeepSeek-V2, 2024): k has one head, and v is a view of its first numbers.

    `decode` needs the model's scale, because the head size of a latent row is not the model's: 1 / √192 in DeepSeek-V2
    and V3, times YaRN's factor if the model has one. Its q is [B, Tq, Hq, latent_dim + rope_dim]: the query multiplied
    by the up-projection of keys, and the rotated part. o is [B, Tq, Hq, latent_dim], still to be multiplied by the
    up-projection of values.

    Args:
        batch, capacity, quantised: as in `KVCache`, except that int4 is refused.
        latent_dim: numbers of a token's latent row, 512 in DeepSeek-V2 and V3.
        rope_dim: numbers of its rotated part, 64 there.
        group: numbers per scale, a divisor of both sizes; None for their greatest common divisor.
        options: dtype, device and fill, as in `KVCache`. WebGPU devices are refused.

    Attributes:
        k: [batch, capacity, 1, latent_dim + rope_dim], or the codes.
        v: the first latent_dim numbers of k, without a copy.
        lengths: int32 [batch], tokens of each sequence.

    Examples:
        >>> cache = saccade.LatentKVCache(1, 4096, 512, 64, dtype=torch.float32)
        >>> cache.append(torch.randn(1, 10, 512), torch.randn(1, 10, 64), rotation={"interleaved": True})
        >>> q = torch.randn(1, 1, 128, 576)  # one query of 128 heads
        >>> saccade.decode(q, cache, scale=192**-0.5).shape
        torch.Size([1, 1, 128, 512])
    """

    def __init__(
        self,
        batch: int,
        capacity: int,
        latent_dim: int = 512,
        rope_dim: int = 64,
        *,
        quantised: str | None = None,
        group: int | None = None,
        **options: Any,
    ) -> None:
        options = _options(latent_dim, rope_dim, quantised, group, options)
        super().__init__(batch, capacity, 1, latent_dim + rope_dim, **options)
        self.rotary = slice(latent_dim, None)

    @classmethod
    def like(cls, k: Array, v: Array | None = None, *, capacity: int | None = None, **options: Any) -> LatentKVCache:
        """Refused: the sizes of a latent row do not follow from k. Use the class with latent_dim and rope_dim."""
        raise TypeError(
            "a latent cache is not like k and v; expected LatentKVCache(batch, capacity, latent_dim, rope_dim)"
        )

    def append(  # type: ignore[override]
        self, latent: Array, k_rope: Array, lengths: ArrayOrList | None = None, *, rotation: Rotation | None = None
    ) -> None:
        """Append new tokens to each sequence. If it raises an error, nothing has been written.

        Args:
            latent: [batch, T, latent_dim], normalised as the model does, in the dtype and on the device of the cache.
            k_rope: [batch, T, rope_dim], likewise.
            lengths: as in `KVCache.append`.
            rotation: options of `rope`, with which k_rope is first rotated to its positions.

        Raises:
            TypeError, ValueError, Unsupported: as in `KVCache.append`.
        """
        batch = len(self.lengths)
        self._check_parts(latent, k_rope, f"{batch}, T", (batch,))
        positions = None
        if rotation is not None:
            positions = self.positions[:, None] + self._arrays.steps(int(latent.shape[1]))
        k = _joined(latent, k_rope, positions, rotation)
        super().append(k, k[..., : self.sizes[1]], lengths)


class IndexedLatentKVCache(LatentKVCache):
    """A `LatentKVCache` that also stores the key of an indexer for each token (DeepSeek-V3.2, 2025), never as a code.

    index: [batch, capacity, 1, index_dim].
    """

    def __init__(
        self, batch: int, capacity: int, latent_dim: int, rope_dim: int, index_dim: int, **options: Any
    ) -> None:
        super().__init__(batch, capacity, latent_dim, rope_dim, **options)
        self.index = self._arrays.full((batch, capacity, 1, index_dim), 0.0)

    @property
    def arrays(self) -> list[Any]:
        return [*super().arrays, self.index]

    def append_indexed(self, latent: Any, k_rope: Any, index: Any) -> None:
        """`append` with index [batch, T, index_dim], the keys of the indexer."""
        self._arrays.check("index", index)
        wanted = (*tuple(latent.shape)[:2], int(self.index.shape[-1]))
        if tuple(index.shape) != wanted:
            raise ValueError(f"index has shape {list(index.shape)}; expected {list(wanted)}, a key for each new token")
        before, T = self.lengths, int(index.shape[1])
        super().append(latent, k_rope)
        rows = index.reshape(-1, 1, index.shape[-1])
        self._arrays.write([(rows, self.index, None, None)], *self._arrays.slots(before, T, None), None)

    def append(self, latent: Any, k_rope: Any, lengths: Any = None, *, rotation: Rotation | None = None) -> None:
        """Refused: use `append_indexed`."""
        raise TypeError("append lacks the indexer's keys; expected append_indexed(latent, k_rope, index)")

    def check_rotation(self, rotation: Any) -> None:
        """Raises ValueError for a rotation, which would leave the indexer's keys at their old positions."""
        if rotation is not None:
            raise ValueError(f"rotation is {rotation}; expected None: the indexer's keys would not be rotated")


class PagedLatentKVCache(_Latent, PagedKVCache):
    """A `PagedKVCache` of latent attention, with rows as in `LatentKVCache`.

    Args:
        pages, page_size: as in `PagedKVCache`.
        latent_dim, rope_dim, quantised, group, options: as in `LatentKVCache`.

    Examples:
        >>> cache = saccade.PagedLatentKVCache(100, 64, 512, 64, dtype=torch.float32)
        >>> cache.append([first := cache.add()], torch.randn(10, 512), torch.randn(10, 64))
        >>> o = saccade.decode(torch.randn(1, 1, 128, 576), cache.view([first]), scale=192**-0.5)
    """

    def __init__(
        self,
        pages: int,
        page_size: int,
        latent_dim: int = 512,
        rope_dim: int = 64,
        *,
        quantised: str | None = None,
        group: int | None = None,
        **options: Any,
    ) -> None:
        options = _options(latent_dim, rope_dim, quantised, group, options)
        super().__init__(pages, page_size, 1, latent_dim + rope_dim, **options)
        self.rotary = slice(latent_dim, None)

    def append(  # type: ignore[override]
        self,
        sequences: Sequence[int],
        latent: Array,
        k_rope: Array,
        cu: ArrayOrList | None = None,
        *,
        rotation: Rotation | None = None,
    ) -> None:
        """Append new tokens to each sequence. If it raises an error, nothing has changed.

        Args:
            sequences, cu: as in `PagedKVCache.append`.
            latent, k_rope: [n, latent_dim] and [n, rope_dim], in the dtype and on the device of the cache.
            rotation: options of `rope`, with which k_rope is first rotated to its positions.

        Raises:
            TypeError, ValueError, Unsupported: as in `PagedKVCache.append`.
        """
        if isinstance(sequences, int):
            raise alone(sequences)
        sequences = list(sequences)
        self._check_parts(latent, k_rope, "tokens", ())
        positions = None
        if rotation is not None:
            bounds = bounds_of("latent", "cu", cu, len(sequences), int(latent.shape[0]))
            positions = self._arrays.indices(new_positions([self.known(s) for s in sequences], bounds))
        k = _joined(latent, k_rope, positions, rotation)
        super().append(sequences, k, k[..., : self.sizes[1]], cu)
