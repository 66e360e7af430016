"""Writing new tokens into the arrays of a cache."""

from __future__ import annotations

import torch
from torch import Tensor

from ...quantised import Quantised
from .chip import on
from .kernels import append as kernels_append
from .kernels.append import Angles, Config, Places, Slots, Tokens
from .launch import PLAIN


def append(
    x: Tensor,
    array: Tensor,
    scale: Tensor | None,
    first: Tensor,
    second: Tensor,
    cos: Tensor | None,
    sin: Tensor | None,
    interleaved: bool,
    how: Quantised | None,
) -> bool:
    """`caches.storage.Arrays.write` in one launch; False, with nothing written, for unsupported sizes."""
    n, heads, D = x.shape
    power = D & (D - 1) == 0 and how is not None and how.group & (how.group - 1) == 0
    if D % 2 or x.dtype is torch.float64 or not (how is None or how.group >= D or power):
        return False
    x = x if x.stride(-1) == 1 else x.contiguous()
    scales = None if scale is None else Slots(scale, *scale.stride()[:3])
    angles = Angles(None, None) if cos is None or sin is None else Angles(cos.contiguous(), sin.contiguous())
    code = (D, "", 0.0) if how is None else (min(how.group, D), how.kind, kernels_append.TOPS[how.kind])
    config = Config(D, max(1, 1 << (D // 2 - 1).bit_length()), *code, interleaved)
    args = Tokens(x, *x.stride()[:2]), Slots(array, *array.stride()[:3]), scales, Places(first, second), angles
    if n * heads:
        with on(x):
            PLAIN.run(kernels_append.append, (n * heads,), *args, heads, config, num_warps=1)
    return True
