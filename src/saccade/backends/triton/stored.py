"""Tensors as kernels take them: contiguous arrays, pages of a cache, codes and their scales."""

from __future__ import annotations

import torch
import triton.language as tl
from torch import Tensor

from ...problem import Problem
from .. import Extras
from .kernels.rows import Array


def same_rows(k: Tensor, v: Tensor) -> bool:
    """Whether v is a view of the first numbers of k."""
    return k.data_ptr() == v.data_ptr() and k.stride() == v.stride() and v.shape[-1] <= k.shape[-1]


def array(x: Tensor) -> Array:
    """A tensor [B, T, H, n] as kernels take it."""
    b, t, h, _ = x.stride()
    return Array(x, b, t, h)


def stored(p: Problem, x: Tensor, scale: Tensor | None, extras: Extras) -> Array:
    """k or v, which a cache may store in pages or as codes."""
    if p.quantised is not None and scale is not None:
        x = x.view(torch.float8_e4m3fn) if p.quantised.kind == "fp8" else x
        n, group = p.quantised.numbers(x.shape[-1]), p.quantised.group
        even = 1 if n & (n - 1) == 0 and (group >= n or group & (group - 1) == 0) else None
        b, t, h, _ = scale.stride()
        groups = tl.constexpr(group) if group < n else None
        kept = array(x)._replace(scale=scale, scale_b=b, scale_t=t, scale_h=h, even=even, group=groups)
    else:
        kept = array(x)
    return kept if extras.block_table is None else _paged(kept, extras)


def _paged(x: Array, extras: Extras) -> Array:
    table = torch.as_tensor(extras.block_table, device=x.p.device)
    table = table if table.stride(-1) == 1 and table.stride(0) == table.shape[1] else table.contiguous()
    page = extras.page_size
    shift = page.bit_length() - 1 if page & (page - 1) == 0 else None
    return x._replace(table=table, columns=table.shape[1], page=page, shift=shift)
