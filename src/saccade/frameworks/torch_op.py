"""The torch operators saccade::forward, forward_more, backward, second and tangent, with fakes, derivatives and vmap.

Each takes its mask as `str structure, SymInt[] ints, Tensor[] data`, so that one graph with symbolic lengths and mask
integers is valid for all values. Lowering and planning happen inside the operator.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..backends import Inputs, Outputs
from ..errors import Unsupported
from ..operands import Options, Request, Side
from . import torch_run as run
from .torch_arguments import (
    BACKWARD,
    COTANGENTS,
    FORWARD,
    INPUTS,
    MORE,
    SECOND,
    TANGENT,
    TANGENTS,
    options_of,
    rest_of,
    side_of,
    wanted_of,
)
from .torch_mask import join, seen
from .torch_second import second_derivative
from .torch_signature import Signature
from .torch_state import forward_mode_active, is_zero, legacy_batched, refusing_tangents, transforms_active
from .torch_vmap import vmap_rule


def _planned(a: Any, grads: frozenset[str] | None = None) -> Any:
    request = Request(join(a.structure, a.ints, a.data), side_of(a), options_of(a))
    return run.prepare(a.q, a.k, a.v, request, grads)


def _extras(a: Any) -> Any:
    return run.carried(run.unsigned(a.seed), *side_of(a))


def _forward(*args: Any) -> tuple[Tensor, ...]:
    return _results(FORWARD.bind(*args))


def _results(a: Any) -> tuple[Tensor, ...]:
    return run.forward(_planned(a), a.q, a.k, a.v, _extras(a), "decode" if a.decode else "forward")


def _forward_more(*args: Any) -> tuple[Tensor, ...]:
    a = MORE.bind(*args)
    o, lse, *more = _results(a)
    return o, lse, *(more.pop(0) if wanted else lse.new_empty(0) for wanted in (a.return_max, a.return_entropy))


def _backward(*args: Any) -> tuple[Tensor, ...]:
    a = BACKWARD.bind(*args)
    wanted, outputs = wanted_of(a), Outputs(a.o, a.lse, a.do, a.dlse, None, a.entropy, a.dentropy)
    planned = _planned(a, wanted)
    run.check_rows(planned.problem, outputs)
    dq, dk, dv, more = run.backward(planned, a.q, a.k, a.v, outputs, _extras(a), wanted)
    of_side = run.gradients_like(side_of(a), more)
    return dq, dk, dv, *(a.lse.new_empty(0) if x is None else x for x in of_side)


def _second(*args: Any) -> tuple[Tensor, ...]:
    a = SECOND.bind(*args)
    planned = _planned(a, wanted_of(a))
    cotangents = [getattr(a, name) for name in COTANGENTS]
    results = second_derivative(planned.problem, cotangents, [getattr(a, x) for x in INPUTS], run.unsigned(a.seed))
    return tuple(a.q.new_empty(0) if x is None else x for x in results)


def _tangent(*args: Any) -> tuple[Tensor, Tensor]:
    a = TANGENT.bind(*args)
    tq, tk, tv, *of_side = (getattr(a, name) for name in TANGENTS)
    tangents = Inputs(tq, tk, tv, run.carried(0, *of_side))
    return run.tangent(_planned(a), Inputs(a.q, a.k, a.v, _extras(a)), a.o, a.lse, tangents)


# shapes and dtypes of the results, for tracing


def _fake_forward(*args: Any) -> tuple[Tensor, ...]:
    return _fake_results(FORWARD.bind(*args))


def _fake_more(*args: Any) -> tuple[Tensor, ...]:
    a = MORE.bind(*args)
    o, lse = _fake_results(a)
    of_rows = (lse.new_empty(lse.shape if wanted else 0) for wanted in (a.return_max, a.return_entropy))
    return o, lse, *of_rows


def _fake_results(a: Any) -> tuple[Tensor, Tensor]:
    _check(a)
    wide = torch.float64 if a.q.dtype is torch.float64 else torch.float32
    return a.q.new_empty((*a.q.shape[:3], a.v.shape[3])), a.q.new_empty(a.q.shape[:3], dtype=wide)


def _fake_backward(*args: Any) -> tuple[Tensor, ...]:
    a = BACKWARD.bind(*args)
    wanted = wanted_of(a)
    _check(a, wanted)
    side = zip(Side._fields, side_of(a), strict=True)
    of_side = [x.new_empty(x.shape) if name in wanted else a.lse.new_empty(0) for name, x in side]
    return *(x.new_empty(x.shape) for x in (a.q, a.k, a.v)), *of_side


def _fake_second(*args: Any) -> tuple[Tensor, ...]:
    a = SECOND.bind(*args)
    inputs = [getattr(a, name) for name in INPUTS]
    return tuple(a.do.new_empty(0) if x is None else x.new_empty(x.shape) for x in inputs)


def _fake_tangent(*args: Any) -> tuple[Tensor, Tensor]:
    a = TANGENT.bind(*args)
    return a.o.new_empty(a.o.shape), a.lse.new_empty(a.lse.shape)


def _check(a: Any, grads: frozenset[str] | None = None) -> None:
    options = options_of(a)
    if options.scale is None:
        # a symbolic head size has no square root yet
        options = options._replace(scale=1.0)
    run.describe_tensors(a.q, a.k, a.v, Request(None, side_of(a), options), grads)


# derivatives: one gradient per argument; ints and data count as one argument each


def _forward_setup(ctx: Any, inputs: Any, output: Any) -> None:
    a = FORWARD.bind(*inputs)
    FORWARD.save(ctx, a, output)
    # keep the mask, and so its plan, alive until the backward is done
    ctx.mask = seen(a.structure, a.ints, a.data)


def _forward_backward(ctx: Any, do: Tensor | None, dlse: Tensor | None) -> tuple[Any, ...]:
    a, (o, lse) = FORWARD.saved(ctx)
    outputs = outputs_of(o, lse, None, do, dlse, None)
    return FORWARD.gradients(differentiate(a.q, a.k, a.v, outputs, rest_of(a), side_of(FORWARD.needs(ctx))))


def _more_setup(ctx: Any, inputs: Any, output: Any) -> None:
    a, (o, lse, top, entropy) = MORE.bind(*inputs), output
    MORE.save(ctx, a, (o, lse, entropy))
    ctx.mask = seen(a.structure, a.ints, a.data)
    ctx.mark_non_differentiable(top)


def _more_backward(ctx: Any, do: Any, dlse: Any, _: Any, dentropy: Any) -> tuple[Any, ...]:
    a, (o, lse, entropy) = MORE.saved(ctx)
    outputs = outputs_of(o, lse, entropy, do, dlse, dentropy if a.return_entropy else None)
    return MORE.gradients(differentiate(a.q, a.k, a.v, outputs, rest_of(a), side_of(MORE.needs(ctx))))


def outputs_of(o: Tensor, lse: Tensor, entropy: Any, do: Any, dlse: Any, dentropy: Any) -> Outputs:
    """The outputs for a backward from results and their gradients, which may be None."""
    do, dlse, dentropy = (None if x is None or is_zero(x) else x for x in (do, dlse, dentropy))
    do = torch.zeros_like(o) if do is None else do
    return Outputs(o, lse, do, dlse, None, None if dentropy is None else entropy, dentropy)


def differentiate(
    q: Tensor, k: Tensor, v: Tensor, outputs: Outputs, rest: list[Any], needs: Side
) -> dict[str, Tensor | None]:
    """Gradients by name of q, k, v and the side arrays, from the backward operator; None if not needed."""
    o, lse, do, dlse, _, entropy, dentropy = outputs
    a = BACKWARD.bind(do, dlse, dentropy, q, k, v, o, lse, entropy, *rest, None)
    grads = [bool(needed) and x is not None for needed, x in zip(needs, side_of(a), strict=True)]
    dq, dk, dv, *of_side = call("backward", *a._replace(grads=grads))
    needed = [x if flag else None for x, flag in zip(of_side, grads, strict=True)]
    return {"q": dq, "k": dk, "v": dv, **dict(zip(Side._fields, needed, strict=True))}


def _backward_setup(ctx: Any, inputs: Any, output: Any) -> None:
    a = BACKWARD.bind(*inputs)
    BACKWARD.save(ctx, a if forward_mode_active() else a._replace(o=None, lse=None, entropy=None))


def _backward_backward(ctx: Any, *cotangents: Tensor | None) -> tuple[Any, ...]:
    a, _ = BACKWARD.saved(ctx)
    if a.dentropy is not None:
        reason = "second derivatives of the entropy are not computed: detach it, or compute one gradient of its call"
        raise Unsupported("torch", [reason])
    flags = [True, True, True, *a.grads]
    needed = [c if flag else None for c, flag in zip(cotangents, flags, strict=True)]
    results = call("second", *needed, a.do, a.dlse, a.q, a.k, a.v, *rest_of(a), a.grads)
    # o and lse are functions of q, k and v here; their contribution is in the gradients of q, k and v
    of_inputs = zip(INPUTS, results, strict=True)
    return BACKWARD.gradients({name: None if getattr(a, name) is None else r for name, r in of_inputs})


def _no_setup(ctx: Any, inputs: Any, output: Any) -> None:
    pass


def _refusing(reason: str) -> Callable[..., Any]:
    def refuse(ctx: Any, *_: Any) -> Any:
        raise Unsupported("torch", [reason])

    return refuse


_third = _refusing("third derivatives are not supported: attention has first and second ones")
_OVER = "compute the second derivative forward over reverse, as torch.func.hessian does"
_tangent_jvp = _refusing(f"a tangent of a tangent is not computed: {_OVER}")
_tangent_backward = _refusing(f"a gradient through a tangent is not computed: detach the tangent, or {_OVER}")


# forward mode: autograd Functions have the rules, because torch.library cannot register them


def _forward_jvp(ctx: Any, *tangents: Any) -> tuple[Tensor, ...]:
    (a, (o, lse)), t = FORWARD.saved(ctx), FORWARD.bind(*tangents)
    return call("tangent", t.q, t.k, t.v, *side_of(t), a.q, a.k, a.v, o, lse, *rest_of(a))


def _more_jvp(ctx: Any, *tangents: Any) -> tuple[Tensor | None, ...]:
    (a, (o, lse, _)), t = MORE.saved(ctx), MORE.bind(*tangents)
    if a.return_entropy:
        raise Unsupported("torch", ["the tangent of the entropy is not computed: leave return_entropy out"])
    to, tlse = call("tangent", t.q, t.k, t.v, *side_of(t), a.q, a.k, a.v, o, lse, *rest_of(a))
    return to, tlse, None, None


def _backward_jvp(ctx: Any, *tangents: Any) -> tuple[Tensor, ...]:
    (a, _), t = BACKWARD.saved(ctx), BACKWARD.bind(*tangents)
    if a.dentropy is not None:
        raise Unsupported("torch", ["the tangent of the entropy's gradient is not computed: leave return_entropy out"])
    results: list[tuple[Tensor, ...]] = []
    if t.do is not None or t.dlse is not None:
        # linear in do and dlse
        do = torch.zeros_like(a.do) if t.do is None else t.do
        results.append(call("backward", *a._replace(do=do, dlse=t.dlse)))
    moved = (t.q, t.k, t.v, *side_of(t))
    if any(x is not None for x in moved):
        # the matrix of second derivatives is symmetric; it includes the tangents of o and lse
        _, _, *rest = call("second", *moved, a.do, a.dlse, a.q, a.k, a.v, *rest_of(a), a.grads)
        wanted = (True, True, True, *a.grads)
        results.append(tuple(x if flag else x.new_empty(0) for x, flag in zip(rest, wanted, strict=True)))
    return results[0] if len(results) == 1 else tuple(x + y for x, y in zip(*results, strict=True))


def call(name: str, *args: Any) -> tuple[Tensor, ...]:
    """saccade::<name>; under torch.func and in forward mode as an autograd Function, which has all derivatives."""
    if name == "tangent" and legacy_batched(*args[: len(TANGENTS)]):
        raise Unsupported("torch", ["vectorize is not computed in forward mode: call torch.func.jacfwd"])
    if not torch.compiler.is_compiling() and (transforms_active() or forward_mode_active()):
        return _functions[name].apply(*args)
    return getattr(torch.ops.saccade, name).default(*args)


def forward(q: Tensor, k: Tensor, v: Tensor, rest: list[Any], decode: bool, options: Options) -> tuple[Tensor, ...]:
    """(o, lse, *more) of the operator that computes the results that the options ask for; rest: from `arguments`."""
    flags = bool(options.return_max), bool(options.return_entropy)
    if not any(flags):
        return call("forward", q, k, v, *rest, decode)
    o, lse, *more = call("forward_more", q, k, v, *rest, decode, *flags)
    return o, lse, *(x for x, wanted in zip(more, flags, strict=True) if wanted)


def _register(
    signature: Signature, kernel: Any, fake: Any, setup: Callable[..., Any], backward: Callable[..., Any], jvp: Any
) -> type[torch.autograd.Function]:
    name = signature.name
    lists = name not in ("second", "tangent")
    # Dynamo calls operators directly, also in forward mode
    reason = "forward mode is not compiled, because Dynamo drops tangents: call torch.func.jvp outside of torch.compile"
    kernel, fake = refusing_tangents(kernel, reason), refusing_tangents(fake, reason)
    signature.register(kernel, fake, setup, signature.with_lists(backward) if lists else backward)
    rule = vmap_rule(signature, partial(call, name))
    torch.library.register_vmap(f"saccade::{name}", rule)
    members = {
        "forward": staticmethod(getattr(torch.ops.saccade, name).default),
        "setup_context": staticmethod(setup),
        "backward": staticmethod(backward),
        "jvp": staticmethod(jvp),
        "vmap": staticmethod(rule),
    }
    return type(f"Attention_{name}", (torch.autograd.Function,), members)


_functions = {
    "forward": _register(FORWARD, _forward, _fake_forward, _forward_setup, _forward_backward, _forward_jvp),
    "forward_more": _register(MORE, _forward_more, _fake_more, _more_setup, _more_backward, _more_jvp),
    "backward": _register(BACKWARD, _backward, _fake_backward, _backward_setup, _backward_backward, _backward_jvp),
    "second": _register(SECOND, _second, _fake_second, _no_setup, _third, _third),
    "tangent": _register(TANGENT, _tangent, _fake_tangent, _no_setup, _tangent_backward, _tangent_jvp),
}
