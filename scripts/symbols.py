"""Fails if an object compiled for one instruction set defines a function that code for another may be linked to.

The linker may merge a weak symbol outside the namespace of its instruction set, such as an inline function of the
standard library, with the same symbol of another object. It would then run on a machine that lacks the instructions.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

OBJECTS = Path(__file__).resolve().parent.parent / "build" / "editable" / "CMakeFiles"


def strays(isa: str, folder: Path) -> list[str]:
    lines: list[str] = []
    for path in folder.rglob("*.o"):
        listing = subprocess.run(
            ["nm", "-C", "--defined-only", path], capture_output=True, text=True, check=True
        ).stdout
        for line in listing.splitlines():
            _, kind, name = (line.split(" ", 2) + ["", ""])[:3]
            # an address that exceptions need, and no code
            if name.startswith("DW.ref."):
                continue
            if kind in "WVu" and not re.search(rf"\bsaccade::{isa}::", name):
                lines.append(f"{path.name} for {isa}: {name}")
    return lines


def main() -> int:
    folders = {path.name[len("kernels_") : -len(".dir")]: path for path in OBJECTS.glob("kernels_*.dir")}
    wide = {isa: folder for isa, folder in folders.items() if isa not in {"base", "neon"}}
    names = [stray for isa, folder in wide.items() for stray in strays(isa, folder)]
    print("\n".join(names) or f"symbols: nothing strays from {', '.join(sorted(wide)) or 'no instruction set'}")
    return int(bool(names))


if __name__ == "__main__":
    sys.exit(main())
