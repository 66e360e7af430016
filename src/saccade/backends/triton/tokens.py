"""Writing new tokens into the arrays of a cache."""

from __future__ import annotations

import torch
from torch import Tensor

from ...quantised import Quantised
from .chip import on
from .kernels import append as kernels_append
from .launch import PLAIN


def append(
    x: Tensor, held: Tensor, scale: Tensor | None, first: Tensor, second: Tensor, cos: Tensor | None,
    sin: Tensor | None, interleaved: bool, how: Quantised | None,
) -> bool:  # fmt: skip
    """`caches.storage.Arrays.write` in one launch; False where the sizes are not this kernel's, and nothing is done."""
    n, heads, D = x.shape
    power = D & (D - 1) == 0 and how is not None and how.group & (how.group - 1) == 0
    if D % 2 or x.dtype is torch.float64 or not (how is None or how.group >= D or power):
        return False
    x = x if x.stride(-1) == 1 else x.contiguous()
    kind = "" if how is None else how.kind
    strides = (0, 0, 0) if scale is None else scale.stride()[:3]
    turned = (None, None) if cos is None or sin is None else (cos.contiguous(), sin.contiguous())
    if n * heads:
        with on(x):
            PLAIN.run(
                kernels_append.append, (n * heads,), x, *x.stride()[:2], held, *held.stride()[:3], scale, *strides,
                first, second, *turned, heads, D=D,
                HALF=max(1, 1 << (D // 2 - 1).bit_length()), GROUP=D if how is None else min(how.group, D), KIND=kind,
                CODE=kernels_append.TOPS.get(kind, 0.0), INTERLEAVED=interleaved, num_warps=1,
            )  # fmt: skip
    return True
