"""The merge of partial results, in the signature of FlashAttention-3."""

from __future__ import annotations

import torch
from torch import Tensor

from ..merge import merge
from .flash_arguments import check_tensor
from .flash_private_3 import written


def flash_attn_combine(
    out_partial: Tensor, lse_partial: Tensor, out: Tensor | None = None, out_dtype: torch.dtype | None = None
) -> tuple[Tensor, Tensor]:
    """Merge partial results over disjoint keys, by `saccade.merge`.

    Args:
        out_partial: [splits, B, S, H, D], or packed [splits, total, H, D].
        lse_partial: [splits, B, S, H], or packed [splits, total, H].
        out: a tensor to which the result is written as well.
        out_dtype: the dtype of out; None for that of out_partial.

    Returns:
        (out, lse), without the dimension of the splits.

    Raises:
        TypeError, ValueError: dtypes or shapes do not fit.

    Examples:
        >>> from saccade.integrations.flash_attn_3 import flash_attn_combine
        >>> out_partial, lse_partial = torch.randn(4, 2, 16, 8, 64), torch.randn(4, 2, 16, 8)  # 4 splits
        >>> out, lse = flash_attn_combine(out_partial, lse_partial)  # [2, 16, 8, 64] and [2, 16, 8]
    """
    for name, x in (("out_partial", out_partial), ("lse_partial", lse_partial)):
        check_tensor(name, x)
    if out_partial.dim() not in (4, 5) or lse_partial.shape != out_partial.shape[:-1]:
        shapes = [list(x.shape) for x in (out_partial, lse_partial)]
        wanted = "[splits, B, S, H, D] and [splits, B, S, H], or packed, without B"
        raise ValueError(f"out_partial, lse_partial have shapes {shapes}; expected {wanted}")
    wide = torch.promote_types(out_partial.dtype, torch.float32)
    o, lse = merge(list(zip(out_partial.to(wide).unbind(), lse_partial.unbind(), strict=True)))
    o = o.to(out_partial.dtype if out_dtype is None else out_dtype)
    return o if out is None else written(out, o), lse
