"""A parser of the parts of WGSL that show what a kernel needs: constants, types, workgroup variables, bindings."""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Callable, Set
from dataclasses import dataclass, field
from typing import Any

_COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/", re.S)
_NAME = re.compile(r"\b[A-Za-z_]\w*")
_CONST = re.compile(r"\bconst\s+(\w+)\s*(?::\s*[^=;]+)?=\s*([^;]+);")
_ALIAS = re.compile(r"\balias\s+(\w+)\s*=\s*([^;]+);")
_STRUCT = re.compile(r"\bstruct\s+(\w+)\s*\{([^}]*)\}")
_MEMBER = re.compile(r"((?:@\w+\s*(?:\([^)]*\))?\s*)*)(\w+)\s*:\s*(.+)", re.S)
_WORKGROUP = re.compile(r"\bvar\s*<\s*workgroup\s*>\s*(\w+)\s*:\s*([^;]+);")
_BINDING = re.compile(
    r"@group\s*\(\s*(\d+)\s*\)\s*@binding\s*\(\s*(\d+)\s*\)\s*var\s*<\s*(\w+)\s*(?:,\s*(\w+)\s*)?>\s*(\w+)\s*:"
)
_FUNCTION = re.compile(r"((?:@\w+\s*(?:\([^)]*\))?\s*)*)\bfn\s+(\w+)\s*\(")
_SIZE = re.compile(r"@workgroup_size\s*\(([^)]*)\)")
_LITERAL = re.compile(r"\b(0x[0-9a-fA-F]+|\d+\.?\d*(?:[eE][-+]?\d+)?)([iufh]?)(?![\w.])")

_SCALARS = {"f32": 4, "i32": 4, "u32": 4, "bool": 4, "f16": 2}
_SHORT = {"f": "f32", "i": "i32", "u": "u32", "h": "f16"}
_OPERATORS: dict[type[ast.AST], Callable[..., Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Mod: operator.mod,
    ast.LShift: operator.lshift,
    ast.RShift: operator.rshift,
    ast.BitAnd: operator.and_,
    ast.BitOr: operator.or_,
    ast.USub: operator.neg,
    ast.Lt: operator.lt,
    ast.Gt: operator.gt,
    ast.LtE: operator.le,
    ast.GtE: operator.ge,
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
}
_CALLS: dict[str, Callable[..., Any]] = {
    "min": min,
    "max": max,
    "abs": abs,
    "u32": int,
    "i32": int,
    "f32": float,
    "select": lambda no, yes, which: yes if which else no,
}


@dataclass(frozen=True)
class Binding:
    """One resource: group, number, kind as a bind group layout names it, and the variable's name."""

    group: int
    number: int
    kind: str
    name: str


@dataclass
class Module:
    """The declarations of a text; types and constants are evaluated only when needed."""

    consts: dict[str, str] = field(default_factory=dict[str, str])
    aliases: dict[str, str] = field(default_factory=dict[str, str])
    structs: dict[str, list[tuple[str, str]]] = field(default_factory=dict[str, list[tuple[str, str]]])
    workgroup: dict[str, str] = field(default_factory=dict[str, str])
    resources: list[Binding] = field(default_factory=list[Binding])
    # name -> attributes, signature and body
    functions: dict[str, tuple[str, str]] = field(default_factory=dict[str, tuple[str, str]])
    enables: frozenset[str] = frozenset()

    def entries(self) -> list[str]:
        """Names of the entry points."""
        return [name for name, (attributes, _) in self.functions.items() if _SIZE.search(attributes)]

    def reached(self, entry: str) -> frozenset[str]:
        """Every name that the entry point uses, itself or through the functions that it calls."""
        if entry not in self.functions:
            raise ValueError(f"the text has no entry point {entry!r}; it has {', '.join(self.functions) or 'none'}")
        seen: set[str] = set()
        ahead = [entry]
        while ahead:
            function = ahead.pop()
            names = set(_NAME.findall(self.functions[function][1])) - seen
            seen |= names
            ahead += [name for name in names if name in self.functions]
        return frozenset(seen)

    def bindings(self, reached: Set[str]) -> tuple[str, ...]:
        """The kind of each binding of group 0, from 0 on; if two have the same number, that of the used one."""
        bindings = {r.number: r for r in sorted(self.resources, key=lambda r: r.name in reached)}
        if any(r.group for r in self.resources) or sorted(bindings) != list(range(len(bindings))):
            numbers = [(r.group, r.number) for r in self.resources]
            raise ValueError(f"bindings (group, number) are {numbers}; expected group 0, numbered from 0 without gaps")
        return tuple(bindings[number].kind for number in range(len(bindings)))

    def workgroup_size(self, entry: str) -> tuple[int, int, int]:
        """Invocations along x, y and z."""
        declared = _SIZE.search(self.functions[entry][0])
        if declared is None:
            raise ValueError(f"{entry} has no @workgroup_size: it is no entry point")
        sizes = [self.value(part) for part in declared[1].split(",") if part.strip()]
        x, y, z = (*sizes, 1, 1)[:3]
        return int(x), int(y), int(z)

    def features(self, reached: Set[str]) -> frozenset[str]:
        """The optional features that the text needs, under wgpu's names."""
        wanted: set[str] = set()
        if "f16" in self.enables:
            wanted.add("shader-f16")
        if "subgroups" in self.enables or any(name.startswith("subgroup") for name in reached):
            wanted.add("subgroup")
        return frozenset(wanted)

    def size(self, declared: str) -> int:
        """Bytes of a value of this type."""
        return self._layout(declared)[0]

    def value(self, expression: str) -> Any:
        """The value of a constant expression of integers and floats."""
        plain = _LITERAL.sub(r"\1", expression).replace("&&", " and ").replace("||", " or ").strip()
        plain = re.sub(r"\b(vec\d|array|f16)\b.*", r"\1", plain, flags=re.S)
        return self._evaluate(ast.parse(plain.replace("!=", " != "), mode="eval").body)

    def _evaluate(self, node: ast.AST) -> Any:
        match node:
            case ast.Constant():
                return node.value
            case ast.Name() if node.id in ("true", "false"):
                return node.id == "true"
            case ast.Name() if node.id in self.consts:
                return self.value(self.consts[node.id])
            case ast.BinOp(op=ast.Div()):
                left, right = self._evaluate(node.left), self._evaluate(node.right)
                return left // right if isinstance(left, int) and isinstance(right, int) else left / right
            case ast.BinOp():
                return _OPERATORS[type(node.op)](self._evaluate(node.left), self._evaluate(node.right))
            case ast.UnaryOp(op=ast.USub()):
                return -self._evaluate(node.operand)
            case ast.Compare(ops=[op], comparators=[right]):
                return _OPERATORS[type(op)](self._evaluate(node.left), self._evaluate(right))
            case ast.Call(func=ast.Name(id=name)) if name in _CALLS:
                return _CALLS[name](*map(self._evaluate, node.args))
            case _:
                raise ValueError(f"not a constant that can be read off the text: {ast.unparse(node)}")

    def _layout(self, declared: str) -> tuple[int, int]:
        """(size, alignment) in bytes."""
        kind, arguments = _split_type(declared)
        if kind in self.aliases:
            return self._layout(self.aliases[kind])
        if kind in self.structs:
            return self._struct_layout(self.structs[kind])
        if kind in _SCALARS:
            return _SCALARS[kind], _SCALARS[kind]
        if kind == "atomic":
            return 4, 4
        if kind == "array" and len(arguments) == 2:
            size, align = self._layout(arguments[0])
            return int(self.value(arguments[1])) * _up(size, align), align
        if shape := re.fullmatch(r"vec(\d)([fiuh]?)", kind):
            n, scalar = int(shape[1]), self._layout(_SHORT.get(shape[2]) or arguments[0])[0]
            return n * scalar, (2 if n == 2 else 4) * scalar
        if shape := re.fullmatch(r"mat(\d)x(\d)([fh]?)", kind):
            scalar = self._layout(_SHORT.get(shape[3]) or arguments[0])[0]
            rows = int(shape[2])
            align = (2 if rows == 2 else 4) * scalar
            return int(shape[1]) * _up(rows * scalar, align), align
        raise ValueError(f"the size of the type {declared!r} cannot be read off the text")

    def _struct_layout(self, members: list[tuple[str, str]]) -> tuple[int, int]:
        end, widest = 0, 1
        for attributes, declared in members:
            size, align = self._layout(declared)
            for word, value in re.findall(r"@(size|align)\s*\(([^)]*)\)", attributes):
                if word == "size":
                    size = int(self.value(value))
                else:
                    align = int(self.value(value))
            end = _up(end, align) + size
            widest = max(widest, align)
        return _up(end, widest), widest


def parse(text: str) -> Module:
    """The declarations of a text. Raises ValueError for override constants: sizes must be known without a device."""
    plain = _COMMENT.sub(" ", text)
    if re.search(r"\boverride\s+\w", plain):
        raise ValueError("the text has override constants; expected const, filled in by its template")
    module = Module()
    module.consts = dict(_CONST.findall(plain))
    module.aliases = dict(_ALIAS.findall(plain))
    module.workgroup = dict(_WORKGROUP.findall(plain))
    enabled = re.findall(r"^\s*enable\s+([^;]+);", plain, re.M)
    module.enables = frozenset(name.strip() for line in enabled for name in line.split(","))
    for name, members in _STRUCT.findall(plain):
        split = [_MEMBER.fullmatch(member.strip()) for member in _split_commas(members)]
        module.structs[name] = [(m[1], m[3]) for m in split if m is not None]
    for group, number, space, access, name in _BINDING.findall(plain):
        kind = "uniform" if space == "uniform" else "storage" if access == "read_write" else "read-only-storage"
        module.resources.append(Binding(int(group), int(number), kind, name))
    for function in _FUNCTION.finditer(plain):
        module.functions[function[2]] = function[1], _to_closing_brace(plain, function.end())
    return module


def _to_closing_brace(text: str, start: int) -> str:
    depth = 0
    for brace in re.finditer(r"[{}]", text[start:]):
        depth += 1 if brace[0] == "{" else -1
        if not depth:
            return text[start : start + brace.end()]
    raise ValueError("a brace of the text is never closed")


def _split_type(declared: str) -> tuple[str, list[str]]:
    """vec2<f32> -> vec2, [f32]; the last > closes the first <."""
    kind, _, rest = declared.strip().partition("<")
    return kind.strip(), _split_commas(rest.rstrip().removesuffix(">")) if rest else []


def _split_commas(text: str) -> list[str]:
    """The text split at commas that are not inside brackets."""
    pieces, depth = [""], 0
    for character in text:
        depth += (character in "<([") - (character in ">)]")
        if character == "," and not depth:
            pieces.append("")
        else:
            pieces[-1] += character
    return [piece.strip() for piece in pieces if piece.strip()]


def _up(n: int, multiple: int) -> int:
    return -(-n // multiple) * multiple
