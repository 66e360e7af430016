"""The arguments of the torch operators of attention: their schemas, and what a call's arguments say."""

from __future__ import annotations

from typing import Any

from ..operands import Options, Request, Side
from .torch_mask import split
from .torch_signature import Signature

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
# results that are not asked for are empty
MORE = Signature(
    "forward_more",
    f"{QKV}, {REST}, bool decode, bool return_max, bool return_entropy",
    "Tensor o, Tensor lse, Tensor max, Tensor entropy",
)
# gradients of side arrays are empty if `grads` is false for them
BACKWARD = Signature(
    "backward",
    f"Tensor do, Tensor? dlse, Tensor? dentropy, {QKV}, Tensor o, Tensor lse, Tensor? entropy, {REST}, bool[] grads",
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
# the tangents of o and lse from those of q, k, v and the side arrays, None for zero
TANGENTS = ("tq", "tk", "tv", *(f"t{name}" for name in Side._fields))
TANGENT = Signature(
    "tangent",
    f"{', '.join(f'Tensor? {name}' for name in TANGENTS)}, {QKV}, Tensor o, Tensor lse, {REST}",
    "Tensor to, Tensor tlse",
)


def arguments(request: Request) -> list[Any]:
    """The operator arguments of REST; the request's seed is a tensor or None."""
    mask, side, options, seed = request
    numbers = options.scale, options.softcap, options.dropout
    return [*split(mask), *side, seed, *numbers, str(options.deterministic), options.backend]


def rest_of(a: Any) -> list[Any]:
    """REST of the arguments of an operator."""
    options = a.scale, a.softcap, a.dropout, a.deterministic, a.backend
    return [a.structure, a.ints, a.data, *side_of(a), a.seed, *options]


def side_of(a: Any) -> Side:
    """The side arrays of the arguments, or one value for each."""
    return Side(*[getattr(a, name) for name in Side._fields])


def options_of(a: Any) -> Options:
    """The options of the arguments."""
    entropy = getattr(a, "return_entropy", False) or getattr(a, "dentropy", None) is not None
    more = {"return_max": getattr(a, "return_max", False), "return_entropy": entropy}
    return Options(a.scale, a.softcap, a.dropout, None, _DETERMINISTIC[a.deterministic], a.backend, **more)


def wanted_of(a: Any) -> frozenset[str]:
    """The side arrays whose gradients are needed."""
    return frozenset(name for name, flag in zip(Side._fields, a.grads, strict=True) if flag)
