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
MOVED = ("tt.addptr", "tt.splat", "tt.broadcast", "tt.expand_dims", "tt.reshape", "tt.trans", "ttg.convert_layout")
NAME = r"%[\w]+"


class Trace:
    """A walk through a kernel's ttgir. arrays: the argument that a pointer points into. reads: of an argument, line
    and pointer. after: the lines of reads that a value depends on."""

    def __init__(self) -> None:
        self.arrays: dict[str, str] = {}
        self.reads: dict[str, list[tuple[int, str]]] = {}
        self.after: dict[str, set[int]] = {}
        # the results of the loops and branches around a line
        self.regions: list[str] = []
        self.barrier = -1

    def read(self, line: int, text: str) -> None:
        """Take notes of a line."""
        result, equals, operation = text.partition(" = ")
        result = result.strip().partition(":")[0] if equals else ""
        names = re.findall(NAME, operation if result else text)
        depends = set().union(*(self.after.get(name, ()) for name in names))
        pointers = [name for name in names if name in self.arrays]
        for inner, outer in re.findall(rf"({NAME}) = ({NAME})", text.partition("iter_args(")[2]):
            self.after[inner] = self.after.get(outer, set())
            if outer in self.arrays:
                self.arrays[inner] = self.arrays[outer]
        if pointers and operation.startswith(MOVED):
            self.arrays[result] = self.arrays[pointers[0]]
        elif pointers and operation.startswith(("tt.load", "ttg.async_copy_global_to_local")):
            self.reads.setdefault(self.arrays[pointers[0]], []).append((line, pointers[0]))
            depends = depends | {line}
        if text.strip().startswith("scf.yield") and self.regions:
            self.after.setdefault(self.regions[-1], set()).update(depends)
        elif result:
            self.after[result] = depends
        opened = text.partition(" loc(")[0].rstrip()
        if "barrier" in opened:
            self.barrier = line
        if opened.lstrip().startswith("}") and not opened.lstrip().startswith(("} else", "})")) and self.regions:
            self.regions.pop()
        elif opened.endswith("{") and not opened.lstrip().startswith("} else"):
            self.regions.append(result)

    def unordered(self, pointer: str, value: str) -> bool:
        """Whether a write of value may come before a read of the same array, because nothing orders them.

        Threads read by the same pointer what they write themselves. The compiler reads a small array once for each
        layout that it needs, by other pointers. A value that depends on such a read is written after it.
        """
        reads = self.reads.get(self.arrays.get(pointer, ""), [])
        done = self.after.get(value, set())
        return any(line > self.barrier and other != pointer and line not in done for line, other in reads)


def unordered(ttgir: str) -> list[str]:
    """Arguments that one warp may write before another has read them, of a compiled kernel."""
    trace, found = Trace(), list[str]()
    trace.arrays = {name: name for name in re.findall(rf"({NAME}): !tt\.ptr", ttgir)}
    for line, text in enumerate(ttgir.splitlines()):
        if (written := re.search(rf"tt\.store ({NAME}), ({NAME})", text)) and trace.unordered(*written.groups()):
            found.append(trace.arrays[written[1]])
        trace.read(line, text)
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
