"""What is wrong with the text of a mask that cannot be read, and at which column. Columns count from 1."""

from __future__ import annotations

import re

_CLOSING = {"(": ")", "[": "]", "{": "}"}
_AFTER = re.compile(r"([&|~])\s*(?:$|[)\],])")
_BEFORE = re.compile(r"(?:^|[(\[,&|~])\s*([&|])")
# from the start of a word: in a long one, a search from each letter would take a time that grows with its square
_VALUE = re.compile(r"(\b\w+\s*=)\s*[,)]")
_NEXT = re.compile(r"[\w)\]]\s+(?=[\w(\[~])")


def wrong_syntax(text: str, error: SyntaxError) -> str:
    """The reason why Python's parser refuses a text, in words about masks."""
    if not text:
        return "it is empty: write full() for a mask that allows every key"
    if "Exceeds the limit" in error.msg:
        return "it has an integer of too many digits: use a smaller one"
    if "nested" in error.msg:
        return "it is nested too deeply: use fewer parentheses"
    if wrong := _bracket(text):
        return wrong
    if at := _AFTER.search(text):
        return f"a mask is missing after {at[1]!r} at column {at.start(1) + 1}: write one, or remove the sign"
    if at := _BEFORE.search(text):
        return f"a mask is missing before {at[1]!r} at column {at.start(1) + 1}: write one, or remove the sign"
    if at := _VALUE.search(text):
        return f"a value is missing after {at[1]!r} at column {at.start(1) + 1}: write one"
    if at := _NEXT.search(text):
        return f"a sign is missing before {text[at.end() :][:30]!r} at column {at.end() + 1}: write &, | or a comma"
    column = min(max(error.offset or 1, 1), len(text))
    rest = text[column - 1 :][:30]
    return f"{rest!r} at column {column} is no part of a mask; expected constructors such as causal(), and &, | or ~"


def _bracket(text: str) -> str:
    # the first bracket that closes nothing, or that is never closed
    opened: list[tuple[str, int]] = []
    for column, sign in enumerate(text, 1):
        if sign in _CLOSING:
            opened.append((sign, column))
        elif sign in _CLOSING.values():
            if not opened or _CLOSING[opened[-1][0]] != sign:
                return f"{sign!r} at column {column} closes no bracket: remove it, or open one before"
            opened.pop()
    if not opened:
        return ""
    sign, column = opened[-1]
    return f"{sign!r} at column {column} is never closed: add {_CLOSING[sign]!r}"
