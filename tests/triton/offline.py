"""Compiling the kernels of a call without a GPU, down to machine code, and reading what they take of a chip.

`python tests/triton/offline.py > tests/triton/resources.csv` writes the table that the tests hold them to.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

import torch
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, make_backend
from triton.runtime.jit import create_function_from_signature

import triton
from saccade.backends import Extras
from saccade.backends.triton import launch, limits
from saccade.mask import causal
from saccade.plan import make_plan
from saccade.problem import Problem

TARGETS = {"sm_80": GPUTarget("cuda", 80, 32), "sm_90": GPUTarget("cuda", 90, 32)}
DUMP = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"


class Taken(NamedTuple):
    """Registers a thread, bytes of shared memory, bytes a thread spills."""

    registers: int
    shared: int
    spilled: int


class Recorder(launch.Call):
    """A call whose launches are compiled for a chip instead."""

    def __init__(self, chip: str, *args: Any) -> None:
        super().__init__(*args)
        self.chip = chip
        self.found: dict[str, Taken] = {}

    def start(self, kernel: Any, grid: int, *args: Any, tile: Any, **constants: Any) -> None:
        options = {"num_warps": tile.num_warps, "num_stages": tile.num_stages}
        self.found[kernel.__name__] = taken(compiled(kernel, args, constants, options, TARGETS[self.chip]))


def compiled(kernel: Any, args: Any, constants: dict[str, Any], options: dict[str, Any], target: GPUTarget) -> Any:
    """A kernel compiled as a launch with these arguments would compile it."""
    backend = make_backend(target)
    bind = create_function_from_signature(kernel.signature, kernel.params, backend)
    bound, kinds, given = bind(*args, **constants, **options)
    parsed, signature, values, attributes = kernel._pack_args(backend, given, bound, kinds, given)
    return triton.compile(ASTSource(kernel, signature, values, attributes), target=target, options=parsed.__dict__)


def taken(kernel: Any) -> Taken:
    """What a compiled kernel takes, from its machine code."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        text = subprocess.run([DUMP, "--dump-resource-usage", file.name], capture_output=True, text=True, check=True)
    found = re.search(r"REG:(\d+) STACK:(\d+)", text.stdout)
    assert found, text.stdout
    return Taken(int(found[1]), kernel.metadata.shared, int(found[2]))


def of_problem(chip: str, dtype: str, D: int) -> dict[str, Taken]:
    """What every kernel takes for causal attention with head size D, by the kernel's name."""
    kind = getattr(torch, dtype)
    found: dict[str, Taken] = {}
    for Tq, bias in ((300, False), (300, True), (2, False)):
        p = Problem(
            1, Tq, 300, 4, 2, D, D, dtype=dtype, mask=causal(), scale=0.1, bias=(1, 4, Tq, 300) if bias else None
        )
        plan = make_plan(p, limits(p))
        q, o, do, dq = (torch.empty(1, Tq, 4, D, dtype=kind) for _ in range(4))
        k, v, dk, dv = (torch.empty(1, 300, 2, D, dtype=kind) for _ in range(4))
        lse, dbias = torch.empty(1, Tq, 4), torch.empty(1, 4, Tq, 300)
        call = Recorder(chip, p, plan, q, k, v, Extras(bias=dbias if bias else None))
        if Tq == 2:
            launch.decode(call, o, lse)
        elif bias:
            launch._dbias(call, 0, (*call.qkv, launch.array(do)), dbias, (lse, lse, call.scores))
        else:
            launch.forward(call, o, lse)
            launch.delta(call, do, o, None)
            launch.backward(call, do, lse, lse, dq, dk, dv, None, False)
        found |= call.found
    return found


if __name__ == "__main__":
    print("chip,dtype,D,kernel," + ",".join(Taken._fields))
    for chip in TARGETS:
        for dtype in ("bfloat16", "float32"):
            for D in (64, 128, 256):
                for name, values in of_problem(chip, dtype, D).items():
                    print(chip, dtype, D, name, *values, sep=",", flush=True)
