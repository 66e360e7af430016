"""The public calls: attention, its backward for those without autograd, and decode from a cache."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from types import ModuleType
from typing import Any, NoReturn

import numpy as np

from . import mask as masks
from .backends import Outputs
from .biases import Bias, side_of
from .keywords import refuse
from .layout import DEFAULT, heads_first, lse_tokens_first, tokens_first
from .mask import Mask
from .operands import DEFAULTS, NO_SIDE, PLAIN, Options, Request

CAUSAL = masks.causal()


def attention(
    q: Any,
    k: Any,
    v: Any,
    mask: Mask | None = None,
    *,
    scale: float | None = None,
    softcap: float | None = None,
    sinks: Any = None,
    bias: Any = None,
    dropout: float = 0.0,
    seed: Any = None,
    descale: Any = None,
    deterministic: bool = True,
    return_lse: bool = False,
    layout: str = DEFAULT,
    backend: str | None = None,
    **unknown: NoReturn,
) -> Any:
    """Exact attention: o = softmax(scale q kᵀ over the allowed keys) v, in O(T) memory (Dao, 2023).

    Args:
        q: [B, Tq, Hq, D], a torch tensor or NumPy array of float32, bfloat16, float16 or float64; any strides (only a
            last dimension that is not contiguous is copied). [Tq, Hq, D] stands for B = 1, then in k and v too.
            Or, with k and v, a `saccade.backends.webgpu.array` of float32 or float16: results stay on its device, as
            float32. Or, with k and v, arrays of MLX, differentiable by `mx.grad` in these three.
        k: [B, Tk, Hk, D]; Hk divides Hq, and query head h reads key head h // (Hq / Hk) (Ainslie et al., 2023).
        v: [B, Tk, Hk, Dv].
        mask: which keys each query sees, an expression of `saccade.mask`; None for all of them.
        scale: factor of q · k, 1/sqrt(D) if None.
        softcap: s becomes softcap · tanh(s / softcap), before the bias.
        sinks: [Hq], a logit per head that takes part in the softmax and has no value.
        bias: added to the scores; broadcastable to [B, Hq, Tq, Tk], -inf excludes; or `alibi(slopes)`,
            `relative(table, origin)`, `gates(log_f)`, or a sum of such terms. Gradients exist for [1|B, 1|Hq, Tq, Tk]
            and [1|B, 1|Hq, 1, Tk], and for slopes, tables and gates.
        dropout: share of weights dropped, by Philox-4x32-10: the same ones on every backend, forward and backward.
        seed: of the dropout, an int or 0-d integer array, 0 <= seed < 2**64; None draws one (from torch's generator
            for tensors).
        descale: the factors of 8-bit q, k and v (a number x stands for factor * x), each float32 [H] or [B, H] and
            positive; 8-bit floats need them, and o is bfloat16 then. Forward alone.
        deterministic: True for the same bits from the same input, whatever the thread count; False where speed may
            cost that.
        return_lse: return (o, lse) instead of o; lse is differentiable.
        layout: "bthd" for the shapes given here. "bhtd" for heads before tokens, as torch's own attention has them: q
            [B, Hq, Tq, D], k and v in the same way, o [B, Hq, Tq, Dv] and lse [B, Hq, Tq]. Views, never copies.
        backend: one of "cpu", "triton", "webgpu", "metal"; None chooses by where the arrays live.

    Returns:
        o [B, Tq, Hq, Dv] in the dtype of q. With `return_lse` also lse [B, Tq, Hq], natural logarithm, float32
        (float64 for float64 inputs). A row with no allowed key has o = 0 and lse = -inf, or its sink.

    Raises:
        TypeError, ValueError: an argument is wrong; the message names it.
        Unsupported: the backend cannot compute this.
    """
    if unknown:
        refuse(attention, unknown)
    if layout != DEFAULT:
        q, k, v = tokens_first(layout, q, k, v)
    options, request = DEFAULTS, PLAIN
    ordinary = scale is softcap is descale is backend is None and deterministic is True
    if not ordinary or type(dropout) is not float or dropout:
        options = _options(scale, softcap, dropout, descale, deterministic, backend)
    if options is not DEFAULTS or not (mask is bias is sinks is seed is None):
        mask = _pruned(mask, q, k, bias, options)
        request = _request(mask, bias, sinks, options, seed)
    result = _framework(q).attention(q, k, v, request, "forward" if return_lse else "result")
    if layout != DEFAULT:
        result = heads_first(*result)
    return result if return_lse else result[0]


def attention_backward(
    do: Any,
    q: Any,
    k: Any,
    v: Any,
    o: Any,
    lse: Any,
    mask: Mask | None = None,
    *,
    dlse: Any = None,
    scale: float | None = None,
    softcap: float | None = None,
    sinks: Any = None,
    bias: Any = None,
    dropout: float = 0.0,
    seed: Any = None,
    descale: Any = None,
    deterministic: bool = True,
    grads: Iterable[str] | None = None,
    layout: str = DEFAULT,
    backend: str | None = None,
    **unknown: NoReturn,
) -> tuple[Any, Any, Any, dict[str, Any]]:
    """The gradients of `attention`, for callers without autograd (recomputed from lse, in O(T) memory; Dao, 2023).

    Args:
        do: [B, Tq, Hq, Dv], gradient of o, in the dtype of q.
        q, k, v, mask and the options: as in the forward call; with dropout also its seed.
        o, lse: what the forward call returned.
        dlse: [B, Tq, Hq], gradient of lse, in its dtype; None for zero.
        grads: which of "bias", "slopes", "sinks", "table" and "log_f" to compute as well; None for all in the call.
        layout: of all arrays and gradients, as in the forward call.

    Returns:
        (dq, dk, dv, extras): shapes and dtypes of q, k and v; extras holds the gradients that `grads` names.

    Raises:
        TypeError, ValueError, Unsupported: as `attention`.
    """
    if unknown:
        refuse(attention_backward, unknown)
    if layout != DEFAULT:
        do, q, k, v, o = tokens_first(layout, do, q, k, v, o)
        lse, dlse = lse_tokens_first(lse, dlse)
    options = _options(scale, softcap, dropout, descale, deterministic, backend)
    request = _request(_pruned(mask, q, k, bias, options), bias, sinks, options, seed)
    side = request.side
    present = frozenset(name for name, x in side._asdict().items() if x is not None)
    wanted = present if grads is None else frozenset(grads)
    if not wanted <= present:
        raise ValueError(
            f"grads asks for {sorted(wanted - present)}; this call gives {sorted(present) or 'none of them'}"
        )
    if dropout and seed is None:
        raise ValueError("dropout without a seed: give the seed of the forward call")
    *first, extras = _framework(q).attention_backward(q, k, v, Outputs(o, lse, do, dlse), request, wanted)
    if layout != DEFAULT:
        # the exchange is its own inverse
        first = tokens_first(layout, *first)
    return *first, extras


def decode(
    q: Any,
    cache: Any,
    *,
    mask: Mask | None = None,
    causal: bool = True,
    scale: float | None = None,
    softcap: float | None = None,
    sinks: Any = None,
    bias: Any = None,
    return_lse: bool = False,
    layout: str = DEFAULT,
    backend: str | None = None,
    **unknown: NoReturn,
) -> Any:
    """Attention of a few new queries over a key cache, split over keys.

    Args:
        q: [B, Tq, Hq, D]; the last query of entry b stands at position lengths[b] - 1 (bottom-right), so append the
            new keys first.
        cache: a `KVCache`; slots from lengths[b] on are never read into a result, whatever they hold. For q on a WebGPU
            device one made there: `KVCache(..., device="webgpu")`. Or `PagedKeys`, of a `PagedKVCache`.
        mask: as in `attention`, on top of the cache's lengths and of `causal`.
        causal: each query sees no key behind its own position, whatever the mask. False lets all queries see all keys
            that the mask allows, as in cross-attention.
        layout: of q, o and lse, as in `attention`; the cache has its own.
        scale, softcap, sinks, bias, return_lse, backend: as in `attention`; Tk is the cache's capacity, that of a row
            of the table.

    Returns, raises: as `attention`.
    """
    if unknown:
        refuse(decode, unknown)
    if layout != DEFAULT:
        (q,) = tokens_first(layout, q)
    if not all(hasattr(cache, name) for name in ("k", "v", "lengths")):
        raise TypeError(f"cache is {type(cache).__name__}; expected a saccade.KVCache or PagedKeys")
    framework, request = _framework(q), PLAIN
    mask = of_decode(mask, q, causal)
    if not (mask is scale is softcap is bias is sinks is backend is None):
        request = _request(mask, bias, sinks, Options(scale, softcap, backend=backend), None)
        if type(bias) is Bias and bias.prune is not None:
            raise ValueError("gates of decode have prune; expected none: it is for attention and attention_backward")
    result = framework.decode(q, cache, request)
    if layout != DEFAULT:
        result = heads_first(*result)
    return result if return_lse else result[0]


def of_decode(mask: Mask | None, q: Any, causal: bool) -> Mask | None:
    """The mask of new queries [B, Tq, Hq, D], with `causal` such that none sees beyond its own position."""
    if type(causal) is not bool:
        raise TypeError(f"causal is {causal!r}; expected True or False")
    # the last query sees all keys, so one alone needs no mask
    if not causal or len(q.shape) != 4 or q.shape[1] < 2:
        return mask
    return CAUSAL if mask is None else mask & CAUSAL if isinstance(mask, Mask) else mask


def _options(scale: Any, softcap: Any, dropout: Any, descale: Any, deterministic: Any, backend: Any) -> Options:
    if type(deterministic) is not bool:
        raise TypeError(f"deterministic is {deterministic!r}; expected True or False")
    return Options(scale, softcap, dropout, descale, deterministic, backend)


def _request(mask: Any, bias: Any, sinks: Any, options: Options, seed: Any) -> Request:
    if type(bias) is Bias and bias.origin:
        options = options._replace(origin=bias.origin)
    return Request(mask, NO_SIDE if bias is sinks is None else side_of(bias, sinks), options, seed)


def _pruned(mask: Any, q: Any, k: Any, bias: Any, options: Options) -> Any:
    if type(bias) is not Bias or bias.prune is None:
        return mask
    from .pruning import pruned

    return pruned(mask, q, k, bias, options.scale, options.softcap)


def _framework(q: Any) -> ModuleType:
    return _frameworks.get(type(q)) or _find_framework(q)


# of the kinds of array seen so far
_frameworks: dict[type, ModuleType] = {}


def _find_framework(q: Any) -> ModuleType:
    # torch is looked up, never imported: a tensor cannot exist before its package was
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(q, torch.Tensor):
        from .frameworks import torch as framework
    elif isinstance(q, np.ndarray):
        from .frameworks import numpy as framework
    elif type(q).__module__ == "saccade.backends.webgpu.arrays":
        from .frameworks import webgpu as framework
    elif type(q).__module__ == "mlx.core":
        from .frameworks import mlx as framework
    else:
        raise TypeError(f"q is {type(q).__name__}; expected a torch tensor or a NumPy array [B, Tq, Hq, D]")
    _frameworks[type(q)] = framework
    return framework
