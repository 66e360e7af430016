"""Masks as text: `str(mask)` prints the constructors, and `parse` reads them back from a whitelist, without eval."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Callable
from contextlib import suppress
from difflib import get_close_matches
from functools import cache
from typing import Any

import numpy as np

from .algebra import Mask, is_array
from .contents import host
from .kinds import KINDS
from .syntax import wrong_syntax

# levels of nodes inside nodes that are read: every function that walks a mask calls itself a few times per level
DEEPEST = 64
# digits of an integer that is read; int64 has 19
_DIGITS = 40
_RANK = {"or": 0, "and": 1, "not": 2}
_SIGN = {"or": " | ", "and": " & "}
_CONSTRUCTORS = {kind.constructor.__name__: kind.constructor for kind in KINDS.values()}
# names in other libraries
_ELSEWHERE = {
    "bidirectional": "full()",
    "block_diagonal": "documents(cu_seqlens=...)",
    "local": "window(n, n)",
    "sliding_window": "window(n - 1, 0)",
}


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
        TypeError: text is not a str.
        ValueError: the text has anything else; the message names the column. Or masks are nested in more than 64
            levels.

    Examples:
        >>> mask.parse("causal & window(1023, 0)")
        causal() & window(1023, 0)
    """
    if not isinstance(text, str):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise TypeError(f"parse: text is {type(text).__name__}, expected a str such as 'causal & window(1023, 0)'")
    shown, text = text[:80], text.strip()
    try:
        tree = ast.parse(text, mode="eval")
    except SyntaxError as error:
        raise ValueError(f"cannot read the mask {shown!r}: {wrong_syntax(text, error)}") from None
    except ValueError:
        raise ValueError(f"cannot read the mask {shown!r}: it has characters that are not text: remove them") from None
    except (RecursionError, MemoryError):
        raise ValueError(f"the mask {shown!r} is nested too deeply") from None
    try:
        mask = _mask(tree.body, text)
        depth = _depth(mask)
    except RecursionError:
        raise ValueError(f"the mask {shown!r} is nested too deeply") from None
    except TypeError as error:
        raise ValueError(f"cannot read the mask {shown!r}: {error}") from None
    if depth > DEEPEST:
        raise ValueError(f"the mask {shown!r} has {depth} levels of masks inside masks, expected at most {DEEPEST}")
    return mask


def _depth(mask: Mask) -> int:
    return 1 + max(map(_depth, mask.children), default=0)


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
    # a chain is a tree that is as deep as the chain is long
    others: list[tuple[ast.operator, ast.expr]] = []
    while isinstance(node, ast.BinOp) and isinstance(node.op, (ast.BitAnd, ast.BitOr)):
        others.append((node.op, node.right))
        node = node.left
    if others:
        mask = _mask(node, text)
        for sign, other in reversed(others):
            right = _mask(other, text)
            mask = mask & right if isinstance(sign, ast.BitAnd) else mask | right
        return mask
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Invert):
        return ~_mask(node.operand, text)
    if isinstance(node, ast.Name):
        return _call(node.id, [], {}, node, text)
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
        named = {k.arg: k.value for k in node.keywords if k.arg is not None}
        if len(named) == len(node.keywords):
            return _call(node.func.id, node.args, named, node, text)
    raise _unreadable(node, text, "a mask constructor, &, | or ~")


def instead(name: str) -> str:
    """What to write for a name that no mask has."""
    near = get_close_matches(name, _CONSTRUCTORS, 1)
    written = _ELSEWHERE.get(name) or (f"{near[0]}()" if near else "")
    return f"{f'did you mean {written}? ' if written else ''}known are {', '.join(_CONSTRUCTORS)}"


def _call(name: str, args: list[ast.expr], named: dict[str, ast.expr], node: ast.expr, text: str) -> Mask:
    if name not in _CONSTRUCTORS:
        raise ValueError(f"unknown mask {name[:60]!r} in {text[:80]!r}: {instead(name)}")
    function = _CONSTRUCTORS[name]
    most, names, required = _parameters(function)
    if missing := [one for one in required[len(args) :] if one not in named]:
        raise ValueError(f"{name} in {text[:80]!r} needs {' and '.join(missing)}: write {name}({', '.join(required)})")
    if len(args) > most or not set(named) <= names:
        extra = ", ".join(sorted(set(named) - names))[:60] or f"{len(args)} arguments"
        raise ValueError(
            f"{name} in {text[:80]!r} does not take {extra}; it takes {', '.join(sorted(names)) or 'none'}"
        )
    values = [_value(a, text) for a in args]
    return function(*values, **{k: _value(v, text) for k, v in named.items()})


@cache
def _parameters(function: Callable[..., Mask]) -> tuple[int, frozenset[str], list[str]]:
    # of a constructor: the number of positional arguments, the names of all, and of those without a default
    parameters = inspect.signature(function).parameters
    positional = [p for p in parameters.values() if p.kind is p.POSITIONAL_OR_KEYWORD]
    return len(positional), frozenset(parameters), [p.name for p in positional if p.default is p.empty]


def _value(node: ast.expr, text: str) -> Any:
    if isinstance(node, ast.Constant) and (node.value is None or isinstance(node.value, int)):
        if node.value is not None and abs(node.value) >= 10**_DIGITS:
            raise _unreadable(node, text, f"an integer of at most {_DIGITS} digits")
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
        if all(type(n) is int and n >= 0 for n in shape) and 0 in shape and not node.keywords:
            with suppress(ValueError):
                # NumPy refuses sizes whose product, without the 0, is too large
                return np.empty(shape, np.int64)
        raise _unreadable(node, text, "empty(shape) of an array without elements")
    return _mask(node, text)


def _unreadable(node: ast.expr, text: str, expected: str) -> ValueError:
    part = ast.get_source_segment(text, node) or type(node).__name__
    # ast counts bytes of the node's line
    before = text.encode().split(b"\n")[: node.lineno]
    before[-1] = before[-1][: node.col_offset]
    column = len(b"\n".join(before).decode()) + 1
    return ValueError(f"cannot read {part[:60]!r} at column {column} of the mask; expected {expected}")
