"""Attention on torch tensors.

Outside torch.compile and torch.func a call goes directly to the backend, with gradients by a small autograd Function.
Otherwise, and for second derivatives, it goes through the operators of torch_op.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from ..backends import Extras, Outputs
from ..errors import Unsupported
from ..mask import keys
from ..operands import FP8, NO_SIDE, Request, Side
from . import torch_op as op
from . import torch_run as run
from .call import first_keys, rows_of, seed_value, specs_of
from .source import STRIDED, Source, check_lengths, check_table, pages_in_use, stored, with_gates
from .torch_arguments import arguments
from .torch_state import (
    autocast,
    autocast_active,
    exporting,
    forward_mode_active,
    is_zero,
    legacy_batched,
    modes_active,
    transforms_active,
)

_PLAIN = (Tensor, Parameter)
_STRIDED = torch.strided
_NAMES = "q", "k", "v", *Side._fields
_EAGER = "keys in pages or as codes are for eager tensors"
# gradients of only q, k and v, and of a bias as well
_NO_GRADS: frozenset[str] = frozenset()
_BIAS = frozenset({"bias"})


def attention(q: Tensor, k: Tensor, v: Tensor, request: Request, verb: str) -> tuple[Any, ...]:
    """(o, lse, *more) of `saccade.attention`, computed by the backend's forward or decode.

    verb: "decode", or "forward" or "result", which are the same here: autograd knows whether a backward may follow.
    """
    side = request.side
    traced, descale = _traced(q, k, v, *side), request.options.descale
    if descale is not None:
        request = _with_specs(q, request, traced)
    lifted = q.dim() == 3 and k.dim() == 3 and v.dim() == 3
    if lifted:
        q, k, v = q[None], k[None], v[None]
    if autocast_active():
        q, k, v = autocast(q, k, v)
    if traced:
        results = _by_operator(q, k, v, request, verb)
        return tuple(x[0] for x in results) if lifted else results
    grads = None
    if torch.is_grad_enabled() and _needs_grad(q, k, v, side):
        grads = _BIAS if side.bias is not None and side.bias.requires_grad else _NO_GRADS
    planned = run.prepare(q, k, v, request, grads)
    seed = _seed(request.seed) if planned.problem.scores.dropout else 0
    if side is not NO_SIDE:
        side = run.widen(q, request, k.shape[1])
    if grads is not None:
        results = _Attention.apply((planned, request.mask, request.options, seed), q, k, v, *side)
    else:
        extras = run.carried(seed, *side)
        if descale is not None:
            extras = extras._replace(descale=descale)
        results = run.forward(planned, q, k, v, extras, verb if verb == "result" else "decode")
    # lse is missing if only the result is needed
    return tuple(x if x is None else x[0] for x in results) if lifted else results


def attention_backward(
    q: Tensor, k: Tensor, v: Tensor, outputs: Outputs, request: Request, grads: frozenset[str]
) -> tuple[Tensor, Tensor, Tensor, dict[str, Tensor]]:
    """(dq, dk, dv, extras) of `saccade.attention_backward`."""
    arrays = request.side._asdict()
    if _traced(q, k, v, *request.side, *outputs):
        raise Unsupported("torch", ["attention_backward is for eager tensors: call attention, which has a gradient"])
    if request.options.descale is not None:
        request = _with_specs(q, request, False)
    lifted = q.dim() == 3 and k.dim() == 3 and v.dim() == 3
    if lifted:
        q, k, v = q[None], k[None], v[None]
        outputs = Outputs(**{name: x[None] for name, x in rows_of(outputs).items()})
    with torch.no_grad():
        planned = run.prepare(q, k, v, request, grads)
        run.check_rows(planned.problem, outputs)
        seed = _seed(request.seed) if planned.problem.scores.dropout else 0
    # autograd computes the gradients of the table and of gates from those of the arrays that kernels read
    with torch.inference_mode(False), torch.enable_grad():
        leaves = request.side.map(lambda x: (x.clone() if x.is_inference() else x.detach()).requires_grad_())
        side = run.widen(q, request._replace(side=leaves), k.shape[1])
    extras = run.carried(seed, *side.map(torch.detach))
    with torch.no_grad():
        dq, dk, dv, more = run.backward(planned, q, k, v, outputs, extras, grads)
    for name in grads & {"table", "log_f"}:
        more[name] = torch.autograd.grad(getattr(side, name), getattr(leaves, name), more[name])[0]
    if lifted:
        dq, dk, dv = dq[0], dk[0], dv[0]
    return dq, dk, dv, {n: x.reshape(arrays[n].shape).to(arrays[n].dtype) for n, x in more.items()}


def decode(q: Tensor, cache: Any, request: Request) -> tuple[Tensor, ...]:
    """(o, lse, *more) of `saccade.decode`."""
    k, v, lengths = cache.k, cache.v, cache.lengths
    if torch.compiler.is_compiling() and exporting():
        reason = "torch.export would store the cache as a constant: pass keys and lengths, and call attention with"
        raise Unsupported("torch", [f"{reason} saccade.mask.keys(lengths) & saccade.mask.causal()"])
    if hasattr(cache, "block_table") or getattr(cache, "quantised", None) is not None:
        look = _outside_graphs if torch.compiler.is_compiling() else _by_source
        return look(q, cache, request)
    _traced(q, k, v)
    if torch.compiler.is_compiling():
        mask, used = request.mask, keys(lengths)
        request = with_gates(
            request._replace(mask=used if mask is None else mask & used), getattr(cache, "gates", None)
        )
        return attention(q, k, v, request, "decode")
    # its kernels have no gradient
    differentiable = torch.is_grad_enabled() and _needs_grad(q, k, v, request.side)
    if not differentiable and _reads_lengths(lengths, cache, request):
        results = _by_lengths(q, k, v, lengths, request)
        if results is not None:
            return results
    longest, request = first_keys(cache, lengths, request)
    return attention(q, k[:, :longest], v[:, :longest], request, "decode")


def _reads_lengths(on: Tensor, cache: Any, request: Request) -> bool:
    # whether the backend for tensors like `on` may read lengths on its device; its kernels compute no tangents
    if request.side._replace(sinks=None) != NO_SIDE or getattr(cache, "gates", None) is not None:
        return False
    return (on.is_cuda or request.options.backend not in (None, "cpu")) and not forward_mode_active()


def _by_lengths(
    q: Tensor, k: Tensor, v: Tensor, lengths: Tensor, request: Request, source: Source = STRIDED
) -> tuple[Tensor, ...] | None:
    # if the backend reads lengths on its device, nothing waits for them and a captured graph follows them
    check_lengths(lengths, q.shape[0])
    with torch.no_grad():
        planned = run.prepare(q, k, v, request, source=source)
        if not planned.backend.follows_lengths(planned.problem, planned.plan):
            return None
        sinks = run.widen(q, request, k.shape[1]).sinks
        return run.decode(planned, q, k, v, source.carried(Extras(sinks=sinks, lengths=lengths)))


def _by_source(q: Tensor, cache: Any, request: Request) -> tuple[Tensor, ...]:
    # decode with keys in pages or as codes
    k, v, lengths, side = cache.k, cache.v, cache.lengths, request.side
    if _traced(q, k, v, *side):
        raise Unsupported("torch", [f"{_EAGER}: call it outside of transforms and modes"])
    if torch.is_grad_enabled() and _needs_grad(q, k, v, side):
        raise Unsupported("torch", ["keys in pages or as codes have no gradient: call it under torch.no_grad()"])
    paged = hasattr(cache, "block_table")
    if _reads_lengths(k, cache, request):
        source = stored(cache)
        if paged:
            check_table(cache.block_table, lengths)
            if cache.block_table.is_cpu and lengths.is_cpu:
                # check tables and lengths on the host, without waiting for a device
                pages_in_use(cache)
            table, page_size = cache.block_table.to(k.device), k.shape[1]
            source = source.behind(table, page_size, table.shape[1] * page_size)
        results = _by_lengths(q, k, v, lengths.to(k.device), request, source)
        if results is not None:
            return results
    if paged:
        source, request = pages_in_use(cache, request)
    else:
        longest, request = first_keys(cache, lengths, request)
        k, v, source = k[:, :longest], v[:, :longest], stored(cache).first(longest)
    planned = run.prepare(q, k, v, request, source=source)
    extras = source.carried(run.carried(0, *run.widen(q, request, planned.problem.Tk)))
    return run.forward(planned, q, k, v, extras, "decode")


_outside_graphs: Any = torch.compiler.disable(_by_source, reason=f"{_EAGER}: leave fullgraph out")


class _Attention(torch.autograd.Function):
    """The eager gradient: the same as the autograd of saccade::forward, without the overhead of an operator."""

    @staticmethod
    def forward(ctx: Any, call: Any, q: Tensor, k: Tensor, v: Tensor, *side: Any) -> tuple[Tensor, ...]:
        # call: the plan, the mask, the options and the seed of the dropout
        ctx.call = call
        o, lse, *more = run.forward(call[0], q, k, v, run.carried(call[3], *side), "forward")
        problem = call[0].problem
        ctx.save_for_backward(q, k, v, o, lse, more[-1] if problem.return_entropy else None, *side)
        ctx.set_materialize_grads(False)
        if problem.return_max:
            ctx.mark_non_differentiable(more[0])
        return o, lse, *more

    @staticmethod
    def backward(ctx: Any, do: Tensor | None, dlse: Tensor | None, *dmore: Any) -> tuple[Any, ...]:  # type: ignore[override]
        q, k, v, o, lse, entropy, *side = ctx.saved_tensors
        planned, _, options, seed = ctx.call
        outputs = op.outputs_of(o, lse, entropy, do, dlse, dmore[-1] if planned.problem.return_entropy else None)
        needs = ctx.needs_input_grad[-len(Side._fields) :]
        if legacy_batched(do, dlse, *dmore):
            reason = "is_grads_batched and vectorize are not computed: call torch.vmap around torch.autograd.grad"
            raise Unsupported("torch", [reason])
        if torch.is_grad_enabled() or forward_mode_active() or transforms_active():
            # a second derivative, a tangent or a batch of gradients is needed, which the operator has
            key = torch.tensor(run.signed(seed)) if planned.problem.scores.dropout else None
            # the mask with its contents at the time of the forward
            rest = arguments(Request(planned.problem.mask, Side(*side), options, key))
            return None, *op.differentiate(q, k, v, outputs, rest, Side(*needs)).values()
        wanted, of_side, arrays = _NO_GRADS, NO_SIDE, Side(*side)
        if any(needs):
            wanted = frozenset(name for name, needed in zip(Side._fields, needs, strict=True) if needed)
        dq, dk, dv, more = run.backward(planned, q, k, v, outputs, run.carried(seed, *side), wanted)
        if wanted:
            of_side = run.gradients_like(arrays, more)
        return None, dq, dk, dv, *of_side


def _by_operator(q: Tensor, k: Tensor, v: Tensor, request: Request, verb: str) -> tuple[Tensor, ...]:
    key, seed = None, request.seed
    if request.options.dropout:
        if seed is None:
            seed = torch.randint(0, (1 << 63) - 1, (), dtype=torch.int64, device="cpu")
        if isinstance(seed, Tensor) and (seed.is_floating_point() or seed.dim()):
            raise TypeError(f"seed is {seed.dtype} {list(seed.shape)}; expected an integer or a 0-d integer tensor")
        key = seed if isinstance(seed, Tensor) else torch.tensor(run.signed(seed_value(seed)))
    rest = arguments(request._replace(side=run.widen(q, request, k.shape[1]), seed=key))
    return op.forward(q, k, v, rest, verb == "decode", request.options)


def _with_specs(q: Tensor, request: Request, traced: bool) -> Request:
    # the factors of 8-bit floats as specs, so that the options can be a key
    if traced and str(q.dtype)[6:] not in FP8:
        raise ValueError(f"descale is given for {q.dtype} tensors; it belongs to 8-bit floats: leave it out")
    if traced:
        raise Unsupported("torch", ["8-bit floats are for eager tensors: wrap the call in torch.compiler.disable"])
    options = request.options
    return request._replace(options=options._replace(descale=specs_of(options.descale, Tensor, run.spec)))


def _seed(seed: Any) -> int:
    if seed is None:
        return int(torch.randint(0, (1 << 63) - 1, (), device="cpu").item())
    return seed_value(seed)


def _needs_grad(q: Tensor, k: Tensor, v: Tensor, side: Side) -> bool:
    if q.requires_grad or k.requires_grad or v.requires_grad:
        return True
    return side is not NO_SIDE and any(x is not None and x.requires_grad for x in side)


def _traced(*tensors: Any) -> bool:
    # whether these tensors must go through the operators; raises for other objects and unsupported kinds of tensors
    if torch.compiler.is_compiling():
        return True
    traced = transforms_active() or modes_active() > 0 or forward_mode_active()
    for n, x in enumerate(tensors):
        if n < 3 if x is None else type(x) not in _PLAIN or x.layout is not _STRIDED or is_zero(x):
            _refuse(x, _NAMES[n] if n < len(_NAMES) else "an output")
            traced = True
    return traced or tensors[0].is_meta


def _refuse(x: Any, name: str) -> None:
    if not isinstance(x, Tensor):
        raise TypeError(f"{name} is {type(x).__name__}; expected a torch tensor, like q: convert it first")
    distributed = sys.modules.get("torch.distributed.tensor")
    if distributed is not None and isinstance(x, distributed.DTensor):
        reason = "each shard of a DTensor would attend only to its own keys: pass x.to_local() inside a local_map"
        raise Unsupported("torch", [reason])
    if x.is_nested:
        raise Unsupported("torch", ["nested tensors have no common length: pack them and pass saccade.mask.documents"])
    if x.layout is not torch.strided:
        raise TypeError(f"{name} has layout {x.layout}; expected a dense tensor: call to_dense() first")
    if is_zero(x):
        raise TypeError(f"{name} is a zero without memory; expected a dense tensor: pass torch.zeros_like(x)")
