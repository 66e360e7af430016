"""Kernels as Metal text: puts constants first, resolves `#include "..."` of this folder, and parses the signature.

One text serves three hosts. MLX gets the header and body and composes the signature itself; torch on MPS and the
emulator compile the text unchanged.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache, lru_cache
from pathlib import Path
from typing import NamedTuple

from ..plan_encoding import struct

KERNELS = Path(__file__).parent / "kernels"
NAMES = (
    "single_head",
    "forward",
    "combine",
    "delta",
    "gradients",
    "restate",
    "bias_gradient",
    "linear_states",
    "linear_outputs",
    "linear_delta",
)
OPENING = "#include <metal_stdlib>\n#include <metal_simdgroup_matrix>\nusing namespace metal;\n\n"
# types of numbers in memory, by the names of their dtypes
TYPES = {"float32": "float", "float16": "half", "bfloat16": "bfloat"}
# the same, and codes
STORED = {**TYPES, "uint8": "uchar"}


class Parameter(NamedTuple):
    """One parameter of a kernel; attribute is the text inside [[ ]]."""

    name: str
    type: str
    attribute: str

    @property
    def buffer(self) -> bool:
        """Whether an array is bound to it."""
        return self.attribute.startswith("buffer(")

    @property
    def written(self) -> bool:
        """Whether it is an output."""
        return self.buffer and self.type.startswith("device ") and " const " not in f" {self.type} "


class Signature(NamedTuple):
    """A kernel's name, its parameters in order, and where its head starts and ends in the text."""

    name: str
    parameters: tuple[Parameter, ...]
    begin: int
    end: int


@dataclass(frozen=True)
class Kernel:
    """A kernel with its constants: the whole text, and the parts that MLX needs.

    name is unique for the text. inputs, outputs: names of its buffers. body: the text between the kernel's braces.
    """

    name: str
    text: str
    header: str
    body: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]


def signature(text: str) -> Signature:
    """The one kernel of a text. Raises ValueError for a text without a kernel, or a parameter without an attribute."""
    plain = without_comments(text)
    match = re.search(r"(?:\bkernel\s+|\[\[kernel\]\]\s*)void\s+(\w+)\s*\(", plain)
    if match is None:
        raise ValueError("the text has no kernel: expected `kernel void name(...)`")
    depth, end = 1, match.end()
    while depth:
        depth += {"(": 1, ")": -1}.get(plain[end], 0)
        end += 1
    parameters: list[Parameter] = []
    for one in re.split(r",(?![^\[]*\]\])", plain[match.end() : end - 1]):
        parts = re.fullmatch(r"\s*(.*?)(\w+)\s*\[\[(.*?)\]\]\s*", one, re.S)
        if parts is None:
            line = " ".join(one.split())
            raise ValueError(f"parameter {line!r} of {match[1]} has no attribute, such as [[buffer(0)]]")
        parameters.append(Parameter(parts[2], " ".join(parts[1].split()), parts[3].strip()))
    return Signature(match[1], tuple(parameters), match.start(), end)


def without_comments(text: str) -> str:
    """The text with comments replaced by blanks, so that every other character keeps its place."""
    return re.sub(r"/\*.*?\*/|//[^\n]*", lambda m: re.sub(r"[^\n]", " ", m[0]), text, flags=re.S)


@cache
def source(name: str) -> str:
    """The text of kernels/<name>.metal unchanged; "dims" is the generated `struct Dims`."""
    return struct("metal") if name == "dims" else (KERNELS / f"{name}.metal").read_text(encoding="utf-8")


def kernel(name: str, constants: Mapping[str, object]) -> Kernel:
    """The kernel of that name with its constants: bools, ints, and names of dtypes, which become types.

    Raises ValueError for an unknown name.
    """
    if name not in NAMES:
        raise ValueError(f"kernel is {name!r}; expected one of {', '.join(NAMES)}")
    return _kernel(name, tuple(sorted(constants.items())))


@lru_cache(maxsize=512)
def _kernel(name: str, constants: tuple[tuple[str, object], ...]) -> Kernel:
    lines = [_constant(key, value) for key, value in constants]
    text = OPENING + "\n".join(lines) + "\n\n" + _joined(name)
    declared = signature(text)
    named = "_".join([name, *(str(value) if type(value) is not bool else "ft"[value] for _, value in constants)])
    begin, end = text.index("{", declared.end), text.rindex("}")
    inputs = tuple(p.name for p in declared.parameters if p.buffer and not p.written)
    outputs = tuple(p.name for p in declared.parameters if p.written)
    header = text[: declared.begin].removeprefix(OPENING)
    return Kernel(named, text, header, text[begin + 1 : end], inputs, outputs)


def _constant(name: str, value: object) -> str:
    if isinstance(value, str):
        return f"typedef {STORED[value]} {name};"
    if isinstance(value, bool):
        return f"constant constexpr bool {name} = {str(value).lower()};"
    return f"constant constexpr int {name} = {value};"


def _joined(name: str) -> str:
    return re.sub(r'^#include "(\w+)\.metal"\n', lambda m: _joined(m[1]) + "\n", source(name), flags=re.M)
