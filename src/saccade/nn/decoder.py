"""The attention layer of decoder models: grouped heads, rotary positions, a causal mask, a cache."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from .. import api
from ..caches.contiguous import KVCache
from ..mask import Mask
from ..problem import check_kind
from ..rope import OPTIONS
from ..rope import rope as rotate


class Attention(nn.Module):
    """Self-attention of a decoder, [B, T, dim] -> [B, T, dim], or cross-attention to a context.

    The projections are `q_proj`, `k_proj`, `v_proj` and `o_proj`, as in Llama. `q_norm` and `k_norm` are applied to
    each head of q and k before these are rotated. They are `torch.nn.Identity()` until replaced, for instance by
    `torch.nn.RMSNorm(layer.head_dim)`.

    Args:
        dim: the size of x.
        heads: query heads.
        kv_heads: heads of keys and values, a divisor of heads (Ainslie et al., 2023); None for heads.
        head_dim: the size of a head; None for dim / heads.
        bias: whether the projections have a bias.
        rope: the base of rotary positions (Su et al., 2021), a mapping of options for `saccade.rope`, or None for no
            rotation.
        causal: True hides keys after a query's own position, with any mask. Set it to False for encoders.

    Raises:
        ValueError: sizes that do not divide, or an odd head_dim with rope.
        TypeError: rope has an option that `saccade.rope` does not have.

    Examples:
        >>> attention, x = saccade.nn.Attention(64, heads=4, kv_heads=2), torch.randn(2, 100, 64)
        >>> y = attention(x, saccade.mask.window(15, None))  # the last 16 keys, because it is causal
    """

    def __init__(
        self,
        dim: int,
        heads: int,
        kv_heads: int | None = None,
        head_dim: int | None = None,
        bias: bool = False,
        rope: float | Mapping[str, Any] | None = 10000.0,
        causal: bool = True,
    ) -> None:
        super().__init__()
        self.heads, self.kv_heads = heads, heads if kv_heads is None else kv_heads
        if heads < 1 or self.kv_heads < 1 or heads % self.kv_heads:
            raise ValueError(f"heads is {heads} and kv_heads {kv_heads}; expected a kv_heads that divides heads")
        if head_dim is None and dim % heads:
            raise ValueError(f"dim is {dim} and heads {heads}; expected heads that divide dim, or a head_dim")
        self.head_dim = dim // heads if head_dim is None else head_dim
        if rope is not None and self.head_dim % 2:
            raise ValueError(f"head_dim is {self.head_dim} and rope {rope!r}; expected an even head_dim, or rope=None")
        rope = rope if rope is None or isinstance(rope, Mapping) else {"base": rope}
        self.rope: dict[str, Any] | None = None if rope is None else dict(rope)
        if unknown := (self.rope or {}).keys() - OPTIONS.keys():
            raise TypeError(f"rope has {', '.join(map(str, unknown))}; expected options of rope: {', '.join(OPTIONS)}")
        self.causal = causal
        self.q_proj = nn.Linear(dim, heads * self.head_dim, bias=bias)
        self.k_proj = nn.Linear(dim, self.kv_heads * self.head_dim, bias=bias)
        self.v_proj = nn.Linear(dim, self.kv_heads * self.head_dim, bias=bias)
        self.o_proj = nn.Linear(heads * self.head_dim, dim, bias=bias)
        self.q_norm, self.k_norm = nn.Identity(), nn.Identity()

    def forward(
        self,
        x: Tensor,
        mask: Mask | None = None,
        *,
        context: Tensor | None = None,
        cache: KVCache | None = None,
        positions: Tensor | None = None,
        backend: str | None = None,
    ) -> Tensor:
        """Attention of x to itself, to the tokens in a cache, or to a context.

        Args:
            x: [B, T, dim].
            mask: which keys each query sees, an expression of `saccade.mask`; None for all. `causal` still applies.
            context: [B, S, dim], keys and values in place of x. They are not rotated, and `causal` does not apply.
            cache: a cache to which the T tokens are appended first. They attend to the tokens in it that `mask` and
                `causal` allow. A cache has no gradient, so call under `torch.no_grad()`.
            positions: [T] or [B, T], for the rotation; None counts from 0, or from the next position of the cache.
            backend: as in `saccade.attention`.

        Returns:
            [B, T, dim].

        Raises:
            TypeError: cache is not a KVCache, or mask not a mask.
            ValueError: x has another shape, or another batch than cache; context is given with a cache or with
                positions; and as in `saccade.attention` and `KVCache.append`.
            Unsupported: as in `saccade.attention`.
        """
        if cache is not None and not isinstance(cache, KVCache):
            raise TypeError(f"cache is {type(cache).__name__}; expected a saccade.KVCache, as make_cache returns")
        check_kind(mask)
        if x.dim() != 3:
            raise ValueError(f"x has shape {list(x.shape)}; expected [B, T, dim]: give a single sequence as x[None]")
        if cache is not None and cache.lengths.shape[0] != x.shape[0]:
            raise ValueError(f"x has {len(x)} sequences and the cache {len(cache.lengths)}; expected the same number")
        q, k, v = self._project(x, x if context is None else context)
        if context is not None:
            if cache is not None or positions is not None:
                raise ValueError("context is given with a cache or positions; expected it alone: leave these out")
            return self._joined(api.attention(q, k, v, mask, backend=backend))
        if self.rope is not None:
            at = positions
            if at is None:
                at = torch.arange(x.shape[1], device=x.device)
                at = at if cache is None else cache.positions[:, None] + at
            q, k = rotate(q, at, **self.rope), rotate(k, at, **self.rope)
        if cache is not None:
            before = cache.lengths
            cache.append(k, v)
            try:
                return self._joined(api.decode(q, cache, mask=mask, causal=self.causal, backend=backend))
            except BaseException:
                # the tokens were not read: a second try appends them again
                cache.lengths = before
                raise
        if self.causal:
            mask = api.CAUSAL if mask is None else mask & api.CAUSAL
        return self._joined(api.attention(q, k, v, mask, backend=backend))

    def make_cache(self, batch: int, capacity: int, **options: Any) -> KVCache:
        """An empty cache for `batch` sequences of up to `capacity` tokens; options: other arguments of `KVCache`."""
        weight = self.k_proj.weight
        options = {"dtype": weight.dtype, "device": weight.device, **options}
        return KVCache(batch, capacity, self.kv_heads, self.head_dim, **options)

    def _project(self, x: Tensor, source: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        # [B, T, heads, head_dim]
        q = self.q_norm(self.q_proj(x).unflatten(-1, (self.heads, self.head_dim)))
        k = self.k_norm(self.k_proj(source).unflatten(-1, (self.kv_heads, self.head_dim)))
        return q, k, self.v_proj(source).unflatten(-1, (self.kv_heads, self.head_dim))

    def _joined(self, o: Tensor) -> Tensor:
        return self.o_proj(o.flatten(-2))
