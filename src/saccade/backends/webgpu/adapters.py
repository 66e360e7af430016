"""Which adapter to open, with which limits and features, and which ones to refuse."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any, Protocol, TypeVar

import numpy as np
import wgpu
from numpy.typing import NDArray

from ...errors import Unsupported

# without these, a device gets all that its adapter has, and a kernel too large for other adapters would pass here
PORTABLE = {
    "max-bind-groups": 4,
    "max-compute-workgroup-size-z": 64,
    "max-compute-workgroups-per-dimension": 65535,
    "max-uniform-buffer-binding-size": 65536,
    "min-storage-buffer-offset-alignment": 256,
    "min-uniform-buffer-offset-alignment": 256,
}
# limits that some kernels may exceed, up to these values; each kernel states what it needs
RAISED = {
    "max-storage-buffers-per-shader-stage": 10,
    "max-compute-workgroup-storage-size": 1 << 30,
    "max-compute-invocations-per-workgroup": 1 << 30,
    "max-compute-workgroup-size-x": 1 << 30,
    "max-compute-workgroup-size-y": 1 << 30,
    "max-storage-buffer-binding-size": 1 << 62,
    "max-buffer-size": 1 << 62,
}
LEAST = {"max-storage-buffers-per-shader-stage": 8, "max-compute-invocations-per-workgroup": 256}
FEATURES = ("shader-f16", "subgroup", "timestamp-query")
KINDS = ("DiscreteGPU", "IntegratedGPU")
LOOP, LOOP_KERNEL = (
    70_000,
    """
@group(0) @binding(0) var<storage, read_write> turns: array<u32>;
@compute @workgroup_size(1)
fn main() {
  var done = 0u;
  for (var i = 0u; i < turns[0]; i++) { done += turns[1]; }
  turns[2] = done;
}
""",
)
# the distances for which the kernel reports which invocations exchange numbers
DISTANCES = (1, 2, 4, 8)
# Intel's compiler gives each kernel subgroups of 8, 16 or 32 invocations
VARYING = {0x8086: 8}
SHUFFLE_KERNEL = """
@group(0) @binding(0) var<storage, read_write> met: array<u32>;
@compute @workgroup_size(256)
fn main(@builtin(local_invocation_index) i: u32) {
  met[i] = subgroupShuffleXor(i, 1u);
  met[256u + i] = subgroupShuffleXor(i, 2u);
  met[512u + i] = subgroupShuffleXor(i, 4u);
  met[768u + i] = subgroupShuffleXor(i, 8u);
}
"""

_announced: set[str] = set()


class Opened(Protocol):
    """An adapter that was opened; `device.Gpu` implements it."""

    software: bool
    described: str

    def changed(self, text: str, label: str, words: NDArray[np.uint32]) -> NDArray[np.uint32]:
        """The words after one workgroup of this kernel has run with them as its only binding."""
        ...


Device = TypeVar("Device", bound=Opened)


def software(adapter: Any) -> bool:
    """Whether the adapter computes on the CPU."""
    return adapter.info["adapter_type"] == "CPU"


def describe(adapter: Any) -> str:
    """The adapter's name, driver and API in one line."""
    info = adapter.info
    return ", ".join(filter(None, (info["device"], info["description"], info["vendor"], info["backend_type"])))


def first_usable(wanted: str, opener: Callable[[Any], Device]) -> Device:
    """The first adapter that opens and computes, hardware before software; `wanted` is a part of its description."""
    adapters = sorted(wgpu.gpu.enumerate_adapters_sync(), key=_rank)
    reasons: list[str] = []
    for adapter in adapters:
        if wanted not in describe(adapter).lower():
            continue
        refusals = _refusals(adapter)
        if refusals:
            reasons += refusals
            continue
        try:
            gpu = opener(adapter)
        except (RuntimeError, wgpu.GPUError) as error:
            reasons.append(f"{describe(adapter)} does not open: {error}")
            continue
        if not loops_are_whole(gpu):
            reasons.append(
                f"{describe(adapter)} silently ends loops after 65535 iterations and would give wrong results: "
                "update its driver, Mesa to 25 or later"
            )
            continue
        if gpu.software and gpu.described not in _announced:
            _announced.add(gpu.described)
            warnings.warn(f"WebGPU runs on a software adapter, on the CPU: {describe(adapter)}", stacklevel=3)
        return gpu
    if not reasons:
        names = "; ".join(map(describe, adapters)) or "none"
        missing = f"no adapter has {wanted!r} in its name" if wanted else "no adapter was found"
        reasons = [f"{missing}, those here: {names}: install a Vulkan driver, or name another adapter"]
    raise Unsupported("webgpu", reasons)


def open_device(adapter: Any) -> Any:
    """A device with portable limits, those of RAISED as high as the adapter allows, and the features that it has."""
    limits = {
        name: max(value, adapter.limits[name]) if name.startswith("min") else min(value, adapter.limits[name])
        for name, value in (PORTABLE | RAISED).items()
    }
    features = [name for name in FEATURES if name in adapter.features]
    return adapter.request_device_sync(required_features=features, required_limits=limits)


def loops_are_whole(gpu: Opened) -> bool:
    """Whether a loop of LOOP iterations runs all of them. Mesa's llvmpipe before 25 stops at 65535."""
    return gpu.changed(LOOP_KERNEL, "loop", np.array([LOOP, 1, 0, 0], np.uint32))[2] == LOOP


def shuffled(gpu: Opened, vendor: int) -> int:
    """The number of consecutive invocations, a power of two, that can exchange numbers by local index; 1 for none.

    WGSL does not specify which invocations share a subgroup, nor how many, so this is tested on the device.
    """
    met = gpu.changed(SHUFFLE_KERNEL, "shuffle", np.zeros(256 * len(DISTANCES), np.uint32)).reshape(-1, 256)
    # kernels in llvmpipe's disk cache may have another subgroup size than those it compiles
    most = 4 if gpu.software else VARYING.get(vendor, 256)
    width = 1
    for distance, row in zip(DISTANCES, met, strict=True):
        if 2 * distance > most or (row != np.arange(256) ^ distance).any():
            break
        width = 2 * distance
    return width if width >= 4 else 1


def _rank(adapter: Any) -> int:
    """Sort key: discrete GPUs, then integrated ones, then unknown kinds, then software."""
    kind = adapter.info["adapter_type"]
    return KINDS.index(kind) if kind in KINDS else len(KINDS) + software(adapter)


def _refusals(adapter: Any) -> list[str]:
    name = describe(adapter)
    if adapter.info["backend_type"] in ("OpenGL", "OpenGLES"):
        return [f"{name} goes through OpenGL, which lacks what the kernels need: install a Vulkan driver"]
    return [
        f"{name} has {adapter.limits[limit]} for {limit}; at least {least} are needed: choose another adapter"
        for limit, least in LEAST.items()
        if adapter.limits[limit] < least
    ]
