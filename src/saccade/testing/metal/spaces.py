"""Check Metal texts with clang's address spaces: a pointer of one space never becomes one of another.

The emulator runs a kernel as C++, which has a single address space. Here a text is only checked: device, constant and
threadgroup are address spaces, and variables without one of these words are in the thread's.
"""

from __future__ import annotations

import re
from functools import cache
from typing import Any

from ...backends.metal.texts import without_comments
from .build import ARRAY, INCLUDE

WORDS = ("-x", "c++", "-std=c++17", "-nostdinc", "-ferror-limit=0", "-Wno-everything")


def diagnostics(text: str) -> list[str]:
    """All errors that clang finds in a Metal text, with their lines; none if pointers stay in their spaces.

    text: a complete source, a kernel file with its constants or the text that MLX composes. Raises RuntimeError without
    the package libclang.
    """
    clang = _clang()
    source = f'#include "declared.hpp"\nusing namespace metal;\n#line 1 "kernel.metal"\n{as_checked(text)}'
    unit = clang.Index.create().parse(
        "kernel.cpp", args=[*WORDS, f"-I{INCLUDE}"], unsaved_files=[("kernel.cpp", source)]
    )
    return [f"line {d.location.line}: {d.spelling}" for d in unit.diagnostics if d.severity >= clang.Diagnostic.Error]


def as_checked(text: str) -> str:
    """The text without Metal's headers and attributes, and with threadgroup arrays as static variables."""
    body = re.sub(r"#include\s*<metal_\w+>|using\s+namespace\s+metal\s*;", "", without_comments(text))
    body = re.sub(r"\[\[[^\]]*\]\]", "", re.sub(r"\bkernel\s+void\b", "void", body))
    return re.sub(ARRAY, r"\1static threadgroup \2 \3\4;", body)


@cache
def _clang() -> Any:
    try:
        from clang import cindex
    except ImportError as error:
        raise RuntimeError("the check of address spaces needs the package libclang: pip install libclang") from error
    return cindex
