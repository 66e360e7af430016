"""Compile Metal kernels as C++: the few keywords that C++ lacks are replaced, the rest is unchanged.

`__init__.py` handles arrays and launches.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import re
import shutil
import subprocess
import tempfile
from functools import cache
from pathlib import Path

from ...backends.metal.texts import signature, without_comments

INCLUDE = Path(__file__).parent / "include"
# the value in the emulator of each attribute of a kernel's parameter
ATTRIBUTES = {
    "thread_position_in_grid": "uint3(g.index.x * g.full.x + lane.position.x, g.index.y * g.full.y + lane.position.y, "
    "g.index.z * g.full.z + lane.position.z)",
    "threadgroup_position_in_grid": "uint3(g.index.x, g.index.y, g.index.z)",
    "threadgroups_per_grid": "uint3(g.groups.x, g.groups.y, g.groups.z)",
    "threads_per_grid": "uint3(g.grid.x, g.grid.y, g.grid.z)",
    "threads_per_threadgroup": "uint3(g.size.x, g.size.y, g.size.z)",
    "thread_position_in_threadgroup": "uint3(lane.position.x, lane.position.y, lane.position.z)",
    "thread_index_in_threadgroup": "lane.number",
    "thread_index_in_simdgroup": "lane.lane",
    "simdgroup_index_in_threadgroup": "lane.simdgroup->index",
    "simdgroups_per_threadgroup": "uint(g.simdgroups.size())",
    "threads_per_simdgroup": "uint(emulator::WIDTH)",
}
# a threadgroup array; for pointers and references `threadgroup` is defined as empty
ARRAY = r"(?<=[;{}\n])(\s*)threadgroup\s+([\w:]+(?:<[^<>;]*>)?)\s+(\w+)\s*((?:\[[^\];]*\]\s*)+);"
WORDS = ("-std=c++17", "-march=native", "-ffp-contract=off", "-w")
SANITIZERS = {
    "": (),
    "process": ("-O1",),
    # -O0, because optimising these checks takes many times as long as the run
    "address": ("-fsanitize=address,undefined", "-fno-sanitize-recover=undefined", "-g1", "-O0"),
    "thread": ("-fsanitize=thread", "-g", "-O1"),
}


def as_cpp(text: str) -> str:
    """C++ with a function `emulate` that launches the kernel of the text."""
    kernel = signature(text)
    body = re.sub(r"#include\s*<metal_\w+>|using\s+namespace\s+metal\s*;", "", without_comments(text))
    body = re.sub(r"\bkernel\s+void\b|\[\[kernel\]\]\s*void\b", "void", body)
    body = re.sub(r"\[\[[^\]]*\]\]", "", body)
    body = re.sub(ARRAY, r"\1SHARED(\2, \3, \4);", body)
    number, arguments = 0, []
    for p in kernel.parameters:
        if p.buffer:
            kind, of = p.type.rstrip("&* "), "*" if p.type.endswith("&") else ""
            arguments.append(f"{of}static_cast<{kind}*>(emulated_buffers[{number}])")
            number += 1
        elif p.attribute in ATTRIBUTES:
            arguments.append(ATTRIBUTES[p.attribute])
        else:
            raise ValueError(f"attribute {p.attribute} of {kernel.name} is unknown; known: {', '.join(ATTRIBUTES)}")
    # inside the namespace, so that C functions of the same names are hidden
    return f"""#include "metal_stdlib.hpp"
namespace metal {{
#line 1 "{kernel.name}.metal"
{body}
#line 1 "launch"
}}
using namespace metal;
static void** emulated_buffers;
static void emulated() {{
  emulator::Threadgroup& g = *emulator::running;
  emulator::Lane& lane = *g.current;
  (void)lane;
  metal::{kernel.name}({", ".join(arguments)});
}}
extern "C" int emulate(void** given, const unsigned* sizes, int order, unsigned long seed, unsigned long memory,
                       char* error, unsigned long size, emulator::Counts* counts) {{
  emulated_buffers = given;
  emulator::Launch launch;
  launch.body = emulated;
  launch.grid = {{sizes[0], sizes[1], sizes[2]}};
  launch.threads = {{sizes[3], sizes[4], sizes[5]}};
  launch.order = static_cast<emulator::Order>(order);
  launch.seed = seed;
  launch.memory = memory;
  return emulator::run(launch, error, size, counts);
}}
"""


def compiler() -> str:
    """A C++ compiler with 16-bit floats; raises RuntimeError if there is none."""
    for name in ("g++", "clang++", "c++"):
        if shutil.which(name):
            return name
    raise RuntimeError("the Metal emulator needs a C++ compiler, g++ 12 or clang++ 16: none is on the path")


@cache
def _headers() -> str:
    return "".join(path.read_text(encoding="utf-8") for path in sorted(INCLUDE.iterdir()))


def folder() -> Path:
    """The folder of compiled kernels, which only this user can access."""
    path = Path(tempfile.gettempdir()) / f"saccade-metal-{os.getuid()}"
    path.mkdir(mode=0o700, exist_ok=True)
    if path.stat().st_uid != os.getuid():
        raise PermissionError(f"{path} belongs to another user: remove it, or set TMPDIR")
    return path


def compiled(text: str, sanitizer: str = "") -> Path:
    """The kernel as a library, or with a sanitizer as a program; equal texts are compiled once."""
    code = as_cpp(text)
    words = [*WORDS, *(SANITIZERS[sanitizer] if sanitizer else ("-O1", "-fPIC", "-shared"))]
    target = folder() / f"{_key(code, *words)}{'' if sanitizer else '.so'}"
    if not target.exists():
        place = _shared(tuple(word for word in words if word != "-shared"), bool(sanitizer))
        _compile([*words, f"-I{place}", f"-I{INCLUDE}", str(place / "emulator.o")], code, target)
    return target


def _key(*texts: str) -> str:
    return hashlib.sha256("\n".join([compiler(), _headers(), *texts]).encode()).hexdigest()[:24]


@cache
def _shared(words: tuple[str, ...], program: bool) -> Path:
    # compiled once, because these take more than half the time of a small kernel: the headers, which g++ uses
    # precompiled if they are next to the original path, and the functions of the emulator
    place = folder() / f"shared-{_key(*words, str(program))}"
    place.mkdir(exist_ok=True)
    headers, emulator = place / "metal_stdlib.hpp.gch", place / "emulator.o"
    if compiler() == "g++" and not headers.exists():
        _compile([*words, f"-I{INCLUDE}", "-x", "c++-header"], _read("metal_stdlib.hpp"), headers)
    if not emulator.exists():
        more = ("-DEMULATOR_PROGRAM",) if program else ()
        _compile([*words, *more, "-c", f"-I{INCLUDE}"], _read("emulator.cpp"), emulator)
    return place


def _read(name: str) -> str:
    return (INCLUDE / name).read_text(encoding="utf-8")


def _compile(words: list[str], code: str, target: Path) -> None:
    with tempfile.TemporaryDirectory(dir=folder()) as inside:
        source, out = Path(inside) / "kernel.cpp", Path(inside) / "out"
        source.write_text(code, encoding="utf-8")
        run = subprocess.run(
            [compiler(), *words, str(source), "-o", str(out)], capture_output=True, text=True, check=False
        )
        if run.returncode:
            raise RuntimeError(f"the Metal text does not compile:\n{run.stderr[:6000]}")
        out.replace(target)


class Counts(ctypes.Structure):
    """Counts of a launch: most threadgroup bytes, barriers, operations of SIMD-groups, 8 x 8 products."""

    _fields_ = [(name, ctypes.c_uint64) for name in ("bytes", "barriers", "exchanges", "products")]


@cache
def library(path: Path) -> ctypes.CDLL:
    """The loaded library of a compiled kernel."""
    return ctypes.CDLL(str(path))
