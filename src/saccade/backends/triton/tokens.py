"""Writing new tokens into the arrays of a cache."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ...quantised import Quantised
from .chip import on
from .kernels import append as kernels_append
from .kernels.append import Angles, Config, Copied, Places, Sizes, Slots, Tokens
from .launches import PLAIN


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


def append_rows(k: Tensor, v: Tensor | None, arrays: Sequence[Tensor], starts: Tensor) -> bool:
    """Write k and v [B, T, heads, size] to the arrays of a cache, row b from slot starts[b] on, in one launch.

    v: None if the values are a part of the keys. False, with nothing written, where numbers do not lie side by side.
    """
    new = [k] if v is None else [k, v]
    if any(x.stride(-1) != 1 and x.shape[-1] != 1 for x in arrays):
        return False
    new = [x if x.stride(-1) == 1 else x.contiguous() for x in new]
    pairs = [Copied(x, *(*x.stride()[:3], a, *a.stride()[:3], a.shape[1])) for x, a in zip(new, arrays, strict=False)]
    (B, T, heads), widths = k.shape[:3], [x.shape[-1] for x in new]
    if B * T * heads and max(widths):
        sizes = Sizes(widths[0], widths[-1], 1 << (max(widths) - 1).bit_length())
        both, grid = (pairs[0], None if v is None else pairs[1]), (B * T * heads, len(new))
        with on(k):
            PLAIN.run(kernels_append.append_rows, grid, *both, starts, T, heads, sizes, num_warps=1)
    return True
