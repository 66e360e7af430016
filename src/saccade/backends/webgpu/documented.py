"""The documented kernels, each run by its name.

Other hosts can use their bindings: LAYOUTS has the names in order, and SHAPES the shape of each. A call has one
sequence, or several packed ones. tiled.py computes other masks, batches and other dtypes.
"""

from __future__ import annotations

import math
import weakref
from typing import Any, NamedTuple

import numpy as np

from ...errors import Unsupported
from .arrays import GpuArray, array, empty
from .device import Gpu, open_gpu
from .step import Step
from .texts import kernel_source

# > output of the call; + added to, starts as zeros unless given; ~ input written in place; dims, params: uniforms
LAYOUTS = {
    "attention_forward": "Q K V >O >LSE dims params seg",
    "attention_decode": "Q_one K_cache V_cache >O_one dims params",
    "attention_backward_short": "Q K V dO LSE +dQ +P_scratch +dS_scratch dims params seg",
    "attention_backward_short_dKdV": "Q dO P_scratch dS_scratch +dK +dV dims",
    "attention_backward": "Q K V dO LSE +dQ +dK +dV dims params seg",
    "rope_q": "~Q dims params",
    "rope_k": "~K dims params",
    "rope_q_backward": "~dQ dims params",
    "rope_k_backward": "~dK dims params",
}
SHAPES = {
    "T Hq D": ("Q", "O", "dO", "dQ"),
    "T Hk D": ("K", "V", "dK", "dV"),
    "T Hq": ("LSE",),
    "T Hq T": ("P_scratch", "dS_scratch"),
    "T": ("seg",),
    "Hq D": ("Q_one", "O_one"),
    "cache Hk D": ("K_cache", "V_cache"),
}
# the fields of `KernelOptions` that each kernel reads
TAKES = {
    "attention_forward": ("scale", "subgroups"),
    "attention_decode": ("scale", "cache_len", "subgroups"),
    "attention_backward_short": ("scale", "subgroups"),
    "attention_backward_short_dKdV": ("n_kv_heads",),
    "attention_backward": ("scale", "subgroups"),
} | {name: ("pos_offset", "rope_base", "interleaved") for name in LAYOUTS if name.startswith("rope")}
LARGEST_HEAD, LONGEST, LONGEST_SHORT, LAST_POSITION = 256, 65535, 1024, 1 << 24

_shape_of = {name: shape.split() for shape, names in SHAPES.items() for name in names}
# device arrays whose elements have been checked: they never change
_seen: weakref.WeakSet[GpuArray] = weakref.WeakSet()


class KernelOptions(NamedTuple):
    """The options of a kernel.

    scale: of the scores, 1 / sqrt(D) if None. cache_len: how many keys of the cache are used, all if None. n_kv_heads:
    heads of dK and dV if neither is given. pos_offset: position of token 0. rope_base: of the rotary frequencies.
    interleaved: rotary pairs are (2 i, 2 i + 1) instead of (i, i + D / 2). subgroups: whether to reduce by subgroup
    operations; None does if the device has them.
    """

    scale: float | None = None
    cache_len: int | None = None
    n_kv_heads: int | None = None
    pos_offset: int = 0
    rope_base: float = 10000.0
    interleaved: bool = True
    subgroups: bool | None = None


class Dispatch(NamedTuple):
    """A dispatch, checked but not yet submitted: its step, arrays by name, names of the written ones, and device."""

    step: Step
    arrays: dict[str, GpuArray]
    written: tuple[str, ...]
    gpu: Gpu


def run(name: str, *, gpu: Gpu | None = None, **arguments: Any) -> Any:
    """Run one documented kernel.

    name: one of LAYOUTS. arguments: its arrays by the names of its bindings, float32, or uint32 for seg (by default one
    document), and the fields of `KernelOptions`. Arrays are NumPy arrays or GpuArrays. gpu: the device, by default that
    of the arrays.

    Returns the array that the kernel writes, or a tuple in the order of its bindings if there are several. They are
    GpuArrays if any argument is one, otherwise NumPy arrays. dQ, dK, dV and the scratch start as zeros unless given.
    GpuArrays given for these, or to a rotation, are written in place.

    Raises Unsupported for sizes or dtypes that these kernels or this device cannot compute, ValueError and TypeError
    for arguments that do not fit together.

    Examples:
        >>> from saccade.backends.webgpu import run
        >>> Q, K, V = np.random.default_rng(0).standard_normal((3, 128, 8, 64), np.float32)  # [T, H, D]
        >>> o, lse = run("attention_forward", Q=Q, K=K, V=V)
    """
    call = prepare(name, gpu=gpu, **arguments)
    steps = [call.step] if math.prod(call.step.grid) else []
    written = [call.arrays[key] for key in call.written]
    if any(isinstance(x, GpuArray) for x in arguments.values()):
        call.gpu.run(steps)
        results: list[Any] = list(written)
    else:
        results = list(call.gpu.call(steps, [(x.buffer, x.dtype, x.shape) for x in written])[0])
    return tuple(results) if len(results) > 1 else results[0]


def prepare(name: str, *, gpu: Gpu | None = None, **arguments: Any) -> Dispatch:
    """The dispatch that `run` would submit, to submit or time several at once; arguments and errors as in `run`."""
    if name not in LAYOUTS:
        raise ValueError(f"kernel is {name!r}; expected one of {', '.join(LAYOUTS)}")
    options = _options(name, {field: arguments.pop(field) for field in KernelOptions._fields if field in arguments})
    present = {key: x for key, x in arguments.items() if x is not None}
    _check_names(name, present)
    sizes = _sizes(name, present, options)
    uniforms = {"dims": _dims(name, sizes, options), "params": _params(name, sizes, options)}
    gpu = gpu or next((x.gpu for x in present.values() if isinstance(x, GpuArray)), None) or open_gpu()
    subgroups = "subgroup" in gpu.features if options.subgroups is None else options.subgroups
    kernel = gpu.kernel(kernel_source(name, subgroups), name)
    shapes = {key: tuple(sizes[letter] for letter in _shape_of[key]) for _, key in _bindings(name) if key in _shape_of}
    for key, shape in shapes.items():
        _check_binding(gpu, key, shape)
    if "seg" in present:
        _check_seg(present["seg"])
    dtypes = {key: np.uint32 if key == "seg" else np.float32 for key in shapes}
    arrays = {
        key: array(present[key], gpu) if key in present else empty(shape, dtypes[key], gpu)
        for key, shape in shapes.items()
    }
    written = tuple(key for mark, key in _bindings(name) if mark)
    _check_apart(name, arrays, written)
    bindings = [arrays[key].buffer if key in arrays else gpu.uniform(uniforms[key]) for _, key in _bindings(name)]
    return Dispatch(Step(kernel, bindings, _grid(name, sizes)), arrays, written, gpu)


def catalogue() -> dict[str, str]:
    """The texts, by name, of every kernel for a browser, with and without subgroup operations."""
    plain = {name: kernel_source(name, target="browser") for name in LAYOUTS}
    subgroups = {f"{name}, subgroups": kernel_source(name, True, "browser") for name in LAYOUTS}
    return plain | {name: text for name, text in subgroups.items() if text not in plain.values()}


def _options(name: str, fields: dict[str, Any]) -> KernelOptions:
    fields = {field: value for field, value in fields.items() if value is not None}
    unknown = [field for field in fields if field not in TAKES[name]]
    if unknown:
        raise TypeError(f"{name} got {', '.join(unknown)}; of the options it takes only {', '.join(TAKES[name])}")
    return KernelOptions(**fields)


def _bindings(name: str) -> list[tuple[str, str]]:
    """(mark, name) of each binding, in order."""
    keys = LAYOUTS[name].split()
    return [(key[0] if key[0] in ">+~" else "", key.lstrip(">+~")) for key in keys]


def _check_names(name: str, present: dict[str, Any]) -> None:
    takes = {key: mark for mark, key in _bindings(name) if key in _shape_of and mark != ">"}
    missing = [key for key, mark in takes.items() if mark != "+" and key not in present and key != "seg"]
    unknown = [key for key in present if key not in takes]
    if missing or unknown:
        wrong = [f"lacks {', '.join(missing)}"] * bool(missing) + [f"got {', '.join(unknown)}"] * bool(unknown)
        expected = f"{', '.join(takes)}, and of the options {', '.join(TAKES[name])}"
        raise TypeError(f"{name} {' and '.join(wrong)}; expected {expected}")
    for key, x in present.items():
        if not isinstance(x, np.ndarray | GpuArray):
            raise TypeError(f"{key} is {type(x).__name__}; expected a NumPy array or a GpuArray")
        if key == "seg" and x.dtype != np.uint32:
            raise TypeError(f"seg is {x.dtype}; expected uint32, the first token of each query's document")
        if key != "seg" and x.dtype != np.float32:
            raise Unsupported("webgpu", [f"{key} is {x.dtype}; the documented kernels take only float32: cast it"])


def _sizes(name: str, present: dict[str, Any], options: KernelOptions) -> dict[str, int]:
    """The length of every dimension that SHAPES names, which must be equal in all arrays."""
    sizes: dict[str, int] = {}
    first: dict[str, str] = {}
    for _, key in _bindings(name):
        if key not in present:
            continue
        shape = tuple(present[key].shape)
        letters = _shape_of[key]
        expected = [f"{letter} = {sizes[letter]}" if letter in sizes else letter for letter in letters]
        if len(shape) != len(letters) or any(
            sizes.get(letter, n) != n for letter, n in zip(letters, shape, strict=False)
        ):
            source = f" as {' and '.join(dict.fromkeys(first.values()))} have it" if sizes else ""
            raise ValueError(f"{key} has shape {list(shape)}; expected [{', '.join(expected)}]{source}")
        for letter, n in zip(letters, shape, strict=True):
            sizes.setdefault(letter, n)
            first.setdefault(letter, key)
    if "n_kv_heads" in TAKES[name]:
        if options.n_kv_heads is None and "Hk" not in sizes:
            raise TypeError(f"{name} got neither dK, dV nor n_kv_heads; expected one of them")
        heads = sizes.get("Hk", options.n_kv_heads)
        if options.n_kv_heads not in (None, heads):
            raise ValueError(f"n_kv_heads is {options.n_kv_heads}; expected {heads}, as dK or dV have it")
        sizes["Hk"] = _whole("n_kv_heads", heads, 1, sizes["Hq"])
    _check_sizes(name, sizes)
    return sizes


def _check_sizes(name: str, sizes: dict[str, int]) -> None:
    Hq, Hk, D = sizes.get("Hq", 0), sizes.get("Hk", 0), sizes["D"]
    if "Hq" in sizes and "Hk" in sizes and (not Hk or Hq % Hk):
        raise ValueError(f"there are {Hk} kv heads for {Hq} query heads; expected a number that divides {Hq}")
    if not D or (name.startswith("rope") and D % 2):
        raise ValueError(f"the head size is {D}; expected at least 1, and an even one to be rotated")
    length = sizes.get("T", sizes.get("cache", 0))
    reasons: list[str] = []
    if D > LARGEST_HEAD:
        reasons.append(f"the head size is {D}; the documented kernels take at most {LARGEST_HEAD}")
    if length > LONGEST:
        reasons.append(f"there are {length} tokens; the documented kernels take at most {LONGEST}")
    elif length > LONGEST_SHORT and "short" in name:
        reasons.append(f"there are {length} tokens; {name} takes at most {LONGEST_SHORT}: run attention_backward")
    if reasons:
        raise Unsupported("webgpu", reasons)


def _check_binding(gpu: Gpu, key: str, shape: tuple[int, ...]) -> None:
    largest = gpu.limits["max-storage-buffer-binding-size"]
    nbytes = 4 * math.prod(shape)
    if nbytes > largest:
        fits = shape[0] * largest // nbytes
        more = "" if key.endswith("scratch") else f": at most {fits} of its {shape[0]} rows fit"
        reason = f"{key} {list(shape)} has {nbytes} bytes; a binding of {gpu.name} holds {largest}{more}"
        raise Unsupported("webgpu", [reason])


def _check_seg(seg: Any) -> None:
    """Check that seg[i] <= i; a device array is read back once."""
    if isinstance(seg, GpuArray) and seg in _seen:
        return
    starts = seg.numpy() if isinstance(seg, GpuArray) else seg
    late = np.flatnonzero(starts > np.arange(len(starts)))
    if late.size:
        i = int(late[0])
        raise ValueError(f"seg[{i}] is {starts[i]}; expected at most {i}: a document starts no later than its tokens")
    if isinstance(seg, GpuArray):
        _seen.add(seg)


def _check_apart(name: str, arrays: dict[str, GpuArray], written: tuple[str, ...]) -> None:
    for key in written:
        for other, x in arrays.items():
            if other != key and x.buffer is arrays[key].buffer:
                raise ValueError(f"{name} got one array as {key} and {other}; expected a separate array to write to")


def _whole(name: str, value: Any, low: int, high: int) -> int:
    n = int(value) if isinstance(value, int | np.integer) and not isinstance(value, bool) else low - 1
    if not low <= n <= high:
        raise ValueError(f"{name} is {value!r}; expected an integer from {low} to {high}")
    return n


def _dims(name: str, sizes: dict[str, int], options: KernelOptions) -> bytes:
    D = sizes["D"]
    if name.startswith("rope"):
        heads = sizes.get("Hq", sizes.get("Hk", 0))
        offset = _whole("pos_offset", options.pos_offset, 0, LAST_POSITION - sizes["T"])
        return np.array([sizes["T"], heads, D, offset], np.uint32).tobytes()
    length = sizes.get("T", sizes.get("cache", 0))
    if options.cache_len is not None:
        length = _whole("cache_len", options.cache_len, 0, length)
    return np.array([length, sizes["Hq"], sizes["Hk"], D], np.uint32).tobytes()


def _params(name: str, sizes: dict[str, int], options: KernelOptions) -> bytes:
    if name.startswith("rope"):
        base = float(options.rope_base)
        if not 1e-30 < base < 1e30:
            raise ValueError(f"rope_base is {base}; expected a number between 1e-30 and 1e30")
        return np.array([base, not options.interleaved, 0, 0], np.float32).tobytes()
    scale = sizes["D"] ** -0.5 if options.scale is None else float(options.scale)
    if not math.isfinite(scale):
        raise ValueError(f"scale is {scale}; expected a finite number")
    return np.array([scale, 0, 0, 0], np.float32).tobytes()


def _grid(name: str, sizes: dict[str, int]) -> tuple[int, int, int]:
    if name.startswith("rope"):
        pairs = sizes["T"] * sizes.get("Hq", sizes.get("Hk", 0)) * sizes["D"] // 2
        groups = -(-pairs // 256)
        return min(groups, LONGEST), -(-groups // LONGEST), 1
    if name == "attention_decode":
        return sizes["Hq"], 1, 1
    return sizes["T"], sizes["Hk" if name.endswith("dKdV") else "Hq"], 1
