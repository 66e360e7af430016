"""Metal kernels on Linux: the source is compiled as C++ and its threads run as fibers, with barriers and matrices.

The emulator finds wrong indices, masks, barriers, bounds and numbers. It does not reveal speed, errors of Apple's
compiler, weak memory order, or how a GPU rounds exp2 and log.
"""

from __future__ import annotations

import ctypes
import subprocess
import tempfile
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ...backends.metal.texts import Signature, signature
from .build import INCLUDE, SANITIZERS, Counts, compiled, library

Array = NDArray[Any]
# orders in which lanes and SIMD-groups run; a correct kernel gives the same results in all
SCHEDULES = ("forward", "reverse", "random", "interleaved")
MEMORY = 32768
# a library runs one launch at a time, while Python may run other threads
_one = threading.Lock()
# numbers around every output that a kernel must not change
MARGIN = 64


class Launch(NamedTuple):
    """A dispatch: threads of the grid and of a threadgroup, and the shape and dtype of each output by name.

    Dtypes of outputs are NumPy's; bfloat16 is represented by its bits, uint16.
    """

    grid: tuple[int, int, int]
    threadgroup: tuple[int, int, int]
    outputs: Mapping[str, tuple[tuple[int, ...], Any]]


class Emulated(dict[str, Array]):
    """The outputs by name. counts: threadgroup bytes, barriers, SIMD-group operations, 8 x 8 products."""

    counts: dict[str, int]


def emulate(
    kernel: str,
    arrays: Mapping[str, Array],
    plan: Launch,
    *,
    schedule: str = "forward",
    seed: int = 0,
    memory: int = MEMORY,
    sanitizer: str = "",
) -> Emulated:
    """Run a Metal kernel and return its outputs.

    Outputs and threadgroup memory start as NaN.

    Args:
        kernel: a complete Metal source with one `kernel void`.
        arrays: inputs by the names of its parameters, NumPy arrays of any shape in C order; bfloat16 as uint16.
        plan: the dispatch: threads of the grid and of a threadgroup, and shapes and dtypes of outputs.
        schedule: the order in which lanes and SIMD-groups run, one of SCHEDULES.
        seed: of random schedules, and of the places of matrix elements in lanes; 0 for row order.
        memory: available threadgroup memory in bytes.
        sanitizer: "" runs in this process. "address", "thread" and "process" run in a separate one, the first two with
            that sanitizer; "process" only survives crashes.

    Returns:
        The outputs by name, with `counts` of the launch.

    Raises:
        RuntimeError: errors of the kernel: a barrier that not all threads reach, too much threadgroup memory, a write
            outside an array.
        ValueError: an argument is wrong.

    Examples:
        >>> from saccade.testing.metal import Launch, emulate
        >>> kernel = '''#include <metal_stdlib>
        ... using namespace metal;
        ... kernel void twice(device const float* x [[buffer(0)]], device float* y [[buffer(1)]],
        ...                   uint3 i [[thread_position_in_grid]]) { y[i.x] = 2 * x[i.x]; }'''
        >>> plan = Launch((32, 1, 1), (32, 1, 1), {"y": ((32,), np.float32)})
        >>> emulate(kernel, {"x": np.arange(32, dtype=np.float32)}, plan)["y"][:4]
        array([0., 2., 4., 6.], dtype=float32)
    """
    declared = signature(kernel)
    if schedule not in SCHEDULES:
        raise ValueError(f"schedule is {schedule!r}; expected one of {', '.join(SCHEDULES)}")
    if sanitizer not in SANITIZERS:
        raise ValueError(f"sanitizer is {sanitizer!r}; expected '', 'address', 'thread' or 'process'")
    _check(declared, arrays, plan)
    outputs = Emulated()
    buffers: list[Array] = []
    whole: dict[str, Array] = {}
    # a separate process checks the bounds of arrays itself
    margin = 0 if sanitizer else MARGIN
    for p in filter(lambda p: p.buffer, declared.parameters):
        if p.written:
            shape, dtype = plan.outputs[p.name]
            n = int(np.prod(shape))
            whole[p.name] = _poisoned(n + 2 * margin, dtype)
            buffers.append(whole[p.name][margin : margin + n])
            outputs[p.name] = buffers[-1].reshape(shape)
        else:
            buffers.append(np.ascontiguousarray(arrays[p.name]))
    run = _apart if sanitizer else _inside
    numbers = [SCHEDULES.index(schedule), seed, memory]
    outputs.counts = run(compiled(kernel, sanitizer), buffers, [*plan.grid, *plan.threadgroup], numbers)
    for name, x in whole.items():
        ends = np.concatenate([x[:margin], x[x.size - margin :]])
        if not (ends.view(np.uint8) == 0xFF).all():
            raise RuntimeError(f"{declared.name} wrote outside its output {name} {list(outputs[name].shape)}")
    return outputs


def _check(declared: Signature, arrays: Mapping[str, Array], plan: Launch) -> None:
    read, written = set(arrays), set(plan.outputs)
    wanted = {p.name for p in declared.parameters if p.buffer and not p.written}
    outputs = {p.name for p in declared.parameters if p.written}
    if read != wanted or written != outputs:
        raise ValueError(
            f"{declared.name} reads {sorted(wanted)} and writes {sorted(outputs)}; "
            f"arrays are {sorted(read)} and outputs {sorted(written)}"
        )


def _poisoned(count: int, dtype: Any) -> Array:
    raw = np.full(count * np.dtype(dtype).itemsize, 0xFF, np.uint8)
    return raw.view(dtype)


def _inside(path: Path, buffers: list[Array], shape: list[int], numbers: list[int]) -> dict[str, int]:
    pointers = (ctypes.c_void_p * len(buffers))(*(b.ctypes.data for b in buffers))
    error, counts = ctypes.create_string_buffer(320), Counts()
    order, seed, memory = numbers
    with _one:
        launch = pointers, (ctypes.c_uint * 6)(*shape), order, ctypes.c_ulong(seed), ctypes.c_ulong(memory)
        bad = library(path).emulate(*launch, error, ctypes.c_ulong(320), ctypes.byref(counts))
    if bad:
        raise RuntimeError(error.value.decode())
    return _counted(counts)


def _apart(path: Path, buffers: list[Array], shape: list[int], numbers: list[int]) -> dict[str, int]:
    with tempfile.TemporaryDirectory() as folder:
        request, reply = Path(folder) / "in", Path(folder) / "out"
        head = np.array([len(buffers), *shape, *numbers, *(b.nbytes for b in buffers)], np.int64)
        request.write_bytes(head.tobytes() + b"".join(b.tobytes() for b in buffers))
        options = "exitcode=66:detect_leaks=0"
        # a sanitizer needs addresses without randomisation
        words = ["setarch", "-R", str(path), str(request), str(reply)]
        threads = f"exitcode=66 history_size=7 suppressions={INCLUDE / 'thread.supp'}"
        environment = {"TSAN_OPTIONS": threads, "ASAN_OPTIONS": options, "PATH": "/usr/bin:/bin"}
        run = subprocess.run(words, capture_output=True, text=True, env=environment, check=False)
        if run.returncode:
            raise RuntimeError(f"exit {run.returncode}: {run.stderr[:6000]}")
        raw = reply.read_bytes()
    at = ctypes.sizeof(Counts)
    for b in buffers:
        b.reshape(-1).view(np.uint8)[:] = np.frombuffer(raw, np.uint8, b.nbytes, at)
        at += b.nbytes
    return _counted(Counts.from_buffer_copy(raw))


def _counted(counts: Counts) -> dict[str, int]:
    return {str(field[0]): int(getattr(counts, field[0])) for field in Counts._fields_}
