"""What a compiled kernel takes of a chip, and whether one warp may write what another has still to read."""

from __future__ import annotations

import re
import subprocess
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

import triton

DUMP = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
# operations whose result points into the array of their first pointer
MOVED = r"(%[\w#]+) = (?:tt\.(?:addptr|splat|broadcast|expand_dims|reshape|trans)|ttg\.convert_layout) (.*)"
READ = r"tt\.load (%[\w#]+)|ttg\.async_copy_global_to_local (%[\w#]+)"
BARRIERS = ("gpu.barrier", "ttg.local_barrier", "ttg.barrier")


def unordered(ttgir: str) -> list[str]:
    """Arguments that are read by other pointers than those by which they are written later, without a barrier between.

    By the same pointers every thread reads what it writes itself. Others have another layout: the compiler reads small
    arrays again for each layout that it needs.
    """
    arrays = {name: name for name in re.findall(r"(%\w+): !tt\.ptr", ttgir)}
    reads: dict[str, list[tuple[int, str]]] = {}
    barriers, found = list[int](), list[str]()
    for line, text in enumerate(ttgir.splitlines()):
        if moved := re.search(MOVED, text):
            first = next((x for x in re.findall(r"%[\w#]+", moved[2]) if x in arrays), None)
            if first:
                arrays[moved[1]] = arrays[first]
        for pair in re.findall(r"(%\w+) = (%[\w#]+)", text.partition("iter_args(")[2]):
            if pair[1] in arrays:
                arrays[pair[0]] = arrays[pair[1]]
        if (read := re.search(READ, text)) and (pointer := read[1] or read[2]) in arrays:
            reads.setdefault(arrays[pointer], []).append((line, pointer))
        if any(word in text for word in BARRIERS):
            barriers.append(line)
        if (written := re.search(r"tt\.store (%[\w#]+)", text)) and (array := arrays.get(written[1])):
            before = [at for at, pointer in reads.get(array, []) if pointer != written[1]]
            if before and not any(max(before) < barrier < line for barrier in barriers):
                found.append(array)
    return found


class Taken(NamedTuple):
    """Registers per thread, bytes of shared memory, bytes spilled per thread."""

    registers: int
    shared: int
    spilled: int


def taken(kernel: Any) -> Taken:
    """The resources of a compiled kernel, read from its machine code; it has no `unordered` arrays."""
    assert not unordered(kernel.asm["ttgir"]), kernel.name
    if text := kernel.asm.get("amdgcn"):
        numbers = {name: int(value) for name, value in re.findall(r"^ +\.(\w+): +(\d+)$", text, re.MULTILINE)}
        return Taken(numbers["vgpr_count"], kernel.metadata.shared, numbers["private_segment_fixed_size"])
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        text = subprocess.run([DUMP, "--dump-resource-usage", file.name], capture_output=True, text=True, check=True)
    found = re.search(r"REG:(\d+) STACK:(\d+)", text.stdout)
    assert found, text.stdout
    return Taken(int(found[1]), kernel.metadata.shared, int(found[2]))
