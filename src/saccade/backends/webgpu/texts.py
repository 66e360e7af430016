"""Kernels as text: renders templates, and reads a kernel's requirements from its text, without a device.

wgpu does not check the size of workgroup memory, and its errors before the pipeline do not name the kernel. `check`
does both, by the rules of WGSL: https://www.w3.org/TR/WGSL/#memory-layouts.
"""

from __future__ import annotations

from collections.abc import Mapping, Set
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from ...errors import Unsupported
from ..plan_encoding import struct
from .wgsl import Module, parse

KERNELS = Path(__file__).parent / "kernels"
DOCUMENTED = (
    "attention_forward",
    "attention_decode",
    "attention_backward_short",
    "attention_backward_short_dKdV",
    "attention_backward",
    "rope_q",
    "rope_k",
    "rope_q_backward",
    "rope_k_backward",
)

# limits of the adapter, as WebGPU names them
BINDING = "max-storage-buffer-binding-size"
STORAGE = "max-storage-buffers-per-shader-stage"
MEMORY = "max-compute-workgroup-storage-size"
THREADS = "max-compute-invocations-per-workgroup"


@dataclass(frozen=True)
class Kernel:
    """A checked kernel.

    text: complete WGSL. entry: the name of its entry point. storage: the number of storage buffers that it binds.
    workgroup_bytes: the sizes of the workgroup variables that the entry uses, without the padding between them.
    bindings: the kind of each binding, from 0, as a bind group layout names it. threads: the workgroup's shape.
    """

    text: str
    entry: str
    storage: int
    workgroup_bytes: int
    label: str
    bindings: tuple[str, ...]
    threads: tuple[int, int, int]


@cache
def _environment() -> Any:
    import jinja2

    environment: Any = jinja2.Environment(
        loader=jinja2.FileSystemLoader([KERNELS / "tiled", KERNELS / "recurrent"]),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.globals["struct_dims"] = struct("wgsl")
    return environment


@cache
def _template(name: str) -> Any:
    return _environment().get_template(f"{name}.wgsl")


def render(template: str, **constants: Any) -> str:
    """The WGSL text of kernels/tiled/<template>.wgsl with its constants filled in; raises if one is missing."""
    return _template(template).render(**constants)


def check(
    text: str, entry: str, limits: Mapping[str, int], features: Set[str] | None = None, label: str = ""
) -> Kernel:
    """The kernel of this text, checked against a device's limits and, when given, its features.

    Raises Unsupported with everything that the device lacks, ValueError for a text that is not such a kernel.
    """
    module = _parsed(text)
    name = label or entry
    reached = module.reached(entry)
    kinds = module.bindings(reached)
    threads = module.workgroup_size(entry)
    sizes = [module.size(declared) for variable, declared in module.workgroup.items() if variable in reached]
    storage = sum(kind != "uniform" for kind in kinds)
    # padding counts only towards the device's limit
    padded = sum(-(-size // 16) * 16 for size in sizes)
    invocations = threads[0] * threads[1] * threads[2]
    wants = [(storage, STORAGE, "storage buffers"), (padded, MEMORY, "bytes of workgroup memory")]
    wants.append((invocations, THREADS, "invocations per workgroup"))
    reasons = [
        f"{name} needs {wanted} {what}; this adapter has {limits[limit]} ({limit})"
        for wanted, limit, what in wants
        if wanted > limits[limit]
    ]
    if features is not None:
        missing = sorted(module.features(reached) - features)
        reasons += [f"{name} needs the feature {feature}, which this adapter lacks" for feature in missing]
    if reasons:
        raise Unsupported("webgpu", reasons)
    return Kernel(text, entry, storage, sum(sizes), name, kinds, threads)


@cache
def _parsed(text: str) -> Module:
    return parse(text)


def kernel_source(name: str, subgroups: bool = False, target: str = "wgpu") -> str:
    """The complete WGSL text of a documented kernel, its shared helpers first; the entry point has its name.

    subgroups: reduce by subgroup operations, for any subgroup size; the device needs that feature. Kernels without a
    reduction do not change. target: "wgpu", or "browser", where the text must enable the feature. Raises ValueError for
    an unknown name or target.

    Examples:
        >>> from saccade.backends.webgpu import kernel_source
        >>> text = kernel_source("attention_forward", target="browser")
        >>> "fn attention_forward(" in text
        True
    """
    if name not in DOCUMENTED:
        raise ValueError(f"kernel is {name!r}; expected one of {', '.join(DOCUMENTED)}")
    if target not in ("wgpu", "browser"):
        raise ValueError(f"target is {target!r}; expected 'wgpu' or 'browser'")
    kernel = _file(name)
    subgroups = subgroups and "wg_reduce" in kernel
    shared = _file("rotary") if name.startswith("rope") else prelude(subgroups)
    return ("enable subgroups;\n\n" if subgroups and target == "browser" else "") + shared + "\n" + kernel


def prelude(subgroups: bool = False) -> str:
    """The text that precedes each documented kernel of attention."""
    text = _file("prelude")
    return text[: text.index("// reductions:")] + _file("prelude_subgroups") if subgroups else text


@cache
def _file(name: str) -> str:
    return (KERNELS / "documented" / f"{name}.wgsl").read_text(encoding="utf-8")
