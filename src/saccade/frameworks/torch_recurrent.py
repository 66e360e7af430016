"""Recurrences on torch tensors: an operator saccade::<family> and its gradient, with fakes, derived from a `Family`.

Calls that are not traced go directly to the backend, with gradients by a small autograd Function.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from ..backends import choose_recurrent
from ..errors import Unsupported
from ..recurrent.diagonal import CAUSAL_CONV1D, RG_LRU, SELECTIVE_SCAN
from ..recurrent.family import Family, check_borders
from ..recurrent.problem import MATRIX
from . import torch_run as run
from .torch_signature import Signature
from .torch_state import forward_mode_active, modes_active, refusing_tangents, transforms_active

# one per name of a family, None if omitted
Tensors = Sequence[Tensor | None]


def compute(family: Family, arrays: dict[str, Any], options: Any) -> tuple[Tensor, ...]:
    """The outputs of a family's operator as tensors."""
    for name, x in arrays.items():
        arrays[name] = _checked(family, name, x)
    tensors = [arrays[name] for name in family.names]
    if not _plain(tensors):
        return getattr(torch.ops.saccade, family.name).default(*tensors, *options)
    if torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tensors):
        return _Recurrence.apply(family, options, *tensors)
    return _forward(family, tensors, options)


def _checked(family: Family, name: str, x: Any) -> Any:
    if x is None or isinstance(x, Tensor):
        return x
    if name in family.integers:
        return torch.as_tensor(x)
    raise TypeError(f"{name} is {type(x).__name__}; expected a torch tensor, like {family.names[0]}: convert it")


def _plain(tensors: Tensors) -> bool:
    if torch.compiler.is_compiling() or transforms_active() or modes_active() > 0 or forward_mode_active():
        return False
    return all(x is None or (type(x) in (Tensor, Parameter) and not x.is_meta) for x in tensors)


def _describe(family: Family, tensors: Tensors, options: Any) -> Any:
    specs = {n: None if x is None else run.spec(x) for n, x in zip(family.names, tensors, strict=True)}
    return family.describe(specs, options)


# checked calls: the problem and the backend by shapes, dtypes, devices and options
MOST_CALLS = 512
_calls: dict[Any, tuple[Any, Any]] = {}


def _prepare(family: Family, tensors: Tensors, options: Any) -> tuple[Any, Any]:
    key = family, options, *(None if x is None else (x.shape, x.dtype, x.device) for x in tensors)
    try:
        prepared = _calls.get(key)
    except TypeError:
        # an unhashable option has a wrong type; `describe` raises the error about it
        prepared = None
    if prepared is None:
        problem = _describe(family, tensors, options)
        prepared = problem, choose_recurrent(problem, options.backend)
        if len(_calls) >= MOST_CALLS:
            _calls.clear()
        _calls[key] = prepared
    run.follow_threads(prepared[1])
    return prepared


def _lend(family: Family, backend: Any, problem: Any, tensors: Tensors) -> dict[str, Any]:
    give = run.giver(backend)
    arrays = {
        n: None if x is None else give(run.dense(x.detach() if x.requires_grad else x))
        for n, x in zip(family.names, tensors, strict=True)
    }
    borders = arrays.get("cu_seqlens")
    if borders is not None and not isinstance(borders, Tensor):
        arrays["cu_seqlens"] = check_borders(borders, problem.T)
    return arrays


def _forward(family: Family, tensors: Tensors, options: Any) -> tuple[Tensor, ...]:
    problem, backend = _prepare(family, tensors, options)
    results = backend.forward(problem, _lend(family, backend, problem, tensors))
    return tuple(run.tensor(x, getattr(torch, s.dtype)) for x, s in zip(results, problem.outputs, strict=True))


def _backward(
    family: Family, cotangents: Tensors, tensors: Tensors, options: Any, needs: Sequence[bool]
) -> tuple[Tensor, ...]:
    problem, backend = _prepare(family, tensors, options)
    give, wanted = run.giver(backend), {n for n, needed in zip(family.names, needs, strict=True) if needed}
    downs = [None if x is None else give(x.contiguous()) for x in cotangents]
    gradients = backend.backward(problem, _lend(family, backend, problem, tensors), downs, wanted)
    results: list[Tensor] = []
    for name, x in zip(family.names, tensors, strict=True):
        if x is None or name not in wanted:
            results.append(_nothing(tensors))
        else:
            results.append(run.tensor(gradients[name], x.dtype))
    return tuple(results)


class _Recurrence(torch.autograd.Function):
    """The eager gradient: the same as the operator's autograd, without the overhead of an operator."""

    @staticmethod
    def forward(ctx: Any, family: Family, options: Any, *tensors: Tensor | None) -> tuple[Tensor, ...]:
        ctx.save_for_backward(*tensors)
        ctx.rest = family, options
        ctx.set_materialize_grads(False)
        return _forward(family, tensors, options)

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor | None) -> tuple[Any, ...]:  # type: ignore[override]
        (family, options), tensors, needs = ctx.rest, ctx.saved_tensors, ctx.needs_input_grad[2:]
        # the operator raises an error if this gradient is differentiated again
        back = _by_operator if torch.is_grad_enabled() else _backward
        gradients = back(family, cotangents, tensors, options, needs)
        return None, None, *(x if needed else None for x, needed in zip(gradients, needs, strict=True))


def _by_operator(
    family: Family, cotangents: Tensors, tensors: Tensors, options: Any, needs: Sequence[bool]
) -> tuple[Tensor, ...]:
    return getattr(torch.ops.saccade, f"{family.name}_backward").default(*cotangents, *tensors, *options, list(needs))


def _nothing(tensors: Tensors) -> Tensor:
    # the result of an operator for a gradient that is not needed
    first = tensors[0]
    assert first is not None
    return first.new_empty(0)


def register(family: Family) -> None:
    """Define saccade::<name> and saccade::<name>_backward."""
    names = family.names
    arrays = ", ".join(f"Tensor{'?' if x.endswith('?') else ''} {x.rstrip('?')}" for x in family.inputs)
    rest, cotangents = f"{arrays}, {family.schema}", [f"d{x}" for x in family.outputs]
    forward_of = Signature(family.name, rest, ", ".join(f"Tensor {x}" for x in family.outputs))
    backward_of = Signature(
        f"{family.name}_backward",
        f"{', '.join(f'Tensor? {x}' for x in cotangents)}, {rest}, bool[] needs",
        ", ".join(f"Tensor d{x}" for x in names),
    )

    def tensors(a: Any) -> list[Any]:
        return [getattr(a, name) for name in names]

    def options(a: Any) -> Any:
        return family.Options(*(getattr(a, name) for name in family.Options._fields))

    def forward(*args: Any) -> tuple[Tensor, ...]:
        a = forward_of.bind(*args)
        return _forward(family, tensors(a), options(a))

    def fake(*args: Any) -> tuple[Tensor, ...]:
        a = forward_of.bind(*args)
        problem = _describe(family, tensors(a), options(a))
        return tuple(args[0].new_empty(s.shape, dtype=getattr(torch, s.dtype)) for s in problem.outputs)

    def backward(*args: Any) -> tuple[Tensor, ...]:
        a = backward_of.bind(*args)
        return _backward(family, [getattr(a, name) for name in cotangents], tensors(a), options(a), a.needs)

    def fake_backward(*args: Any) -> tuple[Tensor, ...]:
        a = backward_of.bind(*args)
        empty = _nothing(tensors(a))
        pairs = zip(tensors(a), a.needs, strict=True)
        return tuple(empty.new_empty(0) if x is None or not needed else x.new_empty(x.shape) for x, needed in pairs)

    def setup(ctx: Any, inputs: Any, output: Any) -> None:
        forward_of.save(ctx, forward_of.bind(*inputs))

    def differentiate(ctx: Any, *cotangents: Tensor | None) -> tuple[Any, ...]:
        a, _ = forward_of.saved(ctx)
        wanted = forward_of.needs(ctx)
        needs = [x is not None and bool(getattr(wanted, n)) for n, x in zip(names, tensors(a), strict=True)]
        gradients = _by_operator(family, cotangents, tensors(a), options(a), needs)
        return forward_of.gradients({n: x for n, x, wanted in zip(names, gradients, needs, strict=True) if wanted})

    def again(ctx: Any, *_: Any) -> Any:
        raise Unsupported("torch", ["second derivatives of recurrences are not supported: detach one of the two"])

    forward, fake, backward, fake_backward = (
        refusing_tangents(f, "forward mode of recurrences is not computed: use torch.func.vjp, or detach")
        for f in (forward, fake, backward, fake_backward)
    )
    forward_of.register(forward, fake, setup, differentiate)
    backward_of.register(backward, fake_backward, lambda ctx, inputs, output: None, again)


# register on import, because torch.compile may trace the first call
for _family in (MATRIX, SELECTIVE_SCAN, RG_LRU, CAUSAL_CONV1D):
    register(_family)
