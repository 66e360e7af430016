"""Metal kernels as C++: the text's few words that C++ lacks are rewritten, the rest is compiled as it stands.

Not responsible for arrays and launches (__init__.py).
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
# what each attribute of a kernel's parameter is in the emulator
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
WORDS = ("-std=c++17", "-march=native", "-ffp-contract=off", "-w")
SANITIZERS = {
    "": (),
    "process": ("-O1",),
    "address": ("-fsanitize=address,undefined", "-fno-sanitize-recover=undefined", "-g", "-O1"),
    "thread": ("-fsanitize=thread", "-g", "-O1"),
}


def as_cpp(text: str) -> str:
    """C++ with a function `emulate` that launches the text's kernel."""
    kernel = signature(text)
    body = re.sub(r"#include\s*<metal_\w+>|using\s+namespace\s+metal\s*;", "", without_comments(text))
    body = re.sub(r"\bkernel\s+void\b|\[\[kernel\]\]\s*void\b", "void", body)
    body = re.sub(r"\[\[[^\]]*\]\]", "", body)
    # a threadgroup array; pointers and references are left to the empty word
    array = r"(?<=[;{}\n])(\s*)threadgroup\s+([\w:]+(?:<[^<>;]*>)?)\s+(\w+)\s*((?:\[[^\];]*\]\s*)+);"
    body = re.sub(array, r"\1SHARED(\2, \3, \4);", body)
    number, arguments = 0, []
    for p in kernel.parameters:
        if p.buffer:
            kind, of = p.type.rstrip("&* "), "*" if p.type.endswith("&") else ""
            arguments.append(f"{of}static_cast<{kind}*>(buffers[{number}])")
            number += 1
        elif p.attribute in ATTRIBUTES:
            arguments.append(ATTRIBUTES[p.attribute])
        else:
            raise ValueError(f"attribute {p.attribute} of {kernel.name} is unknown; known: {', '.join(ATTRIBUTES)}")
    # inside the namespace, so that C's functions of the same names stay out of sight
    return f"""#include "metal_stdlib.hpp"
namespace metal {{
#line 1 "{kernel.name}.metal"
{body}
#line 1 "launch"
}}
using namespace metal;
extern "C" int emulate(void** buffers, const unsigned* sizes, int order, unsigned long seed, unsigned long memory,
                       char* error, unsigned long size, emulator::Counts* counts) {{
  emulator::Launch launch;
  launch.body = [=] {{
    emulator::Threadgroup& g = *emulator::running;
    emulator::Lane& lane = *g.current;
    (void)lane;
    metal::{kernel.name}({", ".join(arguments)});
  }};
  launch.grid = {{sizes[0], sizes[1], sizes[2]}};
  launch.threads = {{sizes[3], sizes[4], sizes[5]}};
  launch.order = static_cast<emulator::Order>(order);
  launch.seed = seed;
  launch.memory = memory;
  return emulator::run(launch, error, size, counts);
}}
"""


def compiler() -> str:
    """A C++ compiler that has 16-bit floats; RuntimeError where there is none."""
    for name in ("g++", "clang++", "c++"):
        if shutil.which(name):
            return name
    raise RuntimeError("the Metal emulator needs a C++ compiler, g++ 12 or clang++ 16: none is on the path")


@cache
def _headers() -> str:
    return "".join(path.read_text(encoding="utf-8") for path in sorted(INCLUDE.iterdir()))


def folder() -> Path:
    """Where compiled kernels are kept, this user's alone."""
    path = Path(tempfile.gettempdir()) / f"saccade-metal-{os.getuid()}"
    path.mkdir(mode=0o700, exist_ok=True)
    if path.stat().st_uid != os.getuid():
        raise PermissionError(f"{path} belongs to another user: remove it, or set TMPDIR")
    return path


def compiled(text: str, sanitizer: str = "") -> Path:
    """The kernel as a library, or with a sanitizer as a program of its own; compiled once for equal text."""
    code = as_cpp(text) + (MAIN if sanitizer else "")
    words = [*WORDS, *(SANITIZERS[sanitizer] if sanitizer else ("-O1", "-fPIC", "-shared"))]
    made = folder() / f"{_key(code, *words)}{'' if sanitizer else '.so'}"
    if not made.exists():
        places = [INCLUDE] if sanitizer else [_headers_once(), INCLUDE]
        _compile([*words, *(f"-I{place}" for place in places)], code, made)
    return made


def _key(*texts: str) -> str:
    return hashlib.sha256("\n".join([compiler(), _headers(), *texts]).encode()).hexdigest()[:24]


def _headers_once() -> Path:
    # half of a small kernel's time goes into the headers; g++ takes them compiled where they lie beside its path
    place = folder() / f"headers-{_key()}"
    place.mkdir(exist_ok=True)
    made = place / "metal_stdlib.hpp.gch"
    if compiler() == "g++" and not made.exists():
        text = (INCLUDE / "metal_stdlib.hpp").read_text(encoding="utf-8")
        _compile([*WORDS, "-O1", "-fPIC", f"-I{INCLUDE}", "-x", "c++-header"], text, made)
    return place


def _compile(words: list[str], code: str, made: Path) -> None:
    with tempfile.TemporaryDirectory(dir=folder()) as inside:
        source, out = Path(inside) / "kernel.cpp", Path(inside) / "out"
        source.write_text(code, encoding="utf-8")
        run = subprocess.run(
            [compiler(), *words, str(source), "-o", str(out)], capture_output=True, text=True, check=False
        )
        if run.returncode:
            raise RuntimeError(f"the Metal text does not compile:\n{run.stderr[:6000]}")
        out.replace(made)


class Counts(ctypes.Structure):
    """What a launch did: the most threadgroup bytes, barriers, operations of SIMD-groups, 8 x 8 products."""

    _fields_ = [(name, ctypes.c_uint64) for name in ("bytes", "barriers", "exchanges", "products")]


@cache
def library(path: Path) -> ctypes.CDLL:
    """The loaded library of a compiled kernel."""
    return ctypes.CDLL(str(path))


# arrays come and go through files: a sanitizer wants a process of its own. Without one NaN lies around every array
MAIN = r"""
#if defined(EMULATOR_ADDRESS) || defined(EMULATOR_THREAD)
constexpr size_t MARGIN = 0;
#else
constexpr size_t MARGIN = 4096;
#endif
int main(int, char** names) {
  FILE* file = fopen(names[1], "rb");
  int64_t head[10];
  if (!file || fread(head, 8, 10, file) != 10) return 9;
  std::vector<int64_t> sizes(head[0]);
  if (fread(sizes.data(), 8, sizes.size(), file) != sizes.size()) return 9;
  std::vector<void*> buffers;
  for (int64_t n : sizes) {
    char* whole = static_cast<char*>(malloc(n + 2 * MARGIN));
    memset(whole, emulator::POISON, MARGIN);
    memset(whole + MARGIN + n, emulator::POISON, MARGIN);
    buffers.push_back(whole + MARGIN);
    if (fread(buffers.back(), 1, n, file) != size_t(n)) return 9;
  }
  fclose(file);
  unsigned shape[6];
  for (int i = 0; i < 6; i++) shape[i] = unsigned(head[1 + i]);
  char error[320] = "";
  emulator::Counts counts{};
  int bad = emulate(buffers.data(), shape, int(head[7]), head[8], head[9], error, sizeof error, &counts);
  for (size_t i = 0; i < sizes.size() && !bad; i++) {
    const char* own = static_cast<char*>(buffers[i]);
    const char poison = char(emulator::POISON);
    for (size_t n = 0; n < MARGIN; n++) bad |= own[-1 - long(n)] != poison || own[sizes[i] + n] != poison;
    if (bad) snprintf(error, sizeof error, "the kernel wrote outside its array %d", int(i));
  }
  if (bad) fprintf(stderr, "emulator: %s\n", error);
  file = fopen(names[2], "wb");
  if (!file) return 9;
  fwrite(&counts, sizeof counts, 1, file);
  for (size_t i = 0; i < sizes.size(); i++) fwrite(buffers[i], 1, sizes[i], file);
  fclose(file);
  return bad;
}
"""
