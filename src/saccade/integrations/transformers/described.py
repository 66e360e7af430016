"""The mask that travels through a model: a tensor by type and shape, with an expression of `saccade.mask` inside."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes  # pyright: ignore[reportPrivateUsage]

from ...errors import Unsupported
from ...frameworks.torch_state import modes_active
from ...mask import Mask

NAME = "saccade"
INSTEAD = 'use attn_implementation="sdpa" (or "eager") for this model'


class Place(NamedTuple):
    """Where the rows and keys of a mask stand: query t at position q_offset + t, key j at kv_offset + j.

    q_offset is an integer, or an integer tensor [1] while torch.compile traces a cache of fixed size.
    """

    B: int
    Tq: int
    Tk: int
    q_offset: Any
    kv_offset: int
    device: Any

    @property
    def offset(self) -> Any:
        """Of queries against keys: query t stands where key t + offset does."""
        offset = self.q_offset - self.kv_offset
        return offset.to(torch.int32).expand(self.B) if isinstance(offset, Tensor) else offset

    def positions(self, axis: str) -> Tensor:
        """[Tq] of the queries or [Tk] of the keys."""
        T, offset = (self.Tq, self.q_offset) if axis == "query" else (self.Tk, self.kv_offset)
        return torch.arange(T, device=self.device) + offset


class Described(Tensor):
    """A mask [B, 1, Tq, Tk] without elements, from `described`.

    transformers passes masks of four dimensions through a model if they are tensors. This one has the shape, and
    storage for one element, whatever its length. An operation on it raises Unsupported, because a model that computes
    with its mask would compute with that element. What leaves a mask as it is passes, and so do slices of its rows and
    columns, which are masks again.

    It overrides `__torch_function__` alone. torch.compile traces such a subclass and its attributes where one arises
    inside the graph, so that a model compiles whole.

    Attributes:
        mask: the expression.
        place: where its rows and columns stand.
        remake: the same mask at another place.
    """

    mask: Mask
    place: Place
    remake: Callable[[Place], Described]

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """`func` if it leaves the mask as it is; raises Unsupported otherwise."""
        if func in ASKED:
            return super().__torch_function__(func, types, args, kwargs or {})
        if func in UNCHANGED:
            return args[0]
        if func in MOVED:
            return _moved(func.__name__, *args, **(kwargs or {}))
        if func is Tensor.__getitem__ and isinstance(args[0], Described):
            return _part(*args)
        name = getattr(getattr(func, "__self__", None), "__name__", func.__name__)
        refuse(f"the model computes with its mask ({name}), which has no elements here: {INSTEAD}")

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # pyright: ignore[reportIncompatibleMethodOverride]
        return f"Described({self.mask}, {list(self.shape)})"


def described(mask: Mask, place: Place, remake: Callable[[Place], Described]) -> Described:
    """The mask [B, 1, Tq, Tk] of this place that says what `mask` does."""
    shape = place.B, 1, place.Tq, place.Tk
    # where torch.export runs the model on fake tensors, this one is a real one: a fake one takes no type
    real = not torch.compiler.is_dynamo_compiling() and modes_active() > 0
    with _disable_current_modes() if real else nullcontext():
        # of numbers, as eager masks are: models ask `torch.finfo` of the dtype before they compute
        tensor: Any = torch.empty_strided(shape, (0, 0, 0, 0), dtype=torch.float32, device=place.device)
        tensor = tensor.as_subclass(Described)
    tensor.mask, tensor.place, tensor.remake = mask, place, remake
    return tensor


def refuse(reason: str) -> NoReturn:
    """Raise Unsupported with this reason. torch.compile gives the reason for the graph break that it makes of it."""
    if torch.compiler.is_compiling():
        torch._dynamo.graph_break(msg=reason)  # pyright: ignore[reportPrivateUsage]
    raise Unsupported(NAME, [reason])


def _moved(name: str, mask: Described, *args: Any, **kwargs: Any) -> Described:
    device = kwargs.get("device", args[0] if args else name)
    for x in (*args, *kwargs.values()):
        if isinstance(x, (torch.dtype, Tensor)):
            refuse(f"the model casts its mask, which has no elements here: {INSTEAD}")
    there = mask.mask.map_arrays(lambda x: x.to(device) if isinstance(x, Tensor) else x)
    return described(there, mask.place._replace(device=device), lambda place: _moved("to", mask.remake(place), device))


def _part(mask: Described, index: Any) -> Described:
    at = mask.place
    indices = list(index) if isinstance(index, tuple) else [index]
    for at_dots, x in enumerate(indices):
        if x is Ellipsis:
            indices[at_dots : at_dots + 1] = [slice(None)] * (5 - len(indices))
            break
    indices += [slice(None)] * (4 - len(indices))
    for x in indices:
        if not isinstance(x, slice) or x.step not in (None, 1):
            refuse(f"the model takes mask[{_written(indices)}], and a mask has no elements here: {INSTEAD}")
    (first_q, Tq), (first_k, Tk) = _range(indices[2], at.Tq), _range(indices[3], at.Tk)
    if _range(indices[0], at.B) != (0, at.B) or _range(indices[1], 1) != (0, 1):
        refuse(f"the model takes mask[{_written(indices)}], some entries of the batch alone: {INSTEAD}")
    moved = at._replace(Tq=Tq, Tk=Tk, q_offset=at.q_offset + first_q, kv_offset=at.kv_offset + first_k)
    return mask.remake(moved)


def _written(index: list[Any]) -> str:
    return ", ".join("Tensor" if isinstance(x, Tensor) else ":" if x == slice(None) else str(x) for x in index)


def _range(part: slice, n: int) -> tuple[int, int]:
    # the first of n that a slice takes, and how many
    first, last = (
        default if x is None else max(x + n, 0) if x < 0 else min(x, n)
        for x, default in ((part.start, 0), (part.stop, n))
    )
    return first, max(last - first, 0)


# what tells of a tensor and touches no element; torch.compile asks for most of it when a mask is a graph's input
TOLD = [
    "shape",
    "ndim",
    "dtype",
    "device",
    "layout",
    "requires_grad",
    "is_leaf",
    "grad_fn",
    "grad",
    "itemsize",
    "_base",
    "_version",
    "is_cpu",
    "is_cuda",
    "is_meta",
    "is_mkldnn",
    "is_mps",
    "is_mtia",
    "is_nested",
    "is_quantized",
    "is_sparse",
    "is_sparse_csr",
    "is_xla",
    "is_xpu",
    "is_maia",
    "is_ipu",
    "is_vulkan",
]
METHODS = [
    "dim",
    "size",
    "stride",
    "storage_offset",
    "numel",
    "is_contiguous",
    "get_device",
    "is_floating_point",
    "is_complex",
    "is_inference",
    "is_conj",
    "is_neg",
    "__hash__",
    "_is_view",
    "untyped_storage",
]
_requires_grad: Any = Tensor.requires_grad
ASKED = {getattr(Tensor, name).__get__ for name in TOLD if hasattr(Tensor, name)} | {
    getattr(Tensor, name) for name in METHODS
}
ASKED.add(_requires_grad.__set__)
UNCHANGED = {Tensor.contiguous, Tensor.detach}
MOVED = {Tensor.to, Tensor.cuda, Tensor.cpu}
