"""The torch operators saccade::forward, saccade::backward and saccade::second, with fakes, derivatives and vmap.

Each takes its mask as `str structure, SymInt[] ints, Tensor[] data`, so that a graph with symbolic lengths and mask
integers holds for all of them; lowering and planning happen inside.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..errors import Unsupported
from ..mask import Mask
from . import torch_run as run
from .call import Options
from .torch_mask import join, seen, split
from .torch_second import second_derivative
from .torch_state import transforms_active
from .torch_vmap import vmap_rule

REST = (
    "str structure, SymInt[] ints, Tensor[] data, Tensor? bias, Tensor? slopes, Tensor? sinks, Tensor? seed, "
    "float? scale, float? softcap, float dropout, bool deterministic, str? backend"
)
QKV = "Tensor q, Tensor k, Tensor v, "
SCHEMAS = {
    "forward": f"({QKV}{REST}, bool decode) -> (Tensor o, Tensor lse)",
    # bias, slopes and sinks gradients are empty where `grads` (of these three) is false
    "backward": f"(Tensor do, Tensor? dlse, {QKV}Tensor o, Tensor lse, {REST}, bool[] grads)"
    " -> (Tensor dq, Tensor dk, Tensor dv, Tensor dbias, Tensor dslopes, Tensor dsinks)",
    # of a function of (do, dlse, q, k, v, bias, slopes, sinks), whose o and lse are recomputed
    "second": "(Tensor? gdq, Tensor? gdk, Tensor? gdv, Tensor? gdbias, Tensor? gdslopes, Tensor? gdsinks, "
    f"Tensor do, Tensor? dlse, {QKV}{REST}, bool[] grads)"
    " -> (Tensor ddo, Tensor ddlse, Tensor dq, Tensor dk, Tensor dv, Tensor dbias, Tensor dslopes, Tensor dsinks)",
}


def arguments(
    mask: Mask | None, bias: Any, slopes: Any, sinks: Any, seed: Tensor | None, options: Options
) -> list[Any]:
    """The operator arguments after q, k and v, up to `backend`."""
    return [
        *split(mask), bias, slopes, sinks, seed, options.scale, options.softcap, options.dropout,
        options.deterministic, options.backend,
    ]  # fmt: skip


def _options(rest: Any) -> Options:
    scale, softcap, dropout, deterministic, backend = rest[7:12]
    return Options(scale, softcap, dropout, None, deterministic, backend)


def _forward(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    structure, ints, data, bias, slopes, sinks, seed = rest[:7]
    mask = join(structure, ints, data)
    call = run.prepare(q, k, v, mask, bias, slopes, sinks, _options(rest), False, False)
    return run.forward(call, q, k, v, bias, slopes, sinks, run.unsigned(seed), rest[12])


def _backward(
    do: Tensor, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, *rest: Any
) -> tuple[Tensor, ...]:  # fmt: skip
    structure, ints, data, bias, slopes, sinks, seed = rest[:7]
    wanted = frozenset(name for name, flag in zip(run.GRADS, rest[12], strict=True) if flag)
    mask = join(structure, ints, data)
    call = run.prepare(q, k, v, mask, bias, slopes, sinks, _options(rest), True, "bias" in wanted)
    run.check_rows(call.problem, do, o, lse, dlse)
    key = run.unsigned(seed)
    dq, dk, dv, extras = run.backward(call, do, dlse, q, k, v, o, lse, bias, slopes, sinks, key, wanted)
    given: dict[str, Any] = {"bias": bias, "slopes": slopes, "sinks": sinks}
    return dq, dk, dv, *(extras[n].reshape(given[n].shape) if n in wanted else lse.new_empty(0) for n in run.GRADS)


def _second(*args: Any) -> tuple[Tensor, ...]:
    cotangents, (do, dlse, q, k, v), rest = args[:6], args[6:11], args[11:]
    structure, ints, data, bias, slopes, sinks, seed = rest[:7]
    mask = join(structure, ints, data)
    call = run.prepare(q, k, v, mask, bias, slopes, sinks, _options(rest), True, bool(rest[12][0]))
    inputs = (do, dlse, q, k, v, bias, slopes, sinks)
    results = second_derivative(call.problem, cotangents, inputs, run.unsigned(seed))
    return tuple(q.new_empty(0) if x is None else x for x in results)


# what the results look like, for tracing


def _fake_forward(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    _check(q, k, v, rest)
    return q.new_empty((*q.shape[:3], v.shape[3])), q.new_empty(q.shape[:3], dtype=_wide(q))


def _fake_backward(
    do: Tensor, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, *rest: Any
) -> tuple[Tensor, ...]:  # fmt: skip
    _check(q, k, v, rest, rest[12][0])
    extras = [lse.new_empty(x.shape if flag else 0) for x, flag in zip(rest[3:6], rest[12], strict=True)]
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape), *extras


def _fake_second(*args: Any) -> tuple[Tensor, ...]:
    inputs = (*args[6:11], *args[14:17])
    return tuple(args[6].new_empty(0) if x is None else x.new_empty(x.shape) for x in inputs)


def _check(q: Tensor, k: Tensor, v: Tensor, rest: Any, bias_grad: bool = False) -> None:
    options = _options(rest)
    if options.scale is None:
        # a symbolic head size has no square root yet
        options = options._replace(scale=1.0)
    bias, slopes, sinks = rest[3:6]
    run.describe_tensors(q, k, v, None, bias, slopes, sinks, options, bias_grad=bias_grad)


def _wide(q: Tensor) -> torch.dtype:
    return torch.float64 if q.dtype is torch.float64 else torch.float32


# derivatives: a gradient for every argument, with ints and data counted as one each


def _forward_setup(ctx: Any, inputs: Any, output: Any) -> None:
    structure, ints, data, bias, slopes, sinks, seed, *more = inputs[3:]
    ctx.save_for_backward(*inputs[:3], *output, bias, slopes, sinks, seed, *data)
    # the mask stays alive, and with it its plan, until the backward is done
    ctx.mask = seen(structure, ints, data)
    ctx.rest = structure, ints, more[:-1]
    ctx.set_materialize_grads(False)


def _forward_backward(ctx: Any, do: Tensor | None, dlse: Tensor | None) -> tuple[Any, ...]:
    q, k, v, o, lse, bias, slopes, sinks, seed, *data = ctx.saved_tensors
    structure, ints, more = ctx.rest
    rest = [structure, ints, data, bias, slopes, sinks, seed, *more]
    first = differentiate(do, dlse, q, k, v, o, lse, rest, ctx.needs_input_grad[6:9])
    return *first[:3], None, None, None, *first[3:], *[None] * (len(more) + 2)


def differentiate(
    do: Tensor | None,
    dlse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    o: Tensor,
    lse: Tensor,
    rest: list[Any],
    needs: Any,
) -> list[Tensor | None]:
    """[dq, dk, dv, dbias, dslopes, dsinks] by the backward operator, None for what is not needed."""
    if do is None:
        do = torch.zeros_like(o)
    grads = [bool(needed) and x is not None for needed, x in zip(needs, rest[3:6], strict=True)]
    results = call("backward", do, dlse, q, k, v, o, lse, *rest, grads)
    return [*results[:3], *(x if flag else None for x, flag in zip(results[3:], grads, strict=True))]


def _backward_setup(ctx: Any, inputs: Any, output: Any) -> None:
    do, dlse, q, k, v, _, _, structure, ints, data, bias, slopes, sinks, seed, *more = inputs
    ctx.save_for_backward(do, dlse, q, k, v, bias, slopes, sinks, seed, *data)
    ctx.rest = structure, ints, more
    ctx.set_materialize_grads(False)


def _backward_backward(ctx: Any, *cotangents: Tensor | None) -> tuple[Any, ...]:
    do, dlse, q, k, v, bias, slopes, sinks, seed, *data = ctx.saved_tensors
    structure, ints, more = ctx.rest
    kept = [*cotangents[:3], *(c if flag else None for c, flag in zip(cotangents[3:], more[-1], strict=True))]
    rest = [structure, ints, data, bias, slopes, sinks, seed, *more]
    results = call("second", *kept, do, dlse, q, k, v, *rest)
    given = (do, dlse, q, k, v, bias, slopes, sinks)
    second = [None if x is None else r for x, r in zip(given, results, strict=True)]
    # o and lse are functions of q, k and v here: their share is in the gradients of those
    return *second[:5], None, None, None, None, None, *second[5:], *[None] * (len(more) + 1)


def _no_setup(ctx: Any, inputs: Any, output: Any) -> None:
    pass


def _second_backward(ctx: Any, *_: Any) -> Any:
    raise Unsupported("torch", ["third derivatives are not offered: attention has first and second ones"])


DERIVATIVES: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
    "forward": (_forward_setup, _forward_backward),
    "backward": (_backward_setup, _backward_backward),
    "second": (_no_setup, _second_backward),
}


def call(name: str, *args: Any) -> tuple[Tensor, ...]:
    """saccade::<name>. torch.func sees it as an autograd Function, the only thing it differentiates and maps in one."""
    if not torch.compiler.is_compiling() and transforms_active():
        return _functions[name].apply(*args)
    return getattr(torch.ops.saccade, name).default(*args)


def _with_lists(backward: Callable[..., tuple[Any, ...]], at: int) -> Callable[..., tuple[Any, ...]]:
    # what torch.library wants for ints and data, which stand at `at`: a list of tensors is taken apart
    def wrapped(ctx: Any, *grads: Any) -> tuple[Any, ...]:
        ints, data = ctx.rest[1], ctx.saved_tensors[9:]
        found = list(backward(ctx, *grads))
        found[at : at + 2] = [None if ints else [], [None] * len(data)]
        return tuple(found)

    return wrapped


def _register(name: str, kernel: Any, fake: Any) -> type[torch.autograd.Function]:
    qualified = f"saccade::{name}"
    torch.library.define(qualified, SCHEMAS[name])
    torch.library.impl(qualified, "CompositeExplicitAutograd", kernel)
    torch.library.register_fake(qualified, fake)
    rule = vmap_rule(name, partial(call, name))
    torch.library.register_vmap(qualified, rule)
    setup, backward = DERIVATIVES[name]
    lists = backward if name == "second" else _with_lists(backward, 4 if name == "forward" else 8)
    torch.library.register_autograd(qualified, lists, setup_context=setup)
    members = {
        "forward": staticmethod(getattr(torch.ops.saccade, name).default),
        "setup_context": staticmethod(setup),
        "backward": staticmethod(backward),
        "vmap": staticmethod(rule),
    }
    return type(f"Attention_{name}", (torch.autograd.Function,), members)


_functions = {
    "forward": _register("forward", _forward, _fake_forward),
    "backward": _register("backward", _backward, _fake_backward),
    "second": _register("second", _second, _fake_second),
}
