"""Export torch models to ONNX: `saccade.attention` becomes the standard operator Attention (opset 23 and later).

    program = torch.onnx.export(
        model, inputs, dynamo=True, opset_version=23, custom_translation_table=translation_table()
    )

The operator has no tiles, so masks become booleans [..., Tq, Tk] that the exported model computes from its lengths.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial, reduce
from typing import Any, NamedTuple

import torch

from ..errors import Unsupported, how_to_install

try:
    from onnxscript import evaluator, ir, opset23
except ModuleNotFoundError as error:
    raise ImportError(f"saccade.integrations.onnx needs onnxscript ({error}): {how_to_install('onnx')}") from error

from ..frameworks import torch_op as torch_op  # registers the operators
from ..frameworks.torch_arguments import FORWARD
from ..frameworks.torch_mask import used
from ..mask import Mask
from ..mask.bits import Bits

# functions that add nodes to the graph; their types describe graphs of constants
op: Any = opset23

OPSET = 23


def translation_table() -> dict[Any, Callable[..., Any]]:
    """The argument `custom_translation_table` of `torch.onnx.export(..., dynamo=True)`.

    Attention of ONNX and `saccade.attention` agree in the order of softcap, bias and mask, in groups of heads, and in
    rows that see no key, which are 0. They differ in causality: `is_causal` aligns the first query with the first key,
    and `mask.causal()` the last with the last. The export uses `is_causal` only for equal lengths and for
    `mask.causal(0)`, and writes a boolean mask for other lengths. This was compared with ONNX Runtime 1.28 and
    1.31; 1.27 and earlier give wrong numbers for rows without keys, and up to 1.26 for a softcap with a mask.

    Supported are all floating dtypes (of which ONNX Runtime's CPU provider lacks bfloat16), scales above 0, a softcap,
    ALiBi, and a bias, which is rounded to the dtype of q; and the masks full, causal, window, keys, prefix, padding,
    documents by ids, dense, strided, dilated, chunked, global tokens up to a number, and what `&`, `|` and `~` make of
    them. The export raises `Unsupported` for anything else, such as sinks, dropout and a use of lse; torch wraps it in
    its own error.

    Returns:
        A dict from Saccade's operators in torch to their translations.

    Examples:
        >>> from saccade.integrations.onnx import translation_table
        >>> model, x = saccade.nn.Attention(64, heads=4).eval(), torch.randn(2, 100, 64)
        >>> options = {"dynamo": True, "opset_version": 23, "custom_translation_table": translation_table()}
        >>> program = torch.onnx.export(model, (x,), verbose=False, **options)
    """
    return {torch.ops.saccade.forward.default: _attention, torch.ops.saccade.forward_more.default: _more}


class _OnlyOutput(tuple[Any, ...]):
    # a copy of o takes the place of lse, until something reads it
    def __getitem__(self, index: Any) -> Any:
        if index == 0:
            return super().__getitem__(0)
        raise _unsupported("its Attention returns no lse: leave return_lse out")


def _unsupported(reason: str) -> Unsupported:
    return Unsupported("onnx", [reason])


def _more(*_: Any) -> Any:
    raise _unsupported("its Attention returns no max and no entropy: leave return_max and return_entropy out")


def _attention(*arguments: Any) -> Any:
    a = FORWARD.bind(*arguments)
    recorder: Any = evaluator.default()
    version = recorder.opset.version
    if version < OPSET:
        raise _unsupported(f"opset {version} has no Attention: pass opset_version={OPSET} or later")
    for name in ("sinks", "table", "log_f"):
        if getattr(a, name) is not None:
            raise _unsupported(f"its Attention has no {name}: leave it out")
    if a.deterministic == "batch":
        raise _unsupported('it promises no bits, as deterministic="batch" does: leave it out')
    if a.dropout:
        raise _unsupported("its Attention has no dropout: export model.eval() with dropout=0")
    if a.scale is not None and a.scale <= 0:
        raise _unsupported(f"scale is {a.scale}; ONNX Runtime expects one above 0: multiply q by its sign")
    positions = _Positions.of(a.q, a.k)
    ints, data = used(a.structure, a.ints, a.data)
    mask = Mask.unflatten(a.structure, ints, data) if a.structure else None
    attributes = {"scale": a.scale, "softcap": a.softcap}
    attributes = {name: value for name, value in attributes.items() if value is not None}
    allowed = None
    if mask is not None:
        if mask.kind == "causal" and (mask.args[0] == 0 or (mask.args[0] is None and positions.square)):
            attributes["is_causal"] = 1
        else:
            allowed = positions.expanded(_pairs(mask, positions))
    bias = _bias(a, positions if mask is None else positions.with_stops(mask))
    if bias is not None and allowed is not None:
        bias = op.Where(allowed, bias, op.CastLike(op.Constant(value_float=float("-inf")), a.q))
    (_, _, Hq, D), (_, _, Hk, Dv) = a.q.shape, a.v.shape
    heads = [
        op.Reshape(x, op.Constant(value_ints=[0, 0, n])) for x, n in ((a.q, Hq * D), (a.k, Hk * D), (a.v, Hk * Dv))
    ]
    o = op.Attention(*heads, allowed if bias is None else bias, q_num_heads=Hq, kv_num_heads=Hk, **attributes)
    o = op.Reshape(o[0] if isinstance(o, (tuple, list)) else o, op.Constant(value_ints=[0, 0, Hq, Dv]))
    return _OnlyOutput((o, op.Identity(o)))


def _bias(a: Any, positions: _Positions) -> Any:
    # the sum of bias and ALiBi, [1 | B, 1 | Hq, Tq, Tk], or None
    terms = [] if a.bias is None else [positions.expanded(op.CastLike(a.bias, a.q))]
    if a.slopes is not None:
        shape = [0, 0, 1, 1] if len(a.slopes.shape) == 2 else [1, -1, 1, 1]
        distance = op.Abs(op.Sub(positions.rows(None), positions.keys))
        slopes = op.Reshape(op.CastLike(a.slopes, a.q), op.Constant(value_ints=shape))
        terms.append(op.Neg(op.Mul(slopes, op.CastLike(distance, a.q))))
    return reduce(op.Add, terms) if terms else None


class _Positions(NamedTuple):
    """Lengths and numbers of rows and keys.

    lengths: (Tq, Tk), each an int, or a value of the graph if it is known only when the model runs. t, keys: int64
    [Tq, 1] and [Tk]. square: whether Tq and Tk are the same. stop: the end of the keys in the `&` chain, or None.
    """

    lengths: tuple[Any, Any]
    t: Any
    keys: Any
    square: bool
    stop: Any = None

    @classmethod
    def of(cls, q: Any, k: Any) -> _Positions:
        """The positions of a call."""
        lengths = _length(q), _length(k)
        t, keys = (
            op.Range(_constant(0), n if isinstance(n, ir.Value) else _constant(n), _constant(1)) for n in lengths
        )
        return cls(lengths, op.Unsqueeze(t, op.Constant(value_ints=[1])), keys, q.shape[1] == k.shape[1])

    def rows(self, explicit: Any) -> Any:
        """Positions of the queries, [Tq, 1] or [1 | B, 1, Tq, 1]; explicit: the offset of the mask, or None."""
        Tq, Tk = self.lengths
        offset = _subtract(Tk if self.stop is None else self.stop, Tq) if explicit is None else _number(explicit)
        return op.Add(self.t, offset)

    def with_stops(self, chain: Mask) -> _Positions:
        """The positions in an `&` chain, or a chain of one; keys(stop) set the position of the last query."""
        stop = self.stop
        for child in chain.children if chain.kind == "and" else (chain,):
            if child.kind == "keys":
                own = op.Max(op.Min(_value(child.args[1]), _value(self.lengths[1])), _constant(0))
                stop = own if stop is None else op.Min(stop, own)
        return self._replace(stop=stop)

    def expanded(self, x: Any) -> Any:
        """x with all rows and keys, [..., Tq, Tk]."""
        one = op.Constant(value_ints=[1])
        ends = [op.Reshape(_value(n), one) for n in self.lengths]
        return op.Expand(x, op.Concat(one, one, *ends, axis=0))


def _length(x: Any) -> Any:
    n = x.shape[1]
    return n if isinstance(n, int) else op.Squeeze(op.Shape(x, start=1, end=2))


def _constant(n: int) -> Any:
    return op.Constant(value_int=n)


def _value(leaf: Any) -> Any:
    leaf = _number(leaf)
    return _constant(leaf) if isinstance(leaf, int) else leaf


def _number(leaf: Any) -> Any:
    # an int, or int64 [1 | B, 1, 1, 1]
    if isinstance(leaf, int):
        return leaf
    return op.Reshape(op.Cast(leaf, to=ir.DataType.INT64), op.Constant(value_ints=[-1, 1, 1, 1]))


def _subtract(x: Any, y: Any) -> Any:
    return x - y if isinstance(x, int) and isinstance(y, int) else op.Sub(_value(x), _value(y))


def _documents(mask: Mask, x: _Positions) -> Any:
    first, second = mask.args
    ids = op.Cast(first, to=ir.DataType.INT64)
    if second is not None:
        return op.Equal(_along(ids, first, rows=True), _along(op.Cast(second, to=ir.DataType.INT64), second))
    if x.stop is not None:
        raise _unsupported("documents with keys(stop) in one mask: give documents the ids of queries and of keys")
    # a query whose position is outside the array has no document
    i = x.rows(None)
    last = _subtract(x.lengths[1], 1)
    place = op.Reshape(op.Max(op.Min(i, _value(last)), _constant(0)), op.Constant(value_ints=[-1]))
    own = op.Gather(ids, place, axis=len(first.shape) - 1)
    inside = op.And(op.GreaterOrEqual(i, _constant(0)), op.LessOrEqual(i, _value(last)))
    return op.And(op.Equal(_along(own, first, rows=True), _along(ids, first)), inside)


def _along(x: Any, like: Any, rows: bool = False) -> Any:
    # [n] or [B, n] as [1 | B, 1, n, 1] for rows, or [1 | B, 1, 1, n] for keys
    added = [1, 3] if rows else [1, 2]
    return op.Unsqueeze(x, op.Constant(value_ints=added if len(like.shape) == 2 else [0, *added]))


def _window(mask: Mask, x: _Positions) -> Any:
    left, right, offset = mask.args
    i = x.rows(offset)
    sides = [] if left is None else [op.GreaterOrEqual(x.keys, op.Sub(i, _constant(left)))]
    sides += [] if right is None else [op.LessOrEqual(x.keys, op.Add(i, _constant(right)))]
    return reduce(op.And, sides) if sides else _full(mask, x)


def _full(mask: Mask, x: _Positions) -> Any:
    return op.GreaterOrEqual(x.keys, _constant(0))


def _keys(mask: Mask, x: _Positions) -> Any:
    start, stop = mask.args
    before = op.Less(x.keys, _value(stop))
    return before if start is None else op.And(before, op.GreaterOrEqual(x.keys, _value(start)))


def _dense(mask: Mask, x: _Positions) -> Any:
    leaf = mask.args[0]
    if isinstance(leaf, Bits):
        powers = op.Cast(op.Constant(value_ints=[1 << n for n in range(8)]), to=ir.DataType.UINT8)
        each = op.BitwiseAnd(op.Unsqueeze(leaf.packed, op.Constant(value_ints=[-1])), powers)
        flat = op.Reshape(each, op.Constant(value_ints=[0] * (len(leaf.shape) - 1) + [-1]))
        pairs = op.Slice(flat, *(op.Constant(value_ints=[n]) for n in (0, leaf.n, -1)))
    else:
        pairs = leaf
    pairs = op.Cast(pairs, to=ir.DataType.BOOL)
    return op.Unsqueeze(pairs, op.Constant(value_ints=[1])) if len(leaf.shape) == 3 else pairs


def _multiple(x: Any, n: int) -> Any:
    # the largest multiple of n that is at most x
    return op.Sub(x, op.Mod(x, _constant(n)))


def _dilated(mask: Mask, x: _Positions) -> Any:
    radius, step = mask.args
    distance = op.Sub(x.rows(None), x.keys)
    near = op.LessOrEqual(op.Abs(distance), _constant(radius * step))
    return op.And(near, op.Equal(op.Mod(distance, _constant(step)), _constant(0)))


def _global(mask: Mask, x: _Positions) -> Any:
    if not isinstance(mask.args[0], int):
        raise _unsupported("global_tokens with an array: give the number of first tokens, or an array to mask.dense")
    i, n = x.rows(None), _constant(mask.args[0])
    return op.Or(op.And(op.GreaterOrEqual(i, _constant(0)), op.Less(i, n)), op.Less(x.keys, n))


RULES: dict[str, Callable[[Mask, _Positions], Any]] = {
    "full": _full,
    "causal": lambda mask, x: op.LessOrEqual(x.keys, x.rows(mask.args[0])),
    "window": _window,
    "keys": _keys,
    "prefix": lambda mask, x: op.Less(x.keys, _value(mask.args[0])),
    "padding": lambda mask, x: _along(op.Cast(mask.args[0], to=ir.DataType.BOOL), mask.args[0]),
    "documents": _documents,
    "dense": _dense,
    "strided": lambda mask, x: op.Equal(
        op.Mod(op.Sub(x.rows(None), x.keys), _constant(mask.args[0])), _constant(mask.args[1])
    ),
    "dilated": _dilated,
    "chunked": lambda mask, x: op.Equal(_multiple(x.rows(None), mask.args[0]), _multiple(x.keys, mask.args[0])),
    "global_tokens": _global,
}


def _pairs(mask: Mask, x: _Positions) -> Any:
    # booleans that broadcast to [B, Hq, Tq, Tk]
    if mask.kind == "not":
        return op.Not(_pairs(mask.children[0], x))
    if mask.kind in ("and", "or"):
        x = x.with_stops(mask) if mask.kind == "and" else x
        return reduce(op.And if mask.kind == "and" else op.Or, map(partial(_pairs, x=x), mask.children))
    rule = RULES.get(mask.kind)
    if rule is None:
        raise _unsupported(
            f"masks of {mask.kind}: give mask.dense the booleans of mask.evaluate, or use {', '.join(RULES)}"
        )
    return rule(mask, x)
