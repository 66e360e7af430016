"""MLX's scaled_dot_product_attention with its signature and layout, which also accepts masks of `saccade.mask`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx

from ..api import attention
from ..mask import Mask


def route(mask: Any = None) -> str:
    """Which kernels compute attention with this mask, and why, as text."""
    if isinstance(mask, Mask):
        return "saccade: MLX's kernels have no windows, documents or other masks without an array of L x S"
    return "mlx: its own kernel is near the machine's limit for plain attention, causal or with an array"


def scaled_dot_product_attention(
    q: mx.array,
    k: mx.array,
    v: mx.array,
    *,
    scale: float,
    mask: Any = None,
    sinks: mx.array | None = None,
    stream: Any = None,
) -> mx.array:
    """`mx.fast.scaled_dot_product_attention`; with a mask of `saccade.mask`, Saccade's kernels compute it.

    Args:
        q: [B, Hq, L, D].
        k: [B, Hk, S, D]; Hk divides Hq.
        v: [B, Hk, S, Dv].
        scale: factor of q · k.
        mask: None, "causal" (the last query is aligned with the last key), an array in MLX's form, or an expression of
            `saccade.mask`. `route(mask)` says which kernels compute it.
        sinks: [Hq], one logit per head that is included in the softmax but has no value; as in MLX, its dtype must not
            be wider than that of q.
        stream: the MLX stream or device on which to compute.

    Returns:
        [B, Hq, L, Dv]. With a mask of `saccade.mask` a row that sees no key is 0.

    Raises:
        TypeError, ValueError, Unsupported: as in `saccade.attention`; MLX's errors for its own masks.

    Examples:
        >>> import mlx.core as mx
        >>> from saccade.integrations.mlx import scaled_dot_product_attention
        >>> q = k = v = mx.random.normal((1, 8, 64, 64))  # heads before tokens
        >>> o = scaled_dot_product_attention(q, k, v, scale=64**-0.5, mask=saccade.mask.causal())
    """
    if not isinstance(mask, Mask):
        return mx.fast.scaled_dot_product_attention(q, k, v, scale=scale, mask=mask, sinks=sinks, stream=stream)
    if sinks is not None and mx.result_type(sinks, q) != q.dtype:
        raise ValueError(
            f"sinks is {sinks.dtype} with q of {q.dtype}; expected a dtype no wider: sinks.astype(q.dtype)"
        )
    with mx.stream(mx.default_device() if stream is None else stream):
        q, k, v = (x.swapaxes(1, 2) for x in (q, k, v))
        o: mx.array = attention(q, k, v, mask, scale=scale, sinks=sinks).swapaxes(1, 2)
    return o


def vmap(function: Callable[..., Any], in_axes: int | Sequence[int | None] | None = 0) -> Callable[..., Any]:
    """`mx.vmap` for attention and recurrences, on both devices: the axis is folded into the batch.

    `mx.vmap` needs a rule for each primitive inside a function. Custom kernels have none, even if the function around
    them has one (MLX 0.32).

    Args:
        function: of arrays [B, T, H, n] or [T, H, n], with independent batch entries; its outputs start with the same
            axes.
        in_axes: the axis of all arguments, or of each; None for an argument without it, which is repeated.

    Returns:
        A function of the arguments with that axis; it is the first axis of the outputs.

    Raises:
        ValueError: no argument has an axis, or they differ in its size.
    """

    def mapped(*arrays: mx.array) -> Any:
        axes = list(in_axes) if isinstance(in_axes, Sequence) else [in_axes] * len(arrays)
        sizes = {x.shape[a] for x, a in zip(arrays, axes, strict=True) if a is not None}
        if len(sizes) != 1:
            raise ValueError(f"the mapped axes have sizes {sorted(sizes)}; expected one size")
        (n,) = sizes
        moved = [
            mx.broadcast_to(x[None], (n, *x.shape)) if a is None else mx.moveaxis(x, a, 0)
            for x, a in zip(arrays, axes, strict=True)
        ]
        lifted = [x.ndim == 4 for x in moved]
        results = function(*(x if one else x.reshape(-1, *x.shape[2:]) for x, one in zip(moved, lifted, strict=True)))
        if lifted[0]:
            return results
        several = isinstance(results, (tuple, list))
        outputs = tuple(x.reshape(n, -1, *x.shape[1:]) for x in (results if several else [results]))
        return outputs if several else outputs[0]

    return mapped
