"""Longformer's attention as a torch module: a window, and global tokens with projections of their own."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from .. import api
from .. import mask as masks


class LongformerAttention(nn.Module):
    """Attention within `window` tokens, half on each side, and between global tokens and all (Beltagy et al., 2020).

    A token sees its window and every global token, through `query`, `key` and `value`. A global token sees all tokens:
    with `separate`, as in trained Longformers, through `query_global`, `key_global` and `value_global`, otherwise
    through the same three. Parameters have the names of the Hugging Face layout; x [B, T, width] -> [B, T, width],
    before the output map. Raises ValueError if the heads do not divide the width, and for an odd window.
    """

    def __init__(self, width: int, heads: int, window: int, separate: bool = True) -> None:
        super().__init__()
        if width % heads or window < 0 or window % 2:
            raise ValueError(
                f"width {width}, heads {heads}, window {window} given; expected heads that divide the width and an "
                "even window, half of it on each side"
            )
        self.heads, self.reach, self.separate = heads, window // 2, separate
        self.query, self.key, self.value = (nn.Linear(width, width) for _ in range(3))
        if separate:
            self.query_global, self.key_global, self.value_global = (nn.Linear(width, width) for _ in range(3))

    def forward(self, x: Tensor, chosen: Tensor, backend: str | None = None) -> Tensor:
        """x [B, T, width]; chosen: int [m] or [B, m], the global tokens, which may be repeated."""
        if not chosen.shape[-1]:
            return self._attend(x, x, masks.window(self.reach, self.reach), "", backend)
        chosen = chosen.expand(len(x), -1)
        mask = masks.window(self.reach, self.reach) | masks.global_tokens(chosen)
        o = self._attend(x, x, mask, "", backend)
        if not self.separate:
            return o
        index = chosen.long()[..., None].expand(-1, -1, x.shape[-1])
        whole = self._attend(x.gather(1, index), x, None, "_global", backend)
        # a token that is named several times has one gradient
        again = (chosen[:, :, None] == chosen[:, None]).tril(-1).any(-1)
        whole = torch.where(again[..., None], whole.detach(), whole)
        return o.scatter(1, index, whole)

    def _attend(self, x: Tensor, source: Tensor, mask: masks.Mask | None, which: str, backend: str | None) -> Tensor:
        # queries of x on keys and values of source, by the three projections of one name
        maps = (("query", x), ("key", source), ("value", source))
        q, k, v = (getattr(self, name + which)(one).unflatten(-1, (self.heads, -1)) for name, one in maps)
        return api.attention(q, k, v, mask, backend=backend).flatten(-2)
