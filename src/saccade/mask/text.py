"""Masks as text: `str(mask)` prints the constructors, and `parse` reads them back from a whitelist, without eval."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np

from .algebra import Mask, is_array
from .contents import host
from .kinds import KINDS

_RANK = {"or": 0, "and": 1, "not": 2}
_SIGN = {"or": " | ", "and": " & "}
_CONSTRUCTORS = {kind.constructor.__name__: kind.constructor for kind in KINDS.values()}


def to_text(mask: Mask) -> str:
    """The mask as calls of constructors with whole arrays, which `parse` reads back. Reads arrays on a device."""
    return _print(mask, numbers)


def brief(mask: Mask) -> str:
    """The mask for messages: arrays are shown by dtype and shape."""
    return _print(mask, lambda array: f"<{array.dtype}{list(array.shape)}>")


def parse(text: str) -> Mask:
    """The mask of a text, such as `"causal & window(1023, 0)"`; the inverse of `str(mask)`.

    Args:
        text: calls of constructors or their bare names, `&`, `|`, `~`, parentheses, integers, None, nested lists, and
            `empty(0, 5)` for an array of that shape without elements.

    Raises:
        ValueError: the text has anything else; the message names the column.

    Examples:
        >>> mask.parse("causal & window(1023, 0)")
        causal() & window(1023, 0)
    """
    try:
        tree = ast.parse(text.strip(), mode="eval")
    except SyntaxError as error:
        raise ValueError(f"cannot read the mask {text[:80]!r}: {error.msg} at column {error.offset}") from None
    except (ValueError, RecursionError, MemoryError) as error:
        raise ValueError(f"cannot read the mask {text[:80]!r}: {error}") from None
    try:
        return _mask(tree.body, text)
    except RecursionError:
        raise ValueError(f"the mask {text[:80]!r} is nested too deeply") from None
    except TypeError as error:
        raise ValueError(f"cannot read the mask {text[:80]!r}: {error}") from None


def _print(mask: Mask, of_array: Callable[[Any], str]) -> str:
    if mask.kind == "not":
        return "~" + _inside(mask.children[0], 2, of_array)
    if mask.kind in _SIGN:
        return _SIGN[mask.kind].join(_inside(c, _RANK[mask.kind] + 1, of_array) for c in mask.children)

    def write(part: Any) -> str:
        return _print(part, of_array) if isinstance(part, Mask) else of_array(part) if is_array(part) else str(part)

    kind = KINDS[mask.kind]
    return f"{kind.constructor.__name__}({', '.join(kind.text(mask, write))})"


def _inside(mask: Mask, rank: int, of_array: Callable[[Any], str]) -> str:
    text = _print(mask, of_array)
    return f"({text})" if _RANK.get(mask.kind, 3) < rank else text


def numbers(array: Any) -> str:
    """An array as text that `parse` reads back. Reads the array."""
    try:
        array = host(array)
    except RuntimeError:
        # a fake tensor, while torch traces
        return f"<{array.dtype}{list(array.shape)}>"
    if not all(array.shape[:-1]):
        # a list of lists would lose the shape
        return f"empty({', '.join(map(str, array.shape))})"
    return str((array.astype(np.uint8) if array.dtype == np.bool_ else array).tolist())


def _mask(node: ast.expr, text: str) -> Mask:
    if isinstance(node, ast.BinOp) and isinstance(node.op, (ast.BitAnd, ast.BitOr)):
        left, right = _mask(node.left, text), _mask(node.right, text)
        return left & right if isinstance(node.op, ast.BitAnd) else left | right
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Invert):
        return ~_mask(node.operand, text)
    if isinstance(node, ast.Name):
        return _call(node.id, [], {}, node, text)
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
        named = {k.arg: k.value for k in node.keywords if k.arg is not None}
        if len(named) == len(node.keywords):
            return _call(node.func.id, node.args, named, node, text)
    raise _unreadable(node, text, "a mask constructor, &, | or ~")


def _call(name: str, args: list[ast.expr], named: dict[str, ast.expr], node: ast.expr, text: str) -> Mask:
    if name not in _CONSTRUCTORS:
        raise ValueError(f"unknown mask {name!r} in {text[:80]!r}; known are {', '.join(_CONSTRUCTORS)}")
    function = _CONSTRUCTORS[name]
    most, names = _parameters(function)
    if len(args) > most or not set(named) <= names:
        extra = ", ".join(sorted(set(named) - names)) or f"{len(args)} arguments"
        raise ValueError(
            f"{name} in {text[:80]!r} does not take {extra}; it takes {', '.join(sorted(names)) or 'none'}"
        )
    values = [_value(a, text) for a in args]
    return function(*values, **{k: _value(v, text) for k, v in named.items()})


@cache
def _parameters(function: Callable[..., Mask]) -> tuple[int, frozenset[str]]:
    # the number of positional arguments of a constructor, and the names of all arguments
    parameters = inspect.signature(function).parameters
    return sum(p.kind is p.POSITIONAL_OR_KEYWORD for p in parameters.values()), frozenset(parameters)


def _value(node: ast.expr, text: str) -> Any:
    if isinstance(node, ast.Constant) and (node.value is None or isinstance(node.value, int)):
        return node.value
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        value = _value(node.operand, text)
        if isinstance(value, int):
            return -value
    if isinstance(node, ast.List):
        return [_value(item, text) for item in node.elts]
    if isinstance(node, ast.Tuple):
        return tuple(_value(item, text) for item in node.elts)
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "empty":
        shape = [_value(n, text) for n in node.args]
        if shape and all(isinstance(n, int) and n >= 0 for n in shape) and 0 in shape and not node.keywords:
            return np.empty(shape, np.int64)
        raise _unreadable(node, text, "empty(shape) of an array without elements")
    return _mask(node, text)


def _unreadable(node: ast.expr, text: str, expected: str) -> ValueError:
    part = ast.get_source_segment(text.strip(), node) or type(node).__name__
    return ValueError(f"cannot read {part[:60]!r} at column {node.col_offset} of the mask; expected {expected}")
