"""Attention on torch tensors.

Outside torch.compile and torch.func a call goes straight to the backend, with gradients through a small autograd
Function; everywhere else, and for second derivatives, through the operators of torch_op.
"""

from __future__ import annotations

import sys
from collections.abc import Set
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from ..errors import Unsupported
from ..mask import Mask, keys
from ..operands import FP8, NO_SIDE, Side
from . import torch_op as op
from . import torch_run as run
from .call import Options, of_first_keys, seed_value, specs_of
from .source import STRIDED, Source, check_lengths, check_table, in_use, pages_in_use, stored
from .torch_state import autocast_active, forward_mode_active, modes_active, transforms_active

_PLAIN = (Tensor, Parameter)
_STRIDED = torch.strided
_EAGER = "keys in pages or as codes are for eager tensors"


def attention(
    q: Tensor, k: Tensor, v: Tensor, mask: Mask | None, side: Side, seed: Any, options: Options, verb: str
) -> tuple[Tensor, Tensor]:
    """(o, lse) as `saccade.attention` describes them, by the backend's forward, or its decode.

    verb: "decode", or "forward" and "result", which here mean the same: autograd tells whether a backward may follow.
    """
    traced = _traced(q, k, v, *side)
    descale, options = _descale(q, options, traced)
    lifted = q.dim() == 3 and k.dim() == 3 and v.dim() == 3
    if lifted:
        q, k, v = q[None], k[None], v[None]
    side = _with_four_dimensions(side)
    if autocast_active() and _autocast_on(q.device.type):
        q, k, v = _autocast(q), _autocast(k), _autocast(v)
    if traced:
        o, lse = _by_operator(q, k, v, mask, side, seed, options, verb)
        return (o[0], lse[0]) if lifted else (o, lse)
    grad = torch.is_grad_enabled() and _needs_grad(q, k, v, side)
    bias_grad = grad and side.bias is not None and side.bias.requires_grad
    call = run.prepare(q, k, v, mask, side, options, grad, bias_grad)
    key = _seed(seed) if call.problem.scores.dropout else 0
    side = run.widen(q, side)
    if grad:
        o, lse = _Attention.apply(key, call, mask, options, q, k, v, *side)
    else:
        o, lse = run.forward(call, q, k, v, side, key, True, verb != "result", descale)
    if not lifted:
        return o, lse
    # where o alone is kept there is no lse
    return o[0], lse[0] if grad or verb != "result" else lse


def attention_backward(
    do: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, mask: Mask | None, dlse: Tensor | None,
    side: Side, seed: Any, options: Options, grads: Set[str],
) -> tuple[Tensor, Tensor, Tensor, dict[str, Tensor]]:  # fmt: skip
    """(dq, dk, dv, extras) as `saccade.attention_backward` describes them."""
    given = side._asdict()
    if _traced(q, k, v, *side, do, o, lse, dlse):
        raise Unsupported("torch", ["attention_backward is for eager tensors: call attention, which has a gradient"])
    _, options = _descale(q, options, False)
    lifted = q.dim() == 3 and k.dim() == 3 and v.dim() == 3
    if lifted:
        do, q, k, v, o, lse = (x[None] for x in (do, q, k, v, o, lse))
        dlse = None if dlse is None else dlse[None]
    side = _with_four_dimensions(side)
    with torch.no_grad():
        call = run.prepare(q, k, v, mask, side, options, True, "bias" in grads)
        run.check_rows(call.problem, do, o, lse, dlse)
        key = _seed(seed) if call.problem.scores.dropout else 0
        dq, dk, dv, more = run.backward(call, do, dlse, q, k, v, o, lse, run.widen(q, side), key, grads)
    if lifted:
        dq, dk, dv = dq[0], dk[0], dv[0]
    return dq, dk, dv, {n: x.reshape(given[n].shape).to(given[n].dtype) for n, x in more.items()}


def decode(
    q: Tensor, cache: Any, mask: Mask | None, side: Side, options: Options
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """(o, lse) of new queries over the cache, as `saccade.decode` describes them."""
    k, v, lengths = cache.k, cache.v, cache.lengths
    if hasattr(cache, "block_table") or getattr(cache, "quantised", None) is not None:
        look = _outside_graphs if torch.compiler.is_compiling() else _by_source
        return look(q, cache, mask, side, options)
    _traced(q, k, v)
    if torch.compiler.is_compiling():
        used = keys(lengths)
        return attention(q, k, v, used if mask is None else mask & used, side, 0, options, "decode")
    capacity = k.shape[1]
    if side.bias is side.slopes is None and (lengths.is_cuda or options.backend not in (None, "cpu")):
        found = _by_lengths(q, k, v, lengths, mask, side, options)
        if found is not None:
            return found
    longest, mask = in_use(lengths, k.shape[0], capacity, mask)
    side = of_first_keys(side, capacity, longest)
    return attention(q, k[:, :longest], v[:, :longest], mask, side, 0, options, "decode")


def _by_lengths(
    q: Tensor, k: Tensor, v: Tensor, lengths: Tensor, mask: Mask | None, side: Side, options: Options,
    source: Source = STRIDED,
) -> tuple[Tensor, Tensor] | None:  # fmt: skip
    # lengths stay on the device where the backend can read them there: nothing waits, and a captured graph follows them
    check_lengths(lengths, q.shape[0])
    with torch.no_grad():
        call = run.prepare(q, k, v, mask, side, options, False, False, source)
        if not call.backend.follows_lengths(call.problem, call.plan):
            return None
        return run.decode(call, q, k, v, lengths, run.widen(q, side).sinks, source)


def _by_source(
    q: Tensor, cache: Any, mask: Mask | None, side: Side, options: Options
) -> tuple[Tensor, Tensor]:  # fmt: skip
    # keys in pages or as codes
    k, v, lengths = cache.k, cache.v, cache.lengths
    if _traced(q, k, v, *side):
        raise Unsupported("torch", [f"{_EAGER}: call it outside of transforms and modes"])
    if torch.is_grad_enabled() and _needs_grad(q, k, v, side):
        raise Unsupported("torch", ["keys in pages or as codes have no gradient: call it under torch.no_grad()"])
    paged = hasattr(cache, "block_table")
    if side.bias is side.slopes is None and (k.is_cuda or options.backend not in (None, "cpu")):
        source = stored(cache)
        if paged:
            check_table(cache.block_table, lengths)
            if cache.block_table.is_cpu and lengths.is_cpu:
                # what lies on the host is looked at, without waiting
                pages_in_use(cache, None)
            table, page_size = cache.block_table.to(k.device), k.shape[1]
            B, tokens = table.shape[0], table.shape[1] * page_size
            key = B, tokens, source.quantised
            source = source._replace(table=table, page_size=page_size, tokens=tokens, key=key)
        found = _by_lengths(q, k, v, lengths.to(k.device), mask, side, options, source)
        if found is not None:
            return found
    if paged:
        source, mask = pages_in_use(cache, mask)
    else:
        longest, mask = in_use(lengths, k.shape[0], k.shape[1], mask)
        side = of_first_keys(side, k.shape[1], longest)
        k, v, source = k[:, :longest], v[:, :longest], stored(cache).first(longest)
    call = run.prepare(q, k, v, mask, side, options, False, False, source)
    return run.forward(call, q, k, v, run.widen(q, side), 0, True, source=source)


_outside_graphs: Any = torch.compiler.disable(_by_source, reason=f"{_EAGER}: leave fullgraph out")


class _Attention(torch.autograd.Function):
    """The eager gradient: what saccade::forward's autograd does, without an operator's overhead."""

    @staticmethod
    def forward(
        ctx: Any, seed: int, call: Any, mask: Any, options: Options, q: Tensor, k: Tensor, v: Tensor, *side: Any
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        o, lse = run.forward(call, q, k, v, _joined(*side), seed)
        ctx.save_for_backward(q, k, v, o, lse, *side)
        ctx.rest = seed, call, mask, options
        ctx.set_materialize_grads(False)
        return o, lse

    @staticmethod
    def backward(ctx: Any, do: Tensor | None, dlse: Tensor | None) -> tuple[Any, ...]:  # type: ignore[override]
        q, k, v, o, lse, *arrays = ctx.saved_tensors
        seed, call, mask, options = ctx.rest
        side, needs = _joined(*arrays), ctx.needs_input_grad[-len(arrays) :]
        if torch.is_grad_enabled():
            # a derivative of this derivative is wanted: the operator has one
            key = torch.tensor(run.signed(seed)) if call.problem.scores.dropout else None
            rest = op.arguments(mask, side, key, options)
            return None, None, None, None, *op.differentiate(do, dlse, q, k, v, o, lse, rest, Side(*needs)).values()
        if do is None:
            do = torch.zeros_like(o)
        wanted: Set[str] = frozenset()
        if side is not NO_SIDE:
            wanted = frozenset(name for name, needed in zip(Side._fields, needs, strict=True) if needed)
        dq, dk, dv, more = run.backward(call, do, dlse, q, k, v, o, lse, side, seed, wanted)
        of_side = NO_SIDE
        if wanted:
            of_side = Side(**{name: more[name].reshape(getattr(side, name).shape) for name in wanted})
        return None, None, None, None, dq, dk, dv, *of_side


def _by_operator(
    q: Tensor, k: Tensor, v: Tensor, mask: Mask | None, side: Side, seed: Any, options: Options, verb: str,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    key = None
    if options.dropout:
        if seed is None:
            seed = torch.randint(0, (1 << 63) - 1, (), dtype=torch.int64)
        key = seed if isinstance(seed, Tensor) else torch.tensor(run.signed(seed_value(seed)))
    rest = op.arguments(mask, run.widen(q, side), key, options)
    o, lse = op.call("forward", q, k, v, *rest, verb == "decode")
    return o, lse


def _descale(q: Tensor, options: Options, traced: bool) -> tuple[Any, Options]:
    # the factors of 8-bit floats, and options that can be a key
    given: Any = options.descale
    if given is None:
        return None, options
    if traced and str(q.dtype)[6:] not in FP8:
        raise ValueError(f"descale is given for {q.dtype} tensors; it belongs to 8-bit floats: leave it out")
    if traced:
        raise Unsupported("torch", ["8-bit floats are for eager tensors: wrap the call in torch.compiler.disable"])
    return given, options._replace(descale=specs_of(given, Tensor, run.spec))


def _seed(seed: Any) -> int:
    if seed is None:
        return int(torch.randint(0, (1 << 63) - 1, ()).item())
    return seed_value(seed)


def _needs_grad(q: Tensor, k: Tensor, v: Tensor, side: Side) -> bool:
    if q.requires_grad or k.requires_grad or v.requires_grad:
        return True
    return side is not NO_SIDE and any(x is not None and x.requires_grad for x in side)


def _joined(bias: Tensor | None, slopes: Tensor | None, sinks: Tensor | None) -> Side:
    return NO_SIDE if bias is slopes is sinks is None else Side(bias, slopes, sinks)


def _with_four_dimensions(side: Side) -> Side:
    if side.bias is None or side.bias.dim() >= 4:
        return side
    return side._replace(bias=side.bias[(None,) * (4 - side.bias.dim())])


def _autocast_on(kind: str) -> bool:
    return kind != "meta" and torch.is_autocast_enabled(kind)


def _autocast(x: Tensor) -> Tensor:
    # as torch does for its own attention: every floating dtype but float64
    if not x.is_floating_point() or x.dtype is torch.float64:
        return x
    return x.to(torch.get_autocast_dtype(x.device.type))


def _traced(*tensors: Any) -> bool:
    # whether these must pass through the operators; refuses what is no tensor, or of a kind that cannot
    if torch.compiler.is_compiling():
        return True
    traced = transforms_active() or modes_active() > 0 or forward_mode_active()
    for x in tensors:
        if x is not None and (type(x) not in _PLAIN or x.layout is not _STRIDED):
            _refuse(x)
            traced = True
    return traced or tensors[0].is_meta


def _refuse(x: Any) -> None:
    if not isinstance(x, Tensor):
        raise TypeError(
            f"an argument beside the tensor q is {type(x).__name__}; expected a torch tensor: convert it first"
        )
    distributed = sys.modules.get("torch.distributed.tensor")
    if distributed is not None and isinstance(x, distributed.DTensor):
        reason = "a DTensor's shards would each attend to their own keys alone: pass x.to_local() inside a local_map"
        raise Unsupported("torch", [reason])
    if x.is_nested:
        raise Unsupported("torch", ["nested tensors have no common length: pack them and pass saccade.mask.documents"])
    if x.layout is not torch.strided:
        raise TypeError(f"an argument has layout {x.layout}; expected a dense tensor: call to_dense() first")
