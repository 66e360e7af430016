"""The public calls: attention, its backward for callers without autograd, and decode from a cache."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NoReturn

from . import mask as masks
from .arrays import Array, ArrayOrTuple, ArrayT
from .backends import Outputs
from .biases import Bias, side_of
from .frameworks import KNOWN, framework_of
from .keywords import refuse
from .layout import DEFAULT, heads_first, lse_tokens_first, tokens_first
from .mask import Mask
from .operands import DEFAULTS, NO_SIDE, PLAIN, Options, Request

CAUSAL = masks.causal()


def attention(
    q: Array,
    k: Array,
    v: Array,
    mask: Mask | None = None,
    *,
    scale: float | None = None,
    softcap: float | None = None,
    sinks: Array | None = None,
    bias: Array | Bias | None = None,
    dropout: float = 0.0,
    seed: int | Array | None = None,
    descale: Sequence[Array] | None = None,
    deterministic: bool | str = True,
    return_lse: bool = False,
    return_max: bool = False,
    return_entropy: bool = False,
    layout: str = DEFAULT,
    backend: str | None = None,
    **unknown: NoReturn,
) -> ArrayOrTuple:
    """Exact attention: o = softmax(scale q kᵀ over the allowed keys) v, in O(T) memory (Dao, 2023).

    Args:
        q: [B, Tq, Hq, D], or [Tq, Hq, D] for B = 1 (then also k and v). q, k and v have one type and one dtype:
            torch tensors or NumPy arrays of float32, bfloat16, float16 or float64, with any strides (only a last
            dimension that is not contiguous is copied); CUDA tensors of float8_e4m3fn with `descale`; arrays of
            `saccade.backends.webgpu.array`, float32 or float16, whose results stay on the device, as float32; MLX
            arrays, also under `mx.grad`; or JAX arrays on the CPU, also under `jax.jit`, `jax.grad` and `jax.vmap`.
        k: [B, Tk, Hk, D]. Hk divides Hq; query head h reads key head h // (Hq / Hk) (Ainslie et al., 2023).
        v: [B, Tk, Hk, Dv].
        mask: which keys each query sees, an expression of `saccade.mask`; None for all keys.
        scale: factor of q · k; None for 1/sqrt(D).
        softcap: a score s becomes softcap · tanh(s / softcap), before the bias is added.
        sinks: [Hq], one logit per head that is included in the softmax but has no value.
        bias: added to the scores: an array that broadcasts to [B, Hq, Tq, Tk], in which -inf excludes a pair;
            `alibi(slopes)`, `relative(table, origin)` or `gates(log_f)`; or a sum of such terms. Arrays
            [1|B, 1|Hq, Tq, Tk] and [1|B, 1|Hq, 1, Tk] have gradients, and so do slopes, tables and gates.
        dropout: the fraction of the weights to drop. Philox-4x32-10 chooses the same weights on every backend, in
            forward and backward.
        seed: seed of the dropout, an int or 0-d integer array, 0 <= seed < 2**64. None draws one (for tensors, from
            torch's generator).
        descale: the factors of 8-bit q, k and v, each float32 [H] or [B, H] and positive: a stored x means
            factor * x. 8-bit floats need them; o is then bfloat16. Forward only.
        deterministic: True gives the same bits for the same input, with any number of threads. False allows faster
            kernels that do not. "batch" also makes the bits of each row independent of the rest of the batch, of the
            chunks and pages of a prompt, and of the function that computes it (docs/reproducible.md; He et al., 2025).
        return_lse: also return lse, which is differentiable.
        return_max: also return the largest score of each row, for QK-clip (Kimi K2, 2025). It has no gradient.
        return_entropy: also return the entropy of each row's weights. It has first derivatives.
        layout: "bthd" for the shapes given here; "bhtd" for heads before tokens, as in torch's own attention: q
            [B, Hq, Tq, D], likewise k and v, o [B, Hq, Tq, Dv] and the others [B, Hq, Tq]. Nothing is copied.
        backend: "cpu", "triton", "webgpu" or "metal"; None chooses by the device of the arrays.

    Returns:
        o [B, Tq, Hq, Dv] in the dtype of q, or a tuple of o and those of lse, max and entropy that are asked for, each
        [B, Tq, Hq], float32 (float64 for float64 inputs). lse is a natural logarithm. max is that of the scores
        after softcap and bias, without the sink. The entropy, in nats, is that of the weights of keys and sink, before
        dropout. A row that sees no key has o = 0, max = -inf, entropy = 0, and lse = -inf or its sink.

    Raises:
        TypeError, ValueError: an argument is wrong; the message names it.
        Unsupported: the backend cannot compute this call.

    Examples:
        >>> q = k = v = torch.randn(2, 1024, 8, 64)  # [B, T, H, D]
        >>> o = saccade.attention(q, k, v, saccade.mask.causal() & saccade.mask.window(255, 0))
    """
    if unknown:
        refuse(attention, unknown)
    if layout != DEFAULT:
        q, k, v = tokens_first(layout, q, k, v)
    options, request = DEFAULTS, PLAIN
    ordinary = scale is softcap is descale is backend is None and deterministic is True
    more = return_max or return_entropy
    if not ordinary or more or type(dropout) is not float or dropout:
        options = Options(scale, softcap, dropout, descale, _checked(deterministic), backend)
        options = options._replace(return_max=return_max, return_entropy=return_entropy)
    if options is not DEFAULTS or not (mask is bias is sinks is seed is None):
        mask = _pruned(mask, q, k, bias, options)
        request = _request(mask, bias, sinks, options, seed)
    framework = KNOWN.get(type(q)) or framework_of(q)
    result = framework.attention(q, k, v, request, "forward" if return_lse or more else "result")
    if layout == DEFAULT and not more:
        return result if return_lse else result[0]
    return _asked_for(result, layout, return_lse)


def attention_backward(
    do: Array,
    q: ArrayT,
    k: ArrayT,
    v: ArrayT,
    o: Array,
    lse: Array,
    mask: Mask | None = None,
    *,
    dlse: Array | None = None,
    entropy: Array | None = None,
    dentropy: Array | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    sinks: Array | None = None,
    bias: Array | Bias | None = None,
    dropout: float = 0.0,
    seed: int | Array | None = None,
    descale: Sequence[Array] | None = None,
    deterministic: bool | str = True,
    grads: Iterable[str] | None = None,
    layout: str = DEFAULT,
    backend: str | None = None,
    **unknown: NoReturn,
) -> tuple[ArrayT, ArrayT, ArrayT, dict[str, ArrayT]]:
    """The gradients of `attention`, for callers without autograd.

    The weights are computed again from lse, in O(T) memory (Dao, 2023).

    Args:
        do: [B, Tq, Hq, Dv], gradient of o, in the dtype of q.
        q, k, v, mask and the options: as in the forward call; a call with dropout also needs its seed.
        o, lse: the results of the forward call with `return_lse=True`.
        dlse: [B, Tq, Hq], gradient of lse, in the dtype of lse; None for zero.
        entropy, dentropy: [B, Tq, Hq], the forward call's entropy and its gradient; both None for a gradient of zero.
        grads: which other gradients to compute: any of "bias", "slopes", "sinks", "table" and "log_f". None for all
            that the call has.
        layout: of all arrays and gradients, as in the forward call.

    Returns:
        (dq, dk, dv, extras). dq, dk and dv have the shapes and dtypes of q, k and v; extras maps each name in `grads`
        to its gradient.

    Raises:
        TypeError, ValueError, Unsupported: as in `attention`.

    Examples:
        >>> q, k, v, do = np.random.default_rng(0).standard_normal((4, 2, 128, 8, 64), np.float32)
        >>> o, lse = saccade.attention(q, k, v, return_lse=True)
        >>> dq, dk, dv, _ = saccade.attention_backward(do, q, k, v, o, lse)
        >>> dq.shape
        (2, 128, 8, 64)
    """
    if unknown:
        refuse(attention_backward, unknown)
    if layout != DEFAULT:
        do, q, k, v, o = tokens_first(layout, do, q, k, v, o)
        lse, dlse, entropy, dentropy = lse_tokens_first(lse, dlse, entropy, dentropy)
    options = Options(scale, softcap, dropout, descale, _checked(deterministic), backend)
    options = options._replace(return_entropy=dentropy is not None)
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
    outputs = Outputs(o, lse, do, dlse, None, entropy, dentropy)
    *first, extras = framework_of(q).attention_backward(q, k, v, outputs, request, wanted)
    if layout != DEFAULT:
        # swapping tokens and heads is its own inverse
        first = tokens_first(layout, *first)
    return *first, extras


def decode(
    q: Array,
    cache: Any,
    *,
    mask: Mask | None = None,
    causal: bool = True,
    scale: float | None = None,
    softcap: float | None = None,
    sinks: Array | None = None,
    bias: Array | Bias | None = None,
    deterministic: bool | str = True,
    return_lse: bool = False,
    return_max: bool = False,
    return_entropy: bool = False,
    layout: str = DEFAULT,
    backend: str | None = None,
    **unknown: NoReturn,
) -> ArrayOrTuple:
    """Attention of a few new queries over the keys and values in a cache.

    Append the new keys before the call: the last query of batch entry b is at position lengths[b] - 1.

    Args:
        q: [B, Tq, Hq, D], in the dtype and framework of the cache.
        cache: a `KVCache` or `LatentKVCache`, or the `PagedKeys` of a paged one. The contents of slots from lengths[b]
            on never affect a result. For q on a WebGPU device: a `KVCache(..., device="webgpu")`.
        mask: as in `attention`, in addition to the lengths of the cache and to `causal`.
        causal: True hides keys after a query's own position, with any mask. False lets all queries see all keys that
            the mask allows, as in cross-attention.
        scale, softcap, sinks, bias, deterministic, backend, return_lse and others: as in `attention`. Tk is the
            capacity of the cache; for `PagedKeys`, of one row of the block table. A latent cache needs a scale.
        layout: of q and the results, as in `attention`. The cache keeps its own layout.

    Returns:
        o [B, Tq, Hq, Dv], or a tuple of o, lse, max and entropy, as in `attention`.

    Raises:
        TypeError, ValueError, Unsupported: as in `attention`.

    Examples:
        >>> cache = saccade.KVCache(1, 4096, 8, 64, dtype=torch.bfloat16)
        >>> q, k, v = torch.randn(3, 1, 10, 8, 64, dtype=torch.bfloat16)  # 10 tokens, [B, T, H, D]
        >>> cache.append(k, v)
        >>> o = saccade.decode(q, cache)
    """
    if unknown:
        refuse(decode, unknown)
    if layout != DEFAULT:
        (q,) = tokens_first(layout, q)
    if not all(hasattr(cache, name) for name in ("k", "v", "lengths")):
        raise TypeError(f"cache is {type(cache).__name__}; expected a saccade.KVCache or PagedKeys")
    if scale is None and getattr(cache, "aliased", False):
        raise ValueError(
            f"scale is None; expected the model's scale, because a latent row of {cache.k.shape[-1]} numbers is not a "
            "head of the model: give scale=, such as 192**-0.5 for DeepSeek-V3"
        )
    framework, request = KNOWN.get(type(q)) or framework_of(q), PLAIN
    mask = of_decode(mask, q, causal)
    more = return_max or return_entropy
    if more or not (mask is scale is softcap is bias is sinks is backend is None and deterministic is True):
        options = Options(scale, softcap, deterministic=_checked(deterministic), backend=backend)
        options = options._replace(return_max=return_max, return_entropy=return_entropy)
        request = _request(mask, bias, sinks, options, None)
        if type(bias) is Bias and bias.prune is not None:
            raise ValueError("gates of decode have prune; expected none: it is for attention and attention_backward")
    result = framework.decode(q, cache, request)
    if layout == DEFAULT and not more:
        return result if return_lse else result[0]
    return _asked_for(result, layout, return_lse)


def of_decode(mask: Mask | None, q: Any, causal: bool) -> Mask | None:
    """The mask of new queries [B, Tq, Hq, D]; with `causal`, no query sees a key after its own position."""
    if type(causal) is not bool:
        raise TypeError(f"causal is {causal!r}; expected True or False")
    # the last query sees all keys, so a single query needs no mask
    if not causal or len(q.shape) != 4 or q.shape[1] < 2:
        return mask
    return CAUSAL if mask is None else mask & CAUSAL if isinstance(mask, Mask) else mask


def _asked_for(results: tuple[Any, ...], layout: str, lse: bool) -> Any:
    # o, or a tuple of o, lse if asked for, and more
    o, of_keys, *more = results if layout == DEFAULT else heads_first(*results)
    return (o, of_keys, *more) if lse else (o, *more) if more else o


def _checked(deterministic: Any) -> Any:
    if type(deterministic) is not bool and deterministic != "batch":
        error = ValueError if isinstance(deterministic, str) else TypeError
        raise error(f'deterministic is {deterministic!r}; expected True, False or "batch"')
    return deterministic


def _request(mask: Any, bias: Any, sinks: Any, options: Options, seed: Any) -> Request:
    if type(bias) is Bias and bias.origin:
        options = options._replace(origin=bias.origin)
    return Request(mask, NO_SIDE if bias is sinks is None else side_of(bias, sinks), options, seed)


def _pruned(mask: Any, q: Any, k: Any, bias: Any, options: Options) -> Any:
    if type(bias) is not Bias or bias.prune is None:
        return mask
    from .pruning import pruned

    return pruned(mask, q, k, bias, options.scale, options.softcap)
