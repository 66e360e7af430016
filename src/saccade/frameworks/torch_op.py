"""The torch operators saccade::forward, saccade::backward and saccade::second, with fakes, derivatives and vmap.

Each takes its mask as `str structure, SymInt[] ints, Tensor[] data`, so that one graph with symbolic lengths and mask
integers is valid for all values. Lowering and planning happen inside the operator.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..backends import Outputs
from ..errors import Unsupported
from ..operands import Options, Request, Side
from . import torch_run as run
from .torch_mask import join, seen, split
from .torch_second import second_derivative
from .torch_signature import Signature
from .torch_state import transforms_active
from .torch_vmap import vmap_rule

QKV = "Tensor q, Tensor k, Tensor v"
SIDE = ", ".join(f"Tensor? {name}" for name in Side._fields)
REST = (
    f"str structure, SymInt[] ints, Tensor[] data, {SIDE}, Tensor? seed, float? scale, float? softcap, float dropout, "
    "str deterministic, str? backend"
)
# the values of the operator's argument, which has one type
_DETERMINISTIC: dict[str, bool | str] = {str(value): value for value in (True, False, "batch")}
OF_SIDE = ", ".join(f"Tensor d{name}" for name in Side._fields)
FORWARD = Signature("forward", f"{QKV}, {REST}, bool decode", "Tensor o, Tensor lse")
# gradients of side arrays are empty if `grads` is false for them
BACKWARD = Signature(
    "backward",
    f"Tensor do, Tensor? dlse, {QKV}, Tensor o, Tensor lse, {REST}, bool[] grads",
    f"Tensor dq, Tensor dk, Tensor dv, {OF_SIDE}",
)
# the gradient of the backward as a function of (do, dlse, q, k, v and the side arrays), which recomputes o and lse
COTANGENTS = ("gdq", "gdk", "gdv", *(f"gd{name}" for name in Side._fields))
SECOND = Signature(
    "second",
    f"{', '.join(f'Tensor? {name}' for name in COTANGENTS)}, Tensor do, Tensor? dlse, {QKV}, {REST}, bool[] grads",
    f"Tensor ddo, Tensor ddlse, Tensor dq, Tensor dk, Tensor dv, {OF_SIDE}",
)
INPUTS = ("do", "dlse", "q", "k", "v", *Side._fields)


def arguments(request: Request) -> list[Any]:
    """The operator arguments of REST; the request's seed is a tensor or None."""
    mask, side, options, seed = request
    numbers = options.scale, options.softcap, options.dropout
    return [*split(mask), *side, seed, *numbers, str(options.deterministic), options.backend]


def _rest(a: Any) -> list[Any]:
    # REST of the arguments of an operator
    options = a.scale, a.softcap, a.dropout, a.deterministic, a.backend
    return [a.structure, a.ints, a.data, *_side(a), a.seed, *options]


def _side(a: Any) -> Side:
    return Side(*[getattr(a, name) for name in Side._fields])


def _options(a: Any) -> Options:
    return Options(a.scale, a.softcap, a.dropout, None, _DETERMINISTIC[a.deterministic], a.backend)


def _planned(a: Any, grads: frozenset[str] | None = None) -> Any:
    request = Request(join(a.structure, a.ints, a.data), _side(a), _options(a))
    return run.prepare(a.q, a.k, a.v, request, grads)


def _extras(a: Any) -> Any:
    return run.carried(run.unsigned(a.seed), *_side(a))


def _wanted(a: Any) -> frozenset[str]:
    return frozenset(name for name, flag in zip(Side._fields, a.grads, strict=True) if flag)


def _forward(*args: Any) -> tuple[Tensor, Tensor]:
    a = FORWARD.bind(*args)
    return run.forward(_planned(a), a.q, a.k, a.v, _extras(a), "decode" if a.decode else "forward")


def _backward(*args: Any) -> tuple[Tensor, ...]:
    a = BACKWARD.bind(*args)
    wanted, outputs = _wanted(a), Outputs(a.o, a.lse, a.do, a.dlse)
    planned = _planned(a, wanted)
    run.check_rows(planned.problem, outputs)
    dq, dk, dv, more = run.backward(planned, a.q, a.k, a.v, outputs, _extras(a), wanted)
    of_side = run.gradients_like(_side(a), more)
    return dq, dk, dv, *(a.lse.new_empty(0) if x is None else x for x in of_side)


def _second(*args: Any) -> tuple[Tensor, ...]:
    a = SECOND.bind(*args)
    planned = _planned(a, _wanted(a))
    cotangents = [getattr(a, name) for name in COTANGENTS]
    results = second_derivative(planned.problem, cotangents, [getattr(a, x) for x in INPUTS], run.unsigned(a.seed))
    return tuple(a.q.new_empty(0) if x is None else x for x in results)


# shapes and dtypes of the results, for tracing


def _fake_forward(*args: Any) -> tuple[Tensor, Tensor]:
    a = FORWARD.bind(*args)
    _check(a)
    wide = torch.float64 if a.q.dtype is torch.float64 else torch.float32
    return a.q.new_empty((*a.q.shape[:3], a.v.shape[3])), a.q.new_empty(a.q.shape[:3], dtype=wide)


def _fake_backward(*args: Any) -> tuple[Tensor, ...]:
    a = BACKWARD.bind(*args)
    wanted = _wanted(a)
    _check(a, wanted)
    side = zip(Side._fields, _side(a), strict=True)
    of_side = [x.new_empty(x.shape) if name in wanted else a.lse.new_empty(0) for name, x in side]
    return *(x.new_empty(x.shape) for x in (a.q, a.k, a.v)), *of_side


def _fake_second(*args: Any) -> tuple[Tensor, ...]:
    a = SECOND.bind(*args)
    inputs = [getattr(a, name) for name in INPUTS]
    return tuple(a.do.new_empty(0) if x is None else x.new_empty(x.shape) for x in inputs)


def _check(a: Any, grads: frozenset[str] | None = None) -> None:
    options = _options(a)
    if options.scale is None:
        # a symbolic head size has no square root yet
        options = options._replace(scale=1.0)
    run.describe_tensors(a.q, a.k, a.v, Request(None, _side(a), options), grads)


# derivatives: one gradient per argument; ints and data count as one argument each


def _forward_setup(ctx: Any, inputs: Any, output: Any) -> None:
    a = FORWARD.bind(*inputs)
    FORWARD.save(ctx, a, output)
    # keep the mask, and so its plan, alive until the backward is done
    ctx.mask = seen(a.structure, a.ints, a.data)


def _forward_backward(ctx: Any, do: Tensor | None, dlse: Tensor | None) -> tuple[Any, ...]:
    a, (o, lse) = FORWARD.saved(ctx)
    outputs = Outputs(o, lse, torch.zeros_like(o) if do is None else do, dlse)
    return FORWARD.gradients(differentiate(a.q, a.k, a.v, outputs, _rest(a), _side(FORWARD.needs(ctx))))


def differentiate(
    q: Tensor, k: Tensor, v: Tensor, outputs: Outputs, rest: list[Any], needs: Side
) -> dict[str, Tensor | None]:
    """Gradients by name of q, k, v and the side arrays, from the backward operator; None if not needed."""
    a = BACKWARD.bind(outputs.do, outputs.dlse, q, k, v, outputs.o, outputs.lse, *rest, None)
    grads = [bool(needed) and x is not None for needed, x in zip(needs, _side(a), strict=True)]
    dq, dk, dv, *of_side = call("backward", *a._replace(grads=grads))
    needed = [x if flag else None for x, flag in zip(of_side, grads, strict=True)]
    return {"q": dq, "k": dk, "v": dv, **dict(zip(Side._fields, needed, strict=True))}


def _backward_setup(ctx: Any, inputs: Any, output: Any) -> None:
    BACKWARD.save(ctx, BACKWARD.bind(*inputs)._replace(o=None, lse=None))


def _backward_backward(ctx: Any, *cotangents: Tensor | None) -> tuple[Any, ...]:
    a, _ = BACKWARD.saved(ctx)
    flags = [True, True, True, *a.grads]
    needed = [c if flag else None for c, flag in zip(cotangents, flags, strict=True)]
    results = call("second", *needed, a.do, a.dlse, a.q, a.k, a.v, *_rest(a), a.grads)
    # o and lse are functions of q, k and v here; their contribution is in the gradients of q, k and v
    of_inputs = zip(INPUTS, results, strict=True)
    return BACKWARD.gradients({name: None if getattr(a, name) is None else r for name, r in of_inputs})


def _no_setup(ctx: Any, inputs: Any, output: Any) -> None:
    pass


def _second_backward(ctx: Any, *_: Any) -> Any:
    raise Unsupported("torch", ["third derivatives are not supported: attention has first and second ones"])


def call(name: str, *args: Any) -> tuple[Tensor, ...]:
    """saccade::<name>; under torch.func as an autograd Function, which torch.func can differentiate and map at once."""
    if not torch.compiler.is_compiling() and transforms_active():
        return _functions[name].apply(*args)
    return getattr(torch.ops.saccade, name).default(*args)


def _register(
    signature: Signature, kernel: Any, fake: Any, setup: Callable[..., Any], backward: Callable[..., Any]
) -> type[torch.autograd.Function]:
    name = signature.name
    signature.register(kernel, fake, setup, backward if name == "second" else signature.with_lists(backward))
    rule = vmap_rule(signature, partial(call, name))
    torch.library.register_vmap(f"saccade::{name}", rule)
    members = {
        "forward": staticmethod(getattr(torch.ops.saccade, name).default),
        "setup_context": staticmethod(setup),
        "backward": staticmethod(backward),
        "vmap": staticmethod(rule),
    }
    return type(f"Attention_{name}", (torch.autograd.Function,), members)


_functions = {
    "forward": _register(FORWARD, _forward, _fake_forward, _forward_setup, _forward_backward),
    "backward": _register(BACKWARD, _backward, _fake_backward, _backward_setup, _backward_backward),
    "second": _register(SECOND, _second, _fake_second, _no_setup, _second_backward),
}
