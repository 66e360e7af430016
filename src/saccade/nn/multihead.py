"""torch.nn.MultiheadAttention with its arguments, parameters and results, on every backend."""

from __future__ import annotations

from itertools import accumulate
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from .. import api
from ..errors import Unsupported
from ..mask import Mask, causal, dense, documents, keys
from ..operands import check_flag
from ..problem import check_kind

# weights are computed for this many keys at a time
_COLUMNS = 128


class MultiheadAttention(torch.nn.MultiheadAttention):
    """`torch.nn.MultiheadAttention` without its T×T memory where a mask allows it (Vaswani et al., 2017).

    The constructor's arguments, the parameters and their initial values are torch's, so state dicts load both ways:
    embed_dim, num_heads, dropout, bias, add_bias_kv, add_zero_attn, kdim, vdim, batch_first, device, dtype. Outputs and
    gradients are the same as torch's, with these differences:

    - `need_weights` is False by default, because weights take O(Tq·Tk) memory and more time than the output.
    - For a query that sees no key, attention is 0, so the output is the bias of `out_proj`, and weights are 0. torch
      returns NaN with `need_weights`.
    - `is_causal=True` needs no attn_mask, and a call may give an expression of `saccade.mask`.
    - Dropout follows the Philox pattern of `saccade.attention`, so other weights are dropped.
    - `torch.nn.TransformerEncoderLayer` calls this module even in eval mode, because a pre-hook keeps that layer from
      passing the parameters to torch's fused operator. Nested tensors, which `torch.nn.TransformerEncoder` makes of
      padded input in eval mode, are computed as packed sequences.

    Examples:
        >>> attention = saccade.nn.MultiheadAttention(64, 4, batch_first=True)
        >>> x = torch.randn(2, 100, 64)
        >>> y, _ = attention(x, x, x, is_causal=True)
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.register_forward_pre_hook(_no_fused_path)

    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = False,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
        *,
        mask: Mask | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """Attention of the projected query, key and value, projected.

        Args:
            query: [Tq, B, embed_dim], [B, Tq, embed_dim] with batch_first, or [Tq, embed_dim] without a batch.
            key, value: [Tk, B, kdim] and [Tk, B, vdim], with the layout of query.
            key_padding_mask: [B, Tk], or [Tk] without a batch: booleans, True where a key is ignored, or numbers added
                to the scores.
            need_weights, average_attn_weights: whether to return weights, and their mean over heads.
            attn_mask: [Tq, Tk] or [B · heads, Tq, Tk]: booleans, True where a key is hidden, or numbers added to the
                scores.
            is_causal: query i sees keys j <= i, both counted from the first. With an attn_mask, it is a promise that
                the mask is causal: as in torch, the mask is then read only if key_padding_mask or need_weights is
                given. If it is not read, keys that add_bias_kv and add_zero_attn append count as the last ones.
            mask: a further restriction of the keys that each query sees, an expression of `saccade.mask`.

        Returns:
            (output, weights): output has the shape of query. weights is None, or [B, Tq, Tk], or [B, heads, Tq, Tk]
            without the average; B is left out for input without a batch. Tk includes appended keys.

        Raises:
            ValueError, TypeError: shapes or dtypes do not fit.
            Unsupported: nested tensors, except one that is query, key and value at once, without masks; or mask with
                add_bias_kv or add_zero_attn. Others as in `saccade.attention`.
        """
        check_kind(mask)
        if query.is_nested or key.is_nested or value.is_nested:
            masked = is_causal or any(x is not None for x in (key_padding_mask, attn_mask, mask))
            return self._of_nested(query, key, value, masked or need_weights)
        if query.dim() not in (2, 3) or not query.dim() == key.dim() == value.dim():
            shapes = [list(x.shape) for x in (query, key, value)]
            raise ValueError(f"query, key, value have shapes {shapes}; expected all [T, B, E], or all [T, E]")
        check_flag("is_causal", is_causal)
        sizes = [x.shape[-1] for x in (query, key, value)]
        if sizes != (expected := [self.embed_dim, self.kdim, self.vdim]):
            raise ValueError(f"query, key, value have {sizes} features; expected {expected}")
        lone = query.dim() == 2
        if lone:
            key_padding_mask = None if key_padding_mask is None else key_padding_mask[None]
        q, k, v = self._project(query, key, value, None if lone else 0 if self.batch_first else 1)
        extra = 0 if self.bias_k is None else 1
        extra += self.add_zero_attn
        if extra and mask is not None:
            reason = "mask does not include the keys that add_bias_kv and add_zero_attn append: give attn_mask"
            raise Unsupported("torch", [reason])
        Tk = k.shape[1]
        hint = is_causal and attn_mask is not None and key_padding_mask is None and not need_weights
        if is_causal and (hint or attn_mask is None):
            seen = causal(0) if hint or not extra else causal(0) | keys(Tk, Tk + extra)
            mask, attn_mask = seen if mask is None else mask & seen, None
        allowed, bias = _of_masks(attn_mask, key_padding_mask, (len(q), q.shape[2], q.shape[1], Tk), extra)
        mask = allowed if mask is None else mask if allowed is None else mask & allowed
        k, v = self._with_extra_keys(k, v)
        options: dict[str, Any] = {"mask": mask, "bias": bias}
        if self.training and self.dropout:
            options |= {"dropout": self.dropout, "seed": torch.randint(1 << 62, ())}
        o = self.out_proj(api.attention(q, k, v, **options).flatten(-2))
        o = o[0] if lone else o if self.batch_first else o.transpose(0, 1)
        if not need_weights:
            return o, None
        weights = _weights(q, k, options)
        weights = weights.mean(1) if average_attn_weights else weights
        return o, weights[0] if lone else weights

    def _project(self, query: Tensor, key: Tensor, value: Tensor, batch: int | None) -> list[Tensor]:
        # [B, T, heads, head_dim] of q, k and v; batch: which dimension is B
        sources = [query] if query is key is value else [query, key, value]
        sources = [x[None] if batch is None else x.transpose(0, batch) for x in sources]
        # torch's annotations omit None
        weight, bias = (cast("Tensor | None", x) for x in (self.in_proj_weight, self.in_proj_bias))
        if weight is not None and len(sources) == 1:
            packed = functional.linear(sources[0], weight, bias)
            return list(packed.unflatten(-1, (3, self.num_heads, self.head_dim)).unbind(-3))
        separate = self.q_proj_weight, self.k_proj_weight, self.v_proj_weight
        weights = separate if weight is None else weight.chunk(3)
        biases = (None, None, None) if bias is None else bias.chunk(3)
        sources = sources * 3 if len(sources) == 1 else sources
        projected = [functional.linear(*of) for of in zip(sources, weights, biases, strict=True)]
        return [x.unflatten(-1, (self.num_heads, self.head_dim)) for x in projected]

    def _with_extra_keys(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        rows: list[tuple[Tensor, Tensor]] = []
        one = len(k), 1, *k.shape[2:]
        if self.bias_k is not None and self.bias_v is not None:
            bias_k, bias_v = (x.view(1, *one[1:]).expand(one) for x in (self.bias_k, self.bias_v))
            rows.append((bias_k.to(k.dtype), bias_v.to(v.dtype)))
        if self.add_zero_attn:
            rows.append((k.new_zeros(one), v.new_zeros(one)))
        if not rows:
            return k, v
        return torch.cat([k, *(row[0] for row in rows)], 1), torch.cat([v, *(row[1] for row in rows)], 1)

    def _of_nested(self, query: Tensor, key: Tensor, value: Tensor, more: bool) -> tuple[Tensor, None]:
        if more or not query is key is value:
            reason = "a nested tensor must be query, key and value at once, without masks or weights: pad the tensors"
            raise Unsupported("torch", [reason])
        rows = query.unbind()
        lengths = [len(row) for row in rows]
        borders = np.array([0, *accumulate(lengths)], np.int32)
        packed = torch.cat(rows)
        o, _ = MultiheadAttention.forward(self, packed, packed, packed, mask=documents(cu_seqlens=borders))
        return torch.nested.as_nested_tensor(list(o.split(lengths)), layout=query.layout), None


def _no_fused_path(module: Any, args: Any) -> None:
    """Do nothing: torch does not pass the parameters of a module that has hooks to fused operators."""


def _of_masks(
    attn_mask: Tensor | None, key_padding_mask: Tensor | None, sizes: tuple[int, int, int, int], extra: int
) -> tuple[Mask | None, Tensor | None]:
    # (mask, bias); sizes: B, heads, Tq, Tk; all queries see the extra keys
    B, H, Tq, Tk = sizes
    allowed, terms = None, []
    if attn_mask is not None:
        _check("attn_mask", attn_mask, ((Tq, Tk), (B * H, Tq, Tk)))
        attn_mask = functional.pad(attn_mask, (0, extra))
        if attn_mask.dim() == 3:
            terms.append(_added(attn_mask).unflatten(0, (B, H)))
        elif attn_mask.dtype is torch.bool:
            allowed = dense(~attn_mask)
        else:
            terms.append(attn_mask[None, None])
    if key_padding_mask is not None:
        _check("key_padding_mask", key_padding_mask, ((B, Tk),))
        terms.append(_added(functional.pad(key_padding_mask, (0, extra)))[:, None, None])
    return allowed, sum(terms[1:], terms[0]) if terms else None


def _check(name: str, mask: Any, shapes: tuple[tuple[int, ...], ...]) -> None:
    if not isinstance(mask, Tensor):
        hint = ": give an expression of saccade.mask as mask=" if isinstance(mask, Mask) else ""
        raise TypeError(f"{name} is a {type(mask).__name__}; expected a tensor{hint}")
    if tuple(mask.shape) not in shapes:
        expected = " or ".join(str(list(shape)) for shape in shapes)
        raise ValueError(f"{name} has shape {list(mask.shape)}; expected {expected}")
    if mask.dtype is not torch.bool and not mask.is_floating_point():
        raise TypeError(f"{name} has dtype {str(mask.dtype)[6:]}; expected bool or a floating dtype: cast it first")


def _added(mask: Tensor) -> Tensor:
    # booleans as numbers to add to the scores
    if mask.dtype is not torch.bool:
        return mask
    return torch.zeros(mask.shape, device=mask.device).masked_fill_(mask, float("-inf"))


def _weights(q: Tensor, k: Tensor, options: dict[str, Any]) -> Tensor:
    """The weights [B, heads, Tq, Tk]: the outputs if the identity is v, computed for a few keys at a time."""
    B, Tk, H, _ = k.shape
    if not Tk:
        return q.new_zeros(B, H, q.shape[1], 0)
    columns = [
        api.attention(q, k, some[None, :, None].expand(B, Tk, H, -1), **options)
        for some in torch.eye(Tk, dtype=k.dtype, device=k.device).split(_COLUMNS, -1)
    ]
    return torch.cat(columns, -1).transpose(1, 2)
