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
    """The positions of the rows and keys of a mask: query t is at q_offset + t, key j at kv_offset + j.

    q_offset is an integer, or an integer tensor [1] while torch.compile traces a cache of fixed size.
    """

    B: int
    Tq: int
    Tk: int
    q_offset: Any
    kv_offset: int
    device: Any

    # no property, which Dynamo of torch 2.10 does not trace in a NamedTuple
    def offset(self) -> Any:
        """The offset of queries from keys: query t is at the position of key t + offset."""
        offset = self.q_offset - self.kv_offset
        return offset.to(torch.int32).expand(self.B) if isinstance(offset, Tensor) else offset

    def positions(self, axis: str) -> Tensor:
        """[Tq] of the queries or [Tk] of the keys."""
        T, offset = (self.Tq, self.q_offset) if axis == "query" else (self.Tk, self.kv_offset)
        return torch.arange(T, device=self.device) + offset


class Described(Tensor):
    """A mask [B, 1, Tq, Tk] without elements, from `described`.

    transformers passes masks of four dimensions through a model if they are tensors. This tensor has the shape, and
    storage for only one element. An operation on it raises Unsupported, because a model that computes with its mask
    would compute with that element. Operations that do not change a mask are allowed, and so are slices of rows and
    columns, which are masks again.

    It overrides only `__torch_function__`. torch.compile traces such a subclass and its attributes if it is created
    inside the graph, so that a model compiles without graph breaks.

    Attributes:
        mask: the expression.
        place: the positions of its rows and columns.
        remake: a function from another place to the same mask there.
        packed: whether the mask keeps packed sequences apart.
    """

    mask: Mask
    place: Place
    remake: Callable[[Place], Described]
    packed: bool

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
        refuse(f"the model computes with its mask ({name}), but Saccade's mask is not an array: {INSTEAD}")

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # pyright: ignore[reportIncompatibleMethodOverride]
        return f"Described({self.mask}, {list(self.shape)})"


def described(mask: Mask, place: Place, remake: Callable[[Place], Described], packed: bool) -> Described:
    """The tensor [B, 1, Tq, Tk] at this place that contains the expression `mask`."""
    shape = place.B, 1, place.Tq, place.Tk
    # under torch.export, which runs the model on fake tensors, this must be a real one: a fake one cannot have a type
    real = not torch.compiler.is_dynamo_compiling() and modes_active() > 0
    with _disable_current_modes() if real else nullcontext():
        # a floating dtype, as in eager masks, because models call `torch.finfo` of it
        tensor: Any = torch.empty_strided(shape, (0, 0, 0, 0), dtype=torch.float32, device=place.device)
        tensor = tensor.as_subclass(Described)
    tensor.mask, tensor.place, tensor.remake, tensor.packed = mask, place, remake, packed
    return tensor


def refuse(reason: str) -> NoReturn:
    """Raise Unsupported with this reason; under torch.compile it is the reason of a graph break."""
    if torch.compiler.is_compiling():
        torch._dynamo.graph_break(msg=reason)  # pyright: ignore[reportPrivateUsage]
    raise Unsupported(NAME, [reason])


def _moved(name: str, mask: Described, *args: Any, **kwargs: Any) -> Described:
    device = kwargs.get("device", args[0] if args else name)
    for x in (*args, *kwargs.values()):
        if isinstance(x, (torch.dtype, Tensor)):
            refuse(f"the model casts its mask, but Saccade's mask is not an array: {INSTEAD}")
    there = mask.mask.map_arrays(lambda x: x.to(device) if isinstance(x, Tensor) else x)
    place, remake = mask.place._replace(device=device), lambda place: _moved("to", mask.remake(place), device)
    return described(there, place, remake, mask.packed)


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
            refuse(f"the model takes mask[{_written(indices)}], but Saccade's mask is not an array: {INSTEAD}")
    (first_q, Tq), (first_k, Tk) = _range(indices[2], at.Tq), _range(indices[3], at.Tk)
    if _range(indices[0], at.B) != (0, at.B) or _range(indices[1], 1) != (0, 1):
        refuse(f"the model takes mask[{_written(indices)}], only some entries of the batch: {INSTEAD}")
    moved = at._replace(Tq=Tq, Tk=Tk, q_offset=at.q_offset + first_q, kv_offset=at.kv_offset + first_k)
    return mask.remake(moved)


def _written(index: list[Any]) -> str:
    return ", ".join("Tensor" if isinstance(x, Tensor) else ":" if x == slice(None) else str(x) for x in index)


def _range(part: slice, n: int) -> tuple[int, int]:
    # (first, count) of the elements of n that a slice takes
    first, last = (
        default if x is None else max(x + n, 0) if x < 0 else min(x, n)
        for x, default in ((part.start, 0), (part.stop, n))
    )
    return first, max(last - first, 0)


# attributes of a tensor that read no element; torch.compile reads most of them when a mask is an input of a graph
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
